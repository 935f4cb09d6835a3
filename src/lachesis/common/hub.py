"""Access to the Hugging Face hub while it does not answer: its library alone would retry for half a minute."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lachesis.common.errors import DependencyError, ModelError, first_line

_CONFIG = "config.json"
_LIMIT_S = 5.0
_answered: set[str] = set()


@contextmanager
def cache_alone_where_the_hub_is_away(path: str | Path) -> Iterator[None]:
    """Read ``path``, a directory or a hub name, in the block from the cache alone if the hub does not answer now."""
    from huggingface_hub import constants

    if Path(path).exists() or constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT):
        yield
        return
    # `datasets` has its own copy, made on import.
    places: list[Any] = [constants, *(module for module in [sys.modules.get("datasets.config")] if module)]
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


@contextmanager
def load_errors(path: str | Path) -> Iterator[None]:
    """Turn errors in reading a model from ``path``, a directory or a hub name, into ModelError or DependencyError."""
    place = described_path(path)
    if not Path(path).exists() and (str(path).startswith((".", "/", "~")) or str(path).count("/") > 1):
        raise ModelError(f"the model's directory {path} does not exist", remedy="check model.path, or name a hub id")
    try:
        with cache_alone_where_the_hub_is_away(path):
            yield
    except ImportError as error:
        raise DependencyError(
            f"{place} needs a package that is not installed: {first_line(error)}",
            remedy="install it, or name a checkpoint in 16 bits",
        ) from error
    except (
        OSError, ValueError, LookupError, AttributeError, RuntimeError, TypeError, AssertionError, SafetensorError,
    ) as error:  # fmt: skip
        raise ModelError(
            f"no causal language model could be loaded from {place}: {first_line(error)}",
            remedy="name a directory with config.json, tokenizer and weights (model.path), or a hub id in the cache",
        ) from error


def described_path(path: str | Path) -> str:
    """Return a model's path for a message, which says if it is not a directory."""
    return repr(str(path)) if Path(path).is_dir() else f"{str(path)!r}, which is not a directory here"


def language_model_class(config: Any, *, images: bool = False) -> Any:
    """Return transformers' automatic class for a language model of this configuration.

    That is ``AutoModelForCausalLM``, or the class for images and text if there is none for text alone (Qwen3-VL,
    Mistral 3), which also takes text alone. With ``images`` it is the latter.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if images:
        return AutoModelForImageTextToText
    # Models that come with code name their class themselves.
    for_text = AutoModelForCausalLM._model_mapping  # pyright: ignore[reportPrivateUsage]
    of_images = type(config) not in for_text and can_see(config)
    return AutoModelForImageTextToText if of_images else AutoModelForCausalLM


def can_see(config: Any) -> bool:
    """Return True if transformers has a model for images and text of this configuration."""
    from transformers import AutoModelForImageTextToText

    return type(config) in AutoModelForImageTextToText._model_mapping  # pyright: ignore[reportPrivateUsage]


def config_here(model: str, *, revision: str | None = None) -> Path | None:
    """Return the path of a model's ``config.json``, in its directory or the hub's cache; None if it is not here."""
    path = Path(model, _CONFIG)
    if path.is_file():
        return path
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, _CONFIG, revision=revision)
    except HFValidationError:  # not a name on the hub
        return None
    return Path(found) if isinstance(found, str) else None


def mentions(model: str, *words: str) -> bool | None:
    """Return True if a model's configuration contains one of the words; ``None`` if it is not on this machine yet.

    Raises:
        OSError: the configuration cannot be read.
    """
    config = config_here(model)
    if config is None:
        return None
    text = config.read_text(encoding="utf-8", errors="replace")
    return any(word in text for word in words)


def _answers(endpoint: str) -> bool:
    import httpx

    if endpoint not in _answered:
        try:
            httpx.head(endpoint, timeout=_LIMIT_S)
        except httpx.TransportError:
            return False
        _answered.add(endpoint)
    return True
