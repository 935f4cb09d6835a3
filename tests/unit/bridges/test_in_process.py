from __future__ import annotations

from collections.abc import Sequence

import pytest

from lachesis.bridges.in_process import InProcessBridge
from lachesis.bridges.proof import SyncProof, canary_alone
from lachesis.common.errors import EngineError, StaleWeights, TrainingError
from lachesis.common.types import CanaryReading
from tests.fakes import FakeEngine


class Weights:
    """A policy that is a single number, read by trainer and engine alike."""

    def __init__(self) -> None:
        self.value = -1.0

    def canary(self, token_ids: Sequence[int]) -> list[float]:
        return [self.value] * (len(token_ids) - 1)


class SharingEngine(FakeEngine):
    """Reads the policy's number; ``calls`` is what was asked of it, in order."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights
        self.calls: list[str] = []
        self.lost_updates = False

    def canary(self, token_ids: Sequence[int]) -> CanaryReading:
        self.calls.append(f"canary of version {self.version}")
        return CanaryReading(tuple(self.weights.canary(token_ids)), self.version, "fake")

    def set_version(self, version: int) -> None:
        self.calls.append(f"set_version {version}")
        if not self.lost_updates:
            super().set_version(version)

    def pause(self, *, mode="keep") -> None:
        self.calls.append("pause")
        super().pause(mode=mode)

    def resume(self) -> None:
        self.calls.append("resume")
        super().resume()

    def close(self) -> None:
        self.calls.append("close")
        super().close()


def proof_of(policy: Weights, engine) -> SyncProof:
    return SyncProof(
        token_ids=lambda: (1, 2, 3),
        trainer=policy.canary,
        engine=canary_alone(engine.canary),
        session_id="fake",
        dtype="float32",
    )


def make_bridge(*, proof: bool = True) -> tuple[InProcessBridge[Weights], Weights, SharingEngine]:
    bridge: InProcessBridge[Weights] = InProcessBridge(
        engine_builder=SharingEngine, proof_builder=proof_of if proof else None
    )
    policy = bridge.prepare(Weights)
    engine = bridge.engine
    assert isinstance(engine, SharingEngine)
    return bridge, policy, engine


def test_the_engine_is_built_around_the_policy():
    _, policy, engine = make_bridge()
    assert engine.weights is policy


def test_an_update_pauses_transfers_proves_and_resumes_in_this_order():
    bridge, policy, engine = make_bridge()
    with bridge.update_to(1):
        engine.calls.append("optimizer step")
        policy.value = -2.0
    assert engine.calls == ["pause", "optimizer step", "set_version 1", "resume", "canary of version 1"]
    assert engine.health().version == 1
    assert not engine.health().paused


def test_the_report_tells_version_time_and_error():
    bridge, _, _ = make_bridge()
    assert bridge.last_report is None
    report = bridge.sync(7)
    assert report is bridge.last_report
    assert (report.version, report.canary_error) == (7, 0.0)
    assert report.seconds >= 0


def test_without_proof_nothing_is_read():
    bridge, _, engine = make_bridge(proof=False)
    assert bridge.sync(1).canary_error is None
    assert engine.calls == ["pause", "set_version 1", "resume"]


def test_an_error_of_the_body_transfers_nothing_and_resumes():
    bridge, _, engine = make_bridge()
    bridge.sync(3)
    engine.calls.clear()
    with pytest.raises(TrainingError, match="not finite"), bridge.update_to(4):
        raise TrainingError("the gradient is not finite")
    assert engine.calls == ["pause", "resume"]
    assert engine.health().version == 3
    assert bridge.last_report is not None
    assert bridge.last_report.version == 3


def test_an_interrupt_of_the_body_resumes_too():
    bridge, _, engine = make_bridge()
    with pytest.raises(KeyboardInterrupt), bridge.update_to(1):
        raise KeyboardInterrupt
    assert engine.calls == ["pause", "resume"]


def test_a_transfer_that_was_lost_is_stale_weights_and_the_engine_resumes():
    bridge, _, engine = make_bridge()
    bridge.sync(1)
    engine.lost_updates = True
    with pytest.raises(StaleWeights, match="weight version 1, but the trainer is at 2"):
        bridge.sync(2)
    assert not engine.health().paused
    assert bridge.last_report is not None
    assert bridge.last_report.version == 1, "what was not proved is not reported"


def test_nothing_is_generated_during_an_update():
    bridge, _, engine = make_bridge()
    with pytest.raises(EngineError, match="paused"), bridge.update_to(1):
        engine.generate([], deadline=None)  # type: ignore[arg-type]


def test_closing_closes_the_engine_and_may_be_repeated():
    bridge, _, engine = make_bridge()
    bridge.close()
    bridge.close()
    assert "close" in engine.calls
    with pytest.raises(EngineError, match="closed"):
        bridge.sync(1)


def test_a_bridge_that_was_never_prepared_closes():
    InProcessBridge(engine_builder=SharingEngine, proof_builder=None).close()


def gone(*arguments, **options) -> None:
    raise EngineError("the engine does not answer")


@pytest.mark.parametrize("call", ["pause", "set_version"])
def test_a_dead_engine_is_reported_as_what_recovery_says_of_it(call: str):
    bridge, _, engine = make_bridge()
    met: list[str] = []

    def recover(error: EngineError) -> None:
        met.append(error.message)
        raise EngineError("its weights died with it", remedy="--resume")

    bridge.recover = recover
    setattr(engine, call, gone)
    engine.resume = gone  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="its weights died with it") as raised, bridge.update_to(1):
        pass
    assert met == ["the engine does not answer"] and raised.value.remedy == "--resume"


def test_an_engine_that_does_not_resume_after_a_good_update_is_an_error():
    bridge, _, engine = make_bridge()
    engine.resume = gone  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="does not answer"), bridge.update_to(1):
        pass
