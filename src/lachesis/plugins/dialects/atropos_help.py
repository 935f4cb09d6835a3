"""Text of `lachesis grpo --help`: every flag, in groups, with the key that it sets."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from lachesis.config.keys import find_keys, value_in_words
from lachesis.plugins.dialects.atropos import SPELLINGS, SWITCHES, TRAINER
from lachesis.plugins.dialects.table import UNSET, Entry

_GROUPS: Mapping[str, Sequence[str]] = {
    "Model": ("model", "dtype", "device", "train-layer-indices"),
    "Engine, and how weights reach it": (
        "weight-bridge-mode", "single-copy", "vllm", "gpu-memory-utilization", "max-model-len", "nccl-init-method",
        "init-method", "nccl-sync-every-step", "no-nccl-sync-every-step",
    ),
    "Rollout API": ("atropos-url", "batch-size", "gradient-accumulation-steps", "seq-len"),
    "Training": (
        "training-steps", "learning-rate", "warmup-steps", "optimizer", "adafactor-scale-parameter", "kl-coef",
        "clip-eps",
    ),
    "LoRA": ("lora",),
    "Output": ("save-path", "checkpoint-interval", "use-wandb", "wandb"),
}  # fmt: skip
_USAGE = """\
Usage: lachesis grpo --model-name MODEL [--weight-bridge-mode MODE] [FLAGS]

Trains with the Atropos trainer's flags on what environments push to a rollout API. Dashes and underscores are the
same. In brackets is the key of Lachesis's own that a flag sets; `lachesis explain KEY` says more.

--weight-bridge-mode is one of
  none          a checkpoint, on which the engine is started again (the run starts it)
  lora_restart  LoRA, and the engine is started again with the adapter (the run starts it)
  shared_vllm   one copy of the weights, in the engine's memory
  lora_only     LoRA, swapped into the running engine
  lora_nccl     LoRA, sent to the running engine
  broadcast     all weights, sent to the running engine
  reload        a checkpoint, loaded by the running engine
With the last five the engine runs already: `lachesis serve --model MODEL`, for LoRA with --enable-lora.
`lachesis run` takes the same flags, and starts the engine, the rollout API and an environment too.
"""
_OWN = """\
Lachesis's own
  --resume           Resume from the last checkpoint in --save-path.
  --overwrite        Replace an existing run.
  --set KEY=VALUE    Set a key of Lachesis, as in --set evaluation.every_steps=10.
  --benchmark        Print the times of all steps at the end.
  --ui               Show the run on a live page while it runs.
  --help             This."""
_WIDTH = 110

# Where a flag says less than its key, or something else.
_MEANINGS: Mapping[str, str] = {
    "weight-bridge-mode": "How new weights reach the engine, as above; none if unset.",
    "single-copy": "The same as --weight-bridge-mode shared_vllm.",
    "dtype": "Of the weights, here and in an engine that the run starts: bfloat16, float16, float32, or auto, which is "
    "the checkpoint's (float32 on a CPU); auto if unset.",
    "device": "Where the trainer's model lives: cpu or cuda; a GPU, if there is one, if unset.",
    "optimizer": "adamw, adamw_8bit, adamw_cpu (states on the CPU) or adafactor; adamw if unset.",
    "vllm-config-path": "The engine's vllm_bridge_config.json, with shared_vllm; auto, or unset, looks for it.",
    "vllm-port": "Port of the engine on this machine; 9001 if unset. Several engines: --set engine.urls=[...].",
    "vllm-gpu": "GPU of an engine that the run starts, as in CUDA_VISIBLE_DEVICES; the trainer's if unset.",
    "vllm-restart-interval": "Steps between two transfers of weights; 3 if unset.",
    "nccl-sync-every-step": "With lora_nccl, transfer after each step; so it is if unset.",
    "no-nccl-sync-every-step": "With lora_nccl, transfer every --vllm-restart-interval steps.",
    "init-method": "As --nccl-init-method, if it is tcp://HOST:PORT.",
    "batch-size": "Most sequences in one forward pass; 2 if unset.",
    "gradient-accumulation-steps": "Times --batch-size: the sequences of one optimizer step; 1 if unset.",
    "lora-dropout": "Dropout on the adapter's input while training; 0.05 if unset.",
    "lora-target-modules": "Names of the modules to adapt, one or more; every linear layer but the head if unset.",
    "lora-layer-indices": "Adapt these decoder layers only, as 20-31 or 0-3,28-31; all if unset.",
    "train-layer-indices": "Without LoRA, train these decoder layers only, as 20-31 or 0-3,28-31; all if unset.",
    "learning-rate": "Peak rate; if unset 1e-6, or 1e-5 with LoRA.",
    "training-steps": "Number of optimizer steps.",
    "clip-eps": "Ratios are clipped to 1 - epsilon and 1 + epsilon.",
    "kl-coef": "Weight of the KL divergence to the model from before training; 0 leaves it out.",
    "save-path": "Directory of the run; trained_model_checkpoints if unset.",
    "use-wandb": "Log to Weights & Biases.",
    "wandb-project": "Project in Weights & Biases; grpo if unset.",
    "wandb-group": "Group in Weights & Biases.",
    "wandb-run-name": "Run in Weights & Biases; named as the run directory if unset.",
}


def help_text() -> str:
    """Every flag of the Atropos trainer with the key that it sets, in groups, and our own."""
    left = {name: entry for name, entry in TRAINER.entries.items() if name not in (*SPELLINGS, "benchmark")}
    parts = [_USAGE]
    for group, prefixes in _GROUPS.items():
        names = [name for name in left if any(name == p or name.startswith(f"{p}-") for p in prefixes)]
        parts += _group(group, [left.pop(name) for name in names])
    parts += _group("Accepted without an effect, or refused", list(left.values()))
    return "\n".join([*parts, _OWN])


def _group(title: str, entries: Sequence[Entry]) -> list[str]:
    return [title, *(line for entry in entries for line in _flag(entry)), ""] if entries else []


def _flag(entry: Entry) -> list[str]:
    """Return lines with the flag under all its names, and its meaning below."""
    names = [entry.name, *(other for other, name in SPELLINGS.items() if name == entry.name)]
    value = "" if entry.name in SWITCHES else " " + entry.name.rpartition("-")[2].upper()
    first = "  " + ", ".join(f"--{name}" for name in names) + value
    return [first, *textwrap.wrap(_meaning(entry), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]


def _meaning(entry: Entry) -> str:
    if not entry.path:
        return f"{entry.note[0].upper()}{entry.note[1:]}."
    default = "" if entry.default is UNSET else f", default {value_in_words(entry.default)}"
    text = _MEANINGS.get(entry.name) or find_keys(entry.path)[0].description
    return f"{text} [{entry.path}{default}]"
