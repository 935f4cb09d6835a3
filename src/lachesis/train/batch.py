"""From scored groups to packed micro-batches, and to those of each rank.

A micro-batch is one stream of tokens without padding. Each group's prompt stands in it once, followed by the
distinct completions of the group; a completion attends to its prompt and to itself, nothing else. That is
written down as *segments*: runs of queries with the keys they may see, causal and aligned at the end. With
nothing shared a segment is a whole sequence and its keys are its own tokens.

The last token of a completion predicts nothing and is no input. Completions of a group that are equal, token
for token, are one segment: their logprobs are computed once and read by every sample that has them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from lachesis.common.errors import TrainingError
from lachesis.common.types import UNKNOWN_VERSIONS, Group, Sample

T = TypeVar("T")
OldLogprobs = Literal["sampler", "trainer"]
"""Whose logprobs the importance ratio compares with: what the samples came with, or the trainer's at first use."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass needs. T inputs, G segments, M predictions, N loss tokens, S rows.

    Attributes:
        input_ids, position_ids: int64 [T]; positions count from each sequence's own start.
        cu_seq_q: int32 [G+1], where each segment's queries begin and end in the stream.
        cu_seq_k: int32 [G+1], where each segment's keys begin and end in ``key_index``.
        key_index: int64 [K], stream positions of the keys; ``None`` where keys are the queries themselves.
        max_q, max_k: longest segment.
        predict: int64 [M], stream positions whose hidden state predicts ``targets`` [M].
        inverse_temperature: float32 [M].
        expand: int64 [N], prediction of each loss token; ``None`` where it is 0..N-1.
        row: int64 [N], row (0..S-1) of each loss token.
        versions: int64 [S], weight version that sampled a row; -1 where it is not known, or several did.
        sampling_logprobs: float32 [N], the sampler's logprobs, NaN where unknown.
        old_logprobs: float [N], log π_old of the importance ratio; NaN leaves it to the policy, which takes its
            own at the batch's first use (:mod:`lachesis.train.iterations` says when which is right).
        advantages: float32 [S]; or [N], where a sample of the micro-batch has advantages of single tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    key_index: Tensor | None
    max_q: int
    max_k: int
    predict: Tensor
    targets: Tensor
    inverse_temperature: Tensor
    expand: Tensor | None
    row: Tensor
    versions: Tensor
    sampling_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor

    @property
    def num_inputs(self) -> int:
        """T, the tokens that go through the model."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device. To a GPU the tensors go without waiting; what comes from one is there."""
        ahead = device.type != "cpu"  # on the way to a CPU they would be read before they have arrived
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=ahead)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, slots=True)
class Batch:
    """All of one optimizer step.

    ``num_sequences`` and ``num_tokens`` count every row and every loss token of the step, also of rows that
    are wholly masked, or left out of the forward pass because their advantage is 0. ``iteration`` counts from 0
    the uses of one and the same batch, ``num_iterations`` is how often it will be used.
    """

    groups: tuple[Group, ...]
    micro_batches: tuple[MicroBatch, ...]
    num_sequences: int
    num_tokens: int
    skipped_sequences: int = 0
    iteration: int = 0
    num_iterations: int = 1


class _Row(NamedTuple):
    """A sample of the batch, and where its old logprobs are from."""

    sample: Sample
    old_logprobs: OldLogprobs


@dataclass(frozen=True, slots=True)
class _Unit:
    """A prompt with distinct completions and the rows that have them: what packing moves around."""

    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[tuple[int, ...], tuple[_Row, ...]], ...]

    @property
    def num_inputs(self) -> int:
        return len(self.prompt_ids) + sum(len(ids) - 1 for ids, _ in self.completions)

    @property
    def num_rows(self) -> int:
        """Sequences that go through the model: equal completions are one."""
        return len(self.completions)


def pack(
    groups: Sequence[Group],
    *,
    max_tokens: int,
    max_rows: int | None = None,
    skip_zero_advantage: bool = False,
    mask_truncated: bool = False,
    share_prompts: bool = True,
    old_logprobs: OldLogprobs = "sampler",
    replayed_old_logprobs: OldLogprobs = "sampler",
) -> Batch:
    """Pack scored groups (advantages set) into micro-batches of at most ``max_tokens`` inputs.

    A sequence longer than the budget goes alone.

    Args:
        max_rows: most sequences in one forward pass; equal completions of a group go through it as one.
        skip_zero_advantage: leave rows whose advantage is 0 out of the forward pass. Right only where nothing
            but the advantage gives them a gradient: ``Policy.ignores_zero_advantage``.
        mask_truncated: no token of a completion that did not end by itself counts. Its reward has shaped the
            group's baseline, and the row still counts in ``num_sequences``, as in TRL.
        share_prompts: ``False`` gives each sample a segment of its own with its whole sequence, for models whose
            attention cannot be replaced.
        old_logprobs, replayed_old_logprobs: what the importance ratio compares with, for fresh groups and for
            those from the replay buffer.

    Raises:
        TrainingError: no sample has a token to learn from (truncated ones aside: a step may consist of them),
            or a sample is malformed.
    """
    rows = [
        _Row(sample, replayed_old_logprobs if group.replayed else old_logprobs)
        for group in groups
        for sample in group.samples
    ]
    counted = [row for row in rows if any(row.sample.loss_mask())]
    if not counted:
        raise TrainingError(
            f"none of the {len(groups)} groups of this step has a completion token to learn from",
            remedy="look at the rollouts in the run directory: are all completions empty or masked?",
        )
    for row in counted:
        _require_whole(row.sample)
    if mask_truncated:
        counted = [row for row in counted if row.sample.finish_reason == "stop"]
    kept = [row for row in counted if not skip_zero_advantage or _teaches(row.sample)]
    # The longest first: sequences of one length meet, and the last micro-batch is the fullest it can be.
    units = sorted(
        _units(kept, max_tokens=max_tokens, max_rows=max_rows, share_prompts=share_prompts),
        key=lambda unit: unit.num_inputs,
        reverse=True,
    )
    return Batch(
        groups=tuple(groups),
        micro_batches=tuple(_collate(bin_) for bin_ in _fill(units, max_tokens=max_tokens, max_rows=max_rows)),
        num_sequences=len(rows),
        num_tokens=sum(sum(row.sample.loss_mask()) for row in counted),
        skipped_sequences=len(counted) - len(kept),
    )


def _teaches(sample: Sample) -> bool:
    """Whether the advantage of any of its tokens is not 0."""
    return bool(sample.advantage) or any(sample.token_advantages or ())


def _require_whole(sample: Sample) -> None:
    tokens = len(sample.completion_ids)
    whole = sample.token_advantages is None or len(sample.token_advantages) == tokens
    if whole and sample.prompt_ids and len(sample.logprobs) == tokens == len(sample.loss_mask()):
        return
    raise TrainingError(
        f"a sample with {len(sample.prompt_ids)} prompt and {tokens} completion tokens has {len(sample.logprobs)} "
        f"logprobs and a mask of {len(sample.loss_mask())}",
        remedy="give a prompt, and for each completion token a logprob (NaN where unknown) and a mask value",
    )


def _units(rows: Sequence[_Row], *, max_tokens: int, max_rows: int | None, share_prompts: bool) -> Iterator[_Unit]:
    """Distinct completions by prompt, cut where a prompt's completions exceed a micro-batch."""
    if not share_prompts:
        for row in rows:
            yield _Unit(row.sample.prompt_ids, ((row.sample.completion_ids, (row,)),))
        return
    by_prompt: dict[tuple[int, ...], dict[tuple, list[_Row]]] = {}
    for row in rows:
        sample = row.sample
        # Samples with other loss masks or temperatures have other predictions: they are not duplicates.
        key = (sample.completion_ids, sample.mask, sample.temperature)
        by_prompt.setdefault(sample.prompt_ids, {}).setdefault(key, []).append(row)
    for prompt_ids, completions in by_prompt.items():
        kept: list[tuple[tuple[int, ...], tuple[_Row, ...]]] = []
        inputs, num_rows = len(prompt_ids), 0
        for (completion_ids, _, _), same in completions.items():
            inputs, num_rows = inputs + len(completion_ids) - 1, num_rows + 1
            if kept and (inputs > max_tokens or (max_rows is not None and num_rows > max_rows)):
                yield _Unit(prompt_ids, tuple(kept))
                kept, inputs, num_rows = [], len(prompt_ids) + len(completion_ids) - 1, 1
            kept.append((completion_ids, tuple(same)))
        yield _Unit(prompt_ids, tuple(kept))


def _fill(units: Sequence[_Unit], *, max_tokens: int, max_rows: int | None) -> list[list[_Unit]]:
    """First-fit decreasing bin packing by inputs (and rows)."""
    bins: list[list[_Unit]] = []
    tokens: list[int] = []
    rows: list[int] = []
    for unit in units:
        num_inputs, num_rows = unit.num_inputs, unit.num_rows
        for i in range(len(bins)):
            if tokens[i] + num_inputs <= max_tokens and (max_rows is None or rows[i] + num_rows <= max_rows):
                break
        else:
            i = len(bins)
            bins.append([])
            tokens.append(0)
            rows.append(0)
        bins[i].append(unit)
        tokens[i] += num_inputs
        rows[i] += num_rows
    return bins


class _Stream:
    """Collects one micro-batch as plain lists, segment by segment."""

    def __init__(self) -> None:
        self.input_ids: list[int] = []
        self.position_ids: list[int] = []
        self.key_index: list[int] = []
        self.len_q: list[int] = []
        self.len_k: list[int] = []
        self.predict: list[int] = []
        self.targets: list[int] = []
        self.inverse_temperature: list[float] = []
        self.expand: list[int] = []
        self.row: list[int] = []
        self.versions: list[int] = []
        self.sampling_logprobs: list[float] = []
        self.old_logprobs: list[float] = []
        self.advantages: list[float] = []
        self.token_advantages: list[float] = []
        self.by_token = False

    def add_segment(self, ids: Sequence[int], *, context: Sequence[int]) -> range:
        """Append ``ids``, which see the stream positions ``context`` and themselves; returns their positions."""
        start = len(self.input_ids)
        positions = range(start, start + len(ids))
        self.input_ids.extend(ids)
        self.position_ids.extend(range(len(context), len(context) + len(ids)))
        self.key_index.extend(context)
        self.key_index.extend(positions)
        self.len_q.append(len(ids))
        self.len_k.append(len(context) + len(ids))
        return positions

    def add_rows(self, rows: Sequence[_Row], *, predicted_at: Sequence[int]) -> None:
        """Append the loss tokens of equal completions, by the positions that predict all of their tokens."""
        first = rows[0].sample
        counted = [i for i, counts in enumerate(first.loss_mask()) if counts]
        offset = len(self.predict)
        self.predict.extend(predicted_at[i] for i in counted)
        self.targets.extend(first.completion_ids[i] for i in counted)
        # Greedy samples (temperature 0) have the logprobs of temperature 1.
        self.inverse_temperature.extend([1.0 / (first.temperature or 1.0)] * len(counted))
        for sample, old_logprobs in rows:
            self.expand.extend(range(offset, offset + len(counted)))
            self.row.extend([len(self.advantages)] * len(counted))
            span = sample.versions
            self.versions.append(span.first if span.first == span.last else UNKNOWN_VERSIONS.first)
            sampled = [sample.logprobs[i] for i in counted]
            self.sampling_logprobs.extend(sampled)
            self.old_logprobs.extend(sampled if old_logprobs == "sampler" else [math.nan] * len(counted))
            self.advantages.append(sample.advantage or 0.0)
            added = sample.token_advantages
            self.by_token |= added is not None
            self.token_advantages.extend((sample.advantage or 0.0) + (added[i] if added else 0.0) for i in counted)


def _collate(units: Sequence[_Unit]) -> MicroBatch:
    stream = _Stream()
    for unit in units:
        if len(unit.completions) == 1:  # one ordinary causal segment
            ((completion_ids, rows),) = unit.completions
            whole = stream.add_segment(unit.prompt_ids + completion_ids[:-1], context=())
            stream.add_rows(rows, predicted_at=whole[len(unit.prompt_ids) - 1 :])
            continue
        prompt = stream.add_segment(unit.prompt_ids, context=())
        for completion_ids, rows in unit.completions:
            inputs = completion_ids[:-1]
            own = stream.add_segment(inputs, context=prompt) if inputs else range(0)
            stream.add_rows(rows, predicted_at=[prompt[-1], *own])
    return _tensors(stream)


def plain_micro_batch(token_ids: Sequence[int]) -> MicroBatch:
    """One sequence whose every token but the first is predicted, at temperature 1; no advantage."""
    prompt, completion = tuple(token_ids[:1]), tuple(token_ids[1:])
    sample = Sample(prompt, completion, (math.nan,) * len(completion), "stop", UNKNOWN_VERSIONS)
    return _collate([_Unit(prompt, ((completion, (_Row(sample, "sampler"),)),))])


def idle_micro_batch() -> MicroBatch:
    """A pass through the model without a loss token: its loss and its gradients are 0.

    Sharded ranks meet in collectives at every pass. One that has fewer micro-batches than another takes part
    with these; a constant in their place would leave the others waiting.
    """
    index, values = torch.empty(0, dtype=torch.int64), torch.empty(0)
    plain = plain_micro_batch((0, 0))
    return dataclasses.replace(plain, expand=index, row=index, sampling_logprobs=values, old_logprobs=values)


def _tensors(stream: _Stream) -> MicroBatch:
    long = lambda values: torch.tensor(values, dtype=torch.int64)  # noqa: E731
    shared = len(stream.key_index) != len(stream.input_ids)
    duplicated = len(stream.expand) != len(stream.predict)
    return MicroBatch(
        input_ids=long(stream.input_ids),
        position_ids=long(stream.position_ids),
        cu_seq_q=_cumulative(stream.len_q),
        cu_seq_k=_cumulative(stream.len_k),
        key_index=long(stream.key_index) if shared else None,
        max_q=max(stream.len_q),
        max_k=max(stream.len_k),
        predict=long(stream.predict),
        targets=long(stream.targets),
        inverse_temperature=torch.tensor(stream.inverse_temperature, dtype=torch.float32),
        expand=long(stream.expand) if duplicated else None,
        row=long(stream.row),
        versions=long(stream.versions),
        sampling_logprobs=torch.tensor(stream.sampling_logprobs, dtype=torch.float32),
        old_logprobs=torch.tensor(stream.old_logprobs, dtype=torch.float32),
        advantages=torch.tensor(stream.token_advantages if stream.by_token else stream.advantages, dtype=torch.float32),
    )


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


# --- several ranks -----------------------------------------------------------------------------------------


def split(batch: Batch, ranks: int) -> list[Batch]:
    """A batch for each rank: micro-batch i goes to rank i mod ``ranks``.

    Ranks meet at every pass, which takes as long as the largest of its micro-batches. They are packed from the
    largest to the smallest, so that dealing them in order brings equals together. The counts of the step stay with
    rank 0: over all ranks they add up to what they were. Groups are no business of a policy.
    """
    none: dict[str, Any] = {"groups": (), "num_sequences": 0, "num_tokens": 0, "skipped_sequences": 0}
    return [
        dataclasses.replace(batch, micro_batches=micro_batches, **(none if rank else {}))
        for rank, micro_batches in enumerate(deal(batch.micro_batches, ranks))
    ]


def deal(items: Sequence[T], ranks: int) -> list[tuple[T, ...]]:
    """Item i to rank i mod ``ranks``."""
    return [tuple(items[rank::ranks]) for rank in range(ranks)]


def collect(parts: Sequence[Sequence[T]]) -> list[T]:
    """The reverse of :func:`deal`."""
    missing = object()
    rounds = zip_longest(*parts, fillvalue=missing)
    return [item for items in rounds for item in items if item is not missing]  # type: ignore[misc]


def pack_for_ranks(groups: Sequence[Group], *, ranks: int, max_tokens: int, **options: Any) -> Batch:
    """As :func:`pack`, in micro-batches that keep all ranks busy.

    One that holds all that a device may take at once leaves others idle where there is no second one. So smaller ones
    are tried too, as many as make full passes, and taken where the passes are shorter then.
    """
    batch = pack(groups, max_tokens=max_tokens, **options)
    if ranks == 1 or not batch.micro_batches:
        return batch
    passes = -(-len(batch.micro_batches) // ranks)
    total = sum(micro.num_inputs for micro in batch.micro_batches)
    even = pack(groups, max_tokens=min(max_tokens, -(-total // (passes * ranks))), **options)
    return min((batch, even), key=lambda packed: passes_cost(packed, ranks))


def passes_cost(batch: Batch, ranks: int) -> int:
    """Tokens that the passes of a split batch take time for: the largest micro-batch of each pass."""
    sizes = [micro.num_inputs for micro in batch.micro_batches]
    return sum(max(sizes[start : start + ranks]) for start in range(0, len(sizes), ranks))
