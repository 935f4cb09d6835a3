from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lachesis.common.deadline import Deadline
from lachesis.common.errors import CheckpointError, DataError, DeadlineExceeded, EngineError, RewardError
from lachesis.common.types import Completion, GenerationRequest, Group, Prompt, SamplingParams
from lachesis.rollouts.base import Draw
from lachesis.rollouts.datasets import PassRates, PromptStream
from lachesis.rollouts.failures import FailureFile
from lachesis.rollouts.generation import nested_deadline, request_seed, text_decoder
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards.functions import Excluded
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from tests.fakes import FakeEngine, random_tokens
from tests.tiny import BOS_ID, EOS, EOS_ID, tiny_tokenizer

FOREVER = Deadline("test", None)
PARAMS = SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(i), token_ids=(i, i), text=f"p{i}", columns={"answer": i}) for i in range(count)]


def decode(token_ids: Sequence[Sequence[int]]) -> list[str]:
    return [" ".join(map(str, ids)) for ids in token_ids]


def length(completions: list[Any]) -> list[float]:
    return [float(len(completion[0]["content"].split())) for completion in completions]


def source(
    *,
    engine: FakeEngine | None = None,
    reward: Callable[..., Any] = length,
    on_error: Any = "drop_group",
    count: int = 7,
    seed: int = 0,
    params: SamplingParams = PARAMS,
    shuffle: bool = True,
) -> LocalSource:
    return LocalSource(
        stream=PromptStream(prompts(count), seed=seed, shuffle=shuffle),
        engine=engine or FakeEngine(),
        rewarder=Rewarder([NamedReward("f", reward)], on_error=on_error),
        decode=decode,
        params=params,
        num_generations=3,
        seed=seed,
    )


def ids(groups: list[Group]) -> list[int]:
    return [int(group.prompt.id) for group in groups]


class TestGroups:
    def test_they_carry_what_the_engine_said_and_their_rewards(self):
        engine = FakeEngine(logprob=-0.25, version=4)
        first, second = source(engine=engine).next_groups(2, deadline=FOREVER)
        (requests,) = engine.requests
        assert [request.n for request in requests] == [3, 3]
        assert [request.params for request in requests] == [PARAMS, PARAMS]
        assert requests[1].prompt_ids == second.prompt.token_ids
        for index, sample in enumerate(first.samples):
            expected = tuple(random_tokens(requests[0], index))
            assert sample.prompt_ids == first.prompt.token_ids
            assert sample.completion_ids == expected
            assert sample.logprobs == (-0.25,) * len(expected)
            assert sample.versions == (4, 4)
            assert sample.text == " ".join(map(str, expected))
            assert sample.rewards == (float(len(expected)),)
            assert sample.reward == len(expected)
            assert sample.mask is None
            assert sample.advantage is None
            assert sample.temperature == 0.7

    def test_greedy_samples_have_logprobs_of_temperature_1(self):
        greedy = dataclasses.replace(PARAMS, temperature=0.0)
        (group,) = source(params=greedy).next_groups(1, deadline=FOREVER)
        assert {sample.temperature for sample in group.samples} == {1.0}

    def test_epochs_follow_each_other(self):
        groups = source(count=3).next_groups(9, deadline=FOREVER)
        assert sorted(ids(groups)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]

    def test_every_request_has_a_seed_of_its_own(self):
        engine = FakeEngine()
        local = source(engine=engine)
        for _ in range(3):
            local.next_groups(4, deadline=FOREVER)
        seeds = [request.seed for call in engine.requests for request in call]
        assert len(set(seeds)) == 12
        assert seeds == [request_seed(0, number) for number in range(12)]

    def test_seeds_are_known_and_within_63_bits(self):
        assert request_seed(0, 0) == 3560153452049741418
        seeds = [request_seed(run, number) for run in range(20) for number in range(20)]
        assert len(set(seeds)) == 400
        assert all(0 <= seed < 2**63 for seed in seeds)

    def test_a_column_that_the_reward_needs_is_missed_before_anything_is_generated(self):
        engine = FakeEngine()
        with pytest.raises(RewardError, match="needs 'solution'"):
            source(engine=engine, reward=lambda completions, solution: [])
        assert engine.requests == []


class TestCounters:
    def test_they_count_since_the_last_call(self):
        local = source(reward=lambda completions, answer: [math.nan if a == 2 else 1.0 for a in answer])
        groups = local.next_groups(7, deadline=FOREVER)
        counts = local.counters()
        assert (counts["dropped_groups"], counts["reward_errors"]) == (1, 1)
        kept = sum(len(sample.completion_ids) for group in groups for sample in group.samples)
        assert counts["tokens_generated"] > kept
        assert counts["generation_time"] > 0
        assert counts["reward_time"] > 0
        assert set(local.counters().values()) == {0.0}


class TestFailingRewards:
    def test_dropped_groups_are_missing(self):
        local = source(reward=lambda completions, answer: [math.nan if a == 2 else 1.0 for a in answer])
        assert sorted(ids(local.next_groups(7, deadline=FOREVER))) == [0, 1, 3, 4, 5, 6]

    def test_where_all_are_dropped_the_next_prompts_are_taken(self):
        def not_before_4(completions, answer):
            return [math.nan if a < 4 else 1.0 for a in answer]

        local = source(reward=not_before_4, shuffle=False)
        assert ids(local.next_groups(2, deadline=FOREVER)) == [4, 5]
        assert local.counters()["dropped_groups"] == 4

    def test_but_not_without_end(self):
        engine = FakeEngine()
        local = source(engine=engine, reward=lambda completions: [math.nan] * len(completions))
        with pytest.raises(RewardError, match=r"rewards of 20 groups in a row failed; the last: .*returned nan"):
            local.next_groups(2, deadline=FOREVER)
        assert len(engine.requests) == 10

    def test_the_policy_fail_raises(self):
        local = source(reward=lambda completions: [math.nan] * len(completions), on_error="fail")
        with pytest.raises(RewardError, match="returned nan"):
            local.next_groups(2, deadline=FOREVER)


class TestSamplesThatCannotBeJudged:
    @pytest.fixture
    def local(self) -> LocalSource:
        """Of prompt 1 the first sample cannot be judged, of prompt 2 all but the last."""

        def judge(completions, answer, log_extra):
            log_extra("place", [place % 3 for place in range(len(answer))])
            lost = [(a, place % 3) in {(1, 0), (2, 0), (2, 1)} for place, a in enumerate(answer)]
            return [Excluded("judge lost", "it fell") if one else float(n) for n, one in enumerate(lost)]

        return source(reward=judge, shuffle=False)

    def test_they_leave_their_groups_and_are_counted_by_their_causes(self, local: LocalSource, tmp_path: Path):
        with FailureFile(tmp_path / "failures.jsonl"):
            first, second = local.next_groups(2, deadline=FOREVER)
        assert [len(group.samples) for group in (first, second)] == [3, 2]
        assert second.rewards == (4.0, 5.0) and second.logged == {"place": [1, 2]}
        counts = local.counters()
        assert (counts["rollout_failures"], counts["rollout_failures/judge_lost"], counts["dropped_groups"]) == (
            1,
            1,
            0,
        )
        assert "rollout_failures" not in local.counters()
        (line,) = map(json.loads, (tmp_path / "failures.jsonl").read_text().splitlines())
        assert (line["cause"], line["prompt"]) == ("judge_lost", "1")
        assert line["message"] == "sample 1 of 3 of prompt '1' could not be judged: it fell"

    def test_a_group_of_one_gives_way_to_the_next(self, local: LocalSource):
        assert ids(local.next_groups(4, deadline=FOREVER)) == [0, 1, 3]
        counts = local.counters()
        assert (counts["rollout_failures"], counts["dropped_groups"]) == (3, 1)
        told: list[Any] = []
        local.roll_out([Draw(prompts(3)[2], 0)], deadline=FOREVER, done=lambda place, outcome: told.append(outcome))
        assert isinstance(told[0], RewardError) and "all but 1 rollouts of prompt '2' failed" in told[0].message


class TestResume:
    def test_it_is_exact(self):
        straight, stopped = source(seed=5), source(seed=5)
        for local in (straight, stopped):
            local.next_groups(4, deadline=FOREVER)
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed = source(seed=5)
        resumed.load_state_dict(state)
        for _ in range(4):
            assert resumed.next_groups(4, deadline=FOREVER) == straight.next_groups(4, deadline=FOREVER)

    def test_another_dataset_is_refused(self):
        with pytest.raises(CheckpointError, match="dataset"):
            source(count=8).load_state_dict(source(count=7).state_dict())

    @pytest.mark.parametrize("error", [DeadlineExceeded("slow"), KeyboardInterrupt()])
    def test_a_call_that_raises_changes_nothing(self, error):
        class Broken(FakeEngine):
            broken = False

            def generate(self, requests, *, deadline):
                if self.broken:
                    raise error
                return super().generate(requests, deadline=deadline)

        engine = Broken()
        local, undisturbed = source(engine=engine), source()
        engine.broken = True
        with pytest.raises(type(error)):
            local.next_groups(3, deadline=FOREVER)
        engine.broken = False
        for _ in range(3):
            assert local.next_groups(3, deadline=FOREVER) == undisturbed.next_groups(3, deadline=FOREVER)

    def test_a_failing_reward_changes_nothing_either(self):
        fail = [True]

        def sometimes(completions):
            return [math.nan if fail[0] else 1.0] * len(completions)

        local, undisturbed = source(reward=sometimes), source(reward=lambda completions: [1.0] * len(completions))
        with pytest.raises(RewardError):
            local.next_groups(3, deadline=FOREVER)
        fail[0] = False
        assert local.next_groups(5, deadline=FOREVER) == undisturbed.next_groups(5, deadline=FOREVER)

    def test_requeued_prompts_come_first_also_after_a_resume(self):
        local = source(shuffle=False)
        taken = [group.prompt for group in local.next_groups(4, deadline=FOREVER)]
        assert local.requeue(taken[1:3]) is True
        resumed = source(shuffle=False)
        resumed.load_state_dict(json.loads(json.dumps(local.state_dict())))
        for one in (local, resumed):
            assert ids(one.next_groups(4, deadline=FOREVER)) == [1, 2, 4, 5]

    def test_a_strange_prompt_is_not_requeued(self):
        with pytest.raises(DataError, match="'9'"):
            source().requeue([Prompt(id="9", token_ids=(1,), text="x")])


class TestEngineAnswers:
    def refuse(self, change: Callable[[list[list[Completion]]], Any], match: str) -> None:
        class Faulty(FakeEngine):
            def generate(self, requests: Sequence[GenerationRequest], *, deadline: Deadline) -> list[list[Completion]]:
                return change(super().generate(requests, deadline=deadline))

        with pytest.raises(EngineError, match=match):
            source(engine=Faulty()).next_groups(2, deadline=FOREVER)

    def test_a_missing_answer(self):
        self.refuse(lambda answers: answers[:1], "answered 1 of 2 requests")

    def test_a_missing_completion(self):
        self.refuse(
            lambda answers: [answers[0], answers[1][:2]], "gave 2 completions of prompt '.', but 3 were requested"
        )

    def test_a_missing_logprob(self):
        def cut(answers):
            last = answers[1][2]
            return [answers[0], [*answers[1][:2], dataclasses.replace(last, logprobs=last.logprobs[1:])]]

        self.refuse(cut, r"gave \d+ logprobs for \d+ tokens of a completion of prompt")

    def test_an_aborted_completion(self):
        def abort(answers):
            return [answers[0], [dataclasses.replace(one, finish_reason="abort") for one in answers[1]]]

        self.refuse(abort, "aborted a completion of prompt")


class TestDeadlines:
    def test_the_tighter_one_holds_and_names_its_setting(self):
        outer = Deadline("feed", 10.0, setting="deadlines.batch_s")
        assert nested_deadline("generation", outer, 5.0, "deadlines.generation_s").limit_s == 5.0
        assert nested_deadline("generation", outer, 5.0, "deadlines.generation_s").setting.endswith("tion_s")
        inner = nested_deadline("generation", outer, 50.0, "deadlines.generation_s")
        assert inner.limit_s is not None
        assert 9 < inner.limit_s <= 10
        assert inner.setting == "deadlines.batch_s"
        assert nested_deadline("generation", FOREVER, None, "x").limit_s is None

    def test_the_error_says_what_was_waited_for(self):
        with pytest.raises(DeadlineExceeded, match="generation of 2 prompts x 3 completions took longer"):
            source().next_groups(2, deadline=Deadline("feed", 0.0, setting="deadlines.batch_s"))


def test_texts_have_no_special_tokens_and_all_others_as_they_are():
    tokenizer = tiny_tokenizer()
    text = " 1 + 2 ,\n it 's"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_decoder(tokenizer)([[BOS_ID, *ids, EOS_ID], [EOS_ID], []]) == [text, "", ""]
    as_it_is = text_decoder(tokenizer, as_sampled=False)
    assert as_it_is([[*ids, EOS_ID], ids]) == [f"{text}{EOS}", text]


def test_a_tokenizer_that_decodes_in_a_way_of_its_own_is_asked_itself():
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *arguments: Any, **named: Any) -> str:
            return super()._decode(*arguments, **named).upper()

    tokenizer = Shouting(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    ids = tokenizer("it 's", add_special_tokens=False)["input_ids"]
    assert text_decoder(tokenizer)([ids]) == ["IT 'S"]


def test_spaces_are_taken_away_only_where_that_is_left_to_a_tokenizer_that_does():
    tokenizer = tiny_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer("it 's", add_special_tokens=False)["input_ids"]
    assert text_decoder(tokenizer)([ids]) == ["it 's"]
    assert text_decoder(tokenizer, as_sampled=False)([ids]) == [tokenizer.decode(ids)] == ["it's"]


def test_problems_solved_always_are_skipped_and_the_tokens_counted():
    rates = PassRates(seed=0, success_reward=0.0)  # which every completion reaches
    adapting = dataclasses.replace(source(), stream=PromptStream(prompts(50), seed=0, rates=rates))
    first = adapting.next_groups(50, deadline=FOREVER)
    assert adapting.counters()["curriculum_skipped"] == 0
    second = adapting.next_groups(5, deadline=FOREVER)
    counts = adapting.counters()
    tokens = sum(len(sample.completion_ids) for group in second for sample in group.samples)
    assert counts["curriculum_skipped"] > 5
    assert counts["curriculum_tokens_saved"] == pytest.approx(counts["curriculum_skipped"] * tokens / 5)
    assert set(rates.state_dict()) == {group.prompt.id for group in first}
