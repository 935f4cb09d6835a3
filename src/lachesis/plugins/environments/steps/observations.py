"""Conversion of observations to token ids: by the chat template, or as plain text if the model has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import ConfigError
from lachesis.common.types import Message
from lachesis.plugins.environments.steps.game import Action
from lachesis.rollouts.generation import SpecialTokens, reward_decoder
from lachesis.rollouts.tools.template import Continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rendering:
    """Tokens of prompts. Sampled tokens stay unchanged: only new text is tokenized.

    Args:
        kwargs: further variables of the chat template, such as the descriptions of tools.
        special_tokens: how :attr:`Action.text` treats them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], *, special_tokens: SpecialTokens = "remove"
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = reward_decoder(tokenizer, special_tokens)
        self._kwargs = dict(kwargs)
        self._chats = bool(tokenizer.chat_template or "chat_template" in kwargs)
        if kwargs.get("tools") and not self._chats:
            raise ConfigError("tools need a chat template, but the model has none", remedy="set model.chat_template")
        self._continuation = Continuation(tokenizer, kwargs)

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the first prompt. Raises ConfigError if the template fails."""
        if not self._chats:
            return tuple(self._tokenizer(_text(messages))["input_ids"])  # type: ignore[arg-type]
        return self._continuation.whole(messages)

    def added(self, answer: Message, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """Return the tokens between a turn and the next. Raises ConfigError as :meth:`Continuation.tokens`.

        Args:
            answer: the turn as a message.
            messages: the environment's messages after it.
            ended: True if the turn was sampled with its end token.
        """
        if self._chats:
            return self._continuation.tokens(answer, messages, ended=ended)
        return list(self._tokenizer(_text(messages), add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]

    def action(self, token_ids: Sequence[int]) -> Action:
        """Return a turn in the form that the environment gets, without its end token."""
        ended = self.ended(token_ids)
        own = list(token_ids[:-1] if ended else token_ids)
        raw = str(self._tokenizer.decode(own, skip_special_tokens=False))
        return Action(text=self._decode([own])[0], raw=raw)

    def ended(self, token_ids: Sequence[int]) -> bool:
        """Return True if a turn has its end token."""
        return bool(token_ids) and token_ids[-1] == self._tokenizer.eos_token_id


def _text(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)
