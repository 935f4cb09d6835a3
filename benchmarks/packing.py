"""How full passes are: groups as wholes, and as they are packed, for completions of equal and of ragged lengths.

    python benchmarks/packing.py [--tiny] [--prompts 32] [--budget 8192] [--ranks 1 4]

Nothing is trained. A row's cost is what chooses the way of packing: tokens of the largest micro-batch of each pass, and
what a pass takes beside its tokens. Groups are wholes where the latter is nothing.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from unittest import mock

from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.train import packing
from lachesis.train.batch import pack

GENERATIONS = 8
# Log-normal lengths, of which one in a hundred is ten times the median or longer; cut off at eight times.
SPREAD, LONGEST = math.log(10) / 2.326, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--budget", type=int, default=8192, help="tokens a micro-batch")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    scale = 8 if options.tiny else 1
    prompts, budget = (4, options.budget // scale) if options.tiny else (options.prompts, options.budget)
    write = sys.stdout.write
    write("| prompt | completions | ranks | packed | micro-batches | passes | tokens | filled | cost ")
    write("| ms to the first micro-batch | to all |\n")
    write(f"{'|---' * 11}|\n")
    for tokens, lengths in ((128, "equal"), (128, "ragged"), (512, "ragged")):
        groups = drawn_groups(prompts, prompt=tokens // scale, median=512 // scale, ragged=lengths == "ragged")
        for ranks in options.ranks:
            for line in rows(groups, budget=budget, ranks=ranks):
                write(f"| {tokens} | {lengths} | {ranks} | {line} |\n")


def rows(groups: list[Group], *, budget: int, ranks: int) -> Iterator[str]:
    for name, worth in (("whole groups", 0), ("as they are", packing.PASS_TOKENS)):
        with mock.patch.object(packing, "PASS_TOKENS", worth):
            began = time.perf_counter()
            batch = pack(groups, max_tokens=budget, ranks=ranks)
            _, first = batch.micro_batches[0], time.perf_counter() - began
            made, every = [*batch.micro_batches], time.perf_counter() - began
        sizes = [micro.num_inputs for micro in made]
        passes, cost = -(-len(sizes) // ranks), packing.passes_cost(sizes, ranks)
        filled = sum(sizes) / (passes * ranks * budget)
        took = f"{first * 1e3:.0f} | {every * 1e3:.0f}"
        yield f"{name} | {len(sizes)} | {passes} | {sum(sizes):,} | {filled:.1%} | {cost:,} | {took}"


def drawn_groups(count: int, *, prompt: int, median: int, ragged: bool) -> list[Group]:
    drawn = random.Random(0)
    made = []
    for number in range(count):
        ids = tuple(drawn.choices(range(1000), k=prompt))
        samples = []
        for _ in range(GENERATIONS):
            times = min(LONGEST, drawn.lognormvariate(0, SPREAD)) if ragged else 1
            length = max(1, round(median * times))
            completion = tuple(drawn.choices(range(1000), k=length))
            samples.append(Sample(ids, completion, (-1.0,) * length, "stop", VersionSpan(0, 0), advantage=1.0))
        made.append(Group(Prompt(str(number), ids, ""), tuple(samples)))
    return made


if __name__ == "__main__":
    main()
