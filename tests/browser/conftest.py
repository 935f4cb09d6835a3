"""A run directory as a real run leaves it, made by the real sinks from a simulated policy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lachesis.common.files import write_atomic
from lachesis.common.types import EvalResult, Group, Prompt, Sample, StepRecord, VersionSpan
from lachesis.metrics.health.monitor import HealthMonitor
from lachesis.metrics.hub import MetricsHub
from lachesis.metrics.sinks.jsonl import JsonlSink
from lachesis.metrics.sinks.tape import TapeSink
from lachesis.plugins.report.page import ReportSink

PIECES = {11: "=", 12: " ", 13: "\n", 14: "<eos>", 15: "</script><b>&", **{digit: str(digit) for digit in range(10)}}
EOS = 14

CONFIG = """\
run:
  name: quickstart
  steps: {steps}
  seed: {seed}
model:
  path: examples/quickstart/.cache/model
adapter:
  kind: none
algorithm:
  loss_type: grpo
batch:
  prompts_per_step: 64
sampling:
  num_generations: 8
optimizer:
  learning_rate: 0.0001
logging:
  report_groups: 2
"""


def write_run(directory: Path, *, steps: int, seed: int = 0) -> Path:
    """Simulate ``steps`` steps of the addition task; returns the run directory with its report."""
    chance = random.Random(seed)
    write_atomic(directory / "config.yaml", CONFIG.format(steps=steps, seed=seed))
    now = [1_780_000_000.0]
    hub = MetricsHub(
        [
            JsonlSink(directory / "metrics.jsonl", clock=lambda: now[0]),
            TapeSink(directory / "rollouts", report_groups=2, texts=lambda ids: [PIECES[i] for i in ids]),
            ReportSink(directory, every_steps=10 * steps),
        ],
        monitor=HealthMonitor(),
    )
    hub.evaluation(_evaluation(0, 0.31, chance))
    for step in range(1, steps + 1):
        skill = 0.27 + 0.68 / (1 + math.exp(-6.5 * (step / steps - 0.38))) + chance.gauss(0, 0.022)
        skill = min(0.985, max(0.05, skill))
        # In the middle nearly all answers are right for some steps, so that there is a finding to follow.
        sure = 0 <= step - steps // 2 < 6
        groups = tuple(_group(chance, 0.985 if sure else skill, step) for _ in range(6))
        evaluation = _evaluation(step, skill - 0.01, chance) if step % max(1, steps // 12) == 0 else None
        values = _values(chance, skill, step, steps)
        now[0] += values["step_time"]
        hub.emit(StepRecord(step=step, values=values, groups=groups, evaluation=evaluation))
    hub.close()
    return directory


def _evaluation(step: int, accuracy: float, chance: random.Random) -> EvalResult:
    accuracy = round(512 * min(1.0, accuracy + chance.gauss(0, 0.006))) / 512
    return EvalResult(step, accuracy, accuracy, problems=512, mean_length=3.6, seconds=0.41)


def _values(chance: random.Random, skill: float, step: int, steps: int) -> dict[str, float]:
    noise = lambda scale: math.exp(chance.gauss(0, scale))  # noqa: E731
    generation, training = 0.064 * noise(0.12), 0.092 * noise(0.1)
    parts = {
        "generation_time": generation,
        "reward_time": 0.004,
        "train_time": training,
        "sync_time": 0.013 * noise(0.2),
    }
    spread = math.sqrt(skill * (1 - skill))
    return {
        "loss": chance.gauss(0, 0.012),
        "grad_norm": 0.55 * noise(0.35) * (1.2 - skill) + (9.0 if step == steps * 2 // 3 else 0.0),
        "learning_rate": 1e-4 * min(1.0, step / 10) * (1 - 0.8 * max(0.0, step / steps - 0.5)),
        "mean_ratio": 1 + chance.gauss(0, 0.012),
        "mean_kl": 0.009 * noise(0.5),
        "clipped_fraction": 0.045 * noise(0.4),
        "clip_fraction_low": 0.018 * noise(0.4),
        "clip_fraction_high": 0.027 * noise(0.4),
        "entropy": 0.62 * (1.12 - skill) * noise(0.06),
        "reward": skill,
        "reward_std": spread * 0.8 * noise(0.08),
        "rewards/exact_match/mean": skill,
        "rewards/exact_match/std": spread,
        "zero_std_fraction": min(1.0, skill**8 + (1 - skill) ** 8 + abs(chance.gauss(0, 0.02))),
        "completion_length/mean": 3.55 + 0.3 * (1 - skill) + chance.gauss(0, 0.03),
        "completion_length/max": 6.0 if chance.random() < 0.7 * (1 - skill) + 0.1 else 4.0,
        "truncated_fraction": max(0.0, 0.04 * (1 - skill) + chance.gauss(0, 0.004)),
        "tokens_generated": 1830.0,
        **{f"train_time/{rank}": training * noise(0.2) for rank in range(7)},
        "reward_of_environment/gsm8k_0": skill,
        "reward_of_environment/code_0": 0.5 * skill,
        "reward_metrics/letters": 0.003 + 1e-5 * chance.random(),
        "staleness": float(step > 3),
        "generation_tokens_per_s": 1830 / generation,
        "train_tokens_per_s": 2600 / training,
        "step_time": sum(parts.values()) + 0.011 * noise(0.3),
        **parts,
    }


def _group(chance: random.Random, skill: float, step: int) -> Group:
    a, b = chance.randrange(100), chance.randrange(100)
    answer = [int(digit) for digit in reversed(str(a + b))]
    samples = [_sample(chance, answer, skill, step) for _ in range(8)]
    rewards = [sample.reward or 0.0 for sample in samples]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 7) + 1e-4
    scored = tuple(
        Sample(**{**_fields(sample), "advantage": ((sample.reward or 0.0) - mean) / deviation}) for sample in samples
    )
    return Group(
        prompt=Prompt(id=f"{a}+{b}", token_ids=(1, 2), text=f"{a}+{b}=", columns={"answer": a + b}),
        samples=scored,
        logged={"digits": [len(str(a + b))] * len(scored)},
    )


def _fields(sample: Sample) -> dict[str, object]:
    return {name: getattr(sample, name) for name in Sample.__slots__}


def _sample(chance: random.Random, answer: list[int], skill: float, step: int) -> Sample:
    ids = [digit if chance.random() < skill ** (1 / len(answer)) else chance.randrange(10) for digit in answer]
    odd = chance.random()
    ids = [*ids, 13] if odd < 0.05 * (1 - skill) else [*ids, 15] if odd > 0.99 else ids
    whole = chance.random() > 0.08 * (1 - skill)
    ids = [*ids, EOS] if whole else [*ids, 12, chance.randrange(10)][:6]
    right = ids == [*answer, EOS]
    logprobs = [
        math.log(min(0.999, max(0.004, chance.betavariate(9 * skill, 1.2) if right or at == len(ids) - 1
                                else chance.betavariate(1.1, 2.4))))
        for at in range(len(ids))
    ]  # fmt: skip
    return Sample(
        prompt_ids=(1, 2),
        completion_ids=tuple(ids),
        logprobs=tuple(logprobs),
        finish_reason="stop" if whole else "length",
        versions=VersionSpan(step - 1, step - 1),
        text="".join(PIECES[i] for i in ids),
        rewards=(float(right),),
        reward=float(right),
    )


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Make a run directory of so many steps."""
    return lambda steps: write_run(tmp_path_factory.mktemp("run"), steps=steps)
