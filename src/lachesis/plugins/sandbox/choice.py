"""Choice of a sandbox: the one that is named, or the best one that works on this machine."""

from __future__ import annotations

import atexit
import os
import sys
import threading

from lachesis.plugins.sandbox.escapes import try_escapes
from lachesis.plugins.sandbox.local import LocalSandbox
from lachesis.plugins.sandbox.records import SandboxError

# Variable with the sandbox of code rewards; a run sets it for its processes, by its configuration.
VARIABLE = "LACHESIS_SANDBOX"
KINDS = ("auto", "namespaces", "landlock", "none")
# Kinds that `auto` tries, the strongest first.
_AUTOMATIC = ("namespaces", "landlock")
REMEDY = (
    "allow user namespaces (sysctl user.max_user_namespaces=15000; in a container: --security-opt "
    "seccomp=unconfined), or use Linux 6.12 or later; rewards.sandbox: none runs code of the model without any wall"
)


def open_sandbox(kind: str = "auto", *, count: int | None = None) -> LocalSandbox:
    """Open a sandbox of a kind: one of :data:`KINDS`.

    Args:
        kind: name of the sandbox.
        count: programs that it runs at a time; one for each processor if unset.

    Raises:
        SandboxError: it is not available here, with the reason; or, with ``auto``, no wall here stops all escapes.
    """
    if kind == "auto":
        return _open_best(count)
    if kind not in KINDS:
        raise SandboxError(f"there is no sandbox {kind!r}", remedy=f"name one of {', '.join(KINDS)}")
    if not sys.platform.startswith("linux"):
        raise SandboxError(f"the sandbox {kind} needs Linux, but this is {sys.platform}", remedy=REMEDY)
    return LocalSandbox(kind, count=count)


def _open_best(count: int | None) -> LocalSandbox:
    """Open the first sandbox whose wall stops all escapes."""
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
        tried.append(f"{kind}: its wall does not hold ({', '.join(broken)})")
    raise SandboxError(f"no sandbox works here, so code of the model is not run ({'; '.join(tried)})", remedy=REMEDY)


_shared: dict[str, LocalSandbox] = {}
_lock = threading.Lock()


def use_sandbox(kind: str) -> None:
    """Set the sandbox that this process, and processes that it starts, use from now on."""
    os.environ[VARIABLE] = kind


def shared_sandbox() -> LocalSandbox:
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
