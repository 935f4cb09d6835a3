"""A plugin of vLLM's with one kernel of its CPU build mended: without it guessed tokens are verified with garbage.

vLLM 0.32.0 spreads the temperatures of requests over their drafts by ``expand_kernel``. Its stand-in for CPUs
(``vllm/utils/cpu_triton_utils.py``) computes in a copy of the float32 tensor, as int64, and does not copy back, so that
drafts are verified with what memory held before, while the last token of a step is sampled as it should be.
"""

from __future__ import annotations

from torch import Tensor


def mend() -> None:
    """Before vLLM's worker registers its stand-ins."""
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = _expand


def _expand(
    output: Tensor, input_val: Tensor, cu_num_tokens: Tensor, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int
) -> None:
    """Write the value of each request [B] to its places in ``output`` [T], which end at ``cu_num_tokens`` [B]."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(input_val.where(input_val != replace_from, replace_to).repeat_interleave(counts))
