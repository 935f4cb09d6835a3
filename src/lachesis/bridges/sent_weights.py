"""Weights that a policy sends to an engine, adapters merged into them or apart, with their names. No transport.

Names are transformers' own for full weights, or a checkpoint's (:func:`as_saved`): the two differ if a model stacks
tensors that its files hold one by one, such as a mixture's experts. An adapter's are peft's without
``base_model.model.`` and ``.default`` (``model.layers.0.self_attn.q_proj.lora_A.weight``). Functions that read an
adapter raise ModelError if the model has none, or one of a kind that engines cannot take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from lachesis.common.errors import ModelError
from lachesis.engines.embedded.adapters import is_adapted
from lachesis.engines.serving.backend import LoraSpec
from lachesis.transport.digest import digests, digests_of_each, served_lora_b
from lachesis.transport.float8 import SCALE, by_rows
from lachesis.transport.layout import ReceivedTensor
from lachesis.transport.shared_tensors import dtype_name

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_WRAPPER = "base_model.model."
_INNER = ".base_layer."

# A policy's ``whole``: yields each parameter in full, also if it is sharded over ranks. It takes many parameters at
# once, because all ranks have to take part.
Whole = Callable[[Sequence[Tensor]], Iterator[Tensor]]


def as_they_are(parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield parameters that are whole already."""
    return (parameter.detach() for parameter in parameters)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Adapter of ``parameter``, a weight of ``module``: it adds ``scaling * B @ A`` to the weight [out, in].

    ``a`` is [rank, in], ``b`` [out, rank]; both are the live parameters. ``transposed``: the layer
    stores its weight as [in, out]. If the parameter stacks ``experts`` weights [experts, out, in], each has its own A
    and B, as peft lays them out: ``a`` is [experts * rank, in], ``b`` [out, rank * experts]. ``stacked`` marks modules
    that are not linear layers: experts, and the router among them.
    """

    module: str
    a: nn.Parameter
    b: nn.Parameter
    scaling: float
    transposed: bool
    parameter: str
    stacked: bool = False
    experts: int = 1

    def delta(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``scaling * B @ A`` in float32 and in the layout of the layer's weight.

        The formula is eq. 3 of LoRA (Hu et al., arXiv 2106.09685). ``a`` and ``b`` are the pair's own, whole.
        """
        if self.experts == 1:
            delta = (b.float() * self.scaling) @ a.float()
        else:
            each_a = a.float().reshape(self.experts, -1, a.shape[-1])
            each_b = b.float().reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)
            delta = (each_b * self.scaling) @ each_a
        return delta.mT if self.transposed else delta

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the weight plus :meth:`delta`, added in float32 and rounded once."""
        return self.delta(a, b).add_(weight).to(weight.dtype)


@torch.no_grad()
def full_weights(
    model: nn.Module, *, whole: Whole = as_they_are, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights by Hugging Face's names, tied ones once; an adapter is merged in float32, rounded once.

    With ``names`` only these, in that order. Unchanged weights are the live parameters, merged and gathered ones are
    new, and few of those exist at a time if the caller keeps none.
    """
    merged, parts = _merged_pairs(model), weight_parts(model)
    chosen = [*parts] if names is None else names
    stream = whole([tensor for name in chosen for tensor in parts[name]])
    for name in chosen:
        tensor = next(stream)
        if name in merged:
            tensor = merged[name].merged(tensor, next(stream), next(stream))
        yield name, tensor


def weight_parts(model: nn.Module) -> dict[str, tuple[nn.Parameter, ...]]:
    """Return the parts of each tensor of :func:`full_weights`: a parameter, and A and B of its adapter, if any.

    Raises:
        ModelError: an adapter is on a head whose weight is that of the embeddings.
    """
    pairs, parameters = _merged_pairs(model), base_parameters(model)
    if tied := sorted(pairs.keys() - parameters.keys()):
        raise ModelError(
            f"the adapter changes {tied[0]}, which shares its weight with the embeddings (tie_word_embeddings): this "
            "bridge merges the adapter into the weight, which would change both",
            remedy="remove it from adapter.targets, or use bridge.kind lora_only or in_process",
        )
    return {
        name: (parameter, pairs[name].a, pairs[name].b) if name in pairs else (parameter,)
        for name, parameter in parameters.items()
    }


def _merged_pairs(model: nn.Module) -> dict[str, LoraPair]:
    return {pair.parameter: pair for pair in _all_pairs(model)} if is_adapted(model) else {}


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's parameters without its adapter, under Hugging Face's names, tied ones once."""
    return {own_name(name): parameter for name, parameter in model.named_parameters() if ".lora_" not in name}


def as_saved(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under transformers' names as the model's checkpoints store them: each expert separately.

    The conversions are transformers' own; those of tensors on the meta device give names and shapes alone.

    Raises:
        ModelError: the model makes one tensor of a checkpoint out of several parameters.
    """
    transformer: Any = model.get_base_model() if is_adapted(model) else model
    found = get_model_conversion_mapping(transformer, add_legacy=False)
    converters = [entry for entry in found if isinstance(entry, WeightConverter)]
    if not converters:
        yield from tensors
        return
    if any(len(entry.reverse_transform().source_patterns) > 1 for entry in converters):
        raise ModelError(
            f"a tensor in the checkpoints of {type(transformer).__name__} combines several of its parameters, and this "
            "bridge sends parameters one by one",
            remedy="use bridge.kind in_process, or an engine that holds the model as transformers does",
        )
    for name, tensor in tensors:
        yield from revert_weight_conversion(transformer, {name: tensor}).items()


def saved_shapes(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of :func:`as_saved` for the model's weights, without bytes.

    Raises as :func:`as_saved`.
    """
    empty = ((name, torch.empty_like(p, device="meta")) for name, p in base_parameters(model).items())
    return dict(as_saved(model, empty))


def own_name(name: str) -> str:
    """Return transformers' name of a parameter of a model that may have an adapter."""
    name = name.removeprefix(_WRAPPER)
    while _INNER in name:  # stacked parameters of one module are wrapped one around the other
        name = name.replace(_INNER, ".")
    return name


@torch.no_grad()
def lora_tensors(model: nn.Module, *, whole: Whole = as_they_are) -> dict[str, Tensor]:
    """Return the adapter's tensors A and B by name, live and unscaled, sorted by name."""
    live: dict[str, Tensor] = {}
    for pair in lora_pairs(model):
        live[f"{pair.module}.lora_A.weight"] = pair.a
        live[f"{pair.module}.lora_B.weight"] = pair.b
    names = sorted(live)
    return dict(zip(names, whole([live[name] for name in names]), strict=True))


def lora_pairs(model: nn.Module) -> list[LoraPair]:
    """Return the adapter, a pair for each adapted layer.

    Raises:
        ModelError: parameters other than linear layers are adapted too, such as experts.
    """
    pairs = _all_pairs(model)
    stacked = [pair.parameter for pair in pairs if pair.stacked]
    if stacked:
        raise ModelError(
            f"the adapter changes {len(stacked)} parameters that are not linear layers, such as {stacked[0]!r}, but "
            "inference engines take only adapters of linear layers",
            remedy="set adapter.targets to linear layers (q_proj, k_proj, v_proj, o_proj), or send the merged weights "
            "with bridge.kind broadcast",
        )
    return pairs


def _all_pairs(model: nn.Module) -> list[LoraPair]:
    """Return :func:`lora_pairs` together with those of experts and routers."""
    from peft.tuners.lora import LoraLayer  # there by now, as the model has an adapter

    adapter = _active_adapter(model)
    return [
        _pair(own_name(name), module, adapter)
        for name, module in cast(Iterable[tuple[str, nn.Module]], model.named_modules())
        if isinstance(module, LoraLayer) and adapter in {*module.lora_A, *module.lora_embedding_A}
    ]


def _pair(where: str, module: LoraLayer, adapter: str) -> LoraPair:
    from peft.tuners.lora.layer import ParamWrapper

    _check_plain(module, adapter, where)
    layer: Any = module  # peft's attributes have no types
    common: dict[str, Any] = {
        "a": layer.lora_A[adapter].weight,
        "b": layer.lora_B[adapter].weight,
        "scaling": float(layer.scaling[adapter]),
    }
    if not isinstance(module, ParamWrapper):
        transposed = bool(getattr(layer, "fan_in_fan_out", False))
        return LoraPair(module=where, transposed=transposed, parameter=f"{where}.weight", **common)
    while where.endswith(".base_layer"):
        where = where.removesuffix(".base_layer")
    experts = int(layer.num_experts)
    # Of several experts peft knows whether they are stored as [in, out]; one weight is [out, in].
    transposed = experts > 1 and not layer._did_swap_in_out_features
    parameter = f"{where}.{layer.parameter_name}"
    return LoraPair(module=where, transposed=transposed, parameter=parameter, experts=experts, stacked=True, **common)


def lora_spec(model: nn.Module) -> LoraSpec:
    """Return rank, alpha and targets, for the engine that is to apply the adapter.

    Raises:
        ModelError: ranks or scalings differ between layers.
    """
    pairs = lora_pairs(model)
    assert is_adapted(model)
    config: Any = model.peft_config[_active_adapter(model)]
    spec = LoraSpec(
        r=int(config.r),
        alpha=float(config.lora_alpha),
        target_modules=tuple(sorted({pair.module.rpartition(".")[2] for pair in pairs})),
        rslora=bool(config.use_rslora),
    )
    for pair in pairs:
        if pair.a.shape[0] != spec.r or abs(pair.scaling - spec.scaling) > 1e-9 * abs(spec.scaling):
            raise ModelError(
                f"the adapter of {pair.module} has rank {pair.a.shape[0]} and scaling {pair.scaling:g}, but the others "
                f"have {spec.r} and {spec.scaling:g}, and engines take one rank and one scaling",
                remedy="use an adapter without rank_pattern and alpha_pattern",
            )
    return spec


def tensor_list(tensors: Mapping[str, Tensor]) -> tuple[ReceivedTensor, ...]:
    """Return names, shapes and dtypes in order, for the receiver of the tensors."""
    return tuple(ReceivedTensor(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items())


def adapter_digests(model: nn.Module, *, dtype: torch.dtype, whole: Whole = as_they_are) -> dict[str, int]:
    """Return digests of the adapter as an engine of that dtype holds it: A rounded, B rounded and then scaled."""
    tensors = lora_tensors(model, whole=whole)
    held: dict[str, Tensor] = {}
    for pair in lora_pairs(model):
        a, b = f"{pair.module}.lora_A.weight", f"{pair.module}.lora_B.weight"
        held[a] = tensors[a].to(dtype)
        held[b] = served_lora_b(tensors[b], scaling=pair.scaling, dtype=dtype)
    return digests(held)


def full_digests(model: nn.Module, *, whole: Whole = as_they_are, quantized: Collection[str] = ()) -> dict[str, int]:
    """Return digests of :func:`full_weights` by name.

    Merged and gathered tensors are made and dropped one by one. Those of ``quantized`` are rounded to 8 bits first, and
    the name with ``_scale`` has the digest of their scales.
    """
    if whole is as_they_are and not is_adapted(model) and not quantized:
        return digests(dict(full_weights(model)))

    def held() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in full_weights(model, whole=whole):
            if name in quantized:
                yield from zip((name, name + SCALE), by_rows(tensor), strict=True)
            else:
                yield name, tensor

    return digests_of_each(held())


def text_config(model: PreTrainedModel) -> Any:
    """Return the configuration of the language model in a model; its class is the architecture's."""
    config: Any = model.config
    return config.get_text_config()


def _active_adapter(model: nn.Module) -> str:
    if not is_adapted(model):
        raise ModelError(f"{type(model).__name__} has no adapter", remedy="set adapter.kind to lora")
    active = model.active_adapters
    if len(active) != 1:
        raise ModelError(
            f"the model has {len(active)} active adapters ({', '.join(active)})", remedy="activate only one of them"
        )
    return active[0]


def _check_plain(module: LoraLayer, adapter: str, where: str) -> None:
    """Raise ModelError for an adapter other than plain B @ A on linear layers: engines would drop it silently."""
    extras = {
        "a variant such as DoRA": adapter in module.lora_variant,
        "with a bias": module.lora_bias.get(adapter, False),
        "of an embedding": adapter in module.lora_embedding_A,
        "of a convolution": adapter in module.lora_A and module.lora_A[adapter].weight.ndim != 2,
    }
    found = next((extra for extra, present in extras.items() if present), None)
    if found:
        raise ModelError(
            f"the adapter of {where} is {found}, which inference engines cannot take",
            remedy="use plain LoRA on linear layers, or full fine-tuning",
        )
