"""The order of the files, and the command line in this process: all but a process's start is as in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lachesis import cli
from tests import warm
from tests.e2e.runs import Main, Outcome
from tests.logs import handlers_kept

HERE = Path(__file__).parent
# The longest come first, so that workers which share the files out end at about the same time.
FIRST = [
    "test_atropos_run", "test_sharded", "test_agents", "test_loss_types", "test_learning", "test_benchmarks",
    "test_tutorials", "test_engines", "test_resume", "test_distillation", "test_atropos_vllm", "test_fleet",
    "test_code", "test_float8", "test_original_environment", "test_gsm8k", "test_cluster", "test_console_tty",
    "test_kills", "test_quickstart", "test_scripts", "test_tinker_recipes",
]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    warm.start_servers(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which ``--forks-in-order`` deals the files out."""

    def place(item: pytest.Item) -> int:
        file = item.path.stem if HERE in item.path.parents else ""
        return FIRST.index(file) if file in FIRST else len(FIRST)

    items.sort(key=place)


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
