"""Task sets that verifiers brings, played for two steps against servers that speak their protocols."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch.nn.functional import cross_entropy

from tests import warm
from tests.contracts.test_environment_contract import OPENENV, openenv_server
from tests.e2e.runs import command, metrics, run_here
from tests.e2e.test_agents import AGENTS, TEMPLATE
from tests.ports import free_port
from tests.tiny import tiny_model, tiny_tokenizer
from tests.waiting import until

pytest.importorskip("verifiers.v1")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALLS = [json.dumps({"name": "increment_counter", "arguments": {"count": count}}) for count in (2, 3)]
TOOL = {
    "type": "function",
    "name": "increment_counter",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
}
Told = list[tuple[str, bool]]


def model(directory: Path, demonstrations: Sequence[Told]) -> str:
    """A tiny model that has been shown texts, of which it writes those with True; returns its directory."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = 4096
    tokenizer.add_tokens([OPEN, CLOSE], special_tokens=True)
    tokenizer.add_tokens(CALLS)
    tiny = tiny_model("olmo2", max_position_embeddings=4096, initializer_range=0.1)
    tiny.resize_token_embeddings(len(tokenizer))
    optimizer, drawn = torch.optim.AdamW(tiny.parameters(), lr=1e-2), random.Random(0)
    for _ in range(40):
        for texts in drawn.choices(demonstrations, k=4):
            parts = [(tokenizer(text, add_special_tokens=False)["input_ids"], own) for text, own in texts]
            ids = torch.tensor([[token for part, _ in parts for token in part]])
            own = torch.tensor([[own for part, own in parts for _ in part]])
            labels = torch.where(own, ids, -100)[:, 1:]
            (cross_entropy(tiny(input_ids=ids).logits[0, :-1], labels[0]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    tiny.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def write_run(directory: Path, source: dict[str, Any], **sections: Any) -> Path:
    config = {
        "run": {"name": "tasks", "dir": str(directory / "runs"), "steps": 2},
        "model": {"path": str(directory / "model")},
        "source": {"kind": "verifiers"} | source,
        "sampling": {"num_generations": 4, "max_completion_length": 6},
        "batch": {"prompts_per_step": 2},
        "checkpoint": {"save_final": False},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config | sections))
    return path


class Counters:
    """A resources server of NeMo Gym: a counter for each session, which its tool increments and whose end is judged."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        paths = {"seed_session": self.seed, "increment_counter": self.increment, "verify": self.verify}
        self.app = Starlette(routes=[Route(f"/{path}", do, methods=["POST"]) for path, do in paths.items()])

    async def seed(self, request: Request) -> Response:
        session = str(next(self._numbers))
        self.counts[session] = (await request.json())["initial_count"]
        response = JSONResponse({})
        response.set_cookie("session", session)
        return response

    async def increment(self, request: Request) -> Response:
        self.counts[request.cookies["session"]] += (await request.json())["count"]
        return JSONResponse({"success": True})

    async def verify(self, request: Request) -> Response:
        body = await request.json()
        right = self.counts.pop(request.cookies["session"]) == body["expected_count"]
        self.verified.append(body | {"reward": float(right)})
        return JSONResponse(self.verified[-1])


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "the resources server did not begin")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def test_a_resources_server_of_nemo_gym(tmp_path: Path):
    """Its tools are called in the session of each rollout, and its verdict is the reward."""
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"{n}+3"}], "tools": [TOOL]},
            "initial_count": n,
            "expected_count": n + 3,
        }
        for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    after = '[tool]{"success":true};[assistant]'
    shown = itertools.product(range(4), CALLS)
    model(
        tmp_path / "model",
        [
            [(f"[user]{n}+3;[assistant]", False), (f"{OPEN}{call}{CLOSE}<eos>", True), (after, False), ("a<eos>", True)]
            for n, call in shown
        ],
    )
    counters = Counters()
    with served(counters.app) as url:
        taskset = {"dataset": str(tmp_path / "rows.jsonl"), "task": {"resources_url": url}}
        renderer = {"name": "auto", "tool_parser": "qwen3"}
        args = {"taskset": taskset, "agent": {"max_turns": 4}}
        run = run_here(write_run(tmp_path, {"environment": "nemo_gym", "args": args, "renderer": renderer}))
    lines = metrics(run.run_dir).steps
    assert [line.values["rollout_failures"] for line in lines] == [0, 0]
    assert all(line.values["mean_ratio"] == pytest.approx(1.0, abs=1e-3) for line in lines)
    assert sum(line.values["reward"] * 8 for line in lines) == sum(body["reward"] for body in counters.verified)
    assert len(counters.verified) == 16 and not counters.counts
    for body in counters.verified:
        said = body["response"]["output"]
        called = [json.loads(item["arguments"])["count"] for item in said if item["type"] == "function_call"]
        assert body["reward"] == (sum(called) == 3), "no session has another's calls"
        answers = [item["output"] for item in said if item["type"] == "function_call_output"]
        assert answers == ['{"success":true}'] * len(called)
    assert 0 < sum(body["reward"] for body in counters.verified) < 16


@pytest.mark.long("test_a_resources_server_of_nemo_gym: over the server of another library")
@pytest.mark.skipif(
    not (OPENENV.is_dir() and AGENTS.is_dir()), reason="`make openenv agents` installs a server of OpenEnv and a client"
)
def test_a_server_of_openenv(tmp_path: Path):
    """Played by the client of OpenEnv 0.10, in a process of its own, as its packages go behind those of the tests."""
    asked = '[user]{"observation": {"text": ""}, "action_schema": {"type": "object"}};[assistant]'
    model(tmp_path / "model", [[(asked, False), (f"{digit}<eos>", True)] for digit in range(5)])
    code = f"import sys; sys.path += {[str(AGENTS), str(OPENENV)]}; {warm.COMMAND}"
    with openenv_server(tmp_path) as url:
        taskset = {"base_url": url, "resets": [{"seed": seed} for seed in range(1, 5)]}
        config = write_run(tmp_path, {"environment": "openenv", "args": {"taskset": taskset}})
        done = command("train", config, code=code)
    assert done.code == 0, done.err
    lines = metrics(tmp_path / "runs" / "tasks").steps
    assert all(line.values["mean_ratio"] == pytest.approx(1.0, abs=1e-3) for line in lines)
    assert sum(line.values["reward_metrics/openenv_reward"] for line in lines) > 0
