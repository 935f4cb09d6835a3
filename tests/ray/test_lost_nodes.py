"""More of what becomes of a run on Ray than the end-to-end tests have time for: ``python -m pytest tests/ray``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.atropos_runs import Stage, write_model
from tests.e2e.runs import metrics, run_here, write_reward, write_run
from tests.e2e.test_ray import groups, lachesis_run
from tests.ports import free_port
from tests.ray_nodes import add_node, lose_node, ray_cluster
from tests.waiting import LONG_S, until

STEPS = 12
ALONE = ("engine={kind: embedded}", "bridge={kind: in_process}", "cluster={kind: local}", "run.name=alone")


def write_two_ranks(directory: Path, reached: Path, *, at_step: int, **sections: Any) -> Path:
    """Two ranks on a node and an engine on another; ``reached`` is there from a step on, in the first attempt."""
    reward = write_reward(
        directory,
        f"import pathlib\nreached = pathlib.Path({str(reached)!r})\n"
        f"if call == {at_step} and not reached.exists():\n"
        "    reached.touch()\n"
        "    while True: time.sleep(1)\n"
        "return shares",
    )
    return write_run(
        directory,
        **{
            "run": {"steps": STEPS},
            "model": {"device": "cpu"},
            "rewards": {"functions": [reward]},
            "engine": {"kind": "embedded_server", "port": free_port()},
            "bridge": {"kind": "broadcast"},
            "checkpoint": {"every_steps": 2},
            "cluster": {"nodes": 2, "ranks_per_node": 2, "preflight_s": 0},
        }
        | sections,
    )


def test_ranks_whose_node_is_lost_go_on_from_the_last_checkpoint_on_another_one(tmp_path: Path):
    reached, log, run_dir = tmp_path / "reached", tmp_path / "log", tmp_path / "runs" / "proof"
    config = write_two_ranks(tmp_path, reached, at_step=6)
    with ray_cluster((1, 2)) as cluster:
        run = lachesis_run(config, log)
        try:
            until(lambda: reached.exists() or run.poll() is not None, log.read_text, limit_s=4 * LONG_S)
            lose_node(cluster, "127.0.0.2")
            add_node(cluster, 3, cpus=2)
            assert run.wait(4 * LONG_S) == 0, log.read_text()
        finally:
            run.kill()
            run.wait()
    said = log.read_text()
    assert "rank 0 is lost with its node" in said
    assert "the ranks are started again, from the last checkpoint" in said
    assert [line.step for line in metrics(run_dir).steps] == list(range(1, STEPS + 1))
    assert groups(run_dir) == groups(run_here(config, *ALONE).run_dir)


@pytest.mark.parametrize("checkpoint", [2, 0])
def test_ranks_of_which_one_is_killed_start_again_by_themselves(tmp_path: Path, checkpoint: int):
    """Without a checkpoint from the start, with the engine that the first ones had claimed."""
    reached, log, run_dir = tmp_path / "reached", tmp_path / "log", tmp_path / "runs" / "proof"
    config = write_two_ranks(tmp_path, reached, at_step=4, checkpoint={"every_steps": checkpoint, "save_final": False})
    with ray_cluster((1, 2)):
        run = lachesis_run(config, log)
        try:
            until(lambda: reached.exists() or run.poll() is not None, log.read_text, limit_s=4 * LONG_S)
            (first,) = [process for process in psutil.process_iter() if is_rank_0(process, config.parent)]
            os.kill(first.pid, signal.SIGKILL)
            assert run.wait(4 * LONG_S) == 0, log.read_text()
        finally:
            run.kill()
            run.wait()
    where = "from the last checkpoint" if checkpoint else "from the start, as there is no checkpoint yet"
    assert f"the ranks are started again, {where}" in log.read_text()
    assert [line.step for line in metrics(run_dir).steps] == list(range(1, STEPS + 1))
    assert groups(run_dir) == groups(run_here(config, *ALONE).run_dir)


def is_rank_0(process: psutil.Process, directory: Path) -> bool:
    """Of the run in a directory."""
    try:
        words, rank = process.cmdline(), process.environ().get("RANK")
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
    return words[2:4] == ["lachesis", "train"] and words[4].startswith(str(directory)) and rank == "0"


def test_an_environment_finds_its_engines_and_the_rollout_api_on_their_nodes(tmp_path: Path):
    stage = Stage(tmp_path, write_model(tmp_path / "model"), "broadcast", steps=4)
    config = stage.write_config(
        services={"environment": {"name": "arithmetic"}},
        cluster={"engines": 2, "nodes": 2, "ranks_per_node": 1, "preflight_s": 0},
    )
    written = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(written | {"engine": {"kind": "embedded_server", "port": stage.engine_port}}))
    with ray_cluster((1, 1, 1)):
        run = lachesis_run(config, tmp_path / "log")
        try:
            assert run.wait(5 * LONG_S) == 0, (tmp_path / "log").read_text()
        finally:
            run.kill()
            run.wait()
    assert [line.step for line in metrics(stage.run_dir).steps] == [1, 2, 3, 4]
    logs = stage.run_dir.with_name("job-ray")
    assert "registered at" in (logs / "env.log").read_text() and "rollout API at" in (logs / "api.log").read_text()
