"""What everything that plays rollouts owes to its source. A player joins by adding a function to ``PLAYERS``.

The model says three random letters a turn and the rollouts have two turns, unless a player says otherwise. Of prompt 0
each player waits for ``slow`` in the midst of a rollout. That failures are excluded by cause is the contract of
``test_lost_rollouts.py``.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError
from lachesis.common.types import GenerationRequest, Group, Prompt, SamplingParams
from lachesis.pipeline.collect import Collector
from lachesis.pipeline.feed import Finisher
from lachesis.pipeline.producer import AsynchronousFeed
from lachesis.plugins.environments.agents.player import AgentPlayers
from lachesis.plugins.environments.agents.process import AgentCommand
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.agents.session import Recorder
from lachesis.plugins.environments.rollout_func import FunctionPlayers
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import EpisodeSource, Players
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
from tests.waiting import LONG_S, until

PROMPTS, SIZE = 6, 3
PARAMS = SamplingParams(max_tokens=200)


class Saying(FakeEngine):
    """Says tokens that follow from the prompt, the seed and the index, and remembers each completion by its prompt."""

    def __init__(self, say: Callable[[GenerationRequest, str], str]) -> None:
        super().__init__(self._say)
        self.say = say
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def _say(self, request: GenerationRequest, index: int) -> Sequence[int]:
        drawn = random.Random(f"{request.prompt_ids}:{request.seed}:{index}")
        said = [*ids(self.say(request, "".join(drawn.choices("abcdefgh", k=drawn.randint(1, 6))))), EOS_ID]
        self.sampled.append((tuple(request.prompt_ids), tuple(said)))
        return said


@dataclass
class World:
    """A player over an engine; ``slow`` lets rollouts of prompt 0 go on."""

    players: Players
    engine: Saying
    prompts: list[Prompt]
    slow: threading.Event


def with_tools(directory: Path) -> World:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    slow = threading.Event()

    def double(x: int) -> int:
        if x == 0:
            slow.wait(LONG_S)
        return 2 * x

    def say(request: GenerationRequest, word: str) -> str:
        text = tokenizer.decode(request.prompt_ids)
        return CALL % text[text.index("?") - 1] if text.count("[assistant]") == 1 else word

    def prompt(number: int) -> Prompt:
        messages = ({"role": "user", "content": f"twice {number}?"},)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return Prompt(str(number), tuple(tokenizer(text)["input_ids"]), text, messages=messages)

    engine = Saying(say)
    made = ToolPlayers(
        calls=CallBatcher(engine, at_once=4), params=PARAMS,
        toolbox=Toolbox([Tool("double", double, {})], timeout_s=60), parse=hermes,
        continuation=Continuation(tokenizer, {}), tokenizer=tokenizer, decode=text_decoder(tokenizer),
        limits=TurnLimits(turns=2, result_tokens=20),
    )  # fmt: skip
    return World(made, engine, [prompt(number) for number in range(PROMPTS)], slow)


def stepped(directory: Path) -> World:
    slow = threading.Event()

    class Twice:
        def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
            self.seed, self.left = seed, 2
            return f"{seed}?", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            if self.seed == 0:
                slow.wait(LONG_S)
            self.left -= 1
            return "and?", 1.0, self.left == 0, False, {}

    engine = Saying(lambda request, word: word)
    made = players(Twice, engine, max_tokens=200, max_context=400, max_tasks=PROMPTS)
    return World(made, engine, made.split()[0], slow)


def by_a_function(directory: Path) -> World:
    slow, tokenizer = threading.Event(), tiny_tokenizer()
    engine = Saying(lambda request, word: word)

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        if prompts[0] == "0?":
            slow.wait(LONG_S)
        first = trainer.generate(prompts)
        between = ids(";")
        second = trainer.generate([one["prompt_ids"] + one["completion_ids"] + between for one in first])
        pairs = list(zip(first, second, strict=True))
        return {
            "prompt_ids": [one["prompt_ids"] for one in first],
            "completion_ids": [a["completion_ids"] + between + b["completion_ids"] for a, b in pairs],
            "logprobs": [a["logprobs"] + [0.0] * len(between) + b["logprobs"] for a, b in pairs],
            "env_mask": [
                [1] * len(a["completion_ids"]) + [0] * len(between) + [1] * len(b["completion_ids"]) for a, b in pairs
            ],
        }

    made = FunctionPlayers(
        rollout_func=rollouts, name="rollouts", calls=CallBatcher(engine, at_once=4), params=PARAMS,
        num_generations=SIZE, tokenizer=tokenizer, decode=text_decoder(tokenizer), version=lambda: 0,
        eos_token_ids=[EOS_ID], vocab_size=len(tokenizer), by_group=True,
    )  # fmt: skip
    prompts = [Prompt(str(n), tuple(ids(f"{n}?")), f"{n}?") for n in range(PROMPTS)]
    return World(made, engine, prompts, slow)


# An agent of nothing but the standard library; its second argument is the file that lets rollouts of prompt 0 go on.
AGENT = """
import json, os, sys, time, urllib.request
messages = []
for question in (sys.argv[1], "and?"):
    messages.append({"role": "user", "content": question})
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    while sys.argv[1] == "0?" and not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
"""


class FileEvent(threading.Event):
    """An event that other processes see as a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def set(self) -> None:
        super().set()
        self.path.touch()


def of_agents(directory: Path) -> World:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    slow = FileEvent(directory / f"go-{random.random()}")
    engine = Saying(lambda request, word: word)
    recorder = Recorder(tokenizer, parse=hermes, template_kwargs={}, max_context=400)
    made = AgentPlayers(
        agent=AgentCommand(
            (sys.executable, "-IS", "-c", AGENT, "{prompt}", str(slow.path)), workdir=None, env={}, timeout_s=LONG_S
        ),
        proxy=AgentProxy(CallBatcher(engine, at_once=4), recorder), params=PARAMS, decode=text_decoder(tokenizer),
        max_concurrent=PROMPTS * SIZE, score_nonzero=False,
    )  # fmt: skip
    prompts = [Prompt(str(n), tuple(ids(f"{n}?")), f"{n}?") for n in range(PROMPTS)]
    return World(made, engine, prompts, slow)


PLAYERS = [with_tools, stepped, by_a_function, of_agents]


@pytest.fixture(params=PLAYERS, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Callable[[Path], World]:
    return request.param


@pytest.fixture
def world(make: Callable[[Path], World], tmp_path: Path) -> World:
    return make(tmp_path)


def length(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    return [float(len(one)) for one in completion_ids]


def source(world: World, **options: Any) -> EpisodeSource:
    own = world.players.columns == ()  # its environment says what an episode is worth
    rewarder = None if own else Rewarder([NamedReward("length", length)])
    stream = PromptStream(world.prompts, seed=0, shuffle=False)
    return EpisodeSource(
        stream=stream, players=world.players, num_generations=SIZE, seed=5, rewarder=rewarder, **options
    )


def test_tokens_are_those_that_were_sampled_and_only_these_are_learned(world: World):
    world.slow.set()
    made = source(world)
    groups = made.next_groups(PROMPTS, deadline=Deadline("contract", LONG_S))
    counted = made.counters()["tokens_generated"]
    made.close()
    assert [len(group.samples) for group in groups] == [SIZE] * PROMPTS
    left = list(world.engine.sampled)
    learned = sum(sample.num_learned for group in groups for sample in group.samples)
    assert learned == counted == sum(len(said) for _, said in left), "the lengths trained on are those generated"
    for sample in (sample for group in groups for sample in group.samples):
        whole, mask = sample.prompt_ids + sample.completion_ids, sample.loss_mask()
        assert len(mask) == len(sample.logprobs) == len(sample.completion_ids)
        assert [logprob for logprob, own in zip(sample.logprobs, mask, strict=True) if own] == [-0.5] * sum(mask)
        place = len(sample.prompt_ids)
        turns = 0
        while place < len(whole):  # what was sampled after exactly these tokens follows them
            if not mask[place - len(sample.prompt_ids)]:
                place += 1
                continue
            said = next(said for before, said in left if before == whole[:place] and said == whole[place:][: len(said)])
            left.remove((whole[:place], said))
            assert all(mask[place - len(sample.prompt_ids) :][: len(said)])
            place += len(said)
            turns += 1
        assert turns == 2
    assert not left, "nothing was sampled that no rollout has"


def test_a_slow_rollout_holds_up_its_own_group_only(world: World):
    made = source(world)
    done: dict[int, Any] = {}
    draws = made.draw(PROMPTS)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(made.roll_out, draws, deadline=Deadline("contract", LONG_S), done=done.__setitem__)
        try:
            until(lambda: len(done) == PROMPTS - 1)
            assert 0 not in done and all(isinstance(one, Group) for one in done.values())
        finally:
            world.slow.set()
        call.result()
    made.close()
    assert isinstance(done[0], Group)


def test_a_deadline_ends_all_and_nothing_of_it_is_lost(make: Callable[[Path], World], tmp_path: Path):
    world, other = make(tmp_path), make(tmp_path)
    made, undisturbed = source(world), source(other)
    with pytest.raises(DeadlineExceeded):
        made.next_groups(2, deadline=Deadline("contract", 0.3))
    assert not made.episodes._under_way
    for one in (world, other):
        one.slow.set()
    again, expected = (one.next_groups(2, deadline=Deadline("contract", LONG_S)) for one in (made, undisturbed))
    assert again == expected
    for one in (made, undisturbed):
        one.close()


def test_closing_ends_what_is_under_way(world: World):
    made = source(world)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(made.next_groups, 1, deadline=Deadline("contract", LONG_S))
        until(lambda: bool(world.engine.sampled) or isinstance(world.players, FunctionPlayers))
        time.sleep(0.05)
        started = time.monotonic()
        made.close()
        with pytest.raises(EngineError, match="closed"):
            call.result(LONG_S)
        assert time.monotonic() - started < LONG_S / 2
    world.slow.set()
    made.close()


def test_groups_ahead_flow_past_a_slow_one_and_none_is_lost_or_changed(make: Callable[[Path], World], tmp_path: Path):
    """The lengths trained on are those generated: every group that is drawn is trained on, as it was sampled."""
    world, other = make(tmp_path), make(tmp_path)
    other.slow.set()
    undisturbed = source(other)
    expected = undisturbed.next_groups(PROMPTS, deadline=Deadline("contract", LONG_S))
    undisturbed.close()
    made = source(world)
    feed = AsynchronousFeed(
        source=made, collector=Collector(made, count=2), finisher=Finisher(advantages=list, pack=tuple), ahead=2,
        batch_deadline_s=LONG_S,
    )  # fmt: skip
    trained = [*feed.next()]
    assert "0" not in {group.prompt.id for group in trained}, "the batch does not wait for the slow group"
    feed.advance(1)
    trained += feed.next()
    world.slow.set()
    feed.advance(2)
    trained += feed.next()
    feed.close()
    found = {group.prompt.id: group for group in trained}
    assert "0" in found, "it is trained on in time"
    assert [found[name] for name in sorted(found)] == [one for one in expected if one.prompt.id in found]
    assert len(found) == 6


def test_no_more_is_begun_than_the_trainer_is_behind(world: World):
    """Back-pressure: where nothing is trained, rollouts of the batches ahead are played, and then no others."""
    world.slow.set()
    made = source(world)
    feed = AsynchronousFeed(
        source=made, collector=Collector(made, count=2), finisher=Finisher(advantages=list, pack=tuple), ahead=1,
        batch_deadline_s=LONG_S,
    )  # fmt: skip
    feed.next()
    turns = 2 * SIZE * 2
    until(lambda: len(world.engine.sampled) >= 2 * turns)
    time.sleep(0.3)
    assert len(world.engine.sampled) == 2 * turns, "the batch that is trained on, and one ahead"
    feed.advance(1)
    until(lambda: len(world.engine.sampled) >= 3 * turns)
    feed.close()
