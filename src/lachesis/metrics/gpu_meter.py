"""Meters of GPUs, which read the driver's counters (NVML) beside the work and average them over each step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pynvml

from lachesis.metrics.names import GPU_MEMORY_IN_USE, GPU_UTILIZATION
from lachesis.metrics.values import Max, Mean, MetricValue

logger = logging.getLogger("lachesis")

# The driver's own average is over a sixth of a second to a second, by the card.
PERIOD_S = 0.5


@dataclass(slots=True)
class _Gauge:
    """Gauge of one number of one GPU, with the readings since it was last taken."""

    name: str
    read: Callable[[], float]
    seen: list[float] = field(default_factory=list)

    def take(self) -> MetricValue:
        """Return the mean share, or the most memory."""
        seen, self.seen = self.seen, []
        return Mean(sum(seen), len(seen)) if self.name.startswith(GPU_UTILIZATION) else Max(max(seen))


class GpuMeter:
    """Meter that reads GPUs of this machine every ``period_s`` seconds, in a separate thread, until it is closed.

    Args:
        nvml: the module ``pynvml``, initialized; it is shut down at the end.
        handles: its handle of each GPU, by the GPU's name in metrics.
    """

    def __init__(self, nvml: Any, handles: dict[str, Any], *, period_s: float = PERIOD_S) -> None:
        self._nvml = nvml
        self._period_s = period_s
        self._gauges = [gauge for label, handle in handles.items() for gauge in self._gauges_of(label, handle)]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._go_on_reading, name="GPU meter", daemon=True)
        self._thread.start()

    def read(self) -> None:
        """Read all gauges now."""
        with self._lock:
            self._read(self._gauges)

    def take(self) -> dict[str, MetricValue]:
        """Return ``gpu_utilization/GPU`` and ``gpu_memory_in_use_gb/GPU`` since the last call.

        Each is read once at least.
        """
        with self._lock:
            self._read(gauge for gauge in self._gauges if not gauge.seen)
            return {gauge.name: gauge.take() for gauge in self._gauges}

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._nvml.nvmlShutdown()

    def _gauges_of(self, label: str, handle: Any) -> Iterator[_Gauge]:
        yield _Gauge(f"{GPU_UTILIZATION}{label}", lambda: self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        yield _Gauge(f"{GPU_MEMORY_IN_USE}{label}", lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9)

    def _go_on_reading(self) -> None:
        while not self._closed.wait(self._period_s):
            self.read()

    def _read(self, gauges: Iterable[_Gauge]) -> None:
        """Read the gauges; one that cannot be read is logged once, and left out from then on."""
        for gauge in [*gauges]:
            try:
                gauge.seen.append(gauge.read())
            except pynvml.NVMLError as error:
                self._gauges.remove(gauge)
                logger.warning("%s is not measured from here on: NVML says %s", gauge.name, error)


def open_meter(
    gpus: Iterable[str], *, machine: str = "", nvml: Any = pynvml, period_s: float = PERIOD_S
) -> GpuMeter | None:
    """Open a meter of these GPUs of this machine; return None, and log it, if NVML knows none of them.

    Args:
        gpus: as ``CUDA_VISIBLE_DEVICES`` names them: numbers, or ``GPU-`` and a UUID.
        machine: stands before the number of each GPU in the names of metrics, where there are several machines.
    """
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.warning("what GPUs do is not measured: NVML says %s", error)
        return None
    handles: dict[str, Any] = {}
    for gpu in gpus:
        try:
            handle = _handle(nvml, gpu)
            handles[f"{machine}{nvml.nvmlDeviceGetIndex(handle)}"] = handle
        except pynvml.NVMLError as error:
            logger.warning("what GPU %s does is not measured: NVML says %s", gpu, error)
    if not handles:
        nvml.nvmlShutdown()
        return None
    return GpuMeter(nvml, handles, period_s=period_s)


def _handle(nvml: Any, gpu: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(gpu)
