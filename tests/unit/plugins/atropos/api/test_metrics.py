from __future__ import annotations

import re

import pytest

from lachesis.plugins.atropos.api.metrics import History, exposition
from tests.unit.plugins.atropos.api.test_state import NOW, add_env, group, new_state, post

LINE = re.compile(r'^lachesis_api_\w+(\{\w+="(\\.|[^"\\])*"(,\w+="(\\.|[^"\\])*")*\})? -?[0-9.e+-]+$')


def test_every_line_is_well_formed_and_every_family_is_named_once():
    state = new_state(max_queued_tokens=1000)
    env_id = add_env(state, desired_name='odd "name"\\\n')
    post(state, group(4, env_id=env_id), group(4))
    state.next_batch(NOW)
    lines = exposition(state, refused=3).splitlines()
    values = [line for line in lines if not line.startswith("#")]
    assert all(LINE.match(line) for line in values), [line for line in values if not LINE.match(line)]
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert "lachesis_api_delivered_batches_total 1" in values
    assert "lachesis_api_queue_tokens_limit 1000" in values
    assert 'lachesis_api_refused_requests_total{reason="malformed"} 3' in values


def test_rates_over_the_last_minute_and_curves_over_ten():
    state, history = new_state(batch_size=4), History()
    assert history.rates(state, NOW) == {"groups_per_s": 0.0, "tokens_per_s": 0.0, "batches_per_min": 0.0}
    for tick in range(200):
        post(state, group(4, tokens=50), group(4, tokens=50))
        if tick % 2:
            state.next_batch(NOW)
        history.sample(state, 5.0 * tick)
    rates = history.rates(state, 5.0 * 199)
    assert rates["groups_per_s"] == pytest.approx(0.4) and rates["tokens_per_s"] == pytest.approx(20)
    assert rates["batches_per_min"] == pytest.approx(6.0)
    curves = history.curves(1000.0)
    assert len(curves["age"]) == 120 and curves["age"][0] == 600.0 and curves["age"][-1] == 5.0
    assert set(curves["groups_per_s"]) == {0.4} and curves["queued"][-1] == 4 * 300


def test_a_reset_begins_anew():
    state, history = new_state(), History()
    post(state, group(4))
    for tick in range(3):
        history.sample(state, float(tick))
    state.reset()
    assert history.rates(state, 3.0)["groups_per_s"] == 0.0
    history.sample(state, 3.0)
    assert history.curves(4.0)["age"] == []
