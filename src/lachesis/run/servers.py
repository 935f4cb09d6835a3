"""The engine of a run on inference servers, started by the run or already running, and the bridge to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lachesis.bridges.broadcast import PackBuckets
from lachesis.bridges.build import BridgeParts, build_bridge, engine_weights
from lachesis.bridges.external import OwnedEngine
from lachesis.bridges.model_files import save_companions
from lachesis.bridges.names import check_same_model
from lachesis.bridges.sent_weights import Whole, as_they_are
from lachesis.common.deadline import Deadline
from lachesis.config.schema import HttpEngineConfig, LachesisConfig
from lachesis.engines.addresses import addresses
from lachesis.engines.build import server_command, server_urls
from lachesis.engines.fleet import EngineRow
from lachesis.engines.http.client import HttpEngine
from lachesis.process.managed import ManagedProcess, wait_together
from lachesis.run.colocated_engine import with_room_aside
from lachesis.run.context import ALONE, EngineSide, RunContext, RunPlace
from lachesis.run.launch import LaunchedEngine, launch_servers
from lachesis.run.pulse import Pulse, server_pulse
from lachesis.train.model.loading import empty_transformer
from lachesis.train.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersSide(EngineSide):
    """An engine on servers, with its bridge."""

    engine: HttpEngine

    def rows(self) -> tuple[EngineRow, ...]:
        """Return the state of each engine, if there are several."""
        return () if len(self.engine.urls) == 1 else self.engine.fleet.rows

    def pulses(self) -> list[Pulse]:
        """Return the pulse of each server."""
        fleet = self.engine.fleet
        return [
            server_pulse(url, has_requests=lambda url=url: url in fleet.at_work, give_up=partial(fleet.given_up, url))
            for url in self.engine.urls
        ]


def build_servers(
    config: LachesisConfig,
    *,
    place: RunPlace,
    context: RunContext = ALONE,
    meanwhile: Callable[[], None] = lambda: None,
    pack_buckets: PackBuckets[Policy] | None = None,
    canary_prompt: Sequence[int] = (),
) -> EngineSide:
    """Start the servers if the run manages them, claim them, and build the bridge.

    ``meanwhile`` is called while servers start. A request to stop ends the wait for them.

    Raises:
        EngineError: a server died, its port is in use, it does not answer, or another run has claimed it.
        DeadlineExceeded: a server was not able to serve in time.
        ModelError: a running server serves another model.
    """
    # External servers may join and leave, unless they share memory with the trainer.
    changing = None if config.shares_weights or not isinstance(config.engine, HttpEngineConfig) else config.engine.urls
    members = None if changing is None else partial(addresses, changing)
    engine = HttpEngine(server_urls(config), control_s=config.deadlines.sync_s, hang_s=config.deadlines.progress_s)
    launched = context.launched
    if launched is None:
        launched = launch_servers(config, directory=place.directory, log_path=place.engine_log)
    processes = launched.take()
    try:
        _claim(config, engine, launched=launched, owner=place.owner, context=context, meanwhile=meanwhile)
        parts = _bridge_parts(
            config,
            engine=engine,
            place=place,
            processes=processes,
            context=context,
            members=members,
            pack_buckets=pack_buckets,
            canary_prompt=canary_prompt,
        )
        bridge = build_bridge(parts)
    except BaseException:
        engine.close()
        launched.stop()
        raise
    return ServersSide(bridge=bridge, weights=parts.weights, owned=parts.owned, engine=engine)


def _claim(
    config: LachesisConfig,
    engine: HttpEngine,
    *,
    launched: LaunchedEngine,
    owner: str,
    context: RunContext,
    meanwhile: Callable[[], None],
) -> None:
    """Wait until the servers answer, and claim them; external servers must serve the trained model."""
    given = config.engine if config.engine.kind == "http" else None
    wait_s = 0.0 if given is None else given.wait_s
    deadline = Deadline(
        "the start of the engine",
        config.deadlines.engine_start_s + wait_s,
        "deadlines.engine_start_s",
        watch=context.raise_if_stopped,
    )
    if launched.processes:
        meanwhile()
    wait_together(launched.processes, deadline=deadline)
    if context.console is not None and config.engine.kind == "vllm":
        context.console.print(f"engine: ready after {launched.age_s:.0f} s", markup=False)
    engine.connect_when_up(wait_s=wait_s, deadline=deadline)
    engine.claim(owner, takeover=given is not None and given.takeover, deadline=deadline)
    if not launched.processes:
        check_model(config, engine, deadline=deadline)


def _bridge_parts(
    config: LachesisConfig,
    *,
    engine: HttpEngine,
    place: RunPlace,
    processes: Sequence[ManagedProcess],
    context: RunContext,
    members: Callable[[], Sequence[str]] | None,
    pack_buckets: PackBuckets[Policy] | None,
    canary_prompt: Sequence[int],
) -> BridgeParts[Policy]:
    """Return the parts of a bridge to the servers: the servers, and how to read a policy's weights."""
    start_s = config.deadlines.engine_start_s
    owned = OwnedEngine(engine=engine, processes=processes, owner=place.owner, start_s=start_s) if processes else None
    return BridgeParts(
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
        together=None if context.leadership is None else context.leadership.together,
        canary_prompt=canary_prompt,
    )


def whole_of(policy: Policy) -> Whole:
    """Return the function that gathers the policy's sharded parameters before they are sent."""
    return policy.whole if policy.strategy.sharded else as_they_are


def check_model(config: LachesisConfig, engine: HttpEngine, *, deadline: Deadline) -> None:
    """Check that external servers serve the trained model.

    Weights that are sharded over several GPUs, or quantized, are not checked.

    Raises:
        ModelError: they serve another model; the message says how the two differ.
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
