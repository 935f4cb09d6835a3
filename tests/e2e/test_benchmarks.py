"""Benchmarks with ``--tiny``: that they run, and say what they measure. How fast anything is, is not looked at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import warm
from tests.e2e.runs import environment
from tests.paths import BENCHMARKS
from tests.waiting import LONG_S

# By script: words that stand in what it prints.
RUN_HERE = {
    "api": "groups_per_s",
    "asynchrony": "waits",
    "code_execution": "| namespaces |",
    "multi_turn": "rollouts",
}
# Scripts with --tiny whose servers are vLLM's, or that train for longer than a test may.
BY_HAND = {"bridges", "end_to_end", "generation", "kills", "memory", "overlap", "reasoning_tasks", "sleep",
           "time_to_reward", "train_step"}  # fmt: skip
# What they measure is made by others' programs or files, which are not here.
OF_OTHERS = {"environments", "public_files", "public_rewards", "quickstart_vs_trl", "trl_side"}
NO_SCRIPTS = {"architectures", "overlap_table"}


@pytest.mark.parametrize("name", sorted(RUN_HERE))
def test_it_runs(name: str, tmp_path: Path):
    start = (
        f"import runpy, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); "
        "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = [sys.executable, "-c", start, str(BENCHMARKS / f"{name}.py"), "--tiny"]
    done = warm.run(words, env=environment(), cwd=tmp_path, timeout=LONG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert RUN_HERE[name] in done.stdout


def test_each_script_has_a_small_version_that_is_tried_here_or_by_hand():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")}
    small = {name for name in scripts if '"--tiny"' in (BENCHMARKS / f"{name}.py").read_text()}
    assert small == RUN_HERE.keys() | BY_HAND
    assert scripts == small | OF_OTHERS | NO_SCRIPTS
