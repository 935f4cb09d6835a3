"""Files of a model or an adapter, as transformers, peft and vLLM read them."""

from __future__ import annotations

import copy
import errno
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # a path of what?
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lachesis.common.errors import ModelError
from lachesis.common.runs import runs
from lachesis.engines.embedded.adapters import is_adapted

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
# A file of a checkpoint holds about this much, which bounds the memory held twice while it is written.
SHARD_BYTES = 512 * 2**20


def write_checkpoint(directory: Path, weights: Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write weights as safetensors files with an index, as transformers and vLLM read them.

    They are taken one by one, and at most one file's worth is in memory. Files are named as transformers names them,
    which is by their number.
    """
    places: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(runs(weights, size=lambda named: named[1].nbytes, limit=shard_bytes), 1):
        file = f"model-{number:05d}.safetensors"
        write_safetensors(directory / file, dict(shard))
        places |= {name: file for name, _ in shard}
        total += sum(tensor.nbytes for _, tensor in shard)
        shard.clear()  # its memory is needed for the next one
    written = sorted(set(places.values()))
    named = {name: f"model-{number:05d}-of-{len(written):05d}.safetensors" for number, name in enumerate(written, 1)}
    if len(written) == 1:
        named = dict.fromkeys(written, "model.safetensors")
    for name, final in named.items():
        (directory / name).rename(directory / final)
    weight_map = {name: named[file] for name, file in sorted(places.items())}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def save_companions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a checkpoint's files besides its weights: the configurations and the tokenizer."""
    config: Any = copy.deepcopy(model.config)
    # FSDP2 gives sharded modules a new class.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = model.dtype
    parts: list[Any] = [config, model.generation_config, tokenizer]
    for part in parts:
        if part is not None:
            part.save_pretrained(directory)


def save_adapter(directory: Path, *, tensors: Mapping[str, Tensor], config: bytes) -> None:
    """Write an adapter as peft does, into an empty directory.

    Args:
        tensors: by name without peft's prefix, on any device.
        config: the content of ``adapter_config.json``, see :func:`adapter_config`.
    """
    write_safetensors(
        directory / ADAPTER_WEIGHTS, {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in tensors.items()}
    )
    (directory / ADAPTER_CONFIG).write_bytes(config)


def adapter_config(model: nn.Module) -> bytes:
    """Return the ``adapter_config.json`` that peft saves with the model's adapter.

    peft itself writes it, which takes longer than writing the tensors; it never changes in training, so make it once.

    Raises:
        ModelError: the model has no adapter.
    """
    if not is_adapted(model):
        raise ModelError(
            f"PEFT library required: {type(model).__name__} has no adapter",
            remedy="set adapter.kind to lora, or use a bridge that transfers full weights",
        )
    with tempfile.TemporaryDirectory() as directory:
        # Without tensors, because only peft's configuration is needed here.
        model.save_pretrained(directory, state_dict={}, save_embedding_layers=False)
        return (Path(directory) / ADAPTER_CONFIG).read_bytes()


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, on any device and of any layout, in the safetensors format.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    try:
        save_file(on_host(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        full = os.strerror(errno.ENOSPC) in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error


@torch.no_grad()
def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous.

    An adapter is hundreds of small tensors, and fetching each from a GPU waits for the GPU each time: those on one
    are packed there and fetched at once.
    """
    found = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if not tensor.is_cuda}
    places = {(t.device, t.dtype) for t in tensors.values() if t.is_cuda}
    for device, dtype in places:
        group = {name: t for name, t in tensors.items() if t.device == device and t.dtype == dtype}
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group.values()])
        host = torch.empty(flat.shape, dtype=dtype, pin_memory=True).copy_(flat)
        parts = host.split_with_sizes([tensor.numel() for tensor in group.values()])
        found |= {name: part.view(t.shape) for (name, t), part in zip(group.items(), parts, strict=True)}
    return {name: found[name] for name in tensors}
