from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from lachesis.engines.serving.backend import Refused
from lachesis.engines.vllm.checkpoint_files import (
    check_architecture,
    read_shapes,
    read_tensors,
    served_shapes,
)


def save(directory, **tensors):
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_shapes_and_tensors_of_one_file(tmp_path):
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(4)
    directory = save(tmp_path, a=a, b=b)
    assert read_shapes(directory) == {"a": (2, 3), "b": (4,)} == served_shapes(str(directory))
    found = dict(read_tensors(directory))
    assert found["a"].equal(a) and found["b"].equal(b)


def test_an_index_names_the_files(tmp_path):
    for name in ("x", "y"):
        save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    save_file({"old": torch.zeros(2)}, tmp_path / "left-over.safetensors")
    index = {"weight_map": {"x": "x.safetensors", "y": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_shapes(tmp_path)) == {"x", "y"} == {name for name, _ in read_tensors(tmp_path)}


@pytest.mark.parametrize("damage", ["empty", "cut", "index", "index of nothing"])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    if damage != "empty":
        save(tmp_path, a=torch.zeros(100))
    if damage == "cut":
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-9])
    elif damage == "index":
        (tmp_path / "model.safetensors.index.json").write_text("[]")
    elif damage == "index of nothing":
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(Refused) as caught:
        read_shapes(tmp_path)
    assert caught.value.status == 400 and caught.value.remedy


def test_a_served_model_without_safetensors_has_no_shapes(tmp_path):
    assert served_shapes(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "status"), [(None, 400), ("{", 400), ("[]", 400), ("{}", 422), ('{"architectures": ["Other"]}', 422)]
)
def test_another_architecture_is_refused(tmp_path, text, status):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(Refused) as caught:
        check_architecture(tmp_path, ["Mine"])
    assert caught.value.status == status


def test_the_same_architecture_is_not(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Mine"]}')
    check_architecture(tmp_path, ("Mine",))
