"""One engine out of several servers: generation, agreement, and what becomes of servers that fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from lachesis.common.deadline import Deadline
from lachesis.common.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    EngineUnreachable,
    RewardError,
    StaleWeights,
    StopRequested,
)
from lachesis.common.types import Completion, GenerationRequest, SamplingParams, VersionSpan
from lachesis.engines.fleet import State
from lachesis.engines.http import client, dispatch
from lachesis.engines.http.client import HttpEngine
from lachesis.engines.http.control import ServerControl, ServerInfo
from lachesis.engines.http.dispatch import request_body
from lachesis.engines.serving import operations as ops
from lachesis.engines.serving.backend import Refused
from tests.unit.engines.fake_server import FakeServer, refusal
from tests.waiting import LONG_S, until

PROMPT = (15, 16, 17)
Make = Callable[..., FakeServer]


def soon(seconds: float = LONG_S) -> Deadline:
    return Deadline("the test", seconds, "deadlines.generation_s")


def asking(count: int, *, n: int = 1, max_tokens: int = 5) -> list[GenerationRequest]:
    return [GenerationRequest((1, i), SamplingParams(max_tokens), n=n, seed=i) for i in range(count)]


def saying(server: FakeServer, **fields: Any) -> Callable[[dict[str, Any]], Coroutine[Any, Any, Response]]:
    """What its /generate answers, and these fields."""

    async def reply(body: dict[str, Any]) -> Response:
        return JSONResponse(await server.generate(body) | fields)

    return reply


@pytest.fixture
def make_engine() -> Iterator[Callable[..., HttpEngine]]:
    made: list[HttpEngine] = []

    def make(*servers: FakeServer, **settings: Any) -> HttpEngine:
        made.append(HttpEngine([server.url for server in servers], token="secret", control_s=LONG_S, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def pair(make_server: Make) -> list[FakeServer]:
    return [make_server(session_id="one"), make_server(session_id="two")]


@pytest.fixture
def engine(fake: FakeServer, make_engine: Callable[..., HttpEngine]) -> HttpEngine:
    return make_engine(fake)


@pytest.fixture
def both(pair: list[FakeServer], make_engine: Callable[..., HttpEngine]) -> HttpEngine:
    return make_engine(*pair)


class LateServers(HttpEngine):
    """Servers that give no answer the first ``absent`` times that they are asked."""

    absent = 0

    def connect(self, *, deadline: Deadline) -> tuple[ServerInfo, ...]:
        if self.absent:
            self.absent -= 1
            raise self.controls[0].unreachable(ConnectionRefusedError("nobody listens"))
        return super().connect(deadline=deadline)


class TestServersThatAreNotUpYet:
    @pytest.fixture
    def late(self, fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateServers]:
        monkeypatch.setattr(client, "_AGAIN_S", 0.0)
        engine = LateServers([fake.url], token="secret")
        engine.absent = 3
        yield engine
        engine.close()

    def test_they_are_waited_for_and_the_log_says_so_once(self, late: LateServers, caplog: pytest.LogCaptureFixture):
        with caplog.at_level("WARNING", logger="lachesis"):
            (info,) = late.connect_when_up(wait_s=60.0, deadline=soon())
        assert info.session_id == late.session_id
        (said,) = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
        assert late.controls[0].url in said and "nobody listens" in said and "for up to 60 s" in said

    def test_who_does_not_want_to_wait_any_more_is_asked_meanwhile(self, late: LateServers):
        def stop() -> None:
            if late.absent == 1:
                raise StopRequested("asked to")

        with pytest.raises(StopRequested, match="asked to"):
            late.connect_when_up(wait_s=60.0, deadline=Deadline("the start", 60.0, watch=stop))
        assert late.absent == 1

    def test_without_a_wait_the_first_silence_is_an_error(self, late: LateServers):
        with pytest.raises(EngineUnreachable, match="nobody listens"):
            late.connect_when_up(wait_s=0.0, deadline=soon())
        assert late.absent == 2

    def test_what_a_server_says_is_not_asked_for_again(self, pair: list[FakeServer], make_engine: Any):
        pair[1].state.model = "another"
        with pytest.raises(EngineError, match="serve different models"):
            make_engine(*pair).connect_when_up(wait_s=60.0, deadline=soon())


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class TestGeneration:
    def test_completions_are_whole_and_in_order(self, fake: FakeServer, engine: HttpEngine):
        fake.state.version = 3
        results = engine.generate(asking(5, n=3), deadline=soon())
        assert [len(group) for group in results] == [3] * 5
        for completion in [completion for group in results for completion in group]:
            assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 5
            assert completion.finish_reason == ("length" if len(completion.token_ids) == 5 else "stop")
            assert completion.versions == VersionSpan(3, 3)
        alone = engine.generate(asking(5, n=3)[2:3], deadline=soon())
        assert alone == results[2:3], "equal seeds give equal completions"

    def test_no_requests(self, fake: FakeServer, engine: HttpEngine):
        assert engine.generate([], deadline=soon()) == []
        assert fake.state.requests == []

    def test_no_texts_are_asked_for(self, fake: FakeServer, engine: HttpEngine):
        engine.generate(asking(2), deadline=soon())
        assert [body["text"] for body in fake.state.bodies("/generate")] == [False, False]

    @pytest.mark.parametrize(
        ("conversation", "sent"),
        [("", None), ("a-1_b.c:d/e", "a-1_b.c:d/e"), ("zwei Wörter\r\nX: y", "zwei%20W%C3%B6rter%0D%0AX:%20y")],
    )
    def test_a_router_in_front_is_told_the_conversation(
        self, fake: FakeServer, engine: HttpEngine, conversation: str, sent: str | None
    ):
        one = GenerationRequest(PROMPT, SamplingParams(2), conversation=conversation)
        engine.generate([one], deadline=soon())
        assert fake.state.conversations == [sent]

    def test_what_is_sent(self):
        def sent(request: GenerationRequest):
            return json.loads(json.dumps(request_body(request)))

        plain = GenerationRequest(PROMPT, SamplingParams(7, temperature=0.5), n=2, seed=9)
        body = {
            "prompt_token_ids": [15, 16, 17],
            "n": 2,
            "seed": 9,
            "max_tokens": 7,
            "temperature": 0.5,
            "skip_special_tokens": False,
        }
        assert sent(plain) == body
        params = SamplingParams(
            7, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, stop_token_ids=(4,), stop=("x",),
            min_tokens=2, presence_penalty=0.1, frequency_penalty=0.2, guided_regex="a+", extra={"bad_words": ["b"]},
        )  # fmt: skip
        cut = {
            "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [4], "stop": ["x"],
            "min_tokens": 2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "structured_outputs": {"regex": "a+"},
            "bad_words": ["b"],
        }  # fmt: skip
        assert sent(GenerationRequest(PROMPT, params, n=2, seed=9)) == body | cut

    def test_a_refused_request_fails_the_call_and_ends_the_others(self, fake: FakeServer, engine: HttpEngine):
        fake.hold()
        asked = [*asking(3), GenerationRequest(PROMPT, SamplingParams(5), seed=99)]

        def reply(body: dict[str, Any]) -> Any:
            return refusal(400, "the prompt does not fit", remedy="shorten it") if body["seed"] == 99 else usual(body)

        usual = fake.generate
        fake.state.replies["/generate"] = reply
        with pytest.raises(Refused, match="does not fit") as caught:
            engine.generate(asked, deadline=soon())
        assert caught.value.remedy == "shorten it"

    @pytest.mark.parametrize(
        "change",
        [
            {"token_ids": [[1, 2]], "token_logprobs": [[-1.0]]},
            {"token_logprobs": [[None, None]]},
            {"token_logprobs": [[1e999, -1.0]]},
            {"finish_reasons": ["because"]},
            {"finish_reasons": []},
            {"weight_version": [1]},
            {"session_id": ...},
        ],
        ids=str,
    )
    def test_an_answer_that_is_not_whole(self, fake: FakeServer, engine: HttpEngine, change: dict[str, Any]):
        whole = {
            "token_ids": [[1, 2]],
            "token_logprobs": [[-1.0, -1.0]],
            "finish_reasons": ["stop"],
            "weight_version": [{"first": 0, "last": 0}],
            "session_id": "fake-session",
        }
        fake.state.replies["/generate"] = lambda body: JSONResponse(whole)
        request = [GenerationRequest(PROMPT, SamplingParams(5))]
        assert engine.generate(request, deadline=soon()) == [
            [Completion((1, 2), (-1.0, -1.0), "stop", VersionSpan(0, 0))]
        ]
        answer = {name: value for name, value in (whole | change).items() if value is not ...}
        fake.state.replies["/generate"] = lambda body: _loose_json(answer)
        with pytest.raises(EngineError, match="/generate gave an unexpected answer"):
            engine.generate(request, deadline=soon())

    def test_a_deadline_returns_nothing_and_ends_the_requests(self, fake: FakeServer, engine: HttpEngine):
        engine.connect(deadline=soon())
        fake.hold()
        with pytest.raises(DeadlineExceeded, match=r"the test took longer.*0 of 3 requests finished") as caught:
            engine.generate(asking(3), deadline=soon(0.3))
        assert "deadlines.generation_s" in caught.value.remedy
        fake.release()
        assert len(engine.generate(asking(1), deadline=soon())) == 1

    def test_a_deadline_that_has_passed_sends_nothing(self, fake: FakeServer, engine: HttpEngine):
        engine.connect(deadline=soon())
        with pytest.raises(DeadlineExceeded, match="nothing was sent"):
            engine.generate(asking(1), deadline=soon(-1.0))
        assert fake.state.bodies("/generate") == []

    @pytest.mark.usefixtures("no_pause_before_trying_again")
    def test_a_server_that_dies_is_an_error_with_its_last_state(self, fake: FakeServer, engine: HttpEngine):
        fake.state.version = 4
        engine.generate(asking(1), deadline=soon())
        fake.stop()
        with pytest.raises(EngineError, match=f"{fake.url} does not answer.*generating at weight version 4"):
            engine.generate(asking(3), deadline=soon())

    def test_a_server_started_again_is_noticed_by_its_answers(self, fake: FakeServer, engine: HttpEngine):
        engine.connect(deadline=soon())
        fake.state.session_id = "another"
        with pytest.raises(StaleWeights, match="has session another, but this run works with fake-session"):
            engine.generate(asking(1), deadline=soon())
        engine.connect(deadline=soon())
        assert len(engine.generate(asking(1), deadline=soon())) == 1


class TestManyAtOnce:
    def test_all_slots_are_used_and_no_more(
        self, fake: FakeServer, make_engine: Callable[..., HttpEngine], threads: ThreadPoolExecutor
    ):
        engine = make_engine(fake, max_in_flight=6)
        fake.hold()
        calls = [threads.submit(engine.generate, asking(4), deadline=soon()) for _ in range(3)]
        arrive(fake, 6)
        assert fake.state.in_flight == 6
        fake.release()
        assert [len(call.result(LONG_S)) for call in calls] == [4, 4, 4]
        assert fake.state.most_in_flight == 6

    def test_the_least_busy_server_gets_the_next(
        self, pair: list[FakeServer], both: HttpEngine, threads: ThreadPoolExecutor
    ):
        for server in pair:
            server.hold()
        call = threads.submit(both.generate, [*asking(1, n=8), *asking(6, n=2)], deadline=soon())
        arrive(pair[0], 2)
        arrive(pair[1], 5)
        assert [server.state.in_flight for server in pair] == [2, 5], "8 + 2 and 5 x 2 sequences"
        for server in pair:
            server.release()
        assert len(call.result(LONG_S)) == 7

    def test_turns_of_a_conversation_go_to_the_engine_that_has_it(self, pair: list[FakeServer], both: HttpEngine):
        def turn(number: int, name: str) -> list[GenerationRequest]:
            prompt = (len(name), *range(number + 1))
            return [GenerationRequest(prompt, SamplingParams(5), seed=number, conversation=name)]

        for number in range(4):
            both.generate([*turn(number, "a"), *turn(number, "bc")], deadline=soon())
        prompts = [[body["prompt_token_ids"][0] for body in server.state.bodies("/generate")] for server in pair]
        assert sorted(map(tuple, map(set, prompts))) == [(1,), (2,)] and [len(one) for one in prompts] == [4, 4]

    def test_each_request_is_told_of_as_soon_as_it_is_complete(self, fake: FakeServer, engine: HttpEngine):
        told: list[tuple[int, list[Completion]]] = []
        second = threading.Event()

        async def after_the_second(body: dict[str, Any]) -> Any:
            assert await asyncio.to_thread(second.wait, LONG_S), "it was not told of while the first was under way"
            return await fake.generate(body)

        def finished(index: int, completions: list[Completion]) -> None:
            told.append((index, completions))
            if index == 1:
                second.set()

        fake.state.replies["/generate"] = lambda body: (
            after_the_second(body) if body["seed"] == 0 else fake.generate(body)
        )
        results = engine.generate(asking(2, n=3), deadline=soon(), finished=finished)
        assert told == [(1, results[1]), (0, results[0])]

    def test_who_is_told_may_end_the_call(self, fake: FakeServer, engine: HttpEngine):
        async def never(body: dict[str, Any]) -> Any:
            await asyncio.Event().wait()

        def finished(index: int, completions: list[Completion]) -> None:
            raise RewardError("what was generated cannot be used")

        fake.state.replies["/generate"] = lambda body: never(body) if body["seed"] else fake.generate(body)
        with pytest.raises(RewardError, match="cannot be used"):
            engine.generate(asking(3), deadline=soon(), finished=finished)
        fake.gone(2)
        del fake.state.replies["/generate"]
        assert len(engine.generate(asking(1), deadline=soon())) == 1

    def test_closing_ends_what_is_in_flight(self, fake: FakeServer, engine: HttpEngine, threads: ThreadPoolExecutor):
        fake.hold()
        calls: list[Future[Any]] = [threads.submit(engine.generate, asking(2), deadline=soon()) for _ in range(3)]
        arrive(fake, 6)
        engine.close()
        for call in calls:
            with pytest.raises(EngineError, match="closed during generation"):
                call.result(LONG_S)

    def test_an_interrupted_call_leaves_nothing_in_flight(
        self, fake: FakeServer, engine: HttpEngine, monkeypatch: pytest.MonkeyPatch
    ):
        engine.connect(deadline=soon())
        fake.hold()
        waits = Future.result

        def interrupted(self: Future[Any], timeout: float | None = None) -> Any:
            arrive(fake, 2)
            raise KeyboardInterrupt

        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(asking(2), deadline=soon())
        monkeypatch.setattr(Future, "result", waits)
        fake.gone(2)
        fake.release()
        assert len(engine.generate(asking(1), deadline=soon())) == 1


@pytest.mark.usefixtures("no_pause_before_trying_again")
class TestLosses:
    """The requests of a server that is lost go to another one, as they were."""

    def test_a_dead_servers_requests_go_to_the_other(
        self, pair: list[FakeServer], both: HttpEngine, threads: ThreadPoolExecutor
    ):
        pair[1].hold()
        told: list[int] = []
        call = threads.submit(both.generate, asking(6), deadline=soon(), finished=lambda i, _: told.append(i))
        arrive(pair[1], 1)
        lost = [body["seed"] for body in pair[1].state.bodies("/generate")]
        pair[1].stop()
        assert [len(completions) for completions in call.result(LONG_S)] == [1] * 6
        assert sorted(told) == [*range(6)], "none is lost, and none is told of twice"
        taken = [body["seed"] for body in pair[0].state.bodies("/generate")]
        assert lost and sorted(taken) == [*range(6)]
        assert len(both.generate(asking(4), deadline=soon())) == 4, "the others go on"
        assert pair[0].state.most_in_flight <= 6

    def test_one_that_was_started_again_gets_nothing_more(self, pair: list[FakeServer], both: HttpEngine):
        both.connect(deadline=soon())
        pair[0].state.session_id = "another"
        assert len(both.generate(asking(4), deadline=soon())) == 4
        until(lambda: both.fleet.state(pair[0].url) is State.DEAD, "it was not looked at")
        assert "restarted" in both.fleet.reason(pair[0].url)

    def test_one_that_generates_nothing_is_given_up_although_it_answers(
        self, pair: list[FakeServer], make_engine: Callable[..., HttpEngine], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(dispatch, "_LOOK_S", 0.05)
        engine = make_engine(*pair, hang_s=0.3)
        pair[0].hold()
        pair[0].state.generated_tokens = 5
        assert len(engine.generate(asking(4), deadline=soon())) == 4
        assert engine.fleet.state(pair[0].url) is State.DEAD
        assert "generated nothing for" in engine.fleet.reason(pair[0].url)
        assert len(pair[1].state.bodies("/generate")) == 4

    def test_where_none_is_left_the_last_says_why(self, pair: list[FakeServer], both: HttpEngine):
        both.connect(deadline=soon())
        for server in pair:
            server.stop()
        with pytest.raises(EngineUnreachable, match="does not answer"):
            both.generate(asking(4), deadline=soon())

    def test_what_every_server_fails_at_fails(self, pair: list[FakeServer], both: HttpEngine):
        for server in pair:
            server.state.replies["/generate"] = lambda body: refusal(500, "out of memory", kind="EngineError")
        with pytest.raises(EngineError, match="out of memory"):
            both.generate(asking(1), deadline=soon())
        assert sum(len(server.state.bodies("/generate")) for server in pair) == 2

    def test_a_server_that_is_gone_is_left_out_of_what_all_are_asked(self, pair: list[FakeServer], both: HttpEngine):
        both.connect(deadline=soon())
        pair[0].stop()
        both.set_version(3)
        assert (both.fleet.state(pair[0].url), pair[1].state.version) == (State.DEAD, 3)
        assert both.canary(PROMPT).version == 3

    def test_only_who_is_proved_serves_where_a_version_is_required(self, pair: list[FakeServer], both: HttpEngine):
        both.connect(deadline=soon())
        both.fleet.proved(pair[1].url, "two", 4)
        both.fleet.require(4)
        both.generate(asking(5), deadline=soon())
        assert (len(pair[0].state.bodies("/generate")), len(pair[1].state.bodies("/generate"))) == (0, 5)
        both.fleet.require(5)
        with pytest.raises(EngineUnreachable, match=r"no engine can serve: .* is stale; .* is stale"):
            both.generate(asking(1), deadline=soon())


class TestAgreement:
    def test_sessions_come_in_the_order_of_the_servers(self, both: HttpEngine):
        assert (both.session_ids, both.session_id) == (("one", "two"), "one,two")
        reading = both.canary(PROMPT)
        assert (reading.logprobs, reading.version, reading.session_id) == ((-1.0, -1.0), 0, "one,two")
        assert both.health().session_id == "one,two"

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"version": 1}, "different weight versions"),
            ({"session_id": "three"}, "has session three, but this run works with two"),
            ({"canary": -1.1}, "differ by up to 0.1 "),
        ],
        ids=str,
    )
    def test_a_canary_on_which_they_differ(
        self, pair: list[FakeServer], both: HttpEngine, change: dict[str, Any], said: str
    ):
        both.connect(deadline=soon())
        for name, value in change.items():
            setattr(pair[1].state, name, value)
        with pytest.raises(StaleWeights, match=said) as caught:
            both.canary(PROMPT)
        assert pair[1].url in caught.value.message

    def test_a_canary_that_is_cut(self, pair: list[FakeServer], both: HttpEngine):
        pair[1].state.replies["/bridge/canary"] = lambda body: JSONResponse(
            {"logprobs": [-1.0], "weight_version": 0, "session_id": "two"}
        )
        with pytest.raises(StaleWeights, match="differ by up to inf"):
            both.canary(PROMPT)

    def test_a_tolerance(self, pair: list[FakeServer], make_engine: Callable[..., HttpEngine]):
        pair[1].state.canary = -1.1
        assert make_engine(*pair, canary_tolerance=0.2).canary(PROMPT).logprobs == (-1.0, -1.0)

    def test_servers_of_different_models(self, pair: list[FakeServer], both: HttpEngine):
        pair[1].state.model = "other"
        with pytest.raises(EngineError, match="different models"):
            both.connect(deadline=soon())


class TestControl:
    def test_versions_pauses_and_claims_reach_all(self, pair: list[FakeServer], both: HttpEngine):
        both.claim("run", deadline=soon())
        both.set_version(5)
        both.pause(mode="drain")
        assert [(s.state.owner, s.state.version, s.state.paused) for s in pair] == [("run", 5, True)] * 2
        health = both.health()
        assert (health.ready, health.paused, health.version) == (False, True, 5)
        assert pair[0].url in health.detail and "paused" in health.detail
        both.resume()
        both.resume()
        assert both.health().ready
        both.release("run", deadline=soon())
        assert [s.state.owner for s in pair] == [None, None]
        both.on_all(lambda server: server.call(ops.SLEEP, ops.Sleep(), deadline=soon()))
        assert [s.state.sleeping for s in pair] == [True, True] and "asleep" in both.health().detail

    def test_all_servers_are_called_at_the_same_time(self, both: HttpEngine):
        barrier = threading.Barrier(2, timeout=LONG_S)
        assert sorted(both.on_all(lambda server: barrier.wait())) == [0, 1]

    def test_the_first_error_is_not_kept_waiting_for_the_others(self, both: HttpEngine):
        blocked = threading.Event()

        def call(server: Any) -> None:
            if server is both.controls[1]:
                raise EngineError("it broke")
            blocked.wait(LONG_S)

        with pytest.raises(EngineError, match="it broke"):
            both.on_all(call)
        blocked.set()

    def test_if_one_cannot_be_paused_none_stays_so(self, pair: list[FakeServer], both: HttpEngine):
        pair[1].state.replies["/bridge/pause"] = lambda body: refusal(500, "no pause")
        with pytest.raises(EngineError, match="no pause"):
            both.pause()
        assert not pair[0].state.paused

    def test_it_says_how_long_each_was_at_work(self, pair: list[FakeServer], both: HttpEngine):
        both.connect(deadline=soon())
        both.generate(asking(2), deadline=soon())
        expected = {f"generation_time/{server.url.removeprefix('http://')}" for server in pair}
        found = both.metrics()
        assert found.keys() == expected
        assert all(0 < value.value() < LONG_S for value in found.values())
        assert {value.value() for value in both.metrics().values()} == {0.0}, "nothing since then"

    def test_hits_in_prefix_caches_are_of_all_servers_and_of_each(self, pair: list[FakeServer], both: HttpEngine):
        cached = {pair[0].url: [0, 2], pair[1].url: [1, None]}
        for server in pair:
            server.state.replies["/generate"] = saying(server, cached_tokens=cached[server.url])
        both.generate(asking(2, n=2), deadline=soon())
        shares = {name: value.value() for name, value in both.metrics().items() if name.startswith("prefix_cache")}
        addresses = [server.url.removeprefix("http://") for server in pair]
        length = len(asking(1)[0].prompt_ids)
        assert shares == pytest.approx({
            "prefix_cache_hit_rate": 3 / (3 * length),
            f"prefix_cache_hit_rate/{addresses[0]}": 2 / (2 * length),
            f"prefix_cache_hit_rate/{addresses[1]}": 1 / length,
        })  # fmt: skip
        assert not [name for name in both.metrics() if name.startswith("prefix_cache")], "nothing since then"

    def test_cached_tokens_of_another_number_of_completions_are_no_answer(
        self, pair: list[FakeServer], both: HttpEngine
    ):
        for server in pair:
            server.state.replies["/generate"] = saying(server, cached_tokens=[1])
        with pytest.raises(EngineError, match="cached_tokens of 1 completions for a request of 2"):
            both.generate(asking(1, n=2), deadline=soon())

    def test_health_of_servers_that_differ(self, pair: list[FakeServer], both: HttpEngine):
        both.connect(deadline=soon())
        pair[1].state.version = 2
        pair[1].state.session_id = "three"
        health = both.health()
        assert not health.ready and health.version == 0
        assert "versions 0, 2" in health.detail and "restarted" in health.detail

    @pytest.mark.usefixtures("no_pause_before_trying_again")
    def test_health_of_a_dead_server(self, pair: list[FakeServer], both: HttpEngine):
        both.connect(deadline=soon())
        pair[1].stop()
        health = both.health()
        assert not health.ready and health.session_id == "one,two"
        assert f"{pair[1].url} does not answer" in health.detail and "last seen" in health.detail
        assert health.others_serve
        pair[0].state.session_id = "restarted"
        assert not both.health().others_serve


@pytest.mark.parametrize("urls", [[], ["http://127.0.0.1:1", "http://127.0.0.1:1/v1"], ["nonsense"]])
def test_addresses_that_make_no_engine(urls: list[str]):
    with pytest.raises(ConfigError):
        HttpEngine(urls)


def test_a_closed_engine_stays_closed(engine: HttpEngine):
    engine.generate(asking(1), deadline=soon())
    engine.close()
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: engine.generate([], deadline=soon()),
        lambda: engine.canary(PROMPT),
        lambda: engine.set_version(1),
        engine.health,
        engine.pause,
        engine.resume,
    ]
    for call in calls:
        with pytest.raises(EngineError, match="closed"):
            call()


def arrive(server: FakeServer, count: int) -> None:
    """Wait until so many requests have reached /generate since the last call of this."""
    for _ in range(count):
        assert server.state.arrived.acquire(timeout=LONG_S), "a request did not arrive"


def _loose_json(document: Any) -> Any:
    """JSON with Infinity, as Python writes and reads it."""
    return Response(json.dumps(document), media_type="application/json")


class TestServersThatAreGivenUp:
    """A server that is stopped accepts what it is sent, and answers when it is resumed, or never."""

    @pytest.fixture
    def stopped(self, pair: list[FakeServer], both: HttpEngine) -> Iterator[threading.Event]:
        both.connect(deadline=soon())
        answers = threading.Event()
        threading.Timer(0.2, both.fleet.given_up, (pair[1].url, "it is stopped by a signal")).start()
        yield answers
        answers.set()

    def version(self, stopped: threading.Event) -> Callable[[ServerControl], None]:
        def call(server: ServerControl) -> None:
            if server.url.endswith(self.last):
                assert stopped.wait(LONG_S)

        return call

    last = ""

    def test_the_others_are_not_held_up(self, pair: list[FakeServer], both: HttpEngine, stopped, caplog):
        self.last = pair[1].url
        assert both.on_all(self.version(stopped)) == [None]
        assert both.urls == tuple(server.url for server in pair) and [one.url for one in both.living] == [pair[0].url]
        assert caplog.messages == [
            f"the engine at {self.last} is gone and the others continue: the run has given up the "
            f"engine at {self.last}: it is stopped by a signal"
        ]

    def test_those_that_go_on_together_do_not_go_on(self, pair: list[FakeServer], both: HttpEngine, stopped):
        self.last = pair[1].url
        with pytest.raises(EngineUnreachable, match=r"has given up the engine at .*: it is stopped by a signal"):
            both.on_all(self.version(stopped), together=True)

    def test_the_last_one_is_waited_for(self, pair: list[FakeServer], both: HttpEngine):
        both.connect(deadline=soon())
        for server in (*pair, *pair):
            both.fleet.given_up(server.url, "it is stopped by a signal")
        assert [one.url for one in both.living] == [pair[1].url]
