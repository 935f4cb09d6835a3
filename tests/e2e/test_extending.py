"""docs/extending.md: its diffs apply, and what they add works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests import warm
from tests.e2e.runs import environment, metrics, state, write_run
from tests.paths import DOCS, ROOT, SOURCE
from tests.ports import free_port
from tests.waiting import LONG_S
from tests.warm import COMMAND, FORKING

SECTIONS = dict(
    re.findall(r"^## ([^\n]+)\n.*?^```diff\n(.*?)^```$", (DOCS / "extending.md").read_text(), flags=re.M | re.S)
)
Extended = Callable[..., str]


@pytest.fixture
def extended(request: pytest.FixtureRequest, tmp_path: Path) -> Extended:
    """Runs Python (or the command line) over a copy of the source to which the test's diff has been applied."""
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "change.diff").write_text(SECTIONS[request.param])
    subprocess.run(["git", "apply", "--unsafe-paths", "change.diff"], cwd=tmp_path, check=True, timeout=LONG_S)

    def run(code: str, *arguments: str | Path) -> str:
        own = environment(PYTHONPATH=f"{tmp_path / 'src'}:{ROOT}")
        done = warm.run([sys.executable, "-c", code, *map(str, arguments)], env=own, timeout=4 * LONG_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_each_section_of_the_page_is_tested():
    assert set(SECTIONS) == {
        "A loss option",
        "An operation of the server",
        "A bridge",
        "An engine",
        "A flag of the server",
        "An environment",
    }


@pytest.mark.parametrize("extended", ["A loss option"], indirect=True)
def test_a_loss_option_changes_what_is_learned(extended: Extended, tmp_path: Path):
    """With advantages of 1e-9 nothing can be learned: there is no gradient to speak of."""
    losses = []
    for name, options in (("plain", {}), ("clipped", {"advantage_clip": 1e-9})):
        config = write_run(tmp_path / name, run={"steps": 2}, algorithm=options, evaluation={"every_steps": 0})
        extended(COMMAND, "train", config)
        losses.append(metrics(tmp_path / name / "runs/proof").steps[-1].values["grad_norm"])
    assert losses[1] < 1e-6 < losses[0]


@pytest.mark.parametrize("extended", ["An operation of the server"], indirect=True)
def test_an_operation_is_a_route_and_a_call(extended: Extended):
    code = """
from starlette.applications import Starlette
from starlette.testclient import TestClient
from lachesis.engines.serving.server import engine_routes
from tests.unit.engines.serving.fakes import SESSION, FakeServed
app = Starlette(routes=engine_routes(FakeServed(), session=SESSION, adapter_roots=()))
print(TestClient(app).get("/bridge/vocabulary").json())
"""
    assert "'size': 100" in extended(code)


@pytest.mark.parametrize("extended", ["A bridge"], indirect=True)
def test_a_bridge_trains(extended: Extended, tmp_path: Path):
    config = write_run(
        tmp_path / "run",
        run={"steps": 2},
        engine={"kind": "embedded_server", "port": free_port()},
        bridge={"kind": "rolling_reload"},
        evaluation={"every_steps": 0},
    )
    extended(FORKING, "train", config)
    run_dir = tmp_path / "run/runs/proof"
    assert state(run_dir)["status"] == "finished"
    assert [path.name for path in (run_dir / "exports").iterdir()] == ["v2"]


@pytest.mark.parametrize("extended", ["An engine"], indirect=True)
def test_an_engine_generates_what_a_run_learns_from(extended: Extended, tmp_path: Path):
    config = write_run(tmp_path / "run", run={"steps": 4}, engine={"kind": "plain"}, evaluation={"every_steps": 0})
    extended(COMMAND, "train", config)
    run_dir = tmp_path / "run/runs/proof"
    assert state(run_dir)["status"] == "finished"
    steps = [entry.values for entry in metrics(run_dir).steps]
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.05
    assert all(values["canary_error"] < 1e-3 for values in steps), "each update is proved"


@pytest.mark.parametrize("extended", ["A flag of the server"], indirect=True)
def test_a_flag_is_shown_and_handed_on(extended: Extended):
    assert "--block-size" in extended(COMMAND, "serve", "--help")
    code = """
from lachesis.engines.options import ServeOptions
print(*ServeOptions(model="m", block_size=32).command_line())
"""
    assert "--block-size 32" in extended(code)


@pytest.mark.parametrize("extended", ["An environment"], indirect=True)
def test_an_environment_is_found_and_has_its_flags(extended: Extended):
    assert "--env.group_size" in extended(COMMAND, "env", "parity", "--help")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory with examples/package and what an installer makes of its pyproject.toml."""
    site, example = tmp_path / "site", ROOT / "examples/package"
    shutil.copytree(example, site, ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    information = site / f"{project['name']}-{project['version']}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    points = [(group, name, place) for group, named in project["entry-points"].items() for name, place in named.items()]
    lines = "".join(f"[{group}]\n{name} = {place}\n" for group, name, place in points)
    (information / "entry_points.txt").write_text(lines)
    return site


def test_a_run_trains_with_the_source_the_reward_and_the_sink_of_a_package(installed: Path, tmp_path: Path):
    config = write_run(
        tmp_path / "run", run={"steps": 2}, batch={"prompts_per_step": 2}, evaluation={"every_steps": 1},
        sampling={"num_generations": 4},
    )  # fmt: skip
    sections = yaml.safe_load(config.read_text())
    del sections["data"]
    sections |= {"source": {"kind": "letters", "alphabet": "abcd", "eval_tasks": 1}, "logging": {"sinks": ["notes"]}}
    sections["rewards"] = {"functions": ["vowels"]}
    config.write_text(yaml.safe_dump(sections))
    own = environment(PYTHONPATH=f"{installed}:{ROOT / 'src'}")

    def lachesis(*words: str | Path) -> str:
        done = warm.run([sys.executable, "-c", COMMAND, *map(str, words)], env=own, timeout=4 * LONG_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    lachesis("train", config)
    run_dir = tmp_path / "run/runs/proof"
    assert (run_dir / "notes").read_text() == "step 1\nstep 2\n"
    steps = [line.values for line in metrics(run_dir).steps]
    assert all(values["rewards/vowels/mean"] == pytest.approx(values["reward"]) for values in steps)
    assert lachesis("alphabet", "--upper") == "ABCD\n"
