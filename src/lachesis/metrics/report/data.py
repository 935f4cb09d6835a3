"""What the report shows, as JSON-safe values: read from a run directory, cut to size. No HTML here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lachesis.common.errors import DataError
from lachesis.common.run_files import run_paths
from lachesis.common.types import LEVELS, UNKNOWN_VERSIONS, EvalResult
from lachesis.metrics.names import (
    BY_ENVIRONMENT,
    GENERATION_OF,
    GPU_MEMORY_IN_USE,
    GPU_UTILIZATION,
    TRAINING_OF,
    describe,
    format_number,
    format_seconds,
    format_share,
    reward_functions,
)
from lachesis.metrics.sinks.jsonl import MetricsLog, StepLine, read_metrics
from lachesis.metrics.sinks.tape import read_lines, tape_files
from lachesis.web.tokens import best_and_worst, token_spans

MAX_POINTS = 2000
MAX_BARS = 400
MAX_STEPS = 60
MAX_SAMPLES = 8
MAX_TOKENS = 240_000
MIN_TOKENS_A_SAMPLE = 160
MAX_PROMPT_CHARACTERS = 2000
MAX_PIECE_CHARACTERS = 60
USUAL_PIECE_CHARACTERS = 6
MAX_HELD_OUT = 20
MAX_HELD_OUT_CHARACTERS = 400

TRAINING = (("train_time", "Training"), ("sync_time", "Optimizer and sync"))
SAMPLING = (("generation_time", "Generation"), ("reward_time", "Rewards"))
# In the place of sampling where that goes on elsewhere: beside training, or in environments.
WAITING = (("data_fetch_time", "Waiting for a batch"),)

# What a line is called beside others in one chart.
LABELS = {
    "mean_kl": "sampler",
    "kl_reference": "base model",
    "clipped_fraction": "all",
    "clip_fraction_low": "below",
    "clip_fraction_high": "above",
    "completion_length/mean": "mean",
    "completion_length/max": "longest",
    "generation_tokens_per_s": "generation",
    "train_tokens_per_s": "training",
    "logprob_diff_mean": "mean",
    "logprob_diff_max": "largest",
    "gpu_memory_gb": "used",
    "gpu_memory_reserved_gb": "reserved",
}
LOGGED = "reward_metrics/"


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """One chart: the metrics drawn in it, the first of which gives title, unit and healthy range.

    ``band`` names the metric whose size is drawn on both sides of the line, ``log`` allows a logarithmic
    axis, ``exact`` forbids smoothing, ``floor`` and ``ceiling`` are ends that the axis shows,
    ``least`` is the smallest range it covers, so that noise does not look like news.
    """

    names: tuple[str, ...]
    title: str = ""
    band: str = ""
    wide: bool = False
    log: bool = False
    exact: bool = False
    floor: float | None = None
    ceiling: float | None = None
    least: float = 0.0


CHARTS = (
    ChartPlan(("reward",), band="reward_std", wide=True, floor=0.0),
    ChartPlan(("evaluation/accuracy",), wide=True, floor=0.0, ceiling=1.0),
    ChartPlan(("mean_kl", "kl_reference"), title="KL divergence", floor=0.0, least=1e-3),
    ChartPlan(("distill_kl",), floor=0.0),
    ChartPlan(("sft_loss",), floor=0.0),
    ChartPlan(("mean_ratio",), least=0.02),
    ChartPlan(("clipped_fraction", "clip_fraction_low", "clip_fraction_high"), floor=0.0, least=0.01),
    ChartPlan(("entropy",), floor=0.0),
    ChartPlan(("completion_length/mean", "completion_length/max"), floor=0.0),
    ChartPlan(("grad_norm",), log=True),
    ChartPlan(("learning_rate",), exact=True, floor=0.0),
    ChartPlan(("generation_tokens_per_s", "train_tokens_per_s"), title="Speed", floor=0.0),
    ChartPlan(("zero_std_fraction",), floor=0.0, ceiling=1.0),
    ChartPlan(("staleness",), floor=0.0, least=1.0),
    ChartPlan(("loss",), least=1e-4),
    ChartPlan(("truncated_fraction",), floor=0.0, least=0.01),
    ChartPlan(("logprob_diff_mean", "logprob_diff_max"), title="Trainer against engine", log=True),
    ChartPlan(("gpu_memory_gb", "gpu_memory_reserved_gb"), floor=0.0),
)


@dataclass(frozen=True, slots=True)
class Run:
    """The files of a run, read."""

    directory: Path
    config: Mapping[str, Any]
    log: MetricsLog


def read_run(run_dir: Path) -> Run:
    """Read configuration and metrics; a run without config.yaml is shown without its settings.

    Raises:
        DataError: no metrics.jsonl, or one of the files is malformed.
    """
    paths = run_paths(Path(run_dir))
    config: Any = {}
    if paths["config"].exists():
        try:
            config = yaml.safe_load(paths["config"].read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise DataError(
                f"{paths['config']} is no YAML: {' '.join(str(error).split())}",
                remedy="restore the file, or remove it to see the report without settings",
            ) from error
    return Run(Path(run_dir), config if isinstance(config, Mapping) else {}, read_metrics(paths["metrics"]))


def setting(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value under a dotted key of a resolved configuration."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def run_seconds(steps: Sequence[StepLine]) -> float:
    """Seconds in steps: their step_time where it was measured, else from the first to the last."""
    if steps and all("step_time" in line.values for line in steps):
        return sum(line.values["step_time"] for line in steps)
    return steps[-1].time - steps[0].time if steps else 0.0


def headline(log: MetricsLog) -> dict[str, Any]:
    """The result in one figure: held-out accuracy where it was measured, else reward; first and last value."""
    if log.evaluations:
        first, last = log.evaluations[0], log.evaluations[-1]
        return {
            "label": "held-out accuracy",
            "first": format_share(first.accuracy) if len(log.evaluations) > 1 else "",
            "last": format_share(last.accuracy),
            "better": last.accuracy >= first.accuracy,
        }
    rewards = [line.values["reward"] for line in log.steps if "reward" in line.values]
    return {
        "label": "mean reward",
        "first": format_number(rewards[0]) if len(rewards) > 1 else "",
        "last": format_number(rewards[-1]) if rewards else "–",
        "better": not rewards or rewards[-1] >= rewards[0],
    }


def facts(run: Run) -> list[tuple[str, str]]:
    """Label and value of the small figures under the headline."""
    steps, evaluations = run.log.steps, run.log.evaluations
    found = [("steps", _of_total(len(steps), steps, setting(run.config, "run.steps")))]
    seconds = run_seconds(steps)
    found.append(("time in steps", format_seconds(seconds)))
    if steps and seconds:
        found.append(("a step", format_seconds(seconds / len(steps)) if seconds >= len(steps) else
                      f"{1000 * seconds / len(steps):.0f} ms"))  # fmt: skip
    if evaluations:
        found.append(("held-out problems", str(evaluations[-1].problems)))
    rewards = [line.values["reward"] for line in steps if "reward" in line.values]
    if rewards and evaluations:
        found.append(("reward", f"{format_number(rewards[0])} → {format_number(rewards[-1])}"))
    tokens = sum(line.values.get("tokens_generated", 0.0) for line in steps)
    if tokens:
        found.append(("tokens generated", format_number(tokens)))
    return found


def _of_total(count: int, steps: Sequence[StepLine], total: Any) -> str:
    last = steps[-1].step if steps else count
    return f"{last} of {total}" if isinstance(total, int) and last < total else str(last)


def descriptors(config: Mapping[str, Any]) -> list[str]:
    """What was trained and how, in a few words each; only what the configuration says."""
    words = [_shortened(str(setting(config, "model.path", "")))]
    if setting(config, "adapter.kind") == "lora":
        words.append(f"LoRA r={setting(config, 'adapter.r')}")
    elif setting(config, "adapter.kind") == "none":
        words.append("all weights")
    if loss := setting(config, "algorithm.loss_type"):
        words.append(f"loss {loss}")
    prompts, generations = (
        setting(config, "batch.prompts_per_step"),
        setting(config, "sampling.num_generations"),
    )
    if prompts and generations:
        words.append(f"{prompts} × {generations} completions a step")
    rate = setting(config, "optimizer.learning_rate")
    if isinstance(rate, int | float):
        words.append(f"learning rate {format_number(rate)}")
    return [word for word in words if word]


def _shortened(path: str) -> str:
    """The end of a path on this machine; a hub id or a relative path as it is."""
    return str(Path("…", *Path(path).parts[-3:])) if Path(path).is_absolute() else path


def date_of(steps: Sequence[StepLine]) -> str:
    """When the first step ended, in UTC; empty before it."""
    if not steps:
        return ""
    return datetime.fromtimestamp(steps[0].time, tz=UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")


def findings(steps: Sequence[StepLine]) -> list[dict[str, Any]]:
    """One entry a rule: its latest level and message, where and how often; the worst first.

    What was resolved comes last, whatever its level was, which is its worst.
    """
    entries: dict[str, dict[str, Any]] = {}
    for line in steps:
        for finding in line.findings:
            entry = entries.setdefault(finding.rule, {"first": line.step, "count": 0, "worst": finding.level})
            entry |= {**asdict(finding), "last": line.step}
            entry["worst"] = max(entry["worst"], finding.level, key=LEVELS.index)
            if finding.resolved is None:
                entry["count"] += 1
            else:
                entry["level"] = entry["worst"]
    return sorted(
        entries.values(),
        key=lambda entry: (entry["resolved"] is not None, -LEVELS.index(entry["level"]), entry["first"]),
    )


def unusual(steps: Sequence[StepLine]) -> list[str]:
    """The values of the last step that are outside of their healthy range, in words."""
    values = steps[-1].values if steps else {}
    found = [(describe(name), value) for name, value in values.items() if math.isfinite(value)]
    return [
        f"{metric.title.lower()} {format_number(value)} (usual: {_range(metric.healthy)})"
        for metric, value in found
        if metric.healthy is not None and not _inside(value, metric.healthy)
    ]


def _inside(value: float, healthy: tuple[float | None, float | None]) -> bool:
    low, high = healthy
    return (low is None or value >= low) and (high is None or value <= high)


def _range(healthy: tuple[float | None, float | None]) -> str:
    low, high = healthy
    if low is None or high is None:
        return f"at least {low:g}" if low is not None else f"at most {high:g}"
    return f"{low:g} to {high:g}"


def charts(log: MetricsLog) -> list[dict[str, Any]]:
    """All charts that have data."""
    functions = reward_functions(log.steps[-1].values) if log.steps else []
    by_function = ChartPlan(tuple(f"rewards/{name}/mean" for name in functions), title="Rewards by function")
    by_environment = ChartPlan(_beginning_with(BY_ENVIRONMENT, log), title="Rewards by environment")
    several = [plan for plan in (by_function, by_environment) if len(plan.names) > 1]
    processes = (
        ChartPlan(_beginning_with(GENERATION_OF, log), title="Generation by engine", floor=0.0),
        ChartPlan(_beginning_with(TRAINING_OF, log), title="Training by rank", floor=0.0),
    )
    gpus = (
        ChartPlan(_beginning_with(GPU_UTILIZATION, log), title="GPU utilization", floor=0.0, ceiling=1.0),
        ChartPlan(_beginning_with(GPU_MEMORY_IN_USE, log), title="GPU memory in use", floor=0.0),
    )
    # What reward functions gave to log_metric.
    logged = [ChartPlan((name,), title=name.removeprefix(LOGGED)) for name in _beginning_with(LOGGED, log)]
    plans = (*CHARTS[:2], *several, *CHARTS[2:], *(plan for plan in (*processes, *gpus) if plan.names), *logged)
    if not any(line.values.get("staleness", 0.0) > 0 for line in log.steps):  # as in runs that take turns
        plans = tuple(plan for plan in plans if "staleness" not in plan.names)
    return [chart for plan in plans if (chart := _chart(plan, log))["series"]]


def _beginning_with(prefix: str, log: MetricsLog) -> tuple[str, ...]:
    """The metrics of one kind that any step has, in the order of the numbers or names that they end in."""
    found = {name for line in log.steps for name in line.values if name.startswith(prefix)}
    return tuple(sorted(found, key=lambda name: (not name[len(prefix) :].isdecimal(), len(name), name)))


def _chart(plan: ChartPlan, log: MetricsLog) -> dict[str, Any]:
    series = [series for name in plan.names if (series := series_of(name, plan.band, log)) is not None]
    return {**chart_of(plan), "series": series}


def chart_of(plan: ChartPlan) -> dict[str, Any]:
    """What a chart says of itself; its series are another matter."""
    metric = describe(plan.names[0])
    return {
        "id": metric.name,
        "title": plan.title or metric.title,
        "unit": metric.unit,
        "explanation": metric.explanation,
        "healthy": None if metric.healthy is None else list(metric.healthy),
        **{name: getattr(plan, name) for name in ("wide", "log", "exact", "floor", "ceiling", "least")},
    }


def series_of(name: str, band: str, log: MetricsLog) -> dict[str, Any] | None:
    """A line of a chart, cut to size; ``None`` where a run has no such value."""
    points = _points(name, log)
    if not points:
        return None
    chosen = downsample([y for _, y in points], limit=MAX_POINTS)
    series: dict[str, Any] = {
        "name": name,
        "label": LABELS.get(name) or describe(name).title.removeprefix("Reward "),
        "x": [points[index][0] for index in chosen],
        "y": [_rounded(points[index][1]) for index in chosen],
    }
    if band:
        widths = {line.step: line.values[band] for line in log.steps if band in line.values}
        series["band"] = [_rounded(widths.get(step, math.nan)) for step in series["x"]]
    return series


def _points(name: str, log: MetricsLog) -> list[tuple[int, float]]:
    if name.startswith("evaluation/"):
        field = name.removeprefix("evaluation/")
        return [(result.step, getattr(result, field)) for result in log.evaluations]
    return [(line.step, line.values[name]) for line in log.steps if name in line.values]


def downsample(values: Sequence[float], *, limit: int) -> list[int]:
    """Indices of at most ``limit`` values: the ends, and the lowest and highest of each stretch."""
    count = len(values)
    if count <= limit:
        return list(range(count))
    buckets = (limit - 2) // 2
    chosen = {0, count - 1}
    for bucket in range(buckets):
        stretch = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        known = [index for index in stretch if math.isfinite(values[index])]
        if known:
            chosen |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
    return sorted(chosen)


def timing(steps: Sequence[StepLine]) -> dict[str, Any] | None:
    """Seconds a step by part, averaged over stretches of steps; None where steps were not timed.

    The parts add up to the step: of sampling that goes on beside training, what the trainer waited for.
    """
    timed = [line for line in steps if "step_time" in line.values]
    named = (*(WAITING if _sampled_elsewhere(timed) else SAMPLING), *TRAINING)
    parts = [(name, title) for name, title in named if any(name in line.values for line in timed)]
    if not timed or not parts:
        return None
    stretches = min(len(timed), MAX_BARS)
    edges = [index * len(timed) // stretches for index in range(stretches + 1)]
    rows = [timed[a:b] for a, b in pairwise(edges)]
    columns = [(name, title, [_seconds(row, name) for row in rows]) for name, title in parts]
    whole = [_mean(row, "step_time") for row in rows]
    rest = [max(0.0, total - sum(column[index] for *_, column in columns)) for index, total in enumerate(whole)]
    columns.append(("other", "Other", rest))
    return {
        "x": [row[-1].step for row in rows],
        "parts": [
            {"name": name, "label": title, "y": [_rounded(value) for value in column]}
            for name, title, column in columns
        ],
        "mean": _rounded(_mean(timed, "step_time")),
    }


def _sampled_elsewhere(timed: Sequence[StepLine]) -> bool:
    """Whether sampling was no part of what the trainer waited for, or more than that."""
    sampling = sum(_seconds(timed, name) for name, _ in SAMPLING)
    waited = any("data_fetch_time" in line.values for line in timed)
    return waited and not 0 < sampling <= _mean(timed, "data_fetch_time")


def _seconds(lines: Sequence[StepLine], name: str) -> float:
    """Mean seconds of a part; of rewards, those in which nothing was generated."""
    return _mean(lines, name) - (_mean(lines, "hidden_reward_time") if name == "reward_time" else 0.0)


def _mean(lines: Sequence[StepLine], name: str) -> float:
    values = [value for line in lines if math.isfinite(value := line.values.get(name, 0.0))]
    return sum(values) / len(values) if values else 0.0


def _rounded(value: float) -> float | None:
    """Five digits are more than a chart can show; JSON has no NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def result_sentence(first: EvalResult | None, last: EvalResult | None, *, steps: int, seconds: float) -> str:
    """ "held-out accuracy 0.44 -> 0.93 (512 problems, 300 steps, 62 s)", or what is known of it."""
    span = f"{steps} steps, {format_seconds(seconds)}"
    if last is None:
        return f"no held-out problems ({span})"
    start = f"{first.accuracy:.2f} -> " if first is not None and first.step != last.step else ""
    return f"held-out accuracy {start}{last.accuracy:.2f} ({last.problems} problems, {span})"


def rollouts(directory: Path, *, groups: int) -> list[dict[str, Any]]:
    """Evenly spread steps of the tape, the first and the last among them, with ``groups`` groups each.

    The number of completions and, if need be, their length are cut so that all steps together stay below
    :data:`MAX_TOKENS` tokens. Within a group the best completions come first.

    Raises:
        DataError: a file of the tape is malformed.
    """
    files = tape_files(directory)
    steps = _spread(list(files), limit=MAX_STEPS)
    if not steps or groups < 1:
        return []
    tokens_a_group = MAX_TOKENS // (len(steps) * groups)
    return [
        {
            "step": step,
            "groups": [_group(line, budget=tokens_a_group) for line in read_lines(files[step], limit=groups)],
        }
        for step in steps
    ]


def held_out(directory: Path) -> dict[str, Any] | None:
    """Completions of the last evaluation that was kept, the worst first; None where none was.

    Raises:
        DataError: a file is malformed.
    """
    files = tape_files(directory)
    if not files:
        return None
    step = max(files)
    rows = [
        {
            "prompt": _cut(line["prompt"]["text"], MAX_HELD_OUT_CHARACTERS),
            "completion": _cut(sample["text"], MAX_HELD_OUT_CHARACTERS),
            "reward": math.nan if sample["reward"] is None else sample["reward"],
        }
        for line in read_lines(files[step])
        for sample in line["samples"]
    ]
    rows.sort(key=lambda row: (not math.isnan(row["reward"]), row["reward"]))
    shown = [row | {"reward": format_number(row["reward"])} for row in rows[:MAX_HELD_OUT]]
    return {"step": step, "count": len(rows), "rows": shown}


def _spread(steps: list[int], *, limit: int) -> list[int]:
    if len(steps) <= limit:
        return steps
    return [steps[round(index * (len(steps) - 1) / (limit - 1))] for index in range(limit)]


def _group(line: Mapping[str, Any], *, budget: int) -> dict[str, Any]:
    samples = line["samples"]
    longest = max((len(sample["completion_ids"]) for sample in samples), default=0)
    kept = max(2, min(MAX_SAMPLES, budget // max(1, min(longest, MIN_TOKENS_A_SAMPLE))))
    logged = line.get("logged", {})
    samples = [
        {**sample, "logged": {name: values[index] for name, values in logged.items() if index < len(values)}}
        for index, sample in enumerate(samples)
    ]
    chosen = best_and_worst(samples, score=lambda sample: sample["reward"], limit=kept)
    prompt = line["prompt"]
    return {
        "id": prompt["id"],
        "prompt": _cut(prompt["text"], MAX_PROMPT_CHARACTERS),
        "size": len(samples),
        "samples": [_sample(sample, limit=max(16, budget // len(chosen))) for sample in chosen],
    }


def _sample(sample: Mapping[str, Any], *, limit: int) -> dict[str, Any]:
    count = len(sample["completion_ids"])
    shown: dict[str, Any] = {
        "reward": sample["reward"],
        "advantage": sample["advantage"],
        "finish": sample["finish_reason"],
        "tokens": count,
        "logged": [f"{name} {_cut(str(value), MAX_PIECE_CHARACTERS)}" for name, value in sample["logged"].items()],
        "version": "unknown" if sample["versions"][0] == UNKNOWN_VERSIONS.first else sample["versions"][0],
    }
    pieces = sample.get("pieces")
    if pieces is None:
        return shown | {"text": _cut(sample["text"], 4 * limit)}
    kept = _within(pieces, limit=limit)
    given = [not sampled for sampled in (sample["mask"] or ())[: len(kept)]]
    return shown | token_spans(kept, sample["logprobs"], given=given, after=count - len(kept))


def _within(pieces: Sequence[str], *, limit: int) -> list[str]:
    """The first ``limit`` pieces, or fewer where they are unusually long."""
    kept: list[str] = []
    characters = 0
    for piece in pieces[:limit]:
        kept.append(_cut(piece, MAX_PIECE_CHARACTERS))
        characters += len(kept[-1])
        if characters > USUAL_PIECE_CHARACTERS * limit:
            break
    return kept


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
