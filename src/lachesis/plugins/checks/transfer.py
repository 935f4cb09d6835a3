"""A transfer of weights as the configuration has it, of a tiny model to a real engine, with the proof of sync."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

from lachesis.common.device import resolve_device
from lachesis.common.errors import DependencyError, LachesisError, StaleWeights
from lachesis.common.http import free_port
from lachesis.config.colocation import engine_workers
from lachesis.config.schema import (
    CustomEngineConfig,
    EmbeddedEngineConfig,
    EmbeddedServerConfig,
    HttpEngineConfig,
    LachesisConfig,
    LoraAdapterConfig,
    VllmEngineConfig,
)
from lachesis.plugins.checks.findings import Check
from lachesis.plugins.checks.tiny_model import write_tiny_model
from lachesis.run.pieces import Pieces, parts
from lachesis.run.warm_up import pass_once

# vLLM has attention for heads of 32 and more.
_HIDDEN_SIZE = 64
# Of a server starting, and of a transfer with its proof.
START_S, VLLM_START_S, SYNC_S = 60.0, 600.0, 30.0
# Of a card, for a vLLM with next to no weights.
_VLLM_SHARE = 0.1


def try_transfer(config: LachesisConfig) -> Check:
    """Start an engine of the configured kind on a tiny model, change the weights by one step, transfer them, prove.

    Running servers are left alone: one on this machine stands in for them.

    Raises:
        LachesisError: as a run would.
    """
    engine, words = engine_for_trial(config)
    start_s = VLLM_START_S if engine["kind"] == "vllm" else START_S
    with trial_directory() as directory:
        write_tiny_model(directory / "model", hidden_size=_HIDDEN_SIZE)
        started = time.monotonic()
        with parts(sections(config, engine, directory=directory, start_s=start_s)) as run:
            seconds = bring_a_step(run)
        took = time.monotonic() - started
    return Check(
        "bridge",
        f"{config.bridge.kind} to {words}: weights of a step arrived and are proved {seconds:.2f} s after it; "
        f"{took:.1f} s in all (limits: start {start_s:.0f} s, transfer {SYNC_S:.0f} s)",
    )


@contextmanager
def trial_directory() -> Iterator[Path]:
    """Gone afterwards, but where an error names a log in it."""
    directory = Path(tempfile.mkdtemp(prefix="lachesis-doctor-"))
    stays = False
    try:
        yield directory
    except LachesisError as error:
        stays = str(directory) in str(error)
        raise
    finally:
        if not stays:
            shutil.rmtree(directory)


def engine_for_trial(config: LachesisConfig) -> tuple[dict[str, Any], str]:
    """Return the section of an engine of the configured kind, on a free port of this machine, and its name in words.

    Raises:
        DependencyError: it is vLLM, which is not installed.
    """
    match config.engine:
        case EmbeddedEngineConfig():
            return {"kind": "embedded"}, "the embedded engine"
        case CustomEngineConfig() as custom:
            return {"kind": "custom", "function": custom.function}, f"the engine {custom.function}"
        case EmbeddedServerConfig():
            return _embedded_server(), "an embedded server"
        case VllmEngineConfig() as vllm:
            if util.find_spec("vllm") is None:
                raise DependencyError(
                    "engine.kind is vllm, and vLLM is not installed here",
                    remedy="install it, or try the configuration where it is to run",
                )
            workers = engine_workers(vllm)
            of = (
                f" of one worker (the {workers} of the run are not tried here: train --smoke does)"
                if workers > 1
                else ""
            )
            return _vllm(devices=vllm.devices, enforce_eager=vllm.enforce_eager), f"a vLLM server{of}"
        case HttpEngineConfig():
            if util.find_spec("vllm") is not None and resolve_device(config.model.device).type == "cuda":
                return _vllm(devices=None), "a vLLM server in the place of engine.urls"
            return _embedded_server(), "an embedded server in the place of engine.urls"
        case installed:
            return installed.model_dump(), f"the engine {installed.kind}"


def _embedded_server() -> dict[str, Any]:
    return {"kind": "embedded_server", "port": free_port()}


def _vllm(*, devices: str | None, enforce_eager: bool = False) -> dict[str, Any]:
    """One server on one device."""
    own = None if devices is None else devices.split(",")[0]
    return {
        "kind": "vllm",
        "port": free_port(),
        "devices": own,
        "enforce_eager": enforce_eager,
        "gpu_memory_utilization": _VLLM_SHARE,
    }


def sections(config: LachesisConfig, engine: dict[str, Any], *, directory: Path, start_s: float) -> dict[str, Any]:
    """Return the sections of the trial: the run's bridge, kind of adapter and device, and a tiny model."""
    bridge = config.bridge.model_dump(exclude_defaults=True) | {"kind": config.bridge.kind, "proof": True}
    for one_of_the_run in ("init_method", "config_path", "keep_last"):
        bridge.pop(one_of_the_run, None)
    # NCCL refuses two processes of one GPU, and the engine of the trial has no separate one.
    if bridge.get("transport") == "nccl" and engine.get("devices") is None:
        bridge.pop("transport")
    if "every_steps" in type(config.bridge).model_fields:
        bridge["every_steps"] = 1
    lora = isinstance(config.adapter, LoraAdapterConfig)
    return {
        "run": {"name": "trial", "dir": str(directory), "steps": 1},
        "model": {"path": str(directory / "model"), "device": config.model.device, "dtype": config.model.dtype},
        "adapter": {"kind": "lora", "r": 4, "alpha": 8} if lora else {"kind": "none"},
        "engine": engine,
        "bridge": bridge,
        "sampling": {"max_completion_length": 8},
        "optimizer": {"learning_rate": 1e-2},
        "deadlines": {"engine_start_s": start_s, "sync_s": SYNC_S},
    }


def bring_a_step(run: Pieces) -> float:
    """Seconds from the end of an optimizer step until the engine serves its weights, proved.

    Raises:
        StaleWeights: it does not.
    """
    run.bridge.sync(0)
    pass_once(run.policy, run.config)
    with run.bridge.update_to(1):
        run.policy.step()
        stepped = time.monotonic()
    seconds = time.monotonic() - stepped
    (group,) = run.engine.sample([[2, 3, 4]], n=2, max_tokens=4)
    versions = {version for sample in group.samples for version in (sample.versions.first, sample.versions.last)}
    if versions != {1}:
        raise StaleWeights(f"after the transfer of version 1 the engine generates with versions {sorted(versions)}")
    return seconds
