"""The file of `lachesis cluster slurm` as slurm runs it; in the place of Python is a program that says what it got."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.world import World, find_world
from lachesis.plugins.cluster.layout import Machines, derive_layout
from lachesis.plugins.cluster.slurm import SlurmJob, render_slurm
from tests.slurm import Ended, sbatch
from tests.unit.plugins.cluster.test_layout import APART, ATROPOS, CPU, config
from tests.waiting import LONG_S

# `status` says that the run has not finished; a server serves until it is ended.
PROGRAM = """#!/bin/bash
told="$(dirname "$0")/$3-${SLURM_RESTART_COUNT:-0}-${SLURMD_NODENAME:-batch}-${SLURM_LOCALID:-0}"
env >"$told.env"
printf '%s\\n' "${@:3}" >"$told"
case $3 in
    cluster) [[ $RANK != 0 || ! -e $(dirname "$0")/unfit ]] || { sleep 0.3; exit 1; }; exit 0 ;;
    status) exit 1 ;;
    vllm-serve) exec sleep 600 ;;
esac
"""


def run(
    tmp_path: Path,
    sections: dict[str, Any],
    machines: Machines,
    *arguments: str,
    rank: str = "",
    **more: Any,
) -> Ended:
    """What the job's processes were told; ``rank`` is what a rank does."""
    program = tmp_path / "python"
    program.write_text(f"{PROGRAM}\n{rank}\n")
    program.chmod(0o755)
    found = config(**{"run": {"steps": 2, "name": "it's", "dir": str(tmp_path)}, **sections})
    job = SlurmJob(config_path=tmp_path / "a b.yaml", directory=tmp_path, python=str(program), overrides=("a=b c",))
    file = tmp_path / "job"
    file.write_text(render_slurm(found, derive_layout(found, machines), job))
    (tmp_path / "bin").mkdir()
    return sbatch(file, *arguments, bin_dir=tmp_path / "bin", timeout_s=LONG_S, **more)


def told(tmp_path: Path, name: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a process."""
    lines = (tmp_path / f"{name}.env").read_text().splitlines()
    environment = dict(line.split("=", 1) for line in lines if "=" in line)
    return (tmp_path / name).read_text().splitlines(), environment


def assert_ended(ended: Ended, code: int, *, restarts: int) -> None:
    assert (ended.code, ended.restarts) == (code, restarts), ended.output


def test_ranks_have_what_torchrun_would_set_and_engines_their_gpus(tmp_path: Path):
    assert_ended(run(tmp_path, APART, Machines(3, 8), rank="sleep 0.5"), 0, restarts=0)
    worlds = []
    for local in range(8):
        words, environment = told(tmp_path, f"train-0-127.0.0.1-{local}")
        worlds.append(find_world(environment))
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert re.fullmatch("[0-9a-f]{64}", environment["LACHESIS_JOB_TOKEN"])
        urls = "http://127.0.0.2:9001,http://127.0.0.2:9002,http://127.0.0.3:9001"
        engine = f"engine={{kind: http, urls: [{urls}], wait_s: 900.0}}"
        assert words == ["train", str(tmp_path / "a b.yaml"), "--set", "a=b c", "--set", engine]
    assert worlds == [World(rank, 8, rank, 8) for rank in range(8)]
    tokens = set()
    for node, local, devices in (("127.0.0.2", 0, "0,1,2,3"), ("127.0.0.2", 1, "4,5,6,7"), ("127.0.0.3", 0, "0,1,2,3")):
        words, environment = told(tmp_path, f"vllm-serve-0-{node}-{local}")
        assert environment["CUDA_VISIBLE_DEVICES"] == devices
        assert words[1:4] == [str(tmp_path / "a b.yaml"), "--set", "a=b c"]
        assert words[4:8] == ["--set", f"engine.devices='{devices}'", "--set", "engine.data_parallel_size=1"]
        assert words[8:] == ["--set", "engine.host=0.0.0.0", "--port", str(9001 + local)]
        tokens.add(environment["LACHESIS_SESSION_TOKEN"])
    assert tokens == {told(tmp_path, "train-0-127.0.0.1-0")[1]["LACHESIS_SESSION_TOKEN"]}


def test_all_nodes_are_looked_at_before(tmp_path: Path):
    """As many processes on those of the engines as on the others; where they do not fit nothing else is started."""
    (tmp_path / "unfit").touch()
    assert_ended(run(tmp_path, APART | CPU, Machines(3, 0, ranks=2)), 1, restarts=0)
    names = [f"127.0.0.{number}" for number in (1, 2, 3)]
    for rank in range(6):
        words, environment = told(tmp_path, f"cluster-0-{names[rank // 2]}-{rank % 2}")
        assert find_world(environment) == World(rank, 6, rank % 2, 2)
        assert words[:3] == ["cluster", "preflight", str(tmp_path / "a b.yaml")]
        assert words[3:7] == ["--ranks", "4", "--servers", "3"]
        assert words[7:] == ["--node-names", ",".join(names), "--within", "30", "--set", "a=b c"]
    assert not list(tmp_path.glob("train-*")) and not list(tmp_path.glob("vllm-serve-*"))


def test_with_environments_ranks_start_the_services(tmp_path: Path):
    assert_ended(run(tmp_path, APART | ATROPOS | CPU, Machines(2)), 0, restarts=0)
    assert told(tmp_path, "run-0-127.0.0.1-0")[0][0] == "run"


KILLED = """
mkdir -p "$run_dir/checkpoints"; touch "$run_dir/state.json"
[[ $RANK != 1 || -n ${SLURM_RESTART_COUNT:-} ]] || { SAVED; kill -9 $$; }
[[ -n ${SLURM_RESTART_COUNT:-} ]] || sleep 600
"""


@pytest.mark.parametrize("saved", [True, False])
def test_a_killed_rank_queues_the_job_again(tmp_path: Path, saved: bool):
    """From the last checkpoint; where there is none, from the start."""
    rank = KILLED.replace("SAVED", 'mkdir "$run_dir/checkpoints/step_000001"' if saved else ":")
    assert_ended(run(tmp_path, CPU, Machines(2), rank=rank), 0, restarts=1)
    assert told(tmp_path, "train-0-127.0.0.2-0")[0][-1] == "a=b c"
    assert told(tmp_path, "train-1-127.0.0.2-0")[0][-1] == ("--resume" if saved else "--overwrite")


@pytest.mark.parametrize(("code", "restarts"), [(2, 0), (10, 0), (6, 3), (137, 3)])
def test_failures_that_come_back_are_not_tried_for_ever(tmp_path: Path, code: int, restarts: int):
    assert_ended(run(tmp_path, CPU, Machines(1), rank=f"exit {code}"), code, restarts=restarts)


def test_ranks_that_are_ended_with_rank_0_do_not_hide_why_it_failed(tmp_path: Path):
    """srun gives the highest code, which is that of a rank that it has killed."""
    rank = "[[ $RANK == 0 ]] || exec sleep 600; sleep 0.2; exit 2"
    assert_ended(run(tmp_path, CPU, Machines(2), rank=rank), 137, restarts=0)


def test_an_older_run_is_not_taken_for_that_of_the_job(tmp_path: Path):
    """The first attempt ends before its run has begun."""
    (tmp_path / "it's" / "checkpoints" / "step_000001").mkdir(parents=True)
    (tmp_path / "it's" / "state.json").touch()
    assert_ended(run(tmp_path, CPU, Machines(1), rank="[[ -n ${SLURM_RESTART_COUNT:-} ]] || kill -9 $$"), 0, restarts=1)
    assert told(tmp_path, "train-1-127.0.0.1-0")[0][-1] == "a=b c"


def test_a_signal_that_ends_the_step_lets_rank_0_save(tmp_path: Path):
    rank = f"trap 'touch {tmp_path}/saved; exit 143' TERM; kill -TERM $PPID $$; sleep 0.2"
    ended = run(tmp_path, CPU, Machines(1), rank=f"[[ -z ${{SLURM_RESTART_COUNT:-}} ]] || exit 0; {rank}")
    assert_ended(ended, 0, restarts=1)
    assert (tmp_path / "saved").exists()


def test_before_the_time_limit_the_run_is_asked_to_stop_and_goes_on(tmp_path: Path):
    rank = """
    if [[ -z ${SLURM_RESTART_COUNT:-} ]]; then
        mkdir -p "$run_dir/checkpoints/step_000001"; touch "$run_dir/state.json"
        until [[ -e $run_dir/requests/stop ]]; do sleep 0.02; done
    fi
    """
    ended = run(tmp_path, CPU, Machines(1), rank=rank, warn_after=tmp_path / "it's" / "state.json")
    assert_ended(ended, 0, restarts=1)
    assert told(tmp_path, "train-1-127.0.0.1-0")[0][-1] == "--resume"


def test_the_one_word_that_a_job_takes(tmp_path: Path):
    assert_ended(run(tmp_path, CPU, Machines(1), "--resume"), 0, restarts=0)
    assert told(tmp_path, "train-0-127.0.0.1-0")[0][-1] == "--resume"
    (tmp_path / "bin").rename(tmp_path / "other")
    ended = run(tmp_path, CPU, Machines(1), "--again")
    assert_ended(ended, 2, restarts=0)
    assert "--again is neither --resume nor --overwrite" in ended.output
