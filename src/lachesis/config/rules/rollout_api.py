"""Rules for groups that come from environments over a rollout API (``source.kind: atropos``)."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.common.types import Finding
from lachesis.config.rules.base import Rule, changed, note, problem, warning
from lachesis.config.schema import LachesisConfig, SamplingConfig

# Of the sampling section, what the trainer itself counts with.
_COUNTS = ("num_generations", "max_completion_length")


def evaluates(config: LachesisConfig) -> bool:
    """Whether there are held-out problems."""
    data = config.data
    return data.eval_path is not None or data.eval_split is not None or data.eval_size > 0


def _engine(config: LachesisConfig) -> Iterator[Finding]:
    if config.source.kind == "atropos" and config.engine.kind == "embedded":
        yield problem(
            "rollout_api",
            "source.kind is atropos, whose environments generate over HTTP, and engine.kind embedded lives in the "
            "trainer's process and has no address; set engine.kind: embedded_server or vllm, which the run starts, or "
            "http for a server that runs already, each with a bridge such as bridge.kind: shared_vllm",
        )


def _pipeline(config: LachesisConfig) -> Iterator[Finding]:
    pipeline = config.pipeline
    if config.source.kind != "atropos":
        return
    if pipeline.async_prefetch:
        yield note(
            "rollout_api",
            "pipeline.async_prefetch, prefetch_depth and max_staleness do nothing with source.kind atropos: "
            "environments generate while the trainer trains in any case, and bound themselves how far ahead they are "
            "(--env.max_batches_offpolicy)",
        )
    if pipeline.refill_zero_signal > 0:
        yield warning(
            "rollout_api",
            "pipeline.refill_zero_signal does nothing with source.kind atropos: environments cannot be asked for other "
            "groups; replay_size replaces those without signal",
        )


def _batch(config: LachesisConfig) -> Iterator[Finding]:
    source = config.source
    if source.kind != "atropos" or source.batch_size is None:
        return
    keys = [*changed(config, "batch", "prompts_per_step"), *changed(config, "sampling", "num_generations")]
    if keys:
        yield note(
            "rollout_api",
            f"{' and '.join(keys)} do{'es' if len(keys) == 1 else ''} nothing: source.batch_size says how many "
            "completions a batch has, and environments how many a group",
        )


def _sampling(config: LachesisConfig) -> Iterator[Finding]:
    if config.source.kind != "atropos":
        return
    names = ["temperature"] if evaluates(config) else [n for n in SamplingConfig.model_fields if n not in _COUNTS]
    if config.algorithm.loss_type != "dr_grpo" and not evaluates(config):
        names.append("max_completion_length")
    if keys := changed(config, "sampling", *names):
        yield note(
            "rollout_api",
            f"{', '.join(keys)}: with source.kind atropos the environments decide how they sample; give it to them",
        )


def _held_out(config: LachesisConfig) -> Iterator[Finding]:
    if config.source.kind != "atropos" or not evaluates(config):
        return
    if config.data.path is None and config.data.eval_path is None:
        yield problem(
            "rollout_api", "data.eval_split and data.eval_size are of data.path, which is missing; set data.eval_path"
        )
    elif config.data.path is not None and config.data.eval_path is not None:
        yield note(
            "rollout_api", "data.path does nothing with source.kind atropos: the environments have their own problems"
        )


ROLLOUT_API_RULES: tuple[Rule, ...] = (_engine, _pipeline, _batch, _sampling, _held_out)
