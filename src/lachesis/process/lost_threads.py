"""Watch over threads that die for lack of memory, for which the rest of a process would wait forever.

Python waits without a limit for a thread that it starts, but one that finds no memory dies before it has begun.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lachesis.common.errors import TrainingError

MEMORY_FULL = (
    "the memory of this process was used up -> give it more (control group, ulimit -v, other processes) or lower "
    "its need (`lachesis plan CONFIG`), and start it again, a run with --resume"
)
# Made in advance: later there may be no memory for it.
_LINE = f"error: {MEMORY_FULL}\n".encode()
# Threads begin at once, even on a busy machine: one that has not begun after four checks, a second apart, never will.
LOOK_S, _LOOKS = 1.0, 4
# Address space of numpy's shared objects and of those loaded after them; and for each thread of OpenBLAS, that of a
# buffer of 32 MiB and a stack.
_NUMPY_BYTES, _OPENBLAS_BYTES, _MOST_THREADS = 96 << 20, 40 << 20, 64
# Messages of Python, torch, and the loader of shared objects.
_WORDS = ("can't start new thread", "DefaultCPUAllocator", "failed to map segment", "cannot allocate memory in")


def lacks_memory(error: BaseException) -> bool:
    """Return True if an error means that the memory of this process, not of a device, was used up."""
    if isinstance(error, ImportError) and error.__cause__ is not None:  # numpy's message guesses another reason
        return lacks_memory(error.__cause__)
    said = str(error) if isinstance(error, RuntimeError | ImportError | OSError) else ""
    known = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return known or any(words in said for words in _WORDS)


class RoomForNumpy:
    """Finder that finds nothing, but lets numpy be loaded only if there is memory for its OpenBLAS.

    While it is loaded, OpenBLAS takes a buffer for each of its threads. It asks forever for one that it does not get,
    and holds Python's lock meanwhile, so this process could neither report that nor end.
    """

    @staticmethod
    def find_spec(fullname: str, path: object, target: object = None, /) -> None:
        """Raise MemoryError if numpy is about to be loaded and this process may not have as much address space."""
        if fullname == "numpy":
            words = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
            threads = int(words) if words.isdecimal() else os.cpu_count() or 1
            needed = _NUMPY_BYTES + _OPENBLAS_BYTES * min(threads, _MOST_THREADS)
            try:  # it is reserved and never used
                mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
            except OSError:
                raise MemoryError from None


@contextmanager
def threads_watched(*, every_s: float = LOOK_S) -> Iterator[None]:
    """End this process with one line if one of its threads dies for lack of memory while the block runs."""
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
        # Threads without a number were started, and have not begun; one whose join was interrupted is "not alive".
        looks = {one: looks.get(one, 0) + 1 for one in threading.enumerate() if one.ident is None}
        if max(looks.values(), default=0) >= _LOOKS:
            _end()


def _end() -> None:
    """Write the line and end the process at once: nothing else is certain to work without memory.

    Its servers and workers notice that it has ended, and end too.
    """
    os.write(2, _LINE)
    os._exit(TrainingError.exit_code)
