"""What a run needs beside its engine, as far as the run knows of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lachesis.run.pulse import Pulse


class Companions(Protocol):
    """Processes that a run needs besides its engine, such as the environments that generate."""

    @property
    def starts_api(self) -> bool: ...

    def pulses(self) -> Sequence[Pulse]: ...

    def start(self, run_dir: Path) -> None: ...

    def watch(self) -> None: ...

    def stop(self) -> None: ...
