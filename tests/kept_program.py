"""What a layer keeps for its backward pass where ranks share a context, beside what `lachesis plan` counts.

    torchrun --nproc-per-node 2 -m tests.kept_program

Run by :mod:`tests.layouts`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lachesis.config.memory import layer_activations
from lachesis.config.model_shape import read_shape
from lachesis.config.schema import DistributedConfig, LachesisConfig
from lachesis.train.batch import plain_micro_batch
from lachesis.train.distributed.strategy import Replicate
from lachesis.train.model import attention
from lachesis.train.model.context import ContextGroup
from tests.unit.config.test_memory import kept_bytes

TOKENS = 64
CONFIG = {"run": {"steps": 1}, "model": {"path": "m", "compile": "off"}, "data": {"path": "d"}}
REWARDS = {"rewards": {"functions": ["r.f"]}}
# Its heads can be dealt out to two ranks and to four.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    dist.init_process_group("gloo")
    sizes = DistributedConfig(strategy="replicate", context_parallel_size=dist.get_world_size())
    context = Replicate(torch.device("cpu"), sizes).context
    assert context is not None
    for model_type in ("qwen2", "qwen3"):
        kept, counted = measured(model_type, context=context)
        assert abs(kept / counted - 1) < 0.03, (model_type, kept, counted)
        if context.rank == 0:
            words = f"{kept:.0f} bytes a token kept, {counted:.0f} counted"
            sys.stdout.write(f"{model_type} over {context.size} ranks: {words}\n")
    dist.destroy_process_group()


def measured(model_type: str, *, context: ContextGroup) -> tuple[float, float]:
    """Bytes that a layer keeps of each of this rank's tokens, in float32, and that are counted."""
    micro = plain_micro_batch([*range(TOKENS), 0])
    share = context.share(micro)

    def run(model: Any) -> Any:
        attention.install(model)
        packing = attention.packing_arguments(micro, flash=False, context=context)
        ids, positions = share.input_ids[None], share.position_ids[None]
        return model.model(input_ids=ids, position_ids=positions, use_cache=False, **packing)

    with tempfile.TemporaryDirectory() as name:
        of: dict[str, Any] = {"model_type": model_type, "lora": False, "dtype": torch.float32, "run": run}
        more, less = (kept_bytes(Path(name), layers=layers, fields=HEADS, **of) for layers in (4, 2))
        shape = read_shape(name)
    assert shape is not None
    config = LachesisConfig.model_validate(CONFIG | REWARDS)
    counted = layer_activations(config, shape, keys=1.0, width=4, device="cpu", context=context.size)
    return (more - less) / 2 / len(share.input_ids), counted


if __name__ == "__main__":
    main()
