"""Choice of a sandbox: the one that is named, or the best one that works on this machine."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from lachesis.plugins.sandbox import commands
from lachesis.plugins.sandbox.e2b import TEMPLATE, E2bSandbox
from lachesis.plugins.sandbox.escapes import try_escapes
from lachesis.plugins.sandbox.local import LocalSandbox
from lachesis.plugins.sandbox.records import FunctionTests, Outcome, Program, SandboxError, Verdict, Wall

# Which sandbox code rewards use, where no configuration says so; processes that a run starts have it from the run's.
VARIABLE = "LACHESIS_SANDBOX"
KINDS = ("auto", "namespaces", "bubblewrap", "nsjail", "landlock", "docker", "podman", "e2b", "none")
# What `auto` tries, the strongest first. Containers take seconds to start and want an image: they have to be asked for.
_AUTOMATIC = ("namespaces", "bubblewrap", "nsjail", "landlock")
REMEDY = (
    "install bubblewrap (apt-get install bubblewrap), allow user namespaces (sysctl user.max_user_namespaces=15000; "
    "in a container: --security-opt seccomp=unconfined), use Linux 6.12 or later, or set rewards.sandbox to docker "
    "or podman; rewards.sandbox: none runs code of the model without any wall"
)


class Sandbox(Protocol):
    """Runs programs and tests behind a wall; thread-safe.

    Methods raise SandboxError if the sandbox itself fails, which says nothing about the code.
    """

    @property
    def wall(self) -> Wall: ...

    def run(self, program: Program) -> Outcome:
        """Run a program to its end."""
        ...

    def run_each(self, program: Program, inputs: Sequence[bytes]) -> list[Outcome]:
        """Run a program with one input after the other, until the limit for all of them together ends it."""
        ...

    def test(self, tests: FunctionTests) -> list[Verdict]:
        """Return a verdict for each test."""
        ...

    def close(self) -> None:
        """End it, with all that runs in it. Idempotent."""
        ...


def open_sandbox(kind: str = "auto", *, count: int | None = None) -> Sandbox:
    """Open a sandbox of a kind: one of :data:`KINDS`, ``docker:IMAGE``, ``podman:IMAGE`` or ``e2b:TEMPLATE``.

    Args:
        kind: name of the sandbox.
        count: programs that it runs at a time; one for each processor if unset.

    Raises:
        SandboxError: it is not available here, with the reason; or, with ``auto``, no wall here holds all escapes.
    """
    if kind == "auto":
        return _open_best(count)
    name, _, image = kind.partition(":")
    if name == "e2b":
        return E2bSandbox(image or TEMPLATE)
    if name in ("docker", "podman"):
        return LocalSandbox(
            name, walls="landlock", count=count, command=commands.container(name, image or commands.DEFAULT_IMAGE)
        )
    if (build := _BUILD.get(kind)) is None:
        raise SandboxError(
            f"there is no sandbox {kind!r}",
            remedy=f"name one of {', '.join(KINDS)}, docker:IMAGE or e2b:TEMPLATE",
        )
    if not sys.platform.startswith("linux"):
        raise SandboxError(f"the sandbox {kind} is for Linux, this is {sys.platform}", remedy=REMEDY)
    return build(count)


def _open_best(count: int | None) -> Sandbox:
    """Open the first sandbox whose wall holds all escapes."""
    tried: list[str] = []
    for kind in _AUTOMATIC:
        try:
            sandbox = open_sandbox(kind, count=count)
        except SandboxError as error:
            tried.append(f"{kind}: {error.message}")
            continue
        try:
            broken = [attempt.name for attempt in try_escapes(sandbox) if not attempt.held]
        except SandboxError as error:
            broken = [error.message]
        if not broken:
            return sandbox
        sandbox.close()
        tried.append(f"{kind}: does not hold ({', '.join(broken)})")
    raise SandboxError(f"no sandbox works here, so no code of the model is run ({'; '.join(tried)})", remedy=REMEDY)


_BUILD: Mapping[str, Callable[[int | None], Sandbox]] = {
    "namespaces": lambda count: LocalSandbox("namespaces", walls="namespaces", count=count),
    "landlock": lambda count: LocalSandbox("landlock", walls="landlock", count=count),
    "none": lambda count: LocalSandbox("none", walls="none", count=count),
    "bubblewrap": lambda count: LocalSandbox("bubblewrap", walls="landlock", count=count, command=commands.bubblewrap),
    "nsjail": lambda count: LocalSandbox("nsjail", walls="landlock", count=count, command=commands.nsjail),
}
_shared: dict[str, Sandbox] = {}
_lock = threading.Lock()


def use_sandbox(kind: str) -> None:
    """Say which sandbox this process and those that it starts use from here on."""
    os.environ[VARIABLE] = kind


def shared_sandbox() -> Sandbox:
    """Return the sandbox of this process, opened on first use. Raises as :func:`open_sandbox`."""
    kind = os.environ.get(VARIABLE) or "auto"
    with _lock:
        if kind not in _shared:
            _shared[kind] = open_sandbox(kind)
        return _shared[kind]


@atexit.register
def _close_shared() -> None:
    for sandbox in _shared.values():
        sandbox.close()
