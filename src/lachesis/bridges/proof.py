"""Proof of sync: the engine holds the trainer's bytes, computes its logprobs, and moves when the weights do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from lachesis.bridges.extract import Whole, adapter_digests, base_parameters, text_config
from lachesis.bridges.names import map_parameters
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineUnreachable, LachesisError, ModelError, StaleWeights
from lachesis.common.types import CanaryReading
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import Engine, largest_difference
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.http.control import ServerControl
from lachesis.engines.http.dispatch import nobody_serves
from lachesis.engines.serving.operations import ServerInfo
from lachesis.engines.serving.served import DigestRequest, DigestSlice
from lachesis.transport.float8 import FP8, SCALE
from lachesis.transport.shared_tensors import dtype_name

logger = logging.getLogger("lachesis")

# Largest absolute difference of a canary logprob between two code paths over the same weights, by dtype. With products
# in TF32, which has float16's ten bits, float32 weights were 0.003 and 0.005 nats apart on a GPU.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "tf32": 0.05, "float16": 0.05, "bfloat16": 0.25}
# Of a trainer whose base weights are quantized and an engine whose are not: int8 moves a weight by about 0.6% of the
# weights' deviation, NF4 by 9%. The transfer itself is then proved by the adapter's digests.
# An engine in fp8 rounds its inputs too, or keys and values, by 3% of a value each. Its bytes are proved by digests.
# With both an 8B model of random weights was 2.2 nats off.
QUANTIZED_TOLERANCE = {"none": 0.0, "int8": 0.5, "fp8": 2.0, "nf4": 4.0, "fp8 with its cache": 4.0}
_ROUNDED = ("none", "fp8", "fp8 with its cache")

_CANARY_TOKENS = 16

Digests = Callable[[], Mapping[str, int]]
NO_DIGESTS = DigestRequest(slices={})
# Where a policy is built on the engine's tensors: which rows of which of them its parameters are.
Slices = Callable[[], Mapping[str, DigestSlice]]
# What each side says of itself: canary, and digests.
EngineSays = tuple[CanaryReading, Mapping[str, int]]
TrainerSays = tuple[Sequence[float], Mapping[str, int]]


class Proof(Protocol):
    """What a bridge has shown after each transfer."""

    def confirm(self, *, version: int) -> float:
        """The largest difference of a canary logprob, in nats. Raises StaleWeights where the engine has others."""
        ...


@dataclass(slots=True, kw_only=True)
class SyncProof:
    """Compares trainer and engine after each transfer.

    The canary shows that the engine computes with the weights, whatever its kernels; digests show that each
    tensor arrived bit for bit, also where an update is far below what a 16-bit forward pass resolves.

    Args:
        token_ids: the canary prompt.
        trainer: reads the canary under the trainer's weights, logprobs as in CanaryReading.
        engine: reads it under the engine's, and digests what is ``wanted`` of what the engine holds.
        session_id: the engine session this run works with.
        dtype: of the weights, or "tf32" where an engine multiplies in it; sets the tolerance.
        quantization: of one side where the other is not quantized; widens the tolerance.
        trainer_digests: digest by name of each tensor that was to be transferred, as the engine should hold it.
        wanted: by which names the engine holds them; none without ``trainer_digests``.
        concurrent: read engine and trainer at the same time, for an engine with a model of its own.
    """

    token_ids: Sequence[int]
    trainer: Callable[[Sequence[int]], Sequence[float]]
    engine: Callable[[Sequence[int], DigestRequest], EngineSays]
    session_id: str
    dtype: str
    quantization: str = "none"
    trainer_digests: Digests = dict
    wanted: DigestRequest = NO_DIGESTS
    concurrent: bool = False
    _last: tuple[Sequence[float], Sequence[float]] | None = field(default=None, init=False)

    @property
    def tolerance(self) -> float:
        """Largest difference of a canary logprob that is agreement, in nats."""
        return max(TOLERANCE[self.dtype], QUANTIZED_TOLERANCE[self.quantization])

    def confirm(self, *, version: int) -> float:
        """The largest difference of a canary logprob, in nats. Raises as :meth:`judge`."""
        if not self.concurrent:
            return self.judge(self.ask_engine(), self.ask_trainer(), version=version)
        # Most of either is waiting, for the wire or for the device.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="proof") as pool:
            engine = pool.submit(self.ask_engine)
            trainer = self.ask_trainer()
            return self.judge(engine.result(), trainer, version=version)

    def ask_engine(self) -> EngineSays:
        """Canary and digests of what it holds."""
        return self.engine(self.token_ids, self.wanted)

    def ask_trainer(self) -> TrainerSays:
        """Canary and digests of what the engine should hold."""
        return self.trainer(self.token_ids), self.trainer_digests()

    def judge(self, engine: EngineSays, trainer: TrainerSays, *, version: int) -> float:
        """The largest difference of a canary logprob, in nats.

        Raises:
            StaleWeights: another session or version answers, a tensor is missing or differs, the logprobs differ
                by more than the tolerance, or the trainer's moved by more than it and the engine's did not.
        """
        (reading, theirs), (expected, ours) = engine, trainer
        self._check_identity(reading, version=version)
        _check_digests(ours, theirs, version=version)
        error = largest_difference(expected, reading.logprobs)
        # A NaN is no agreement: the comparison is written so that it fails.
        if not error <= self.tolerance:
            raise StaleWeights(
                f"after the transfer of version {version} the engine's canary logprobs differ from the "
                f"trainer's by up to {error:.4g} (allowed {self.tolerance:g}): "
                f"engine {_brief(reading.logprobs)}, trainer {_brief(expected)}",
                remedy="part of the weights did not arrive, or the weights diverge so far that two correct "
                "forward passes disagree; look at the engine's log and at grad_norm",
            )
        self._check_moved(expected, reading.logprobs, version=version)
        if self._last is None:
            logger.info(
                "[PROOF] Engine session %s has version %d: canary within %.2g nats, digests of %d tensors agree",
                self.session_id, version, error, len(ours),
            )  # fmt: skip
        self._last = (tuple(expected), tuple(reading.logprobs))
        return error

    def _check_identity(self, reading: CanaryReading, *, version: int) -> None:
        if reading.session_id != self.session_id:
            raise StaleWeights(
                f"the engine is of session {reading.session_id}, this run works with {self.session_id}",
                remedy="stop the engine that another run left over, or point the run at its own",
            )
        if reading.version != version:
            raise StaleWeights(
                f"the engine serves weight version {reading.version}, the trainer is at {version}",
                remedy="the transfer did not arrive; look at the engine's log",
            )

    def _check_moved(self, trainer: Sequence[float], engine: Sequence[float], *, version: int) -> None:
        if self._last is None:
            return
        moved = largest_difference(trainer, self._last[0])
        if moved > self.tolerance and tuple(engine) == tuple(self._last[1]):
            raise StaleWeights(
                f"with version {version} the trainer's canary logprobs moved by {moved:.4g} and the engine's "
                "not at all",
                remedy="the engine still serves the weights before; look at its log",
            )


class FleetProof:
    """Proof of sync with each engine that lives: it alone admits that one, and one that fails does not end the step.

    Args:
        engine: the client of all.
        proof_of: makes the proof of one of them, in the session in which it was met. The trainer's side of all is the
            same, and asked once.
    """

    def __init__(self, engine: HttpEngine, *, proof_of: Callable[[ServerControl], SyncProof]) -> None:
        self._engine = engine
        self._proof_of = proof_of
        self._proofs: dict[str, SyncProof] = {}

    def confirm(self, *, version: int) -> float:
        """The largest difference of a canary logprob over the engines that have the weights, in nats.

        From now on the fleet requires this version: engines that were not proved get no requests.

        Raises:
            StaleWeights, EngineUnreachable: what the first engine's proof raised, where none was proved.
        """
        controls = self._engine.living
        if not controls:
            raise nobody_serves(self._engine.fleet)
        errors: list[float] = []
        failures: list[LachesisError] = []
        with ThreadPoolExecutor(len(controls), thread_name_prefix="proofs") as pool:
            asked = [(control, pool.submit(self._ask, control)) for control in controls]
            trainer = self.of(controls[0]).ask_trainer()
            for control, answer in asked:
                try:
                    errors.append(self._judge(control, answer.result(), trainer, version=version))
                except (StaleWeights, EngineUnreachable, DeadlineExceeded) as error:
                    self._note(control, error)
                    failures.append(error)
        if not errors:
            raise failures[0]
        for failure in failures:
            logger.warning("an engine is left out, others go on: %s", failure.message)
        self._engine.fleet.require(version)
        return max(errors)

    def _ask(self, control: ServerControl) -> EngineSays:
        return self.of(control).ask_engine()

    def _judge(self, control: ServerControl, says: EngineSays, trainer: TrainerSays, *, version: int) -> float:
        proof = self.of(control)
        expected, ours = trainer
        error = proof.judge(says, (expected, ours if proof.wanted.asks else {}), version=version)
        self._engine.fleet.proved(control.url, proof.session_id, version)
        return error

    def _note(self, control: ServerControl, error: LachesisError) -> None:
        note = self._engine.fleet.unproved if isinstance(error, StaleWeights) else self._engine.fleet.died
        note(control.url, error.message)

    def of(self, control: ServerControl) -> SyncProof:
        """The proof of one engine, in the session in which it was met last."""
        session_id = self._engine.fleet.session(control.url)
        proof = self._proofs.get(control.url)
        if proof is None or proof.session_id != session_id:
            proof = self._proofs[control.url] = self._proof_of(control)
        return proof


def _check_digests(ours: Mapping[str, int], theirs: Mapping[str, int], *, version: int) -> None:
    """Every tensor of ``ours`` is in ``theirs`` with the same digest."""
    missing = [name for name in ours if name not in theirs]
    different = [name for name, digest in ours.items() if name in theirs and theirs[name] != digest]
    if not missing and not different:
        return
    parts = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (("are not the trainer's", different), ("are not there", missing))
        if names
    ]
    raise StaleWeights(
        f"after the transfer of version {version}, of {len(ours)} tensors in the engine {' and '.join(parts)}",
        remedy="the transfer arrived in part or went to other tensors; look at the engine's log",
    )


def _brief(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.4f}" for value in values[:4])
    return f"[{shown}{', ...' if len(values) > 4 else ''}]"


class ModelPolicy(Protocol):
    """What is proved of a policy: its model, with the adapter if it has one, and that model's transformer."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def transformer(self) -> PreTrainedModel: ...

    def canary(self, token_ids: Sequence[int]) -> Sequence[float]: ...

    def weight_digests(self, *, quantized: Collection[str] = ()) -> Mapping[str, int]: ...


ModelPolicyT = TypeVar("ModelPolicyT", bound=ModelPolicy)


def canary_alone(
    read: Callable[[Sequence[int]], CanaryReading],
) -> Callable[[Sequence[int], DigestRequest], EngineSays]:
    """What an engine says that holds no bytes of its own to digest."""
    return lambda token_ids, wanted: (read(token_ids), {})


def local_proof(policy: ModelPolicy, engine: Engine, *, context: int) -> SyncProof:
    """Proof of sync with an engine in this process, by a canary; ``context`` is the longest that it may be."""
    return SyncProof(
        token_ids=_canary(_vocab_size(policy), context),
        trainer=policy.canary,
        engine=canary_alone(engine.canary),
        session_id=engine.health().session_id,
        dtype=str(policy.transformer.dtype).removeprefix("torch."),
    )


def remote_proof(
    config: LachesisConfig,
    policy: ModelPolicyT,
    engine: HttpEngine,
    *,
    slices_of: Slices | None,
    whole_of: Callable[[ModelPolicyT], Whole],
) -> FleetProof:
    """Proof of sync with servers: a canary of ordinary tokens, and digests where both sides hold equal tensors."""
    prove = partial(_server_proof, config, policy, slices_of=slices_of, whole=whole_of(policy))
    return FleetProof(engine, proof_of=lambda control: prove(control, session_id=engine.fleet.session(control.url)))


def _server_proof(
    config: LachesisConfig,
    policy: ModelPolicy,
    control: ServerControl,
    *,
    session_id: str,
    slices_of: Slices | None,
    whole: Whole,
) -> SyncProof:
    deadline = partial(Deadline, "the proof of sync", config.deadlines.sync_s, "deadlines.sync_s")
    info = control.info(deadline=deadline())
    ours = str(policy.transformer.dtype).removeprefix("torch.")
    digests = digests_of(config, policy, control, slices_of=slices_of, whole=whole, deadline=deadline)
    mine, wanted = digests or (dict, NO_DIGESTS)
    return SyncProof(
        token_ids=_canary(min(_vocab_size(policy), info.model.vocab_size), info.model.max_model_len - 1),
        trainer=policy.canary,
        engine=lambda token_ids, wanted: control.prove(token_ids, wanted, deadline=deadline()),
        session_id=session_id,
        # The coarser of the two sets what can be expected of them.
        dtype=max((ours, engine_arithmetic(info)), key=tuple(TOLERANCE).index),
        quantization=coarser_quantization(config, rounds=info.model.rounds),
        trainer_digests=mine,
        wanted=wanted,
        concurrent=True,
    )


def engine_arithmetic(info: ServerInfo) -> str:
    """What a server multiplies in: its dtype, but TF32 where vLLM's attention on a GPU has float32 to multiply."""
    on_gpu = info.model.device.startswith("cuda")
    of_vllm = info.engine.startswith("vllm")  # its version comes after it
    return "tf32" if of_vllm and on_gpu and info.model.dtype == "float32" else info.model.dtype


def digests_of(
    config: LachesisConfig,
    policy: ModelPolicy,
    control: ServerControl,
    *,
    slices_of: Slices | None,
    whole: Whole,
    deadline: Callable[[], Deadline],
) -> tuple[Digests, DigestRequest] | None:
    """Exact digests of what travels: the trainer's, and what to ask the server for; none where it has another form.

    That is so with adapters split over GPUs, with kernels that repack weights (as on the CPU), with layers whose cut
    the server does not know, and in another dtype.
    """
    info = control.info(deadline=deadline())
    dtype: torch.dtype = getattr(torch, info.model.dtype)
    if config.bridge.capabilities.adapter_only:
        if info.model.tensor_parallel_size > 1:
            logger.info("the adapter is proved by the canary alone: each of the engine's workers has a part of it")
            return None
        return (
            lambda: adapter_digests(policy.model, dtype=dtype, whole=whole),
            DigestRequest(slices={}, adapter=True),
        )
    if dtype != policy.transformer.dtype:
        return None
    slices = slices_of() if slices_of is not None else _parameter_slices(policy, control, info, deadline=deadline())
    if slices is None:
        return None
    quantized = frozenset(name.removesuffix(SCALE) for name in slices if name.endswith(SCALE))
    return (
        lambda: policy.weight_digests(quantized=quantized),
        DigestRequest(slices=dict(slices)),
    )


def coarser_quantization(config: LachesisConfig, *, rounds: int) -> str:
    """What keeps trainer and engine further apart: the trainer's base weights, or an engine that ``rounds`` so much."""
    kinds = (config.model.quantization, _ROUNDED[rounds])
    return max(kinds, key=QUANTIZED_TOLERANCE.__getitem__)


def _parameter_slices(
    policy: ModelPolicy, control: ServerControl, info: ServerInfo, *, deadline: Deadline
) -> Mapping[str, DigestSlice] | None:
    held = control.state_dict_info(deadline=deadline)
    if repacked := [name for name, tensor in held.items() if 0 in tensor.shape]:
        which = ", ".join(repacked[:2]) + (f" and {len(repacked) - 2} more" if len(repacked) > 2 else "")
        logger.info("weights are proved by the canary alone: the engine has %s in a form of its own", which)
        return None
    in_8_bits = {name for name, tensor in held.items() if tensor.dtype == dtype_name(FP8)}
    scales = {name + SCALE for name in in_8_bits}
    try:
        slices = map_parameters(
            {name: tuple(p.shape) for name, p in base_parameters(policy.model).items()},
            {name: tensor.shape for name, tensor in held.items() if name not in scales},
            model_type=text_config(policy.transformer).model_type,
            engine_kind=info.engine,
            mixtures=True,
        )
    except ModelError as error:
        logger.info("weights are proved by the canary alone: %s", error.message)
        return None
    quantized = {name: part for name, part in slices.items() if part.name in in_8_bits}
    # A row and its scale stand at the same place of their tensors.
    return slices | {name + SCALE: replace(part, name=part.name + SCALE) for name, part in quantized.items()}


def _vocab_size(policy: ModelPolicy) -> int:
    return text_config(policy.transformer).vocab_size


def _canary(vocab_size: int, longest: int) -> list[int]:
    """A fixed prompt of ordinary tokens."""
    return [(7 * i + 5) % vocab_size for i in range(min(_CANARY_TOKENS, longest))]
