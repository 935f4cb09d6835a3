"""Safe printing of text by models, files and other programs, which may contain a terminal's control sequences."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment

# Control characters but tab and line feed, and those that reorder the text around them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    r"""Return ``text`` with control characters written out, as in ``\x1b[2J``."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class SafeConsole(Console):
    """A console on which printed text cannot control the terminal; its own styles can."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        safe = (part if part.control else Segment(escape_controls(part.text), part.style) for part in buffer)
        return super()._render_buffer(safe)


class SafeFormatter(logging.Formatter):
    """A formatter of log records for people who read the log in a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))
