"""Held-out accuracy of SmolLM2-135M-Instruct by step, for several settings and seeds, a few runs at a time.

    PYTHONPATH=src python benchmarks/curves.py [--only NAME ...] [--seeds 0 1 2] [--rate 1e-5] [--steps 60]
                                               [--at-once 5] [--set KEY=VALUE ...] [--work DIR] [--out FILE.json]
                                               [--tiny]
    PYTHONPATH=src python benchmarks/curves.py --read FILE.json ... [--svg FILE.svg]

`on policy`, `4 behind` and `4 behind, corrected` train on the sums of `examples/smollm2`: synchronously, on samples
that are four weight versions old with the loss's clip alone, and on such samples with the default correction for their
age. `all problems` and `by pass rate` train on a mixture of such sums, of sums that the model solves already, and of
products that it never solves: as they come, and with `data.curriculum: pass_rate`. `equation` is the example of that
name, `gsm8k` the recipe. Rate and steps are those of the file if unset. The runs share one GPU, each with a vLLM server
on a port of its own. ``--read`` prints the table of earlier results, and draws them. ``--tiny`` takes the embedded
engine and two steps of one seed, also on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue

from lachesis.metrics.sinks.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SUMS = ROOT / "examples/smollm2/full.yaml"
PORT = 9001
PORTS_BETWEEN = 20
KV_CACHE_BYTES = 4_000_000_000  # said, as vLLM cannot measure what is free while other runs start
STEPS: dict[str, object] = {"run.steps": 60, "batch.prompts_per_step": 16}
BEHIND = STEPS | {"pipeline.async_prefetch": True, "pipeline.prefetch_depth": 4, "pipeline.max_staleness": 4}


@dataclass(frozen=True)
class Setting:
    """A file, and the keys that differ from it."""

    file: Path
    keys: Mapping[str, object]
    mixed: bool = False  # train on `mixture`


SETTINGS = {
    "on policy": Setting(SUMS, STEPS),
    "4 behind": Setting(SUMS, BEHIND | {"algorithm.sampler_correction": "none"}),
    "4 behind, corrected": Setting(SUMS, BEHIND),
    "all problems": Setting(SUMS, STEPS, mixed=True),
    "by pass rate": Setting(SUMS, STEPS | {"data.curriculum": "pass_rate"}, mixed=True),
    "equation": Setting(SUMS.with_name("equation.yaml"), {}),
    "gsm8k": Setting(ROOT / "recipes/gsm8k/smollm2-135m.yaml", {}),
}


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy of a run by step.

    Attributes:
        rate: the learning rate; None if it is the file's.
        tokens: sampled for training until each of these steps.
    """

    name: str
    rate: float | None
    seed: int
    accuracy: dict[int, float]
    tokens: dict[int, int] = field(default_factory=dict[int, int])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rate", type=float, help="learning rate")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--at-once", type=int, default=5, help="runs at a time")
    parser.add_argument("--set", nargs="+", default=[], help="further keys, as KEY=VALUE in JSON")
    parser.add_argument("--work", type=Path, default=Path(".bench/curves"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", nargs="+", type=Path, default=[])
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.seeds, options.steps, options.at_once = [0], 2, 1
    curves = [curve for file in options.read for curve in read(file)] or measured(options)
    if options.out:
        options.out.write_text(json.dumps([asdict(curve) for curve in curves]))
    sys.stdout.write(f"{table(curves)}\n")
    if options.svg:
        draw(curves, options.svg)


def read(file: Path) -> list[Curve]:
    """Return the curves that ``--out`` wrote; JSON's keys are texts, and steps are numbers."""
    rows = json.loads(file.read_text())
    numbered = [
        {k: {int(step): x for step, x in v.items()} for k, v in row.items() if isinstance(v, dict)} for row in rows
    ]
    return [Curve(**row | numbers) for row, numbers in zip(rows, numbered, strict=True)]


def measured(options: argparse.Namespace) -> list[Curve]:
    """Train once for each setting and seed, and return the curves."""
    options.work.mkdir(parents=True, exist_ok=True)
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(options.at_once):
        slots.put(slot)

    def run(name: str, seed: int) -> Curve:
        slot = slots.get()
        try:
            return train(name, seed, port=PORT + slot * PORTS_BETWEEN, options=options)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(options.at_once) as pool:
        return [one.result() for one in [pool.submit(run, name, s) for s in options.seeds for name in options.only]]


def train(name: str, seed: int, *, port: int, options: argparse.Namespace) -> Curve:
    """Run ``lachesis train``, and return its evaluations. Raises SystemExit where the run fails."""
    setting = SETTINGS[name]
    run = "-".join([*name.replace(",", "").split(), *([f"{options.rate:g}"] if options.rate else []), str(seed)])
    keys: dict[str, object] = {
        **setting.keys, **engine(port, tiny=options.tiny),
        "run.name": run, "run.dir": str(options.work.resolve()), "run.seed": seed,
    }  # fmt: skip
    if options.steps:
        keys["run.steps"] = options.steps
    if options.rate:
        keys["optimizer.learning_rate"] = options.rate
    if setting.mixed:
        keys["data.path"] = str(mixture(options.work.resolve() / "mixture.jsonl"))
    if options.tiny:
        keys |= {"batch.prompts_per_step": 2, "evaluation.max_problems": 4}
    pairs = [f"{key}={json.dumps(value)}" for key, value in keys.items()] + options.set
    command = [sys.executable, "-m", "lachesis", "train", setting.file.name, "--overwrite"]
    command += [word for pair in pairs for word in ("--set", pair)]
    log = options.work / f"{run}.log"
    with log.open("wb") as output:
        code = subprocess.run(
            command, cwd=setting.file.parent, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise SystemExit(f"{run} ended with {code}:\n{log.read_text(errors='replace')[-2000:]}")
    return curve(options.work / run / "metrics.jsonl", name=name, rate=options.rate, seed=seed)


def curve(metrics: Path, *, name: str, rate: float | None, seed: int) -> Curve:
    """Read a run's evaluations, and the tokens that were sampled until each."""
    read_lines = read_metrics(metrics)
    accuracy = {one.step: round(one.accuracy, 4) for one in read_lines.evaluations}
    sampled = {one.step: int(one.values["tokens_generated"]) for one in read_lines.steps}
    tokens = {until: sum(count for step, count in sampled.items() if step <= until) for until in accuracy}
    return Curve(name, rate, seed, accuracy, tokens)


def mixture(path: Path) -> Path:
    """Write 300 problems: a third each that the model solves nearly always, sometimes and never."""
    draw_from = random.Random(0)
    rows: list[dict[str, object]] = []
    for index in range(300):
        kind = index % 3
        least, most = ((1, 3), (1, 20), (100, 999))[kind]
        a, b = draw_from.randint(least, most), draw_from.randint(least, most)
        question, answer = (f"What is {a} * {b}?", a * b) if kind == 2 else (f"What is {a} + {b}?", a + b)
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": str(answer)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def engine(port: int, *, tiny: bool) -> dict[str, object]:
    """Return the keys of the engine, which shares its GPU with other runs."""
    if tiny:
        return {"engine": {"kind": "embedded"}, "bridge": {"kind": "in_process"}}
    vllm = {
        "kind": "vllm", "port": port, "gpu_memory_utilization": 0.1, "max_model_len": 320,
        "extra_args": ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)],
    }  # fmt: skip
    return {"engine": vllm, "bridge": {"kind": "shared_vllm"}}


def table(curves: list[Curve]) -> str:
    """Return a Markdown table: a row for each setting, the mean and the range of its seeds by step."""
    steps = sorted({step for curve in curves for step in curve.accuracy})
    lines = ["| | rate | seeds |" + "".join(f" {step} |" for step in steps), "|---" * (len(steps) + 3) + "|"]
    for name, rate in dict.fromkeys((curve.name, curve.rate) for curve in curves):
        group = [curve.accuracy for curve in curves if (curve.name, curve.rate) == (name, rate)]
        cells = [[100 * one[step] for one in group if step in one] for step in steps]
        shown = [f"{statistics.mean(v):.0f} ({min(v):.0f}–{max(v):.0f})" if v else "" for v in cells]
        lines.append(f"| {name} | {rate or 'file'} | {len(group)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def draw(curves: list[Curve], path: Path) -> None:
    """Draw each rate in a panel of its own: the mean of a setting's seeds, and their range as a band."""
    from matplotlib import pyplot

    rates = sorted({curve.rate for curve in curves}, key=lambda rate: rate or 0)
    figure, panels = pyplot.subplots(1, len(rates), figsize=(4.2 * len(rates), 3.4), sharey=True, squeeze=False)
    for panel, rate in zip(panels[0], rates, strict=True):
        for name in dict.fromkeys(curve.name for curve in curves if curve.rate == rate):
            group = [curve.accuracy for curve in curves if (curve.name, curve.rate) == (name, rate)]
            steps = sorted(set.intersection(*(set(one) for one in group)))
            values = [[100 * one[step] for one in group] for step in steps]
            (line,) = panel.plot(steps, [statistics.mean(v) for v in values], label=name)
            panel.fill_between(
                steps, [min(v) for v in values], [max(v) for v in values], alpha=0.15, color=line.get_color()
            )
        panel.set(title=f"learning rate {rate:g}" if rate else "", xlabel="step", ylim=(0, 100))
    panels[0][0].set_ylabel("held-out accuracy, %")
    panels[0][0].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
