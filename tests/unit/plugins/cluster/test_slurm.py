"""The text for sbatch; what it does when it runs is tested in tests/processes and tests/e2e."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.plugins.cluster.layout import Machines, derive_layout
from lachesis.plugins.cluster.slurm import SlurmJob, render_slurm
from tests.slurm import batch_options
from tests.unit.plugins.cluster.test_layout import APART, ATROPOS, CPU, config


def rendered(sections: dict[str, Any], machines: Machines, **options: Any) -> str:
    found = config(**{"run": {"steps": 2, "name": "it's", "dir": "/shared/my runs"}, **sections})
    job = SlurmJob(config_path=Path("/shared/a b.yaml"), directory=Path("/work"), python="/venv/bin/python", **options)
    return render_slurm(found, derive_layout(found, machines), job)


@pytest.mark.parametrize(
    ("sections", "machines"),
    [({}, Machines(2, 8)), (CPU, Machines(1)), (APART, Machines(4, 8)), (APART | ATROPOS, Machines(3, 8))],
)
def test_it_is_bash(sections: dict[str, Any], machines: Machines):
    text = rendered(sections, machines, overrides=("run.seed=1", "model.path=it's"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_what_the_configuration_says_is_asked_of_slurm():
    text = rendered(APART, Machines(4, 8), time="1-00:00:00", partition="gpu", account="me", sbatch=("--qos=high",))
    assert batch_options(text) == {
        "job-name": "it's", "chdir": "/work", "output": "it's-slurm-%j.log", "nodes": "4", "ntasks-per-node": "8",
        "gpus-per-node": "8", "mem": "0", "time": "1-00:00:00", "partition": "gpu", "account": "me",
        "signal": "B:USR1@300", "open-mode": "append", "exclusive": "", "requeue": "", "qos": "high",
    }  # fmt: skip
    assert "gpus-per-node" not in batch_options(rendered(CPU, Machines(2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": "soon"}, "not a time for sbatch"),
        ({"partition": "a b"}, "not a name"),
        ({"sbatch": ("qos=high",)}, "not an option for sbatch"),
    ],
)
def test_what_sbatch_would_misread_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        rendered({}, Machines(2, 8), **options)
