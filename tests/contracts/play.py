"""Plays an environment over a fake engine, and says what a source got of it.

Of verifiers in a process of its own: ``python -m tests.contracts.play``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DeadlineExceeded
from lachesis.common.types import Group, Prompt, SamplingParams
from lachesis.plugins.environments.section import StepsSourceConfig
from lachesis.plugins.environments.steps.build import step_players
from lachesis.plugins.environments.turn_server import TurnServer
from lachesis.plugins.environments.verifiers.build import load_players
from lachesis.plugins.environments.verifiers.settings import VerifiersSettings, own_signals
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import (
    EpisodeEvaluator,
    EpisodeSource,
    Played,
    Players,
    PolicyAccess,
    RolloutFailed,
    TaskPlayers,
)
from tests.fakes import FakeEngine
from tests.paths import ROOT

DIGIT, EOS = 3, 2
CALL = '<tool_call>{"name": "guess", "arguments": {"digit": 0}}</tool_call>'
PARAMS = SamplingParams(max_tokens=4)
LOSSY_GROUPS, LOSSY_SIZE = 6, 6


WRONG_RENDERERS = (
    {"name": "qwen3", "tool_parser": "qwen3"},
    {"name": "qwen3", "enable_thinkin": False},
    {"name": "qwen33"},
)


class Recording(FakeEngine):
    """Says a digit that follows from prompt and seed, with what is around it; keeps what it sampled."""

    def __init__(self, before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        super().__init__(self.digit)
        self.around = list(before), list(after)
        self.sampled: list[tuple[list[int], list[int], list[float]]] = []

    def digit(self, request: Any, index: int) -> list[int]:
        before, after = self.around
        return [*before, DIGIT + random.Random(f"{request.prompt_ids}{request.seed}").randrange(10), *after, EOS]

    def generate(self, requests: Any, **options: Any) -> Any:
        results = super().generate(requests, **options)
        for request, (completion,) in zip(requests, results, strict=True):
            self.sampled.append((list(request.prompt_ids), list(completion.token_ids), list(completion.logprobs)))
        return results


class Failing(Players):
    """The same rollouts, of which the third of each task fails once it is over; or none ever ends."""

    def __init__(self, inner: Players, *, hang: bool = False) -> None:
        self.inner, self.hang, self.counts = inner, hang, Counter[str]()
        self.start, self.report, self.stop, self.finish = inner.start, inner.report, inner.stop, inner.finish

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        played = await self.inner.play(prompt, seed=seed, greedy=greedy)
        self.counts[prompt.id] += 1
        if self.hang:
            await asyncio.sleep(600)
        if self.counts[prompt.id] == 3:
            raise RolloutFailed("made to fail", cause="crash")
        return played


def main(line: str, directory: Path) -> None:
    """Of the line ``v1`` or ``v01``."""
    engine = Recording()
    settings = VerifiersSettings(
        environment=str(ROOT / "examples" / "verifiers" / f"digits_{line}.py"),
        args=arguments(line, kind="guess"),
        server=TurnServer(CallBatcher(engine, at_once=1), params=PARAMS, max_context=64, vocab_size=200),
        tokenizer=directory / "tokenizer",
        params=PARAMS,
        decode=lambda rows: [" ".join(map(str, row)) for row in rows],
        eval_tasks=2,
    )
    found = record(loaded(settings), engine)
    games = {"alone": {}} if line == "v1" else {"alone": {}, "together": {"together": True}}
    found["lossy"] = {name: lossy(settings, line, game) for name, game in games.items()}
    if line == "v01":
        found["renderers"] = [refusal(settings, fields) for fields in WRONG_RENDERERS]
    (directory / "played.json").write_text(json.dumps(found))


def refusal(settings: VerifiersSettings, fields: dict[str, Any]) -> str:
    """What is said of a renderer's fields when play begins; empty if they are taken."""
    players = loaded(replace(settings, renderer=fields))

    async def begin() -> None:
        await players.start()
        await players.stop()

    try:
        asyncio.run(begin())
    except ConfigError as error:
        return str(error)
    return ""


def arguments(line: str, **options: Any) -> dict[str, Any]:
    """Arguments of an environment, where its line has them."""
    return options if line == "v01" else {"taskset": options}


def loaded(settings: VerifiersSettings) -> TaskPlayers:
    with own_signals():
        return load_players()(settings)


def lossy(settings: VerifiersSettings, line: str, game: dict[str, Any]) -> dict[str, Any]:
    """What a source got of an environment that loses some of its rollouts, and of the same one whole."""
    found: dict[str, Any] = {}
    for name, failing in (("found", True), ("whole", False)):
        server = TurnServer(CallBatcher(Recording(), at_once=1), params=PARAMS, max_context=64, vocab_size=200)
        environment = str(Path(__file__).with_name(f"lossy_{line}.py"))
        args = arguments(line, failing=failing, **game)
        players = loaded(replace(settings, environment=environment, args=args, server=server))
        source = EpisodeSource(
            stream=PromptStream(players.split()[0], seed=0), players=players, num_generations=LOSSY_SIZE,
            max_concurrent=64, refill_rounds=0, rollout_s=120.0, seed=5,
        )  # fmt: skip
        found[name] = documents(source.next_groups(LOSSY_GROUPS, deadline=Deadline("lossy groups", 200.0)))
        found.setdefault("counters", source.counters())
        source.close()
    return found


def steps(environment: str, tokenizer: Any, *, calls: bool = False) -> dict[str, Any]:
    """What a source got of an environment that is stepped: a class of the example, or a server of OpenEnv."""
    around = CALL.split("0") if calls else ("", "")
    engine = Recording(*(tokenizer(text, add_special_tokens=False)["input_ids"] for text in around))
    policy = PolicyAccess(
        calls=CallBatcher(engine, at_once=1), tokenizer=tokenizer, model="tiny",
        params=SamplingParams(max_tokens=400), max_context=1000, vocab_size=200,
    )  # fmt: skip
    settings = StepsSourceConfig(environment=environment, max_tasks=10, eval_tasks=2, max_turns=3)
    return json.loads(json.dumps(record(step_players(policy, settings), engine, hang_s=1.0)))


def record(players: TaskPlayers, engine: Recording, *, hang_s: float = 6.0) -> dict[str, Any]:
    """Groups as they are, with rollouts that are made to fail, and with ones that never end within ``hang_s``."""
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
    found |= {"failed": failed(episodes, players), "cancelled": cancelled(episodes, players, hang_s=hang_s)}
    use(episodes, players)
    episodes.close()
    return found


def begin_anew(episodes: EpisodeSource) -> None:
    prompts = list(episodes.stream._by_id.values())
    episodes.load_state_dict({"stream": PromptStream(prompts, seed=0).state_dict(), "requests": 0})


def use(source: EpisodeSource, players: Players) -> None:
    """Have other players play what comes."""
    source.players = source.episodes.players = players


def failed(episodes: EpisodeSource, players: Players) -> dict[str, Any]:
    use(episodes, Failing(players))
    begin_anew(episodes)
    episodes.counters()
    groups = episodes.next_groups(3, deadline=Deadline("failing groups", 200.0))
    return {
        "samples": sum(len(group.samples) for group in groups),
        "counters": episodes.counters(),
        "others": texts(groups),
    }


def cancelled(episodes: EpisodeSource, players: Players, *, hang_s: float) -> dict[str, Any]:
    use(episodes, Failing(players, hang=True))
    try:
        episodes.next_groups(1, deadline=Deadline("groups that hang", hang_s))
    except DeadlineExceeded as error:
        name = type(error).__name__
    else:
        name = ""

    async def left() -> int:
        # The server's own tasks, of uvicorn and of the library, are none of a rollout.
        return sum("Episode" in repr(task.get_coro()) for task in asyncio.all_tasks())

    tasks = episodes.episodes._loop.run(left())
    use(episodes, players)
    again = bool(episodes.next_groups(1, deadline=Deadline("groups after it", 200.0)))
    return {"error": name, "tasks_left": tasks, "again": again}


def documents(groups: list[Group]) -> list[list[dict[str, Any]]]:
    return [[asdict(sample) | {"mask": sample.loss_mask()} for sample in group.samples] for group in groups]


def texts(groups: list[Group]) -> list[str]:
    return [f"{group.prompt.id}: {sample.text} = {sample.reward}" for group in groups for sample in group.samples]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
