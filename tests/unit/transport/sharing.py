"""A process that exports tensors, for tests of the other side. Imports as little as it can, as it may be spawned."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lachesis.transport.bridge_file import BridgeFile, write_bridge_file
from lachesis.transport.digest import digests
from lachesis.transport.shared_tensors import export_cuda, export_from_file, share_tensors
from tests.forkserver import forkserver

Shapes = Mapping[str, tuple[int, ...]]
SESSION = "the exporter's session"


def digest(tensor: torch.Tensor) -> int:
    """Of one tensor."""
    return digests({"": tensor})[""]


def export_forever(connection: Connection, path: Path, shapes: Shapes, device: str, dtype: torch.dtype) -> None:
    """Export random tensors to ``path``, then do what comes: ("fill", name, value), ("digests",) or ("stop",)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tensors = {name: (torch.randn(shape) * 0.1).to(device, dtype) for name, shape in shapes.items()}
    file = share_tensors(tensors.values(), path.parent) if device == "cpu" else None
    exported = {name: export_from_file(t, file) if file else export_cuda(t) for name, t in tensors.items()}
    write_bridge_file(path, bridge_file(exported))
    connection.send("exported")
    while (command := connection.recv())[0] != "stop":
        if command[0] == "fill":
            tensors[command[1]].fill_(command[2])
        if device != "cpu":
            torch.cuda.synchronize()
        connection.send(digests(tensors))
    if file is not None:
        file.close()


def bridge_file(exported: Mapping[str, Any], **changes: Any) -> BridgeFile:
    fields = {"model": "tiny", "session_id": SESSION, "url": "http://127.0.0.1:1", "pid": os.getpid(), "engine": "vllm"}
    return BridgeFile(**fields | {"tensors": exported} | changes)


class Exporter:
    """The other process, from this side."""

    def __init__(self, connection: Connection, path: Path) -> None:
        self._connection = connection
        self.path = path

    def fill(self, name: str, value: float) -> dict[str, int]:
        """Fill a tensor there; returns all digests as read there."""
        return self._ask("fill", name, value)

    def digests(self) -> dict[str, int]:
        return self._ask("digests")

    def _ask(self, *command: Any) -> dict[str, int]:
        self._connection.send(command)
        assert self._connection.poll(60), "the exporter does not answer"
        return self._connection.recv()


@contextmanager
def exporter(
    path: Path, shapes: Shapes, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Iterator[Exporter]:
    """A process that has exported ``shapes`` to ``path`` and goes on until the end of the block."""
    # What has been forked cannot be trusted with CUDA.
    context = forkserver() if device == "cpu" else multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=export_forever, args=(theirs, path, dict(shapes), device, dtype), daemon=True)
    process.start()
    try:
        theirs.close()
        assert ours.poll(120) and ours.recv() == "exported"
        yield Exporter(ours, path)
        ours.send(("stop",))
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
