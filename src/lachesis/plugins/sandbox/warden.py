"""Process that keeps a warm interpreter behind the walls, and forks the processes that run code of a model.

It never reads code or tests: the processes that it forks do.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket

from lachesis.plugins.sandbox import kernel
from lachesis.plugins.sandbox.cgroup import Cgroup, make_cgroup
from lachesis.plugins.sandbox.filters import prepare_filters
from lachesis.plugins.sandbox.job import ENVIRONMENT, Walls, measure_own_space, run_job
from lachesis.plugins.sandbox.link import LinkClosed, receive, send
from lachesis.plugins.sandbox.view import enter_view, python_view, use_real_paths

# Usual imports of programs, and little else: imported once before forks, but each fork pays for their memory.
_WARM = (
    "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "enum", "functools", "heapq", "io",
    "itertools", "json", "math", "operator", "random", "re", "string", "threading", "time", "traceback", "typing",
)  # fmt: skip


def keep(link: socket.socket, walls: str) -> None:
    """Run a warden: put up ``walls``, report them, and serve until the other end is closed."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    kernel.take_priority()
    group = make_cgroup()
    try:
        if walls == "namespaces":
            _enter_namespaces(link, group)
        elif walls == "landlock":
            if not kernel.landlock_version():
                raise OSError("this kernel has no Landlock")
            _serve(link, Walls(python_view(), contained=False, nobody=False, group=group), ["Landlock", "seccomp"])
        else:
            _serve(link, Walls(python_view(), contained=False, nobody=False, filtered=False, group=group), [])
    except OSError as error:
        send(link, {"error": str(error)})


def _enter_namespaces(link: socket.socket, group: Cgroup | None) -> None:
    """Leave all namespaces that can be left; a child, the first process of the new ones, serves."""
    view = python_view()
    root = os.geteuid() == 0
    layers = ["namespaces of users, files, processes and network", "seccomp"]
    if kernel.landlock_version():
        layers.append("Landlock")
    try:
        leave_user_namespace(map_nobody=root)
    except OSError:
        if not root:
            raise
        layers[0] = "namespaces of files, processes and network"
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    kernel.unshare(flags)
    first = os.fork()
    if first:
        link.close()
        os.waitpid(first, 0)
        return
    kernel.die_with_parent()
    use_real_paths()
    enter_view(view)
    _serve(link, Walls(view, contained=True, nobody=root, group=group), layers)


def leave_user_namespace(*, map_nobody: bool, keep_user: bool = False) -> None:
    """Become root of a new user namespace. Root has a helper map a second user to run code; others cannot.

    Args:
        keep_user: non-root users keep their number, with root's rights in the namespace until they give them up.
    """
    user, group, own = os.geteuid(), os.getegid(), os.getpid()
    if not map_nobody:
        kernel.unshare(kernel.CLONE_NEWUSER)
        _write(own, "setgroups", "deny")
        _write(own, "uid_map", f"{user if keep_user else 0} {user} 1")
        _write(own, "gid_map", f"{group if keep_user else 0} {group} 1")
        return
    go, told = os.pipe()
    helper = os.fork()
    if helper == 0:
        code = 1
        try:
            os.close(told)
            if os.read(go, 1):
                for kind in ("uid_map", "gid_map"):
                    _write(own, kind, "0 0 1\n65534 65534 1\n")
                code = 0
        finally:
            kernel.end_process(code)
    os.close(go)
    try:
        kernel.unshare(kernel.CLONE_NEWUSER)
        os.write(told, b"x")
    finally:
        os.close(told)
        status = os.waitpid(helper, 0)[1]
    if status:
        raise OSError("users cannot be mapped")


def _write(pid: int, name: str, text: str) -> None:
    with open(f"/proc/{pid}/{name}", "w") as file:
        file.write(text)


def _serve(link: socket.socket, walls: Walls, layers: list[str]) -> None:
    for name in _WARM:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    kernel.keep_memory_together()
    measure_own_space()
    prepare_filters()
    gc.collect()
    gc.freeze()
    group = walls.group
    limits = ["limits"] if group is None else [group.layer, "limits"]
    send(link, {"layers": [*layers, *limits], "group": None if group is None else str(group.path)})
    while True:
        try:
            header = receive(link)
        except LinkClosed:
            return
        run_job(link, header, walls)
