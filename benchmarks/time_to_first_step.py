"""From the command to the end of the first step, a row a stage, beside the engine's own start.

    PYTHONPATH=src python benchmarks/time_to_first_step.py [--size 1.5B|8B] [--repeats N] [--config FILE] [--tiny]

`lachesis train` is started as its users start it, on a model of random weights as in `end_to_end.py`, or on a
configuration of yours, and watched from outside: when its engine appears, when that serves, when the run directory is
there (data read, policy built), when its first step begins and ends. Then the very command of that engine is started
alone. All of it once with the compilers' caches empty, and then with what that has left in them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
import psutil
import torch
import yaml
from end_to_end import COMPLETIONS, EQUAL, PROMPT_TOKENS, REWARD, our_config, sizes, versions, write_model
from needs_gpu import require_gpu
from overlap import write_problems

from lachesis.common.run_files import run_paths
from lachesis.config.load import load_config
from lachesis.metrics.sinks.jsonl import read_metrics

LOOK_S = 0.05
LIMIT_S = 900.0
# Where vLLM, inductor and triton keep what they have compiled.
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
COLD, WARM = "empty caches", "warm caches"


@dataclass(frozen=True)
class Server:
    """An engine that a run started: how it was started, and when it was seen, and seen to serve."""

    command: list[str]
    launched: float
    serves: float


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start. Seconds since the command, but for the parts of steps and ``alone``, the engine's own start."""

    caches: str
    launched: float | None = None
    serves: float | None = None
    built: float
    begins: float
    ends: float
    generation: float
    training: float
    sync: float
    second: float
    alone: float | None = None

    @property
    def longer(self) -> float | None:
        """Than the engine alone."""
        return None if self.alone is None else self.ends - self.alone


ROWS: Mapping[str, Callable[[Start], float | None]] = {
    "the engine is launched": lambda start: start.launched,
    "it serves": lambda start: start.serves,
    "policy and data are there": lambda start: start.built,
    "weights are proved, held-out problems answered: the first step begins": lambda start: start.begins,
    "**the first step ends**": lambda start: start.ends,
    "of that step: batch": lambda start: start.generation,
    "of that step: forward and backward": lambda start: start.training,
    "of that step: optimizer and transfer": lambda start: start.sync,
    "the second step, in all": lambda start: start.second,
    "the engine alone, from its command till it serves": lambda start: start.alone,
    "**longer than the engine alone**": lambda start: start.longer,
}


def measure(config: Path, *, caches: str, options: argparse.Namespace) -> Start:
    """One start of the run, and one of its engine alone."""
    directory = options.work / "caches"
    began = time.time()
    process = launch([sys.executable, "-m", "lachesis", "train", str(config), "--overwrite"], options, "run")
    try:
        server = watch_server(process, began=began)
        if process.wait(LIMIT_S):
            fail(options, "run")
    finally:
        end(process)
    loaded = load_config(config).config
    files = run_paths(Path(loaded.run.dir) / loaded.run.name)
    first, second = read_metrics(files["metrics"]).steps[:2]
    start = Start(
        caches=caches,
        launched=server and server.launched,
        serves=server and server.serves,
        built=json.loads(files["state"].read_text())["began"] - began,
        begins=first.time - first.values["step_time"] - began,
        ends=first.time - began,
        generation=first.values["data_fetch_time"],
        training=first.values["train_time"],
        sync=first.values["sync_time"],
        second=second.values["step_time"],
    )
    if server is None:
        return start
    if caches == COLD:
        shutil.rmtree(directory)
    return replace(start, alone=start_alone(server, options))


def watch_server(run: subprocess.Popen[bytes], *, began: float) -> Server | None:
    """Wait until the engine of the run serves; None where the run ends without one."""
    found: tuple[list[str], float] | None = None
    with httpx.Client(trust_env=False, timeout=1.0) as client:
        while run.poll() is None and time.time() - began < LIMIT_S:
            if found is None:
                found = find_server(run.pid, began=began)
            elif healthy(client, found[0]):
                return Server(*found, time.time() - began)
            time.sleep(LOOK_S)
    return None


def find_server(pid: int, *, began: float) -> tuple[list[str], float] | None:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:  # it has just ended, and is no longer there to be asked
        return None
    for child in children:
        try:
            words = " ".join(child.cmdline()).split()  # one that was forked shows it as one word
            if words[1:4] == ["-m", "lachesis", "serve"]:
                return words, child.create_time() - began
        except psutil.Error:  # it has just ended, or is not yet what it is to be
            continue
    return None


def healthy(client: httpx.Client, command: Sequence[str]) -> bool:
    port = command[command.index("--port") + 1]
    try:
        return client.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.TransportError:
        return False


def start_alone(server: Server, options: argparse.Namespace) -> float:
    """Seconds from the engine's command till it serves, with nothing beside it."""
    began = time.time()
    process = launch(server.command, options, "engine")
    try:
        with httpx.Client(trust_env=False, timeout=1.0) as client:
            while not healthy(client, server.command):
                if process.poll() is not None or time.time() - began > LIMIT_S:
                    fail(options, "engine")
                time.sleep(LOOK_S)
        return time.time() - began
    finally:
        end(process)


def launch(command: Sequence[str], options: argparse.Namespace, name: str) -> subprocess.Popen[bytes]:
    """Start it with caches of this benchmark's own, its output in a log, and as the head of a group."""
    own = {variable: str(options.work / "caches" / name) for variable, name in CACHES.items()}
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (options.work / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            list(command),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=defaults | dict(os.environ) | own,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def fail(options: argparse.Namespace, name: str) -> None:
    log = options.work / f"{name}.log"
    sys.exit("\n".join(log.read_text(errors="replace").splitlines()[-40:]) + f"\n\n{name} did not come up; see {log}")


def table(starts: Sequence[Start]) -> str:
    """Markdown: a row a stage; medians, and in brackets the least and the most of several."""
    kinds = [kind for kind in (COLD, WARM) if any(start.caches == kind for start in starts)]
    lines = [f"| seconds | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name, value in ROWS.items():
        cells = [cell([value(start) for start in starts if start.caches == kind]) for kind in kinds]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    spread = f" ({min(known):.1f} to {max(known):.1f})" if len(known) > 1 else ""
    return f"{statistics.median(known):.1f}{spread}"


def write_run(options: argparse.Namespace) -> Path:
    """Model, problems, reward and configuration as `end_to_end.py` has them, for two steps."""
    model = options.work / "model"
    if not (model / "config.json").exists():
        shutil.rmtree(model, ignore_errors=True)
        write_model(model, options=options)
    _, fields = sizes(options)
    count = options.prompts * options.steps
    write_problems(options.work / "problems.jsonl", count=count, tokens=PROMPT_TOKENS, vocab_size=fields["vocab_size"])
    (options.work / "reward.py").write_text(REWARD)
    return write_config(our_config(options, name="start"), options)


def own_run(options: argparse.Namespace) -> Path:
    """A configuration of the user's, for two steps, in a directory of this benchmark's."""
    keys = ["run.steps=2", f"run.dir={options.work / 'runs'}", "run.name=start", *options.set]
    return write_config(load_config(options.config, overrides=keys).config.model_dump(mode="json"), options)


def write_config(tree: object, options: argparse.Namespace) -> Path:
    path = options.work / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("1.5B", "8B"), default="1.5B", help="1.5B trains whole, 8B by LoRA")
    parser.add_argument("--config", type=Path, default=None, help="a configuration of yours in place of that model")
    parser.add_argument("--repeats", type=int, default=1, help="starts with warm caches, after the one without")
    parser.add_argument("--prompts", type=int, default=32, help=f"a step, with {COMPLETIONS} completions each")
    parser.add_argument("--devices", default=None, help="a GPU for the engine alone")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="vllm")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens; also on a CPU")
    parser.add_argument("--port", type=int, default=9137)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lachesis-first-step")
    parser.add_argument("--out", type=Path, default=None, help="all starts as JSON")
    options = parser.parse_args()
    require_gpu(tiny=options.tiny or options.config is not None)
    options.lengths, options.steps, options.most = "equal", 2, 16 if options.tiny else EQUAL
    options.model = options.problems = None  # which end_to_end.py may be given
    options.work = options.work / ("own" if options.config else "tiny" if options.tiny else options.size)
    return options


def main() -> None:
    options = read_options()
    options.work.mkdir(parents=True, exist_ok=True)
    config = write_run(options) if options.config is None else own_run(options)
    shutil.rmtree(options.work / "caches", ignore_errors=True)
    starts = []
    for caches in [COLD, *[WARM] * options.repeats]:
        starts.append(measure(config, caches=caches, options=options))
        sys.stderr.write(json.dumps(asdict(starts[-1])) + "\n")
        if options.out is not None:
            options.out.write_text(json.dumps([asdict(start) for start in starts], indent=1))
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    what = options.config or ("a tiny model" if options.tiny else options.size)
    sys.stdout.write(f"{place}, {what}, load {os.getloadavg()[0]:.0f}, {versions('vllm')}\n\n{table(starts)}")


if __name__ == "__main__":
    main()
