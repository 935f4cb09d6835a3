"""What an adapter directory holds, from its configuration and the header of its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lachesis.engines.serving.adapter_files import adapted_module, read_adapter
from lachesis.engines.serving.backend import Refused

MODULE = "model.layers.0.mlp.down_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "base_model_name_or_path": "base"}


def write(path: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    names = {part: f"base_model.model.{MODULE}.lora_{part}.weight" for part in "AB"}
    default = {names["A"]: torch.zeros(4, 6), names["B"]: torch.zeros(5, 4)}
    save_file(default if tensors is None else tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return path


def test_a_plain_adapter_is_described(tmp_path):
    files = read_adapter(write(tmp_path), max_rank=4)
    assert (files.spec.r, files.spec.alpha, files.spec.scaling, files.base_model) == (4, 8.0, 2.0, "base")
    assert files.modules == {MODULE: (6, 5)}
    assert read_adapter(write(tmp_path, use_rslora=True), max_rank=4).spec.scaling == 4.0


@pytest.mark.parametrize(
    "name",
    ["a.b.lora_A.weight", "base_model.model.a.b.lora_A.weight", "base_model.model.a.b.lora_A.default.weight"],
)
def test_names_with_and_without_what_peft_adds(name):
    assert adapted_module(name) == ("a.b", "A")


@pytest.mark.parametrize(
    "name", ["a.b.weight", "lora_A.weight", "a.lora_embedding_A", "a.lora_C.weight", "a.lora_A.bias"]
)
def test_other_names_are_refused(name):
    with pytest.raises(Refused, match="not a LoRA matrix A or B"):
        adapted_module(name)


@pytest.mark.parametrize(
    ("config", "status", "message"),
    [
        ({"peft_type": "IA3"}, 422, "IA3"),
        ({"use_dora": True}, 422, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, 422, "modules_to_save"),
        ({"rank_pattern": {"q": 2}}, 422, "rank_pattern"),
        ({"bias": "all"}, 422, "biases"),
        ({"r": 0}, 400, "r 0"),
        ({"r": "4"}, 400, "r '4'"),
        ({"lora_alpha": None}, 400, "lora_alpha None"),
        ({"r": 16}, 422, "rank 16"),
        ({"r": 2}, 422, r"not \[2, in\]"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path, config, status, message):
    with pytest.raises(Refused, match=message) as caught:
        read_adapter(write(tmp_path, **config), max_rank=8)
    assert caught.value.status == status and caught.value.remedy


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {f"{MODULE}.lora_A.weight": torch.zeros(4, 6)},
        {f"{MODULE}.lora_A.weight": torch.zeros(4, 6), f"{MODULE}.lora_B.weight": torch.zeros(4)},
        {f"{MODULE}.lora_A.weight": torch.zeros(4, 6).int(), f"{MODULE}.lora_B.weight": torch.zeros(5, 4)},
    ],
    ids=["none", "half", "flat", "integers"],
)
def test_tensors_that_are_no_pairs_are_refused(tmp_path, tensors):
    with pytest.raises(Refused) as caught:
        read_adapter(write(tmp_path, tensors), max_rank=8)
    assert caught.value.status == 422


def header(document: Any, data: bytes = b"") -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x02", b"\xff" * 16, header(b"{"), header([1]), header({"a": 3}), header({"a": {"dtype": "F32"}}),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"123"),
        header({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": 5, "shape": [1], "data_offsets": [0, 4]}}, b"1234"), b"\x80\x04pickle of something",
        header(b"[" * 5000),
    ],
)  # fmt: skip
def test_files_that_are_no_safetensors_are_refused(tmp_path, content):
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(Refused, match="not a complete safetensors file") as caught:
        read_adapter(tmp_path, max_rank=8)
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_are_not_there_are_named(tmp_path, name):
    write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(Refused, match=name):
        read_adapter(tmp_path, max_rank=8)


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff"])
def test_configurations_that_are_no_json_are_refused(tmp_path, text):
    write(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(Refused, match=r"adapter_config\.json"):
        read_adapter(tmp_path, max_rank=8)
