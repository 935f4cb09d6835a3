"""Templates of the files that start a job, beside this module."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2


@functools.cache
def job_template(name: str) -> jinja2.Template:
    """Read a template; its filter ``sh`` quotes a word, or several, for a shell."""
    environment = jinja2.Environment(
        autoescape=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",  # bash has its own use for {#
        comment_end_string="#>",
    )
    environment.filters["sh"] = _quoted
    return environment.from_string(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _quoted(value: str | Sequence[str]) -> str:
    return shlex.quote(value) if isinstance(value, str) else shlex.join(value)
