"""The curve of a run in a notebook cell, drawn again each second while the run goes on."""

from __future__ import annotations

import html
import math
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import ConfigError
from lachesis.common.imports import optional_package
from lachesis.metrics.names import format_number
from lachesis.metrics.sinks.jsonl import MetricsLog
from lachesis.plugins.report.charts import downsample
from lachesis.plugins.report.data import headline

if TYPE_CHECKING:
    from lachesis.run.library import Run

_WIDTH, _HEIGHT, _MARGIN = 640, 180, 44
_MAX_POINTS = 500
_REDRAW_S = 1.0
# A long run's metrics take a while to read: at most a twentieth of the time goes into drawing.
_PAUSE_RATIO = 20
_LINE, _DOTS = "#1668a8", "#c2410c"


def in_notebook() -> bool:
    """Return True if this program is the kernel of a notebook, whose cells can show a picture."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def show(run: Run) -> threading.Thread:
    """Show the run's curve below the current cell until the run ends; return the thread that draws it again."""
    cell = optional_package("IPython.display", "run.show() draws in a notebook", remedy="call it in a notebook's cell")
    shown = cell.display(cell.HTML(picture(run)), display_id=True)
    thread = threading.Thread(target=_redraw, args=(run, shown, cell.HTML), name="lachesis live curve", daemon=True)
    thread.start()
    return thread


def _redraw(run: Run, shown: Any, as_html: Any) -> None:
    while is_active(run):
        began = time.monotonic()
        shown.update(as_html(picture(run)))
        time.sleep(max(_REDRAW_S, _PAUSE_RATIO * (time.monotonic() - began)))
    shown.update(as_html(picture(run)))


def is_active(run: Run) -> bool:
    """Return True if the run goes on, in this process or another."""
    try:
        return not run.done and run.status.goes_on
    except ConfigError:  # there is no run directory yet
        return True


def picture(run: Run) -> str:
    """Return HTML with the run's state, its headline figure, and its rewards and held-out accuracies by step."""
    try:
        status = run.status
    except ConfigError:
        return f"<p>{html.escape(str(run.error or 'The run is starting.'))}</p>"
    found = headline(run.log)
    values = " → ".join(value for value in (found["first"], found["last"]) if value)
    words = f"{status.state}, step {status.step} of {status.steps}: {found['label']} {values}"
    return f"<p>{html.escape(words)}</p>{curve(run.log, steps=status.steps)}"


def curve(log: MetricsLog, *, steps: int | None) -> str:
    """Return an SVG of the mean reward (line) and the held-out accuracy (dots) by step; empty without any value.

    Args:
        steps: right end of the axis; the last step that has a value if None.
    """
    rewards = [(line.step, y) for line in log.steps if math.isfinite(y := line.values.get("reward", math.nan))]
    accuracies = [(result.step, result.accuracy) for result in log.evaluations]
    points = [*rewards, *accuracies]
    if not points:
        return ""
    last = max(1, steps or 0, *(step for step, _ in points))
    low, high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    high = high if high > low else low + 1.0

    def place(step: int, y: float) -> tuple[float, float]:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * step / last
        return round(x, 1), round(_HEIGHT - 24 - (_HEIGHT - 40) * (y - low) / (high - low), 1)

    chosen = downsample([y for _, y in rewards], limit=_MAX_POINTS)
    line = " ".join("{},{}".format(*place(*rewards[index])) for index in chosen)
    dots = "".join('<circle cx="{}" cy="{}" r="3.5" fill="{}"/>'.format(*place(*point), _DOTS) for point in accuracies)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" font-family="sans-serif" font-size="12" role="img">'
        f"{_axes(low=low, high=high, last=last)}"
        f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="2"/>{dots}</svg>'
    )


def _axes(*, low: float, high: float, last: int) -> str:
    bottom, right = _HEIGHT - 24, _WIDTH - _MARGIN
    labels: Sequence[tuple[float, float, str, str]] = (
        (_MARGIN - 6, 20, "end", format_number(high)),
        (_MARGIN - 6, bottom, "end", format_number(low)),
        (right, _HEIGHT - 8, "end", f"step {last}"),
    )
    legend = f'<tspan fill="{_LINE}">mean reward</tspan> <tspan fill="{_DOTS}">held-out accuracy</tspan>'
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="gray">{words}</text>' for x, y, anchor, words in labels
    )
    return (
        f'<path d="M{_MARGIN} 16V{bottom}H{right}" fill="none" stroke="gray"/>{texts}'
        f'<text x="{_MARGIN + 8}" y="{_HEIGHT - 8}">{legend}</text>'
    )
