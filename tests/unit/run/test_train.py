"""The log of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lachesis.run.directory import claim_run
from lachesis.run.train import begin_run


class ZMQInteractiveShell(SimpleNamespace):
    """The shell of a notebook's kernel: rich shows in the cell what is printed where it finds one of this name."""


def test_lines_go_to_the_log_in_a_notebook_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    run = claim_run(tmp_path / "first", resume=False, overwrite=False)
    with begin_run(run, resume=False) as log:
        log.print("step 1/2  reward 0.5")
    assert (run.files["logs"] / "trainer.log").read_text() == "step 1/2  reward 0.5\n"
