"""A teacher behind an address: what is asked, what is believed, and how it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, ModelError
from lachesis.plugins.teachers.server import TeacherServer
from tests.waiting import LONG_S

IDS = (5, 6, 7)
Answer = Callable[[dict[str, Any]], httpx.Response]


def vllm(body: dict[str, Any]) -> httpx.Response:
    """As vLLM answers; more than 20 logprobs it refuses."""
    if body["prompt_logprobs"] > 20:
        message = f"Requested prompt logprobs of {body['prompt_logprobs']}, which is greater than max allowed: 20"
        return httpx.Response(400, json={"error": {"message": message, "type": "BadRequestError", "code": 400}})
    entry = lambda token: {str(token): {"logprob": -0.5, "rank": 2}, "1": {"logprob": -0.25, "rank": 1}}  # noqa: E731
    choice = {"index": 0, "text": "x", "prompt_logprobs": [None, *map(entry, body["prompt"][1:])]}
    return httpx.Response(200, json={"choices": [choice]})


def server_of(answer: Answer, *, top_k: int = 1) -> TeacherServer:
    made = TeacherServer("http://teacher:8000/v1", model="big", top_k=top_k, key="secret")

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        body = json.loads(request.content)
        assert body.pop("model") == "big"
        return answer(body)

    made._http = httpx.Client(transport=httpx.MockTransport(handle), headers=made._http.headers)
    return made


def soon(seconds: float = LONG_S) -> Deadline:
    return Deadline("the teacher", seconds, "deadlines.teacher_s")


def test_of_each_token_the_likeliest_and_its_own():
    assert server_of(vllm).tops([IDS, IDS[:2]], deadline=soon()) == [
        [{6: -0.5, 1: -0.25}, {7: -0.5, 1: -0.25}],
        [{6: -0.5, 1: -0.25}],
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda body: httpx.Response(200, json={"choices": [{"text": "x"}]}), "of 3 tokens and gave none"),
        (lambda body: vllm(body | {"prompt": [9, 9, 9]}), "gave no logprob of token 6 at position 1"),
        (
            lambda body: vllm(body | {"prompt_logprobs": 30}),
            "allowed: 20 -> start the server with --max-logprobs 1",
        ),
        (lambda body: httpx.Response(401, json={"error": "Unauthorized"}), "Unauthorized -> put the server's key into"),
        (lambda body: httpx.Response(404, text="Not Found"), "answered 404: Not Found -> use a server that gives"),
        (lambda body: httpx.Response(200, text="<html>"), "did not return a JSON object"),
    ],
    ids=["none", "of other tokens", "too many", "no key", "no route", "no JSON"],
)
def test_one_that_cannot_teach_is_refused(answer: Answer, said: str):
    with pytest.raises(EngineError) as caught:
        server_of(answer).tops([IDS], deadline=soon())
    assert said in str(caught.value)


def test_a_busy_one_is_asked_again_until_the_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lachesis.plugins.teachers.server.time.sleep", lambda seconds: None)
    calls = list[int]()

    def busy(body: dict[str, Any]) -> httpx.Response:
        calls.append(1)
        if len(calls) == 1:
            raise httpx.ConnectError("refused")
        return httpx.Response(503, text="loading") if len(calls) == 2 else vllm(body)

    assert len(server_of(busy).tops([IDS], deadline=soon())[0]) == 2 and len(calls) == 3
    with pytest.raises(DeadlineExceeded, match=r"the teacher took longer .* answered 503: loading"):
        server_of(lambda body: httpx.Response(503, text="loading")).tops([IDS], deadline=soon(0.01))


def test_another_tokenizer_is_refused():
    server = server_of(lambda body: httpx.Response(200, json={"tokens": list(body["prompt"].encode())}))
    server.check_tokenizer(["a", "b"] * 40, encode=lambda text: list(text.encode()), deadline=soon())
    with pytest.raises(ModelError, match="'a b' the first token that differs is 97 there and 98 here"):
        server.check_tokenizer(["a", "b"], encode=lambda text: [byte + 1 for byte in text.encode()], deadline=soon())
