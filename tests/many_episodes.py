"""Many episodes at the same time in one process: how many there were, and the most memory that it held.

    python -m tests.many_episodes tools|steps|conversations [NUMBER]

Each has a prompt of 1,000 tokens and two turns of up to 300. Between the two all wait until each has said its first,
so that all are under way at once. ``conversations`` are those of agents with the proxy, without the agents' processes.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.types import GenerationRequest, Prompt, SamplingParams
from lachesis.plugins.environments.agents.requests import Asked
from lachesis.plugins.environments.agents.session import AgentSession, Recorder
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import EpisodeSource, Played, Players
from lachesis.rollouts.generation import text_decoder
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from lachesis.rollouts.tools.parsers import hermes
from lachesis.rollouts.tools.player import ToolPlayers, TurnLimits
from lachesis.rollouts.tools.template import Continuation
from lachesis.rollouts.tools.toolbox import Tool, Toolbox
from tests.fakes import FakeEngine
from tests.tiny import EOS_ID, tiny_tokenizer
from tests.unit.plugins.environments.steps.games import ids, players
from tests.unit.rollouts.tools.test_player import CALL, TEMPLATE

SIZE, PROMPT, TURN = 8, 1_000, 280
PARAMS = SamplingParams(max_tokens=800)


class Gate:
    """A place at which so many wait for each other."""

    def __init__(self, number: int) -> None:
        self.number, self.there, self.most = number, 0, 0
        self.open: asyncio.Event | None = None

    async def passed(self) -> None:
        self.open = self.open or asyncio.Event()
        self.there += 1
        self.most = max(self.most, self.there)
        if self.there == self.number:
            self.open.set()
        await self.open.wait()


def engine_of(first: str) -> FakeEngine:
    """Says ``first`` until it was told an answer."""

    def say(request: GenerationRequest, index: int) -> list[int]:
        said = first if len(request.prompt_ids) < PROMPT + 40 else ""
        return [*ids(said + "a" * (TURN - len(said))), EOS_ID]

    return FakeEngine(say)


def prompts(count: int) -> list[Prompt]:
    texts = [f"{number}".rjust(PROMPT, "x") for number in range(count)]
    return [
        Prompt(str(number), tuple(ids(text)), text, messages=({"role": "user", "content": text},))
        for number, text in enumerate(texts)
    ]


def with_tools(number: int, gate: Gate) -> tuple[Players, list[Prompt]]:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE

    async def double(x: int) -> int:
        await gate.passed()
        return 2 * x

    made = ToolPlayers(
        calls=CallBatcher(engine_of(CALL % 4), at_once=1), params=PARAMS,
        toolbox=Toolbox([Tool("double", double, {})], timeout_s=60), parse=hermes,
        continuation=Continuation(tokenizer, {}), tokenizer=tokenizer, decode=text_decoder(tokenizer),
        limits=TurnLimits(turns=2, result_tokens=20),
    )  # fmt: skip
    return made, prompts(number // SIZE)


def stepped(number: int, gate: Gate) -> tuple[Players, list[Prompt]]:
    class Waiting:
        def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
            self.left = 2
            return f"{seed}".rjust(PROMPT, "x"), {}

        async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            self.left -= 1
            if self.left:
                await gate.passed()
            return "and?", 1.0, not self.left, False, {}

    made = players(Waiting, engine_of(""), max_tokens=800, max_context=4_000, max_tasks=number // SIZE)
    return made, made.split()[0]


class Conversations(Players):
    """What the proxy does for agents, asked without HTTP: two turns of a conversation."""

    def __init__(self, gate: Gate) -> None:
        tokenizer: Any = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        self.gate, self.calls, self.decode = gate, CallBatcher(engine_of(""), at_once=1), text_decoder(tokenizer)
        self.recorder = Recorder(tokenizer, parse=hermes, template_kwargs={}, max_context=4_000)

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        session, messages = AgentSession(seed=seed, params=PARAMS), list(prompt.messages or ())
        for left in (1, 0):
            prepared = self.recorder.prepare(session, Asked(tuple(messages)))
            turn = self.recorder.record(session, prepared, await self.calls.complete(prepared.requests[0]))
            messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": "and?"}]
            if left:
                await self.gate.passed()
        (made,) = session.trajectories
        text = self.decode([made.conversation.token_ids])[0]
        return Played((made.conversation.as_sample(text=text, temperature=1.0),))

    async def stop(self) -> None:
        await self.calls.stop()


def conversations(number: int, gate: Gate) -> tuple[Players, list[Prompt]]:
    return Conversations(gate), prompts(number // SIZE)


KINDS = {"tools": with_tools, "steps": stepped, "conversations": conversations}


def length(completion_ids: list[Any]) -> list[float]:
    return [float(len(one)) for one in completion_ids]


def main(kind: str, number: int = 2_000) -> None:
    gate = Gate(number)
    made, tasks = KINDS[kind](number, gate)
    rewarder = None if kind == "steps" else Rewarder([NamedReward("length", length)])
    stream = PromptStream(tasks, seed=0, shuffle=False)
    source = EpisodeSource(stream=stream, players=made, num_generations=SIZE, seed=1, rewarder=rewarder)
    groups = source.next_groups(len(tasks), deadline=Deadline("many", 500.0))
    tokens = source.counters()["tokens_generated"]
    source.close()
    found = {
        "episodes": sum(len(group.samples) for group in groups),
        "at_once": gate.most,
        "tokens": tokens,
        "gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
