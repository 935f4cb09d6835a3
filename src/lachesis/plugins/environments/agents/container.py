"""An agent in a container: the command line of docker or podman around its own command."""

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
    """Container for a rollout's command: ``program`` is docker or podman, ``image`` the image to start.

    The container runs as this user, with this machine's network, so that it reaches the proxy. Of this machine's files
    it has only the rollout's, at the same path.
    """

    program: str
    image: str

    def command(self, command: Sequence[str], *, name: str, scratch: Path, variables: Collection[str]) -> list[str]:
        """Return the whole command line.

        Args:
            command: to run inside.
            name: name by which the container is removed.
            scratch: directory of the rollout; its ``work`` is the container's working directory.
            variables: names of the variables that it gets; their values are in the environment, which process lists do
                not show.
        """
        given = [word for variable in sorted(variables) for word in ("--env", variable)]
        work = scratch / "work"
        return [
            self.program, "run", "--rm", "--init", "--name", name, "--network", "host",
            "--user", f"{os.getuid()}:{os.getgid()}", "--volume", f"{scratch}:{scratch}", "--workdir", str(work),
            "--env", f"HOME={work}", *given, self.image, *command,
        ]  # fmt: skip

    def remove(self, name: str) -> None:
        """End the container, which outlives the command that started it; ignore one that has ended."""
        line = [self.program, "rm", "--force", name]
        subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_REMOVE_S, check=False)


def container_of(spec: str) -> Container:
    """Parse ``docker:IMAGE`` or ``podman:IMAGE``. Raises ConfigError if it is malformed, or not installed."""
    program, _, image = spec.partition(":")
    if program not in PROGRAMS or not image:
        raise ConfigError(f"source.container is {spec!r}", remedy="write docker:IMAGE or podman:IMAGE")
    if shutil.which(program) is None:
        raise ConfigError(f"source.container needs {program}, which is not installed", remedy=f"install {program}")
    return Container(program, image)
