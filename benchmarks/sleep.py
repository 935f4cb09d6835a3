"""What it costs that an engine sleeps while the trainer computes, and whether memory grows from cycle to cycle.

    PYTHONPATH=src python benchmarks/sleep.py [--only small 8B] [--bridge KIND] [--tiny] [--port N]
        [--out FILE.json]

Each part is a run's two sides with vLLM on the trainer's GPU: the engine falls asleep, a step changes every weight,
the engine's weights wake up, the new ones are brought over, its cache wakes up, and the transfer is proved. 200 cycles
with a model of 2 layers, 5 with the architecture of Llama 3.1 8B in bf16 (random weights). "Memory" is what is in use
on the GPU by all processes, "host" what the engine's processes hold of the machine's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from bridges import LORA, NO_LORA, PORT, change, configuration, make_model, memory_gb, say
from needs_gpu import require_gpu

from lachesis.bridges.external import ExternalBridge
from lachesis.config.schema import LachesisConfig
from lachesis.run.context import EngineSide, RunPlace
from lachesis.run.parts import build_policy
from lachesis.run.servers import build_servers
from lachesis.train.policy import Policy

CYCLES = {"small": 200, "8B": 5}
# Cycles after which nothing is allocated for the first time any more.
SETTLED = {"small": 10, "8B": 1}
COLUMNS = ("falling asleep s", "waking up s", "transfer s", "proof s")


def cycle(side: EngineSide, policy: Policy, version: int) -> dict[str, float]:
    """One turn of sleep, step, transfer and proof, with what was in use asleep and awake again."""
    side.bridge.rest()
    asleep = memory_gb()
    with side.bridge.update_to(version):
        change(policy)
    report = side.bridge.last_report
    assert report is not None and report.sleep_seconds is not None and report.wake_seconds is not None
    return {
        "falling asleep s": report.sleep_seconds,
        "waking up s": report.wake_seconds,
        "transfer s": report.seconds - report.wake_seconds,
        "proof s": report.proof_seconds,
        "asleep GB": asleep or 0.0,
        "awake GB": memory_gb() or 0.0,
        **host(),
    }


def host() -> dict[str, float]:
    """Resident memory of the processes below this one, and how many there are."""
    found: list[int] = []
    for process in psutil.Process().children(recursive=True):
        try:
            found.append(process.memory_info().rss)
        except psutil.Error:
            continue
    return {"host GB": sum(found) / 2**30, "processes": float(len(found))}


def measure(size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    model = arguments.work / size
    if not (model / "config.json").exists():
        make_model(model, tiny=size == "small" or arguments.tiny)
    tree = configuration("broadcast, sleeping", model, devices=None, port=arguments.port).model_dump(mode="json")
    tree["bridge"] = {"kind": arguments.bridge}
    tree["adapter"] = LORA if arguments.bridge.startswith("lora") else NO_LORA
    tree["engine"] |= {"gpu_memory_utilization": 0.1, "enforce_eager": True} if size == "small" else {}
    tree["engine"]["enable_sleep_mode"] = torch.cuda.is_available()
    config = LachesisConfig.model_validate(tree)
    place = RunPlace(directory=model.parent / "run", engine_log=arguments.work / f"{size}.log", owner="benchmark")
    place.directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as closing:
        started = time.perf_counter()
        side = build_servers(config, place=place)
        closing.callback(side.close)
        say(f"{size}: the engine is there after {time.perf_counter() - started:.0f} s")
        if not torch.cuda.is_available():  # the server pauses, and has no memory of a GPU to give back
            assert isinstance(side.bridge, ExternalBridge)
            side.bridge._servers = replace(side.bridge._servers, sleep_level=1)
        policy = side.bridge.prepare(partial(build_policy, config, weights=side.weights))
        side.bridge.sync(0)
        cycles = []
        for version in range(1, arguments.cycles.get(size, CYCLES[size]) + 1):
            cycles.append(cycle(side, policy, version))
            if version in (1, 2, 5) or version % 50 == 0:
                say(f"{size} {version}: " + ", ".join(f"{name} {value:.3f}" for name, value in cycles[-1].items()))
    return {"name": f"{size}, {arguments.bridge}", "size": size, "cycles": cycles}


def summary(result: dict[str, Any]) -> str:
    """A row: medians with the worst, and what the memory has grown by since the first cycles."""
    cycles = result["cycles"]
    settled = cycles[min(SETTLED[result["size"]], len(cycles) - 1) :]
    row = [result["name"], str(len(cycles))]
    for name in COLUMNS:
        found = [one[name] for one in settled]
        row.append(f"{statistics.median(found):.3f} ({max(found):.3f})")
    for name in ("asleep GB", "awake GB", "host GB"):
        row.append(f"{settled[-1][name]:.2f} ({settled[-1][name] - settled[0][name]:+.2f})")
    return "| " + " | ".join(row) + " |"


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    heads = ["", "cycles", *(f"{name}, median (worst)" for name in COLUMNS)]
    heads += [f"{name} at the end (growth)" for name in ("asleep GB", "awake GB", "host GB")]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *map(summary, results)]
    return "\n".join(lines) + f"\n\n{gpu}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*CYCLES], default=[*CYCLES])
    parser.add_argument("--bridge", choices=["broadcast", "reload", "lora_only", "lora_nccl"], default="broadcast")
    parser.add_argument("--tiny", action="store_true", help="small models and three cycles; also on a CPU")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lachesis-sleep")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    require_gpu(tiny=arguments.tiny)
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.cycles = dict.fromkeys(CYCLES, 3) if arguments.tiny else {}
    if arguments.part is not None:
        arguments.out.write_text(json.dumps(measure(arguments.part, arguments)))
        return
    results = []
    for size in arguments.only:
        out = arguments.work / f"{size}.json"
        # Of options that are given twice the later one counts.
        command = [sys.executable, __file__, *sys.argv[1:], "--part", size, "--out", str(out)]
        subprocess.run(command, check=True, env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ})
        results.append(json.loads(out.read_text()))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results))
    sys.stdout.write(table(results))


if __name__ == "__main__":
    main()
