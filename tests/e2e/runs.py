"""Small real runs: their configuration, the command line around them, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

import lachesis
from lachesis.config.load import load_config
from lachesis.metrics.sinks.jsonl import MetricsLog, read_metrics
from lachesis.plugins.checks.doctor import write_proof
from lachesis.run.context import RunContext
from lachesis.run.train import RunSummary, train
from tests import warm
from tests.waiting import LONG_S
from tests.warm import COMMAND

# What a run measures with a clock, and the proof's canary, which the engine writes anew at each start; all else has to
# be the same in two equal runs.
_TIMED = ("_time", "_per_s", "canary_error", "canary_ratio")


def write_run(directory: Path, **sections: dict[str, Any]) -> Path:
    """A configuration over the doctor's model and problems, its sections changed; returns its path.

    The reward is the share of the letter a among at most 8 letters: about 0.25 at first, and quickly learned.
    """
    directory.mkdir(parents=True, exist_ok=True)
    return change(write_proof(directory), **sections)


def quickly(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections of a run that learns in 18 steps what the doctor's rate takes 30 for."""
    quick: dict[str, dict[str, Any]] = {"run": {"steps": 18}, "optimizer": {"learning_rate": 6e-3}}
    return sections | {name: keys | sections.get(name, {}) for name, keys in quick.items()}


def change(path: Path, **sections: dict[str, Any]) -> Path:
    """Change sections of a configuration, and nothing beside it: a server may be loading its model."""
    config = yaml.safe_load(path.read_text())
    for name, keys in sections.items():
        config[name] = config.get(name, {}) | keys
    path.write_text(yaml.safe_dump(config))
    return path


def write_reward(directory: Path, body: str) -> str:
    """A reward function in a file of its own; returns how a configuration names it.

    ``body`` sees ``completions``, ``call`` (counted from 1 in each process), ``shares``, the usual rewards, and
    ``send``, which gives the run's process a signal (by its main thread: another would not wake it).
    """
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    (directory / "custom.py").write_text(
        "import os, signal, threading, time\n"
        "def send(number):\n"
        "    if threading.current_thread() is threading.main_thread():  # of a process that the run has started\n"
        f"        os.kill(int(os.environ.get({warm.STARTED_BY!r}) or os.getppid()), number)\n"
        "    else:\n"
        "        signal.pthread_kill(threading.main_thread().ident, number)\n"
        "calls = []\n"
        "def share_of_a(completions, **columns):\n"
        "    calls.append(1)\n"
        "    call = len(calls)\n"
        "    texts = [completion[0]['content'] for completion in completions]\n"
        "    shares = [text.count('a') / max(len(text), 1) for text in texts]\n"
        f"{lines}\n"
    )
    return f"{directory / 'custom.py'}:share_of_a"


def write_dying_loss(directory: Path, *, rank: int, at_call: int) -> str:
    """A loss, as a configuration names it, at one call of which the process of that rank is killed.

    Where torchrun has started all ranks again, nobody is. When it was killed, and each was started: ``times``.
    """
    times = directory / "times"
    times.mkdir(parents=True)
    (directory / "dying.py").write_text(
        "import os, pathlib, psutil, signal, time\n"
        "attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')\n"
        f"times = pathlib.Path({str(times)!r})\n"
        "started = times / f'{attempt}-{os.environ[\"RANK\"]}'\n"
        "started.write_text(str(psutil.Process().create_time()))\n"
        "calls = []\n"
        "def loss(logprobs, *, ratio, advantages, **rest):\n"
        "    calls.append(1)\n"
        f"    if attempt == '0' and os.environ['RANK'] == '{rank}' and len(calls) == {at_call}:\n"
        "        (times / 'killed').write_text(str(time.time()))\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return -ratio * advantages\n"
    )
    return f"{directory / 'dying.py'}:loss"


def run_here(
    config: Path, *overrides: str, resume: bool = False, overwrite: bool = False, stop_after: int | None = None
) -> RunSummary:
    """Train in this process; ``stop_after`` asks the run to stop after that many steps of it."""
    asked: list[int] = []

    def stop_requested() -> bool:
        asked.append(1)
        return stop_after is not None and len(asked) >= stop_after

    context = RunContext(stop_requested=stop_requested)
    return train(load_config(config, overrides=overrides), context, resume=resume, overwrite=overwrite)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """What was said of the error; warnings and notes left out."""
        lines = self.err.splitlines()
        starts = [index for index, line in enumerate(lines) if line.startswith("error: ")]
        return lines[starts[0] :] if starts else []


def environment(**extra: str) -> dict[str, str]:
    """For a process of its own: this package, one thread, nothing from the network."""
    source = str(Path(lachesis.__file__).parents[1])
    fixed = {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | fixed | extra


def command(*arguments: str | Path, code: str = COMMAND, cwd: Path | None = None) -> Outcome:
    """`lachesis ARGUMENTS` in a process of its own; ``code`` may do something first."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = warm.run(words, env=environment(), cwd=cwd, timeout=4 * LONG_S)
    return Outcome(done.returncode, done.stdout, done.stderr)


def torchrun(
    ranks: int, *arguments: str | Path, max_restarts: int = 0, forked: bool = True, timeout_s: float = 8 * LONG_S
) -> Outcome:
    """`torchrun --nproc-per-node RANKS -m MODULE ARGUMENTS`; a module of these tests too."""
    own = [Path(lachesis.__file__).parents[1], Path(__file__).parents[2]]
    paths = os.pathsep.join([*map(str, own), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["--standalone", "--max-restarts", str(max_restarts), "--nproc-per-node", str(ranks), "-m", *arguments]
    kind = ("-c", warm.TORCHRUN) if forked else ("-m", "torch.distributed.run")
    run = warm.run if forked else partial(subprocess.run, capture_output=True, text=True)
    done = run([sys.executable, *kind, *words], env=environment(PYTHONPATH=paths), timeout=timeout_s)
    return Outcome(done.returncode, done.stdout, done.stderr)


Main = Callable[..., Outcome]


def state(run_dir: Path) -> dict[str, Any]:
    """How the run says that it stands."""
    return json.loads((run_dir / "state.json").read_text())


def metrics(run_dir: Path) -> MetricsLog:
    return read_metrics(run_dir / "metrics.jsonl")


def untimed(run_dir: Path) -> tuple[dict[int, dict[str, float]], list[tuple[float, ...]]]:
    """All metrics of a run by step, and its evaluations, without what a clock measured."""
    log = metrics(run_dir)
    steps = {
        line.step: {name: value for name, value in line.values.items() if not name.partition("/")[0].endswith(_TIMED)}
        for line in log.steps
    }
    return steps, [(e.step, e.accuracy, e.mean_reward, e.problems, e.mean_length) for e in log.evaluations]


def rewards(run_dir: Path) -> list[float]:
    return [line.values["reward"] for line in metrics(run_dir).steps]


def tape(run_dir: Path) -> dict[str, str]:
    """Every rollout, byte by byte."""
    return {path.name: path.read_text() for path in sorted((run_dir / "rollouts").iterdir())}


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The final model, which may be in several files, or adapter."""
    paths = sorted((run_dir / "final").glob("*model*.safetensors"))
    assert paths, "there is none"
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def files(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in a directory: modification times and contents."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("*"))
