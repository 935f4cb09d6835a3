from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass

import pytest

from lachesis.plugins.atropos.api.entries import Change, HeldGroup, RolloutBatch, Snapshot, StoredGroup
from lachesis.plugins.atropos.api.environments import RegisteredEnvironment
from lachesis.plugins.atropos.api.state import QueueLimits, RolloutState
from lachesis.plugins.atropos.api.wire import EnvRegistration, Refusal, Registration
from lachesis.plugins.atropos.environments.rollout_api import QueueStatus
from lachesis.plugins.atropos.environments.runner import room_for_groups
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig
from tests.unit.plugins.atropos.api.processes import ENVIRONMENT, REGISTRATION

NOW = 50.0


def new_state(*, batch_size: int = 8, acknowledge: bool = False, **limits) -> RolloutState:
    state = RolloutState(QueueLimits(**limits))
    state.register(registration(batch_size=batch_size, acknowledge=acknowledge))
    return state


def registration(**changes) -> Registration:
    return Registration(**REGISTRATION | changes)


def sequences(batch: RolloutBatch) -> int:
    return sum(held.group.sequences for held in batch.groups)


def group(size: int, *, mark: int = 0, env_id: int | None = None, tokens: int | None = None) -> StoredGroup:
    return StoredGroup(
        json=json.dumps({"mark": mark}).encode(), sequences=size, tokens=tokens or size, env_id=env_id, score=0.5
    )


def marks(batch) -> list[int]:
    return [json.loads(held.group.json)["mark"] for held in batch.groups]


def post(state: RolloutState, *groups: StoredGroup) -> list[dict]:
    return state.post(groups, NOW)[0]


def add_env(state: RolloutState, **changes) -> int:
    state.started = True
    return state.register_env(EnvRegistration(**ENVIRONMENT | changes), NOW)[0]["env_id"]


class Mirror:
    """What a store would hold: changes applied as they come."""

    def __init__(self) -> None:
        self.held: dict[int, HeldGroup] = {}
        self.batch_of: dict[int, int] = {}
        self.summary: dict = {}

    def apply(self, change: Change | None) -> None:
        if change is None:
            return
        if change.wipe:
            self.held.clear()
        self.held |= {held.number: held for held in change.added}
        for number, position in change.placed:
            self.held[number] = HeldGroup(number=number, group=self.held[number].group, position=position)
        for number, batch in change.batched:
            self.batch_of[number] = batch
        for number in change.removed:
            del self.held[number]
            self.batch_of.pop(number, None)
        self.summary = dict(change.summary) if change.summary is not None else self.summary

    def snapshot(self) -> Snapshot:
        return Snapshot(held=tuple(self.held.values()), batch_of=self.batch_of, receipts={}, summary=self.summary)


def test_what_is_buffered_for_an_environment_that_leaves_takes_no_room_any_more():
    state, mirror = new_state(max_queued_tokens=group(4).weight + group(3).weight), Mirror()
    gone, stays = (add_env(state, group_size=4) for _ in range(2))
    for change in [state.post([group(3, env_id=gone), group(4, env_id=gone)], NOW)[1], state.disconnect_env(gone)[1]]:
        mirror.apply(change)
    assert (state.backlog.weight, state.backlog.set_aside.count) == (group(4).weight, 1)
    assert "left before a group of 4 was complete" in state.backlog.set_aside.last[0].reason
    assert [held.group.sequences for held in mirror.held.values()] == [4]
    assert post(state, group(3, env_id=stays)) == [{"status": "buffered", "buffer_size": 3}]


def test_steps_count_deliveries():
    state = new_state()
    state.register(registration(starting_step=5))
    post(state, *(group(4, mark=mark) for mark in range(6)))
    for step in range(5, 8):
        assert state.status() == {"current_step": step, "queue_size": 16 - 2 * step}
        batch, change = state.next_batch(NOW)
        assert marks(batch) == [2 * step - 10, 2 * step - 9] and len(change.removed) == 2
    assert state.next_batch(NOW) == (None, None)


def test_a_registration_takes_no_step_back():
    state = new_state()
    state.register(registration(starting_step=7))
    state.register(registration(starting_step=3))
    assert state.step == 7


def test_only_a_first_poll_and_batches_change_anything():
    state = new_state()
    batch, change = state.next_batch(NOW)
    assert batch is None and change.summary["started"] is True
    assert state.next_batch(NOW) == (None, None)


def test_a_batch_put_back_is_the_next_one():
    state = new_state()
    post(state, *(group(8, mark=mark) for mark in range(3)))
    first, _ = state.next_batch(NOW)
    change = state.put_back(first, epoch=state.epoch)
    assert state.step == 0 and change.added == first.groups
    assert [marks(state.next_batch(NOW)[0]) for _ in range(3)] == [[0], [1], [2]]
    state.reset()
    assert state.put_back(first, epoch=0) is None and not state.deliveries.returned


def test_returned_batches_of_another_size_are_made_anew():
    state = new_state(batch_size=8)
    post(state, *(group(4, mark=mark) for mark in range(3)))
    state.put_back(state.next_batch(NOW)[0], epoch=state.epoch)
    state.register(registration(batch_size=4))
    assert [marks(state.next_batch(NOW)[0]) for _ in range(3)] == [[0], [1], [2]]


def test_acknowledged_batches_are_gone_and_others_come_back():
    state = new_state(ack_timeout_s=10)
    trainer, _ = state.register(registration(acknowledge=True))
    post(state, *(group(8, mark=mark) for mark in range(4)))
    first, change = state.next_batch_for(trainer, None, NOW)
    assert change.batched == ((0, 0),) and not change.removed
    second, _ = state.next_batch_for(trainer, None, NOW + 1)
    assert (first.id, second.id, state.step) == (0, 1, 2)
    answer, change = state.acknowledge(trainer, [1, 1, 9])
    assert answer["acknowledged"] == [1] and answer["unknown"] == [9] and change.removed == (1,)
    # In time it gets a new one, out of time the old one; saying that it holds it gives it time.
    assert state.next_batch_for(trainer, {0}, NOW + 9)[0].id == 2
    assert state.next_batch_for(trainer, {0, 2}, NOW + 18)[0].id == 3
    again, _ = state.next_batch_for(trainer, None, NOW + 28)
    assert (again.id, again.deliveries, state.step) == (0, 2, 4)


def test_a_reply_that_never_arrived_is_repeated_at_once():
    state = new_state()
    trainer, _ = state.register(registration(acknowledge=True))
    post(state, group(8), group(8))
    state.next_batch_for(trainer, set(), NOW)
    assert state.next_batch_for(trainer, set(), NOW)[0].id == 0
    assert state.next_batch_for(trainer, {0}, NOW)[0].id == 1


def test_only_the_last_trainer_may_take_batches():
    state = new_state()
    old, _ = state.register(registration(acknowledge=True))
    new, _ = state.register(registration(acknowledge=True))
    for call in (lambda: state.next_batch_for(old, None, NOW), lambda: state.acknowledge(old, [0])):
        with pytest.raises(Refusal, match="another trainer") as refused:
            call()
        assert refused.value.status == 409
    assert state.next_batch_for(new, None, NOW)[0] is None


def test_strict_sets_aside_and_counts():
    state = new_state(strict=True)
    env_id = add_env(state)
    bad = StoredGroup(json=b"{}", sequences=4, tokens=4, env_id=env_id, problem="scores is odd")
    assert post(state, bad, group(4, env_id=77), group(4, env_id=env_id)) == [
        {"status": "set_aside", "reason": "scores is odd"},
        {"status": "set_aside", "reason": "env_id 77 was never registered"},
        {"status": "received"},
    ]
    assert state.status() == {"current_step": 0, "queue_size": 1, "set_aside": 2}
    assert state.environments.get(env_id).set_aside == 1
    kept = json.loads(state.backlog.set_aside.reply())
    assert [(misfit["environment"], misfit["reason"]) for misfit in kept["last"]] == [
        ("env_0", "scores is odd"), ("#77", "env_id 77 was never registered"),
    ]  # fmt: skip


def test_groups_set_aside_are_kept_within_bounds():
    state = new_state(strict=True)
    for _ in range(60):
        large = StoredGroup(json=b"[" + b"1" * (1 << 20) + b"]", sequences=1, tokens=1, env_id=9)
        post(state, large)
    assert state.backlog.set_aside.count == 60 and len(state.backlog.set_aside.last) == 15


def test_plain_mode_accepts_all_but_keeps_nothing_empty():
    state = new_state()
    assert post(state, group(0), group(3, env_id=5)) == [{"status": "received"}] * 2
    assert state.status() == {"current_step": 0, "queue_size": 1}


def test_full_queue_refuses_whole_posts():
    state = new_state(max_queued_tokens=100, batch_size=4)
    post(state, group(4, tokens=60))
    with pytest.raises(Refusal) as refused:
        post(state, group(4, tokens=20), group(4, tokens=30))
    assert refused.value.status == 429 and refused.value.headers["Retry-After"] == "2"
    assert state.status() == {"current_step": 0, "queue_size": 1, "queued_tokens": 60, "max_queued_tokens": 100}
    with pytest.raises(Refusal) as refused:
        post(state, group(4, tokens=101))
    assert refused.value.status == 413
    state.next_batch(NOW)
    assert post(state, group(4, tokens=100)) == [{"status": "received"}]


def test_buffered_tokens_count_against_the_limit():
    state = new_state(max_queued_tokens=100)
    env_id = add_env(state)
    post(state, group(3, tokens=60, env_id=env_id))
    with pytest.raises(Refusal):
        post(state, group(4, tokens=50))
    assert state.status_env(env_id, NOW)["queued_tokens"] == 60


def test_waiting():
    state = RolloutState(QueueLimits())
    assert state.waiting(NOW) == "no trainer has registered"
    state.register(registration())
    assert state.waiting(NOW) == "0 of 8 sequences are queued"
    env_id = add_env(state, min_batch_allocation=0.5, desired_name="math")
    post(state, group(8))
    assert state.waiting(NOW) == "environment math_0 owes 4 sequences and has none queued"
    assert state.waiting(NOW + 1000) == ""
    post(state, group(4, env_id=env_id), group(4))
    assert state.waiting(NOW) == ""


def test_reset_forgets_everything():
    state = new_state(strict=True)
    add_env(state)
    post(state, group(4), group(4, env_id=9))
    change = state.reset()
    assert change.wipe and change.summary["registration"] is None
    assert state.status() == {"current_step": 0, "queue_size": 0, "set_aside": 0}
    assert state.waiting(NOW) == "no trainer has registered" and state.backlog.latest is None


def test_any_history_can_be_restored():
    """A random run, stopped anywhere: what is restored from its changes goes on as the original does."""
    chance = random.Random(5)
    state, mirror = RolloutState(QueueLimits(ack_timeout_s=1e9)), Mirror()
    trainer, change = state.register(registration(acknowledge=True))
    mirror.apply(change)
    mirror.apply(state.next_batch(NOW)[1])
    for _ in range(2):
        mirror.apply(state.register_env(EnvRegistration(**ENVIRONMENT | {"min_batch_allocation": 0.25}), NOW)[1])
    for mark in range(300):
        kind = chance.random()
        if kind < 0.7:
            size, env_id = chance.choice([1, 2, 3, 4]), chance.choice([None, 0, 0, 1])
            mirror.apply(state.post([group(size, mark=mark, env_id=env_id)], NOW)[1])
        elif kind < 0.8:
            mirror.apply(state.next_batch(NOW)[1])
        elif kind < 0.9:
            mirror.apply(state.next_batch_for(trainer, None, NOW)[1])
        else:
            mirror.apply(state.acknowledge(trainer, list(state.deliveries.outstanding)[:1])[1])
        if mark % 20 == 0:
            again = RolloutState(state.limits)
            again.restore(mirror.snapshot(), NOW)
            assert again.summary() == state.summary() and again.status() == state.status()
            assert {key: list(lane) for key, lane in again.backlog.queue.lanes.items()} == {
                key: list(lane) for key, lane in state.backlog.queue.lanes.items()
            }
            assert buffered(again) == buffered(state)
            assert list(again.deliveries.outstanding) == list(state.deliveries.outstanding)
            if chance.random() < 0.5:
                state = again
    assert state.step > 10 and mirror.held


def buffered(state: RolloutState) -> dict[int, list[int]]:
    return {env_id: [held.number for held in buffer] for env_id, buffer in state.backlog.buffers.items() if buffer}


def test_numbers_go_on_after_a_restore():
    state, mirror = new_state(), Mirror()
    trainer, _ = state.register(registration(acknowledge=True))
    mirror.apply(state.post([group(8), group(8)], NOW)[1])
    mirror.apply(state.next_batch_for(trainer, None, NOW)[1])
    mirror.apply(state.next_batch_for(trainer, None, NOW)[1])
    again = RolloutState(QueueLimits())
    again.restore(mirror.snapshot(), NOW)
    _, change = again.post([group(8)], NOW)
    assert change.added[0].number == 2 and again.next_batch_for(trainer, {0, 1}, NOW)[0].id == 2


def test_an_environment_of_number_minus_1_is_nobody():
    """Not the last one that registered, whose size of groups would hold this one back."""
    state = new_state()
    add_env(state, group_size=4)
    assert post(state, group(3, env_id=-1)) == [{"status": "received"}]
    assert state.status() == {"current_step": 0, "queue_size": 1}


class TestATrainerThatEnds:
    def test_what_it_asked_for_binds_no_environment_any_more(self):
        state = new_state()
        uuid, _ = state.register(registration(acknowledge=True, batch_size=2))
        add_env(state)
        post(state, group(4))
        state.forget_trainer(uuid)
        assert state.register_env(EnvRegistration(**ENVIRONMENT), NOW) == (
            {"status": "wait for trainer to start"},
            None,
        )
        again, _ = state.register(registration(acknowledge=True, batch_size=4))
        batch, _ = state.next_batch_for(again, (), NOW)
        assert batch is not None and sequences(batch) == 4, "what was queued stays"

    def test_only_the_one_that_registered_last_may_leave(self):
        state = new_state()
        earlier, _ = state.register(registration(acknowledge=True))
        state.register(registration(acknowledge=True))
        with pytest.raises(Refusal, match="another trainer"):
            state.forget_trainer(earlier)


def test_a_trainer_is_told_what_ended_the_last_environment():
    state = new_state()
    env_id = add_env(state, desired_name="sums")
    state.disconnect_env(env_id, reason="its tokenizer is another -> give the trainer's")
    assert "no environment is left; sums_0 ended: its tokenizer is another" in state.waiting(NOW)
    add_env(state)
    assert "ended" not in state.waiting(NOW)


def test_groups_larger_than_a_batch_are_promised_and_handed_out_alone():
    state = new_state(batch_size=2)
    state.started = True
    reply, _ = state.register_env(EnvRegistration(**ENVIRONMENT | {"group_size": 4}), NOW)
    assert reply["takes_larger_groups"]
    post(state, group(4, mark=1, env_id=reply["env_id"]), group(4, mark=2, env_id=reply["env_id"]))
    batch, _ = state.next_batch(NOW)
    assert marks(batch) == [1]


@dataclass
class Sender:
    """An environment that throttles itself by the rule of the protocol and sends groups of the sizes it has."""

    id: int
    config: EnvironmentConfig
    sizes: tuple[int, ...]
    making: int = 0

    def room(self, state: RolloutState, *, batch_size: int) -> int:
        figures = state.status_env(self.id, NOW)
        names = ("queue_size", "self_queue_size", "max_group_size", "unallocated_fraction", "env_weight")
        full = figures.get("queued_tokens", 0) >= figures.get("max_queued_tokens", math.inf)
        status = QueueStatus(step=figures["current_step"], full=full, **{name: figures[name] for name in names})
        return room_for_groups(status, self.config, batch_size=batch_size) - self.making


@pytest.mark.parametrize("seed", range(60))
def test_no_sizes_of_groups_stop_a_run(seed: int):
    """Environments of arbitrary sizes send as much as they are told to; the trainer always gets its next batch."""
    chance = random.Random(seed)
    batch_size = chance.choice([3, 8, 16, 64])
    limit = chance.choice([None, 160 * batch_size, 320 * batch_size])
    state = new_state(batch_size=batch_size, max_queued_tokens=limit)
    senders: list[Sender] = []
    for _ in range(chance.randint(1, 3)):
        largest = 2 * batch_size
        sizes = tuple(chance.randint(1, largest) for _ in range(chance.randint(1, 3)))
        minimum = chance.choice([None, None, 0.25])
        config = EnvironmentConfig(
            group_size=max(sizes), max_batches_offpolicy=chance.choice([1, 3]), min_batch_allocation=minimum
        )
        env_id = add_env(state, group_size=config.group_size, min_batch_allocation=minimum)
        senders.append(Sender(env_id, config, sizes))
    handed_out = 0
    for _ in range(40):
        for _ in range(12 * batch_size):
            batch, _ = state.next_batch(NOW)
            if batch is not None:
                break
            sender = chance.choice(senders)
            if sender.room(state, batch_size=batch_size) > 0:
                try:
                    size = chance.choice(sender.sizes)
                    state.post([group(size, env_id=sender.id, tokens=40 * size)], NOW)
                except Refusal as refusal:
                    assert refusal.status == 429
        assert batch is not None, state.waiting(NOW)
        handed_out += sequences(batch)
        assert sequences(batch) <= batch_size or len(batch.groups) == 1
    assert handed_out > 20 * batch_size or max(max(sender.sizes) for sender in senders) > batch_size // 2


def test_an_overview_of_many_environments_compares_none_with_another(monkeypatch: pytest.MonkeyPatch):
    """Which took two seconds with 3,000 of them, in which the API answered nobody."""
    state = new_state()
    names = [add_env(state) for _ in range(3)]
    monkeypatch.setattr(RegisteredEnvironment, "__eq__", lambda *_: pytest.fail("compared"))
    assert [one["state"] for one in state.overview(NOW)["environments"]] == ["here"] * len(names)
