from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.keys import all_keys
from lachesis.plugins.dialects.explain import CONSTRUCTORS, Alias, explain
from lachesis.plugins.dialects.table import Dialect, Entry

TRAINER = Dialect(
    "trainer",
    [
        Entry("lr", "optimizer.learning_rate", default=3e-4, note="twice as large"),
        Entry("group-size", "sampling.num_generations"),
        Entry("sky.color", treatment="nothing", note="the sky is always blue"),
        Entry("birds", treatment="cannot", note="there are no birds"),
    ],
    prefix="--",
)


def test_a_full_path():
    answer = explain("sampling.temperature")
    assert answer.meaning == "key"
    (found,) = answer.explanations
    assert (answer.query, found.path, found.section) == ("sampling.temperature", "sampling.temperature", "sampling")
    assert (found.type, found.default) == ("number > 0", "1.0")
    assert found.description == "Sampling temperature."


@pytest.mark.parametrize("name", ["weight_decay", "--weight-decay", " weight-decay "])
def test_a_bare_name_that_one_key_has(name):
    answer = explain(name)
    assert answer.meaning == "key"
    assert answer.explanations[0].path == "optimizer.weight_decay"


def test_a_required_key_has_no_default():
    assert explain("model.path").explanations[0].default is None


def test_the_end_of_a_path_is_enough():
    assert explain("wandb.name").explanations[0].path == "logging.wandb.name"


def test_an_ambiguous_name_lists_all():
    answer = explain("every_steps")
    assert answer.meaning == "several"
    assert [found.section for found in answer.explanations] == [
        *("bridge", "bridge", "evaluation", "checkpoint", "logging")
    ]
    assert answer.explanations[0].kinds != answer.explanations[1].kinds


def test_a_section_lists_its_keys_and_those_of_sections_in_it():
    answer = explain("logging")
    assert answer.meaning == "section"
    assert answer.description == "The logs, metrics and reports of a run."
    paths = [found.path for found in answer.explanations]
    assert "logging.tape" in paths and "logging.wandb.project" in paths
    assert all(path.startswith("logging.") for path in paths)


def test_a_nested_section_by_its_name():
    answer = explain("wandb")
    assert answer.meaning == "section"
    assert {found.section for found in answer.explanations} == {"logging.wandb"}


@pytest.mark.parametrize("name", ["sources.weight", "sources[1].weight"])
def test_a_key_of_one_of_several_sources(name: str):
    (found,) = explain(name).explanations
    assert (found.path, found.default) == ("sources.weight", "1.0")
    assert explain("sources.data.path").explanations[0].path == "sources.data.path"


def test_keys_of_a_variant_say_so():
    assert explain("alpha").explanations[0].kinds == ("lora",)


@pytest.mark.parametrize("name", ["lr", "--lr"])
def test_a_name_of_a_dialect(name):
    (found,) = explain(name, dialects=[TRAINER]).explanations
    assert (found.path, found.dialect) == ("optimizer.learning_rate", "trainer")


def test_dashes_in_a_dialect_are_underscores():
    (found,) = explain("--group_size", dialects=[TRAINER]).explanations
    assert found.path == "sampling.num_generations"


def test_a_name_that_is_ours_and_a_dialects_is_told_once_with_all_its_names():
    other = Dialect("other", [Entry("temperature", "evaluation.temperature"), Entry("x.epochs", "sampling.top_k")])
    answer = explain("temperature", dialects=[other])
    assert [(found.path, found.dialect) for found in answer.explanations] == [
        ("sampling.temperature", ""),
        ("evaluation.temperature", ""),
    ]
    assert answer.explanations[0].aliases == ()
    assert answer.explanations[1].aliases == (Alias("other", "temperature"),)
    assert [(found.path, found.dialect) for found in explain("epochs", dialects=[other]).explanations] == [
        ("run.epochs", ""),
        ("sampling.top_k", "other"),
    ]


def test_an_alias_has_its_default_and_what_is_different():
    (found,) = explain("optimizer.learning_rate", dialects=[TRAINER]).explanations
    assert found.dialect == ""
    assert found.aliases == (Alias("trainer", "--lr", "0.0003", "twice as large"),)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("color", "the sky is always blue"), ("--birds", "not honoured: there are no birds")],
)
def test_a_name_that_sets_nothing_says_what_is_done_instead(name, expected):
    (found,) = explain(name, dialects=[TRAINER]).explanations
    assert (found.path, found.dialect, found.description) == ("", "trainer", expected)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("base_model", "model.path"),
        ("trl.vllm_lora_sync", "bridge.kind"),
        ("per_device_train_batch_size", "batch.micro_batch_size"),
        ("--kl-coef", "algorithm.beta"),
        ("max-model-len", "engine.max_model_len"),
    ],
)
def test_the_names_of_the_other_trainers_are_known_unasked(name, path):
    assert explain(name).explanations[0].path == path


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("learnin_rate", "did you mean optimizer.learning_rate?"),
        ("sampling.temprature", "did you mean sampling.temperature?"),
        ("groupsize", "did you mean group_size?"),
        ("qqqqq", "the sections are run, model, adapter"),
        ("", "the sections are run, model, adapter"),
    ],
)
def test_an_unknown_name(name, remedy):
    with pytest.raises(ConfigError) as caught:
        explain(name, dialects=[TRAINER])
    assert remedy in caught.value.remedy
    assert caught.value.message == f"no key is called {name!r}"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("GRPOConfig(beta=0.04)", "algorithm.beta"),
        ("GRPOConfig.beta", "algorithm.beta"),
        ("GRPOConfig(num_generations)", "sampling.num_generations"),
        ("AxolotlGRPOConfig(beta=0.04)", "algorithm.beta"),
        ("GRPOTrainer(processing_class=tokenizer)", "model.tokenizer"),
        ("LoraConfig(r=16)", "adapter.r"),
        ("peft_config", "adapter.kind"),
        ("train_dataset", "data.path"),
        ("$LOGDIR", "bridge.config_path"),
        ("--learning-rate=1e-5", "optimizer.learning_rate"),
        ("overlong_filter", "algorithm.mask_truncated"),
        ("--train_type", "adapter.kind"),
        ("trainer.optim.lr", "optimizer.learning_rate"),
        ("orchestrator.rollouts_per_example", "sampling.num_generations"),
    ],
)
def test_names_are_taken_as_scripts_write_them(name: str, path: str):
    assert path in [found.path for found in explain(name).explanations]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("--env.max_steps", "services.environment.args"),
        ("--env.group_size=8", "services.environment.args"),
        ("compute_metrics", "log_metric"),
        ("GRPOConfig", "lachesis.train"),
        ("optimizers", "refused"),
        ("dynamic_sample", "refused: write pipeline.refill_zero_signal"),
        ("orchestrator.batch_size", "counts completions"),
    ],
)
def test_names_that_set_nothing_say_what_to_do(name: str, words: str):
    assert any(words in found.description for found in explain(name).explanations)


def test_all_entries_of_constructors_name_keys():
    known = {key.path for key in all_keys()}
    assert {entry.path for entry in CONSTRUCTORS.entries.values() if entry.path} <= known
