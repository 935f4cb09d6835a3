"""The engine of a run and the bridge to it, built from their sections of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from lachesis.bridges.base import Bridge
from lachesis.bridges.in_process import InProcessBridge
from lachesis.bridges.proof import local_proof
from lachesis.common.deadline import Deadline
from lachesis.common.errors import LachesisError
from lachesis.config.schema import HttpEngineConfig, LachesisConfig
from lachesis.engines.base import Engine, TrainedModel
from lachesis.engines.build import IN_PROCESS, custom_engine
from lachesis.run.context import ALONE, EngineSide, RunContext, RunPlace
from lachesis.train.model.loading import LoadedModel, context_length, eos_token_ids, load_model
from lachesis.train.policy import Policy

if TYPE_CHECKING:
    from lachesis.bridges.broadcast import PackBuckets

_RELEASE_S = 5.0


def build_engine_side(
    config: LachesisConfig,
    *,
    place: RunPlace,
    sharded: bool = False,
    context: RunContext = ALONE,
    meanwhile: Callable[[], None] = lambda: None,
    pack_buckets: PackBuckets[Policy] | None = None,
    canary_prompt: Sequence[int] = (),
) -> EngineSide:
    """Build the engine and its bridge. Servers are ready on return; an engine in this process waits for the policy.

    Args:
        sharded: True if the policy's model is sharded over ranks; an engine in this process then gets a whole copy.
        context: the run's context; a request to stop ends the wait for servers.
        meanwhile: called once while servers start. pack_buckets, canary_prompt: as in
            :class:`~lachesis.bridges.build.BridgeParts`.

    Raises:
        EngineError, DeadlineExceeded: as :func:`build_servers`.
    """
    if config.engine.place != "trainer":
        from lachesis.run.servers import build_servers

        return build_servers(
            config,
            place=place,
            context=context,
            meanwhile=meanwhile,
            pack_buckets=pack_buckets,
            canary_prompt=canary_prompt,
        )
    second = load_model(config.model, config.adapter) if sharded else None

    def engine_around(policy: Policy) -> Engine:
        engine = build_engine(config, second or policy.loaded)
        if second is None:
            policy.alone = engine.exclusive
        return engine

    proof = partial(local_proof, context=context_length(config.model), prompt=canary_prompt, one_model=second is None)
    bridge: Bridge[Policy] = InProcessBridge(
        engine_builder=engine_around,
        proof_builder=proof if config.bridge.proof else None,
        bring=None if second is None else lambda policy: policy.copy_to(second.model),
        sync_s=config.deadlines.sync_s,
    )
    return EngineSide(bridge=bridge)


def build_engine(config: LachesisConfig, loaded: LoadedModel) -> Engine:
    """Build an engine in this process on the policy's model, or on a whole copy if the policy is sharded."""
    trained = TrainedModel(
        model=loaded.transformer,
        tokenizer=loaded.tokenizer,
        eos_token_ids=eos_token_ids(loaded),
        max_context=context_length(config.model),
    )
    return IN_PROCESS.get(type(config.engine), custom_engine)(config.engine, trained)


@contextmanager
def unclaimed_on_error(config: LachesisConfig, *, owner: str, claimed_before: bool) -> Iterator[None]:
    """Release claimed servers if the block, which builds a run, fails: no weights were changed.

    Args:
        config: the run's configuration; servers that the run starts itself are left alone.
        owner: the name under which it claims engines.
        claimed_before: True if servers may already have weights of this run; they stay claimed. Servers taken over from
            another run stay claimed too, because they have that run's weights.
    """
    try:
        yield
    except BaseException:
        engine = config.engine
        if isinstance(engine, HttpEngineConfig) and not engine.takeover and not claimed_before:
            from lachesis.engines.addresses import addresses
            from lachesis.engines.http.control import ServerControl

            for url in addresses(engine.urls):
                # The original error matters more than one from here.
                with suppress(LachesisError), closing(ServerControl(url)) as control:
                    control.release(owner, deadline=Deadline("releasing the engine", _RELEASE_S))
        raise
