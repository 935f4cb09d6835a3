"""An environment that subclasses the original's BaseEnv, unchanged, on our API and server: our trainer learns from it.

One job is run as a user would start it; the tests look at what it did and what it left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lachesis.metrics.sinks.tape import read_groups, tape_files
from lachesis.plugins.atropos.environments.shipped.arithmetic import Sum, problems
from tests.contracts.servers import CHAT_TEMPLATE
from tests.e2e.atropos_runs import (
    GROUP,
    PROBLEMS,
    Stage,
    assert_learned,
    assert_said_what_the_atropos_trainer_says,
    stage,
    wait_for,
    write_model,
)
from tests.original import PYTHON, needs_original
from tests.tiny import EOS_ID, tiny_tokenizer

pytestmark = [needs_original, pytest.mark.timeout(900)]
STEPS = 14
SUMS: list[Sum] = problems(seed=0)[0][:PROBLEMS]
ENVIRONMENT = Path(__file__).with_name("original_sums.py")


def start_environment(job: Stage) -> None:
    data = job.directory / "sums.json"
    data.write_text(json.dumps([[item.prompt, item.answer] for item in SUMS]))
    flags = {
        "--env.rollout_server_url": job.api_url, "--env.tokenizer_name": job.model, "--env.data_path": data,
        "--env.group_size": GROUP, "--env.max_token_length": 64, "--env.max_batches_offpolicy": 1,
        "--env.max_num_workers": 32, "--env.steps_per_eval": 5, "--openai.base_url": f"{job.engine_url}/v1",
        "--openai.model_name": job.model, "--openai.api_key": "x", "--slurm": "false",
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair]
    job.start("env", "serve", *words, python=(*PYTHON, str(ENVIRONMENT)))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Trained to its end; API, server and environment still run."""
    directory = tmp_path_factory.mktemp("original")
    model = write_model(directory / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    with stage(directory, model=model, mode="lora_nccl", steps=STEPS) as job:
        job.start_api("--strict")
        job.start_engine()
        start_environment(job)
        job.start_grpo()
        # The environment ends by itself once the last batch is out, or because it failed: the trainer would wait for
        # another one.
        wait_for(lambda: ended(job, "env") or ended(job, "trainer"), "the end of the job", timeout_s=600)
        assert not ended(job, "env") or job.processes["env"].wait() == 0, job.log("env")
        assert job.wait_trainer(timeout_s=300) == 0, job.log("trainer") + job.log("env")
        yield job


def ended(job: Stage, name: str) -> bool:
    return job.processes[name].poll() is not None


def test_our_trainer_learns_from_it(job: Stage) -> None:
    assert_learned(job.run_dir, steps=STEPS)
    assert_said_what_the_atropos_trainer_says(job)


def test_completion_and_chat_arrive_token_by_token(job: Stage) -> None:
    """What the trainer got are prompts as tokenized, sampled tokens with their logprobs, and the right scores."""
    tokenizer, answers = tiny_tokenizer(), {item.prompt: item.answer for item in SUMS}
    trained = set()
    for path in tape_files(job.run_dir / "rollouts").values():
        for group in read_groups(path):
            trained.add(group.prompt.text)
            assert group.prompt.token_ids == tuple(tokenizer.encode(group.prompt.text))
            for sample in group.samples:
                assert 1 <= len(sample.completion_ids) <= 6 and all(logprob <= 0 for logprob in sample.logprobs)
                said = str(tokenizer.decode(list(sample.completion_ids), skip_special_tokens=True))
                assert sample.reward == (said == answers[group.prompt.text])
                assert len(sample.completion_ids) == 6 or sample.completion_ids[-1] == EOS_ID or said.endswith("\n")
    # Every other one by chat.
    assert trained == set(answers)


def test_nothing_was_set_aside(job: Stage) -> None:
    """By the strict checks; and on the wire its groups are as the protocol has them."""
    status = httpx.get(f"{job.api_url}/status", timeout=60, trust_env=False).json()
    assert status.get("set_aside", 0) == 0 and status["current_step"] == STEPS
    group = httpx.get(f"{job.api_url}/latest_example", timeout=60, trust_env=False).json()
    rows = zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True)
    for tokens, masks, logprobs in rows:
        trains = [mask != -100 for mask in masks]
        assert [mask for mask in masks if mask != -100] == tokens[trains.index(True) :]
        assert all((logprob <= 0) == counts for logprob, counts in zip(logprobs, trains, strict=True))


def test_its_other_calls(job: Stage) -> None:
    """Its evaluation: chat and completions by the OpenAI client, and the logprobs of a prompt."""
    answers = json.loads((job.directory / "calls.json").read_text())
    assert len(answers["chat"]) == len(answers["text"]) == 2
    assert answers["prompt_tokens"] == tiny_tokenizer().encode(SUMS[0].prompt)
    first, *others = zip(answers["ids"], answers["logprobs"], strict=True)
    assert first == ([], []) and len(others) == len(answers["prompt_tokens"]) - 1
    for (ids, logprobs), token in zip(others, answers["prompt_tokens"][1:], strict=True):
        assert len(ids) == len(logprobs) >= 3 and token in ids and max(logprobs) <= 0


def test_it_ends_by_itself(job: Stage) -> None:
    """Once the trainer has its steps and another batch is queued, as it does on the original's API."""
    assert job.processes["env"].wait(300) == 0, job.log("env")
