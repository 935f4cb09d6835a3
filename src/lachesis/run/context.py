"""Records that the parts of a run share: its context, its place on disk, and its engine with the bridge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from lachesis.common.errors import StopRequested
from lachesis.common.world import World
from lachesis.engines.fleet import EngineRow
from lachesis.run.pulse import Pulse

if TYPE_CHECKING:
    from lachesis.bridges.base import Bridge
    from lachesis.bridges.external import OwnedEngine
    from lachesis.bridges.shared import EngineWeights
    from lachesis.run.launch import LaunchedEngine
    from lachesis.run.ranks import Leadership
    from lachesis.train.policy import Policy


class Companions(Protocol):
    """Processes that a run needs besides its engine, such as the environments that generate."""

    @property
    def starts_api(self) -> bool: ...

    def pulses(self) -> Sequence[Pulse]: ...

    def start(self, run_dir: Path) -> None: ...

    def watch(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The context of a run: its console, the function that stops it, and the processes beside it.

    Attributes:
        console: the console for progress; None shows nothing.
        stop_requested: called after each step, and while the run waits; True saves a checkpoint and ends the run early.
        companions: processes to start once the run directory exists, and to stop at the end.
        world: the ranks, of which this process is the first; the others call :func:`lachesis.run.ranks.follow`.
        leadership: rank 0's means to lead the others; set once all ranks have joined.
        launched: the run's servers, if their start has begun.
    """

    console: Console | None = None
    stop_requested: Callable[[], bool] = lambda: False
    companions: Companions | None = None
    world: World | None = None
    leadership: Leadership | None = None
    launched: LaunchedEngine | None = None

    def raise_if_stopped(self) -> None:
        """Raise StopRequested if the run was asked to stop, or the error that ended another rank."""
        if self.leadership is not None:
            self.leadership.leader.check()
        if self.stop_requested():
            raise StopRequested("the run was asked to stop while it waited for its engine or for environments")


# The context of a run without a console, companions or other ranks.
ALONE = RunContext()


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The directory for files shared by run and engine, and the name under which the run claims engines.

    ``engine_log`` receives the output of servers that the run starts.
    """

    directory: Path
    engine_log: Path
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSide:
    """Engine of a run with the bridge to it.

    Attributes:
        weights: the engine's tensors on which to build the policy, if they are shared.
        owned: the servers that the run itself started.
    """

    bridge: Bridge[Policy]
    weights: EngineWeights | None = None
    owned: OwnedEngine | None = None

    def rows(self) -> tuple[EngineRow, ...]:
        """Return the state of each engine, if there are several."""
        return ()

    def pulses(self) -> list[Pulse]:
        """Return a pulse for each server; none for an engine in this process."""
        return []

    def keep_log(self, path: Path) -> None:
        """Move the log of the servers into the run directory."""
        if self.owned is not None:
            self.owned.move_log(path)

    def close(self) -> None:
        """Stop everything that was started. Idempotent."""
        self.bridge.close()
