"""The curve of a run in a notebook's cell."""

from __future__ import annotations

import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import lachesis
from lachesis.common.errors import DependencyError
from lachesis.common.types import EvalResult
from lachesis.metrics.sinks.jsonl import MetricsLog, StepLine
from lachesis.plugins.report.live_curve import curve, in_notebook, picture
from tests.unit.plugins.report.test_watch import write_run


def log_of(*rewards: float, accuracies: dict[int, float] | None = None) -> MetricsLog:
    steps = tuple(StepLine(step, float(step), {"reward": reward}) for step, reward in enumerate(rewards, start=1))
    evaluations = tuple(
        EvalResult(step=step, accuracy=share, mean_reward=share, problems=10, mean_length=3.0, seconds=1.0)
        for step, share in (accuracies or {}).items()
    )
    return MetricsLog(steps, evaluations)


def line(svg: str) -> list[tuple[float, float]]:
    (points,) = re.findall(r'<polyline points="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]


def test_rewards_are_a_line_over_all_steps_and_accuracies_are_dots():
    svg = curve(log_of(0.0, 0.5, 1.0, accuracies={0: 0.25, 3: 0.75}), steps=6)
    (x1, y1), (x2, y2), (x3, y3) = line(svg)
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and y1 - y2 == pytest.approx(y2 - y3, abs=0.2) and y3 < y1
    assert x3 == pytest.approx((44 + 596) / 2)  # half of the steps are done
    assert svg.count("<circle") == 2 and "step 6" in svg


def test_values_that_are_no_numbers_are_left_out():
    assert len(line(curve(log_of(0.1, math.nan, math.inf, 0.2), steps=None))) == 2
    assert curve(log_of(math.nan), steps=3) == "" == curve(MetricsLog((), ()), steps=3)


def test_a_long_run_keeps_a_small_picture():
    assert len(line(curve(log_of(*(step / 20_000 for step in range(20_000))), steps=None))) <= 500


def run_at(path: Path) -> lachesis.Run:
    return lachesis.load(
        model="m",
        data={"path": [{"prompt": "2+2=", "answer": "4"}]},
        rewards=["accuracy"],
        run={"dir": str(path.parent), "name": path.name, "steps": 4},
    )


def test_the_state_is_above_the_curve(tmp_path: Path):
    run = run_at(write_run(tmp_path / "first", status="stopped"))
    assert picture(run).startswith("<p>stopped, step 2 of ") and "mean reward 0.25 → 0.5</p><svg" in picture(run)


def test_a_run_without_a_directory_is_starting(tmp_path: Path):
    assert picture(run_at(tmp_path / "first")) == "<p>The run is starting.</p>"


class Cell:
    """A display that keeps what it was given, as IPython's handle of an output does."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, text: str, *, display_id: bool) -> Cell:
        assert display_id, "without an id the output could not be replaced"
        self.update(text)
        return self

    def update(self, text: str) -> None:
        self.shown.append(text)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    shown = Cell()
    kernel = types.SimpleNamespace(kernel=object())
    package: Any = types.ModuleType("IPython")
    package.get_ipython = lambda: kernel
    display: Any = types.ModuleType("IPython.display")
    display.display, display.HTML = shown.display, str
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_it_is_drawn_a_last_time_when_the_run_has_ended(tmp_path: Path, cell: Cell):
    assert in_notebook()
    run = run_at(write_run(tmp_path / "first", status="finished"))
    run.show().join(timeout=10)
    assert len(cell.shown) == 2 and all("finished" in text and "<svg" in text for text in cell.shown)


def test_it_is_drawn_again_while_the_run_goes_on(tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lachesis.plugins.report.live_curve._REDRAW_S", 0.01)
    monkeypatch.setattr("lachesis.plugins.report.live_curve._PAUSE_RATIO", 0)
    path = write_run(tmp_path / "first")
    drawing = run_at(path).show()
    while len(cell.shown) < 3:
        assert drawing.is_alive()
        drawing.join(0.01)
    state = path / "state.json"
    state.write_text(state.read_text().replace("running", "finished"))
    drawing.join(timeout=10)
    assert not drawing.is_alive() and "running" in cell.shown[0] and "finished" in cell.shown[-1]


def test_outside_of_a_notebook_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    assert not in_notebook()
    with pytest.raises(DependencyError, match="draws in a notebook"):
        run_at(write_run(tmp_path / "first")).show()
