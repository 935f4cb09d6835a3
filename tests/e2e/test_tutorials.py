"""docs/tutorials: the files of each page are written, its commands run and its Python too, in order, in one folder.

A text is what the commands before it said, or, where it begins with a report's name, what that says of health.
"""

from __future__ import annotations

import html
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import Main, Outcome, command, environment, torchrun
from tests.paths import DOCS
from tests.slurm import sbatch
from tests.waiting import LONG_S
from tests.walls import needs_namespaces
from tests.warm import FORKING

PAGES = sorted((DOCS / "tutorials").glob("*.md"))
_RANKS = "test_a_run_of_two_ranks_goes_on_with_three_as_that_of_one"
_MARKS = {
    "code": [needs_namespaces],
    "cluster": [
        pytest.mark.long("test_cluster.py::test_two_ranks_and_an_engine_train_as_a_job_of_slurm: as the page has it")
    ],
    "two-gpus": [pytest.mark.long(f"test_sharded.py::{_RANKS}[asynchronous]: as the page has it")],
}
_CASES = [pytest.param(page, id=page.stem, marks=_MARKS.get(page.stem, [])) for page in PAGES]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d+(?:\\\.\d+)*")  # in a pattern, where a point is escaped
_CODE = re.compile(r"# exit code (\d)")
_REPORT = re.compile(r"# (\S+/report\.html)\n")
_FILE = re.compile(r"# ([\w./-]+\.(?:py|ya?ml))\n")


def run(line: str, *, main: Main, folder: Path) -> Outcome:
    program, *words = shlex.split(line, comments=True)
    if program == "torchrun":
        option, ranks, *module = words[:4]
        assert (option, module) == ("--nproc-per-node", ["-m", "lachesis"]), line
        return torchrun(int(ranks), "tests.e2e.forking", *words[4:])
    if program == "sbatch":
        return submitted(folder / words[0])
    if program == "python":
        runpy.run_path(str(folder / words[0]), run_name="__main__")
        return Outcome(0, "", "")
    assert program == "lachesis", line
    # What starts processes of its own is one, too.
    starts = words[0] == "run" or "engine={kind: embedded_server}" in words
    return command(*words, code=FORKING, cwd=folder) if starts else main(*words)


def submitted(job: Path) -> Outcome:
    """A job that a slurm of this machine runs to its end."""
    (job.parent / "bin").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(GLOO_SOCKET_IFNAME="lo").items():
            patch.setenv(name, value)
        ended = sbatch(job, bin_dir=job.parent / "bin", timeout_s=4 * LONG_S)
    return Outcome(ended.code, ended.output, ended.output)


def health_of(report: Path) -> str:
    """What a report says of a run's health, as one reads it."""
    section = report.read_text().split('<section id="health">')[1].split("</section>")[0]
    return html.unescape(re.sub("<[^>]+>", "", section))


def assert_said(expected: str, out: str) -> None:
    """It stands in what was said, but for numbers, which depend on the machine, and where lines break."""
    pattern = r"\s+".join(_NUMBER.sub(r"[\\d.,]+", re.escape(word)) for word in expected.split())
    assert re.search(pattern, out), f"{expected!r} is not in:\n{out}"


@pytest.mark.parametrize("page", _CASES)
def test_what_the_page_says_works(page: Path, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    # As in an activated environment: an agent behind a wall finds no `python` that is a shim of the home folder.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    said, ran = "", 0
    for language, text in _BLOCK.findall(page.read_text()):
        if named := _FILE.match(text):
            path = tmp_path / named[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif language == "python":
            exec(compile(text, str(page), "exec"), {"__name__": "__main__"})
        elif language == "bash":
            lines = text.replace("\\\n", " ").splitlines()
            outcomes = [run(line, main=main, folder=tmp_path) for line in lines]
            for line, outcome in zip(lines, outcomes, strict=True):
                assert outcome.code == int((_CODE.search(line) or [0, 0])[1]), (line, outcome.err)
            said = "".join(outcome.out + outcome.err for outcome in outcomes)
            ran += len(outcomes)
        else:
            assert language == "text"
            page_of_run = _REPORT.match(text)
            if page_of_run is None:
                assert_said(text, said)
            else:
                assert_said(text[page_of_run.end() :], health_of(tmp_path / page_of_run[1]))
    assert ran >= 2


def test_the_first_page_is_first_and_each_kind_is_there():
    assert {page.stem for page in PAGES} == {
        *("first-run", "own-reward", "from-axolotl", "from-trl", "from-atropos", "from-verifiers"),
        *("after-the-run", "agent", "code", "two-gpus", "cluster", "does-not-learn"),
    }
