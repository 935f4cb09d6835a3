"""Where the time of a step goes: seconds of its kernels by kind, and the longest of them, by torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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


def table(kernels: Iterable[Kernel], *, seconds: float) -> str:
    """Lines of Markdown: the kinds, beside the ``seconds`` that a step takes without a profiler, and the longest."""
    kernels = [*kernels]
    by_kind: dict[str, list[Kernel]] = {}
    for one in kernels:
        by_kind.setdefault(one.kind, []).append(one)
    total = sum(one.seconds for one in kernels)
    sums = {kind: sum(one.seconds for one in some) for kind, some in by_kind.items()}
    lines = [f"| {total:.3f} s of kernels in a step of {seconds:.3f} s | seconds | calls |", "|---|---|---|"]
    for kind, some in sorted(by_kind.items(), key=lambda item: sums[item[0]], reverse=True):
        lines.append(f"| {kind} | {sums[kind]:.3f} | {sum(one.calls for one in some):,} |")
    lines += [f"| - `{one.name[:90]}` | {one.seconds:.3f} | {one.calls:,} |" for one in kernels[:LONGEST]]
    return "\n".join(lines) + "\n"
