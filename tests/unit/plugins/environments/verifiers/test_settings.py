"""What holds for both lines of verifiers: which is installed, whose tokens are trained on, whose signals hold."""

from __future__ import annotations

import importlib.metadata
import signal
import sys
from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError, DataError, DependencyError, EngineError
from lachesis.common.types import Completion, Prompt, VersionSpan
from lachesis.plugins.environments.turn_server import Turn
from lachesis.plugins.environments.verifiers import settings
from lachesis.rollouts import episodes


def turn(*tokens: int) -> Turn:
    return Turn((9,), Completion(tokens, (-1.0,) * len(tokens), "stop", VersionSpan(0, 0)))


def test_the_turns_that_the_environment_kept_are_those_that_the_engine_sampled():
    turns = [turn(3, 4), turn(5), turn(3, 4)]
    assert settings.kept_turns(turns, [[3, 4], [5], [3, 4]], where="task 0") == turns
    assert settings.kept_turns(turns, [[5]], where="task 0") == [turns[1]], "what it threw away is not trained on"


@pytest.mark.parametrize("tokens", [[3, 5], [3], [5, 5], []])
def test_tokens_that_were_never_sampled_end_the_run(tokens: list[int]):
    with pytest.raises(EngineError, match="never sampled"):
        settings.kept_turns([turn(3, 4), turn(5)], [tokens], where="task 0")


@pytest.mark.parametrize(("version", "line"), [("0.1.14", "0.1"), ("0.4.0", "today"), ("1.2", "today")])
def test_lines(version: str, line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert settings.installed_line() == line


def test_a_release_between_the_lines_and_none_at_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.1")
    with pytest.raises(DependencyError, match=r"0\.2\.1"):
        settings.installed_line()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(DependencyError, match="needs the package"):
        settings.installed_line()


def test_a_file_is_an_environment_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").touch()
    assert settings.environment_id(str(tmp_path / "mine.py")) == "mine"
    assert sys.path[0] == str(tmp_path)
    assert settings.environment_id("owner/gsm8k") == "owner/gsm8k"
    with pytest.raises(ConfigError, match="no file"):
        settings.environment_id(str(tmp_path / "other.py"))


def test_signals_are_the_runs_again():
    before = signal.getsignal(signal.SIGTERM)
    with settings.own_signals():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_last_tasks_are_held_out():
    prompts = [Prompt(id=str(number), token_ids=(), text="") for number in range(3)]
    assert episodes.held_out_last(prompts, 1) == (prompts[:2], prompts[2:])
    assert episodes.held_out_last(prompts, 0) == (prompts, [])
    with pytest.raises(DataError, match="eval_tasks is 3"):
        episodes.held_out_last(prompts, 3)


@pytest.mark.parametrize(("error", "cause"), [("SandboxError", "sandbox"), ("Error", "error"), ("Crash", "crash")])
def test_causes(error: str, cause: str):
    assert episodes.cause_of(error) == cause
