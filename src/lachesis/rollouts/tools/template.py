"""Tokens between two turns: the chat template's text after a turn of the model, up to the start of the next."""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lachesis.common.errors import ConfigError
from lachesis.common.types import Message
from lachesis.rollouts.datasets.rendering import applied
from lachesis.rollouts.tools.memo import Remembered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The number of remembered answers.
_KEPT = 4096
_ASKED: Message = {"role": "user", "content": "?"}


class Told(NamedTuple):
    """Messages to the model after its turn ``answer``; ``ended``: the turn was sampled with its end token.

    ``ids`` are the ids of its calls from :func:`call_id`; most templates do not write them.
    """

    answer: Message
    messages: Sequence[Message]
    ended: bool
    ids: Sequence[str] = ()


class Continuation:
    """Renderer of messages after a sampled turn, which leaves the tokens before them unchanged.

    The template renders a small conversation with and without the messages; the difference is its text for them. So
    sampled tokens are never recomputed from text.

    The rollouts of a prompt often repeat the same calls, so the latest texts and their tokens are remembered.

    Args:
        kwargs: further variables of the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._end = str(tokenizer.eos_token or "")
        self._rendered = Remembered(self._written, most=_KEPT)
        self._tokenized = Remembered(self._token_ids, most=_KEPT)
        self._writes_ids = False  # as far as has been seen

    def tokens(self, answer: Message, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """Return the tokens after the turn ``answer``: its end, ``messages``, and the start of the model's next turn.

        Args:
            answer: the turn.
            messages: after it.
            ended: True if the turn was sampled with its end token, which is then not repeated.

        Raises:
            ConfigError: the template fails, or rewrites the turn once messages follow it.
        """
        (found,) = self.tokens_of([Told(answer, messages, ended)])
        return list(found)

    def tokens_of(self, told: Sequence[Told]) -> list[tuple[int, ...]]:
        """Return :meth:`tokens` of many turns."""
        return self._tokenized(self.texts_of(told))

    def texts_of(self, told: Sequence[Told]) -> list[str]:
        """Return the texts of :meth:`tokens`; equal ones, except for ids that are not written, are rendered once."""
        if not self._writes_ids:
            texts = self._rendered(told, keys=[_key(one, but=one.ids) for one in told])
            if not self._writes_ids:  # known once messages with ids have been rendered, here or in another thread
                return texts
        return self._rendered(told, keys=[_key(one) for one in told])

    def _written(self, told: Sequence[Told]) -> list[str]:
        before = self._render([[_ASKED, one.answer] for one in told], going_on=False)
        after = self._render([[_ASKED, one.answer, *one.messages] for one in told], going_on=True)
        texts = [self._added(*texts, ended=one.ended) for *texts, one in zip(before, after, told, strict=True)]
        if any(name in text for text, one in zip(texts, told, strict=True) for name in one.ids):
            self._writes_ids = True
        return texts

    def _token_ids(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        return [tuple(ids) for ids in short_token_ids(self._tokenizer, texts)]

    def _added(self, before: str, after: str, *, ended: bool) -> str:
        place = before.rfind(self._end) if self._end else -1
        if not after.startswith(before):
            place = self._end_of_turn(before, after)
        return after[len(before) if place < 0 else place + (len(self._end) if ended else 0) :]

    def _end_of_turn(self, before: str, after: str) -> int:
        """Return where a turn ends that the template rewrites once messages follow it, as Qwen3's drops thoughts.

        Raises:
            ConfigError: it has no end token, or what stands before it is rewritten too.
        """
        (asked,) = self._render([[_ASKED]], going_on=False)
        same = before.startswith(asked) and after.startswith(asked)
        ends = before[len(asked) :].count(self._end) if same and self._end else 0
        pieces = after[len(asked) :].split(self._end) if ends else []
        if len(pieces) <= ends:
            raise ConfigError(
                "the chat template rewrites a turn of the model once messages follow it",
                remedy="set model.chat_template to one that only appends, such as TRL's templates for training",
            )
        return len(asked) + len(self._end.join(pieces[:ends]))

    def whole(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a conversation and of a generation prompt. Raises ConfigError if the template fails.

        They depend only on these messages; to continue after sampled tokens, append those of :meth:`tokens`.
        """
        (text,) = self._render([list(messages)], going_on=True)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]

    def _render(self, conversations: list[list[Message]], *, going_on: bool) -> list[str]:
        try:
            return [
                applied(self._tokenizer, messages, add_generation_prompt=going_on, **self._kwargs)
                for messages in conversations
            ]
        except Exception as error:  # a template is a program that comes with the model, and may raise anything
            raise ConfigError(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}",
                remedy="set model.chat_template to one that supports their roles, including tool, and tool_calls",
            ) from error


def _key(told: Told, *, but: Sequence[str] = ()) -> bytes | str:
    """Return a key that is equal for messages that differ at most in the ids ``but``.

    Arguments of tools may be of any type.
    """
    messages: Any = (told.answer, *told.messages, told.ended)
    try:
        key = marshal.dumps(messages, 2)  # a version that does not tell strings apart by their places in memory
    except ValueError:
        return repr(messages)
    for number, name in enumerate(but):
        key = key.replace(name.encode(), f"{number:0{len(name)}}".encode())
    return key


def short_token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return token ids of texts without special tokens.

    One by one if possible: the library's threads take a batch, and waiting for them takes longer than a few short
    texts, above all on a busy machine.
    """
    fast: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    if fast is None or fast.truncation is not None or fast.padding is not None:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]  # type: ignore[return-value]
    return [fast.encode(text, add_special_tokens=False).ids for text in texts]


def answer_message(content: str, calls: Sequence[tuple[str, Mapping[str, Any]]], *, first: int = 0) -> Message:
    """Return a turn of the model in the format of chat templates; ``calls`` are names with arguments."""
    if not calls:
        return {"role": "assistant", "content": content}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": call_id(first + number),
                "type": "function",
                "function": {"name": name, "arguments": dict(arguments)},
            }
            for number, (name, arguments) in enumerate(calls)
        ],
    }


def call_id(number: int) -> str:
    """Return an id of nine letters and digits, a form that all templates accept."""
    return f"call{number:05d}"
