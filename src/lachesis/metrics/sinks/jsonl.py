"""File metrics.jsonl: a line per step, written during training, and read back by report and status."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lachesis.common.errors import DataError
from lachesis.common.files import write_atomic
from lachesis.common.types import EvalResult, Finding, StepRecord
from lachesis.metrics.hub import Sink


@dataclass(frozen=True, slots=True)
class StepLine:
    """Step of a metrics.jsonl. Values that were not finite are read back as NaN.

    ``rewards`` is the distribution of the completions' rewards; None in files older than this field.
    """

    step: int
    time: float
    values: Mapping[str, float]
    findings: tuple[Finding, ...] = ()
    rewards: Histogram | None = None


@dataclass(frozen=True, slots=True)
class MetricsLog:
    """Contents of a metrics.jsonl in the order of steps; if a step has two lines, the later counts."""

    steps: tuple[StepLine, ...]
    evaluations: tuple[EvalResult, ...]


class JsonlSink(Sink):
    """Sink that appends each record as a line of JSON and flushes it.

    Args:
        path: the file, usually RUN/metrics.jsonl.
        resume_step: the last step that counts when a run is resumed; lines of later steps, and a last line cut short by
            a kill, are removed. ``None`` starts a new file in the place of an old one.
        clock: seconds since 1970.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [] if resume_step is None or not path.exists() else _lines(path)
        write_atomic(path, "".join(text for _, text, line in lines if line.get("step", 0) <= resume_step))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        rewards = histogram(reward for group in record.groups for reward in group.generated.rewards)
        self._append(
            {
                "type": "step",
                "step": record.step,
                "time": record.ended,
                # JSON has no NaN.
                "values": {name: value if math.isfinite(value) else None for name, value in record.values.items()},
                "findings": [_fields(finding) for finding in record.findings],
                "evaluation": None if record.evaluation is None else asdict(record.evaluation),
                **({} if rewards is None else {"rewards": asdict(rewards)}),
            }
        )

    def evaluation(self, result: EvalResult) -> None:
        self._append({"type": "evaluation", "time": self._clock(), **asdict(result)})

    def close(self) -> None:
        self._file.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def _fields(finding: Finding) -> dict[str, Any]:
    """Return the fields of a finding, with ``resolved`` only if it is true."""
    return {name: value for name, value in asdict(finding).items() if value is not None}


def read_metrics(path: Path) -> MetricsLog:
    """Read a metrics.jsonl, even while it is being written: an incomplete last line is left out.

    Raises:
        DataError: there is no such file, or a line in it is malformed.
    """
    steps: dict[int, StepLine] = {}
    evaluations: dict[int, EvalResult] = {}
    for number, _, line in _lines(path):
        try:
            if line["type"] == "step":
                steps[line["step"]] = _step_line(line)
                result = line.get("evaluation")
            else:
                result = {name: value for name, value in line.items() if name not in ("type", "time")}
            if result is not None:
                evaluations[result["step"]] = EvalResult(**result)
        except (KeyError, TypeError, AttributeError) as error:
            raise _malformed(path, number, f"{type(error).__name__} {error}") from error
    return MetricsLog(
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
    )


def _step_line(line: Mapping[str, Any]) -> StepLine:
    rewards = line.get("rewards")
    return StepLine(
        step=line["step"],
        time=line["time"],
        values={name: math.nan if value is None else value for name, value in line["values"].items()},
        findings=tuple(Finding(**finding) for finding in line.get("findings", ())),
        rewards=None if rewards is None else Histogram(**(rewards | {"counts": tuple(rewards["counts"])})),
    )


def _lines(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield number, text and content of each whole line.

    Only the last may be incomplete, because of a kill or a live writer.
    """
    try:
        texts = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{path} does not exist", remedy="give the directory of a run that has finished a step"
        ) from error
    for number, text in enumerate(texts, start=1):
        if not text.endswith("\n"):
            return
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise _malformed(path, number, str(error)) from error
        if not isinstance(line, dict):
            raise _malformed(path, number, "not an object")
        yield number, text, line


def _malformed(path: Path, number: int, reason: str) -> DataError:
    return DataError(
        f"{path}, line {number}: not a line of metrics ({reason})",
        remedy="remove the line, or restore the file; training does not need it",
    )


BINS = 20


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram of values in equal ranges from ``low`` to ``high``; the last range includes its upper end."""

    low: float
    high: float
    counts: tuple[int, ...]


def histogram(values: Iterable[float | None], *, bins: int = BINS) -> Histogram | None:
    """Return the histogram of the known, finite values: one range if all are equal, None if there is no value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    low, high = min(known), max(known)
    if low == high:
        return Histogram(low, high, (len(known),))
    import numpy as np  # imported here, so that commands that only read metrics start without it

    counts, _ = np.histogram(known, bins=bins)
    return Histogram(low, high, tuple(counts.tolist()))
