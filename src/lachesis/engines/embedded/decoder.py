"""A batch of sequences in a transformers causal language model with a growing KV cache: prefill, fork, extend."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

from lachesis.common.errors import EngineError
from lachesis.common.prompt_images import PromptImages
from lachesis.engines.embedded.adapters import is_adapted
from lachesis.plugins import load

if TYPE_CHECKING:
    from peft import PeftModel

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Up to this length, copying keys and values is cheaper than attention over a strided tensor.
_GROW_FROM = 32


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The properties of a model's forward pass.

    ``cache_argument`` is the name of its cache argument, ``None`` if it has no cache with selectable rows. ``pads``:
    prompts of different lengths may share a batch. ``extends``: several tokens at once may follow a cache.
    ``keeps_last``: it can compute logits for the last positions only. ``told_positions``: it needs explicit positions
    after a cache, because some models with recurrent layers (Bamba in transformers 5.19) count from 0, and those with
    positions for images (Qwen3-Omni) add the offsets of an earlier batch.
    """

    cache_argument: str | None
    takes_use_cache: bool
    pads: bool
    extends: bool
    keeps_last: bool
    told_positions: bool
    vocab_size: int

    @classmethod
    def of(cls, model: PreTrainedModel | PeftModel) -> ModelTraits:
        base: Any = model.get_base_model() if is_adapted(model) else model
        arguments = inspect.signature(base.forward).parameters
        config = base.config.get_text_config(decoder=True)
        cache_argument = next((name for name in ("past_key_values", "cache_params") if name in arguments), None)
        if hasattr(base, "_setup_cache"):  # RecurrentGemma keeps its state in its modules, whose rows cannot be moved
            cache_argument = None
        other_layers = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
        # In a recurrent layer padding would enter the state.
        recurrent = bool(other_layers) or bool(getattr(base, "_is_stateful", False))
        return cls(
            cache_argument=cache_argument,
            takes_use_cache=cache_argument is not None or "use_cache" in arguments,
            pads=not recurrent and {"attention_mask", "position_ids"} <= set(arguments),
            extends=not recurrent,
            keeps_last="logits_to_keep" in arguments,
            told_positions="position_ids" in arguments
            and (recurrent or any(hasattr(module, "rope_deltas") for module in base.modules())),
            vocab_size=config.vocab_size,
        )


class Decoder:
    """A batch of N sequences that grow together, left-padded if their lengths differ.

    Without a cache, or with one whose rows cannot be selected (see :func:`can_pick_rows`), every extension recomputes
    the sequences from their start: slow, but correct for any causal model.

    Args:
        model: the model, in :func:`generation_mode`.
        traits: the model's traits.
        prompts: N token sequences, of equal length unless ``traits.pads``.
        pad_token_id: token for padding; it is masked, so any token of the vocabulary will do.
        images: the images of each prompt, if any has images.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        traits: ModelTraits,
        prompts: Sequence[Sequence[int]],
        pad_token_id: int,
        images: Sequence[PromptImages | None] = (),
    ) -> None:
        self._model = model
        self._traits = traits
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        padded = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        self._ids = torch.tensor(padded, device=model.device)
        self._mask: Tensor | None = None
        if min(lengths) < width or any(images):
            length = torch.tensor(lengths, device=model.device)
            self._mask = (torch.arange(width, device=model.device) >= width - length[:, None]).long()
        self._length = width
        self._cache: DynamicCache | None = None
        self._caches = traits.cache_argument is not None
        self._seen: dict[str, Tensor] = {}
        self._ahead: Tensor | None = None
        if any(images):
            self._see(images)

    def _see(self, images: Sequence[PromptImages | None]) -> None:
        """Keep the images' inputs for the prefill, and the offset of positions from the number of tokens: [N, 1]."""
        if not self._caches:
            raise EngineError(
                f"{type(self._model).__name__} has no usable cache, which prompts with images need",
                remedy="train it on text, or choose another model for images and text",
            )
        assert self._mask is not None
        found = load("vision", "inputs")(self._model, images, ids=self._ids, valid=self._mask.bool())
        self._seen, self._ahead = found.arguments, found.ahead

    def prefill(self, *, last_only: bool = True) -> Tensor:
        """Return logits [N, V] after the prompts, or [N, P, V] at all their positions."""
        return self._forward(self._ids, keep=1 if last_only else self._ids.shape[1], last_only=last_only)

    def fork(self, rows: Tensor) -> None:
        """Replace sequence i by a copy of sequence ``rows[i]``; ``rows`` [M] may repeat and omit indices."""
        if self._cache is not None:
            self._cache.reorder_cache(rows)  # type: ignore[arg-type]
        else:
            self._ids = self._ids.index_select(0, rows)
        if self._mask is not None:
            self._mask = self._mask.index_select(0, rows)
        if self._ahead is not None:
            self._ahead = self._ahead.index_select(0, rows)

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token [N] to each sequence; return logits [N, V] after it."""
        return self._append(tokens[:, None], last_only=True)

    def extend(self, tokens: Tensor) -> Tensor:
        """Append tokens [N, L]; return logits [N, L, V] after each of them."""
        if self._cache is None or self._traits.extends:
            return self._append(tokens, last_only=False)
        return torch.stack([self.step(column) for column in tokens.unbind(1)], dim=1)

    def _append(self, tokens: Tensor, *, last_only: bool) -> Tensor:
        self._length += tokens.shape[1]
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(tokens)], dim=1)
        if self._cache is None:
            self._ids = torch.cat([self._ids, tokens], dim=1)
        return self._forward(
            tokens if self._cache is not None else self._ids, keep=tokens.shape[1], last_only=last_only
        )

    def _forward(self, ids: Tensor, *, keep: int, last_only: bool) -> Tensor:
        """Run ``ids`` (all tokens without a cache, else the new ones); return the logits of the last ``keep``."""
        name = self._traits.cache_argument
        arguments: dict[str, Any] = {"input_ids": ids}
        if self._traits.takes_use_cache:
            arguments["use_cache"] = self._caches
        if name is not None and self._caches:
            arguments[name] = self._cache
        if self._traits.keeps_last and keep < ids.shape[1]:
            arguments["logits_to_keep"] = keep
        # Without padding the model needs neither mask nor positions, which saves building a mask.
        if self._mask is not None:
            positions = (self._mask.cumsum(1) - 1).clamp_(min=0)
            if self._ahead is not None:  # equal positions for time, height and width, as for text
                positions = (positions + self._ahead).expand(3, -1, -1)
            arguments |= {"attention_mask": self._mask, "position_ids": positions[..., -ids.shape[1] :]}
        elif self._cache is not None and self._traits.told_positions:
            first = self._length - ids.shape[1]
            arguments["position_ids"] = torch.arange(first, self._length, device=ids.device).expand_as(ids)
        arguments |= self._seen
        try:
            output = self._model(**arguments)
        except (TypeError, ValueError, AttributeError, LookupError):
            if not self._caches or self._cache is not None or self._seen:
                raise
            # transformers' cache of a model without attention layers: rerun all tokens each time instead.
            self._caches = False
            return self._forward(ids, keep=keep, last_only=last_only)
        self._seen = {}
        if name is not None and self._caches:
            cache = getattr(output, name, None)
            self._caches = can_pick_rows(cache)
            self._cache = cache if self._caches else None
            if self._cache is not None:
                let_grow(self._cache)
        logits = output.logits[:, -keep:]
        return logits[:, -1] if last_only else logits


@contextmanager
def generation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode without gradients or compiled layers; restore every module's mode afterwards.

    Not ``inference_mode``: tensors that a module caches there (rotary tables) could not be used in training. Compiled
    layers run eagerly, because a growing cache would recompile them again and again.
    """
    modules = [*model.modules()]  # iterating over a model's modules takes as long as a layer of a small model
    training = [module for module in modules if module.training]
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
    for module in training:
        module.training = False
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        for module in training:
            module.training = True


class GrowingLayer(DynamicLayer):
    """The cache of a full-attention layer [rows, heads, length, dim] with room to grow.

    ``DynamicLayer`` copies all keys and values at every token; this class appends the new ones in place.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._key_room = _with_room(keys)
        self._value_room = _with_room(values)
        self._show(keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [rows, heads, new, dim]; return all keys and values."""
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        if stop > self._key_room.shape[2]:
            self._key_room = _with_room(self._key_room[:, :, :start], extra=stop - start)
            self._value_room = _with_room(self._value_room[:, :, :start], extra=stop - start)
        self._key_room[:, :, start:stop] = key_states
        self._value_room[:, :, start:stop] = value_states
        return self._show(stop)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by a copy of row ``beam_idx[i]``."""
        length = self.get_seq_length()
        self._key_room = _with_room(self._key_room[:, :, :length], rows=beam_idx)
        self._value_room = _with_room(self._value_room[:, :, :length], rows=beam_idx)
        self._show(length)

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys = self._key_room[:, :, :length]
        self.values = self._value_room[:, :, :length]
        return self.keys, self.values


def can_pick_rows(cache: object) -> bool:
    """Return True if ``reorder_cache`` is known to move all state of this cache, as for transformers' own layers.

    ``reorder_cache`` also repeats and drops rows, and unlike ``batch_repeat_interleave`` and
    ``batch_select_indices`` recurrent layers have it. It leaves out tensors that a model binds to the cache itself.
    """
    known = (cache_utils.__name__, __name__)
    return (
        type(cache) is DynamicCache
        and all(type(layer).__module__ in known for layer in cache.layers)
        and not any(isinstance(value, Tensor) for value in vars(cache).values())
    )


def let_grow(cache: DynamicCache) -> None:
    """Replace long full-attention layers of the cache, in place, by ones that grow in place."""
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.get_seq_length() >= _GROW_FROM:
            assert layer.keys is not None and layer.values is not None
            cache.layers[i] = GrowingLayer(layer.keys, layer.values)


def _with_room(states: Tensor, *, rows: Tensor | None = None, extra: int = 0) -> Tensor:
    """Copy ``states`` [rows, heads, length, dim], or selected rows, into a longer tensor."""
    count, heads, length, dim = states.shape
    # A quarter more: few copies, little unused memory.
    room = length + extra + max(16, length // 4)
    grown = states.new_empty(count if rows is None else rows.numel(), heads, room, dim)
    if rows is None:
        grown[:, :, :length] = states
    else:
        torch.index_select(states, 0, rows, out=grown[:, :, :length])
    return grown
