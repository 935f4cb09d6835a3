from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.engines.serving.backend import MEMORY_PARTS, Refused
from lachesis.engines.vllm.gate import Gate


class FakeEngine:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._freeze)

    async def _freeze(self, *, mode: str, clear_cache: bool) -> None:
        assert not clear_cache, "requests in flight keep their cache"
        self.told.append(mode)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._freeze(mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        self.told.append("resume")

    async def sleep(self, *, level: int, mode: str) -> None:
        self.told.append(("sleep", level, mode))

    async def wake_up(self, *, tags: list[str]) -> None:
        self.told.append(("wake up", *tags))


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("mode", "told"), [("keep", "keep"), ("drain", "wait"), ("abort", "abort")])
def test_requests_wait_from_pause_to_resume(mode, told):
    async def run() -> None:
        engine = FakeEngine()
        gate = Gate(engine)
        await gate.wait()
        await gate.pause(mode)
        waiting = asyncio.ensure_future(gate.wait())
        await turns()
        assert engine.told == [told] and gate.paused and not waiting.done()
        await gate.resume()
        await waiting
        assert engine.told == [told, "resume"] and not gate.paused

    asyncio.run(run())


def test_a_canary_runs_in_a_pause_and_lets_no_request_through():
    async def run() -> None:
        engine = FakeEngine()
        gate = Gate(engine)
        await gate.pause("keep")
        waiting = asyncio.ensure_future(gate.wait())
        async with gate.running():
            resuming = asyncio.ensure_future(gate.resume())
            await turns()
            assert engine.told == ["keep", "resume"] and not waiting.done() and not resuming.done()
        await asyncio.gather(resuming, waiting)
        assert engine.told == ["keep", "resume", "keep", "resume"]

    asyncio.run(run())


def test_a_canary_that_fails_leaves_the_engine_paused():
    async def run() -> None:
        engine = FakeEngine()
        gate = Gate(engine)
        await gate.pause("keep")
        with pytest.raises(ValueError):
            async with gate.running():
                raise ValueError
        assert engine.told[-1] == "keep" and gate.paused

    asyncio.run(run())


def test_a_running_engine_is_left_alone_by_a_canary():
    async def run() -> None:
        engine = FakeEngine()
        async with Gate(engine).running():
            assert engine.told == []

    asyncio.run(run())


@pytest.mark.parametrize(("level", "mode"), [(1, "keep"), (2, "abort")])
def test_an_engine_that_was_paused_wakes_up_paused(level, mode):
    async def run() -> None:
        engine, restored = FakeEngine(), []

        async def restore() -> None:
            restored.append(True)

        gate = Gate(engine)
        assert await gate.sleep(level) and not await gate.sleep(level)
        await gate.pause("drain")
        assert engine.told == [("sleep", level, mode)], "an engine that sleeps is not paused"
        with pytest.raises(Refused, match="asleep"):
            async with gate.running():
                pass
        await gate.wake_up(MEMORY_PARTS, restore)
        await gate.wake_up(MEMORY_PARTS, restore)
        assert restored == [True] and engine.told[1:] == [("wake up", "kv_cache", "weights"), "keep"] and gate.paused
        await gate.resume()
        await gate.wait()

    asyncio.run(run())


def test_the_weights_wake_up_first_and_nothing_is_generated_before_the_cache_is_there():
    async def run() -> None:
        engine, restored = FakeEngine(), []

        async def restore() -> None:
            restored.append(list(engine.told))

        gate = Gate(engine)
        await gate.sleep(2)
        with pytest.raises(Refused, match="no weights are received"):
            gate.refuse_asleep("no weights are received", without=("weights",))
        await gate.wake_up(("weights",), restore)
        gate.refuse_asleep("no weights are received", without=("weights",))
        with pytest.raises(Refused, match="nothing is computed"):
            async with gate.running():
                pass
        waiting = asyncio.ensure_future(gate.wait())
        await gate.resume()
        await turns()
        assert gate.sleeping and not waiting.done()
        await gate.wake_up(("weights", "kv_cache"), restore)
        await waiting
        told = [("sleep", 2, "abort"), ("wake up", "weights")]
        assert engine.told == [*told, ("wake up", "kv_cache")] and restored == [told] and not gate.sleeping

    asyncio.run(run())


def test_resuming_does_not_wake_up():
    async def run() -> None:
        engine = FakeEngine()
        gate = Gate(engine)
        await gate.sleep(1)
        await gate.resume()
        assert engine.told == [("sleep", 1, "keep")] and gate.sleeping

    asyncio.run(run())
