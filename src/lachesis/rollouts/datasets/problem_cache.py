"""Prepared problems stored on disk under a key derived from all their inputs.

The file is JSONL: a header with a digest of the rest, then one problem per line.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import DataError
from lachesis.common.files import write_atomic
from lachesis.common.group_codec import decode_prompt
from lachesis.common.types import Prompt
from lachesis.common.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedProblem:
    """A prepared problem, and its place in the dataset for messages."""

    place: str
    prompt: Prompt


def key_of(parts: Mapping[str, Any]) -> str:
    """Return a key for the result of a preparation: equal only for equal inputs and the same release."""
    text = json.dumps({"release": __version__, **parts}, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest that differs between tokenizers with different tokens or chat templates."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    content = fast.to_str() if fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    identity = [
        type(tokenizer).__name__,
        content,
        tokenizer.chat_template,
        sorted(tokenizer.special_tokens_map.items()),
    ]
    return hashlib.sha256(json.dumps(identity, default=repr).encode()).hexdigest()


def load_prepared(directory: Path, key: str) -> list[PreparedProblem] | None:
    """Load the problems stored under ``key``; ``None`` if there are none, or if they are damaged (which is logged)."""
    path = _path(directory, key)
    try:
        header, _, body = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", remedy="check data.prepared_path") from error
    if header != _header(body):
        logger.warning("%s is damaged; preparing the data again", path)
        return None
    logger.info("using prepared data from %s", path)
    return list(map(_parsed, body.splitlines()))


def save_prepared(directory: Path, key: str, prepared: Sequence[PreparedProblem]) -> None:
    """Store the problems, unless a column has values that JSON would change (which is logged).

    Raises:
        DataError: the directory cannot be written.
    """
    lines = []
    for one in prepared:
        line = _as_line(one)
        if line is None:
            logger.warning("%s: a column is not plain data, so the prepared data is not stored", one.place)
            return
        lines.append(line)
    body = b"".join(line + b"\n" for line in lines)
    path = _path(directory, key)
    try:
        write_atomic(path, _header(body) + b"\n" + body)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}", remedy="check data.prepared_path") from error


def _path(directory: Path, key: str) -> Path:
    return directory / f"{key}.jsonl"


def _header(body: bytes) -> bytes:
    return json.dumps({"problems": body.count(b"\n"), "sha256": hashlib.sha256(body).hexdigest()}).encode()


def _as_line(one: PreparedProblem) -> bytes | None:
    """Return a problem as a line of JSON; ``None`` if reading it back would change the problem."""
    try:
        text = json.dumps({"place": one.place} | {name: getattr(one.prompt, name) for name in Prompt.__slots__})
    except (TypeError, ValueError):
        return None
    return text.encode() if _parsed(text) == one else None


def _parsed(line: str | bytes) -> PreparedProblem:
    record = json.loads(line)
    return PreparedProblem(record["place"], decode_prompt(record))
