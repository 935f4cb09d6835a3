from __future__ import annotations

import json
import logging
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lachesis.common.errors import CheckpointError, ConfigError
from lachesis.train.batch import pack
from lachesis.train.checkpoint import CheckpointManager
from lachesis.train.host_memory import HostMemory
from lachesis.train.policy import Policy
from lachesis.train.resume import LEAST_S, Budget, RunCheckpoints
from tests.losses import loss_options
from tests.unit.train.model.test_forward import random_groups
from tests.unit.train.test_policy import make_policy
from tests.waiting import LONG_S, until


class PlaceInData:
    """The part of a feed that checkpoints need."""

    def __init__(self, place: int = 0) -> None:
        self.place = place
        self.safe: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "front": ["7"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def saved(self) -> None:
        self.safe = self.place


def checkpoints(directory: Path, policy: Policy, feed: Any = None, *, every_steps: int = 2) -> RunCheckpoints:
    manager = CheckpointManager(directory, keep_last=2)
    return RunCheckpoints(manager, policy=policy, feed=feed or PlaceInData(), every_steps=every_steps)


class SlowManager(CheckpointManager):
    """Writes a checkpoint once it is let."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, keep_last=2)
        self.may_write = threading.Event()

    def save(self, step: int, **content: Any) -> Path:
        assert self.may_write.wait(LONG_S)
        return super().save(step, **content)


def train(policy: Policy, *, steps: int, seed: int = 0) -> list[float]:
    """A few steps; returns the learning rate and the gradient norm of each."""
    told = []
    for step in range(steps):
        groups = random_groups(groups=2, samples=3, longest=6, seed=seed + step)
        policy.accumulate(pack(groups, max_tokens=64))
        told += [value.value() for value in policy.step().values()]
    return told


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters() if p.requires_grad])


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step_*"))


@pytest.mark.parametrize(
    ("every_steps", "steps", "stopping", "expected"),
    [
        (2, (1, 2, 3, 4), False, ["step_000002", "step_000004"]),
        (0, (1, 2, 3, 4), False, []),
        (0, (3,), True, ["step_000003"]),
        (2, (3,), True, ["step_000003"]),
    ],
)
def test_when_checkpoints_are_saved(tmp_path: Path, every_steps, steps, stopping, expected):
    manager = checkpoints(tmp_path, make_policy(options=loss_options()), every_steps=every_steps)
    for step in steps:
        manager.maybe_save(step, stopping=stopping)
    assert saved(tmp_path) == expected


def test_what_is_recorded_of_steps_is_written_before_a_checkpoint_of_them(tmp_path: Path):
    """A run that is killed then goes on from the checkpoint, with a line for every step before it."""
    manager = checkpoints(tmp_path, make_policy(options=loss_options()), every_steps=2)
    there: list[list[str]] = []
    for step in (1, 2):
        manager.maybe_save(step, recorded=lambda: there.append(saved(tmp_path)))
    assert (there, saved(tmp_path)) == ([[]], ["step_000002"])


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_everything_goes_on_exactly(tmp_path: Path, lora: bool):
    straight = make_policy(options=loss_options(), lora=lora)
    train(straight, steps=2)
    checkpoints(tmp_path, straight, PlaceInData(40)).maybe_save(2)
    expected = train(straight, steps=3, seed=50)

    resumed, feed = make_policy(options=loss_options(), lora=lora), PlaceInData()
    assert not torch.equal(weights(resumed), weights(straight))
    assert checkpoints(tmp_path, resumed, feed).restore() == 2
    assert feed.place == 40
    assert train(resumed, steps=3, seed=50) == expected
    assert torch.equal(weights(resumed), weights(straight))


def test_random_generators_go_on_where_they_were(tmp_path: Path):
    policy = make_policy(options=loss_options())
    torch.manual_seed(3)
    checkpoints(tmp_path, policy).maybe_save(2)
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(4)
    checkpoints(tmp_path, policy).restore()
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


def test_weights_are_restored_in_place(tmp_path: Path):
    """An engine may read the same storage."""
    policy = make_policy(options=loss_options())
    checkpoints(tmp_path, policy).maybe_save(2)
    before, places = weights(policy), [p.data_ptr() for p in policy.model.parameters()]
    train(policy, steps=1)
    assert not torch.equal(weights(policy), before)
    checkpoints(tmp_path, policy).restore()
    assert torch.equal(weights(policy), before)
    assert [p.data_ptr() for p in policy.model.parameters()] == places
    assert all(p.requires_grad for p in policy.model.parameters())


def test_with_lora_only_the_adapter_is_saved(tmp_path: Path):
    policy = make_policy(options=loss_options(), lora=True)
    checkpoints(tmp_path, policy).maybe_save(2)
    tensors = CheckpointManager(tmp_path, keep_last=1).load().tensors
    assert tensors
    assert all("lora_" in name for name in tensors)


def test_without_a_checkpoint_the_run_starts_anew_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    policy = make_policy(options=loss_options())
    before, feed = weights(policy), PlaceInData(3)
    with caplog.at_level(logging.WARNING, logger="lachesis"):
        assert checkpoints(tmp_path, policy, feed).restore() == 0
    assert "no checkpoint to resume from" in caplog.text
    assert torch.equal(weights(policy), before)
    assert feed.place == 3


@pytest.mark.parametrize(("saved_lora", "own_lora"), [(True, False), (False, True)])
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path, saved_lora, own_lora):
    checkpoints(tmp_path, make_policy(options=loss_options(), lora=saved_lora)).maybe_save(2)
    policy = make_policy(options=loss_options(), lora=own_lora)
    before, feed = weights(policy), PlaceInData(3)
    with pytest.raises(CheckpointError, match=r"step 2 is of another model: \d+ tensors differ, such as \w") as caught:
        checkpoints(tmp_path, policy, feed).restore()
    assert "model and adapter settings" in caught.value.remedy
    assert torch.equal(weights(policy), before)
    assert feed.place == 3


def test_a_model_of_another_size_is_refused(tmp_path: Path):
    checkpoints(tmp_path, make_policy(options=loss_options(), architecture="qwen2")).maybe_save(2)
    with pytest.raises(CheckpointError, match="of another model"):
        checkpoints(tmp_path, make_policy(options=loss_options(), architecture="qwen3")).restore()


def test_a_place_in_the_data_of_another_source_is_refused(tmp_path: Path):
    class Elsewhere(PlaceInData):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.place = state["batches_known"]

    policy = make_policy(options=loss_options())
    checkpoints(tmp_path, policy).maybe_save(2)
    with pytest.raises(
        CheckpointError, match=r"step 2 does not say where in this run's data .*KeyError 'batches_known'"
    ) as caught:
        checkpoints(tmp_path, policy, Elsewhere()).restore()
    assert "the source" in caught.value.remedy


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path):
    policy = make_policy(options=loss_options())
    manager = checkpoints(tmp_path, policy, PlaceInData(2))
    manager.maybe_save(2)
    expected = weights(policy)
    train(policy, steps=1)
    manager.maybe_save(4)
    damaged = tmp_path / "step_000004" / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    assert manager.restore() == 2
    assert torch.equal(weights(policy), expected)


def test_where_every_checkpoint_is_damaged_nothing_starts_anew(tmp_path: Path):
    policy = make_policy(options=loss_options())
    manager = checkpoints(tmp_path, policy, PlaceInData(2))
    for step in (2, 4):
        manager.maybe_save(step)
        (tmp_path / f"step_{step:06d}" / "weights.safetensors").write_bytes(b"")
    before = weights(policy)
    with pytest.raises(
        CheckpointError, match=r"is damaged \(step_000004: weights.* 0 bytes .*; step_000002: "
    ) as caught:
        manager.restore()
    assert "--overwrite" in caught.value.remedy and torch.equal(weights(policy), before)
    assert "--overwrite" in caught.value.remedy


def test_the_data_position_is_readable_json(tmp_path: Path):
    checkpoints(tmp_path, make_policy(options=loss_options()), PlaceInData(12)).maybe_save(4)
    meta = json.loads((tmp_path / "step_000004" / "meta.json").read_text())
    assert meta == {"step": 4, "feed": {"place": 12, "front": ["7"]}}


def test_ranks_that_write_parts_need_one_directory(tmp_path: Path):
    seen: list[Path] = []

    def sees(path: str) -> bool:
        seen.append(Path(path))
        assert seen[-1].is_file()
        return False

    policy: Any = SimpleNamespace(strategy=SimpleNamespace(sharded=True), sees=sees)
    with pytest.raises(ConfigError, match="but some rank cannot see it") as caught:
        checkpoints(tmp_path / "checkpoints", policy).require_shared_disk()
    assert "checkpoint.format: whole" in caught.value.remedy
    assert seen and not list(tmp_path.iterdir())
    manager = CheckpointManager(tmp_path, keep_last=2)
    RunCheckpoints(manager, policy=policy, feed=PlaceInData(), every_steps=2, whole=True).require_shared_disk()
    assert len(seen) == 1


def slow(directory: Path, policy: Policy, feed: Any) -> tuple[SlowManager, RunCheckpoints]:
    manager = SlowManager(directory)
    return manager, RunCheckpoints(manager, policy=policy, feed=feed, every_steps=2, asynchronous=True)


class Time:
    """A clock that is set forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TestBudget:
    @pytest.mark.parametrize("later", [0.0, 2.0], ids=["waited for", "written later"])
    @pytest.mark.parametrize(("step_s", "cost_s"), [(0.18, 3.4), (2.2, 4.2), (60.0, 0.1), (1.0, 200.0)])
    def test_saving_takes_two_percent_of_the_time_whatever_the_length_of_a_step(
        self, step_s: float, cost_s: float, later: float
    ):
        budget, saved, passed = Budget(0.02, clock=(clock := Time())), 0, 0.0
        for _ in range(int(40_000 / step_s)):
            clock.now += step_s
            if budget.due(lambda: int(cost_s * 1e9)):
                with budget.saving():
                    clock.now += cost_s
                if later:
                    clock.now += step_s
                    with budget.finishing():
                        clock.now += later
                saved, passed = saved + 1, clock.now - 1000.0
        spent = saved * (cost_s + later)
        assert saved >= 2 and spent / passed <= 0.02 * (1 + later / cost_s if saved < 5 else 1.1)
        due_s = max(LEAST_S, (cost_s + later) / 0.02)
        assert saved >= 0.8 * passed / (due_s + cost_s + 2 * step_s)

    def test_a_first_one_that_cost_more_than_its_size_said_is_made_up_for(self):
        budget, spent = Budget(0.02, clock=(clock := Time())), 0.0
        for _ in range(4000):
            clock.now += 1.0
            if budget.due(lambda: 10**9):  # 1 s where a gigabyte takes that
                with budget.saving():
                    clock.now += 4.0
                spent += 4.0
                assert spent == 4.0 or spent <= 0.02 * (clock.now - 1000.0)
        assert 60.0 < spent <= 0.02 * (clock.now - 1000.0)

    def test_without_a_share_there_are_none(self):
        budget = Budget(0.0, clock=(clock := Time()))
        clock.now += 1e6
        assert not budget.due(lambda: 1)

    def test_the_first_waits_for_what_its_size_may_cost(self):
        budget = Budget(0.02, clock=(clock := Time()))
        clock.now += 99.0
        assert not budget.due(lambda: 2 * 10**9)
        clock.now += 2.0
        assert budget.due(lambda: 2 * 10**9)


def test_checkpoints_are_saved_as_their_share_of_the_time_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy, clock = make_policy(options=loss_options()), Time()
    monkeypatch.setattr("lachesis.train.resume.Budget", lambda share: Budget(share, clock=clock))
    manager = CheckpointManager(tmp_path, keep_last=9)
    saving = RunCheckpoints(manager, policy=policy, feed=PlaceInData(), every_steps=0, max_share=0.02)
    train(policy, steps=1)
    for step in range(1, 9):
        clock.now += 20.0
        saving.maybe_save(step)
    assert saved(tmp_path) == ["step_000002", "step_000004", "step_000006", "step_000008"]


class TestAsynchronous:
    @pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
    def test_training_goes_on_and_what_is_saved_is_of_the_step(self, tmp_path: Path, lora: bool):
        straight, feed = make_policy(options=loss_options(), lora=lora), PlaceInData(40)
        train(straight, steps=2)
        manager, saving = slow(tmp_path, straight, feed)
        saving.maybe_save(2)
        feed.place = 41
        expected = train(straight, steps=3, seed=50)
        saving.maybe_save(3)
        assert saved(tmp_path) == [] and feed.safe is None and saving.take_metrics() == {}
        manager.may_write.set()
        until(lambda: saved(tmp_path) == ["step_000002"])
        saving.wait()
        assert feed.safe == 41
        assert saving.take_metrics()["checkpoint_write_time"].value() > 0 and saving.take_metrics() == {}

        resumed, place = make_policy(options=loss_options(), lora=lora), PlaceInData()
        assert checkpoints(tmp_path, resumed, place).restore() == 2
        assert place.place == 40
        assert train(resumed, steps=3, seed=50) == expected
        assert torch.equal(weights(resumed), weights(straight))

    def test_memory_for_copies_is_taken_once_after_a_first_step_that_saves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """Of weights and optimizer: a model's alone would be a seventh of what a checkpoint copies."""
        policy = make_policy(options=loss_options())
        sizes: list[int] = []
        monkeypatch.setattr(
            HostMemory, "reserve", lambda memory, tensors: sizes.append(sum(tensor.numel() for tensor in tensors))
        )
        _, saving = slow(tmp_path, policy, PlaceInData())
        train(policy, steps=1)
        for step in (1, 3):
            saving.maybe_save(step)
        trained = sum(tensor.numel() for tensor in policy.weights().values())
        assert len(sizes) == 1 and sizes[0] >= 3 * trained
        checkpoints(tmp_path, policy).maybe_save(1)
        assert len(sizes) == 1, "who waits until all is written copies nothing"

    def test_one_is_written_at_a_time_and_that_of_the_end_is_waited_for(self, tmp_path: Path):
        manager, saving = slow(tmp_path, make_policy(options=loss_options()), PlaceInData())
        saving.maybe_save(2)
        threading.Timer(0.02, manager.may_write.set).start()
        saving.maybe_save(4)
        assert saved(tmp_path)[0] == "step_000002"
        saving.maybe_save(5, stopping=True)
        assert saved(tmp_path) == ["step_000004", "step_000005"]

    def test_what_cannot_be_written_is_told_at_the_next_step(self, tmp_path: Path):
        (tmp_path / "file").write_text("where a directory should be")
        manager, saving = slow(tmp_path / "file", make_policy(options=loss_options()), feed := PlaceInData())
        manager.may_write.set()
        saving.maybe_save(2)
        with pytest.raises(CheckpointError, match="cannot be written"):
            until(lambda: saving.maybe_save(3))
        assert feed.safe is None

    @pytest.mark.parametrize("fails", [False, True])
    def test_an_error_of_the_run_does_not_lose_it(self, tmp_path: Path, fails: bool, caplog: pytest.LogCaptureFixture):
        directory = tmp_path / "checkpoints"
        manager, saving = slow(directory, make_policy(options=loss_options()), PlaceInData())
        with pytest.raises(ZeroDivisionError), saving.completed():
            saving.maybe_save(2)
            if fails:
                directory.write_text("in its way")
            manager.may_write.set()
            1 / 0  # noqa: B018
        assert fails == ("the unfinished checkpoint is lost" in caplog.text)
        assert fails or saved(directory) == ["step_000002"]
