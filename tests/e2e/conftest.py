"""The command line in this process: everything but the start of a process is as in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lachesis import cli
from tests.e2e.runs import Main, Outcome
from tests.logs import handlers_kept


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """`lachesis ARGUMENTS`, without the seconds that it takes to import torch."""

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["lachesis", *map(str, arguments)])
        capsys.readouterr()
        with handlers_kept(), pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(int(exit_.value.code or 0), captured.out, captured.err)

    return run
