"""How long a checkpoint of a sharded model with its optimizer holds training up: written at once, or copied first.

    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/checkpoint.py [--size 8B] [--directory DIR] [--out FILE]
    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/checkpoint.py --tiny        # on a CPU

Each rank has its rows of a model of random weights, AdamW's moments and float32 masters, and a checkpoint has all of
them. ``asynchronous`` copies them to pinned host memory and writes them beside training, as ``checkpoint.asynchronous``
does, and one step is trained meanwhile, to see that it goes on; ``synchronous`` holds training up until all is on disk.
The copy is timed by itself first, three times, after pinned memory for it was taken beside steps, as in a run; with
``--not-ahead`` the first of them takes it.
The last checkpoint is read back and compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory import TINY, Case, Meter, configured, known_architecture, random_model, sections, workload
from memory_rows import MODELS
from needs_gpu import require_gpu

from lachesis.common.world import find_world
from lachesis.config.schema import DistributedConfig
from lachesis.run.parts import policy_of
from lachesis.train.batch import split
from lachesis.train.distributed.fsdp2 import Fsdp2
from lachesis.train.distributed.sharded_checkpoint import on_host
from lachesis.train.host_memory import local_part
from lachesis.train.model.loading import made_trainable
from lachesis.train.policy import Policy
from lachesis.transport.digest import digests

SAVES = ("asynchronous", "asynchronous, once more", "synchronous")


class Bench:
    """A sharded policy that has its optimizer's state, and a place for checkpoints."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.directory: Path = options.directory
        self.strategy = Fsdp2(device, DistributedConfig())
        self.meter = Meter(device)
        fields = known_architecture(MODELS[options.size])
        assert fields is not None
        fields |= TINY if options.tiny else {}
        case = Case(options.size, "full", 1024, extra={"model": {"gradient_checkpointing": True, "compile": "off"}})
        none: Any = None
        with tempfile.TemporaryDirectory() as directory:
            config = configured(fields, sections(case, tiny=options.tiny), directory=directory)
            model = random_model(config, device=device)
        loaded = made_trainable(model, none, config=config.model, adapter=config.adapter)
        del model
        self.policy: Policy = policy_of(loaded, config, strategy=self.strategy)
        vocab_size = int(fields["vocab_size"])
        self.groups = [
            group
            for rank in range(self.strategy.world_size)
            for group in workload(config, vocab_size=vocab_size, seed=1 + rank)
        ]

    def step(self) -> float:
        """Seconds of an optimizer step."""
        started = time.perf_counter()
        batch = split(self.policy.pack(self.groups), self.strategy.world_size)[self.strategy.rank]
        self.policy.accumulate(batch)
        self.policy.step()
        self.wait()
        return time.perf_counter() - started

    def save(self, name: str, *, copied: bool) -> dict[str, Any]:
        """Seconds for which training is held up, and until all ranks' parts are on disk."""
        path = self.directory / name
        self.wait()
        dist.barrier()
        started = time.perf_counter()
        self.policy.begin_parts(str(path), copied)
        held = time.perf_counter() - started
        say(self.strategy.rank, f"{name}: begun after {held:.2f} s")  # writing takes minutes where a disk is slow
        beside = self.step() if copied else 0.0
        self.policy.finish_parts()
        dist.barrier()
        written = time.perf_counter() - started
        return {"held up s": held if copied else written, "on disk after s": written, "a step beside it s": beside}

    def take_ahead(self) -> dict[str, Any]:
        """As a run does after its first step: memory for the copies is taken while steps go on."""
        started = time.perf_counter()
        self.policy.reserve_copies()
        steps: list[float] = []
        busy = torch.ones(1)
        while busy.item():
            steps.append(self.step())
            busy = torch.tensor([float(not self.policy._host_memory._there.is_set())])
            dist.all_reduce(busy, dist.ReduceOp.MAX)
        return {"memory was there after s": time.perf_counter() - started, "steps meanwhile s": steps}

    def copy(self) -> float:
        """Seconds of the copy alone, of which the first takes pinned memory that later ones have."""
        dist.barrier()
        started = time.perf_counter()
        copies = on_host(self.policy._parts()[1])
        seconds = time.perf_counter() - started
        del copies
        return seconds

    def read_back(self, name: str) -> bool:
        """Whether what this rank reads is what it has, bit by bit, after it was overwritten."""
        state, tensors = self.policy._parts()
        before = self._digests()
        for tensor in tensors.values():
            local_part(tensor).zero_()
        emptied = self._digests()
        self.policy.load_parts(str(self.directory / name), state)
        return emptied != before == self._digests()

    def _digests(self) -> dict[str, Any]:
        """Of this rank's rows: a second copy of them has no room on the card."""
        return dict(digests({name: local_part(tensor) for name, tensor in self.policy._parts()[1].items()}))

    def wait(self) -> None:
        if self.meter.cuda:
            torch.cuda.synchronize()


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    rank = bench.strategy.rank
    result: dict[str, Any] = {"bytes": bench.policy.parts_bytes(), "ranks": bench.strategy.world_size}
    bench.step()
    result["a step alone s"] = bench.step()
    result["bytes"] = bench.policy.parts_bytes()
    if options.ahead:
        result |= bench.take_ahead()
    result["copies s"] = [bench.copy() for _ in range(3)]
    say(rank, f"copies to the host: {result['copies s']}")
    if rank == 0 and options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))
    say(rank, f"{result['bytes'] / 1e9:.1f} GB, a step {result['a step alone s']:.2f} s")
    names = SAVES[: options.saves]
    for number, name in enumerate(names):
        if rank == 0 and number:
            shutil.rmtree(bench.directory / str(number - 1))
        dist.barrier()
        result[name] = bench.save(str(number), copied=name != "synchronous")
        say(rank, f"{name}: {result[name]}")
        if rank == 0 and options.out is not None:
            options.out.write_text(json.dumps(result, indent=1))
    last = str(len(names) - 1)
    same = torch.tensor([int(bench.read_back(last))]) if options.read_back else None
    if same is not None:
        dist.all_reduce(same, dist.ReduceOp.MIN)
        result["read back bit by bit"] = bool(same.item())
    return result


def say(rank: int, text: str) -> None:
    if rank == 0:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def table(result: dict[str, Any], *, device: str) -> str:
    """Markdown."""
    lines = [
        f"{device}, {result['ranks']} ranks, {result['bytes'] / 1e9:.1f} GB, torch {torch.__version__}, "
        f"{time.strftime('%d %B %Y')}; a step alone {result['a step alone s']:.2f} s; copies to the host "
        f"{', '.join(f'{seconds:.2f}' for seconds in result['copies s'])} s",
        "",
        "| | training held up, s | on disk after, s | a step beside it, s |",
        "|---|---|---|---|",
    ]
    for name, row in result.items():
        if isinstance(row, dict):
            beside = f"{row['a step beside it s']:.2f}" if row["a step beside it s"] else ""
            lines.append(f"| {name} | {row['held up s']:.2f} | {row['on disk after s']:.2f} | {beside} |")
    if "read back bit by bit" in result:
        lines += ["", f"Read back: {'bit by bit the same' if result['read back bit by bit'] else 'DIFFERENT'}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--size", choices=tuple(MODELS), default="8B")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "lachesis-checkpoint")
    parser.add_argument("--saves", type=int, default=len(SAVES), help="so many of the rows, where the disk is slow")
    parser.add_argument(
        "--not-ahead", dest="ahead", action="store_false", help="the first copy takes its memory itself"
    )
    parser.add_argument("--no-read-back", dest="read_back", action="store_false")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    require_gpu(tiny=options.tiny)
    world = find_world(os.environ)
    if world is None:
        parser.error("start it by torchrun --nproc-per-node N: parts are of several ranks")
    device = torch.device("cpu")
    if not options.tiny:
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.tiny else "cpu:gloo,cuda:nccl")
    options.directory.mkdir(parents=True, exist_ok=True)
    bench = Bench(options, device)
    result = measure(bench, options)
    if bench.strategy.rank == 0:
        shutil.rmtree(options.directory)
        name = torch.cuda.get_device_name() if bench.meter.cuda else "CPU"
        sys.stdout.write(table(result, device=name))
    dist.destroy_process_group()
    if not result.get("read back bit by bit", True):
        sys.exit(1)


if __name__ == "__main__":
    main()
