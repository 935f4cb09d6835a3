"""Inference servers in memory: they hold tensors, load adapters and checkpoints from disk and receive over a channel.

Their canary is a number for each tensor that they hold, so that a policy's and a server's agree when their tensors do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lachesis.bridges.external import Servers
from lachesis.bridges.fleet_proof import FleetProof
from lachesis.bridges.proof import EngineSays, SyncProof
from lachesis.bridges.sent_weights import full_weights, lora_tensors
from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, EngineUnreachable, LachesisError
from lachesis.common.types import CanaryReading
from lachesis.config.schema import LoraAdapterConfig
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.http.control import ServerControl, ServerInfo
from lachesis.engines.receiver import Receiver
from lachesis.engines.serving.backend import (
    MEMORY_PARTS,
    DigestRequest,
    MemoryPart,
    ModelInfo,
    ReceiverSpec,
    ReceiverStatus,
    Refused,
)
from lachesis.engines.serving.operations import Digests
from lachesis.train.model.lora import add_lora
from lachesis.transport.digest import digests
from tests.tiny import tiny_model
from tests.waiting import LONG_S

Corruption = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def read(tensors: Mapping[str, Tensor]) -> tuple[float, ...]:
    """A number for each tensor, in the order of the names."""
    return tuple(float(tensors[name].double().sum()) for name in sorted(tensors))


class FakePolicy:
    """A tiny model whose training is noise."""

    def __init__(self, *, lora: bool) -> None:
        transformer = tiny_model()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model: Any = add_lora(transformer, LoraAdapterConfig(r=4)) if lora else transformer
        self.transformer = transformer
        self._generator = torch.Generator().manual_seed(1)
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=self._generator)

    def travelling(self) -> dict[str, Tensor]:
        return lora_tensors(self.model)

    def canary(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return read(self.travelling())


class MergedPolicy(FakePolicy):
    """All of its weights travel, an adapter merged into them."""

    def travelling(self) -> dict[str, Tensor]:
        return dict(full_weights(self.model))


class FakeServer(ServerControl):
    """One server. ``faults`` maps a method's name to an error it raises, once; ``corrupt`` changes what arrives.

    ``dies_in`` is the call in which it dies; while ``goes_on`` is not set its workers take nothing, as if stopped.
    """

    def __init__(self, *, number: int = 0, workers: int = 1, engine: str = "fake") -> None:
        super().__init__(f"http://127.0.0.1:{50000 + number}", token="none")
        self.session_id = f"session-{number}"
        self.owner: str | None = None
        self.version = 0
        self.tensors: dict[str, Tensor] = {}
        self.served: Path | None = None
        self.faults: dict[str, Exception] = {}
        self.corrupt: Corruption = lambda tensors: tensors
        self.calls: list[str] = []
        self.workers = workers
        self.engine = engine
        self.asleep: set[MemoryPart] = set()
        self.gone = False
        self.dies_in = ""
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._status = ReceiverStatus()
        self._receivers: list[Receiver] = []

    def info(self, *, deadline: Deadline) -> ServerInfo:
        self._begin("info")
        model = ModelInfo(
            model="tiny",
            served_names=("tiny",),
            dtype="float32",
            vocab_size=32,
            max_model_len=64,
            tensor_parallel_size=self.workers,
            device="cpu",
            lora_enabled=True,
            max_lora_rank=16,
        )
        return ServerInfo(
            url=self.url, session_id=self.session_id, weight_version=self.version, paused=False, sleeping=False,
            owner=self.owner, engine=self.engine, pid=1, model=model,
        )  # fmt: skip

    def claim(self, owner: str, *, takeover: bool = False, deadline: Deadline) -> None:
        self._begin("claim")
        self.owner = owner

    def release(self, owner: str, *, deadline: Deadline) -> None:
        self._begin("release")
        if self.owner == owner:
            self.owner = None

    def canary(self, token_ids: Sequence[int], *, deadline: Deadline) -> CanaryReading:
        self._begin("canary")
        return CanaryReading(read(self.tensors), version=self.version, session_id=self.session_id)

    def digests(self, *arguments: Any, deadline: Deadline, **options: Any) -> Digests:
        return Digests(digests=digests(self.tensors), weight_version=self.version, session_id=self.session_id)

    def prove(self, token_ids: Sequence[int], wanted: DigestRequest, *, deadline: Deadline) -> EngineSays:
        held = digests(self.tensors) if wanted.asks else {}
        return self.canary(token_ids, deadline=deadline), held

    def load_adapter(self, path: Path, *, name: str, version: int, deadline: Deadline) -> None:
        self._begin("load_adapter")
        tensors = load_file(path / "adapter_model.safetensors")
        self._hold({n.removeprefix("base_model.model."): t for n, t in tensors.items()}, version, path)

    def reload(self, path: Path, *, version: int, deadline: Deadline) -> None:
        self._begin("reload")
        self._hold(load_checkpoint(path), version, path)

    def set_version(self, version: int, *, deadline: Deadline) -> None:
        self._begin("set_version")
        self.version = version

    def sleep(self, *, level: int = 1, deadline: Deadline) -> None:
        self._begin("sleep")
        self.asleep = set(MEMORY_PARTS)
        if level == 2:
            self.tensors = {}

    def wake_up(self, tags: Sequence[MemoryPart] = MEMORY_PARTS, *, deadline: Deadline) -> None:
        self._begin("wake_up")
        self.asleep -= set(tags)

    def restarted(self, checkpoint: Path | None = None) -> None:
        """As after a new start, on a checkpoint if there is one."""
        self.session_id += "'"
        self.gone = False
        self.owner, self.version, self.tensors, self.asleep = None, 0, {}, set()
        if checkpoint is not None:
            self._hold(load_checkpoint(checkpoint), 0, checkpoint)

    def start_receiver(self, spec: ReceiverSpec, *, deadline: Deadline) -> None:
        self._begin("start_receiver")
        if self._status.state in ("connecting", "connected"):
            raise Refused("a receiver is there already", status=409)
        self._status = ReceiverStatus("connecting", spec=spec)
        threading.Thread(target=self._connect, args=(spec,), daemon=True).start()

    def receiver_status(self, *, deadline: Deadline) -> ReceiverStatus:
        self._begin("receiver_status")
        return self._status

    def receive(self, version: int, *, deadline: Deadline) -> None:
        self._begin("receive")
        if self._status.state != "connected":
            raise Refused(f"the receiver is {self._status.state}", status=409)
        with ThreadPoolExecutor(self.workers) as workers:
            received = list(workers.map(self._take, self._receivers))
        assert len({read(tensors) for tensors in received}) == 1
        self._hold(received[0], version, None)

    def stop_receiver(self, *, deadline: Deadline) -> None:
        self._begin("stop_receiver")
        if not self.goes_on.is_set() and not self.goes_on.wait(deadline.remaining_s()):  # its workers are asked
            deadline.check("no answer")
        for receiver in self._receivers:
            receiver.close()
        self._receivers = []
        self._status = ReceiverStatus()

    def _connect(self, spec: ReceiverSpec) -> None:
        receivers: list[Receiver] = []
        try:
            self._begin("joining")
            receivers = [
                Receiver(spec, rank=spec.rank + worker, device=torch.device("cpu")) for worker in range(self.workers)
            ]
            for receiver in receivers:
                receiver._thread.join(LONG_S)
            status = next((r.status for r in receivers if r.status.state != "connected"), receivers[0].status)
        except LachesisError as error:
            status = ReceiverStatus("error", str(error))
        if self._status.spec is spec:
            self._receivers, self._status = receivers, status
        else:  # stopped meanwhile; another one may be connecting by now
            for receiver in receivers:
                receiver.close()

    def _take(self, receiver: Receiver) -> dict[str, Tensor]:
        assert self.goes_on.wait(LONG_S)
        tensors = receiver.take(None)
        assert tensors is not None
        with receiver.loading():
            found = dict(tensors)
            self._begin("loading")
        return found

    def _hold(self, tensors: dict[str, Tensor], version: int, path: Path | None) -> None:
        self.tensors = self.corrupt(dict(tensors))
        self.version = version
        self.served = path

    def die(self) -> None:
        """Answer nothing any more."""
        self.gone, self.dies_in = True, ""
        for receiver in self._receivers:
            receiver.close()

    def _begin(self, call: str) -> None:
        self.calls.append(call)
        if call == self.dies_in:
            self.die()
        if self.gone:
            raise EngineUnreachable(f"the server at {self.url} does not answer")
        if call in self.faults:
            raise self.faults.pop(call)
        needed = {
            "canary": self.asleep,
            **dict.fromkeys(("load_adapter", "reload", "receive"), {"weights"} & self.asleep),
        }
        if needed.get(call):
            raise Refused(f"while the engine is asleep there is no {call}", status=409)


class FakeHttpEngine(HttpEngine):
    """The real client over fake servers."""

    def __init__(self, *servers: FakeServer, later: Sequence[FakeServer] = ()) -> None:
        self._known = {server.url: server for server in (*servers, *later)}
        super().__init__([server.url for server in servers])
        self.servers = servers

    def _client(self, url: str) -> ServerControl:
        return self._known[url]


class FakeProcess:
    """The process behind a fake server. ``dies_at_start`` is how many of the next starts fail."""

    after = None

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.command: tuple[str, ...] = ("serve", "base")
        self.pid: int | None = None
        self.starts = 0
        self.dies_at_start = 0
        self.log_path = Path("engine.log")

    def start(self, *, deadline: Deadline) -> None:
        self.launch()
        self.wait_ready(deadline=deadline)

    @property
    def name(self) -> str:
        return f"the server at {self.server.url}"

    def launch(self) -> None:
        if self.pid is not None:
            raise EngineError("it runs already")
        self.starts += 1
        self.pid = 1000 + self.starts
        checkpoint = Path(self.command[1])
        self.server.restarted(checkpoint if checkpoint.is_absolute() else None)

    def wait_ready(self, *, deadline: Deadline) -> None:
        if self.dies_at_start:
            self.dies_at_start, self.pid = self.dies_at_start - 1, None
            raise EngineError("the server died; the end of its log: out of memory")

    def stop(self) -> None:
        self.pid = None


def load_checkpoint(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def build_proof(policy: FakePolicy, engine: HttpEngine) -> FleetProof:
    """Exact: canary within 1e-6 and digests of every tensor."""
    _ = engine.session_ids  # of the first contact, or the one after a restart

    def proof_of(control: ServerControl) -> SyncProof:
        deadline = Deadline("the proof", LONG_S)
        return SyncProof(
            token_ids=lambda: (1, 2, 3),
            trainer=policy.canary,
            engine=lambda token_ids, wanted: control.prove(token_ids, wanted, deadline=deadline),
            session_id=engine.fleet.session(control.url),
            dtype="float64",
            trainer_digests=lambda: digests(policy.travelling()),
            wanted=DigestRequest(),
        )

    return FleetProof(engine, proof_of=proof_of)


def servers_of(engine: HttpEngine, options: dict[str, Any]) -> Servers[FakePolicy]:
    """Of the engine, with a proof; takes what belongs to it out of a bridge's ``options``."""
    own = {field.name: options.pop(field.name) for field in fields(Servers) if field.name in options}
    return Servers(**{"engine": engine, "proof_builder": build_proof} | own)


def drop_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(tensors.items())[1:])


def swap_two(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Exchange two tensors of one shape."""
    first = next(n for n in tensors if n.endswith(("q_proj.lora_A.weight", "q_proj.weight")))
    second = first.replace("layers.0", "layers.1")
    return tensors | {first: tensors[second], second: tensors[first]}


def keep_old(server: FakeServer) -> Corruption:
    """What was there before stays."""
    return lambda tensors: server.tensors
