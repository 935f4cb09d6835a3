"""Which layers are cut and which are refused; that ranks then learn as one is in `tests/ranks_program.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lachesis.common.errors import ConfigError, ModelError
from lachesis.config.schema import LoraAdapterConfig
from lachesis.train.distributed import tensor_parallel
from lachesis.train.distributed.strategy import decoder_layers
from lachesis.train.distributed.tensor_parallel import TensorCut, _Entrance
from lachesis.train.model.loading import add_lora
from lachesis.train.model.tensor import TensorGroup
from tests.tiny import tiny_model

NO_MESH: Any = None


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch):
    """Cuts a model's layers as rank 1 of so many does, without ranks: parts are plain parameters."""

    def part_of(parameter: Any, dimension: int, *, rank: int, mesh: Any) -> torch.nn.Parameter:
        return torch.nn.Parameter(parameter.detach().chunk(2, dim=dimension)[rank].clone())

    monkeypatch.setattr(tensor_parallel, "part_of", part_of)

    def of(model: Any, ranks: int = 2) -> TensorCut:
        made = TensorCut(model, mesh=NO_MESH, group=TensorGroup(1, ranks, NO_MESH))
        for layer in decoder_layers(model):
            made.apply(layer)
        return made

    return of


def test_a_rank_has_rows_of_what_leads_to_heads_and_columns_of_what_leads_away(cut):
    model = tiny_model("qwen3")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found = cut(model)
    partial = {name for name, parameter in model.named_parameters() if id(parameter) in found.partial}
    for name, parameter in model.named_parameters():
        whole, leaf = before[name], name.split(".")[-2]
        dimension = {"o_proj": 1, "down_proj": 1}.get(leaf, 0 if leaf.endswith("_proj") else None)
        expected = whole if dimension is None else whole.chunk(2, dim=dimension)[1]
        assert torch.equal(parameter, expected), name
    heads = [f"model.layers.{layer}.self_attn.{norm}.weight" for layer in (0, 1) for norm in ("q_norm", "k_norm")]
    assert partial == {*heads, "lm_head.weight"}


def test_of_an_adapter_the_matrix_on_the_side_of_the_cut_is_cut(cut):
    model = tiny_model()
    add_lora(model, LoraAdapterConfig(r=4))
    found = cut(model)
    shapes = {
        name: (tuple(p.shape), id(p) in found.partial)
        for name, p in model.model.layers[0].self_attn.named_parameters()
        if ".lora_" in name
    }
    assert shapes["q_proj.lora_A.default.weight"] == ((4, 32), True)
    assert shapes["q_proj.lora_B.default.weight"] == ((16, 4), False)
    assert shapes["o_proj.lora_A.default.weight"] == ((4, 16), False)
    assert shapes["o_proj.lora_B.default.weight"] == ((32, 4), True)


@pytest.mark.parametrize(
    ("ranks", "fields", "expected"),
    [
        (2, {"intermediate_size": 49}, r"size is 2, and model\.layers\.0\.mlp\.gate_proj\.weight has 49 rows"),
        (4, {}, r"size is 4, and the model has 4 attention heads, 2 of keys and values"),
    ],
)
def test_what_does_not_divide_is_refused(cut, ranks: int, fields: dict[str, Any], expected: str):
    """Of the latter a rank would have half a head of keys."""
    with pytest.raises(ConfigError, match=expected) as caught:
        cut(tiny_model(**fields), ranks)
    assert "divisor of" in caught.value.remedy


def test_an_architecture_that_nobody_has_tried_is_refused(cut):
    with pytest.raises(ModelError, match="layers of BloomForCausalLM have not been tried in parts") as caught:
        cut(tiny_model("bloom"))
    assert "qwen3" in caught.value.remedy


def test_states_enter_once_for_all_matrices_that_read_them():
    class Counting(TensorGroup):
        entered = 0

        def enter(self, states: torch.Tensor) -> torch.Tensor:
            Counting.entered += 1
            return states.clone()

    group, entrance = Counting(0, 2, NO_MESH), _Entrance(3)
    first, second = torch.ones(2), torch.ones(2)
    results = [entrance.enter(states, group) for states in (first, first, first, second, first)]
    assert results[0] is results[1] is results[2]
    assert Counting.entered == 3
