from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.load import dump_config, load_config
from lachesis.config.schema import BatchConfig, SamplingConfig


def message_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=overrides)
    assert caught.value.remedy
    return caught.value.message


def test_a_minimal_file(write, minimal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(minimal)
    loaded = load_config(path.relative_to(tmp_path))
    assert loaded.base_dir == path.parent
    assert loaded.config.run.steps == 10
    assert loaded.config.data.path == str(path.parent / "train.jsonl")
    assert loaded.config.run.dir == str(tmp_path / "runs")
    assert loaded.config.adapter.kind == "none"


def test_overrides_win_over_the_file_and_later_ones_over_earlier(write, minimal):
    path = write(minimal + "adapter: {kind: lora}\n")
    overrides = ["run.steps=20", "run.steps=30", "adapter.r=4", "optimizer.learning_rate=1e-3"]
    config = load_config(path, overrides=[*overrides, "data.chat_template_kwargs.thinking=false"]).config
    assert config.run.steps == 30
    assert config.adapter.kind == "lora" and config.adapter.r == 4
    assert config.optimizer.learning_rate == 1e-3
    assert config.data.chat_template_kwargs == {"thinking": False}


def test_paths_in_overrides_follow_the_rule_of_the_file(write, minimal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(minimal)
    assert load_config(path, overrides=["data.path=x.jsonl"]).config.data.path == str(path.parent / "x.jsonl")


EVERY_SORT_OF_VALUE = """\
run: {steps: 10, setup: setup.py:make}
model: {path: model, compile: on}
adapter: {kind: lora, targets: [q_proj, v_proj]}
data: {path: train.jsonl, chat_template_kwargs: {a: [1, {b: 0.5}], date: 2024-01-01}}
rewards: {functions: [installed.module.exact, rewards.py:exact]}
optimizer: {betas: [0.8, 0.99], learning_rate: 1e-6}
sampling: {stop: ['no', '1e-6', "\\n\\n"]}
logging: {wandb: {project: p}}
"""


def test_the_dump_loads_back_equal_from_anywhere(write, tmp_path, monkeypatch):
    config = load_config(write(EVERY_SORT_OF_VALUE)).config
    elsewhere = tmp_path / "runs" / "x"
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    monkeypatch.chdir(elsewhere)
    assert load_config("config.yaml").config == config


def test_the_dump_holds_every_key(build):
    text = dump_config(build())
    for key in ("learning_rate: null", "num_generations: 8", "kind: in_process", "wandb: null"):
        assert key in text


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (
            "sampling: {top_p: 1.5}",
            "sampling.top_p (line 9): expected a number > 0 and <= 1, got the number 1.5",
        ),
        (
            "sampling: {stop: x}",
            "sampling.stop (line 9): expected a list of text, got the text 'x'; write [x]",
        ),
        ("optimizer:\n  kind: adam", "optimizer.kind (line 10): expected one of adamw, adamw_8bit"),
        ("optimizer: {kind: adamW}", "did you mean adamw?"),
        ("optimizer: {warmup_steps: 1e1}", "expected a whole number >= 0, got the number 10.0; write 10"),
        ("optimizer: {betas: [0.9]}", "expected a list of 2, each number from 0 to 1, got a list [0.9]"),
        ("optimizer: {betas: [0.9, x]}", "optimizer.betas[1] (line 9): expected a list of 2"),
        ("optimizer: {learning_rate: true}", "expected a number > 0 or null, got true"),
        ("optimizer: {learning_rate: '1e-6'}", "got the text '1e-6'"),
        (
            "logging: {tape: yes}",
            "logging.tape (line 9): expected true or false, got the text 'yes'; write true",
        ),
        ("logging: {wandb: {}}", "logging.wandb.project (line 9): missing, but required: Project name."),
        ("logging: {wandb: {project: 2024}}", "expected text, got the number 2024; put it in quotes"),
        ("adapter: {kind: lra}", "adapter.kind (line 9): expected one of none, lora, got the text 'lra'"),
        ("adapter: {r: 8}", "adapter.r (line 9): unknown key; it belongs to adapter.kind: lora, but kind is"),
        ("adapter: {kind: lora, targets: 5}", "adapter.targets (line 9): expected text or non-empty list of text, got"),
        ("adapter: {kind: lora, targets: [q, 1]}", "adapter.targets (line 9): expected text or non-empty list of text"),
        ("adapter: {kind: [lora]}", "adapter.kind (line 9): expected one of none, lora, got a list ['lora']"),
        ("run.steps: 5", "run.steps (line 9): unknown key; write steps on a line below run:, indented"),
        ("adapter: {kind: lora, r: 0}", "adapter.r (line 9): expected a whole number >= 1, got the number 0"),
        (
            "engine: {kind: vlm}",
            "engine.kind (line 9): expected one of embedded, embedded_server, vllm, http, custom, got the text 'vlm'",
        ),
        ("logging: {wandb: {project: p, nam: x}}", "did you mean logging.wandb.name?"),
        ("peft_config: m", "peft_config (line 9): unknown key; it is the TRL library's; here it is adapter.kind"),
        ("base_model: m", "base_model (line 9): unknown key; it is Axolotl's; here it is model.path"),
        ("sampling: []", "sampling (line 9): expected keys, got a list []; give it keys or remove it"),
        ("batch: 3", "batch (line 9): expected keys, got the number 3"),
        ("epsilon: 0.3", "epsilon (line 9): unknown key; it belongs to algorithm.epsilon"),
        (
            "batch: {prompt_per_step: 3}",
            "batch.prompt_per_step (line 9): unknown key; did you mean batch.prompts",
        ),
    ],
)
def test_one_problem_is_one_line(write, minimal, added, expected):
    message = message_of(write(f"{minimal}{added}\n"))
    assert expected in message
    assert "\n" not in message


def test_stages_at_the_top_of_a_file_are_those_of_the_run(write, minimal):
    config = load_config(write(f"{minimal}stages: [sft, grpo]\n")).config
    assert config.run.stages == ["sft", "grpo"] and config.sft_steps == 100
    assert "run.stages[0] (line 9: stages): expected a list" in message_of(write(f"{minimal}stages: [sftt, grpo]\n"))
    both = f"{minimal}stages: [sft, grpo]\n"
    twice = message_of(write(both), "run.stages=[grpo]")
    assert "stages (line 9): run.stages (--set run.stages) sets the same; keep one" in twice
    assert load_config(write(minimal), overrides=["stages=[sft,grpo]"]).config.run.stages == ["sft", "grpo"]
    theirs = "model_name_or_path: m\ndataset_name: d\nreward_funcs: [a.b]\nmax_steps: 4\nstages: [sft, grpo]\n"
    assert load_config(write(theirs)).config.run.stages == ["sft", "grpo"]


MANY_PROBLEMS = """\
run: {}
model: {path: m, path: n}
adapter: {kind: lora, targets: 5}
rewards: {functions: [a, 1]}
"""


def test_all_problems_come_at_once_and_each_key_once(write):
    message = message_of(write(MANY_PROBLEMS), "sampling.typo=1", "broken")
    first, *lines = message.splitlines()
    assert first.endswith("config.yaml: 7 problems")
    assert [line.split(":")[0].split(" (")[0].strip() for line in lines] == [
        "model.path",
        "--set broken",
        "run.steps",
        "data.path",
        "adapter.targets",
        "rewards.functions[1]",
        "sampling.typo",
    ]


def test_problems_inside_a_list_of_datasets_say_which(write, minimal):
    data = "data: {path: a.jsonl, more: [{path: b.jsonl, splt: x}, {path: 3}, {}]}"
    message = message_of(write(minimal.replace("data:\n  path: train.jsonl", data)))
    assert "data.more[0].splt (line 5): unknown key; list of mappings with path, name, split" in message
    assert "data.more[1].path (line 5): Input should be a valid string, got the number 3" in message
    assert "data.more[2].path (line 5): Field required" in message


def test_missing_keys_are_named_with_the_place_of_their_section(write):
    message = message_of(write("run:\n  name: x\nmodel: {path: m}\nrewards: {functions: [a.b]}\n"))
    assert "run.steps (line 1): missing, but required: Number of optimizer steps." in message
    assert "Required with" not in message
    assert "data.path: missing, but required" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "optimizer.learning_rat=1",
            "optimizer.learning_rat (--set optimizer.learning_rat): unknown key; did you",
        ),
        ("learning_rate=1", "it belongs to optimizer.learning_rate"),
        (
            "optimiser.learning_rate=1",
            "optimiser (--set optimiser.learning_rate): unknown key; did you mean opti",
        ),
        ("run.steps=many", "run.steps (--set run.steps): expected a whole number >= 1 or null, got the"),
        ("run.steps.more=1", "run.steps (line 2) is the number 10 and has no keys"),
        ("optimizer.kind.more=1", "expected one of adamw, adamw_8bit"),
    ],
)
def test_overrides_that_are_wrong(write, minimal, override, expected):
    assert expected in message_of(write(minimal), override)


def test_a_duplicate_alone_is_enough_to_refuse(write, minimal):
    assert "run.steps (line 3): written twice, first in line 2" in message_of(
        write(minimal.replace("  steps: 10\n", "  steps: 10\n  steps: 10\n"))
    )


def test_the_configuration_cannot_be_changed(build):
    with pytest.raises(ValueError, match="frozen"):
        build().run.steps = 3


def test_null_is_as_good_as_not_written(write, minimal):
    written = f"{minimal}sampling: {{temperature: null, top_p:}}\nbatch:\nservices: {{api: null}}\n"
    config = load_config(write(written)).config
    assert (config.sampling, config.batch) == (SamplingConfig(), BatchConfig())
    assert config.services.api is None  # where null says something
