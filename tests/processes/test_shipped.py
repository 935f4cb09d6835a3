"""The shipped GSM8K environment compares answers in a process of its own."""

from __future__ import annotations

import asyncio
import math
import os
import time
from functools import partial
from typing import Any

import pytest

from lachesis.common.errors import DataError, DependencyError, EngineError
from lachesis.common.imports import optional_package
from lachesis.plugins.atropos.environments.shipped import math_scoring
from lachesis.plugins.atropos.environments.shipped.gsm8k import Gsm8k
from lachesis.plugins.atropos.environments.shipped.math_scoring import MathScorer
from lachesis.process.workers import WorkerPool
from tests.unit.plugins.atropos.environments.one import gsm8k, ids, one_group, served


def test_group(tmp_path):
    answers = [
        "It is 1000.",
        r"so \boxed{1000}",
        r"\boxed{1,000.0}",
        r"first \boxed{7}, no: \boxed{\frac{2000}{2}}",
    ]
    data = str(gsm8k(tmp_path))
    config = {"data": data, "group_size": 4, "max_num": 1}
    with served(Gsm8k, lambda prompt, n, body: [ids(a) for a in answers], **config) as (_, run):
        item, group = run(one_group)
    assert item.answer == "1000"
    assert group.scores == [0.0, 1.0, 1.0, 1.0]


def test_an_answer_that_hangs_the_comparison_costs_only_itself(monkeypatch):
    """The process is killed and replaced; the others of the group keep their scores."""

    async def work() -> Any:
        scorer = MathScorer(limit_s=60)
        await scorer.start()
        try:
            pool = scorer._pool
            pids, whole = pool.pids, pool.run

            def run(function: Any, calls: Any, *, timeout_s: float) -> Any:
                if any("hang" in answers for _, answers in calls):
                    return whole(time.sleep, [(600,)], timeout_s=0.01)
                return whole(function, calls, timeout_s=timeout_s)

            pool.run = run
            scores = await scorer.score("3", [r"\boxed{3}", "hang", r"\boxed{4}"])
            pids += pool.pids
            return scores, scorer.timeouts, pids
        finally:
            await scorer.close()

    scores, timeouts, pids = asyncio.run(work())
    assert (scores, timeouts) == ([1.0, 0.0, 0.0], 1)
    assert pids[0] != pids[1]


@pytest.mark.parametrize(
    ("function", "args", "kind", "message"),
    [
        (partial(optional_package, remedy=""), ["math_verify_absent", "it is not there"], DependencyError, "not there"),
        (os._exit, [3], EngineError, "did not start: ended its process .ended with exit code 3"),
        (math.sqrt, [4], EngineError, "does not find that 1 equals 1: 2.0"),
    ],
)
def test_a_comparison_that_does_not_start(monkeypatch, function, args, kind, message):
    def pool(count: int, compare: Any, *given: Any, **options: Any) -> WorkerPool:
        return WorkerPool(count, function, *args, **options)

    monkeypatch.setattr(math_scoring, "WorkerPool", pool)
    with pytest.raises(kind, match=message):
        asyncio.run(MathScorer().start())


def test_a_right_answer_that_is_none():
    async def work() -> None:
        scorer = MathScorer()
        await scorer.start()
        try:
            await scorer.score("", ["x"])
        finally:
            await scorer.close()

    with pytest.raises(DataError, match="not a mathematical expression"):
        asyncio.run(work())
