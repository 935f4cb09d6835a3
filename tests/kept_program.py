"""What a layer keeps for its backward pass where ranks share a context, or its matrices, beside what `plan` counts.

    torchrun --nproc-per-node 2 -m tests.kept_program

Run by :mod:`tests.layouts`.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lachesis.config.memory import layer_activations
from lachesis.config.model_shape import read_shape
from lachesis.config.schema import DistributedConfig, LachesisConfig
from lachesis.train.batch import plain_micro_batch
from lachesis.train.distributed.fsdp2 import Fsdp2
from lachesis.train.distributed.strategy import Ranks, Replicate
from lachesis.train.distributed.tensor_parallel import TensorCut
from lachesis.train.model import attention
from tests.unit.config.test_memory import kept_bytes

CPU = torch.device("cpu")
TOKENS = 64
CONFIG = {"run": {"steps": 1}, "model": {"path": "m", "compile": "off"}, "data": {"path": "d"}}
REWARDS = {"rewards": {"functions": ["r.f"]}}
# Its heads can be dealt out to two ranks and to four.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    shared = {"strategy": "replicate", "context_parallel_size": ranks}
    strategies = {
        "context": Replicate(CPU, DistributedConfig(**shared)),
        "tensor": Fsdp2(CPU, DistributedConfig(tensor_parallel_size=ranks)),
    }
    for (name, strategy), model_type in product(strategies.items(), ("qwen2", "qwen3")):
        kept, counted = measured(model_type, strategy=strategy)
        assert abs(kept / counted - 1) < 0.03, (name, model_type, kept, counted)
        if strategy.rank == 0:
            words = f"{kept:.0f} bytes a token kept, {counted:.0f} counted"
            sys.stdout.write(f"{model_type} over {name} {ranks}: {words}\n")
    dist.destroy_process_group()


def measured(model_type: str, *, strategy: Ranks) -> tuple[float, float]:
    """Bytes that a layer keeps of each of this rank's tokens, in float32, and that are counted."""
    micro, context = plain_micro_batch([*range(TOKENS), 0]), strategy.context
    ids, positions = micro.input_ids, micro.position_ids
    if context is not None:
        ids, positions = context.share(micro)[:2]

    def prepare(model: Any) -> None:
        if strategy.tensor is not None:  # FSDP would gather copies of the parts
            mesh = init_device_mesh("cpu", (strategy.tensor.size,), mesh_dim_names=("tensor",))
            TensorCut(model, mesh=mesh, group=strategy.tensor).apply(model)

    def run(model: Any) -> Any:
        attention.install(model)
        packing = attention.packing_arguments(micro, flash=False, context=context)
        return model.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **packing)

    with tempfile.TemporaryDirectory() as name:
        of: dict[str, Any] = {"model_type": model_type, "lora": False, "dtype": torch.float32}
        of |= {"prepare": prepare, "run": run, "fields": HEADS | ({} if context else {"num_key_value_heads": 4})}
        more, less = (kept_bytes(Path(name), layers=layers, **of) for layers in (4, 2))
        shape = read_shape(name)
    assert shape is not None
    config = LachesisConfig.model_validate(CONFIG | REWARDS)
    counted = layer_activations(config, shape, keys=1.0, width=4, device="cpu", mesh=strategy.mesh)
    return (more - less) / 2 / len(ids), counted


if __name__ == "__main__":
    main()
