"""What a run does about failures: an engine that dies is started again, one that was not used is given back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError, LachesisError
from lachesis.common.types import EvalResult
from lachesis.config.schema import HttpEngineConfig, LachesisConfig
from lachesis.engines.http.control import ServerControl
from lachesis.pipeline.feed import BatchT, Feed
from lachesis.run.engine import EngineSide
from lachesis.train.loop import Evaluation

logger = logging.getLogger("lachesis")

T = TypeVar("T")

_RELEASE_S = 5.0


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
            for url in engine.urls:
                # What went wrong before says more.
                with suppress(LachesisError), closing(ServerControl(url)) as control:
                    control.release(owner, deadline=Deadline("giving the engine back", _RELEASE_S))
        raise


class Recovery:
    """Makes a dead engine serve the trainer's weights again.

    Only engines that the run itself started are started again, and none in whose memory the trainer's weights
    are: those are lost with it.

    Args:
        side: the engine and its bridge.
        start_s: the longest a start may take, in seconds.
    """

    def __init__(self, side: EngineSide, *, start_s: float) -> None:
        self._side = side
        self._start_s = start_s
        self._recovered: int | None = None

    def __call__(self, error: EngineError) -> None:
        """Return once the engine serves the weights of now.

        Raises:
            EngineError: ``error``, where the engine lives or is not ours; or that it died twice with these weights.
        """
        side, bridge = self._side, self._side.bridge
        if side.owned is None or not side.owned.died():
            raise error
        if side.weights is not None:
            raise EngineError(
                f"the engine died and the weights in its memory with it: {error.message}",
                remedy="go on from the last checkpoint with --resume",
            ) from error
        if self._recovered == bridge.version:
            raise EngineError(
                f"the engine died a second time with weight version {bridge.version}: {error.message}",
                remedy="read the engine's log: starting it again will not help",
            ) from error
        self._recovered = bridge.version
        logger.warning("the engine died; starting it again with weight version %d", bridge.version)
        if not bridge.capabilities.owns_engine:  # those start it in their transfer
            deadline = Deadline("the engine's second start", self._start_s, "deadlines.engine_start_s")
            with deadline.waiting():
                side.owned.restart(deadline=deadline)
        bridge.renew()
        bridge.sync(bridge.version)

    def retry(self, call: Callable[[], T]) -> T:
        """``call``, and once more if the engine died in it and serves again."""
        try:
            return call()
        except EngineError as error:
            self(error)
        return call()


class RecoveringFeed(Feed[BatchT]):
    """A feed whose batches may need an engine that has to be started again."""

    def __init__(self, feed: Feed[BatchT], *, recovery: Recovery) -> None:
        self._feed = feed
        self._recovery = recovery

    def next(self) -> BatchT:
        return self._recovery.retry(self._feed.next)

    def advance(self, step: int) -> None:
        self._feed.advance(step)

    def counters(self) -> dict[str, float]:
        return self._feed.counters()

    def state_dict(self) -> dict[str, Any]:
        return self._feed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._feed.load_state_dict(state)

    def close(self) -> None:
        self._feed.close()


class RecoveringEvaluation(Evaluation):
    """The same for evaluation."""

    def __init__(self, evaluation: Evaluation, *, recovery: Recovery) -> None:
        self._evaluation = evaluation
        self._recovery = recovery

    def due(self, step: int) -> bool:
        return self._evaluation.due(step)

    def maybe_run(self, step: int) -> EvalResult | None:
        return self._recovery.retry(lambda: self._evaluation.maybe_run(step))
