"""A run in a terminal: what a person sees."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.runs import environment, state, write_reward, write_run
from tests.waiting import LONG_S
from tests.warm import COMMAND

pty = pytest.importorskip("pty")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07")
SECTIONS = {
    "run": {"steps": 12},
    "data": {"eval_size": 4},
    "evaluation": {"every_steps": 4, "success_reward": 0.4},
}


class Terminal:
    """A command in a terminal of 100 columns, and what it has written so far."""

    def __init__(self, *arguments: str | Path) -> None:
        master, slave = pty.openpty()
        # Not forked: whether there is a terminal is found out by libraries that are imported, who say what they like.
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *map(str, arguments)],
            env=environment(TERM="xterm-256color", COLUMNS="100", LINES="40", LANG="C.UTF-8", PYTHONUTF8="1"),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._master = master
        self._bytes = b""

    def read(self, *, until: str | None = None, seconds: float = 3 * LONG_S) -> str:
        """All that was written, once ``until`` is on the screen or the command has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (until is None or until not in self.text):
            if not select.select([self._master], [], [], 0.2)[0]:
                continue
            try:
                self._bytes += os.read(self._master, 65536)
            except OSError:  # the other side is closed
                break
        return self.text

    @property
    def text(self) -> str:
        return _CONTROL.sub("", self._bytes.decode(errors="replace")).replace("\r", "")

    def close(self) -> int:
        code = self.process.wait(LONG_S)
        os.close(self._master)
        return code


def test_lines_show_how_the_run_goes(tmp_path: Path):
    config = write_run(tmp_path, **SECTIONS, rewards={"functions": [write_reward(tmp_path, "return shares")]})
    terminal = Terminal("train", config)
    shown = terminal.read()
    assert terminal.close() == 0, shown
    assert "Traceback" not in shown
    assert not re.search(r"error|W\d{4} |Failed to load|Loading weights", shown), "nothing of libraries"
    for step in range(1, 13):
        assert re.search(rf"step {step}/12  reward 0\.\d{{3}}  accuracy \d+ % \(step \d+\)", shown), step
    assert re.search(r"generation [\d.]+k? tok/s  training [\d.]+k? tok/s  [\d.]+ s left", shown)
    finding = "completions are cut off at 8 tokens before they end: raise sampling.max_completion_length, or reward"
    assert finding in " ".join(shown.split()), "with its remedy, however long"
    last = shown.strip().splitlines()[-1]
    assert last.startswith("held-out accuracy ")
    assert last.endswith("report: " + str(tmp_path / "runs" / "proof" / "report.html"))


def test_ctrl_c_leaves_the_terminal_in_order(tmp_path: Path):
    config = write_run(
        tmp_path,
        **SECTIONS | {"run": {"steps": 500}},
        rewards={"functions": [write_reward(tmp_path, "time.sleep(0.05)\nreturn shares")]},
    )
    terminal = Terminal("train", config)
    assert "s left" in terminal.read(until="s left"), "it is under way"
    terminal.process.send_signal(signal.SIGINT)
    shown = terminal.read()
    assert terminal.close() == 130, shown
    assert "Traceback" not in shown
    assert "stopping after this step, with a checkpoint" in shown
    assert re.search(r"stopped by SIGINT after step \d+; resume with: lachesis train .* --resume", shown)
    assert terminal._bytes.count(b"\x1b[?25h") >= terminal._bytes.count(b"\x1b[?25l"), "the cursor is shown again"
    assert state(tmp_path / "runs" / "proof")["status"] == "stopped"


@pytest.mark.long("test_bad_input.py::test_in_a_process_of_its_own_an_error_is_as_clear: in a terminal")
def test_an_error_is_the_last_line(tmp_path: Path):
    body = "time.sleep(0.1)\nif call > 6:\n    raise KeyError('answer')\nreturn shares"
    config = write_run(tmp_path, **SECTIONS, rewards={"functions": [write_reward(tmp_path, body)]})
    terminal = Terminal("train", config)
    shown = terminal.read()
    assert terminal.close() == 4
    assert "Traceback" not in shown
    last = shown.strip().splitlines()[-1]
    assert last.startswith("error: reward function 'share_of_a' raised KeyError: 'answer'")
    assert " -> " in last
