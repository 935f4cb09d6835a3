"""The process that compares answers: math-verify's time limits need a main thread of their own.

It reads a line of JSON, ``{"gold": "18", "answers": ["... \\\\boxed{18}"]}``, and writes one, ``{"scores": [1.0]}``,
until its input ends. What the libraries print goes nowhere, but for the error of an import that fails.
"""

from __future__ import annotations

import json
import logging
import os
import sys

_PARSE_S, _VERIFY_S = 3, 3
_BOXED = "\\boxed{"


def main() -> None:
    """Answer requests, one after the other."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    # Nobody reads what they may still have to say, and a full pipe would hold this process up.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    boxed = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]

    def right(gold: object, answer: str) -> bool:
        found = parse(last_boxed(answer), extraction_config=boxed, parsing_timeout=_PARSE_S)
        return bool(found) and verify(gold, found, timeout_seconds=_VERIFY_S)

    for line in sys.stdin:
        asked = json.loads(line)
        gold = parse(f"${asked['gold']}$", parsing_timeout=_PARSE_S)
        scores = [float(right(gold, answer)) for answer in asked["answers"]] if gold else None
        replies.write(json.dumps({"scores": scores}) + "\n")
        replies.flush()


def last_boxed(text: str) -> str:
    """The last ``\\boxed{...}`` of a text, braces within it balanced; empty where there is none."""
    start = text.rfind(_BOXED)
    depth = 0
    for at in range(start + len(_BOXED) - 1, len(text)) if start >= 0 else ():
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[start : at + 1]
    return ""
