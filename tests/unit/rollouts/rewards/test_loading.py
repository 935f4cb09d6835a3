from __future__ import annotations

import json
from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.rollouts.rewards.loading import ImportPath, load_named, needs_main_thread
from lachesis.rollouts.rewards.rewarder import load_reward, load_rewards

MADE = "def make(bonus):\n    def reward(completions):\n        return [bonus] * len(completions)\n    return reward\n"


def named(spec: str, base_dir: Path = Path(), **arguments: object) -> ImportPath:
    return ImportPath(spec, base_dir, json.dumps(arguments))


def test_a_factory_is_called_with_its_arguments(tmp_path):
    (tmp_path / "mine.py").write_text(MADE)
    assert load_named(named("mine.py:make", tmp_path, bonus=2.0))(completions=["a"]) == [2.0]
    with pytest.raises(ConfigError, match="cannot be called with other"):
        load_named(named("mine.py:make", tmp_path, other=1))


def test_a_function_of_completions_gets_arguments_beside_them(tmp_path):
    (tmp_path / "mine.py").write_text("def good(completions, *, scale=1.0, **_): return [scale] * len(completions)")
    assert load_named(named("mine.py:good", tmp_path, scale=3.0))(completions=["a"]) == [3.0]


def test_what_makes_no_function_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def number(n): return n")
    with pytest.raises(ConfigError, match="returned a int, not a reward function"):
        load_named(named("mine.py:number", tmp_path, n=1))


def test_a_name_without_a_module_is_of_the_registry():
    assert load_reward("think_format_reward").name == "think_format_reward"
    assert load_named(named("get_soft_overlong_punishment", max_completion_len=2, soft_punish_cache=1))(
        completion_ids=[[1, 1]]
    ) == [-1.0]


def test_two_of_one_factory_are_told_apart():
    spec = {"function": "code_format", "kwargs": {"language": "cpp"}}
    first, second = load_rewards(["code_format", spec])
    assert (first.name, second.name) == ("code_format", 'code_format {"language": "cpp"}')


def test_what_uses_signals_runs_in_a_process_of_its_own(tmp_path):
    (tmp_path / "timed.py").write_text("import signal\ndef good(completions):\n    signal.alarm(1)\n    return [1.0]\n")
    (tmp_path / "plain.py").write_text("def good(completions): return [1.0]")
    assert isinstance(load_reward("timed.py:good", tmp_path).function, ImportPath)
    assert not isinstance(load_reward("plain.py:good", tmp_path).function, ImportPath)
    assert isinstance(load_reward("accuracy_reward").function, ImportPath)
    assert not needs_main_thread(len)
