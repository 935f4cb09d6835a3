"""One of two vLLM servers is killed while it generates: what is lost, and how long until it serves again.

    PYTHONPATH=src python benchmarks/fleet.py [--devices 1,1] [--bridge broadcast] [--tiny]

The run starts both servers (with ``--devices 1,1`` both are on the second GPU, beside a trainer on the first). A round
is what a training run does between two steps: 64 requests are generated, the weights change and are brought to the
servers, each of which proves that it has them. In one round a server and all processes under it get SIGKILL while the
requests are under way; rounds go on until it has been started again, has the weights of then, and is given requests.
The exit code is 1 where a request was lost, or where the server that was not killed was started again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from needs_gpu import require_gpu
from overlap import write_model, write_problems

from lachesis.common.deadline import Deadline
from lachesis.common.types import Completion, GenerationRequest, SamplingParams
from lachesis.config.load import load_config
from lachesis.config.schema import LachesisConfig
from lachesis.engines.fleet import EngineRow, State
from lachesis.engines.http.client import HttpEngine
from lachesis.run.engine import EngineSide, RunPlace, build_engine_side
from lachesis.run.parts import build_policy
from lachesis.train.policy import Policy

REQUESTS = 64
PROMPT_TOKENS = 64
LIMIT_S = 300.0


def configuration(options: argparse.Namespace) -> LachesisConfig:
    """Model and configuration, written to the working directory."""
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    size, dtype = ("small", "float32") if options.tiny or not gpu else ("1.5B", "bfloat16")
    model = work / f"model-{size}"
    if not (model / "config.json").exists():
        write_model(model, size=size, dtype=getattr(torch, dtype))
    write_problems(work / "problems.jsonl", count=8, tokens=PROMPT_TOKENS, vocab_size=1000)
    flags = ["--max-num-seqs", "256"] if gpu else ["--max-num-seqs", "64", "--no-enable-chunked-prefill"]
    tree = {
        "run": {"name": "fleet", "dir": str(work / "runs"), "steps": 1},
        "model": {"path": str(model), "tokenizer": str(model / "tokenizer"), "dtype": dtype, "compile": "off"},
        "data": {"path": str(work / "problems.jsonl")},
        "rewards": {"functions": ["none.none"]},
        "engine": {
            "kind": "vllm",
            "port": options.port,
            "max_model_len": PROMPT_TOKENS + options.tokens,
            "data_parallel_size": 2,
            "devices": options.devices,
            "enforce_eager": options.eager or not gpu,
            "extra_args": flags,
        },
        "bridge": {"kind": options.bridge},
        # Nothing is learned here: the cheapest optimizer in memory.
        "optimizer": {"kind": "adafactor", "weight_update": "plain"},
        "deadlines": {"engine_start_s": LIMIT_S, "sync_s": LIMIT_S},
    }
    path = work / "fleet.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_config(path).config


class Rounds:
    """Generation and transfer in turn over one engine side."""

    def __init__(self, side: EngineSide, policy: Policy, *, tokens: int) -> None:
        self.side, self.policy = side, policy
        self.version = 0
        self.params = SamplingParams(tokens, extra={"ignore_eos": True})

    def generate(self) -> list[Completion]:
        """A round's completions."""
        generator = torch.Generator().manual_seed(self.version)
        drawn = torch.randint(10, 1000, (REQUESTS, PROMPT_TOKENS), generator=generator).tolist()
        requests = [GenerationRequest(tuple(prompt), self.params, seed=i) for i, prompt in enumerate(drawn)]
        found = self.side.bridge.engine.generate(requests, deadline=Deadline("generation", LIMIT_S))
        return [completion for (completion,) in found]

    def update(self) -> float:
        """Change the weights and bring them over; seconds of transfer and proof."""
        self.version += 1
        with self.side.bridge.update_to(self.version), torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)
        report = self.side.bridge.last_report
        assert report is not None
        return report.seconds + report.proof_seconds

    def row(self, url: str) -> EngineRow:
        return next(row for row in self.side.rows() if row.url == url)

    def pid(self, url: str) -> int:
        """Of the server at this address, not of the engine that it has started, which may hold its port as well."""
        engine = self.side.bridge.engine
        assert isinstance(engine, HttpEngine)
        return engine.control(url).info(deadline=Deadline("a server's process", LIMIT_S)).pid


def kill_all_of(pid: int) -> None:
    """A server with all under it, as a machine's out-of-memory killer or a fault of its GPU ends it."""
    leader = psutil.Process(pid)
    for process in [leader, *leader.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it went with another
            process.send_signal(signal.SIGKILL)


def measure(rounds: Rounds) -> dict[str, Any]:
    """The rounds, in one of which a server is killed."""
    urls = [row.url for row in rounds.side.rows()]
    killed, survivor = urls[1], urls[0]
    pids = [rounds.pid(url) for url in urls]
    quiet = timed(rounds)
    result: dict[str, Any] = {"undisturbed round s": quiet["generation s"], "transfer and proof s": rounds.update()}
    at = threading.Timer(quiet["generation s"] / 2, partial(kill_all_of, pids[1]))
    at.start()
    began = time.perf_counter() + quiet["generation s"] / 2
    disturbed = timed(rounds)
    at.join()
    result |= {
        "round in which it was killed s": disturbed["generation s"],
        "requests": REQUESTS,
        "lost": REQUESTS - disturbed["whole"],
    }
    others: list[float] = []
    while True:
        transfer_s = rounds.update()
        row = rounds.row(killed)
        if row.state is State.SERVING and row.version == rounds.version:
            result["serves again after s"] = time.perf_counter() - began
            result["transfer and proof, of both again s"] = transfer_s
            break
        others.append(timed(rounds)["generation s"])
        if time.perf_counter() - began > LIMIT_S:
            raise SystemExit(f"{killed} does not serve again: {row}")
    before = rounds.row(killed).completed
    result["round of both again s"] = timed(rounds)["generation s"]
    result["requests that it then had"] = rounds.row(killed).completed - before
    result["rounds by the other alone meanwhile"] = len(others)
    result["the other was started again"] = rounds.pid(survivor) != pids[0]
    return result | {"killed": killed, "other": survivor}


def timed(rounds: Rounds) -> dict[str, Any]:
    started = time.perf_counter()
    completions = rounds.generate()
    whole = sum(len(completion.token_ids) == rounds.params.max_tokens for completion in completions)
    return {"generation s": time.perf_counter() - started, "whole": whole}


@contextmanager
def built(options: argparse.Namespace) -> Iterator[tuple[Rounds, float]]:
    """Both servers with the trainer's weights, and the seconds of their start."""
    config = configuration(options)
    with ExitStack() as closing:
        directory = options.work / "engine"
        directory.mkdir(exist_ok=True)
        place = RunPlace(directory=directory, engine_log=options.work / "engine.log", owner=f"fleet-{os.getpid()}")
        started = time.perf_counter()
        side = build_engine_side(config, place=place)
        closing.callback(side.close)
        start_s = time.perf_counter() - started
        policy = side.bridge.prepare(partial(build_policy, config, weights=side.weights))
        side.bridge.sync(0)
        yield Rounds(side, policy, tokens=options.tokens), start_s


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    lines = [f"{place}, torch {torch.__version__}, {time.strftime('%d %B %Y')}", "", "| | |", "|---|---|"]
    for name, value in result.items():
        lines.append(f"| {name} | {f'{value:.2f}' if isinstance(value, float) else value} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens; also on a CPU")
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs, which starts sooner")
    parser.add_argument("--devices", default=None, help="a GPU for each of the two servers, as in 1,1")
    parser.add_argument("--bridge", default="broadcast")
    parser.add_argument("--tokens", type=int, default=None, help="of a completion")
    parser.add_argument("--port", type=int, default=9137)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lachesis-fleet")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    require_gpu(tiny=options.tiny)
    options.tokens = options.tokens or (64 if options.tiny else 512)
    with built(options) as (rounds, start_s):
        rounds.generate()  # what is slow the first time
        rounds.update()
        result = {"start of both servers s": start_s, **measure(rounds)}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))
    sys.stdout.write(table(result))
    if result["lost"] or result["the other was started again"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
