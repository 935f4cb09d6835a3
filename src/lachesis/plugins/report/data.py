"""Files of a run, and the report's texts and figures about it. No HTML here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from lachesis.common.errors import DataError
from lachesis.common.run_files import run_paths
from lachesis.common.types import LEVELS, EvalResult
from lachesis.metrics.health.rules import urgency
from lachesis.metrics.names import format_number, format_seconds, format_share, gain_words
from lachesis.metrics.sinks.jsonl import MetricsLog, StepLine, read_metrics
from lachesis.plugins.report.metric_descriptions import Metric, describe

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader, if PyYAML has it, is ten times as fast


@dataclass(frozen=True, slots=True)
class Run:
    """Contents of a run's files."""

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
            config = yaml.load(paths["config"].read_text(encoding="utf-8"), Loader=LOADER) or {}
        except yaml.YAMLError as error:
            raise DataError(
                f"{paths['config']} is not YAML: {' '.join(str(error).split())}",
                remedy="restore the file, or remove it to see the report without settings",
            ) from error
    return Run(Path(run_dir), config if isinstance(config, Mapping) else {}, read_metrics(paths["metrics"]))


def how_the_model_ran(run_dir: Path) -> str:
    """Return the run's line on packing, kernels and compilation of its model; empty if it has written none.

    Raises:
        DataError: the run's state.json is malformed.
    """
    path = run_paths(run_dir)["state"]
    try:
        state: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", remedy="restore the file, or remove it") from error
    return str(state.get("model", "")) if isinstance(state, Mapping) else ""


def setting(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value under a dotted key of a resolved configuration."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def run_seconds(steps: Sequence[StepLine]) -> float:
    """Return the seconds spent in steps: their step_time if measured, else from the first to the last."""
    if steps and all("step_time" in line.values for line in steps):
        return sum(line.values["step_time"] for line in steps)
    return steps[-1].time - steps[0].time if steps else 0.0


def headline(log: MetricsLog) -> dict[str, Any]:
    """Return the result in one figure: held-out accuracy if measured, else reward; first and last value."""
    if log.evaluations:
        first, last = log.evaluations[0], log.evaluations[-1]
        return {
            "label": "held-out accuracy",
            "first": format_share(first.accuracy) if len(log.evaluations) > 1 else "",
            "last": format_share(last.accuracy),
            "better": last.accuracy >= first.accuracy,
            "note": _evidence(last),
        }
    rewards = [line.values["reward"] for line in log.steps if "reward" in line.values]
    return {
        "label": "mean reward",
        "first": format_number(rewards[0]) if len(rewards) > 1 else "",
        "last": format_number(rewards[-1]) if rewards else "–",
        "better": not rewards or rewards[-1] >= rewards[0],
        "note": "",
    }


def _evidence(result: EvalResult) -> str:
    """Return "n = 24 problems, 95 % interval 51 to 85 %"."""
    low, high = accuracy_interval(result.accuracy, result.problems)
    return f"n = {result.problems} problems, 95 % interval {100 * low:.0f} to {100 * high:.0f} %"


def accuracy_interval(accuracy: float, problems: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share that was found on so many problems.

    Source: Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    if problems < 1:
        return 0.0, 1.0
    z2 = 1.959964**2 / problems
    middle = (accuracy + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * accuracy * (1 - accuracy) + z2 * z2 / 4) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def facts(run: Run) -> list[tuple[str, str]]:
    """Return label and value of the small figures under the headline."""
    steps, evaluations = run.log.steps, run.log.evaluations
    found = [("steps", _of_total(len(steps), steps, setting(run.config, "run.steps")))]
    seconds = run_seconds(steps)
    found.append(("time in steps", format_seconds(seconds)))
    if steps and seconds:
        found.append(("a step", format_seconds(seconds / len(steps)) if seconds >= len(steps) else
                      f"{1000 * seconds / len(steps):.0f} ms"))  # fmt: skip
    rewards = [line.values["reward"] for line in steps if "reward" in line.values]
    if rewards and evaluations:
        found.append(("reward", f"{format_number(rewards[0])} → {format_number(rewards[-1])}"))
    tokens = sum(line.values.get("tokens_generated", 0.0) for line in steps)
    if tokens:
        found.append(("tokens generated", format_number(tokens)))
    for name, of in (evaluations[-1].benchmarks if evaluations else {}).items():
        found.append((f"{name}{': ' + gain_words(of) if 'gain' in of else ''}", format_share(of["mean"])))
    return found


def _of_total(count: int, steps: Sequence[StepLine], total: Any) -> str:
    last = steps[-1].step if steps else count
    return f"{last} of {total}" if isinstance(total, int) and last < total else str(last)


def descriptors(config: Mapping[str, Any]) -> list[str]:
    """Describe what was trained and how, in a few words each; only from the configuration."""
    words = [_shortened(str(setting(config, "model.path", "")))]
    if setting(config, "adapter.kind") == "lora":
        words.append(f"LoRA r={setting(config, 'adapter.r')}")
    elif setting(config, "adapter.kind") == "none":
        words.append("all weights")
    if loss := setting(config, "algorithm.loss_type"):
        words.append(f"loss {loss}")
    prompts, generations = (setting(config, "batch.prompts_per_step"), setting(config, "sampling.num_generations"))
    if prompts and generations:
        words.append(f"{prompts} × {generations} completions a step")
    rate = setting(config, "optimizer.learning_rate")
    if isinstance(rate, int | float):
        words.append(f"learning rate {format_number(rate)}")
    return [word for word in words if word]


def _shortened(path: str) -> str:
    """Return the name of a model's directory, with its parent's if it only says "model"; a hub id unchanged."""
    parts = [part for part in Path(path).parts if not part.startswith(".")]
    return (
        str(Path(*parts[-2 if parts[-1] in ("model", "final", "merged") else -1 :]))
        if Path(path).is_absolute()
        else path
    )


def date_of(steps: Sequence[StepLine]) -> str:
    """Return when the first step ended, in UTC; empty before it."""
    if not steps:
        return ""
    return datetime.fromtimestamp(steps[0].time, tz=UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")


def findings(steps: Sequence[StepLine]) -> list[dict[str, Any]]:
    """Return one entry per rule: its latest level and message, its steps and count; the worst first.

    Resolved findings come last, whatever their level, which is their worst.
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
        entries.values(), key=lambda entry: (entry["resolved"] is not None, urgency(entry["rule"], entry["level"]))
    )


@dataclass(frozen=True, slots=True)
class Unusual:
    """Texts about values outside their healthy ranges, or NaN: in the last step, and in earlier ones."""

    now: tuple[str, ...]
    earlier: tuple[str, ...]


def unusual(steps: Sequence[StepLine]) -> Unusual:
    """Return the charted values outside their healthy range, or NaN, at any step.

    A metric is named once: if it is unusual in the last step, only with that value.
    """
    now: list[str] = []
    earlier: list[str] = []
    for name in dict.fromkeys(name for line in steps for name in line.values):
        metric = describe(name)
        off = {line.step: line.values[name] for line in steps if _is_off(line.values.get(name), metric)}
        if off and steps[-1].step in off:
            now.append(_unusual_now(metric, off[steps[-1].step]))
        elif off:
            earlier.append(_unusual_earlier(metric, off))
    return Unusual(tuple(now), tuple(earlier))


def _is_off(value: float | None, metric: Metric) -> bool:
    return value is not None and not (math.isfinite(value) and (not metric.judged or metric.is_usual(value)))


def _unusual_now(metric: Metric, value: float) -> str:
    usual = "" if metric.healthy is None else f" (usual: {_range(metric.healthy)})"
    return f"{metric.title.lower()} {format_number(value)}{usual}"


def _unusual_earlier(metric: Metric, off: Mapping[int, float]) -> str:
    """Describe as in "gradient norm 3 in step 2 (usual: 0.001 to 1)", or by first, last and worst of several."""
    worst = max(off.values(), key=lambda value: _distance(value, metric.healthy))
    usual = "" if metric.healthy is None else f"usual: {_range(metric.healthy)}"
    title, first, last = metric.title.lower(), min(off), max(off)
    if len(off) == 1:
        return f"{title} {format_number(worst)} in step {first}" + (f" ({usual})" if usual else "")
    words = [f"{len(off)} times", f"at worst {format_number(worst)}", usual]
    return f"{title} in steps {first} to {last} ({', '.join(word for word in words if word)})"


def _distance(value: float, healthy: tuple[float | None, float | None] | None) -> float:
    """Return how far a value is outside its range; NaN is the farthest."""
    low, high = healthy or (None, None)
    if not math.isfinite(value):
        return math.inf
    return max(0.0 if low is None else low - value, 0.0 if high is None else value - high)


def _range(healthy: tuple[float | None, float | None]) -> str:
    low, high = healthy
    if low is None or high is None:
        return f"at least {low:g}" if low is not None else f"at most {high:g}"
    return f"{low:g} to {high:g}"


def result_sentence(first: EvalResult | None, last: EvalResult | None, *, steps: int, seconds: float) -> str:
    """Return "held-out accuracy 0.44 -> 0.93 (512 problems, 300 steps, 62 s)", or as much of it as is known."""
    span = f"{steps} steps, {format_seconds(seconds)}"
    if last is None:
        return f"no held-out problems ({span})"
    start = f"{first.accuracy:.2f} -> " if first is not None and first.step != last.step else ""
    return f"held-out accuracy {start}{last.accuracy:.2f} ({last.problems} problems, {span})"
