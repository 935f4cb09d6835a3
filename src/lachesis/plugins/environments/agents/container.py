"""An agent in a container: the command line of docker or podman around its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from lachesis.common.errors import ConfigError

PROGRAMS = ("docker", "podman")
_REMOVE_S = 30.0


@dataclass(frozen=True, slots=True)
class Container:
    """Where a rollout's command runs: ``program`` is docker or podman, ``image`` what it starts.

    The container has the network of this machine, so that it reaches the proxy; of its files the rollout's alone, at
    the same path, and as this user.
    """

    program: str
    image: str

    def command(self, command: Sequence[str], *, name: str, scratch: Path, variables: Collection[str]) -> list[str]:
        """The whole command line.

        Args:
            name: by which the container is removed.
            scratch: directory of the rollout, of which ``work`` is the container's current one.
            variables: names of those that it is given; their values are in the environment, which no list of
                processes shows.
        """
        given = [word for variable in sorted(variables) for word in ("--env", variable)]
        work = scratch / "work"
        return [
            self.program, "run", "--rm", "--init", "--name", name, "--network", "host",
            "--user", f"{os.getuid()}:{os.getgid()}", "--volume", f"{scratch}:{scratch}", "--workdir", str(work),
            "--env", f"HOME={work}", *given, self.image, *command,
        ]  # fmt: skip

    def remove(self, name: str) -> None:
        """End the container, which outlives the command that started it. One that has ended is none to complain of."""
        line = [self.program, "rm", "--force", name]
        subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_REMOVE_S, check=False)


def container_of(spec: str) -> Container:
    """The container of ``docker:IMAGE`` or ``podman:IMAGE``. Raises ConfigError where it is none, or not installed."""
    program, _, image = spec.partition(":")
    if program not in PROGRAMS or not image:
        raise ConfigError(f"source.container is {spec!r}", remedy="write docker:IMAGE or podman:IMAGE")
    if shutil.which(program) is None:
        raise ConfigError(f"source.container needs {program}, which is not there", remedy=f"install {program}")
    return Container(program, image)
