"""Four clients of one Tinker server at once, sampled by a real vLLM with an adapter each; one of them is hostile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from tests import warm
from tests.contracts.vllm_server import ENVIRONMENT, needs_vllm
from tests.e2e.tinker_server import tinker_server
from tests.ports import free_port
from tests.tiny import tiny_model, tiny_tokenizer
from tests.waiting import until

tinker = pytest.importorskip("tinker", reason="the client tinker is not installed")
types = tinker.types
pytestmark = [needs_vllm, pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")]

HONEST = {"alice": ("a", 4), "bob": ("b", 8), "carol": ("c", 16)}
PROMPTS = [[2, 3], [4, 5], [3, 3], [5, 2]]
STEPS = 16
START_S = 240.0
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96}


@contextmanager
def vllm(model: Path, log: Path) -> Iterator[str]:
    """vLLM's own server, which knows nothing of Lachesis."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--max-model-len", "64", "--dtype", "float32", "--enforce-eager", "--enable-lora", "--max-loras", "4",
        "--max-lora-rank", "16", "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_PLUGINS": ""}
    with log.open("wb") as output:
        process = warm.VllmPopen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return httpx.get(f"{url}/health").is_success
        except httpx.TransportError:
            return False

    try:
        until(serves, log.read_text, limit_s=START_S)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


class Server:
    """The Tinker server, and the keys of its clients."""

    def __init__(self, url: str, model: Path) -> None:
        self.url, self.model = url, str(model)

    def client(self, name: str) -> Any:
        return tinker.ServiceClient(base_url=self.url, api_key=f"tml-{name}")

    def run(self, client: Any, rank: int) -> Any:
        options: dict[str, Any] = {"rank": rank, "seed": 1, "base_model": self.model}
        return client.create_lora_training_client(**options).result()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("tenants")
    tiny_model("qwen2", **SIZES).save_pretrained(place / "model")
    tiny_tokenizer().save_pretrained(place / "model")
    names = (*HONEST, "mallory")
    (place / "clients.toml").write_text(
        "".join(f'[{name}]\nkey_variable = "KEY_{name.upper()}"\nmax_lora_rank = 16\nmax_runs = 2\n' for name in names)
    )
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("TINKER_TELEMETRY", "0")
        for name in names:
            patch.setenv(f"KEY_{name.upper()}", f"tml-{name}")
        engine = stack.enter_context(vllm(place / "model", place / "vllm.log"))
        words = ("--clients", str(place / "clients.toml"), "--engine", engine, "--unembed", "never", "--seed", "0")
        yield Server(stack.enter_context(tinker_server(place / "model", place / "saved", *words)), place / "model")


def learned(server: Server, name: str, letter: str, rank: int) -> list[float]:
    """The mean share of the letter in what a run samples, by step, as it learns to say nothing else."""
    run = server.run(server.client(name), rank)
    wanted, means = AutoTokenizer.from_pretrained(server.model).encode(letter)[0], []
    for step in range(STEPS):
        sampler = run.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, seed=step)
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), 8, params) for prompt in PROMPTS]
        data, rewards = [], []
        for prompt, future in zip(PROMPTS, asked, strict=True):
            group = [(one, list(one.tokens).count(wanted) / 6) for one in future.result().sequences]
            mean = fmean(reward for _, reward in group)
            for one, reward in group:
                tokens, before = [*prompt, *one.tokens], [0.0] * (len(prompt) - 1)
                values = {"logprobs": one.logprobs, "advantages": [reward - mean] * len(one.tokens)}
                inputs = {key: np.array([*before, *found], np.float32) for key, found in values.items()}
                data.append(
                    types.Datum(
                        model_input=types.ModelInput.from_ints(tokens[:-1]),
                        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **inputs},
                    )
                )
            rewards.append(mean)
        run.forward_backward(data, "importance_sampling")
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        means.append(fmean(rewards))
    return means


def mallory(server: Server, others: list[str]) -> list[str]:
    """Flood the server, make a run that is not finite, and try everything that another has; what the server says."""
    client, said = server.client("mallory"), []
    run = server.run(client, 8)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([2, 3, 4]),
        loss_fn_inputs={"target_tokens": np.array([3, 4, 5]), "weights": np.ones(3, np.float32)},
    )
    floods = [run.forward_backward([datum] * 50, "cross_entropy") for _ in range(40)]
    spoilt = [run.optim_step(types.AdamParams(learning_rate=1e30)), run.forward_backward([datum], "cross_entropy")]
    for future in (*floods, *spoilt):
        try:
            future.result()
        except tinker.RequestFailedError as error:
            said.append(str(error))
    with httpx.Client(base_url=server.url, headers={"x-api-key": "tml-mallory"}) as http:
        for name in others:
            for method, path in (
                ("GET", f"/api/v1/training_runs/{name}"),
                ("GET", f"/api/v1/training_runs/{name}/checkpoints"),
                ("DELETE", f"/api/v1/training_runs/{name}/checkpoints/weights/kept"),
                ("POST", f"/api/v1/sessions/{name.partition(':')[0]}/finish"),
            ):
                assert http.request(method, path, json={}).status_code == 404, (method, path)
            bodies = {
                "get_info": {"model_id": name, "type": "get_info"},
                "unload_model": {"model_id": name, "type": "unload_model"},
                "optim_step": {"model_id": name, "adam_params": {"learning_rate": 1.0}, "seq_id": 99},
                "weights_info": {"tinker_path": f"tinker://{name}/weights/kept"},
                "asample": {
                    "model_path": f"tinker://{name}/weights/kept",
                    "prompt": {"chunks": [{"tokens": [2], "type": "encoded_text"}]},
                    "sampling_params": {"max_tokens": 1},
                },
            }
            for path, body in bodies.items():
                answer = http.post(f"/api/v1/{path}", json=body)
                assert answer.status_code in (404, 422), (path, answer.text)
    return said


@pytest.mark.timeout(600)
def test_three_clients_learn_on_one_vllm_while_a_fourth_attacks(server: Server):
    kept = server.run(server.client("alice"), 8)
    path = kept.save_state("kept").result().path
    with ThreadPoolExecutor() as pool:
        attack = pool.submit(mallory, server, [kept.get_info().model_id])
        runs = [pool.submit(learned, server, name, letter, rank) for name, (letter, rank) in HONEST.items()]
        means = [run.result() for run in runs]
        said = attack.result()
    for found in means:
        assert fmean(found[-2:]) - fmean(found[:2]) > 0.3, means
    assert any("is not finite" in one for one in said)
    assert kept.save_state("again").result().path != path

    for name, count in (("alice", 2), ("mallory", 1)):
        answer = httpx.get(f"{server.url}/api/v1/training_runs", headers={"x-api-key": f"tml-{name}"}).json()
        assert answer["cursor"]["total_count"] == count
    page = httpx.get(server.url).text
    assert "mallory" in page and "serving" in page and "tml-" not in page


def test_a_client_gets_no_more_runs_or_rank_than_its_own(server: Server):
    client = server.client("bob")
    with pytest.raises(tinker.RequestFailedError, match=r"rank 17 is not served: the largest is 16"):
        server.run(client, 17)
    assert httpx.get(f"{server.url}/api/v1/training_runs", headers={"x-api-key": "tml-nobody"}).status_code == 401
