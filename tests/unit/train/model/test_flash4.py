"""FlashAttention 4 as an operator: its arguments, its gradients, and that it is used where it is right alone.

The kernels need a GPU. In their place stand functions with the package's names and arguments, which refuse what it
refuses; tests/gpu has the package itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lachesis.train.batch import pack
from lachesis.train.model import attention, flash4
from lachesis.train.model.forward import ForwardPlan, _attention_kinds, target_logprobs
from tests.tiny import tiny_model
from tests.unit.train.model.test_forward import random_groups

CPU = torch.device("cpu")
Kernel = Callable[..., tuple[Tensor, ...]]


class Weights(NamedTuple):
    """Of a segment: its queries and keys in the stream, the keys and values of each head of queries, the weights."""

    rows: slice
    columns: slice
    keys: Tensor
    values: Tensor
    weights: Tensor


def segments(q: Tensor, k: Tensor, v: Tensor, *, ends_q, ends_k, scale, causal, left, right) -> Iterator[Weights]:
    """In float32."""
    for (a, b), (c, d) in zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True):
        heads = q.shape[1] // k.shape[1]
        keys, values = (x[c:d].float().repeat_interleave(heads, 1).transpose(0, 1) for x in (k, v))
        scores = q[a:b].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        behind = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        seen = torch.ones_like(behind, dtype=torch.bool)
        seen &= (behind >= 0) if causal or right == 0 else seen
        seen &= (behind <= left) if left is not None else seen
        yield Weights(slice(a, b), slice(c, d), keys, values, scores.masked_fill(~seen, -torch.inf).softmax(-1))


def check(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int) -> None:
    """As the package asserts."""
    assert q.dtype in (torch.float16, torch.bfloat16), "inputs must be float16 or bfloat16"
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[1] % k.shape[1] == 0, "num_head must be divisible by num_head_kv"
    for ends, rows, longest in ((ends_q, q, max_q), (ends_k, k, max_k)):
        assert ends.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k must be int32"
        assert ends.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k must be contiguous"
        assert int(ends[-1]) == len(rows)
        assert int(ends.diff().max()) <= longest


def _flash_attn_fwd(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size_left=None,
    window_size_right=None,
    return_lse=False,
) -> tuple[Tensor, ...]:
    check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    ends = {"ends_q": cu_seqlens_q, "ends_k": cu_seqlens_k, "scale": softmax_scale or q.shape[-1] ** -0.5}
    found = segments(q, k, v, **ends, causal=causal, left=window_size_left, right=window_size_right)
    out = torch.cat([(part.weights @ part.values).transpose(0, 1) for part in found])
    lse = torch.zeros(q.shape[1], q.shape[0]) if return_lse else None
    return out.to(q.dtype).contiguous(), lse, None, None, None


def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    *,
    softmax_scale=None,
    causal=False,
    window_size_left=None,
    window_size_right=None,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    deterministic=False,
    dq,
    dk,
    dv,
) -> tuple[Tensor, ...]:
    check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert lse.dtype == torch.float32, "lse must be float32"
    assert lse.shape == (q.shape[1], q.shape[0]), "lse must have shape (num_head, total_q)"
    assert out.shape == dout.shape == q.shape
    scale = softmax_scale or q.shape[-1] ** -0.5
    ends = {"ends_q": cu_seqlens_q, "ends_k": cu_seqlens_k, "scale": scale}
    of_heads = lambda x: x.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)  # noqa: E731  # of those that share keys
    for part in segments(q, k, v, **ends, causal=causal, left=window_size_left, right=window_size_right):
        rows, columns, keys, values, p = part
        upstream, query = (x[rows].float().transpose(0, 1) for x in (dout, q))
        of_weights = upstream @ values.transpose(1, 2)
        of_scores = p * (of_weights - (of_weights * p).sum(-1, keepdim=True)) * scale
        dq[rows] = (of_scores @ keys).transpose(0, 1).to(dq.dtype)
        dk[columns] = of_heads(of_scores.transpose(1, 2) @ query).to(dk.dtype)
        dv[columns] = of_heads(p.transpose(1, 2) @ upstream).to(dv.dtype)
    return dq, dk, dv


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install it, with kernels of choice."""

    def install(*, forward: Kernel = _flash_attn_fwd, backward: Kernel = _flash_attn_bwd) -> None:
        module = ModuleType("flash_attn.cute.interface")
        module.__dict__.update(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
        for name in ("flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)

    install()
    return install


def tried() -> str:
    return flash4.difference(CPU, torch.bfloat16, heads=4, kv_heads=2, head_dim=16)


def test_what_is_right_has_no_difference(package):
    assert tried() == ""


def test_a_wrong_result_or_gradient_is_named(package):
    def shifted(*args, **options):
        out, *others = _flash_attn_fwd(*args, **options)
        return out.roll(1, 0), *others

    def half(*args, dk, **options):
        grads = _flash_attn_bwd(*args, dk=dk, **options)
        dk.mul_(0.5)
        return grads

    def not_a_number(*args, dq, **options):
        grads = _flash_attn_bwd(*args, dq=dq, **options)
        dq[3] = torch.nan
        return grads

    for broken, named in (
        ({"forward": shifted}, "result"),
        ({"backward": half}, "dk"),
        ({"backward": not_a_number}, "dq"),
    ):
        package(**broken)
        assert tried().startswith(f"{named} differs by")


def test_what_its_compiler_raises_is_the_difference(package):
    def refusing(*args, **options):
        raise AssertionError("(head_dim, head_dim_v)=(16, 16) is not supported on SM90")

    package(forward=refusing)
    assert tried() == "AssertionError: (head_dim, head_dim_v)=(16, 16) is not supported on SM90"


def test_what_its_compiler_says_over_pages_and_in_colours_is_told_in_a_line(package):
    def refusing(*args, **options):
        raise RuntimeError("\n\x1b[91m\x1b[1m[Internal Error]\x1b[0m\nof the DSL\n" + "a page " * 1000)

    package(forward=refusing)
    assert tried().startswith("RuntimeError: [Internal Error] of the DSL a page")
    assert tried().endswith("a page ...") and len(tried()) < 330


def test_where_it_does_not_run():
    assert flash4.refusal(CPU, torch.bfloat16) == "it takes 16-bit weights on a GPU"
    assert flash4.refusal(torch.device("cuda"), torch.float32) == "it takes 16-bit weights on a GPU"


def arguments(window: int | None) -> tuple:
    micro = pack(random_groups(groups=2, samples=3, longest=9), max_tokens=1 << 20).micro_batches[0]
    keys = micro.num_inputs if micro.key_index is None else len(micro.key_index)
    # As a model has them: laid out by head, and seen by token.
    query, key, value = (
        torch.randn(h, n, 8).bfloat16().transpose(0, 1) for h, n in ((4, micro.num_inputs), (2, keys), (2, keys))
    )
    return query, key, value, micro.cu_seq_q, micro.cu_seq_k, micro.max_q, micro.max_k, None, window


@pytest.mark.parametrize("window", [None, 3])
def test_the_operator_is_what_torch_asks_of_one(package, window: int | None):
    inputs = arguments(window)
    leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])
    assert set(torch.library.opcheck(flash4.flash4, (*leaves, *inputs[3:])).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("architecture", "compiled"), [("qwen2", False), ("mistral", True)])
def test_a_model_has_the_logprobs_and_gradients_that_it_has_by_buckets(package, architecture: str, compiled: bool):
    """Mistral's window is shorter than the sequences."""
    torch._dynamo.reset()
    model = tiny_model(architecture, initializer_range=0.1).bfloat16()
    attention.install(model)
    micro = pack(random_groups(groups=3, samples=3, longest=20), max_tokens=1 << 20).micro_batches[0]
    found = {}
    for kind in ("bucketed", "flash4"):
        model.zero_grad()
        if compiled and kind == "flash4":
            for layer in model.model.layers:
                layer.compile(dynamic=True, backend="aot_eager")
        logprobs = target_logprobs(model, micro, plan=ForwardPlan(attention=kind, head="chunked")).logprobs
        logprobs.sum().backward()
        grads = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        found[kind] = logprobs.detach().float(), grads
    (expected, of_expected), (logprobs, grads) = found["bucketed"], found["flash4"]
    assert float((logprobs - expected).abs().max()) < 0.08
    assert float((grads - of_expected).norm() / of_expected.norm()) < 0.05


@pytest.mark.parametrize("wrong", ["", "dk differs by 0.5 of its norm, where 0.02 may be"])
def test_it_comes_first_where_it_is_right_and_is_named_where_it_is_not(monkeypatch, caplog, wrong: str):
    asked = {}
    monkeypatch.setattr(flash4, "refusal", lambda device, dtype: "")
    monkeypatch.setattr(flash4, "difference", lambda *args, **shape: asked.update(shape) or wrong)
    model = tiny_model("qwen2").bfloat16()
    kinds = _attention_kinds(model, torch.device("cuda"))
    assert kinds == (["flash", "bucketed"] if wrong else ["flash4", "flash", "bucketed"])
    assert asked == {"heads": 4, "kv_heads": 2, "head_dim": 8}
    told = [record.getMessage() for record in caplog.records]
    assert [wrong in message for message in told] == [True] * bool(wrong)


def test_where_it_cannot_run_nothing_is_said(monkeypatch, caplog):
    monkeypatch.setattr(flash4, "refusal", lambda device, dtype: "flash-attn-4 is not installed")
    assert _attention_kinds(tiny_model("qwen2").bfloat16(), torch.device("cuda")) == ["flash", "bucketed"]
    assert not caplog.records
