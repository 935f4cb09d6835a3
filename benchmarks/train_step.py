"""One optimizer step of a fixed workload, ours and TRL's in one run: seconds, memory, share of the peak.

    PYTHONPATH=src python benchmarks/train_step.py [--tiny] [--no-trl] [--only NAME ...] [--repeats 5] [--out FILE.json]
                                                   [--budgets TOKENS TOKENS ...] [--equal GROUPS | --tree]
                                                   [--profile]

The workload is 64 sequences with 128 prompt tokens each (8 prompts with 8 completions) and completions of 16 to
1,024 tokens, 33,120 tokens in all, on the architecture of Qwen2.5-1.5B with random bf16 weights. ``--tiny`` runs
the same code on a small model on the CPU. ``--equal`` has that many groups of 8 completions of 512 tokens instead, as
a whole step of end_to_end.py has 32.

``--tree`` is another workload: 2 groups of 8 trajectories of 10 turns, half of which go on from the fifth turn of
another. Each turn is a sequence, with all before it as its prompt; the rows are the prefix tree, each turn flat, and
each trajectory flat, as one sequence whose observations are masked. The last shows what flat packing needs where turns
are joined before.

``--profile`` says below each row where the time of one more step went, kernel by kernel (kernel_times.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from architectures import LLAMA_3_1_8B, PEAK_BF16_FLOPS, QWEN2_5_1_5B
from kernel_times import kernels_of, table
from needs_gpu import require_gpu
from step_workloads import (
    GENERATIONS,
    GROUPS,
    TRAJECTORIES,
    TREE_GROUPS,
    TURNS,
    tree_workload,
    workload,
)
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config

from lachesis.common.types import Group
from lachesis.config.schema import Activations, AlgorithmConfig, LoraAdapterConfig, NoAdapterConfig, OptimizerConfig
from lachesis.train.batch import pack
from lachesis.train.distributed.strategy import SingleDevice
from lachesis.train.model.activations import keep_activations
from lachesis.train.model.float8 import Float8Switch, compute_in_float8
from lachesis.train.model.forward import Packing
from lachesis.train.model.loading import LoadedModel
from lachesis.train.model.lora import add_lora
from lachesis.train.optim.optimizer import build_optimizer
from lachesis.train.policy import Policy

# Name, tokens a micro-batch, and what builds the step: with the tokens that go forward and the micro-batches.
Plan = tuple[str, int | None, Callable[[], tuple[Callable[[], None], int, int]]]
VARIANTS: dict[str, dict[str, Any]] = {
    "checkpointing": {"activations": "recompute"},
    "selective": {"activations": "selective"},
    "offload": {"activations": "offload"},
    "float8": {"matmul": "float8"},
    "float8_rowwise": {"matmul": "float8_rowwise"},
}


@dataclass(frozen=True)
class Row:
    """One line of the table. ``mfu`` counts 6 FLOP a parameter for each of the workload's tokens."""

    name: str
    tokens_per_microbatch: int | None
    seconds: float
    spread: float
    peak_gb: float
    mfu: float
    forward_tokens: int
    micro_batches: int


# 8B is for LoRA: the masters of all weights would not fit.
SIZES: dict[str, dict[str, Any]] = {
    "1.5B": QWEN2_5_1_5B,
    "8B": LLAMA_3_1_8B,
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


def architecture(size: str) -> Qwen2Config:
    return Qwen2Config(**SIZES[size], max_position_embeddings=32768)


def random_model(
    config: PretrainedConfig, *, device: torch.device, checkpointing: bool, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def our_policy(
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    lora: bool = False,
    activations: Activations = "keep",
    matmul: Literal["auto", "float8", "float8_rowwise"] = "auto",
    packing: Packing = "auto",
) -> Policy:
    model = random_model(config, device=device, checkpointing=False, dtype=dtype)
    keep_activations(model, activations)
    float8 = Float8Switch() if matmul == "auto" else compute_in_float8(model, matmul)
    adapter = LoraAdapterConfig(r=16, alpha=32) if lora else NoAdapterConfig()
    trained = add_lora(model, adapter) if isinstance(adapter, LoraAdapterConfig) else model
    policy = Policy(
        LoadedModel(model=trained, transformer=model, tokenizer=None, float8=float8),  # type: ignore[arg-type]
        strategy=SingleDevice(),
        optimizer_builder=partial(
            build_optimizer, config=OptimizerConfig(learning_rate=1e-6), learning_rate=1e-6, total_steps=1000
        ),
        options=AlgorithmConfig(loss_type="grpo", sampler_correction="sequence_mask"),
        packing=packing,
        compile_layers=device.type == "cuda",
    )
    sys.stdout.write(f"{policy.plan.words}\n")
    return policy


def our_step(
    config: PretrainedConfig,
    groups: list[Group],
    *,
    device: torch.device,
    max_tokens: int,
    share_prefixes: bool = True,
    **kind: Any,
) -> tuple[Callable[[], None], int, int]:
    policy = our_policy(config, device=device, **kind)

    def step() -> None:
        batch = pack(groups, max_tokens=max_tokens, share_prefixes=share_prefixes)  # packing is part of a step
        policy.accumulate(batch)
        policy.step()

    batch = pack(groups, max_tokens=max_tokens, share_prefixes=share_prefixes)
    return step, sum(m.num_inputs for m in batch.micro_batches), len(batch.micro_batches)


def trl_step(
    config: Qwen2Config, groups: list[Group], *, device: torch.device, rows: int, checkpointing: bool
) -> Callable[[], None]:
    """The same step by TRL's own compute_loss, on padded rows, with the accumulation that ``rows`` makes."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    model = random_model(config, device=device, checkpointing=checkpointing)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    count = GROUPS * GENERATIONS
    arguments = GRPOConfig(
        output_dir="/tmp/trl-step",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=count // rows,
        num_generations=GENERATIONS,
        max_completion_length=1024,
        learning_rate=1e-6,
        beta=0.0,
        loss_type="grpo",
        bf16=device.type == "cuda",
        use_cpu=device.type == "cpu",
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "x"}] * count),
    )
    trained = trainer.model
    assert trained is not None
    trained.train()
    trainer.current_gradient_accumulation_steps = count // rows
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    batches = [micro.to_device(device) for micro in padded(groups, rows=rows)]

    def step() -> None:
        for batch in batches:
            inputs = batch.inputs(total_tokens=sum(len(s.completion_ids) for g in groups for s in g.samples))
            trainer.compute_loss(trained, inputs).backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass(frozen=True)
class PaddedRows:
    """Rows as TRL has them: prompts padded on the left, completions on the right."""

    prompt_ids: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    advantages: torch.Tensor

    def to_device(self, device: torch.device) -> PaddedRows:
        return PaddedRows(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def inputs(self, *, total_tokens: int) -> dict[str, torch.Tensor]:
        return {
            "prompt_ids": self.prompt_ids,
            "prompt_mask": torch.ones_like(self.prompt_ids),
            "completion_ids": self.completion_ids,
            "completion_mask": self.completion_mask,
            "advantages": self.advantages,
            "num_items_in_batch": torch.tensor(total_tokens, device=self.prompt_ids.device),
        }


def padded(groups: list[Group], *, rows: int) -> Iterator[PaddedRows]:
    samples = [sample for group in groups for sample in group.samples]
    for start in range(0, len(samples), rows):
        part = samples[start : start + rows]
        longest = max(len(s.completion_ids) for s in part)
        completion = torch.zeros(len(part), longest, dtype=torch.int64)
        mask = torch.zeros_like(completion)
        for i, sample in enumerate(part):
            completion[i, : len(sample.completion_ids)] = torch.tensor(sample.completion_ids)
            mask[i, : len(sample.completion_ids)] = 1
        yield PaddedRows(
            prompt_ids=torch.tensor([s.prompt_ids for s in part]),
            completion_ids=completion,
            completion_mask=mask,
            advantages=torch.tensor([s.advantage for s in part]),
        )


def measure(
    step: Callable[[], None], *, device: torch.device, repeats: int, warmup: int = 2
) -> tuple[float, float, float]:
    """Median seconds, largest deviation from it, and peak memory in GB over the timed steps."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(warmup):
        step()
    synchronize()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return median, max(abs(s - median) for s in seconds), peak


def plans(
    config: Qwen2Config,
    shared: list[Group],
    own_prompts: list[Group],
    *,
    device: torch.device,
    options: argparse.Namespace,
) -> Iterator[Plan]:
    """All rows of the table; a step, its model included, is built when its turn comes."""
    budgets = options.budgets or ([512, 1024] if options.tiny else [8192, 16384, 32768])
    middle = budgets[min(1, len(budgets) - 1)]
    ours = partial(our_step, config, device=device)
    for budget in budgets:
        yield "lachesis", budget, partial(ours, shared, max_tokens=budget)
    yield "lachesis, no shared prompts", middle, partial(ours, own_prompts, max_tokens=middle)
    for name, extra in VARIANTS.items():
        yield f"lachesis, {name}", middle, partial(ours, shared, max_tokens=middle, **extra)
    for budget in budgets:
        yield "lachesis LoRA", budget, partial(ours, shared, max_tokens=budget, lora=True)
    for name, extra in VARIANTS.items():
        yield f"lachesis LoRA, {name}", middle, partial(ours, shared, max_tokens=middle, lora=True, **extra)
    if options.no_trl:
        return
    for rows, checkpointing in ((8, False), (16, False), (8, True)):
        name = f"TRL, {rows} rows" + (", checkpointing" if checkpointing else "")
        step = partial(trl_step, config, shared, device=device, rows=rows, checkpointing=checkpointing)
        yield name, None, lambda step=step, rows=rows: (step(), 0, GROUPS * GENERATIONS // rows)


def tree_plans(config: Qwen2Config, *, device: torch.device, options: argparse.Namespace) -> Iterator[Plan]:
    """The rows of ``--tree``."""
    budget = 1024 if options.tiny else 16384
    by_turn, joined = (
        tree_workload(tiny=options.tiny, vocab_size=config.vocab_size, joined=joined) for joined in (False, True)
    )
    packed = pack(by_turn, max_tokens=1 << 30)
    sys.stdout.write(
        f"{TREE_GROUPS * TRAJECTORIES} trajectories of {TURNS} turns: {packed.flat_tokens:,} tokens flat, "
        f"{packed.distinct_tokens:,} distinct\n"
    )
    ours = partial(our_step, config, device=device, max_tokens=budget)
    yield "prefix tree", budget, partial(ours, by_turn)
    yield "flat, a sequence a trajectory", budget, partial(ours, joined, share_prefixes=False)
    yield "flat, a sequence a turn", budget, partial(ours, by_turn, share_prefixes=False)


def compared_steps(config: Qwen2Config, *, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The table of all other modes."""
    parameters = sum(
        p.numel() for p in random_model(config, device=torch.device("meta"), checkpointing=False).parameters()
    )
    draw = partial(workload, tiny=options.tiny, vocab_size=config.vocab_size, equal=options.equal)
    shared, own_prompts = draw(), draw(shared_prompts=False)
    counted = shared
    if options.tree:
        counted = tree_workload(tiny=options.tiny, vocab_size=config.vocab_size, joined=True)
    tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for g in counted for s in g.samples)
    write = sys.stdout.write
    write(f"{parameters / 1e9:.2f} B parameters, {tokens:,} tokens\n")
    results = []
    flat = plans(config, shared, own_prompts, device=device, options=options)
    for name, budget, build in tree_plans(config, device=device, options=options) if options.tree else flat:
        if not any(part in name or part == f"={name}" for part in options.only):
            continue
        try:
            step, forward_tokens, micro_batches = build()
            seconds, spread, peak = measure(step, device=device, repeats=options.repeats)
            profiled = table(kernels_of(step, device=device), seconds=seconds) if options.profile else ""
        except torch.OutOfMemoryError:
            write(f"{name:32s} {budget or '':>7}  out of memory\n")
            continue
        finally:
            step = None
            torch.compiler.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        mfu = 6 * parameters * tokens / seconds / PEAK_BF16_FLOPS
        row = Row(name, budget, seconds, spread, peak, mfu, forward_tokens, micro_batches)
        results.append(asdict(row))
        computed = f"{forward_tokens:6d} tokens in" if forward_tokens else "padded rows in"
        write(f"{name:32s} {budget or '':>7} {seconds:8.3f} s ±{spread:.3f} {peak:7.1f} GB  MFU {mfu:5.1%}  "
              f"{computed} {micro_batches} micro-batches\n{profiled}")  # fmt: skip
        sys.stdout.flush()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--size", choices=("1.5B", "8B"), default="1.5B", help="8B with --only LoRA")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--tree", action="store_true", help="trajectories of several turns, as a tree and flat")
    parser.add_argument("--equal", type=int, metavar="GROUPS", help="so many groups, all completions equally long")
    parser.add_argument("--budgets", type=int, nargs="+", help="tokens a micro-batch, a row each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[""], help="only rows that contain one of these; =NAME is one row")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes, kernel by kernel")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu(tiny=options.tiny)
    device = torch.device("cpu" if options.tiny else "cuda")
    if options.tiny:
        torch.set_num_threads(1)  # of so little work several threads spend most on waiting for each other
    config = architecture("tiny" if options.tiny else options.size)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU"
    sys.stdout.write(f"{gpu}, torch {torch.__version__}, transformers {transformers.__version__}, ")
    results = compared_steps(config, device=device, options=options)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
