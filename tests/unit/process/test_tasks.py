"""Tasks that end together, and leave none behind."""

from __future__ import annotations

import asyncio

import pytest

from lachesis.process.tasks import cancel, together, unless


async def wait_forever(ended: list[str]) -> str:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")
    return "never"


async def give(value: str) -> str:
    return value


async def fail() -> str:
    raise ValueError("no")


def test_results_come_in_order():
    async def slow() -> str:
        await asyncio.sleep(0)
        return "slow"

    assert asyncio.run(together([slow(), give("quick")])) == ["slow", "quick"]


def test_the_first_error_cancels_the_others():
    ended: list[str] = []
    with pytest.raises(ValueError, match="no"):
        asyncio.run(together([wait_forever(ended), fail()]))
    assert ended == ["cancelled"]


def test_work_is_cancelled_once_the_other_has_ended():
    async def both() -> tuple[str | None, str | None]:
        return await unless(give("stop"), wait_forever(ended)), await unless(wait_forever(ended), give("done"))

    ended: list[str] = []
    assert asyncio.run(both()) == (None, "done")
    assert ended == ["cancelled", "cancelled"]


def test_an_error_of_a_cancelled_task_is_not_raised():
    async def cancelled() -> None:
        await cancel([asyncio.ensure_future(fail()), asyncio.ensure_future(wait_forever([]))])

    asyncio.run(cancelled())
