"""The processes that share out the files of our own tests: nothing that happens in one of them is lost."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

PLUGINS = ("-p", "tests.forks", *(f"-pno:{name}" for name in ("anyio", "cacheprovider", "timeout", "xdist")))
PASSED = "def test_passes():\n    pass\n"
SKIPPED = "import pytest\n\n@pytest.mark.skip(reason='not today')\ndef test_skipped():\n    pass\n"
FAILED = "def test_fails():\n    assert 1 + 1 == 3\n"
DIES = "import os\n\ndef test_before():\n    pass\n\ndef test_dies():\n    os._exit(7)\n\ndef test_after():\n    pass\n"


@pytest.fixture
def run(pytester: pytest.Pytester):
    """Run such files by so many processes; returns what pytest printed and how it ended."""

    def run_files(*arguments: str, forks: int = 2, **files: str) -> pytest.RunResult:
        pytester.makepyfile(**files)
        return pytester.runpytest_inprocess(*PLUGINS, f"--forks={forks}", *arguments)

    return run_files


def test_results_of_all_processes_arrive(run):
    found = run("-rsf", test_a=PASSED, test_b=SKIPPED, test_c=FAILED, test_d=PASSED)
    found.assert_outcomes(passed=2, skipped=1, failed=1)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(["*assert (1 + 1) == 3*", "*not today*", "FAILED test_c.py::test_fails*"])


def test_all_that_passed_is_a_success(run):
    found = run(test_a=PASSED, test_b=PASSED, test_c=PASSED)
    found.assert_outcomes(passed=3)
    assert found.ret == pytest.ExitCode.OK


def test_a_test_whose_process_dies_has_failed_and_the_other_files_are_run(run):
    """By the process that is left; what comes after the test in its file is lost, and the report says so."""
    found = run(test_a=DIES, test_b=PASSED, test_c=PASSED, test_d=PASSED)
    found.assert_outcomes(passed=4, failed=1)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(["*its process ended with code 7*", "FAILED test_a.py::test_dies*"])


def test_the_first_failure_ends_all_of_it_where_it_is_to(run):
    found = run("-x", forks=1, test_a=FAILED + PASSED, test_b=PASSED)
    found.assert_outcomes(failed=1)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(["*stopping after 1 failures*"])


ONCE = """
import pathlib
def test_fails_once():
    path = pathlib.Path(__file__).with_suffix(".seen")
    seen = path.exists()
    path.touch()
    assert seen
"""


def test_a_test_is_run_once_more_and_said_to_be(run):
    found = run("--reruns=1", "-rfR", test_a=ONCE, test_b=FAILED)
    found.assert_outcomes(passed=1, failed=1)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(["*RERUN test_a.py::test_fails_once*", "FAILED test_b.py::test_fails*"])


NOTES = """
import pathlib, pytest
{mark}
def test_notes():
    with pathlib.Path({path!r}).open("a") as file:
        file.write("{name}\\n")
"""


def test_tests_of_one_name_are_run_as_one_file(run, tmp_path):
    """In the place of the first of them."""
    notes, together = tmp_path / "notes", "@pytest.mark.together('both')"
    marks = {"test_a": "", "test_b": together, "test_c": "", "test_d": together}
    files = {name: NOTES.format(name=name, mark=mark, path=str(notes)) for name, mark in marks.items()}
    run("--forks-in-order", "-W", "ignore", forks=1, **files).assert_outcomes(passed=4)
    assert notes.read_text().split() == ["test_a", "test_b", "test_d", "test_c"]


def test_files_are_dealt_out_by_how_many_tests_they_have_or_as_they_were_collected(run, tmp_path):
    notes = tmp_path / "notes"
    files = {name: NOTES.format(name=name, mark="", path=str(notes)) for name in ("test_a", "test_b")}
    files["test_b"] += PASSED
    for words, order in (((), ["test_b", "test_a"]), (("--forks-in-order",), ["test_a", "test_b"])):
        notes.unlink(missing_ok=True)
        run(*words, forks=1, **files).assert_outcomes(passed=3)
        assert notes.read_text().split() == order
