"""The proof of sync of a policy with its engine, in this process or behind a server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from lachesis.bridges.extract import Whole, adapter_digests, base_parameters, full_digests, text_config
from lachesis.bridges.names import Slice, map_parameters
from lachesis.bridges.proof import Digests, SyncProof
from lachesis.bridges.shared import EngineWeights
from lachesis.common.deadline import Deadline
from lachesis.common.errors import ModelError
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import Engine
from lachesis.engines.http.client import HttpEngine

logger = logging.getLogger("lachesis")

_CANARY_TOKENS = 16


class ModelPolicy(Protocol):
    """What is proved of a policy: its model, with the adapter if it has one, and that model's transformer."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def transformer(self) -> PreTrainedModel: ...

    def canary(self, token_ids: Sequence[int]) -> Sequence[float]: ...


ModelPolicyT = TypeVar("ModelPolicyT", bound=ModelPolicy)


def local_proof(policy: ModelPolicy, engine: Engine, *, context: int) -> SyncProof:
    """Proof of sync with an engine in this process, by a canary; ``context`` is the longest that it may be."""
    return SyncProof(
        token_ids=_canary(_vocab_size(policy), context),
        trainer=policy.canary,
        engine=engine.canary,
        session_id=engine.health().session_id,
        dtype=str(policy.transformer.dtype).removeprefix("torch."),
    )


def remote_proof(
    config: LachesisConfig,
    policy: ModelPolicyT,
    engine: HttpEngine,
    *,
    weights: EngineWeights | None,
    whole_of: Callable[[ModelPolicyT], Whole],
) -> SyncProof:
    """Proof of sync with a server: a canary of ordinary tokens, and digests where both sides hold equal tensors."""
    deadline = partial(Deadline, "the proof of sync", config.deadlines.sync_s, "deadlines.sync_s")
    info = engine.controls[0].info(deadline=deadline())
    ours = str(policy.transformer.dtype).removeprefix("torch.")
    digests = digest_functions(config, policy, engine, weights=weights, whole=whole_of(policy), deadline=deadline)
    mine, theirs = digests or (dict, dict)
    return SyncProof(
        token_ids=_canary(min(_vocab_size(policy), info.model.vocab_size), info.model.max_model_len - 1),
        trainer=policy.canary,
        engine=engine.canary,
        session_id=engine.session_id,
        # The coarser of the two sets what can be expected of them.
        dtype=max((ours, info.model.dtype), key=("float64", "float32", "float16", "bfloat16").index),
        quantization=config.model.quantization,
        trainer_digests=mine,
        engine_digests=theirs,
        concurrent=True,
    )


def digest_functions(
    config: LachesisConfig,
    policy: ModelPolicy,
    engine: HttpEngine,
    *,
    weights: EngineWeights | None,
    whole: Whole,
    deadline: Callable[[], Deadline],
) -> tuple[Digests, Digests] | None:
    """Exact digests of what travels, on both sides; none where the engine keeps it in another form.

    That is so with weights split over GPUs, with kernels that repack them (as on the CPU), and in another dtype.
    """
    info = engine.controls[0].info(deadline=deadline())
    if info.model.tensor_parallel_size > 1:
        return None
    dtype: torch.dtype = getattr(torch, info.model.dtype)
    if config.bridge.capabilities.adapter_only:
        return (
            lambda: adapter_digests(policy.model, dtype=dtype, whole=whole),
            lambda: engine.digests({}, adapter=True, deadline=deadline()).digests,
        )
    if dtype != policy.transformer.dtype:
        return None
    slices = weights.slices if weights is not None else _parameter_slices(policy, engine, deadline=deadline())
    if slices is None:
        return None
    wanted = {name: entry.for_digest() for name, entry in slices.items()}
    return (
        lambda: full_digests(policy.model, whole=whole),
        lambda: engine.digests(wanted, deadline=deadline()).digests,
    )


def _parameter_slices(policy: ModelPolicy, engine: HttpEngine, *, deadline: Deadline) -> Mapping[str, Slice] | None:
    info = engine.controls[0].info(deadline=deadline)
    there = {name: tensor.shape for name, tensor in engine.controls[0].state_dict_info(deadline=deadline).items()}
    try:
        return map_parameters(
            {name: tuple(p.shape) for name, p in base_parameters(policy.model).items()},
            there,
            model_type=text_config(policy.transformer).model_type,
            engine_kind=info.engine,
        )
    except ModelError as error:
        logger.info("weights are proved by the canary alone: %s", error.message)
        return None


def _vocab_size(policy: ModelPolicy) -> int:
    return text_config(policy.transformer).vocab_size


def _canary(vocab_size: int, longest: int) -> list[int]:
    """A fixed prompt of ordinary tokens."""
    return [(7 * i + 5) % vocab_size for i in range(min(_CANARY_TOKENS, longest))]
