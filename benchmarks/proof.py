"""The proof of sync on real weights: false alarms over healthy updates, and how many planted faults it finds.

    PYTHONPATH=src python benchmarks/proof.py MODEL [MODEL ...] [--only MODE ...] [--updates N] [--faults N]
        [--each SECONDS] [--vllm] [--out F]
    PYTHONPATH=src python benchmarks/proof.py --tiny

Each mode is an engine with a bridge. The policy takes real gradient steps on sums that it is to answer, at learning
rates from 1e-7 to 1e-4 in turn; every update is transferred and proved. Then each fault is planted, one transfer at a
time, at a learning rate of 1e-6 for full weights and 1e-4 for an adapter, with two healthy updates before it:

- the weights are changed for the time of a transfer (one update behind, one layer not sent, two tensors swapped, one
  scaled by 1.01, another run's);
- an engine that holds the adapter answers with the logprobs of its base model;
- a vLLM plugin takes away both guards of the prefix cache: requests are found whatever their salt, and the cache
  outlives an update.

Where engine and trainer share their weights nothing travels, and only the last is planted. "Canary alone" leaves the
digests out, as with a foreign server.

With a GPU the engine is vLLM; without one it is the embedded engine's server, whose other kernels stand in for it, or
with ``--vllm`` vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bridges import make_model
from torch import Tensor
from transformers import AutoTokenizer

from lachesis.bridges.base import Bridge
from lachesis.bridges.fleet_proof import FleetProof
from lachesis.bridges.proof import NO_DIGESTS, EngineSays, SyncProof
from lachesis.common.errors import StaleWeights
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.config.schema import LachesisConfig
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.serving.backend import DigestRequest
from lachesis.run.context import EngineSide, RunPlace
from lachesis.run.engine import build_engine_side
from lachesis.run.parts import build_policy
from lachesis.train.batch import pack
from lachesis.train.policy import Policy

RATES = (1e-7, 1e-6, 1e-5, 1e-4)
LORA = {"kind": "lora", "r": 16}
PORT = 9301
QUESTION = "What is {one} plus {other}? The sum of {one} and {other} is"


@dataclass(frozen=True, slots=True)
class Mode:
    """An engine, a bridge and number formats.

    ``shares``: the trainer's weights are the engine's own tensors. ``digests``: the proof may compare digests.
    """

    bridge: dict[str, Any]
    dtype: str = "bfloat16"
    adapter: dict[str, Any] = field(default_factory=lambda: {"kind": "none"})
    engine: dict[str, Any] = field(default_factory=dict[str, Any])
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    shares: bool = False
    digests: bool = True


MODES = {
    "shared, bf16": Mode({"kind": "shared_vllm"}, shares=True),
    "broadcast, bf16": Mode({"kind": "broadcast"}),
    "broadcast, fp16": Mode({"kind": "broadcast"}, dtype="float16"),
    "broadcast, fp32": Mode({"kind": "broadcast"}, dtype="float32"),
    "broadcast, fp8 engine": Mode({"kind": "broadcast"}, engine={"quantization": "fp8"}),
    "broadcast, merged LoRA": Mode({"kind": "broadcast"}, adapter=LORA),
    "LoRA by file": Mode({"kind": "lora_only"}, adapter=LORA),
    "LoRA by file, one base": Mode({"kind": "lora_only", "share_base": True}, adapter=LORA),
    "LoRA by NCCL": Mode({"kind": "lora_nccl"}, adapter=LORA),
    "LoRA by file, NF4 trainer": Mode({"kind": "lora_only"}, adapter=LORA, model={"quantization": "nf4"}),
    "two engines, broadcast": Mode({"kind": "broadcast"}, engine={"data_parallel_size": 2}),
    "two GPUs an engine, LoRA by NCCL": Mode({"kind": "lora_nccl"}, adapter=LORA, engine={"tensor_parallel_size": 2}),
    "two GPUs an engine, broadcast": Mode({"kind": "broadcast"}, engine={"tensor_parallel_size": 2}),
    "reload, bf16": Mode({"kind": "reload"}),
    "broadcast, canary alone": Mode({"kind": "broadcast"}, digests=False),
    "LoRA by file, canary alone": Mode({"kind": "lora_only"}, adapter=LORA, digests=False),
}


def configuration(mode: Mode, model: Path, *, directory: Path, port: int, vllm: bool) -> LachesisConfig:
    engine: dict[str, Any] = {"kind": "embedded_server", "port": port, "max_model_len": 256}
    if vllm and not torch.cuda.is_available():
        engine |= {"kind": "vllm", "dtype": mode.dtype, "gpu_memory_utilization": 0.25, "enforce_eager": True}
    elif vllm:
        # A cache of a given size: memory is not measured, so that modes may run side by side on one card.
        cache = ["--kv-cache-memory-bytes", "1000000000"]
        engine |= {"kind": "vllm", "gpu_memory_utilization": 0.1, "enforce_eager": True, "extra_args": cache}
        engine |= mode.engine
    return LachesisConfig.model_validate(
        {
            "run": {"name": "proof", "dir": str(directory), "steps": 1000},
            "model": {"path": str(model), "dtype": mode.dtype, "compile": "off", **mode.model},
            "adapter": mode.adapter,
            "data": {"path": __file__},
            "rewards": {"functions": ["a.b"]},
            "engine": engine,
            "bridge": mode.bridge,
            "optimizer": {"learning_rate": 1e-5, "schedule": "constant"},
            "deadlines": {"sync_s": 120, "engine_start_s": 400},
        }
    )


def sums(policy: Policy, *, seed: int) -> list[Group]:
    """Two groups of a right and a wrong answer to a sum, in words, with advantages of 1 and -1."""
    draw, tokenizer = random.Random(seed), policy.tokenizer
    encode = partial(tokenizer.encode, add_special_tokens=False)
    groups = []
    for number in range(2):
        one, other = draw.randint(1, 20), draw.randint(1, 20)
        prompt = tuple(encode(QUESTION.format(one=one, other=other)))
        samples = []
        for answer, advantage in ((one + other, 1.0), (one + other + draw.randint(1, 9), -1.0)):
            ids = tuple(encode(f" {answer}. That is the answer."))
            samples.append(
                Sample(
                    prompt_ids=prompt, completion_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop",
                    versions=VersionSpan(0, 0), temperature=1.0, reward=advantage, rewards=(advantage,),
                    advantage=advantage,
                )
            )  # fmt: skip
        groups.append(Group(Prompt(id=str(number), token_ids=prompt, text=""), tuple(samples)))
    return groups


def trained(policy: Policy) -> dict[str, Tensor]:
    return {name: p for name, p in policy.model.named_parameters() if p.requires_grad}


Corrupt = Callable[[dict[str, Tensor]], None]
# Plants a fault, drawn by a seed, in one update, and returns what the proof said of it; empty if nothing.
Planted = Callable[[int], str]
Fault = Callable[[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], random.Random], None]


def one_update_behind(now: dict[str, Tensor], before: dict[str, Tensor], first: dict[str, Tensor], _: random.Random):
    for name, tensor in now.items():
        tensor.copy_(before[name])


def one_layer_not_sent(now: dict[str, Tensor], before: dict[str, Tensor], first: dict[str, Tensor], r: random.Random):
    layers = sorted({name.split("layers.")[1].split(".")[0] for name in now if "layers." in name})
    chosen = f"layers.{r.choice(layers)}."
    for name, tensor in now.items():
        if chosen in name:
            tensor.copy_(before[name])


def two_tensors_swapped(now: dict[str, Tensor], before: dict[str, Tensor], first: dict[str, Tensor], r: random.Random):
    kinds: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in now.items():
        if tensor.dim() > 1:
            kinds.setdefault(tuple(tensor.shape), []).append(name)
    one, other = r.sample(r.choice([names for names in kinds.values() if len(names) > 1]), 2)
    kept = now[one].clone()
    now[one].copy_(now[other])
    now[other].copy_(kept)


def one_tensor_scaled(now: dict[str, Tensor], before: dict[str, Tensor], first: dict[str, Tensor], r: random.Random):
    now[r.choice([name for name, tensor in now.items() if tensor.any()])].mul_(1.01)


def another_runs_weights(now: dict[str, Tensor], before: dict[str, Tensor], first: dict[str, Tensor], _: random.Random):
    for name, tensor in now.items():
        tensor.copy_(2 * first[name].float() - tensor.float())  # as far off on the other side


TENSOR_FAULTS: dict[str, Fault] = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        one_update_behind, one_layer_not_sent, two_tensors_swapped, one_tensor_scaled, another_runs_weights,
    )
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Rig:
    """A policy and an engine, with the proof between them."""

    side: EngineSide
    policy: Policy
    rate: float
    keeps_cache: Path
    version: int = 0

    @property
    def proof(self) -> SyncProof:
        """The proof of the first engine that lives."""
        fleet, engine = self.bridge.proof, self.bridge.engine
        assert isinstance(fleet, FleetProof) and isinstance(engine, HttpEngine)
        return fleet.of(engine.living[0])

    @property
    def bridge(self) -> Bridge[Policy]:
        return self.side.bridge

    def update(self, *, rate: float, corrupt: Corrupt | None = None) -> float:
        """Take a step, transfer, and prove; returns the canary's ratio. ``corrupt`` changes what is transferred."""
        self.version += 1
        self.policy.optimizer._peak = rate
        self.policy.accumulate(pack(sums(self.policy, seed=self.version), max_tokens=512))
        with corrupted(self.bridge, self.policy, corrupt), self.bridge.update_to(self.version):
            self.policy.step()
        report = self.bridge.last_report
        assert report is not None and report.canary_ratio is not None
        return report.canary_ratio


@contextmanager
def corrupted(bridge: Bridge[Policy], policy: Policy, corrupt: Corrupt | None) -> Iterator[None]:
    """Within it ``corrupt`` changes the weights for the time of each transfer."""
    if corrupt is None:
        yield
        return
    transfer = bridge._transfer

    def faulty(*arguments: Any, **options: Any) -> None:
        weights = trained(policy)
        kept = {name: tensor.detach().clone() for name, tensor in weights.items()}
        with torch.no_grad():
            corrupt(weights)
        try:
            transfer(*arguments, **options)
        finally:
            with torch.no_grad():
                for name, tensor in weights.items():
                    tensor.copy_(kept[name])

    bridge._transfer = faulty
    try:
        yield
    finally:
        bridge._transfer = transfer


def said_of(rig: Rig, fault: Callable[[], AbstractContextManager[Any]], *, transfer: Corrupt | None = None) -> str:
    """Make an update under ``fault``, with ``transfer`` changing the weights; returns what the proof said, or ""."""
    try:
        with fault():
            rig.update(rate=rig.rate, corrupt=transfer)
    except StaleWeights as error:
        return error.message
    return ""


def with_faulty_tensors(rig: Rig, fault: Fault, *, seed: int, first: dict[str, Tensor]) -> str:
    before = {name: tensor.detach().clone() for name, tensor in trained(rig.policy).items()}
    return said_of(rig, nullcontext, transfer=lambda now: fault(now, before, first, random.Random(seed)))


@contextmanager
def unused_adapter(rig: Rig, base: Sequence[float]) -> Iterator[None]:
    """Within it the engine has the adapter's bytes, and computes with its base model alone."""
    proof = rig.proof
    ask = proof.engine

    def without_adapter(token_ids: Sequence[int], wanted: DigestRequest) -> EngineSays:
        reading, digests = ask(token_ids, wanted)
        return replace(reading, logprobs=tuple(base)), digests

    proof.engine = without_adapter
    try:
        yield
    finally:
        proof.engine = ask


@contextmanager
def kept_cache(rig: Rig) -> Iterator[None]:
    """Within it vLLM empties its prefix cache in no update."""
    rig.keeps_cache.touch()
    try:
        yield
    finally:
        rig.keeps_cache.unlink()


def faults_of(
    rig: Rig, mode: Mode, *, first: dict[str, Tensor], base: Sequence[float], vllm: bool
) -> dict[str, Planted]:
    """The faults that can be planted in a mode, by name; each is called with a seed and returns what was said."""
    planted: dict[str, Planted] = {}
    if not mode.shares:
        for name, fault in TENSOR_FAULTS.items():
            planted[name] = lambda seed, fault=fault: with_faulty_tensors(rig, fault, seed=seed, first=first)
    if mode.bridge["kind"] in ("lora_only", "lora_nccl"):
        planted["an adapter not applied"] = lambda seed: said_of(rig, lambda: unused_adapter(rig, base))
    if vllm:
        planted["the cache of the weights before"] = lambda seed: said_of(rig, lambda: kept_cache(rig))
    return planted


# Patches vLLM so that salts do not keep cached prefixes apart, and no cache is emptied while the file {flag} is there.
_PLUGIN = """
from pathlib import Path

def keep():
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request
    start, reset = Request.__init__, KVCacheManager.reset_prefix_cache
    Request.__init__ = lambda self, *args, **options: start(self, *args, **options | {{"cache_salt": None}})
    KVCacheManager.reset_prefix_cache = lambda self: True if Path({flag!r}).exists() else reset(self)
"""


def install_cache_fault(directory: Path) -> Path:
    """Install a vLLM plugin for servers started from now on; returns the file that has it keep the prefix cache."""
    flag = directory / "keeps_cache"
    info = directory / "site" / "cache_fault-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cache-fault\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ncache_fault = cache_fault:keep\n")
    (directory / "site" / "cache_fault.py").write_text(_PLUGIN.format(flag=str(flag)))
    sys.path.append(str(directory / "site"))
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(directory / "site")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    return flag


# The words of the proof, by what they tell.
WORDS = {
    "still holds": "as they were before", "in place of": "swapped", "none of them": "another run's",
    "from the trainer's (": "tensors differ", "still computes as at": "stands still",
    "times what is allowed": "canary off", "prefix cache": "prefix cache",
}  # fmt: skip


def words(message: str) -> str:
    return next((short for said, short in WORDS.items() if said in message), message[:80])


def measure(
    mode: Mode, model: Path, *, updates: int, faults: int, seconds: float, rates: float, port: int, vllm: bool
) -> dict[str, Any]:
    with TemporaryDirectory() as directory:
        flag = install_cache_fault(Path(directory))
        config = configuration(mode, model, directory=Path(directory), port=port, vllm=vllm)
        place = RunPlace(directory=Path(directory) / "proof", engine_log=Path(directory) / "engine.log", owner="proof")
        place.directory.mkdir()
        prompt = AutoTokenizer.from_pretrained(model).encode(
            QUESTION.format(one=7, other=5)
        )  # begins as the model's do
        side = build_engine_side(config, place=place, canary_prompt=prompt)
        try:
            return _measure(
                config,
                side,
                mode,
                updates=updates,
                faults=faults,
                seconds=seconds,
                rates=rates,
                keeps_cache=flag,
                vllm=vllm,
            )
        except Exception:
            say(place.engine_log.read_text()[-3000:] if place.engine_log.exists() else "the engine has no log")
            raise
        finally:
            side.close()


def _measure(
    config: LachesisConfig,
    side: EngineSide,
    mode: Mode,
    *,
    updates: int,
    faults: int,
    seconds: float,
    rates: float,
    keeps_cache: Path,
    vllm: bool,
) -> dict[str, Any]:
    policy = side.bridge.prepare(partial(build_policy, config, weights=side.weights))
    lora = mode.adapter["kind"] == "lora"
    rig = Rig(side=side, policy=policy, rate=rates * (1e-4 if lora else 1e-6), keeps_cache=keeps_cache)
    if not mode.digests:
        rig.proof.wanted = NO_DIGESTS
    side.bridge.sync(0)
    first = {name: tensor.detach().clone() for name, tensor in trained(policy).items()}
    base = rig.proof.ask_engine(rig.proof.token_ids())[0].logprobs
    ratios, errors, durations, alarms = [], [], [], []
    ends = time.perf_counter() + seconds / 2
    for number in range(updates):
        started = time.perf_counter()
        if started > ends:
            break
        try:
            ratios.append(rig.update(rate=rates * RATES[number // 5 % len(RATES)]))
        except StaleWeights as error:
            alarms.append(error.message)
        else:
            report = side.bridge.last_report
            errors.append(report.canary_error if report and report.canary_error is not None else float("nan"))
        durations.append(time.perf_counter() - started)
    planted = faults_of(rig, mode, first=first, base=base, vllm=vllm)
    found: dict[str, Counter[str]] = {}
    for place, (name, plant) in enumerate(planted.items()):
        share = (ends + seconds / 2 - time.perf_counter()) / (len(planted) - place)
        ends_fault = time.perf_counter() + share
        found[name] = Counter()
        for seed in range(faults):
            if time.perf_counter() > ends_fault:
                break
            for _ in range(2):
                rig.update(rate=rig.rate)
            message = plant(seed)
            found[name][words(message) if message else "not found"] += 1
    ordered = sorted(ratios)
    return {
        "healthy updates": len(durations),
        "false alarms": len(alarms),
        "alarms": alarms[:3],
        "doubts": sum(ratio > 1 for ratio in ratios),
        "ratio, median": statistics.median(ratios) if ratios else None,
        "ratio, 0.99 quantile": ordered[int(0.99 * (len(ordered) - 1))] if ratios else None,
        "ratio, largest": max(ratios, default=None),
        "error in nats, median": statistics.median(errors) if errors else None,
        "seconds an update": statistics.median(durations),
        "found": found,
    }


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| model | mode | healthy | false alarms | doubts | ratio, median and largest | faults found |"
    yield "|---|---|---|---|---|---|---|"
    for one in results:
        found = "; ".join(
            f"{name} {sum(n for said, n in counts.items() if said != 'not found')}/{sum(counts.values())} "
            f"({', '.join(said for said in counts)})"
            for name, counts in one["found"].items()
        )
        yield (
            f"| {one['model']} | {one['mode']} | {one['healthy updates']} | {one['false alarms']} | {one['doubts']} | "
            f"{one['ratio, median']:.2f}, {one['ratio, largest']:.2f} | {found or 'none can be planted'} |"
        )


def say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL")
    parser.add_argument("--rates", type=float, default=1.0, help="multiplies all learning rates")
    parser.add_argument("--tiny", action="store_true", help="8 updates and 2 of each fault on a model made here")
    parser.add_argument("--only", nargs="+", choices=sorted(MODES), default=list(MODES), metavar="MODE")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--each", type=float, default=float("inf"), help="seconds a mode may take, its start left out")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further mode after so long")
    parser.add_argument("--vllm", action="store_true", default=torch.cuda.is_available(), help="on a CPU too")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        if options.tiny:
            make_model(Path(directory) / "tiny", tiny=True)
            options.models, options.updates, options.faults, options.rates = [Path(directory) / "tiny"], 8, 2, 10.0
        results = list(measured_modes(options))
    say(
        *table(results), f"missed: {sum(map(missed, results))}, false alarms: {sum(r['false alarms'] for r in results)}"
    )


def measured_modes(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    started = time.perf_counter()
    results: list[dict[str, Any]] = []
    for model in options.models:
        for name in options.only:
            if time.perf_counter() - started > options.seconds:
                say(f"{model.name}, {name}: no time left")
                continue
            measured = measure(
                MODES[name],
                model,
                updates=options.updates,
                faults=options.faults,
                seconds=options.each,
                rates=options.rates,
                port=options.port,
                vllm=options.vllm,
            )
            results.append({"model": model.name, "mode": name} | measured)
            say(*list(table(results[-1:]))[2:], *results[-1]["alarms"])
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1))
            yield results[-1]


def missed(result: dict[str, Any]) -> int:
    """Return how many planted faults the proof said nothing of."""
    return sum(counts["not found"] for counts in result["found"].values())


if __name__ == "__main__":
    main()
