"""How often ranks gather weights in a pass and its backward: once outside of layers, twice in each. By torchrun."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lachesis.config.schema import DistributedConfig
from lachesis.train.batch import pack
from lachesis.train.distributed.fsdp2 import Fsdp2
from lachesis.train.model import attention
from lachesis.train.model.forward import ForwardPlan, target_logprobs
from tests.tiny import tiny_model
from tests.unit.train.model.test_forward import random_groups

LAYERS = 2
# What FSDP gathers with; the second up to torch 2.11 or so.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def counted(call: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return call(*arguments, **named)

    return counting


def gathers(*, reshard: bool) -> int:
    model = tiny_model("qwen2", num_hidden_layers=LAYERS)
    attention.install(model)
    Fsdp2(torch.device("cpu"), DistributedConfig(reshard_after_forward=reshard)).place(model)
    (micro,) = pack(random_groups(groups=2, samples=2, longest=12), max_tokens=1 << 20).micro_batches
    calls: list[int] = []
    plain = getattr(dist, GATHER)
    setattr(dist, GATHER, counted(plain, calls))
    try:
        found = target_logprobs(model, micro, plan=ForwardPlan(attention="bucketed", head="chunked"))
        found.logprobs.sum().backward()
    finally:
        setattr(dist, GATHER, plain)
    return len(calls)


def main() -> None:
    dist.init_process_group("gloo")
    found = {reshard: gathers(reshard=reshard) for reshard in (True, False)}
    if dist.get_rank() == 0:
        sys.stdout.write(f"{found}\n")
    dist.destroy_process_group()
    assert found == {True: 1 + 2 * LAYERS, False: 1 + LAYERS}, found


if __name__ == "__main__":
    main()
