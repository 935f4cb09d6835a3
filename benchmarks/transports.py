"""Every way for weights to travel on one GPU or two, with a pretrained model: does it learn, and is it proved?

    PYTHONPATH=src python benchmarks/transports.py MODEL [--only WAY ...] [--steps 30] [--beside N] [--out F]
    PYTHONPATH=src python benchmarks/transports.py --tiny

Each way is an engine, a bridge and number formats, and trains by `lachesis train` on the sums of `examples/smollm2`:
16 prompts x 8 completions a step, held-out sums answered greedily before the first step and after the last. The table
has what the proof of sync measured of the canary, and how far the trainer's logprobs of sampled tokens are from the
engine's. With ``--beside N`` so many run at a time on the card, and seconds say less.

MODEL is SmolLM2-135M-Instruct (`examples/smollm2` fetches it). ``--tiny`` takes a model made here, the embedded
engine's server in vLLM's place, and two steps; also on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from bridges import make_model
from needs_gpu import require_gpu
from proof import LORA, MODES, Mode

from lachesis.metrics.sinks.jsonl import read_metrics

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/smollm2"
PORT = 9501
FULL_RATE, LORA_RATE = 1e-5, 3e-4
# Steps that warm up, and how many at each end the reward is the mean of.
WARM_UP, ENDS = 5, 5
# Graphs of decode steps alone, and a cache of a given size: engines start in seconds, and several beside each other.
ENGINE_FLAGS = [
    "--max-num-seqs", "128", "--kv-cache-memory-bytes", "600000000", "--compilation-config",
    json.dumps({"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32, 64, 128]}),
]  # fmt: skip
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
TINY_REWARD = "def length(completions, **columns):\n    return [float(len(one[0]['content'])) for one in completions]\n"


def ways() -> dict[str, Mode]:
    """Return those of proof.py that need one GPU and prove by all that they can, and some more."""
    of_proof = {name: mode for name, mode in MODES.items() if mode.digests and "two GPUs" not in name}
    return of_proof | {
        "broadcast, the engine sleeps": Mode({"kind": "broadcast"}, engine={"enable_sleep_mode": True}),
        "embedded server, broadcast": Mode({"kind": "broadcast"}, engine={"kind": "embedded_server"}),
        "embedded": Mode({"kind": "in_process"}, engine={"kind": "embedded"}),
        "embedded, LoRA": Mode({"kind": "in_process"}, engine={"kind": "embedded"}, adapter=LORA),
        "broadcast, a second GPU": Mode({"kind": "broadcast"}, engine={"devices": "1"}),
        "LoRA by NCCL, a second GPU": Mode({"kind": "lora_nccl"}, engine={"devices": "1"}, adapter=LORA),
    }


WAYS = ways()
TINY = ("broadcast, bf16", "LoRA by file", "LoRA by NCCL", "reload, bf16", "embedded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The figures of a run: logprobs and canary in nats, and the canary's error over what is allowed as a ratio."""

    way: str
    steps: int
    first_reward: float
    last_reward: float
    accuracy_before: float
    accuracy_after: float
    logprob_diff_mean: float
    logprob_diff_max: float
    canary_error: float
    canary_error_largest: float
    canary_ratio_largest: float
    step_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that ended before its last step, with the end of what it said."""

    way: str
    words: str


def configuration(way: str, mode: Mode, *, options: argparse.Namespace, place: int) -> dict[str, Any]:
    """Return the run's configuration; ``place`` gives it ports of its own."""
    lora = mode.adapter["kind"] == "lora"
    reward = f"{options.work / 'reward.py'}:length" if options.tiny else f"{EXAMPLE / 'rewards.py'}:right_sum"
    return {
        "run": {"name": name_of(way), "dir": str(options.work / "runs"), "steps": options.steps},
        "model": {
            "path": str(options.model), "dtype": mode.dtype, "compile": "off", **mode.model,
            **({"chat_template": PLAIN_TEMPLATE} if options.tiny else {}),
        },
        "adapter": {**mode.adapter, "alpha": 32} if lora else mode.adapter,
        "data": {"path": str(options.work / "train.jsonl"), "eval_path": str(options.work / "eval.jsonl")},
        "rewards": {"functions": [reward]},
        "sampling": {"num_generations": 8, "max_completion_length": 8 if options.tiny else 32},
        "batch": {"prompts_per_step": 2 if options.tiny else 16},
        "engine": engine_of(mode, port=options.port + 20 * place),
        "bridge": mode.bridge,
        "optimizer": {
            "learning_rate": LORA_RATE if lora else FULL_RATE, "warmup_steps": 3, "schedule": "constant",
        },
        "evaluation": {"every_steps": options.steps},
        "checkpoint": {"every_steps": 0, "save_final": False},
        "deadlines": {"engine_start_s": 420},
    }  # fmt: skip


def engine_of(mode: Mode, *, port: int) -> dict[str, Any]:
    kind = mode.engine.get("kind", "vllm" if torch.cuda.is_available() else "embedded_server")
    if kind == "embedded":
        return dict(mode.engine)
    if kind == "embedded_server":
        return {"kind": kind, "port": port, "max_model_len": 256}
    common = {"kind": kind, "port": port, "max_model_len": 256, "gpu_memory_utilization": 0.1}
    return {**common, "extra_args": ENGINE_FLAGS, **mode.engine}


def name_of(way: str) -> str:
    return way.replace(",", "").replace(" ", "-")


def train(way: str, *, options: argparse.Namespace, place: int) -> Course | Ended:
    """Run one way to its end."""
    path = options.work / f"{name_of(way)}.yaml"
    path.write_text(yaml.safe_dump(configuration(way, WAYS[way], options=options, place=place)))
    log = path.with_suffix(".log")
    command = [sys.executable, "-m", "lachesis", "train", str(path), "--overwrite"]
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment())
    if done.returncode:
        return Ended(way, log.read_text(errors="replace")[-2000:])
    return course_of(way, options.work / "runs" / name_of(way))


def environment() -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}


def course_of(way: str, run: Path) -> Course:
    """Read a finished run's figures."""
    found = read_metrics(run / "metrics.jsonl")
    steps = [step.values for step in found.steps]
    counted = steps[min(WARM_UP, len(steps) - 1) :]
    accuracy = [evaluation.accuracy for evaluation in found.evaluations]

    def all_of(name: str, among: Sequence[Mapping[str, float]] = steps) -> list[float]:
        return [values[name] for values in among if name in values] or [math.nan]

    apart = ("eval_time", "checkpoint_time")
    return Course(
        way=way,
        steps=len(steps),
        first_reward=statistics.fmean(all_of("reward")[:ENDS]),
        last_reward=statistics.fmean(all_of("reward")[-ENDS:]),
        accuracy_before=accuracy[0],
        accuracy_after=accuracy[-1],
        logprob_diff_mean=statistics.fmean(all_of("logprob_diff_mean")),
        logprob_diff_max=max(all_of("logprob_diff_max")),
        canary_error=statistics.median(all_of("canary_error")),
        canary_error_largest=max(all_of("canary_error")),
        canary_ratio_largest=max(all_of("canary_ratio")),
        step_s=statistics.median(v["step_time"] - sum(v.get(name, 0.0) for name in apart) for v in counted),
        transfer_s=statistics.median(all_of("transfer_time", counted)),
    )


def table(results: Sequence[Course | Ended]) -> str:
    """Markdown, a row a way."""
    lines = [
        "| way | held out, before and after | reward, first and last 5 steps | `logprob_diff_mean` | `_max` "
        "| canary, median and largest | over what is allowed, largest | s a step | transfer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        if isinstance(one, Ended):
            lines.append(f"| {one.way} | ended early | | | | | | | |")
            continue
        lines.append(
            f"| {one.way} | {one.accuracy_before:.0%}, {one.accuracy_after:.0%} "
            f"| {one.first_reward:.2f}, {one.last_reward:.2f} | {one.logprob_diff_mean:.4f} "
            f"| {one.logprob_diff_max:.2f} | {one.canary_error:.3f}, {one.canary_error_largest:.3f} "
            f"| {one.canary_ratio_largest:.2f} | {one.step_s:.2f} | {one.transfer_s:.3f} |"
        )
    return "\n".join(lines) + "\n"


def prepare(options: argparse.Namespace) -> None:
    """Write the example's problems, and for ``--tiny`` a model and a reward that differs between its answers."""
    sys.path.insert(0, str(EXAMPLE))
    example: Any = importlib.import_module("setup")
    options.work.mkdir(parents=True, exist_ok=True)
    train_rows, held_out = example.problems(seed=0)
    example.write_jsonl(options.work / "train.jsonl", train_rows)
    example.write_jsonl(options.work / "eval.jsonl", held_out[:4] if options.tiny else held_out)
    if options.tiny:
        options.model = options.work / "model"
        make_model(options.model, tiny=True)
        (options.work / "reward.py").write_text(TINY_REWARD)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--beside", type=int, default=1, help="so many run at a time")
    parser.add_argument("--port", type=int, default=PORT, help="of the first engine; each way takes 20")
    parser.add_argument("--tiny", action="store_true", help="a small model and two steps; also on a CPU")
    parser.add_argument("--work", type=Path, default=None, help="directory to keep; a temporary one if unset")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu(tiny=options.tiny)
    if options.tiny:
        options.steps = 2
    elif options.model is None:
        parser.error("MODEL is missing")
    options.only = options.only or [
        *(TINY if options.tiny else (way for way, mode in WAYS.items() if "devices" not in mode.engine))
    ]
    return options


def main() -> None:
    options = read_options()
    with TemporaryDirectory() as temporary:
        options.work = (options.work or Path(temporary)).absolute()
        prepare(options)
        results: list[Course | Ended] = []
        with ThreadPoolExecutor(options.beside) as pool:
            runs = [pool.submit(train, way, options=options, place=i) for i, way in enumerate(options.only)]
            for run in runs:
                results.append(run.result())
                if isinstance(results[-1], Ended):
                    sys.stderr.write(f"{results[-1].way} ended early:\n{results[-1].words}\n")
                if options.out is not None:
                    options.out.write_text(json.dumps([asdict(one) for one in results], indent=1))
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    sys.stdout.write(f"{place}, torch {torch.__version__}, {options.steps} steps\n\n{table(results)}")
    if any(isinstance(one, Ended) for one in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
