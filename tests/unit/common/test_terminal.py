"""Text of models is printed without what controls a terminal."""

from __future__ import annotations

import ast
import io
import logging
from pathlib import Path

import pytest
from rich.text import Text

import lachesis
from lachesis.cli import base
from lachesis.common.errors import RewardError, escape_controls, first_line
from lachesis.common.imports import describe_exception
from lachesis.common.terminal import SafeConsole, SafeFormatter

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


def test_errors_are_safe_for_whoever_prints_them():
    """Python itself, where a program trains and catches nothing."""
    error = RewardError(f"no number in {EVIL}", remedy=f"see {EVIL}")
    texts = (str(error), error.message, error.remedy, *map(str, error.args), describe_exception(ValueError(EVIL), None))
    for text in (*texts, first_line(ValueError(EVIL))):
        assert not set(text) & set("\x1b\x07\x9b\x08\r\u202e") and "\\x1b[2J" in text


# What writes to the screen past the consoles: words of ours, or output of other programs that is passed on.
PAST_THE_CONSOLES = {
    "plugins/atropos/commands/environments.py": 1,  # JSON, which escapes them
    "plugins/serving/vllm_launch.py": 2,  # errors, which are safe
    "run/at_exit.py": 1,
    "process/watchdog.py": 2,
    "process/lost_threads.py": 1,
    "plugins/sandbox/cell.py": 2,  # to the output of an agent
}


def test_nothing_else_writes_to_the_screen():
    root, found = Path(lachesis.__file__).parent, dict[str, int]()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _writes(node):
                name = path.relative_to(root).as_posix()
                found[name] = found.get(name, 0) + 1
    assert found == PAST_THE_CONSOLES


def _writes(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    streams = name in ("print", "typer.echo", "click.echo", "sys.stdout.write", "sys.stderr.write")
    return streams or (name == "os.write" and ast.unparse(call.args[0]) in ("1", "2"))
