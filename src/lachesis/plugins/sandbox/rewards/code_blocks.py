"""Blocks of code in a model's text, found in linear time as :mod:`lachesis.common.tagged_text` finds marked parts."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FENCE = "```"
_LANGUAGE = re.compile(r"[ \t]*([\w.+-]*)")


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and code of each block between fences of three backticks, from left to right.

    The first line of a block has the language, if any, and may have more; a block without an end is none.
    """
    at = 0
    while (start := text.find(_FENCE, at)) >= 0:
        line_end = text.find("\n", start)
        if line_end < 0:
            return
        broken = text.rfind("\r", start, line_end - 1)
        if broken >= 0:  # that line has ended before, without a line feed: it is none of a block
            at = broken + 1
            continue
        end = text.find(_FENCE, line_end + 1)
        if end < 0:
            return
        language = _LANGUAGE.match(text, start + len(_FENCE))
        yield language[1] if language else "", text[line_end + 1 : end]
        at = end + len(_FENCE)
