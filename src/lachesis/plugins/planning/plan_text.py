"""Text of a plan, and of its fit on cards of the usual sizes."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.config.schema import OWN_GPU_UTILIZATION, LachesisConfig
from lachesis.plan.cards import CARDS, GB, card_use, decide_activations
from lachesis.plan.memory import ALWAYS, TRAINING, Phase, Place
from lachesis.plan.plan import Plan, plan, size_text

_PHASES: dict[tuple[Phase, ...], str] = {
    ALWAYS: "",
    TRAINING: "  while training",
    ("passes",): "  in forward and backward",
    ("update",): "  in the update",
    ("generation",): "  while generating",
    ("passes", "generation"): "  from one transfer to the next",
}


def plan_lines(planned: Plan) -> list[str]:
    """Return the plan as lines of text."""
    batches = planned.batches
    steps = "steps unknown" if batches.steps is None else f"{batches.steps:,} optimizer steps"
    size, prompts = planned.lengths, "groups as the environment makes them"
    if batches.prompts is not None:
        prompts = f"{batches.prompts:,} prompt{'s' if batches.prompts != 1 else ''}"
    lines = [
        "batches",
        f"  step          {prompts}, {batches.completions:,} completions, at most "
        f"{batches.tokens:,} tokens in {batches.micro_batches:,} micro-batches of up to {size.microbatch:,}"
        + (f", {-(-batches.micro_batches // planned.mesh.parts):,} passes of each device" * (planned.devices > 1)),
        f"  run           {steps}" + (f" over {batches.problems:,} problems" if batches.problems is not None else ""),
    ]
    if batches.start_steps:
        before = "" if batches.steps is None else f"; {batches.start_steps + batches.steps:,} steps in all"
        lines.append(
            f"  start         {batches.start_steps:,} steps of sft before, on {batches.answers:,} answers each, "
            f"{batches.start_steps * batches.answers:,} answers{before}"
        )
    if batches.steps is not None:
        lines.append(
            f"                {batches.steps * batches.completions:,} completions trained on, {batches.transfers:,} "
            f"weight transfers, {batches.evaluations:,} evaluations"
        )
    if planned.shape is not None and planned.trained is not None:
        lines += ["model", f"  parameters    {planned.shape.parameters:,}, of which {planned.trained:,} are trained"]
        places: tuple[Place, ...] = ("trainer", "engine")
        for place in places:
            lines += list(_memory_lines(planned, place))
        lines += list(_disk_lines(planned))
    return lines + [f"note: {text}" for text in planned.notes]


def _memory_lines(planned: Plan, place: Place) -> Iterator[str]:
    parts = [part for part in planned.memory if part.place == place]
    several = place == "trainer" and planned.devices > 1
    layout = f", {planned.mesh.words}" if planned.mesh.words else ""
    each = f", each of {planned.devices} devices{layout}" if several else ""
    yield f"memory of the {place} ({planned.device}{each}): {size_text(planned.peak(place))}"
    for part in parts:
        yield f"  {part.name:<18}{size_text(part.bytes):>10}{_PHASES[part.phases]}"


def _disk_lines(planned: Plan) -> Iterator[str]:
    if planned.checkpoint is None or planned.export is None:
        return
    yield "disk"
    yield f"  {'checkpoint':<18}{size_text(planned.checkpoint):>10}  x {planned.checkpoints_kept} kept"
    yield f"  {'final':<18}{size_text(planned.export):>10}"
    if planned.exports_kept:
        yield f"  {'transfers':<18}{size_text(planned.export):>10}  x {planned.exports_kept} kept"


def card_lines(config: LachesisConfig, planned: Plan) -> Iterator[str]:
    """Yield a line for each size of card: if the plan fits, and its memory; ``planned`` is for ``cuda``."""
    yield f"on one card, each of {planned.devices}" if planned.devices > 1 else "on one card"
    for size in CARDS:
        decided = decide_activations(config, card_gb=size, devices=planned.devices)
        counted = planned if decided is config else plan(decided, device="cuda", devices=planned.devices)
        use = card_use(decided, counted, card_gb=size)
        parts = f"trainer {use.trainer / GB:.1f} GB"
        if use.engine:
            parts += f", engine {use.engine / GB:.1f} GB" + (f" (its share is {use.share:g})" if use.share else "")
        elif not use.engine_fits:
            parts += f"; the engine's own needs {use.engine_least / OWN_GPU_UTILIZATION / GB:.1f} GB"
        if decided is not config:
            parts += f"; activations {decided.model.activations}"
        if use.aside:
            parts += f", {use.aside / GB:.1f} GB for an update that it keeps aside"
        elif use.by_host and use.fits:
            parts += "; weight updates are staged in host memory"
            if use.room_share:
                parts += f" (set engine.gpu_memory_utilization <= {use.room_share:g} to keep them on the GPU)"
        short = "" if use.engine_fits or not use.engine else f"; the engine needs {use.engine_least / GB:.1f} GB"
        verdict = "tight" if use.tight else "fits" if use.fits else "too small"
        yield f"  {f'{size} GB':<8}{verdict:<11}{parts}{short}"
