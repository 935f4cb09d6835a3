"""``python -m lachesis``."""

from __future__ import annotations

try:
    from lachesis.cli import main
except (MemoryError, OSError, ImportError, SystemError) as error:
    if str(error) and not any(words in str(error) for words in ("allocate", "map segment", "without exception")):
        raise
    raise SystemExit("error: there is no memory to start in -> give this process more, and start it again") from None

if __name__ == "__main__":  # the engine's own processes import this file
    # multiprocessing leaves out a file that is named by its package, and with it what keeps libraries quiet.
    __spec__ = None
    main()
