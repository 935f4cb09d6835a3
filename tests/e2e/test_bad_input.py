"""What can be wrong with the input: each one clear error with a remedy, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from lachesis.common.errors import TrainingError
from tests.e2e.runs import Main, Outcome, command, files, metrics, run_here, write_reward, write_run
from tests.tiny import tiny_model, tiny_tokenizer

# Makes something bad in a directory and returns the arguments of `lachesis train CONFIG` that meet it.
Arrange = Callable[[Path], list[str]]


@dataclass(frozen=True, slots=True)
class Bad:
    """``says`` is what the error has to contain: the cause first, the remedy last."""

    name: str
    arrange: Arrange
    code: int
    says: tuple[str, ...]


def sets(*pairs: str) -> Arrange:
    return lambda directory: [f"--set={pair}" for pair in pairs]


def data(content: str | bytes, *pairs: str) -> Arrange:
    """Another dataset."""

    def arrange(directory: Path) -> list[str]:
        (directory / "bad.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["--set=data.path=bad.jsonl", *(f"--set={pair}" for pair in pairs)]

    return arrange


def reward(body: str, *pairs: str) -> Arrange:
    return lambda directory: [
        f"--set=rewards.functions=[{json.dumps(write_reward(directory, body))}]",
        *(f"--set={pair}" for pair in pairs),
    ]


def reward_file(text: str, name: str = "right") -> Arrange:
    def arrange(directory: Path) -> list[str]:
        (directory / "bad.py").write_text(text)
        return [f"--set=rewards.functions=[bad.py:{name}]"]

    return arrange


def model(architecture: str = "llama", *, special: bool = True, damage: int = 0) -> Arrange:
    def arrange(directory: Path) -> list[str]:
        path = directory / "bad"
        tiny_model(architecture).save_pretrained(path)
        roles = {"eos_token": "<eos>", "pad_token": "<pad>"} if special else {}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, **roles)
        tokenizer.save_pretrained(path)
        if damage:
            weights = path / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-damage])
        return ["--set=model.path=bad"]

    return arrange


GOOD = '{"prompt": "ab"}\n'
CONFIGURATION = [
    Bad("unknown key", sets("run.stepz=3"), 2, ("run.stepz", "unknown key", "did you mean", "steps")),
    Bad("unknown section", sets("optimiser.kind=adamw"), 2, ("optimiser", "unknown key", "optimizer")),
    Bad("text for a number", sets("run.steps=many"), 2, ("run.steps", "expected a whole number", "'many'")),
    Bad("number out of range", sets("run.steps=0"), 2, ("run.steps", ">= 1", "0")),
    Bad("text for a list", sets("rewards.functions=a.py:f"), 2, ("rewards.functions", "expected", "list", "write [")),
    Bad("no such choice", sets("algorithm.loss_type=dapoo"), 2, ("algorithm.loss_type", "did you mean dapo?")),
    Bad("group of one", sets("sampling.num_generations=1"), 2, ("sampling.num_generations", ">= 2")),
    Bad("weights that do not fit", sets("rewards.weights=[1, 2]"), 2, ("2 values for 1 rewards.functions", "give one")),
    Bad("evaluation of nothing", sets("evaluation.every_steps=2"), 2, ("no held-out problems", "data.eval_size")),
    Bad("all problems held out", sets("data.eval_size=16"), 3, ("data.eval_size is 16", "hold out fewer")),
    Bad(
        "no room for a prompt",
        sets("sampling.max_completion_length=32"),
        2,
        ("sampling.max_completion_length is 32", "context has 32 tokens", "lower"),
    ),
    Bad("a name that is a path", sets("run.name=../up"), 2, ("run.name", "'../up'", "directory name")),
    Bad("a setup that is missing", sets("run.setup=none.py:prepare"), 2, ("none.py",)),
]
DATASET = [
    Bad("missing", sets("data.path=none.jsonl"), 3, ("none.jsonl", "No such file", "check the path")),
    Bad("a directory", sets("data.path=model"), 3, ("cannot read the dataset", "model")),
    Bad("empty", data(""), 3, ("bad.jsonl is empty", "one JSON object per line")),
    Bad("blank lines only", data("\n\n  \n"), 3, ("bad.jsonl is empty",)),
    Bad("malformed line", data(GOOD + '{"prompt": \n'), 3, ("bad.jsonl, line 2: malformed JSON", "one JSON object")),
    Bad("a list", data(GOOD + "[1]\n"), 3, ("line 2", "a list, not an object")),
    Bad("not UTF-8", data(GOOD.encode() + b'{"prompt": "\xff"}\n'), 3, ("line 2", "UTF-8", "save the file")),
    Bad(
        "another column",
        data('{"promt": "ab"}\n'),
        3,
        ("line 1", "no prompt in column 'prompt'", "data.prompt_column: promt"),
    ),
    Bad("an empty prompt", data(GOOD + '{"prompt": " "}\n'), 3, ("line 2", "is empty", "correct")),
    Bad("a number as prompt", data('{"prompt": 3}\n'), 3, ("line 1", "a number", "a string or a list of messages")),
    Bad("a conversation without template", data('{"prompt": [{"role": "user", "content": "ab"}]}\n'), 3, ("chat",)),
    Bad(
        "longer than the context",
        data(GOOD + '{"prompt": "' + "ab" * 15 + '"}\n'),
        3,
        ("line 2", "the prompt has 30 tokens, but only 24 are allowed", "max_completion_length", "overlong_prompts"),
    ),
    Bad(
        "all longer than the context",
        data('{"prompt": "' + "ab" * 15 + '"}\n', "data.overlong_prompts=drop"),
        3,
        ("all 1 prompts have more than 24 tokens", "data.max_prompt_length"),
    ),
    Bad("missing held-out problems", sets("data.eval_path=none.jsonl"), 3, ("none.jsonl", "check the path")),
]
REWARDS = [
    Bad("missing file", sets("rewards.functions=[none.py:f]"), 2, ("none.py",)),
    Bad("missing function", reward_file("def exact(completions): ...\n", "exakt"), 2, ("exakt", "exact")),
    Bad("not a Python", reward_file("def right(:\n"), 2, ("bad.py", "SyntaxError")),
    Bad("import error", reward_file("import no_such_package\n"), 2, ("no_such_package",)),
    Bad(
        "a column that there is not",
        reward_file("def right(completions, answr): ...\n"),
        4,
        ("'right' needs 'answr'", "nor a column of the dataset"),
    ),
    Bad(
        "raises",
        reward("raise ValueError('odd answer')"),
        4,
        ("raised ValueError: odd answer", "custom.py:", "correct"),
    ),
    Bad("too few", reward("return shares[:-1]"), 4, ("returned 7 rewards for 8 completions", "return a list")),
    Bad("NaN", reward("return [float('nan')] * len(shares)"), 4, ("returned nan", "completion 1 of 8", "finite")),
    Bad("text", reward("return ['good'] * len(shares)"), 4, ("returned a str ('good')", "finite number")),
    Bad("nothing", reward("pass"), 4, ("returned None, not a list", "return a list")),
    Bad("None for all", reward("return [None] * len(shares)"), 4, ("abstained on all 128 completions", "judge")),
    Bad(
        "hangs",
        reward("time.sleep(60)", "rewards.timeout_s=0.2", "batch.prompts_per_step=1"),
        4,
        ("did not return within 0.2 s", "rewards.timeout_s"),
    ),
    Bad(
        "always fails where groups may be dropped",
        reward("raise ValueError('odd answer')", "rewards.on_error=drop_group"),
        4,
        ("groups in a row failed", "odd answer"),
    ),
]
MODELS = [
    Bad("missing", sets("model.path=./none"), 5, ("none", "->")),
    Bad("no pad token", model(special=False), 5, ("neither a pad token nor an end token", "set model.pad_token to a")),
    Bad("unknown pad token", sets("model.pad_token=<nil>"), 5, ("'<nil>' is not in the vocabulary", "choose a token")),
    Bad("damaged weights", model(damage=400), 5, ("could be loaded", "bad")),
    Bad(
        "adapter for nothing",
        sets("adapter.kind=lora", "adapter.targets=[query]"),
        5,
        ("['query'] match nothing", "q_proj", "all-linear"),
    ),
]
DEADLINES = [
    Bad(
        "generation",
        sets("deadlines.generation_s=0.0001"),
        8,
        ("generation of 16 prompts x 8 completions took longer than 0.0001 s", "raise deadlines.generation_s"),
    ),
]
ALL = {
    "configuration": CONFIGURATION,
    "dataset": DATASET,
    "reward": REWARDS,
    "model": MODELS,
    "deadline": DEADLINES,
}
# These show only while training: the run's directory is there by then.
DURING = {"raises", "too few", "NaN", "text", "nothing", "None for all", "hangs"}
DURING |= {"always fails where groups may be dropped", "generation"}


def check_error(outcome: Outcome, bad: Bad) -> None:
    assert outcome.code == bad.code, outcome.err
    assert len(outcome.errors) == 1, outcome.err
    line = outcome.errors[0]
    for words in bad.says:
        assert words in line
    cause, _, remedy = line.partition(" -> ")
    assert len(cause) > len("error: ")
    assert remedy.strip(), line
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "bad", [pytest.param(bad, id=f"{kind}: {bad.name}") for kind, all_bad in ALL.items() for bad in all_bad]
)
def test_each_is_one_line_with_cause_and_remedy(main: Main, tmp_path: Path, bad: Bad):
    config = write_run(tmp_path, run={"steps": 5})
    outcome = main("train", config, *bad.arrange(tmp_path))
    check_error(outcome, bad)
    assert (tmp_path / "runs").exists() == (bad.name in DURING), "a run that cannot begin leaves nothing"


@pytest.fixture(scope="module")
def held_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose run is there, with a checkpoint and a final model."""
    directory = tmp_path_factory.mktemp("held")
    config = write_run(directory, run={"steps": 2}, checkpoint={"every_steps": 1, "save_final": True})
    run_here(config)
    return config


@pytest.mark.parametrize("flag", [[], ["--overwrite"], ["--resume"]], ids=["plain", "overwrite", "resume"])
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(bad, id=f"{kind}: {bad.name}")
        for kind, all_bad in ALL.items()
        for bad in (all_bad[0], all_bad[-1])
        if bad.name not in DURING
    ],
)
def test_a_run_that_is_there_is_left_as_it_is(main: Main, held_run: Path, bad: Bad, flag: list[str]):
    runs = held_run.parent / "runs"
    before = files(runs)
    outcome = main("train", held_run, *bad.arrange(held_run.parent), *flag)
    assert outcome.code in ((bad.code,) if flag else (bad.code, 2))
    assert len(outcome.errors) == 1
    assert files(runs) == before


def test_a_run_of_that_name_is_not_written_over(main: Main, held_run: Path):
    before = files(held_run.parent / "runs")
    outcome = main("train", held_run)
    assert outcome.code == 2
    (line,) = outcome.errors
    assert "holds a run already (finished at step 2)" in line
    assert "--resume" in line
    assert "--overwrite" in line
    assert files(held_run.parent / "runs") == before


def test_prompts_that_are_too_long_can_be_dropped(main: Main, tmp_path: Path):
    config = write_run(tmp_path, run={"steps": 1})
    problems = tmp_path / "problems.jsonl"
    problems.write_text(problems.read_text() + json.dumps({"prompt": "ab" * 15}) + "\n")
    outcome = main("train", config, "--set=data.overlong_prompts=drop")
    assert outcome.code == 0
    assert "dropped 1 of 17 prompts that are too long" in outcome.err
    assert "line 17: the prompt has 30 tokens, but only 24 are allowed" in outcome.err


def test_in_a_process_of_its_own_an_error_is_as_clear(tmp_path: Path):
    config = write_run(tmp_path)
    bad = Bad("raises", reward("raise ValueError('odd answer')"), 4, ("raised ValueError: odd answer",))
    outcome = command("train", config, *bad.arrange(tmp_path))
    check_error(outcome, bad)
    assert outcome.err.splitlines()[-1] == outcome.errors[0], "it is the last line"
    log = (tmp_path / "runs" / "proof" / "logs" / "trainer.log").read_text()
    assert "ERROR reward function 'share_of_a' raised ValueError: odd answer" in log


@pytest.mark.parametrize("most", [1, 0])
def test_one_gradient_that_is_not_finite_skips_a_step_and_no_more(tmp_path: Path, most: int):
    (tmp_path / "burst.py").write_text(
        "calls = []\n"
        "def loss(logprobs, *, ratio, advantages, **rest):\n"
        "    calls.append(1)\n"
        "    edge = ((logprobs - logprobs.detach()) ** 2).sqrt()  # 0, and its gradient NaN\n"
        "    return -ratio * advantages + (edge if len(calls) == 3 else 0.0)\n"
    )
    config = write_run(tmp_path, run={"steps": 4}, algorithm={"loss": f"{tmp_path / 'burst.py'}:loss"})
    if not most:
        with pytest.raises(TrainingError, match="the gradient norm is nan at optimizer step"):
            run_here(config, "optimizer.max_skipped_steps=0")
        return
    summary = run_here(config, "optimizer.max_skipped_steps=1")
    assert summary.finished
    (skipped,) = [line for line in metrics(summary.run_dir).steps if line.values["skipped_steps"]]
    assert any(one.rule == "not_finite" and "that step was skipped" in one.message for one in skipped.findings)
