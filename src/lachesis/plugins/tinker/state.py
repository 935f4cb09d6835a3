"""State of the server on disk, so that its clients can continue after a restart.

It is written when a signal ends the server, and deleted when it is read. After a crash there is none: clients learn
that their session has ended, rather than continue from weights that they do not expect.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from lachesis.common.errors import ConfigError
from lachesis.common.files import atomic_directory
from lachesis.plugins.tinker.clients import Client
from lachesis.plugins.tinker.records import LoraShape
from lachesis.plugins.tinker.service import Run, SamplingSession, Service, Session, unnamed_weights
from lachesis.plugins.tinker.worker import Answer, Failure

_FORMAT = 1


def save_state(service: Service, directory: Path) -> None:
    """Write sessions, runs with their optimizers, samplers and unfetched answers.

    The service must have ended. Runs that could not be made are left out.
    """
    runs = {run_id: run for run_id, run in service.runs.items() if run.training is not None}
    if not service.sessions:
        return
    with atomic_directory(directory) as place:
        for number, run in enumerate(runs.values()):
            save_file(_tensors(run), place / f"{number}.safetensors")
        state = {
            "format": _FORMAT,
            "base_model": service.name,
            "seed": service.seed,
            "made_samplers": service.made_samplers,
            "sessions": {name: asdict(found.client) for name, found in service.sessions.items()},
            "runs": {run_id: _run_row(run) for run_id, run in runs.items()},
            "samplers": {name: _sampler_row(found) for name, found in service.samplers.items()},
            "answers": {name: _answer_row(found) for name, found in service.futures.done().items()},
        }
        (place / "state.json").write_text(json.dumps(state))


def restore_state(service: Service, directory: Path) -> int:
    """Read what :func:`save_state` wrote, delete it, and return the number of runs.

    Raises:
        ConfigError: it is of another model or version; it stays.
    """
    file = directory / "state.json"
    if not file.exists():
        return 0
    state: dict[str, Any] = json.loads(file.read_text())
    if (state["format"], state["base_model"]) != (_FORMAT, service.name):
        raise ConfigError(
            f"{directory} has the runs of a server of {state['base_model']!r}, but this one serves {service.name!r}",
            remedy="start the server as before, name another --dir, or delete that directory to give the runs up",
        )
    service.seed, service.made_samplers = state["seed"], state["made_samplers"]
    service.sessions |= {name: Session(Client(**client)) for name, client in state["sessions"].items()}
    for number, (run_id, row) in enumerate(state["runs"].items()):
        service.runs[run_id] = _restored(service, row, load_file(directory / f"{number}.safetensors"))
    for name, row in state["samplers"].items():
        service.samplers[name] = _sampler(service, row)
    for name, row in state["answers"].items():
        future: Future[Answer | Failure] = Future()
        future.set_result(_answer(row))
        service.futures.restore(name, future)
    shutil.rmtree(directory)
    return len(state["runs"])


def _tensors(run: Run) -> dict[str, Tensor]:
    """Return all tensors of a run, by ``KIND/NAME``, or ``unnamed/KEY/NAME`` for weights in memory."""
    training = run.made
    kinds: dict[str, Mapping[str, Tensor]] = {
        "weights": training.weights(),
        "optimizer": training.optimizer_state(),
        "gradient": training.gradient(),
        **{f"unnamed/{key}": tensors for key, tensors in run.unnamed.items()},
    }
    return {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def _restored(service: Service, row: dict[str, Any], tensors: Mapping[str, Tensor]) -> Run:
    def kind(prefix: str) -> dict[str, Tensor]:
        start = f"{prefix}/"
        return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}

    run = service.restore_run(row["session_id"], LoraShape(**row["shape"]), kind("weights"))
    training = run.made
    training.load(kind("weights"), kind("optimizer"))
    training.add_gradient(kind("gradient"))
    training.failed = row["failed"]
    run.steps, run.trained_tokens, run.user_metadata = row["steps"], row["trained_tokens"], row["user_metadata"]
    run.requests.expected = row["expected"]
    run.requests.ids = {int(number): request_id for number, request_id in row["ids"].items()}
    run.unnamed = OrderedDict((key, kind(f"unnamed/{key}")) for key in row["unnamed"])
    return run


def _run_row(run: Run) -> dict[str, Any]:
    return {
        "session_id": run.session_id,
        "shape": asdict(run.made.shape),
        "failed": run.made.failed,
        "steps": run.steps,
        "trained_tokens": run.trained_tokens,
        "user_metadata": run.user_metadata,
        "expected": run.requests.expected,
        "ids": run.requests.ids,
        "unnamed": list(run.unnamed),
    }


def _sampler_row(found: SamplingSession) -> dict[str, Any]:
    key = found.weights.key if found.weights is not None and found.run_id else ""
    return {
        "session_id": found.session_id,
        "path": found.path,
        "clients": found.clients,
        "number": found.number,
        "run_id": found.run_id,
        "key": key,
    }


def _sampler(service: Service, row: dict[str, Any]) -> SamplingSession:
    key = row.pop("key")
    sampler = SamplingSession(**row)
    if sampler.run_id in service.runs:
        sampler.weights = unnamed_weights(service.runs[sampler.run_id], key)
    elif sampler.path is not None:
        sampler.weights = service.saved_weights(sampler.path)
    return sampler


def _answer_row(found: Answer | Failure) -> dict[str, str]:
    if isinstance(found, Failure):
        return {"message": found.message, "category": found.category}
    return {"content": base64.b64encode(found.content).decode(), "media_type": found.media_type}


def _answer(row: dict[str, Any]) -> Answer | Failure:
    return Failure(**row) if "message" in row else Answer(base64.b64decode(row["content"]), row["media_type"])
