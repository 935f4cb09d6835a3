"""Arguments of torch's compiler for everything that is compiled here."""

from __future__ import annotations

from functools import cache
from typing import Any

# Whether the sums over rows and over columns of a norm's gradient become one kernel, inductor decides by the size of a
# pass, and then compiles for sizes on that side of its lines alone (4,096 rows, 5 * 2^20 elements): the first pass on
# the other side stalls a step by seconds, and may come late. So it always makes them one.
_WITHOUT_LINES = ("mix_order_reduction_non_strict_mode",)


@cache
def compiler_arguments() -> dict[str, Any]:
    """Return keyword arguments of ``torch.compile`` for one graph that serves any size, as far as this torch can."""
    import torch._inductor.config as inductor  # here, because it is slow and only needed for compilation

    known = [name for name in _WITHOUT_LINES if hasattr(inductor.triton, name)]
    return {"dynamic": True, "options": {f"triton.{name}": True for name in known}}
