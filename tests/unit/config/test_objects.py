"""A configuration from Python is that of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lachesis.common.errors import ConfigError
from lachesis.common.objects import object_named
from lachesis.config.load import dump_config, load_config
from lachesis.config.objects import load_objects, require_steps
from lachesis.config.schema import LachesisConfig

ROWS = [{"prompt": "1+1=", "answer": "2"}]
KEYS: dict[str, Any] = {"model": "hub/model", "data": ROWS, "run": {"steps": 3}}


def right(completions: Any, **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


def config_of(*arguments: Any, complete: bool = True, **keys: Any) -> LachesisConfig:
    config, *_ = arguments or (None,)
    return load_objects(config, keys, complete=complete).loaded.config


def test_objects_are_where_names_would_be():
    found = load_objects(None, KEYS | {"rewards": [right, "rewards.other"], "algorithm": {"loss": right}})
    config = found.loaded.config
    assert object_named(config.data.path or "") is ROWS
    assert object_named(config.rewards.functions[0]) is right
    assert config.rewards.functions[1] == "rewards.other"
    assert config.algorithm.loss == config.rewards.functions[0], "one object, one name"
    assert len(found.given) == 2


def test_sections_may_be_given_whole():
    config = config_of(
        model={"path": Path("/model"), "dtype": "float32"},
        data={"path": ROWS, "eval_path": [*ROWS], "shuffle": False},
        rewards={"functions": (right,), "weights": [np.float64(2.0)]},
        **{"run.steps": np.int64(7)},
    )
    assert (config.model.path, config.model.dtype, config.data.shuffle) == ("/model", "float32", False)
    assert config.data.eval_path != config.data.path
    assert config.rewards.weights == [2.0]
    assert config.run.steps == 7


def test_a_function_alone_is_a_list_of_one():
    assert len(config_of(**KEYS, rewards=right).rewards.functions) == 1


def test_the_errors_are_those_of_a_file(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("model: {path: hub/model}\ndata: {path: d.jsonl}\nrewards: {functions: [a.b]}\nrun: {stepz: 3}\n")
    with pytest.raises(ConfigError) as of_file:
        load_config(file)
    with pytest.raises(ConfigError) as of_keys:
        config_of(model="hub/model", data="d.jsonl", rewards="a.b", run={"stepz": 3})
    plain = of_file.value.message.replace(str(file), "the keys given from Python").replace(" (line 4)", "")
    assert of_keys.value.message == plain
    assert "stepz" in plain


def test_a_key_without_its_section_is_not_taken_for_another_trainers():
    with pytest.raises(ConfigError, match=r"learning_rate: unknown key; it belongs to optimizer\.learning_rate"):
        config_of(**KEYS, rewards=right, learning_rate=1e-5)
    with pytest.raises(ConfigError, match=r"adapter: expected keys, got the text 'lora'; write adapter\.kind: lora"):
        config_of(**KEYS, rewards=right, adapter="lora")


def test_an_object_that_no_key_takes_is_named():
    with pytest.raises(ConfigError, match=r"run\.seed: an object of type complex is not accepted there"):
        config_of(**{**KEYS, "run": {"steps": 3, "seed": 1j}}, rewards=right)


def test_keys_are_laid_over_a_file_of_any_dialect(tmp_path: Path):
    ours = tmp_path / "ours.yaml"
    ours.write_text(
        "model: {path: hub/model}\ndata: {path: d.jsonl}\nrewards: {functions: [a.b]}\nrun: {steps: 3, seed: 5}\n"
    )
    found = load_objects(ours, {"data": ROWS, "run": {"steps": 9}})
    config = found.loaded.config
    assert (config.run.steps, config.run.seed) == (9, 5)
    assert object_named(config.data.path or "") is ROWS
    axolotl = tmp_path / "axolotl.yaml"
    axolotl.write_text(
        "base_model: hub/model\nrl: grpo\nmax_steps: 4\nmicro_batch_size: 8\nlearning_rate: 1.0e-6\n"
        "datasets: [{path: d.jsonl}]\ntrl: {reward_funcs: [a.b], num_generations: 8}\n"
    )
    assert config_of(axolotl, rewards=right, sampling={"num_generations": 4}).sampling.num_generations == 4


CALLS = [
    '({"model_name_or_path": M, "reward_funcs": f}, data=d)',
    '({"model_name_or_path": M, "reward_funcs": [f, "org/reward-model"]}, data=d)',
    '({"model_name_or_path": M, "reward_funcs": f, "beta": 0.01, "loss_type": "dr_grpo"}, data=d)',
    '({"model_name_or_path": M, "reward_funcs": f, "use_vllm": True, "vllm_mode": "server"}, data=d)',
    '({"model_name_or_path": M, "reward_funcs": f, "use_peft": True, "lora_r": 8}, data=d)',
    '({"model_name_or_path": M, "reward_funcs": f}, data=d, source={"tools": [f]})',
    '({"model_name_or_path": M, "reward_funcs": f}, data=d, source={"rollout_func": f})',
    '({"model_name_or_path": M, "reward_funcs": f}, source={"kind": "steps", "environment": C, "tasks": "t.jsonl"})',
]


class Game:
    """Of TRL's ``environment_factory``."""


@pytest.mark.parametrize("call", CALLS)
def test_calls_in_trls_names_are_possible(call: str):
    names = {"M": "org/model", "f": right, "d": ROWS, "C": Game}
    words = {"train": lambda config, **keys: load_objects(config, keys), **names}
    objects = eval(f"train{call}", words)
    loaded = objects.loaded
    assert loaded.dialect == "trl" and loaded.config.model.path == "org/model"
    source = loaded.config.source
    if source.kind == "steps":
        assert object_named(source.environment) is Game and loaded.config.data.path is None
    else:
        assert object_named(str(loaded.config.data.path)) is ROWS


def test_a_run_directory_is_its_configuration(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(dump_config(config_of(**KEYS, rewards="a.b")))
    assert config_of(tmp_path, run={"seed": 4}).run.seed == 4


def test_a_loop_needs_no_number_of_steps():
    config = config_of(model="hub/model", complete=False)
    assert require_steps(config).run.steps == 1
    with pytest.raises(ConfigError, match="needs the number of steps"):
        require_steps(config_of(model="hub/model", optimizer={"schedule": "cosine"}, complete=False))


def test_errors_and_notes_from_python_name_arguments():
    def right(completions: list[str], **rest: object) -> list[float]:
        return [1.0 for _ in completions]

    theirs = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": right, "max_steps": 2}
    with pytest.raises(ConfigError, match=r"my_own.* my_own=None trains") as caught:
        load_objects(theirs | {"my_own": 3}, {})
    assert "--set" not in str(caught.value)
    told = load_objects(theirs, {}).loaded.findings
    assert told and not [finding for finding in told if "--set" in finding.message]
