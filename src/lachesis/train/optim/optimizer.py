"""Optimizer step: clip the gradients, update the weights precisely, advance the learning-rate schedule."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lachesis.common.errors import CheckpointError, ConfigError, DependencyError, ModelError, TrainingError
from lachesis.config.schema import OptimizerConfig
from lachesis.train.optim.custom import custom_optimizer_factory
from lachesis.train.optim.weight_update import InPlace, MasterCopies, StochasticRounding, WeightUpdate, buckets

logger = logging.getLogger("lachesis")

Named = tuple[str, Parameter]
Precision = Literal["in_place", "fp32_master", "stochastic_rounding"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Parameters with their weight update, and the optimizer over their slots."""

    names: tuple[str, ...]
    update: WeightUpdate
    optimizer: Optimizer

    def finish(self) -> None:
        self.update.ready()
        self.optimizer.step()
        self.update.commit()


class Start(NamedTuple):
    """Initial steps at a separate constant rate, before the schedule begins."""

    steps: int = 0
    rate: float = 0.0


class PolicyOptimizer:
    """Optimizer over all trained parameters. Made by :func:`build_optimizer`.

    Weights keep their storage, so that its readers (an engine in single-copy mode) see the update.
    """

    def __init__(
        self,
        parts: Sequence[_Part],
        *,
        named_parameters: Sequence[Named],
        config: OptimizerConfig,
        learning_rate: float,
        total_steps: int,
        noise: torch.Generator | None,
    ) -> None:
        self._parts = list(parts)
        self._named_parameters = list(named_parameters)
        self._config = config
        self._peak = learning_rate
        self._total_steps = total_steps
        self._noise = noise
        self._step = 0
        self._skipped = 0
        # Set by the code that knows about an earlier stage.
        self.start = Start()

    @property
    def skipped(self) -> bool:
        """Return True if the last step was skipped because its gradient was not finite."""
        return self._skipped > 0

    @property
    def steps_taken(self) -> int:
        """Return the optimizer steps since the start of the run, resumed ones included."""
        return self._step

    @property
    def learning_rate(self) -> float:
        """Return the rate that the next :meth:`step` will use."""
        config, total_steps, step = self._config, self._total_steps, self._step - self.start.steps
        if step < 0:
            return self.start.rate
        factor = schedule_factor(
            step,
            schedule=config.schedule,
            total_steps=total_steps,
            warmup_steps=warmup_length(steps=config.warmup_steps, ratio=config.warmup_ratio, total_steps=total_steps),
            min_lr_ratio=config.min_lr_ratio,
            phases=Phases(stable=config.stable_steps, decay=config.decay_steps, shape=config.decay),
        )
        return self._peak * factor

    @torch.no_grad()
    def step(self) -> float:
        """Clip the gradients to ``max_grad_norm``, update the weights, advance the schedule.

        If the norm is not finite, weights and states stay, and only the schedule advances; that may happen
        ``max_skipped_steps`` times in a row. Parameters without a gradient stay unchanged; if none has one, only the
        schedule advances. The gradients' values are undefined afterwards: call :meth:`zero_grad`.

        Returns:
            The L2 norm of all gradients together, before clipping (0 if there are none).

        Raises:
            TrainingError: the norm was not finite too many times in a row. Weights, states and schedule are as before.
        """
        gradients = [p.grad for _, p in self._named_parameters if p.grad is not None]
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            error = self._non_finite(norm)
            if self._skipped == self._config.max_skipped_steps:
                raise error
            self._skipped += 1
            logger.warning("%s; the run continues (%d skipped in a row)", error.message, self._skipped)
            self._step += 1
            return norm
        self._skipped = 0
        if gradients:
            self._set_rate(self.learning_rate)
            self._update(clip_coefficient(norm, self._config.max_grad_norm))
        self._step += 1
        return norm

    def zero_grad(self) -> None:
        """Drop the gradients of all trained parameters."""
        for _, parameter in self._named_parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for an exact resume, loadable with ``torch.load(weights_only=True)``.

        Tensors are references to the live state, not copies: save them before the next step.
        """
        return {
            **self._signature(),
            "step": self._step,
            "skipped": self._skipped,
            "noise": self._noise.get_state() if self._noise else None,
            "parts": [
                {"optimizer": part.optimizer.state_dict(), "update": part.update.state_dict()} for part in self._parts
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; with float32 masters, this also sets the weights.

        Raises:
            CheckpointError: the state is of another kind of optimizer or of other parameters.
        """
        self._require_fitting(state)
        for part, saved in zip(self._parts, state["parts"], strict=True):
            _load_exactly(part.optimizer, saved["optimizer"])
            part.update.load_state_dict(saved["update"])
        if self._noise is not None:
            self._noise.set_state(state["noise"])
        self._step = state["step"]
        self._skipped = state["skipped"]

    def _require_fitting(self, state: Mapping[str, Any]) -> None:
        for key, expected in self._signature().items():
            if state.get(key) != expected:
                raise CheckpointError(
                    f"the checkpoint's optimizer does not fit: its {key} is {_short(state.get(key))}, "
                    f"but this run's is {_short(expected)}",
                    remedy="resume with the optimizer, adapter and model settings of the checkpoint",
                )

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        return global_norm(gradients)

    def _update(self, gradient_scale: float) -> None:
        # One bucket's gradients travel while the bucket before it is updated.
        staged: _Part | None = None
        for part in self._parts:
            part.update.stage(gradient_scale)
            if staged is not None:
                staged.finish()
            staged = part
        if staged is not None:
            staged.finish()

    def _set_rate(self, rate: float) -> None:
        for part in self._parts:
            for group in part.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):  # torchao compiles the update with the rate as an input
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _signature(self) -> dict[str, Any]:
        """Return the properties that a fitting state must share."""
        first = type(self._parts[0].optimizer)
        own = self._config.function is not None  # its module is named after its content, which may change
        return {
            "kind": "custom" if own else self._config.kind,
            "implementation": first.__name__ if own else f"{first.__module__.split('.')[0]}.{first.__name__}",
            "noise_device": self._noise.device.type if self._noise else None,
            "weight_update": [type(part.update).__name__ for part in self._parts],
            "parameters": [list(part.names) for part in self._parts],
        }

    def _non_finite(self, norm: float) -> TrainingError:
        broken = [
            name for name, p in self._named_parameters if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        ]
        where = f"{broken[0]} and {len(broken) - 1} more" if len(broken) > 1 else "".join(broken) or "their sum"
        return TrainingError(
            f"the gradient norm is {norm} at optimizer step {self._step + 1}, from {where}; the step was not applied",
            remedy="lower optimizer.learning_rate, check the rewards for extreme values, or use "
            "model.dtype float32 or bfloat16",
        )


def build_optimizer(
    named_parameters: Iterable[Named],
    config: OptimizerConfig,
    *,
    learning_rate: float,
    total_steps: int,
    seed: int = 0,
    make_policy_optimizer: Callable[..., PolicyOptimizer] = PolicyOptimizer,
    sizes: Mapping[str, int] | None = None,
) -> PolicyOptimizer:
    """Make the optimizer over the parameters that require gradients. They must hold their weights already.

    ``config.weight_update`` says how 16-bit weights take small updates: see
    :mod:`lachesis.train.optim.weight_update`. Weight decay is not applied to tensors of fewer than two dimensions
    (biases, norms).

    Args:
        learning_rate: the peak rate.
        total_steps: optimizer steps after the start, if there is one; where ``linear`` and ``cosine`` end.
        seed: of the noise of stochastic rounding.
        make_policy_optimizer: called with the arguments of :class:`PolicyOptimizer`.
        sizes: elements of each whole parameter by name, if the given ones are parts, so that the grouping in updates
            and checkpoints does not depend on the cut.

    Raises:
        ModelError: nothing to train.
        ConfigError: stochastic rounding of float16 weights.
        DependencyError: the kind needs a package that is not installed.
    """
    trained = _trained(named_parameters)
    device = trained[0][1].device
    make = partial(_optimizer_factory, device=device, learning_rate=learning_rate)
    noise, on_cpu = torch.Generator(device).manual_seed(seed), config.kind == "adamw_cpu" and config.function is None
    slots_on = torch.device("cpu") if on_cpu and device.type != "cpu" else None
    parts = []
    for kind, family in _families(trained, config).items():
        factory = make(config.model_copy(update={"kind": kind}))
        for members, precision in _partition(family, config, offload=slots_on is not None, sizes=sizes):
            names, parameters = zip(*members, strict=True)
            update = _weight_update(parameters, precision, noise=noise, slots_on=slots_on)
            groups = _decay_groups(parameters, update.slots, weight_decay=config.weight_decay)
            parts.append(_Part(names, update, factory(groups)))
    return make_policy_optimizer(
        parts,
        named_parameters=trained,
        config=config,
        learning_rate=learning_rate,
        total_steps=total_steps,
        noise=noise if any(isinstance(part.update, StochasticRounding) for part in parts) else None,
    )


def _families(trained: Sequence[Named], config: OptimizerConfig) -> dict[str, list[Named]]:
    """Return the parameters by the kind of their optimizer; only ``muon`` has two."""
    if config.kind != "muon" or config.function is not None:
        return {config.kind: list(trained)}
    matrices = [pair for pair in trained if pair[1].ndim == 2 and not _VOCABULARY.search(pair[0])]
    names = {name for name, _ in matrices}
    rest = [pair for pair in trained if pair[0] not in names]
    return {kind: family for kind, family in (("muon", matrices), ("adamw", rest)) if family}


# Names of embeddings and LM heads, in which a row belongs to a single token.
_VOCABULARY = re.compile(r"embed|lm_head|\bw[tp]e\b")


def _trained(named_parameters: Iterable[Named]) -> list[Named]:
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    if not trained:
        raise ModelError("no parameter of the model requires a gradient", remedy="add an adapter or unfreeze the model")
    return trained


def _weight_update(
    parameters: Sequence[Parameter], precision: Precision, *, noise: torch.Generator, slots_on: torch.device | None
) -> WeightUpdate:
    """Return the weight update of ``parameters``; its slots lie on ``slots_on``, or beside them if unset."""
    if precision == "stochastic_rounding":
        return StochasticRounding(parameters, generator=noise, device=slots_on)
    if precision == "fp32_master" or slots_on is not None:
        dtype = torch.float32 if precision == "fp32_master" else None
        return MasterCopies(parameters, dtype=dtype, device=slots_on)
    return InPlace(parameters)


def global_norm(gradients: Sequence[Tensor]) -> float:
    """Return the L2 norm of all tensors together, accumulated in at least float32; 0 for none."""
    if not gradients:
        return 0.0
    widest = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    norms = torch._foreach_norm(list(gradients), 2, dtype=widest)  # pyright: ignore[reportPrivateImportUsage]  # it is there
    return torch.stack([norm.to(norms[0].device) for norm in norms]).norm().item()


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor for gradients of this norm, equal to that of ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def _partition(
    trained: Sequence[Named], config: OptimizerConfig, *, offload: bool, sizes: Mapping[str, int] | None
) -> list[tuple[list[Named], Precision]]:
    """Group parameters that are updated together.

    Only slots that cost memory during the step come in buckets.
    """
    by_precision: dict[Precision, list[Named]] = {}
    for name, parameter in trained:
        by_precision.setdefault(_precision(name, parameter, config), []).append((name, parameter))
    result: list[tuple[list[Named], Precision]] = []
    for precision, members in by_precision.items():
        whole = precision == "in_place" and not offload
        result.extend((run, precision) for run in ([members] if whole else buckets(members, sizes=sizes)))
    return result


def _precision(name: str, parameter: Parameter, config: OptimizerConfig) -> Precision:
    if parameter.dtype not in (torch.bfloat16, torch.float16) or config.weight_update == "plain":
        return "in_place"
    if config.weight_update == "stochastic_rounding":
        if parameter.dtype == torch.float16:
            raise ConfigError(
                f"optimizer.weight_update is stochastic_rounding, which needs bfloat16, but {name} is float16",
                remedy="set optimizer.weight_update to fp32_master, or model.dtype to bfloat16",
            )
        return "stochastic_rounding"
    return "fp32_master"


def _decay_groups(
    parameters: Sequence[Parameter], slots: Sequence[Parameter], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Return groups in which matrices decay, and biases and norms (fewer than two dimensions) do not."""
    pairs = list(zip(parameters, slots, strict=True))
    matrices = [slot for p, slot in pairs if p.ndim >= 2]
    vectors = [slot for p, slot in pairs if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _optimizer_factory(
    config: OptimizerConfig, *, device: torch.device, learning_rate: float
) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """Return the library's class with the configuration's hyperparameters, still without parameters.

    ``config.kind`` chooses the library's class, with states in float32 for all but plain 16-bit updates:

    - ``adamw``: torch's AdamW, fused where the device has it. 8 bytes of state a parameter.
    - ``adamw_8bit``: bitsandbytes' AdamW8bit, else torchao's. 2 bytes a parameter.
    - ``adamw_cpu``: torch's AdamW on the CPU over float32 copies of the parameters there. A GPU then holds
      weights and gradients only, and the CPU 16 bytes a parameter, gradients included. (torchao's
      CPUOffloadOptimizer takes gradients during backward, before they can be clipped.) Where the parameters
      are on the CPU already, this is ``adamw``.
    - ``adafactor``: transformers' Adafactor with this schedule's rate (no relative steps, scaling by
      parameter as ``scale_parameter`` says, no first moment; ``betas`` and ``eps`` do not apply). Rows and
      columns of state only.
    - ``muon``: torch's Muon for matrices (momentum 0.95, steps of AdamW's size by 0.2·√max(rows, columns); Keller
      Jordan's Muon as scaled in arXiv 2502.16982), and AdamW for embeddings, the LM head, stacked experts and vectors.
      4 bytes of state a parameter of a matrix.

    ``config.function`` replaces all of them: :mod:`lachesis.train.optim.custom`.

    Raises:
        DependencyError: the kind needs a package that is not installed.
    """
    if config.function is not None:
        return custom_optimizer_factory(config, learning_rate=learning_rate)
    if config.kind == "adafactor":
        from transformers.optimization import Adafactor

        scale = config.scale_parameter
        return lambda groups: Adafactor(groups, lr=learning_rate, scale_parameter=scale, relative_step=False)
    if config.kind == "muon":
        rate = {"lr": learning_rate, "adjust_lr_fn": "match_rms_adamw"}
        return lambda groups: torch.optim.Muon(groups, **rate)
    adam: dict[str, Any] = {"lr": learning_rate, "betas": config.betas, "eps": config.eps}
    if config.kind == "adamw_8bit":
        eight_bit = _eight_bit_adamw(device)
        return lambda groups: eight_bit(groups, **adam)
    fused = config.kind == "adamw_cpu" or device.type in ("cpu", "cuda", "mps", "xpu")
    return lambda groups: torch.optim.AdamW(groups, fused=fused, foreach=not fused, **adam)


def _eight_bit_adamw(device: torch.device) -> Callable[..., Optimizer]:
    try:
        from bitsandbytes.optim import AdamW8bit as BitsAndBytesAdamW8bit  # pyright: ignore[reportPrivateImportUsage]  # public

        return BitsAndBytesAdamW8bit
    except ImportError:
        pass
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise DependencyError(
            "optimizer.kind adamw_8bit needs bitsandbytes or torchao, but neither can be imported",
            remedy="pip install bitsandbytes (or: pip install torchao)",
        ) from error
    if device.type != "cpu":
        return AdamW8bit

    class EagerAdamW8bit(AdamW8bit):
        """AdamW8bit without compilation.

        On a CPU, compiling the update takes half a minute and a C++ compiler, and gains milliseconds.
        """

        def step(self, closure: Any = None) -> Any:
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    return EagerAdamW8bit


def _load_exactly(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state without the cast of float32 states to 16-bit weights' dtype in ``optimizer.load_state_dict``."""
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, saved in state["state"].items():
        loaded = optimizer.state[parameters[index]]
        for key, value in saved.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


Schedule = Literal["constant", "linear", "cosine", "warmup_stable_decay"]
Decay = Literal["cosine", "linear", "1-sqrt"]


@dataclass(frozen=True, slots=True)
class Phases:
    """Phases of ``warmup_stable_decay``, in steps; None follows from the rest, or is a tenth of the run's steps."""

    stable: int | None = None
    decay: int | None = None
    shape: Decay = "cosine"


def warmup_length(*, steps: int, ratio: float, total_steps: int) -> int:
    """Return the steps of warm-up, at most all.

    They are ``ratio`` of all steps, rounded up, or ``steps`` without a ratio.
    """
    return min(total_steps, math.ceil(round(ratio * total_steps, 9)) if ratio else steps)


def schedule_factor(
    step: int,
    *,
    schedule: Schedule,
    total_steps: int,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
    phases: Phases = Phases(),
) -> float:
    """Return the factor on the peak learning rate at the ``step``-th optimizer step, counted from 0.

    Warm-up is linear: ``(step + 1) / warmup_steps``, so that the first step already learns. After it,
    ``linear`` and ``cosine`` fall from 1 to ``min_lr_ratio``, which is reached right after the last step
    (``step == total_steps``), so that no step is spent at a rate of 0. ``cosine`` is half a period, as in
    Loshchilov & Hutter, "SGDR" (2017), eq. 5, without restarts. ``warmup_stable_decay`` stays at 1 for its stable
    phase, falls to ``min_lr_ratio`` within its decay, and stays there: Hägele et al., "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations" (2024), with their shape ``1-sqrt``.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    begin, length, shape = warmup_steps, total_steps - warmup_steps, schedule
    if schedule == "warmup_stable_decay":
        length = phases.decay or math.ceil(total_steps / 10)
        begin += max(0, total_steps - warmup_steps - length) if phases.stable is None else phases.stable
        shape = phases.shape
    progress = min(1.0, max(0.0, (step - begin) / max(1, length)))
    return min_lr_ratio + (1.0 - min_lr_ratio) * _REMAINING[shape](progress)


# Shapes of a fall, as functions of its completed share.
_REMAINING: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
