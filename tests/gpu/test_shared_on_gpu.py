"""CUDA IPC between two processes on one GPU. Not part of `make test`: run where there is one.

PYTHONPATH=src python -m pytest tests/gpu
"""

from __future__ import annotations

import pytest
import torch

from lachesis.bridges.names import map_parameters
from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.train.optim.weight_update import stochastic_round_
from lachesis.transport.bridge_file import read_bridge_file
from lachesis.transport.digest import digests
from lachesis.transport.shared_tensors import Attachments
from tests.tiny import tiny_model
from tests.unit.bridges.test_shared import fused_shapes
from tests.unit.transport.sharing import exporter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Some tensors share a block of the exporter's allocator, the large one has an allocation of its own.
SHAPES = {"qkv": (96, 64), "norm": (64,), "odd": (7, 3), "scale": (), "large": (4096, 4096)}


@pytest.fixture
def other(tmp_path):
    with exporter(tmp_path / "bridge.json", SHAPES, device="cuda", dtype=torch.bfloat16) as running:
        yield running


def attach(path) -> tuple[Attachments, dict[str, torch.Tensor]]:
    attachments = Attachments()
    shared = read_bridge_file(path).tensors
    return attachments, {name: attachments.tensor(name, entry) for name, entry in shared.items()}


def test_both_processes_read_and_write_one_memory(other):
    before = torch.cuda.mem_get_info()[0]
    _, tensors = attach(other.path)
    assert before - torch.cuda.mem_get_info()[0] < tensors["large"].nbytes, "mapped, not copied"
    assert digests(tensors) == other.digests()
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.mul_(1.5)
    torch.cuda.synchronize()
    assert digests(tensors) == other.digests()
    other.fill("norm", 3.0)
    assert (tensors["norm"] == 3.0).all()


def test_rows_of_a_fused_tensor_are_written_where_they_are(other):
    _, tensors = attach(other.path)
    before = other.digests()
    k = torch.nn.Parameter(tensors["qkv"].narrow(0, 64, 16))
    assert k.data_ptr() == tensors["qkv"].data_ptr() + 64 * 64 * 2
    with torch.no_grad():
        stochastic_round_(k, k.float() + 0.5)
    torch.cuda.synchronize()
    after = other.digests()
    assert {name for name in after if after[name] != before[name]} == {"qkv"}
    assert after["qkv"] == digests(tensors)["qkv"]


def test_a_second_mapping_and_one_after_the_first_is_gone(other):
    first, tensors = attach(other.path)
    _, again = attach(other.path)
    again["large"].fill_(2.0)
    torch.cuda.synchronize()
    assert (tensors["large"] == 2.0).all()
    first.close()
    del first, tensors, again
    torch.cuda.synchronize()
    _, later = attach(other.path)
    assert (later["large"] == 2.0).all()


def test_a_whole_model_as_views(tmp_path):
    model = tiny_model("qwen2")
    with exporter(tmp_path / "bridge.json", fused_shapes(model), device="cuda", dtype=torch.bfloat16) as other:
        _, tensors = attach(other.path)
        slices = map_parameters(
            {name: tuple(p.shape) for name, p in model.named_parameters()},
            {name: tuple(t.shape) for name, t in tensors.items()},
            model_type="qwen2",
            engine_kind="vllm",
        )
        with torch.no_grad():
            for entry in slices.values():
                tensors[entry.name].narrow(0, entry.start, entry.rows).fill_(0.25)
        torch.cuda.synchronize()
        assert digests(tensors) == other.digests()


def test_expandable_segments_are_shared_or_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with exporter(tmp_path / "bridge.json", SHAPES, device="cuda", dtype=torch.bfloat16) as other:
        try:
            _, tensors = attach(other.path)
        except EngineError as error:
            assert "expandable" in f"{error}"
        else:
            assert digests(tensors) == other.digests()


def test_an_exporter_that_has_died_is_an_error(tmp_path):
    with exporter(tmp_path / "bridge.json", SHAPES, device="cuda", dtype=torch.bfloat16) as other:
        path = other.path
    with pytest.raises(EngineError, match="cannot be mapped") as caught:
        attach(path)
    assert "still runs" in caught.value.remedy


def test_digests_are_fast_and_equal_to_those_on_the_cpu():
    tensor = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    assert digests({"w": tensor}) == digests({"w": tensor.cpu()})
    deadline = Deadline("digests of 4 GB", 0.1)
    found = digests({str(i): tensor for i in range(32)})
    deadline.check()
    assert len(set(found.values())) == 1
