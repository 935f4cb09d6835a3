"""The quickstart, trained by Lachesis and by TRL's GRPOTrainer in turn on the same machine.

    python benchmarks/quickstart_vs_trl.py [--quick] [--steps 200] [--seeds 0 1 2] [--prompts 64 32] [--threads 2]
                                           [--trl-threads N] [--trl-rows N] [--trl-python PATH] [--out FILE.json]
                                           [--vllm [--dtype float32|bfloat16] [--engines N] [--ahead N]]
                                           [--trl-memory SHARE] [--only NAME ...]

Both train the same start model on the same prompts in the same order, with the hyperparameters of
examples/quickstart/config.yaml, each in a process of its own. Lachesis trains as `lachesis train` does, with the
quickstart's records, report and checkpoints; TRL logs and saves nothing. A third run is ours without leaving out the
groups that have no signal. With `--vllm`, on a GPU, both generate with vLLM: ours in a server that shares the weights
(`--engines 3`: in three servers on the same GPU, which get them by `broadcast`), TRL's in its process. What is measured
and how is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from needs_gpu import require_gpu

from lachesis import __version__
from lachesis.common.http import free_port
from lachesis.common.imports import load_function
from lachesis.common.types import Group, Prompt
from lachesis.config.load import load_config
from lachesis.config.rules import learning_rate
from lachesis.config.schema import LachesisConfig
from lachesis.config.steps import total_steps
from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.metrics.sinks.tape import read_groups, tape_files
from lachesis.process.openmp import brief_waits
from lachesis.rollouts.datasets import PromptStream
from lachesis.run.engine import build_engine
from lachesis.run.parts import build_evaluation, build_policy
from lachesis.run.sources import build_rewarder, load_data
from lachesis.train.optim.optimizer import schedule_factor

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "examples/quickstart/config.yaml"
WORK = REPOSITORY / ".bench/quickstart"
TRL_ENVIRONMENT = REPOSITORY / ".bench/trl"
TRL_REQUIREMENTS = Path(__file__).parents[1] / "tests" / "envs" / "trl.txt"

OURS, OURS_ALL, TRL = "Lachesis", "Lachesis, no group left out", "TRL"
DIRECTORIES = {OURS: "lachesis", OURS_ALL: "lachesis-all", TRL: "trl"}
EVALUATE_EVERY = 25
TARGET = 0.90
WARMUP_STEPS = 10


@dataclass(frozen=True)
class Plan:
    """One run to make."""

    system: str
    seed: int
    prompts: int
    steps: int
    engine: tuple[str, ...] = ()  # settings of the engine, where it is not the quickstart's own

    @property
    def directory(self) -> Path:
        """Where the run leaves its files."""
        return WORK / f"{DIRECTORIES[self.system]}-{self.prompts}-{self.seed}"

    @property
    def overrides(self) -> list[str]:
        """What differs from the quickstart's own configuration."""
        return [
            f"run.dir={WORK}",
            f"run.name={self.directory.name}",
            f"run.seed={self.seed}",
            f"run.steps={self.steps}",
            f"batch.prompts_per_step={self.prompts}",
            f"evaluation.every_steps={EVALUATE_EVERY}",
            f"algorithm.skip_zero_advantage={'false' if self.system == OURS_ALL else 'true'}",
            *(self.engine if self.system != TRL else ()),
        ]

    def config(self) -> LachesisConfig:
        """The configuration of this run; TRL's arguments are made of it too."""
        return load_config(CONFIG, overrides=self.overrides).config


@dataclass(frozen=True)
class Step:
    """One optimizer step. Seconds without evaluation and checkpoints; tokens are sums over the batch.

    ``generation`` includes decoding the completions to text, ``training`` is forward and backward;
    ``forward_tokens`` counts positions of the training forward pass, padding included.
    """

    seconds: float
    generation: float
    training: float
    reward: float
    learning_rate: float
    completions: int
    prompt_tokens: int
    completion_tokens: int
    forward_tokens: int

    @property
    def other(self) -> float:
        """Everything else: rewards, advantages, packing or padding, the optimizer, records."""
        return self.seconds - self.generation - self.training


@dataclass(frozen=True)
class Run:
    """A finished run; ``accuracy`` is that on held-out problems after so many steps."""

    plan: Plan
    steps: list[Step]
    accuracy: dict[int, float]

    @property
    def counted(self) -> list[Step]:
        """The steps that the medians are of."""
        return self.steps[min(WARMUP_STEPS, len(self.steps) // 2) :]

    @property
    def median(self) -> float:
        """Seconds a step."""
        return statistics.median(step.seconds for step in self.counted)

    @property
    def seconds_to_target(self) -> float:
        """Training seconds until an evaluation first found TARGET; infinite where none did."""
        reached = [step for step, accuracy in sorted(self.accuracy.items()) if accuracy >= TARGET]
        return sum(step.seconds for step in self.steps[: reached[0]]) if reached else math.inf


def run_lachesis(plan: Plan, *, threads: int) -> Run:
    """Train through the command line, and read what was recorded."""
    settings = [part for override in plan.overrides for part in ("--set", override)]
    command = [sys.executable, "-c", "from lachesis.cli import main; main()", "train", str(CONFIG), "--overwrite"]
    execute([*command, *settings], log=plan.directory.with_suffix(".log"), threads=threads)
    log = read_metrics(plan.directory / "metrics.jsonl")
    tape = tape_files(plan.directory / "rollouts")
    steps = [our_step(line.values, read_groups(tape[line.step])) for line in log.steps]
    return Run(plan, steps, {result.step: result.accuracy for result in log.evaluations})


def our_step(values: Mapping[str, float], groups: Sequence[Group]) -> Step:
    """A line of metrics.jsonl with the step's rollouts. A checkpoint lies within the time of the step after it."""
    samples = [sample for group in groups for sample in group.samples]
    return Step(
        seconds=values["step_time"] - values["eval_time"] - values.get("checkpoint_time", 0.0),
        generation=values["generation_time"],
        training=values["train_time"],
        reward=values["reward"],
        learning_rate=values["learning_rate"],
        completions=len(samples),
        prompt_tokens=sum(len(sample.prompt_ids) for sample in samples),
        completion_tokens=sum(len(sample.completion_ids) for sample in samples),
        forward_tokens=round(values["tokens_forward"]),
    )


def prompts_in_order(config: LachesisConfig) -> list[Prompt]:
    """The prompts of all steps, as Lachesis draws them."""
    stream = PromptStream(load_data(config)[0], seed=config.run.seed, shuffle=config.data.shuffle)
    return stream.take(total_steps(config) * config.batch.prompts_per_step)


class TrlRunner:
    """Trains with TRL, and evaluates the weights that it saved on the way with our engine and evaluation.

    ``rows`` are the most completions in one forward pass, ``arguments`` further ones of TRL's configuration, ``None``
    for its own default. After a run ``training_began`` is when its first step did, in seconds since 1970.
    """

    def __init__(
        self, python: Path, config: LachesisConfig, *, rows: int, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.versions: dict[str, str] = {}
        self.training_began = 0.0
        self._arguments = arguments or {}
        self._python = python
        self.rows = rows
        policy = build_policy(config)
        self._model = policy.transformer
        self._evaluation = build_evaluation(
            config,
            held_out=load_data(config)[1],
            policy=policy,
            engine=build_engine(config, policy.loaded),
            rewarder=build_rewarder(config),
        )

    def run(self, plan: Any, *, threads: int) -> Run:
        job = trl_job(plan, rows=self.rows)
        steps = self._train(plan, job, threads=threads)
        accuracy = {int(step): self._accuracy(plan.directory / f"{step}.pt", int(step)) for step in job["snapshots"]}
        return Run(plan, steps, accuracy)

    def seconds(self, plan: Any, *, rows: int, threads: int) -> float:
        """The median step of a run that nothing is evaluated of, its first half left out."""
        steps = self._train(plan, trl_job(plan, rows=rows) | {"snapshots": []}, threads=threads)
        return statistics.median(step.seconds for step in steps[len(steps) // 2 :])

    def _train(self, plan: Any, job: Mapping[str, Any], *, threads: int) -> list[Step]:
        shutil.rmtree(plan.directory, ignore_errors=True)
        plan.directory.mkdir(parents=True)
        job_file = plan.directory / "job.json"
        job_file.write_text(json.dumps({**job, "more": dict(self._arguments)}))
        command = [str(self._python), str(Path(__file__).with_name("trl_side.py")), str(job_file)]
        execute(command, log=plan.directory.with_suffix(".log"), threads=threads)
        result = json.loads(Path(job["result"]).read_text())
        self.versions, self.training_began = result["versions"], result["began"]
        return [Step(**step) for step in result["steps"]]

    def _accuracy(self, weights: Path, step: int) -> float:
        self._model.load_state_dict(torch.load(weights, weights_only=True))
        weights.unlink()
        result = self._evaluation.maybe_run(step)
        if result is None:
            raise SystemExit(f"no evaluation is due after step {step}")
        return result.accuracy


def trl_job(plan: Any, *, rows: int) -> dict[str, Any]:
    """What trl_side.py is told: the plan's configuration in TRL's words."""
    config = plan.config()
    sampling, algorithm, optimizer = config.sampling, config.algorithm, config.optimizer
    course = optimizer.model_dump(include={"schedule", "warmup_steps", "min_lr_ratio"})
    completions = config.batch.prompts_per_step * sampling.num_generations
    rows = min(rows, completions)
    if completions % rows:
        raise SystemExit(f"--trl-rows {rows} does not divide the {completions} completions of a step")
    grpo = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": completions // rows,
        **sampling.model_dump(include={"num_generations", "max_completion_length", "temperature", "top_p", "top_k"}),
        **algorithm.model_dump(include={"loss_type", "scale_rewards", "epsilon", "epsilon_high", "beta"}),
        "learning_rate": learning_rate(config),
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
    }
    return {
        "model": config.model.path,
        "problems": [{**prompt.columns, "prompt": prompt.text} for prompt in prompts_in_order(config)],
        "reward": config.rewards.functions[0],
        "steps": plan.steps,
        "seed": plan.seed,
        "grpo": grpo,
        "learning_rates": [
            learning_rate(config) * schedule_factor(step, total_steps=plan.steps, **course)
            for step in range(plan.steps + 1)  # one more, for a scheduler that looks ahead
        ],
        "snapshots": sorted({*range(0, plan.steps + 1, config.evaluation.every_steps), plan.steps}),
        "directory": str(plan.directory),
        "result": str(plan.directory / "result.json"),
    }


def execute(command: Sequence[str], *, log: Path, threads: int = 1) -> None:
    """Run to the end; where it fails, show the end of what it said."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY / "src"), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        **brief_waits(os.environ),  # what `lachesis` sets for itself, for both
        "HF_HUB_OFFLINE": "1",
        # Where TRL's vLLM in its process would listen at one port, whoever has it already.
        "MASTER_PORT": str(free_port()),
    }
    with log.open("w") as output:
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise SystemExit(f"{tail}\n\n{command[0]} ended with {code}; all of its output: {log}")


def trl_python() -> Path:
    """The interpreter of TRL's own environment, which is made where it is missing or was made of other pins."""
    python, stamp = TRL_ENVIRONMENT / "bin/python", TRL_ENVIRONMENT / "installed.txt"
    requirements = TRL_REQUIREMENTS.read_text()
    if not stamp.is_file() or stamp.read_text() != requirements:
        shutil.rmtree(TRL_ENVIRONMENT, ignore_errors=True)
        log = TRL_ENVIRONMENT.with_name("trl-install.log")
        sys.stderr.write(f"installing TRL into {TRL_ENVIRONMENT}; output in {log}\n")
        torch_pin = next(line for line in requirements.splitlines() if line.startswith("torch=="))
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        execute([sys.executable, "-m", "venv", str(TRL_ENVIRONMENT)], log=log)
        execute([*pip, torch_pin], log=log)
        execute([*pip, "-r", str(TRL_REQUIREMENTS)], log=log)
        stamp.write_text(requirements)
    return python


def check_comparable(ours: Run, trl: Run) -> None:
    """Both began with the same model, and each step had as many completions of the same prompts, at one rate."""
    # Two engines round differently, so that of the start need not be the same to the last answer.
    if ours.accuracy[0] != trl.accuracy[0] and not ours.plan.engine:
        raise SystemExit(f"the start models differ: held-out accuracy {ours.accuracy[0]} and {trl.accuracy[0]}")
    for number, (a, b) in enumerate(zip(ours.steps, trl.steps, strict=True), start=1):
        same = (a.completions, a.prompt_tokens) == (b.completions, b.prompt_tokens)
        if not (same and math.isclose(a.learning_rate, b.learning_rate, rel_tol=1e-6)):
            raise SystemExit(f"step {number} differs: {a} and {b}")


def markdown_table(runs: Sequence[Run]) -> str:
    """A row a figure, a column a system, for the runs of one batch size. Lists are by seed."""
    systems = {name: of for name in (TRL, OURS, OURS_ALL) if (of := [run for run in runs if run.plan.system == name])}
    first, trl = runs[0], systems.get(TRL, [])
    rows: dict[str, Callable[[list[Run]], str]] = {
        "s a step: median (quartiles)": lambda of: spread(of, "seconds"),
        "- generation": lambda of: spread(of, "generation"),
        "- forward and backward": lambda of: spread(of, "training"),
        "- all else": lambda of: spread(of, "other"),
        "TRL's median s a step over this one's": lambda of: listed(
            theirs.median / own.median for own, theirs in zip(of, trl, strict=False)
        ),
        f"training s to {TARGET:.2f} held out": lambda of: listed(run.seconds_to_target for run in of),
        "training s in all": lambda of: listed(sum(step.seconds for step in run.steps) for run in of),
        "held-out accuracy at the start": lambda of: listed((run.accuracy[0] for run in of), digits=3),
        "held-out accuracy at the end": lambda of: listed((run.accuracy[len(run.steps)] for run in of), digits=3),
        "reward of step 1": lambda of: listed((run.steps[0].reward for run in of), digits=3),
        "completions a step": lambda of: f"{mean(of, 'completions'):.0f}",
        "tokens of a prompt, mean": lambda of: f"{mean(of, 'prompt_tokens') / mean(of, 'completions'):.2f}",
        "tokens of a completion, mean": lambda of: f"{mean(of, 'completion_tokens') / mean(of, 'completions'):.2f}",
        "positions in the training forward pass a step": lambda of: f"{mean(of, 'forward_tokens'):.0f}",
    }
    seeds = ", ".join(str(run.plan.seed) for run in next(iter(systems.values())))
    generations = first.plan.config().sampling.num_generations
    left_out = len(first.steps) - len(first.counted)
    lines = [
        f"**{first.plan.prompts} prompts x {generations} completions, {len(first.steps)} steps, seeds {seeds}** "
        f"(the first {left_out} steps are left out of medians and means)\n",
        "| | " + " | ".join(systems) + " |",
        "|---" * (len(systems) + 1) + "|",
    ]
    lines += [f"| {name} | " + " | ".join(cell(of) for of in systems.values()) + " |" for name, cell in rows.items()]
    return "\n".join(lines) + "\n"


def spread(runs: Sequence[Run], name: str) -> str:
    """Median and quartiles over the counted steps of all seeds."""
    values = [getattr(step, name) for run in runs for step in run.counted]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def mean(runs: Sequence[Run], name: str) -> float:
    """Mean over the counted steps of all seeds."""
    return statistics.fmean(getattr(step, name) for run in runs for step in run.counted)


def listed(values: Iterable[float], *, digits: int = 2) -> str:
    """A value a seed; infinity is a time that never came."""
    return " / ".join(f"{value:.{digits}f}" if math.isfinite(value) else "not reached" for value in values)


def machine(trl_versions: Mapping[str, str], *, threads: Mapping[str, int], rows: int) -> str:
    """One paragraph: the machine, the versions, the day."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    theirs = ", ".join(f"{name} {trl_versions[name]}" for name in ("trl", "torch", "transformers") if trl_versions)
    beside = f"; {theirs}, Python {trl_versions['python']}, at most {rows} rows a forward pass" if trl_versions else ""
    return (
        f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores, {threads[OURS]} threads "
        f"(TRL {threads[TRL]}). Lachesis {__version__} on torch {version('torch')}, "
        f"transformers {version('transformers')}, Python {platform.python_version()}{beside}. "
        f"{time.strftime('%d %B %Y', time.gmtime())}.\n"
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64], help="prompts a step; a table for each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-threads", type=int, help="TRL's, where its best are others")
    parser.add_argument("--quick", action="store_true", help="10 steps of one seed, to see that all works")
    parser.add_argument("--trl-rows", type=int, default=256, help="most completions in one of TRL's forward passes")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL; by default .bench/trl's")
    parser.add_argument("--only", nargs="+", choices=(OURS, TRL, OURS_ALL), default=[OURS, TRL, OURS_ALL])
    parser.add_argument("--vllm", action="store_true", help="on a GPU: both systems generate with vLLM")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="with --vllm")
    parser.add_argument("--engines", type=int, default=1, help="with --vllm: our servers, all on the same GPU")
    parser.add_argument(
        "--ahead", type=int, default=0, help="with --vllm: our batches that are generated ahead, at most"
    )
    parser.add_argument("--trl-memory", type=float, default=0.3, help="share of the GPU for TRL's vLLM")
    parser.add_argument("--out", type=Path, help="JSON with every step of every run")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.steps, chosen.seeds = 10, chosen.seeds[:1]
    return chosen


def vllm_settings(chosen: argparse.Namespace) -> tuple[str, ...]:
    """Our engine: a server on the same GPU, of whose weights the trainer's are, or several that get them."""
    flags = '["--max-num-seqs", "1024", "--kv-cache-memory-bytes", "4000000000"]'
    bridge = "shared_vllm" if chosen.engines == 1 else "broadcast"
    return (
        "engine.kind=vllm",
        f"engine.extra_args={flags}",
        f"engine.data_parallel_size={chosen.engines}",
        f"bridge.kind={bridge}",
        f"model.dtype={chosen.dtype}",
        *(("pipeline.async_prefetch=true", f"pipeline.prefetch_depth={chosen.ahead}") if chosen.ahead else ()),
    )


def trl_arguments(chosen: argparse.Namespace) -> dict[str, Any]:
    return {
        "use_cpu": False, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": chosen.trl_memory,
        "vllm_max_model_length": 64, "bf16": chosen.dtype == "bfloat16",
    }  # fmt: skip


def main() -> None:
    chosen = options()
    if chosen.vllm:
        require_gpu(tiny=False)
    threads = {OURS: chosen.threads, OURS_ALL: chosen.threads, TRL: chosen.trl_threads or chosen.threads}
    WORK.mkdir(parents=True, exist_ok=True)
    engine = vllm_settings(chosen) if chosen.vllm else ()
    plans = [
        Plan(system=system, seed=seed, prompts=prompts, steps=chosen.steps, engine=engine)
        for prompts in chosen.prompts
        for seed in chosen.seeds
        for system in (OURS, TRL, OURS_ALL)
        if system in chosen.only
    ]
    config = replace(plans[0], system=TRL).config()  # whose engine, in this process, evaluates TRL's weights
    if config.run.setup is not None:
        load_function(config.run.setup)(config.model.path)
    theirs = trl_arguments(chosen) if chosen.vllm else None
    trl = None
    if TRL in chosen.only:
        trl = TrlRunner(chosen.trl_python or trl_python(), config, rows=chosen.trl_rows, arguments=theirs)
    runs: list[Run] = []
    for plan in plans:
        train = trl.run if trl is not None and plan.system == TRL else run_lachesis
        run = train(plan, threads=threads[plan.system])
        sys.stderr.write(f"{plan.directory.name}: {run.median:.3f} s a step, load average {os.getloadavg()[0]:.1f}\n")
        if plan.system == TRL and OURS in chosen.only:
            check_comparable(runs[-1], run)
        runs.append(run)
        if chosen.out:
            chosen.out.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    sys.stdout.write(machine({} if trl is None else trl.versions, threads=threads, rows=chosen.trl_rows))
    for prompts in chosen.prompts:
        sys.stdout.write("\n" + markdown_table([run for run in runs if run.plan.prompts == prompts]))


if __name__ == "__main__":
    main()
