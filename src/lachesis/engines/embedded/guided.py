"""Completions that match a regular expression: which tokens may come next. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import numpy as np
import regex

from lachesis.common.errors import EngineError

_KEPT = 256  # texts
_NO_CHARACTER = "\ufffd"  # what a tokenizer writes for part of a character's bytes


class RegexGuide:
    """The tokens after which a text can still become a match of ``pattern``, in whole.

    A token that is part of a character only is never allowed, nor is one without text. An end token is, once the
    text is a match.

    Args:
        pattern: a regular expression, as the package ``regex`` reads it.
        pieces: [V], the text of each token of the vocabulary; empty where it has none of its own.
        end_token_ids: tokens that end a completion.

    Raises:
        EngineError: the pattern is none.

    Attributes:
        allowed: :meth:`_allowed`, which remembers the latest texts.
    """

    def __init__(self, pattern: str, *, pieces: Sequence[str], end_token_ids: Collection[int]) -> None:
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise EngineError(
                f"the regular expression {pattern!r} cannot be read: {error}", remedy="correct sampling.guided_regex"
            ) from error
        self._size = len(pieces)
        self._ends = sorted(end_token_ids)
        ends = frozenset(end_token_ids)
        usable = {i: text for i, text in enumerate(pieces) if text and _NO_CHARACTER not in text and i not in ends}
        # Most tokens are ruled out by their first character, tried once for all that share it.
        self._by_first: dict[str, list[tuple[int, str]]] = {}
        for i, text in usable.items():
            self._by_first.setdefault(text[0], []).append((i, text))
        # Rows that have not parted ask for the same; a bool for each token of the vocabulary is not kept for ever.
        self.allowed = lru_cache(maxsize=_KEPT)(self._allowed)

    def _allowed(self, text: str) -> np.ndarray:
        """Which tokens may follow ``text``, bool [V].

        Raises:
            EngineError: none may, and ``text`` is no match: the vocabulary cannot spell what the pattern asks for.
        """
        allowed = np.zeros(self._size, dtype=bool)
        for first, tokens in self._by_first.items():
            if self._can_become(text + first):
                allowed[[i for i, piece in tokens if len(piece) == 1 or self._can_become(text + piece)]] = True
        if self._pattern.fullmatch(text):
            allowed[self._ends] = True
        if not allowed.any():
            raise EngineError(
                f"after {text!r} no token leads to a match of {self._pattern.pattern!r}",
                remedy="allow in sampling.guided_regex what the tokenizer can write",
            )
        return allowed

    def _can_become(self, text: str) -> bool:
        return self._pattern.fullmatch(text, partial=True) is not None


def token_pieces(
    decode: Callable[[Sequence[int]], str], *, vocab_size: int, special_token_ids: Collection[int] = ()
) -> list[str]:
    """The text that each token adds to what stands before it, [V]; empty for special ones.

    A token alone may lose the space that it begins with, so each is decoded behind another one.
    """
    special = frozenset(special_token_ids)
    ordinary = [i for i in range(vocab_size) if i not in special]
    anchor = next((i for i in ordinary if (text := decode([i])) and text.isascii() and text.isalnum()), None)
    before = [] if anchor is None else [anchor]
    known = decode(before) if before else ""
    return [decode([*before, i]).removeprefix(known) if i not in special else "" for i in range(vocab_size)]
