"""The cost model of several GPUs and nodes: sums that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.plan.cards import process_bytes
from lachesis.plan.plan import plan
from lachesis.plan.shapes import FoundShape, find_shape
from lachesis.plugins.planning.cost import Scale, scale, scale_lines

PARAMETERS = 8_190_735_360


@pytest.fixture
def model() -> FoundShape:
    found = find_shape("Qwen/Qwen3-8B")
    assert found is not None
    return found


@pytest.fixture
def over(build, model: FoundShape):
    def run(gpus: int, nodes: int = 1, *, card: float = 80, train: int | None = None, **sections: Any) -> Scale:
        given = {"model": {"gradient_checkpointing": True}, "engine": {"kind": "http"}, "bridge": {"kind": "broadcast"}}
        config = build(**given | sections)
        return scale(config, gpus=gpus, nodes=nodes, card_gb=card, found=model, train=train)

    return run


def test_memory_checkpoint_and_loading(over, build, model: FoundShape):
    found = over(8)
    config = build(model={"gradient_checkpointing": True}, engine={"kind": "http"}, bridge={"kind": "broadcast"})
    assert found.rank == process_bytes(plan(config, device="cuda", devices=4, found=model), "trainer")
    assert found.checkpoint == 14 * PARAMETERS and found.host == 2 * PARAMETERS, "all four ranks are of one node"
    assert found.copy == found.checkpoint / 4, "of each rank its part"
    gathered = over(8, checkpoint={"format": "whole"})
    assert gathered.copy == gathered.checkpoint
    copies = over(8, distributed={"strategy": "replicate"})
    assert copies.copy == copies.checkpoint


def test_more_train_where_half_do_not_hold_it(over):
    assert over(8, card=80).layout.train == 4
    tight = over(8, card=40)
    assert tight.layout.train == 6 and tight.rank < over(8, card=40, train=4).rank


@pytest.mark.parametrize(("card", "ways"), [(80, 4), (141, 2), (240, 1)])
def test_large_models_are_split_over_the_gpus_of_an_engine(build, card: float, ways: int):
    found = find_shape("meta-llama/Llama-3.1-70B")
    assert found is not None
    config = build(engine={"kind": "http"}, bridge={"kind": "broadcast"})
    assert scale(config, gpus=64, nodes=8, card_gb=card, found=found).layout.tensor_parallel == ways


def test_what_cannot_be(over):
    for gpus, nodes, train in ((10, 4, None), (8, 1, 8)):
        with pytest.raises(ConfigError):
            over(gpus, nodes, train=train)


def test_the_lines(build, model: FoundShape):
    config = build(engine={"kind": "http"}, bridge={"kind": "broadcast"}, model={"gradient_checkpointing": True})
    text = "\n".join(scale_lines(config, gpus=64, nodes=8, card_gb=80, found=model, train=None))
    assert "on 8 x 8 GPUs of 80 GB, calculated" in text and "32 + 32, 32 engines of 1" in text
    with pytest.raises(ConfigError, match="no config"):
        list(scale_lines(config, gpus=64, nodes=8, card_gb=80, found=None, train=None))


def test_an_adapters_checkpoint_has_a_size(build, model: FoundShape):
    config = build(adapter={"kind": "lora", "r": 16}, engine={"kind": "http"}, bridge={"kind": "lora_nccl"})
    lines = list(scale_lines(config, gpus=8, nodes=1, card_gb=80, found=model, train=None))
    (size,) = (float(line.split()[2]) for line in lines if line.strip().startswith("a checkpoint"))
    assert 0.1 < size < 1.0


TP4 = {"kind": "vllm", "tensor_parallel_size": 4}


@pytest.mark.parametrize(
    ("engine", "gpus", "nodes", "expected"),
    [
        (TP4 | {"devices": "4,5,6,7"}, 8, 1, (4, 4, 1, False)),
        (TP4, 8, 1, (4, 4, 1, False)),
        (TP4 | {"data_parallel_size": 2}, 8, 1, (8, 8, 2, True)),
        (TP4 | {"data_parallel_size": 2, "enable_sleep_mode": True}, 8, 1, (8, 8, 2, True)),
        ({"kind": "vllm", "devices": "7"}, 8, 1, (7, 1, 1, False)),
        ({"kind": "vllm"}, 4, 1, (4, 1, 1, True)),
        (TP4 | {"data_parallel_size": 3}, 32, 4, (16, 12, 3, False)),
    ],
)
def test_the_layout_is_that_of_the_file(over, engine: dict[str, Any], gpus: int, nodes: int, expected: tuple[Any, ...]):
    layout = over(gpus, nodes, engine=engine).layout
    assert (layout.train, layout.generate, layout.engines, layout.shared) == expected
    assert layout.idle == (4 if nodes == 4 else 0)


def test_engines_that_do_not_fit_beside_the_ranks_are_refused(over):
    for gpus, nodes, train in ((4, 1, 2), (2, 1, None), (8, 4, None)):
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            over(gpus, nodes, train=train, engine=TP4)


def test_a_gpu_of_trainer_and_engine_counts_both(build, model: FoundShape):
    config = build(engine=TP4 | {"data_parallel_size": 2}, bridge={"kind": "broadcast"})
    text = "\n".join(scale_lines(config, gpus=8, nodes=1, card_gb=80, found=model, train=None))
    assert "8 + 8 on the same GPUs, 2 engines of 4" in text and "a GPU of both" in text
