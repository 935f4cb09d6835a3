"""``python -m lachesis``."""

from __future__ import annotations

from lachesis.cli import main

if __name__ == "__main__":  # the engine's own processes import this file
    main()
