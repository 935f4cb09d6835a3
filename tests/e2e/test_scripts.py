"""What `lachesis scripts` writes, run as the documents run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lachesis.cli import app
from lachesis.config.load import load_config
from tests.e2e.atropos_runs import write_model
from tests.e2e.runs import environment, metrics
from tests.long import long_but
from tests.ports import free_port
from tests.waiting import LONG_S


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scripts")
    assert CliRunner().invoke(app, ["scripts", str(directory / "written")]).exit_code == 0
    # As installing puts them there.
    for name, module in (("lachesis", "lachesis"), ("torchrun", "torch.distributed.run")):
        command = directory / name
        command.write_text(f'#!/bin/bash\nexec {sys.executable} -m {module} "$@"\n')
        command.chmod(0o755)
    (directory / "python").symlink_to(sys.executable)
    return directory / "written"


def run(scripts: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{scripts.parent}:{os.environ['PATH']}"
    return subprocess.run(
        words, cwd=scripts, env=environment(PATH=path, **variables), capture_output=True, text=True, timeout=4 * LONG_S
    )


def test_each_is_a_script_of_bash_and_each_configuration_is_one(scripts: Path):
    for script in [*scripts.glob("*.sh"), *(scripts / "bin").iterdir()]:
        assert os.access(script, os.X_OK) and run(scripts, "bash", "-n", str(script)).returncode == 0
    for config in scripts.glob("*.yaml"):
        assert load_config(config).dialect == "axolotl"


def test_written_twice_nothing_is_overwritten(scripts: Path):
    assert "would be overwritten" in str(CliRunner().invoke(app, ["scripts", str(scripts)]).exception)


def test_the_transforms_are_shown(scripts: Path):
    done = run(scripts, sys.executable, "simple_test_transforms.py")
    assert done.returncode == 0, done.stderr
    assert "instruction_response_with_tests_transform: 4 of 4 rows" in done.stdout


@pytest.mark.parametrize(
    "script",
    long_but(
        ["train_single_gpu.sh", "train_single_gpu_shared.sh", "train_multi_gpu.sh"],
        short=["train_single_gpu.sh"],
        why="test_without_a_server_they_say_how_to_start_one[train_single_gpu.sh]: another script",
    ),
)
def test_without_a_server_they_say_how_to_start_one(scripts: Path, script: str):
    port = str(free_port())
    done = run(scripts, f"./{script}", PORT=port, PORTS=port)
    assert done.returncode == 1
    assert f"no server answers on port {port}" in done.stderr and "start_vllm_server.sh" in done.stderr


def test_the_whole_loop_in_one_script(scripts: Path, tmp_path: Path):
    model = write_model(tmp_path / "model")
    flags = ["--engine", "embedded", "--device", "cpu", "--vllm-port", str(free_port())]
    api = f"source.url=http://127.0.0.1:{free_port()}"
    variables = {"MODEL": str(model), "ENVIRONMENT": "arithmetic", "STEPS": "2", "SAVE_PATH": str(tmp_path / "run")}
    done = run(scripts, "./test_single_copy_mode.sh", *flags, "--set", api, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics(tmp_path / "run").steps) == 2
