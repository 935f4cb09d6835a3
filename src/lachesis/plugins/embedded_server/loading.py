"""Loading of a transformers model and its tokenizer from a directory, for an inference server."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lachesis.common.errors import ConfigError, ModelError, first_line
from lachesis.common.hub import load_errors
from lachesis.config.schema import ModelConfig
from lachesis.train.model.loading import read_model


def load_causal_lm(path: str | Path, *, dtype: str, device: str, revision: str | None = None) -> PreTrainedModel:
    """Load the model in evaluation mode, all weights from safetensors; code that comes with the model is not run.

    Args:
        path: directory, or hub id.
        dtype: torch's name; ``auto`` is the checkpoint's, and float32 on the CPU.
        device: torch's name; ``auto`` is the GPU if there is one.
        revision: of a model of the hub.

    Raises:
        ConfigError: the device does not exist.
        ModelError: the model does not exist, or its weights are incomplete.
    """
    place = _place(device)
    chosen = "float32" if dtype == "auto" and place.type == "cpu" else dtype
    config = ModelConfig(path=str(path), revision=revision)
    model, loaded = read_model(
        config, dtype=chosen if chosen == "auto" else getattr(torch, chosen), use_safetensors=True
    )
    for what in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, loaded.get(what) or ())):
            raise ModelError(
                f"the checkpoint {path} is incomplete: {what.replace('_', ' ')} {', '.join(names[:3])}",
                remedy="save the whole model there again",
            )
    return model.requires_grad_(False).eval().to(place)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in ``path``. Raises ModelError if there is none."""
    with load_errors(path):
        return AutoTokenizer.from_pretrained(str(path))


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a completion: the generation config's and the tokenizer's."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    return tuple(sorted({i for i in ids if isinstance(i, int)}))


def _place(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    remedy = "use auto, cpu, cuda or cuda:N"
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device} is not known", remedy=remedy)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter comes from a torch without CUDA
        raise ConfigError(f"--device {device} cannot be used: {first_line(error)}", remedy=remedy) from error
    return torch.device(device)
