"""The engine's end of a weight channel: joined in the background, read when asked."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, LachesisError
from lachesis.engines.serving.served import ReceiverSpec, ReceiverState, ReceiverStatus, Refused
from lachesis.transport.channel import Channel

_JOIN_S = 300.0
_UPDATE_S = 600.0


class Receiver:
    """At most one channel at a time. Thread-safe; methods block, except :meth:`start` and :attr:`status`."""

    def __init__(self, *, device: torch.device | str) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._state: ReceiverState = "idle"
        self._detail = ""
        self._spec: ReceiverSpec | None = None
        self._channel: Channel | None = None
        self._cancel = threading.Event()
        self._joining: threading.Thread | None = None
        self._updates = 0

    @property
    def status(self) -> ReceiverStatus:
        """Where the receiver stands."""
        return ReceiverStatus(self._state, self._detail, self._spec, self._updates)

    def start(self, spec: ReceiverSpec) -> None:
        """Join the channel in the background. Refused (409) where one is connected or being joined."""
        with self._lock:
            if self._state in ("connecting", "connected"):
                raise Refused(
                    f"a receiver is {self._state} already", status=409, remedy="stop it with /nccl/stop_receiver first"
                )
            self._leave()
            self._state, self._detail, self._spec, self._updates = "connecting", "", spec, 0
            self._cancel = threading.Event()
            self._joining = threading.Thread(
                target=self._join, args=(spec, self._cancel), name="weight-channel", daemon=True
            )
            self._joining.start()

    def receive(self) -> tuple[dict[str, Tensor], ReceiverSpec]:
        """Wait for one update and return all of its tensors, as copies.

        Raises:
            Refused: (409) no channel is connected.
            EngineError, DeadlineExceeded: it did not arrive whole; see :meth:`Channel.receive`.
        """
        with self._lock:
            channel, spec = self._channel, self._spec
            if channel is None or spec is None or self._state != "connected":
                detail = f": {self._detail}" if self._detail else ""
                raise Refused(
                    f"the receiver is {self._state}{detail}", status=409, remedy="start it with /nccl/start_receiver"
                )
        deadline = Deadline("the engine's wait for an update of the weights", _UPDATE_S)
        try:
            with channel.receive(spec.tensors, deadline=deadline) as tensors:
                copies = {name: view.clone() for name, view in tensors}
        except LachesisError as error:
            with self._lock:
                if self._channel is channel:
                    self._state, self._detail = "error", str(error)
            raise
        self._updates += 1
        return copies, spec

    def stop(self) -> None:
        """Leave the channel, or give up joining it. A call of :meth:`receive` ends with an error. Idempotent."""
        with self._lock:
            self._cancel.set()
            joining = self._joining
            if self._channel is not None:
                self._channel.abort("the receiver was stopped")
        if joining is not None:
            joining.join(timeout=10)
        with self._lock:
            self._leave()
            self._state, self._detail, self._spec = "idle", "", None

    def _join(self, spec: ReceiverSpec, cancel: threading.Event) -> None:
        try:
            channel = Channel.connect(
                init_method=spec.init_method,
                world_size=spec.world_size,
                rank=spec.rank,
                backend=spec.backend,
                device=self._device,
                deadline=Deadline(f"joining the weight channel at {spec.init_method}", _JOIN_S),
                cancel=cancel,
            )
        except LachesisError as error:
            self._failed(error, cancel)
            return
        except Exception as error:
            self._failed(EngineError(f"joining {spec.init_method} failed: {type(error).__name__}: {error}"), cancel)
            return
        with self._lock:
            if cancel.is_set():
                channel.close()
                return
            self._channel, self._state = channel, "connected"

    def _failed(self, error: LachesisError, cancel: threading.Event) -> None:
        with self._lock:
            if not cancel.is_set():
                self._state, self._detail = "error", str(error)

    def _leave(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._joining = None
