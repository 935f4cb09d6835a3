"""What the pods of `lachesis cluster kubernetes` run, around a program in the place of Python that says what it got."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.world import World, find_world
from lachesis.plugins.cluster.layout import Machines
from tests.unit.plugins.cluster.test_kubernetes import TOKENS, rendered
from tests.unit.plugins.cluster.test_layout import APART, ATROPOS, CPU
from tests.waiting import LONG_S, until

# What a kubelet puts in the place of `$(NAME)`; where there is no such variable the text stays.
_EXPANDED = re.compile(r"\$\(([^)]*)\)")
PROGRAM = """#!/bin/bash
told="$(dirname "$0")/$3-${RANK:-$HOSTNAME}"
printf '%s\\n' "${@:3}" >"$told"
env >"$told.env"
[[ $3 != cluster ]] || exit 0
"""


def started(tmp_path: Path, manifest: dict[str, Any], index: int, *, rank: str = "") -> subprocess.Popen[bytes]:
    """A pod's container as a kubelet starts it: its environment and no other."""
    program = tmp_path / "python"
    program.write_text(f"{PROGRAM}\n{rank}\n")
    program.chmod(0o755)
    name = manifest["metadata"]["name"]
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.labels['batch.kubernetes.io/controller-uid']": "7f3a",
    }
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOSTNAME": f"{name}-{index}"}
    for one in container["env"]:
        source = one.get("valueFrom", {})
        assert ("value" in one) != bool(source)
        if "fieldRef" in source:
            environment[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            environment[one["name"]] = TOKENS[source["secretKeyRef"]["key"]]
        else:
            environment[one["name"]] = one["value"]
    words = [_EXPANDED.sub(lambda found: environment.get(found[1], found[0]), word) for word in container["command"]]
    assert not any("$$" in word for word in words), "a kubelet makes one $ of it"
    return subprocess.Popen(words, env=environment, start_new_session=True)


def pod(tmp_path: Path, manifest: dict[str, Any], index: int = 0, *, rank: str = "") -> int:
    return started(tmp_path, manifest, index, rank=rank).wait(LONG_S)


def told(tmp_path: Path, name: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a process."""
    lines = (tmp_path / f"{name}.env").read_text().splitlines()
    return (tmp_path / name).read_text().splitlines(), dict(line.split("=", 1) for line in lines)


def manifests(tmp_path: Path, sections: dict[str, Any], machines: Machines, **options: Any) -> dict[str, Any]:
    run = {"run": {"steps": 2, "name": "it", "dir": str(tmp_path)}}
    return {found["kind"]: found for found in rendered(run | sections, machines, mount=tmp_path, **options)}


def test_the_environment_of_each_rank_is_what_ranks_take(tmp_path: Path):
    job = manifests(tmp_path, {}, Machines(2, 3))["Job"]
    assert [pod(tmp_path, job, index) for index in range(2)] == [0, 0]
    ranks = [told(tmp_path, f"train-{rank}") for rank in range(6)]
    assert [find_world(environment) for _, environment in ranks] == [World(rank, 6, rank % 3, 3) for rank in range(6)]
    looked = [told(tmp_path, f"cluster-{rank}") for rank in range(6)]
    assert [find_world(environment) for _, environment in looked] == [find_world(one) for _, one in ranks]
    assert {tuple(words) for words, _ in looked} == {
        ("cluster", "preflight", "/etc/lachesis/config.yaml", "--within", "600")
    }
    for words, environment in ranks:
        assert words == ["train", "/etc/lachesis/config.yaml"]
        assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("it-ranks-0.it-ranks", "29500")
        assert environment.items() >= TOKENS.items()
    spec = job["spec"]["template"]["spec"]
    assert f"{job['metadata']['name']}-0.{spec['subdomain']}" == "it-ranks-0.it-ranks"


def test_an_engine_answers_by_its_name_in_the_service(tmp_path: Path):
    found = manifests(tmp_path, APART | ATROPOS | CPU, Machines(2))
    assert pod(tmp_path, found["StatefulSet"], 1) == 0
    words, environment = told(tmp_path, "vllm-serve-it-engine-1")
    assert words == ["vllm-serve", "/etc/lachesis/engine.yaml"]
    assert environment["LACHESIS_ALLOWED_HOSTS"] == "it-engine-1.it-engines"
    assert pod(tmp_path, found["Job"]) == 0
    assert told(tmp_path, "run-0")[0][0] == "run"


def test_where_pods_do_not_fit_together_nothing_is_trained(tmp_path: Path):
    job = manifests(tmp_path, CPU, Machines(1))["Job"]
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    words[2] = "python() { return $(( ${#3} > 5 )); }\n" + words[2]  # `cluster` fails, and `train` would not
    assert pod(tmp_path, job) == 1
    assert not (tmp_path / "train-0").exists()
    assert pod(tmp_path, manifests(tmp_path, CPU, Machines(1), preflight_s=0)["Job"]) == 0
    assert not (tmp_path / "cluster-0").exists()


@pytest.mark.parametrize("saved", [True, False])
def test_a_pod_that_replaces_another_goes_on(tmp_path: Path, saved: bool):
    job = manifests(tmp_path, CPU, Machines(1), options=("--overwrite",))["Job"]
    directory = tmp_path / "it"
    rank = f"mkdir -p {directory}/checkpoints; touch {directory}/state.json"
    assert pod(tmp_path, job, rank=rank + (f"; mkdir {directory}/checkpoints/step_000001" if saved else "")) == 0
    assert told(tmp_path, "train-0")[0][-1] == "--overwrite"
    assert pod(tmp_path, job) == 0
    assert told(tmp_path, "train-0")[0][-1] == ("--resume" if saved else "--overwrite")


def test_an_older_run_is_not_taken_for_that_of_the_job(tmp_path: Path):
    (tmp_path / "it" / "checkpoints" / "step_000001").mkdir(parents=True)
    (tmp_path / "it" / "state.json").touch()
    job = manifests(tmp_path, CPU, Machines(1), options=("--overwrite",))["Job"]
    for _ in range(2):  # the first ends before its run has begun
        assert pod(tmp_path, job) == 0
        assert told(tmp_path, "train-0")[0][-1] == "--overwrite"


def test_one_rank_that_fails_ends_the_pod_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lachesis.plugins.cluster.kubernetes._ALONE_S", 0.1)
    job = manifests(tmp_path, CPU, Machines(1, 0, ranks=2))["Job"]
    begun = time.monotonic()
    assert pod(tmp_path, job, rank="[[ $RANK == 0 ]] && exec sleep 600; exit 3") == 3
    assert time.monotonic() - begun < LONG_S / 2
    final = job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]
    assert 3 in final["values"]
    assert not {6, 8, 10, 70, 137, 143} & set(final["values"])


def test_a_pod_that_is_to_end_lets_rank_0_save(tmp_path: Path):
    job = manifests(tmp_path, CPU, Machines(1))["Job"]
    rank = f"trap 'touch {tmp_path}/saved; exit 143' TERM; touch {tmp_path}/up; sleep 600 & wait"
    container = started(tmp_path, job, 0, rank=rank)
    until(lambda: (tmp_path / "up").exists())
    os.kill(container.pid, signal.SIGTERM)
    assert container.wait(LONG_S) == 143
    with suppress(ProcessLookupError):  # what the rank was waiting for, where it had begun to
        os.killpg(container.pid, signal.SIGKILL)
    assert (tmp_path / "saved").exists()
