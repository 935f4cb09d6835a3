"""The tokens between two turns: what a chat template writes after a turn of the model, up to where it goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import ConfigError
from lachesis.common.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How many answers are remembered.
_KEPT = 4096
_ASKED: Message = {"role": "user", "content": "?"}


class Continuation:
    """Renders messages that come after a sampled turn, without touching the tokens before them.

    The template's text of a small conversation with the messages is compared with that without: what is more is what
    the template writes for them. So no token that was sampled is ever made anew from text.

    The rollouts of a prompt often ask the same of the same tool: what was rendered last is kept.

    Args:
        kwargs: further variables of the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._end = str(tokenizer.eos_token or "")
        self._rendered: dict[str, tuple[int, ...]] = {}

    def tokens(self, answer: Message, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """What follows the turn ``answer``: its end, ``messages``, and the beginning of the model's next turn.

        Args:
            ended: whether the turn was sampled with its end token, which is then not repeated.

        Raises:
            ConfigError: the template fails, or writes the turn otherwise once messages follow it.
        """
        key = json.dumps([answer, messages, ended], default=repr)
        if (known := self._rendered.get(key)) is None:
            if len(self._rendered) >= _KEPT:
                self._rendered.clear()
            known = self._rendered[key] = tuple(self._tokens(answer, messages, ended=ended))
        return list(known)

    def _tokens(self, answer: Message, messages: Sequence[Message], *, ended: bool) -> list[int]:
        before = self._render([_ASKED, answer], going_on=False)
        after = self._render([_ASKED, answer, *messages], going_on=True)
        if not after.startswith(before):
            raise ConfigError(
                "the chat template writes a turn of the model otherwise once messages follow it",
                remedy="set model.chat_template to one that only adds, as TRL's templates for training do",
            )
        place = before.rfind(self._end) if self._end else -1
        start = len(before) if place < 0 else place + (len(self._end) if ended else 0)
        return list(self._tokenizer(after[start:], add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]

    def _render(self, messages: list[Message], *, going_on: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,  # type: ignore[arg-type]
                    tokenize=False,
                    add_generation_prompt=going_on,
                    **self._kwargs,
                )
            )
        except Exception as error:  # a template is a program of the model's, and may raise anything
            raise ConfigError(
                f"the chat template cannot render the answers of tools: {type(error).__name__}: {error}",
                remedy="set model.chat_template to one that knows the role tool and tool_calls",
            ) from error


def answer_message(content: str, calls: Sequence[tuple[str, Mapping[str, Any]]], *, first: int = 0) -> Message:
    """A turn of the model in the format of chat templates; ``calls`` are names with arguments."""
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
    """Nine letters and digits, which is what all templates take."""
    return f"call{number:05d}"
