"""Text of completions: decoded, cut at stop strings, and handed out while it grows. Pure but for the decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder makes of the first bytes of a character


def cut_at_stop(text: str, stop: Sequence[str], *, include: bool) -> str:
    """``text`` up to the first stop string in it, with that string if ``include``."""
    places = [(text.find(string), string) for string in stop if string in text]
    if not places:
        return text
    place, string = min(places)
    return text[: place + len(string) * include]


class GrowingText:
    """The text of one completion, in pieces that are never taken back.

    Args:
        decode: token ids to text.
        stop: strings that end the completion.
        include_stop: whether the stop string is part of the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, stop: Sequence[str], include_stop: bool) -> None:
        self._decode = decode
        self._stop = stop
        self._include_stop = include_stop
        self._handed_out = 0

    def more(self, token_ids: Sequence[int], *, finished: bool) -> str:
        """What may be handed out now that the completion is ``token_ids``."""
        text = cut_at_stop(self._decode(token_ids), self._stop, include=self._include_stop)
        end = len(text)
        if not finished:
            end = len(text.rstrip(_INCOMPLETE)) - self._held_back(text)
        piece = text[self._handed_out : end]
        self._handed_out = max(self._handed_out, end)
        return piece

    def _held_back(self, text: str) -> int:
        """Length of the longest end of ``text`` that may be the beginning of a stop string."""
        longest = max((len(string) for string in self._stop), default=0)
        ends = range(min(longest, len(text)), 0, -1)
        return next((n for n in ends if any(string.startswith(text[-n:]) for string in self._stop)), 0)
