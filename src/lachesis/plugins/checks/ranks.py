"""Two processes that meet as the ranks of a run do: over NCCL where there are two GPUs, else over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import IO

import torch

from lachesis.common.errors import TrainingError
from lachesis.common.http import free_port
from lachesis.common.world import launchers_variables
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.checks.findings import Check

# For both to start, to meet and to end.
LIMIT_S = 60.0
_RANK = ("-m", "lachesis.plugins.checks.rank")


def try_ranks(config: LachesisConfig) -> Check:
    """Start two ranks on this machine. Raises TrainingError where they do not meet, with the last words of one."""
    gpus = 0 if config.model.device == "cpu" else torch.cuda.device_count()
    found, seconds = _run(device="cuda" if gpus > 1 else "cpu")
    by = "NCCL" if found["device"] == "cuda" else "gloo"
    why = "" if gpus > 1 else f", for there {'is 1 GPU' if gpus == 1 else f'are {gpus} GPUs'} to train on"
    return Check(
        "two ranks",
        f"met over {by}{why}; added up {found['mb']:.0f} MB at {found['mb_per_s']:,.0f} MB/s; {seconds:.1f} s in all "
        f"(limit {LIMIT_S:.0f} s)",
    )


def _run(*, device: str) -> tuple[dict[str, float], float]:
    """Run two ranks; return the first one's result, and the duration in seconds."""
    started = time.monotonic()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "doctor"}
    # The ranks are these two alone, also where torchrun has started this process.
    ours = launchers_variables(os.environ)
    alone = {name: value for name, value in os.environ.items() if name not in ours}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        ranks = [
            subprocess.Popen(
                [sys.executable, *_RANK, device],
                env=alone | address | _place(rank),
                stdout=said if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
            )
            for rank in range(2)
        ]
        try:
            codes = [rank.wait(timeout=max(0.0, started + LIMIT_S - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise _failure(f"were not done after {LIMIT_S:.0f} s", errors) from error
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise _failure(f"ended with {' and '.join(map(str, codes))}", errors)
        said.seek(0)
        return json.loads(said.read().splitlines()[-1]), time.monotonic() - started


def _place(rank: int) -> dict[str, str]:
    """Return the variables that torchrun would set for this rank."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}


def _failure(what: str, errors: IO[str]) -> TrainingError:
    errors.seek(0)
    last = next((line for line in reversed(errors.read().splitlines()) if line.strip()), "they said nothing")
    return TrainingError(
        f"two ranks on this machine {what}: {last}",
        remedy="several devices cannot train together here until this works; NCCL_DEBUG=INFO says more of NCCL",
    )
