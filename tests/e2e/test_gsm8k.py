"""The real questions of GSM8K from end to end: as an environment of Atropos, and by the example's configuration."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from lachesis import cli
from lachesis.common.imports import load_function
from lachesis.common.types import Group
from lachesis.metrics.sinks.jsonl import StepLine
from lachesis.metrics.sinks.tape import read_groups, tape_files
from lachesis.plugins.atropos.environments.shipped.gsm8k import load_split
from tests import gsm8k
from tests.e2e.atropos_runs import Stage, answers, stage, wait_for
from tests.e2e.runs import Main, Outcome, checkpoints, metrics, state
from tests.logs import handlers_kept
from tests.paths import EXAMPLES

CONFIG = EXAMPLES / "gsm8k" / "config.yaml"
REWARDS = CONFIG.with_name("rewards.py")
STEPS = 3
GROUP = 8
QUESTIONS = {row["question"]: row["answer"].rpartition("####")[2].strip() for row in gsm8k.rows("train")}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """`lachesis serve` with a model that is right about every other time on the first questions."""
    directory = tmp_path_factory.mktemp("gsm8k")
    model = gsm8k.write_learned_model(directory / "model")
    with stage(directory, model=model, mode="lora_only", steps=STEPS) as job:
        job.start_engine()
        yield job


def flags(job: Stage, *, url: str) -> list[str]:
    """What the documents start the environment with."""
    return [
        "--env.data", str(gsm8k.DATA), "--env.tokenizer_name", str(job.model), "--env.use_wandb", "False",
        "--env.group_size", str(GROUP), "--env.max_num", str(gsm8k.LEARNED), "--env.max_new_tokens", "96",
        "--openai.api_key", "x", "--openai.base_url", url, "--openai.model_name", str(job.model),
        "--openai.server_type", "vllm", "--slurm", "False", "--slurm.num_requests_per_time_interval", "64",
        "--slurm.time_interval", "1",
    ]  # fmt: skip


def assert_scored_as_read(question: str, answer: str, score: float) -> bool:
    """The score is that of the number in the last box, which is read here without math-verify.

    Whether it can be: now and then the model writes something in the box that is no number.
    """
    found = gsm8k.value(answer)
    readable = found is not None or "\\boxed" not in answer
    assert not readable or score == float(found == gsm8k.number(QUESTIONS[question])), (question, answer)
    return readable


def test_rollouts_of_real_questions_to_a_file_and_a_page(job: Stage, main: Main, tmp_path: Path):
    path = tmp_path / "rollouts.jsonl"
    done = main("env", "gsm8k", "process", *flags(job, url=f"{job.engine_url}/v1"), "--env.total_steps=6",
                f"--env.data_path_to_save_groups={path}")  # fmt: skip
    assert done.code == 0, done.err
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(groups) == 6
    words, compared = AutoTokenizer.from_pretrained(job.model), 0
    for group in groups:
        assert len(group["scores"]) == GROUP
        for messages, tokens, masks, score in zip(
            group["messages"], group["tokens"], group["masks"], group["scores"], strict=True
        ):
            question, answer = messages[-2]["content"], messages[-1]["content"]
            trained = [token for token, mask in zip(tokens, masks, strict=True) if mask != -100]
            assert words.decode(trained, skip_special_tokens=True) == answer
            compared += assert_scored_as_read(question, answer, score)
    scores = [score for group in groups for score in group["scores"]]
    assert compared > 0.8 * len(scores)
    assert {0.0, 1.0} == set(scores) and 0.2 < sum(scores) / len(scores) < 0.8
    assert len({group["messages"][0][-2]["content"] for group in groups}) == gsm8k.LEARNED
    page = path.with_suffix(".html").read_text()
    assert f"6 groups, {6 * GROUP} sequences, mean score {sum(scores) / len(scores):.3f}" in page


def test_held_out_questions_are_evaluated(job: Stage, main: Main, tmp_path: Path):
    done = main("env", "gsm8k", "evaluate", *flags(job, url=job.engine_url), "--env.eval_num=4",
                f"--env.data_dir_to_save_evals={tmp_path}")  # fmt: skip
    assert done.code == 0, done.err
    (line,) = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    result: dict[str, Any] = json.loads(line)
    # One of the four was learned.
    assert result["problems"] == 4 and 0.25 <= result["accuracy"] < 1.0
    assert f"accuracy {result['accuracy']:.3f}" in done.out


def test_served_to_the_trainer(job: Stage, main: Main, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(job.sessions))
    job.start_api("--strict")
    job.start("env", "env", "gsm8k", "serve", *flags(job, url=f"{job.engine_url}/v1"), "--env.rollout_server_url",
              job.api_url, "--env.wait_timeout", "300", "--env.max_batches_offpolicy", "1")  # fmt: skip
    done = main(
        "grpo", "--model-name", job.model, "--weight-bridge-mode", "lora_only", "--vllm-port", job.engine_port,
        "--vllm-restart-interval", 1, "--atropos-url", job.api_url, "--training-steps", STEPS, "--batch-size",
        2 * GROUP, "--gradient-accumulation-steps", 1, "--seq-len", gsm8k.CONTEXT, "--optimizer", "adamw",
        "--learning-rate", "1e-4", "--kl-coef", 0.1, "--clip-eps", 0.2, "--lora-r", 8, "--lora-alpha", 16,
        "--lora-dropout", 0, "--save-path", job.run_dir, "--device", "cpu", "--benchmark",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert state(job.run_dir)["status"] == "finished"
    steps = metrics(job.run_dir).steps
    assert [line.step for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert line.values["weight_version"] == line.step and 0 <= line.values["canary_error"] < 1e-3
    assert sum(line.values["grad_norm"] for line in steps) > 0
    groups = [group for path in tape_files(job.run_dir / "rollouts").values() for group in read_groups(path)]
    assert len(groups) == 2 * STEPS
    words = AutoTokenizer.from_pretrained(job.model)
    learned = {problem.question for problem in load_split(str(gsm8k.DATA), "train")[: gsm8k.LEARNED]}
    for group in groups:
        asked = words.decode(group.samples[0].prompt_ids)
        (question,) = (one for one in learned if one in asked)
        assert len(group.samples) == GROUP
        for sample in group.samples:
            answer = words.decode(sample.completion_ids, skip_special_tokens=True)
            assert_scored_as_read(question, answer, float(sample.reward or 0.0))
    assert {sample.reward for group in groups for sample in group.samples} == {0.0, 1.0}
    job.processes["env"].terminate()
    wait_for(lambda: job.processes["env"].poll() is not None, "the end of the environment")
    said = job.log("env")
    assert f"using the first {gsm8k.LEARNED} problems only" in said and "groups sent" in said


# What the example says that sets nothing here; each key is named in a note of the run's log.
NOTHING_TO_SET = {
    "attn_implementation", "skip_prepare_dataset", "trl.use_data_producer", "trl.use_liger_loss",
    "vllm.gpu_memory_utilization", "vllm.tensor_parallel_size", "vllm.max_model_len", "vllm.dtype",
}  # fmt: skip
# Where all else of it is, in the configuration that ran.
LANDED = {
    "run.steps": 12, "run.seed": 42, "model.chat_template": None, "model.pad_token": gsm8k.PAD,
    "model.gradient_checkpointing": True, "adapter.r": 4, "adapter.alpha": 8, "adapter.targets": "all-linear",
    "data.eval_size": 0, "data.max_prompt_length": 512, "data.chat_template_kwargs": {"enable_thinking": False},
    "engine.kind": "http", "bridge.kind": "lora_only", "bridge.every_steps": 2, "sampling.num_generations": 4,
    "sampling.max_completion_length": 24, "sampling.temperature": 1.0, "sampling.top_p": 1.0, "sampling.top_k": 0,
    "sampling.min_p": 0.0, "sampling.repetition_penalty": 1.0, "rewards.weights": [1.0, 0.5], "rewards.num_workers": 2,
    "algorithm.aggregation": "sum_then_normalize", "algorithm.scale_rewards": "group",
    "algorithm.skip_zero_advantage": True, "algorithm.mask_truncated": True, "algorithm.loss_type": "grpo",
    "algorithm.epsilon": 0.2, "algorithm.epsilon_high": 0.28, "algorithm.num_iterations": 2, "algorithm.beta": 0.01,
    "algorithm.use_bias_correction_kl": True, "algorithm.kl_reference": "ema", "algorithm.ref_mixup_alpha": 0.9,
    "algorithm.ref_sync_steps": 4, "algorithm.sampler_correction": "token_truncate",
    "algorithm.sampler_correction_max": 2.0, "algorithm.sampler_correction_min": 0.5,
    "algorithm.importance_sampling_level": "token", "algorithm.off_policy_mask_threshold": 0.5,
    "pipeline.async_prefetch": True, "pipeline.prefetch_depth": 1, "pipeline.streaming": True,
    "pipeline.streaming_min_groups": 2, "pipeline.replay_size": 6, "pipeline.replay_recompute_logps": True,
    "pipeline.reroll_start_fraction": 0.5, "pipeline.reroll_max_groups": 1, "batch.prompts_per_step": 4,
    "batch.micro_batch_size": 4, "optimizer.kind": "adamw", "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "cosine", "optimizer.warmup_steps": 1, "checkpoint.every_steps": 6, "checkpoint.keep_last": 2,
    "logging.every_steps": 1, "logging.completions": 2, "deadlines.generation_s": 300, "engine.wait_s": 300,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Example:
    """A finished run of the example: what its trainer said, its metrics and its groups, by step."""

    job: Stage
    done: Outcome
    steps: Sequence[StepLine]
    groups: Sequence[Sequence[Group]]

    @property
    def batches(self) -> list[tuple[int, StepLine, Sequence[Group]]]:
        """Step, metrics and groups of each batch's first use; the second is the step after it."""
        return [(line.step, line, groups) for line, groups in zip(self.steps, self.groups, strict=True)][::2]

    def total(self, name: str, *, first: int = 1, last: int = 12) -> float:
        return sum(line.values[name] for line in self.steps if first <= line.step <= last)


class TestTheExample:
    """`examples/gsm8k`, all options on, as a user starts it: a server, and the trainer.

    The model gets nothing right, and half of the questions nothing at all: the other half teaches the format.
    """

    QUESTIONS, HARD = 6, 3
    # The last is longer than a completion may be.
    BABBLE = (
        "<reasoning>I guess.</reasoning><answer>-1</answer>",
        "I guess.",
        "<reasoning>" + "I guess. " * 12,
    )

    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
        directory = tmp_path_factory.mktemp("example")
        with stage(directory, model=self.write_model(directory / "model"), mode="lora_only", steps=12) as job:
            words = [f"--set={key}={value}" for key, value in self.tiny(job).items()]
            job.start("engine", "vllm-serve", CONFIG, "--engine", "embedded", *words)
            wait_for(lambda: answers(f"{job.engine_url}/health"), "the engine", timeout_s=180)
            done = in_this_process("train", CONFIG, *words, LACHESIS_SESSION_DIR=str(job.sessions))
            assert done.code == 0, done.err
            tapes = tape_files(job.run_dir / "rollouts").values()
            yield Example(job, done, metrics(job.run_dir).steps, [read_groups(path) for path in tapes])

    def write_model(self, directory: Path) -> Path:
        words = gsm8k.tokenizer()
        transform, _ = load_function(f"{REWARDS}:prompt_transform")(None)
        prompts, texts = [], []
        for number, row in enumerate(gsm8k.rows("train")[: self.QUESTIONS]):
            prompt = words.apply_chat_template(
                transform(row)["prompt"], add_generation_prompt=True, enable_thinking=False, return_dict=False
            )
            learned = ("I give up.",) if number < self.HARD else self.BABBLE[: 2 + number % 2]
            prompts += [prompt] * len(learned)
            texts += learned
        return gsm8k.write_taught_model(directory, prompts=prompts, texts=texts)

    def tiny(self, job: Stage) -> dict[str, Any]:
        """What a run of seconds on a CPU has otherwise than the file: sizes, places and addresses."""
        path = gsm8k.DATA / "train.jsonl"
        return {
            "base_model": job.model, "bf16": "false", "output_dir": job.run_dir, "lora_r": 4, "lora_alpha": 8,
            "datasets": f"[{{path: {path}, split: 'train[:{self.QUESTIONS}]', type: rewards.prompt_transform}}]",
            "vllm.port": job.engine_port, "trl.vllm_server_port": job.engine_port, "vllm.max_model_len": gsm8k.CONTEXT,
            "trl.num_generations": 4, "trl.generation_batch_size": 4, "trl.max_completion_length": 24,
            "trl.reward_num_workers": 2, "trl.streaming_min_groups": 2, "trl.replay_buffer_size": 6,
            "trl.reroll_max_groups": 1, "trl.ref_model_sync_steps": 4, "micro_batch_size": 4,
            "gradient_accumulation_steps": 4, "max_steps": 12, "warmup_steps": 1, "learning_rate": 1e-3,
            "save_steps": 6,
        }  # fmt: skip

    def test_it_runs_to_its_end(self, run: Example):
        run_dir = run.job.run_dir
        assert state(run_dir)["status"] == "finished"
        assert [line.step for line in run.steps] == list(range(1, 13))
        assert checkpoints(run_dir) == ["step_000006", "step_000012"]
        assert (run_dir / "final" / "adapter_model.safetensors").is_file()
        report = (run_dir / "report.html").read_text()
        assert any(row["question"][:40] in report for row in gsm8k.rows("train")[: self.QUESTIONS])

    def test_nothing_is_passed_over_in_silence(self, run: Example):
        config = yaml.safe_load((run.job.run_dir / "config.yaml").read_text())
        landed = {key: config[(parts := key.split("."))[0]][parts[1]] for key in LANDED}
        assert landed == LANDED
        said = (run.job.run_dir / "logs" / "trainer.log").read_text().splitlines()
        started = next(at for at, line in enumerate(said) if line.startswith("step 1/12"))
        notes = [line.removeprefix("note: ").partition(": ") for line in said[:started] if line.startswith("note: ")]
        several = "keys without meaning here"
        defaults = [keys for keys, *_ in notes if keys.startswith("left out of the file")]
        assert len(defaults) == 1
        named = [
            text.partition(" (")[0] if several in keys else keys for keys, _, text in notes if keys not in defaults
        ]
        assert {key for keys in named for key in keys.split(", ")} == NOTHING_TO_SET
        served = run.job.log("engine").splitlines()
        assert [line for line in [*said, *run.done.err.splitlines(), *served] if "warning" in line.lower()] == []

    def test_rewards_are_of_real_answers_and_by_math_verify(self, run: Example):
        compared = 0
        for line, groups in zip(run.steps, run.groups, strict=True):
            for group in groups:
                question = str([*(group.prompt.messages or ())][-1]["content"])
                assert group.prompt.columns["answer"] == str(gsm8k.number(QUESTIONS[question]))
                assert group.prompt.text.endswith(f"assistant\n{gsm8k.NOT_THINKING}")
                for sample in group.samples:
                    tags = sum(sample.text.count(tag) == 1 for tag in gsm8k.TAGS) / 4
                    assert sample.rewards == (0.0, tags) and sample.reward == 0.5 * tags
                    compared += "<answer>-1</answer>" in sample.text
            scores = [sample.rewards[1] or 0.0 for group in groups for sample in group.generated.samples]
            assert line.values["rewards/format_reward/mean"] == pytest.approx(fmean(scores))
            assert line.values["rewards/accuracy_reward/mean"] == 0.0
        assert compared > 0
        assert run.total("reward_errors") == run.total("dropped_groups") == 0
        assert len({sample.reward for group in run.groups[0] for sample in group.samples}) > 1

    def test_weights_arrive_at_every_other_step(self, run: Example):
        for line, groups in zip(run.steps, run.groups, strict=True):
            assert line.values["weight_version"] == line.step - line.step % 2
            assert 0 <= line.values["canary_error"] < 1e-3
            for sample in (sample for group in groups for sample in group.samples):
                assert sample.versions.first % 2 == sample.versions.last % 2 == 0
        assert {path.name for path in (run.job.run_dir / "adapters").iterdir()} == {"v10", "v12"}

    def test_generation_runs_ahead_and_is_corrected_for(self, run: Example):
        ages = [line.values["staleness"] for line in run.steps if "staleness" in line.values]
        # The batch before is used at two steps, this one at two more, and the last may come before a transfer.
        assert 1 <= max(ages) <= 3
        assert all(line.values["groups_waiting"] <= 2 * 4 and line.values["idle_slots"] < 1 for line in run.steps)
        later = [line.values["sampling_ratio"] for _, line, _ in run.batches[1:]]
        assert all(0.5 <= ratio <= 2.0 for ratio in later) and any(ratio != 1.0 for ratio in later)

    def test_each_batch_is_used_twice(self, run: Example):
        for step, line, groups in run.batches:
            assert line.values["mean_ratio"] == pytest.approx(1.0, abs=1e-6)
            assert run.steps[step].values["mean_ratio"] != 1.0
            assert run.groups[step] == groups

    def test_groups_that_teach_nothing_are_replaced_by_earlier_ones(self, run: Example):
        earlier: list[Group] = []
        for step, line, groups in run.batches:
            replayed = [group for group in groups if group.replayed]
            assert line.values["replayed_groups"] == len(replayed)
            assert run.steps[step].values["replayed_groups"] == 0
            for group in replayed:
                assert len(set(group.rewards)) > 1
                assert [s.text for s in group.samples] in [[s.text for s in one.samples] for one in earlier]
            earlier += [group for group in groups if not group.replayed]
        assert run.total("replayed_groups") > 0
        # With the KL term a completion without advantage still counts.
        assert run.total("skipped_zero_advantage") == 0

    def test_what_failed_is_tried_again_from_half_of_the_run_on(self, run: Example):
        assert run.total("rerolled_groups", last=5) == 0, "after the sixth step the next prompts are drawn"
        assert 1 <= run.total("rerolled_groups", first=6) <= 4

    def test_cut_completions_do_not_count(self, run: Example):
        for line, groups in zip(run.steps, run.groups, strict=True):
            whole = [s for group in groups for s in group.samples if s.finish_reason == "stop"]
            assert line.values["tokens_trained"] == sum(len(sample.completion_ids) for sample in whole)
        assert max(line.values["truncated_fraction"] for line in run.steps) > 0

    def test_the_reference_follows_every_four_steps(self, run: Example):
        distance = {line.step: line.values["kl_reference"] for line in run.steps}
        assert distance[4] > 10 * abs(distance[5]) and distance[8] > 10 * abs(distance[9])


def in_this_process(*words: str | Path, **variables: str) -> Outcome:
    """`lachesis WORDS`, where no fixture can be had."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err), handlers_kept():
        patch.setattr(sys, "argv", ["lachesis", *map(str, words)])
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    return Outcome(int(exit_.value.code or 0), out.getvalue(), err.getvalue())


def test_the_rewards_of_the_example_know_right_from_wrong():
    accuracy, form = (load_function(f"{REWARDS}:{name}") for name in ("accuracy_reward", "format_reward"))
    gold = [str(gsm8k.number(answer)) for answer in list(QUESTIONS.values())[:40]]

    def score(pattern: str) -> set[float]:
        texts = [[{"role": "assistant", "content": pattern.replace("GOLD", answer)}] for answer in gold]
        return set(accuracy(completions=texts, answer=gold))

    assert score("<reasoning>so</reasoning><answer>GOLD</answer>") == {1.0}
    assert score("<answer>7</answer> no: <answer>$GOLD.0$</answer>") == {1.0}
    assert score("<answer>\\frac{GOLD}{1}</answer>") == {1.0}
    for wrong in ("GOLD", "<answer>GOLD", "<answer></answer>", "<answer>GOLD</answer><answer>-1</answer>"):
        assert score(wrong) == {0.0}
    completions = [[{"content": text}] for text in ("".join(gsm8k.TAGS), "<answer>1</answer>", "<answer>" * 2, "")]
    assert form(completions=completions, answer=gold[:4]) == [1.0, 0.5, 0.0, 0.0]
