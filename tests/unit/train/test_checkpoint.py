from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lachesis.common.errors import CheckpointError
from lachesis.config.schema import OptimizerConfig
from lachesis.train import checkpoint
from lachesis.train.checkpoint import CheckpointManager, capture_rng, restore_rng, save_model
from lachesis.train.distributed.sharded_checkpoint import Written
from lachesis.train.optim.optimizer import build_optimizer


def save(manager: CheckpointManager, step: int, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "tensors": {"w": torch.full((64,), float(step))},
        "state": {"moments": [torch.full((8,), float(step))], "step": step},
        "meta": {"step": step},
    }
    return manager.save(step, **(content | changes))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def hit(path: Path) -> None:
    """Change one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "new" / "checkpoints", keep_last=2)
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.arange(4)}
    state = {"optimizer": {0: {"exp_avg": torch.randn(3)}}, "rate": 1e-6, "names": ["a", None, True]}
    meta = {"epoch": 1, "name": "γ", "nested": [1.5]}
    path = manager.save(10, tensors=tensors, state=state, meta=meta)
    assert names(path) == ["manifest.json", "meta.json", "state.pt", "weights.safetensors"]
    assert path.name == "step_000010"
    found = manager.load()
    assert found.step == manager.latest() == 10
    torch.testing.assert_close(found.tensors, tensors, rtol=0, atol=0)
    assert torch.equal(found.state["optimizer"][0]["exp_avg"], state["optimizer"][0]["exp_avg"])
    assert (found.state["rate"], found.state["names"], found.meta) == (1e-6, ["a", None, True], meta)


def test_tied_tensors_and_views_survive(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    embedding, fused = torch.randn(64, 64), torch.randn(8, 6)
    tensors = {"embed": embedding, "head": embedding, "q": fused[:4], "overlap": fused[2:6], "t": fused.T}
    path = manager.save(1, tensors=tensors, state={}, meta={})
    found = manager.load().tensors
    torch.testing.assert_close(found, {k: v.contiguous() for k, v in tensors.items()}, rtol=0, atol=0)
    assert found["head"].data_ptr() == found["embed"].data_ptr()
    assert (path / "weights.safetensors").stat().st_size < 1.5 * embedding.nbytes


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        save(manager, step)
    assert names(tmp_path) == ["step_000003", "step_000004"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    save(manager, 5)
    save(manager, 5, meta={"again": True})
    assert manager.load().meta == {"again": True}
    assert names(tmp_path) == ["step_000005"]


def test_after_going_back_the_newest_save_counts_not_the_highest_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 20, 12):
        save(manager, step)
    assert manager.latest() == 12
    assert names(tmp_path) == ["step_000012", "step_000020"]


@pytest.mark.parametrize("file", ["weights.safetensors", "state.pt", "meta.json"])
@pytest.mark.parametrize("damage", [hit, os.unlink, lambda path: os.truncate(path, 3)])
def test_damaged_checkpoints_are_passed_over_and_named(
    tmp_path: Path, file: str, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=3)
    for step in (1, 2):
        save(manager, step)
    damage(tmp_path / "step_000002" / file)
    with caplog.at_level(logging.WARNING):
        assert manager.latest() == 1
    assert "step_000002" in caplog.text and file in caplog.text
    assert manager.load().step == 1
    with pytest.raises(CheckpointError, match=rf"step_000002 cannot be used: .*{file}"):
        manager.load(2)


def test_parts_that_ranks_have_written_elsewhere_make_no_checkpoint(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=3)
    save(manager, 1)
    with (
        pytest.raises(CheckpointError, match=r"parts/__1_0.distcp, which a rank wrote, is not visible in") as caught,
        manager.saving(2, needed=1) as draft,
    ):
        draft.write(state={}, meta={})
        draft.describe(parts=[Written("__1_0.distcp", 8, 1)])
    assert "a disk that all nodes share" in caught.value.remedy
    assert names(tmp_path) == ["step_000001"]


def test_a_checkpoint_without_readable_manifest_is_passed_over(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        save(manager, step)
    (tmp_path / "step_000003" / "manifest.json").write_text("{")
    (tmp_path / "step_000002" / "manifest.json").unlink()
    assert manager.latest() == 1


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (1, 2):
        save(manager, step)
    os.truncate(tmp_path / "step_000002" / "state.pt", 3)
    save(manager, 3)
    assert names(tmp_path) == ["step_000001", "step_000003"]


def test_without_checkpoint(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "nothing", keep_last=1)
    assert manager.latest() is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        manager.load()
    save(manager, 3)
    with pytest.raises(CheckpointError, match=r"step_000004 cannot be used: .*missing.*available: 3"):
        manager.load(4)


@pytest.mark.parametrize("content", [{"state": {"object": SimpleNamespace()}}, {"meta": {"set": {1}}}])
def test_what_could_not_be_read_back_is_refused_when_saving(tmp_path: Path, content: dict[str, Any]) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    save(manager, 1)
    with pytest.raises(CheckpointError, match=r"SimpleNamespace|not JSON serializable"):
        save(manager, 2, **content)
    assert names(tmp_path) == ["step_000001"]


def test_too_little_space_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    save(manager, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    big = torch.zeros(2_000_000)
    with pytest.raises(CheckpointError, match=r"step_000002: 16,000,000 bytes.*5,000,000 bytes are free -> free"):
        manager.save(2, tensors={"w": big}, state={"moment": big, "view_of_it": big[:1]}, meta={})
    assert names(tmp_path) == ["step_000001"] and manager.latest() == 1


@pytest.mark.parametrize("at", ["save_file", "torch.save", "write_text"])
def test_disk_that_fills_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    save(manager, 1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = {"save_file": checkpoint, "torch.save": torch, "write_text": Path}[at]
    with monkeypatch.context() as patch:
        patch.setattr(owner, at.split(".")[-1], full)
        with pytest.raises(CheckpointError, match=r"no space left for .*step_000002.* bytes are needed"):
            save(manager, 2)
    assert names(tmp_path) == ["step_000001"]
    assert manager.load().meta == {"step": 1}


def test_training_goes_on_exactly_from_a_checkpoint(tmp_path: Path) -> None:
    def policy() -> tuple[Parameter, Any]:
        weight = Parameter(torch.linspace(-1, 1, 64).view(8, 8).bfloat16())
        config = OptimizerConfig(schedule="linear", warmup_steps=3)
        return weight, build_optimizer([("w", weight)], config, learning_rate=1e-3, total_steps=6)

    def train(weight: Parameter, optimizer: Any, steps: int) -> Tensor:
        for _ in range(steps):
            weight.grad = torch.randn(8, 8).bfloat16() * random.random() + float(np.random.rand())
            optimizer.step()
        return weight.detach()

    weight, optimizer = policy()
    torch.manual_seed(0)
    train(weight, optimizer, 3)
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(
        3,
        tensors={"w": weight},
        state={"optimizer": optimizer.state_dict(), "rng": capture_rng()},
        meta={},
    )
    expected = train(weight, optimizer, 3)
    resumed, fresh = policy()
    found = manager.load()
    resumed.data.copy_(found.tensors["w"])
    fresh.load_state_dict(found.state["optimizer"])
    restore_rng(found.state["rng"])
    assert torch.equal(train(resumed, fresh, 3), expected)


def draw() -> list[float]:
    return [random.gauss(0, 1), float(np.random.normal()), *torch.randn(2).tolist()]


def test_random_states_go_through_a_file(tmp_path: Path) -> None:
    draw()
    torch.save(capture_rng(), tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    restore_rng(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_missing_cuda_devices_are_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    state = capture_rng() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 2}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with caplog.at_level(logging.WARNING):
        restore_rng(state)
    assert "2 CUDA devices were saved, but there are 0" in caplog.text


class Tokenizer:
    """Saves a file, as a tokenizer does."""

    def save_pretrained(self, save_directory: str) -> None:
        Path(save_directory, "tokenizer.json").write_text("{}")


def tiny_model(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(input_ids=torch.arange(8)[None]).logits


@pytest.mark.parametrize("tied", [True, False])
def test_saved_models_are_loaded_by_transformers(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tied=tied)
    save_model(model, Tokenizer(), tmp_path / "final")
    assert names(tmp_path) == ["final"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names(tmp_path / "final"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    assert torch.equal(logits(loaded), logits(model))


def test_saved_adapters_are_loaded_by_peft(tmp_path: Path) -> None:
    save_model(tiny_model(tied=True), None, tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()
    save_model(model, Tokenizer(), tmp_path / "final")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(names(tmp_path / "final"))
    assert "model.safetensors" not in names(tmp_path / "final")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = logits(fresh)
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "final").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(logits(loaded), plain)


def test_an_earlier_model_is_replaced_and_other_things_are_not(tmp_path: Path) -> None:
    final, other = tmp_path / "final", tmp_path / "other"
    save_model(tiny_model(tied=False), Tokenizer(), final)
    save_model(tiny_model(tied=False), None, final)
    assert "tokenizer.json" not in names(final)
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match="holds no model"):
        save_model(tiny_model(tied=False), None, other)
    assert names(other) == ["thesis.tex"]


def test_a_full_disk_keeps_the_earlier_model(tmp_path: Path) -> None:
    class Full(Tokenizer):
        def save_pretrained(self, save_directory: str) -> None:
            raise Exception("No space left on device (os error 28)")  # as the tokenizers library does

    save_model(tiny_model(tied=False), Tokenizer(), tmp_path / "final")
    with pytest.raises(CheckpointError, match=r"no space left for .*final: .* bytes are free"):
        save_model(tiny_model(tied=False), Full(), tmp_path / "final")
    assert names(tmp_path) == ["final"] and "tokenizer.json" in names(tmp_path / "final")
