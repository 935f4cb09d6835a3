"""Rollouts of three turns with a tool of which one call in ten is slow: how many a second a run gets.

    PYTHONPATH=src python benchmarks/multi_turn.py [--batches 10] [--slow 0.1] [--depth 2] [--tiny]

Slow calls sleep for seconds drawn log-normally (median 0.3 s, sigma 1), the others return at once. The model is
a stand-in that answers each call of the engine after 5 ms, so that all else is what flows: groups of 8 rollouts, 8 a
batch, generated ahead. Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tools"))
import setup as example  # pyright: ignore[reportMissingImports]

import lachesis
from lachesis.common.deadline import Deadline
from lachesis.common.types import Completion, GenerationRequest, VersionSpan

PROMPTS, GENERATIONS, TURNS = 8, 8, 3
ANSWER_S, MEDIAN_S, SIGMA = 0.005, 0.3, 1.0


def calculate(expression: str) -> str:
    """Work out an arithmetic expression, after a while.

    Args:
        expression: Seconds to wait in milliseconds.
    """
    time.sleep(int(expression) / 1000)
    return "1"


def short(completions: list[Any], **columns: Any) -> list[float]:
    """Reward rollouts differently, so that each group counts."""
    return [float(place) for place in range(len(completions))]


class StandIn:
    """Answers a call of the engine after 5 ms: with calls of the tool in all turns but the last."""

    def __init__(self, tokenizer: Any, *, slow: float) -> None:
        self.tokenizer, self.slow = tokenizer, slow
        self.assistant = tokenizer.convert_tokens_to_ids("<assistant>")

    def __call__(self, requests: Sequence[GenerationRequest], *, deadline: Deadline, finished: Any = None) -> Any:
        time.sleep(ANSWER_S)
        answers = [[self.answer(request, index) for index in range(request.n)] for request in requests]
        for place, answer in enumerate(answers):
            if finished is not None:
                finished(place, answer)
        return answers

    def answer(self, request: GenerationRequest, index: int) -> Completion:
        text = "1<eos>"
        if request.prompt_ids.count(self.assistant) < TURNS:
            drawn = random.Random(f"{request.seed}:{index}")
            late = drawn.random() < self.slow
            milliseconds = round(1000 * drawn.lognormvariate(0, SIGMA) * MEDIAN_S) if late else 0
            text = f"{example.OPEN}{milliseconds}{example.CLOSE}<eos>"
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return Completion(ids, (-1.0,) * len(ids), "stop", VersionSpan(0, 0))


def measure(directory: Path, *, batches: int, slow: float, depth: int) -> float:
    """Return the rollouts a second of so many batches, after two to warm up."""
    torch.manual_seed(0)
    tokenizer = example.word_tokenizer()
    example.small_model(tokenizer).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    rows = example.problems(seed=0)
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"steps": batches + 2},
        "model": {"path": str(directory / "model")},
        "data": {"path": str(directory / "train.jsonl")},
        "source": {"tools": [f"{Path(__file__).resolve()}:calculate"], "tool_parser": "hermes", "max_turns": TURNS},
        "sampling": {"num_generations": GENERATIONS, "max_completion_length": 96},
        "batch": {"prompts_per_step": PROMPTS},
        "pipeline": {"async_prefetch": True, "prefetch_depth": depth},
        "algorithm": {"sampler_correction": "token_truncate"},
    }
    with lachesis.parts(config, rewards=[short]) as run:
        assert run.feed is not None
        run.engine.generate = StandIn(tokenizer, slow=slow)  # type: ignore[method-assign]
        rollouts, started = 0, 0.0
        for step in range(1, batches + 3):
            if step == 3:
                rollouts, started = 0, time.perf_counter()
            groups = run.feed.next().groups
            run.feed.advance(step)
            rollouts += sum(len(group.samples) for group in groups)
        return rollouts / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--slow", type=float, default=0.1, help="share of calls that are slow")
    parser.add_argument("--depth", type=int, default=2, help="batches that are generated ahead")
    parser.add_argument("--tiny", action="store_true", help="one batch, to see that it runs")
    options = parser.parse_args()
    batches = 1 if options.tiny else options.batches
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), batches=batches, slow=options.slow, depth=options.depth)
    sys.stdout.write(f"{found:.1f} rollouts/s, {options.slow:.0%} of calls slow, {options.depth} batches ahead\n")


if __name__ == "__main__":
    main()
