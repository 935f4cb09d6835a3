from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from lachesis.common.errors import ModelError
from lachesis.config.schema import ModelConfig
from lachesis.train.model.attach import attached_transformer, empty_transformer
from tests.tiny import tiny_model


class Recorder:
    """Weights in bfloat16 that are attached nowhere."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        self.model = None

    def attach(self, model) -> int:
        self.model = model
        return 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gpt2", "recurrent_gemma"])
def test_parameters_are_empty_and_all_else_is_as_loaded(architecture, dtype, tmp_path):
    tiny_model(architecture).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    empty = empty_transformer(ModelConfig(path=str(tmp_path)), dtype=dtype)
    ours, theirs = ({n: (p.shape, p.dtype) for n, p in m.named_parameters()} for m in (empty, loaded))
    assert ours == theirs
    assert all(p.is_meta for p in empty.parameters())
    buffers = dict(empty.named_buffers())
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffers[name], buffer) and buffers[name].dtype == buffer.dtype, name
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert (empty.get_output_embeddings().weight is empty.get_input_embeddings().weight) is tied
    assert not empty.training


def test_end_tokens_of_the_generation_config_are_kept(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    assert empty_transformer(ModelConfig(path=str(tmp_path)), dtype=torch.float32).generation_config.eos_token_id == 2
    GenerationConfig(eos_token_id=[2, 7]).save_pretrained(tmp_path)
    model = empty_transformer(ModelConfig(path=str(tmp_path)), dtype=torch.float32)
    assert model.generation_config.eos_token_id == [2, 7]


def test_the_dtype_is_the_configured_one_or_that_of_the_weights(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    for configured, expected in (("auto", torch.bfloat16), ("float16", torch.float16)):
        weights = Recorder()
        model = attached_transformer(ModelConfig(path=str(tmp_path), dtype=configured), weights)
        assert weights.model is model and model.dtype == expected


def test_no_model_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="no causal language model is described in") as caught:
        empty_transformer(ModelConfig(path=str(tmp_path)), dtype=torch.float32)
    assert caught.value.remedy
