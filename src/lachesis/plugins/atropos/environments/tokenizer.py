"""Tokenizers of environments: loading by name, and texts of sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import ConfigError
from lachesis.common.hub import cache_alone_where_the_hub_is_away
from lachesis.common.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory or hub id.

    Raises:
        ConfigError: it does not exist.
    """
    from transformers import AutoTokenizer

    try:
        with cache_alone_where_the_hub_is_away(name):
            return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the library passes on any error of the file, the hub or the network
        raise ConfigError(
            f"no tokenizer can be loaded from {name!r}: {error}",
            remedy="name a model's directory or hub id with --env.tokenizer_name",
        ) from error


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, plain: str) -> list[int]:
    """Return token ids of a conversation that the model is to continue.

    Args:
        tokenizer: of the model.
        messages: the conversation.
        plain: the text to use instead if the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(plain))
    ids: Any = tokenizer.apply_chat_template(
        [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(ids)


def text_of(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int]) -> str:
    """Return the text of tokens, without special ones."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def pieces_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds, special tokens too; the text of a character belongs to its last token."""
    from tokenizers.decoders import DecodeStream

    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return [str(tokenizer.decode([token])) for token in token_ids]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(fast, token) or "" for token in token_ids]
