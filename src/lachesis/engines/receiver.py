"""An engine's end of a weight channel: it joins and takes updates in threads of its own.

So the engine goes on generating until all of an update is there, and is held up only by loading it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, LachesisError
from lachesis.engines.serving.served import ReceiverSpec, ReceiverState, ReceiverStatus, Refused
from lachesis.transport.channel import Channel
from lachesis.transport.layout import num_bytes

_JOIN_S = 600.0
# The channel notices at once when the trainer has gone; this is for one that hangs.
_UPDATE_S = 600.0
# How long stopping waits for a join that is under way, and is then given up.
_LEAVE_S = 10.0

Connect = Callable[..., Channel]


class Receiver:
    """One channel, from joining to leaving. One thread takes updates; :meth:`close` may come from any.

    Args:
        spec: the channel and the tensors of an update.
        rank: of this side on the channel.
        device: where the tensors of the model live.
        connect: makes the channel.
    """

    def __init__(
        self, spec: ReceiverSpec, *, rank: int, device: torch.device, connect: Connect = Channel.connect
    ) -> None:
        self.spec = spec
        self.updates = 0
        self._rank = rank
        self._device = device
        self._connect = connect
        self._state: ReceiverState = "connecting"
        self._detail = f"waiting for the trainer at {spec.init_method}"
        self._channel: Channel | None = None
        self._update: _Update | None = None
        self._beside = _Beside(device)
        self._cancel = threading.Event()
        self._thread = threading.Thread(target=self._join, name="lachesis-join", daemon=True)
        self._thread.start()

    @property
    def status(self) -> ReceiverStatus:
        """Where it stands, and why."""
        return ReceiverStatus(self._state, self._detail, self.spec, self.updates)

    def look_again(self) -> None:
        """What the last update took on the device was given back: the next one finds out anew where there is room."""
        self._beside.look_again()

    def check_free(self) -> None:
        """Raise Refused (409) while this receiver keeps another from being started."""
        if self._state in ("connecting", "connected"):
            raise Refused(
                f"a receiver is {self._state} already", status=409, remedy="stop it with /nccl/stop_receiver first"
            )

    def take(self, wait_s: float | None) -> Mapping[str, Tensor] | None:
        """Begin an update if none has begun; its tensors, the caller's own, or ``None`` if more than ``wait_s``
        seconds are needed (``None`` waits for them). Once there are tensors, they are to be loaded
        inside of :meth:`loading`.

        Raises:
            Refused: (409) the channel is not connected.
            EngineError, DeadlineExceeded: the update did not arrive; the channel is closed.
        """
        if self._update is None:
            channel = self._channel
            if channel is None or self._state != "connected":
                raise Refused(f"the receiver is {self._state}: {self._detail}", status=409, remedy="start a receiver")
            self._update = _Update(channel, self.spec, beside=self._beside)
        update = self._update
        if not update.arrived.wait(wait_s):
            return None
        if update.error is not None:
            self._fail(update.error)
        for tensor in update.tensors.values():
            if tensor.is_cuda:  # made on another stream than the caller's
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return update.tensors

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load what :meth:`take` has given inside; the trainer is told that it was, or why it was not.

        Raises:
            EngineError: the trainer could not be told. What was loaded stays.
        """
        try:
            yield
        except Exception as error:
            self._settle(error)
            raise
        self._settle()

    def close(self) -> None:
        """Leave the channel, or give up joining it. Idempotent."""
        self._cancel.set()
        self._thread.join(_LEAVE_S)
        update, self._update = self._update, None
        if update is not None and self._channel is not None:
            self._channel.abort("the receiver was stopped")
            update.settle(EngineError("the receiver was stopped"))
        if self._channel is not None:
            self._channel.close()
        self._state, self._detail = "idle", ""

    def _settle(self, failure: Exception | None = None) -> None:
        update, self._update = self._update, None
        if update is None:  # closed meanwhile, and the trainer told so
            return
        update.settle(failure)
        if failure is not None:
            self._close_channel(str(failure))
        elif update.error is not None:
            self._fail(update.error)
        else:
            self.updates += 1

    def _join(self) -> None:
        try:
            with self._beside.entered():
                self._channel = self._connect(
                    init_method=self.spec.init_method,
                    world_size=self.spec.world_size,
                    rank=self._rank,
                    backend=self.spec.backend,
                    device=self._device,
                    deadline=Deadline(f"the engine: joining the weight channel at {self.spec.init_method}", _JOIN_S),
                    cancel=self._cancel,
                    secret=self.spec.secret,
                )
            if self._cancel.is_set():
                self._channel.close()
                return
            self._state, self._detail = "connected", f"rank {self._rank} of {self.spec.world_size}"
        except Exception as error:
            self._state, self._detail = "error", str(_ours(error, "the weight channel could not be joined"))

    def _fail(self, error: LachesisError) -> None:
        self._update = None
        self._close_channel(str(error))
        raise error

    def _close_channel(self, reason: str) -> None:
        """The trainer is not to wait for what will not come."""
        self._state, self._detail = "error", reason
        if self._channel is not None:
            self._channel.close()


class _Update:
    """One update: taken off the channel in a thread, which then waits to be told how loading went."""

    def __init__(self, channel: Channel, spec: ReceiverSpec, *, beside: _Beside) -> None:
        self.arrived = threading.Event()
        self.tensors: Mapping[str, Tensor] = {}
        self.error: LachesisError | None = None
        self._channel = channel
        self._spec = spec
        self._beside = beside
        self._settled = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lachesis-update", daemon=True)
        self._thread.start()

    def settle(self, failure: Exception | None) -> None:
        """Let the thread answer the trainer, and wait for its end."""
        self._failure = failure
        self._settled.set()
        self._thread.join()

    def _run(self) -> None:
        deadline = Deadline("the engine: an update of the weights from the trainer", _UPDATE_S)
        try:
            with (
                self._beside.entered(),
                self._channel.receive(
                    self._spec.tensors, deadline=deadline, keep=self._beside.staging_device(self._spec)
                ) as arriving,
            ):
                self.tensors = dict(arriving)
                if self._beside.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
                self.arrived.set()
                self._settled.wait()
                if self._failure is not None:
                    raise self._failure
        except Exception as error:
            self.error = _ours(error, "an update could not be received")
        finally:
            self.arrived.set()


class _Beside:
    """For threads beside the engine's: its device, and a stream that the engine's steps do not wait for.

    The stream is one for all updates: memory that was freed on it is used again on it only, and a new stream for
    each update would take new memory for each until none is left.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._has_room = False

    def entered(self) -> AbstractContextManager[object]:
        """Within it, this thread works on that stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def look_again(self) -> None:
        """The memory of the updates before is gone."""
        self._has_room = False

    def staging_device(self, spec: ReceiverSpec) -> torch.device:
        """An update is kept aside until all of it is there: on the model's device where it has the room."""
        if self.device.type != "cuda":
            return self.device
        if not self._has_room:
            size = sum(map(num_bytes, spec.tensors))
            free, _ = torch.cuda.mem_get_info(self.device)
            # What the first update took stays with the stream for the next ones.
            self._has_room = size * 1.1 < free
        return self.device if self._has_room else torch.device("cpu")


def _ours(error: Exception, what: str) -> LachesisError:
    return error if isinstance(error, LachesisError) else EngineError(f"{what}: {type(error).__name__}: {error}")
