"""`lachesis cluster preflight` by a process for each rank and one for a node of engines, over gloo."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError, EngineError
from lachesis.plugins.cluster.preflight import find_place, preflight
from tests import warm
from tests.e2e.runs import environment
from tests.ports import free_port
from tests.tiny import tiny_model
from tests.unit.plugins.cluster.test_layout import config
from tests.waiting import LONG_S
from tests.warm import COMMAND


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    return {name: str(value) for name, value in own.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "SLURMD_NODENAME": f"127.0.0.{rank + 1}",
        "GLOO_SOCKET_IFNAME": "lo",
        "LACHESIS_JOB_TOKEN": "secret",
    }


@dataclass(frozen=True, slots=True)
class Coming:
    """A process of a node: more words of its command, and the secret that it has."""

    words: tuple[str, ...] = ()
    token: str = "secret"


def processes(tmp_path: Path, coming: Mapping[int, Coming], *words: str, engine_port: int) -> list[Ended]:
    """Two ranks and an engine's node, of which some come."""
    tiny_model().save_pretrained(tmp_path / "model")
    written = tmp_path / "config.yaml"
    written.write_text(
        f"run: {{steps: 2, dir: {tmp_path / 'runs'}}}\n"
        f"model: {{path: {tmp_path / 'model'}, device: cpu}}\n"
        "data: {path: p.jsonl}\nrewards: {functions: [r.r]}\n"
        f"engine: {{kind: vllm, port: {engine_port}}}\nbridge: {{kind: broadcast}}\n"
    )
    names = ",".join(f"127.0.0.{number}" for number in (1, 2, 3))
    port = free_port()
    command = [sys.executable, "-c", COMMAND, "cluster", "preflight", str(written), "--ranks", "2", "--servers", "1"]
    with ExitStack() as closing:
        started = [
            closing.enter_context(
                warm.Popen(
                    [*command, "--node-names", names, *words, *one.words],
                    env=environment(**variables(rank, 3, port) | {"LACHESIS_JOB_TOKEN": one.token}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank, one in coming.items()
        ]
        said = [process.communicate(timeout=LONG_S) for process in started]
    return [Ended(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]


def test_nodes_that_fit_together(tmp_path: Path):
    first, *others = processes(tmp_path, dict.fromkeys(range(3), Coming()), engine_port=free_port())
    assert (first.code, [one.code for one in others]) == (0, [0, 0]), first
    lines = first.out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    assert "engines" in lines[2] and "torch 2." in lines[0]
    assert lines[3].startswith("all-reduce of 16 MiB over the ranks: ")
    assert lines[4] == "the nodes fit together"
    assert [one.out for one in others] == ["", ""]
    assert list((tmp_path / "runs").iterdir()) == []


def test_each_finding_names_its_node(tmp_path: Path):
    """Rank 1 writes to a disk of its own; something listens on the engine's port."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        own = Coming(("--set", f"run.dir={tmp_path / 'elsewhere'}"))
        first, *others = processes(tmp_path, {0: Coming(), 1: own, 2: Coming()}, engine_port=port)
    assert (first.code, [one.code for one in others]) == (1, [0, 0]), first
    problems = [line.removeprefix("problem   ") for line in first.out.splitlines() if line.startswith("problem")]
    assert problems[0].startswith(f"127.0.0.3: port {port} of 0.0.0.0 is taken by pid "), first
    assert problems[1:] == [
        "127.0.0.2: does not see files that 127.0.0.1 writes to the run directory, and each rank writes its own "
        "part of a checkpoint there: put run.dir on a shared disk"
    ]


def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path):
    first, engine = processes(tmp_path, {0: Coming(), 2: Coming()}, "--within", "4", engine_port=free_port())
    assert (first.code, engine.code) == (1, 0), first
    assert "problem   127.0.0.2: process 1 did not connect within 2 s" in first.out


def test_a_stranger_is_told_from_a_rank(tmp_path: Path):
    coming = {0: Coming(), 1: Coming(token="another")}
    first, _ = processes(tmp_path, coming, "--within", "6", engine_port=free_port())
    assert first.code == 10
    assert "was not written by a rank of this job" in first.err


def test_one_process_looks_at_its_own_node(tmp_path: Path):
    own = config(run={"steps": 1, "dir": str(tmp_path)}, model={"path": "m", "device": "cpu"})
    verdict = preflight(own, find_place({}, ranks=None), within_s=5.0)
    assert verdict is not None and verdict.findings == [] and verdict.collective_s is None


def test_the_port_of_rank_0_has_to_be_free(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("", 0)) as taken:
        environment = variables(0, 2, taken.getsockname()[1])
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(EngineError, match="is taken by pid"):
            preflight(config(), find_place(environment, ranks=None), within_s=5.0)


def test_words_that_do_not_belong_to_the_processes_are_refused():
    environment = variables(0, 2, 1)
    with pytest.raises(ConfigError, match="--ranks is 3, but there are 2"):
        find_place(environment, ranks=3)
    with pytest.raises(ConfigError, match="--node-names has 1 names"):
        find_place(environment, ranks=None, nodes=["a"])
