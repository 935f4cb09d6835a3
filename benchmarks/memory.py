"""What training takes of a GPU's memory, beside what `lachesis plan` says of the same configuration.

    PYTHONPATH=src python benchmarks/memory.py [--tiny] [--only NAME ...] [--budget-s 380] [--out FILE.json]
    PYTHONPATH=src python benchmarks/memory.py --again FILE.json ... # what was measured, beside what is planned now
    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/memory.py [--out FILE.json]     # sharded over two GPUs

Models have random weights, made on the device from their shapes. A row is two or three optimizer steps of two
micro-batches by the product's own policy; every sequence has the context's length, so that micro-batches are full.
"Shared" rows train on weights that another process has, as with vLLM on the same card. ``--tiny`` runs the same code
on small models on the CPU, where nothing is measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from memory_rows import MODELS, compared, configured, line, read
from needs_gpu import require_gpu
from torch import nn

from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.common.world import find_world
from lachesis.config.schema import DistributedConfig, LachesisConfig
from lachesis.plan.cards import process_bytes
from lachesis.plan.plan import plan
from lachesis.plan.shapes import known_architecture
from lachesis.train.batch import split
from lachesis.train.distributed.fsdp2 import Fsdp2
from lachesis.train.distributed.strategy import SingleDevice, Strategy, decoder_layers
from lachesis.train.losses.loss import PolicyLoss
from lachesis.train.model.loading import LoadedModel, empty_transformer, made_trainable
from lachesis.train.model.quantization import settle
from lachesis.train.policy import Policy

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 512, "head_dim": 16}  # fmt: skip
LORA = {"adapter": {"kind": "lora", "r": 16, "alpha": 32}}
NF4 = {"model": {"quantization": "nf4"}}
CHECKPOINTING = {"model": {"gradient_checkpointing": True}}
# Sections of the methods; a shared one trains on the weights of an engine on the same card.
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": LORA,
    "QLoRA": {**LORA, **NF4},
    "full, shared": {"engine": {"kind": "vllm"}, "bridge": {"kind": "shared_vllm"}},
    "LoRA, shared": {**LORA, "engine": {"kind": "vllm"}, "bridge": {"kind": "lora_only", "share_base": True}},
}
# A step of theirs takes seconds.
SLOW = ("14B", "24B", "32B")
# What of several devices needs no recomputation.
_SHARDED = [("1.5B", "full"), ("1.5B", "LoRA"), ("3B", "full"), ("3B", "LoRA"), ("8B", "full"), ("8B", "LoRA")]
ELSEWHERE = {"engine": {"kind": "http"}, "bridge": {"kind": "broadcast"}}
# Tokens of a sequence, of its prompt, completions of a prompt, tokens of a micro-batch. As many completions as fill it.
CONTEXTS: dict[int, tuple[int, int, int]] = {1024: (128, 4, 4096), 8192: (1024, 1, 8192)}
TINY_CONTEXTS: dict[int, tuple[int, int, int]] = {1024: (16, 2, 128), 8192: (16, 1, 128)}


@dataclass(frozen=True)
class Case:
    """One row: ``extra`` are further sections, ``also`` says them in words."""

    size: str
    method: str
    context: int
    also: str = ""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.size, self.method, str(self.context), self.also)))


def cases() -> list[Case]:
    """All rows, by importance; shared ones are first, and the process that lends them weights ends after them."""
    recomputed = ("checkpointing", CHECKPOINTING)
    found = [Case("8B", "LoRA, shared", context) for context in CONTEXTS]
    found.append(Case("1.5B", "full, shared", 8192))
    found += [Case("1.5B", method, context) for method in ("full", "LoRA", "QLoRA") for context in CONTEXTS]
    found += [Case("1.5B", "full", 1024, kind, {"optimizer": {"kind": kind}})
              for kind in ("adamw_8bit", "adamw_cpu", "adafactor")]  # fmt: skip
    rounding = {"optimizer": {"weight_update": "stochastic_rounding"}}
    found.append(Case("1.5B", "full", 1024, "stochastic rounding", rounding))
    found.append(Case("1.5B", "full", 1024, "KL term", {"algorithm": {"beta": 0.01}}))
    found += [Case("1.5B", method, 8192, *recomputed) for method in ("full", "QLoRA")]
    found += [Case("8B", "LoRA", context) for context in CONTEXTS]
    found += [Case("8B", "QLoRA", context, *recomputed) for context in CONTEXTS]
    found += [Case("8B", "full", context, *recomputed) for context in CONTEXTS]
    found += [Case("3B", method, context) for method in ("full", "LoRA", "QLoRA") for context in CONTEXTS]
    for size in ("14B", "32B", "24B"):
        found += [Case(size, method, context, *recomputed) for method in ("LoRA", "QLoRA") for context in CONTEXTS]
    return [*shared_cases(), *found]


def shared_cases() -> list[Case]:
    """Further rows of one card shared with an engine: an adapter for each size, all weights where they fit."""
    found = [Case(size, "LoRA, shared", context) for size in ("1.5B", "3B") for context in CONTEXTS]
    found += [Case("1.5B", "full, shared", 1024), *(Case("3B", "full, shared", context) for context in CONTEXTS)]
    large = [(size, context) for size in ("14B", "24B", "32B") for context in CONTEXTS]
    return found + [Case(size, "LoRA, shared", context, "checkpointing", CHECKPOINTING) for size, context in large]


def sharded_cases() -> list[Case]:
    """Rows of several devices, the longer context first: it is the one that decides what fits."""
    recomputed = ("checkpointing", CHECKPOINTING)
    found = [Case(size, method, context) for context in (8192, 1024) for size, method in _SHARDED]
    large = [("8B", "full"), ("14B", "LoRA"), ("32B", "LoRA"), ("14B", "full"), ("24B", "LoRA")]
    large += [("24B", "full"), ("32B", "full")]
    return found + [Case(size, method, context, *recomputed) for context in (8192, 1024) for size, method in large]


def sections(case: Case, *, tiny: bool) -> dict[str, Any]:
    """What of the configuration a row is about."""
    prompt, completions, tokens = (TINY_CONTEXTS if tiny else CONTEXTS)[case.context]
    length = tokens // (1 if completions == 1 else completions) if tiny else case.context
    data: dict[str, Any] = {
        "model": {"compile": "off"} if tiny else {},
        "data": {"path": "none.jsonl", "max_prompt_length": prompt},
        "batch": {"prompts_per_step": 2, "max_tokens_per_microbatch": tokens},
        "sampling": {"num_generations": max(2, completions), "max_completion_length": length - prompt},
    }
    for part in (ELSEWHERE, METHODS[case.method], case.extra):
        for section, keys in part.items():
            data[section] = dict(keys) if "kind" in keys else {**data.get(section, {}), **keys}
    return data


def workload(config: LachesisConfig, *, vocab_size: int, seed: int) -> list[Group]:
    """Groups of random tokens that make two full micro-batches, all of the longest sequences there may be.

    Each rank's have a seed of their own: sequences that are the same would be computed once.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())

    prompt_length, length = config.data.max_prompt_length, config.sampling.max_completion_length
    assert prompt_length is not None
    rows = max(1, config.batch.max_tokens_per_microbatch // (prompt_length + length))
    groups = []
    for number in range(2 * rows):
        prompt = draw(prompt_length)
        sample = Sample(
            prompt_ids=prompt,
            completion_ids=draw(length),
            logprobs=(-1.0,) * length,
            finish_reason="stop",
            versions=VersionSpan(0, 0),
            advantage=1.0 if number % 2 else -1.0,
        )
        groups.append(Group(prompt=Prompt(id=str(number), token_ids=prompt, text=""), samples=(sample,)))
    return groups


# --- models -------------------------------------------------------------------------------------------------


def random_model(config: LachesisConfig, *, device: torch.device) -> transformers.PreTrainedModel:
    """The model with random weights on the device; a layer's linear ones quantized as soon as they are made."""
    model = empty_transformer(config.model, dtype=torch.bfloat16)
    quantized = config.model.quantization == "nf4"
    if quantized:
        for layer in decoder_layers(model):
            _quantize(layer, device=device)
    made = {id(p): nn.Parameter(_random(p, device=device)) for p in model.parameters() if p.is_meta}
    _fill(model, made, device)
    if quantized:
        vars(model)["is_loaded_in_4bit"] = True  # as transformers' loader does
        settle(model)
    return model


def _fill(model: nn.Module, parameters: dict[int, nn.Parameter], device: torch.device) -> None:
    """Put parameters in the place of those whose ids are given; buffers go to the device. Ties stay."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in parameters:
                setattr(module, name, parameters[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, buffer.to(device))


def _random(like: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    """Norms of ones, small matrices."""
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    return tensor.fill_(1.0) if like.ndim < 2 else tensor.normal_(0.0, 0.02)


def _quantize(layer: nn.Module, *, device: torch.device) -> None:
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    for parent in list(layer.modules()):
        for name, linear in list(parent.named_children()):
            if not isinstance(linear, nn.Linear):
                continue
            packed = Linear4bit(
                linear.in_features,
                linear.out_features,
                linear.bias is not None,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
                device=torch.device("meta"),
            )
            make: Any = Params4bit  # its stub is that of torch.nn.Parameter
            weight = make(_random(linear.weight, device=device), quant_type="nf4", module=packed)
            packed.weight = weight._quantize(device)  # what its `to` does
            if linear.bias is not None:
                packed.bias = nn.Parameter(_random(linear.bias, device=device), requires_grad=False)
            setattr(parent, name, packed)


def _lend(device: torch.device, jobs: Any, tensors: Any, released: Any) -> None:
    """In another process: hold the weights that are asked for, as an engine does, until they are not wanted more."""
    while (fields := jobs.get()) is not None:
        with tempfile.TemporaryDirectory() as directory:
            config = configured(fields, {"model": {"path": directory}}, directory=directory)
            model = random_model(config, device=device)
        tensors.put({name: p.detach() for name, p in model.named_parameters()})
        released.get()
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.ipc_collect()


class Lender:
    """A process that has weights which this one trains on."""

    def __init__(self, device: torch.device) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._device = device
        self._jobs, self._tensors, self._released = queues = [context.Queue() for _ in range(3)]
        self._process = context.Process(target=_lend, args=(device, *queues), daemon=True)
        self._process.start()

    @contextmanager
    def model(self, config: LachesisConfig, fields: dict[str, Any]) -> Iterator[transformers.PreTrainedModel]:
        """The model whose parameters are the other process's."""
        self._jobs.put(fields)
        lent: dict[str, torch.Tensor] = self._tensors.get(timeout=120)
        model = empty_transformer(config.model, dtype=torch.bfloat16)
        _fill(model, {id(p): nn.Parameter(lent.pop(name)) for name, p in model.named_parameters()}, self._device)
        try:
            yield model
        finally:
            self._released.put(None)

    def close(self) -> None:
        """End the process; its memory is free then."""
        self._jobs.put(None)
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()


# --- measuring ----------------------------------------------------------------------------------------------


class Meter:
    """Bytes of the device: of this process's tensors, of its allocator, and of all processes."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def peak(self) -> int:
        """Of tensors since the last call."""
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    def reserved(self) -> int:
        return torch.cuda.memory_reserved() if self.cuda else 0

    def used(self) -> int:
        if not self.cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free


class MeasuredPolicy(Policy):
    """Notes what is held after each forward pass."""

    meter: Meter
    after_forward: list[int]

    def _loss(self, *args: Any, **kwargs: Any) -> PolicyLoss:
        output = super()._loss(*args, **kwargs)
        self.after_forward.append(self.meter.allocated())
        return output


def measure(
    config: LachesisConfig,
    model: transformers.PreTrainedModel,
    *,
    meter: Meter,
    steps: int,
    before: int,
    strategy: Strategy,
) -> dict[str, Any]:
    """Bytes by phase, and seconds of each step but the first; ``before`` is what the device held without this row."""
    from lachesis.run.parts import policy_of

    none: Any = None
    loaded: LoadedModel = made_trainable(model, none, config=config.model, adapter=config.adapter)
    policy = policy_of(loaded, config, strategy=strategy, make=MeasuredPolicy)
    assert isinstance(policy, MeasuredPolicy)
    policy.meter, policy.after_forward = meter, []
    if meter.cuda:
        torch.cuda.empty_cache()  # what building took is no part of training
    built = meter.allocated()
    vocab_size = model.config.get_text_config().vocab_size
    groups = [
        group for rank in range(strategy.world_size) for group in workload(config, vocab_size=vocab_size, seed=1 + rank)
    ]
    passes, updates, seconds, reserved, used = [], [], [], [], []
    at_rest, tokens = built, 0
    for number in range(steps):
        started = time.perf_counter()
        batch = split(policy.pack(groups), strategy.world_size)[strategy.rank]
        tokens = sum(micro.num_inputs for micro in batch.micro_batches)
        at_rest = meter.allocated()
        policy.after_forward.clear()
        meter.peak()
        policy.accumulate(batch)
        passes.append(meter.peak())
        policy.step()
        updates.append(meter.peak())
        if number:
            seconds.append(time.perf_counter() - started)
        # Before the canary: its second call is captured as a CUDA graph, which gives back what the allocator keeps.
        reserved.append(meter.reserved())
        used.append(meter.used())
        policy.canary(range(16))  # as the proof of sync does after each update
    return {
        "built": built,
        "at_rest": at_rest,
        "after_forward": policy.after_forward[0],
        "passes": max(passes[1:]),
        "update": max(updates[1:]),
        "peak": max(passes + updates),
        "reserved": max(reserved),
        "process": max(used) - before,
        "seconds": seconds,
        "tokens": tokens,
        "micro_batches": len(batch.micro_batches),
    }


def run(
    case: Case, *, device: torch.device, options: argparse.Namespace, lender: Lender | None, strategy: Strategy
) -> dict[str, Any]:
    """Build, train, measure: one row as it goes to the file."""
    meter, started = Meter(device), time.perf_counter()
    fields = known_architecture(MODELS[case.size])
    assert fields is not None
    fields |= TINY if options.tiny else {}
    chosen = sections(case, tiny=options.tiny)
    steps = min(options.steps, 2) if case.size in SLOW else options.steps
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        config = configured(fields, chosen, directory=directory)
        before = meter.used() - meter.reserved()
        if lender is None:
            model = random_model(config, device=device)
        else:
            model = stack.enter_context(lender.model(config, fields))
            before = meter.used() - meter.reserved()  # the other process's weights are no part of this one's
        measured = measure(config, model, meter=meter, steps=steps, before=before, strategy=strategy)
        del model
    named = {key: value for key, value in asdict(case).items() if key != "extra"}
    row = {"name": case.name, **named, "devices": strategy.world_size, "architecture": fields, "sections": chosen}
    return {**row, "measured": measured, "took_s": round(time.perf_counter() - started, 1)}


def release(device: torch.device) -> None:
    """Let go of all that a row has left."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def surroundings(device: torch.device) -> dict[str, Any]:
    """The machine; ``context_bytes`` are those of an empty card with this process's context on it."""
    cuda, meter = device.type == "cuda", Meter(device)
    return {
        "gpu": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "card_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else 0,
        "context_bytes": meter.used(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bitsandbytes": importlib.metadata.version("bitsandbytes") if has_bitsandbytes() else None,
        "date": datetime.now(UTC).date().isoformat(),
    }


def has_bitsandbytes() -> bool:
    """Rows of quantized weights need it."""
    return importlib.util.find_spec("bitsandbytes") is not None


def needed(case: Case, *, devices: int) -> int:
    """Bytes of a card that the trainer's process takes by `lachesis plan`."""
    fields = known_architecture(MODELS[case.size])
    assert fields is not None
    with tempfile.TemporaryDirectory() as directory:
        config = configured(fields, sections(case, tiny=False), directory=directory)
        return process_bytes(plan(config, device="cuda", devices=devices), "trainer")


def chosen_cases(options: argparse.Namespace, *, ranks: int) -> Iterator[Case]:
    quantizes = has_bitsandbytes()
    for case in sharded_cases() if ranks > 1 else cases():
        if "QLoRA" in case.method and not quantizes:
            sys.stdout.write(f"{case.name:48s} left out: bitsandbytes is not installed\n")
        elif any(part in case.name for part in options.only):
            yield case


def measure_all(device: torch.device, strategy: Strategy, options: argparse.Namespace) -> None:
    """Every chosen row in turn; rank 0 writes."""
    started, record = time.monotonic(), {**surroundings(device), "rows": []}
    rows: list[dict[str, Any]] = record["rows"]
    write = sys.stdout.write if strategy.rank == 0 else lambda _: None
    write(f"{record['gpu']}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    lender: Lender | None = None
    for case in chosen_cases(options, ranks=strategy.world_size):
        if strategy.max_count(int(time.monotonic() - started > options.budget_s)):
            write(f"{case.name:48s} not begun: the time is over\n")
            continue
        if record["card_bytes"] and needed(case, devices=strategy.world_size) > record["card_bytes"]:
            # Ranks that run out of memory do so one by one, and the others wait for them.
            write(f"{case.name:48s} left out: plan says that it does not fit on this card\n")
            continue
        if lender is None and "shared" in case.method:
            lender = Lender(device)
        if lender is not None and "shared" not in case.method:
            lender = lender.close()
        try:
            row = run(case, device=device, options=options, lender=lender, strategy=strategy)
        except torch.OutOfMemoryError:
            write(f"{case.name:48s} out of memory\n")
            continue
        finally:
            release(device)
        rows.append(row)
        write(f"{line(row)} ({row['took_s']} s)\n")
        sys.stdout.flush()
        if options.out and strategy.rank == 0:
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    if lender is not None:
        lender.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=3, help="the largest models take 2 at most")
    parser.add_argument("--only", nargs="*", default=[""], help="run only rows whose names contain one of these")
    parser.add_argument("--budget-s", type=float, default=370.0, help="begin no row after so many seconds")
    parser.add_argument("--again", type=Path, nargs="+", help="measure nothing: files of earlier --out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.again:
        sys.stdout.writelines(f"{text}\n" for text in compared([read(path) for path in options.again]))
        return
    require_gpu(tiny=options.tiny)
    device = torch.device("cpu" if options.tiny else "cuda")
    world = find_world(os.environ)
    if world is None:
        measure_all(device, SingleDevice(), options)
        return
    if not options.tiny:
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.tiny else "nccl", device_id=None if options.tiny else device)
    measure_all(device, Fsdp2(device, DistributedConfig()), options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
