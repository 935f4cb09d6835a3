from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from lachesis.common.types import EvalResult, Group, StepRecord
from lachesis.metrics.hub import MetricsHub
from lachesis.metrics.sinks.base import Sink
from lachesis.metrics.telemetry import Telemetry, throughput
from lachesis.metrics.values import Mean, MetricValue, Sum, reduce_metrics

EVALUATION = EvalResult(step=0, accuracy=0.5, mean_reward=0.5, problems=4, mean_length=3.0, seconds=0.1)


class Memory(Sink):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.evaluations: list[EvalResult] = []

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def evaluation(self, result: EvalResult) -> None:
        self.evaluations.append(result)


@pytest.fixture
def sink() -> Memory:
    return Memory()


def telemetry(sink: Sink, **options) -> Telemetry:
    return Telemetry(hub=MetricsHub([sink]), reward_names=("right",), **{"reduce": reduce_metrics, **options})


def emit(
    telemetry: Telemetry,
    *,
    metrics: dict[str, MetricValue] | None = None,
    counters: dict[str, float] | None = None,
    groups: tuple[Group, ...] = (),
    evaluation: EvalResult | None = None,
) -> None:
    telemetry.emit(step=5, metrics=metrics or {}, counters=counters or {}, groups=groups, evaluation=evaluation)


def test_a_record_has_what_policy_feed_and_groups_say(sink: Memory, make_group: Callable[..., Group]):
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


def test_staleness_is_seen_from_the_weights_that_were_trained(sink: Memory, make_group: Callable[..., Group]):
    emit(telemetry(sink), groups=(make_group((0.0, 1.0)),))  # sampled under version 3, trained on by version 4
    assert sink.records[0].values["staleness"] == 1


def test_everything_is_reduced_once_and_together(sink: Memory):
    seen: list[Mapping[str, MetricValue]] = []

    def over_two_equal_ranks(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
        seen.append(metrics)
        return reduce_metrics({name: value.merge(value) for name, value in metrics.items()})  # type: ignore[arg-type]

    emit(
        telemetry(sink, reduce=over_two_equal_ranks),
        metrics={"train_time": Mean(2.0), "tokens_forward": Sum(100.0)},
        counters={"generation_time": 4.0, "tokens_generated": 300.0},
    )
    assert len(seen) == 1
    values = sink.records[0].values
    assert (values["generation_time"], values["tokens_generated"]) == (4.0, 600.0), "seconds are averaged, counts added"
    assert values["generation_tokens_per_s"] == 150.0
    assert values["train_tokens_per_s"] == 100.0


def test_memory_is_in_gigabytes_where_there_is_a_gpu(sink: Memory):
    emit(telemetry(sink, device_memory=lambda: (2_500_000_000, 4_000_000_000)))
    emit(telemetry(sink))
    with_gpu, without = (record.values for record in sink.records)
    assert (with_gpu["gpu_memory_gb"], with_gpu["gpu_memory_reserved_gb"]) == (2.5, 4.0)
    assert "gpu_memory_gb" not in without


def test_an_evaluation_before_the_first_step_is_passed_on_if_there_was_one(sink: Memory):
    telemetry(sink).evaluation(EVALUATION)
    telemetry(sink).evaluation(None)
    assert sink.evaluations == [EVALUATION]


def test_one_name_from_two_sides_is_an_error_and_not_a_wrong_number(sink: Memory):
    with pytest.raises(TypeError, match="'dropped_groups'"):
        emit(telemetry(sink), metrics={"dropped_groups": Mean(1.0)}, counters={"dropped_groups": 2.0})


def test_speeds_need_both_tokens_and_seconds():
    assert throughput({"tokens_generated": 10.0, "generation_time": 4.0}) == {"generation_tokens_per_s": 2.5}
    assert throughput({"tokens_forward": 10.0}) == {}
    assert throughput({"tokens_forward": 10.0, "train_time": 0.0}) == {}
