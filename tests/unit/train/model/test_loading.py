"""Models and tokenizers as people have them: whole, incomplete, or of another kind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from lachesis.bridges.sent_weights import full_weights
from lachesis.common.errors import ModelError
from lachesis.config.schema import LoraAdapterConfig, ModelConfig, NoAdapterConfig
from lachesis.train.checkpoint import save_model
from lachesis.train.model.loading import (
    LoadedModel,
    attached_transformer,
    empty_transformer,
    eos_token_ids,
    load_model,
    load_tokenizer,
    train_only,
)
from tests.ports import free_port
from tests.tiny import EOS, EOS_ID, PAD_ID, tiny_model, tiny_tokenizer

SaveModel = Callable[..., Path]


def config(path: Path, **options) -> ModelConfig:
    return ModelConfig(path=str(path), device="cpu", **options)


class TestTokenizer:
    def test_without_pad_token_the_end_token_stands_in(self, save: SaveModel):
        assert load_tokenizer(config(save("llama", without=("pad_token",)))).pad_token == EOS

    @pytest.mark.parametrize("pad", [None, EOS])
    def test_one_whose_unknown_token_is_its_end_token_needs_no_other_pad_token(self, tmp_path: Path, pad: str | None):
        backend = tiny_tokenizer().backend_tokenizer
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, unk_token=EOS).save_pretrained(tmp_path)
        assert load_tokenizer(config(tmp_path, pad_token=pad)).pad_token_id == EOS_ID

    def test_without_an_end_token_either_the_remedy_says_what_to_do(self, save: SaveModel):
        path = save("llama", without=("pad_token", "eos_token"))
        with pytest.raises(ModelError, match="has neither a pad token nor an end token") as caught:
            load_tokenizer(config(path))
        assert str(path) in caught.value.message
        assert "model.pad_token" in caught.value.remedy

    def test_a_configured_pad_token_is_taken(self, save: SaveModel):
        tokenizer = load_tokenizer(config(save("llama", without=("pad_token",)), pad_token=EOS))
        assert tokenizer.pad_token_id == EOS_ID

    def test_configured_roles_are_taken(self, save: SaveModel):
        path = save("llama")
        assert load_tokenizer(config(path, special_tokens={"eos_token": "7"})).eos_token == "7"
        with pytest.raises(ModelError, match=r"model.special_tokens.bos_token '<no>' is not in the vocabulary"):
            load_tokenizer(config(path, special_tokens={"bos_token": "<no>"}))

    def test_a_pad_token_outside_of_the_vocabulary_is_refused(self, save: SaveModel):
        path = save("llama", without=("pad_token",))
        with pytest.raises(ModelError, match=r"model.pad_token '<padding>' is not in the vocabulary") as caught:
            load_tokenizer(config(path, pad_token="<padding>"))
        assert caught.value.remedy

    def test_another_tokenizer_directory_is_taken(self, save: SaveModel, tmp_path: Path):
        other = tmp_path / "other"
        tiny_tokenizer().save_pretrained(other)
        assert (
            load_tokenizer(config(save("llama", without=("pad_token",)), tokenizer=str(other))).pad_token_id == PAD_ID
        )

    @pytest.mark.parametrize("as_file", [False, True], ids=["text", "file"])
    def test_a_configured_chat_template_replaces_the_tokenizers_own(
        self, save: SaveModel, tmp_path: Path, as_file: bool
    ):
        template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
        (tmp_path / "chat.jinja").write_text(template)
        given = str(tmp_path / "chat.jinja") if as_file else template
        tokenizer = load_tokenizer(config(save(), chat_template=given))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"

    def test_a_directory_without_tokenizer_says_where_it_looked(self, tmp_path: Path):
        tiny_model("llama").save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="no tokenizer could be loaded from") as caught:
            load_tokenizer(config(tmp_path))
        assert str(tmp_path) in caught.value.message
        assert "model.tokenizer" in caught.value.remedy


class TestModel:
    def test_a_pad_token_that_the_model_has_no_embedding_for_is_refused(self, save: SaveModel):
        """transformers gives tokenizers of some architectures a pad token of its own, behind the vocabulary."""
        path = save("qwen2", without=("pad_token",))
        assert load_tokenizer(config(path)).pad_token_id == tiny_model().config.vocab_size
        with pytest.raises(ModelError, match="pad token") as caught:
            load_model(config(path), NoAdapterConfig())
        assert "model.pad_token" in caught.value.remedy

    def test_a_missing_directory_is_one_clear_error(self, tmp_path: Path):
        with pytest.raises(ModelError) as caught:
            load_model(config(tmp_path / "nowhere"), NoAdapterConfig())
        assert str(tmp_path / "nowhere") in caught.value.message
        assert "\n" not in str(caught.value)
        assert caught.value.remedy

    def test_a_hub_that_is_away_is_asked_once(self, monkeypatch: pytest.MonkeyPatch):
        """Its library by itself tries again for half a minute, also for a wrong path."""
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits {seconds} s to try again"))
        with pytest.raises(ModelError, match="could be loaded from 'data/modle', which is not a directory here:"):
            load_model(config(Path("data/modle")), NoAdapterConfig())
        assert not constants.HF_HUB_OFFLINE

    def test_a_directory_with_a_tokenizer_only_has_no_model(self, tmp_path: Path):
        tiny_tokenizer().save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=r"no causal language model could be loaded from '[^']+': ") as caught:
            load_model(config(tmp_path), NoAdapterConfig())
        assert "model.path" in caught.value.remedy

    def test_weights_that_are_cut_off_are_an_error_of_the_model(self, save: SaveModel):
        path = save()
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-500])
        with pytest.raises(ModelError, match="could be loaded") as caught:
            load_model(config(path), NoAdapterConfig())
        assert "\n" not in str(caught.value)

    def test_a_config_that_is_no_json_is_an_error_of_the_model(self, save: SaveModel):
        path = save()
        (path / "config.json").write_text("{")
        with pytest.raises(ModelError):
            load_model(config(path), NoAdapterConfig())

    def test_another_kind_of_model_is_refused(self, save: SaveModel):
        path = save()
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(settings | {"model_type": "t5"}))
        with pytest.raises(ModelError, match="no causal language model"):
            load_model(config(path), NoAdapterConfig())

    def test_on_the_cpu_auto_means_float32(self, save: SaveModel):
        path = save()
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
        assert load_model(config(path), NoAdapterConfig()).transformer.dtype == torch.float32
        assert load_model(config(path, dtype="bfloat16"), NoAdapterConfig()).transformer.dtype == torch.bfloat16

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_that_is_not_there_is_an_error_with_a_remedy(self, save: SaveModel):
        with pytest.raises(ModelError, match="torch sees no GPU") as caught:
            load_model(ModelConfig(path=str(save()), device="cuda"), NoAdapterConfig())
        assert "model.device: auto" in caught.value.remedy


class TestDropout:
    """Ratios of two passes with different dropout would compare two random networks."""

    @pytest.mark.parametrize(
        ("architecture", "dropout"),
        [("gpt2", {"resid_pdrop": 0.5, "attn_pdrop": 0.5, "embd_pdrop": 0.5}), ("qwen2", {"attention_dropout": 0.5})],
    )
    def test_a_models_own_dropout_is_off(self, save: SaveModel, architecture: str, dropout: dict[str, float]):
        model = load_model(config(save(architecture, **dropout)), NoAdapterConfig()).transformer.train()
        ids = torch.tensor([[5, 9, 13, 20, 33]])
        with torch.no_grad():
            first, second = model(ids).logits, model(ids).logits
        assert (first - second).abs().max() == 0

    def test_the_adapters_dropout_stays_as_configured(self, save: SaveModel):
        loaded = load_model(config(save("gpt2")), LoraAdapterConfig(r=2, dropout=0.25, targets=["c_attn"]))
        rates = {module.p for module in loaded.model.modules() if isinstance(module, torch.nn.Dropout)}
        assert rates == {0.0, 0.25}


class TestEndTokens:
    def load(self, path: Path) -> LoadedModel:
        return load_model(config(path), NoAdapterConfig())

    def test_they_are_those_of_the_generation_config_and_the_tokenizer(self, save: SaveModel):
        path = save()
        settings = json.loads((path / "generation_config.json").read_text())
        (path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [7, 5]}))
        assert eos_token_ids(self.load(path)) == (EOS_ID, 5, 7)

    def test_one_that_is_not_a_number_is_refused(self, save: SaveModel):
        path = save("llama")
        (path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
        loaded = self.load(path)
        with pytest.raises(ModelError, match="is '</s>', which is not a token id"):
            eos_token_ids(loaded)

    def test_without_any_a_completion_would_never_end(self, save: SaveModel):
        path = save("llama", without=("eos_token",), eos_token_id=None)
        loaded = self.load(path)
        with pytest.raises(ModelError, match="end token") as caught:
            eos_token_ids(loaded)
        assert caught.value.remedy


ARCHITECTURES = ["qwen2", "llama"]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    def save(architecture: str) -> Path:
        tiny_model(architecture).save_pretrained(str(tmp_path))
        tiny_tokenizer().save_pretrained(str(tmp_path))
        return tmp_path

    return save


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_rest_stays_as_it_is(saved: Callable[[str], Path], architecture: str):
    config = ModelConfig(path=str(saved(architecture)), device="cpu", train_layers=[1])
    model = load_model(config, NoAdapterConfig()).transformer
    before = {name: tensor.clone() for name, tensor in full_weights(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    ids = torch.arange(4, 12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moved = {name for name, tensor in full_weights(model) if not torch.equal(tensor, before[name])}
    assert moved
    assert all(name.startswith("model.layers.1.") for name in moved)
    assert {name for name in before if name.startswith("model.layers.1.")} == moved


def test_an_embedding_that_is_also_the_head_is_frozen_too():
    model = tiny_model("qwen2", tie_word_embeddings=True)
    train_only(model, [0])
    assert not model.get_input_embeddings().weight.requires_grad
    assert not model.lm_head.weight.requires_grad


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
    with pytest.raises(ModelError, match="does not describe a causal language model") as caught:
        empty_transformer(ModelConfig(path=str(tmp_path)), dtype=torch.float32)
    assert caught.value.remedy


class TestWhatTheFilesHave:
    """A model is made of its files: nothing is drawn, and nothing is left over in silence."""

    def test_tensors_of_another_shape_are_named(self, save: SaveModel):
        path = save()
        weights = load_file(path / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        weights[name] = weights[name][:40].clone()
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=rf"1 tensors in the files .* other shapes .*first: {name}"):
            load_model(config(path), NoAdapterConfig())

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "x.y.", "language_model."])
    def test_names_behind_a_prefix_end_the_run_with_the_command_that_removes_it(self, save: SaveModel, prefix: str):
        path = save()
        rename(path, lambda name: prefix + name)
        with pytest.raises(ModelError, match=r"of \d+ tensors of Qwen2ForCausalLM are not in the files") as caught:
            load_model(config(path), NoAdapterConfig())
        assert f"lachesis export {path} {path}-renamed --unwrap" in caught.value.remedy

    @pytest.mark.parametrize("name", ["module._orig_mod.{}", "{}"])
    def test_words_in_the_midst_of_names_end_it_alike(self, save: SaveModel, name: str):
        path = save()
        rename(path, lambda own: name.format(own.replace("self_attn.", "_checkpoint_wrapped_module.self_attn.")))
        with pytest.raises(ModelError, match="are not in the files") as caught:
            load_model(config(path), NoAdapterConfig())
        assert "--unwrap" in caught.value.remedy

    def test_a_missing_tensor_is_named(self, save: SaveModel):
        path = save()
        rename(path, lambda name: None if name.endswith("1.mlp.up_proj.weight") else name)
        with pytest.raises(ModelError, match=r"1 of .*first: model\.layers\.1\.mlp\.up_proj\.weight"):
            load_model(config(path), NoAdapterConfig())

    def test_a_configuration_of_fewer_layers_than_the_files_have_is_refused(self, save: SaveModel):
        path = save()
        content = json.loads((path / "config.json").read_text())
        content |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        (path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ModelError, match=r"unknown to Qwen2ForCausalLM \(first: model\.layers\.1\."):
            load_model(config(path), NoAdapterConfig())

    def test_a_tied_head_need_not_be_there(self, save: SaveModel):
        path = save(tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(path / "model.safetensors")
        load_model(config(path), NoAdapterConfig())


def rename(path: Path, name_of: Callable[[str], str | None]) -> None:
    """Give the tensors of a checkpoint other names, or leave those out whose name is None."""
    file = path / "model.safetensors"
    renamed = {name_of(name): tensor for name, tensor in load_file(file).items()}
    save_file({n: t for n, t in renamed.items() if n is not None}, file, metadata={"format": "pt"})


def test_a_generation_config_that_would_not_be_written_is_mended(save: SaveModel, tmp_path: Path, caplog):
    path = save()
    (path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "top_k": 5}')
    loaded = load_model(config(path), NoAdapterConfig())
    assert "generation_config.json" in caplog.text
    loaded.model.save_pretrained(tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.6


class TestQuantizedCheckpoint:
    """A checkpoint whose config.json says that its weights have 4 bits already."""

    @pytest.fixture
    def path(self, save: SaveModel) -> Path:
        path = save()
        content = json.loads((path / "config.json").read_text())
        saved = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        (path / "config.json").write_text(json.dumps(content | {"quantization_config": saved}))
        return path

    def test_full_training_is_refused(self, path: Path):
        with pytest.raises(ModelError, match="saved in nf4, so they cannot be trained"):
            load_model(config(path), NoAdapterConfig())

    @pytest.mark.parametrize("bits", [4, 8])
    def test_files_without_scales_are_not_quantized_whatever_the_config_says(self, path: Path, bits: int):
        content = json.loads((path / "config.json").read_text())
        content["quantization_config"] = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
        (path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ModelError, match="hold no scales of them") as raised:
            load_model(config(path), LoraAdapterConfig(r=2))
        assert "remove quantization_config" in raised.value.remedy

    def test_a_setting_that_its_library_asserts_is_an_error_of_the_model(self, path: Path):
        content = json.loads((path / "config.json").read_text())
        content["quantization_config"] = {"quant_method": "torchao", "quant_type": "nonsense"}
        (path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ModelError, match="Expected only one key"):
            load_model(config(path), LoraAdapterConfig(r=2))

    def test_other_bits_than_it_has_are_refused(self, path: Path):
        with pytest.raises(ModelError, match=r"saved in nf4, but model\.quantization is int8"):
            load_model(config(path, quantization="int8"), LoraAdapterConfig(r=2))

    @pytest.fixture
    def in_8_bits(self, save: SaveModel) -> Path:
        """Weights in FP8 with a scale for each block of 16 by 16, all of them 0.5."""
        path = save()
        weights: dict[str, torch.Tensor] = {}
        for name, weight in load_file(path / "model.safetensors").items():
            inside = name.endswith("_proj.weight")
            weights[name] = (weight * 2).to(torch.float8_e4m3fn) if inside else weight
            if inside:
                weights[f"{name}_scale_inv"] = torch.full([size // 16 for size in weight.shape], 0.5)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        content = json.loads((path / "config.json").read_text())
        saved = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
        (path / "config.json").write_text(json.dumps(content | {"quantization_config": saved}))
        return path

    def test_of_weights_in_fp8_such_in_more_bits_are_made_and_saved(
        self, in_8_bits: Path, save: SaveModel, tmp_path: Path
    ):
        loaded = load_model(config(in_8_bits), NoAdapterConfig())
        parameters = dict(loaded.model.named_parameters())
        assert {value.dtype for value in parameters.values()} == {torch.float32}
        assert "quantization_config" not in loaded.model.config.to_dict()
        before = load_file(save() / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
        torch.testing.assert_close(parameters["model.layers.0.mlp.up_proj.weight"], before, atol=0.05, rtol=0.1)
        save_model(loaded.model, loaded.tokenizer, tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        for name, value in again.named_parameters():
            assert torch.equal(value, parameters[name]), name

    @pytest.fixture
    def packed(self, save: SaveModel) -> Path:
        """Weights in 4 bits of compressed-tensors, eight in a word, all with the scale 0.125."""
        helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
        path = save()
        weights: dict[str, torch.Tensor] = {}
        for name, weight in load_file(path / "model.safetensors").items():
            if not name.endswith("_proj.weight"):
                weights[name] = weight
                continue
            rounded = (weight * 8).round().clamp(-8, 7).to(torch.int8)
            weights[f"{name}_packed"] = helpers.pack_to_int32(rounded, 4)
            weights[f"{name}_scale"] = torch.full((len(weight), 1), 0.125)
            weights[f"{name}_shape"] = torch.tensor(weight.shape)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        content = json.loads((path / "config.json").read_text())
        scheme = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
        content["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}, "ignore": ["lm_head"],
        }  # fmt: skip
        (path / "config.json").write_text(json.dumps(content))
        return path

    @pytest.mark.parametrize("adapter", [NoAdapterConfig(), LoraAdapterConfig(r=2)], ids=["full", "lora"])
    def test_packed_weights_are_unpacked_before_the_first_pass_and_saved_as_such(
        self, packed: Path, save: SaveModel, tmp_path: Path, adapter
    ):
        loaded = load_model(config(packed), adapter)
        parameters = dict(loaded.transformer.named_parameters())
        name = "model.layers.0.mlp.up_proj.weight"
        layer = loaded.transformer.get_submodule(name.removesuffix(".weight"))
        own = layer.base_layer.weight if adapter.kind == "lora" else parameters[name]
        before = load_file(save() / "model.safetensors")[name]
        torch.testing.assert_close(own, (before * 8).round().clamp(-8, 7) / 8, rtol=0, atol=0)
        assert not any("scale" in name or "packed" in name for name in loaded.model.state_dict())
        if adapter.kind == "none":
            assert all(parameter.requires_grad for parameter in parameters.values())
            save_model(loaded.model, loaded.tokenizer, tmp_path / "saved")
            again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
            assert torch.equal(again.get_parameter(name), own)
            assert "quantization_config" not in again.config.to_dict()

    def test_of_weights_in_fp8_no_4_bits_are_made(self, in_8_bits: Path):
        with pytest.raises(ModelError, match=r"already quantized \(fp8\), but model\.quantization is nf4"):
            load_model(config(in_8_bits, quantization="nf4"), LoraAdapterConfig(r=2))
