"""Checkpoints whose tensors have the names of a wrapper, and their copies."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lachesis.cli import app
from lachesis.common.errors import CheckpointError, ConfigError, ModelError
from lachesis.config.schema import ModelConfig, NoAdapterConfig
from lachesis.plugins.export.unwrap import unwrap
from lachesis.train.model.loading import load_model
from tests import pictures
from tests.tiny import tiny_model, tiny_tokenizer

INNER = ("self_attn.", "_checkpoint_wrapped_module.self_attn.")
NAMES: dict[str, Callable[[str], str]] = {
    "ddp": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "peft": lambda name: f"base_model.model.{name}",
    "lightning": lambda name: f"net.{name}",
    "fsdp": lambda name: f"module._fsdp_wrapped_module.{name.replace(*INNER)}",
    "inside": lambda name: name.replace(*INNER),
}


def wrapped(path: Path, name_of: Callable[[str], str], *, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """Rename the tensors of a checkpoint, as one file of safetensors, two, or of torch; return its own."""
    own = load_file(path / "model.safetensors")
    renamed = {name_of(name): tensor for name, tensor in own.items()}
    (path / "model.safetensors").unlink()
    if file == "pytorch_model.bin":
        torch.save(renamed, path / file)
        return own
    shards = [dict(list(renamed.items())[part::2]) for part in range(2)] if "-" in file else [renamed]
    places = [file.replace("1-", f"{number}-") for number in range(1, len(shards) + 1)]
    for place, shard in zip(places, shards, strict=True):
        save_file(shard, path / place, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: place for place, shard in zip(places, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return own


def saved(tmp_path: Path, architecture: str = "qwen2", **more: object) -> Path:
    path = tmp_path / "a model"
    tiny_model(architecture, **more).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("wrapper", NAMES)
@pytest.mark.parametrize("file", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_the_command_that_the_error_names_writes_a_copy_that_loads(tmp_path: Path, wrapper: str, file: str):
    path = saved(tmp_path, tie_word_embeddings=wrapper == "ddp")
    own = wrapped(path, NAMES[wrapper], file=file)
    with pytest.raises(ModelError, match="are not in the files") as caught:
        load_model(ModelConfig(path=str(path), device="cpu"), NoAdapterConfig())
    command, _, copy = caught.value.remedy.partition("by: ")[2].partition("; then set model.path: ")
    program, *words = shlex.split(command)
    done = CliRunner().invoke(app, words)
    assert (program, done.exit_code) == ("lachesis", 0), done.output
    found = load_model(ModelConfig(path=copy, device="cpu"), NoAdapterConfig()).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    kept = {one.name for one in path.iterdir() if one.suffix == ".json" and "index" not in one.name}
    assert kept <= {one.name for one in Path(copy).iterdir()}
    with pytest.raises(CheckpointError, match="is not empty"):
        unwrap(str(path), Path(copy))


@pytest.mark.parametrize("more", [["--merge"], ["--to", "gguf"]])
def test_no_other_option_is_ignored_beside_it(tmp_path: Path, more: list[str]):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="--unwrap only renames"):
        CliRunner().invoke(app, ["export", str(tmp_path), str(out), "--unwrap", *more], catch_exceptions=False)
    assert not out.exists()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "pictures"])
def test_experts_and_towers_are_renamed_too(tmp_path: Path, architecture: str):
    path = pictures.save(tmp_path / "model") if architecture == "pictures" else saved(tmp_path, architecture)
    own = wrapped(path, NAMES["ddp"])
    with pytest.raises(ModelError, match="--unwrap"):
        load_model(ModelConfig(path=str(path), device="cpu"), NoAdapterConfig())
    copied = load_file(unwrap(str(path), tmp_path / "out") / "model.safetensors")
    assert copied.keys() == own.keys()


def test_what_is_not_the_models_after_all_is_not_written(tmp_path: Path):
    path = saved(tmp_path)
    with pytest.raises(ModelError, match="have the model's names already"):
        unwrap(str(path), tmp_path / "out")
    wrapped(path, NAMES["ddp"])
    weights = load_file(path / "model.safetensors")
    save_file({**weights, "module.a.lora_A.weight": torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 tensors .* are unknown to Qwen2ForCausalLM \(first: a\.lora_A"):
        unwrap(str(path), tmp_path / "out")
    both = {name.replace(*INNER): tensor for name, tensor in weights.items()}
    save_file({**both, "_orig_mod.lm_head.weight": torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"name of another \(first: lm_head\.weight\)"):
        unwrap(str(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()
