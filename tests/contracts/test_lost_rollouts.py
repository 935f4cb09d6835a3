"""15 % of rollouts are lost, by what loses them in each kind of source: advantages are as if they had never been.

What is played over an environment's episodes in general is in ``tests/unit/rollouts/test_episodes.py``, environments of
verifiers in ``test_environment_contract.py``, other ways in which agents' programs fail in ``test_agent_process.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.types import GenerationRequest, Group, Prompt, Sample, SamplingParams, VersionSpan
from lachesis.plugins.environments.agents.player import AgentPlayers
from lachesis.plugins.environments.agents.process import AgentCommand
from lachesis.plugins.environments.agents.proxy import AgentProxy
from lachesis.plugins.environments.agents.session import Recorder
from lachesis.plugins.sandbox.records import FunctionTests, SandboxError, Verdict
from lachesis.plugins.sandbox.rewards import execution
from lachesis.plugins.sandbox.rewards.grpo_code import code_execution_reward_func, soft_format_reward_func
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import EpisodeSource
from lachesis.rollouts.generation import text_decoder
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards.functions import Excluded
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from lachesis.rollouts.streaming import StreamingSource
from lachesis.rollouts.tools.base import ToolServerLost
from lachesis.rollouts.tools.parsers import hermes
from lachesis.rollouts.tools.player import ToolPlayers, TurnLimits
from lachesis.rollouts.tools.template import Continuation
from lachesis.rollouts.tools.toolbox import Tool, Toolbox
from lachesis.train.losses.advantage import assign_advantages
from tests.contracts.chance import lost, share
from tests.fakes import FakeEngine
from tests.tiny import EOS_ID, tiny_tokenizer
from tests.unit.plugins.environments.steps.games import TOKENIZER, ids, players
from tests.unit.rollouts.tools.test_player import CALL, TEMPLATE

TASKS, SIZE = 12, 8
AGENT_TASKS = 4  # each of their rollouts is a process


def number(request: GenerationRequest, index: int) -> int:
    return int(share(request.prompt_ids, request.seed, index) * 1_000_000)


def without_a_tool_server(*, failing: bool) -> tuple[list[Group], dict[str, float]]:
    """The model calls a tool with a number of its own; its server breaks off at some."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE

    def turn(request: GenerationRequest, index: int) -> list[int]:
        first = tokenizer.decode(request.prompt_ids).count("[assistant]") == 1
        return [*ids(CALL % number(request, index) if first else "ok"), EOS_ID]

    def double(x: int) -> int:
        if failing and lost(x):
            raise ToolServerLost("the server broke off")
        return 2 * x

    def prompt(task: int) -> Prompt:
        messages = ({"role": "user", "content": f"twice {task}?"},)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return Prompt(str(task), tuple(tokenizer(text)["input_ids"]), text, messages=messages)

    engine = FakeEngine(turn)
    turns = ToolPlayers(
        calls=CallBatcher(engine, at_once=1), params=SamplingParams(max_tokens=400),
        toolbox=Toolbox([Tool("double", double, {})], timeout_s=60), parse=hermes,
        continuation=Continuation(tokenizer, {}), tokenizer=tokenizer, decode=text_decoder(tokenizer),
        limits=TurnLimits(turns=2, result_tokens=20),
    )  # fmt: skip
    source = EpisodeSource(
        players=turns, stream=PromptStream([prompt(task) for task in range(TASKS)], seed=1),
        rewarder=Rewarder([NamedReward("of its text", lambda completions: [share(str(one)) for one in completions])]),
        num_generations=SIZE, seed=0,
    )  # fmt: skip
    return played(source)


class Guess:
    """A game that is over after one turn, scored by what was said in it; it raises at some of that."""

    failing = False
    falls = True

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        self.task = seed
        return f"{seed}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.said = action
        if self.falls and Guess.failing and lost(action):
            raise OSError("the game fell over")
        return "", share(action), True, False, {}


class Judged(Guess):
    falls = False


def judge(completions: Sequence[Any], environments: Sequence[Any]) -> list[float | Excluded]:
    return [
        Excluded("judge") if Guess.failing and lost(one.said) else share(one.said, "judged") for one in environments
    ]


def without_an_environment(*, failing: bool, judged: bool = False) -> tuple[list[Group], dict[str, float]]:
    """Where it is judged, the environment stands, and the function beside it cannot judge some episodes."""
    Guess.failing = failing
    engine = FakeEngine(lambda request, index: [*ids(str(number(request, index))), EOS_ID])
    rewarder = Rewarder([NamedReward("judge", judge)]) if judged else None
    made = players(Judged if judged else Guess, engine, max_tasks=TASKS, rewarder=rewarder)
    stream = PromptStream(made.split()[0], seed=1)
    options: dict[str, Any] = {"max_concurrent": 16, "refill_rounds": 0, "rollout_s": 60.0, "seed": 3}
    return played(EpisodeSource(stream=stream, players=made, num_generations=SIZE, **options))


class Falling:
    """A sandbox that is lost in some programs; of the tests of others, some pass."""

    failing = True

    def test(self, tests: FunctionTests) -> list[Verdict]:
        if self.failing and lost(tests.code):
            raise SandboxError("it fell")
        return [Verdict(share(tests.code, test) < 0.5) for test in tests.tests]


class Standing(Falling):
    failing = False


# What the model says decides whether the program ends well.
AGENT = """
import hashlib, json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
sys.exit(sys.argv[2] == "failing" and hashlib.sha256(said.encode()).digest()[0] < 40)
"""


def without_an_agent(*, failing: bool) -> tuple[list[Group], dict[str, float]]:
    """Programs that ask the model, and of which some crash then."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    decode = text_decoder(tokenizer)
    engine = FakeEngine(lambda request, index: [*ids(str(number(request, index))), EOS_ID])
    recorder = Recorder(tokenizer, parse=hermes, template_kwargs={}, max_context=400)
    command = (sys.executable, "-IS", "-c", AGENT, "{prompt}", "failing" if failing else "whole")
    proxy = AgentProxy(CallBatcher(engine, at_once=1), recorder)
    rollouts = AgentPlayers(
        agent=AgentCommand(command, None, {}, 60.0), proxy=proxy, params=SamplingParams(max_tokens=20), decode=decode,
        max_concurrent=8, score_nonzero=False,
    )  # fmt: skip
    prompts = [Prompt(str(task), (task, 2), f"say {task}") for task in range(AGENT_TASKS)]
    source = EpisodeSource(
        players=rollouts, stream=PromptStream(prompts, seed=1), max_concurrent=8,
        rewarder=Rewarder([NamedReward("of its text", lambda completions: [share(str(one)) for one in completions])]),
        num_generations=SIZE, seed=0,
    )  # fmt: skip
    return played(source, AGENT_TASKS)


COLUMNS = {"test_cases": ["assert f() == 1", "assert f() == 2", "assert f() == 3"]}
FUNCTIONS = [NamedReward("format", soft_format_reward_func), NamedReward("execution", code_execution_reward_func)]


def use_sandbox(patch: pytest.MonkeyPatch, made: type[Falling]) -> None:
    for module in (execution.__name__, "lachesis.plugins.sandbox.rewards.grpo_code.rewards"):
        patch.setattr(f"{module}.shared_sandbox", made)


def without_a_sandbox(
    source: type[LocalSource], *, failing: bool, **options: Any
) -> tuple[list[Group], dict[str, float]]:
    """The model writes programs, whose format a second function judges too; the sandbox is lost in some."""

    def turn(request: GenerationRequest, index: int) -> list[int]:
        return [*ids(written(f"def f():\n    return {number(request, index)}\n")), EOS_ID]

    prompts = [Prompt(str(task), (task, 2), "f?", columns=COLUMNS) for task in range(TASKS)]
    made = source(
        stream=PromptStream(prompts, seed=1), engine=FakeEngine(turn), rewarder=Rewarder(FUNCTIONS, [0.5, 1.0]),
        decode=text_decoder(TOKENIZER), params=SamplingParams(max_tokens=400), num_generations=SIZE, seed=0, **options,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        use_sandbox(patch, Falling if failing else Standing)
        try:
            return played(made)
        finally:
            made.rewarder.close()


def played(source: Any, tasks: int = TASKS) -> tuple[list[Group], dict[str, float]]:
    try:
        groups = source.next_groups(tasks, deadline=Deadline("a test", 60.0))
        return groups, source.counters()
    finally:
        source.close()


@pytest.mark.parametrize(
    ("play", "cause"),
    [
        pytest.param(without_a_tool_server, "tool_server", id="local tools"),
        pytest.param(without_an_environment, "environment", id="steps"),
        pytest.param(partial(without_an_environment, judged=True), "judge", id="steps, judged"),
        pytest.param(without_an_agent, "crash", id="agents"),
        pytest.param(partial(without_a_sandbox, LocalSource), "sandbox", id="code"),
        pytest.param(partial(without_a_sandbox, StreamingSource, min_groups=1), "sandbox", id="code, one by one"),
    ],
)
def test_what_is_lost_on_the_way_changes_nothing_about_the_others(play: Any, cause: str):
    found, counts = play(failing=True)
    whole, _ = play(failing=False)
    assert {len(group.samples) for group in whole} == {SIZE}
    missing = len(whole) * SIZE - sum(len(group.samples) for group in found)
    assert 0.08 < missing / (len(whole) * SIZE) < 0.25
    assert (counts["rollout_failures"], counts[f"rollout_failures/{cause}"]) == (missing, missing)
    survivors = [
        Group(group.prompt, tuple(one for one in group.samples if one in left.samples))
        for group, left in zip(whole, found, strict=True)
    ]
    assert found == survivors
    assert advantages(found) == advantages(survivors)
    assert all(len(set(of_group)) > 1 for of_group in advantages(found)), "there is something to learn"


def test_a_program_whose_sandbox_is_lost_is_outside_of_its_groups_baseline(monkeypatch: pytest.MonkeyPatch):
    use_sandbox(monkeypatch, Falling)
    groups = [
        Group(
            Prompt(str(task), (1, 2), "f?", columns=COLUMNS),
            tuple(program(f"def f():\n    return {task * SIZE + place}\n") for place in range(SIZE)),
        )
        for task in range(TASKS)
    ]
    found, missing = scored(groups)
    left_out = [one for group in found for one in group.samples if one.reward is None]
    assert 0.08 < len(left_out) / (TASKS * SIZE) < 0.25
    assert missing == len(left_out)
    never = [
        Group(group.prompt, tuple(one for one, seen in zip(group.samples, judged.samples, strict=True)
                                  if seen.reward is not None))
        for group, judged in zip(groups, found, strict=True)
    ]  # fmt: skip
    without, none = scored(never)
    assert none == 0
    with_them = assign_advantages(found)
    assert [[one.advantage for one in group.samples if one.reward is not None] for group in with_them] == advantages(
        without
    )
    assert {one.advantage for group in with_them for one in group.samples if one.reward is None} == {0.0}


def written(code: str) -> str:
    return f"```python\n{code}```"


def program(code: str) -> Sample:
    text = written(code)
    return Sample((1, 2), tuple(TOKENIZER(text)["input_ids"]), (-0.5,), "stop", VersionSpan(0, 0), text=text)


def scored(groups: Sequence[Group]) -> tuple[list[Group], float]:
    """With a second function, which judges those too that the first could not. And how many it could not."""
    rewarder = Rewarder(FUNCTIONS, [0.5, 1.0])
    try:
        done = rewarder.score(groups)
    finally:
        rewarder.close()
    return list(done.groups), done.metrics.get("sandbox_failures", 0.0)


def advantages(groups: Sequence[Group]) -> list[list[float | None]]:
    return [[one.advantage for one in group.samples] for group in assign_advantages(groups)]
