"""``python -m lachesis``."""

from __future__ import annotations

from lachesis.cli import main

if __name__ == "__main__":  # the engine's own processes import this file
    # multiprocessing leaves out a file that is named by its package, and with it what keeps libraries quiet.
    __spec__ = None
    main()
