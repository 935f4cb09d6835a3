"""What /generate is asked, and the versions of what it answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from lachesis.common.routed_experts import RoutedExperts
from lachesis.engines.http.dispatch import read_cached_tokens, read_completions
from lachesis.engines.serving.bodies import Refused
from lachesis.engines.serving.generation import (
    GenerateBody,
    GenerateCompletion,
    GenerateResult,
    VersionClock,
    parse_sampled,
    read_arrays,
    result_arrays,
    result_document,
)
from tests.unit.engines.serving.fakes import FIELDS


def generate(**document):
    return parse_sampled(GenerateBody, {"prompt": "a"} | document, sampling_fields=FIELDS)


def test_a_generate_request_has_what_the_caller_gave_and_nothing_else():
    request = generate(temperature=0.5, stop="x", stop_token_ids=[3], max_tokens=None, n=3, logit_bias={"1": 2.0})
    assert request.sampling == {"temperature": 0.5, "stop": ["x"], "stop_token_ids": [3], "logit_bias": {"1": 2.0}}
    assert (request.n, request.logprobs, request.prompt) == (3, None, "a")
    assert generate(max_completion_tokens=5).sampling == {"max_tokens": 5}
    assert generate(max_new_tokens=5, max_tokens=6).sampling == {"max_tokens": 6}
    assert generate(timeout=3, user="u", tools=None).sampling == {}
    assert generate().request_id != generate().request_id


@pytest.mark.parametrize(
    "document",
    [
        {"n": 0}, {"n": 5000}, {"temperature": -0.1}, {"top_p": 0}, {"top_k": -2}, {"max_tokens": 0},
        {"min_tokens": -1}, {"seed": 1 << 63}, {"stop": [""]}, {"stop_token_ids": [-1]}, {"ignore_eos": 1},
        {"logprobs": -1}, {"prompt": None}, {"prompt": []}, {"prompt": 3},
        {"prompt": {"prompt_token_ids": []}}, {"prompt": {}},
        {"prompt": {"prompt_token_ids": [1], "prompt": "a"}}, {"prompt_token_ids": [1]}, {"temperature": 1e999},
    ],
)  # fmt: skip
def test_requests_that_mean_nothing_are_refused(document):
    with pytest.raises(Refused) as caught:
        generate(**document)
    assert caught.value.status == 400


def test_versions_are_those_in_force_at_a_moment(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = VersionClock()
    assert clock.current == clock.at(0) == 0
    for moment, version in ((20.0, 4), (30.0, 2)):
        now[0] = moment
        clock.record(version)
    assert [clock.at(moment) for moment in (19.9, 20.0, 29.9, 30.0)] == [0, 4, 4, 2]
    assert clock.span(15, 25) == (0, 4) and clock.current == 2


def routed_result(*lengths: int) -> GenerateResult:
    """Completions of so many tokens after a prompt of two; an empty one has no experts."""
    draw = np.random.default_rng(0)
    return GenerateResult(
        prompt=None,
        prompt_token_ids=(1, 2),
        completions=tuple(
            GenerateCompletion(
                token_ids=(7,) * length,
                logprobs=(-1.0,) * length,
                finish_reason="stop" if length else "abort",
                text="",
                first_token_time=0.0,
                last_token_time=0.0,
                routed=RoutedExperts.of(draw.integers(0, 300, (length + 1, 2, 3))) if length else None,
            )
            for length in lengths
        ),
    )


@pytest.mark.parametrize("form", ["arrays", "json"])
def test_routed_experts_travel_in_both_forms_of_an_answer(form: str):
    result, clock = routed_result(3, 0, 5), VersionClock()
    if form == "arrays":
        reply = read_arrays(result_arrays(result, clock=clock, session_id="s"))
    else:
        request = generate(routed_experts=True)
        reply = json.loads(json.dumps(result_document(result, request=request, clock=clock)))
    found = read_completions(reply, n=3, routed=True)
    for one, given in zip(found, result.completions, strict=True):
        assert (one.routed is None) == (given.routed is None)
        if one.routed is not None and given.routed is not None:
            assert one.routed.chosen.dtype == np.int16
            assert np.array_equal(one.routed.chosen, given.routed.chosen)
    assert all(one.routed is None for one in read_completions(reply, n=3)), "nobody asked"


def both_forms(result: GenerateResult) -> tuple[dict[str, Any], dict[str, Any]]:
    clock = VersionClock()
    document = result_document(result, request=generate(), clock=clock)
    return json.loads(json.dumps(document)), read_arrays(result_arrays(result, clock=clock, session_id="s"))


def test_cached_tokens_travel_in_both_forms_and_are_left_out_where_nobody_knows_them():
    result = routed_result(3, 0, 5)
    for reply in both_forms(result):
        assert "cached_tokens" not in reply
        assert read_cached_tokens(reply, n=3) == [None, None, None]
    known = [replace(one, cached_tokens=cached) for one, cached in zip(result.completions, (0, None, 2), strict=True)]
    for reply in both_forms(replace(result, completions=tuple(known))):
        assert read_cached_tokens(reply, n=3) == [0, None, 2]


@pytest.mark.parametrize("lengths", [(3, 1), (3, 1, 2), (5, -1), (2, 2)])
def test_arrays_are_divided_by_lengths_that_say_where_all_of_them_end(lengths: tuple[int, ...]):
    arrays = {
        "lengths": np.array(lengths, dtype=np.int64),
        "token_ids": np.arange(4, dtype=np.int32),
        "token_logprobs": -np.arange(4, dtype=np.float32),
        "weight_version": np.zeros((len(lengths), 2), dtype=np.int64),
    }
    answer = save(arrays, metadata={"session_id": "s", "finish_reasons": "[]"})
    if sum(lengths) == 4 and min(lengths) >= 0:
        parts = [list(range(lengths[0])), list(range(lengths[0], 4))]
        assert read_arrays(answer)["token_ids"] == parts
        assert read_arrays(answer)["token_logprobs"] == [[-float(value) for value in part] for part in parts]
    else:
        with pytest.raises(ValueError, match="4 values for parts with"):
            read_arrays(answer)


def test_a_server_that_does_not_say_them_has_not_answered():
    with pytest.raises(KeyError, match="routed_experts"):
        read_completions(
            read_arrays(result_arrays(routed_result(0), clock=VersionClock(), session_id="s")), n=1, routed=True
        )
