"""What a layer keeps for its backward pass where ranks share it, beside what `lachesis plan` counts.

    torchrun --nproc-per-node 2 -m tests.kept_program

Run by :mod:`tests.layouts`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lachesis.config.schema import DistributedConfig, LachesisConfig
from lachesis.plan.memory import layer_activations
from lachesis.plan.shapes import read_shape
from lachesis.train.batch import plain_micro_batch
from lachesis.train.distributed.expert_parallel import ExpertCut
from lachesis.train.distributed.fsdp2 import Fsdp2
from lachesis.train.distributed.strategy import Ranks, Replicate, decoder_layers
from lachesis.train.model import attention
from lachesis.train.model.dispatch import ExpertGroup
from tests.unit.plan.test_memory import kept_bytes

CPU = torch.device("cpu")
TOKENS = 64
CONFIG = {"run": {"steps": 1}, "model": {"path": "m", "compile": "off"}, "data": {"path": "d"}}
REWARDS = {"rewards": {"functions": ["r.f"]}}
# Its heads can be dealt out to two ranks and to four.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURE = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "mlp_only_layers": []},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


@dataclass(frozen=True, slots=True)
class Kept:
    """What is shared, by which model, and by how much of what is counted it may differ."""

    shared: str
    model_type: str
    fields: Mapping[str, Any]
    near: float = 0.03


KEPT = [
    *(Kept("context", model_type, HEADS) for model_type in ("qwen2", "qwen3")),
    # Of a mixture the counts know less.
    Kept("expert", "qwen3_moe", MIXTURE | {"experts_implementation": "grouped_mm"}, near=0.05),
]


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    shared = {"strategy": "replicate", "context_parallel_size": ranks}
    strategies = {
        "context": Replicate(CPU, DistributedConfig(**shared)),
        "expert": Fsdp2(CPU, DistributedConfig(expert_parallel_size=ranks)),
    }
    for case in KEPT:
        strategy = strategies[case.shared]
        kept, counted = measured(case, strategy=strategy)
        assert abs(kept / counted - 1) < case.near, (case, kept, counted)
        if strategy.rank == 0:
            words = f"{kept:.0f} bytes a token kept, {counted:.0f} counted"
            sys.stdout.write(f"{case.model_type} over {case.shared} {ranks}: {words}\n")
    dist.destroy_process_group()


def measured(case: Kept, *, strategy: Ranks) -> tuple[float, float]:
    """Bytes that a layer keeps of each of this rank's tokens, in float32, and that are counted."""
    micro, context = plain_micro_batch([*range(TOKENS), 0]), strategy.context
    ids, positions = micro.input_ids, micro.position_ids
    if context is not None:
        ids, positions = context.share(micro)[:2]

    def prepare(model: Any) -> None:
        if strategy.mesh.expert > 1:  # FSDP would gather copies of the parts
            mesh = init_device_mesh("cpu", (strategy.mesh.expert,), mesh_dim_names=("expert",))
            group = ExpertGroup(mesh.get_local_rank(), mesh.size(), mesh.get_group())
            cut = ExpertCut(model, mesh=mesh, group=group)
            for layer in decoder_layers(model):
                cut.apply(layer)

    def run(model: Any) -> Any:
        attention.install(model)
        packing = attention.packing_arguments(micro, kind="bucketed", context=context)
        return model.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **packing)

    with tempfile.TemporaryDirectory() as name:
        of: dict[str, Any] = {"model_type": case.model_type, "lora": False, "dtype": torch.float32}
        of |= {"prepare": prepare, "run": run, "fields": case.fields}
        more, less = (kept_bytes(Path(name), layers=layers, **of) for layers in (4, 2))
        shape = read_shape(name)
    assert shape is not None
    config = LachesisConfig.model_validate(CONFIG | REWARDS)
    counted = layer_activations(config, shape, keys=1.0, width=4, device="cpu", context=strategy.mesh.context)
    # Of a mixture more tokens may come to one rank than to another.
    kept = torch.tensor((more - less) / 2 / len(ids), dtype=torch.float64)
    dist.all_reduce(kept)
    return kept.item() / strategy.world_size, counted


if __name__ == "__main__":
    main()
