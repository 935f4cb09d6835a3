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

from lachesis.bridges.canary import CanaryText, Evidence, Greedy, History, NoiseScale, disagreement
from lachesis.bridges.extract import Whole, adapter_digests, base_parameters, text_config
from lachesis.bridges.names import map_parameters
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineUnreachable, LachesisError, ModelError, StaleWeights
from lachesis.common.types import CanaryReading, GenerationRequest, SamplingParams
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import Engine
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.http.control import ServerControl
from lachesis.engines.http.dispatch import nobody_serves
from lachesis.engines.serving.backend import DigestRequest, DigestSlice
from lachesis.engines.serving.operations import ServerInfo
from lachesis.transport.float8 import FP8, SCALE
from lachesis.transport.shared_tensors import dtype_name

logger = logging.getLogger("lachesis")

# The largest mean of |z| (see lachesis.bridges.canary) between two correct passes over the same weights, by dtype, on
# any model: ten times what was seen on pretrained ones. With products in TF32, which has float16's ten bits, float32
# weights were 0.003 and 0.005 nats apart on a GPU.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "tf32": 0.05, "float16": 0.05, "bfloat16": 0.25}
# Smallest usual mean of |z|: a model of few layers agrees better than one that has moved since.
_FLOOR = {"float64": 1e-10, "float32": 1e-5, "tf32": 1e-3, "float16": 1e-3, "bfloat16": 8e-3}
# Of a trainer whose base weights are quantized and an engine whose are not: int8 moves a weight by about 0.6% of the
# weights' deviation, NF4 by 9%. The transfer itself is then proved by the adapter's digests.
# An engine in fp8 rounds its inputs too, or keys and values, by 3% of a value each. Its bytes are proved by digests.
# With both an 8B model of random weights was 2.2 nats off.
QUANTIZED_TOLERANCE = {"none": 0.0, "int8": 0.5, "fp8": 2.0, "nf4": 4.0, "fp8 with its cache": 4.0}
# Where digests prove the bytes, so many times the allowance is more than rounding can do: the engine computes with
# something else than the tensors that were digested.
_BEYOND_ROUNDING = 8.0
_ROUNDED = ("none", "fp8", "fp8 with its cache")

Digests = Callable[[], Mapping[str, int]]
NO_DIGESTS = DigestRequest(slices={})
# Where a policy is built on the engine's tensors: which rows of which of them its parameters are.
Slices = Callable[[], Mapping[str, DigestSlice]]
# What each side says of itself: canary, and digests.
EngineSays = tuple[CanaryReading, Mapping[str, int]]
TrainerSays = tuple[Sequence[float], Mapping[str, int]]


_REMEDIES = {
    "none": "part of the weights did not arrive, or the weights diverge; look at the engine's log and at grad_norm",
    "adapter": "the engine does not compute with the adapter as the trainer does; look at its log for modules that it "
    "left out, and at grad_norm",
    "weights": "the engine has the trainer's bytes and computes something else: its kernels are wrong for this model, "
    "or read a copy made before the update; restart it, try --enforce-eager, and look at its log",
    "one model": "the model's cache is wrong in this version of transformers, or its weights diverge: use engine.kind: "
    "vllm, another version of transformers, or look at grad_norm",
}


@dataclass(frozen=True, slots=True)
class Proved:
    """Result of a proof that passed.

    Args:
        error: the largest difference of a canary logprob, in nats.
        ratio: the canary's disagreement as a multiple of what is allowed. Above 1 only where digests prove the bytes.
        doubt: what the canary says against the transfer although the digests agree; empty if nothing.
    """

    error: float
    ratio: float
    doubt: str = ""


class Proof(Protocol):
    """Proof of each transfer that a bridge makes."""

    def confirm(self, *, version: int) -> Proved:
        """Prove that the engine computes with ``version``.

        Raises StaleWeights if it has other weights.
        """
        ...


@dataclass(slots=True, kw_only=True)
class SyncProof:
    """Proof that compares trainer and engine after each transfer.

    Digests show that each tensor arrived bit for bit, also where an update is far below what a 16-bit forward pass
    resolves. The canary shows that the engine computes with the weights, whatever its kernels. Where digests prove all
    weights, a canary that is off is a doubt, and ends the run only beyond what rounding can do; elsewhere it decides.

    Args:
        token_ids: returns the canary, the same at each call.
        trainer: reads the canary under the trainer's weights, logprobs as in CanaryReading.
        engine: reads it under the engine's, and digests what is ``wanted`` of what the engine holds.
        session_id: the engine session this run works with.
        dtype: of the weights, or "tf32" where an engine multiplies in it; limits what rounding can do.
        quantization: of one side where the other is not quantized; widens that limit.
        adapter: the engine adds an adapter to its weights. In 16 bits that rounds small updates of it away.
        trainer_digests: digest by name of each tensor that was to be transferred, as the engine should hold it.
        wanted: by which names the engine holds them; none without ``trainer_digests``.
        concurrent: read engine and trainer at the same time, for an engine with a model of its own.
        one_model: engine and trainer compute with one model in this process, so nothing travels that could be lost.
    """

    token_ids: Callable[[], Sequence[int]]
    trainer: Callable[[Sequence[int]], Sequence[float]]
    engine: Callable[[Sequence[int], DigestRequest], EngineSays]
    session_id: str
    dtype: str
    quantization: str = "none"
    adapter: bool = False
    trainer_digests: Digests = dict
    wanted: DigestRequest = NO_DIGESTS
    concurrent: bool = False
    one_model: bool = False
    _scale: NoiseScale = field(init=False)
    _history: History = field(init=False)
    _version: int | None = field(default=None, init=False)
    _digests: Mapping[str, int] = field(default_factory=dict[str, int], init=False)

    def __post_init__(self) -> None:
        limit = max(TOLERANCE[self.dtype], QUANTIZED_TOLERANCE[self.quantization])
        self._scale = NoiseScale(limit=limit, floor=_FLOOR[self.dtype])
        absorbs = self.adapter or self.quantization != "none"
        self._history = History(floor=_FLOOR[self.dtype], absorbs=absorbs)

    def confirm(self, *, version: int) -> Proved:
        """Ask both sides and judge their answers. Raises as :meth:`judge`."""
        token_ids = self.token_ids()
        if not self.concurrent:
            proved = self.judge(self.ask_engine(token_ids), self.ask_trainer(token_ids), version=version)
            if proved.doubt:
                logger.warning("no weights can have been lost, but %s", proved.doubt)
            return proved
        # Most of either is waiting, for the wire or for the device.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="proof") as pool:
            engine = pool.submit(self.ask_engine, token_ids)
            trainer = self.ask_trainer(token_ids)
            return self.judge(engine.result(), trainer, version=version)

    def ask_engine(self, token_ids: Sequence[int]) -> EngineSays:
        """Return the engine's reading of the canary and the digests of what it holds."""
        return self.engine(token_ids, self.wanted)

    def ask_trainer(self, token_ids: Sequence[int]) -> TrainerSays:
        """Return the trainer's reading of the canary and the digests of what the engine should hold."""
        return self.trainer(token_ids), self.trainer_digests()

    def judge(self, engine: EngineSays, trainer: TrainerSays, *, version: int) -> Proved:
        """Judge what both sides say after the transfer of ``version``.

        Raises:
            StaleWeights: another session or version answers, a tensor is missing or differs, the canary was answered
                from a prefix cache of other weights, or the canary shows that the engine computes with other weights.
        """
        (reading, theirs), (expected, ours) = engine, trainer
        self._check_identity(reading, version=version)
        check_digests(ours, theirs, before=self._digests, version=version)
        self._check_cache(reading, version=version)
        found = disagreement(expected, reading.logprobs)
        ratio = self._scale.allowance.ratio(found)
        doubt = self._doubt(reading, expected, found.mean, ratio, version=version)
        # A NaN is no agreement.
        if not found.is_finite or (doubt and (self._evidence != "weights" or ratio > _BEYOND_ROUNDING)):
            raise StaleWeights(
                doubt
                or f"after the transfer of version {version} the canary's logprobs are not finite: "
                f"engine {_brief(reading.logprobs)}, trainer {_brief(expected)}",
                remedy=_REMEDIES["one model" if self.one_model else self._evidence],
            )
        if self._version is None:
            logger.info(
                "[PROOF] Engine session %s has version %d: canary within %.2g nats, digests of %d tensors agree",
                self.session_id, version, found.largest, len(ours),
            )  # fmt: skip
        if not doubt:
            self._scale.accept(found)
        self._history.add(version, expected, reading.logprobs)
        self._version, self._digests = version, dict(ours)
        return Proved(found.largest, ratio, doubt)

    @property
    def _evidence(self) -> Evidence:
        if self.one_model:
            return "weights"
        if not self.wanted.asks:
            return "none"
        return "adapter" if self.wanted.adapter else "weights"

    def _doubt(
        self, reading: CanaryReading, expected: Sequence[float], mean: float, ratio: float, *, version: int
    ) -> str:
        """Return what the canary says against the transfer, or an empty text."""
        standing = self._history.standing_at(expected, reading.logprobs, usual=self._scale.usual)
        if standing is not None:
            unused = " although it holds the adapter: it does not use it" if self._evidence == "adapter" else ""
            return (
                f"after the transfer of version {version} the engine computes what it computed at version {standing}"
                f"{unused}; the trainer's logprobs have moved since, to {_brief(expected)}, and the engine's are "
                f"{_brief(reading.logprobs)}"
            )
        if ratio <= 1:
            return ""
        allowed = self._scale.allowance
        who = "the logprobs of this model with a KV cache differ from those of its whole forward pass by "
        if not self.one_model:
            who = "the engine's canary logprobs differ from the trainer's by "
        return (
            f"after the transfer of version {version} {who}"
            f"{mean:.4g} nats of logit noise on average, {ratio:.3g} times what is allowed (a mean of "
            f"{allowed.mean:.3g} and a 0.9 quantile of {allowed.high:.3g}): engine {_brief(reading.logprobs)}, "
            f"trainer {_brief(expected)}"
        )

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

    def _check_cache(self, reading: CanaryReading, *, version: int) -> None:
        """Raise StaleWeights if the prefix cache knows the probe.

        The probe begins as no prompt does, so a cached part of it was computed before this update.
        """
        if reading.cached_tokens and version != self._version:
            raise StaleWeights(
                f"after the transfer of version {version} the engine answers from a prefix cache that holds "
                f"{reading.cached_tokens} tokens of the proof's probe, computed with the weights before",
                remedy="the engine did not empty its prefix cache; restart it, or start it without prefix caching",
            )


# What ends the proof of one engine, and not those of the others.
_ONE_FAILS = (StaleWeights, EngineUnreachable, DeadlineExceeded)


class FleetProof:
    """Proof of sync with each live engine, which admits that engine alone; one failure does not end the step.

    Args:
        engine: the client of all.
        proof_of: makes the proof of one of them, in the session in which it was met. The canary and the trainer's side
            of all are the same, and computed once.
    """

    def __init__(self, engine: HttpEngine, *, proof_of: Callable[[ServerControl], SyncProof]) -> None:
        self._engine = engine
        self._proof_of = proof_of
        self._proofs: dict[str, SyncProof] = {}

    def confirm(self, *, version: int) -> Proved:
        """Prove each engine that lives, and return the worst of those that passed.

        From now on the fleet requires this version: engines that were not proved get no requests.

        Raises:
            StaleWeights, EngineUnreachable: what the first engine's proof raised, where none was proved.
        """
        controls = self._engine.living
        if not controls:
            raise nobody_serves(self._engine.fleet)
        proved: list[Proved] = []
        failures: list[LachesisError] = []
        token_ids = self._canary(controls, failures)
        with ThreadPoolExecutor(len(controls), thread_name_prefix="proofs") as pool:
            asked = [(control, pool.submit(self._ask, control, token_ids)) for control in controls]
            trainer = self.of(controls[0]).ask_trainer(token_ids)
            for control, answer in asked:
                try:
                    proved.append(self._judge(control, answer.result(), trainer, version=version))
                except _ONE_FAILS as error:
                    self._note(control, error)
                    failures.append(error)
        if not proved:
            raise failures[0]
        for failure in failures:
            logger.warning("an engine is left out, others go on: %s", failure.message)
        self._engine.fleet.require(version)
        return max(proved, key=lambda one: (bool(one.doubt), one.ratio))

    def _canary(self, controls: Sequence[ServerControl], failures: list[LachesisError]) -> Sequence[int]:
        """Return the canary, which the first engine that can has written."""
        for control in controls:
            try:
                return self.of(control).token_ids()
            except _ONE_FAILS as error:
                self._note(control, error)
                failures.append(error)
        raise failures[0]

    def _ask(self, control: ServerControl, token_ids: Sequence[int]) -> EngineSays:
        return self.of(control).ask_engine(token_ids)

    def _judge(self, control: ServerControl, says: EngineSays, trainer: TrainerSays, *, version: int) -> Proved:
        proof = self.of(control)
        expected, ours = trainer
        proved = proof.judge(says, (expected, ours if proof.wanted.asks else {}), version=version)
        self._engine.fleet.proved(control.url, proof.session_id, version)
        if proved.doubt:
            logger.warning("the digests of %s agree, but %s", control.url, proved.doubt)
        return proved

    def _note(self, control: ServerControl, error: LachesisError) -> None:
        note = self._engine.fleet.unproved if isinstance(error, StaleWeights) else self._engine.fleet.died
        note(control.url, error.message)

    def of(self, control: ServerControl) -> SyncProof:
        """Return the proof of one engine, in the session in which it was met last."""
        session_id = self._engine.fleet.session(control.url)
        proof = self._proofs.get(control.url)
        if proof is None or proof.session_id != session_id:
            proof = self._proofs[control.url] = self._proof_of(control)
        return proof


def check_digests(
    ours: Mapping[str, int], theirs: Mapping[str, int], *, before: Mapping[str, int], version: int
) -> None:
    """Compare the digests of what was sent with those of what the engine holds.

    Args:
        ours: digest by name of each tensor as the engine should hold it.
        theirs: digest by name as it holds them; further ones do no harm.
        before: ``ours`` of the version that was proved before, empty without one.
        version: the version that was transferred.

    Raises:
        StaleWeights: a tensor is missing or differs. The message says which, and what the engine holds instead.
    """
    missing = [name for name in ours if name not in theirs]
    different = [name for name, digest in ours.items() if name in theirs and theirs[name] != digest]
    if not missing and not different:
        return
    parts = [
        f"{len(names)} {what} ({_named(names)})"
        for what, names in (("are not the trainer's", different), ("are not there", missing))
        if names
    ]
    raise StaleWeights(
        f"after the transfer of version {version}, of {len(ours)} tensors in the engine {' and '.join(parts)}"
        + _what_instead(different, ours, theirs, before=before),
        remedy="the transfer arrived in part or went to other tensors; look at the engine's log",
    )


def _what_instead(
    different: Sequence[str], ours: Mapping[str, int], theirs: Mapping[str, int], *, before: Mapping[str, int]
) -> str:
    """Return what the engine holds in the place of the tensors that differ, as the end of a sentence."""
    if not different:
        return ""
    if stale := [name for name in different if theirs[name] == before.get(name)]:
        few = "" if len(stale) == len(different) else f" {len(stale)} of them"
        return f": it still holds{few or ' them'} as they were before this update"
    named = {digest: name for name, digest in ours.items()}
    if swapped := [(name, named[theirs[name]]) for name in different if theirs[name] in named]:
        return f": in the place of {swapped[0][0]} it holds {swapped[0][1]}"
    if len(different) == len(ours) > 1:
        return ": none of them is the trainer's, so these are the weights of another run or model"
    return ""


def _named(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _brief(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.4f}" for value in values[:4])
    return f"[{shown}{', ...' if len(values) > 4 else ''}]"


class ModelPolicy(Protocol):
    """Parts of a policy that are proved: its model, with any adapter, and that model's transformer."""

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
    """Return a function that reads the canary of an engine without bytes to digest."""
    return lambda token_ids, wanted: (read(token_ids), {})


def local_proof(
    policy: ModelPolicy, engine: Engine, *, context: int, prompt: Sequence[int] = (), one_model: bool = True
) -> SyncProof:
    """Build the proof of sync with an engine in this process, which a canary alone decides.

    Args:
        policy: the trainer's side.
        engine: the engine's side; it writes the canary.
        context: the most tokens that a sequence may have.
        prompt: token ids with which the canary begins.
        one_model: the engine computes with the policy's model, not with a copy.
    """
    text = CanaryText(prompt, vocab_size=_vocab_size(policy), longest=context)
    return SyncProof(
        token_ids=partial(text.written_by, partial(_greedy, engine)),
        trainer=policy.canary,
        engine=canary_alone(engine.canary),
        one_model=one_model,
        session_id=engine.health().session_id,
        dtype=str(policy.transformer.dtype).removeprefix("torch."),
    )


def _greedy(engine: Engine, prompt: Sequence[int], count: int) -> Sequence[int]:
    request = GenerationRequest(prompt_ids=tuple(prompt), params=SamplingParams(max_tokens=count, temperature=0.0))
    ((completion,),) = engine.generate([request], deadline=Deadline("writing the canary", None))
    return completion.token_ids


def remote_proof(
    config: LachesisConfig,
    policy: ModelPolicyT,
    engine: HttpEngine,
    *,
    slices_of: Slices | None,
    whole_of: Callable[[ModelPolicyT], Whole],
    prompt: Sequence[int] = (),
) -> FleetProof:
    """Build the proof of sync with servers: a canary, and digests where both sides hold equal tensors.

    Args:
        config: of the run.
        policy: the trainer's side.
        engine: the client of the servers; the first that lives writes the canary.
        slices_of: where the policy is built on the engine's tensors, which rows of which they are.
        whole_of: makes the policy's parameters whole before they travel.
        prompt: token ids with which the canary begins.
    """
    text: list[CanaryText] = []  # made with the first server's limits, and the same for all

    def text_for(info: ServerInfo) -> CanaryText:
        if not text:
            vocab_size = min(_vocab_size(policy), info.model.vocab_size)
            text.append(CanaryText(prompt, vocab_size=vocab_size, longest=info.model.max_model_len - 1))
        return text[0]

    prove = partial(_server_proof, config, policy, text_for=text_for, slices_of=slices_of, whole=whole_of(policy))
    return FleetProof(engine, proof_of=lambda control: prove(control, session_id=engine.fleet.session(control.url)))


def _server_proof(
    config: LachesisConfig,
    policy: ModelPolicy,
    control: ServerControl,
    *,
    session_id: str,
    text_for: Callable[[ServerInfo], CanaryText],
    slices_of: Slices | None,
    whole: Whole,
) -> SyncProof:
    deadline = partial(Deadline, "the proof of sync", config.deadlines.sync_s, "deadlines.sync_s")
    info = control.info(deadline=deadline())
    ours = str(policy.transformer.dtype).removeprefix("torch.")
    digests = digests_of(config, policy, control, slices_of=slices_of, whole=whole, deadline=deadline)
    mine, wanted = digests or (dict, NO_DIGESTS)
    greedy: Greedy = lambda prompt, count: control.continue_greedily(prompt, count, deadline=deadline())  # noqa: E731
    return SyncProof(
        token_ids=partial(text_for(info).written_by, greedy),
        trainer=policy.canary,
        engine=lambda token_ids, wanted: control.prove(token_ids, wanted, deadline=deadline()),
        session_id=session_id,
        # The coarser of the two sets what can be expected of them.
        dtype=max((ours, engine_arithmetic(info)), key=tuple(TOLERANCE).index),
        quantization=coarser_quantization(config, rounds=info.model.rounds),
        adapter=config.bridge.capabilities.adapter_only,
        trainer_digests=mine,
        wanted=wanted,
        concurrent=True,
    )


def engine_arithmetic(info: ServerInfo) -> str:
    """Return the arithmetic of a server: its dtype, or TF32 if vLLM's attention multiplies float32 on a GPU."""
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
    """Return the trainer's exact digests, and what to ask the server for; None if the server's tensors differ in form.

    They differ with adapters split over GPUs, with kernels that repack weights (as on the CPU), with layers whose cut
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
    """Return the coarser quantization of trainer and engine.

    That is the trainer's base weights', or the engine's if it ``rounds`` so much.
    """
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
