"""Where the time of a step goes: seconds of its kernels by kind, and the longest of them, by torch's profiler."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# By what stands in a kernel's name, or on a CPU in an operation's; the first that fits.
KINDS = (
    ("attention", re.compile(r"flash|fmha|attention|cudnn.*sdpa", re.IGNORECASE)),
    (
        "matrix products",
        re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|_scaled_mm|::(mm|addmm|bmm|baddbmm|linear)$", re.IGNORECASE),
    ),
    ("fused by the compiler: sums, largest values", re.compile(r"triton_(red|per)")),
    ("fused by the compiler: elementwise", re.compile(r"triton_")),
    ("copies", re.compile(r"memcpy|memset|::(copy_|_to_copy|clone)$", re.IGNORECASE)),
)
OTHERS = "all others"
# Categories of what ran on a GPU in a trace.
ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LONGEST = 8


@dataclass(frozen=True)
class Kernel:
    """All calls of one kernel in a step: their ``seconds`` together."""

    name: str
    seconds: float
    calls: int

    @property
    def kind(self) -> str:
        return next((kind for kind, words in KINDS if words.search(self.name)), OTHERS)


def kernels_of(step: Callable[[], object], *, device: torch.device) -> list[Kernel]:
    """What ran in one call of ``step``, the longest first; on a CPU operations without those that they call."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    microseconds = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels = [Kernel(one.key, getattr(one, microseconds) / 1e6, one.count) for one in found.key_averages()]
    return sorted((one for one in kernels if one.seconds > 0), key=lambda one: one.seconds, reverse=True)


def kernels_in(trace: Path) -> tuple[list[Kernel], float]:
    """What ran on a GPU in a trace that torch's profiler wrote, the longest first, and seconds from first to last."""
    events = json.loads(trace.read_text())["traceEvents"]
    ran = [one for one in events if one.get("ph") == "X" and one.get("cat") in ON_GPU]
    if not ran:
        raise ValueError(f"in {trace} nothing ran on a GPU")
    lasted: dict[str, list[float]] = defaultdict(list)
    for one in ran:
        lasted[one["name"]].append(one["dur"] / 1e6)
    kernels = [Kernel(name, sum(each), len(each)) for name, each in lasted.items()]
    span = max(one["ts"] + one["dur"] for one in ran) - min(one["ts"] for one in ran)
    return sorted(kernels, key=lambda one: one.seconds, reverse=True), span / 1e6


def table(kernels: Iterable[Kernel], *, seconds: float, what: str = "a step") -> str:
    """Lines of Markdown: the kinds, beside the ``seconds`` that ``what`` takes, and the longest."""
    kernels = [*kernels]
    by_kind: dict[str, list[Kernel]] = {}
    for one in kernels:
        by_kind.setdefault(one.kind, []).append(one)
    total = sum(one.seconds for one in kernels)
    sums = {kind: sum(one.seconds for one in some) for kind, some in by_kind.items()}
    lines = [f"| {total:.3f} s of kernels in {what} of {seconds:.3f} s | seconds | calls |", "|---|---|---|"]
    for kind, some in sorted(by_kind.items(), key=lambda item: sums[item[0]], reverse=True):
        lines.append(f"| {kind} | {sums[kind]:.3f} | {sum(one.calls for one in some):,} |")
    lines += [f"| - `{one.name[:90]}` | {one.seconds:.3f} | {one.calls:,} |" for one in kernels[:LONGEST]]
    return "\n".join(lines) + "\n"
