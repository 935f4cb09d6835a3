from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lachesis.common.errors import EngineError
from lachesis.engines.receiver import Receiver
from lachesis.engines.receiver import _Room as Room
from lachesis.engines.serving.backend import ReceiverSpec, Refused
from lachesis.transport.layout import ReceivedTensor
from tests.waiting import LONG_S

SPEC = ReceiverSpec(
    init_method="tcp://h:1", world_size=2, backend="gloo", kind="full", tensors=(ReceivedTensor("w", (3,), "float32"),)
)


class FakeChannel:
    """Sends one buffer as every tensor, once :attr:`sent` is set; keeps what the trainer would be told."""

    def __init__(self) -> None:
        self.sent = threading.Event()
        self.buffer = torch.ones(3)
        self.told: list[str] = []
        self.breaks_with: Exception | None = None
        self.closed = False
        self._aborted = ""

    @contextmanager
    def receive(self, specs: Any, *, deadline: Any, keep: torch.device):
        self.sent.wait(LONG_S)
        if self._aborted:
            raise EngineError(self._aborted)
        if self.breaks_with is not None:
            raise self.breaks_with
        try:
            yield ((spec.name, self.buffer.to(keep, copy=True)) for spec in specs)
        except Exception as error:
            self.told.append(f"failed: {error}")
            raise
        self.told.append("loaded")

    def abort(self, reason: str) -> None:
        self._aborted = reason
        self.sent.set()

    def close(self) -> None:
        self.closed = True


def connected(channel: FakeChannel) -> Receiver:
    receiver = Receiver(SPEC, rank=1, device=torch.device("cpu"), connect=lambda **_: channel)
    receiver._thread.join(LONG_S)
    assert receiver.status.state == "connected"
    return receiver


def taken(receiver: Receiver) -> dict[str, torch.Tensor]:
    tensors = receiver.take(LONG_S)
    assert tensors is not None
    return dict(tensors)


@pytest.mark.parametrize(("staging", "where"), [("device", "cuda"), ("host", "cpu")])
def test_where_an_update_is_kept_aside_may_be_asked_for(staging, where, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("nobody is to look"))
    assert Room(torch.device("cuda", 0), staging).staging_device(SPEC.tensors).type == where


def test_where_an_update_is_kept_aside_is_found_out_anew_once_its_memory_was_given_back(monkeypatch):
    free = [1000]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1000))
    room = Room(torch.device("cuda", 0), "auto")
    assert room.staging_device(SPEC.tensors).type == "cuda"
    free[0] = 0
    assert room.staging_device(SPEC.tensors).type == "cuda", "what the first one took stays"
    room.look_again()
    assert room.staging_device(SPEC.tensors).type == "cpu"


def test_joining_goes_on_in_the_background_and_can_be_stopped():
    asked: dict[str, Any] = {}

    def connect(**arguments: Any) -> Any:
        asked.update(arguments)
        arguments["cancel"].wait(LONG_S)
        raise EngineError("given up")

    receiver = Receiver(SPEC, rank=4, device=torch.device("cpu"), connect=connect)
    assert receiver.status.state == "connecting" and "tcp://h:1" in receiver.status.detail
    with pytest.raises(Refused) as caught:
        receiver.take(0.0)
    assert caught.value.status == 409
    receiver.close()
    assert receiver.status.state == "idle" and asked["rank"] == 4 and asked["world_size"] == 2


@pytest.mark.parametrize("error", [EngineError("nobody there"), OSError("nobody there")])
def test_joining_that_fails_is_an_error_with_its_reason(error):
    def connect(**_: Any) -> Any:
        raise error

    receiver = Receiver(SPEC, rank=1, device=torch.device("cpu"), connect=connect)
    receiver._thread.join(LONG_S)
    assert receiver.status.state == "error" and "nobody there" in receiver.status.detail
    receiver.close()


def test_an_update_is_a_copy_and_the_trainer_hears_of_it_once_it_is_loaded():
    channel = FakeChannel()
    receiver = connected(channel)
    assert receiver.take(0.0) is None
    channel.sent.set()
    tensors = taken(receiver)
    channel.buffer.zero_()
    assert tensors["w"].tolist() == [1, 1, 1] and channel.told == []
    with receiver.loading():
        assert channel.told == []
    assert channel.told == ["loaded"] and receiver.updates == 1 and receiver.status.state == "connected"
    assert receiver.take(LONG_S) is not None
    receiver.close()


def test_a_failure_to_load_reaches_the_trainer():
    channel = FakeChannel()
    channel.sent.set()
    receiver = connected(channel)
    receiver.take(LONG_S)
    with pytest.raises(EngineError, match="does not fit"), receiver.loading():
        raise EngineError("it does not fit")
    assert channel.told == ["failed: it does not fit"] and channel.closed
    assert (receiver.status.state, receiver.updates) == ("error", 0) and "does not fit" in receiver.status.detail
    with pytest.raises(Refused, match="does not fit"):
        receiver.take(0.0)


@pytest.mark.parametrize("error", [EngineError("the trainer died"), RuntimeError("the trainer died")])
def test_an_update_that_breaks_off_closes_the_channel(error):
    channel = FakeChannel()
    channel.breaks_with = error
    channel.sent.set()
    receiver = connected(channel)
    with pytest.raises(EngineError, match="the trainer died"):
        receiver.take(LONG_S)
    assert receiver.status.state == "error" and channel.closed


def test_stopping_ends_an_update_that_has_not_come():
    channel = FakeChannel()
    receiver = connected(channel)
    assert receiver.take(0.0) is None
    receiver.close()
    receiver.close()
    assert channel.closed and receiver.status.state == "idle" and channel.told == []


def test_stopping_ends_an_update_that_was_not_loaded():
    channel = FakeChannel()
    channel.sent.set()
    receiver = connected(channel)
    assert receiver.take(LONG_S) is not None
    receiver.close()
    assert channel.told == ["failed: the receiver was stopped"]


def both(*channels: FakeChannel) -> Receiver:
    """A receiver of two senders, each of one tensor."""
    tensors = (ReceivedTensor("w", (3,), "float32"), ReceivedTensor("v", (3,), "float32"))
    update = {"tensors": tensors, "senders": ("tcp://h:2",), "sender_of": (1, 0)}
    spec = SPEC.model_copy(update=update)
    by_address = dict(zip(spec.addresses, channels, strict=True))
    receiver = Receiver(
        spec, rank=1, device=torch.device("cpu"), connect=lambda init_method, **_: by_address[init_method]
    )
    receiver._thread.join(LONG_S)
    return receiver


def test_an_update_of_two_senders_is_there_once_both_shares_are():
    first, second = FakeChannel(), FakeChannel()
    second.buffer *= 2
    receiver = both(first, second)
    first.sent.set()
    assert receiver.take(0.05) is None
    second.sent.set()
    tensors = taken(receiver)
    assert [(name, tensor.tolist()) for name, tensor in tensors.items()] == [("w", [2, 2, 2]), ("v", [1, 1, 1])]
    with receiver.loading():
        assert first.told == second.told == []
    assert first.told == second.told == ["loaded"] and receiver.updates == 1
    receiver.close()
    assert first.closed and second.closed


@pytest.mark.parametrize("other_arrives", [True, False])
def test_a_share_that_breaks_off_ends_the_others(other_arrives: bool):
    first, second = FakeChannel(), FakeChannel()
    receiver = both(first, second)
    assert receiver.take(0.0) is None
    if other_arrives:
        second.sent.set()
    first.breaks_with = EngineError("the trainer died")
    first.sent.set()
    with pytest.raises(EngineError, match="the trainer died"):
        receiver.take(LONG_S)
    for thread in threading.enumerate():
        if thread.name == "lachesis-update":
            thread.join(LONG_S)
    assert "loaded" not in first.told + second.told and first.closed and second.closed


def test_where_one_sender_cannot_be_joined_the_others_are_left():
    channel, cancelled = FakeChannel(), threading.Event()

    def connect(init_method: str, cancel: threading.Event, **_: Any) -> Any:
        if init_method.endswith(":2"):
            raise EngineError("nobody there")
        assert cancel.wait(LONG_S)
        cancelled.set()
        return channel

    spec = SPEC.model_copy(update={"senders": ("tcp://h:2",), "sender_of": (0,)})
    receiver = Receiver(spec, rank=1, device=torch.device("cpu"), connect=connect)
    receiver._thread.join(LONG_S)
    assert cancelled.is_set() and channel.closed
    assert receiver.status.state == "error" and "nobody there" in receiver.status.detail
