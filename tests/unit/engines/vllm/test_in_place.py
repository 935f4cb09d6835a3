"""Places of matrices in 8 bits. Those of vLLM's own layers are in tests/contracts/test_vllm_cuts.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lachesis.engines.vllm.in_place import InPlaceLoader
from lachesis.transport.float8 import by_rows

SHAPES = {"q.weight": (6, 8), "k.weight": (2, 8), "down.weight": (8, 5), "norm.weight": (8,)}


def offered(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}


def model_with(tensors: dict[str, Tensor]) -> Any:
    """As vLLM holds them: q above k, and a matrix of 8 bits as a view [in, out] of its bytes."""
    model: Any = nn.Module()
    model.packed_modules_mapping = {"qk": ["q", "k"]}
    matrices = {"qk": torch.cat([tensors["q.weight"], tensors["k.weight"]]), "down": tensors["down.weight"]}
    for name, matrix in matrices.items():
        rounded, scales = by_rows(matrix)
        layer = nn.Module()
        layer.weight = nn.Parameter(rounded.t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(scales, requires_grad=False)
        model.add_module(name, layer)
    model.norm = nn.Module()
    model.norm.weight = nn.Parameter(tensors["norm.weight"].clone())
    return model


def test_an_update_is_rounded_on_its_way_to_the_bytes_that_kernels_read():
    model, before, after = model_with(offered(0)), offered(0), offered(1)
    places = {name: one.data_ptr() for name, one in model.named_parameters()}
    loader = InPlaceLoader.find(model, SHAPES)
    assert loader is not None and loader.matches(before) and not loader.matches(after)
    loader.load(after)
    assert loader.matches(after) and not loader.matches(before)
    expected = dict(model_with(after).named_parameters())
    for name, one in model.named_parameters():
        assert one.data_ptr() == places[name]
        assert torch.equal(one.data.view(torch.uint8), expected[name].data.view(torch.uint8)), name


def test_one_bit_of_a_matrix_or_of_its_scales_is_noticed():
    model = model_with(offered(0))
    loader = InPlaceLoader.find(model, SHAPES)
    assert loader is not None
    for name in ("qk", "down"):
        layer = model.get_submodule(name)
        for held in (layer.weight.data.view(torch.uint8), layer.weight_scale.data.view(torch.int32)):
            held[-1, -1] ^= 1
            assert not loader.matches(offered(0)), name
            held[-1, -1] ^= 1
    assert loader.matches(offered(0))


def test_there_are_no_places_without_scales_by_outputs_or_in_a_part_of_a_matrix():
    def found(**changes: Any) -> InPlaceLoader | None:
        model = model_with(offered(0))
        for leaf, value in changes.items():
            setattr(model.down, leaf, None if value is None else nn.Parameter(value, requires_grad=False))
        return InPlaceLoader.find(model, SHAPES)

    whole = model_with(offered(0)).down
    assert found() is not None
    assert found(weight_scale=None) is None
    assert found(weight_scale=torch.ones(1)) is None, "one for all"
    assert found(weight=whole.weight.data[:3]) is None, "a worker's share of the inputs"
    assert found(weight=whole.weight.data[:, :4], weight_scale=whole.weight_scale.data[:4]) is None, "of the outputs"
