"""Layouts of ranks beside those that the tests run: `python -m tests.layouts [RANKS ...]`, or `make layouts`.

Each trains what one process trains (:mod:`tests.ranks_program`). It takes some minutes on two cores.
"""

from __future__ import annotations

import subprocess
import sys

from tests.ranks_program import MORE


def main() -> int:
    chosen = [int(word) for word in sys.argv[1:]] or [*MORE]
    codes: list[int] = []
    for ranks in chosen:
        words = ["--standalone", "--nproc-per-node", str(ranks), "-m", "tests.ranks_program", *MORE[ranks]]
        codes.append(subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
