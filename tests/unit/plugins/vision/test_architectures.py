"""Each architecture for images that docs/models.md names: exact with images, its tower frozen, saved as it came."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from tests.paths import BENCHMARKS
from tests.tiny import tiny_tokenizer

from lachesis.common.types import Group
from lachesis.config.schema import LoraAdapterConfig, ModelConfig, NoAdapterConfig
from lachesis.train.batch import pack
from lachesis.train.checkpoint import save_model
from lachesis.train.model.forward import loss_token_logprobs, plan_forward
from lachesis.train.model.loading import load_model


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vision_models", BENCHMARKS / "vision_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = _loaded()
pytestmark = pytest.mark.parametrize("name", models.ARCHITECTURES)


def test_engine_and_trainer_have_transformers_logprobs(name: str):
    model, prompts = models.tiny(name), models.prompts(name)
    groups = models.sampled(model, prompts)
    assert models.error_of_engine(model, groups) < 1e-4
    assert models.error_of_trainer(model, groups) < 1e-4
    # Prompts 0 and 2 have the same tokens: with each other's image the logprobs are others.
    swapped = [Group(prompts[2], groups[0].samples), Group(prompts[0], groups[2].samples)]
    assert models.error_of_trainer(model, swapped) > 1e-3


def test_a_text_is_not_shifted_by_the_images_of_an_earlier_batch(name: str):
    model = models.tiny(name)
    for module in model.modules():
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = torch.full((1, 1), 5)  # as transformers leaves it there
    groups = models.sampled(model, models.prompts(name)[3:])
    assert models.error_of_engine(model, groups) < 1e-4


def test_only_the_language_model_is_trained_and_all_tensors_are_saved(name: str, tmp_path: Path):
    models.tiny(name).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    config = ModelConfig(path=str(tmp_path / "model"), device="cpu", vision="frozen")
    loaded = load_model(config, NoAdapterConfig())
    model, prompts = loaded.transformer.train(), models.prompts(name)
    # Also a micro-batch without any image: Gemma 3 asks for token types in training.
    for groups in (models.sampled(model, prompts), models.sampled(model, prompts[3:])):
        (micro,) = pack(groups, max_tokens=1 << 20, share_prefixes=False).micro_batches
        plan = plan_forward(model, packing="padded")
        loss_token_logprobs(model, micro, plan=plan).logprobs.sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(1)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "final", write=loaded.writer())
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("model", "final"))
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed
    assert not [key for key in changed if any(word in key for word in ("visual", "vision", "connector", "projector"))]
    adapted = load_model(config, LoraAdapterConfig(r=2)).model
    with_adapter = [key for key, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert with_adapter
    assert all("language_model" in key or "text_model" in key for key in with_adapter)
