"""Files that tell a trainer where an engine's tensors (single copy) or its channel (broadcast) are.

``vllm_bridge_config.json`` names the engine's parameters and how to map their memory; ``nccl_bridge_config.json``
records how trainer and engine meet. Only this user may write them, because they decide which memory a trainer writes
to.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.common.errors import EngineError
from lachesis.common.files import write_atomic
from lachesis.common.json_values import is_object
from lachesis.process.managed import process_exists
from lachesis.transport.layout import ChannelBackend, ReceivedTensor
from lachesis.transport.shared_tensors import CudaStorage, SharedTensor

BRIDGE_FILE = "vllm_bridge_config.json"
CHANNEL_FILE = "nccl_bridge_config.json"
LOGDIR = "LOGDIR"
# The environment variable that makes an engine write its bridge file at its start.
SHARED_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS"
# The documented default place.
DEFAULT_DIRECTORY = Path("/tmp/atropos_bridge")
_EXPORT_ANEW = f"start the engine with {SHARED_VARIABLE}=1, or let the trainer have it export its weights"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeFile:
    """Contents of a bridge file: an engine's description of its shared tensors.

    ``engine`` reads like "vllm 0.26.0"; ``tensors`` has the engine's own names. ``path`` is where it was read.
    """

    model: str
    session_id: str
    url: str
    pid: int
    engine: str
    tensors: Mapping[str, SharedTensor]
    tp_degree: int = 1
    dp_shard_degree: int = 1
    path: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the documented fields, followed by those of Lachesis."""
        on_gpu = {name: t.to_json() for name, t in self.tensors.items() if isinstance(t.storage, CudaStorage)}
        in_files = {name: t.to_json() for name, t in self.tensors.items() if name not in on_gpu}
        return {
            "model": self.model,
            "tp_degree": self.tp_degree,
            "dp_shard_degree": self.dp_shard_degree,
            "param_names": list(self.tensors),
            "shared_weights_enabled": True,
            "single_copy_enabled": bool(self.tensors),
            "num_params": len(self.tensors),
            "param_mappings": {
                name: {"vllm_name": name, "shape": list(t.shape), "dtype": t.dtype, "device": t.device}
                for name, t in self.tensors.items()
            },
            "ipc_handles": on_gpu,
            "shared_files": in_files,
            "session_id": self.session_id,
            "url": self.url,
            "pid": self.pid,
            "engine": self.engine,
        }


def default_directory() -> Path:
    """Return the default directory of bridge files: $LOGDIR, else the last place of the search."""
    return Path(os.environ.get(LOGDIR) or DEFAULT_DIRECTORY)


def asked_at_start() -> Path | None:
    """Return the directory given to a starting engine for its bridge file, after creating it.

    None if no directory was given.
    """
    if os.environ.get(SHARED_VARIABLE, "0") in ("", "0"):
        return None
    directory = default_directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return directory / BRIDGE_FILE


def search_places(path: str | Path | None = None) -> list[Path]:
    """Return the paths where the bridge file may be, best first: an explicit path alone, else $LOGDIR, ``.``, default.

    An explicit path may be the file or its directory; ``auto`` counts as unset.
    """
    if path not in (None, "", "auto"):
        explicit = Path(path).expanduser()
        return [explicit / BRIDGE_FILE if explicit.is_dir() else explicit]
    directories = [os.environ.get(LOGDIR), Path.cwd(), DEFAULT_DIRECTORY]
    return list(dict.fromkeys(Path(directory) / BRIDGE_FILE for directory in directories if directory))


def find_bridge_file(path: str | Path | None = None) -> Path:
    """Return the first of :func:`search_places` that exists.

    Raises:
        EngineError: none exists; the message lists the places.
    """
    places = search_places(path)
    for place in places:
        if place.is_file():
            return place
    raise EngineError(
        f"Could not find {BRIDGE_FILE}; looked for {', '.join(map(str, places))}",
        remedy=f"{_EXPORT_ANEW}, with the same {LOGDIR} for both, or set bridge.config_path to the file",
    )


def write_bridge_file(path: Path, bridge: BridgeFile) -> None:
    """Write the bridge file atomically, readable by this user alone.

    Raises:
        EngineError: the place cannot be written.
    """
    _write_private(path, bridge.to_json())
    _log.info("Exported %d IPC handles for single-copy mode to %s", len(bridge.tensors), path)


def read_bridge_file(path: Path) -> BridgeFile:
    """Read what :func:`write_bridge_file` wrote.

    Raises:
        EngineError: the file belongs to another user, is not JSON, lacks fields, or has no or wrong handles.
    """
    document = _read_private(path)
    entries = {**_section(path, document, "ipc_handles"), **_section(path, document, "shared_files")}
    if not entries:
        raise EngineError(
            f"{path} has an empty ipc_handles: the engine shares no tensors"
            + ("" if document.get("single_copy_enabled", True) else " (single_copy_enabled is false)"),
            remedy=_EXPORT_ANEW,
        )
    tensors = {name: SharedTensor.from_json(name, entry) for name, entry in entries.items()}
    _check_count(path, document, tensors)
    try:
        return BridgeFile(
            model=str(document["model"]),
            session_id=str(document["session_id"]),
            url=str(document["url"]),
            pid=int(document["pid"]),
            engine=str(document["engine"]),
            tp_degree=int(document["tp_degree"]),
            dp_shard_degree=int(document["dp_shard_degree"]),
            tensors=tensors,
            path=path,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def check_session(bridge: BridgeFile, *, session_id: str) -> None:
    """Refuse a bridge file that was not written by the answering server.

    Raises:
        EngineError: the file is stale.
    """
    if bridge.session_id == session_id:
        return
    writer = "still runs" if process_exists(bridge.pid) else "is gone"
    raise EngineError(
        f"{bridge.path or BRIDGE_FILE} is stale: engine session {bridge.session_id} wrote it (process "
        f"{bridge.pid}, which {writer}), but session {session_id} answers",
        remedy="remove the file, or have the running engine export its weights again",
    )


def write_channel_file(
    directory: Path,
    *,
    init_method: str,
    world_size: int,
    tensors: Sequence[ReceivedTensor],
    backend: ChannelBackend,
    session_id: str,
    url: str,
) -> Path:
    """Write ``nccl_bridge_config.json``, with the ``tensors`` of an update in order, into ``directory``.

    It is meant for other programs: nothing in this package reads it. Raises EngineError as :func:`write_bridge_file`.
    """
    path = Path(directory) / CHANNEL_FILE
    document = {
        "init_method": init_method,
        "world_size": world_size,
        "param_metadata": {
            "param_names": [tensor.name for tensor in tensors],
            "param_shapes": {tensor.name: list(tensor.shape) for tensor in tensors},
            "param_dtypes": {tensor.name: tensor.dtype for tensor in tensors},
            "num_params": len(tensors),
        },
        "param_mappings": {},
        "backend": backend,
        "session_id": session_id,
        "url": url,
    }
    _write_private(path, document)
    return path


def _section(path: Path, document: Mapping[str, Any], key: str) -> dict[str, Any]:
    section: object = document.get(key) or {}
    if not is_object(section) or not all(is_object(entry) for entry in section.values()):
        raise _damaged(path, TypeError(f"{key} is not a JSON object whose values are objects"))
    return section


def _check_count(path: Path, document: Mapping[str, Any], tensors: Mapping[str, SharedTensor]) -> None:
    promised = document.get("param_names") or list(document.get("param_mappings") or tensors)
    missing = [name for name in promised if name not in tensors]
    if missing:
        raise EngineError(
            f"{path} lists {len(promised)} parameters but has handles for only {len(tensors)}; {missing[0]!r} has none",
            remedy=_EXPORT_ANEW,
        )


def _write_private(path: Path, document: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps(document, indent=1), durable=False, mode=0o600)
    except OSError as error:
        raise EngineError(
            f"{path} cannot be written: {error.strerror or error}", remedy="choose another place for the bridge file"
        ) from error


def _read_private(path: Path) -> dict[str, Any]:
    try:
        _check_owner(path)
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EngineError(f"{path} is gone", remedy=_EXPORT_ANEW) from error
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror or error}", remedy=_EXPORT_ANEW) from error
    except ValueError as error:
        raise _damaged(path, error) from error
    if not is_object(document):
        raise _damaged(path, TypeError("not a JSON object"))
    return document


def _check_owner(path: Path) -> None:
    """Refuse a file of another user, because a trainer writes to the memory that the file names."""
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        raise EngineError(
            f"{path} belongs to another user, or anyone may write to it",
            remedy="remove it, or use your own directory (bridge.config_path, LOGDIR)",
        )


def _damaged(path: Path, error: Exception) -> EngineError:
    return EngineError(
        f"{path} is damaged, or another version wrote it: {type(error).__name__}: {error}",
        remedy="have this version of the engine export its weights again",
    )
