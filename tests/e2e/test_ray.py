"""`lachesis run` on a Ray cluster of three nodes of this machine, of which one is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lachesis.process.managed import answers
from tests.e2e.runs import metrics, rewards, run_here, tape, write_reward, write_run
from tests.ports import free_port
from tests.ray_nodes import lose_node, ray_cluster
from tests.waiting import LONG_S, until

STEPS = 20
# Of a step's mean reward: two ranks add up in another order than one, by which a token may be another now and then.
CLOSE = 0.02


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """The head has room for two ranks and one process more, the others for an engine each."""
    with ray_cluster((3, 1, 1)) as found:
        yield found


def lachesis_run(config: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        command = [sys.executable, "-m", "lachesis", "run", str(config)]
        return subprocess.Popen(command, cwd=config.parent, stdout=file, stderr=subprocess.STDOUT)


def groups(run_dir: Path) -> dict[str, list[tuple[str, int]]]:
    """Which groups were trained in each step, and of how many samples."""
    return {
        name: [(line["prompt"]["id"], len(line["samples"])) for line in map(json.loads, text.splitlines())]
        for name, text in tape(run_dir).items()
    }


def engines(run_dir: Path) -> Path:
    """The file of their addresses."""
    return run_dir.with_name(f"{run_dir.name}-ray") / "engines"


def served_by(run_dir: Path, url: str) -> bool:
    """Whether the run says that this engine, proved to be of its version, has completed requests."""
    try:
        rows = json.loads((run_dir / "live.json").read_text())["engines"]
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return any(row["url"] == url and row["state"] == "serving" and row["completed"] for row in rows)


def test_an_engine_that_is_lost_with_its_node_is_replaced_on_another_one(cluster: Any, tmp_path: Path):
    port, lost, back = free_port(), tmp_path / "lost", tmp_path / "back"
    # The step in which it is lost, and the one in which the other one has to be there.
    reward = write_reward(
        tmp_path,
        f"import pathlib\nlost, back = pathlib.Path({str(lost)!r}), pathlib.Path({str(back)!r})\n"
        "if call == 3: lost.touch()\n"
        "while call == 6 and not back.exists(): time.sleep(0.05)\n"
        "return shares",
    )
    config = write_run(
        tmp_path,
        run={"steps": STEPS},
        model={"device": "cpu"},
        rewards={"functions": [reward], "timeout_s": 4 * LONG_S},
        engine={"kind": "embedded_server", "port": port},
        bridge={"kind": "broadcast"},
        cluster={"nodes": 2, "ranks_per_node": 2, "engines": 2, "preflight_s": 0},
    )
    run_dir, log = tmp_path / "runs" / "proof", tmp_path / "log"
    run = lachesis_run(config, log)

    def there(condition: Callable[[], bool]) -> None:
        until(lambda: run.poll() is not None or condition(), log.read_text, limit_s=4 * LONG_S)
        assert run.poll() is None, log.read_text()

    try:
        there(lost.exists)
        kept, before = engines(run_dir).read_text().split()
        assert {kept.rpartition(":")[0], before.rpartition(":")[0]} == {"http://127.0.0.2", "http://127.0.0.3"}
        lose_node(cluster, before.removeprefix("http://").partition(":")[0])
        there(lambda: len(engines(run_dir).read_text().split()) == 2 and before not in engines(run_dir).read_text())
        again, after = engines(run_dir).read_text().split()
        assert again == kept
        with httpx.Client(trust_env=False) as client:
            there(lambda: answers(client, f"{after}/health"))
        back.touch()
        there(lambda: served_by(run_dir, after))
        assert run.wait(4 * LONG_S) == 0, log.read_text()
    finally:
        run.kill()
        run.wait()
    said = log.read_text()
    assert said.count("engine 1 is lost with its node; it gets another place") == 1, said
    assert "started again" not in said
    assert [line.step for line in metrics(run_dir).steps] == list(range(1, STEPS + 1))
    back.touch()
    alone = ("engine={kind: embedded}", "bridge={kind: in_process}", "cluster={kind: local}", "run.name=alone")
    undisturbed = run_here(config, *alone).run_dir
    assert groups(run_dir) == groups(undisturbed)
    assert rewards(run_dir) == pytest.approx(rewards(undisturbed), abs=CLOSE), "the curve is that of an undisturbed run"


def test_an_error_that_would_come_again_ends_the_run_at_once(cluster: Any, tmp_path: Path):
    config = write_run(tmp_path, model={"device": "cpu"}, data={"path": "gone.jsonl"}, cluster={"nodes": 1})
    log = tmp_path / "log"
    assert lachesis_run(config, log).wait(2 * LONG_S) == 3
    said = log.read_text()
    assert "the nodes fit together" in said
    assert "gone.jsonl" in said.splitlines()[-1] and said.splitlines()[-1].startswith("error: rank 0: ")
    assert "started again" not in said
