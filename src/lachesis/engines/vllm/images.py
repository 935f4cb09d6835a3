"""Prompts with images for vLLM, from the inputs that the trainer's processor made: vLLM does not process them again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import BatchFeature

from lachesis.common.prompt_images import PromptImages
from lachesis.engines.serving.bodies import Refused
from lachesis.engines.vllm import compat


def image_prompt(processor: Any, token_ids: Sequence[int], images: PromptImages, *, cache_salt: str) -> Any:
    """Return a prompt in vLLM's form with these token ids, placeholders included, and these inputs of the model.

    vLLM's own processor for the model says which inputs belong to which image, and which placeholders it expects for
    each; where it would call the processor of transformers it gets the trainer's inputs.

    Args:
        processor: vLLM's ``BaseMultiModalProcessor`` of the model.

    Raises:
        Refused: the prompt's placeholders differ from the ones that vLLM expects for these images.
    """
    ids, records = [*token_ids], images.records
    ends = [*(one.first for one in records[1:]), len(ids)]
    found = [_found(processor, ids[:end], one) for one, end in zip(records, ends, strict=True) if one.sizes]
    return compat.mm_input(
        ids,
        compat.MultiModalKwargsItems({"image": [item for one in found for item in one.items]}),
        {"image": [name for one in found for name in one.names]},
        {"image": [place for one in found for place in one.places]},
        cache_salt=cache_salt,
    )


class _Found(NamedTuple):
    """Images of one record in vLLM's form: their inputs, names and places in the prompt."""

    items: Sequence[Any]
    names: Sequence[str]
    places: Sequence[Any]


def _found(processor: Any, token_ids: Sequence[int], images: PromptImages) -> _Found:
    ids, names = [*token_ids[images.first :]], [f"{_digest(images)}-{number}" for number in range(len(images.sizes))]
    done = _with_inputs(processor, images.inputs, ids)
    blank = [Image.new("RGB", size) for size in images.sizes]  # models read only their sizes
    items = done.info.parse_mm_data({"image": blank})
    found = done._apply_hf_processor(
        compat.ProcessorInputs(ids, items, {"image": names}), compat.TimingContext(enabled=False)
    )
    found = found[1] if type(found) is tuple else found  # up to 0.26 it is between the tokens and a flag
    places = done._find_mm_placeholders(ids, found.prompt_updates).get("image", [])
    if len(places) != len(names) or len(found.kwargs["image"]) != len(names):
        tokenizer = processor.info.get_tokenizer()
        raise _other_counts(
            ids, [compat.shown_tokens(update.content, tokenizer) for update, *_ in found.prompt_updates["image"]]
        )
    ranges = [one.to_range() for one in places]
    moved = [replace(one, offset=one.offset + images.first) for one in ranges]
    return _Found(found.kwargs["image"], names, moved)


def _with_inputs(processor: Any, inputs: Mapping[str, Any], ids: Sequence[int]) -> Any:
    """Return a copy of vLLM's processor that gets these inputs from the processor of transformers."""

    def answer(*_: Any, **__: Any) -> BatchFeature:
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        kept = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
        return BatchFeature({**kept, "input_ids": [[*ids]]})

    dtype = processor.info.ctx.model_config.dtype
    done = copy(processor)
    done.info = copy(processor.info)
    done.info.ctx = copy(processor.info.ctx)
    object.__setattr__(done.info.ctx, "call_hf_processor", answer)
    return done


def _other_counts(ids: Sequence[int], shown: Sequence[Sequence[int]]) -> Refused:
    """Return the error for a prompt whose placeholders differ from the ones that vLLM expects for its images."""
    wanted = [token for tokens in shown for token in tokens]
    have = sum(token in {*wanted} for token in ids)
    return Refused(
        f"vLLM expects {len(wanted)} placeholders for the {len(shown)} images of a prompt, but the trainer's processor "
        f"made {have}{', between other tokens' if have == len(wanted) else ''}",
        remedy="give vLLM the model.path of the trainer, with the same preprocessor_config.json, and no "
        "--mm-processor-kwargs",
    )


def _digest(images: PromptImages) -> str:
    """Return a name for the images, under which vLLM caches the results for them."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(images.inputs):
        array = images.inputs[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
