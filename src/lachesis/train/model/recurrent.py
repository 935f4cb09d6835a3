"""Recurrent layers over packed segments: short convolutions, gated delta nets, Kimi delta attention and Mamba-2.

A micro-batch is a tree of sequences (:mod:`lachesis.train.batch`). It is cut into *runs* of tokens without a branch
inside. Each run starts from the state at the end of the run that it continues, so that a group's prompt is computed
once and its completions continue from its state, with gradients through it. Runs are scanned a level of the tree at a
time. A convolution sees the few tokens before a run in its own sequence, which are copied in front of it.

Layers stay transformers' own. They call functions of their modeling file; replacements there do the above if a pass has
our kind of ``seq_idx``, and otherwise call the originals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from transformers import PreTrainedModel
from typing_extensions import TypeIs

from lachesis.train.batch import MicroBatch

# Tokens that scans compute together; rows whose numbers of chunks differ by less than 2 times are scanned together.
_CHUNK = 64


@dataclass(slots=True, eq=False)
class Rows:
    """Runs that are scanned together, as B rows of L tokens; or end to end in one row of B * L, with their bounds.

    Attributes:
        index: int64 [B * L], stream positions, and 0 where a row has ended.
        held: bool [B * L], which of them are tokens; ``None`` if all are.
        shape: B and L; 1 and their number for runs that stand end to end.
        bounds: int64 [B + 1], where runs that stand end to end begin and end, else ``None``.
        parents: int64 [B], the runs before, counted in the order of scanning; ``None`` for runs that start anew.
    """

    index: Tensor
    held: Tensor | None
    shape: tuple[int, int]
    bounds: Tensor | None
    parents: Tensor | None

    def lay(self, stream: Tensor) -> Tensor:
        """Return the rows [B, L, ...] of a stream [T, ...]."""
        return stream.index_select(0, self.index).unflatten(0, self.shape)

    def lay_gate(self, stream: Tensor) -> Tensor:
        """Return the rows of a gate, which is 0 beyond a row's end: nothing enters the state there or leaves it."""
        rows = self.lay(stream)
        return rows if self.held is None else rows * self.held.view(*self.shape, *[1] * (rows.dim() - 2))


@dataclass(slots=True, eq=False)  # not frozen, for the same reason as attention's BucketPlan
class RecurrentPlan:
    """Way of running recurrent layers over a micro-batch of T tokens.

    Attributes:
        rows: sets of runs that are scanned together, in order: each run comes after the one that it continues.
        unscan: int64 [T], position of each token in the output of all rows.
        tailed: int64 [T + runs * tail], the stream with the tokens before each run in front of it; T stands for zeros.
        untail: int64 [T], position of each token in ``tailed``.
    """

    rows: tuple[Rows, ...]
    unscan: Tensor
    tailed: Tensor
    untail: Tensor


@dataclass(frozen=True, slots=True)
class RunWays:
    """Form in which a model's recurrent layers take runs.

    Attributes:
        tail: number of tokens before a run that its convolutions see.
        end_to_end: scans take runs of any lengths in one row, as those of flash-linear-attention do.
    """

    tail: int
    end_to_end: bool

    @property
    def words(self) -> str:
        return "end to end" if self.end_to_end else "in rows"


def ways_of(model: PreTrainedModel, device: torch.device) -> tuple[RunWays, ...]:
    """Return the forms in which recurrent layers may take runs, fastest first; none for a model without such layers."""
    layers = [layer for layer in model.modules() if _replaceable(layer)]
    if not layers:
        return ()
    tail = max(module.kernel_size[0] for layer in layers for module in layer.children() if _convolves(module)) - 1
    # flash-linear-attention's scans, which transformers uses if it can import them; the probe finds out.
    fla = device.type == "cuda" and find_spec("fla") is not None
    return tuple(RunWays(tail=tail, end_to_end=way) for way in ((True, False) if fla else (False,)))


def install(model: PreTrainedModel) -> None:
    """Replace the functions that the model's recurrent layers call; without a plan they work as before."""
    for layer in model.modules():
        for name in _replaceable(layer):
            module = sys.modules[type(layer).__module__]
            original = getattr(module, name)
            if not hasattr(original, "lachesis_replaces"):
                setattr(module, name, _replacement(original, _REPLACEMENTS[name]))


def _replaceable(layer: nn.Module) -> list[str]:
    """Return the functions that a recurrent layer calls; none for any other layer, or one whose scan is Mamba-1's."""
    module = sys.modules[type(layer).__module__]
    if hasattr(module, "mamba_selective_scan") or not any(_convolves(module) for module in layer.children()):
        return []
    return [name for name in _REPLACEMENTS if callable(getattr(module, name, None))]


def _convolves(module: nn.Module) -> TypeIs[nn.Conv1d]:
    return isinstance(module, nn.Conv1d)


def _replacement(original: Callable[..., Any], packed: Callable[..., Any]) -> Callable[..., Any]:
    # Outside compiled layers: each number of rows would need another graph.
    over_runs: Any = torch.compiler.disable(partial(packed, original))

    @wraps(original)
    def replaced(*positional: Any, seq_idx: Any = None, **keywords: Any) -> Any:
        if isinstance(seq_idx, RecurrentPlan):
            return over_runs(seq_idx, *positional, **keywords)
        return original(*positional, **keywords, **({} if seq_idx is None else {"seq_idx": seq_idx}))

    vars(replaced)["lachesis_replaces"] = original
    return replaced


def _convolution(
    original: Callable[..., Tensor],
    plan: RecurrentPlan,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **keywords: Any,
) -> Tensor:
    """Convolve [1, C, T] with a weight [C, W], each run after the tokens before it in its own sequence."""
    stream = pad(hidden_states.squeeze(0).transpose(0, 1), (0, 0, 0, 1))
    tailed = stream.index_select(0, plan.tailed)
    if plan.rows[0].bounds is not None and find_spec("causal_conv1d") is None:
        # torch's convolution of single channels is slow on GPUs, its gradient above all.
        fla: Any = import_module("fla.modules.causal_conv1d")
        out = fla.causal_conv1d(tailed[None], weight, bias, activation=activation)[0].squeeze(0)
    else:
        out = original(tailed.transpose(0, 1)[None], weight, bias, activation=activation)
        out = out.squeeze(0).transpose(0, 1)
    return out.index_select(0, plan.untail).transpose(0, 1)[None]


def _delta_rule(
    original: Callable[..., Any],
    plan: RecurrentPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Compute a gated delta rule over the runs: queries, keys and values [1, T, H, D], decay ``g`` and ``beta``."""
    given = {name: value for name, value in keywords.items() if name in ("use_qk_l2norm_in_kernel", "chunk_size")}

    def scan(rows: Rows, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
        laid = [rows.lay(x.squeeze(0)) for x in (query, key, value)]
        gates = {"g": rows.lay_gate(g.squeeze(0)), "beta": rows.lay_gate(beta.squeeze(0))}
        return original(*laid, **gates, **given, initial_state=initial, output_final_state=True, cu_seqlens=rows.bounds)

    return _scanned(plan, scan), None


def _state_space(
    original: Callable[..., Any],
    plan: RecurrentPlan,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **keywords: Any,
) -> Tensor:
    """Compute Mamba-2's scan over the runs: hidden states [1, T, H, D], time steps [1, T, H], B and C [1, T, G, N]."""
    # Here and not in the scan, which would make a step beyond a row's end greater than 0.
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = (softplus(steps) if dt_softplus else steps).clamp(*dt_limit).squeeze(0)

    def scan(rows: Rows, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        states, b, c = (rows.lay(x.squeeze(0)) for x in (hidden_states, B, C))
        return original(
            states, rows.lay_gate(steps), A, b, c, chunk_size=chunk_size, D=D, initial_states=initial,
            return_final_states=True,
        )  # fmt: skip

    return _scanned(plan, scan)


def _fused(original: Callable[..., Any], plan: RecurrentPlan, *positional: Any, **keywords: Any) -> None:
    """Return None, so that the layer runs its unfused steps."""


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _fused,
}


def _scanned(plan: RecurrentPlan, scan: Callable[[Rows, Tensor | None], tuple[Tensor, Tensor | None]]) -> Tensor:
    """Scan all rows, each from its initial state, and return the output [1, T, ...] in the order of the stream."""
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for rows in plan.rows:
        initial = None if rows.parents is None else torch.cat(states).index_select(0, rows.parents)
        output, final = scan(rows, initial)
        outputs.append(output.flatten(0, 1))
        if final is not None:
            states.append(final)
    return torch.cat(outputs).index_select(0, plan.unscan)[None]


def plan_runs(micro: MicroBatch, *, ways: RunWays) -> RecurrentPlan:
    """Cut a micro-batch into runs, and order them for scanning."""
    device, total = micro.input_ids.device, micro.num_inputs
    starts, before = _runs(micro)
    lengths = torch.cat([starts, torch.tensor([total])]).diff()
    parents = [int(torch.searchsorted(starts, place, right=True)) - 1 if place >= 0 else -1 for place in before]
    levels: list[int] = []
    for parent in parents:
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
    chunks = [0 if ways.end_to_end else -(-length // _CHUNK) for length in lengths.tolist()]
    keys = [(level, count.bit_length()) for level, count in zip(levels, chunks, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    number = {run: place for place, run in enumerate(order)}
    rows, unscan, first = [], torch.empty(total, dtype=torch.int64), 0
    for (level, _), members in groupby(order, key=keys.__getitem__):
        runs = [*members]
        own = torch.tensor([number[parents[run]] for run in runs]) if level else None
        made, places = _rows(starts[runs], lengths[runs], parents=own, end_to_end=ways.end_to_end)
        unscan[made.index[places]] = first + places
        first += made.index.numel()
        rows.append(_on(made, device))
    tailed, untail = _tails(starts, before, lengths, tail=ways.tail, total=total)
    return RecurrentPlan(tuple(rows), unscan.to(device), tailed.to(device), untail.to(device))


def _runs(micro: MicroBatch) -> tuple[Tensor, list[int]]:
    """Return where runs begin, int64 [R], and the stream position before each in its sequence, -1 for none."""
    bounds, key_bounds = micro.cu_seq_q.cpu().long(), micro.cu_seq_k.cpu().long()
    begin, shared = bounds[:-1], key_bounds.diff() - bounds.diff()
    if micro.key_index is None:
        return begin, [-1] * len(begin)
    last = micro.key_index.cpu()[(key_bounds[:-1] + shared - 1).clamp_min(0)]
    parent_of = dict(zip(begin.tolist(), torch.where(shared > 0, last, -1).tolist(), strict=True))
    ends = {place + 1 for place in parent_of.values() if place >= 0}
    starts = sorted({*parent_of, *ends} - {micro.num_inputs})
    return torch.tensor(starts), [parent_of.get(start, start - 1) for start in starts]


def _rows(starts: Tensor, lengths: Tensor, *, parents: Tensor | None, end_to_end: bool) -> tuple[Rows, Tensor]:
    """Return runs as rows, int64, and which of their places are tokens."""
    if end_to_end:
        bounds = pad(lengths.cumsum(0), (1, 0))
        index = torch.repeat_interleave(starts - bounds[:-1], lengths) + torch.arange(int(bounds[-1]))
        return Rows(index, None, (1, index.numel()), bounds, parents), torch.arange(index.numel())
    longest = torch.arange(int(lengths.max()))
    held = longest < lengths[:, None]
    index = ((starts[:, None] + longest) * held).flatten()
    whole = None if bool(held.all()) else held.flatten()
    return Rows(index, whole, (len(starts), len(longest)), None, parents), held.flatten().nonzero().squeeze(1)


def _tails(starts: Tensor, before: Sequence[int], lengths: Tensor, *, tail: int, total: int) -> tuple[Tensor, Tensor]:
    """Return the stream with each run's ``tail`` tokens in front of it, and the positions of its own tokens there."""
    previous = torch.arange(-1, total)  # never read at the position ``total``, which stands for zeros
    previous[starts] = torch.tensor([place if place >= 0 else total for place in before])
    previous[total] = total
    places, steps = starts, []
    for _ in range(tail):
        places = previous[places]
        steps.append(places)
    tails = torch.stack([*reversed(steps)], dim=1)
    untail = torch.arange(total) + tail * (1 + torch.repeat_interleave(torch.arange(len(starts)), lengths))
    tailed = torch.empty(total + tails.numel(), dtype=torch.int64)
    tailed[untail] = torch.arange(total)
    fronts = starts + tail * torch.arange(len(starts))
    tailed[(fronts[:, None] + torch.arange(tail)).flatten()] = tails.flatten()
    return tailed, untail


def _on(rows: Rows, device: torch.device) -> Rows:
    held, bounds, parents = (x if x is None else x.to(device) for x in (rows.held, rows.bounds, rows.parents))
    return Rows(rows.index.to(device), held, rows.shape, bounds, parents)
