"""What GPUs do, read from a driver that refuses what NVML refuses."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from lachesis.metrics.gpu_meter import open_meter
from lachesis.metrics.values import reduce_metrics
from tests.waiting import until


@dataclass(eq=False)
class Card:
    """Each of its readings is the next of these, the last one over and over; an error of NVML's is raised."""

    uuid: str
    busy: list[int] = field(default_factory=lambda: [0])
    used: list[int] = field(default_factory=lambda: [0])
    failing: int = 0


class FakeNvml:
    """NVML as pynvml shows it: each function raises NVMLError with the code that the library returns."""

    def __init__(self, *cards: Card) -> None:
        self._cards = cards
        self.users = 0

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        self._require_init()
        self.users -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        self._require_init()
        if not 0 <= index < len(self._cards):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        self._require_init()
        for card in self._cards:
            if card.uuid == uuid:
                return card
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetIndex(self, card: Card) -> int:
        self._require_init()
        return self._cards.index(card)

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:
        self._require(card)
        return SimpleNamespace(gpu=_next(card.busy), memory=0)

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:
        self._require(card)
        return SimpleNamespace(used=_next(card.used), total=80 * 10**9)

    def _require_init(self) -> None:
        if not self.users:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _require(self, card: Card) -> None:
        self._require_init()
        if card.failing:
            raise pynvml.NVMLError(card.failing)


def _next(readings: list[int]) -> int:
    return readings.pop(0) if len(readings) > 1 else readings[0]


NEVER_S = 3600.0


def test_a_step_has_the_mean_share_and_the_most_memory_of_each_gpu():
    first = Card("GPU-a", busy=[100, 50, 0], used=[8_000_000_000, 2_000_000_000])
    second = Card("GPU-b", busy=[20], used=[1_000_000_000])
    nvml = FakeNvml(first, second)
    meter = open_meter(["GPU-b", "0", "1"], nvml=nvml, period_s=NEVER_S)
    assert meter is not None
    with closing(meter):
        meter.read()
        meter.read()
        assert reduce_metrics(meter.take()) == {
            "gpu_utilization/0": 0.75,
            "gpu_memory_in_use_gb/0": 8.0,
            "gpu_utilization/1": pytest.approx(0.2),
            "gpu_memory_in_use_gb/1": 1.0,
        }
        step = reduce_metrics(meter.take())  # so short that the thread has read nothing meanwhile
        assert (step["gpu_utilization/0"], step["gpu_memory_in_use_gb/0"]) == (0.0, 2.0)
    assert nvml.users == 0


def test_what_cannot_be_read_is_said_once_and_missing_from_then_on(caplog: pytest.LogCaptureFixture):
    lost, well = Card("GPU-a"), Card("GPU-b", busy=[40])
    meter = open_meter(["0", "1", "7"], machine="node-b:", nvml=FakeNvml(lost, well), period_s=NEVER_S)
    assert meter is not None
    with closing(meter), caplog.at_level(logging.WARNING, logger="lachesis"):
        assert "gpu_utilization/node-b:0" in meter.take()
        lost.failing = pynvml.NVML_ERROR_GPU_IS_LOST
        for _ in range(2):
            assert set(meter.take()) == {"gpu_utilization/node-b:1", "gpu_memory_in_use_gb/node-b:1"}
    assert caplog.messages == [
        "what GPU 7 does is not measured: NVML says Invalid Argument",
        "gpu_utilization/node-b:0 is not measured from here on: NVML says GPU is lost",
        "gpu_memory_in_use_gb/node-b:0 is not measured from here on: NVML says GPU is lost",
    ]


def test_it_reads_beside_the_work():
    card = Card("GPU-a", busy=[100, 100, 100, 0, 0, 0])
    meter = open_meter(["0"], nvml=FakeNvml(card), period_s=0.001)
    assert meter is not None
    with closing(meter):
        until(lambda: card.busy == [0], "five readings, of which the last may not be noted yet")
        assert 0 < reduce_metrics(meter.take())["gpu_utilization/0"] < 1


def test_where_nvml_knows_none_nothing_is_measured(caplog: pytest.LogCaptureFixture):
    nvml = FakeNvml(Card("GPU-a"))
    assert open_meter(["GPU-of-another-machine"], nvml=nvml) is None
    assert nvml.users == 0
    assert caplog.messages == ["what GPU GPU-of-another-machine does is not measured: NVML says Not Found"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_the_real_library_is_not_there(caplog: pytest.LogCaptureFixture):
    assert open_meter(["0"]) is None
    assert caplog.messages == ["what GPUs do is not measured: NVML says NVML Shared Library Not Found"]
