from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from lachesis.common.errors import ConfigError, RewardError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.plugins.reward_models.model import RewardModel
from lachesis.rollouts.rewards.loading import names_model
from lachesis.rollouts.rewards.rewarder import Rewarder, load_rewards
from tests.tiny import PAD_ID, VOCAB_SIZE, tiny_tokenizer

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }};{% endfor %}"


def save(directory: Path, *, kind: Any = AutoModelForSequenceClassification, template: str | None = TEMPLATE,
         **config: Any) -> Path:  # fmt: skip
    """A tiny model with random weights, and the tokenizer of a token per character."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    fields = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "initializer_range": 0.5, "pad_token_id": PAD_ID,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind.from_config(AutoConfig.for_model("qwen2", **fields, **config)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "judge", num_labels=1)


@pytest.fixture(scope="module")
def model(directory) -> RewardModel:
    return RewardModel(str(directory), device="cpu", batch_size=2)


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


USER = [{"role": "user", "content": "1+2"}]


def expected(directory: Path, text: str) -> float:
    """The model's output for one text, without batch and padding."""
    judge = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    ids = tiny_tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return judge(ids).logits.item()


class TestScores:
    def test_a_conversation_goes_through_the_template_whatever_else_is_in_the_batch(self, directory, model):
        answers = ["3", "unknown", "33", "3+3+3"]
        scores = model(prompts=[USER] * 4, completions=[answer(text) for text in answers])
        right = [expected(directory, f"[user]1+2;[assistant]{text};") for text in answers]
        assert scores == pytest.approx(right, abs=1e-5)
        assert len(set(scores)) == 4

    def test_a_continued_answer_is_joined(self, model):
        begun = [*USER, {"role": "assistant", "content": "It is "}]
        assert model([begun], [answer("3")]) == pytest.approx(model([USER], [answer("It is 3")]))

    def test_a_text_is_followed_by_its_answer(self, directory, model):
        assert model(["1+2="], [answer("3")]) == pytest.approx([expected(directory, "1+2=3")], abs=1e-5)

    def test_without_a_template_prompt_and_answer_are_a_pair(self, tmp_path):
        path = save(tmp_path / "m", num_labels=1, template=None)
        judge = RewardModel(str(path))
        assert judge([USER], [answer("3")]) == pytest.approx([expected(path, "1+23")], abs=1e-5)
        assert judge(["1+2"], [answer("3")]) == judge([USER], [answer("3")])

    def test_no_completions(self, model):
        assert model([], []) == []


class TestRefusals:
    def test_two_outputs(self, tmp_path):
        path = save(tmp_path / "m", num_labels=2)
        with pytest.raises(ConfigError, match="no trained head with one output") as caught:
            RewardModel(str(path))
        assert "num_labels=1" in caught.value.remedy

    def test_a_model_without_a_head(self, tmp_path):
        path = save(tmp_path / "m", kind=AutoModelForCausalLM)
        with pytest.raises(ConfigError, match=r"no trained head.*score\.weight"):
            RewardModel(str(path))

    def test_what_cannot_be_loaded(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match="cannot be loaded"):
            RewardModel(str(tmp_path))

    def test_a_directory_that_is_not_there(self, tmp_path):
        with pytest.raises(ConfigError, match=r"the reward model \./none cannot be loaded"):
            load_rewards(["./none"], tmp_path)

    def test_a_text_that_is_too_long_is_reported_with_its_sample(self, directory):
        def sample(text: str) -> Sample:
            return Sample((1,), (5,), (-0.5,), "stop", VersionSpan(0, 0), text=text)

        rewarder = Rewarder(load_rewards([str(directory)], model_device="cpu"))
        group = Group(Prompt(id="7", token_ids=(1,), text="p"), (sample("3"), sample("3" * 70)))
        with pytest.raises(RewardError, match=r"'judge' raised ValueError: 71 tokens.* takes 64.* completion 2 of 2"):
            rewarder.score([group])


class TestNames:
    @pytest.mark.parametrize("spec", ["owner/reward-model-v3.1", "OpenAssistant/reward-model-deberta-v3-large-v2"])
    def test_hub_ids(self, spec, tmp_path):
        assert names_model(spec, tmp_path) == spec

    @pytest.mark.parametrize("spec", ["rewards.accuracy", "a/rewards.py:f", "rewards.py:f", "math"])
    def test_what_is_none(self, spec, tmp_path):
        assert names_model(spec, tmp_path) is None

    def test_directories_are_found_beside_the_configuration(self, directory):
        assert names_model("./judge", directory.parent) == str(directory)
        assert names_model(str(directory), Path("/")) == str(directory)

    def test_models_stay_here_and_functions_go(self, directory, tmp_path):
        (tmp_path / "mine.py").write_text("def f(completions, answer): return [float(a) for a in answer]")
        rewards = load_rewards([str(directory), "mine.py:f"], tmp_path, num_workers=1, model_device="cpu")
        assert [reward.name for reward in rewards] == ["judge", "f"]
        rewarder = Rewarder(rewards, num_workers=1)
        prompt = Prompt(id="0", token_ids=(1,), text="1+2=", columns={"answer": "5"})
        sample = Sample((1,), (5,), (-0.5,), "stop", VersionSpan(0, 0), text="3")
        (scored,) = rewarder.score([Group(prompt, (sample,))]).groups
        rewarder.close()
        assert scored.samples[0].rewards == (pytest.approx(expected(directory, "1+2=3"), abs=1e-5), 5.0)
