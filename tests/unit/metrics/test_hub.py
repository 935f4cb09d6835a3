from __future__ import annotations

import errno
import logging
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from lachesis.common.errors import RunRemoved
from lachesis.common.types import UNKNOWN_VERSIONS, EvalResult, Finding, Group, StepRecord, VersionSpan
from lachesis.metrics.health.monitor import HealthMonitor
from lachesis.metrics.hub import HubTelemetry, MetricsHub, Sink, group_metrics, throughput
from lachesis.metrics.values import Max, Mean, MetricValue, Sum, reduce_metrics
from tests.waiting import LONG_S


class Recorder(Sink):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.evaluations: list[EvalResult] = []
        self.closed = 0

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def evaluation(self, result: EvalResult) -> None:
        self.evaluations.append(result)

    def close(self) -> None:
        self.closed += 1


class Broken(Recorder):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.calls = 0

    def write(self, record: StepRecord) -> None:
        self.calls += 1
        raise self.error


class BrokenMonitor(HealthMonitor):
    def examine(self, record: StepRecord) -> tuple[Finding, ...]:
        raise ZeroDivisionError("division by zero")


EVALUATION = EvalResult(0, 0.4, 0.4, 512, 3.0, 0.5)


def test_every_sink_gets_everything_in_order() -> None:
    sinks = [Recorder(), Recorder()]
    hub = MetricsHub(sinks)
    hub.evaluation(EVALUATION)
    for step in (1, 2):
        hub.emit(StepRecord(step=step, values={}))
    hub.close()
    for sink in sinks:
        assert [record.step for record in sink.records] == [1, 2]
        assert sink.evaluations == [EVALUATION]
        assert sink.closed == 1


def test_broken_sink_is_reported_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    broken, good = Broken(ValueError("no\nsuch series")), Recorder()
    hub = MetricsHub([broken, good])
    with caplog.at_level(logging.WARNING, logger="lachesis"):
        for step in (1, 2, 3):
            hub.emit(StepRecord(step=step, values={}))
        hub.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    message = caplog.messages[0]
    assert "Broken failed at step 1" in message and "ValueError: no such series" in message and "\n" not in message
    assert (broken.calls, broken.closed) == (1, 1)
    assert len(good.records) == 3 and hub.sinks == ()


def test_full_disk_is_said_plainly(caplog: pytest.LogCaptureFixture) -> None:
    hub = MetricsHub([Broken(OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"))])
    hub.emit(StepRecord(step=7, values={}))
    assert caplog.messages[0].startswith("the disk is full while writing metrics.jsonl: Broken failed at step 7")
    assert "free some space" in caplog.messages[0]


def test_what_stops_the_run_is_not_swallowed() -> None:
    class Interrupting(Recorder):
        def write(self, record: StepRecord) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MetricsHub([Interrupting()]).emit(StepRecord(step=1, values={}))


def test_findings_of_the_monitor_reach_the_sinks() -> None:
    sink = Recorder()
    hub = MetricsHub([sink], monitor=HealthMonitor())
    own = Finding("note", "own", "said by the loop")
    returned = hub.emit(StepRecord(step=1, values={"mean_kl": 0.9}, findings=(own,)))
    assert [finding.rule for finding in sink.records[0].findings] == ["own", "kl_high"]
    assert returned == sink.records[0]


def test_broken_monitor_is_reported_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    sink = Recorder()
    hub = MetricsHub([sink], monitor=BrokenMonitor())
    for step in (1, 2):
        hub.emit(StepRecord(step=step, values={}))
    assert len(caplog.messages) == 1 and "the health rules failed at step 1" in caplog.messages[0]
    assert len(sink.records) == 2


@pytest.fixture
def sink() -> Recorder:
    return Recorder()


def telemetry(sink: Sink, **options) -> HubTelemetry:
    return HubTelemetry(hub=MetricsHub([sink]), reward_names=("right",), **options)


def emit(
    telemetry: HubTelemetry,
    *,
    metrics: dict[str, MetricValue] | None = None,
    counters: dict[str, float] | None = None,
    groups: tuple[Group, ...] = (),
    evaluation: EvalResult | None = None,
) -> None:
    telemetry.emit(step=5, metrics=metrics or {}, counters=counters or {}, groups=groups, evaluation=evaluation)
    telemetry.flush()


class SlowSink(Recorder):
    """Takes a record once it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write(self, record: StepRecord) -> None:
        assert self.go_on.wait(LONG_S)
        super().write(record)


def tell(telemetry: HubTelemetry, step: int, **metrics: MetricValue) -> None:
    telemetry.emit(step=step, metrics=metrics, counters={}, groups=(), evaluation=None)


def test_a_sink_that_takes_long_holds_up_the_next_record_and_not_this_one():
    sink = SlowSink()
    told = telemetry(sink)
    tell(told, 1)
    assert sink.records == []
    second = threading.Thread(target=tell, args=(told, 2))
    second.start()
    assert second.is_alive() and sink.records == []
    sink.go_on.set()
    second.join(LONG_S)
    told.flush()
    assert [record.step for record in sink.records] == [1, 2]


def test_what_was_told_last_is_with_the_sinks_before_they_are_closed():
    sink = SlowSink()
    told = telemetry(sink)
    tell(told, 1)
    threading.Timer(0.05, sink.go_on.set).start()
    told.close()
    assert [record.step for record in sink.records] == [1] and sink.closed
    told.close()


def test_memory_of_a_gpu_is_read_when_its_step_ends():
    sink, read = SlowSink(), iter([(3_000_000_000, 5_000_000_000), (7, 7)])
    told = telemetry(sink, device_memory=lambda: next(read))
    tell(told, 1)
    assert next(read) == (7, 7), "it was read by then"
    sink.go_on.set()
    told.flush()
    assert (sink.records[0].values["gpu_memory_gb"], sink.records[0].values["gpu_memory_reserved_gb"]) == (3.0, 5.0)


def test_a_record_says_when_its_step_ended_however_late_sinks_hear_of_it():
    sink = SlowSink()
    told = telemetry(sink)
    tell(told, 1)
    ended = time.time()
    sink.go_on.set()
    told.flush()
    assert sink.records[0].ended <= ended


def test_a_defect_on_the_way_to_the_sinks_is_raised_by_what_comes_next(sink: Recorder):
    told = telemetry(sink)
    tell(told, 1, reward=Sum(1.0))  # which the groups have as a mean
    with pytest.raises(TypeError, match="'reward'"):
        tell(told, 2)
    tell(told, 3)
    told.close()
    assert [record.step for record in sink.records] == [3]


def test_a_record_has_what_policy_feed_and_groups_say(sink: Recorder, make_group: Callable[..., Group]):
    group = make_group((0.0, 1.0))
    emit(
        telemetry(sink),
        metrics={"loss": Sum(0.25), "grad_norm": Mean(2.0)},
        counters={"dropped_groups": 3.0, "generation_time": 0.5},
        groups=(group,),
        evaluation=EVALUATION,
    )
    (record,) = sink.records
    assert (record.step, record.groups, record.evaluation) == (5, (group,), EVALUATION)
    expected = {"loss": 0.25, "grad_norm": 2.0, "dropped_groups": 3.0, "generation_time": 0.5, "reward": 0.5}
    assert {name: record.values[name] for name in expected} == expected
    assert record.values["rewards/right/mean"] == 0.5


def test_staleness_is_seen_from_the_weights_that_were_trained(sink: Recorder, make_group: Callable[..., Group]):
    emit(telemetry(sink), groups=(make_group((0.0, 1.0)),))  # sampled under version 3, trained on by version 4
    assert sink.records[0].values["staleness"] == 1


def test_everything_is_reduced_once_and_together(sink: Recorder):
    emit(
        telemetry(sink),
        metrics={"train_time": Mean(4.0, 2.0), "tokens_forward": Sum(100.0)},
        counters={"generation_time": 4.0, "tokens_generated": 300.0},
    )
    values = sink.records[0].values
    assert (values["train_time"], values["generation_time"], values["tokens_generated"]) == (2.0, 4.0, 300.0)
    assert values["generation_tokens_per_s"] == 75.0
    assert values["train_tokens_per_s"] == 50.0


def test_memory_is_in_gigabytes_where_there_is_a_gpu(sink: Recorder):
    emit(telemetry(sink, device_memory=lambda: (2_500_000_000, 4_000_000_000)))
    emit(telemetry(sink))
    with_gpu, without = (record.values for record in sink.records)
    assert (with_gpu["gpu_memory_gb"], with_gpu["gpu_memory_reserved_gb"]) == (2.5, 4.0)
    assert "gpu_memory_gb" not in without


def test_an_evaluation_before_the_first_step_is_passed_on_if_there_was_one(sink: Recorder):
    telemetry(sink).evaluation(EVALUATION)
    telemetry(sink).evaluation(None)
    assert sink.evaluations == [EVALUATION]


def test_one_name_from_two_sides_is_an_error_and_not_a_wrong_number(sink: Recorder):
    with pytest.raises(TypeError, match="'dropped_groups'"):
        emit(telemetry(sink), metrics={"dropped_groups": Mean(1.0)}, counters={"dropped_groups": 2.0})


def test_speeds_need_both_tokens_and_seconds():
    assert throughput({"tokens_generated": 10.0, "generation_time": 4.0}) == {"generation_tokens_per_s": 2.5}
    assert throughput({"tokens_forward": 10.0}) == {}
    assert throughput({"tokens_forward": 10.0, "train_time": 0.0}) == {}


def measure(groups: list[Group], *, names: tuple[str, ...] = ("right",), version: int = 4) -> dict[str, float]:
    return reduce_metrics(group_metrics(groups, reward_names=names, version=version))


def test_rewards_and_their_deviation_within_groups(make_group: Callable[..., Group]):
    values = measure([make_group((0.0, 1.0, 1.0)), make_group((2.0, 2.0, 2.0)), make_group((0.0, 4.0, 2.0))])
    assert values["reward"] == pytest.approx(14 / 9)
    assert values["reward_std"] == pytest.approx((statistics.stdev((0, 1, 1)) + 0 + 2.0) / 3)
    assert values["zero_std_fraction"] == pytest.approx(1 / 3)
    assert values["groups"] == 3


def test_a_reward_that_is_not_known_counts_nowhere(make_group: Callable[..., Group]):
    values = measure([make_group((None, 1.0, 3.0)), make_group((None, None, 5.0))])
    assert values["reward"] == 3.0
    assert values["reward_std"] == pytest.approx(statistics.stdev((1, 3))), "a group with one reward has no deviation"
    assert values["zero_std_fraction"] == 0.0


def test_without_any_reward_the_values_are_missing(make_group: Callable[..., Group]):
    values = measure([make_group((None, None))])
    assert not {"reward", "reward_std", "zero_std_fraction", "rewards/right/mean"} & values.keys()
    assert values["groups"] == 1


def test_equal_rewards_have_no_deviation_in_spite_of_rounding(make_group: Callable[..., Group]):
    assert measure([make_group((0.1,) * 7)])["zero_std_fraction"] == 1.0


def test_lengths_and_truncation(make_group: Callable[..., Group]):
    short = make_group((0.0, 1.0), completions=[(1,), (1, 2, 3)])
    long = make_group((0.0, 1.0), completions=[(1, 2, 3, 4), (1, 2, 3, 5)], finish_reason="length")
    values = measure([short, long])
    assert (values["completion_length/mean"], values["completion_length/max"]) == (3.0, 4)
    assert values["truncated_fraction"] == 0.5


def test_staleness_counts_from_the_first_token_of_the_oldest_sample(make_group: Callable[..., Group]):
    group = make_group((0.0, 1.0))
    old, new = group.samples
    mixed = replace(group, samples=(replace(old, versions=VersionSpan(1, 4)), replace(new, versions=VersionSpan(4, 4))))
    assert measure([mixed], version=4)["staleness"] == 3
    assert measure([replace(group, samples=(replace(new, versions=VersionSpan(4, 4)),))], version=4)["staleness"] == 0


def test_staleness_is_told_by_distance_where_there_is_any(make_group: Callable[..., Group]):
    group = make_group((0.0, 1.0))
    old, new = group.samples
    mixed = replace(group, samples=(replace(old, versions=VersionSpan(1, 4)), replace(new, versions=VersionSpan(4, 4))))
    found = {name: value for name, value in measure([mixed], version=4).items() if name.startswith("staleness/")}
    assert found == {"staleness/0": 0.5, "staleness/1": 0.0, "staleness/2": 0.0, "staleness/3": 0.5}
    fresh = replace(group, samples=(replace(new, versions=VersionSpan(4, 4)),))
    assert not any(name.startswith("staleness/") for name in measure([fresh], version=4))


def test_samples_of_an_unknown_version_are_neither_fresh_nor_stale(make_group: Callable[..., Group]):
    group = make_group((0.0, 1.0))
    unknown = tuple(replace(sample, versions=UNKNOWN_VERSIONS) for sample in group.samples)
    assert "staleness" not in measure([replace(group, samples=unknown)], version=4)
    mixed = replace(group, samples=(unknown[0], group.samples[1]))
    assert measure([mixed], version=4)["staleness"] == 1


def test_a_replayed_group_does_not_make_generation_look_late(make_group: Callable[..., Group]):
    group = make_group((0.0, 1.0))
    old = replace(group, samples=tuple(replace(sample, versions=VersionSpan(0, 0)) for sample in group.samples))
    without_signal = make_group((0.0, 0.0))
    assert measure([group, replace(old, replaces=without_signal)], version=4)["staleness"] == 1


def test_a_replayed_group_does_not_make_the_policy_look_better(make_group: Callable[..., Group]):
    """What is drawn for its rewards says nothing of the policy: all values are of what was generated."""
    good, without_signal = make_group((0.0, 2.0)), make_group((0.0, 0.0))
    generated = measure([good, without_signal])
    assert generated["reward"] == 0.5 and generated["zero_std_fraction"] == 0.5
    assert measure([good, replace(good, replaces=without_signal)]) == generated


def test_every_reward_function_has_its_own_mean_and_deviation(make_group: Callable[..., Group]):
    group = make_group((0.0, 1.0, 2.0))
    rows = [(1.0, 10.0), (3.0, None), (None, None)]
    samples = tuple(replace(s, rewards=row) for s, row in zip(group.samples, rows, strict=True))
    values = measure([replace(group, samples=samples)], names=("right", "short"))
    assert values["rewards/right/mean"] == 2.0
    assert values["rewards/right/std"] == pytest.approx(statistics.stdev((1, 3)))
    assert values["rewards/short/mean"] == 10.0
    assert "rewards/short/std" not in values


def test_each_environment_has_its_own_mean(make_group: Callable[..., Group]):
    def sent(env_id: int, *rewards: float | None, **columns: str) -> Group:
        group = make_group(rewards)
        return replace(group, prompt=replace(group.prompt, columns={"env_id": env_id, **columns}))

    named = sent(4, 0.25, environment="gsm8k_0")
    groups = [sent(0, 1.0, 0.0), sent(3, 1.0, 1.0), sent(0, 0.0, None), make_group((0.5, 0.5)), named]
    values = reduce_metrics(group_metrics(groups, reward_names=(), version=0))
    found = {name: value for name, value in values.items() if name.startswith("reward_of_environment/")}
    assert found == {"reward_of_environment/0": pytest.approx(1 / 3), "reward_of_environment/3": 1.0} | {
        "reward_of_environment/gsm8k_0": 0.25
    }


def test_no_groups_give_counts_and_no_means():
    values = measure([])
    assert values["groups"] == 0
    assert "reward" not in values


def test_values_can_be_merged_over_ranks(make_group: Callable[..., Group]):
    metrics = group_metrics([make_group((0.0, 1.0))], reward_names=("right",), version=4)
    assert metrics["reward"] == Mean(1.0, 2)
    assert isinstance(metrics["staleness"], Max)
    assert isinstance(metrics["completion_length/max"], Max)


def test_rewards_whose_squares_are_no_numbers_have_a_deviation(make_group: Callable[..., Group]):
    found = group_metrics([make_group((1e200, -1e200))], reward_names=("right",), version=3)
    assert reduce_metrics(found)["reward_std"] == pytest.approx(2**0.5 * 1e200)


def test_that_the_run_directory_was_removed_ends_the_run_and_is_all_that_is_said(caplog: pytest.LogCaptureFixture):
    before, after = Recorder(), Broken(OSError(errno.ENOENT, "No such file or directory"))
    hub = MetricsHub([before, Broken(RunRemoved("the run directory was removed")), after])
    with pytest.raises(RunRemoved):
        hub.emit(StepRecord(1, {}))
    hub.close()
    assert len(before.records) == 1 and not after.calls and not caplog.messages
