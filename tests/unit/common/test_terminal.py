"""Text of models is printed without what controls a terminal."""

from __future__ import annotations

import io
import logging

import pytest
from rich.text import Text

from lachesis.cli import base
from lachesis.common.terminal import SafeConsole, SafeFormatter, escape_controls

EVIL = "a\x1b]0;owned\x07b\x1b[2J\x9b31mc\x08\r\u202ed"


def printed(*things: object, terminal: bool = True, **how: object) -> str:
    file = io.StringIO()
    console = SafeConsole(
        file=file, force_terminal=terminal, color_system="truecolor" if terminal else None, width=200, highlight=False
    )
    console.print(*things, **how)  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_no_control_of_a_text_reaches_the_terminal(terminal: bool):
    for thing in (EVIL, Text(EVIL, style="red"), Text.assemble((EVIL, "bold"), "x")):
        text = printed(thing, terminal=terminal, markup=False)
        for own in ("\x1b[31m", "\x1b[1m", "\x1b[0m"):
            text = text.replace(own, "")
        assert not set(text) & set("\x1b\x07\x9b\x08\r\u202e"), text
        assert "\\x1b]0;owned" in text and "\\x9b31m" in text and "\\u202e" in text


def test_styles_lines_and_tabs_stay():
    assert printed(Text("a\nb", style="red")) == "\x1b[31ma\x1b[0m\n\x1b[31mb\x1b[0m\n"
    assert escape_controls("a\tb\nc é 漢") == "a\tb\nc é 漢"


def test_the_consoles_of_the_commands_and_the_log_of_a_run_are_safe():
    assert isinstance(base.console, SafeConsole) and isinstance(base.error_console, SafeConsole)
    record = logging.makeLogRecord({"msg": "said %s", "args": (EVIL,)})
    assert "\x1b" not in SafeFormatter("%(message)s").format(record)
