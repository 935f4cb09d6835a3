"""Problems from JSONL files, and the order in which training meets them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lachesis.errors import CheckpointError, ConfigError, DataError
from lachesis.rollouts.imports import nearest
from lachesis.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Rows tokenized at once: enough for the tokenizer's own threads, few enough for its memory.
_TOKENIZER_BATCH = 4096
# These say what the template is rendered for; a configuration that set them would train on other prompts.
_OWN_TEMPLATE_KEYS = frozenset({"conversation", "tokenize", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the file; ``place`` is the file and line for messages."""

    place: str
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A prompt as text; ``special_tokens``: the tokenizer adds its own, as no template wrote them."""

    text: str
    messages: tuple[Message, ...] | None
    special_tokens: bool


def load_problems(
    path: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompt_column: str = "prompt",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None,
    overlong: Literal["error", "drop"] = "error",
) -> list[Prompt]:
    """Read, render and tokenize the problems of a JSONL file.

    A string is tokenized as it is, with the special tokens that the tokenizer adds to plain text. A list of
    messages goes through the chat template, which asks for an answer, or for the continuation of the last
    message where that is the assistant's. Prompt ids are the index in the file, counted from 0, so they stay
    the same whatever is dropped. Every prompt has all columns of the file; a row without one has ``None``.

    Args:
        max_prompt_length: longest prompt in tokens; ``None`` allows any.
        overlong: ``error`` stops at a longer prompt, ``drop`` leaves it out (and logs how many).

    Raises:
        DataError: the file is missing, empty or malformed, a prompt is missing, empty, of the wrong type or
            too long, or nothing remains; the message names file and line.
        ConfigError: ``chat_template_kwargs`` sets what only this function may set.
    """
    rows = _read_jsonl(Path(path))
    template_kwargs = dict(chat_template_kwargs or {})
    if taken := sorted(_OWN_TEMPLATE_KEYS & template_kwargs.keys()):
        raise ConfigError(f"data.chat_template_kwargs sets {taken[0]!r}", remedy="leave it out; it is ours")
    rendered = [_render(row, prompt_column, tokenizer, template_kwargs) for row in rows]
    token_ids = _tokenize(rows, rendered, tokenizer)
    prompts = [
        Prompt(id=str(index), token_ids=ids, text=one.text, messages=one.messages, columns=row.columns)
        for index, (row, one, ids) in enumerate(zip(rows, rendered, token_ids, strict=True))
    ]
    return _within_limit(prompts, rows, max_prompt_length, overlong, Path(path))


def split_eval(problems: Sequence[Prompt], eval_size: int, *, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Hold out ``eval_size`` problems, drawn at random by ``seed``: (training, held out), both in file order.

    Raises:
        DataError: nothing would be left to train on.
    """
    if eval_size >= len(problems):
        raise DataError(
            f"data.eval_size is {eval_size}, and there are only {len(problems)} problems",
            remedy="hold out fewer problems, or name a file of their own in data.eval_path",
        )
    held_out = set(np.random.default_rng(seed).permutation(len(problems))[len(problems) - eval_size :].tolist())
    training = [problem for index, problem in enumerate(problems) if index not in held_out]
    return training, [problems[index] for index in sorted(held_out)]


class PromptStream:
    """An endless stream of prompts, epoch after epoch, whose place can be saved and found again exactly.

    The order of an epoch depends on the seed and the number of the epoch only.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        """Raises: DataError: there are no prompts, or two have one id."""
        self._by_id = {prompt.id: prompt for prompt in prompts}
        if not prompts or len(self._by_id) != len(prompts):
            problem = "two prompts have one id" if prompts else "there are no prompts to train on"
            raise DataError(problem, remedy="check the dataset")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._front: deque[Prompt] = deque()
        self._enter(epoch=0, index=0)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """The epoch that the last prompt came from, counted from 0."""
        return self._epoch

    @property
    def columns(self) -> frozenset[str]:
        """Names of all columns that prompts have."""
        return frozenset(name for prompt in self._prompts for name in prompt.columns)

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts: first those put back, then the epoch's."""
        taken = [self._front.popleft() for _ in range(min(count, len(self._front)))]
        while len(taken) < count:
            if self._index == len(self._prompts):
                self._enter(epoch=self._epoch + 1, index=0)
            taken.append(self._prompts[self._order[self._index]])
            self._index += 1
        return taken

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Make ``prompts`` the next ones, in their order.

        Raises:
            DataError: a prompt is not of this stream.
        """
        if unknown := [prompt.id for prompt in prompts if prompt.id not in self._by_id]:
            raise DataError(f"prompt {unknown[0]!r} is not of this dataset")
        self._front.extendleft(reversed([self._by_id[prompt.id] for prompt in prompts]))

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, and a fingerprint of the dataset that it is a place in."""
        return {
            "epoch": self._epoch,
            "index": self._index,
            "front": [prompt.id for prompt in self._front],
            "dataset": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            CheckpointError: the place is in another dataset.
        """
        if state.get("dataset") != self._fingerprint:
            raise CheckpointError(
                "the dataset is not the checkpoint's: its prompts, their order or the chat template differ",
                remedy="resume with the dataset that the run began with, or begin a new run",
            )
        self._enter(epoch=int(state["epoch"]), index=int(state["index"]))
        self._front = deque(self._by_id[prompt_id] for prompt_id in state["front"])

    def _enter(self, *, epoch: int, index: int) -> None:
        order = np.arange(len(self._prompts))
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(order)
        self._epoch, self._index, self._order = epoch, index, order.tolist()

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(f"{prompt.id}\0{prompt.text}\0".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]


def _read_jsonl(path: Path) -> list[_Row]:
    """The objects of the file, all with the same columns. Blank lines are skipped."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise DataError(
            f"cannot read the dataset {path}: {error.strerror}",
            remedy="check the path; in a configuration it is relative to the configuration's directory",
        ) from error
    rows = [_parse(f"{path}, line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise DataError(f"the dataset {path} is empty", remedy="give it one JSON object a line")
    names = dict.fromkeys(name for row in rows for name in row.columns)
    return [_Row(row.place, {name: row.columns.get(name) for name in names}) for row in rows]


def _parse(place: str, line: bytes) -> _Row:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 text (byte {error.start + 1}: {error.reason})",
            remedy="save the file as UTF-8",
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: malformed JSON: {error.msg} at column {error.colno}",
            remedy="write one JSON object a line, each on one line, without commas or brackets around them",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: JSON that cannot be read: {error}", remedy="mend that line") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{place}: {_json_type(value)}, not an object",
            remedy='write one JSON object a line, such as {"prompt": "37+45=", "answer": "28"}',
        )
    return _Row(place, value)


def _json_type(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    kinds = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return kinds[type(value)]


def _render(
    row: _Row, column: str, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> _Rendered:
    prompt = row.columns.get(column)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{row.place}: the prompt in column {column!r} is empty", remedy="mend that line")
        return _Rendered(text=prompt, messages=None, special_tokens=True)
    if isinstance(prompt, list):
        messages = _check_messages(prompt, row.place, column)
        text = _apply_template(messages, row.place, tokenizer, template_kwargs)
        return _Rendered(text=text, messages=messages, special_tokens=False)
    if prompt is None:
        raise _missing_prompt(row, column)
    raise DataError(
        f"{row.place}: the prompt in column {column!r} is {_json_type(prompt)}",
        remedy="a prompt is a string or a list of messages",
    )


def _missing_prompt(row: _Row, column: str) -> DataError:
    others = [name for name, value in row.columns.items() if value is not None and name != column]
    close = nearest(column, others)
    hint = f"set data.prompt_column to {close!r}" if close else "set data.prompt_column, or mend that line"
    return DataError(
        f"{row.place}: no prompt in column {column!r}; the columns there are: {', '.join(others) or 'none'}",
        remedy=hint,
    )


def _check_messages(prompt: list[Any], place: str, column: str) -> tuple[Message, ...]:
    if not prompt:
        raise DataError(f"{place}: the prompt in column {column!r} is empty", remedy="mend that line")
    for number, message in enumerate(prompt, start=1):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            raise DataError(
                f"{place}: message {number} of the prompt in column {column!r} has no role and content",
                remedy='write messages as {"role": "user", "content": "..."}',
            )
    return tuple(prompt)


def _apply_template(
    messages: tuple[Message, ...], place: str, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]
) -> str:
    if not tokenizer.chat_template and "chat_template" not in kwargs:
        raise DataError(
            f"{place}: the prompt is a conversation and the tokenizer has no chat template",
            remedy="set model.chat_template, or write prompts as strings",
        )
    prefilled = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            list(messages),  # type: ignore[arg-type]
            tokenize=False,
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            **kwargs,
        )
    except Exception as error:
        raise DataError(
            f"{place}: the chat template failed: {type(error).__name__}: {error}",
            remedy="mend the messages, or see model.chat_template and data.chat_template_kwargs",
        ) from error
    return str(text)


def _tokenize(
    rows: Sequence[_Row], rendered: Sequence[_Rendered], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    """Token ids per row, in batches; no prompt is without tokens."""
    token_ids: list[tuple[int, ...]] = [()] * len(rendered)
    for special in (True, False):
        chosen = [index for index, one in enumerate(rendered) if one.special_tokens is special]
        for start in range(0, len(chosen), _TOKENIZER_BATCH):
            batch = chosen[start : start + _TOKENIZER_BATCH]
            try:
                encoded = _encode(tokenizer, [rendered[index].text for index in batch], special)
            except Exception as error:
                raise _untokenizable(rows, rendered, tokenizer, batch, error) from error
            for index, ids in zip(batch, encoded, strict=True):
                token_ids[index] = tuple(ids)
    for row, ids in zip(rows, token_ids, strict=True):
        if not ids:
            raise DataError(
                f"{row.place}: the tokenizer makes no tokens of the prompt",
                remedy="mend that line, or check that the tokenizer knows these characters",
            )
    return token_ids


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> Iterable[list[int]]:
    encoding = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
    return encoding["input_ids"]  # type: ignore[return-value]


def _untokenizable(
    rows: Sequence[_Row],
    rendered: Sequence[_Rendered],
    tokenizer: PreTrainedTokenizerBase,
    batch: Sequence[int],
    error: Exception,
) -> DataError:
    """Find the row of a batch that the tokenizer choked on; it says nothing about that itself."""
    place = rows[batch[0]].place + " and following"
    for index in batch:
        try:
            _encode(tokenizer, [rendered[index].text], rendered[index].special_tokens)
        except Exception as own:
            place, error = rows[index].place, own
            break
    return DataError(
        f"{place}: the prompt cannot be tokenized: {type(error).__name__}: {error}", remedy="mend that line"
    )


def _within_limit(
    prompts: list[Prompt],
    rows: Sequence[_Row],
    limit: int | None,
    overlong: Literal["error", "drop"],
    path: Path,
) -> list[Prompt]:
    if limit is None:
        return prompts
    long = [index for index, prompt in enumerate(prompts) if len(prompt.token_ids) > limit]
    if not long:
        return prompts
    first = f"{rows[long[0]].place}: the prompt has {len(prompts[long[0]].token_ids)} tokens, {limit} are allowed"
    if overlong == "error":
        raise DataError(
            f"{first} ({len(long)} of {len(prompts)} prompts are longer)",
            remedy="raise data.max_prompt_length, or lower sampling.max_completion_length if the model's "
            "context is the limit, or set data.overlong_prompts to drop",
        )
    if len(long) == len(prompts):
        raise DataError(
            f"{path}: all {len(prompts)} prompts have more than {limit} tokens; none remains",
            remedy="raise data.max_prompt_length",
        )
    logger.warning("%s: dropped %d of %d prompts as too long; %s", path, len(long), len(prompts), first)
    dropped = set(long)
    return [prompt for index, prompt in enumerate(prompts) if index not in dropped]
