"""LoRA adapters: the linear layers that get one, and the start from a saved one."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lachesis.common.chatter import without_chatter
from lachesis.common.errors import ModelError, first_line
from lachesis.common.hub import described_path
from lachesis.config.schema import LoraAdapterConfig
from lachesis.train.distributed.strategy import decoder_layers, text_part
from lachesis.train.model.experts import routers

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)

# Features of peft's adapters beyond A and B on linear layers, by their names in adapter_config.json.
_MORE_THAN_LORA = (
    "bias", "modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters", "trainable_token_indices",
    "use_dora", "use_rslora", "use_qalora", "megatron_config",
)  # fmt: skip
# Layers of each model type whose weights are read without a call of the layer, which an adapter would change.
_READ_DIRECTLY = {
    **dict.fromkeys(("mamba", "falcon_mamba"), ("out_proj", "x_proj", "dt_proj")),
    **dict.fromkeys(("mamba2", "falcon_h1", "nemotron_h"), ("out_proj",)),
    "jamba": ("dt_proj",), "gemma3n_text": ("correction_coefs",),
}  # fmt: skip


def add_lora(transformer: PreTrainedModel, adapter: LoraAdapterConfig) -> PeftModel:
    """Wrap the linear layers that ``adapter.targets`` names.

    Raises ModelError if they match nothing, or cannot be adapted.
    """
    with without_chatter():
        from peft import LoraConfig, get_peft_model

    _refuse_tied_embeddings(transformer, adapter)
    linear = sorted(_adaptable(transformer, decoder_layers(transformer)))
    lora = LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]
        lora_dropout=adapter.dropout,
        **lora_targets(transformer, adapter),
        task_type="CAUSAL_LM",
    )
    try:
        # Adapters in the base's dtype: peft's float32 would run their matrix products in float32 too, and the
        # optimizer keeps float32 masters of 16-bit weights anyway.
        model = get_peft_model(transformer, lora, autocast_adapter_dtype=False)
    except ValueError as error:
        reason, name = first_line(error), type(transformer).__name__
        nothing = "not found in the base model" in reason
        raise ModelError(
            f"adapter.targets {adapter.targets!r} match nothing in {name}"
            if nothing
            else f"peft cannot adapt adapter.targets {adapter.targets!r} of {name}: {reason}",
            remedy=f"name some of its linear layers ({', '.join(linear)}), or all-linear",
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad:  # on quantized weights peft creates adapters in float32
            parameter.data = parameter.data.to(transformer.dtype)
    if transformer.is_gradient_checkpointing:
        transformer.enable_input_require_grads()
    if adapter.path is not None:
        start_from(model, adapter, adapter.path)
    return model


def start_from(model: PeftModel, adapter: LoraAdapterConfig, directory: str) -> None:
    """Copy the weights of a saved adapter into the one that is trained.

    Raises:
        ModelError: there is no such adapter, or its kind, sizes or layers differ.
    """
    from peft import PeftConfig, load_peft_weights, set_peft_model_state_dict

    try:
        saved: Any = PeftConfig.from_pretrained(directory)
        weights = load_peft_weights(directory, device="cpu")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"no adapter could be loaded from {described_path(directory)}: {first_line(error)}",
            remedy="set adapter.path to a directory with adapter_config.json and adapter_model.safetensors",
        ) from error
    extra = sorted(name for name in _MORE_THAN_LORA if getattr(saved, name, None) not in (None, False, "none", {}, []))
    if str(saved.peft_type.value) != "LORA" or extra:
        raise ModelError(
            f"the adapter in {directory} is more than plain LoRA ({', '.join(extra) or saved.peft_type.value})",
            remedy="merge it into its model, and set model.path to the merged model",
        )
    targets = saved.target_modules if isinstance(saved.target_modules, str) else sorted(saved.target_modules or ())
    remedy = f"set adapter.r: {saved.r}, adapter.alpha: {saved.lora_alpha:g} and adapter.targets: {targets}"
    own = sum("lora_" in name for name, _ in model.named_parameters())
    same = (saved.r, saved.lora_alpha) == (adapter.r, adapter.alpha) and own == len(weights)
    if not same or set_peft_model_state_dict(model, weights).unexpected_keys:
        raise ModelError(
            f"the adapter in {directory} has rank {saved.r}, alpha {saved.lora_alpha:g} and {len(weights)} tensors, "
            f"but the configuration asks for rank {adapter.r}, alpha {adapter.alpha:g} and {own} tensors",
            remedy=remedy + (f", and adapter.layers: {saved.layers_to_transform}" if saved.layers_to_transform else ""),
        )


def lora_targets(model: PreTrainedModel, adapter: LoraAdapterConfig) -> dict[str, Any]:
    """Return the adapter's target modules, as peft's LoraConfig takes them.

    Raises:
        ModelError: the model has no such layer.
    """
    if adapter.targets != "all-linear":
        chosen = {} if adapter.layers is None else {"layers_to_transform": adapter.layers}
        if adapter.layers is not None:
            named_layers(model, adapter.layers, key="adapter.layers")
        return {"target_modules": adapter.targets, **chosen}
    left_out, of_text_alone = _refused_by_peft(model), text_part(model) is model
    if adapter.layers is None and not left_out and not has_experts(model) and of_text_alone:
        return {"target_modules": "all-linear"}
    # peft does not take all-linear together with layers, and counts a mixture's router and experts as linear layers,
    # whose adapters no engine takes: those have to be asked for by name.
    layers = (
        decoder_layers(model) if adapter.layers is None else named_layers(model, adapter.layers, key="adapter.layers")
    )
    names = sorted(_adaptable(model, layers))
    if left_out:
        logger.warning(
            "adapter.targets all-linear skips %s of %s, because its kernels ignore an adapter on these weights; it "
            "adapts %s",
            ", ".join(sorted(left_out)),
            type(model).__name__,
            ", ".join(names),
        )
    if of_text_alone:
        return {"target_modules": names, "layers_to_transform": adapter.layers}
    inside = {module for layer in layers for module in layer.modules()}
    linear = [name for name, module in model.named_modules() if module in inside and isinstance(module, nn.Linear)]
    return {"target_modules": [name for name in linear if name.rpartition(".")[2] in names]}


def _adaptable(model: PreTrainedModel, layers: Sequence[nn.Module]) -> set[str]:
    """Return the last names of the linear layers in ``layers`` that can have an adapter, so not routers."""
    of_routers = {inner for _, router in routers(model) for inner in router.modules()}
    found = {
        name.rpartition(".")[2]
        for layer in layers
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module not in of_routers and not _returns_more(module)
    }
    return found - _refused_by_peft(model)


def _returns_more(module: nn.Module) -> bool:
    """Return True for a linear layer of a model's own file that is a router, such as Llama 4's."""
    return type(module).__module__.startswith("transformers.models.") and "forward" in vars(type(module))


def _refused_by_peft(model: PreTrainedModel) -> frozenset[str]:
    """Return the layers of Mamba models and Gemma 3n whose weights are read directly, bypassing an adapter."""
    kind = getattr(model.config.get_text_config(), "model_type", "")
    return frozenset(_READ_DIRECTLY.get(kind, ()))


def _refuse_tied_embeddings(model: PreTrainedModel, adapter: LoraAdapterConfig) -> None:
    """Raise ModelError for an adapter on embeddings that share the head's weight."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embeddings.weight or adapter.targets == "all-linear":
        return
    names = [name for name, module in model.named_modules() if module is embeddings]
    targets = adapter.targets
    for name in names:
        named = (
            re.fullmatch(targets, name)
            if isinstance(targets, str)
            else any(name == target or name.endswith(f".{target}") for target in targets)
        )
        if named:
            raise ModelError(
                f"adapter.targets names {name}, which shares its weight with the head (tie_word_embeddings): the "
                "adapter would change only one of them, but a merged model has one weight for both",
                remedy="remove it from adapter.targets, or first save the model untied (tie_word_embeddings: false)",
            )


def has_experts(model: PreTrainedModel) -> bool:
    """Return True if the model is a mixture of experts, whose weights transformers stacks in one parameter a layer."""
    return any(re.search(r"\.experts\.\w+$", name) for name, _ in model.named_parameters())


def named_layers(model: PreTrainedModel, layers: Sequence[int], *, key: str) -> list[nn.Module]:
    """Return the decoder layers ``layers``, counted from 0, which the key ``key`` names. Raises ModelError."""
    found = decoder_layers(model)
    missing = [index for index in layers if index >= len(found)]
    if missing:
        raise ModelError(
            f"{key} names layer {missing[0]}, but {type(model).__name__} has {len(found)} decoder layers",
            remedy=f"choose from 0 to {len(found) - 1}" if found else f"remove {key}",
        )
    return [found[index] for index in layers]
