"""The file of `lachesis cluster slurm`, run as slurm runs it: ranks and an engine on nodes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.metrics.sinks.jsonl import read_metrics
from tests.e2e.runs import Main, environment, write_run
from tests.ports import free_port
from tests.slurm import sbatch
from tests.waiting import LONG_S


def test_two_ranks_and_an_engine_train_as_a_job_of_slurm(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = write_run(
        tmp_path,
        run={"steps": 2},
        model={"device": "cpu"},
        engine={"kind": "embedded_server", "port": free_port()},
        bridge={"kind": "broadcast", "senders": 2},
    )
    monkeypatch.chdir(tmp_path)
    words = ["--nodes", "3", "--master-port", str(free_port()), "--set", "run.seed=3"]
    printed = main("cluster", "slurm", str(config), *words)
    assert printed.code == 0, printed.err
    (tmp_path / "job").write_text(printed.out)
    (tmp_path / "bin").mkdir()
    for name, value in environment(GLOO_SOCKET_IFNAME="lo").items():
        monkeypatch.setenv(name, value)
    ended = sbatch(tmp_path / "job", bin_dir=tmp_path / "bin", timeout_s=4 * LONG_S)
    logs = "\n".join(path.read_text() for path in (tmp_path / "runs" / "proof-slurm").rglob("*.log"))
    assert ended.code == 0, f"{ended.output}\n{logs}"
    steps = read_metrics(tmp_path / "runs" / "proof" / "metrics.jsonl").steps
    assert [line.step for line in steps] == [1, 2]
    assert all(line.values[f"sent_gb/{rank}"] > 0 for line in steps for rank in (0, 1)), "both nodes send"
    assert "2 steps in" in ended.output
    assert "serving" in logs
