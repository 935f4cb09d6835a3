"""A group as the dashboard shows it: text a token at a time, where a tokenizer is known, and ids otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lachesis.api.records import HeldGroup
from lachesis.api.scored_group import UNTRAINED
from lachesis.common.errors import ConfigError
from lachesis.web.tokens import best_and_worst, token_spans

Pieces: TypeAlias = Callable[[Sequence[int]], list[str]]

_SEQUENCES = 8
_BEFORE = 60
_AFTER = 400
_LARGEST = 8 << 20


def load_pieces(name: str) -> Pieces:
    """From token ids to the text that each adds, by a tokenizer's directory, its tokenizer.json or its hub name.

    A character of several tokens is the last one's. Loads no torch.

    Raises:
        ConfigError: there is no such tokenizer, or it has no tokenizer.json.
    """
    import tokenizers
    from tokenizers.decoders import DecodeStream

    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        found = (
            tokenizers.Tokenizer.from_file(str(file)) if path.exists() else tokenizers.Tokenizer.from_pretrained(name)
        )
    except Exception as error:
        # The library raises bare exceptions for missing files, bad JSON and an unreachable hub alike.
        remedy = "give the directory of a model that has a tokenizer.json, or leave it out to see token ids"
        raise ConfigError(f"--tokenizer {name}: {error}", remedy=remedy) from error

    def pieces(ids: Sequence[int]) -> list[str]:
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(found, token) or "" if found.id_to_token(token) else f"<{token}?>" for token in ids]

    return pieces


def view(held: HeldGroup, *, environment: str, pieces: Pieces | None) -> dict[str, Any]:
    """The sequences of a group, best scores first, eight at most, cut to what can be read.

    None of a group beyond 8 MiB: reading it would hold up those who post and pull.
    """
    count = held.group.sequences
    group = json.loads(held.group.json) if len(held.group.json) <= _LARGEST else None
    if group is None:
        return {"environment": environment, "size": count, "has_text": False, "sequences": []}
    shown = best_and_worst(range(count), score=lambda index: _row(group["scores"], index), limit=_SEQUENCES)
    return {
        "environment": environment,
        "size": count,
        "has_text": pieces is not None,
        "sequences": [_sequence(group, index, pieces) for index in shown],
    }


def _sequence(group: dict[str, Any], index: int, pieces: Pieces | None) -> dict[str, Any]:
    """One sequence around the first token that is trained on: a little before, more after."""
    tokens = group["tokens"][index]
    mask: list[Any] = _row(group["masks"], index) or []
    logprobs: list[Any] = _row(group["inference_logprobs"], index) or []
    given = [at >= len(mask) or mask[at] == UNTRAINED for at in range(len(tokens))]
    first = given.index(False) if False in given else 0
    start, end = max(0, first - _BEFORE), min(len(tokens), first + _AFTER)
    return {
        "index": index,
        "score": _row(group["scores"], index),
        "tokens": len(tokens),
        "trained": len(tokens) - sum(given),
        **token_spans(
            (pieces or _ids)(tokens[start:end]),
            logprobs[start:],
            given=given[start:end],
            before=start,
            after=len(tokens) - end,
        ),
    }


def _row(rows: Sequence[Any] | None, index: int) -> Any:
    return rows[index] if rows and index < len(rows) else None


def _ids(tokens: Sequence[int]) -> list[str]:
    return [str(token) for token in tokens]
