"""Tape: every rollout of every step, as rollouts/step_000001.jsonl with one group a line.

From the tape rewards can be recomputed and a step replayed; the report shows samples of it. It has only tokens,
logprobs and numbers: the completions, their weight versions and their scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from lachesis.common.errors import DataError
from lachesis.common.files import clean_files, write_atomic
from lachesis.common.group_codec import TokenTexts, decode_group, encode_group
from lachesis.common.json_values import json_bytes
from lachesis.common.types import Group, StepRecord
from lachesis.metrics.hub import Sink


class SupportsTokenText(Protocol):
    """Methods of a Hugging Face tokenizer that :func:`token_texts` needs."""

    def convert_ids_to_tokens(self, ids: int) -> Any: ...

    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


class TapeSink(Sink):
    """Sink that writes the groups of each step to a separate file, which appears complete or not at all.

    Args:
        directory: usually RUN/rollouts.
        resume_step: the last step that counts when a run is resumed; files of later steps are deleted.
            ``None`` starts a new tape: all files of an old one are deleted.
        report_groups: number of groups a step that get the text of each token, for the report.
        texts: maps token ids to their texts; see :func:`token_texts`. Without it no texts are written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        resume_step: int | None = None,
        report_groups: int = 0,
        texts: TokenTexts | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._report_groups = report_groups if texts is not None else 0
        self._texts = texts
        self._directory.mkdir(parents=True, exist_ok=True)
        clean_files(self._directory)
        for step, path in tape_files(self._directory).items():
            if resume_step is None or step > resume_step:
                path.unlink()

    def write(self, record: StepRecord) -> None:
        if record.groups:
            texts = self._texts if self._report_groups else None
            write_groups(self._directory, record.step, record.groups, texts=texts, with_texts=self._report_groups)


def write_groups(
    directory: Path, step: int, groups: Sequence[Group], *, texts: TokenTexts | None = None, with_texts: int = 0
) -> None:
    """Write the groups of a step, the first ``with_texts`` of them with the text of each token. Raises OSError."""
    lines = [
        json_bytes(encode_group(group, texts=texts if index < with_texts else None, whole=False))
        for index, group in enumerate(groups)
    ]
    write_atomic(tape_path(directory, step), b"\n".join(lines) + b"\n")


def tape_path(directory: Path, step: int) -> Path:
    """Return the path of the groups of a step."""
    return directory / f"step_{step:06d}.jsonl"


def tape_files(directory: Path) -> dict[int, Path]:
    """Return the tape files by step, in order; empty if there is no tape."""
    found = {
        int(number): path
        for path in directory.glob("step_*.jsonl")
        if (number := path.stem.removeprefix("step_")).isdecimal()
    }
    return dict(sorted(found.items()))


def read_groups(path: Path) -> list[Group]:
    """Return the groups of one step, equal to those that were written.

    Two things come back changed: columns that JSON cannot hold are their ``repr``, and a logprob that was
    not finite is NaN.

    Raises:
        DataError: no such file, or a line in it is not a group.
    """
    groups: list[Group] = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            groups.append(decode_group(line))
        except (KeyError, TypeError) as error:
            raise _malformed(path, number, error) from error
    return groups


def read_lines(path: Path, *, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the raw lines of one step (at most ``limit``), with ``pieces``; raises as :func:`read_groups`."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, text in enumerate(islice(file, limit), start=1):
                line = json.loads(text)
                if not isinstance(line, dict) or not {"prompt", "samples"} <= line.keys():
                    raise _malformed(path, number, "no prompt or no samples")
                yield line
    except json.JSONDecodeError as error:
        raise _malformed(path, number, error) from error
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist", remedy="choose a step whose rollouts were written (logging.tape)"
        ) from error


def _malformed(path: Path, number: int, reason: Exception | str) -> DataError:
    words = reason if isinstance(reason, str) else f"{type(reason).__name__} {reason}"
    return DataError(
        f"{path}, line {number}: not a group ({words})",
        remedy="delete this file of the tape; training does not need it",
    )


def token_texts(tokenizer: SupportsTokenText) -> TokenTexts:
    """Return a function from token ids to single-token texts, leading spaces kept, with a cache.

    A token that holds only a part of a character shows as the replacement character.
    """
    known: dict[int, str] = {}

    def text_of(token_id: int) -> str:
        if token_id not in known:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            # SentencePiece drops the space before a text, and so that of a single token.
            marked = str(tokenizer.convert_ids_to_tokens(token_id)).startswith("\u2581")
            known[token_id] = f" {text}" if marked and not text.startswith(" ") else text
        return known[token_id]

    return lambda token_ids: [text_of(token_id) for token_id in token_ids]
