from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lachesis.common.errors import ModelError
from lachesis.config.schema import LoraAdapterConfig, ModelConfig, NoAdapterConfig
from lachesis.train.losses.reference import second_model
from lachesis.train.model.loading import load_model
from lachesis.train.model.saved_rows import SavedRows, find_rows
from tests.losses import loss_options
from tests.tiny import tiny_model, tiny_tokenizer


def save(directory: Path, architecture: str = "qwen2", *, shard: str = "50GB", **overrides: object) -> Path:
    tiny_model(architecture, **overrides).save_pretrained(directory, max_shard_size=shard)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def config(directory: Path, **keys: object) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(directory), "device": "cpu", **keys})


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt2", {}),
        ("qwen3_moe", {}),
        ("qwen2", {"shard": "10KB"}),
    ],
    ids=["plain", "tied", "gpt2", "experts", "several files"],
)
@pytest.mark.parametrize("adapter", [NoAdapterConfig(), LoraAdapterConfig(r=4)], ids=["", "lora"])
def test_what_is_filled_in_is_what_loading_gives(tmp_path: Path, architecture: str, options: dict, adapter):
    save(tmp_path, architecture, **options)
    torch.manual_seed(1)
    expected = load_model(config(tmp_path), adapter)
    torch.manual_seed(1)
    found = load_model(config(tmp_path), adapter, sharded=True)
    assert found.unread is not None and expected.unread is None
    found.unread.fill(found.transformer)
    own, others = found.model.state_dict(), expected.model.state_dict()
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name], others[name]) for name in own), "an adapter's first values too"
    trained = [{n for n, p in one.model.named_parameters() if p.requires_grad} for one in (found, expected)]
    assert trained[0] == trained[1]


def test_a_reference_of_unread_weights_is_not_copied_but_read(tmp_path: Path):
    loaded = load_model(config(save(tmp_path)), NoAdapterConfig(), sharded=True)
    second = second_model(loaded, loss_options(beta=0.1))
    assert second is not None and loaded.unread is not None
    loaded.unread.fill(second)
    assert torch.equal(second.lm_head.weight, tiny_model().lm_head.weight)
    assert second.lm_head.weight is not loaded.transformer.lm_head.weight
    assert not any(parameter.requires_grad for parameter in second.parameters())


def test_a_dtype_of_ones_own_is_read_into(tmp_path: Path):
    loaded = load_model(config(save(tmp_path), dtype="bfloat16"), NoAdapterConfig(), sharded=True)
    assert loaded.unread is not None
    loaded.unread.fill(loaded.transformer)
    assert torch.equal(loaded.transformer.lm_head.weight, tiny_model().lm_head.weight.bfloat16())


def test_rows_of_stacked_experts_are_put_together_from_their_files(tmp_path: Path):
    model = tiny_model("qwen3_moe")
    rows = find_rows(model, str(save(tmp_path, "qwen3_moe")), revision={})
    assert rows is not None
    experts = "model.layers.0.mlp.experts"
    names = (f"{experts}.2.gate_proj.weight", f"{experts}.2.up_proj.weight")
    assert rows.parts[f"{experts}.gate_up_proj"][2] == names
    assert rows.parts["lm_head.weight"] == "lm_head.weight"


def test_buffers_that_are_saved_are_read_too(tmp_path: Path):
    """A router's correction bias is a buffer, and what it is made of would be 0."""
    file = save(tmp_path, "deepseek_v3") / "model.safetensors"
    model, name = tiny_model("deepseek_v3"), "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.tensor([0.5, -0.5, 0.25, 0.0])
    save_file(load_file(file) | {name: bias}, file, {"format": "pt"})
    assert find_rows(model, str(tmp_path), revision={}) is not None
    assert torch.equal(model.get_buffer(name), bias)


def test_tensors_that_the_model_lacks_are_refused_in_sharded_loading_too(tmp_path: Path):
    file = save(tmp_path) / "model.safetensors"
    save_file(load_file(file) | {"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors in the files .* are unknown .*layers\.2\.mlp"):
        load_model(config(tmp_path), NoAdapterConfig(), sharded=True)


class TestModelsThatAreLoadedWhole:
    def unread(self, directory: Path, **keys: object) -> SavedRows | None:
        return load_model(config(directory, **keys), NoAdapterConfig(), sharded=True).unread

    def test_without_safetensors(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        save(tmp_path)
        file = tmp_path / "model.safetensors"
        torch.save(load_file(file), tmp_path / "pytorch_model.bin")
        file.unlink()
        with caplog.at_level("INFO"):
            assert self.unread(tmp_path) is None
        assert "has no safetensors files" in caplog.text

    def test_with_other_names(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        file = save(tmp_path) / "model.safetensors"
        save_file({name.removeprefix("model."): t for name, t in load_file(file).items()}, file, {"format": "pt"})
        with caplog.at_level("INFO"):
            assert self.unread(tmp_path) is None
        assert "as one tensor" in caplog.text

    def test_where_nobody_shards_them(self, tmp_path: Path):
        assert load_model(config(save(tmp_path)), NoAdapterConfig()).unread is None


def test_the_files_of_an_index_are_found(tmp_path: Path):
    save(tmp_path, shard="10KB")
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    rows = find_rows(tiny_model(), str(tmp_path), revision={})
    assert rows is not None and len({*places.values()}) > 1
    assert {name: path.name for name, path in rows.files.items()} == places
