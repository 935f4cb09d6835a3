"""The bodies of single operations, as the documents have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.engines.serving.backend import DigestRequest, EngineBackend, LoraSpec, ReceiverSpec
from lachesis.engines.serving.bodies import Refused, parse
from lachesis.engines.serving.operations import OPERATIONS, LoadAdapter
from lachesis.engines.serving.server import Server
from lachesis.transport.layout import ReceivedTensor


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_every_operation_is_somebodys(operation):
    assert not operation.name or hasattr(Server, operation.name) or hasattr(EngineBackend, operation.name)
    assert operation.guarded or not operation.loading
    assert not operation.loading or "weight_version" in operation.request.model_fields


def test_slices_are_of_the_tensor_they_are_named_after():
    request = parse(DigestRequest, {"slices": {"w": {}, "v": {"name": "u", "start": 2, "rows": 3}}})
    assert request.slices is not None and not request.adapter
    assert [(s.name, s.start, s.rows) for s in request.slices.values()] == [("w", 0, None), ("u", 2, 3)]
    assert parse(DigestRequest, {"adapter": True}).slices is None
    with pytest.raises(Refused, match=r"slices\.w"):
        parse(DigestRequest, {"slices": {"w": {"start": -1}}})


def test_adapter_routes_take_either_name():
    load = parse(LoadAdapter, {"lora_path": "/a", "lora_name": "n", "lora_int_id": 3, "weight_version": 2})
    assert (load.adapter_path, load.adapter_name, load.weight_version) == (Path("/a"), "n", 2)
    load = parse(LoadAdapter, {"adapter_path": "/a"})
    assert (load.adapter_name, load.weight_version) == ("policy", None)
    for wrong in ({}, {"adapter_path": "/a", "lora_path": "/b"}, {"adapter_path": "/a", "weight_version": 1 << 60}):
        with pytest.raises(Refused):
            parse(LoadAdapter, wrong)


def receiver(**changes):
    metadata = {"param_names": ["a", "b"], "param_shapes": [[2, 3], []], "param_dtypes": ["torch.float32", "bfloat16"]}
    body = {"init_method": "tcp://[::1]:29500", "world_size": 3, "rank": 2, "param_metadata": metadata}
    return parse(ReceiverSpec, body | changes)


def test_receivers():
    spec = receiver()
    assert (spec.kind, spec.backend, spec.rank, spec.lora) == ("full", "nccl", 2, None)
    assert spec.tensors == (ReceivedTensor("a", (2, 3), "float32"), ReceivedTensor("b", (), "bfloat16"))
    by_name = {"param_names": ["a"], "param_shapes": {"a": [2]}, "param_dtypes": {"a": "float16"}, "num_params": 1}
    assert receiver(param_metadata=by_name).tensors == (ReceivedTensor("a", (2,), "float16"),)
    lora = receiver(lora={"r": 4, "alpha": 8, "target_modules": ["q"], "rslora": True}).lora
    assert lora == LoraSpec(4, 8.0, ("q",), rslora=True) and lora.scaling == 4.0


def test_several_senders_share_the_tensors_out():
    spec = receiver(senders=["tcp://other:29501"], sender_of=[1, 0])
    assert spec.addresses == ("tcp://[::1]:29500", "tcp://other:29501")
    assert [[tensor.name for tensor in spec.share(sender)] for sender in range(2)] == [["b"], ["a"]]
    assert receiver().share(0) == receiver().tensors
    for wrong in ([0, 0], [1], [0, 2], []):
        with pytest.raises(Refused, match="sender_of does not give a sender"):
            receiver(senders=["tcp://other:29501"], sender_of=wrong)
    with pytest.raises(Refused, match="sender_of does not give a sender"):
        receiver(sender_of=[0, 0])
    with pytest.raises(Refused, match="is not an address"):
        receiver(senders=["other"], sender_of=[0, 1])


@pytest.mark.parametrize("init_method", ["tcp://a", "tcp://:5", "tcp://a:0", "tcp://a:70000", "file:///x", "env://"])
def test_channels_have_an_address(init_method):
    with pytest.raises(Refused, match="is not an address"):
        receiver(init_method=init_method)
