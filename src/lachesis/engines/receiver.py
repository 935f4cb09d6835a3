"""The engine's end of weight channels, which receives updates in separate threads.

The engine generates until an update has arrived, and waits only while the update is loaded. If several trainer ranks
send, each has its own channel for its share of the tensors.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, LachesisError
from lachesis.engines.serving.backend import ReceiverSpec, ReceiverState, ReceiverStatus, Refused
from lachesis.transport.channel import Channel
from lachesis.transport.layout import ReceivedTensor, Staging, num_bytes

_JOIN_S = 600.0
# Time limit, in seconds, for a hanging trainer; the channel notices one that has gone at once.
_UPDATE_S = 600.0
# How long, in seconds, stopping waits for a join in progress.
_LEAVE_S = 10.0
# An update is staged on the GPU if this multiple of its bytes is free.
ROOM = 1.1

Connect = Callable[..., Channel]


class Receiver:
    """The channels to the senders of updates, from joining to leaving.

    One thread takes updates; :meth:`close` may be called from any thread.

    Args:
        spec: the channels and the tensors of an update.
        rank: this side's rank on each channel.
        device: device of the model's tensors.
        connect: creates a channel.
    """

    def __init__(
        self, spec: ReceiverSpec, *, rank: int, device: torch.device, connect: Connect = Channel.connect
    ) -> None:
        self.spec = spec
        self.updates = 0
        self._rank = rank
        self._state: ReceiverState = "connecting"
        self._detail = f"waiting for the trainer at {', '.join(spec.addresses)}"
        self._update: _Update | None = None
        self._room = _Room(device, spec.staging)
        self._cancel = threading.Event()
        self._lanes = [
            _Lane(
                spec.share(number), stream=_Stream(device), connect=partial(connect, **self._arguments(address, device))
            )
            for number, address in enumerate(spec.addresses)
        ]
        self._thread = threading.Thread(target=self._join, name="lachesis-join", daemon=True)
        self._thread.start()

    @property
    def status(self) -> ReceiverStatus:
        """Return the state of the receiver, with the reason."""
        return ReceiverStatus(self._state, self._detail, self.spec, self.updates)

    def look_again(self) -> None:
        """Measure free memory again before the next update, because memory of the last one was released."""
        self._room.look_again()

    def check_free(self) -> None:
        """Raise Refused (409) if this receiver is active, so that no other can be started."""
        if self._state in ("connecting", "connected"):
            raise Refused(
                f"a receiver is already {self._state}", status=409, remedy="stop it with /nccl/stop_receiver first"
            )

    def take(self, wait_s: float | None) -> Iterator[tuple[str, Tensor]] | None:
        """Begin an update if none has begun, and return its tensors in the announced order.

        The caller owns them and must load them inside :meth:`loading`. Return ``None`` if they take more than
        ``wait_s`` seconds to arrive (with ``wait_s=None``, wait for them).

        Raises:
            Refused: (409) the channels are not connected.
            EngineError, DeadlineExceeded: the update did not arrive; the channels are closed.
        """
        if self._update is None:
            if self._state != "connected":
                raise Refused(f"the receiver is {self._state}: {self._detail}", status=409, remedy="start a receiver")
            self._update = _Update(self._lanes, keep=self._room.staging_device(self.spec.tensors))
        update = self._update
        if not update.arrived.wait(wait_s):
            return None
        if update.error is not None:
            self._fail(update.error)
        return map(_for_this_stream, update.tensors([tensor.name for tensor in self.spec.tensors]))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load the tensors of :meth:`take` inside this context; afterwards the trainer is told if that succeeded.

        Raises:
            EngineError: the trainer could not be reached. The loaded weights stay.
        """
        try:
            yield
        except Exception as error:
            self._settle(error)
            raise
        self._settle()

    def close(self) -> None:
        """Leave the channels, or stop joining them. Idempotent."""
        self._cancel.set()
        self._thread.join(_LEAVE_S)
        update, self._update = self._update, None
        if update is not None:
            update.give_up("the receiver was stopped")
            update.settle(EngineError("the receiver was stopped"))
        self._close_channels()
        self._state, self._detail = "idle", ""

    def _arguments(self, address: str, device: torch.device) -> dict[str, Any]:
        return {
            "init_method": address,
            "world_size": self.spec.world_size,
            "rank": self._rank,
            "backend": self.spec.backend,
            "device": device,
            "deadline": Deadline(f"the engine: joining the weight channel at {address}", _JOIN_S),
            "cancel": self._cancel,
            "secret": self.spec.secret,
        }

    def _settle(self, failure: Exception | None = None) -> None:
        update, self._update = self._update, None
        if update is None:  # closed in the meantime; the trainer was told
            return
        update.settle(failure)
        if failure is not None:
            self._broken(str(failure))
        elif update.error is not None:
            self._fail(update.error)
        else:
            self.updates += 1

    def _join(self) -> None:
        joins = [threading.Thread(target=self._join_lane, args=(lane,), daemon=True) for lane in self._lanes]
        for join in joins:
            join.start()
        for join in joins:
            join.join()
        errors = [lane.error for lane in self._lanes if lane.error is not None]
        if errors:
            self._broken(str(errors[0]))
        elif self._cancel.is_set():
            self._close_channels()
        else:
            self._state, self._detail = "connected", f"rank {self._rank} of {self.spec.world_size}"

    def _join_lane(self, lane: _Lane) -> None:
        lane.join()
        if lane.error is not None:  # an update takes all of them
            self._cancel.set()

    def _fail(self, error: LachesisError) -> None:
        self._update = None
        self._broken(str(error))
        raise error

    def _broken(self, reason: str) -> None:
        """Close the channels after an error, so that the trainer does not keep waiting."""
        self._state, self._detail = "error", reason
        self._close_channels()

    def _close_channels(self) -> None:
        for lane in self._lanes:
            if lane.channel is not None:
                lane.channel.close()


class _Lane:
    """The channel of one sender, with its share of an update."""

    def __init__(self, tensors: Sequence[ReceivedTensor], *, stream: _Stream, connect: Callable[[], Channel]) -> None:
        self.channel: Channel | None = None
        self.error: LachesisError | None = None
        self.tensors = tensors
        self.stream = stream
        self._connect = connect

    def join(self) -> None:
        """Connect, or record the error."""
        try:
            with self.stream.entered():
                self.channel = self._connect()
        except Exception as error:
            self.error = _ours(error, "the weight channel could not be joined")


class _Update:
    """An update in transit: a thread per channel receives it, then waits for the result of loading.

    ``arrived`` is set once everything has arrived, or there is an ``error``.
    """

    def __init__(self, lanes: Sequence[_Lane], *, keep: torch.device) -> None:
        self.arrived = threading.Event()
        self.error: LachesisError | None = None
        self._lanes = lanes
        self._keep = keep
        self._shares: dict[int, Mapping[str, Tensor]] = {}
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._failure: Exception | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name="lachesis-update", daemon=True)
            for number in range(len(lanes))
        ]
        for thread in self._threads:
            thread.start()

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of these names, in this order."""
        held = {name: tensor for share in self._shares.values() for name, tensor in share.items()}
        return ((name, held[name]) for name in names)

    def give_up(self, reason: str) -> None:
        """Cancel the transfers that are still in progress."""
        for lane in self._lanes:
            if lane.channel is not None:
                lane.channel.abort(reason)

    def settle(self, failure: Exception | None) -> None:
        """Let the threads answer the trainer, and wait for them to end."""
        self._failure = self._failure or failure
        self._settled.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        deadline = Deadline("the engine: an update of the weights from the trainer", _UPDATE_S)
        lane = self._lanes[number]
        assert lane.channel is not None, "it was joined"
        try:
            with (
                lane.stream.entered(),
                lane.channel.receive(lane.tensors, deadline=deadline, keep=self._keep) as arriving,
            ):
                self._take(number, arriving)
                self._settled.wait()
                if self._failure is not None:
                    raise self._failure
        except Exception as error:
            self._note_failure(_ours(error, "an update could not be received"))

    def _take(self, number: int, arriving: Iterator[tuple[str, Tensor]]) -> None:
        """Collect the tensors of one lane, in its thread."""
        share = dict(arriving)
        self._lanes[number].stream.synchronize()
        with self._lock:
            self._shares[number] = share
            if len(self._shares) == len(self._lanes):
                self.arrived.set()

    def _note_failure(self, error: LachesisError) -> None:
        with self._lock:
            first = self.error is None
            self.error = self.error or error
            self._failure = self._failure or error
        if first:  # the other senders must not wait for this one
            self.give_up(str(error))
        self.arrived.set()
        self._settled.set()


class _Stream:
    """A CUDA stream for a background thread, so that the engine's steps do not wait for it.

    All updates share it: memory freed on a stream is reused only on that stream, so a new stream for each update would
    take new memory each time until none is left.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def entered(self) -> AbstractContextManager[object]:
        """Make this thread use the stream inside the context."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Wait for the work that this thread has queued on it."""
        if self._stream is not None:
            self._stream.synchronize()


class _Room:
    """The choice of the device on which to stage an update until it has fully arrived.

    It is the requested one, or the model's device if there is room.
    """

    def __init__(self, device: torch.device, staging: Staging) -> None:
        self._device = device
        self._staging = staging
        self._enough = False

    def look_again(self) -> None:
        """Reset the check for free memory, because memory of earlier updates was released."""
        self._enough = False

    def staging_device(self, tensors: Sequence[ReceivedTensor]) -> torch.device:
        """Return the device where an update of these tensors is kept."""
        if self._staging == "host":
            return torch.device("cpu")
        if self._device.type != "cuda" or self._staging == "device":
            return self._device
        if not self._enough:
            free, _ = torch.cuda.mem_get_info(self._device)
            # The streams keep the memory of the first update for later ones.
            self._enough = sum(map(num_bytes, tensors)) * ROOM < free
        return self._device if self._enough else torch.device("cpu")


def end_this_process() -> None:
    """Send this process SIGTERM, so that the server closes its connections and ends, and can be restarted."""
    os.kill(os.getpid(), signal.SIGTERM)


def _for_this_stream(item: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """Record that the current stream uses a tensor that was created on another stream."""
    if item[1].is_cuda:
        item[1].record_stream(torch.cuda.current_stream(item[1].device))
    return item


def _ours(error: Exception, what: str) -> LachesisError:
    return error if isinstance(error, LachesisError) else EngineError(f"{what}: {type(error).__name__}: {error}")
