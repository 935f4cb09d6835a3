"""Proof of sync with the servers of a fleet: each is proved separately, and one that fails is left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from lachesis.bridges.canary import CanaryText, Greedy
from lachesis.bridges.names import map_parameters
from lachesis.bridges.proof import (
    NO_DIGESTS,
    TOLERANCE,
    Digests,
    EngineSays,
    ModelPolicy,
    ModelPolicyT,
    Proved,
    SyncProof,
    TrainerSays,
    coarser_quantization,
    vocab_size_of,
)
from lachesis.bridges.sent_weights import Whole, adapter_digests, base_parameters, text_config
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineUnreachable, LachesisError, ModelError, StaleWeights
from lachesis.config.schema import LachesisConfig
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.http.control import ServerControl
from lachesis.engines.http.dispatch import nobody_serves
from lachesis.engines.serving.backend import DigestRequest, DigestSlice
from lachesis.engines.serving.operations import ServerInfo
from lachesis.transport.float8 import FP8, SCALE
from lachesis.transport.shared_tensors import dtype_name

logger = logging.getLogger("lachesis")

# Returns the rows of the engine's tensors that a policy's parameters are, if it is built on these tensors.
Slices = Callable[[], Mapping[str, DigestSlice]]
# Errors that end the proof of one engine, but not the proofs of the others.
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
            StaleWeights, EngineUnreachable: raised by the first engine's proof, if no engine was proved.
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
            logger.warning("an engine is left out and the others continue: %s", failure.message)
        self._engine.fleet.require(version)
        return max(proved, key=lambda one: (bool(one.doubt), one.ratio))

    def _canary(self, controls: Sequence[ServerControl], failures: list[LachesisError]) -> Sequence[int]:
        """Return the canary, written by the first engine that can."""
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
        """Return the proof of one engine in its last known session."""
        session_id = self._engine.fleet.session(control.url)
        proof = self._proofs.get(control.url)
        if proof is None or proof.session_id != session_id:
            proof = self._proofs[control.url] = self._proof_of(control)
        return proof


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
        slices_of: the policy's rows of the engine's tensors, if it is built on them.
        whole_of: makes the policy's parameters whole before they travel.
        prompt: token ids with which the canary begins.
    """
    text: list[CanaryText] = []  # made with the first server's limits, and the same for all

    def text_for(info: ServerInfo) -> CanaryText:
        if not text:
            vocab_size = min(vocab_size_of(policy), info.model.vocab_size)
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
    """Return the trainer's exact digests and the request for the server's; None if the server's tensors differ in form.

    They differ in form if the dtype is another, if an adapter is split over GPUs, if kernels repack weights (as on the
    CPU), or if the server does not know how a layer is split.
    """
    info = control.info(deadline=deadline())
    dtype: torch.dtype = getattr(torch, info.model.dtype)
    if config.bridge.capabilities.adapter_only:
        if info.model.tensor_parallel_size > 1:
            logger.info("only the canary proves the adapter: each of the engine's workers has a part of it")
            return None
        return (lambda: adapter_digests(policy.model, dtype=dtype, whole=whole), DigestRequest(slices={}, adapter=True))
    if dtype != policy.transformer.dtype:
        return None
    slices = slices_of() if slices_of is not None else _parameter_slices(policy, control, info, deadline=deadline())
    if slices is None:
        return None
    quantized = frozenset(name.removesuffix(SCALE) for name in slices if name.endswith(SCALE))
    return (lambda: policy.weight_digests(quantized=quantized), DigestRequest(slices=dict(slices)))


def _parameter_slices(
    policy: ModelPolicy, control: ServerControl, info: ServerInfo, *, deadline: Deadline
) -> Mapping[str, DigestSlice] | None:
    held = control.state_dict_info(deadline=deadline)
    if repacked := [name for name, tensor in held.items() if 0 in tensor.shape]:
        which = ", ".join(repacked[:2]) + (f" and {len(repacked) - 2} more" if len(repacked) > 2 else "")
        logger.info("only the canary proves the weights: the engine has %s in another form", which)
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
        logger.info("only the canary proves the weights: %s", error.message)
        return None
    quantized = {name: part for name, part in slices.items() if part.name in in_8_bits}
    # A row and its scale stand at the same place of their tensors.
    return slices | {name + SCALE: replace(part, name=part.name + SCALE) for name, part in quantized.items()}
