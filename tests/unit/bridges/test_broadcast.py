"""Weights over a channel into running servers, with real channels, and every stage failing."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lachesis.bridges import broadcast
from lachesis.bridges.broadcast import BroadcastBridge, TravellingWeights, full_source, lora_source, travelling
from lachesis.bridges.senders import SenderRanks
from lachesis.bridges.sent_weights import as_they_are, lora_tensors
from lachesis.common.errors import DeadlineExceeded, EngineError, StaleWeights
from lachesis.engines.fleet import State
from lachesis.engines.serving.backend import Refused, TransferKind
from lachesis.transport.bridge_file import CHANNEL_FILE
from lachesis.transport.layout import plan_buckets
from lachesis.transport.partners import PartnerLine, SendPacked, pack_beside
from lachesis.transport.rendezvous import listen
from lachesis.transport.transports import SharedRoom
from tests.sender_ranks import ThreadRanks
from tests.unit.bridges.fake_engine import (
    FakeHttpEngine,
    FakePolicy,
    FakeServer,
    MergedPolicy,
    drop_one,
    keep_old,
    read,
    servers_of,
    swap_two,
)
from tests.unit.transport.test_partners import FakeLine
from tests.waiting import LONG_S


class Built:
    def __init__(self, tmp_path: Path, *, kind: str = "lora", servers: Any = None, **options: Any) -> None:
        self.servers = servers or [FakeServer()]
        make = lora_source if kind == "lora" else full_source
        options = {"source": make(lambda policy: policy.model), "sync_s": 20.0} | options
        self.bridge: BroadcastBridge[FakePolicy] = BroadcastBridge(
            servers_of(FakeHttpEngine(*self.servers), options),
            backend=options.pop("backend", "gloo"),
            device="cpu",
            directory=tmp_path,
            **options,
        )
        policy = FakePolicy if kind == "lora" else MergedPolicy
        self.policy: FakePolicy = self.bridge.prepare(lambda: policy(lora=kind != "full"))

    @property
    def server(self) -> FakeServer:
        return self.servers[0]

    def update(self, version: int) -> None:
        with self.bridge.update_to(version):
            self.policy.step()

    def check_served(self, version: int) -> None:
        for server in self.servers:
            assert server.version == version
            assert server.tensors.keys() == self.policy.travelling().keys()
            assert read(server.tensors) == read(self.policy.travelling())


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Built] = []

    def build(**options: Any) -> Built:
        made.append(Built(tmp_path, **options))
        return made[-1]

    yield build
    for built in made:
        built.bridge.close()


@pytest.mark.parametrize("kind", ["lora", "full", "merged"])
def test_the_engine_has_the_new_weights_after_each_update(make, caplog, kind: str):
    built = make(kind=kind)
    with caplog.at_level(logging.INFO):
        built.bridge.sync(0)
        for version in (1, 2):
            built.update(version)
            built.check_served(version)
    assert built.server.calls.count("start_receiver") == 1, "one channel for all updates"
    assert caplog.text.count("[NCCL] Weights synced in") == 3
    assert built.bridge.capabilities.adapter_only == (kind == "lora")


@pytest.mark.parametrize("staging", ["device", "host"])
def test_engines_are_told_where_to_keep_an_update_aside(make, staging: str):
    built = make(kind="full", staging=staging, servers=[FakeServer(number=0, workers=2), FakeServer(number=1)])
    for version in (1, 2):
        built.policy.step()
        built.bridge.sync(version)
        for server in built.servers:
            assert server._status.spec is not None and server._status.spec.staging == staging
            assert server.version == version and read(server.tensors) == built.policy.canary(())


def test_several_servers_with_several_workers_each(make):
    built = make(servers=[FakeServer(workers=2), FakeServer(number=1)])
    built.bridge.sync(0)
    built.update(1)
    built.check_served(1)


@pytest.mark.parametrize("call", ["info", "start_receiver", "joining", "receive", "loading"])
def test_a_server_that_dies_in_a_transfer_is_left_out_and_the_others_have_the_weights(make, call: str):
    built = make(servers=[FakeServer(), FakeServer(number=1), FakeServer(number=2)])
    if call in ("receive", "loading"):
        built.bridge.sync(0)
    built.servers[1].dies_in = call
    built.update(1)
    assert built.servers.pop(1).version == 0
    built.check_served(1)
    built.update(2)
    built.check_served(2)


class Beside:
    """A second rank of the trainer's, which packs what workers beside it read. ``events`` are what has happened."""

    def __init__(self) -> None:
        self.room = SharedRoom(torch.device("cpu"))
        self.rooms: list[bool] = []
        self.events: list[str] = []

    def pack_buckets(
        self, policy: FakePolicy, kind: TransferKind, saved: bool, bucket_bytes: int, anew: bool, *, send: SendPacked
    ) -> None:
        self.rooms.append(anew)
        self.events.append("pack")
        if anew:
            self.room.close()
        source = travelling(kind, as_they_are)
        specs, line = source.specs(policy, saved), FakeLine()
        options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "room": self.room, "line": line.partner}
        partners = PartnerLine(line, left=len(plan_buckets(specs, limit_bytes=bucket_bytes)))
        with ThreadPoolExecutor(1) as pool:
            packing = pool.submit(pack_beside, source.tensors(policy, saved), specs, **options)
            try:
                send(iter(source.tensors(policy, saved)), partners)
            finally:
                partners.stop()
                packing.result(LONG_S)


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.room.close()


def test_workers_read_what_the_ranks_beside_them_pack_and_others_go_on_where_one_dies(make, caplog, beside: Beside):
    servers = [FakeServer(), FakeServer(number=1)]
    with caplog.at_level(logging.INFO, logger="lachesis"):
        built = make(kind="merged", servers=servers, backend="ipc", pack_buckets=beside.pack_buckets)
        built.bridge.sync(0)
        built.update(1)
    built.check_served(1)
    assert caplog.text.count("in place, on their own GPUs: 1 of rank 0, 2 of rank 1") == 1
    assert beside.rooms == [True, False], "the same memory for all updates of a channel"
    servers[0].dies_in = "loading"
    built.update(2)
    assert beside.rooms[2:] == [False, True]
    assert (servers.pop(0).version, servers[0].version) == (1, 2)
    built.check_served(2)


def test_an_engine_beside_the_ranks_sleeps_while_they_train_and_wakes_in_parts(make, beside: Beside):
    """In this order on all ranks; the server refuses what it is asked while its memory is not there."""
    server = FakeServer()
    server.calls = beside.events  # type: ignore[assignment]
    sleeping: dict[str, Any] = {"sleep_level": 2, "make_room": lambda policy: beside.events.append("make room")}
    built = make(kind="full", servers=[server], backend="ipc", pack_buckets=beside.pack_buckets, **sleeping)
    built.bridge.sync(0)
    beside.events.clear()
    built.bridge.rest()
    assert server.asleep == {"weights", "kv_cache"} and not server.tensors
    beside.events.append("train")
    built.update(1)
    built.check_served(1)
    told = [event for event in beside.events if event not in ("info", "receiver_status", "loading")]
    order = ["sleep", "train", "make room", "wake_up", "pack", "receive", "make room", "wake_up", "canary"]
    assert [event for event in told if event not in ("pack", "receive")] == [
        e for e in order if e not in ("pack", "receive")
    ]
    assert set(told[4:6]) == {"pack", "receive"}, "side by side"


def test_the_channel_is_recorded_in_the_documented_file(make, tmp_path):
    built = make()
    built.bridge.sync(0)
    file = json.loads((tmp_path / CHANNEL_FILE).read_text())
    assert file["init_method"].startswith("tcp://127.0.0.1:")
    assert (file["world_size"], file["backend"], file["session_id"]) == (2, "gloo", "session-0")
    assert file["param_metadata"]["param_names"] == list(lora_tensors(built.policy.model))


def test_only_every_nth_version_travels(make):
    built = make(every_steps=2)
    built.bridge.sync(0)
    for version in (1, 2, 3):
        built.update(version)
    assert built.server.version == 2
    assert built.server.calls.count("receive") == 2


def test_a_server_that_refuses_the_receiver_is_named(make):
    built = make()
    built.server.faults["start_receiver"] = Refused("target module 'x_proj' is unknown", status=422, remedy="train y")
    with pytest.raises(
        EngineError, match=r"Failed to start NCCL receiver on vLLM \(http.*'x_proj' is unknown"
    ) as caught:
        built.bridge.sync(0)
    assert caught.value.remedy == "train y"
    built.bridge.sync(0)
    built.check_served(0)


def test_a_worker_that_cannot_join_ends_the_wait_at_once(make):
    built = make()
    built.server.faults["joining"] = EngineError("no route to host")
    with pytest.raises(EngineError, match=r"vLLM NCCL setup failed on http.*no route to host"):
        built.bridge.sync(0)
    built.bridge.sync(0)
    built.check_served(0)


def test_a_taken_port_is_an_error_in_words(make):
    rendezvous = listen("tcp://127.0.0.1:0")
    built = make(init_method=rendezvous.init_method)
    with (
        rendezvous.listener,
        pytest.raises(EngineError, match=r"Failed to setup NCCL bridge: .*cannot listen at") as caught,
    ):
        built.bridge.sync(0)
    assert "port" in caught.value.remedy
    for version in (0, 1):  # the same port serves each new channel
        built.bridge.sync(version)
        built.check_served(version)
        built.server.faults["receive"] = EngineError("not now")
        with pytest.raises(EngineError, match="not now"):
            built.update(version + 1)


def test_a_server_that_fails_to_receive_ends_the_sending_with_its_reason(make):
    built = make()
    built.bridge.sync(0)
    old = read(built.server.tensors)
    built.server.faults["receive"] = EngineError("the engine is asleep", remedy="wake it up")
    with pytest.raises(EngineError, match="the engine is asleep") as caught:
        built.update(1)
    assert caught.value.remedy == "wake it up"
    assert (built.server.version, read(built.server.tensors)) == (0, old)
    built.update(2)
    built.check_served(2)
    assert built.server.calls.count("start_receiver") == 2, "a new channel after a failure"


def test_an_engine_with_weights_of_two_versions_is_reported(make):
    built = make(kind="full")
    built.bridge.sync(1)
    built.server.faults["receive"] = StaleWeights("it broke off")
    with pytest.raises(StaleWeights, match="it broke off"):
        built.bridge.sync(2)


def test_a_worker_that_fails_to_load_is_reported(make):
    built = make()
    built.bridge.sync(0)
    built.server.faults["loading"] = EngineError("no module of this name")
    with pytest.raises(EngineError, match="no module of this name"):
        built.update(1)
    assert built.server.version == 0
    built.update(2)
    built.check_served(2)


def test_an_error_while_weights_are_made_ends_the_receiving(make):
    fail = False

    def tensors(policy: FakePolicy, saved: bool) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in lora_tensors(policy.model).items():
            if fail:
                raise EngineError("a rank is gone")
            yield name, tensor

    whole: TravellingWeights[FakePolicy] = lora_source(lambda policy: policy.model)
    built = make(source=TravellingWeights(whole.capabilities, "lora", whole.specs, tensors, whole.lora))
    built.bridge.sync(0)
    fail = True
    with pytest.raises(EngineError, match=r"weight version 1 was not sent: a rank is gone.*the servers say"):
        built.update(1)
    fail = False
    assert built.server.version == 0
    built.update(2)
    built.check_served(2)


@pytest.mark.parametrize("call", ["start_receiver", "joining", "receive", "loading"])
def test_a_server_that_fails_in_a_transfer_is_dead_and_the_others_have_the_weights(make, caplog, call: str):
    built = make(servers=[FakeServer(), FakeServer(number=1), FakeServer(number=2)])
    if call in ("receive", "loading"):
        built.bridge.sync(0)
    failing = built.servers[1]
    failing.faults[call] = EngineError("no memory for an update")
    with caplog.at_level(logging.WARNING):
        built.update(1)
    assert "goes to the remaining engines" in caplog.text and "no memory for an update" in caplog.text
    assert failing.version == 0 and built.bridge.engine.fleet.state(failing.url) is State.DEAD
    assert "no memory for an update" in built.bridge.engine.fleet.reason(failing.url)
    assert [server.version for server in built.servers] == [1, 0, 1]
    built.update(2)  # it is met again, and takes part
    built.check_served(2)


@pytest.mark.parametrize("call", ["start_receiver", "receive"])
def test_what_two_servers_fail_with_is_no_fault_of_theirs(make, call: str):
    built = make(servers=[FakeServer(number=number) for number in range(4)])
    if call == "receive":
        built.bridge.sync(0)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise EngineError("engines know no such tensor")

    for server in built.servers:
        setattr(server, call, refuse)
    with pytest.raises(EngineError, match="engines know no such tensor"):
        built.update(1)
    assert len(built.bridge.engine.living) == 3, "one was taken for the culprit"
    for server in built.servers:
        delattr(server, call)
    built.update(2)
    built.check_served(2)


def test_a_server_that_hangs_in_a_transfer_is_dead_and_the_others_have_the_weights(make, monkeypatch):
    monkeypatch.setattr(broadcast, "_LAST_WORD_S", 1.0)
    built = make(servers=[FakeServer(), FakeServer(number=1), FakeServer(number=2)])
    built.bridge.sync(0)
    hanging = built.servers[1]
    hanging.goes_on.clear()
    built.bridge._sync_s = 2.0
    built.update(1)
    assert [server.version for server in built.servers] == [1, 0, 1]
    assert built.bridge.engine.fleet.state(hanging.url) is State.DEAD
    assert "does not answer" in built.bridge.engine.fleet.reason(hanging.url)
    hanging.goes_on.set()
    built.bridge._sync_s = LONG_S
    built.update(2)
    built.check_served(2)


@pytest.mark.parametrize("connected", [True, False])
def test_a_server_that_is_given_up_in_a_transfer_is_waited_for_no_longer(make, connected: bool):
    built = make(servers=[FakeServer(), FakeServer(number=1), FakeServer(number=2)])
    built.bridge.sync(0)
    stopped, fleet = built.servers[1], built.bridge.engine.fleet
    if not connected:
        built.bridge._disconnect()
    stopped.goes_on.clear()
    threading.Timer(0.5, fleet.given_up, (stopped.url, "it is stopped by a signal")).start()
    built.update(1)
    assert [server.version for server in built.servers] == [1, 0, 1]
    assert (fleet.state(stopped.url), fleet.reason(stopped.url)) == (State.DEAD, "it is stopped by a signal")
    stopped.goes_on.set()
    built.update(2)
    built.check_served(2)


def test_a_transfer_that_is_slow_for_all_servers_ends_at_its_deadline(make, monkeypatch):
    built = make(servers=[FakeServer(), FakeServer(number=1)], sync_s=LONG_S)
    built.bridge.sync(0)
    built.bridge._sync_s = 0.5
    for server in built.servers:
        server.receive = lambda version, deadline: wait_out(deadline)
    with pytest.raises(DeadlineExceeded, match=r"the transfer of weight version 1 "):
        built.update(1)
    assert len(built.bridge.engine.living) == 2


def test_a_server_that_never_receives_ends_at_the_deadline(make):
    built = make(sync_s=LONG_S)
    built.bridge.sync(0)
    built.bridge._sync_s = 0.3
    built.server.receive = lambda version, deadline: wait_out(deadline)
    with pytest.raises(DeadlineExceeded, match=r"the transfer of weight version 1 .*has not"):
        built.update(1)


def wait_out(deadline: Any) -> None:
    """As an HTTP call that gets no answer. The trainer is to be the first to say so, on a busy machine too."""
    threading.Event().wait(deadline.remaining_s() + 1.0)
    deadline.check("no answer")


def test_a_server_of_another_session_is_not_connected_to(make):
    built = make()
    built.bridge.sync(0)
    built.server.faults["receive"] = EngineError("the server died")
    with pytest.raises(EngineError, match="died"):
        built.update(1)
    built.server.session_id = "somebody else's"
    with pytest.raises(StaleWeights, match="has session somebody else's, but this run works with session-0"):
        built.update(2)


def test_an_engine_that_was_started_again_gets_a_new_channel_and_proof(make):
    built = make()
    built.bridge.sync(0)
    built.update(1)
    built.server.stop_receiver(deadline=None)
    built.server.restarted()
    built.bridge.engine.connect(deadline=None)
    built.bridge.renew()
    built.bridge.sync(1)
    built.check_served(1)
    assert built.server.calls.count("start_receiver") == 2


@pytest.mark.parametrize("corruption", ["drop one", "swap two", "keep old"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_what_does_not_arrive_is_stale_weights(make, kind: str, corruption: str):
    built = make(kind=kind)
    built.bridge.sync(0)
    faults = {"drop one": drop_one, "swap two": swap_two, "keep old": keep_old(built.server)}
    built.server.corrupt = faults[corruption]
    with pytest.raises(StaleWeights):
        built.update(1)


def test_closing_stops_the_receivers_and_may_be_repeated(make):
    built = make()
    built.bridge.sync(0)
    built.bridge.close()
    built.bridge.close()
    assert built.server.calls[-1] == "stop_receiver"


class TestSeveralRanks:
    """Three of them send, as threads over one model; each to every worker of every server."""

    def build(self, make: Any, *, kind: str = "merged", servers: int = 1, workers: int = 1, ranks: int = 3) -> Any:
        held: list[ThreadRanks] = []

        def together(policy: FakePolicy) -> ThreadRanks:
            if not held:
                held.append(ThreadRanks(policy.model, ranks=ranks))
            return held[0]

        built = make(
            kind=kind,
            servers=[FakeServer(number=number, workers=workers) for number in range(servers)],
            sender_ranks=SenderRanks(together, most=8),
        )
        return built, together(built.policy)

    @pytest.mark.parametrize(("kind", "servers", "workers"), [("full", 1, 2), ("merged", 2, 1)])
    def test_each_sends_a_share_and_the_engines_have_all_of_it(self, make, kind: str, servers: int, workers: int):
        built, ranks = self.build(make, kind=kind, servers=servers, workers=workers)
        built.bridge.sync(0)
        for version in (1, 2):
            built.update(version)
            built.check_served(version)
        assert [told.step for told in ranks.told] == ["listen", "send", "send", "send"], "channels are made once"
        report = built.bridge.last_report
        assert sorted(report.ranks) == [0, 1, 2]
        total = sum(tensor.nbytes for tensor in built.policy.travelling().values())
        shares = [sent.num_bytes for sent in report.ranks.values()]
        assert sum(shares) >= total
        assert min(shares) > total / 6, "none is left with little to do"
        assert all(0 < sent.most_under_way <= sent.num_bytes for sent in report.ranks.values())
        assert len(report.engines) == (servers if servers > 1 else 0)
        assert all(0 < seconds < report.seconds for seconds in report.engines.values())

    @pytest.mark.parametrize("call", ["start_receiver", "joining", "receive", "loading"])
    def test_a_server_that_dies_in_a_transfer_is_left_out(self, make, call: str):
        built, _ = self.build(make, servers=2)
        if call in ("receive", "loading"):
            built.bridge.sync(0)
        built.servers[1].dies_in = call
        built.update(1)
        built.servers.pop(1)
        built.check_served(1)
        built.update(2)
        built.check_served(2)
        assert len(built.bridge.last_report.ranks) == 3

    @pytest.mark.parametrize("call", ["start_receiver", "joining", "receive", "loading"])
    def test_what_a_server_refuses_ends_all_of_them_with_its_reason(self, make, call: str):
        built, _ = self.build(make)
        if call in ("receive", "loading"):
            built.bridge.sync(0)
        built.server.faults[call] = EngineError("the engine is asleep")
        with pytest.raises(EngineError, match="the engine is asleep"):
            built.update(1)
        built.update(2)
        built.check_served(2)

    def test_a_rank_that_cannot_make_its_share_ends_the_transfer_with_its_reason(self, make):
        built, ranks = self.build(make)
        built.bridge.sync(0)

        def fail() -> None:
            ranks.following[1].making = lambda: None
            raise EngineError("no memory for merging")

        ranks.following[1].making = fail
        with pytest.raises(EngineError, match="no memory for merging"):
            built.update(1)
        built.update(2)
        built.check_served(2)

    def test_a_rank_that_engines_cannot_reach_sends_nothing(self, make, caplog):
        built, ranks = self.build(make)
        ranks.machine = "another one"
        with caplog.at_level(logging.WARNING):
            built.bridge.sync(0)
        built.check_served(0)
        assert "Rank 2 sends no weights: engine.urls has a loopback address" in caplog.text
        assert built.bridge.last_report.ranks == {}
