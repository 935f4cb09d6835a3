from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lachesis.engines.serving.served import DigestSlice, Refused
from lachesis.engines.vllm.worker import WorkerWeights, named_parameters, repack_tied
from tests.unit.transport.sharing import digest


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Module()
        self.proj.base_layer = nn.Linear(3, 4, bias=False)
        self.norm = nn.Parameter(torch.arange(5.0))
        self.tied = self.norm
        self.repacked = nn.Parameter(torch.empty(0))


def weights(device: str = "cpu", size: int = 1) -> WorkerWeights:
    """Those of one of ``size`` workers."""
    config = SimpleNamespace(lora_config=None, parallel_config=SimpleNamespace(tensor_parallel_size=size))
    runner = SimpleNamespace(get_model=Model)
    return WorkerWeights(SimpleNamespace(model_runner=runner, vllm_config=config, device=device, rank=0))


def test_names_are_those_without_lora_and_ties_count_once():
    model = Model()
    assert set(named_parameters(model)) == {"proj.weight", "norm", "repacked"}
    assert weights().state_dict_info()["proj.weight"] == {"shape": [4, 3], "dtype": "float32", "device": "cpu"}


def test_digests_are_of_rows():
    held = weights()
    model = Model()
    held._runner.get_model = lambda: model
    weight = model.proj.base_layer.weight.detach()
    asked = {"a": DigestSlice("proj.weight", 1, 2), "b": DigestSlice("proj.weight", 1), "c": DigestSlice("norm", 0, 5)}
    assert held.digests({"slices": asked}) == {
        "a": digest(weight[1:3]), "b": digest(weight[1:]), "c": digest(torch.arange(5.0)),
    }  # fmt: skip


def test_all_digests_leave_out_what_vllm_emptied():
    assert set(weights().digests({})) == {"proj.weight", "norm"}


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (DigestSlice("nothing"), 404),
        (DigestSlice("norm", 4, 2), 422),
        (DigestSlice("norm", 6), 422),
        (DigestSlice("repacked"), 409),
    ],
)
def test_what_cannot_be_digested_is_refused(part, status):
    with pytest.raises(Refused) as caught:
        weights().digests({"slices": {"x": part}})
    assert caught.value.status == status and caught.value.remedy


@pytest.mark.parametrize(("device", "size", "reason"), [("cpu", 1, "repacks"), ("cuda", 2, "the part that is there")])
def test_sharing_that_cannot_be_is_refused_with_the_reason(device, size, reason):
    with pytest.raises(Refused, match=reason) as caught:
        weights(device, size).export()
    assert caught.value.status == 409 and caught.value.remedy


class Packer:
    def __init__(self) -> None:
        self.packed: list[nn.Module] = []

    def process_weights_after_loading(self, module: nn.Module) -> None:
        self.packed.append(module)


def test_only_what_shares_anothers_weight_is_packed_again():
    model, packer = nn.Module(), Packer()
    model.embed, model.norm, model.head, model.other = (
        nn.Embedding(4, 3),
        nn.LayerNorm(3),
        nn.Linear(3, 4),
        nn.Linear(3, 4),
    )
    model.head.weight = model.embed.weight
    for module in (model.embed, model.head, model.other):
        module.quant_method = packer
    repack_tied(model)
    assert packer.packed == [model.head]
