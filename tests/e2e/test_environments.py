"""Environments as a user starts them: processes over a real rollout API and a real inference server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm
from tests.contracts.servers import CHAT_TEMPLATE, EMBEDDED
from tests.contracts.servers import process as server_process
from tests.e2e.runs import environment
from tests.paths import EXAMPLES
from tests.ports import free_port
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.plugins.atropos.api.processes import Server, ours
from tests.waiting import LONG_S

ENVIRONMENTS = EXAMPLES / "environments"
CODE = """
import sys
from lachesis.plugins.atropos.commands.environments import run_environment
from lachesis.common.errors import LachesisError
try:
    sys.exit(run_environment(sys.argv[1], sys.argv[2], sys.argv[3:]))
except LachesisError as error:
    sys.exit(f"error: {error}")
"""
CUSTOM = """
from lachesis.plugins.atropos.environments.shipped.arithmetic import Arithmetic

class Mine(Arithmetic):
    name = "mine"

    async def score(self, item, trajectories):
        return [float(len(trajectory.tokens)) for trajectory in trajectories]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model(max_position_embeddings=512).save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def inference(model: Path, directory: Path, *, port: int | None = None) -> Iterator[str]:
    """The embedded engine's server; yields its address."""
    port = port or free_port()
    options = {"model": str(model), "port": port, "max_num_seqs": 32}
    command = [sys.executable, "-c", EMBEDDED, json.dumps(options)]
    with server_process(
        command, url=f"http://127.0.0.1:{port}", log=directory / f"server_{time.monotonic_ns()}.log", start_s=120,
        popen=warm.Popen, LACHESIS_SESSION_DIR=str(directory / "sessions"),
    ) as url:  # fmt: skip
        yield url


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with inference(model, tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Server]:
    with ours(tmp_path, strict=True) as server:
        yield server


class Running:
    """`lachesis env` in a process of its own."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.log = directory / f"env_{time.monotonic_ns()}.log"
        with self.log.open("wb") as output:
            self.process = warm.Popen(
                [sys.executable, "-c", CODE, *arguments], cwd=directory, env=environment(), stdout=output, stderr=output
            )

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=LONG_S)

    @property
    def said(self) -> str:
        return self.log.read_text()


@contextmanager
def started(directory: Path, *arguments: str) -> Iterator[Running]:
    running = Running(directory, *arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait(timeout=LONG_S)


def run(directory: Path, *arguments: str, code: str = CODE) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-c", code, *arguments], cwd=directory, env=environment(), timeout=180)


def until(condition: Callable[[], Any], running: Running, *, seconds: float = 3 * LONG_S) -> Any:
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end and running.process.poll() is None, running.said
        time.sleep(0.05)
    return result


def next_batch(api: Server, running: Running) -> list[dict[str, Any]]:
    return until(lambda: api.get("/batch")["batch"], running)


def test_serving_until_it_is_stopped(url: str, api: Server, model: Path, tmp_path: Path) -> None:
    flags = [f"--openai.base_url={url}/v1", f"--env.rollout_server_url=http://127.0.0.1:{api.port}"]
    with started(tmp_path, "arithmetic", "serve", *flags, "--env.group-size", "4") as running:
        until(lambda: "waiting for a trainer to register" in running.said, running)
        api.start(batch_size=8)
        for group in next_batch(api, running):
            assert len(group["tokens"]) == 4 and group["env_id"] == 0
            for tokens, masks, logprobs in zip(
                group["tokens"], group["masks"], group["inference_logprobs"], strict=True
            ):
                trained = [mask != -100 for mask in masks]
                assert 1 <= sum(trained) <= 6 and not any(trained[: len(tokens) - 6])
                assert all((logprob <= 0) == trains for logprob, trains in zip(logprobs, trained, strict=True))
        assert running.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert "it was asked to stop" in running.said
    assert api.get("/overview")["environments"][0]["state"] == "left"
    assert "set_aside" not in api.get("/status") or api.get("/status")["set_aside"] == 0


def test_deaths_are_survived(model: Path, api: Server, tmp_path: Path) -> None:
    """kill -9 of the inference server and of the environment: the other goes on, the trainer gets its batches."""
    port = free_port()
    flags = [
        f"--openai.base_url=http://127.0.0.1:{port}", f"--env.rollout_server_url=http://127.0.0.1:{api.port}",
        f"--env.tokenizer_name={model}", "--env.max_batches_offpolicy=1",
    ]  # fmt: skip
    api.start(batch_size=8)
    with started(tmp_path, "arithmetic", "serve", *flags) as first:
        until(lambda: "waiting for the inference server" in first.said, first)
        with inference(model, tmp_path, port=port):
            next_batch(api, first)
        until(lambda: (api.get("/batch"), first.said.count("waiting for the inference server") > 1)[1], first)
        with inference(model, tmp_path, port=port):
            next_batch(api, first)
            first.end(signal.SIGKILL)
            with started(tmp_path, "arithmetic", "serve", *flags) as second:
                until(lambda: "registered at" in second.said and "arithmetic_1" in second.said, second)
                while next_batch(api, second)[0]["env_id"] != 1:
                    pass


def gsm8k(directory: Path) -> Path:
    rows = [{"question": f"What is {n}+1?", "answer": f"It is.\n#### {n + 1}"} for n in range(20)]
    directory.mkdir()
    for split in ("train", "test"):
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_gsm8k_to_a_page_and_evaluated(url: str, tmp_path: Path) -> None:
    data = gsm8k(tmp_path / "data")
    flags = [f"--openai.base_url={url}", f"--env.data={data}", "--env.max_new_tokens=8", "--slurm", "False"]
    done = run(tmp_path, "gsm8k", "process", *flags, "--env.total_steps", "3", "--env.group_size", "2")
    assert done.returncode == 0, done.stderr
    (rollouts,) = (tmp_path / "data").glob("gsm8k.jsonl")
    groups = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert [len(group["scores"]) for group in groups] == [2, 2, 2]
    assert "What is" in groups[0]["messages"][0][1]["content"]
    assert "3 groups, 6 sequences" in rollouts.with_suffix(".html").read_text()
    done = run(
        tmp_path, "gsm8k", "evaluate", *flags, "--env.eval_num=4", f"--env.data_dir_to_save_evals={tmp_path / 'evals'}"
    )
    assert done.returncode == 0 and "on 4 held-out problems" in done.stdout, done.stderr
    (line,) = (tmp_path / "evals" / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line)["problems"] == 4


def test_an_environment_of_ones_own(url: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM)
    flags = [f"--openai.base_url={url}", "--env.total_steps=1", "--openai.server_type=openai"]
    done = run(tmp_path, "mine.py:Mine", "process", *flags)
    assert done.returncode == 0, done.stderr
    (group,) = [json.loads(line) for line in (tmp_path / "data" / "mine.jsonl").read_text().splitlines()]
    assert group["scores"] == [float(len(tokens)) for tokens in group["tokens"]]


def test_the_examples(url: str, tmp_path: Path) -> None:
    """One answer a problem, and several turns whose hints are not trained on."""
    flags = [f"--openai.base_url={url}", "--env.total_steps=2"]
    done = run(tmp_path, f"{ENVIRONMENTS / 'largest.py'}:Largest", "process", *flags, "--env.digits", "2")
    assert done.returncode == 0, done.stderr
    for line in (tmp_path / "data" / "largest.jsonl").read_text().splitlines():
        group = json.loads(line)
        (asked, answered), *_ = group["messages"]
        assert len(asked["content"]) == 4 and answered["role"] == "assistant" and len(group["scores"]) == 8
        assert all(score in (0.0, 0.5, 1.0) for score in group["scores"])

    done = run(tmp_path, f"{ENVIRONMENTS / 'guess.py'}:Guess", "process", *flags, "--env.max_turns", "3")
    assert done.returncode == 0, done.stderr
    for line in (tmp_path / "data" / "guess.jsonl").read_text().splitlines():
        group = json.loads(line)
        for messages, masks, logprobs in zip(
            group["messages"], group["masks"], group["inference_logprobs"], strict=True
        ):
            given = [message["role"] != "assistant" for message in messages]
            # A character is a token; what was given trains nothing and has no logprob.
            lengths = [len(message["content"]) or 1 for message in messages]
            expected = [own for own, length in zip(given, lengths, strict=True) for _ in range(length)]
            assert [mask == -100 for mask in masks] == [logprob == 1.0 for logprob in logprobs] == expected


def test_calculator_on_a_real_server(url: str, tmp_path: Path) -> None:
    flags = [f"--openai.base_url={url}", "--env.total_steps=1", "--env.max_new_tokens=12", "--env.max_turns=2"]
    done = run(tmp_path, f"{ENVIRONMENTS / 'calculator.py'}:Calculator", "process", *flags)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["arithmetik", "serve"], "unknown environment 'arithmetik' -> did you mean arithmetic?"),
        (["arithmetic", "server"], "did you mean serve?"),
        (["arithmetic", "serve", "--env.grop_size", "4"], "did you mean --env.group_size?"),
        (["json.JSONDecoder", "serve"], "is not an environment"),
        (["arithmetic", "process", "--env.tokenizer_name=/nowhere"], "no tokenizer can be loaded from '/nowhere'"),
    ],
)
def test_what_cannot_be_run(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 1 and message in done.stderr


def test_help(tmp_path: Path) -> None:
    done = run(tmp_path, "gsm8k", "serve", "--help")
    assert done.returncode == 0 and "--env.data (openai/gsm8k)" in done.stdout
    assert "arithmetic, gsm8k" in run(tmp_path, "--help", "").stdout


def test_any_environment_is_tried_by_its_id(url: str, tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    file = str(EXAMPLES / "verifiers" / "digits_v1.py")
    tried = run(tmp_path, "eval", file, "--engine", url, "--tasks", "3", "--samples", "2", "--max-tokens", "2",
                "--env.args", '{"taskset": {"kind": "guess"}}', "--json", "tried.json")  # fmt: skip
    assert tried.returncode == 0, tried.stderr
    found = json.loads((tmp_path / "tried.json").read_text())
    assert (found["problems"], found["rollouts"], found["failures"]) == (3, 6, {})
    assert found["pass_at"].keys() == {"1", "2"} and found["metrics"].keys() == {"right", "turns"}
    assert found["metrics"]["right"] == pytest.approx(found["mean_reward"])
    tried = run(tmp_path, "eval", "arithmetic", "--engine", url, "--tasks=4", "--greedy", "--json=-")
    assert json.loads(tried.stdout)["problems"] == 4 and json.loads(tried.stdout)["pass_at"].keys() == {"1"}


def test_a_model_is_served_for_as_long_as_it_is_tried(model: Path, tmp_path: Path) -> None:
    words = ["eval", "arithmetic", "--model", str(model), "--tasks=3", "--samples=2", "--max-tokens=4", "--json=-"]
    tried = run(tmp_path, *words, code=f"from tests import warm; warm.fork_servers()\n{CODE}")
    assert tried.returncode == 0, tried.stderr
    found = json.loads(tried.stdout)
    assert (found["problems"], found["rollouts"], found["failures"]) == (3, 6, {})
    assert found["pass_at"].keys() == {"1", "2"}
    served = [process for process in psutil.process_iter(["cmdline"]) if str(model) in (process.info["cmdline"] or ())]
    assert not served, "its server has ended"
