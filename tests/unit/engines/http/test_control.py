"""One method for each control route, and what becomes of every way to fail."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError, EngineUnreachable, StaleWeights
from lachesis.common.http import server_url
from lachesis.engines.http.control import ServerControl
from lachesis.engines.serving import operations as ops
from lachesis.engines.serving.backend import DigestRequest, LoraSpec, ReceiverSpec, Refused
from lachesis.engines.serving.bodies import parse
from lachesis.engines.serving.session import TOKEN_VARIABLE, new_session, write_session
from lachesis.transport.layout import ReceivedTensor
from tests.unit.engines.fake_server import FakeServer, refusal
from tests.waiting import LONG_S

SPEC = ReceiverSpec(
    init_method="tcp://127.0.0.1:1",
    world_size=2,
    backend="gloo",
    kind="lora",
    tensors=(ReceivedTensor("a.lora_A.weight", (2, 3), "bfloat16"), ReceivedTensor("b", (4,), "float32")),
    lora=LoraSpec(r=2, alpha=4.0, target_modules=("q_proj",), rslora=True, name="mine"),
    param_mappings={"b": {"vllm_name": "c"}},
)

FULL = SPEC.model_copy(update={"kind": "full", "lora": None, "param_mappings": {}, "backend": "nccl"})


def soon(seconds: float = LONG_S) -> Deadline:
    return Deadline("the test", seconds, "deadlines.sync_s")


@pytest.fixture
def control(fake: FakeServer) -> Iterator[ServerControl]:
    made = ServerControl(fake.url, token="secret")
    yield made
    made.close()


class TestAddresses:
    @pytest.mark.parametrize(
        ("written", "url"),
        [
            ("http://127.0.0.1:9001", "http://127.0.0.1:9001"),
            ("http://127.0.0.1:9001/v1", "http://127.0.0.1:9001"),
            (" http://host:1/v1/ ", "http://host:1"),
            ("https://host/", "https://host"),
            ("http://host/proxy/v1", "http://host/proxy"),
            ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
            ("http://[::1]:9001/v1", "http://[::1]:9001"),
        ],
    )
    def test_with_or_without_v1(self, written: str, url: str):
        assert server_url(written) == url

    @pytest.mark.parametrize(
        "written",
        ["", "localhost:9001", "ftp://host", "http://", "http://host?x=1", "/v1", "http://host:99999", "http://[::1"],
    )
    def test_what_is_none(self, written: str):
        with pytest.raises(ConfigError, match="not an address"):
            server_url(written)


class TestRoutes:
    def test_info(self, fake: FakeServer, control: ServerControl):
        info = control.info(deadline=soon())
        assert (info.url, info.session_id, info.weight_version, info.pid) == (fake.url, "fake-session", 0, os.getpid())
        assert (info.model.model, info.model.served_names, info.model.max_model_len) == ("fake", ("fake",), 64)
        assert (info.paused, info.sleeping, info.owner, info.adapter) == (False, False, None, None)

    def test_canary_and_digests(self, fake: FakeServer, control: ServerControl):
        fake.state.version = 3
        reading = control.canary([1, 2, 3], deadline=soon())
        assert (reading.logprobs, reading.version, reading.session_id) == ((-1.0, -1.0), 3, "fake-session")
        reading, digests = control.prove([1, 2, 3], DigestRequest(slices={}, adapter=True), deadline=soon())
        assert (reading.logprobs, reading.version, digests) == ((-1.0, -1.0), 3, {"a": 255, "b": 1})
        assert control.prove([1, 2, 3], DigestRequest(slices={}), deadline=soon()) == (reading, {})
        assert fake.state.bodies("/bridge/prove") == [{"token_ids": [1, 2, 3], "slices": {}, "adapter": True}]

    @pytest.mark.parametrize(
        ("route", "call", "body"),
        [
            (
                "/lora/load",
                lambda c: c.load_adapter(Path("/run/v1"), name="policy", version=4, deadline=soon()),
                {"adapter_path": "/run/v1", "adapter_name": "policy", "weight_version": 4},
            ),
            (
                "/lora/unload",
                lambda c: c.call(
                    ops.UNLOAD_ADAPTER, ops.UnloadAdapter(adapter_name="policy", weight_version=5), deadline=soon()
                ),
                {"adapter_name": "policy", "weight_version": 5},
            ),
            ("/nccl/receive", lambda c: c.receive(6, deadline=soon()), {"weight_version": 6}),
            ("/nccl/stop_receiver", lambda c: c.stop_receiver(deadline=soon()), {}),
            (
                "/bridge/export",
                lambda c: c.export_shared(Path("/run/b.json"), deadline=soon()),
                {"path": "/run/b.json"},
            ),
            ("/bridge/pause", lambda c: c.pause(mode="drain", deadline=soon()), {"mode": "drain"}),
            ("/bridge/resume", lambda c: c.resume(deadline=soon()), {}),
            ("/bridge/sleep", lambda c: c.call(ops.SLEEP, ops.Sleep(level=2), deadline=soon()), {"level": 2}),
            ("/bridge/wake_up", lambda c: c.call(ops.WAKE_UP, ops.Nothing(), deadline=soon()), {}),
            (
                "/bridge/reload",
                lambda c: c.reload(Path("/run/ckpt"), version=7, deadline=soon()),
                {"path": "/run/ckpt", "weight_version": 7},
            ),
            ("/bridge/set_version", lambda c: c.set_version(8, deadline=soon()), {"weight_version": 8}),
            ("/bridge/claim", lambda c: c.claim("run", deadline=soon()), {"owner": "run", "takeover": False}),
            ("/bridge/release", lambda c: c.release("run", deadline=soon()), {"owner": "run"}),
        ],
    )
    def test_changes(
        self, fake: FakeServer, control: ServerControl, route: str, call: Callable[..., None], body: dict[str, Any]
    ):
        call(control)
        assert fake.state.bodies(route) == [body]

    @pytest.mark.parametrize("spec", [SPEC, FULL])
    def test_a_receiver_is_what_the_server_understands(
        self, fake: FakeServer, control: ServerControl, spec: ReceiverSpec
    ):
        control.start_receiver(spec, deadline=soon())
        assert parse(ReceiverSpec, fake.state.bodies("/nccl/start_receiver")[0]) == spec

    def test_what_is_read_of_receiver_and_parameters(self, control: ServerControl):
        assert control.receiver_status(deadline=soon()).state == "connected"
        info = control.state_dict_info(deadline=soon())["w"]
        assert (info.shape, info.dtype, info.device) == ((2, 3), "bfloat16", "cpu")

    def test_an_engine_of_another_run_is_refused(self, fake: FakeServer, control: ServerControl):
        control.claim("first", deadline=soon())
        with pytest.raises(Refused, match="belongs to first") as caught:
            control.claim("second", deadline=soon())
        assert caught.value.status == 409 and "take it over" in caught.value.remedy
        control.claim("second", takeover=True, deadline=soon())
        assert fake.state.owner == "second"


class TestTokens:
    def test_of_the_session_file(self, fake: FakeServer):
        write_session(new_session(host="127.0.0.1", port=fake.port, token="secret"))
        ServerControl(fake.url).set_version(1, deadline=soon())
        assert fake.state.version == 1

    def test_of_the_environment(self, fake: FakeServer, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        ServerControl(fake.url).set_version(1, deadline=soon())
        assert fake.state.version == 1

    def test_there_is_none(self, fake: FakeServer):
        with pytest.raises(EngineError, match="no token is known") as caught:
            ServerControl(fake.url).set_version(1, deadline=soon())
        assert TOKEN_VARIABLE in caught.value.remedy and fake.state.version == 0

    def test_a_wrong_one_is_tried_once(self, fake: FakeServer):
        control = ServerControl(fake.url, token="wrong")
        with pytest.raises(Refused, match="no valid token") as caught:
            control.set_version(1, deadline=soon())
        assert caught.value.status == 401 and fake.state.version == 0

    def test_a_server_started_again_has_another(self, fake: FakeServer):
        control = ServerControl(fake.url)
        write_session(new_session(host="127.0.0.1", port=fake.port, token="secret"))
        control.set_version(1, deadline=soon())
        fake.state.token = "other"
        write_session(new_session(host="127.0.0.1", port=fake.port, token="other"))
        control.set_version(2, deadline=soon())
        assert [body["weight_version"] for body in fake.state.bodies("/bridge/set_version")] == [1, 2]


class TestFailures:
    def test_the_servers_words_are_kept(self, fake: FakeServer, control: ServerControl):
        fake.state.replies["/lora/load"] = lambda body: refusal(422, "rank 32 is too much", remedy="lower lora.r")
        with pytest.raises(Refused) as caught:
            control.load_adapter(Path("x"), name="policy", version=1, deadline=soon())
        assert caught.value.status == 422 and caught.value.remedy == "lower lora.r"
        assert "rank 32 is too much" in caught.value.message and fake.url in caught.value.message

    @pytest.mark.parametrize(
        ("kind", "error"),
        [
            ("StaleWeights", StaleWeights),
            ("DeadlineExceeded", DeadlineExceeded),
            ("Whatever", EngineError),
            ("EngineUnreachable", EngineUnreachable),
        ],
    )
    def test_its_own_failures(self, fake: FakeServer, control: ServerControl, kind: str, error: type[Exception]):
        fake.state.replies["/nccl/receive"] = lambda body: refusal(500, "it broke", kind=kind)
        with pytest.raises(error, match="it broke") as caught:
            control.receive(1, deadline=soon())
        assert type(caught.value) is error

    @pytest.mark.parametrize(
        ("reply", "said"),
        [
            (PlainTextResponse("Bad Gateway", status_code=502), "Bad Gateway"),
            (JSONResponse({"detail": "some detail"}, status_code=500), "some detail"),
            (JSONResponse({"error": "text"}, status_code=503), "text"),
            (Response(status_code=500), "Internal Server Error"),
            (JSONResponse([1, 2]), "not a JSON object"),
            (PlainTextResponse("<html>"), "<html>"),
            (JSONResponse({"logprobs": [-1.0]}), "'weight_version' is missing"),
            (JSONResponse({"logprobs": "x", "weight_version": 1, "session_id": "s"}), "'logprobs' is \"x\""),
        ],
    )
    def test_answers_of_other_servers(self, fake: FakeServer, control: ServerControl, reply: Response, said: str):
        fake.state.replies["/bridge/canary"] = lambda body: reply
        with pytest.raises(EngineError, match=said):
            control.canary([1, 2], deadline=soon())

    @pytest.mark.parametrize("call", ["info", "state_dict_info", "receiver_status", "prove"])
    def test_answers_that_are_not_whole(self, fake: FakeServer, control: ServerControl, call: str):
        asked = ([1, 2], DigestRequest(slices={}, adapter=True)) if call == "prove" else ()
        for route in ("/bridge/info", "/bridge/state_dict_info", "/nccl/status", "/bridge/prove"):
            fake.state.replies[route] = lambda body: JSONResponse({"digests": {"a": "xyz"}, "param_mappings": {"a": 1}})
        with pytest.raises(EngineError, match="gave an unexpected answer"):
            getattr(control, call)(*asked, deadline=soon())

    def test_a_server_of_another_kind(self, fake: FakeServer, control: ServerControl):
        control.url += "/elsewhere"
        with pytest.raises(Refused, match=r"no route /bridge/info: it is not an inference server") as caught:
            control.info(deadline=soon())
        assert "lachesis serve" in caught.value.remedy

    @pytest.mark.usefixtures("no_pause_before_trying_again")
    def test_nobody_listens(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
            for call in (
                ServerControl(url).info,
                lambda deadline: ServerControl(url, token="t").resume(deadline=deadline),
            ):
                with pytest.raises(EngineError, match=f"{url} does not answer.*has not answered this process before"):
                    call(deadline=soon())

    @pytest.mark.usefixtures("no_pause_before_trying_again")
    def test_a_server_that_died_is_named_with_its_last_state(self, fake: FakeServer, control: ServerControl):
        fake.state.version = 7
        control.info(deadline=soon())
        fake.stop()
        with pytest.raises(
            EngineError, match=r"does not answer.*last seen .* at weight version 7, session fake-session"
        ):
            control.canary([1, 2], deadline=soon())

    def test_a_deadline_names_the_wait(self, fake: FakeServer, control: ServerControl):
        answered = threading.Event()

        async def never(body: dict[str, Any]) -> Response:
            await asyncio.to_thread(answered.wait, LONG_S)
            return JSONResponse({})

        fake.state.replies["/nccl/receive"] = never  # type: ignore[assignment]
        with pytest.raises(
            DeadlineExceeded, match=r"the test took longer than.*/nccl/receive has not answered"
        ) as caught:
            control.receive(1, deadline=soon(0.5))
        answered.set()
        assert "deadlines.sync_s" in caught.value.remedy

    def test_a_deadline_that_has_passed_sends_nothing(self, fake: FakeServer, control: ServerControl):
        with pytest.raises(DeadlineExceeded, match="no time was left for a request"):
            control.set_version(1, deadline=soon(-1.0))
        assert fake.state.requests == []

    def test_a_closed_one(self, control: ServerControl):
        control.close()
        control.close()
        with pytest.raises(EngineError, match="closed"):
            control.info(deadline=soon())


class _Hanging:
    """Accepts connections, reads a request from each, and closes them; the last one is answered."""

    def __init__(self, answer_after: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests = 0
        self._answer_after = answer_after
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self.requests <= self._answer_after:
            connection, _ = self._listener.accept()
            with connection:
                connection.recv(1 << 16)
                self.requests += 1
                if self.requests > self._answer_after:
                    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 25\r\n\r\n{"status": "idle", "a":1}')


class TestBrokenConnections:
    def test_reading_is_tried_again_once(self):
        server = _Hanging(answer_after=1)
        assert ServerControl(server.url).receiver_status(deadline=soon()).state == "idle"
        assert server.requests == 2
        with pytest.raises(EngineError, match="does not answer"):
            ServerControl(_Hanging(answer_after=2).url).receiver_status(deadline=soon())

    def test_a_change_is_never_sent_twice(self):
        server = _Hanging(answer_after=1)
        with pytest.raises(EngineError, match="does not answer"):
            ServerControl(server.url, token="t").receive(1, deadline=soon())
        assert server.requests == 1
