"""Proof of sync: the engine holds the trainer's bytes, computes its logprobs, and moves when the weights do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from torch import nn
from transformers import PreTrainedModel

from lachesis.bridges.canary import CanaryText, Evidence, History, NoiseScale, disagreement
from lachesis.bridges.sent_weights import text_config
from lachesis.common.deadline import Deadline
from lachesis.common.errors import StaleWeights
from lachesis.common.types import CanaryReading, GenerationRequest, SamplingParams
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import Engine
from lachesis.engines.serving.backend import DigestRequest

logger = logging.getLogger("lachesis")

# The largest mean of |z| (see lachesis.bridges.canary) between two correct passes over the same weights, by dtype, on
# any model: ten times what was seen on pretrained ones. With products in TF32, which has float16's ten bits, float32
# weights were 0.003 and 0.005 nats apart on a GPU.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "tf32": 0.05, "float16": 0.05, "bfloat16": 0.25}
# Smallest usual mean of |z|, because a small model may agree better at first than after training.
_FLOOR = {"float64": 1e-10, "float32": 1e-5, "tf32": 1e-3, "float16": 1e-3, "bfloat16": 8e-3}
# The same limit if only the trainer's base weights are quantized: int8 moves a weight by about 0.6% of the weights'
# deviation, NF4 by 9%. The adapter's digests then prove the transfer itself.
# An engine in fp8 also rounds its inputs, or keys and values, by 3% of a value each. Digests prove its bytes.
# With both, an 8B model with random weights was 2.2 nats off.
QUANTIZED_TOLERANCE = {"none": 0.0, "int8": 0.5, "fp8": 2.0, "nf4": 4.0, "fp8 with its cache": 4.0}
# If digests prove the bytes, a disagreement beyond this multiple of the allowance is more than rounding can do: the
# engine computes with something other than the digested tensors.
_BEYOND_ROUNDING = 8.0
_ROUNDED = ("none", "fp8", "fp8 with its cache")

Digests = Callable[[], Mapping[str, int]]
NO_DIGESTS = DigestRequest(slices={})
# What each side reports: its reading of the canary, and its digests.
EngineSays = tuple[CanaryReading, Mapping[str, int]]
TrainerSays = tuple[Sequence[float], Mapping[str, int]]


_REMEDIES = {
    "none": "part of the weights did not arrive, or training diverges; look at the engine's log and at grad_norm",
    "adapter": "the engine does not compute with the adapter as the trainer does; look for skipped modules in its log, "
    "and at grad_norm",
    "weights": "the engine has the trainer's bytes but computes something else: its kernels are wrong for this model, "
    "or read a copy made before the update; restart it, try --enforce-eager, and look at its log",
    "one model": "the model's KV cache is wrong in this version of transformers, or its weights diverge; use "
    "engine.kind: vllm or another version of transformers, and look at grad_norm",
}


@dataclass(frozen=True, slots=True)
class Proved:
    """Result of a proof that passed.

    Args:
        error: the largest difference of a canary logprob, in nats.
        ratio: the canary's disagreement as a multiple of its limit. Above 1 only if digests prove the bytes.
        doubt: the canary's evidence against the transfer although the digests agree; empty without any.
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

    Digests show that each tensor arrived bit for bit, even if a 16-bit forward pass cannot resolve the update. The
    canary shows that the engine computes with the weights, whatever its kernels. If digests prove all weights, a
    deviating canary is only a doubt, and ends the run only beyond the reach of rounding; otherwise the canary decides.

    Args:
        token_ids: returns the canary, the same at each call.
        trainer: reads the canary under the trainer's weights, logprobs as in CanaryReading.
        engine: reads it under the engine's, and digests the ``wanted`` tensors.
        session_id: the engine session this run works with.
        dtype: of the weights, or "tf32" where an engine multiplies in it; limits what rounding can do.
        quantization: of one side where the other is not quantized; widens that limit.
        adapter: the engine adds an adapter to its weights, which in 16 bits rounds small updates away.
        trainer_digests: digest by name of each tensor that was to be transferred, as the engine should hold it.
        wanted: the engine's names for them; none without ``trainer_digests``.
        concurrent: read engine and trainer at the same time, for an engine with a separate model.
        one_model: engine and trainer share one model in this process, so nothing can get lost on the way.
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
        quantized = self.quantization != "none"
        self._history = History(floor=_FLOOR[self.dtype], absorbs=self.adapter or quantized, quantized=quantized)

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
        """Return the engine's reading of the canary and the digests of its tensors."""
        return self.engine(token_ids, self.wanted)

    def ask_trainer(self, token_ids: Sequence[int]) -> TrainerSays:
        """Return the trainer's reading of the canary and the digests of the tensors that the engine should hold."""
        return self.trainer(token_ids), self.trainer_digests()

    def judge(self, engine: EngineSays, trainer: TrainerSays, *, version: int) -> Proved:
        """Judge both sides' answers after the transfer of ``version``.

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
        # A NaN does not agree.
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
        """Return the canary's evidence against the transfer, or an empty text."""
        standing = self._history.standing_at(expected, reading.logprobs, usual=self._scale.usual)
        if standing is not None:
            unused = ", so it has the adapter but does not use it" if self._evidence == "adapter" else ""
            return (
                f"after the transfer of version {version} the engine still computes as at version {standing}"
                f"{unused}; the trainer's logprobs have moved since then to {_brief(expected)}, but the engine's are "
                f"{_brief(reading.logprobs)}"
            )
        if ratio <= 1:
            return ""
        allowed = self._scale.allowance
        who = f"after the transfer of version {version} the engine's canary logprobs differ from the trainer's by "
        if self.one_model:
            who = (
                f"at version {version} the logprobs of this model with a KV cache differ from those of its whole "
                "forward pass by "
            )
        return (
            f"{who}"
            f"{mean:.4g} nats of logit noise on average, {ratio:.3g} times what is allowed (a mean of "
            f"{allowed.mean:.3g} and a 0.9 quantile of {allowed.high:.3g}): engine {_brief(reading.logprobs)}, "
            f"trainer {_brief(expected)}"
        )

    def _check_identity(self, reading: CanaryReading, *, version: int) -> None:
        if reading.session_id != self.session_id:
            raise StaleWeights(
                f"the engine that answers has session {reading.session_id}, but this run works with {self.session_id}",
                remedy="stop the engine that another run left behind, or point this run at its own engine",
            )
        if reading.version != version:
            raise StaleWeights(
                f"the engine serves weight version {reading.version}, but the trainer is at {version}",
                remedy="the transfer did not arrive; look at the engine's log",
            )

    def _check_cache(self, reading: CanaryReading, *, version: int) -> None:
        """Raise StaleWeights if the prefix cache knows the probe.

        No prompt begins like the probe, so a cached part of it is older than this update.
        """
        if reading.cached_tokens and version != self._version:
            raise StaleWeights(
                f"after the transfer of version {version} the engine answers from a prefix cache that holds "
                f"{reading.cached_tokens} tokens of the proof's probe, computed with earlier weights",
                remedy="the engine did not clear its prefix cache; restart it, or start it without prefix caching",
            )


def check_digests(
    ours: Mapping[str, int], theirs: Mapping[str, int], *, before: Mapping[str, int], version: int
) -> None:
    """Compare the digests of the sent tensors with those of the engine's.

    Args:
        ours: digest by name of each tensor as the engine should hold it.
        theirs: digest by name as it holds them; further ones do no harm.
        before: ``ours`` of the last proved version, empty without one.
        version: the version that was transferred.

    Raises:
        StaleWeights: a tensor is missing or differs. The message names it and the engine's tensor in its place.
    """
    missing = [name for name in ours if name not in theirs]
    different = [name for name, digest in ours.items() if name in theirs and theirs[name] != digest]
    if not missing and not different:
        return
    parts = [
        f"{len(names)} {one if len(names) == 1 else many} ({_named(names)})"
        for one, many, names in (
            ("differs from the trainer's", "differ from the trainer's", different),
            ("is missing", "are missing", missing),
        )
        if names
    ]
    raise StaleWeights(
        f"after the transfer of version {version}, of {len(ours)} tensors in the engine, {' and '.join(parts)}"
        + _what_instead(different, ours, theirs, before=before),
        remedy="the transfer arrived in part or went to other tensors; look at the engine's log",
    )


def _what_instead(
    different: Sequence[str], ours: Mapping[str, int], theirs: Mapping[str, int], *, before: Mapping[str, int]
) -> str:
    """Describe, as the end of a sentence, the engine's tensors in place of those that differ."""
    if not different:
        return ""
    if stale := [name for name in different if theirs[name] == before.get(name)]:
        few = "" if len(stale) == len(different) else f" {len(stale)} of them"
        return f": it still holds{few or ' them'} as they were before this update"
    named = {digest: name for name, digest in ours.items()}
    if swapped := [(name, named[theirs[name]]) for name in different if theirs[name] in named]:
        return f": it holds {swapped[0][1]} in place of {swapped[0][0]}"
    if len(different) == len(ours) > 1:
        return ": none of them is the trainer's, so these are the weights of another run or model"
    return ""


def _named(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _brief(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.4f}" for value in values[:4])
    return f"[{shown}{', ...' if len(values) > 4 else ''}]"


class ModelPolicy(Protocol):
    """Parts of a policy that a proof reads: its model, with any adapter, and that model's transformer."""

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
    """Build the proof of sync with an engine in this process; a canary alone decides.

    Args:
        policy: the trainer's side.
        engine: the engine's side; it writes the canary.
        context: the most tokens that a sequence may have.
        prompt: token ids with which the canary begins.
        one_model: the engine computes with the policy's model, not with a copy.
    """
    text = CanaryText(prompt, vocab_size=vocab_size_of(policy), longest=context)
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


def coarser_quantization(config: LachesisConfig, *, rounds: int) -> str:
    """Return the coarser quantization of trainer and engine.

    That is the trainer's base weights', or the engine's if its ``rounds`` is coarser.
    """
    kinds = (config.model.quantization, _ROUNDED[rounds])
    return max(kinds, key=QUANTIZED_TOLERANCE.__getitem__)


def vocab_size_of(policy: ModelPolicy) -> int:
    return text_config(policy.transformer).vocab_size
