"""Several uses of one batch: what the ratio compares with, and that a batch outlives a restart."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from lachesis.common.errors import CheckpointError, TrainingError
from lachesis.common.types import Group
from lachesis.metrics.values import reduce_metrics
from lachesis.pipeline.feed import Feed
from lachesis.train.batch import Batch, OldLogprobs, pack
from lachesis.train.iterations import OldLogprobStore, RepeatedFeed, undivided
from lachesis.train.policy import Policy
from tests.losses import loss_options
from tests.tiny import tiny_model
from tests.unit.train.drifted import drifted_groups, tokens_of, used
from tests.unit.train.test_policy import make_policy

OPTIONS = loss_options(loss_type="dapo", sampler_correction="token_truncate")


def groups() -> list[Group]:
    return drifted_groups(tiny_model().double())


def move(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)


def current(policy: Policy, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([policy._scores(micro).logprobs for micro in batch.micro_batches])


def mean_ratio(policy: Policy, batch: Batch) -> float:
    metrics = reduce_metrics(policy.accumulate(batch))
    policy.optimizer.zero_grad()
    return metrics["mean_ratio"]


class TestOldLogprobs:
    def test_the_samplers_are_kept_where_known_and_the_first_uses_where_not(self):
        policy, batch = make_policy(options=OPTIONS), pack(groups(), max_tokens=30)
        sampled, first = tokens_of(batch, "sampling_logprobs"), current(policy, batch)
        assert sampled.isnan().any()
        old = torch.where(sampled.isnan(), first, sampled.double())
        assert mean_ratio(policy, used(batch, 0, of=2)) == pytest.approx(float((first - old).exp().mean()), rel=1e-5)
        move(policy)
        moved = current(policy, batch)
        expected = float((moved - old).exp().mean())
        assert mean_ratio(policy, used(batch, 1, of=2)) == pytest.approx(expected, rel=1e-5)
        own = float((moved - torch.where(sampled.isnan(), moved, sampled.double())).exp().mean())
        assert expected != pytest.approx(own, rel=1e-5), "an unknown token is measured from its first use on"

    def test_the_trainers_are_those_of_the_first_use(self):
        policy, batch = make_policy(options=OPTIONS), pack(groups(), max_tokens=30, old_logprobs="trainer")
        assert tokens_of(batch, "old_logprobs").isnan().all()
        first = current(policy, batch)
        assert mean_ratio(policy, used(batch, 0, of=3)) == pytest.approx(1.0, abs=1e-7)
        for iteration in (1, 2):
            move(policy)
            expected = float((current(policy, batch) - first).exp().mean())
            assert mean_ratio(policy, used(batch, iteration, of=3)) == pytest.approx(expected, rel=1e-5)
            assert abs(expected - 1) > 1e-3

    def test_the_sampler_is_corrected_for_the_same_in_all_uses(self):
        policy, batch = make_policy(options=OPTIONS), pack(groups(), max_tokens=30, old_logprobs="trainer")
        first = reduce_metrics(policy.accumulate(used(batch, 0, of=2)))["sampling_ratio"]
        drift = (current(policy, batch) - tokens_of(batch, "sampling_logprobs")).nan_to_num(0.0)
        assert first == pytest.approx(float(drift.exp().clamp(max=3).mean()), rel=1e-5)
        move(policy)
        assert reduce_metrics(policy.accumulate(used(batch, 1, of=2)))["sampling_ratio"] == first

    def test_replayed_groups_have_a_choice_of_their_own(self):
        fresh, *replayed = groups()
        mixed = [fresh, *(replace(group, replaces=group) for group in replayed)]
        count = sum(sum(sample.loss_mask()) for group in replayed for sample in group.samples)
        batch = pack(mixed, max_tokens=1 << 20, replayed_old_logprobs="trainer")
        sampled, old = tokens_of(batch, "sampling_logprobs"), tokens_of(batch, "old_logprobs")
        left_to_the_policy = old.isnan()
        assert int(left_to_the_policy.sum()) == count + 1, "and the fresh group's unknown one"
        assert torch.equal(old[~left_to_the_policy], sampled[~left_to_the_policy])

    def test_recomputing_fixes_the_trainers_as_of_now(self):
        policy, batch = make_policy(options=OPTIONS), pack(groups(), max_tokens=30, old_logprobs="trainer")
        now = current(policy, batch)
        fixed = policy.recompute_logprobs(batch)
        torch.testing.assert_close(tokens_of(fixed, "old_logprobs"), now)
        assert torch.equal(
            tokens_of(fixed, "sampling_logprobs").nan_to_num(9), tokens_of(batch, "sampling_logprobs").nan_to_num(9)
        )
        move(policy)
        expected = float((current(policy, batch) - now).exp().mean())
        assert mean_ratio(policy, fixed) == pytest.approx(expected, rel=1e-5)

    def test_recomputing_leaves_the_samplers(self):
        policy, batch = make_policy(options=OPTIONS), pack(groups(), max_tokens=30)
        known = ~tokens_of(batch, "sampling_logprobs").isnan()
        old = tokens_of(policy.recompute_logprobs(batch), "old_logprobs")
        assert torch.equal(old[known].float(), tokens_of(batch, "sampling_logprobs")[known])
        assert not old.isnan().any()

    def test_a_second_use_needs_the_first(self):
        policy, batch = make_policy(options=OPTIONS), pack(groups(), max_tokens=30)
        with pytest.raises(TrainingError, match=r"iteration 2 of a batch of .* one after the other"):
            policy.accumulate(used(batch, 1, of=2))
        policy.accumulate(used(batch, 0, of=2))
        other = replace(batch, micro_batches=tuple(reversed(batch.micro_batches)))
        with pytest.raises(TrainingError, match="loss tokens, but had"):
            policy.accumulate(used(other, 1, of=2))

    def test_a_batch_that_is_used_once_leaves_nothing_behind(self):
        policy = make_policy(options=OPTIONS)
        policy.accumulate(pack(groups(), max_tokens=30))
        assert policy.state_dict()["old_logprobs"] == []

    def test_they_go_on_exactly_after_a_restart(self):
        batch = pack(groups(), max_tokens=30, old_logprobs="trainer")
        straight, resumed = make_policy(options=OPTIONS), make_policy(options=OPTIONS)
        straight.accumulate(used(batch, 0, of=2))
        resumed.load_state_dict(straight.state_dict())
        for policy in (straight, resumed):
            move(policy)
        assert mean_ratio(resumed, used(batch, 1, of=2)) == mean_ratio(straight, used(batch, 1, of=2)) != 1.0

    def test_an_unknown_token_takes_the_policys(self):
        (micro,) = pack(groups(), max_tokens=1 << 20).micro_batches
        store, now = OldLogprobStore(), torch.zeros(micro.row.numel())
        batch = Batch(groups=(), micro_batches=(micro,), num_sequences=1, num_tokens=1)
        store.begin(batch, num_passes=1)
        old = store.take(batch, 0, micro, current=now)
        assert (old == 0).sum() == micro.sampling_logprobs.isnan().sum() > 0


class CountedFeed(Feed[Batch]):
    """Numbers its batches; its state is how many there were."""

    def __init__(self) -> None:
        self.made = 0
        self.calls: list[str] = []

    def next(self) -> Batch:
        self.made += 1
        self.calls.append(f"next {self.made}")
        these = drifted_groups(tiny_model().double(), groups=1, seed=self.made)
        return pack(these, max_tokens=64)

    def advance(self, step: int) -> None:
        self.calls.append(f"advance {step}")

    def counters(self) -> dict[str, float]:
        return {"batches": float(self.made)}

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = state["made"]

    def saved(self) -> None:
        self.calls.append("saved")

    def complete(self) -> None:
        self.calls.append("complete")

    def close(self) -> None:
        self.calls.append("close")


def repeated(inner: CountedFeed, uses: int) -> RepeatedFeed:
    return RepeatedFeed(inner, num_iterations=uses, pack=lambda groups: pack(groups, max_tokens=64))


def run(feed: RepeatedFeed, steps: range) -> list[tuple[int, list[float]]]:
    seen = []
    for step in steps:
        batch = feed.next()
        assert batch.num_iterations == 3
        seen.append((batch.iteration, [round(x, 6) for x in tokens_of(batch, "sampling_logprobs").tolist()]))
        feed.advance(step)
    return seen


class TestRepeatedFeed:
    def test_each_batch_is_used_n_times_and_then_freed(self):
        inner = CountedFeed()
        feed = repeated(inner, 3)
        seen = run(feed, range(1, 7))
        assert [iteration for iteration, _ in seen] == [0, 1, 2, 0, 1, 2]
        assert str(seen[0][1]) == str(seen[1][1]) == str(seen[2][1]) != str(seen[3][1])
        assert inner.calls == ["next 1", "advance 3", "next 2", "advance 6"]
        assert feed.counters() == {"batches": 2.0}
        feed.saved()
        feed.complete()
        feed.close()
        assert inner.calls[-3:] == ["saved", "complete", "close"]

    @pytest.mark.parametrize("stopped", [1, 2, 3, 4, 5])
    def test_a_run_goes_on_with_the_next_use_after_a_restart(self, stopped: int):
        expected = run(repeated(CountedFeed(), 3), range(1, 8))
        first = repeated(CountedFeed(), 3)
        seen = run(first, range(1, stopped + 1))
        saved = json.loads(json.dumps(first.state_dict()))
        inner = CountedFeed()
        second = repeated(inner, 3)
        second.load_state_dict(saved)
        seen += run(second, range(stopped + 1, 8))
        assert str(seen) == str(expected)
        assert inner.calls[0] == ("next 2" if stopped == 3 else f"advance {3 * math.ceil(stopped / 3)}")

    def test_a_batch_that_was_used_up_is_not_resumed(self):
        feed = repeated(CountedFeed(), 3)
        run(feed, range(1, 3))
        saved = feed.state_dict()
        with pytest.raises(CheckpointError, match="was used 2 times, but num_iterations is 2"):
            repeated(CountedFeed(), 2).load_state_dict(saved)

    def test_a_batch_has_to_be_used(self):
        with pytest.raises(ValueError, match="at least 1"):
            repeated(CountedFeed(), 0)


class GroupsFeed(CountedFeed):
    """Gives four groups at once, to be divided and packed."""

    def next(self) -> Batch:
        self.made += 1
        self.calls.append(f"next {self.made}")
        return undivided(drifted_groups(tiny_model().double(), groups=4, seed=self.made))


def divided(
    inner: CountedFeed, policy: Policy, *, parts: int = 2, uses: int = 1, seed: int = 0, old: OldLogprobs = "trainer"
) -> RepeatedFeed:
    return RepeatedFeed(
        inner,
        num_iterations=uses,
        pack=lambda groups: pack(groups, max_tokens=30, old_logprobs=old),
        steps_per_generation=parts,
        seed=seed,
        score=policy.recompute_logprobs,
    )


def steps(feed: RepeatedFeed, policy: Policy, numbers: range) -> list[tuple[list[str], float]]:
    """The prompts of each step, and its mean ratio; the policy moves after each."""
    seen = []
    for step in numbers:
        batch = feed.next()
        seen.append(([group.prompt.id for group in batch.groups], mean_ratio(policy, batch)))
        move(policy)
        feed.advance(step)
    return seen


@cache
def straight_steps(old: OldLogprobs) -> list[tuple[list[str], float]]:
    """Of a run that nothing stops."""
    policy = make_policy(options=OPTIONS)
    return steps(divided(GroupsFeed(), policy, uses=2, old=old), policy, range(1, 8))


class TestSeveralStepsOfOneGeneration:
    def test_each_group_is_in_one_of_them_in_an_order_of_the_seed(self):
        policy = make_policy(options=OPTIONS)
        orders = [
            [ids for ids, _ in steps(divided(GroupsFeed(), policy, seed=seed), policy, range(1, 5))]
            for seed in (0, 0, 1)
        ]
        assert orders[0] == orders[1] != orders[2]
        for order in orders:
            assert [len(ids) for ids in order] == [2] * 4
            assert sorted(order[0] + order[1]) == sorted(order[2] + order[3]) == ["0", "1", "2", "3"]
        assert orders[0][:2] != orders[0][2:], "each generation in an order of its own"

    def test_the_feed_hears_of_the_last_one(self):
        inner, policy = GroupsFeed(), make_policy(options=OPTIONS)
        steps(divided(inner, policy, parts=3, uses=2), policy, range(1, 8))
        assert inner.calls == ["next 1", "advance 6", "next 2"]

    def test_old_logprobs_are_from_before_the_first(self):
        policy = make_policy(options=OPTIONS)
        feed = divided(GroupsFeed(), policy, uses=2)
        batches = []
        for step in range(1, 5):
            batches.append(feed.next())
            if step == 1:
                before = [current(policy, batch) for batch in feed._parts]
                move(policy)
            feed.advance(step)
        for batch, expected in zip(batches, [*before, *before], strict=True):
            torch.testing.assert_close(tokens_of(batch, "old_logprobs").double(), expected)
        found = [mean_ratio(policy, batch) for batch in batches]
        assert found[:2] == found[2:] and all(abs(ratio - 1) > 1e-3 for ratio in found)

    def test_no_pass_is_spent_on_logprobs_that_the_sampler_has_given(self):
        scored: list[Batch] = []
        known = [
            replace(group, samples=tuple(replace(s, logprobs=(-0.5,) * len(s.completion_ids)) for s in group.samples))
            for group in groups()
        ]
        feed = RepeatedFeed(
            GroupsFeed(),
            num_iterations=1,
            pack=lambda _: pack(known, max_tokens=30),
            steps_per_generation=2,
            score=lambda batch: scored.append(batch) or batch,
        )
        feed.next()
        assert scored == []

    def test_ratios_are_clipped_from_the_second_step_on(self):
        """What GSPO, PPO and DAPO clip is what the steps before did: with one step there is nothing to clip."""
        gspo = loss_options(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
        clipped = []
        policy = make_policy(options=gspo)
        feed = divided(GroupsFeed(), policy, parts=4)
        for step in range(1, 5):
            metrics = reduce_metrics(policy.accumulate(feed.next()))
            clipped.append(metrics["clip_fraction_low"] + metrics["clip_fraction_high"])
            policy.step()
            move(policy)
            feed.advance(step)
        assert clipped[0] == 0 and min(clipped[1:]) > 0

    @pytest.mark.parametrize("old", ["sampler", "trainer"])
    @pytest.mark.parametrize("stopped", [1, 2, 3, 4, 5])
    def test_a_run_goes_on_exactly_with_the_next_one_after_a_restart(self, stopped: int, old: OldLogprobs):
        policy = make_policy(options=OPTIONS)
        first = divided(GroupsFeed(), policy, uses=2, old=old)
        seen = steps(first, policy, range(1, stopped + 1))
        second = divided(GroupsFeed(), policy, uses=2, old=old)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert seen + steps(second, policy, range(stopped + 1, 8)) == straight_steps(old)

    def test_one_step_takes_the_batch_as_it_is(self):
        inner, policy = CountedFeed(), make_policy(options=OPTIONS)
        whole = inner.next()
        inner.next = lambda: whole  # type: ignore[method-assign]
        batch = divided(inner, policy, parts=1).next()
        assert batch.micro_batches is whole.micro_batches and batch.groups is whole.groups

    def test_a_generation_of_few_groups_makes_few_steps(self):
        inner, policy = GroupsFeed(), make_policy(options=OPTIONS)
        found = steps(divided(inner, policy, parts=9), policy, range(1, 6))
        assert [len(ids) for ids, _ in found] == [1] * 5
        assert inner.calls[:2] == ["next 1", "advance 4"]


def test_nan_is_kept_through_json():
    feed = repeated(CountedFeed(), 3)
    feed.next()
    restored = repeated(CountedFeed(), 3)
    restored.load_state_dict(json.loads(json.dumps(feed.state_dict())))
    values = tokens_of(restored.next(), "sampling_logprobs").tolist()
    assert any(math.isnan(value) for value in values)
