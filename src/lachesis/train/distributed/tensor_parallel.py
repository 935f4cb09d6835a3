"""Tensor parallelism by transformers' plan for the model: each layer's matrices cut over the ranks of a group.

A cut parameter is a DTensor over the ranks that share it, which FSDP shards further, checkpoints save in parts and
bridges gather. A layer computes with its part only (:mod:`lachesis.train.model.tensor`); attention, adapters and the
head see the same tensors as on one rank. Transformers' own hooks are not used: those of its norms sum a gradient's
accumulated value over ranks again after each micro-batch, and none supports an adapter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from transformers import PreTrainedModel

from lachesis.common.errors import ConfigError, ModelError
from lachesis.config.schema.mesh import Mesh, require_heads
from lachesis.train.distributed.cut import computing_with_parts, part_of, style_of
from lachesis.train.model.tensor import TensorGroup, scale_gradient

# Architectures whose layers were compared with those of one process, by model_type: a plan alone does not say what
# else in a layer counts on having all heads.
ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
_COLWISE, _ROWWISE, _OF_HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"
# Experts are dealt out whole instead (:mod:`~lachesis.train.distributed.expert_parallel`).
_OF_EXPERTS = "moe_tp_experts"
# Of a linear layer the dimension of its weight [out, in] that is cut.
_CUT_DIMENSION = {_COLWISE: 0, _ROWWISE: 1}


class TensorCut:
    """Division of a model's layers over ranks.

    Args:
        model: not sharded yet; it may have an adapter.
        mesh: of the tensor group.
        group: the same ranks.

    Raises:
        ModelError: its architecture is untested, or its plan cuts a layer that is not linear.
        ConfigError: its heads are not a multiple of the ranks.
    """

    def __init__(self, model: PreTrainedModel, *, mesh: DeviceMesh, group: TensorGroup) -> None:
        self._mesh = mesh
        self._group = group
        self._styles = dict(_planned(model))
        config: Any = model.config.get_text_config()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        require_heads(Mesh(tensor=group.size), heads=heads, kv_heads=kv_heads)
        self._names = {module: name for name, module in model.named_modules()}
        self._entrances = _entrances(self._names[m] for m, style in self._styles.items() if style == _COLWISE)
        self._partial: list[tuple[nn.Module, str]] = []
        self._share_head(model)

    @property
    def partial(self) -> set[int]:
        """Return the ids of parameters that are equal on all ranks and whose gradient is a sum over them."""
        return {id(getattr(module, name)) for module, name in self._partial}

    def apply(self, layer: nn.Module) -> None:
        """Cut the parameters of a layer that the plan names, in place.

        Raises:
            ConfigError: a dimension is not a multiple of the ranks.
        """
        for module in [*layer.modules()]:
            style = self._styles.get(module)
            if style == _OF_HEADS:
                self._partial += [(module, name) for name, _ in module.named_parameters(recurse=False)]
            elif style is not None:
                for part, cut in _linear_parts(module, style):
                    self._cut(part, cut, name=self._names[module])
                self._compute_in_parts(module, style)

    def _cut(self, linear: nn.Module, dimension: int | None, *, name: str) -> None:
        """Keep this rank's part of a layer's weight; with ``None`` all of it, and a part of its gradient's sum."""
        parameters = dict(linear.named_parameters(recurse=False))
        for key, parameter in parameters.items():
            if dimension is None or dimension >= parameter.ndim:
                self._partial.append((linear, key))
            else:
                self._require_divisible(parameter, dimension, name=f"{name}.{key}")
                setattr(linear, key, part_of(parameter, dimension, rank=self._group.rank, mesh=self._mesh))
        _compute_with_local(linear, adds_bias=dimension != 1 or self._group.rank == 0)

    def _require_divisible(self, parameter: Parameter, dimension: int, *, name: str) -> None:
        size, ranks = parameter.shape[dimension], self._group.size
        if size % ranks:
            raise ConfigError(
                f"distributed.tensor_parallel_size is {ranks}, and {name} has {size} "
                f"{'columns' if dimension else 'rows'}: each device needs a whole number",
                remedy=f"choose a divisor of {size}, or leave it out",
            )

    def _compute_in_parts(self, module: nn.Module, style: str) -> None:
        forward: Any = module.forward
        if style == _ROWWISE:
            module.forward = lambda states, *args, **options: self._group.leave(forward(states, *args, **options))
            return
        entrance = self._entrances[_parent(self._names[module])]
        module.forward = lambda states, *args, **options: forward(entrance.enter(states, self._group), *args, **options)

    def _share_head(self, model: PreTrainedModel) -> None:
        """Give each rank its share of the predictions, and so of the sum of the head's weight gradient."""
        head: Any = model.get_output_embeddings()
        embeddings: Any = model.get_input_embeddings()
        if head is None:
            return
        self._partial += [(head, name) for name, _ in head.named_parameters(recurse=False)]
        if head.weight is embeddings.weight:
            # The gradient that comes by way of the embeddings is whole on each rank.
            share = 1 / self._group.size

            def scale(module: nn.Module, given: Any, output: Tensor) -> Tensor:
                return scale_gradient(output, share)

            embeddings.register_forward_hook(scale)


class _Entrance:
    """Point where the same states enter several matrices, so that their gradients are summed once."""

    def __init__(self, times: int) -> None:
        self._times = self._left = times
        self._given: Tensor | None = None
        self._entered: Tensor | None = None

    def enter(self, states: Tensor, group: TensorGroup) -> Tensor:
        if states is not self._given or self._entered is None:
            self._given, self._entered, self._left = states, group.enter(states), self._times
        entered = self._entered
        self._left -= 1
        if self._left == 0:  # nothing is kept longer than it is needed
            self._given = self._entered = None
        return entered


def _entrances(colwise: Iterator[str]) -> dict[str, _Entrance]:
    return {parent: _Entrance(number) for parent, number in Counter(map(_parent, colwise)).items()}


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _planned(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules of a model's layers that are cut or see only some heads, each with its style."""
    config: Any = model.config.get_text_config()
    if config.model_type not in ARCHITECTURES:
        raise ModelError(
            f"the layers of {type(model).__name__} have not been tried in parts",
            remedy=f"leave distributed.tensor_parallel_size out; it is for {', '.join(sorted(ARCHITECTURES))}",
        )
    plan: Mapping[str, str] = model.tp_plan
    whole = (model.get_output_embeddings(), model.get_input_embeddings())
    for name, module in model.named_modules():
        style = style_of(plan, name)
        if style not in (None, _OF_EXPERTS) and module not in whole:
            if style not in (_COLWISE, _ROWWISE, _OF_HEADS):
                raise ModelError(
                    f"transformers has {name} cut as {style!r}, which is not built",
                    remedy="leave distributed.tensor_parallel_size out",
                )
            yield module, style


def _linear_parts(module: nn.Module, style: str) -> Iterator[tuple[nn.Module, int | None]]:
    """Yield the linear layers of a module, each with the dimension in which it is cut (None: not at all).

    Under an adapter B @ A is cut as the weight is: B by its outputs, or A by its inputs.
    """
    base: Any = getattr(module, "base_layer", module)
    if not isinstance(base, nn.Linear):
        raise ModelError(
            f"a {type(base).__name__} is to be cut over devices, and only linear layers can be",
            remedy="leave distributed.tensor_parallel_size out",
        )
    yield base, _CUT_DIMENSION[style]
    if base is not module:
        yield from ((a, 1 if style == _ROWWISE else None) for a in _adapters(module, "lora_A"))
        yield from ((b, 0 if style == _COLWISE else None) for b in _adapters(module, "lora_B"))


def _adapters(module: nn.Module, kind: str) -> Iterator[nn.Module]:
    found: Any = getattr(module, kind)
    return iter(found.values())


def _compute_with_local(linear: nn.Module, *, adds_bias: bool) -> None:
    """Make a layer compute with this rank's part of its parameters; a bias after a sum is added on one rank."""
    forward: Any = linear.forward

    def compute(*args: Any, **options: Any) -> Any:
        with computing_with_parts(linear, adds_bias=adds_bias):
            return forward(*args, **options)

    linear.forward = compute
