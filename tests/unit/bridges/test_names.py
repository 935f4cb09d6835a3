"""The expected tables are written by hand, after vLLM's own models (0.26 and 0.32) for the same configurations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch

from lachesis.bridges.names import VLLM_ARCHITECTURES, check_same_model, describe, map_parameters
from lachesis.common.errors import ModelError
from lachesis.engines.serving.backend import DigestSlice

# 32 wide, 4 heads of 16 (not 32 / 4), 2 heads of keys and values, 48 wide inside, 100 tokens padded to 128.
LAYER = "model.layers.0"
QUERY, KEY, HIDDEN, INNER, VOCAB, PADDED = 64, 32, 32, 48, 100, 128

HF_LAYER = {
    f"{LAYER}.self_attn.q_proj.weight": (QUERY, HIDDEN),
    f"{LAYER}.self_attn.k_proj.weight": (KEY, HIDDEN),
    f"{LAYER}.self_attn.v_proj.weight": (KEY, HIDDEN),
    f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, QUERY),
    f"{LAYER}.mlp.gate_proj.weight": (INNER, HIDDEN),
    f"{LAYER}.mlp.up_proj.weight": (INNER, HIDDEN),
    f"{LAYER}.mlp.down_proj.weight": (HIDDEN, INNER),
    f"{LAYER}.input_layernorm.weight": (HIDDEN,),
    f"{LAYER}.post_attention_layernorm.weight": (HIDDEN,),
}
VLLM_LAYER = {
    f"{LAYER}.self_attn.qkv_proj.weight": (QUERY + 2 * KEY, HIDDEN),
    f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, QUERY),
    f"{LAYER}.mlp.gate_up_proj.weight": (2 * INNER, HIDDEN),
    f"{LAYER}.mlp.down_proj.weight": (HIDDEN, INNER),
    f"{LAYER}.input_layernorm.weight": (HIDDEN,),
    f"{LAYER}.post_attention_layernorm.weight": (HIDDEN,),
}
HF_ENDS = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
VLLM_ENDS = {"model.embed_tokens.weight": (PADDED, HIDDEN), "model.norm.weight": (HIDDEN,)}
HF_HEAD, VLLM_HEAD = {"lm_head.weight": (VOCAB, HIDDEN)}, {"lm_head.weight": (PADDED, HIDDEN)}
HF_BIAS = {f"{LAYER}.self_attn.{x}_proj.bias": (n,) for x, n in (("q", QUERY), ("k", KEY), ("v", KEY))}
VLLM_BIAS = {f"{LAYER}.self_attn.qkv_proj.bias": (QUERY + 2 * KEY,)}
QK_NORMS = {f"{LAYER}.self_attn.q_norm.weight": (16,), f"{LAYER}.self_attn.k_norm.weight": (16,)}
FFN_NORMS = {f"{LAYER}.{name}_feedforward_layernorm.weight": (HIDDEN,) for name in ("pre", "post")}
PHI_LAYER = {
    f"{LAYER}.self_attn.qkv_proj.weight": (128, HIDDEN),
    f"{LAYER}.mlp.gate_up_proj.weight": (96, HIDDEN),
}

LLAMA = ({**HF_ENDS, **HF_LAYER, **HF_HEAD}, {**VLLM_ENDS, **VLLM_LAYER, **VLLM_HEAD})
TIED = ({**HF_ENDS, **HF_LAYER}, {**VLLM_ENDS, **VLLM_LAYER})
MODELS = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "granite": LLAMA,
    "qwen2": ({**LLAMA[0], **HF_BIAS}, {**LLAMA[1], **VLLM_BIAS}),
    "qwen3": ({**LLAMA[0], **QK_NORMS}, {**LLAMA[1], **QK_NORMS}),
    "gemma": TIED,
    "gemma2": ({**TIED[0], **FFN_NORMS}, {**TIED[1], **FFN_NORMS}),
    "gemma3_text": ({**TIED[0], **FFN_NORMS, **QK_NORMS}, {**TIED[1], **FFN_NORMS, **QK_NORMS}),
    "phi3": ({**HF_ENDS, **HF_HEAD, **PHI_LAYER}, {**VLLM_ENDS, **VLLM_HEAD, **PHI_LAYER}),
}


def shapes(slices: Mapping[str, DigestSlice], engine: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Of what the slices pick out of an engine's tensors."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in engine.items()}
    return {name: tuple(entry.of(tensors).shape) for name, entry in slices.items()}


def mapped(model_type: str, *, kind: str = "vllm 0.26.0") -> dict[str, DigestSlice]:
    ours, theirs = MODELS[model_type]
    return map_parameters(ours, theirs, model_type=model_type, engine_kind=kind)


def test_every_supported_architecture_has_a_table():
    assert MODELS.keys() == VLLM_ARCHITECTURES


@pytest.mark.parametrize("model_type", MODELS)
def test_slices_have_the_parameters_shapes_and_cover_the_engine_once(model_type):
    ours, theirs = MODELS[model_type]
    slices = mapped(model_type)
    assert shapes(slices, theirs) == ours
    for name, shape in theirs.items():
        rows = sorted((s.start, s.start + s.rows) for s in slices.values() if s.name == name)
        assert rows[0][0] == 0
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(rows)), "no gap, no overlap"
        assert rows[-1][1] == (VOCAB if shape[0] == PADDED and "proj" not in name else shape[0])


TOWER = "vision_tower.vision_model.encoder.layers.0.self_attn"


def in_a_model_for_images(name: str) -> str:
    return f"language_model.{name}"


def test_a_language_model_beside_a_tower_is_found_under_vllms_names():
    """As vLLM 0.32 lists Gemma 3 and Llava; transformers has lm_head outside, and another name for the tower."""
    ours = {name.replace("model.", "model.language_model.", 1): shape for name, shape in LLAMA[0].items()}
    theirs = {in_a_model_for_images(name): shape for name, shape in LLAMA[1].items()}
    projector = {"multi_modal_projector.linear.weight": (HIDDEN, HIDDEN)}
    ours |= {f"model.{name}": shape for name, shape in projector.items()}
    slices = map_parameters(ours, theirs | projector, model_type="llama", engine_kind="vllm 0.32.0")
    assert shapes(slices, theirs | projector) == ours
    assert slices["lm_head.weight"].name == "language_model.lm_head.weight"
    assert slices["model.language_model.layers.0.self_attn.k_proj.weight"].start == QUERY

    tower = {f"{TOWER}.qkv_proj.weight": (3 * HIDDEN, HIDDEN)}
    of_ours = {f"model.vision_tower.encoder.layers.0.self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for x in "qkv"}
    both = (ours | of_ours, theirs | projector | tower)
    check_same_model(*both, model_type="llama", engine_kind="vllm 0.32.0")
    with pytest.raises(ModelError, match="serves another model"):
        map_parameters(*both, model_type="llama", engine_kind="vllm 0.32.0")
    emptied = {name: (0,) if "_proj" in name else shape for name, shape in both[1].items()}
    check_same_model(both[0], emptied, model_type="llama", engine_kind="vllm 0.32.0")
    smaller = both[1] | {"language_model.model.norm.weight": (HIDDEN // 2,)}
    with pytest.raises(ModelError, match="serves another model"):
        check_same_model(both[0], smaller, model_type="llama", engine_kind="vllm 0.32.0")


EXPERTS = f"{LAYER}.mlp.experts"
MIXTURE = (
    {
        **{name: shape for name, shape in LLAMA[0].items() if "mlp" not in name},
        **QK_NORMS,
        f"{LAYER}.mlp.gate.weight": (8, HIDDEN),
        f"{EXPERTS}.gate_up_proj": (8, 2 * INNER, HIDDEN),
        f"{EXPERTS}.down_proj": (8, HIDDEN, INNER),
    },
    # As vLLM 0.26 and 0.32 list it.
    {
        **{name: shape for name, shape in LLAMA[1].items() if "mlp" not in name},
        **QK_NORMS,
        f"{LAYER}.mlp.gate.weight": (8, HIDDEN),
        f"{EXPERTS}.routed_experts.w13_weight": (8, 2 * INNER, HIDDEN),
        f"{EXPERTS}.routed_experts.w2_weight": (8, HIDDEN, INNER),
    },
)


def test_experts_of_a_mixture_have_names_of_vllms_own():
    ours, theirs = MIXTURE
    slices = map_parameters(ours, theirs, model_type="qwen3_moe", engine_kind="vllm 0.26.0", mixtures=True)
    assert shapes(slices, theirs) == ours
    assert slices[f"{EXPERTS}.gate_up_proj"].name == f"{EXPERTS}.routed_experts.w13_weight"
    assert slices[f"{EXPERTS}.down_proj"].name == f"{EXPERTS}.routed_experts.w2_weight"


def test_where_their_order_is_not_certain_a_mixture_is_not_looked_at():
    """A digest would be of other bytes; weights that are shared are proved by what is computed with them."""
    with pytest.raises(ModelError, match="'qwen3_moe' model cannot be shared"):
        map_parameters(*MIXTURE, model_type="qwen3_moe", engine_kind="vllm 0.26.0")
    check_same_model(*MIXTURE, model_type="qwen3_moe", engine_kind="vllm 0.26.0")


def test_experts_in_another_shape_are_refused():
    """As kernels of other cards lay them out."""
    ours, theirs = MIXTURE
    other = theirs | {f"{EXPERTS}.routed_experts.w13_weight": (8, 2, INNER, HIDDEN)}
    with pytest.raises(ModelError, match=r"gate_up_proj: \[8, 96, 32\] here, \[8, 2, 48, 32\] there"):
        map_parameters(ours, other, model_type="qwen3_moe", engine_kind="vllm 0.26.0", mixtures=True)


def test_fused_matrices_are_split_by_rows():
    slices = mapped("qwen2")
    qkv, gate_up = f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.mlp.gate_up_proj"
    assert slices[f"{LAYER}.self_attn.q_proj.weight"] == DigestSlice(f"{qkv}.weight", 0, 64)
    assert slices[f"{LAYER}.self_attn.k_proj.weight"] == DigestSlice(f"{qkv}.weight", 64, 32)
    assert slices[f"{LAYER}.self_attn.v_proj.weight"] == DigestSlice(f"{qkv}.weight", 96, 32)
    assert slices[f"{LAYER}.self_attn.v_proj.bias"] == DigestSlice(f"{qkv}.bias", 96, 32)
    assert slices[f"{LAYER}.mlp.gate_proj.weight"] == DigestSlice(f"{gate_up}.weight", 0, 48)
    assert slices[f"{LAYER}.mlp.up_proj.weight"] == DigestSlice(f"{gate_up}.weight", 48, 48)


def test_padded_vocabularies_give_their_first_rows():
    slices = mapped("llama")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert slices[name] == DigestSlice(name, 0, 100)


def test_layers_that_can_wear_adapters_keep_their_own_names():
    ours, theirs = MODELS["llama"]
    wrapped = {name.replace("_proj.weight", "_proj.base_layer.weight"): shape for name, shape in theirs.items()}
    slices = map_parameters(ours, wrapped, model_type="llama", engine_kind="vllm 0.32.0")
    assert slices[f"{LAYER}.self_attn.k_proj.weight"].name == f"{LAYER}.self_attn.qkv_proj.base_layer.weight"
    assert slices[f"{LAYER}.mlp.down_proj.weight"].name == f"{LAYER}.mlp.down_proj.base_layer.weight"


def test_an_engine_may_list_the_head_of_tied_embeddings():
    ours, theirs = MODELS["gemma"]
    slices = map_parameters(ours, {**theirs, **VLLM_HEAD}, model_type="gemma", engine_kind="vllm")
    assert slices.keys() == ours.keys()


def test_the_embedded_engine_has_transformers_names_for_any_architecture():
    ours = {"transformer.h.0.attn.c_attn.weight": (32, 96), "transformer.scale": (), **HF_LAYER}
    slices = map_parameters(ours, ours, model_type="gpt2", engine_kind="embedded")
    assert {name: (s.name, s.start) for name, s in slices.items()} == {name: (name, 0) for name in ours}
    assert shapes(slices, ours) == ours
    assert slices["transformer.scale"].rows == 1


def test_the_digest_of_a_slice_is_asked_for_by_rows():
    asked = mapped("llama")[f"{LAYER}.self_attn.k_proj.weight"]
    assert (asked.name, asked.start, asked.rows) == (f"{LAYER}.self_attn.qkv_proj.weight", 64, 32)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2_moe", "gemma3"])
def test_an_unknown_architecture_is_refused_by_name(model_type):
    ours = {"transformer.h.0.attn.c_proj.weight": (32, 32)}
    with pytest.raises(ModelError, match=f"'{model_type}' model cannot be shared") as caught:
        map_parameters(ours, ours, model_type=model_type, engine_kind="vllm 0.32.0")
    assert "lora_only" in caught.value.remedy and "qwen3" in caught.value.remedy


def refused(ours, theirs, match: str, kind: str = "vllm") -> ModelError:
    with pytest.raises(ModelError, match=match) as caught:
        map_parameters(ours, theirs, model_type="llama", engine_kind=kind)
    assert "model.path" in caught.value.remedy
    return caught.value


class TestAnotherModel:
    def test_of_another_width(self):
        wide = {name: tuple(64 if n == HIDDEN else n for n in shape) for name, shape in LLAMA[0].items()}
        error = refused(wide, LLAMA[1], r"size mismatch or missing: model.embed_tokens.weight: \[100, 64\] here")
        assert "hidden size 32" in error.message and "hidden size 64" in error.message
        assert "and 8 more" in error.message, "not a page of names"

    def test_with_more_layers_in_the_engine(self):
        more = {name.replace("layers.0", "layers.1"): shape for name, shape in VLLM_LAYER.items()}
        refused(LLAMA[0], {**LLAMA[1], **more}, r"the trainer's model lacks model.layers.1.* and 2 more")

    def test_with_more_layers_in_the_trainer(self):
        more = {name.replace("layers.0", "layers.1"): shape for name, shape in HF_LAYER.items()}
        refused({**LLAMA[0], **more}, LLAMA[1], r"with 1 layers.*has 2 layers.*no model.layers.1.self_attn.qkv_proj")

    def test_with_other_heads(self):
        other = {**LLAMA[0], f"{LAYER}.self_attn.k_proj.weight": (16, HIDDEN)}
        refused(other, LLAMA[1], r"64 \+ 16 \+ 32 rows of \[32\] here, .*qkv_proj.weight \[128, 32\] there")

    def test_with_a_larger_vocabulary(self):
        refused({**LLAMA[0], "lm_head.weight": (129, HIDDEN)}, LLAMA[1], r"lm_head.weight: \[129, 32\] here")

    def test_with_tied_embeddings(self):
        refused(LLAMA[0], TIED[1], "the engine has no lm_head.weight")

    def test_with_biases(self):
        refused(LLAMA[0], {**LLAMA[1], **VLLM_BIAS}, r"the trainer's model lacks .*qkv_proj\.bias")
        refused({**LLAMA[0], **HF_BIAS}, LLAMA[1], r"the engine has no .*qkv_proj\.bias")

    def test_with_a_third_of_a_matrix_missing(self):
        partial = {name: shape for name, shape in LLAMA[0].items() if "k_proj" not in name}
        refused(partial, LLAMA[1], "k_proj.weight is missing here")

    def test_in_an_embedded_engine(self):
        refused(LLAMA[0], {**LLAMA[0], "lm_head.weight": (PADDED, HIDDEN)}, "lm_head.weight", kind="embedded")


def test_a_model_in_words():
    assert describe({"model.layers.1.w": (2, 3), **HF_ENDS}) == (
        "1 layers, hidden size 32, 100 rows of vocabulary, 3,238 parameters"
    )
    assert describe({"a": (2,)}) == "0 layers, 2 parameters"


class TestTheSameModel:
    """What is asked before a run begins, of a server that others have started."""

    @staticmethod
    def emptied(engine: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """As vLLM leaves its parameters on the CPU."""
        return {name: (0,) if name.endswith("proj.weight") else shape for name, shape in engine.items()}

    @pytest.mark.parametrize("model_type", MODELS)
    def test_it_is(self, model_type: str):
        ours, theirs = MODELS[model_type]
        for engine in (theirs, self.emptied(theirs)):
            check_same_model(ours, engine, model_type=model_type, engine_kind="vllm 0.32.0")
        check_same_model(ours, ours, model_type=model_type, engine_kind="embedded")

    @pytest.mark.parametrize("empty", [False, True])
    @pytest.mark.parametrize(
        "change",
        [
            {"model.embed_tokens.weight": (PADDED, 2 * HIDDEN)},
            {f"{LAYER}.self_attn.qkv_proj.bias": (QUERY,)},
            {"model.layers.1.input_layernorm.weight": (HIDDEN,)},
            {"model.norm.weight": (HIDDEN + 1,)},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_it_is_not(self, change: dict[str, tuple[int, ...]], empty: bool):
        ours, theirs = MODELS["qwen2"]
        engine = self.emptied(theirs | change) if empty else theirs | change
        with pytest.raises(ModelError, match="another model"):
            check_same_model(ours, engine, model_type="qwen2", engine_kind="vllm 0.32.0")

    def test_a_layer_that_only_the_trainer_has(self):
        ours, theirs = MODELS["llama"]
        more = ours | {name.replace("layers.0", "layers.1"): shape for name, shape in HF_LAYER.items()}
        for engine in (theirs, self.emptied(theirs)):
            with pytest.raises(ModelError, match="another model"):
                check_same_model(more, engine, model_type="llama", engine_kind="vllm 0.32.0")

    def test_nothing_is_said_of_unknown_architectures(self):
        check_same_model(HF_ENDS, VLLM_LAYER, model_type="unheard_of", engine_kind="vllm 0.32.0")
        with pytest.raises(ModelError, match="another model"):
            check_same_model(HF_ENDS, HF_LAYER, model_type="unheard_of", engine_kind="embedded")
