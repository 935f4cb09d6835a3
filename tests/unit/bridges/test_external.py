"""Engines whose processes belong to a bridge, and what it does when one dies."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from lachesis.bridges.external import OwnedEngine
from lachesis.bridges.model_files import adapter_config
from lachesis.bridges.saved import AdapterWriter, SavedBridge, load_adapter
from lachesis.bridges.sent_weights import lora_tensors
from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, StaleWeights
from lachesis.config.schema import LoraSwapBridgeConfig
from lachesis.engines.fleet import State
from tests.unit.bridges.fake_engine import (
    FakeHttpEngine,
    FakePolicy,
    FakeProcess,
    FakeServer,
    keep_old,
    read,
    servers_of,
)
from tests.waiting import LONG_S


def adapters_to(engine: FakeHttpEngine, tmp_path: Path, **options: Any) -> SavedBridge[FakePolicy]:
    return SavedBridge(
        servers_of(engine, options),
        capabilities=LoraSwapBridgeConfig.capabilities,
        directory=tmp_path / "adapters",
        keep_last=1,
        save=AdapterWriter(
            tensors=lambda policy: lora_tensors(policy.model), config=lambda policy: adapter_config(policy.model)
        ),
        load=load_adapter,
        done="%d in %.3f s",
    )


class Built:
    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.server = FakeServer()
        self.process = FakeProcess(self.server)
        self.process.launch()
        engine = FakeHttpEngine(self.server)
        options["owned"] = OwnedEngine(engine=engine, processes=[self.process], owner="run 7")  # type: ignore[list-item]
        self.bridge = adapters_to(engine, tmp_path, **options)
        self.policy = self.bridge.prepare(lambda: FakePolicy(lora=True))
        self.bridge.sync(0)
        self.calls = 0

    def call(self) -> str:
        """What an engine is asked; a dead one does not answer."""
        self.calls += 1
        if self.process.pid is None:
            raise EngineError("the engine does not answer")
        return "answer"


def test_a_call_in_which_it_dies_is_made_again_once_it_serves_the_same_weights(tmp_path):
    built = Built(tmp_path)
    built.process.stop()
    assert built.bridge.retry(built.call) == "answer"
    assert (built.calls, built.process.starts) == (2, 2)
    assert (built.server.version, built.server.owner) == (0, "run 7")
    assert read(built.server.tensors) == read(lora_tensors(built.policy.model))


def test_it_is_started_again_once_for_each_version(tmp_path):
    built = Built(tmp_path)
    built.process.stop()
    built.bridge.retry(built.call)
    built.process.stop()
    with pytest.raises(EngineError, match="died a second time with weight version 0: the engine does not answer"):
        built.bridge.retry(built.call)


def test_an_error_of_one_that_lives_is_passed_on(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OwnedEngine.died, "__kwdefaults__", {"within_s": 0.0})
    built = Built(tmp_path)

    def refuse() -> None:
        raise EngineError("no such prompt")

    with pytest.raises(EngineError, match="no such prompt"):
        built.bridge.retry(refuse)
    assert built.process.starts == 1


def test_weights_in_its_memory_died_with_it(tmp_path):
    built = Built(tmp_path, trains_in_engine=True)
    built.process.stop()
    with pytest.raises(EngineError, match="the weights in its memory are lost: the engine does not") as raised:
        built.bridge.retry(built.call)
    assert "--resume" in raised.value.remedy


def test_an_engine_that_sleeps_is_awake_for_its_weights_and_for_generation(tmp_path):
    built = Built(tmp_path, sleep_level=1, every_steps=2)
    transferred = ["sleep", "wake_up", "load_adapter", "wake_up", "canary"]
    for version, expected in ((1, ["sleep", "wake_up"]), (2, transferred)):
        built.server.calls.clear()
        built.bridge.rest()
        assert built.server.asleep
        with built.bridge.update_to(version):
            built.policy.step()
            assert built.server.asleep, "also in the optimizer's step"
        assert [call for call in built.server.calls if call != "info"] == expected
        assert not built.server.asleep
    report = built.bridge.last_report
    assert report is not None and report.sleep_seconds is not None and report.wake_seconds is not None
    assert 0 <= report.wake_seconds <= report.seconds


@pytest.mark.parametrize("level", [1, 2])
def test_its_cache_wakes_up_once_the_weights_are_there(level: Any, tmp_path):
    """So that it stands beside neither what the trainer sends nor what the engine keeps of it while it arrives."""
    built = Built(tmp_path, sleep_level=level)
    there: list[bool] = []

    def corrupt(tensors: dict[str, Any]) -> dict[str, Any]:
        there.append("kv_cache" not in built.server.asleep)
        return tensors

    built.server.corrupt = corrupt
    built.bridge.rest()
    assert bool(built.server.tensors) == (level == 1), "at level 2 they are dropped"
    with built.bridge.update_to(1):
        built.policy.step()
    assert there == [False] and not built.server.asleep
    assert read(built.server.tensors) == read(lora_tensors(built.policy.model))


def test_ranks_give_back_what_they_keep_before_each_part_of_it_wakes_up(tmp_path):
    """Else it could not take it: its cache stands beside what has arrived, too."""
    asleep: list[set[str]] = []
    servers: list[FakeServer] = []

    def room(policy: Any) -> None:
        asleep.extend(set(server.asleep) for server in servers)

    built = Built(tmp_path, sleep_level=2, make_room=room)
    servers.append(built.server)
    built.bridge.rest()
    assert not asleep
    with built.bridge.update_to(1):
        built.policy.step()
    assert asleep == [{"weights", "kv_cache"}, {"kv_cache"}]


def test_one_of_several_that_sleep_is_started_again_before_anything_is_trained(tmp_path):
    """Beside the training there would be no room for it."""
    servers = [FakeServer(number=i) for i in range(2)]
    processes = [FakeProcess(server) for server in servers]
    engine = FakeHttpEngine(*servers)
    owned = OwnedEngine(engine=engine, processes=processes, owner="run 7")  # type: ignore[arg-type]
    for process in processes:
        process.launch()
    starts: list[int] = []

    def room(policy: Any) -> None:
        starts.append(processes[1].starts)

    bridge = adapters_to(engine, tmp_path, owned=owned, sleep_level=1, make_room=room)
    policy = bridge.prepare(lambda: FakePolicy(lora=True))
    engine.claim("run 7", deadline=within())
    bridge.sync(0)
    bridge.rest()
    servers[1].die()
    processes[1].pid = None
    starts.clear()
    with bridge.update_to(1):
        policy.step()
    assert (starts[0], processes[1].starts) == (1, 2), "ranks made room before it was started"
    assert [server.version for server in servers] == [1, 1] and engine.fleet.admitted == engine.urls
    bridge.close()


def test_a_failed_step_leaves_the_engine_awake(tmp_path):
    built = Built(tmp_path, sleep_level=1)
    built.bridge.rest()
    with pytest.raises(EngineError, match="nothing"), built.bridge.update_to(1):
        raise EngineError("nothing was computed")
    assert not built.server.asleep and built.server.version == 0


@pytest.mark.parametrize("every_steps", [1, 2])
def test_one_that_dies_asleep_is_started_again_with_the_weights_of_now(every_steps: int, tmp_path):
    built = Built(tmp_path, sleep_level=1, every_steps=every_steps)
    built.bridge.rest()
    built.process.stop()
    built.server.faults["wake_up"] = EngineError("the engine does not answer")
    with built.bridge.update_to(1):
        built.policy.step()
    assert built.process.starts == 2 and not built.server.asleep
    assert read(built.server.tensors) == read(lora_tensors(built.policy.model))


def test_an_engine_that_does_not_sleep_is_not_asked_to(tmp_path):
    built = Built(tmp_path)
    built.bridge.rest()
    with built.bridge.update_to(1):
        built.policy.step()
    assert not {"sleep", "wake_up"} & set(built.server.calls)
    assert built.bridge.last_report is not None and built.bridge.last_report.wake_seconds is None


def build(number: int = 2) -> tuple[OwnedEngine, list[FakeProcess]]:
    servers = [FakeServer(number=i) for i in range(number)]
    processes = [FakeProcess(server) for server in servers]
    engine = FakeHttpEngine(*servers)
    return OwnedEngine(engine=engine, processes=processes, owner="run 7"), processes  # type: ignore[arg-type]


def within() -> Deadline:
    return Deadline("test: a start", LONG_S)


def test_all_servers_are_started_claimed_and_met_anew():
    owned, processes = build()
    owned.restart(deadline=within())
    first = owned.engine.session_id
    owned.restart(deadline=within())
    assert owned.engine.session_id != first
    assert [process.starts for process in processes] == [2, 2]
    assert {process.server.owner for process in processes} == {"run 7"}


def test_each_server_gets_the_command_for_its_number():
    owned, processes = build()
    owned.restart(deadline=within(), command=lambda i, path: ("serve", f"{path}-{i}"), checkpoint=Path("base"))
    assert [process.command for process in processes] == [("serve", "base-0"), ("serve", "base-1")]


def test_where_one_server_does_not_start_none_is_left():
    owned, processes = build()
    processes[1].dies_at_start = 1
    with pytest.raises(EngineError, match="out of memory"):
        owned.restart(deadline=within())
    assert [process.pid for process in processes] == [None, None]


def test_a_death_is_noticed_also_a_moment_after_the_connection_broke():
    owned, processes = build()
    owned.restart(deadline=within())
    assert not owned.died(within_s=0.01)
    processes[0].stop()
    assert not owned.died(within_s=0.01), "as long as one lives the others are replaced beside it"
    threading.Timer(0.1, processes[1].stop).start()
    assert owned.died(within_s=LONG_S)


def test_only_the_dead_one_of_several_is_started_again_and_it_serves_once_it_is_proved(tmp_path):
    servers = [FakeServer(number=i) for i in range(3)]
    processes = [FakeProcess(server) for server in servers]
    engine = FakeHttpEngine(*servers)
    owned = OwnedEngine(engine=engine, processes=processes, owner="run 7")  # type: ignore[arg-type]
    for process in processes:
        process.launch()
    bridge = adapters_to(engine, tmp_path, owned=owned)
    policy = bridge.prepare(lambda: FakePolicy(lora=True))
    engine.claim("run 7", deadline=within())
    bridge.sync(0)
    assert engine.fleet.admitted == engine.urls

    servers[1].die()
    processes[1].pid = None
    with bridge.update_to(1):
        policy.step()
    assert [server.version for server in servers] == [1, 0, 1], "the step went on without it"
    assert engine.fleet.admitted == (engine.urls[0], engine.urls[2])
    wait(owned._starts.values(), timeout=LONG_S)
    assert [process.starts for process in processes] == [1, 2, 1]
    assert engine.fleet.state(engine.urls[1]) is State.STARTING, "that it is up does not admit it"

    with bridge.update_to(2):
        policy.step()
    assert [server.version for server in servers] == [2, 2, 2]
    assert (engine.fleet.admitted, servers[1].owner) == (engine.urls, "run 7")
    bridge.close()


def test_servers_join_and_leave_and_those_that_joined_serve_once_they_are_proved(tmp_path):
    one, two, three = servers = [FakeServer(number=i) for i in range(3)]
    urls = [server.url for server in servers]
    engine = FakeHttpEngine(one, two, later=[three])
    members = urls[:2]
    bridge = adapters_to(engine, tmp_path, members=lambda: members)
    policy = bridge.prepare(lambda: FakePolicy(lora=True))
    engine.claim("run 7", deadline=within())
    bridge.sync(0)

    busy = engine.fleet.pick(completions=1, max_tokens=8, group="a prompt")
    assert busy is not None and busy.url == urls[0]
    members = urls[1:]
    with bridge.update_to(1):
        policy.step()
    assert engine.urls == engine.fleet.admitted == tuple(urls[1:])
    assert [server.version for server in servers] == [0, 1, 1]
    assert [server.owner for server in servers] == ["run 7"] * 3, "it still has a request"

    engine.fleet.ended(busy, lengths=[3])
    members = []  # as where a name is being moved: the engines stay as they are
    with bridge.update_to(2):
        policy.step()
    assert engine.fleet.admitted == tuple(urls[1:]) and one.owner == "run 7"
    members = urls[1:]
    with bridge.update_to(3):
        policy.step()
    assert one.owner is None, "another run may have it"
    members = urls
    with bridge.update_to(4):
        policy.step()
    assert [server.version for server in servers] == [4, 4, 4]
    assert set(engine.fleet.admitted) == set(urls)
    bridge.close()


def test_members_that_cannot_be_learned_change_nothing(tmp_path, caplog: pytest.LogCaptureFixture):
    def unknown() -> list[str]:
        raise EngineError("the name has no address")

    engine = FakeHttpEngine(FakeServer(), FakeServer(number=1))
    bridge = adapters_to(engine, tmp_path, members=unknown)
    bridge.prepare(lambda: FakePolicy(lora=True))
    bridge.sync(0)
    assert engine.fleet.admitted == engine.urls and "the engines are unchanged" in caplog.text
    bridge.close()


def test_a_server_with_other_weights_is_left_out_until_it_has_the_trainers(tmp_path):
    servers = [FakeServer(number=i) for i in range(2)]
    engine = FakeHttpEngine(*servers)
    bridge: SavedBridge[FakePolicy] = SavedBridge(
        servers_of(engine, {}),
        capabilities=LoraSwapBridgeConfig.capabilities,
        directory=tmp_path / "adapters",
        keep_last=1,
        save=AdapterWriter(
            tensors=lambda policy: lora_tensors(policy.model), config=lambda policy: adapter_config(policy.model)
        ),
        load=load_adapter,
        done="%d in %.3f s",
    )
    policy = bridge.prepare(lambda: FakePolicy(lora=True))
    bridge.sync(0)
    admitted = []
    for version, corrupt in ((1, keep_old(servers[1])), (2, servers[1].corrupt)):
        servers[1].corrupt = corrupt
        with bridge.update_to(version):
            policy.step()
        admitted.append(engine.fleet.admitted)
    assert admitted == [engine.urls[:1], engine.urls]
    for server in servers:
        server.corrupt = keep_old(server)
    with pytest.raises(StaleWeights), bridge.update_to(3):
        policy.step()
    bridge.close()


def test_logs_move_while_they_are_written_and_older_ones_stay(tmp_path):
    owned, processes = build()
    writers = []
    for number, process in enumerate(processes):
        process.log_path = tmp_path / f".{number}.log"
        writers.append(process.log_path.open("a", buffering=1))
        writers[-1].write("before\n")
    target = tmp_path / "logs" / "engine.log"
    target.parent.mkdir()
    target.write_text("of the run before it was resumed")
    owned.move_log(target)
    for writer in writers:
        writer.write("after\n")
        writer.close()
    assert target.read_text() == (tmp_path / "logs" / "engine-1.log").read_text() == "before\nafter\n"
    assert (tmp_path / "logs" / "engine-before.log").read_text() == "of the run before it was resumed"
    assert processes[0].log_path == target


def test_a_log_that_cannot_be_moved_is_an_error_in_words(tmp_path):
    owned, processes = build(1)
    processes[0].log_path = tmp_path / "never written"
    with pytest.raises(EngineError, match="cannot be moved"):
        owned.move_log(tmp_path / "engine.log")
