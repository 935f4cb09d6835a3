"""Comparison of a saved model's files with the model in memory, tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from lachesis.common.errors import CheckpointError


class Content(NamedTuple):
    """Dtype and shape of a tensor, and a digest of its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: bytes


def content_of(tensor: Tensor) -> Content:
    """Return a tensor's content, bit for bit, regardless of its device."""
    values: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return Content(tensor.dtype, tuple(tensor.shape), hashlib.blake2b(values, digest_size=16).digest())


def noting(weights: Iterable[tuple[str, Tensor]], contents: dict[str, Content]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights as they are, and note the content of each."""
    for name, tensor in weights:
        contents[name] = content_of(tensor)
        yield name, tensor


def contents_to_save(model: object, weights: Mapping[str, Tensor] | None = None) -> dict[str, Content] | None:
    """Return the tensors that ``save_pretrained`` should write; None for a model of neither transformers nor peft.

    Args:
        weights: whole tensors by the model's names, if its own parameters are sharded.
    """
    state: Any
    if isinstance(model, PreTrainedModel):
        ignored = set(model._keys_to_ignore_on_save or ())
        found = model.state_dict() if weights is None else weights
        kept = {name: tensor for name, tensor in found.items() if name not in ignored}
        state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(kept, model))
    elif type(model).__module__.startswith("peft."):
        from peft import get_peft_model_state_dict  # here, because it takes a second and only adapters need it

        state = get_peft_model_state_dict(model, state_dict=None if weights is None else dict(weights))
    else:
        return None
    return {name: content_of(tensor) for name, tensor in state.items()}


def check_saved(directory: Path, expected: Mapping[str, Content]) -> None:
    """Compare the safetensors files in a directory with the model in memory, one tensor at a time.

    Raises:
        CheckpointError: a tensor is missing, unexpected or different; the message names it.
    """
    missing = set(expected)
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is not a mapping
                wanted, found = expected.get(name), content_of(file.get_tensor(name))
                if found != wanted:
                    raise _differs(name, path, "should not be there" if wanted is None else _how(found, wanted))
                missing.discard(name)
    if missing:
        raise _differs(min(missing), directory, "is missing")


def _how(found: Content, wanted: Content) -> str:
    if (found.dtype, found.shape) == (wanted.dtype, wanted.shape):
        return "has other values than the model"
    return f"is {found.dtype} {list(found.shape)}, but should be {wanted.dtype} {list(wanted.shape)}"


def _differs(name: str, path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"the saved model was read back and differs from the model in memory: tensor {name!r} {how} ({path.name})",
        remedy="check the disk, then save the model from the run's last checkpoint with lachesis export",
    )
