"""Packing of scored groups into micro-batches, and their division among ranks.

A micro-batch is one stream of tokens without padding, in which the sequences of a group form a prefix tree: a prefix
that two of them share occurs once, whether it is the prompt, the turns before they part, or a whole earlier turn. A
token attends only to earlier tokens of its own sequence. This is written down as *segments*: runs of queries with the
keys they may see, causal and aligned at the end. Each sequence that is not a prefix of another is a
segment: its queries are the tokens that no earlier sequence has, its keys are all of its tokens. So there are never
    more keys than tokens without sharing, however the tree branches.

The last token of a completion predicts nothing and is not an input. Predictions that are equal, with everything before
them, are made once and read by every sample that has them.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, compress, repeat, zip_longest
from typing import Any, Literal, TypeAlias, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from lachesis.common.errors import TrainingError
from lachesis.common.prompt_images import PromptImages, with_later
from lachesis.common.teacher_logprobs import NO_TOKEN, TeacherLogprobs
from lachesis.common.types import UNKNOWN_VERSIONS, Group, Sample
from lachesis.train.packing import Inputs, OldLogprobs, Part, Row, Shares, Unit, arrange, flat, trees
from lachesis.train.route_tensors import Stretch, routed_tensor

T = TypeVar("T")
Objective = Literal["policy", "sft"]
"""Objective of a batch: a policy-gradient loss, or the likelihood of its tokens."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of one forward and backward pass: T inputs, G segments, M predictions, N loss tokens, S rows.

    Attributes:
        input_ids, position_ids: int64 [T]; positions count from each sequence's own start.
        cu_seq_q: int32 [G+1], where each segment's queries begin and end in the stream.
        cu_seq_k: int32 [G+1], where each segment's keys begin and end in ``key_index``.
        key_index: int64 [K], stream positions of the keys; ``None`` if the keys are the queries themselves.
        max_q, max_k: longest segment.
        predict: int64 [M], stream positions whose hidden state predicts ``targets`` [M].
        inverse_temperature: float32 [M].
        expand: int64 [N], prediction of each loss token; ``None`` where it is 0..N-1.
        row: int64 [N], row (0..S-1) of each loss token.
        versions: int64 [S], weight version that sampled a row; -1 if it is unknown, or if there were several.
        sampling_logprobs: float32 [N], the sampler's logprobs, NaN where unknown.
        old_logprobs: float [N], log π_old of the importance ratio; NaN means the policy's own at the batch's first use
            (:mod:`lachesis.train.iterations` says when that is right).
        advantages: float32 [S]; or [N] if a sample of the micro-batch has advantages of single tokens.
        teacher_weights: float32 [S], the factor of the teacher's part of each row's loss.
        teacher_ids: int64 [M, K], the likeliest tokens of a teacher outside the trainer; -1 if it named fewer.
        teacher_logprobs: float32 [M, K] of these.
        teacher_sampled: float32 [M] of the targets, NaN where unknown. All three are ``None`` without teacher logprobs.
        routed: int16 [T, L, K], the experts that the engine used for the inputs, -1 where unknown; ``None`` if all are
            unknown.
        images: the images of each segment's prompt; empty if no prompt has images.
        taught: the completions after the prompts of the policy's own teacher; ``None`` without such a teacher.
        taught_index: int64 [M], the teacher's prediction for each; -1 where there is none.
        teacher: number of the only teacher of all rows, among several.
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
    teacher_weights: Tensor
    teacher_ids: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_sampled: Tensor | None = None
    routed: Tensor | None = None
    images: tuple[PromptImages | None, ...] = ()
    taught: MicroBatch | None = None
    taught_index: Tensor | None = None
    teacher: int = 0

    @property
    def num_inputs(self) -> int:
        """Return T, the number of tokens that go through the model."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on a device.

        Copies to a GPU do not wait; a copy from one is complete on return.
        """
        if self.input_ids.device == device:  # all are on one
            return self
        moved: dict[str, Any] = {
            field.name: _moved(value, device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        moved["taught"] = None if self.taught is None else self.taught.to(device)
        return dataclasses.replace(self, **moved)


def _moved(values: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":  # an asynchronous copy to a CPU could be read before it has arrived
        return values.to(device)
    # A copy from memory that is not pinned waits for all queued work, and the queue runs dry meanwhile.
    pinned = values if values.is_cuda else values.pin_memory()
    return pinned.to(device, non_blocking=True)


class MicroBatches(Sequence[MicroBatch]):
    """Micro-batches of a batch, each made when it is first read, and then kept.

    A GPU therefore works on one while the next is made, instead of waiting for all of them.
    """

    def __init__(self, makers: Iterable[Callable[[], MicroBatch]]) -> None:
        self._makers = tuple(makers)

    @classmethod
    def of(cls, passes: Iterable[Sequence[Unit]], *, share_prefixes: bool) -> MicroBatches:
        """Return a micro-batch for the units of each pass."""
        return cls(cache(partial(_collate, units, share_prefixes=share_prefixes)) for units in passes)

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> MicroBatches: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | MicroBatches:
        return MicroBatches(self._makers[index]) if isinstance(index, slice) else self._makers[index]()


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed data of one optimizer step.

    ``num_sequences`` and ``num_tokens`` count every row and every loss token of the step, including rows that are
    wholly masked, or left out of the forward pass because their advantage is 0. Of the other rows' inputs,
    ``flat_tokens`` counts all, ``distinct_tokens`` only those that differ within their group or follow different
    tokens. ``iteration`` counts the uses of one batch from 0, up to ``num_iterations``.
    """

    groups: tuple[Group, ...]
    micro_batches: Sequence[MicroBatch]
    num_sequences: int
    num_tokens: int
    skipped_sequences: int = 0
    distinct_tokens: int = 0
    flat_tokens: int = 0
    iteration: int = 0
    num_iterations: int = 1
    objective: Objective = "policy"

    @property
    def lacks_old_logprobs(self) -> bool:
        """Return True if some log π_old is the trainer's, and is not computed yet."""
        return any(bool(micro.old_logprobs.isnan().any()) for micro in self.micro_batches)


def pack(
    groups: Sequence[Group],
    *,
    max_tokens: int,
    max_rows: int | None = None,
    skip_zero_advantage: bool = False,
    mask_truncated: bool = False,
    share_prefixes: bool = True,
    old_logprobs: OldLogprobs = "sampler",
    replayed_old_logprobs: OldLogprobs = "sampler",
    shares: Callable[[Group], Shares] = lambda group: Shares(),
    ranks: int = 1,
) -> Batch:
    """Pack scored groups (advantages set) into micro-batches of at most ``max_tokens`` inputs.

    A sequence longer than the budget goes alone.

    Args:
        max_rows: most sequences in one forward pass; equal ones of a group go through it as one.
        skip_zero_advantage: leave rows whose advantage is 0 out of the forward pass. Right only if the advantage alone
            gives them a gradient: ``Policy.ignores_zero_advantage``.
        mask_truncated: exclude the tokens of completions that did not end by themselves. Their rewards still shape the
            group's baseline, and their rows count in ``num_sequences``, as in TRL.
        share_prefixes: ``False`` gives each sample a separate segment with its whole sequence, for models whose
            attention cannot be replaced.
        old_logprobs, replayed_old_logprobs: the old policy of the importance ratio, for fresh groups and for those from
            the replay buffer.
        shares: weights of the rewards and of a teacher in each group's loss.
        ranks: number of ranks that share the micro-batches (:func:`split`), which are then as even as keeps all busy.

    Raises:
        TrainingError: no sample has a token to learn from (unless all are truncated), or a sample is malformed.
    """
    rows = [
        row
        for number, group in enumerate(groups)
        for row in _rows(group, number, replayed_old_logprobs if group.replayed else old_logprobs, shares(group))
    ]
    counted = _learnable(rows, groups=len(groups))
    if mask_truncated:
        counted = [row for row in counted if row.sample.finish_reason == "stop"]
    kept = [row for row in counted if not skip_zero_advantage or _teaches(row.sample)]
    whole = [*trees(kept)]
    passes: list[list[Unit]] = []
    numbers = sorted({row.shares.number for row in kept})
    for number in numbers:  # a pass has one teacher
        mine = [*trees([row for row in kept if row.shares.number == number])]
        passes += arrange(mine, max_tokens=max_tokens, max_rows=max_rows, share_prefixes=share_prefixes, ranks=ranks)
    if len(numbers) > 1:
        passes.sort(key=lambda units: -sum(unit.num_inputs for unit in units))
    return Batch(
        groups=tuple(groups),
        micro_batches=MicroBatches.of(passes, share_prefixes=share_prefixes),
        num_sequences=len(rows),
        num_tokens=sum(row.sample.num_learned for row in counted),
        skipped_sequences=len(counted) - len(kept),
        distinct_tokens=sum(tree.num_inputs for tree in whole),
        flat_tokens=sum(len(part.sequence.ids) * len(part.sequence.rows) for tree in whole for part in tree.parts),
    )


def _rows(group: Group, number: int, old_logprobs: OldLogprobs, shares: Shares) -> list[Row]:
    return [
        Row(sample, old_logprobs, number, shares, with_later(group.prompt.images, sample.images))
        for sample in group.samples
    ]


def _learnable(rows: Sequence[Row], *, groups: int) -> list[Row]:
    """Return the rows with a token to learn from. Raises TrainingError if there are none, or one is malformed."""
    counted = [row for row in rows if row.sample.num_learned]
    if not counted:
        raise TrainingError(
            f"none of the {groups} groups of this step has a completion token to learn from",
            remedy="check in the run directory's rollouts if all completions are empty or masked",
        )
    for row in counted:
        _require_whole(row.sample)
    return counted


def _teaches(sample: Sample) -> bool:
    """Return True if any token of the sample has an advantage other than 0."""
    return bool(sample.advantage) or any(sample.token_advantages or ())


def _require_whole(sample: Sample) -> None:
    tokens = len(sample.completion_ids)
    inputs = len(sample.prompt_ids) + tokens - 1
    if sample.routed is not None and len(sample.routed) != inputs:
        raise TrainingError(
            f"a sample with {inputs} inputs has routed experts for {len(sample.routed)}",
            remedy="give the experts of all tokens of prompt and completion except the last",
        )
    whole = sample.token_advantages is None or len(sample.token_advantages) == tokens
    masked = sample.mask is None or len(sample.mask) == tokens
    if whole and masked and sample.prompt_ids and len(sample.logprobs) == tokens:
        return
    raise TrainingError(
        f"a sample with {len(sample.prompt_ids)} prompt and {tokens} completion tokens has {len(sample.logprobs)} "
        f"logprobs and a mask of {len(sample.loss_mask())}",
        remedy="give a prompt, and for each completion token a logprob (NaN where unknown) and a mask value",
    )


class _Stream:
    """Builder of one micro-batch, which collects plain lists segment by segment."""

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
        self.teacher_weights: list[float] = []
        self.teacher_number = 0
        self.teacher: list[Said] = []  # for each prediction
        self.routes: list[Stretch] = []
        self.images: list[PromptImages | None] = []  # for each segment
        self.numbers: list[tuple[Row, Sequence[int]]] = []  # the predictions of each row
        self.by_token = False

    def add_segment(self, ids: Sequence[int], *, context: Sequence[int]) -> range:
        """Append ``ids``, which see the stream positions ``context`` and themselves; return their positions."""
        start = len(self.input_ids)
        positions = range(start, start + len(ids))
        self.input_ids.extend(ids)
        self.position_ids.extend(range(len(context), len(context) + len(ids)))
        self.key_index.extend(context)
        self.key_index.extend(positions)
        self.len_q.append(len(ids))
        self.len_k.append(len(context) + len(ids))
        return positions

    def add_sequence(self, sequence: Inputs, *, path: Sequence[int], overlap: int, known: dict[tuple, int]) -> None:
        """Append the loss tokens of a sequence whose inputs stand at the stream positions ``path``.

        Predictions at the first ``overlap`` of them may belong to other sequences too: ``known`` has their numbers.
        """
        sample, before = sequence.rows[0].sample, sequence.prompt_tokens - 1
        mask = sample.loss_mask()
        counted = [*compress(range(len(mask)), mask)]
        places, targets = [*compress(path[before:], mask)], [*compress(sample.completion_ids, mask)]
        # Greedy samples (temperature 0) have the logprobs of temperature 1.
        inverse = 1.0 / (sample.temperature or 1.0)
        number_shared = bisect_left(counted, overlap - before)
        numbers: list[int] = []
        for i, place, target in zip(counted[:number_shared], places, targets, strict=False):
            numbers.append(known.setdefault((place, target, inverse, sample.teacher_prompt_ids), len(self.predict)))
            if numbers[-1] == len(self.predict):
                self._predict([place], [target], inverse)
                self.teacher.append((sample.teacher, i))
        own = counted[number_shared:]
        numbers.extend(range(len(self.predict), len(self.predict) + len(own)))
        self._predict(places[number_shared:], targets[number_shared:], inverse)
        self.teacher.extend(zip(repeat(sample.teacher), own))
        for row in sequence.rows:
            self._add_row(row, mask, numbers)

    def _predict(self, positions: Sequence[int], targets: Sequence[int], inverse_temperature: float) -> None:
        self.predict.extend(positions)
        self.targets.extend(targets)
        self.inverse_temperature.extend([inverse_temperature] * len(positions))

    def _add_row(self, row: Row, mask: Sequence[int], numbers: Sequence[int]) -> None:
        """Append a sample; the tokens that ``mask`` counts are the predictions ``numbers``."""
        sample = row.sample
        self.numbers.append((row, numbers))
        self.expand.extend(numbers)
        self.row.extend([len(self.advantages)] * len(numbers))
        span = sample.versions
        self.versions.append(span.first if span.first == span.last else UNKNOWN_VERSIONS.first)
        sampled = [*compress(sample.logprobs, mask)]
        self.sampling_logprobs.extend(sampled)
        self.old_logprobs.extend(sampled if row.old_logprobs == "sampler" else [math.nan] * len(numbers))
        self.teacher_weights.append(row.shares.teacher)
        self.teacher_number = row.shares.number
        advantage, added = sample.advantage or 0.0, sample.token_advantages
        self.by_token |= added is not None
        self.advantages.append(row.shares.reward * advantage)
        counted = compress(added, mask) if added else [0.0] * len(numbers)
        self.token_advantages.extend([row.shares.reward * (advantage + value) for value in counted])


def _leaf(parts: Sequence[Part], place: int) -> int:
    """Return the index of the longest sequence that the one at ``place`` is a prefix of, or ``place`` itself."""
    while place + 1 < len(parts) and parts[place + 1].shared == len(parts[place].sequence.ids):
        place += 1
    return place


def _collate(units: Sequence[Unit], *, share_prefixes: bool = True) -> MicroBatch:
    stream = _streamed(units)
    return dataclasses.replace(_tensors(stream), **_own_teacher(stream, share_prefixes=share_prefixes))


def _own_teacher(stream: _Stream, *, share_prefixes: bool) -> dict[str, Any]:
    """Return ``taught`` and ``taught_index`` of the rows whose teacher has a prompt; empty without such rows."""
    taught = [(row, numbers) for row, numbers in stream.numbers if row.sample.teacher_prompt_ids]
    if not taught:
        return {}
    own = [
        row._replace(
            sample=dataclasses.replace(
                row.sample,
                prompt_ids=row.sample.teacher_prompt_ids or (),
                teacher_prompt_ids=None,
                teacher=None,
                routed=None,
            )
        )
        for row, _ in taught
    ]
    whole = [*trees(own)]
    second = _streamed(whole if share_prefixes else [unit for tree in whole for unit in flat(tree)])
    places = {id(row.sample): numbers for row, numbers in second.numbers}
    index = torch.full((len(stream.predict),), -1, dtype=torch.int64)
    for (_, numbers), row in zip(taught, own, strict=True):
        index[[*numbers]] = torch.tensor([*places[id(row.sample)]], dtype=torch.int64)
    return {"taught": _tensors(second), "taught_index": index}


def _streamed(units: Sequence[Unit]) -> _Stream:
    stream = _Stream()
    for unit in units:
        path: list[int] = []
        known: dict[tuple, int] = {}
        leaf = -1
        for place, (sequence, shared) in enumerate(unit.parts):
            if place > leaf:
                leaf = _leaf(unit.parts, place)
                whole, context = unit.parts[leaf].sequence, path[:shared]
                path = [*context, *stream.add_segment(whole.ids[shared:], context=context)]
                # Shared inputs go through the experts of the first sequence that has them.
                stream.routes.append(Stretch(whole.rows[0].sample.routed, shared, len(whole.ids)))
                stream.images.append(whole.rows[0].images)
            # In the order of the tree no later sequence shares more than the next one does.
            following = unit.parts[place + 1].shared if place + 1 < len(unit.parts) else 0
            stream.add_sequence(sequence, path=path, overlap=max(shared, following), known=known)
    return stream


def plain_micro_batch(token_ids: Sequence[int]) -> MicroBatch:
    """Return one sequence whose every token but the first is predicted, at temperature 1, without advantages."""
    prompt, completion = tuple(token_ids[:1]), tuple(token_ids[1:])
    sample = Sample(prompt, completion, (math.nan,) * len(completion), "stop", UNKNOWN_VERSIONS)
    sequence = Inputs(prompt + completion[:-1], len(prompt), (Row(sample, "sampler", 0),))
    return _collate([Unit((Part(sequence, 0),))])


def idle_micro_batch() -> MicroBatch:
    """Return a pass through the model without a loss token: its loss and its gradients are 0.

    Sharded ranks meet in collectives at every pass. A rank with fewer micro-batches than another takes part with idle
    passes; otherwise the others would wait.
    """
    index, values = torch.empty(0, dtype=torch.int64), torch.empty(0)
    plain = plain_micro_batch((0, 0))
    return dataclasses.replace(plain, expand=index, row=index, sampling_logprobs=values, old_logprobs=values)


def _tensors(stream: _Stream) -> MicroBatch:
    long, real = partial(_tensor, dtype=np.int64), partial(_tensor, dtype=np.float32)
    shared = len(stream.key_index) != len(stream.input_ids)
    teacher = teacher_tensors(stream.teacher)
    duplicated = len(stream.expand) != len(stream.predict)  # each prediction is of some loss token
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
        inverse_temperature=real(stream.inverse_temperature),
        expand=long(stream.expand) if duplicated else None,
        row=long(stream.row),
        versions=long(stream.versions),
        sampling_logprobs=real(stream.sampling_logprobs),
        old_logprobs=real(stream.old_logprobs),
        advantages=real(stream.token_advantages if stream.by_token else stream.advantages),
        teacher_weights=real(stream.teacher_weights),
        teacher_ids=teacher.get("teacher_ids"),
        teacher_logprobs=teacher.get("teacher_logprobs"),
        teacher_sampled=teacher.get("teacher_sampled"),
        teacher=stream.teacher_number,
        routed=routed_tensor(stream.routes),
        images=tuple(stream.images) if any(stream.images) else (),
    )


def _tensor(values: Sequence[float], *, dtype: type[np.number]) -> Tensor:
    """Convert a list to a tensor through numpy, because ``torch.tensor`` takes three times as long."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return _tensor([0, *accumulate(lengths)], dtype=np.int32)


# --- several ranks -----------------------------------------------------------------------------------------


def split(batch: Batch, ranks: int) -> list[Batch]:
    """Split a batch among ranks: micro-batch i goes to rank i mod ``ranks``.

    Ranks meet at every pass, which takes as long as the largest of its micro-batches. They are packed from the largest
    to the smallest, so that dealing them in order gives ranks passes of equal size. The counts of the step stay with
    rank 0: summed over ranks they are unchanged. Groups are left out, because a policy does not use them.
    """
    counts = ("num_sequences", "num_tokens", "skipped_sequences", "distinct_tokens", "flat_tokens")
    none: dict[str, Any] = {"groups": ()} | dict.fromkeys(counts, 0)
    return [
        dataclasses.replace(batch, micro_batches=micro_batches, **(none if rank else {}))
        for rank, micro_batches in enumerate(deal(batch.micro_batches, ranks))
    ]


def deal(items: Sequence[T], ranks: int) -> list[Sequence[T]]:
    """Deal items to ranks: item i goes to rank i mod ``ranks``."""
    return [items[rank::ranks] for rank in range(ranks)]


def collect(parts: Sequence[Sequence[T]]) -> list[T]:
    """Restore the order of items that :func:`deal` distributed."""
    missing = object()
    rounds = zip_longest(*parts, fillvalue=missing)
    return [item for items in rounds for item in items if item is not missing]  # type: ignore[misc]


Said: TypeAlias = tuple[TeacherLogprobs | None, int]
"""Teacher logprobs of a completion, and the tokens that have them; ``None`` without any."""


def teacher_tensors(said_of: Sequence[Said]) -> dict[str, Tensor]:
    """Return ``teacher_ids``, ``teacher_logprobs`` [M, K] and ``teacher_sampled`` [M]; empty without teacher logprobs.

    K is that of the completion with the most candidates.
    """
    places: dict[int, list[int]] = {}
    records: dict[int, TeacherLogprobs] = {}
    for number, (teacher, _) in enumerate(said_of):
        if teacher is not None:
            records[id(teacher)] = teacher
            places.setdefault(id(teacher), []).append(number)
    if not records:
        return {}
    width = max(teacher.ids.shape[1] for teacher in records.values())
    ids = torch.full((len(said_of), width), NO_TOKEN, dtype=torch.int64)
    logprobs, sampled = torch.zeros(len(said_of), width), torch.full((len(said_of),), math.nan)
    for key, teacher in records.items():
        rows = places[key]
        which, known = [said_of[number][1] for number in rows], teacher.ids.shape[1]
        ids[rows, :known] = torch.from_numpy(teacher.ids[which].astype("int64"))
        logprobs[rows, :known] = torch.from_numpy(teacher.logprobs[which])
        sampled[rows] = torch.from_numpy(teacher.sampled[which])
    return {"teacher_ids": ids, "teacher_logprobs": logprobs, "teacher_sampled": sampled}
