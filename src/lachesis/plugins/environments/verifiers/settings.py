"""Settings of the players of both lines of verifiers."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DependencyError, EngineError
from lachesis.common.imports import installed_version
from lachesis.common.types import SamplingParams
from lachesis.plugins.environments.turn_server import Turn, TurnServer
from lachesis.rollouts.episodes import TaskPlayers
from lachesis.rollouts.generation import TextDecoder

NEEDS = "pip install 'lachesis[verifiers]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersSettings:
    """Settings of an environment and of playing it.

    Args:
        environment: its id, or a ``.py`` file, which is imported under its own name.
        args: of the environment: keywords of ``load_environment`` (0.1), or its ``env`` section.
        tokenizer: directory of the tokenizer, with the chat template.
        model: name of the tokenizer's model, by which the library may know a renderer.
        renderer: name and fields of a renderer; ``{"name": "auto"}`` renders by the chat template.
        max_tasks: number of tasks, from the first; needed if an environment has unlimited tasks.
        eval_tasks: number of tasks held out, or taken from its own evaluation set.
        max_concurrent: most rollouts at the same time.
    """

    environment: str
    args: Mapping[str, Any] = field(default_factory=dict)
    server: TurnServer
    tokenizer: Path
    model: str = ""
    renderer: Mapping[str, Any] = field(default_factory=lambda: {"name": "auto"})
    params: SamplingParams
    decode: TextDecoder
    max_tasks: int | None = None
    eval_tasks: int = 0
    max_concurrent: int = 1


class VerifiersPlayers(TaskPlayers):
    """The players of one environment, over a server in front of the engine."""

    def __init__(self, settings: VerifiersSettings) -> None:
        self.settings = settings

    def report(self, deadline: Deadline) -> None:
        self.settings.server.begin(deadline)

    async def start(self) -> None:
        await self.settings.server.start()

    async def stop(self) -> None:
        await self.settings.server.stop()


def installed_line() -> str:
    """Return ``0.1`` or ``today``.

    Raises:
        DependencyError: verifiers is not installed, or a release in between, which has neither interface.
    """
    version = installed_version("verifiers")
    if version is None:
        raise DependencyError("source.kind verifiers needs the package verifiers", remedy=NEEDS)
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers == (0, 1):
        return "0.1"
    if numbers >= (0, 4):
        return "today"
    raise DependencyError(f"verifiers {version} is not supported: only 0.1, and 0.4 or later, are", remedy=NEEDS)


def environment_id(environment: str) -> str:
    """Return the id of an environment; a file's directory is added to Python's search path.

    Raises:
        ConfigError: the file does not exist.
    """
    if not environment.endswith(".py"):
        return environment
    path = Path(environment).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"source.environment: there is no file {path}", remedy="name a package or a file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return path.stem


@contextmanager
def own_signals() -> Iterator[None]:
    """Restore the run's signal handlers after the block, because verifiers 0.1 replaces them."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def kept_turns(turns: Sequence[Turn], sampled: Sequence[Sequence[int]], *, where: str) -> list[Turn]:
    """Return the engine's turns that the environment kept, in their order.

    Raises:
        EngineError: the environment has tokens that were never sampled, on which training would be wrong.
    """
    left = Counter(tuple(ids) for ids in sampled)
    kept: list[Turn] = []
    for turn in turns:
        if left[turn.completion.token_ids]:
            left[turn.completion.token_ids] -= 1
            kept.append(turn)
    if lost := [ids for ids, count in left.items() if count]:
        raise EngineError(
            f"{where}: the environment has a completion of {len(lost[0])} tokens that the engine never sampled",
            remedy="its client must use /inference/v1/generate, and keep the tokens of its answers",
        )
    return kept
