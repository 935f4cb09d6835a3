"""Safe printing of text from models, files and other programs, which may contain terminal control sequences."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment

from lachesis.common.errors import escape_controls


class SafeConsole(Console):
    """A console on which printed text cannot control the terminal; its own styles can."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        safe = (part if part.control else Segment(escape_controls(part.text), part.style) for part in buffer)
        return super()._render_buffer(safe)


class SafeFormatter(logging.Formatter):
    """A formatter that makes log records safe to read in a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))
