"""An environment that subclasses the original's BaseEnv, unchanged, against our API and our inference server.

``ATROPOS_PYTHON`` names a Python that has ``atroposlib``; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.servers import CHAT_TEMPLATE
from tests.e2e import test_environments as shipped
from tests.e2e.test_environments import inference, until
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.api.processes import Server, original, ours

ORIGINAL = os.environ.get("ATROPOS_PYTHON", "")
pytestmark = pytest.mark.skipif(not ORIGINAL, reason="ATROPOS_PYTHON names no Python that has atroposlib")

ENVIRONMENT = """
import asyncio, json, sys
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

model, url, api, kind = sys.argv[1:5]


class Digits(BaseEnv):
    name = "digits"

    async def setup(self):
        self.count = 0

    async def get_next_item(self):
        self.count += 1
        return self.count

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            if kind == "chat":
                await managed.chat_completion(
                    messages=[{"role": "user", "content": f"{item}+1="}], n=self.config.group_size, max_tokens=6,
                    temperature=1.0,
                )
            else:
                await managed.completion(
                    prompt=f"{item}+1=", n=self.config.group_size, max_tokens=6, temperature=1.0, top_p=1.0,
                    stop=["zzz"],
                )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup()
        group["tokens"] = [node.tokens for node in nodes]
        group["masks"] = [node.masked_tokens for node in nodes]
        group["inference_logprobs"] = [node.logprobs for node in nodes]
        group["scores"] = [float(index) for index in range(len(nodes))]
        return group, []


async def calls(environment):
    server = environment.server
    chat = await server.chat_completion(
        messages=[{"role": "user", "content": "1+1="}], n=2, max_tokens=4, temperature=0.5
    )
    text = await server.completion(prompt="1+1=", n=2, max_tokens=4, temperature=0.5, split="eval")
    known = await server.get_logprobs(prompt="1+1=", top_k=3)
    print(json.dumps({
        "chat": [choice.message.content for choice in chat.choices],
        "text": [choice.text for choice in text.choices],
        "prompt_tokens": known["prompt_tokens"],
        "top": [len(row) for row in known["prompt_topk_token_ids"]],
    }))


config = BaseEnvConfig(
    group_size=4, tokenizer_name=model, use_wandb=False, rollout_server_url=api, wandb_name="digits",
    max_token_length=64, total_steps=100, steps_per_eval=0, max_num_workers=4,
)
servers = [
    APIServerConfig(base_url=url, model_name=model, api_key="x", server_type="vllm", timeout=60) for _ in range(2)
]
environment = Digits(config, servers)
asyncio.run(calls(environment) if kind == "calls" else environment.env_manager())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with inference(model, tmp_path_factory.mktemp("server")) as address:
        yield f"{address}/v1"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Server]:
    with ours(tmp_path, strict=True) as server:
        yield server


class Original:
    """The environment in a process of the original's Python."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        script = directory / "digits.py"
        script.write_text(ENVIRONMENT)
        self.log = directory / "environment.log"
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [ORIGINAL, str(script), *arguments], cwd=directory, stdout=output, stderr=output,
                env=variables | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text()


@contextmanager
def started(directory: Path, *arguments: str) -> Iterator[Original]:
    running = Original(directory, *arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait(timeout=10)


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_it_serves(kind: str, model: Path, url: str, api: Server, tmp_path: Path) -> None:
    """What it samples arrives, with the logprobs of our server, and strict checks find nothing."""
    api.start(batch_size=8)
    with started(tmp_path, str(model), url, f"http://127.0.0.1:{api.port}", kind) as running:
        groups: list[dict[str, Any]] = []
        while len(groups) < 8:
            groups += until(lambda: api.get("/batch")["batch"], running, seconds=120)  # type: ignore[arg-type]
    for group in groups:
        rows = zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True)
        for tokens, masks, logprobs in rows:
            trained = [mask != -100 for mask in masks]
            assert 1 <= sum(trained) <= 6 and len(tokens) > sum(trained)
            assert all((logprob <= 0) == trains for logprob, trains in zip(logprobs, trained, strict=True))
    assert "set_aside" not in api.get("/status") or api.get("/status")["set_aside"] == 0


def test_its_other_calls(model: Path, url: str, tmp_path: Path) -> None:
    """Chat and completions by the OpenAI client, and logprobs of a prompt, as distillation asks for them."""
    with started(tmp_path, str(model), url, "http://127.0.0.1:9", "calls") as running:
        assert running.process.wait(timeout=120) == 0, running.said
        answers = json.loads(running.said.splitlines()[-1])
    assert len(answers["chat"]) == len(answers["text"]) == 2
    assert len(answers["prompt_tokens"]) == 4
    assert answers["top"][0] == 0 and all(count >= 3 for count in answers["top"][1:])


def test_ours_serves_the_originals_api(model: Path, url: str, tmp_path: Path) -> None:
    """The other way round: a shipped environment, and the original's run-api."""
    with original(tmp_path, ORIGINAL) as api:
        api.register(batch_size=16, num_steps=3, max_token_len=64)
        address = f"http://127.0.0.1:{api.port}"
        flags = [f"--openai.base_url={url}", f"--env.rollout_server_url={address}", "--env.linger=1"]
        with shipped.started(tmp_path, "arithmetic", "serve", *flags) as running:
            until(lambda: "waiting for a trainer to register" in running.said, running)
            batches: list[list[dict[str, Any]]] = []
            while len(batches) < 3:
                batches.append(shipped.next_batch(api, running))
            assert running.process.wait(timeout=60) == 0, running.said
            assert "the trainer has taken its" in running.said
    assert [[len(group["tokens"]) for group in batch] for batch in batches] == [[8, 8]] * 3
