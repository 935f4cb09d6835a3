"""Requests are told of when they are complete, and generation goes on as if nobody listened."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from lachesis.common.errors import RewardError
from lachesis.common.types import Completion, GenerationRequest, SamplingParams
from lachesis.engines.embedded.engine import EmbeddedEngine, Step
from tests.tiny import tiny_model
from tests.unit.engines.embedded.test_engine import PROMPTS, make, soon

# Sequences end at different tokens.
ENDS = range(2, 12)


def requests(*, n: int = 3) -> list[GenerationRequest]:
    limits = (12, 2, 7, 4)
    return [
        GenerationRequest(ids, SamplingParams(limit), n=n, seed=seed)
        for seed, (ids, limit) in enumerate(zip(PROMPTS, limits, strict=True))
    ]


def engine(**settings: object) -> EmbeddedEngine:
    return make(tiny_model("qwen2"), eos_token_ids=ENDS, **settings)


@pytest.mark.parametrize("max_batch_size", [64, 6, 2])
def test_each_is_told_of_once_and_results_are_bitwise_those_without(max_batch_size: int):
    told: list[tuple[int, list[Completion]]] = []
    plain = engine(max_batch_size=max_batch_size).generate(requests(), deadline=soon())
    results = engine(max_batch_size=max_batch_size).generate(
        requests(), deadline=soon(), finished=lambda index, completions: told.append((index, completions))
    )
    assert results == plain
    assert sorted(told) == list(enumerate(results))


def test_the_short_ones_are_told_of_while_the_long_ones_grow():
    events: list[int | str] = []

    def listener(step: Step) -> Collection[int]:
        events.append("token")
        return ()

    results = engine().generate(
        requests(), deadline=soon(), finished=lambda index, completions: events.append(index), listener=listener
    )
    lengths = [max(len(completion.token_ids) for completion in group) for group in results]
    tokens_before = {event: events[:place].count("token") for place, event in enumerate(events) if event != "token"}
    assert tokens_before == dict(enumerate(lengths)), "each one right after its last token"
    assert len(set(lengths)) > 2


def test_who_is_told_may_end_the_call():
    def finished(index: int, completions: list[Completion]) -> None:
        raise RewardError("what was generated cannot be used")

    generating = engine()
    with pytest.raises(RewardError, match="cannot be used"):
        generating.generate(requests(), deadline=soon(), finished=finished)
    assert generating.generate(requests(), deadline=soon()) == engine().generate(requests(), deadline=soon())
