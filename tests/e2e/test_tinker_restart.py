"""A Tinker server that is stopped and started again: its clients go on, bit by bit as if nothing had happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from lachesis.plugins.checks.doctor import write_proof
from tests.e2e.tinker_server import KEY, tinker_server
from tests.ports import free_port

tinker = pytest.importorskip("tinker", reason="the client tinker is not installed")
types = tinker.types
pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")

TOKENS = [2, 3, 4, 5, 1]
ADAM = types.AdamParams(learning_rate=1e-2)


def data() -> list[Any]:
    targets, weights = np.array(TOKENS[1:]), np.ones(4, np.float32)
    prompt = types.ModelInput.from_ints(TOKENS[:-1])
    return [types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": targets, "weights": weights})]


def passed(run: Any) -> list[float]:
    (output,) = run.forward_backward(data(), "cross_entropy").result().loss_fn_outputs
    return list(output["logprobs"].data)


def learned(run: Any, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        found.append(passed(run))
        run.optim_step(ADAM).result()
    return found


def client_and_run(url: str, model: Path) -> tuple[Any, Any]:
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    return client, client.create_lora_training_client(base_model=str(model), rank=8, seed=1).result()


def sampled(sampler: Any) -> Sequence[int]:
    params = types.SamplingParams(max_tokens=6, seed=3)
    return list(sampler.sample(types.ModelInput.from_ints([2, 3]), 1, params).result().sequences[0].tokens)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    write_proof(tmp_path)
    return tmp_path


def test_a_run_goes_on_after_a_restart(place: Path):
    model, saved, port = place / "model", place / "saved", free_port()
    words = ("--seed", "0", "--port", str(port))
    with tinker_server(model, saved, *words) as url:
        _, whole = client_and_run(url, model)
        expected = learned(whole, 4)
        _client, run = client_and_run(url, model)
        assert learned(run, 2) == expected[:2]
        sampler = run.save_weights_and_get_sampling_client().result()
        before = sampled(sampler)
        assert passed(run) == expected[2]  # the gradient waits for a step
    assert (saved / ".server" / "state.json").exists()

    with tinker_server(model, saved, *words):
        assert not (saved / ".server").exists(), "a crash from here on must not bring these weights back"
        run.optim_step(ADAM).result()
        assert learned(run, 1) == expected[3:]
        assert sampled(sampler) == before
        runs = httpx.get(f"{url}/api/v1/training_runs", headers={"x-api-key": KEY}).json()
        assert runs["cursor"]["total_count"] == 2


def test_runs_of_another_model_are_left_where_they_are(place: Path):
    model, saved = place / "model", place / "saved"
    with tinker_server(model, saved, "--name", "one") as url:
        client = tinker.ServiceClient(base_url=url, api_key=KEY)
        client.create_lora_training_client(base_model="one", rank=8, seed=1).result()
    said = r"has the runs of a server of 'one', but this one serves 'two'"
    with pytest.raises(AssertionError, match=said), tinker_server(model, saved, "--name", "two"):
        pass
    assert (saved / ".server" / "state.json").exists()
