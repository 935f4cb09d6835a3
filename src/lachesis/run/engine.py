"""The engine of a run with the bridge to it, from their sections of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lachesis.bridges.base import Bridge
from lachesis.bridges.broadcast import PackBuckets
from lachesis.bridges.build import BridgeParts, build_bridge, engine_weights
from lachesis.bridges.external import OwnedEngine
from lachesis.bridges.extract import Whole, as_they_are
from lachesis.bridges.in_process import InProcessBridge
from lachesis.bridges.names import check_same_model
from lachesis.bridges.proof import local_proof
from lachesis.bridges.saved import save_companions
from lachesis.bridges.shared import EngineWeights
from lachesis.common.deadline import Deadline
from lachesis.common.errors import LachesisError
from lachesis.config.schema import HttpEngineConfig, LachesisConfig
from lachesis.engines.addresses import addresses
from lachesis.engines.base import Engine, TrainedModel
from lachesis.engines.build import IN_PROCESS, server_command, server_urls
from lachesis.engines.fleet import EngineRow
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.http.control import ServerControl
from lachesis.run.fleet import fleet_members
from lachesis.run.launch import LaunchedEngine, launch_servers
from lachesis.run.pulse import Pulse, server_pulse
from lachesis.run.share import with_room_aside
from lachesis.train.model.loading import LoadedModel, context_length, empty_transformer, eos_token_ids, load_model
from lachesis.train.policy import Policy

_RELEASE_S = 5.0


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run keeps what engine and trainer exchange, and the name under which it claims engines.

    ``engine_log`` is where the output of servers goes that the run starts.
    """

    directory: Path
    engine_log: Path
    owner: str


@dataclass(frozen=True, slots=True)
class EngineSide:
    """Everything beyond the trainer. ``weights`` are the engine's tensors that the policy is built on, if any.

    ``owned`` are the servers that the run itself started.
    """

    bridge: Bridge[Policy]
    weights: EngineWeights | None = None
    owned: OwnedEngine | None = None

    def rows(self) -> tuple[EngineRow, ...]:
        """How the engines stand, where there are several."""
        engine = self.bridge.engine
        if not isinstance(engine, HttpEngine) or len(engine.urls) == 1:
            return ()
        return engine.fleet.rows

    def pulses(self) -> list[Pulse]:
        """What tells that a server is stopped or silent; nothing of an engine in this process."""
        engine = self.bridge.engine
        return [server_pulse(url) for url in engine.urls] if isinstance(engine, HttpEngine) else []

    def keep_log(self, path: Path) -> None:
        """Move the log of the servers to its place in the run directory, which is there by now."""
        if self.owned is not None:
            self.owned.move_log(path)

    def close(self) -> None:
        """Stop what was started. Idempotent."""
        self.bridge.close()


def build_engine_side(
    config: LachesisConfig,
    *,
    place: RunPlace,
    sharded: bool = False,
    watch: Callable[[], None] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    launched: LaunchedEngine | None = None,
    pack_buckets: PackBuckets[Policy] | None = None,
    canary_prompt: Sequence[int] = (),
) -> EngineSide:
    """The bridge with its engine. One in this process is built once the policy exists, others run when this returns.

    Args:
        sharded: the policy's model is cut over ranks; an engine in this process gets a whole one of its own.
        watch: called while servers are waited for; what it raises ends the wait.
        meanwhile: called once, when servers have been started that take their time to come up.
        launched: the servers that the run starts, where they are on their way up already.
        pack_buckets, canary_prompt: as :class:`~lachesis.bridges.build.BridgeParts` has them.

    Raises:
        EngineError, DeadlineExceeded: as :func:`build_servers`.
    """
    if config.engine.place != "trainer":
        return build_servers(
            config,
            place=place,
            watch=watch,
            meanwhile=meanwhile,
            launched=launched,
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
    """The engine in this process, around the policy's model or a whole one beside a policy whose model is sharded."""
    trained = TrainedModel(
        model=loaded.transformer,
        tokenizer=loaded.tokenizer,
        eos_token_ids=eos_token_ids(loaded),
        max_context=context_length(config.model),
    )
    return IN_PROCESS[type(config.engine)](config.engine, trained)


def build_servers(
    config: LachesisConfig,
    *,
    place: RunPlace,
    watch: Callable[[], None] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    launched: LaunchedEngine | None = None,
    pack_buckets: PackBuckets[Policy] | None = None,
    canary_prompt: Sequence[int] = (),
) -> EngineSide:
    """The engine in its own process, started if the run manages it and claimed, and the bridge to it.

    Servers that were started are given ``meanwhile`` to come up. While they are waited for after that, ``watch`` is
    called; what it raises ends the wait.

    Raises:
        EngineError: a server died, its port is taken, it does not answer, or another run has it.
        DeadlineExceeded: it was not able to serve in time.
        ModelError: a server that runs already serves another model.
    """
    members = fleet_members(config, directory=place.directory)
    urls = server_urls(config) if members is None else members()
    engine = HttpEngine(urls, control_s=config.deadlines.sync_s, hang_s=config.deadlines.progress_s)
    start_s = config.deadlines.engine_start_s
    if launched is None:
        launched = launch_servers(config, directory=place.directory, log_path=place.engine_log)
    processes = launched.take()
    owned = OwnedEngine(engine=engine, processes=processes, owner=place.owner, start_s=start_s) if processes else None
    try:
        wait_s = config.engine.wait_s if config.engine.kind == "http" else 0.0
        limit_s = start_s + wait_s
        deadline = Deadline("the start of the engine", limit_s, "deadlines.engine_start_s", watch=watch)
        if processes:
            meanwhile()
        launched.wait_ready(deadline=deadline)
        quorum = config.engine.quorum if config.engine.kind == "http" else None
        engine.connect_when_up(wait_s=wait_s, quorum=quorum, deadline=deadline)
        takeover = config.engine.kind == "http" and config.engine.takeover
        engine.claim(place.owner, takeover=takeover, deadline=deadline)
        if not processes:
            check_model(config, engine, deadline=deadline)
        parts: BridgeParts[Policy] = BridgeParts(
            config=with_room_aside(config),
            engine=engine,
            directory=place.directory,
            weights=engine_weights(config, engine=engine, owner=place.owner, directory=place.directory),
            owned=owned,
            command=partial(server_command, config, directory=place.directory),
            members=members,
            whole_of=whole_of,
            companions=lambda policy, path: save_companions(policy.transformer, policy.loaded.tokenizer, path),
            make_room=lambda policy: policy.make_room(),
            pack_buckets=pack_buckets,
            together=lambda policy: policy,
            canary_prompt=canary_prompt,
        )
        bridge = build_bridge(parts)
    except BaseException:
        engine.close()
        launched.stop()
        raise
    return EngineSide(bridge=bridge, weights=parts.weights, owned=owned)


def whole_of(policy: Policy) -> Whole:
    """What makes parameters of the policy whole before they travel."""
    return policy.whole if policy.strategy.sharded else as_they_are


def check_model(config: LachesisConfig, engine: HttpEngine, *, deadline: Deadline) -> None:
    """See that servers which others have started serve the model that is trained.

    Nothing can be said of weights that are cut over several GPUs, or quantized.

    Raises:
        ModelError: they serve another one; the message says how the two differ.
    """
    control = engine.controls[0]
    info, held = control.info(deadline=deadline), control.state_dict_info(deadline=deadline)
    if info.model.tensor_parallel_size > 1 or any(tensor.dtype != info.model.dtype for tensor in held.values()):
        return
    model = empty_transformer(config.model, dtype=torch.float32)
    check_same_model(
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        {name: tensor.shape for name, tensor in held.items()},
        model_type=model.config.get_text_config().model_type,
        engine_kind=info.engine,
    )


@contextmanager
def unclaimed_on_error(config: LachesisConfig, *, owner: str, claimed_before: bool) -> Iterator[None]:
    """Within it a run is built: one that fails here has changed no weights, so the next one may claim its servers.

    Args:
        config: of the run; servers that it starts itself end with it.
        owner: the name under which it claims engines.
        claimed_before: the servers may have weights of this run already, and stay claimed. So do those that it takes
            over, which have another run's.
    """
    try:
        yield
    except BaseException:
        engine = config.engine
        if isinstance(engine, HttpEngineConfig) and not engine.takeover and not claimed_before:
            for url in addresses(engine.urls):
                # What went wrong before says more.
                with suppress(LachesisError), closing(ServerControl(url)) as control:
                    control.release(owner, deadline=Deadline("giving the engine back", _RELEASE_S))
        raise
