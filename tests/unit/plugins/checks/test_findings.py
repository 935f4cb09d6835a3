"""An error of a trial as one line."""

from __future__ import annotations

from lachesis.common.errors import EngineError
from lachesis.plugins.checks.findings import failure

LOG = """the server ended with exit code 6; the end of its log engine.log:
  | (EngineCore pid=2) ERROR [core.py:1] ValueError: Free memory on device cuda:0 (2/79 GiB) is less than desired
  | (APIServer pid=1) Traceback (most recent call last):
  | (APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."""


def test_of_a_log_the_first_error_and_the_last_words_are_said():
    found = failure("bridge", EngineError(LOG))
    assert found.failed and found.subject == "bridge"
    first, cause, last = found.message.split(" … ")
    assert first.endswith("engine.log:")
    assert cause.endswith("Free memory on device cuda:0 (2/79 GiB) is less than desired")
    assert last.startswith("(APIServer pid=1) RuntimeError: Engine core")


def test_without_an_error_in_it_what_it_is_and_the_last_words():
    found = failure("bridge", EngineError("it ended; the end of its log:\n  | started\n  | killed"))
    assert found.message == "it ended; the end of its log: … killed"


def test_one_line_stays_as_it_is():
    assert failure("disk", EngineError("the disk is full")).message == "the disk is full"
