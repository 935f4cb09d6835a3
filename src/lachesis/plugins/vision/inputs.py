"""Arguments of a model for rows of prompts with images: the same for the engine's rows and for the trainer's.

Shapes: B rows of W tokens, padded on one side.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lachesis.common.errors import ModelError
from lachesis.common.prompt_images import PromptImages


class ImageInputs(NamedTuple):
    """Arguments of a forward pass besides token ids and mask.

    ``ahead`` [B, 1]: added to a later token's number for its position, if the model has its own positions for images
    (M-RoPE); else ``None``.
    """

    arguments: dict[str, Tensor]
    ahead: Tensor | None


def image_inputs(model: nn.Module, images: Sequence[PromptImages | None], *, ids: Tensor, valid: Tensor) -> ImageInputs:
    """Return the arguments for rows ``ids`` [B, W], int64, with the images of each row's prompt and of later answers.

    Args:
        valid: bool [B, W], False for padding.

    Raises:
        ModelError: the processor's number of token types differs from the row's number of tokens.
    """
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    records = [record for one in images if one is not None for record in one.records]
    names = list(dict.fromkeys(name for one in records for name in one.inputs))
    arguments = {
        name: joined([torch.from_numpy(one.inputs[name]) for one in records if name in one.inputs]) for name in names
    }
    arguments = {
        name: value.to(ids.device, dtype if value.is_floating_point() else None) for name, value in arguments.items()
    }
    arguments |= _token_types(images, valid)
    positions = _positions(model, arguments, ids=ids, valid=valid)
    if positions is None:
        return ImageInputs(arguments, None)
    position_ids, ahead = positions
    return ImageInputs(arguments | {"position_ids": position_ids}, ahead.reshape(-1, 1).to(ids.device))


def joined(values: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension; the others are padded with zeros to the largest, as processors do."""
    size = [max(value.shape[dim] for value in values) for dim in range(1, values[0].dim())]
    whole = values[0].new_zeros(sum(value.shape[0] for value in values), *size)
    start = 0
    for value in values:
        whole[(slice(start, start + value.shape[0]), *(slice(length) for length in value.shape[1:]))] = value
        start += value.shape[0]
    return whole


def _token_types(images: Sequence[PromptImages | None], valid: Tensor) -> dict[str, Tensor]:
    """Return the tokens' types [B, W] by argument: 0 for text, which includes completions and padding."""
    placed = [(row, record) for row, one in enumerate(images) if one is not None for record in one.records]
    names = list(dict.fromkeys(name for _, one in placed for name in one.token_types))
    rows = {name: torch.zeros(valid.shape, dtype=torch.int64) for name in names}
    begin = valid.int().argmax(1).tolist()
    for row, one in placed:
        start = begin[row] + one.first
        for name, types in one.token_types.items():
            if start + len(types) > valid.shape[1]:
                raise ModelError(
                    f"the processor counts {one.first + len(types)} tokens up to the end of the images, but the "
                    f"sequence has {int(valid[row].sum())}",
                    remedy="set model.tokenizer to the tokenizer of the model's processor, or leave it out",
                )
            rows[name][row, start : start + len(types)] = torch.from_numpy(types)
    return {name: types.to(valid.device) for name, types in rows.items()}


def _positions(
    model: nn.Module, arguments: Mapping[str, Any], *, ids: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return positions [3, B, W] by the model's own ``get_rope_index``, and the offset of later ones; or None."""
    inner: Any = next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)
    if inner is None:
        return None
    taken = inspect.signature(inner.get_rope_index).parameters
    known = {name: value for name, value in arguments.items() if name in taken}
    return inner.get_rope_index(input_ids=ids, attention_mask=valid.long(), **known)
