"""The status of a run, read only from its files."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, ValidationError

from lachesis.common.errors import ConfigError
from lachesis.common.run_files import run_paths
from lachesis.common.types import Finding
from lachesis.metrics.health.rules import urgency
from lachesis.metrics.names import format_number, format_seconds
from lachesis.metrics.sinks.jsonl import StepLine, read_metrics
from lachesis.run.directory import condition

RunState = Literal["loading", "running", "paused", "suspended", "finished", "stopped", "failed", "gone"]
_GOING_ON = ("loading", "running", "paused")

MAIN_METRICS = ("reward", "loss", "grad_norm", "entropy", "mean_kl")
# In the order of a step. If the trainer generates itself, "waiting for data" is generation and rewards.
SECONDS = {
    "step_time": "whole",
    "data_fetch_time": "waiting for data",
    "generation_time": "generation",
    "reward_time": "rewards",
    "train_time": "training",
    "sync_time": "sync",
    "eval_time": "evaluation",
    "checkpoint_time": "checkpoint",
}
# Parts of a step below this many seconds are not shown.
_WORTH_SAYING_S = 1e-3
# Number of last steps whose mean time gives the expected remaining time.
_RECENT_STEPS = 20

# Strict numbers: neither a bool nor text is accepted.
_STRICT = ConfigDict(strict=True)


@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=_STRICT)
class NamedWait:
    """A wait: ``name`` says who waits for whom; times in seconds, ``since`` from 1970.

    ``limit_s`` is ``None`` if there is no limit, ``setting`` is the key that sets it (may be empty); ``background`` is
    True for waits in threads other than the training loop's.
    """

    name: str = ""
    since: float = 0.0
    limit_s: float | None = None
    setting: str = ""
    background: bool = False


@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=_STRICT)
class NamedEngine:
    """Row of one of several engines, as :class:`~lachesis.engines.fleet.EngineRow` when ``live.json`` was written."""

    url: str
    state: str
    version: int | None = None
    in_flight: int = 0
    expected_tokens: int = 0
    completed: int = 0
    for_s: float = 0.0
    reason: str = ""


class _StateFile(BaseModel):
    """The fields of state.json that are read."""

    model_config = _STRICT

    status: Literal["starting", "running", "paused", "finished", "stopped", "failed"]
    error: str | None = None
    pid: int | None = None
    host: str | None = None
    began: float | None = None
    updated: float | None = None
    step: int | None = None
    steps: int | None = None


class _LiveFile(BaseModel):
    """The fields of live.json that are read."""

    model_config = _STRICT

    pid: int | None = None
    time: float | None = None
    waits: tuple[NamedWait, ...] = ()
    engines: tuple[NamedEngine, ...] = ()


FileT = TypeVar("FileT", _StateFile, _LiveFile)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run. ``None`` means unknown or not yet known; times are in seconds.

    Args:
        state: ``gone`` means that the process ended without recording why, ``suspended`` that a signal has stopped it,
            ``paused`` that it waits between two steps on request.
        note: an explanation of the state; may be empty.
        error: the error of a failed run, with its remedy.
        elapsed_s: time since this process started the run.
        remaining_s: expected remaining time of an active run, from its last steps.
        silent_s: time since the run last wrote anything.
        values: all metrics of the last step.
        model: the directory of the trained model or adapter, once saved at the end.
        waits: current waits, the outermost first; for a run that is gone, its last ones.
        engines: the state of each of several engines, when last written.
    """

    run_dir: Path
    state: RunState
    note: str
    error: str
    pid: int | None
    host: str | None
    step: int
    steps: int | None
    weight_version: int | None
    elapsed_s: float | None
    remaining_s: float | None
    silent_s: float
    values: Mapping[str, float] = field(repr=False)
    findings: tuple[Finding, ...]
    checkpoint: Path | None
    model: Path | None
    waits: tuple[NamedWait, ...] | None
    logs: tuple[Path, ...]
    engines: tuple[NamedEngine, ...] = ()

    @property
    def goes_on(self) -> bool:
        """Return True if the run is active, as far as its files and this machine show."""
        return self.state in _GOING_ON


def read_status(run_dir: Path, *, now: float | None = None) -> RunStatus:
    """Read the status of the run in ``run_dir`` at ``now`` (seconds since 1970; the present, if ``None``).

    Raises:
        ConfigError: ``run_dir`` is not a run directory, or state.json or live.json is damaged.
        DataError: metrics.jsonl is damaged.
    """
    files = run_paths(run_dir)
    now = time.time() if now is None else now
    facts = _read_state(run_dir, files["state"])
    live = _read(files["live"], _LiveFile)
    lines = read_metrics(files["metrics"]).steps if files["metrics"].is_file() else ()
    if live is not None and live.pid != facts.pid:  # a previous process left it
        live = None
    state, note = _state(facts)
    if state == "gone":  # if the run ended during this read, its final state is there by now
        facts = _read_state(run_dir, files["state"])
        state, note = _state(facts)
    heard = max(facts.updated or 0.0, (live and live.time) or 0.0, lines[-1].time if lines else 0.0)
    end = now if state in (*_GOING_ON, "suspended") else heard
    step = max(facts.step or 0, lines[-1].step if lines else 0)
    values = lines[-1].values if lines else {}
    version = values.get("weight_version")
    return RunStatus(
        run_dir=run_dir,
        state=state,
        note=note,
        error=facts.error or "",
        pid=facts.pid,
        host=facts.host,
        step=step,
        steps=facts.steps,
        weight_version=None if version is None or math.isnan(version) else int(version),
        elapsed_s=None if facts.began is None else max(0.0, end - facts.began),
        remaining_s=_remaining_s(lines, step=step, steps=facts.steps) if state in _GOING_ON else None,
        silent_s=max(0.0, now - heard),
        values=values,
        findings=_findings(lines),
        checkpoint=_last_checkpoint(files["checkpoints"]),
        model=files["final"] if files["final"].is_dir() else None,
        waits=None if live is None else tuple(one for one in live.waits if now - one.since >= 1 or state == "gone"),
        logs=tuple(sorted(files["logs"].glob("*.log"))),
        engines=() if live is None else live.engines,
    )


def _read_state(run_dir: Path, path: Path) -> _StateFile:
    facts = _read(path, _StateFile)
    if facts is None:
        raise ConfigError(
            f"{run_dir} is not a run directory: it has no state.json",
            remedy="give run.dir/run.name of a configuration; a new run that still loads its model has none yet",
        )
    return facts


def _read(path: Path, kind: type[FileT]) -> FileT | None:
    """Read a JSON file and validate it as ``kind``; return None if the file does not exist."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _damaged(path, str(error)) from error
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise _damaged(path, f"{place} is {wrong['input']!r}" if place else wrong["msg"]) from error


def _damaged(path: Path, reason: str) -> ConfigError:
    remedy = "look at the run's metrics.jsonl and logs/trainer.log instead"
    return ConfigError(f"the status of the run cannot be read from {path}: {reason}", remedy=remedy)


def _state(facts: _StateFile) -> tuple[RunState, str]:
    """Return the state and an explanation, which may be empty."""
    state: RunState = "loading" if facts.status == "starting" else facts.status
    if state not in _GOING_ON:
        return state, ""
    pid, host = facts.pid, facts.host
    if pid is None or host is None:
        return state, "its process was not recorded, so lachesis cannot check if it is alive"
    if host != socket.gethostname():
        return state, f"its process runs on {host}, so lachesis cannot check from here if it is alive"
    found = condition(pid, began=facts.began)
    if found == "gone":
        return "gone", f"the process (pid {pid}) has ended without saying why: see logs/trainer.log"
    if found == "suspended":
        return "suspended", f"a signal has stopped the process; resume it with: kill -CONT {pid}"
    return (
        state,
        "as requested; resume it with the button of `lachesis watch`" if state == "paused" else "",
    )


def _remaining_s(lines: tuple[StepLine, ...], *, step: int, steps: int | None) -> float | None:
    seconds = [line.values["step_time"] for line in lines[-_RECENT_STEPS:] if "step_time" in line.values]
    if steps is None or not seconds:
        return None
    return max(0, steps - step) * sum(seconds) / len(seconds)


def _findings(lines: tuple[StepLine, ...]) -> tuple[Finding, ...]:
    """Return the last finding of each rule over the whole run: the most severe first, resolved ones last."""
    last = {finding.rule: finding for line in lines for finding in line.findings}
    return tuple(
        sorted(last.values(), key=lambda found: (found.resolved is not None, urgency(found.rule, found.level)))
    )


def _last_checkpoint(directory: Path) -> Path | None:
    """Return the last checkpoint. Existing checkpoints are complete, because they are renamed into place."""
    found = [path for path in directory.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def status_json(status: RunStatus) -> str:
    """Return the status as JSON, with null for values that are not finite."""
    values = {name: value if math.isfinite(value) else None for name, value in status.values.items()}
    content = asdict(status) | {"values": values, "goes_on": status.goes_on}
    return json.dumps(content, indent=2, default=str, allow_nan=False)


def status_lines(status: RunStatus, *, now: float | None = None) -> list[tuple[str, str]]:
    """Return the status as lines to print: pairs of title and text. An empty title continues the previous one."""
    now = time.time() if now is None else now
    lines = [*fact_lines(status), *_titled(*wait_lines(status, now=now))]
    return [*lines, *_titled("engines", _engine_texts(status.engines)), *log_lines(status)]


def fact_lines(status: RunStatus) -> list[tuple[str, str]]:
    """Return the lines of the status except waits, engines and logs."""
    of = "" if status.steps is None else f" of {status.steps}"
    version = "" if status.weight_version is None else f", weight version {status.weight_version}"
    lines = [("state", f"{status.state}, step {status.step}{of}{version}")]
    lines += [("", text) for text in (status.note, status.error) if text]
    if status.pid is not None:
        lines.append(("process", f"pid {status.pid}" + (f" on {status.host}" if status.host else "")))
    lines += [("time", text) for text in [_times(status)] if text]
    lines += [("last step", text) for text in [_metrics(status.values)] if text]
    lines += [("seconds", text) for text in [_seconds(status.values)] if text]
    lines += _titled("health", [finding.line for finding in status.findings])
    if status.checkpoint is not None or status.state != "finished":
        lines.append(("checkpoint", "none yet" if status.checkpoint is None else str(status.checkpoint)))
    lines += [("model", str(path)) for path in [status.model] if path is not None]
    return lines


def wait_lines(status: RunStatus, *, now: float) -> tuple[str, list[str]]:
    """Return a title, and a text for each wait of an unfinished run, or one text that says there is no wait."""
    under_way = status.state in (*_GOING_ON, "suspended", "gone")
    return "last waits" if status.state == "gone" else "waits", _wait_texts(status, now=now) if under_way else []


def log_lines(status: RunStatus) -> list[tuple[str, str]]:
    """Return lines with the paths of the run's logs."""
    return _titled("logs", [str(path) for path in status.logs])


def _titled(title: str, texts: list[str]) -> list[tuple[str, str]]:
    return [(title if index == 0 else "", text) for index, text in enumerate(texts)]


def _times(status: RunStatus) -> str:
    word = "so far" if status.goes_on else "in all"
    parts = [] if status.elapsed_s is None else [f"{format_seconds(status.elapsed_s)} {word}"]
    if status.remaining_s is not None:
        parts.append(f"about {format_seconds(status.remaining_s)} left")
    parts.append(f"last heard from {format_seconds(status.silent_s)} ago")
    return ", ".join(parts)


def _metrics(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_number(values[name])}" for name in MAIN_METRICS if name in values)


def _seconds(values: Mapping[str, float]) -> str:
    shown = {title: values[name] for name, title in SECONDS.items() if values.get(name, 0.0) >= _WORTH_SAYING_S}
    return ", ".join(
        f"{title} {format_seconds(seconds) if seconds >= 10 else f'{format_number(seconds)} s'}"
        for title, seconds in shown.items()
    )


def _engine_texts(engines: Sequence[NamedEngine]) -> list[str]:
    """Return a table with a row for each engine and aligned columns."""
    rows = [
        (
            engine.url,
            engine.state,
            "no version proved" if engine.version is None else f"version {engine.version}",
            f"{engine.in_flight} requests of about {engine.expected_tokens} tokens",
            f"{engine.completed} done",
            f"for {format_seconds(engine.for_s)}",
        )
        for engine in engines
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"{text}  {engine.reason}".rstrip() for text, engine in zip(texts, engines, strict=True)]


def _wait_texts(status: RunStatus, *, now: float) -> list[str]:
    if status.waits is None:
        return ["unknown: this process has not written live.json"]
    texts = [_wait(wait, now=None if status.state == "gone" else now) for wait in status.waits]
    return texts or ["none longer than a second"]


def _wait(wait: NamedWait, *, now: float | None) -> str:
    """Describe a wait; if ``now`` is None, the wait is over and its length is unknown."""
    beside = " (in the background)" if wait.background else ""
    if now is None:
        return f"{wait.name}{beside}"
    since = time.strftime("%H:%M:%S", time.localtime(wait.since))
    key = f" ({wait.setting})" if wait.setting else ""
    limit = "no deadline" if wait.limit_s is None else f"deadline {format_seconds(wait.limit_s)}{key}"
    return f"{wait.name}{beside}: for {format_seconds(max(0.0, now - wait.since))}, since {since}, {limit}"
