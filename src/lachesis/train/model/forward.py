"""Forward pass that returns logprobs and entropies of a micro-batch's targets, for any causal LM of transformers."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lachesis.common.errors import ModelError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.plugins import load
from lachesis.train.batch import MicroBatch, pack
from lachesis.train.distributed.strategy import run_within
from lachesis.train.model import attention, recurrent
from lachesis.train.model.activations import spares_memory
from lachesis.train.model.attention import AttentionKind
from lachesis.train.model.context import ContextGroup
from lachesis.train.model.first_layers import first_layers_in_float32, has_float32
from lachesis.train.model.head import (
    Logits,
    Read,
    TokenLogprobs,
    logits_of_head,
    logprobs_from_logits,
    read_distributions,
    scaled_logits,
    token_logprobs,
)
from lachesis.train.model.recurrent import RunWays

logger = logging.getLogger(__name__)

HeadKind = Literal["chunked", "model"]
Packing = Literal["auto", "packed", "padded"]
# Tolerances of the probe, in nats, for correct ways of running a model: a model of 32 bits or more, the first layers in
# float32 of a 16-bit model, and a whole model in 16 bits.
_EXACT, _FIRST_LAYERS, _ROUNDED = 1e-4, 1e-3, 0.15
# Rows of the probe that run beside each other, and the largest difference, in nats, that rounding may explain.
_COPIES = 8
_MOST_ROUNDING = 0.6
# The number of token ids from which the probe takes its tokens.
_VOCABULARY = 320
# Settings that limit how far attention sees, with their values during the probe, whose sequences are longer. Doge's
# keep_window_size counts chosen tokens: with few, it chooses among equal scores.
_REACH = re.compile(r"(?<!keep_)(window|window_size|attention_chunk_size|block_size|block_length|local_attention)$")
_PROBED_REACH = 6


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Way of running a model.

    ``attention``: over segments with a variable-length kernel, over segments in buckets, or over padded rows. ``head``:
    ``chunked`` where the logits are a linear map of the last hidden state, else the model computes them itself, at the
    chosen positions only. ``softcap``: what the head does to its logits. ``context``: the ranks that share the tokens
    of a micro-batch, where there are several. ``recurrent``: how its recurrent layers, if any, take runs of a packed
    stream. ``told``: a line on how the model is run, and why not faster.
    """

    attention: AttentionKind
    head: HeadKind
    softcap: float | None = None
    context: ContextGroup | None = field(default=None, compare=False)
    recurrent: RunWays | None = None
    told: str = field(default="", compare=False)

    @property
    def packed(self) -> bool:
        return self.attention != "padded"

    @property
    def words(self) -> str:
        runs = "" if self.recurrent is None else f", recurrent layers {self.recurrent.words}"
        return f"attention {self.attention}{runs}, head {self.head}"


def target_logprobs(
    model: PreTrainedModel, micro: MicroBatch, *, plan: ForwardPlan, read: Read | None = None
) -> TokenLogprobs:
    """Return logprobs and entropies [M] of ``micro.targets`` under the model, at the samples' temperatures.

    Args:
        read: computes a further result from the whole distributions.
    """
    return run_within(model, partial(_target_logprobs, model, micro, plan=plan, read=read))


def _target_logprobs(
    model: PreTrainedModel, micro: MicroBatch, *, plan: ForwardPlan, read: Read | None
) -> TokenLogprobs:
    values, own = _values(model, micro, plan=plan)
    targets, inverse = micro.targets[own], micro.inverse_temperature[own]
    if plan.head == "model":
        found = logprobs_from_logits(values, targets, inverse)
    else:
        weight, bias = _head_of(model)
        spares = spares_memory(model)
        found = token_logprobs(values, weight, targets, inverse, bias=bias, softcap=plan.softcap, keep=not spares)
    found = TokenLogprobs(_whole(found.logprobs, micro, plan=plan), _whole(found.entropies, micro, plan=plan))
    if read is None:
        return found
    return found._replace(read=_read(model, micro, values, own, plan=plan, read=read))


def distributions(model: PreTrainedModel, micro: MicroBatch, *, plan: ForwardPlan, read: Read) -> Tensor:
    """Return the result [M, ...] of ``read`` on the distributions of the predictions, and nothing else."""
    return run_within(model, lambda: _read(model, micro, *_values(model, micro, plan=plan), plan=plan, read=read))


def _read(
    model: PreTrainedModel, micro: MicroBatch, values: Tensor, own: slice, *, plan: ForwardPlan, read: Read
) -> Tensor:
    logits: Logits = scaled_logits
    vocab = values.shape[1]
    if plan.head == "chunked":
        weight, bias = _head_of(model)
        logits, vocab = logits_of_head(weight, bias=bias, softcap=plan.softcap), weight.shape[0]

    def read_own(log_p: Tensor, chunk: slice) -> Tensor:
        return read(log_p, slice(own.start + chunk.start, own.start + chunk.stop))

    inverse = micro.inverse_temperature[own]
    return _whole(read_distributions(values, inverse, logits=logits, read=read_own, vocab=vocab), micro, plan=plan)


def _values(model: PreTrainedModel, micro: MicroBatch, *, plan: ForwardPlan) -> tuple[Tensor, slice]:
    """Return hidden states [m, H] for the head, or logits [m, V] of a model that computes them itself.

    The slice tells which of the micro-batch's predictions they belong to: all, or those that this rank takes.
    """
    module = model if plan.head == "model" else model.base_model
    return _packed(module, micro, plan=plan) if plan.packed else _padded(module, micro)


def _whole(own: Tensor, micro: MicroBatch, *, plan: ForwardPlan) -> Tensor:
    """Gather this rank's values [m, ...] into those of all predictions, [M, ...]."""
    return own if plan.context is None else plan.context.gather(own, total=micro.targets.numel())


def _head_of(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Return the head's weight [V, H] and bias [V]."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} names no output layer")
    return head.weight, getattr(head, "bias", None)


def loss_token_logprobs(
    model: PreTrainedModel, micro: MicroBatch, *, plan: ForwardPlan, read: Read | None = None
) -> TokenLogprobs:
    """Return :func:`target_logprobs` at the loss tokens [N]; rows with equal completions read the same result."""
    found = target_logprobs(model, micro, plan=plan, read=read)
    rows = (None if values is None else at_loss_tokens(values, micro) for values in found)
    return TokenLogprobs(*rows)  # type: ignore[arg-type]


def at_loss_tokens(values: Tensor, micro: MicroBatch) -> Tensor:
    """Map values from the predictions [M] to the loss tokens [N]."""
    return values if micro.expand is None else values.index_select(0, micro.expand)


def _packed(module: torch.nn.Module, micro: MicroBatch, *, plan: ForwardPlan) -> tuple[Tensor, slice]:
    """Return [m, H] of the base model or [m, V] of the whole model, and the slice of predictions they belong to."""
    share = None if plan.context is None else plan.context.share(micro)
    ids, positions, places = (micro.input_ids, micro.position_ids, micro.predict) if share is None else share[:3]
    keep = {"logits_to_keep": places} if plan.head == "model" else {}
    output = module(
        input_ids=ids[None],
        position_ids=positions[None],
        use_cache=False,
        **attention.packing_arguments(micro, kind=plan.attention, context=plan.context, recurrent=plan.recurrent),
        **keep,
    )
    if plan.head == "model":
        values = output.logits.squeeze(0)
    else:
        values = output.last_hidden_state.squeeze(0).index_select(0, places)
    if plan.context is None or share is None:
        return values, slice(0, micro.targets.numel())
    return plan.context.deal(values, share), share.predictions


def _padded(module: torch.nn.Module, micro: MicroBatch) -> tuple[Tensor, slice]:
    """Return [M, H] or [M, V] of a model that takes one right-padded row per sequence, for all predictions."""
    valid = valid_rows(micro)
    rows = torch.zeros(valid.shape, dtype=torch.int64, device=valid.device)
    rows[valid] = micro.input_ids
    seen: dict[str, Tensor] = {}
    if micro.images:
        seen = load("vision", "inputs")(module, micro.images, ids=rows, valid=valid).arguments
    output = module(input_ids=rows, attention_mask=valid.long(), use_cache=False, **seen)
    values = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return values[valid].index_select(0, micro.predict), slice(0, micro.targets.numel())


def valid_rows(micro: MicroBatch) -> Tensor:
    """Mark tokens that are not padding if each sequence is a right-padded row: bool [sequences, longest]."""
    lengths = micro.cu_seq_q.diff().long()
    return torch.arange(micro.max_q, device=lengths.device) < lengths[:, None]


def plan_forward(
    model: PreTrainedModel,
    *,
    packing: Packing,
    device: torch.device | None = None,
    context: ContextGroup | None = None,
) -> ForwardPlan:
    """Choose the fastest way of running the model that reproduces the model's own logprobs, by trying them.

    Args:
        device: where the model computes; where its parameters are, if unset.
        context: the ranks that are to share the tokens of a micro-batch.

    Raises:
        ModelError: ``packing="packed"`` or a ``context`` is wanted, and the model cannot do it.
        ConfigError: its heads do not divide among the ranks of the context.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        # transformers' SDPA leaves out the softcap, which changes the model.
        model.set_attn_implementation("eager")
    device = device or model.device
    with _short_reach(model):
        return _planned(model, packing=packing, device=device, context=context)


def _planned(
    model: PreTrainedModel, *, packing: Packing, device: torch.device, context: ContextGroup | None
) -> ForwardPlan:
    """Return the fastest way of running the model that the probe finds right; as :func:`plan_forward`."""
    trials = _Trials(model, device, _Judge(model, device, alone=context is None))
    takes_attention = any(getattr(model, name, False) for name in ("_supports_attention_backend", "_supports_sdpa"))
    ways = recurrent.ways_of(model, device)
    if ways and context is not None:
        raise _no_context(model, ": its recurrent layers compute each token from the state after the one before")
    if packing != "padded" and (takes_attention or ways):
        plan = trials.packed(ways, takes_attention=takes_attention, context=context)
        if plan is not None:
            return trials.told(plan)
    if context is not None:
        raise _no_context(model, f" ({trials.tried() or 'its attention cannot be replaced'})")
    if packing == "packed":
        raise ModelError(
            f"{type(model).__name__} cannot train on packed sequences: its layers ignore the segments of a pack",
            remedy="set model.packing: auto (or padded), which trains on padded rows",
        )
    if packing != "padded" and not takes_attention:
        trials.differences["packed"] = "its attention cannot be replaced"
    plan = trials.padded()
    if plan is not None:
        return trials.told(plan)
    raise ModelError(
        f"the logits of {type(model).__name__} could not be reproduced, packed or padded ({trials.tried()})",
        remedy="check that it is a causal language model of transformers",
    )


def _no_context(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be trained with context parallelism{reason}",
        remedy="leave out distributed.context_parallel_size",
    )


@dataclass(frozen=True, slots=True)
class _Trials:
    """Ways of running a model that were tried on the probe; ``differences`` describes each one's, empty if right."""

    model: PreTrainedModel
    device: torch.device
    judge: _Judge
    differences: dict[str, str] = field(default_factory=dict[str, str])

    def packed(
        self, ways: Sequence[RunWays], *, takes_attention: bool, context: ContextGroup | None
    ) -> ForwardPlan | None:
        """Return the first right way of running packed sequences; without one restore the model."""
        before = self.model.config._attn_implementation
        assert before is not None, "transformers chooses one when it makes a model"
        if takes_attention:
            attention.install(self.model)
        recurrent.install(self.model)
        candidates = _candidates(self.model, self.device, packed=True)
        plan = self._first_right(
            replace(candidate, context=context, recurrent=way)
            for candidate, way in itertools.product(candidates, ways or (None,))
        )
        if plan is None:
            self.model.set_attn_implementation(before)
        return plan

    def padded(self) -> ForwardPlan | None:
        """Return the first right way of running padded rows."""
        return self._first_right(_candidates(self.model, self.device, packed=False))

    def _first_right(self, plans: Iterable[ForwardPlan]) -> ForwardPlan | None:
        for plan in plans:
            self.differences[plan.words] = difference = self.judge.difference(plan)
            if not difference:
                return plan
        return None

    def tried(self) -> str:
        """Describe the deviations of the tried ways."""
        return "; ".join(f"{words}: {difference}" for words, difference in self.differences.items() if difference)

    def told(self, plan: ForwardPlan) -> ForwardPlan:
        """Return the plan with one line on how the model is run, and why not faster, and log that line."""
        shared = "packed, a group's prompt computed once" if plan.packed else "padded, prompts not shared"
        why = f"; rejected: {self.tried()}" if self.tried() else ""
        told = f"{type(self.model).__name__} trains {shared}, {plan.words}{why}"
        logger.info("%s", told)
        return replace(plan, told=told)


def _candidates(model: PreTrainedModel, device: torch.device, *, packed: bool) -> list[ForwardPlan]:
    """Return the ways of running the model, fastest first."""
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    kinds: list[AttentionKind] = _attention_kinds(model, device) if packed else ["padded"]
    chunked = [ForwardPlan(attention=kind, head="chunked", softcap=softcap) for kind in kinds]
    return chunked + [ForwardPlan(attention=kind, head="model") for kind in kinds]


def _attention_kinds(model: PreTrainedModel, device: torch.device) -> list[AttentionKind]:
    """Return the kinds of attention over segments, fastest first."""
    if device.type != "cuda" or model.dtype not in (torch.bfloat16, torch.float16):
        return ["bucketed"]
    return ["flash", "bucketed"]


@dataclass(frozen=True, slots=True)
class _Probe:
    """Probe: groups with the model's own logprobs, and the tolerance for another way of running it."""

    groups: list[Group]
    tolerance: float


class _Judge:
    """Judge of the ways of running a model.

    In 16 bits two correct ways differ by rounding, on some models by more than a wrong way on others: Gemma 3 270M by
    0.6, while positions that are off by one change SmolLM2-135M by 0.2. A way whose kernels can compute in float32 is
    therefore tried in float32, on the model's first layers: there correct ways differ by 0.00003 on both, and wrong
    positions by 2 to 5 nats. The unchanged model then only has to run that way. Ways without float32 (flash attention,
    the scans of flash-linear-attention, quantized weights) or without whole layers (weights cut over ranks) are judged
    in 16 bits.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, *, alone: bool) -> None:
        self._model = model
        self._device = device
        least = _ROUNDED if model.dtype.itemsize == 2 else _EXACT
        exact = self._probe_first_layers() if least > _EXACT and alone and has_float32(model) else None
        # Computed before attention is replaced; not needed on a CPU, where every kernel has float32.
        self._whole = exact if exact is not None and device.type == "cpu" else _probe(model, device, least=least)
        self._exact = exact

    def difference(self, plan: ForwardPlan) -> str:
        """Describe how this plan's results deviate from the model's own; empty if they do not."""
        scans = plan.recurrent is not None and plan.recurrent.end_to_end
        if self._exact is None or scans or plan.attention == "flash":
            return _difference(self._model, plan, self._whole, self._device)
        with first_layers_in_float32(self._model, vocab_size=_VOCABULARY):
            difference = _difference(self._model, plan, self._exact, self._device)
        runs = replace(self._exact, tolerance=math.inf)
        return difference or _difference(self._model, plan, runs, self._device)

    def _probe_first_layers(self) -> _Probe | None:
        with first_layers_in_float32(self._model, vocab_size=_VOCABULARY):
            try:
                return _probe(self._model, self._device, least=_FIRST_LAYERS)
            except ModelError as error:
                logger.info(
                    "comparing ways of running the model in 16 bits, because float32 is not possible: %s", error
                )
                return None


@torch.no_grad()
def _probe(model: PreTrainedModel, device: torch.device, *, least: float) -> _Probe:
    """Return a probe of groups whose samples share a prompt, each sequence run by itself.

    The effect of rounding is measured by running a sequence beside copies of itself: with more rows matrices are
    multiplied in another order, and 4-bit ones by another kernel. Above 16 bits this is skipped.

    Args:
        least: lower bound of the tolerance.
    """
    text: Any = model.config.get_text_config()
    # Without padding, whose embedding is often zeros: sparse attention would choose among equal scores.
    tokens = [token for token in range(min(_VOCABULARY, text.vocab_size)) if token != text.pad_token_id]
    ids = tuple(tokens[(5 * i + 3) % len(tokens)] for i in range(64))
    sequences = (
        (ids[:4], ids[4:7]),
        (ids[:4], ids[7:20]),
        (ids[20:33], ids[33:45]),
        (ids[20:33], ids[45:47]),
        (ids[:1], ids[50:64]),
    )
    groups, rounding = [], 0.0
    for prompt, completion in sequences:
        inputs = torch.tensor([prompt + completion], device=device)
        own = _completion_logprobs(model, inputs, start=len(prompt))[0]
        if least > _EXACT:
            copies = _completion_logprobs(model, inputs.expand(_COPIES, -1), start=len(prompt))
            rounding = max(rounding, float((copies - own).abs().max()))
        sample = Sample(prompt, completion, tuple(own.tolist()), "stop", VersionSpan(0, 0), advantage=1.0)
        groups.append(Group(Prompt(id="probe", token_ids=prompt, text=""), (sample,)))
    return _Probe(groups, tolerance=min(max(least, 4 * rounding), _MOST_ROUNDING))


def _completion_logprobs(model: PreTrainedModel, inputs: Tensor, *, start: int) -> Tensor:
    """Return logprobs [B, T - start] of the tokens from ``start`` on, by the model as transformers calls it.

    Raises:
        ModelError: the model raises an error by itself.
    """
    try:
        log_p = model(input_ids=inputs, use_cache=False).logits.float().log_softmax(-1)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, AssertionError, RuntimeError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot be run by transformers on text: {type(error).__name__}: {error}",
            remedy="set model.path to one that takes text alone, if it needs images; else check its config.json and "
            "the size of its vocabulary, or use another version of transformers",
        ) from error
    if log_p.isnan().any():
        raise ModelError(
            f"the logits of {type(model).__name__} have NaN, as transformers computes them",
            remedy="check its weights for NaN; if they have none, set model.dtype: bfloat16 or float32",
        )
    return log_p[:, start - 1 : -1].gather(2, inputs[:, start:, None]).squeeze(2)


@torch.no_grad()
def _difference(model: PreTrainedModel, plan: ForwardPlan, probe: _Probe, device: torch.device) -> str:
    """Describe how this plan's results deviate from the model's own; empty if they do not."""
    (micro,) = pack(probe.groups, max_tokens=1 << 20, share_prefixes=plan.packed).micro_batches
    try:
        found = loss_token_logprobs(model, micro.to(device), plan=plan).logprobs
        with _training(model):
            in_training = loss_token_logprobs(model, micro.to(device), plan=plan).logprobs
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError) as error:
        # The probe finds architectures that do not take these arguments.
        return f"{type(error).__name__}: {error}"
    expected = micro.sampling_logprobs.to(found.device)
    for name, logprobs in (("logprobs", found), ("logprobs in training mode", in_training)):
        largest = float((logprobs.float() - expected).abs().max())
        if not largest < probe.tolerance:
            return f"{name} differ by {largest:.3g}, more than the allowed {probe.tolerance:.3g}"
    return ""


@contextmanager
def _training(model: PreTrainedModel) -> Iterator[None]:
    """Set training mode within the block, without dropout, which an adapter may have."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        for module, _ in modes:
            module.training = module.training and not isinstance(module, torch.nn.Dropout)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _short_reach(model: PreTrainedModel) -> Iterator[None]:
    """Shorten windows, chunks and blocks of attention below the length of the probe's sequences."""
    owners = [model.config, model.config.get_text_config(), *model.modules()]
    lowered = [
        (owner, name, value)
        for owner in {id(owner): owner for owner in owners}.values()
        for name, value in vars(owner).items()
        if _REACH.search(name) and type(value) is int and value > _PROBED_REACH
    ]
    try:
        for owner, name, _ in lowered:
            setattr(owner, name, _PROBED_REACH)
        yield
    finally:
        for owner, name, value in lowered:
            setattr(owner, name, value)
