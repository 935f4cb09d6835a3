"""Conversion of a request's data to micro-batches: each datum a separate sequence, with a target at every token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lachesis.common.errors import DataError
from lachesis.plugins.tinker.losses import loss_named, options_of
from lachesis.plugins.tinker.records import Datum, Pass
from lachesis.train.batch import MicroBatch


def check_pass(asked: Pass, *, vocab_size: int, max_context: int) -> None:
    """Raise DataError, before anything is computed, if a datum or an option is wrong."""
    options_of(asked.loss, asked.options)
    if not asked.data:
        raise DataError("the request has no data", remedy="send at least one datum")
    for number, datum in enumerate(asked.data):
        if wrong := _wrong(datum, names=loss_named(asked.loss).inputs, vocab_size=vocab_size, max_context=max_context):
            raise DataError(f"datum {number} {wrong}", remedy="correct it and send the request again")


def micro_batches(data: Sequence[Datum], *, max_tokens: int) -> Iterator[tuple[Sequence[Datum], MicroBatch]]:
    """Yield the data in order, packed up to ``max_tokens``; a longer datum goes alone."""
    part: list[Datum] = []
    room = max_tokens
    for datum in data:
        if part and datum.tokens.size > room:
            yield part, _micro_batch(part)
            part, room = [], max_tokens
        part.append(datum)
        room -= datum.tokens.size
    yield part, _micro_batch(part)


def loss_inputs(data: Sequence[Datum], *, names: Sequence[str], device: torch.device) -> Mapping[str, Tensor]:
    """Return the loss function's inputs, each float32 [T] over the tokens of all data."""
    return {name: torch.from_numpy(np.concatenate([d.inputs[name] for d in data])).to(device) for name in names}


def _wrong(datum: Datum, *, names: Sequence[str], vocab_size: int, max_context: int) -> str:
    """Describe the error of a datum; empty if it has none."""
    length = datum.tokens.size
    if not 0 < length <= max_context:
        return f"has {length} tokens, and from 1 to {max_context} are allowed"
    if datum.targets.shape != (length,):
        return f"has target_tokens of shape {list(datum.targets.shape)} for {length} tokens: only [T] is served"
    for what, ids in (("model_input", datum.tokens), ("target_tokens", datum.targets)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            return f"has token ids outside of 0 to {vocab_size - 1} in {what}"
    if missing := [name for name in names if name not in datum.inputs]:
        return f"has no {missing[0]!r} in loss_fn_inputs"
    if unknown := [name for name in datum.inputs if name not in names]:
        return f"has {unknown[0]!r} in loss_fn_inputs, which this loss function does not take"
    for name, values in datum.inputs.items():
        if values.shape != (length,):
            return f"has {name} of shape {list(values.shape)} for {length} tokens"
        if not np.isfinite(values).all():
            return f"has values in {name} that are not finite"
    if "sequence_ratio_mask" in names and not datum.inputs["sequence_ratio_mask"].any():
        return "has a sequence_ratio_mask that marks no token, so its ratio is undefined"
    return ""


def _micro_batch(data: Sequence[Datum]) -> MicroBatch:
    lengths = [datum.tokens.size for datum in data]
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    total = sum(lengths)
    unknown = torch.full((total,), torch.nan)
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate([datum.tokens for datum in data])),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seq_q=ends,
        cu_seq_k=ends,
        key_index=None,
        max_q=max(lengths),
        max_k=max(lengths),
        predict=torch.arange(total),
        targets=torch.from_numpy(np.concatenate([datum.targets for datum in data])),
        inverse_temperature=torch.ones(total),
        expand=None,
        row=torch.repeat_interleave(torch.arange(len(data)), torch.tensor(lengths)),
        versions=torch.full((len(data),), -1),
        sampling_logprobs=unknown,
        old_logprobs=unknown,
        advantages=torch.zeros(len(data)),
        teacher_weights=torch.zeros(len(data)),
    )
