"""Layouts of ranks beside those that the tests run: `python -m tests.layouts [RANKS ...]`, or `make layouts`.

Each trains what one process trains (:mod:`tests.ranks_program`), and ranks that share tokens or experts keep
what `lachesis plan` counts (:mod:`tests.kept_program`). It takes some minutes on two cores.
"""

from __future__ import annotations

import subprocess
import sys

from tests.kept_program import HEADS
from tests.ranks_program import MORE

MOST_HEADS = HEADS["num_attention_heads"]


def main() -> int:
    chosen = [int(word) for word in sys.argv[1:]] or [*MORE]
    codes = [torchrun(ranks, "tests.ranks_program", *MORE[ranks]) for ranks in chosen]
    codes += [torchrun(ranks, "tests.kept_program") for ranks in chosen if ranks <= MOST_HEADS]
    return max(codes)


def torchrun(ranks: int, *words: str) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return subprocess.run([*command, *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
