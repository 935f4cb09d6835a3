"""Steps over long sequences on one card, beside what prime-rl publishes for the same shapes.

    PYTHONPATH=src python benchmarks/long_rows.py [--tiny] [--only NAME ...] [--activations selective] [--out FILE.json]

The architectures of Qwen3-0.6B (all weights, AdamW with float32 masters) and Qwen3-4B (LoRA, r=16, all linear layers)
with random bf16 weights, sequences of 16,384 and 65,536 tokens, one a micro-batch, 65,536 tokens a step; nearly all
tokens count in the loss. The share of the card's peak is by prime-rl's formula, so that it can be held beside theirs:
6 FLOP a parameter and 12 times layers, hidden size and length for each token, as if attention were not causal.
``--tiny`` runs the same code on a small model on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from needs_gpu import require_gpu
from step_workloads import random_tokens
from train_step import PEAK_BF16_FLOPS, measure, our_step, random_model
from transformers import AutoConfig, PretrainedConfig

from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.config.schema import SPARING
from lachesis.plan.shapes import known_architecture

PROMPT_TOKENS, STEP_TOKENS = 256, 65_536
# prime-rl's benchmarks of one H100, shares of the peak by its formula.
PUBLISHED = {
    ("Qwen3-0.6B", 16_384): 0.111,
    ("Qwen3-0.6B", 65_536): 0.268,
    ("Qwen3-4B", 16_384): 0.217,
    ("Qwen3-4B", 65_536): 0.374,
}


@dataclass(frozen=True)
class Shape:
    """One row: a model, how it is trained, and tokens of a sequence."""

    model: str
    lora: bool
    length: int

    @property
    def name(self) -> str:
        return f"{self.model} {'LoRA' if self.lora else 'full'} {self.length}"


SHAPES = [Shape(model, lora, length) for model, lora in (("Qwen3-0.6B", False), ("Qwen3-4B", True))
          for length in (16_384, 65_536)]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """``times`` is the share over the published one."""

    name: str
    activations: str
    seconds: float
    spread: float
    peak_gb: float
    tokens_per_second: float
    mfu: float
    published: float
    times: float


def architecture(name: str, *, tiny: bool) -> PretrainedConfig:
    known = known_architecture(f"Qwen/{name}")
    assert known is not None, "the table has it"
    fields: dict[str, Any] = known | {"max_position_embeddings": 1 << 17}
    if tiny:
        fields |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        fields |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512}
    return AutoConfig.for_model(**fields)


def sequences(length: int, *, count: int, vocab_size: int) -> list[Group]:
    """Groups of one completion each, that fills the length with its prompt."""
    generator = torch.Generator().manual_seed(1)
    groups = []
    for number in range(count):
        prompt = random_tokens(min(PROMPT_TOKENS, length // 2), vocab_size=vocab_size, generator=generator)
        completion = random_tokens(length - len(prompt), vocab_size=vocab_size, generator=generator)
        unknown = (float("nan"),) * len(completion)
        sample = Sample(prompt, completion, unknown, "stop", VersionSpan(0, 0), advantage=1.0 if number % 2 else -1.0)
        groups.append(Group(prompt=Prompt(id=str(number), token_ids=prompt, text=""), samples=(sample,)))
    return groups


def flops_per_token(config: PretrainedConfig, *, length: int) -> float:
    """prime-rl's count, its perf counter's: 6 · parameters + 12 · layers · hidden · length."""
    parameters = sum(
        p.numel() for p in random_model(config, device=torch.device("meta"), checkpointing=False).parameters()
    )
    return 6 * parameters + 12 * config.num_hidden_layers * config.hidden_size * length


def run(shape: Shape, *, device: torch.device, options: argparse.Namespace) -> Row:
    config = architecture(shape.model, tiny=options.tiny)
    length = shape.length // 256 if options.tiny else shape.length
    count = max(1, (STEP_TOKENS // 256 if options.tiny else STEP_TOKENS) // length)
    groups = sequences(length, count=count, vocab_size=config.vocab_size)
    step, tokens, _ = our_step(
        config, groups, device=device, max_tokens=length, lora=shape.lora, activations=options.activations
    )
    seconds, spread, peak = measure(step, device=device, repeats=options.repeats, warmup=1)
    mfu = flops_per_token(config, length=length) * tokens / seconds / PEAK_BF16_FLOPS
    published = PUBLISHED[shape.model, shape.length]
    return Row(
        shape.name, options.activations, seconds, spread, peak, tokens / seconds, mfu, published, mfu / published
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--activations", choices=("keep", *SPARING), default="selective")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[""], help="run only rows whose names contain one of these")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu(tiny=options.tiny)
    device = torch.device("cpu" if options.tiny else "cuda")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU"
    write = sys.stdout.write
    write(f"{gpu}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    rows = []
    for shape in SHAPES:
        if not any(part in shape.name for part in options.only):
            continue
        row = run(shape, device=device, options=options)
        rows.append(asdict(row))
        write(f"{row.name:24s} {row.activations:10s} {row.seconds:7.3f} s ±{row.spread:.3f} {row.peak_gb:6.1f} GB "
              f"{row.tokens_per_second:8.0f} tokens/s  MFU {row.mfu:5.1%}, published {row.published:5.1%}, "
              f"{row.times:.2f} times\n")  # fmt: skip
        sys.stdout.flush()
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
