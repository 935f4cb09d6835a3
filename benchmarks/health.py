"""Record the course of small real runs, healthy and sick ones, for the tests of the health rules.

    python benchmarks/health.py MODEL OUT [--only NAME ...]     runs each, and writes OUT/NAME.json
    python benchmarks/health.py --of RUN OUT/NAME.json          writes down a run that is there

MODEL is SmolLM2-135M-Instruct (`examples/smollm2` fetches it). A run trains it on a CPU with additions, a few minutes
each. A recording has the metrics of each step, and of each completion the reward, the length, how it ended and which
text it was, but not the text: `tests/unit/metrics/health/test_recordings.py` plays it to the health rules.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from transformers import AutoTokenizer

from lachesis.config.load import load_config
from lachesis.metrics.health.types import HealthLimits
from lachesis.run.sinks import health_limits

REWARDS = Path(__file__).with_name("health_rewards.py")
# What rules do not look at, and what differs between machines.
LEFT_OUT = ("tokens_", "micro_batches", "weight_version", "transfer_time", "proof_time", "canary_error", "sync_time")
OTHER_TEMPLATE = "{% for message in messages %}[INST] {{ message['content'] }} [/INST]{% endfor %}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run to record: ``cause`` is the rule that has to speak first, None for a healthy run."""

    cause: str | None
    reward: str = "right"
    steps: int = 12
    config: Mapping[str, Any] = field(default_factory=dict)
    leak: bool = False
    product: bool = False


LORA = {"adapter": {"kind": "lora", "r": 16, "alpha": 32}, "optimizer": {"learning_rate": 3e-4}}
FAST = {"optimizer": {"learning_rate": 5e-5}}
SCENARIOS: Mapping[str, Scenario] = {
    "learning_rate_30_times": Scenario("policy_lost", config={"optimizer": {"learning_rate": 3e-4}}),
    "wrong_chat_template": Scenario("foreign_template", config={"model": {"chat_template": OTHER_TEMPLATE}}, steps=10),
    "leaking_answers": Scenario("answer_in_prompt", leak=True, steps=10),
    "length_hacking": Scenario(
        "reward_pays_length",
        reward="right_and_long",
        steps=8,
        config={**FAST, "sampling": {"max_completion_length": 64}},
    ),
    "one_text": Scenario(
        "one_text_for_all", reward="one_text", steps=14, config={"optimizer": {"learning_rate": 2e-4}}
    ),
    "shortness_hacking": Scenario("empty_completions", reward="short", config=FAST),
    "old_samples_unclipped": Scenario(
        "nothing_clips",
        config={"algorithm": {"num_iterations": 6, "epsilon": 1e4}, "optimizer": {"learning_rate": 3e-5}},
    ),
    "reward_of_the_prompt": Scenario("zero_variance", reward="of_the_prompt", steps=10),
    "reward_zero": Scenario("zero_variance", reward="nothing", steps=10),
    "truncated": Scenario("zero_variance", config={"sampling": {"max_completion_length": 3}}, steps=10),
    "temperature_too_low": Scenario("zero_variance", config={"sampling": {"temperature": 0.02}}, steps=10),
    "temperature_too_high": Scenario("entropy_off", config={"sampling": {"temperature": 2.5}}, steps=10),
    "failing_reward": Scenario(
        "groups_dropped", reward="fails_often", steps=6, config={"rewards": {"on_error": "drop_group"}}
    ),
    "stale_weights": Scenario(
        "samples_stale",
        steps=10,
        config={"engine": {"kind": "embedded_server"}, "bridge": {"kind": "broadcast", "every_steps": 8}},
    ),
    "lora_rate_30_times": Scenario("policy_lost", config={**LORA, "optimizer": {"learning_rate": 1e-2}}),
    "healthy_products": Scenario(None, steps=20, product=True),
    "healthy_points": Scenario(None, reward="right_in_points", steps=24),
    "healthy_sentence": Scenario(None, reward="one_sentence", steps=20),
    "healthy_costs_lora": Scenario(None, reward="right_or_costs", steps=24, config=LORA),
    "healthy_two_iterations": Scenario(None, steps=20, config={"algorithm": {"num_iterations": 2}}),
}


def configuration(scenario: Scenario, *, model: Path, directory: Path) -> dict[str, Any]:
    """The run's configuration: additions, 4 prompts x 6 completions a step."""
    config: dict[str, Any] = {
        "run": {"name": "run", "dir": str(directory), "steps": scenario.steps},
        "model": {"path": str(model)},
        "data": {"path": "train.jsonl"},
        "rewards": {"functions": [f"health_rewards.{scenario.reward}"]},
        "sampling": {"num_generations": 6, "max_completion_length": 20},
        "batch": {"prompts_per_step": 4},
        "optimizer": {"learning_rate": 1e-5, "warmup_steps": 2, "schedule": "constant"},
        "checkpoint": {"save_final": False},
        "logging": {"tensorboard": False},
    }
    for section, values in scenario.config.items():
        config[section] = config.get(section, {}) | values
    return config


def problems(*, leak: bool, product: bool) -> Iterator[dict[str, Any]]:
    """Additions up to 20 + 20, or products up to 10 times 20; with ``leak`` each says its answer."""
    pairs = [(a, b) for a in range(1, 11 if product else 21) for b in range(1, 21)]
    random.Random(0).shuffle(pairs)
    for a, b in pairs:
        asked, answer = (f"{a} times {b}", a * b) if product else (f"{a} + {b}", a + b)
        told = f" (answer: {answer})" if leak else ""
        yield {"prompt": [{"role": "user", "content": f"What is {asked}?{told}"}], "answer": str(answer)}


def run(scenario: Scenario, *, model: Path, work: Path) -> Path:
    """Train, and return the run's directory. Raises CalledProcessError where the run fails."""
    config = configuration(scenario, model=model, directory=work / "runs")
    (work / "config.yaml").write_text(yaml.safe_dump(config))
    (work / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in problems(leak=scenario.leak, product=scenario.product))
    )
    shutil.copy(REWARDS, work)
    command = [sys.executable, "-m", "lachesis", "train", str(work / "config.yaml"), "--overwrite"]
    subprocess.run(command, check=True)
    return work / "runs" / "run"


def recording(run_dir: Path, *, cause: str | None) -> dict[str, Any]:
    """What the health rules see of a run, as small as it goes."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["type"] == "step"]
    tapes = {line["step"]: list(_groups(run_dir, line["step"])) for line in steps}
    texts = [group["prompt"]["text"] for groups in tapes.values() for group in groups]
    before = _common_start(texts)
    after = _common_start([text[len(before) :][::-1] for text in texts])[::-1]
    model = yaml.safe_load((run_dir / "config.yaml").read_text())["model"]
    ids: dict[tuple[int, ...], int] = {}
    return {
        "cause": cause,
        "special_tokens": sorted(AutoTokenizer.from_pretrained(model["path"]).get_added_vocab()),
        "limits": _limits(run_dir / "config.yaml"),
        "before": before,
        "after": after,
        "evaluations": [evaluation for line in lines if (evaluation := line.get("evaluation"))],
        "steps": [
            {
                "step": line["step"],
                "values": _values(line["values"]),
                "groups": [
                    {
                        "prompt": group["prompt"]["text"][len(before) :].removesuffix(after),
                        "answer": group["prompt"]["columns"].get("answer"),
                        "samples": [_sample(sample, ids) for sample in group["samples"]],
                    }
                    for group in tapes[line["step"]]
                ],
            }
            for line in steps
        ],
    }


def _limits(config: Path) -> dict[str, Any]:
    """The limits that are not the usual ones, and that of staleness."""
    limits, usual = asdict(health_limits(load_config(config).config)), asdict(HealthLimits())
    return {name: value for name, value in limits.items() if value != usual[name] or name == "staleness"}


def _groups(run_dir: Path, step: int) -> Iterator[Mapping[str, Any]]:
    for line in (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines():
        if "samples" in (found := json.loads(line)):
            yield found


def _common_start(texts: Sequence[str]) -> str:
    same = takewhile(lambda signs: len(set(signs)) == 1, zip(*texts, strict=False))
    return "".join(signs[0] for signs in same)


def _values(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items() if not name.startswith(LEFT_OUT)}


def _sample(sample: Mapping[str, Any], ids: dict[tuple[int, ...], int]) -> list[Any]:
    """Reward, number of the text (0 where it is empty), tokens, whether it was cut off, and minus its mean logprob."""
    number = ids.setdefault(tuple(sample["completion_ids"]), len(ids) + 1) if sample["text"].strip() else 0
    reward = None if sample["reward"] is None else float(f"{sample['reward']:.4g}")
    nats = -fmean(sample["logprobs"])
    return [reward, number, len(sample["completion_ids"]), int(sample["finish_reason"] == "length"), round(nats, 2)]


def write(path: Path, recorded: Mapping[str, Any]) -> None:
    """Write a step a line, so that changes can be read."""
    head = {name: value for name, value in recorded.items() if name != "steps"}
    steps = ",\n".join(json.dumps(step, separators=(",", ":")) for step in recorded["steps"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head)[:-1] + ', "steps": [\n' + steps + "\n]}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="MODEL")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--of", action="store_true", help="the first argument is a run, the second the file")
    chosen = parser.parse_args(arguments)
    if chosen.of:
        write(chosen.out, recording(chosen.source, cause=None))
        return
    for name in chosen.only:
        with tempfile.TemporaryDirectory() as work:
            scenario = SCENARIOS[name]
            done = run(scenario, model=chosen.source.absolute(), work=Path(work))
            write(chosen.out / f"{name}.json", recording(done, cause=scenario.cause))
        sys.stdout.write(f"{chosen.out / name}.json\n")


if __name__ == "__main__":
    main()
