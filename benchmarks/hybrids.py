"""One optimizer step of a hybrid model: packed with shared prompts, padded, and beside a dense model of its size.

    PYTHONPATH=src python benchmarks/hybrids.py [--tiny] [--size 4B] [--lengths equal ragged] [--trained full LoRA]
                                                [--ways packed padded dense] [--budget TOKENS] [--repeats 3]
                                                [--groups 8] [--out FILE.jsonl]

The models have the shapes of Qwen3.5's language models (three gated delta nets to one full attention) and random
weights in bfloat16. ``dense`` is the Qwen3 model of about the same size, packed. A step has ``--groups`` groups of 8
completions with 128 prompt tokens: of 512 tokens (``equal``), or of 16 to 1,024, more short ones than long ones
(``ragged``). A JSON row for each is printed as it is measured, a failure for want of memory too. Install
flash-linear-attention (and causal-conv1d, if there is one for the torch at hand): without it transformers computes the
scans by torch, which is much slower, packed and padded.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import json
import platform
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from needs_gpu import require_gpu
from step_workloads import EQUAL_TOKENS, GENERATIONS, completion_lengths, groups_of
from train_step import measure, our_policy
from transformers import AutoConfig, PretrainedConfig

from lachesis.common.types import Group
from lachesis.train.batch import pack
from lachesis.train.policy import Policy

_QWEN3_5: dict[str, Any] = {
    "vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
# By size: the hybrid, and the dense model beside it.
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2B": (
        _QWEN3_5 | {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
                    "intermediate_size": 6144, "linear_num_value_heads": 16},
        _QWEN3 | {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    ),
    "4B": (
        _QWEN3_5 | {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
                    "intermediate_size": 9216, "linear_num_value_heads": 32},
        _QWEN3 | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
    ),
    "9B": (
        _QWEN3_5 | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
                    "intermediate_size": 12288, "linear_num_value_heads": 32, "tie_word_embeddings": False},
        _QWEN3 | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
                  "tie_word_embeddings": False},
    ),
    "tiny": (_TINY, _TINY),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--size", choices=[size for size in SIZES if size != "tiny"], default="4B")
    parser.add_argument("--lengths", nargs="+", choices=("equal", "ragged"), default=["equal", "ragged"])
    parser.add_argument("--trained", nargs="+", choices=("full", "LoRA"), default=["full", "LoRA"])
    parser.add_argument(
        "--ways", nargs="+", choices=("packed", "padded", "dense"), default=["packed", "padded", "dense"]
    )
    parser.add_argument("--budget", type=int, help="tokens a micro-batch; padded ones have their padding beside")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="to append the rows to")
    options = parser.parse_args()
    require_gpu(tiny=options.tiny)
    size = "tiny" if options.tiny else options.size
    for trained, lengths, way in itertools.product(options.trained, options.lengths, options.ways):
        row = {"size": size, "trained": trained, "lengths": lengths, "way": way}
        row |= measured(size, trained=trained, lengths=lengths, way=way, options=options) | surroundings(options.tiny)
        line = json.dumps(row)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        if options.out:
            with options.out.open("a") as file:
                file.write(f"{line}\n")


def measured(size: str, *, trained: str, lengths: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a step took, or why it could not be taken. ``tokens_per_s`` counts each sequence whole."""
    device = torch.device("cpu" if options.tiny else "cuda")
    config = shape(size, dense=way == "dense")
    groups = [*drawn_groups(lengths, groups=options.groups, tiny=options.tiny, vocab_size=config.vocab_size)]
    tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for g in groups for s in g.samples)
    budget = options.budget or (1024 if options.tiny else 16384)
    try:
        taken = steps_of(config, groups, budget=budget, device=device, trained=trained, way=way, options=options)
    except torch.OutOfMemoryError as error:
        return {"failed": str(error).splitlines()[0]}
    finally:  # the policy is gone by now
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    batch = pack(groups, max_tokens=budget, share_prefixes=way != "padded")
    return taken | {
        "tokens_per_s": round(tokens / taken["seconds"]), "tokens": tokens,
        "forward_tokens": sum(micro.num_inputs for micro in batch.micro_batches),
        "micro_batches": len(batch.micro_batches), "budget": budget,
    }  # fmt: skip


def steps_of(
    config: PretrainedConfig,
    groups: list[Group],
    *,
    budget: int,
    device: torch.device,
    trained: str,
    way: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return seconds and memory of a step of a policy, after one to warm up."""
    policy = our_policy(
        config,
        device=device,
        dtype=torch.float32 if options.tiny else torch.bfloat16,
        lora=trained == "LoRA",
        activations="recompute",
        packing="padded" if way == "padded" else "packed",
    )
    take = partial(step, policy, groups, budget=budget)
    seconds, spread, peak = measure(take, device=device, repeats=options.repeats, warmup=1)
    parameters = sum(p.numel() for p in policy.transformer.parameters())
    return {
        "seconds": round(seconds, 4), "spread": round(spread, 4), "peak_gb": round(peak, 1),
        "parameters_b": round(parameters / 1e9, 3),
    }  # fmt: skip


def step(policy: Policy, groups: list[Group], *, budget: int) -> None:
    policy.accumulate(pack(groups, max_tokens=budget, share_prefixes=policy.plan.packed))
    policy.step()


def shape(size: str, *, dense: bool) -> PretrainedConfig:
    hybrid, beside = SIZES[size]
    if dense:
        own = {name: value for name, value in beside.items() if not name.startswith("linear_")}
        return AutoConfig.for_model("qwen3", **own, max_position_embeddings=32768)
    return AutoConfig.for_model("qwen3_5_text", **hybrid, max_position_embeddings=32768)


def drawn_groups(lengths: str, *, groups: int, tiny: bool, vocab_size: int) -> Iterator[Group]:
    every = (
        [EQUAL_TOKENS // (8 if tiny else 1)] * (8 * GENERATIONS)
        if lengths == "equal"
        else completion_lengths(tiny=tiny)
    )
    by_group = [every[start : start + GENERATIONS] for start in range(0, len(every), GENERATIONS)]
    yield from groups_of((by_group * -(-groups // len(by_group)))[:groups], vocab_size=vocab_size, seed=1)


def surroundings(tiny: bool) -> dict[str, str]:
    packages = {}
    for name in ("fla-core", "causal-conv1d"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed"
    device = platform.processor() or "CPU" if tiny else torch.cuda.get_device_name()
    return {"device": device, "torch": torch.__version__, "transformers": transformers.__version__, **packages}


if __name__ == "__main__":
    main()
