"""Rules about memory, deadlines and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.common.types import Finding
from lachesis.config.rules.base import Rule, note, warning
from lachesis.config.schema import CheckpointConfig, LachesisConfig


def _microbatch(config: LachesisConfig) -> Iterator[Finding]:
    budget = config.batch.max_tokens_per_microbatch
    longest = (config.data.max_prompt_length or 0) + config.sampling.max_completion_length
    if config.source.kind == "atropos":
        longest = config.source.max_sequence_length
    if budget < longest:
        yield note(
            "microbatch",
            f"batch.max_tokens_per_microbatch {budget} is less than one longest sequence ({longest} tokens): "
            "such a sequence goes alone and sets the peak memory",
        )


def _deadlines(config: LachesisConfig) -> Iterator[Finding]:
    deadlines = config.deadlines
    if deadlines.batch_s < deadlines.generation_s:
        yield warning(
            "deadlines",
            f"deadlines.batch_s {deadlines.batch_s:g} is less than generation_s {deadlines.generation_s:g}, "
            "so the wait for a batch ends before generation may; raise it",
        )


def _checkpoint(config: LachesisConfig) -> Iterator[Finding]:
    checkpoint, steps = config.checkpoint, config.run.steps
    if not checkpoint.save_final and checkpoint.every_steps == 0:
        yield warning(
            "checkpoint",
            "checkpoint.save_final is false and every_steps 0: a run that ends leaves no trained weights",
        )
    if steps is not None and checkpoint.every_steps > steps:
        yield note(
            "checkpoint",
            f"checkpoint.every_steps {checkpoint.every_steps} is more than run.steps {steps}: no checkpoint "
            "is written unless the run is stopped",
        )
    if checkpoint.every_steps == 0 and checkpoint.keep_last != CheckpointConfig.model_fields["keep_last"].default:
        yield note("checkpoint", "checkpoint.keep_last does nothing while checkpoint.every_steps is 0")


PROCESS_RULES: tuple[Rule, ...] = (_microbatch, _deadlines, _checkpoint)
