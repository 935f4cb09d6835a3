"""Rollout API, engine, environment and trainer as processes of their own, and a model that learns in seconds."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import yaml

from lachesis.metrics.sinks.tape import read_groups, tape_files
from lachesis.plugins.atropos.environments.shipped.arithmetic import problems
from tests import warm
from tests.e2e.runs import environment, metrics, rewards
from tests.ports import free_port
from tests.tiny import EOS_ID, tiny_model, tiny_tokenizer
from tests.waiting import LONG_S
from tests.warm import FORKING

# So many problems are learned by heart, half-way, before training begins.
PROBLEMS = 24
START_REWARD = 0.2
GROUP, BATCH, RANK = 8, 256, 16


def write_model(directory: Path, *, reward: float = START_REWARD, **sizes: int) -> Path:
    """A model that answers the first PROBLEMS sums right about ``reward`` of the time.

    ``sizes`` are fields of its configuration.
    """
    tokenizer = tiny_tokenizer()
    train, _ = problems(seed=0)
    prompts = [tokenizer.encode(item.prompt) for item in train[:PROBLEMS]]
    answers = [[*tokenizer.encode(item.answer), EOS_ID] for item in train[:PROBLEMS]]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    input_ids, labels = torch.zeros(PROBLEMS, length, dtype=torch.long), torch.full((PROBLEMS, length), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        input_ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    model = tiny_model(**{"hidden_size": 64, "intermediate_size": 128} | sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(1000):
        log_p = model(input_ids=input_ids).logits[:, :-1].log_softmax(-1)
        targets = labels[:, 1:]
        chosen = log_p.gather(2, targets.clamp_min(0)[..., None]).squeeze(-1).masked_fill(targets < 0, 0.0)
        if chosen.sum(1).exp().mean() >= reward:
            break
        optimizer.zero_grad()
        (-chosen.sum(1).mean()).backward()
        optimizer.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@dataclass
class Stage:
    """Everything of one job: a directory, its ports, and the processes that were started for it."""

    directory: Path
    model: Path
    mode: str
    steps: int
    api_port: int = field(default_factory=free_port)
    engine_port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.engine_port}"

    @property
    def sessions(self) -> Path:
        return self.directory / "sessions"

    @property
    def register(self) -> Path:
        """Where processes that are forked add themselves."""
        return self.directory / "forked.jsonl"

    @property
    def run_dir(self) -> Path:
        return self.directory / "runs" / "job"

    @property
    def restarts_engine(self) -> bool:
        """Whether the trainer is the one who starts the engine."""
        return self.mode == "none"

    def write_config(self, **sections: dict[str, Any]) -> Path:
        """The trainer's configuration; ``sections`` change it."""
        lora = self.mode.startswith("lora")
        engine: dict[str, Any] = {"kind": "http", "urls": [self.engine_url]}
        if self.restarts_engine:
            engine = {"kind": "embedded_server", "port": self.engine_port}
        config: dict[str, Any] = {
            "run": {"name": "job", "dir": str(self.directory / "runs"), "steps": self.steps},
            "model": {"path": str(self.model), "device": "cpu"},
            "adapter": {"kind": "lora", "r": RANK, "alpha": 2 * RANK} if lora else {"kind": "none"},
            "source": {"kind": "atropos", "url": self.api_url, "batch_size": BATCH, "wait_s": 60},
            "engine": engine,
            "bridge": {"kind": self.mode} | ({"every_steps": 6} if self.restarts_engine else {}),
            "optimizer": {"learning_rate": 5e-3 if lora else 2e-3},
            "checkpoint": {"save_final": False},
            "logging": {"report_every_steps": 1000},
        }
        for name, keys in sections.items():
            config[name] = config.get(name, {}) | keys
        path = self.directory / "job.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def start(
        self,
        name: str,
        *words: str | Path,
        python: Sequence[str] = (sys.executable, "-m", "lachesis"),
        popen: type[subprocess.Popen[str]] = warm.Popen,
    ) -> None:
        """A process with a log of its own, which goes on where it was started before."""
        log = (self.directory / f"{name}.log").open("a")
        own = {"LACHESIS_SESSION_DIR": str(self.sessions), warm.REGISTER: str(self.register)}
        with log:
            self.processes[name] = (popen if python[0] == sys.executable else subprocess.Popen)(
                [*python, *map(str, words)],
                env=environment(**own),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                text=True,
            )

    def start_api(self, *words: str | Path) -> None:
        self.start("api", "run-api", "--port", str(self.api_port), *words)
        wait_for(lambda: answers(f"{self.api_url}/info"), "the API")

    def start_engine(self) -> None:
        lora = ["--enable-lora", "--max-lora-rank", str(RANK)] if self.mode.startswith("lora") else []
        self.start("engine", "serve", "--engine", "embedded", "--model", self.model, "--port", str(self.engine_port),
                   "--dtype", "float32", "--device", "cpu", "--adapter-root", self.directory, *lora)  # fmt: skip
        wait_for(lambda: answers(f"{self.engine_url}/health"), "the engine")

    def start_environment(self, *words: str | Path, name: str = "arithmetic") -> None:
        self.start("env", "env", name, "serve", "--env.rollout_server_url", self.api_url, "--openai.base_url",
                   self.engine_url, "--env.tokenizer_name", self.model, "--env.max_num", str(PROBLEMS),
                   "--env.group_size", str(GROUP), "--env.wait_timeout", "60", "--openai.timeout", "60",
                   "--env.max_batches_offpolicy", "1", *words)  # fmt: skip

    def start_trainer(self, config: Path, *words: str) -> None:
        self.start("trainer", "train", config, *words, python=(sys.executable, "-c", FORKING))

    def start_grpo(self) -> None:
        """The trainer with the flags of the Atropos trainer."""
        flags = {
            "--model-name": self.model, "--weight-bridge-mode": self.mode, "--vllm-port": self.engine_port,
            "--atropos-url": self.api_url, "--training-steps": self.steps, "--batch-size": BATCH, "--lr": 5e-3,
            "--kl_coef": 0, "--lora-r": RANK, "--lora-alpha": 2 * RANK, "--lora-dropout": 0, "--device": "cpu",
            "--save-path": self.run_dir, "--set": "checkpoint.save_final=false",
        }  # fmt: skip
        words = [str(word) for pair in flags.items() for word in pair]
        self.start("trainer", "grpo", *words, "--benchmark", python=(sys.executable, "-c", FORKING))

    def wait_trainer(self, *, timeout_s: float = 4 * LONG_S) -> int:
        """The trainer's exit code."""
        return self.processes["trainer"].wait(timeout_s)

    def kill(self, name: str) -> None:
        """kill -9."""
        self.processes[name].kill()
        self.processes[name].wait()

    def below(self, of: str) -> list[tuple[psutil.Process, list[str]]]:
        """The processes that one which was started here has started, with their command lines."""
        one = psutil.Process(self.processes[of].pid)
        started = [(process, process.cmdline()) for process in one.children(recursive=True)]
        return started + [(process, words) for process, words in warm.forked(self.register) if process != one]

    def child(self, of: str, words: str) -> psutil.Process:
        """The process below one that was started here whose command line has these words."""
        found = [process for process, line in self.below(of) if words in " ".join(line[1:5])]
        assert found, f"{of} has no process {words}"
        return found[-1]

    def supervisor(self, of: str, words: str) -> psutil.Process:
        """The process that watches over :meth:`child` for the one that started it."""
        pid = self.child(of, words).ppid()
        found = [process for process, line in self.below(of) if process.pid == pid and "supervisor.py" in str(line)]
        assert found, f"{words} has another parent"
        return found[0]

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def steps_done(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_step(self, step: int, *, timeout_s: float = 4 * LONG_S) -> None:
        """Until the trainer has done ``step`` steps; an ended trainer fails at once."""

        def done() -> bool:
            trainer = self.processes["trainer"]
            assert trainer.poll() is None or self.steps_done() >= step, self.log("trainer")
            return self.steps_done() >= step

        wait_for(done, f"step {step}", timeout_s=timeout_s)

    def stop(self) -> None:
        """End what still runs, by the processes that were started here."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(LONG_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def stage(directory: Path, *, model: Path, mode: str, steps: int) -> Iterator[Stage]:
    """A job whose processes end with the test."""
    job = Stage(directory, model, mode, steps)
    try:
        yield job
    finally:
        job.stop()


def trained_ids(run_dir: Path) -> list[str]:
    """The ids of all groups that were trained on, in order, as the tape has them."""
    steps = sorted(tape_files(run_dir / "rollouts").items())
    return [group.prompt.id for _, path in steps for group in read_groups(path)]


def assert_learned(run_dir: Path, *, steps: int) -> None:
    """Whole batches, each used once; finite losses; true logprobs; and a mean reward that rose by 0.2."""
    done = [line.values for line in metrics(run_dir).steps]
    assert len(done) == steps and all(math.isfinite(step["loss"]) for step in done)
    # Before the first update the logprobs that came through the environment are the trainer's own, token by token.
    assert abs(done[0]["mean_ratio"] - 1) < 1e-3 and done[0]["mean_kl"] < 1e-6
    assert not any(step["groups_without_logprobs"] or step["dropped_groups"] for step in done)
    assert [step["weight_version"] for step in done] == list(range(1, steps + 1))
    batches = [
        tuple((sample.completion_ids, sample.logprobs) for group in read_groups(path) for sample in group.samples)
        for path in tape_files(run_dir / "rollouts").values()
    ]
    assert [len(batch) for batch in batches] == [BATCH] * steps and len(set(batches)) == steps
    values = rewards(run_dir)
    assert sum(values[-4:]) / 4 - sum(values[:2]) / 2 >= 0.2, values


def assert_said_what_the_atropos_trainer_says(job: Stage) -> None:
    """What scripts around it may look for, in the log of a trainer that was started with its flags."""
    said = job.log("trainer")
    assert "[Trainer] ✓ Registered with Atropos API" in said
    assert "[NCCL] Weights synced in" in said
    assert "step_times: mean" in said


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def wait_for(condition: Callable[[], bool], what: str, *, timeout_s: float = 4 * LONG_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.05)
