"""Episodes token by token: what is masked, what ends them, and what is left of one that fails."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import replace
from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.plugins.environments.steps.scoring import EpisodeEnd, with_turn_advantages
from lachesis.rollouts.episodes import Played, RolloutFailed
from lachesis.rollouts.generation import SpecialTokens
from lachesis.rollouts.rewards.functions import Excluded
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from lachesis.train.batch import pack
from lachesis.train.losses.advantage import assign_advantages
from tests.fakes import FakeEngine
from tests.tiny import EOS_ID, tiny_tokenizer
from tests.unit.plugins.environments.steps.games import TOKENIZER, Count, Scripted, ids, play, players
from tests.waiting import until

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>{% endfor %}" + (
    "{% if add_generation_prompt %}a:{% endif %}"
)


def test_gymnasium_observations_are_masked_and_rewards_add_up():
    played = play(Count, "a", "bc", "end")
    (sample,) = played.samples
    assert sample.prompt_ids == tuple(ids("1?"))
    said = [*ids("a"), EOS_ID, *ids("ok"), *ids("bc"), EOS_ID, *ids("ok"), *ids("end"), EOS_ID]
    assert list(sample.completion_ids) == said
    assert sample.mask == (1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1)
    assert sample.rewards == (6.0,) and sample.finish_reason == "stop"
    assert played.metrics == {"turns": 3, "truncated": 0}
    until(lambda: Count.closed[-1:] == [1])  # on a thread that nobody waits for


def group_of(*rewards: tuple[float, ...], weight: float = 1.0) -> list[Played]:
    """Episodes of two tokens a turn, with one of the environment between turns."""
    found = []
    for of_turns in rewards:
        mask = (1, 1, *((0, 1, 1) * (len(of_turns) - 1)))
        one = Sample((1,), mask, (-1.0,) * len(mask), "stop", VersionSpan(0, 0), mask=mask, reward=sum(of_turns))
        turns = tuple((reward, 2) for reward in of_turns)
        found.append(Played((one,), state=EpisodeEnd(Prompt("0", (1,), ""), None, (), (), turns)))
    return with_turn_advantages(found, weight=weight)


def test_advantages_of_turns_are_those_of_mt_grpo():
    """Its A^T for each turn, by hand: the first turn's rewards are 1, 0, 1, and the second's 0.5, 0.5, 2."""
    found = group_of((1.0, 0.5), (0.0, 0.5), (1.0, 2.0), weight=0.5)
    firsts, seconds = [1.0, 0.0, 1.0], [0.5, 0.5, 2.0]
    for number, one in enumerate(found):
        first = 0.5 * (firsts[number] - 2 / 3) / (statistics.stdev(firsts) + 1e-4)
        second = 0.5 * (seconds[number] - 1.0) / (statistics.stdev(seconds) + 1e-4)
        assert one.samples[0].token_advantages == pytest.approx((first, first, 0.0, second, second), abs=1e-12)
        assert one.samples[0].advantage is None


def test_a_turn_that_one_episode_has_alone_has_nothing_to_be_compared_with():
    long, short = group_of((1.0, 7.0), (0.0,))
    assert long.samples[0].token_advantages[2:] == (0.0, 0.0, 0.0) and len(short.samples[0].token_advantages) == 2
    alike = group_of((0.1, 0.3), (0.1, 0.3), (0.1, 0.3))
    assert all(value == 0 for one in alike for value in one.samples[0].token_advantages)


def test_an_episode_that_is_played_has_the_advantages_of_its_turns():
    async def whole() -> list[Any]:
        made = players(Count, Scripted("a", "end"), turn_advantage=1.0)
        try:
            first = await made.play(made.split()[0][0], seed=7)
            end = replace(first.state, turns=tuple((reward + 2, tokens) for reward, tokens in first.state.turns))
            return await made.finish([first, replace(first, state=end)])
        finally:
            await made.stop()

    low, high = asyncio.run(whole())
    expected = 1 / (statistics.stdev([0, 2]) + 1e-4)
    mask = low.samples[0].loss_mask()
    assert low.samples[0].token_advantages == pytest.approx([-expected * one for one in mask])
    assert high.samples[0].token_advantages == pytest.approx([expected * one for one in mask])


def test_with_turns_apart_an_episode_has_the_outcome_and_turns_have_what_came_before():
    """A = A^O + A^T before the last turn and A^O from there on, as in MT-GRPO, by hand."""

    async def whole() -> tuple[float | None, list[Any]]:
        made = players(Count, Scripted("a", "end"), turn_advantage=1.0, turns_apart=True)
        try:
            first = await made.play(made.split()[0][0], seed=7)
            end = replace(first.state, turns=tuple((reward + 3, tokens) for reward, tokens in first.state.turns))
            return first.samples[0].reward, await made.finish([first, replace(first, state=end)])
        finally:
            await made.stop()

    outcome, (low, high) = asyncio.run(whole())
    assert outcome == 3.0, "of the last step"
    assert low.state.turns == ((1.0, 2),) and high.state.turns == ((4.0, 2),)
    turn = 1.5 / (statistics.stdev([1, 4]) + 1e-4)
    mask = low.samples[0].loss_mask()
    assert sum(mask) > 2
    for one, sign in ((low, -1), (high, 1)):
        assert one.samples[0].token_advantages == pytest.approx((sign * turn, sign * turn, *[0.0] * (len(mask) - 2)))


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_what_is_trained_on_is_mt_grpo_s_advantage(weight: float):
    """Four episodes of a tool's turn and an answer, to the batch: A^O + weight * A^T before the result, A^O after it.

    In the words of MTGRPOEnvTrainer, of the paper's authors (github.com/SiliangZeng/Multi-Turn-RL-Agent, estimator
    "aae"), with its rewards of turns 0.3, 0.1 ... and of outcomes 1, 0 ...
    """
    tool, outcome = [0.3, 0.1, 0.2, 0.3], [1.0, 0.0, 1.0, 0.5]
    mask, samples = (1, 1, 0, 1, 1, 1), []
    for of_turn, of_outcome in zip(tool, outcome, strict=True):
        one = Sample((1,), (4, 5, 6, 7, 8, 9), (-1.0,) * 6, "stop", VersionSpan(0, 0), mask=mask)
        one = replace(one, reward=of_outcome, rewards=(of_outcome,))
        state = EpisodeEnd(Prompt("0", (1,), ""), None, (), (), ((of_turn, 2),))
        samples.append(Played((one,), state=state))
    played = with_turn_advantages(samples, weight=weight)
    groups = assign_advantages([Group(Prompt("0", (1,), ""), tuple(one.samples[0] for one in played))])
    (micro,) = pack(groups, max_tokens=100, share_prefixes=False).micro_batches

    def normalized(rewards: list[float]) -> list[float]:
        return [(one - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4) for one in rewards]

    expected = []
    for of_outcome, of_turn in zip(normalized(outcome), normalized(tool), strict=True):
        before = [of_outcome + weight * of_turn] * 2
        expected += [*before, *[of_outcome] * 3]
    assert micro.advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_an_episode_without_a_tool_s_turn_has_mt_grpo_s_combined_advantage():
    """MTGRPOEnvTrainer._assign_advantages: combined where there is no result, else A^O + A^T up to it.

    Its turn's rewards are 0 where no tool was called, and count in the means.
    """
    tool, outcome = [0.3, None, 0.1, 0.4], [1.0, 1.0, 0.0, 0.5]
    samples = []
    for of_turn, of_outcome in zip(tool, outcome, strict=True):
        one = Sample((1,), (4, 5, 6), (-1.0,) * 3, "stop", VersionSpan(0, 0), mask=(1, 0, 1))
        turns = () if of_turn is None else ((of_turn, 1),)
        state = EpisodeEnd(Prompt("0", (1,), ""), None, (), (), turns)
        samples.append(Played((replace(one, reward=of_outcome, rewards=(of_outcome,)),), state=state))
    played = with_turn_advantages(samples, weight=1.0, apart=True)
    groups = assign_advantages([Group(Prompt("0", (1,), ""), tuple(one.samples[0] for one in played))])
    (micro,) = pack(groups, max_tokens=100, share_prefixes=False).micro_batches

    def normalized(rewards: list[float]) -> list[float]:
        return [(one - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4) for one in rewards]

    turn = [reward or 0.0 for reward in tool]
    combined = normalized([a + b for a, b in zip(turn, outcome, strict=True)])
    expected = []
    for place, (of_outcome, of_turn) in enumerate(zip(normalized(outcome), normalized(turn), strict=True)):
        expected += [combined[place]] * 2 if tool[place] is None else [of_outcome + of_turn, of_outcome]
    assert micro.advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_turns_apart_need_a_weight():
    with pytest.raises(ConfigError, match=r"turn_advantage is 0 .*set source\.turn_advantage"):
        players(Count, Scripted("end"), turns_apart=True)


@pytest.mark.parametrize(("special_tokens", "text"), [("remove", "ab"), ("keep", "a[THINK]b")])
def test_special_tokens_are_kept_for_the_environment_and_for_rewards(special_tokens: SpecialTokens, text: str):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]"]})
    said = [*tokenizer.encode("a[THINK]b", add_special_tokens=False), EOS_ID]
    seen: list[Any] = []

    class Listens(Count):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            seen.append(action)
            return "", 1.0, True, False, {}

    def judge(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(one[-1]["content"] for one in completions)
        return [1.0] * len(completions)

    async def whole() -> Played:
        made = players(
            Listens, FakeEngine(lambda request, index: said), tokenizer=tokenizer, special_tokens=special_tokens,
            rewarder=Rewarder([NamedReward("judge", judge)], weights=[1.0]),
        )  # fmt: skip
        try:
            played = await made.play(made.split()[0][0], seed=7)
            await made.finish([played])
            return played
        finally:
            await made.stop()

    played = asyncio.run(whole())
    assert seen == [text, text] and played.samples[0].text == text


def test_a_rollout_ends_where_turns_or_tokens_do():
    played = play(Count, "a", "b", max_turns=2)
    assert played.metrics == {"turns": 2, "truncated": 1} and played.samples[0].finish_reason == "stop"
    played = play(Count, "abc", max_tokens=6)  # 4 tokens and 2 of the hint leave none
    assert played.metrics == {"turns": 1, "truncated": 1} and played.samples[0].finish_reason == "length"
    played = play(Count, "ab", "end", turn_tokens=1, max_turns=2)
    assert played.samples[0].rewards == (2.0,) and played.samples[0].finish_reason == "stop"
    with pytest.raises(RolloutFailed, match="leaves no room"):
        play(Count, "a", max_context=2)


def test_a_chat_template_renders_what_is_new_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", TEMPLATE)
    (sample,) = play(Count, "a", "end|").samples
    assert list(sample.prompt_ids) == [*ids("u:1?"), EOS_ID, *ids("a:")]
    between = [*ids("u:ok"), EOS_ID, *ids("a:")]
    assert list(sample.completion_ids) == [*ids("a"), EOS_ID, *between, *ids("end")]


def test_a_greedy_episode_that_a_function_cannot_judge_has_failed():
    async def whole() -> None:
        rewarder = Rewarder([NamedReward("judge", lambda completions: [Excluded("judge", "it fell")])])
        made = players(Count, Scripted("a", "end"), rewarder=rewarder)
        with pytest.raises(RolloutFailed, match="could not be judged: it fell") as failed:
            await made.play(made.split()[0][0], seed=1, greedy=True)
        assert failed.value.cause == "judge"
        await made.stop()

    asyncio.run(whole())


class Broken(Count):
    def step(self, action: str) -> Any:
        if action == "late":
            raise TimeoutError("too late")
        return {"number": 3.0, "tuple": ("ok", "much", False, False, {})}.get(action, ({"x": 1}, 0.0, False, False, {}))


@pytest.mark.parametrize(
    ("said", "message", "cause"),
    [
        ("late", "step raised TimeoutError: too late", "timeout"),
        ("number", "step did not return", "environment"),
        ("tuple", "a reward is 'much', not a number", "environment"),
        ("x", "an observation is a dict, neither a text nor messages", "environment"),
    ],
)
def test_what_an_environment_does_wrong_fails_its_rollout(said: str, message: str, cause: str):
    closed = len(Count.closed)
    with pytest.raises(RolloutFailed, match=message) as raised:
        play(Broken, said)
    assert raised.value.cause == cause
    until(lambda: len(Count.closed) > closed)
