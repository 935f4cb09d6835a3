"""A small model learns from a teacher, in fewer tokens than from the reward alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from lachesis.common.errors import ModelError
from tests.e2e.runs import metrics, run_here, weights, write_run
from tests.e2e.test_engines import served

LEARNED = 0.8
PROMPTS = [f"{a}{b}" for a in "abcd" for b in "abcd"]
# Four letters, each the one after that before it, all or nothing: chance gets them right once in a thousand times.
NEXT = dict(zip("abcd", "bcda", strict=True))
REWARD = """
def right(completions, prompts, **columns):
    texts = [prompt[-1] + completion[0]["content"] for prompt, completion in zip(prompts, completions)]
    return [float(len(text) == 5 and all(pair in "abcda" for pair in zip_pairs(text))) for text in texts]

def zip_pairs(text):
    return [a + b for a, b in zip(text, text[1:])]
"""


def write(directory: Path, *, steps: int, optimizer: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Path:
    """A run of the doctor's model that is to go on with the alphabet."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "alphabet.py").write_text(REWARD)
    return write_run(
        directory,
        rewards={"functions": [f"{directory / 'alphabet.py'}:right"]},
        sampling={"max_completion_length": 4},
        optimizer=optimizer or {"learning_rate": 1e-2},
        run={"name": "run", "dir": str(directory / "runs"), "steps": steps},
        **sections,
    )


def continued(letter: str) -> str:
    """The four letters after it."""
    return "".join(accumulate([letter] * 5, lambda before, _: NEXT[before]))[1:]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, trained with nothing but torch until it knows."""
    return taught(tmp_path_factory.mktemp("teacher"), continued)


def taught(directory: Path, answer: Callable[[str], str]) -> Path:
    """The doctor's model, trained to answer the last letter of each prompt so."""
    write(directory, steps=1)
    model = Qwen2ForCausalLM.from_pretrained(directory / "model").train()
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    ids = torch.tensor([tokenizer(prompt + answer(prompt[-1]))["input_ids"] for prompt in PROMPTS])
    labels = ids.clone()
    labels[:, :2] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory / "taught")
    tokenizer.save_pretrained(directory / "taught")
    return directory / "taught"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one that learns from the reward alone."""
    return run_here(write(tmp_path_factory.mktemp("alone"), steps=26)).run_dir


def values(run_dir: Path, name: str) -> list[float]:
    return [line.values[name] for line in metrics(run_dir).steps]


def tokens_until_learned(run_dir: Path) -> float:
    """Tokens trained on before the first step whose mean reward is 0.8; all of the run's where none is."""
    rewards, tokens = values(run_dir, "reward"), [0.0, *accumulate(values(run_dir, "tokens_trained"))]
    return tokens[next((place for place, reward in enumerate(rewards) if reward >= LEARNED), len(rewards))]


OTHER_DIVERGENCE = pytest.mark.long("test_a_teacher_saves_tokens[reverse kl]: another divergence")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="reverse kl"),
        pytest.param({"beta": 0.5, "top_k": 3}, id="jsd of 3 tokens"),
        pytest.param({"estimate": "sampled"}, id="sampled", marks=OTHER_DIVERGENCE),
        pytest.param({"reward_weight": 0.0, "beta": 0.0}, id="forward kl alone", marks=OTHER_DIVERGENCE),
    ],
)
def test_a_teacher_saves_tokens(tmp_path: Path, teacher: Path, alone: Path, options: dict[str, Any]):
    section = {"model": str(teacher), **options}
    run_dir = run_here(write(tmp_path, steps=20, algorithm={"teacher": section})).run_dir
    assert max(values(run_dir, "reward")) >= LEARNED
    assert tokens_until_learned(run_dir) < 0.7 * tokens_until_learned(alone)
    distance = values(run_dir, "distill_kl")
    assert distance[-1] < 0.2 * distance[0]


SAVED = {"checkpoint": {"save_final": True}}


def test_a_teacher_for_some_prompts_and_rewards_for_the_others(tmp_path: Path, teacher: Path):
    """What is measured of the first kind is no reward to learn from, and the teacher would say something else of the
    second: each has to be learned from what its environment names, and from that alone."""
    section = {
        "model": str(teacher),
        "column": "subject",
        "weights": {"letters": 0.0},
        "reward_weights": {"alphabet": 0.0},
    }
    config = write(tmp_path, steps=80, algorithm={"teacher": section}, optimizer={"learning_rate": 3e-3}, **SAVED)
    (tmp_path / "alphabet.py").write_text(
        "def right(completions, **columns):\n"
        "    return [completion[0]['content'].count('a') / 4 for completion in completions]\n"
    )
    subjects = {prompt: "alphabet" if prompt[0] in "ab" else "letters" for prompt in PROMPTS}
    (tmp_path / "problems.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "subject": subject}) + "\n" for prompt, subject in subjects.items())
    )
    said = greedy(run_here(config).run_dir / "final", length=4)
    assert {prompt: said[prompt] for prompt in PROMPTS if subjects[prompt] == "alphabet"} == {
        prompt: continued(prompt[-1]) for prompt in PROMPTS if subjects[prompt] == "alphabet"
    }
    assert {said[prompt] for prompt in PROMPTS if subjects[prompt] == "letters"} == {"aaaa"}


@pytest.fixture(scope="module")
def other_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, trained to say the prompt's last letter again and again."""
    return taught(tmp_path_factory.mktemp("other"), lambda letter: letter * 4)


def test_each_source_moves_to_its_own_teacher(tmp_path: Path, teacher: Path, other_teacher: Path):
    """Both teachers know what to say to every prompt; a source's prompts are continued as its own one says."""
    config = write(tmp_path, steps=100, optimizer={"learning_rate": 3e-3}, **SAVED)
    written = yaml.safe_load(config.read_text())
    data, rewards = written.pop("data"), written.pop("rewards")
    subjects = {prompt: "on" if prompt[0] in "ab" else "again" for prompt in PROMPTS}
    written["sources"] = []
    for name in ("on", "again"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in PROMPTS if subjects[one] == name))
        written["sources"].append({"name": name, "data": {**data, "path": str(file)}, "rewards": rewards})
    written["algorithm"] = {
        "teachers": {
            "on": {"model": str(teacher), "reward_weight": 0.0},
            "again": {"model": str(other_teacher), "reward_weight": 0.0, "beta": 0.0},
        }
    }
    config.write_text(yaml.safe_dump(written))
    said = greedy(run_here(config).run_dir / "final", length=4)
    assert said == {prompt: continued(prompt[-1]) if subjects[prompt] == "on" else prompt[-1] * 4 for prompt in PROMPTS}


def greedy(model_dir: Path, *, length: int) -> dict[str, str]:
    """What a saved model says to each prompt, always its likeliest token."""
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    ids = torch.tensor([tokenizer(prompt)["input_ids"] for prompt in PROMPTS])
    for _ in range(length):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return dict(zip(PROMPTS, tokenizer.batch_decode(ids[:, -length:]), strict=True))


@pytest.fixture(scope="module")
def server(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The teacher, served by `lachesis serve`."""
    directory = tmp_path_factory.mktemp("server")
    with served(teacher, root=directory, log=directory / "server.log") as url:
        yield url


class TestOneThatIsServed:
    def test_all_that_it_says_teaches_what_the_model_does(self, tmp_path: Path, teacher: Path, server: str):
        """Its whole vocabulary, which is small: the divergence to 1e-6, and after three
        steps of AdamW, which divides by small numbers, the weights to 5e-6."""
        vocab = len(AutoTokenizer.from_pretrained(teacher))
        said = {"kind": "url", "url": server, "top_k": vocab}
        runs = [
            run_here(write(tmp_path / name, steps=3, algorithm={"teacher": section | {"beta": 0.5}}, **SAVED)).run_dir
            for name, section in (("held", {"model": str(teacher)}), ("asked", said))
        ]
        held, asked = (values(run_dir, "distill_kl") for run_dir in runs)
        assert asked == pytest.approx(held, abs=1e-6)
        for name, tensor in weights(runs[0]).items():
            torch.testing.assert_close(weights(runs[1])[name], tensor, rtol=1e-4, atol=5e-6)

    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({"top_k": 3}, id="3 tokens", marks=pytest.mark.long(
                "TestOneThatIsServed::test_it_saves_tokens[sampled]: more tokens a position"
            )),
            pytest.param({"estimate": "sampled"}, id="sampled"),
        ],
    )  # fmt: skip
    def test_it_saves_tokens(self, tmp_path: Path, alone: Path, server: str, options: dict[str, Any]):
        section = {"kind": "url", "url": f"{server}/v1", **options}
        run_dir = run_here(write(tmp_path, steps=20, algorithm={"teacher": section})).run_dir
        assert max(values(run_dir, "reward")) >= LEARNED
        assert tokens_until_learned(run_dir) < 0.7 * tokens_until_learned(alone)

    def test_it_is_asked_by_a_policy_of_another_tokenizer(self, tmp_path: Path, server: str):
        config = write(tmp_path, steps=1, algorithm={"teacher": {"kind": "url", "url": server, "top_k": 3}})
        swap(tmp_path / "model" / "tokenizer.json")
        with pytest.raises(ModelError, match=r"the tokenizer of the teacher at .* differs from .* the first token"):
            run_here(config)


def swap(file: Path) -> None:
    """Two tokens have each other's ids."""
    text = file.read_text()
    file.write_text(text.replace('"a": 2', '"a": 3').replace('"b": 3', '"b": 2'))
    assert file.read_text() != text


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path, teacher: Path):
    swapped = PreTrainedTokenizerFast.from_pretrained(teacher)
    swapped.save_pretrained(tmp_path / "other")
    swap(tmp_path / "other" / "tokenizer.json")
    with pytest.raises(ModelError, match=r"the tokenizer of the teacher .* differs from the policy's"):
        run_here(write(tmp_path, steps=1, algorithm={"teacher": {"model": str(tmp_path / "other")}}))
