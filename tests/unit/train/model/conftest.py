"""Tiny models that the tests of loading save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.tiny import EOS, PAD, tiny_model, tiny_tokenizer


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Save a tiny model with its tokenizer; ``without`` are special tokens that the tokenizer lacks."""

    def write(architecture: str = "qwen2", *, without: tuple[str, ...] = (), **overrides) -> Path:
        directory = tmp_path / architecture
        tiny_model(architecture, **overrides).save_pretrained(directory)
        tokenizer_without(*without).save_pretrained(directory)
        return directory

    return write


def tokenizer_without(*names: str) -> PreTrainedTokenizerFast:
    special = {"pad_token": PAD, "eos_token": EOS}
    kept = {name: token for name, token in special.items() if name not in names}
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, **kept)
