"""What a rank has in memory while it loads a sharded model, and that the weights are those of the files.

torchrun --nproc-per-node 2 -m tests.shard_read_program MODEL [LIMIT_MIB]

``MODEL/small`` is another model of its architecture, which is loaded first; a mixture has its experts shared out.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lachesis.common.world import find_world
from lachesis.config.schema import DistributedConfig, LoraAdapterConfig, ModelConfig, NoAdapterConfig
from lachesis.train.distributed.control import destroying_process_group, init_process_group
from lachesis.train.distributed.fsdp2 import Fsdp2
from lachesis.train.distributed.job import join_job
from lachesis.train.model import saved_rows
from lachesis.train.model.loading import LoadedModel, load_model

LIMIT_S = 120.0
WINDOW = 8 * 2**20  # a small model has small files
CPU = torch.device("cpu")


def memory(name: str) -> float:
    """Of this process, in MiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) / 1024


def loaded(path: str, *, lora: bool = False, **sizes: int) -> tuple[LoadedModel, Fsdp2]:
    """As a run builds it: loaded, sharded, read."""
    torch.manual_seed(0)
    adapter = LoraAdapterConfig(r=4) if lora else NoAdapterConfig()
    saved_rows._WINDOW_BYTES = WINDOW
    made = load_model(ModelConfig(path=path, device="cpu"), adapter, sharded=True)
    assert made.unread is not None, "it would have been loaded whole"
    strategy = Fsdp2(CPU, DistributedConfig(**sizes))
    strategy.place(made.transformer)
    made.unread.fill(made.transformer)
    return made, strategy


def check_equal(made: LoadedModel, strategy: Fsdp2, path: str) -> None:
    """The weights are what transformers loads."""
    expected = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    named = [(n.replace(".base_layer.", "."), p) for n, p in made.transformer.named_parameters() if ".lora_" not in n]
    assert {name for name, _ in named} == expected.keys()
    for (name, _), whole in zip(named, strategy.gather([p.detach() for _, p in named]), strict=True):
        assert torch.equal(whole, expected[name]), name


def main(path: str, limit_mib: float | None = None) -> None:
    logging.basicConfig(level=logging.INFO)
    world = find_world(os.environ)
    assert world is not None
    with destroying_process_group():
        job = join_job(world, limit_s=LIMIT_S)
        init_process_group(world, job.store, device=CPU, limit_s=LIMIT_S, secret=job.secret)
        # What is imported and made at first counts for nothing.
        small = str(Path(path) / "small")
        check_equal(*loaded(small, **({} if limit_mib is not None else {"expert_parallel_size": 2})), small)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        before = memory("VmRSS")
        made, strategy = loaded(path, lora=limit_mib is None)
        grown = memory("VmHWM") - before
        assert limit_mib is None or grown < limit_mib, f"{grown:.0f} MiB"
        check_equal(made, strategy, path)
    if world.rank == 0:
        sys.stdout.write("equal\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
