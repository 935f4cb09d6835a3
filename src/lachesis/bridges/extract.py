"""Which tensors a policy sends to an engine, under which names. No transport.

Names are those of a checkpoint: Hugging Face's for full weights, peft's without ``base_model.model.`` and
``.default`` for an adapter (``model.layers.0.self_attn.q_proj.lora_A.weight``). Whatever reads an adapter raises
ModelError where the model has none, or one of a kind that engines cannot take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from lachesis.common.errors import ModelError
from lachesis.engines.serving.served import LoraSpec
from lachesis.transport.digest import digests, served_lora_b
from lachesis.transport.float8 import SCALE, by_rows
from lachesis.transport.layout import ReceivedTensor
from lachesis.transport.shared_tensors import dtype_name

_WRAPPER = "base_model.model."

# All of each parameter, one after the other, also where they are sharded over ranks: a policy's ``whole``. It is asked
# for many at once, since ranks have to meet for it.
Whole = Callable[[Sequence[Tensor]], Iterator[Tensor]]


def as_they_are(parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """The parameters, where they are whole."""
    return (parameter.detach() for parameter in parameters)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The adapter of one linear layer ``module``: it adds ``scaling * B @ A`` to the weight [out, in].

    ``a`` is [rank, in], ``b`` [out, rank]; both are the live parameters. ``transposed`` says that the layer
    stores its weight as [in, out].
    """

    module: str
    a: nn.Parameter
    b: nn.Parameter
    scaling: float
    transposed: bool

    def delta(self, a: Tensor, b: Tensor) -> Tensor:
        """``scaling * B @ A`` in float32 and in the layout of the layer's weight (Hu et al. 2021, LoRA, eq. 3).

        ``a`` and ``b`` are the pair's own, whole.
        """
        delta = (b.float() @ a.float()) * self.scaling
        return delta.T if self.transposed else delta


@torch.no_grad()
def full_weights(model: nn.Module, *, whole: Whole = as_they_are) -> Iterator[tuple[str, Tensor]]:
    """All weights under Hugging Face's names, tied ones once; an adapter is merged in float32 and rounded once.

    Unchanged weights are the live parameters, merged and gathered ones are new, and few of those exist at a time if the
    caller keeps none.
    """
    merged = {f"{pair.module}.weight": pair for pair in lora_pairs(model)} if is_adapted(model) else {}
    base = base_parameters(model)
    added = {name: (merged[name].a, merged[name].b) if name in merged else () for name in base}
    stream = whole([part for name, parameter in base.items() for part in (parameter, *added[name])])
    for name in base:
        tensor = next(stream)
        if name in merged:
            delta = merged[name].delta(next(stream), next(stream))
            tensor = (tensor.float() + delta).to(tensor.dtype)
        yield name, tensor


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the model without its adapter, under Hugging Face's names, tied ones once."""
    return {
        name.removeprefix(_WRAPPER).replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }


@torch.no_grad()
def lora_tensors(model: nn.Module, *, whole: Whole = as_they_are) -> dict[str, Tensor]:
    """The adapter's tensors A and B by name, live and unscaled, sorted by name."""
    live: dict[str, Tensor] = {}
    for pair in lora_pairs(model):
        live[f"{pair.module}.lora_A.weight"] = pair.a
        live[f"{pair.module}.lora_B.weight"] = pair.b
    names = sorted(live)
    return dict(zip(names, whole([live[name] for name in names]), strict=True))


def lora_pairs(model: nn.Module) -> list[LoraPair]:
    """The adapter, a pair for each adapted layer."""
    adapter = _active_adapter(model)
    pairs: list[LoraPair] = []
    for name, module in cast(Iterable[tuple[str, nn.Module]], model.named_modules()):
        if not isinstance(module, LoraLayer) or adapter not in {*module.lora_A, *module.lora_embedding_A}:
            continue
        where = name.removeprefix(_WRAPPER)
        _check_plain(module, adapter, where)
        layer: Any = module  # peft's attributes have no types
        pairs.append(
            LoraPair(
                module=where,
                a=layer.lora_A[adapter].weight,
                b=layer.lora_B[adapter].weight,
                scaling=float(layer.scaling[adapter]),
                transposed=bool(getattr(layer, "fan_in_fan_out", False)),
            )
        )
    return pairs


def lora_spec(model: nn.Module, *, name: str = "policy") -> LoraSpec:
    """Rank, alpha and targets, for the engine that is to apply the adapter.

    Raises:
        ModelError: layers have ranks or scalings of their own.
    """
    pairs = lora_pairs(model)
    assert isinstance(model, PeftModel)
    config: Any = model.peft_config[_active_adapter(model)]
    spec = LoraSpec(
        r=int(config.r),
        alpha=float(config.lora_alpha),
        target_modules=tuple(sorted({pair.module.rpartition(".")[2] for pair in pairs})),
        rslora=bool(config.use_rslora),
        name=name,
    )
    for pair in pairs:
        if pair.a.shape[0] != spec.r or abs(pair.scaling - spec.scaling) > 1e-9 * abs(spec.scaling):
            raise ModelError(
                f"the adapter of {pair.module} has rank {pair.a.shape[0]} and scaling {pair.scaling:g}, the others "
                f"{spec.r} and {spec.scaling:g}: engines take one of each",
                remedy="use an adapter without rank_pattern and alpha_pattern",
            )
    return spec


def tensor_list(tensors: Mapping[str, Tensor]) -> tuple[ReceivedTensor, ...]:
    """Names, shapes and dtypes in order, as the receiver of the tensors is told them."""
    return tuple(ReceivedTensor(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items())


def adapter_digests(model: nn.Module, *, dtype: torch.dtype, whole: Whole = as_they_are) -> dict[str, int]:
    """Digests of the adapter as an engine of that dtype holds it: A rounded, B rounded and then scaled."""
    tensors = lora_tensors(model, whole=whole)
    held: dict[str, Tensor] = {}
    for pair in lora_pairs(model):
        a, b = f"{pair.module}.lora_A.weight", f"{pair.module}.lora_B.weight"
        held[a] = tensors[a].to(dtype)
        held[b] = served_lora_b(tensors[b], scaling=pair.scaling, dtype=dtype)
    return digests(held)


def full_digests(model: nn.Module, *, whole: Whole = as_they_are, quantized: Collection[str] = ()) -> dict[str, int]:
    """Digests of :func:`full_weights` by the same names. Merged and gathered ones are made and dropped one by one.

    Those of ``quantized`` are rounded to 8 bits first, and the name with ``_scale`` has the digest of their scales.
    """
    if whole is as_they_are and not is_adapted(model) and not quantized:
        return digests(dict(full_weights(model)))
    found: dict[str, int] = {}
    for name, tensor in full_weights(model, whole=whole):
        held = dict(zip((name, name + SCALE), by_rows(tensor), strict=True)) if name in quantized else {name: tensor}
        found |= digests(held)
    return found


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model in a model; its class is the architecture's."""
    config: Any = model.config
    return config.get_text_config()


def is_adapted(model: nn.Module) -> bool:
    """Whether the model wears a peft adapter."""
    return isinstance(model, PeftModel)


def _active_adapter(model: nn.Module) -> str:
    if not isinstance(model, PeftModel):
        raise ModelError(f"{type(model).__name__} has no adapter", remedy="set adapter.kind to lora")
    active = model.active_adapters
    if len(active) != 1:
        raise ModelError(
            f"the model has {len(active)} active adapters ({', '.join(active)})", remedy="activate one of them"
        )
    return active[0]


def _check_plain(module: LoraLayer, adapter: str, where: str) -> None:
    """Engines know B @ A on linear layers; anything else would be dropped in silence."""
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
