"""Writes gpu-guide.md from benchmarks/raw/memory*.json and `lachesis plan`: ``python docs/generate_gpu_guide.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lachesis.config.schema import LachesisConfig
from lachesis.plan.cards import CARDS, GB, OWN_GPU_UTILIZATION, CardUse, card_use, process_bytes
from lachesis.plan.plan import plan
from lachesis.plan.shapes import FoundShape, find_shape
from lachesis.plugins.planning.fit import Change, _steps, _Uses, apply_change, fit

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
from memory_rows import MODELS, Measurement, error, kept, largest_error, plan_of  # noqa: E402

TARGET = Path(__file__).with_name("gpu-guide.md")
ROWS = BENCHMARKS / "raw" / "README.md"
ROOMY_GB = 10**6  # of a card on which everything fits
# Of a context: prompt, completion, tokens of a micro-batch.
CONTEXTS = {1024: (128, 896, 4096), 8192: (1024, 7168, 8192)}
VLLM, SERVER = {"kind": "vllm"}, {"kind": "vllm", "devices": "1"}
LORA = {"kind": "lora", "r": 16, "alpha": 32}
# Engine, bridge, adapter and quantization by method: on one card, and apart.
TOGETHER: dict[str, dict[str, Any]] = {
    "full": {"engine": VLLM, "bridge": {"kind": "shared_vllm"}},
    "LoRA": {"engine": VLLM, "bridge": {"kind": "lora_only", "share_base": True}, "adapter": LORA},
    "QLoRA": {"engine": {"kind": "embedded", "max_batch_size": 64}, "adapter": LORA},
}
APART: dict[str, dict[str, Any]] = {
    "full": {"engine": SERVER, "bridge": {"kind": "broadcast"}},
    "LoRA": {"engine": SERVER, "bridge": {"kind": "lora_nccl"}, "adapter": LORA},
    "QLoRA": {"engine": SERVER, "bridge": {"kind": "lora_nccl"}, "adapter": LORA},
}

# Layouts of the table of cards: on how many, and by method of the guide which of memory.py's it is.
LAYOUTS: dict[str, tuple[int, dict[str, str | None]]] = {
    "one card, shared": (1, {"full": "full, shared", "LoRA": "LoRA, shared", "QLoRA": None}),
    "one each": (1, {"full": "full", "LoRA": "LoRA", "QLoRA": "QLoRA"}),
    "two": (2, {"full": "full", "LoRA": "LoRA"}),
    "four": (4, {"full": "full", "LoRA": "LoRA"}),
}

PROPOSED, PROPOSED_SIZES = (24, 40, 48, 80), ("8B", "14B", "24B", "32B")
NO_CARD = "none"

INTRODUCTION = """\
# GPU guide: how much memory a model needs

<!-- Written by docs/generate_gpu_guide.py from benchmarks/raw/memory*.json and lachesis plan; do not edit. -->

```bash
lachesis plan config.yaml              # memory by phase, and the cards that have it
lachesis plan config.yaml --fit 40     # what to change for a card of 40 GB
```

It loads nothing, and asks the hub only for config.json. This page comes from the same arithmetic. GB are 10^9 bytes. A
context is prompt and completion: 128 + 896 tokens in micro-batches of 4,096, or 1,024 + 7,168 in micro-batches of
8,192. Memory follows the tokens of a micro-batch, not the number of prompts.

## Measured

"""

MEASURED = """\
# Memory of a step, measured and planned

<!-- Written by docs/generate_gpu_guide.py from these files and lachesis plan; do not edit. -->

`benchmarks/memory.py`: peak of the trainer's tensors over a step of two full micro-batches, and what its process takes
of the card, each beside what `lachesis plan` says. "Shared" trains on weights that another process holds, as vLLM's.
Layers are compiled; seconds are the fastest step after the first. Of several GPUs, sharded by FSDP2, the figures are
those of one.
"""

NOT_MEASURED_TEXT = """
These have no row, so the [GPU guide](../../docs/gpu-guide.md) only plans them:
"""
CARDS_TEXT = """
## How much memory: which card

Planned, with `model.gradient_checkpointing` and AdamW. A cell such as `33/37 (40)` has the GB for a context of 1,024
and of 8,192 tokens, and in brackets the smallest cards (24, 40, 48, 80 or 141 GB) that have them.

- **One card, shared**: trainer and engine on one copy of the weights, with the smallest share that lets vLLM serve 16
  sequences. Full: `shared_vllm`; LoRA: `lora_only` with `share_base`; QLoRA: the embedded engine.
- **One each**: the trainer's card; the last column is the engine's.
- **Two, four**: each of the trainer's cards, sharded by FSDP2, with the engine elsewhere.
"""


PROPOSALS_TEXT = """
## 24, 40, 48 and 80 GB

What `plan --fit` chooses for all weights with `shared_vllm` at a context of 1,024 tokens. `--set` takes the words as
they are.
"""
ORDER_TEXT = """
## When it does not fit: in this order

From what costs only time to what changes training, with what each saves for 8B, all weights, vLLM beside it with a copy
to itself, a context of 8,192 and micro-batches of 16,384. Then: more cards (`torchrun`), or shorter completions.
"""


def configured(method: str, context: int, sections: dict[str, Any], *, checkpointing: bool = True) -> LachesisConfig:
    """A configuration of the guide."""
    prompt, completion, tokens = CONTEXTS[context]
    model = {"gradient_checkpointing": checkpointing, "quantization": "nf4" if method == "QLoRA" else "none"}
    return LachesisConfig.model_validate(
        {
            "run": {"steps": 10},
            "model": {"path": "of-the-table", **model},
            "data": {"path": "data.jsonl", "max_prompt_length": prompt},
            "rewards": {"functions": ["rewards.right"]},
            "sampling": {"max_completion_length": completion},
            "batch": {"max_tokens_per_microbatch": tokens},
            **sections,
        }
    )


def sources(measurements: Sequence[Measurement], *, directory: str) -> Iterator[str]:
    """Where and when each file was measured, and how far plan is from all of them."""
    for number, one in enumerate(measurements, 1):
        yield f"{number}. [{one.path.name}]({directory}{one.path.name}): {one.machine}, rows: {len(one.rows)}"
    rows = [row for one in measurements for row in one.rows]
    yield f"\nThe largest error of `plan` over these {len(rows)} rows is {largest_error(rows):.1%}."


def measured_rows(measurements: Sequence[Measurement]) -> Iterator[str]:
    """The table of what was measured."""
    yield "| model | method | GPUs | context | | measured: tensors | plan | error | process | plan | a step | run |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    order = list(MODELS)
    rows = [(row, number) for number, one in enumerate(measurements) for row in one.rows]
    for row, number in sorted(rows, key=lambda pair: (order.index(pair[0]["size"]), pair[0]["devices"])):
        measured, expected = row["measured"], plan_of(row)
        reserved = measured["reserved"]  # null where it was read after the canary had given memory back
        process = "" if reserved is None else f"{(reserved + measurements[number].context_bytes) / GB:.1f} GB"
        cells = (
            row["size"],
            row["method"],
            str(row["devices"]),
            f"{row['context']:,}",
            row["also"],
            f"{measured['peak'] / GB:.1f} GB",
            f"{expected.peak('trainer') / GB:.1f}",
            f"{error(row):+.1%}",
            process,
            f"{process_bytes(expected, 'trainer') / GB:.1f}",
            f"{min(measured['seconds']):.2f} s of {measured['tokens']:,} tokens",
            str(number + 1),
        )
        yield f"| {' | '.join(cells)} |"


def not_measured(measurements: Sequence[Measurement]) -> Iterator[str]:
    """By layout the sizes and methods that no row has, at either context."""
    found = {(row["size"], row["method"], row["devices"]) for one in measurements for row in one.rows}
    for layout, (devices, methods) in LAYOUTS.items():
        sizes: list[str] = []
        for size in MODELS:
            missing = [method for method, measured in methods.items() if (size, measured, devices) not in found]
            if missing:
                sizes.append(size if len(missing) == len(methods) else f"{size} {' and '.join(missing)}")
        if sizes:
            yield f"- {layout}: {'all' if sizes == list(MODELS) else ', '.join(sizes)}"


def too_large() -> Iterator[str]:
    """Why full training of some sizes is measured on no single card: what the smaller context takes of one."""
    yield ""
    for size, name in MODELS.items():
        model = find_shape(name)
        assert model is not None, name
        needed = use_of("full", min(CONTEXTS), APART["full"], model).trainer
        if smallest(needed) == NO_CARD:
            yield (
                f"- {size} full has no row on one card because none holds it: with AdamW's states on the card it needs "
                f"{needed / GB:.0f} GB by `plan`, the engine not counted, and the largest card here has "
                f"{max(CARDS)} GB."
            )


def smallest(size: int) -> str:
    """Return the GB of the smallest card that has so many bytes."""
    return next((str(card) for card in CARDS if size <= card * GB), NO_CARD)


def use_of(method: str, context: int, sections: dict[str, Any], model: FoundShape, *, devices: int = 1) -> CardUse:
    config = configured(method, context, sections)
    return card_use(config, plan(config, device="cuda", devices=devices, found=model), card_gb=1000)


def cell(sizes: list[int]) -> str:
    """Return the GB of both contexts, and in brackets those of the cards that have them."""
    cards = [smallest(size) for size in sizes]
    text = "/".join(f"{size / GB:.0f}" for size in sizes)
    return f"{text} ({'/'.join(dict.fromkeys(cards))})"


def card_rows() -> Iterator[str]:
    """The table of what fits where."""
    yield "| model | method | one card, shared | one each: trainer | two | four | one each: engine |"
    yield "|---|---|---|---|---|---|---|"
    for size, name in MODELS.items():
        model = find_shape(name)
        assert model is not None, name
        for method in TOGETHER:
            together = [use_of(method, context, TOGETHER[method], model) for context in CONTEXTS]
            apart = [use_of(method, context, APART[method], model) for context in CONTEXTS]
            several = [
                "-"
                if method == "QLoRA"
                else cell([use_of(method, context, APART[method], model, devices=n).trainer for context in CONTEXTS])
                for n in (2, 4)
            ]
            cells = (
                size,
                method,
                cell([use.trainer + use.engine_least for use in together]),
                cell([use.trainer for use in apart]),
                *several,
                cell([round(use.engine_least / OWN_GPU_UTILIZATION) for use in apart]),
            )
            yield f"| {' | '.join(cells)} |"


def steps_with_savings(config: LachesisConfig, *, found: FoundShape) -> Iterator[tuple[Change, int, int]]:
    """Yield all changes in turn, with the bytes that each saves, and the need after it."""
    use, current = _Uses(ROOMY_GB, 1, found), config
    for step in _steps(config):
        changed = apply_change(current, step, devices=1)
        if changed is not None and (saved := use.least(current) - use.least(changed)) > 0:
            current = changed
            yield step, saved, use.least(current)


def order_rows() -> Iterator[str]:
    """What each change saves, one after the other, for a model of 8B with all weights trained beside vLLM."""
    model = find_shape(MODELS["8B"])
    assert model is not None
    start = {"engine": VLLM, "bridge": {"kind": "broadcast"}}
    config = configured("full", 8192, start, checkpointing=False)
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"max_tokens_per_microbatch": 16384})})
    yield "| change | it costs | saves | then it takes |"
    yield "|---|---|---|---|"
    for change, saved, taken in steps_with_savings(config, found=model):
        words = "<br>".join(f"`{word}`" for word in change.words())
        yield f"| {words} | {change.costs} | {saved / GB:.1f} GB | {taken / GB:.1f} GB |"


def proposals() -> Iterator[str]:
    """What `plan --fit` proposes for the usual cards, and in words where it has nothing to propose."""
    yield f"| model | {' | '.join(f'{card} GB' for card in PROPOSED)} |"
    yield "|---" * (1 + len(PROPOSED)) + "|"
    without: list[str] = []
    for size in PROPOSED_SIZES:
        model = find_shape(MODELS[size])
        assert model is not None
        config = configured("full", 1024, {"engine": VLLM, "bridge": {"kind": "shared_vllm"}}, checkpointing=False)
        cells: list[str] = []
        too_small: list[str] = []
        for card in PROPOSED:
            found = fit(config, card_gb=card, found=model)
            if found is None:
                too_small.append(str(card))
                cells.append("nothing fits")
            else:
                words = [f"`{word}`" for *_, parts in found.in_words() for word in parts]
                cells.append("<br>".join([*words, f"{found.use.total / GB:.0f} GB"]))
        yield f"| {size} | {' | '.join(cells)} |"
        if too_small:
            *_, (_, _, least) = steps_with_savings(config, found=model)
            cards = " and ".join(too_small)
            without.append(
                f"Of {size} nothing that is tried fits on {cards} GB: with all changes it takes {least / GB:.1f} GB."
            )
    if without:
        yield f"\n{' '.join(without)} Then: more cards (`torchrun`), or a smaller model."


def render() -> str:
    """Return the whole page."""
    measurements = kept()
    rows = [row for one in measurements for row in one.rows]
    return INTRODUCTION + "\n".join(
        [
            f"{len(rows)} steps of 1.5B to 24B on one to four H100s and H200s were measured; `plan` was off by at most "
            f"{largest_error(rows):.1%} ([all rows](../benchmarks/raw/README.md)).",
            CARDS_TEXT,
            *card_rows(),
            PROPOSALS_TEXT,
            *proposals(),
            ORDER_TEXT,
            *order_rows(),
            "",
        ]
    )


def render_measured() -> str:
    """Return the page with all measured rows, beside the files that they come from."""
    measurements = kept()
    rows = [*measured_rows(measurements), NOT_MEASURED_TEXT, *not_measured(measurements), *too_large()]
    return "\n".join([MEASURED, *sources(measurements, directory=""), "", *rows, ""])


if __name__ == "__main__":
    TARGET.write_text(render())
    ROWS.write_text(render_measured())
