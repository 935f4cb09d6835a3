"""Every bridge over every engine, built from a configuration by the functions by which a run builds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lachesis.bridges.fleet_proof import digests_of
from lachesis.common.deadline import Deadline
from lachesis.common.types import Completion, GenerationRequest, SamplingParams
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import Engine
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.http.control import ServerControl
from lachesis.run.context import EngineSide, RunPlace
from lachesis.run.engine import build_engine_side
from lachesis.run.parts import build_policy
from lachesis.run.servers import whole_of
from lachesis.train.batch import pack
from lachesis.train.policy import Policy
from tests.contracts.bridge_faults import Tampering
from tests.contracts.servers import MAX_LEN, Server
from tests.ports import free_port, free_ports
from tests.unit.train.model.test_forward import random_groups

CANARY = tuple(range(20, 32))
PROMPT = (15, 16, 17, 18)
OWNER = "the bridges' contract"
LORA_RANK = 4  # less than the servers have room for
TOLERANCE = 1e-3  # float32 on both sides
TINY = 1e-4  # of the optimizer's own step, which then is one that a learning rate of 2e-6 makes


@dataclass(frozen=True, slots=True)
class Case:
    """A bridge over an engine.

    ``engine`` is that of this process, the embedded server, or vLLM. ``exact`` says that digests of what travels
    exist on both sides, ``two`` that the engine is two servers, ``owned`` that the bridge starts its server, of so many
    ``workers``.
    """

    engine: Literal["in process", "embedded", "vllm"]
    bridge: dict[str, Any]
    lora: bool = False
    exact: bool = True
    two: bool = False
    owned: bool = False
    workers: int = 1

    @property
    def name(self) -> str:
        options = [f"{key}={value}" for key, value in self.bridge.items() if key not in ("kind", "every_steps")]
        merged = ["merged"] if self.lora and not self.kind.startswith("lora") and self.engine != "in process" else []
        adapter = ["lora"] if self.lora and self.engine == "in process" else []
        return " ".join([f"{'two ' * self.two}{self.engine}:", self.kind, *options, *merged, *adapter])

    @property
    def kind(self) -> str:
        return self.bridge["kind"]

    @property
    def servers(self) -> list[str]:
        """The fixtures of the servers that it is over; none where the engine is its own."""
        if self.engine == "in process" or self.restarts or self.owned:
            return []
        return [f"{prefix}{self.engine}_server" for prefix in ("", "second_")[: 1 + self.two]]

    @property
    def restarts(self) -> bool:
        """Whether every transfer starts the engine anew: then it takes seconds."""
        return self.kind == "none"

    @property
    def every(self) -> int:
        return self.bridge.get("every_steps", 1)


IN_PROCESS = [
    Case("in process", {"kind": "in_process"}, exact=False),
    Case("in process", {"kind": "in_process"}, lora=True, exact=False),
]
EMBEDDED = [
    Case("embedded", {"kind": "shared_vllm"}),
    Case("embedded", {"kind": "lora_only"}, lora=True),
    Case("embedded", {"kind": "lora_only", "share_base": True}, lora=True),
    Case("embedded", {"kind": "lora_nccl"}, lora=True),
    Case("embedded", {"kind": "lora_nccl", "share_base": True}, lora=True),
    Case("embedded", {"kind": "broadcast"}),
    Case("embedded", {"kind": "broadcast"}, lora=True),
    Case("embedded", {"kind": "reload"}),
    Case("embedded", {"kind": "lora_only"}, lora=True, two=True),
    Case("embedded", {"kind": "lora_nccl"}, lora=True, two=True),
    Case("embedded", {"kind": "broadcast"}, two=True),
    Case("embedded", {"kind": "none", "every_steps": 1}),
]
# vLLM's kernels for the CPU repack full weights: they are proved by the canary alone.
VLLM = [
    Case("vllm", {"kind": "lora_only"}, lora=True),
    Case("vllm", {"kind": "lora_nccl"}, lora=True),
    Case("vllm", {"kind": "broadcast"}, exact=False),
    Case("vllm", {"kind": "reload"}, exact=False),
    Case("vllm", {"kind": "none", "every_steps": 3}, exact=False),
]
# Once through, with two real servers of vLLM.
TWO_VLLM = [
    Case("vllm", {"kind": "broadcast"}, exact=False, two=True),
    Case("vllm", {"kind": "lora_nccl"}, lora=True, two=True),
    Case("vllm", {"kind": "lora_only"}, lora=True, two=True),
]
# Of those that the run starts one dies.
MORTAL = [
    Case("vllm", {"kind": "broadcast"}, exact=False, two=True, owned=True),
    Case("vllm", {"kind": "lora_only"}, lora=True, owned=True),
]


def configuration(case: Case, *, model: Path, directory: Path, urls: list[str]) -> LachesisConfig:
    """A run's, with an engine of its own or the servers at ``urls``."""
    if case.engine == "in process":
        engine: dict[str, Any] = {"kind": "embedded"}
    elif not (case.restarts or case.owned):
        engine = {"kind": "http", "urls": urls, "takeover": True}
    elif case.engine == "embedded":
        engine = {"kind": "embedded_server", "port": free_port(), "max_model_len": MAX_LEN}
    else:
        engine = {"kind": "vllm", "port": free_ports(2), "max_model_len": MAX_LEN, "enforce_eager": True}
        engine |= {"data_parallel_size": 2} if case.two else {}
        engine |= {"tensor_parallel_size": case.workers}
    return LachesisConfig.model_validate(
        {
            "run": {"name": directory.name, "dir": str(directory.parent), "steps": 1000},
            "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
            "adapter": {"kind": "lora", "r": LORA_RANK} if case.lora else {"kind": "none"},
            "engine": engine,
            "bridge": case.bridge,
            "optimizer": {"learning_rate": 2e-2, "schedule": "constant"},
            "deadlines": {"sync_s": 60, "engine_start_s": 200, "generation_s": 60},
        }
    )


@dataclass(slots=True)
class Live:
    """A bridge at work. ``version`` is the trainer's, ``served`` the engine's; ``stale`` after a failed proof."""

    case: Case
    config: LachesisConfig
    side: EngineSide
    policy: Policy
    tampering: Tampering
    version: int = 0
    served: int = 0
    stale: bool = False

    @property
    def bridge(self):
        return self.side.bridge

    @property
    def engine(self) -> Engine:
        return self.bridge.engine

    @property
    def remote(self) -> HttpEngine:
        assert isinstance(self.engine, HttpEngine)
        return self.engine

    def update(self, *, scale: float = 1.0, due: bool = False, fault: str | None = None) -> None:
        """An optimizer step, or ``scale`` of one, and the transfer that belongs to it."""
        self.version += 1
        groups = random_groups(groups=2, samples=4, longest=6, seed=self.version)
        self.policy.accumulate(pack(groups, max_tokens=256))
        self.stale = True
        shares = self.case.kind == "shared_vllm"
        with (
            self.tampering.having(fault, parting=self.policy.model if shares else None) as step,
            self.bridge.update_to(self.version, due=due),
            step(),
        ):
            before = [p.detach().clone() for p in self.trained()]
            self.policy.step()
            with torch.no_grad():
                for parameter, old in zip(self.trained(), before, strict=True):
                    parameter.lerp_(old, 1.0 - scale)
        if due or self.version % self.case.every == 0:
            self.served = self.version
        self.stale = False

    def catch_up(self) -> None:
        """Have the engine serve the trainer's weights, if it does not."""
        if self.stale or self.served != self.version:
            self.bridge.sync(self.version)
            self.served, self.stale = self.version, False

    def trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.policy.model.parameters() if parameter.requires_grad]

    def generate(self, *, n: int = 4, max_tokens: int = 6) -> list[Completion]:
        request = GenerationRequest(PROMPT, SamplingParams(max_tokens), n=n, seed=3)
        return self.engine.generate([request], deadline=soon("generation"))[0]

    def difference(self, tokens: Sequence[int] = CANARY) -> float:
        """Of the two sides' logprobs, the largest."""
        pairs = zip(self.policy.canary(tokens), self.engine.canary(tokens).logprobs, strict=True)
        return max(abs(a - b) for a, b in pairs)

    def digests(self, control: ServerControl | None = None) -> tuple[dict[str, int], dict[str, int]] | None:
        """The trainer's and a server's, of what travels; the last one's unless it is said."""
        weights, control = self.side.weights, control or self.remote.controls[-1]
        found = digests_of(
            self.config,
            self.policy,
            control,
            slices_of=None if weights is None else lambda: weights.slices,
            whole=whole_of(self.policy),
            deadline=lambda: soon("digests"),
        )
        if found is None:
            return None
        ours, wanted = found
        return dict(ours()), dict(control.prove(CANARY, wanted, deadline=soon("digests"))[1])


def build(case: Case, *, model: Path, directory: Path, servers: list[Server], tampering: Tampering) -> Live:
    """The bridge, prepared; nothing is synchronized yet."""
    urls = [str(server.http.base_url) for server in servers]
    config = configuration(case, model=model, directory=directory, urls=urls)
    place = RunPlace(directory=directory, engine_log=directory / "engine.log", owner=OWNER)
    torch.manual_seed(0)
    side = build_engine_side(config, place=place)
    try:
        policy = side.bridge.prepare(partial(build_policy, config, weights=side.weights))
    except BaseException:
        side.close()
        raise
    return Live(case, config, side, policy, tampering)


def reset(server: Server) -> None:
    """The weights that the server was started with, whatever bridges have left behind."""
    server.post("/nccl/stop_receiver")
    server.post("/bridge/resume")
    if (adapter := server.get("/bridge/info")["adapter"]) is not None:
        server.post("/lora/unload", adapter_name=adapter["name"])
    server.post("/bridge/reload", path=str(server.model), weight_version=0)


def soon(what: str) -> Deadline:
    return Deadline(f"the bridges' contract: {what}", 60.0)
