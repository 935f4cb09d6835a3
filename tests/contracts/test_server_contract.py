"""What every inference server owes to its clients, over HTTP. A server joins by adding a factory to ``SERVERS``."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from lachesis.common.deadline import Deadline
from lachesis.engines.serving.generation import ARRAYS, read_arrays
from lachesis.plugins.teachers.server import TeacherServer
from lachesis.transport.bridge_file import read_bridge_file
from lachesis.transport.channel import Channel
from lachesis.transport.digest import served_lora_b
from lachesis.transport.layout import ReceivedTensor
from lachesis.transport.rendezvous import listen
from lachesis.transport.shared_tensors import Attachments
from tests.contracts.servers import (
    EMBEDDED_SERVER,
    MAX_LEN,
    MAX_RANK,
    TOKEN,
    Server,
    ServerFactory,
    answered,
    running,
)
from tests.contracts.vllm_server import VLLM_SERVER, needs_vllm
from tests.unit.transport.sharing import digest

SERVERS = [EMBEDDED_SERVER, pytest.param(VLLM_SERVER, marks=needs_vllm)]
CANARY = [15, 16, 17, 18, 40, 41, 9, 70, 33, 21]
PROMPT = [15, 16, 17, 18]
GREEDY = {"prompt_token_ids": PROMPT, "temperature": 0.0, "max_tokens": 8}
NORM = "model.norm.weight"


@pytest.fixture(scope="module", params=SERVERS, ids=lambda factory: factory.name)
def factory(request: pytest.FixtureRequest) -> ServerFactory:
    return request.param


@pytest.fixture(scope="module")
def started(factory: ServerFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp(factory.name)
    with running(factory, directory) as server:
        (session,) = (directory / "sessions").glob("*.json")
        assert session.stat().st_mode & 0o777 == 0o600
        yield server
    assert not list((directory / "sessions").glob("*.json")), "a server that is stopped takes its session with it"


@pytest.fixture(scope="module")
def base(factory: ServerFactory) -> PreTrainedModel:
    """The model that the server was started on."""
    return factory.build_model(0)


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    """The server with its base weights, running; whatever a test leaves is undone."""
    yield started
    started.post("/nccl/stop_receiver")
    started.post("/bridge/wake_up")
    started.post("/bridge/resume")
    adapter = started.get("/bridge/info")["adapter"]
    if adapter is not None:
        started.post("/lora/unload", adapter_name=adapter["name"])


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, token_ids: list[int] = CANARY) -> list[float]:
    logits = model(input_ids=torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)
    return logits.gather(-1, torch.tensor(token_ids[1:])[:, None]).squeeze(-1).tolist()


def canary(server: Server) -> list[float]:
    return server.post("/bridge/canary", token_ids=CANARY)["logprobs"]


def version(server: Server) -> int:
    return server.get("/bridge/info")["weight_version"]


def close(a: list[float], b: list[float], factory: ServerFactory) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= factory.tolerance for x, y in zip(a, b, strict=True))


def save_adapter(model: PreTrainedModel, path: Path, *, seed: int = 1, r: int = 4, **config: Any) -> PeftModel:
    """A LoRA adapter with large random weights; ``model`` is left as it was."""
    lora = {"r": r, "lora_alpha": 2 * r, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    adapted = get_peft_model(copy, LoraConfig(**(lora | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    adapted.save_pretrained(path)
    return adapted.eval()


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(path: Path, change: Any) -> None:
    file = path / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)


@contextmanager
def still_serving(server: Server, factory: ServerFactory) -> Iterator[None]:
    """Whatever happens inside, the server has the weights, the version and the adapter from before, and serves."""
    before = canary(server), standing(server), server.post("/generate", **GREEDY)["token_ids"]
    yield
    after = canary(server), standing(server), server.post("/generate", **GREEDY)["token_ids"]
    assert close(after[0], before[0], factory)
    assert after[1:] == before[1:]


def standing(server: Server) -> dict[str, Any]:
    """What the server says of itself, but for what it has generated so far."""
    return {name: value for name, value in server.get("/bridge/info").items() if name != "generated_tokens"}


def refused(reply: httpx.Response, *statuses: int) -> str:
    """The message of an error of the documented form."""
    assert reply.status_code in statuses, (reply.status_code, reply.text[:300])
    error = reply.json()["error"]
    assert set(error) == {"type", "message", "remedy"} and error["message"]
    return error["message"]


class TestGenerate:
    def test_the_answer_is_whole(self, server: Server):
        answer = server.post("/generate", prompt_token_ids=PROMPT, n=3, max_tokens=6, seed=5, logprobs=0)
        assert answer["prompt_token_ids"] == PROMPT and answer["prompt"] is None
        assert answer["session_id"] == server.get("/bridge/info")["session_id"]
        current = version(server)
        columns = ("text", "token_ids", "finish_reasons", "logprobs", "token_logprobs", "weight_version")
        assert all(len(answer[name]) == 3 for name in columns)
        for ids, reason, documented, compact, span in zip(*(answer[name] for name in columns[1:]), strict=True):
            assert 1 <= len(ids) <= 6 and reason in ("stop", "length")
            assert documented == [[{str(token): value}] for token, value in zip(ids, compact, strict=True)]
            assert all(math.isfinite(value) and value <= 0 for value in compact)
            assert span == {"first": current, "last": current}

    def test_arrays_say_what_json_says(self, server: Server):
        """Also while requests are computed beside them that want more of each token."""
        body = {"prompt_token_ids": PROMPT, "n": 3, "max_tokens": 12, "seed": 5}
        expected = server.post("/generate", **body)
        with ThreadPoolExecutor(8) as pool:
            others = [pool.submit(server.post, "/generate", **body | {"logprobs": 2, "seed": i}) for i in range(4)]
            asking = [
                pool.submit(server.http.post, "/generate", json=body | {"text": False}, headers={"Accept": ARRAYS})
                for _ in range(4)
            ]
            found = [read_arrays(reply.result(60).content) for reply in asking]
            assert all(len(other.result(60)["logprobs"]) == 3 for other in others)
        for one in found:
            assert one["token_ids"] == expected["token_ids"]
            assert one["finish_reasons"] == expected["finish_reasons"]
            assert one["session_id"] == expected["session_id"]
            assert one["weight_version"] == expected["weight_version"]
            for ours, theirs in zip(one["token_logprobs"], expected["token_logprobs"], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-3)

    def test_a_text_prompt_and_its_token_ids_are_the_same(self, server: Server):
        by_text = server.post("/generate", prompt="cdef", temperature=0, max_tokens=8)
        by_ids = server.post("/generate", **(GREEDY | {"prompt_token_ids": by_text["prompt_token_ids"]}))
        assert by_text["prompt"] == "cdef" and by_text["token_ids"] == by_ids["token_ids"]
        assert by_text["text"] == by_ids["text"] and len(by_text["text"][0]) >= 1

    def test_prompts_may_be_a_list_or_an_object(self, server: Server):
        expected = server.post("/generate", **GREEDY)["token_ids"]
        for prompt in (PROMPT, {"prompt_token_ids": PROMPT}):
            assert server.post("/generate", prompt=prompt, temperature=0, max_tokens=8)["token_ids"] == expected

    def test_logprobs_come_only_where_they_are_asked_for(self, server: Server):
        answer = server.post("/generate", **GREEDY)
        assert answer["logprobs"] is None and len(answer["token_logprobs"][0]) == len(answer["token_ids"][0])

    def test_tokens_come_back_as_the_train_client_of_verifiers_reads_them(self, server: Server):
        sampling = {"temperature": 1.0, "max_tokens": 6, "seed": 3, "stop_token_ids": [9], "logprobs": 1}
        answer = server.post("/inference/v1/generate", token_ids=PROMPT, sampling_params=sampling, model="policy")
        plain = server.post("/generate", prompt_token_ids=PROMPT, **{**sampling, "logprobs": None})
        (choice,) = answer["choices"]
        assert choice["token_ids"] == plain["token_ids"][0]
        assert choice["finish_reason"] == plain["finish_reasons"][0]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(
            plain["token_logprobs"][0], abs=1e-4
        )

    def test_the_likeliest_tokens_come_beside_the_sampled_one(self, server: Server):
        answer = server.post("/generate", prompt_token_ids=PROMPT, max_tokens=4, seed=3, logprobs=2)
        for token, entry in zip(answer["token_ids"][0], answer["logprobs"][0], strict=True):
            values = [next(iter(one.values())) for one in entry]
            assert next(iter(entry[0])) == str(token) and 2 <= len(entry) <= 3
            assert max(values) == max(values[1:]) >= values[0] or len(entry) == 2

    def test_logprobs_are_of_the_distribution_sampled_from(
        self, server: Server, base: PreTrainedModel, factory: ServerFactory
    ):
        answer = server.post(
            "/generate", prompt_token_ids=PROMPT, max_tokens=6, temperature=0.7, top_p=0.9, seed=11, n=4
        )
        for ids, values in zip(answer["token_ids"], answer["token_logprobs"], strict=True):
            assert close(values, nucleus_logprobs(base, PROMPT, ids, temperature=0.7, top_p=0.9), factory)

    def test_the_canary_reads_what_generation_says(self, server: Server, factory: ServerFactory):
        answer = server.post("/generate", **GREEDY)
        reading = server.post("/bridge/canary", token_ids=PROMPT + answer["token_ids"][0])
        assert close(reading["logprobs"][len(PROMPT) - 1 :], answer["token_logprobs"][0], factory)

    def test_equal_seeds_give_equal_completions(self, server: Server):
        first, second, other = (
            server.post("/generate", prompt_token_ids=PROMPT, max_tokens=8, n=3, seed=seed)["token_ids"]
            for seed in (1, 1, 2)
        )
        assert first == second != other

    def test_a_stop_string_is_not_in_the_text(self, server: Server):
        free = server.post("/generate", **(GREEDY | {"max_tokens": 12}))["text"][0]
        stop = free[3]
        stopped = server.post("/generate", **(GREEDY | {"max_tokens": 12, "stop": [stop]}))
        assert stopped["text"][0] == free[: free.index(stop)] and stopped["finish_reasons"] == ["stop"]

    def test_a_stream_is_the_answer_in_pieces(self, server: Server):
        body = {"prompt_token_ids": PROMPT, "n": 2, "max_tokens": 12, "seed": 4}
        whole = server.post("/generate", **body)
        chunks = stream(server.http, "/generate", body | {"stream": True})
        for index in range(2):
            own = [chunk for chunk in chunks if chunk["index"] == index]
            assert [token for chunk in own for token in chunk["token_ids"]] == whole["token_ids"][index]
            assert "".join(chunk["text"] for chunk in own) == whole["text"][index]
            assert sum(len(chunk["token_logprobs"]) for chunk in own) == len(whole["token_ids"][index])
            assert [chunk["finish_reason"] for chunk in own] == [
                *[None] * (len(own) - 1),
                whole["finish_reasons"][index],
            ]
        assert chunks[0]["prompt_token_ids"] == PROMPT

    def test_the_archived_clients_requests_are_understood(self, server: Server, base: PreTrainedModel, factory):
        body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "n": 2, "max_tokens": 5, "temperature": 1.0}
        # What its environments hand through besides, with the key of the OpenAI client as token.
        extra = {"top_p": 1.0, "stop": ["User:", "</answer>"], "timeout": 120, "user": "x", "stream": False}
        reply = server.stranger.post("/generate", json=body | extra, headers={"Authorization": "Bearer x"})
        answer = answered(reply)
        read = [[int(next(iter(item[0]))) for item in tokens] for tokens in answer["logprobs"]]
        assert read == answer["token_ids"] and len(answer["finish_reasons"]) == 2
        body = {"prompt": {"prompt_token_ids": CANARY}, "prompt_logprobs": 1, "n": 1, "temperature": 0.0, "top_p": 1.0}
        entries = server.post("/generate", **body, max_tokens=1)["prompt_logprobs"]
        own = [entry[str(token)] for token, entry in zip(CANARY[1:], entries[1:], strict=True)]
        assert entries[0] is None and close(own, logprobs_of(base), factory)


class TestOpenAI:
    def test_it_can_be_a_teacher(self, server: Server, base: PreTrainedModel, factory: ServerFactory):
        """Its tokenizer, and of each token what it would have said in its place."""
        deadline = Deadline("the teacher", 60.0)
        with closing(TeacherServer(str(server.http.base_url), model="policy", top_k=5)) as teacher:
            encode = partial(AutoTokenizer.from_pretrained(server.model).encode, add_special_tokens=False)
            teacher.check_tokenizer(["cd", "ef"], encode=encode, deadline=deadline)
            (tops,) = teacher.tops([tuple(CANARY)], deadline=deadline)
        own = [top[token] for top, token in zip(tops, CANARY[1:], strict=True)]
        assert close(own, logprobs_of(base), factory) and all(len(top) in (5, 6) for top in tops)
        likeliest = base(input_ids=torch.tensor([CANARY])).logits[0, :-1].argmax(-1).tolist()
        assert [max(top, key=top.__getitem__) for top in tops] == likeliest
        with closing(TeacherServer(str(server.http.base_url))) as sampled:
            ((first, *_),) = sampled.tops([tuple(CANARY)], deadline=deadline)
        assert set(first) >= {CANARY[1]}

    def test_all_names_of_the_model_are_the_same(self, server: Server):
        names = [card["id"] for card in server.get("/v1/models")["data"]]
        assert names[0] in server.get("/bridge/info")["served_names"]
        texts = {server.post("/v1/completions", model=name, prompt=PROMPT, temperature=0, max_tokens=6)["choices"][0][
            "text"
        ] for name in [names[0], "policy"]}  # fmt: skip
        assert len(texts) == 1
        assert server.http.post("/v1/completions", json={"model": "nobody", "prompt": "a"}).status_code == 404

    def test_completions_have_token_ids_and_logprobs(self, server: Server):
        expected = server.post("/generate", **GREEDY)
        answer = server.post(
            "/v1/completions", model="policy", prompt=PROMPT, temperature=0, max_tokens=8, logprobs=1,
            return_token_ids=True,
        )  # fmt: skip
        (choice,) = answer["choices"]
        assert choice["token_ids"] == expected["token_ids"][0] and choice["prompt_token_ids"] == PROMPT
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected["token_logprobs"][0], abs=1e-3)
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])

    def test_chats_have_token_ids_and_logprobs(self, server: Server):
        body = {"model": "policy", "messages": [{"role": "user", "content": "cdef"}], "temperature": 0}
        expected = server.post("/generate", prompt="cdef", temperature=0, max_tokens=8)
        options = {"max_tokens": 8, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
        answer = server.post("/v1/chat/completions", **body, **options)
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == expected["text"][0]
        assert choice["token_ids"] == expected["token_ids"][0]
        assert answer["prompt_token_ids"] == expected["prompt_token_ids"]
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert values == pytest.approx(expected["token_logprobs"][0], abs=1e-3)

    def test_a_chat_goes_on_after_tokens_that_are_given(self, server: Server):
        """The messages of the turn are not tokenized again, whatever they say."""
        body = {"model": "policy", "messages": [{"role": "user", "content": "cdefcdef"}], "temperature": 0}
        expected = server.post("/generate", **GREEDY)
        options = {"max_completion_tokens": 8, "logprobs": True, "return_token_ids": True, "seed": 3}
        answer = server.post(
            "/v1/chat/completions/tokens", **body, **options, tokens=PROMPT, return_tokens_as_token_ids=True
        )
        (choice,) = answer["choices"]
        assert answer["prompt_token_ids"] == PROMPT and answer["object"] == "chat.completion"
        assert choice["token_ids"] == expected["token_ids"][0]
        assert choice["message"]["content"] == expected["text"][0]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert values == pytest.approx(expected["token_logprobs"][0], abs=1e-3)
        chunks = stream(server.http, "/v1/chat/completions/tokens", body | {"max_tokens": 8, "stream": True,
                                                                            "tokens": PROMPT})  # fmt: skip
        deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        assert "".join(deltas) == expected["text"][0]

    @pytest.mark.parametrize("tokens", [None, [], [5, "6"], [10**6]])
    def test_tokens_that_are_none_are_refused(self, tokens: Any, server: Server):
        body = {"model": "policy", "messages": [{"role": "user", "content": "c"}], "max_tokens": 2, "tokens": tokens}
        assert server.http.post("/v1/chat/completions/tokens", json=body).status_code == 400

    def test_texts_and_conversations_are_tokenized(self, server: Server):
        expected = server.post("/generate", prompt="cdef", max_tokens=1)["prompt_token_ids"]
        by_text = server.post("/tokenize", model="policy", prompt="cdef", return_token_strs=True)
        assert by_text["tokens"] == expected and by_text["max_model_len"] == MAX_LEN
        assert by_text["count"] == len(by_text["token_strs"]) == len(expected)
        messages = [{"role": "user", "content": "cd"}, {"role": "assistant", "content": "ef"}]
        by_chat = server.post("/tokenize", model="policy", messages=messages, add_generation_prompt=False, tools=None)
        assert by_chat["tokens"] == expected and by_chat["token_strs"] is None
        assert server.http.post("/tokenize", json={"model": "nobody", "prompt": "a"}).status_code == 404
        assert server.http.post("/tokenize", json={"model": "policy"}).status_code == 400

    def test_chats_are_streamed(self, server: Server):
        body = {"model": "policy", "messages": [{"role": "user", "content": "cdef"}], "temperature": 0}
        expected = server.post("/v1/chat/completions", **body, max_tokens=8)["choices"][0]
        chunks = stream(server.http, "/v1/chat/completions", body | {"max_tokens": 8, "stream": True})
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == expected["message"]["content"]
        assert deltas[0]["role"] == "assistant"


class TestInfo:
    def test_health(self, server: Server):
        assert server.stranger.get("/health").status_code == 200
        assert server.stranger.get("/health_generate").status_code == 200

    def test_info_says_who_serves_what(self, server: Server, base: PreTrainedModel):
        info = answered(server.stranger.get("/bridge/info"))
        assert info["vocab_size"] == base.config.vocab_size and info["max_model_len"] == MAX_LEN
        assert info["model"] == str(server.model) and info["max_lora_rank"] == MAX_RANK
        assert (info["lora_enabled"], info["paused"], info["sleeping"]) == (True, False, False)
        assert info["pid"] > 0 and info["engine"] and info["dtype"].startswith("float")
        assert TOKEN not in json.dumps(info)

    def test_what_it_has_generated_is_counted(self, server: Server):
        before = server.get("/bridge/info")["generated_tokens"]
        reply = server.post("/generate", prompt_token_ids=[5, 6], n=2, max_tokens=4)
        generated = sum(map(len, reply["token_ids"]))
        assert server.get("/bridge/info")["generated_tokens"] - (before or 0) == generated > 0

    def test_parameters_are_listed_and_digested(self, server: Server, base: PreTrainedModel):
        listed = server.get("/bridge/state_dict_info")
        assert listed["num_params"] == len(listed["param_mappings"]) > 0
        assert listed["param_mappings"][NORM]["shape"] == list(base.get_parameter(NORM).shape)
        asked = {"norm": {"name": NORM}, "rows": {"name": NORM, "start": 3, "rows": 5}}
        found = server.post("/bridge/digests", slices=asked)["digests"]
        own = base.get_parameter(NORM).detach().to(getattr(torch, server.get("/bridge/info")["dtype"]))
        assert found == {"norm": f"{digest(own):016x}", "rows": f"{digest(own[3:8]):016x}"}
        proved = server.post("/bridge/prove", token_ids=CANARY, slices=asked)
        assert proved["digests"] == found and proved["logprobs"] == pytest.approx(canary(server), abs=1e-6)

    def test_the_canary_reads_the_models_logprobs(self, server: Server, base: PreTrainedModel, factory: ServerFactory):
        assert close(canary(server), logprobs_of(base), factory)


class TestAdapters:
    @pytest.mark.parametrize(
        ("path", "names"),
        [
            ("/lora/load", ("adapter_path", "adapter_name")),
            ("/v1/load_lora_adapter", ("lora_path", "lora_name")),
            ("/set_lora_adapter", ("lora_path", "lora_name")),
            ("/set_lora_adapter/", ("lora_path", "lora_name")),
        ],
    )
    def test_an_adapter_is_in_force_for_everyone(self, path, names, server, base, factory):
        adapted = save_adapter(base, server.root / "adapter")
        before = version(server)
        answer = server.post(path, **dict(zip(names, (str(server.root / "adapter"), "swap"), strict=True)))
        assert answer["weight_version"] == before + 1 and answer["adapter"]["name"] == "swap"
        assert close(canary(server), logprobs_of(adapted), factory)
        assert not close(logprobs_of(adapted), logprobs_of(base), factory)
        served = server.get("/bridge/info")["served_names"][0]
        answers = [
            server.post("/generate", **GREEDY, model=model) for model in (None, served, "policy", "swap") if model
        ]
        assert len({json.dumps(one["token_ids"]) for one in answers}) == 1
        together = PROMPT + answers[0]["token_ids"][0]
        expected = logprobs_of(adapted, together)[len(PROMPT) - 1 :]
        assert all(close(one["token_logprobs"][0], expected, factory) for one in answers)
        assert all(one["weight_version"] == [{"first": before + 1, "last": before + 1}] for one in answers)
        assert server.get("/lora/status")["adapter"]["name"] == "swap"
        server.post("/lora/unload")  # the one in force
        assert close(canary(server), logprobs_of(base), factory) and version(server) == before + 2

    def test_a_second_one_replaces_the_first(self, server, base, factory):
        for seed, rank in ((1, 4), (2, 2), (3, 8)):
            adapted = save_adapter(base, server.root / f"adapter_{seed}", seed=seed, r=rank)
            server.post("/lora/load", adapter_path=str(server.root / f"adapter_{seed}"), weight_version=100 + seed)
            assert close(canary(server), logprobs_of(adapted), factory) and version(server) == 100 + seed
            asked = server.post("/bridge/digests", slices={}, adapter=True)["digests"]
            assert asked == adapter_digests(server.root / f"adapter_{seed}", server)


class TestChannels:
    def test_an_adapter_comes_over_a_channel(self, server, base, factory):
        adapted = save_adapter(base, server.root / "sent", seed=7)
        tensors = load_file(server.root / "sent" / "adapter_model.safetensors")
        lora = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
        with channel(server, tensors, kind="lora", lora=lora) as trainer, ThreadPoolExecutor(1) as pool:
            for scale, number in ((1.0, 41), (0.5, 42)):
                scaled = {name: tensor * scale for name, tensor in tensors.items()}
                receiving = pool.submit(server.post, "/nccl/receive", weight_version=number)
                trainer.send(scaled.items(), specs_of(tensors), deadline=soon())
                assert receiving.result(60)["weight_version"] == number
                assert server.get("/nccl/status")["updates"] == number - 40
                if scale == 1.0:
                    assert close(canary(server), logprobs_of(adapted), factory)
                    assert server.post("/bridge/digests", slices={}, adapter=True)["digests"] == adapter_digests(
                        server.root / "sent", server
                    )
            assert not close(canary(server), logprobs_of(adapted), factory)
        assert server.get("/nccl/status")["status"] == "idle"

    def test_all_weights_come_over_a_channel(self, server, base, factory):
        other = factory.build_model(5)
        tensors = {name: parameter.detach() for name, parameter in other.named_parameters()}
        original = {name: parameter.detach() for name, parameter in base.named_parameters()}
        with channel(server, tensors, kind="full") as trainer, ThreadPoolExecutor(1) as pool:
            for sent, model in ((tensors, other), (original, base)):
                number = version(server) + 1
                receiving = pool.submit(server.post, "/nccl/receive", weight_version=number)
                trainer.send(sent.items(), specs_of(tensors), deadline=soon())
                assert receiving.result(60)["weight_version"] == number
                assert close(canary(server), logprobs_of(model), factory)

    def test_a_second_receiver_is_refused_and_joining_can_be_stopped(self, server, base, factory):
        spec = receiver_body(dict(base.named_parameters()), init_method="tcp://127.0.0.1:9", kind="full")
        with still_serving(server, factory):
            assert server.post("/nccl/start_receiver", **spec)["status"] in ("connecting", "error")
            refused(server.http.post("/nccl/start_receiver", json=spec), 409)
            refused(server.http.post("/nccl/receive", json={"weight_version": 3}), 409)
            assert server.post("/nccl/stop_receiver")["status"] == "idle"

    def test_an_update_that_breaks_off_changes_nothing(self, server, base, factory):
        tensors = {name: parameter.detach() for name, parameter in factory.build_model(6).named_parameters()}
        with still_serving(server, factory), channel(server, tensors, kind="full") as trainer:
            with ThreadPoolExecutor(2) as pool:
                receiving = pool.submit(server.http.post, "/nccl/receive", json={"weight_version": 900})
                half = list(tensors.items())[: len(tensors) // 2]
                sending = pool.submit(trainer.send, half, specs_of(tensors), deadline=soon())
                assert sending.exception(60) is not None
                assert receiving.result(60).status_code >= 400
            assert server.get("/nccl/status")["status"] == "error"

    def test_one_change_at_a_time(self, server, base, factory):
        tensors = {name: parameter.detach() for name, parameter in base.named_parameters()}
        with still_serving(server, factory), channel(server, tensors, kind="full"), ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(until_taken, server, "/nccl/receive", {"weight_version": 900})
            message = until_refused(server, "/bridge/set_version", {"weight_version": version(server)})
            assert "receiving" in message
            server.post("/nccl/stop_receiver")
            assert receiving.result(60).status_code >= 400


class TestReload:
    def test_a_checkpoint_is_loaded_into_the_running_engine(self, server, base, factory):
        other = factory.build_model(3)
        other.save_pretrained(server.root / "step_3")
        before = version(server)
        server.post("/bridge/reload", path=str(server.root / "step_3"), weight_version=before + 5)
        assert close(canary(server), logprobs_of(other), factory) and version(server) == before + 5
        server.post("/bridge/reload", path=str(server.model))
        assert close(canary(server), logprobs_of(base), factory) and version(server) == before + 6


class TestSharing:
    def test_another_process_writes_the_weights(self, server, base, factory):
        if not factory.exports:
            pytest.skip("this server's parameters cannot be shared here")
        path = server.root / "vllm_bridge_config.json"
        server.post("/bridge/export", path=str(path))
        bridge = read_bridge_file(path)
        assert bridge.session_id == server.get("/bridge/info")["session_id"]
        attachments = Attachments()
        norm = attachments.tensor(NORM, bridge.tensors[NORM])
        torch.testing.assert_close(norm, base.get_parameter(NORM).detach())
        kept, number = norm.clone(), version(server) + 1
        server.post("/bridge/pause", mode="keep")
        norm.mul_(2.0)
        server.post("/bridge/set_version", weight_version=number)
        server.post("/bridge/resume")
        assert not close(canary(server), logprobs_of(base), factory) and version(server) == number
        norm.copy_(kept)
        assert close(canary(server), logprobs_of(base), factory)
        attachments.close()


class TestPausing:
    @pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
    def test_of_32_requests_none_is_lost(self, mode: str, server: Server, base: PreTrainedModel, factory):
        body = {"prompt_token_ids": PROMPT, "max_tokens": 48, "n": 2}
        with ThreadPoolExecutor(32) as pool:
            replies = [pool.submit(server.http.post, "/generate", json=body | {"seed": i}) for i in range(32)]
            rounds = 0
            while rounds < 3 or not all(reply.done() for reply in replies):
                server.post("/bridge/pause", mode=mode)
                assert server.get("/bridge/info")["paused"]
                if rounds < 2:
                    assert close(canary(server), logprobs_of(base), factory), "weights are proved while paused"
                server.post("/bridge/resume")
                rounds += 1
                if rounds >= 3:
                    wait(replies, timeout=0.5)
        answers = [answered(reply.result()) for reply in replies]
        reasons = {reason for answer in answers for reason in answer["finish_reasons"]}
        assert len(answers) == 32 and reasons <= (
            {"stop", "length", "abort"} if mode == "abort" else {"stop", "length"}
        )
        for answer in answers:
            for ids, values, reason in zip(
                answer["token_ids"], answer["token_logprobs"], answer["finish_reasons"], strict=True
            ):
                assert len(ids) == len(values) and (reason != "length" or len(ids) == 48)

    def test_what_is_held_goes_on_as_if_nothing_had_been(self, server: Server):
        body = {"prompt_token_ids": PROMPT, "max_tokens": 60, "n": 8, "seed": 3}
        undisturbed = server.post("/generate", **body)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(server.post, "/generate", **body)
            for _ in range(4):
                server.post("/bridge/pause", mode="keep")
                server.post("/bridge/resume")
            disturbed = reply.result(60)
        assert disturbed["token_ids"] == undisturbed["token_ids"]

    def test_requests_that_come_while_paused_wait(self, server: Server):
        server.post("/bridge/pause", mode="keep")
        assert server.stranger.get("/health").status_code == 200
        assert server.http.get("/health_generate").status_code == 503
        with ThreadPoolExecutor(4) as pool:
            replies = [pool.submit(server.post, "/generate", **GREEDY) for _ in range(4)]
            with pytest.raises(TimeoutError):
                replies[0].result(0.2)
            server.post("/bridge/pause", mode="keep")
            server.post("/bridge/resume")
            server.post("/bridge/resume")
            assert len({json.dumps(reply.result(60)["token_ids"]) for reply in replies}) == 1

    def test_a_request_that_straddles_an_update_says_so(self, server: Server):
        for _ in range(20):
            before = version(server)
            body = {"prompt_token_ids": PROMPT, "max_tokens": 110, "temperature": 0.0, "stream": True, "n": 4}
            chunks: list[dict[str, Any]] = []
            with server.http.stream("POST", "/generate", json=body) as reply:
                for line in reply.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunks.append(json.loads(line.removeprefix("data: ")))
                    if len(chunks) == 1:
                        server.post("/bridge/pause", mode="keep")
                        server.post("/bridge/set_version", weight_version=before + 1)
                        server.post("/bridge/resume")
            spans = [chunk["weight_version"] for chunk in chunks if chunk["finish_reason"]]
            assert len(spans) == 4 and chunks[0]["weight_version"] == {"first": before, "last": before}
            assert all(before <= span["first"] <= span["last"] <= before + 1 for span in spans)
            if any(span == {"first": before, "last": before + 1} for span in spans):
                break
        else:
            pytest.fail("no request straddled the update in 20 trials")
        after = server.post("/generate", **GREEDY)["weight_version"]
        assert after == [{"first": before + 1, "last": before + 1}]

    def test_an_adapter_is_swapped_under_requests_in_flight(self, server, base, factory):
        adapted = save_adapter(base, server.root / "flight")
        body = {"prompt_token_ids": PROMPT, "max_tokens": 100, "n": 4}
        before = version(server)
        with ThreadPoolExecutor(16) as pool:
            replies = [pool.submit(server.post, "/generate", **body, seed=i) for i in range(16)]
            server.post("/lora/load", adapter_path=str(server.root / "flight"))
            assert close(canary(server), logprobs_of(adapted), factory)
            answers = [reply.result(60) for reply in replies]
        assert len(answers) == 16 and version(server) == before + 1
        spans = [span for answer in answers for span in answer["weight_version"]]
        assert all(before <= span["first"] <= span["last"] <= before + 1 for span in spans)

    def test_a_sleeping_engine_wakes_up_with_its_weights(self, server: Server, base: PreTrainedModel, factory):
        server.post("/bridge/sleep", level=1)
        assert server.get("/bridge/info")["sleeping"]
        server.post("/bridge/sleep", level=1)
        server.post("/bridge/wake_up", tags=["weights"])
        assert server.get("/bridge/info")["sleeping"], "the cache is not there yet"
        server.post("/bridge/wake_up")
        server.post("/bridge/wake_up")
        assert not server.get("/bridge/info")["sleeping"]
        assert close(canary(server), logprobs_of(base), factory) and server.post("/generate", **GREEDY)["token_ids"]


CHANGING = [
    "/bridge/claim", "/lora/load", "/lora/unload", "/v1/load_lora_adapter", "/set_lora_adapter", "/nccl/start_receiver",
    "/nccl/receive", "/nccl/stop_receiver", "/bridge/export", "/bridge/pause", "/bridge/resume", "/bridge/sleep",
    "/bridge/wake_up", "/bridge/reload", "/bridge/set_version", "/bridge/release",
]  # fmt: skip
BAD_BODIES: dict[str, tuple[str, bytes]] = {
    "bad JSON": ("/generate", b'{"prompt": '),
    "no object": ("/generate", b"[1, 2]"),
    "not UTF-8": ("/generate", b'{"prompt": "\xff"}'),
    "NaN": ("/generate", b'{"prompt": "a", "temperature": NaN}'),
    "deep": ("/bridge/canary", b"[" * 100_000),
    "bad JSON of a change": ("/bridge/set_version", b"{"),
}
BAD: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "no prompt": ("/generate", {}, (400,)),
    "an empty prompt": ("/generate", {"prompt_token_ids": []}, (400,)),
    "two prompts": ("/generate", {"prompt": "a", "prompt_token_ids": [5]}, (400,)),
    "an unknown field": ("/generate", {"prompt": "a", "max_token": 5}, (400,)),
    "n as text": ("/generate", {"prompt": "a", "n": "2"}, (400,)),
    "n of 0": ("/generate", {"prompt": "a", "n": 0}, (400,)),
    "no tokens": ("/generate", {"prompt": "a", "max_tokens": 0}, (400,)),
    "a negative temperature": ("/generate", {"prompt": "a", "temperature": -1}, (400,)),
    "top_p above 1": ("/generate", {"prompt": "a", "top_p": 2}, (400,)),
    "stop as a number": ("/generate", {"prompt": "a", "stop": 3}, (400,)),
    "a token that the model has not": ("/generate", {"prompt_token_ids": [5, 100_000]}, (400,)),
    "a negative token": ("/generate", {"prompt_token_ids": [5, -1]}, (400,)),
    "a token as text": ("/generate", {"prompt_token_ids": ["5"]}, (400,)),
    "a prompt too long": ("/generate", {"prompt_token_ids": [5] * (MAX_LEN + 1)}, (400,)),
    "a completion too long": ("/generate", {"prompt_token_ids": [5], "max_tokens": MAX_LEN}, (400,)),
    "an unknown model": ("/generate", {"prompt": "a", "model": "nobody"}, (404,)),
    "a canary of one token": ("/bridge/canary", {"token_ids": [5]}, (400,)),
    "a canary too long": ("/bridge/canary", {"token_ids": [5] * (MAX_LEN + 1)}, (400,)),
    "a canary of unknown tokens": ("/bridge/canary", {"token_ids": [5, 100_000]}, (400,)),
    "a canary without tokens": ("/bridge/canary", {}, (400,)),
    "digests of an unknown tensor": ("/bridge/digests", {"slices": {"x": {"name": "nothing"}}}, (404,)),
    "a proof of an unknown tensor": ("/bridge/prove", {"token_ids": [5, 6], "slices": {"x": {"name": "none"}}}, (404,)),
    "a proof without tokens": ("/bridge/prove", {"slices": {}}, (400,)),
    "digests of rows that are not there": ("/bridge/digests", {"slices": {NORM: {"start": 9999}}}, (400, 422)),
    "an unknown pause": ("/bridge/pause", {"mode": "stop"}, (400,)),
    "an unknown sleep": ("/bridge/sleep", {"level": 7}, (400,)),
    "an unknown part to wake up": ("/bridge/wake_up", {"tags": ["graphs"]}, (400,)),
    "no version": ("/bridge/set_version", {}, (400,)),
    "a negative version": ("/bridge/set_version", {"weight_version": -1}, (400,)),
    "unloading what is not there": ("/lora/unload", {"adapter_name": "nobody"}, (404,)),
    "an update without a channel": ("/nccl/receive", {"weight_version": 1}, (409,)),
    "a claim without an owner": ("/bridge/claim", {}, (400,)),
}


class TestRefusals:
    @pytest.mark.parametrize("path", CHANGING)
    def test_who_has_no_token_changes_nothing(self, path: str, server: Server, factory: ServerFactory):
        before = standing(server)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Basic x"}):
            message = refused(server.stranger.post(path, json={"weight_version": 5}, headers=headers), 401)
            assert TOKEN not in message
        assert standing(server) == before

    def test_who_asks_for_another_name(self, server: Server, factory: ServerFactory):
        refused(server.http.get("/bridge/info", headers={"Host": "evil.example"}), 403)
        assert server.http.get("/bridge/info", headers={"Host": "localhost:1"}).is_success

    def test_who_asks_from_a_foreign_page(self, server: Server, factory: ServerFactory):
        for path in ("/generate", "/v1/completions", "/bridge/pause"):
            refused(server.http.post(path, json={}, headers={"Origin": "http://evil.example"}), 403)
            assert server.http.options(path, headers={"Origin": "http://evil.example"}).status_code == 403

    @pytest.mark.parametrize("what", BAD_BODIES)
    def test_a_body_that_is_no_json(self, what: str, server: Server, factory: ServerFactory):
        path, content = BAD_BODIES[what]
        with still_serving(server, factory):
            refused(server.http.post(path, content=content, headers={"Content-Type": "application/json"}), 400)

    @pytest.mark.parametrize("what", BAD)
    def test_a_request_that_cannot_be_served(self, what: str, server: Server, factory: ServerFactory):
        path, body, statuses = BAD[what]
        with still_serving(server, factory):
            refused(server.http.post(path, json=body), *statuses)

    def test_the_nearest_known_field_is_named(self, server: Server):
        error = server.http.post("/generate", json={"prompt": "a", "temprature": 1}).json()["error"]
        assert "temprature" in error["message"] and "temperature" in error["remedy"]

    def test_a_body_too_large(self, server: Server, factory: ServerFactory):
        with still_serving(server, factory):
            refused(server.http.post("/generate", content=b" " * (33 << 20)), 413)

    def test_an_engine_of_another_run_is_refused(self, server: Server, factory: ServerFactory):
        server.post("/bridge/claim", owner="run-1", takeover=True)
        assert server.post("/bridge/claim", owner="run-1")["owner"] == "run-1"
        with still_serving(server, factory):
            assert "run-1" in refused(server.http.post("/bridge/claim", json={"owner": "run-2"}), 409)
        assert server.post("/bridge/claim", owner="run-2", takeover=True)["owner"] == "run-2"
        assert server.post("/bridge/release", owner="run-1")["owner"] == "run-2"
        assert server.post("/bridge/release", owner="run-2")["owner"] is None
        assert server.post("/bridge/claim", owner="run-3")["owner"] == "run-3"

    @pytest.mark.parametrize("route", ["/lora/load", "/bridge/reload", "/bridge/export"])
    def test_paths_that_lead_outside(self, route: str, server: Server, base: PreTrainedModel, factory):
        save_adapter(base, server.outside / "adapter")
        link = server.root / "link"
        if not link.is_symlink():
            link.symlink_to(server.outside / "adapter")
        inner = server.root / "with_link"
        inner.mkdir(exist_ok=True)
        if not (inner / "adapter_config.json").is_symlink():
            (inner / "adapter_config.json").symlink_to(server.outside / "adapter" / "adapter_config.json")
        relative = os.path.relpath(server.outside / "adapter")
        paths = [server.outside / "adapter", f"{server.root}/../outside/adapter", link, "/etc", relative, "~", inner]
        name = "adapter_path" if route == "/lora/load" else "path"
        with still_serving(server, factory):
            for path in paths:
                refused(server.http.post(route, json={name: str(path)}), 403)
            refused(server.http.post(route, json={name: "a\0b"}), 400)

    @pytest.mark.parametrize("damage", sorted(DAMAGES := [
        "no directory", "no config", "no weights", "pickle only", "cut short", "rank too large", "wrong rank",
        "wrong shapes", "unknown modules", "wrong dtype", "half a pair", "dora", "other kind", "other model",
    ]))  # fmt: skip
    def test_an_adapter_that_does_not_fit(self, damage: str, server: Server, base: PreTrainedModel, factory):
        path = server.root / f"damaged_{damage.replace(' ', '_')}"
        save_adapter(base, path)
        do_damage(damage, path, base)
        with still_serving(server, factory):
            refused(server.http.post("/lora/load", json={"adapter_path": str(path)}), 400, 409, 422)

    def test_an_adapter_in_force_survives_one_that_does_not_fit(self, server, base, factory):
        adapted = save_adapter(base, server.root / "good")
        server.post("/lora/load", adapter_path=str(server.root / "good"), adapter_name="good")
        save_adapter(base, server.root / "bad")
        do_damage("wrong shapes", server.root / "bad", base)
        with still_serving(server, factory):
            refused(server.http.post("/lora/load", json={"adapter_path": str(server.root / "bad")}), 400, 409, 422)
        assert close(canary(server), logprobs_of(adapted), factory)
        assert server.get("/lora/status")["adapter"]["name"] == "good"

    @pytest.mark.parametrize("damage", ["no config", "no weights", "other shapes", "not whole", "cut short"])
    def test_a_checkpoint_that_does_not_fit(self, damage: str, server: Server, base: PreTrainedModel, factory):
        path = server.root / f"checkpoint_{damage.replace(' ', '_')}"
        base.save_pretrained(path)
        weights = path / "model.safetensors"
        if damage == "no config":
            (path / "config.json").unlink()
        elif damage == "no weights":
            weights.unlink()
        elif damage == "other shapes":
            wider = load_file(weights)
            wider[NORM] = torch.cat([wider[NORM], wider[NORM]])
            save_file(wider, weights, metadata={"format": "pt"})
        elif damage == "not whole":
            save_file({n: t for n, t in load_file(weights).items() if n != NORM}, weights, metadata={"format": "pt"})
        else:
            weights.write_bytes(weights.read_bytes()[:-100])
        with still_serving(server, factory):
            refused(server.http.post("/bridge/reload", json={"path": str(path)}), 400, 409, 422)

    @pytest.mark.parametrize("wrong", ["address", "world", "rank", "backend", "shape", "name", "missing", "dtype",
        "count", "kind", "lora rank", "twice", "lora module"])  # fmt: skip
    def test_a_receiver_that_does_not_fit(self, wrong: str, server: Server, base: PreTrainedModel, factory):
        body = receiver_body(dict(base.named_parameters()), init_method="tcp://127.0.0.1:9", kind="full")
        spoil(wrong, body)
        with still_serving(server, factory):
            refused(server.http.post("/nccl/start_receiver", json=body), 400, 409, 422)
            assert server.get("/nccl/status")["status"] == "idle"


def stream(http: httpx.Client, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer, which ends as it should."""
    with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@torch.no_grad()
def nucleus_logprobs(model, prompt: list[int], ids: list[int], *, temperature: float, top_p: float) -> list[float]:
    """Logprobs of ``ids`` after temperature and top-p, from one forward pass."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float() / temperature
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    kept = (probs.cumsum(-1) - probs < top_p) * probs
    kept = torch.zeros_like(kept).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
    return kept.log().gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).tolist()


def adapter_digests(path: Path, server: Server) -> dict[str, str]:
    """What the server has to answer for an adapter on disk with alpha twice its rank."""
    dtype = getattr(torch, server.get("/bridge/info")["dtype"])
    digests = {}
    for name, tensor in load_file(path / "adapter_model.safetensors").items():
        served = served_lora_b(tensor, scaling=2.0, dtype=dtype) if ".lora_B." in name else tensor.to(dtype)
        digests[name.removeprefix("base_model.model.")] = f"{digest(served):016x}"
    return digests


def soon() -> Deadline:
    return Deadline("contract: a transfer", 60.0)


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[ReceivedTensor, ...]:
    return tuple(ReceivedTensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items())


def receiver_body(tensors: Mapping[str, Tensor], *, init_method: str, kind: str, lora: Any = None) -> dict[str, Any]:
    specs = specs_of(tensors)
    return {
        "init_method": init_method, "world_size": 2, "rank": 1, "backend": "gloo", "kind": kind, "lora": lora,
        "param_metadata": {
            "param_names": [spec.name for spec in specs],
            "param_shapes": [list(spec.shape) for spec in specs],
            "param_dtypes": [spec.dtype for spec in specs],
            "num_params": len(specs),
        },
    }  # fmt: skip


@contextmanager
def channel(server: Server, tensors: Mapping[str, Tensor], *, kind: str, lora: Any = None) -> Iterator[Channel]:
    """The trainer's end of a channel that the server has joined."""
    rendezvous = listen("tcp://127.0.0.1:0")
    server.post(
        "/nccl/start_receiver", **receiver_body(tensors, init_method=rendezvous.init_method, kind=kind, lora=lora)
    )
    trainer = Channel.connect(
        init_method=rendezvous.init_method,
        world_size=2,
        rank=0,
        backend="gloo",
        device="cpu",
        deadline=soon(),
        rendezvous=rendezvous,
    )
    try:
        until(lambda: server.get("/nccl/status")["status"] == "connected")
        yield trainer
        server.post("/nccl/stop_receiver")
    finally:
        trainer.close()


def until(holds: Any) -> None:
    deadline = soon()
    while not holds():
        deadline.check()
        threading.Event().wait(0.01)


def until_refused(server: Server, path: str, body: Mapping[str, Any]) -> str:
    """The message of the first 409; until then the answers are successes that change nothing."""
    found: list[str] = []

    def tried() -> bool:
        reply = server.http.post(path, json=body)
        if reply.status_code == 409:
            found.append(refused(reply, 409))
        return bool(found)

    until(tried)
    return found[0]


def until_taken(server: Server, path: str, body: Mapping[str, Any]) -> httpx.Response:
    """The answer to a change that does not come while :func:`until_refused` tries its own."""
    while True:
        reply = server.http.post(path, json=body)
        if not (reply.status_code == 409 and "setting the version" in reply.text):
            return reply


def do_damage(damage: str, path: Path, base: PreTrainedModel) -> None:
    weights = path / "adapter_model.safetensors"
    first = sorted(load_file(weights))[0] if weights.exists() else ""
    if damage == "no directory":
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    elif damage == "no config":
        (path / "adapter_config.json").unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "pickle only":
        torch.save(load_file(weights), path / "adapter_model.bin")
        weights.unlink()
    elif damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "rank too large":
        save_adapter(base, path, r=2 * MAX_RANK)
    elif damage == "wrong rank":
        edit_config(path, r=2)
    elif damage == "wrong shapes":
        edit_tensors(path, lambda ts: ts | {first: torch.cat([ts[first], ts[first]], dim=1)})
    elif damage == "unknown modules":
        edit_tensors(path, lambda ts: {name.replace("q_proj", "z_proj"): tensor for name, tensor in ts.items()})
    elif damage == "wrong dtype":
        edit_tensors(path, lambda ts: {name: tensor.to(torch.int32) for name, tensor in ts.items()})
    elif damage == "half a pair":
        edit_tensors(path, lambda ts: {name: tensor for name, tensor in ts.items() if name != first})
    elif damage == "dora":
        edit_config(path, use_dora=True)
    elif damage == "other kind":
        edit_config(path, peft_type="IA3")
    elif damage == "other model":
        config = type(base.config)(**(base.config.to_dict() | {"hidden_size": 64}))
        save_adapter(type(base)(config), path)
    else:
        raise AssertionError(damage)


def spoil(wrong: str, body: dict[str, Any]) -> None:
    metadata = body["param_metadata"]
    if wrong == "address":
        body["init_method"] = "file:///etc/passwd"
    elif wrong == "world":
        body["world_size"] = 1
    elif wrong == "rank":
        body["rank"] = 2
    elif wrong == "backend":
        body["backend"] = "mpi"
    elif wrong == "shape":
        metadata["param_shapes"][0] = [3, 3]
    elif wrong == "name":
        metadata["param_names"][0] = "model.nothing.weight"
    elif wrong == "missing":
        for field in ("param_names", "param_shapes", "param_dtypes"):
            metadata[field].pop()
        metadata["num_params"] -= 1
    elif wrong == "dtype":
        metadata["param_dtypes"][0] = "object"
    elif wrong == "count":
        metadata["num_params"] += 1
    elif wrong == "kind":
        body["kind"] = "lora"
    elif wrong == "lora rank":
        body |= {"kind": "lora", "lora": {"r": 2 * MAX_RANK, "alpha": 1, "target_modules": ["q_proj"]}}
    elif wrong == "twice":
        metadata["param_names"][1] = metadata["param_names"][0]
    elif wrong == "lora module":
        name = "model.layers.0.self_attn.z_proj.lora_{}.weight"
        body |= {"kind": "lora", "lora": {"r": 2, "alpha": 1, "target_modules": ["z_proj"]}}
        body["param_metadata"] = {
            "param_names": [name.format(part) for part in "AB"],
            "param_shapes": [[2, 32], [32, 2]],
            "param_dtypes": ["float32"] * 2,
        }
    else:
        raise AssertionError(wrong)
