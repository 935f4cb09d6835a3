"""What is vLLM's own: adapters whose files are gone, its prefix cache, tensor parallelism of two workers, guesses."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lachesis.common.errors import StaleWeights
from lachesis.engines.serving.generation import ARRAYS, read_arrays
from lachesis.transport.channel import Channel
from lachesis.transport.layout import ChannelBackend, plan_buckets
from lachesis.transport.partners import PartnerLine, pack_beside
from lachesis.transport.rendezvous import listen
from lachesis.transport.transports import SharedRoom
from tests.contracts.bridge_cases import Case, build
from tests.contracts.bridge_faults import Tampering
from tests.contracts.left_out import LEFT_OUT, leave_out
from tests.contracts.servers import MAX_LEN, Server, running
from tests.contracts.test_server_contract import (
    canary,
    logprobs_of,
    receiver_body,
    refused,
    save_adapter,
    soon,
    specs_of,
    until,
)
from tests.contracts.vllm_server import SIZES, VLLM_SERVER, needs_vllm, start_vllm
from tests.tiny import tiny_model
from tests.unit.transport.test_partners import FakeLine

pytestmark = needs_vllm
WORKERS = 2
# Its prefix cache holds whole blocks; on a CPU one would be longer than the prompts here.
BLOCK = 32
LONG_PROMPT = [(7 * i) % 90 + 3 for i in range(64)]
TOLERANCE = VLLM_SERVER.tolerance


def build_model(seed: int) -> PreTrainedModel:
    """A Llama, whose output head vLLM would adapt too, and which is tied to the embedding."""
    return tiny_model("llama", seed=seed, tie_word_embeddings=True, **SIZES)


@contextmanager
def guessing(model: Path, root: Path, session_dir: Path, log: Path) -> Iterator[str]:
    """Start vLLM with guesses by n-grams."""
    guesses = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    with start_vllm(model, root, session_dir, log, "--speculative-config", guesses) as url:
        yield url


def test_a_server_that_guesses_tokens_is_refused(tmp_path: Path):
    """Its logprobs need not be the model's: vLLM 0.32 on CPUs verifies guesses with uninitialized temperatures."""
    refusal = "--speculative-config is not supported: logprobs of guessed tokens may differ from the model's"
    with pytest.raises(AssertionError, match=refusal), running(replace(VLLM_SERVER, start=guessing), tmp_path):
        pass


@contextmanager
def start(model: Path, root: Path, session_dir: Path, log: Path) -> Iterator[str]:
    with start_vllm(
        model, root, session_dir, log, "--tensor-parallel-size", str(WORKERS), "--block-size", str(BLOCK),
        VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_USE_V1="0",
    ) as url:  # fmt: skip
        yield url


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("vllm")
    with running(replace(VLLM_SERVER, start=start, build_model=build_model), directory) as started:
        assert len(list((directory / "sessions").iterdir())) == 1
        yield started
    assert not list((directory / "sessions").iterdir()), "the session ends with the server"


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return build_model(0)


def worst(server: Server, model: torch.nn.Module) -> float:
    return max(abs(a - b) for a, b in zip(canary(server), logprobs_of(model), strict=True))


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], steps: int) -> list[int]:
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def load(server: Server, base: PreTrainedModel, seed: int) -> torch.nn.Module:
    """Load a new adapter and delete its files."""
    path = server.root / f"adapter_{seed}"
    adapted = save_adapter(base, path, seed=seed, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"])
    server.post("/lora/load", adapter_path=str(path), adapter_name=f"adapter-{seed}")
    shutil.rmtree(path)
    return adapted


def test_an_adapter_whose_files_are_gone_stays_in_force_for_all(server: Server, base: PreTrainedModel):
    load(server, base, 1)
    body = {"prompt_token_ids": LONG_PROMPT, "max_tokens": MAX_LEN - len(LONG_PROMPT), "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        flying = [pool.submit(server.http.post, "/generate", json=body | {"seed": seed}) for seed in range(8)]
        for seed in (2, 3):
            adapted = load(server, base, seed)
        answers = [reply.result(60) for reply in flying]
    assert all(len(answer.json()["token_ids"][0]) == body["max_tokens"] for answer in answers)
    assert worst(server, adapted) <= TOLERANCE
    server.post("/lora/unload", adapter_name="adapter-3")
    assert worst(server, base) <= TOLERANCE


def test_requests_that_hold_an_unloaded_adapter_go_on(server: Server, base: PreTrainedModel):
    load(server, base, 4)
    body = {"prompt_token_ids": LONG_PROMPT, "max_tokens": MAX_LEN - len(LONG_PROMPT), "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        flying = pool.submit(server.http.post, "/generate", json=body)
        server.post("/lora/unload", adapter_name="adapter-4")
        assert flying.result(60).json()["finish_reasons"] == ["length"]
    assert server.http.get("/health").is_success


def test_an_answer_says_by_token_which_weights_sampled_it(server: Server):
    """vLLM labels tokens itself from 0.32 on; the label changes in the middle of a request that goes on."""
    body = {"prompt_token_ids": LONG_PROMPT[:2], "max_tokens": MAX_LEN - 2, "ignore_eos": True, "n": 8}
    for trial in range(20):
        before = server.get("/bridge/info")["weight_version"]
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(server.post, "/generate", **body)
            time.sleep(0.02 * (1 + trial))
            server.post("/bridge/pause", mode="keep")
            server.post("/bridge/set_version", weight_version=before + 1)
            server.post("/bridge/resume")
            answer = reply.result(60)
        for tokens, labels, span in zip(
            answer["token_ids"], answer["weight_versions"], answer["weight_version"], strict=True
        ):
            assert [labels[0]["start"], *(one["end"] for one in labels)] == [
                0, *(one["start"] for one in labels[1:]), len(tokens),
            ]  # fmt: skip
            versions = [one["version"] for one in labels]
            assert versions == sorted({before, before + 1} & {*versions})
            assert span == {"first": versions[0], "last": versions[-1]}
        if any(len(labels) == 2 for labels in answer["weight_versions"]):
            break
    else:
        pytest.fail("no request straddled a change of version in 20 trials")
    arrays = server.http.post("/generate", json={**body, "max_tokens": 2, "text": False}, headers={"Accept": ARRAYS})
    assert read_arrays(arrays.content)["weight_version"] == [{"first": before + 1, "last": before + 1}] * 8


def cached_in(server: Server) -> list[int]:
    """How much of the long prompt three completions found in the prefix cache."""
    return server.post("/generate", prompt_token_ids=LONG_PROMPT, max_tokens=2, n=3)["cached_tokens"]


def test_an_answer_says_what_was_in_the_prefix_cache_and_new_weights_empty_it(server: Server, base: PreTrainedModel):
    """A prompt's last token is always computed, so its last block is."""
    found = len(LONG_PROMPT) - BLOCK
    server.post("/bridge/reload", path=str(server.model))
    assert cached_in(server) == [0, found, found], "the first of a group fills it for the others"
    assert cached_in(server) == [found] * 3
    arrays = server.http.post(
        "/generate",
        json={"prompt_token_ids": LONG_PROMPT, "max_tokens": 2, "n": 2, "text": False},
        headers={"Accept": ARRAYS},
    )
    assert read_arrays(arrays.content)["cached_tokens"] == [found] * 2
    load(server, base, 9)
    assert cached_in(server) == [0, found, found]
    server.post("/lora/unload", adapter_name="adapter-9")


def test_no_route_reads_the_cache_of_old_weights(server: Server, base: PreTrainedModel):
    """While a request is in flight vLLM cannot empty its prefix cache."""
    steps = 5
    ask = {"model": "policy", "temperature": 0, "max_tokens": steps}
    with ThreadPoolExecutor(1) as pool:
        for seed in (5, 6):
            long = {"prompt_token_ids": LONG_PROMPT, "max_tokens": MAX_LEN - len(LONG_PROMPT), "ignore_eos": True}
            flying = pool.submit(server.http.post, "/generate", json=long)
            adapted = load(server, base, seed)
            expected = greedy(adapted, LONG_PROMPT, steps)
            ours = server.post("/generate", prompt_token_ids=LONG_PROMPT, temperature=0, max_tokens=steps)
            theirs = server.post("/v1/completions", prompt=LONG_PROMPT, return_token_ids=True, **ask)
            assert ours["token_ids"][0] == theirs["choices"][0]["token_ids"] == expected
            assert flying.result(60).is_success
    message = server.post("/v1/messages", messages=[{"role": "user", "content": "ab"}], **ask)
    assert message["model"] == "policy"
    server.post("/lora/unload", adapter_name="adapter-6")


@pytest.mark.parametrize(("kind", "backend"), [("lora", "gloo"), ("full", "gloo"), ("full", "ipc")])
def test_every_worker_is_a_rank_of_the_channel(
    kind: str, backend: ChannelBackend, server: Server, base: PreTrainedModel
):
    """With ``ipc`` each reads what the trainer's rank beside it has packed."""
    if kind == "lora":
        model = save_adapter(base, server.root / "sent", seed=7)
        tensors = {
            name.removeprefix("base_model.model.").replace(".default", ""): parameter.detach()
            for name, parameter in model.named_parameters()
            if "lora_" in name
        }
        lora = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "name": "sent"}
    else:
        model = build_model(8)
        tensors, lora = {name: parameter.detach() for name, parameter in model.named_parameters()}, None
    rendezvous = listen("tcp://127.0.0.1:0")
    body = receiver_body(tensors, init_method=rendezvous.init_method, kind=kind, lora=lora) | {"backend": backend}
    assert "2 workers" in refused(server.http.post("/nccl/start_receiver", json=body), 422)
    server.post("/nccl/start_receiver", **(body | {"world_size": 1 + WORKERS}))
    trainer = Channel.connect(
        init_method=rendezvous.init_method, world_size=1 + WORKERS, rank=0, backend=backend, device="cpu",
        deadline=soon(), rendezvous=rendezvous,
    )  # fmt: skip
    until(lambda: server.get("/nccl/status")["status"] == "connected")
    line, room, specs = FakeLine(), SharedRoom(torch.device("cpu")), specs_of(tensors)
    limit = 1 << 16
    partners = PartnerLine(line, left=len(plan_buckets(specs, limit_bytes=limit))) if backend == "ipc" else None
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(server.http.post, "/nccl/receive", json={"weight_version": 77})
        if partners is not None:
            pool.submit(pack_beside, tensors.items(), specs, bucket_bytes=limit, room=room, line=line.partner)
        trainer.send(tensors.items(), specs, deadline=soon(), bucket_bytes=limit, partners=partners)
        assert receiving.result(60).is_success
    assert worst(server, model) <= TOLERANCE
    assert trainer.read_ranks == ({1: 0, 2: 1} if backend == "ipc" else {1: 0, 2: 0})
    server.post("/nccl/stop_receiver")
    trainer.close()
    room.close()
    if kind == "lora":
        server.post("/lora/unload", adapter_name="sent")
    else:
        server.post("/bridge/reload", path=str(server.model))
    assert worst(server, base) <= TOLERANCE


def test_what_needs_the_whole_weights_is_refused_with_the_reason(server: Server):
    shared = refused(server.http.post("/bridge/export", json={"path": str(server.root / "bridge.json")}), 409)
    assert "split over 2" in shared and not (server.root / "bridge.json").exists()
    asked = {"slices": {"model.layers.0.mlp.down_proj.weight": {}}}
    assert "it is not known how vLLM splits it" in refused(server.http.post("/bridge/digests", json=asked), 409)


def test_obsolete_variables_are_named(server: Server):
    assert "VLLM_USE_V1=0 is obsolete" in server.log.read_text()


@pytest.mark.long("test_bridge_contract.py::test_what_does_not_arrive_is_stale_weights: a dense model, and tensors")
@pytest.mark.timeout(600)
def test_a_module_of_a_hybrid_whose_adapter_is_left_out_is_found(
    session_environment: pytest.MonkeyPatch, tmp_path: Path
):
    """The digests agree, since the adapter is there, but the layers compute without it."""
    file = tmp_path / "left_out"
    begin = partial(start_vllm, plugin=f"{leave_out.__module__}:{leave_out.__name__}", **{LEFT_OUT: str(file)})
    hybrid = partial(tiny_model, "falcon_h1", **SIZES | {"head_dim": 32})
    factory = replace(VLLM_SERVER, build_model=lambda seed: hybrid(seed=seed), start=begin)
    with running(factory, tmp_path) as one:
        (directory := one.root / "run").mkdir()
        case = Case("vllm", {"kind": "lora_only"}, lora=True)
        live = build(case, model=one.model, directory=directory, servers=[one], tampering=Tampering())
        try:
            live.bridge.sync(0)
            live.update()
            file.touch()
            with pytest.raises(StaleWeights, match="differ from the trainer's"):
                live.update()
        finally:
            live.side.close()
