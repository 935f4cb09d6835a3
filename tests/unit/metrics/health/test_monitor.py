from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from lachesis.common.types import EvalResult, Group, StepRecord
from lachesis.config.schema import LachesisConfig, LoraAdapterConfig
from lachesis.metrics.health import rules
from lachesis.metrics.health.digests import digest
from lachesis.metrics.health.monitor import RULES, HealthMonitor, alarms, for_environments
from lachesis.metrics.health.types import Alarm, HealthLimits, Observation

MakeGroup = Callable[..., Group]

HEALTHY = {
    "loss": 0.01, "grad_norm": 0.4, "mean_ratio": 1.0, "mean_kl": 0.03, "clipped_fraction": 0.05, "entropy": 0.3,
    "reward": 0.5, "reward_std": 0.4, "rewards/exact/mean": 0.5, "rewards/exact/std": 0.4, "zero_std_fraction": 0.1,
    "completion_length/mean": 8.0, "completion_length/max": 16.0, "truncated_fraction": 0.02, "staleness": 0.0,
    "canary_ratio": 0.2, "logprob_diff_mean": 1e-5, "generation_time": 1.0, "train_time": 1.2, "step_time": 2.4,
    "reward_time": 0.1,
}  # fmt: skip


def see(step: int = 30, *, history: int = 0, groups: Any = (), evaluations: Any = (), **values: float) -> Observation:
    """Healthy values but for those given; ``history`` steps before had the same, and eight steps these groups."""
    changed = {**HEALTHY, **{name.replace("__", "/"): value for name, value in values.items()}}
    batches = (digest(groups),) * 8 if groups else ()
    history_of = (changed,) * history
    return Observation(step, changed, groups=groups, history=history_of, evaluations=evaluations, batches=batches)


def say(rule: str, seen: Observation) -> Alarm:
    found = alarms(seen)
    assert rule in found, f"{rule} is silent; {sorted(found)} are not"
    return found[rule]


def evaluated(step: int, accuracy: float) -> EvalResult:
    return EvalResult(step, accuracy, accuracy, 512, 3.0, 0.1)


def test_a_healthy_step_has_no_findings(make_group: MakeGroup) -> None:
    groups = [make_group(prompt=prompt) for prompt in ("1+1=", "2+2=", "3+3=")]
    assert alarms(see(groups=groups, history=50, evaluations=[evaluated(10, 0.4), evaluated(30, 0.5)])) == {}


@pytest.mark.parametrize(
    ("rule", "level", "words", "values"),
    [
        ("not_finite", "problem", "loss at step 30 is not a number", {"loss": math.nan}),
        ("not_finite", "problem", "grad_norm", {"grad_norm": math.inf}),
        ("not_finite", "warning", "that step was skipped", {"grad_norm": math.inf, "skipped_steps": 1.0}),
        ("ratio_off", "warning", "mean_ratio is 1.3", {"mean_ratio": 1.3}),
        ("ratio_off", "problem", "mean_ratio is 0.4", {"mean_ratio": 0.4}),
        ("nothing_clips", "problem", "set algorithm.epsilon", {"mean_kl": 0.2, "clipped_fraction": 0.0}),
        ("kl_high", "warning", "mean_kl is 0.2", {"mean_kl": 0.2}),
        ("kl_high", "problem", "set algorithm.beta", {"mean_kl": 0.6}),
        ("clipped_much", "warning", "40 % of the tokens", {"clipped_fraction": 0.4}),
        ("clipped_much", "problem", "the learning rate is too high", {"clipped_fraction": 0.51}),
        ("gradient_vanished", "problem", "nothing reaches the weights", {"grad_norm": 0.0}),
        ("samples_stale", "warning", "5 weight versions old", {"staleness": 5.0}),
        ("logprobs_differ", "problem", "at most 3", {"logprob_diff_mean": 0.9, "logprob_diff_max": 3.0}),
        ("canary_off", "problem", "although it has the trainer", {"canary_ratio": 1.4}),
        ("groups_dropped", "warning", "failed 2 times", {"reward_errors": 2.0, "dropped_groups": 1.0}),
        ("groups_dropped", "note", "3 groups were dropped", {"dropped_groups": 3.0}),
    ],
)
def test_one_step_is_enough(rule: str, level: str, words: str, values: dict[str, float]) -> None:
    alarm = say(rule, see(**values))
    assert alarm.level == level
    assert words in alarm.message


@pytest.mark.parametrize(
    ("rule", "level", "words", "values"),
    [
        ("reward_stays_low", "warning", "the mean reward is 0.1 after 30 steps", {"reward": 0.1}),
        ("entropy_off", "problem", "mode collapse", {"entropy": 0.004}),
        ("entropy_off", "warning", "close to random", {"entropy": 4.5}),
        ("entropy_off", "note", "sure of its answers", {"entropy": 0.004, "reward": 0.98}),
        ("zero_variance", "problem", "all groups have zero variance", {"zero_std_fraction": 1.0}),
        ("truncated_often", "warning", "60 % of the completions are cut off at 16 tokens", {"truncated_fraction": 0.6}),
        ("truncated_often", "note", "30 %", {"truncated_fraction": 0.3}),
        ("reward_function_constant", "warning", "exact gave 0 to every completion of the last 20 steps",
         {"rewards__exact__mean": 0.0, "rewards__exact__std": 0.0}),
        ("reward_function_constant", "note", "no longer teaches anything",
         {"rewards__exact__mean": 1.0, "rewards__exact__std": 0.0}),
        ("logprobs_differ", "warning", "0.08 nats", {"logprob_diff_mean": 0.08}),
    ],
)  # fmt: skip
def test_some_things_take_a_while_to_see(rule: str, level: str, words: str, values: dict[str, float]) -> None:
    assert rule not in alarms(see(**values))
    alarm = say(rule, see(history=29, **values))
    assert alarm.level == level
    assert words in alarm.message


def test_low_reward_that_rises_is_left_alone() -> None:
    history = tuple({"reward": 0.002 * step} for step in range(49))
    seen = Observation(50, {"reward": 0.1}, history=history)
    assert "reward_stays_low" not in alarms(seen)


def test_gradient_of_zero_is_right_where_no_group_has_spread() -> None:
    assert "gradient_vanished" not in alarms(see(grad_norm=0.0, zero_std_fraction=1.0))


@pytest.mark.parametrize("values", [{"entropy": 2.3}, {"entropy": 0.02}, {"grad_norm": 40.0}, {"grad_norm": 3.0}])
def test_what_a_run_always_had_is_no_verdict(values: dict[str, float]) -> None:
    """Ranges that the field documents are of its models: others begin with 2 nats, or have longer gradients."""
    assert alarms(see(history=49, **values)) == {}


@pytest.mark.parametrize(("norm", "level"), [(12.0, "warning"), (120.0, "problem"), (9.0, None)])
def test_the_gradient_is_measured_against_its_past(norm: float, level: str | None) -> None:
    alarm = alarms(replace(see(grad_norm=norm), history=(HEALTHY,) * 5)).get("gradient_large")
    assert (alarm.level if alarm else None) == level


@pytest.mark.parametrize(("rewards", "speaks"), [((0.3, 0.2), True), ((0.3, 0.4), False)])
def test_entropy_that_rises_is_bad_where_the_reward_does_not(rewards: tuple[float, float], speaks: bool) -> None:
    before, now = ({"entropy": entropy, "reward": reward} for entropy, reward in zip((1.0, 1.9), rewards, strict=True))
    assert ("entropy_off" in alarms(Observation(7, now, history=(before, before, before, now, now)))) is speaks


def test_random_text_is_told_where_no_entropy_was_measured(make_group: MakeGroup) -> None:
    """As in a step without any advantage: the logprobs of what was sampled say it."""
    unsure = replace(digest([make_group()])[0], nats=6.0)
    seen = replace(see(zero_std_fraction=1.0), batches=((unsure,), (unsure,)))
    assert say("entropy_off", seen).level == "problem"
    assert "entropy_off" not in alarms(replace(seen, batches=((unsure,), digest([make_group()]))))


def test_low_is_of_the_rewards_that_there_are(make_group: MakeGroup) -> None:
    """Rewards from -50 to 50 that average 10 are far from low, though below the start of most scales."""
    groups = [make_group((-50.0, 50.0), prompt=str(index)) for index in range(4)]
    assert "reward_stays_low" not in alarms(see(groups=groups, history=29, reward=10.0))
    assert "on a scale from -50 to 50" in say("reward_stays_low", see(groups=groups, history=29, reward=-45.0)).message


def test_exploding_loss_is_measured_against_its_past() -> None:
    history = tuple({"loss": loss} for loss in (0.01, -0.02, 0.03, 0.01, -0.01))
    assert "loss_explodes" in alarms(Observation(6, {"loss": 40.0}, history=history))
    assert "loss_explodes" not in alarms(Observation(6, {"loss": 0.5}, history=history))
    assert "loss_explodes" not in alarms(Observation(1, {"loss": 40.0}))


def test_falling_reward() -> None:
    rewards = [0.6] * 10 + [0.2] * 6
    history = tuple({"reward": reward} for reward in rewards)
    assert "fell from 0.6 to 0.2" in say("reward_fell", Observation(17, {"reward": 0.2}, history=history)).message


def test_falling_accuracy_is_told_from_collapse() -> None:
    hurt = say("accuracy_fell", see(40, evaluations=[evaluated(20, 0.59), evaluated(40, 0.46)]))
    assert hurt.level == "warning"
    collapse = say("accuracy_fell", see(60, evaluations=[evaluated(40, 0.59), evaluated(60, 0.07)]))
    assert collapse.level == "problem"
    assert "fell from 59 % (step 40) to 7 %: the policy collapsed; set algorithm.beta" in collapse.message
    few = [replace(result, problems=30) for result in (evaluated(20, 0.59), evaluated(40, 0.43))]
    assert "accuracy_fell" not in alarms(see(40, evaluations=few)), "5 of 30 problems are chance"
    old = see(61, evaluations=[evaluated(40, 0.59), evaluated(60, 0.07)])
    assert "accuracy_fell" not in alarms(old)


class TestCauseOfZeroVariance:
    def message(self, groups: list[Group]) -> tuple[str, str]:
        alarm = say("zero_variance", see(groups=groups, zero_std_fraction=1.0, truncated_fraction=1.0))
        return alarm.level, alarm.message

    def test_truncation(self, make_group: MakeGroup) -> None:
        long = [tuple(range(index, index + 16)) for index in range(2)]
        groups = [make_group((0.0, 0.0), prompt=f"{i}", completions=long, finish_reason="length") for i in range(32)]
        level, message = self.message(groups)
        assert level == "problem"
        assert message == (
            "all 96 groups have zero variance because every completion hit 16 tokens: "
            "raise sampling.max_completion_length"
        )

    def test_truncation_but_for_a_few(self, make_group: MakeGroup) -> None:
        long = [tuple(range(index, index + 16)) for index in range(4)]
        cut = {"completions": long, "finish_reason": "length"}
        groups = [make_group((0.0,) * 4, prompt=f"{i}", **cut) for i in range(31)]
        groups.append(make_group((0.0,) * 4, prompt="31", completions=long))
        assert "because 97 % of the completions hit 16 tokens: raise" in self.message(groups)[1]

    def test_empty(self, make_group: MakeGroup) -> None:
        groups = [make_group((0.0, 0.0), prompt=p, completions=[(1,), (1,)], texts=["", " "]) for p in "ab"]
        assert "every completion is empty" in self.message(groups)[1]
        assert say("empty_completions", see(groups=groups)).level == "problem"

    def test_identical(self, make_group: MakeGroup) -> None:
        groups = [make_group((0.0, 0.0), prompt=p, completions=[(ord(p),)] * 2) for p in "ab"]
        assert "identical: raise sampling.temperature" in self.message(groups)[1]

    def test_all_wrong(self, make_group: MakeGroup) -> None:
        level, message = self.message([make_group((0.0, 0.0), prompt=p) for p in "ab"])
        assert level == "problem" and "every completion got reward 0: call your reward functions" in message

    def test_all_right(self, make_group: MakeGroup) -> None:
        level, message = self.message([make_group((1.0, 1.0), prompt=p) for p in "ab"])
        assert level == "note" and "these problems are solved" in message

    def test_reward_of_the_prompt(self, make_group: MakeGroup) -> None:
        groups = [make_group((0.0, 0.0), prompt="a"), make_group((0.5, 0.5), prompt="b")]
        assert "depend on the prompt, not on the answer" in self.message(groups)[1]

    def test_most_groups(self, make_group: MakeGroup) -> None:
        groups = [make_group((1.0, 1.0), prompt=str(i)) for i in range(9)] + [make_group((0.0, 1.0), prompt="x")]
        alarm = say("zero_variance", see(groups=groups))
        assert alarm.level == "note"
        assert "72 of 80 groups have zero variance and teach nothing (90 % all right, 0 % all wrong)" in alarm.message

    def test_a_few_groups_are_equal_by_chance(self, make_group: MakeGroup) -> None:
        groups = [make_group((0.0, 0.0), prompt=p) for p in "abcd"]
        assert "zero_variance" not in alarms(replace(see(groups=groups), batches=(digest(groups),) * 7))

    def test_a_policy_that_has_become_sure_is_told_from_a_reward_that_does_not_read(
        self, make_group: MakeGroup
    ) -> None:
        sure = [make_group((float(index % 2),) * 2, prompt=f"{index}") for index in range(96)]
        began = [make_group((0.0, 1.0), prompt="a")]
        seen = replace(see(groups=sure), batches=(digest(began), digest(sure)))
        alarm = say("zero_variance", seen)
        assert alarm.level == "warning" and "gives the same answer" in alarm.message

    def test_the_best_reward_of_any_scale_is_a_solved_task(self, make_group: MakeGroup) -> None:
        solved = [make_group((0.0, 0.0), prompt=f"{index}") for index in range(96)]
        began = [make_group((-1.0, 0.0), prompt="a")]
        alarm = say("zero_variance", replace(see(groups=solved), batches=(digest(began), digest(solved))))
        assert alarm.level == "note" and "these problems are solved" in alarm.message

    def test_missing_rewards_are_no_spread_and_no_zero(self, make_group: MakeGroup) -> None:
        groups = [make_group((None, None), prompt=p) for p in "ab"]
        assert "zero_variance" not in alarms(see(groups=groups))


def test_one_answer_to_everything(make_group: MakeGroup) -> None:
    groups = [make_group(prompt=p, completions=[(5, 5), (5, 5)], texts=["7", "7"]) for p in "abcdefghijkl"]
    said = say("one_text_for_all", see(groups=groups)).message
    assert "every completion of 12 prompts is the same text ('7')" in said
    assert "one_text_for_all" not in alarms(see(groups=groups[:1]))


def test_without_a_fresh_sample_trainer_and_engine_are_not_compared() -> None:
    stale = {name: value for name, value in HEALTHY.items() if not name.startswith("logprob_diff")}
    assert alarms(Observation(30, stale | {"staleness": 2.0}, history=({"logprob_diff_mean": 0.9},) * 5)) == {}


def test_one_step_of_few_tokens_above_the_limit_is_rounding() -> None:
    """As seen with SmolLM2 in bfloat16 and 192 tokens a step: 0.0527 nats in one of twelve steps."""
    history = ({"logprob_diff_mean": 0.03}, {"logprob_diff_mean": 0.04})
    assert alarms(Observation(3, {"logprob_diff_mean": 0.053}, history=history)) == {}


@pytest.mark.parametrize(
    ("limits", "values"),
    [
        ({"clipped_fraction": None}, {"clipped_fraction": 0.81}),  # GSPO's bounds of 3e-4
        ({"clipped_fraction": None}, {"clipped_fraction": 0.9, "grad_norm": 0.0}),  # all that have an advantage
        ({"ratio_of_tokens": False}, {"mean_ratio": 1.6}),  # RLOO's products of 200 ratios
        ({"clips": False}, {"clipped_fraction": 0.0, "mean_kl": 0.2}),  # CISPO caps a weight
        ({"unscaled": True}, {"loss": 40.0, "grad_norm": 60.0}),  # rewards of -50 and 50
    ],
)
def test_what_an_algorithm_does_by_design_is_no_finding(
    make_group: MakeGroup, limits: dict[str, Any], values: dict[str, float]
) -> None:
    groups = [make_group((-50.0, 50.0), prompt=str(index)) for index in range(3)]
    seen = replace(see(groups=groups, **values), history=(HEALTHY,) * 6)
    told = alarms(seen).keys() - {"kl_high"}
    assert told
    assert alarms(replace(seen, limits=HealthLimits(**limits))).keys() - {"kl_high"} == set()


def test_prompts_are_compared_with_each_other_where_groups_have_no_baseline(make_group: MakeGroup) -> None:
    groups = [make_group((float(index % 2),) * 2, prompt=str(index)) for index in range(12)]
    seen, without = see(groups=groups), HealthLimits(group_baseline=False)
    assert "zero_variance" in alarms(seen) and "zero_variance" not in alarms(replace(seen, limits=without))
    wrong = [make_group((0.0, 0.0), prompt=str(index)) for index in range(12)]
    assert "zero_variance" in alarms(replace(see(groups=wrong), limits=without)), "there is nothing to compare"


def test_a_task_with_one_answer_is_not_a_collapse(make_group: MakeGroup) -> None:
    """Of twelve rows in a row all have the answer "no" where nine in ten of all have it."""
    groups = [make_group(prompt=p, completions=[(5, 5), (5, 5)], texts=["no", "no"]) for p in "abcdefghijkl"]
    seen = see(groups=groups)
    same = tuple(tuple(replace(group, answer=1) for group in batch) for batch in seen.batches)
    assert "one_text_for_all" not in alarms(replace(seen, batches=same))


def test_a_punishment_that_none_has_earned_is_no_fault() -> None:
    values = {"rewards__overlong__mean": 0.0, "rewards__overlong__std": 0.0}
    assert say("reward_function_constant", see(history=29, **values)).level == "note"


def test_a_function_that_looks_for_the_tag_that_prompts_end_with_is_told_of_it(make_group: MakeGroup) -> None:
    values = {"rewards__form__mean": 0.0, "rewards__form__std": 0.0}
    opened = [make_group((0.0, 0.0), prompt=f"{p}[assistant]<think>\n") for p in "ab"]
    told = "a function that needs it must read prompt_texts"
    assert told in say("reward_function_constant", see(history=29, groups=opened, **values)).message
    assert told in say("zero_variance", see(groups=opened)).message
    closed = [make_group((0.0, 0.0), prompt=p) for p in "ab"]
    assert told not in say("reward_function_constant", see(history=29, groups=closed, **values)).message


def test_limits_can_be_set() -> None:
    values = {"staleness": 5.0, "logprob_diff_mean": 0.08, "canary_ratio": 1.5}
    limits = HealthLimits(staleness=8, logprob_diff=0.1, canary_ratio=2.0)
    assert alarms(Observation(1, values, limits=limits)) == {}


def test_every_rule_is_silent_without_values() -> None:
    assert alarms(Observation(100, {}, history=({},) * 50)) == {}
    assert len(RULES) == 25


def test_settings_named_in_messages_exist(make_group: MakeGroup) -> None:
    bad = dict.fromkeys(HEALTHY, 0.0) | {"clipped_fraction": 0.9, "mean_kl": 1.0, "grad_norm": 50.0, "entropy": 0.001}
    observations = [
        see(history=49, **{name.replace("/", "__"): value for name, value in bad.items()}),
        see(history=49, mean_ratio=3.0, staleness=9.0, logprob_diff_mean=1.0, truncated_fraction=0.9, loss=math.nan),
        see(history=49, groups=[make_group((0.0, 0.0), prompt=p, finish_reason="length") for p in "ab"]),
        see(history=49, groups=[make_group((0.0, 0.0), prompt=p, texts=["", ""]) for p in "ab"]),
        replace(see(history=49, grad_norm=50.0), history=(HEALTHY,) * 9),
        see(history=49, mean_kl=0.3, clipped_fraction=0.0),
        see(history=49, reward_errors=1.0, generation_time=100.0),
        see(history=49, train_time=100.0, evaluations=[evaluated(1, 0.9), evaluated(30, 0.1)]),
    ]
    named = {
        key
        for seen in observations
        for alarm in alarms(seen).values()
        for key in re.findall(r"(?<!--)\b[a-z]+\.[a-z_]+\b", alarm.message)  # not flags of environments
    }
    assert len(named) >= 10
    assert [key for key in sorted(named) if not _exists(key)] == []


def _exists(key: str) -> bool:
    section, field = key.split(".")
    if section == "adapter":
        return field in LoraAdapterConfig.model_fields
    annotation = LachesisConfig.model_fields[section].annotation
    assert annotation is not None and issubclass(annotation, BaseModel)
    return field in annotation.model_fields


class TestMonitor:
    def steps(self, monitor: HealthMonitor, kls: list[float]) -> list[int]:
        """The steps at which a finding came."""
        records = [StepRecord(step=step, values={"mean_kl": kl}) for step, kl in enumerate(kls, start=1)]
        return [record.step for record in records if monitor.examine(record)]

    def test_a_finding_is_repeated_after_20_steps(self) -> None:
        assert self.steps(HealthMonitor(), [0.2] * 45) == [1, 21, 41]

    def test_a_note_is_not_repeated_unless_it_was_worse_before(self) -> None:
        values = [{"truncated_fraction": 0.3, "dropped_groups": 1.0 + step} for step in range(70)]
        records = [StepRecord(step=step, values=value) for step, value in enumerate(values, start=1)]
        monitor = HealthMonitor()
        told = [(record.step, found.level) for record in records for found in monitor.examine(record)]
        assert [level for _, level in told] == ["note", "note"]  # one of each, though more groups are dropped

    def test_a_finding_that_gets_worse_is_repeated_at_once(self) -> None:
        assert self.steps(HealthMonitor(), [0.2, 0.25, 0.45, 0.45, 0.51, 0.6]) == [1, 3, 5]

    def test_history_reaches_the_rules(self) -> None:
        monitor = HealthMonitor()
        found = [monitor.examine(StepRecord(step=step, values={"reward": 0.05})) for step in range(1, 26)]
        assert [index + 1 for index, some in enumerate(found) if some] == [20]
        assert found[19][0].rule == "reward_stays_low"

    def test_evaluations_reach_the_rules(self) -> None:
        monitor = HealthMonitor()
        monitor.evaluation(evaluated(0, 0.59))
        (finding,) = monitor.examine(StepRecord(step=5, values={}, evaluation=evaluated(5, 0.07)))
        assert finding.rule == "accuracy_fell" and finding.level == "problem"

    def test_the_worst_comes_first(self) -> None:
        record = StepRecord(step=1, values={"dropped_groups": 1.0, "mean_kl": 0.2, "clipped_fraction": 0.9})
        assert [finding.level for finding in HealthMonitor().examine(record)] == ["problem", "warning", "note"]


class TestWhatHasPassed:
    def monitor(self) -> HealthMonitor:
        return HealthMonitor()

    def step(self, monitor: HealthMonitor, step: int, **values: float) -> Any:
        return monitor.examine(StepRecord(step=step, values=HEALTHY | values))

    def test_it_says_at_which_step_it_was_resolved(self) -> None:
        monitor = self.monitor()
        (told,) = self.step(monitor, 1, mean_kl=0.2)
        assert told.resolved is None
        assert self.step(monitor, 2, mean_kl=0.2) == ()
        quiet = [self.step(monitor, step) for step in range(3, 10)]
        assert [found.line for step in quiet for found in step] == [f"resolved at step 3: {told.message}"]
        assert quiet[4], "after five silent steps"

    def test_what_comes_again_is_told_again(self) -> None:
        monitor = self.monitor()
        self.step(monitor, 1, mean_kl=0.2)
        for step in range(2, 8):
            self.step(monitor, step)
        (again,) = self.step(monitor, 8, mean_kl=0.2)
        assert again.resolved is None and again.rule == "kl_high"


def test_stale_samples_name_the_interval_at_which_weights_travel() -> None:
    seen = replace(see(staleness=9.0), limits=HealthLimits(sync_every=5))
    message = say("samples_stale", seen).message
    assert "every 5 steps" in message and "--vllm-restart-interval" in message and "generation" not in message


def test_each_message_is_said_by_a_rule_of_its_name() -> None:
    source = inspect.getsource(rules)
    for name in rules.MESSAGES:
        rule, _, case = name.partition(".")
        assert rule in RULES or f'MESSAGES["{name}"]' in source
        assert f'"{name}"' in source or (f'f"{rule}.{{' in source and f'"{case}"' in source), f"no rule says {name}"


NOT_THERE = re.compile(r"\b(sampling|rewards|data|pipeline)\.\w+|batch\.prompts_per_step|model\.chat_template")


def test_remedies_apply_to_runs_with_environments() -> None:
    """Each message of a rule, as such a run says it."""
    left = {word.group() for text in rules.MESSAGES.values() for word in NOT_THERE.finditer(for_environments(text))}
    assert left <= {"pipeline.prefetch_depth"}, "which samples_stale says to others only"
    stale = replace(see(staleness=9.0), limits=HealthLimits(environments=True))
    assert not NOT_THERE.search(say("samples_stale", stale).message)
    flat = replace(see(history=3, zero_std_fraction=1.0), limits=HealthLimits(environments=True))
    assert "--env.temperature" in say("zero_variance", flat).message


class TestSources:
    """Rules that one of several sources breaks while the run as a whole looks well."""

    def see_two(self, make_group: MakeGroup, *, of_flat: dict[str, float]) -> Observation:
        """Half of the groups of each step are of the source ``flat``, in which all rewards are equal."""
        flat, fine = make_group(rewards=(0.0,) * 8), make_group(rewards=(0.0, 1.0) * 4)
        groups = [
            replace(group, prompt=replace(group.prompt, source=name))
            for name, group in (("flat", flat), ("fine", fine))
            for _ in range(8)
        ]
        return see(groups=groups, history=30, **of_flat)

    def test_its_name_is_told(self, make_group: MakeGroup):
        found = alarms(self.see_two(make_group, of_flat={"source/flat/truncated_fraction": 0.6}))
        assert found.keys() == {"zero_variance/flat", "truncated_often/flat"}
        assert found["zero_variance/flat"].message.startswith("source flat: all ")
        assert found["truncated_often/flat"].message.startswith("source flat: 60 % of the completions are cut off")

    def test_a_low_reward_names_its_functions(self, make_group: MakeGroup):
        own = {"source/flat/reward": 0.0, "rewards/flat/exact/mean": 0.0, "rewards/flat/form/mean": 0.0}
        seen = self.see_two(make_group, of_flat=own)
        batches = [[*batch, replace(batch[0], rewards=(1.0, 0.0))] for batch in seen.batches]
        found = alarms(replace(seen, batches=batches))
        assert "(exact 0, form 0)" in found["reward_stays_low/flat"].message

    def test_what_is_wrong_with_all_is_said_once(self, make_group: MakeGroup):
        seen = self.see_two(make_group, of_flat={"truncated_fraction": 0.6, "source/flat/truncated_fraction": 0.6})
        assert {"truncated_often"} == {name for name in alarms(seen) if name.startswith("truncated_often")}
