"""Plays an example of verifiers over a fake engine, in a process of its own: ``python -m tests.contracts.play``."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded
from lachesis.common.types import Group, Prompt, SamplingParams
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import EpisodeEvaluator, EpisodeSource, Played, Players, RolloutFailed
from lachesis.rollouts.gathered import GatheredCalls
from lachesis.rollouts.turns import TurnServer
from lachesis.rollouts.verifiers.build import load_players
from lachesis.rollouts.verifiers.settings import VerifiersSettings, own_signals
from tests.fakes import FakeEngine
from tests.paths import ROOT

DIGIT, EOS = 3, 2
PARAMS = SamplingParams(max_tokens=4)


class Recording(FakeEngine):
    """Says a digit that follows from prompt and seed; keeps what it sampled."""

    def __init__(self) -> None:
        super().__init__(self.digit)
        self.sampled: list[tuple[list[int], list[int], list[float]]] = []

    @staticmethod
    def digit(request: Any, index: int) -> list[int]:
        return [DIGIT + random.Random(f"{request.prompt_ids}{request.seed}").randrange(10), EOS]

    def generate(self, requests: Any, **options: Any) -> Any:
        results = super().generate(requests, **options)
        for request, (completion,) in zip(requests, results, strict=True):
            self.sampled.append((list(request.prompt_ids), list(completion.token_ids), list(completion.logprobs)))
        return results


class Failing(Players):
    """The same rollouts, of which every third fails once it is over, or never ends."""

    def __init__(self, inner: Players, *, hang: bool = False) -> None:
        self.inner, self.hang, self.count = inner, hang, 0
        self.start, self.report, self.stop, self.finish = inner.start, inner.report, inner.stop, inner.finish

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        played = await self.inner.play(prompt, seed=seed, greedy=greedy)
        self.count += 1
        if self.hang:
            await asyncio.sleep(600)
        if self.count % 3 == 0:
            raise RolloutFailed("made to fail", cause="crash")
        return played


def main(environment: str, directory: Path) -> None:
    old = environment == "digits_v01.py"
    engine = Recording()
    settings = VerifiersSettings(
        environment=str(ROOT / "examples" / "verifiers" / environment),
        args={"kind": "guess"} if old else {"taskset": {"kind": "guess"}},
        server=TurnServer(GatheredCalls(engine, at_once=1), params=PARAMS, max_context=64, vocab_size=200),
        tokenizer=directory / "tokenizer",
        params=PARAMS,
        decode=lambda rows: [" ".join(map(str, row)) for row in rows],
        eval_tasks=2,
    )
    with own_signals():
        players = load_players()(settings)
    training, held_out = players.split()

    def source(inner: Players) -> EpisodeSource:
        return EpisodeSource(
            stream=PromptStream(training, seed=0), players=inner, num_generations=4, max_concurrent=16,
            refill_rounds=0, rollout_s=120.0, seed=5,
        )  # fmt: skip

    episodes = source(players)
    groups = episodes.next_groups(3, deadline=Deadline("groups", 200.0))
    found: dict[str, Any] = {"groups": documents(groups), "sampled": list(engine.sampled)}
    found["all"] = texts(groups)
    evaluator = EpisodeEvaluator(source=episodes, prompts=held_out, success_reward=1.0, seed=0, generation_s=200.0)
    found["evaluated"] = asdict(evaluator.run(0))
    found |= {"failed": failed(episodes, players), "cancelled": cancelled(episodes, players)}
    episodes.players = players
    episodes.close()
    (directory / "played.json").write_text(json.dumps(found))


def failed(episodes: EpisodeSource, players: Players) -> dict[str, Any]:
    episodes.players = Failing(players)
    episodes.load_state_dict({"stream": PromptStream(list(episodes.stream._by_id.values()), seed=0).state_dict(),
                              "requests": 0})  # fmt: skip
    episodes.counters()
    groups = episodes.next_groups(3, deadline=Deadline("failing groups", 200.0))
    return {
        "samples": sum(len(group.samples) for group in groups),
        "counters": episodes.counters(),
        "others": texts(groups),
    }


def cancelled(episodes: EpisodeSource, players: Players) -> dict[str, Any]:
    episodes.players = Failing(players, hang=True)
    try:
        episodes.next_groups(1, deadline=Deadline("groups that hang", 6.0))
    except DeadlineExceeded as error:
        name = type(error).__name__
    else:
        name = ""

    async def left() -> int:
        # The server's own tasks, of uvicorn and of the library, are none of a rollout.
        return sum("EpisodeSource" in repr(task.get_coro()) for task in asyncio.all_tasks())

    tasks = episodes._loop.run(left())
    episodes.players = players
    again = bool(episodes.next_groups(1, deadline=Deadline("groups after it", 200.0)))
    return {"error": name, "tasks_left": tasks, "again": again}


def documents(groups: list[Group]) -> list[list[dict[str, Any]]]:
    return [[asdict(sample) | {"mask": sample.loss_mask()} for sample in group.samples] for group in groups]


def texts(groups: list[Group]) -> list[str]:
    return [f"{group.prompt.id}: {sample.text} = {sample.reward}" for group in groups for sample in group.samples]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
