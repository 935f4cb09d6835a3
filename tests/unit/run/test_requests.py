"""A run that is paused between two steps, and goes on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lachesis.common.deadline import paused_s, waits_now
from lachesis.common.errors import StopRequested
from lachesis.run.directory import RunDirectory, claim_run
from lachesis.run.requests import RequestedPause, ask, is_asked, take
from lachesis.run.status import read_status, status_lines


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Of this process, at work."""
    run = RunDirectory(tmp_path / "run")
    run.begin(resume=False)
    run.update(status="running", step=3, steps=10)
    return run


def nothing() -> None:
    pass


def test_who_is_not_asked_goes_on_at_once(run: RunDirectory):
    RequestedPause(run, watch=pytest.fail, look_s=0.0)(3, pytest.fail)  # type: ignore[arg-type]
    assert read_status(run.path).state == "running"


def test_it_lasts_until_it_is_taken_back_and_says_so(run: RunDirectory, caplog: pytest.LogCaptureFixture):
    looks: list[dict[str, str]] = []
    before = paused_s()

    def look() -> None:
        status = read_status(run.path)
        assert status.goes_on
        looks.append(dict(status_lines(status)))
        assert [wait.deadline.name for wait in waits_now()] == ["the requested pause"]
        if len(looks) == 2:
            take(run.path, "pause")

    ask(run.path, "pause")
    with caplog.at_level(logging.WARNING, logger="lachesis"):
        RequestedPause(run, watch=nothing, look_s=0.01)(3, look)
    assert [lines["state"] for lines in looks] == ["paused, step 3 of 10"] * 2
    assert read_status(run.path).state == "running" and paused_s() > before
    first, last = (record.getMessage() for record in caplog.records)
    assert first == f"paused after step 3, as requested; `lachesis watch {run.path}` resumes it"
    assert last.startswith("resumed at step 4 after a pause of ")


def test_a_request_to_stop_ends_it(run: RunDirectory):
    def stop() -> None:
        raise StopRequested("enough")

    ask(run.path, "pause")
    with pytest.raises(StopRequested):
        RequestedPause(run, watch=stop, look_s=0.0)(3, nothing)
    assert is_asked(run.path, "pause") and waits_now() == ()
    at = paused_s()
    assert paused_s() == at, "time passes again for deadlines"


def test_a_run_that_is_paused_is_at_work(run: RunDirectory):
    run.update(status="paused", pid=1)
    with pytest.raises(Exception, match="process 1 is training in"):
        claim_run(run.path, resume=False, overwrite=True)
