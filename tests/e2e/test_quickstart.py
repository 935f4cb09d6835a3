"""The quickstart: its own parts, and the whole of it in miniature."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis.config.load import load_config
from lachesis.config.rules import check
from tests.e2e.runs import Main, metrics, tape
from tests.paths import EXAMPLES

EXAMPLE = EXAMPLES / "quickstart"
LAST_LINE = re.compile(
    r"held-out accuracy (\d\.\d\d) -> (\d\.\d\d) \((\d+) problems, (\d+) steps, (\d+) s\); report: (\S+/report\.html)"
)


def load(name: str, directory: Path = EXAMPLE) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", directory / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return load("setup")


class TestParts:
    def test_the_configuration_is_sound(self):
        loaded = load_config(EXAMPLE / "config.yaml")
        assert not [finding for finding in check(loaded.config) if finding.level == "problem"]
        assert loaded.config.run.name == "quickstart"
        assert loaded.config.sampling.num_generations == 8
        assert loaded.config.data.eval_path is not None

    def test_the_tokenizer_has_a_token_for_each_character(self, setup: ModuleType):
        tokenizer = setup.character_tokenizer()
        ids = tokenizer("37+45=")["input_ids"]
        assert len(ids) == 6
        assert tokenizer.pad_token_id not in ids
        assert tokenizer.decode(ids).replace(" ", "") == "37+45="
        assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3

    def test_problems_are_right_and_none_is_on_both_sides(self, setup: ModuleType):
        train, held_out = setup.problems(seed=0)
        assert (len(train), len(held_out)) == (10_000 - setup.HELD_OUT, setup.HELD_OUT)
        assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in held_out)
        for row in train[:50] + held_out[:50]:
            a, b = map(int, row["prompt"].removesuffix("=").split("+"))
            assert int(row["answer"][::-1]) == a + b
        assert setup.problems(seed=0) == (train, held_out)

    def test_every_answer_fits_into_a_completion(self, setup: ModuleType):
        longest = load_config(EXAMPLE / "config.yaml").config.sampling.max_completion_length
        train, held_out = setup.problems(seed=0)
        assert max(len(row["answer"]) for row in train + held_out) + 1 <= longest, "with its end token"

    def test_labels_are_the_answer_and_its_end_alone(self, setup: ModuleType):
        tokenizer = setup.character_tokenizer()
        rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "37+45=", "answer": "28"}]
        ids, labels = setup.encode(tokenizer, rows)
        assert ids.shape == labels.shape == (2, 9)
        for row, row_ids, row_labels in zip(rows, ids, labels, strict=True):
            answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
            prompt = tokenizer(row["prompt"])["input_ids"]
            counted = row_labels != -100
            assert row_labels[counted].tolist() == answer
            assert row_ids[: len(prompt) + len(answer)].tolist() == prompt + answer
            assert (row_ids[len(prompt) + len(answer) :] == tokenizer.pad_token_id).all()
            assert not counted[: len(prompt)].any()

    def test_the_model_is_small(self, setup: ModuleType):
        model = setup.small_model(setup.character_tokenizer())
        assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 4_000_000

    def test_sampled_accuracy_is_the_probability_of_the_right_answer(self, setup: ModuleType):
        tokenizer = setup.character_tokenizer()

        class Certain(torch.nn.Module):
            """Sure of the token that comes next in the input."""

            def forward(self, input_ids: torch.Tensor):
                following = torch.nn.functional.one_hot(input_ids.roll(-1, dims=1), len(tokenizer)).float()
                return type("Output", (), {"logits": 100 * following})

        rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "37+45=", "answer": "28"}]
        assert setup.sampled_accuracy(Certain(), tokenizer, rows) == pytest.approx(1.0)
        flat = type("Flat", (Certain,), {"forward": lambda self, input_ids: flat_output(input_ids, len(tokenizer))})
        expected = (len(tokenizer) ** -2 + len(tokenizer) ** -3) / 2
        assert setup.sampled_accuracy(flat(), tokenizer, rows) == pytest.approx(expected, rel=1e-4)

    def test_the_reward_is_for_the_exact_answer(self):
        completions = [[{"role": "assistant", "content": text}] for text in ("28", "28 ", "", "82")]
        assert load("rewards").exact_match(completions, answer=["28"] * 4) == [1.0, 0.0, 0.0, 0.0]


def flat_output(input_ids: torch.Tensor, vocabulary: int):
    return type("Output", (), {"logits": torch.zeros(*input_ids.shape, vocabulary)})


@pytest.fixture
def miniature(tmp_path: Path) -> Path:
    """The example with one-digit numbers and a smaller model, which starts in seconds."""
    directory = tmp_path / "quickstart"
    shutil.copytree(EXAMPLE, directory, ignore=shutil.ignore_patterns(".cache", "__pycache__"))
    text = (directory / "setup.py").read_text()
    for old, new in (
        ("range(100) for b in range(100)", "range(10) for b in range(10)"),
        ("HELD_OUT = 512", "HELD_OUT = 20"),
        ("generator.sample(train, 256)", "generator.sample(train, 64)"),
        ("hidden_size=192", "hidden_size=48"),
        ("intermediate_size=512", "intermediate_size=96"),
        ("START_ACCURACY = 0.25", "START_ACCURACY = 0.1"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (directory / "setup.py").write_text(text)
    return directory


def test_the_whole_of_it_in_miniature(main: Main, miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["quickstart/config.yaml", "--set=run.steps=6", "--set=batch.prompts_per_step=16"]
    outcome = main("train", *arguments, "--set=optimizer.warmup_steps=2", "--set=evaluation.every_steps=3")
    assert outcome.code == 0, outcome.err
    last = LAST_LINE.fullmatch(outcome.out.splitlines()[-1])
    assert last, outcome.out
    before, after, problems, steps, _, report = last.groups()
    assert (problems, steps, report) == ("20", "6", "runs/quickstart/report.html")

    run_dir = tmp_path / "runs" / "quickstart"
    evaluations = metrics(run_dir).evaluations
    assert [result.step for result in evaluations] == [0, 3, 6]
    assert (f"{evaluations[0].accuracy:.2f}", f"{evaluations[-1].accuracy:.2f}") == (before, after)
    assert len(tape(run_dir)) == 6
    assert {"config.yaml", "metrics.jsonl", "report.html", "state.json", "final", "rollouts", "logs"} <= {
        path.name for path in run_dir.iterdir()
    }
    for directory in (miniature / ".cache" / "model", run_dir / "final"):
        assert AutoModelForCausalLM.from_pretrained(directory).config.model_type == "qwen2"
        assert AutoTokenizer.from_pretrained(directory).pad_token == "<pad>"


def test_the_start_is_made_once(miniature: Path):
    setup = load("setup", miniature)
    model = miniature / ".cache" / "model"
    setup.prepare(str(model))
    assert len((miniature / ".cache" / "train.jsonl").read_text().splitlines()) == 80
    rows = [json.loads(line) for line in (miniature / ".cache" / "eval.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    tokenizer = AutoTokenizer.from_pretrained(model)
    accuracy = setup.sampled_accuracy(AutoModelForCausalLM.from_pretrained(model), tokenizer, rows)
    assert accuracy >= setup.START_ACCURACY
    written = (model / "model.safetensors").stat().st_mtime_ns
    setup.prepare(str(model))
    assert (model / "model.safetensors").stat().st_mtime_ns == written


def test_a_start_that_was_interrupted_is_made_anew(miniature: Path):
    setup = load("setup", miniature)
    model = miniature / ".cache" / "model"
    (model.with_name("model.unfinished")).mkdir(parents=True)
    model.mkdir()
    setup.prepare(str(model))
    assert AutoModelForCausalLM.from_pretrained(model).config.model_type == "qwen2"
