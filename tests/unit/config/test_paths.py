from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lachesis.config.paths import resolve_all, resolve_path
from lachesis.config.schema import LachesisConfig


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    base, cwd = tmp_path / "base", tmp_path / "cwd"
    base.mkdir()
    cwd.mkdir()
    return base, cwd


def resolver(build: Callable[..., LachesisConfig], base: Path, cwd: Path) -> Callable[[str], str]:
    """What a function of the configuration's is resolved to."""
    return lambda spec: resolve_all(build(rewards={"functions": [spec]}), base_dir=base, cwd=cwd).rewards.functions[0]


def test_resolve_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    base = Path("/etc/run")
    assert resolve_path(base, "a/b.jsonl") == Path("/etc/run/a/b.jsonl")
    assert resolve_path(base, "../b") == Path("/etc/b")
    assert resolve_path(base, "/abs") == Path("/abs")
    assert resolve_path(base, "~/x") == Path("/home/somebody/x")


def test_functions_in_files_are_relative_to_the_configuration(places, build):
    base, cwd = places
    function = resolver(build, base, cwd)
    assert function("sub/r.py:f") == f"{base}/sub/r.py:f"
    assert function("/x/r.py:f") == "/x/r.py:f"


def test_modules_beside_the_configuration_come_before_those_in_the_current_directory(places, build):
    base, cwd = places
    function = resolver(build, base, cwd)
    (cwd / "rewards.py").touch()
    assert function("rewards.f") == f"{cwd}/rewards.py:f"
    (base / "rewards.py").touch()
    assert function("rewards.f") == f"{base}/rewards.py:f"
    (base / "package").mkdir()
    (base / "package" / "math.py").touch()
    assert function("package.math.f") == f"{base}/package/math.py:f"


@pytest.mark.parametrize("spec", ["installed.module.f", "alone", "package.module:f", ""])
def test_other_functions_stay_as_they_are(places, build, spec):
    function = resolver(build, *places)
    assert function(spec) == spec


def test_a_model_is_a_path_if_it_looks_like_one_or_is_one(places, build):
    base, cwd = places

    def model(path: str, setup: str | None = None) -> str:
        return resolve_all(build(model={"path": path}, run={"setup": setup}), base_dir=base, cwd=cwd).model.path

    assert model("org/model") == "org/model"
    assert model("./model") == f"{base}/model"
    assert model("model", setup="s.py:f") == f"{base}/model"
    (base / "org" / "model").mkdir(parents=True)
    assert model("org/model") == f"{base}/org/model"


@pytest.mark.parametrize(
    ("value", "is_path"),
    [("a.jsonl", True), ("a/b.parquet", True), ("./data", True), ("openai/gsm8k", False), ("squad", False)],
)
def test_data_is_a_path_if_it_looks_like_one(places, build, value, is_path):
    base, cwd = places
    data = resolve_all(build(data={"path": value, "more": [{"path": value}]}), base_dir=base, cwd=cwd).data
    expected = str(resolve_path(base, value)) if is_path else value
    assert (data.path, data.more[0].path) == (expected, expected)


def test_data_is_a_path_if_it_is_there(places, build):
    base, cwd = places
    (base / "openai" / "gsm8k").mkdir(parents=True)
    config = resolve_all(build(data={"path": "openai/gsm8k"}), base_dir=base, cwd=cwd)
    assert config.data.path == f"{base}/openai/gsm8k"


def test_a_reward_may_be_a_model(places, build):
    base, cwd = places
    functions = ["org/reward-1.5b", "./rm", "a/b.py:f"]
    resolved = resolve_all(build(rewards={"functions": functions}), base_dir=base, cwd=cwd)
    assert resolved.rewards.functions == ["org/reward-1.5b", f"{base}/rm", f"{base}/a/b.py:f"]


def test_all_functions_and_paths(places, build):
    base, cwd = places
    (base / "m.py").touch()
    config = build(
        data={"transform": "m.f", "prepared_path": "p", "more": [{"path": "x.csv", "transform": "m.g"}]},
        source={"kind": "local", "rollout_func": "m.h"},
        algorithm={"loss": "m.loss"},
        bridge={"kind": "shared_vllm", "config_path": "b.json"},
    )
    resolved = resolve_all(config, base_dir=base, cwd=cwd)
    assert (resolved.data.transform, resolved.data.prepared_path) == (f"{base}/m.py:f", f"{base}/p")
    assert resolved.data.more[0].transform == f"{base}/m.py:g"
    assert resolved.source.kind == "local" and resolved.source.rollout_func == f"{base}/m.py:h"
    assert resolved.algorithm.loss == f"{base}/m.py:loss"
    assert resolved.bridge.kind == "shared_vllm" and resolved.bridge.config_path == f"{base}/b.json"


def test_in_a_file_of_another_trainers_the_current_directory_comes_first(places, build):
    base, cwd = places
    (base / "rewards.py").touch()
    (base / "here.jsonl").touch()
    config = build(data={"path": "here.jsonl", "eval_path": "none.jsonl"}, rewards={"functions": ["rewards.f"]})
    resolved = resolve_all(config, base_dir=base, cwd=cwd, like_theirs=True)
    assert resolved.data.path == f"{base}/here.jsonl"
    assert resolved.data.eval_path == f"{cwd}/none.jsonl"
    assert resolved.rewards.functions == [f"{base}/rewards.py:f"]
    for name in ("rewards.py", "here.jsonl"):
        (cwd / name).touch()
    resolved = resolve_all(config, base_dir=base, cwd=cwd, like_theirs=True)
    assert resolved.data.path == f"{cwd}/here.jsonl"
    assert resolved.rewards.functions == [f"{cwd}/rewards.py:f"]


def test_resolve_all(places, build):
    base, cwd = places
    (base / "rewards.py").touch()
    config = build(
        run={"setup": "setup.py:make"},
        model={"path": "model", "tokenizer": "org/tokenizer", "chat_template": "chat.jinja"},
        data={"path": "a.jsonl", "eval_path": "../b.jsonl"},
        rewards={"functions": ["rewards.f", "installed.g"]},
    )
    resolved = resolve_all(config, base_dir=base, cwd=cwd)
    assert resolved.run.dir == f"{cwd}/runs"
    assert resolved.run.setup == f"{base}/setup.py:make"
    assert resolved.model.path == f"{base}/model"
    assert resolved.model.tokenizer == "org/tokenizer"
    assert resolved.model.chat_template == f"{base}/chat.jinja"
    assert resolved.data.path == f"{base}/a.jsonl"
    assert resolved.data.eval_path == f"{base.parent}/b.jsonl"
    assert resolved.rewards.functions == [f"{base}/rewards.py:f", "installed.g"]
    assert config.data.path == "a.jsonl"


def test_what_is_unset_stays_unset_and_a_template_is_no_path(places, build):
    base, cwd = places
    template = "{{ messages[0].content }}"
    resolved = resolve_all(build(model={"chat_template": template}), base_dir=base, cwd=cwd)
    assert resolved.model.chat_template == template
    assert (resolved.run.setup, resolved.model.tokenizer, resolved.data.eval_path) == (None, None, None)
    assert resolved.model.path == "org/model"


def test_resolving_twice_from_elsewhere_changes_nothing(places, build):
    base, cwd = places
    once = resolve_all(build(run={"setup": "s.py:f"}), base_dir=base, cwd=cwd)
    assert resolve_all(once, base_dir=Path("/elsewhere"), cwd=Path("/other")) == once


def test_parts_of_a_command_are_paths_where_they_are_files_and_a_program_is_none(places, build):
    base, cwd = places
    (base / "agent.py").touch()
    program = "import os\n" * 1000
    command = ["python", "agent.py", "-c", program, "{prompt}"]
    source = resolve_all(build(source={"kind": "agent", "command": command}), base_dir=base, cwd=cwd).source
    assert source.command == ["python", f"{base}/agent.py", "-c", program, "{prompt}"]
