"""Rendering of problems as text and tokens: the chat template and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lachesis.common.errors import ConfigError, DataError, nearest
from lachesis.common.types import Message
from lachesis.rollouts.datasets.formats import Problem
from lachesis.rollouts.datasets.rows import describe_type

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Number of rows to tokenize at once: enough for the tokenizer's threads, few enough for its memory.
TOKENIZER_BATCH = 4096
# Variables that rendering sets itself; a configuration that set them would train on other prompts.
_OWN_TEMPLATE_KEYS = frozenset({"conversation", "tokenize", "add_generation_prompt", "continue_final_message"})
_PROBE = "the text of a message"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text. ``special_tokens`` is True if the tokenizer must add its own, because no template did."""

    text: str
    messages: tuple[Message, ...] | None
    special_tokens: bool


def checked_template_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return variables for the chat template. Raises ConfigError if one is reserved."""
    kwargs = dict(given or {})
    if taken := sorted(_OWN_TEMPLATE_KEYS & kwargs.keys()):
        message = f"data.chat_template_kwargs sets {taken[0]!r}, which Lachesis sets itself"
        raise ConfigError(message, remedy="leave it out")
    return kwargs


def render(problem: Problem, *, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> Rendered:
    """Render a conversation through the chat template; leave a text unchanged.

    The template adds a generation prompt, or continues the last message if it is the assistant's.

    Raises:
        DataError: the prompt is missing, empty or of the wrong type, or the template failed on it.
    """
    prompt, column = problem.prompt, problem.column
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{problem.place}: the prompt in column {column!r} is empty", remedy="correct that line")
        return Rendered(text=prompt, messages=None, special_tokens=True)
    if isinstance(prompt, list):
        messages = _check_messages(prompt, problem.place, column)
        text = _apply_template(messages, problem.place, tokenizer, template_kwargs)
        return Rendered(text=text, messages=messages, special_tokens=False)
    if prompt is None:
        raise missing_prompt(problem)
    raise DataError(
        f"{problem.place}: the prompt in column {column!r} is {describe_type(prompt)}",
        remedy="a prompt is a string or a list of messages",
    )


def tokenize(
    places: Sequence[str], rendered: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    """Return token ids per prompt, computed in batches.

    Raises:
        DataError: the tokenizer fails on a prompt, or returns no tokens for it.
    """
    token_ids: list[tuple[int, ...]] = [()] * len(rendered)
    for special in (True, False):
        chosen = [index for index, one in enumerate(rendered) if one.special_tokens is special]
        for start in range(0, len(chosen), TOKENIZER_BATCH):
            batch = chosen[start : start + TOKENIZER_BATCH]
            try:
                encoded = _encode(tokenizer, [rendered[index].text for index in batch], special)
            except Exception as error:
                raise _untokenizable(places, rendered, tokenizer, batch, error) from error
            for index, ids in zip(batch, encoded, strict=True):
                token_ids[index] = tuple(ids)
    for place, ids in zip(places, token_ids, strict=True):
        if not ids:
            raise DataError(
                f"{place}: the tokenizer returns no tokens for the prompt",
                remedy="correct this line, or check that the tokenizer knows these characters",
            )
    return token_ids


# Common names of the question in public datasets such as GSM8K.
_QUESTIONS = ("question", "problem", "query", "instruction", "input", "text")


def missing_prompt(problem: Problem) -> DataError:
    column = problem.column
    others = [name for name, value in problem.columns.items() if value is not None and name != column]
    questions = (name for question in _QUESTIONS for name in others if name.lower() == question)
    close = nearest(column, others, cutoff=0.5) or next(questions, None)
    hint = f"set `data.prompt_column: {close}`" if close else "set data.prompt_column, or correct this line"
    return DataError(
        f"{problem.place}: no prompt in column {column!r}; the columns with values are: {', '.join(others) or 'none'}",
        remedy=hint,
    )


def _check_messages(prompt: list[Any], place: str, column: str) -> tuple[Message, ...]:
    if not prompt:
        raise DataError(f"{place}: the prompt in column {column!r} is empty", remedy="correct this line")
    for number, message in enumerate(prompt, start=1):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            raise DataError(
                f"{place}: message {number} of the prompt in column {column!r} lacks a role or a content",
                remedy='write messages as {"role": "user", "content": "..."}',
            )
    return tuple(prompt)


def _apply_template(
    messages: tuple[Message, ...], place: str, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]
) -> str:
    if not tokenizer.chat_template and "chat_template" not in kwargs:
        raise DataError(
            f"{place}: the prompt is a conversation, but the tokenizer has no chat template",
            remedy="set model.chat_template, or write prompts as strings",
        )
    prefilled = messages[-1]["role"] == "assistant"
    try:
        return applied(
            tokenizer, messages, add_generation_prompt=not prefilled, continue_final_message=prefilled, **kwargs
        )
    except Exception as error:
        raise DataError(
            f"{place}: the chat template failed: {type(error).__name__}: {error}",
            remedy="correct the messages, or check model.chat_template and data.chat_template_kwargs",
        ) from error


def applied(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> str:
    """Return the chat template's text for messages, whose texts are made parts if it drops others."""
    template = options.get("chat_template") or tokenizer.chat_template
    if isinstance(template, str) and _takes_only_parts(tokenizer, template):
        messages = [_in_parts(message) for message in messages]
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def _takes_only_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return True if a template drops a text that is not a part of a message, as SmolVLM's and LLaVA's do."""
    probe: Message = {"role": "user", "content": _PROBE}
    try:
        texts = [
            str(tokenizer.apply_chat_template([dict(message)], tokenize=False, chat_template=template))
            for message in (probe, _in_parts(probe))
        ]
    except (TypeError, ValueError, TemplateError):  # it takes other messages, or no parts
        return False
    return [_PROBE in text for text in texts] == [False, True]


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> Iterable[list[int]]:
    encoding = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
    return encoding["input_ids"]  # type: ignore[return-value]


def _untokenizable(
    places: Sequence[str],
    rendered: Sequence[Rendered],
    tokenizer: PreTrainedTokenizerBase,
    batch: Sequence[int],
    error: Exception,
) -> DataError:
    """Find the row of a batch on which the tokenizer failed, because its error does not name it."""
    place = places[batch[0]] + " or a row soon after it"
    for index in batch:
        try:
            _encode(tokenizer, [rendered[index].text], rendered[index].special_tokens)
        except Exception as own:
            place, error = places[index], own
            break
    return DataError(
        f"{place}: the prompt cannot be tokenized: {type(error).__name__}: {error}", remedy="correct that line"
    )
