from __future__ import annotations

import re

from lachesis.api.exposition import exposition
from tests.unit.api.test_state import NOW, add_env, group, new_state, post

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
