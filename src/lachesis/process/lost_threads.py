"""Watch over threads that die for want of memory, for which the others of a process would wait for ever.

Python waits without a limit for a thread that it starts, and one that finds no memory dies before it has begun.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lachesis.common.errors import TrainingError

MEMORY_FULL = (
    "the memory of this process was used up -> give it more (control group, ulimit -v, other processes) or lower what "
    "it needs (`lachesis plan CONFIG`), and start it again, a run with --resume"
)
# Made beforehand: there may be no memory to make it.
_LINE = f"error: {MEMORY_FULL}\n".encode()
# Threads begin at once, on a busy machine too: one that has not begun after four looks, a second apart, never will.
LOOK_S, _LOOKS = 1.0, 4
# As Python, torch, and the loader of shared objects say it.
_WORDS = ("can't start new thread", "DefaultCPUAllocator", "failed to map segment", "cannot allocate memory in")


def lacks_memory(error: BaseException) -> bool:
    """Return True if an error means that the memory of this process, not of a device, was used up."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ImportError) and error.__cause__ is not None:  # numpy guesses at another reason
        return lacks_memory(error.__cause__)
    said = str(error) if isinstance(error, RuntimeError | ImportError) else ""
    return isinstance(error, MemoryError) or any(words in said for words in _WORDS)


@contextmanager
def threads_watched(*, every_s: float = LOOK_S) -> Iterator[None]:
    """End this process with one line if a thread of it dies for want of memory while the block runs."""
    ended, process, before = threading.Event(), os.getpid(), threading.excepthook

    def died(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_value is not None and lacks_memory(failure.exc_value) and os.getpid() == process:
            _end()
        before(failure)

    threading.excepthook = died
    threading.Thread(target=_watch, args=(ended, every_s), name="lachesis-threads", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        threading.excepthook = before


def _watch(ended: threading.Event, every_s: float) -> None:
    looks: dict[threading.Thread, int] = {}
    while not ended.wait(every_s):
        # Those that are listed and not alive have been started, and have not begun.
        looks = {one: looks.get(one, 0) + 1 for one in threading.enumerate() if not one.is_alive()}
        if max(looks.values(), default=0) >= _LOOKS:
            _end()


def _end() -> None:
    """Write the line and end the process at once: nothing else is sure to work without memory.

    Its servers and workers notice that it has ended, and end too.
    """
    os.write(2, _LINE)
    os._exit(TrainingError.exit_code)
