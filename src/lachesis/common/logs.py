"""The end of a server's log, as errors show it. Pure but for reading the file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lachesis.common.errors import EngineError

_TAIL_BYTES = 64 << 10
_LINES, _CAUSES, _WIDTH = 12, 3, 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CAUSE = re.compile(r"\b\w*(Error|Exception)\b: .")
_REMEDIES = {
    "out of memory": "lower --gpu-memory-utilization or --max-model-len, or free the device",
    "Free memory on device": "lower --gpu-memory-utilization, or stop what else uses the device",
    "No available memory for the cache blocks": "raise --gpu-memory-utilization or lower --max-model-len",
    "address already in use": "choose another port",
    # A fault of vLLM's CPU build: a prompt with a seed that is read in two steps ends it.
    "CPU Generator does not use offset": "raise --max-num-batched-tokens, so that prompts are read in one step",
    "unrecognized arguments": "correct the arguments; `vllm serve --help=all` lists them",
}


def last_lines(path: Path, *, start: int = 0) -> list[str]:
    """The last lines from byte ``start`` on, after those before them that name an error, which are causes often.

    Raises:
        EngineError: the log cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        raise EngineError(f"the log {path} cannot be read: {error.strerror}") from error
    # Of a progress bar only what it showed last.
    lines = [_COLOUR.sub("", line.rsplit("\r", 1)[-1]).rstrip()[:_WIDTH] for line in text.split("\n")]
    lines = [line for line in lines if line]
    end = lines[-_LINES:]
    causes = [line for line in lines[:-_LINES] if _CAUSE.search(line)]
    return [*dict.fromkeys(causes[-_CAUSES:]), *end]


def remedy(lines: Sequence[str], *, killed: bool) -> str:
    """What to do about a server that ended with these lines; empty if nothing is known about it."""
    text = "\n".join(lines).lower()
    for sign, advice in _REMEDIES.items():
        if sign.lower() in text:
            return advice
    return "if nobody killed it, the machine ran out of memory: look at its kernel log" if killed else ""
