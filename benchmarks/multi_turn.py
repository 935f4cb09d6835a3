"""Rollouts of five turns with a tool: how many a second, and what of a step is not the model's own work.

    PYTHONPATH=src python benchmarks/multi_turn.py [--steps 8] [--threads 2] [--profile] [--tiny]
    PYTHONPATH=src python benchmarks/multi_turn.py --episodes 2000

The first trains the small model of `examples/tools`, after it has learned to ask its calculator in each of five turns,
with the embedded engine on CPU cores: 8 prompts with 8 rollouts a step. A step is generation, training, what the
calculator itself takes, which is the user's, and all else: reading turns, calling tools, rendering their answers,
rewards, advantages, packing, the proof of sync.

The second plays episodes of five turns on one event loop, all at the same time, with an engine that answers each call
after 5 ms: what the machinery of episodes and turns costs by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tools"))
import setup as example  # pyright: ignore[reportMissingImports]

import lachesis
from lachesis.common.deadline import Deadline
from lachesis.common.types import Completion, GenerationRequest, Prompt, Sample, SamplingParams, VersionSpan
from lachesis.plugins.atropos.environments.shipped import calculator
from lachesis.rollouts.call_batcher import GatheredCalls
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import EpisodeSource, Played, Players

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tools"
PROMPTS, GENERATIONS, TURNS = 8, 8, 5
ANSWER_S = 0.005


def last_word(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the rollout ends with a call, which five turns of calls do."""
    return [float(bool(messages[-1].get("tool_calls"))) for messages in completions]


def prepare(directory: Path, *, steps: int) -> None:
    """A model that asks its calculator in each turn, after so many steps that teach it to, and problems."""
    import json

    torch.manual_seed(0)
    rows = example.problems(seed=0)
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = example.word_tokenizer()
    model = example.small_model(tokenizer)
    example.demonstration = five_turns
    example.STEPS = steps  # few are enough to call the tool each time; the answers do not matter here
    example.supervised_start(model, tokenizer, rows)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")


def five_turns(row: dict[str, Any], source: Any) -> list[tuple[str, bool]]:
    """A conversation in which each turn is a call."""
    question = row["prompt"][0]["content"]
    said = [(f"<tools>calculate<end><user>{question}<end><assistant>", False)]
    for turn in range(TURNS):
        said.append((f"{example.OPEN}{question}{example.CLOSE}<eos>", True))
        if turn < TURNS - 1:
            said.append((f"<tool>{source.randint(4, 81)}<end><assistant>", False))
    return said


class Clock:
    """Seconds on the wall and of CPU, those of all threads of the process."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> tuple[float, float]:
        """Since it was made."""
        return time.perf_counter() - self.wall, time.process_time() - self.cpu


class Timed:
    """Seconds within a function, on the wall and of CPU; the profiler does not look there."""

    def __init__(self, function: Callable[..., Any], profiler: cProfile.Profile | None) -> None:
        self.function, self.profiler = function, profiler
        self.wall = self.cpu = 0.0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.profiler:
            self.profiler.disable()
        clock = Clock()
        try:
            return self.function(*arguments, **named)
        finally:
            wall, cpu = clock.seconds()
            self.wall, self.cpu = self.wall + wall, self.cpu + cpu
            if self.profiler:
                self.profiler.enable()


def train(directory: Path, *, steps: int, prompts: int, profile: bool) -> None:
    """Print rollouts a second, and the parts of a step."""
    config = {
        "run": {"steps": steps + 2},
        "model": {"path": str(directory / "model")},
        "data": {"path": str(directory / "train.jsonl")},
        "source": {
            "tools": [f"{EXAMPLE / 'calculator.py'}:calculate"],
            "tool_parser": "hermes",
            "max_turns": TURNS,
        },
        "sampling": {"num_generations": GENERATIONS, "max_completion_length": 96, "temperature": 1.0},
        "batch": {"prompts_per_step": prompts},
        "optimizer": {"learning_rate": 1e-6},
    }
    profiler = cProfile.Profile() if profile else None
    tool = calculator.calculate = Timed(calculator.calculate, None)  # on a thread of its own, which is not profiled
    with lachesis.parts(config, rewards=[last_word]) as run:
        assert run.feed is not None
        run.bridge.sync(0)
        for step in (1, 2):  # to warm up
            one_step(run, step)
        tool.wall = tool.cpu = 0.0
        parts = {
            "generation": Timed(run.engine.generate, profiler),
            "training": Timed(run.policy.accumulate, profiler),
            "optimizer": Timed(run.policy.step, profiler),
        }
        run.engine.generate, run.policy.accumulate, run.policy.step = parts.values()  # type: ignore[method-assign]
        parts["the calculator"] = tool
        clock, counts = Clock(), Counter[str]()
        for step in range(3, steps + 3):
            with profiler or nullcontext():
                counts += one_step(run, step)
        wall, cpu = clock.seconds()
    ours = {"wall": wall - sum(one.wall for one in parts.values()), "CPU": cpu - sum(one.cpu for one in parts.values())}
    shares = ", ".join(f"{name} {one.wall / wall:.1%}" for name, one in parts.items())
    sys.stdout.write(
        f"{torch.get_num_threads()} threads: {counts['rollouts'] / wall:.1f} rollouts/s, "
        f"{counts['turns'] / counts['rollouts']:.2f} turns each, {wall / steps:.3f} s a step "
        f"({cpu / steps:.3f} of CPU): {shares}, ours {ours['wall'] / wall:.1%} ({ours['CPU'] / cpu:.1%} of CPU, "
        f"{1e6 * ours['wall'] / counts['turns']:.0f} us a turn)\n"
    )
    if profiler:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)


def one_step(run: Any, step: int) -> Counter[str]:
    """As the trainer does it; how many rollouts there were, and turns."""
    batch = run.feed.next()
    run.policy.accumulate(batch)
    with run.bridge.update_to(step):
        run.policy.step()
    run.feed.advance(step)
    turns = round(run.feed.counters()["turns"])
    return Counter(rollouts=sum(len(group.samples) for group in batch.groups), turns=turns)


class Waiting:
    """An engine that answers a call, however large, after 5 ms."""

    def __init__(self) -> None:
        self.calls = self.turns = 0

    def generate(self, requests: Sequence[GenerationRequest], *, deadline: Deadline, finished: Any = None) -> None:
        time.sleep(ANSWER_S)
        self.calls += 1
        self.turns += len(requests)
        for place in range(len(requests)):
            finished(place, [Completion((5, 6), (-1.0, -1.0), "stop", VersionSpan(0, 0))])


class FiveTurns(Players):
    """Each turn waits for the engine, and the next prompt continues the last."""

    def __init__(self, engine: Waiting) -> None:
        self.engine = engine
        self.under_way = self.most = 0

    async def start(self) -> None:
        self.calls = GatheredCalls(self.engine, at_once=4)  # type: ignore[arg-type]

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        tokens: tuple[int, ...] = ()
        for turn in range(TURNS):
            request = GenerationRequest((*prompt.token_ids, *tokens), SamplingParams(4), seed=seed + turn)
            tokens = (*tokens, *(await self.calls.complete(request)).token_ids, 7)
            await asyncio.sleep(0)
        self.under_way -= 1
        unknown = (-1.0,) * len(tokens)
        sample = Sample(prompt.token_ids, tokens, unknown, "stop", VersionSpan(0, 0), rewards=(1.0,), reward=1.0)
        return Played((sample,))

    async def stop(self) -> None:
        await self.calls.ended()
        self.calls.close()


def play(episodes: int) -> None:
    """Print episodes a second, and how many were under way at once."""
    engine = Waiting()
    players = FiveTurns(engine)
    groups = episodes // GENERATIONS
    prompts = [Prompt(id=str(number), token_ids=(1, 2), text="") for number in range(groups)]
    source = EpisodeSource(
        stream=PromptStream(prompts, seed=0),
        players=players,
        num_generations=GENERATIONS,
        max_concurrent=episodes,
        refill_rounds=0,
        rollout_s=60.0,
        seed=0,
    )
    started, cpu = time.perf_counter(), time.process_time()
    found = source.next_groups(groups, deadline=Deadline("the benchmark", 120.0))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    source.close()
    played = sum(len(group.samples) for group in found)
    sys.stdout.write(
        f"{played} episodes of {TURNS} turns on one loop, {players.most} at once: {seconds:.2f} s, "
        f"{played / seconds:.0f} a second, {1e6 * cpu / engine.turns:.0f} us of CPU a turn, {engine.calls} calls\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="what takes our part of the time, by function")
    parser.add_argument("--episodes", type=int, default=0, help="play so many with an engine that only waits")
    parser.add_argument("--tiny", action="store_true", help="one step of one prompt, and 16 episodes: that both run")
    options = parser.parse_args()
    if options.episodes or options.tiny:
        play(options.episodes or 2 * GENERATIONS)
    if options.episodes:
        return
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory), steps=2 if options.tiny else 50)
        steps, prompts = (1, 1) if options.tiny else (options.steps, PROMPTS)
        train(Path(directory), steps=steps, prompts=prompts, profile=options.profile)


if __name__ == "__main__":
    main()
