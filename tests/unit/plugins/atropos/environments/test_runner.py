"""Serving against the real rollout API: registration, staleness, what is lost and what must not be."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from lachesis.common.errors import ConfigError, DataError, DeadlineExceeded, EngineError, LachesisError
from lachesis.common.types import Message
from lachesis.plugins.atropos.api import backlog
from lachesis.plugins.atropos.environments import rollout_api as api_module
from lachesis.plugins.atropos.environments import runner as runner_module
from lachesis.plugins.atropos.environments.base import SingleTurn
from lachesis.plugins.atropos.environments.client import InferenceClient
from lachesis.plugins.atropos.environments.outputs import Counters, Outputs
from lachesis.plugins.atropos.environments.records import UsableGroup
from lachesis.plugins.atropos.environments.rollout_api import Membership, QueueStatus, RolloutApi, Sender
from lachesis.plugins.atropos.environments.runner import Runner, Summary
from lachesis.plugins.atropos.environments.settings import EnvironmentConfig, ServerConfig
from tests.ports import free_port
from tests.tiny import tiny_tokenizer
from tests.unit.plugins.atropos.api.processes import REGISTRATION
from tests.unit.plugins.atropos.environments.servers import Api, inference, logged_lines, rollout_api
from tests.waiting import LONG_S, until

TOKENIZER = tiny_tokenizer()
FOUR: dict[str, Any] = {
    "tokens": [[3, 5]] * 4, "masks": [[-100, 5]] * 4, "scores": [0.0, 1.0, 0.0, 1.0],
    "inference_logprobs": [[1.0, -0.5]] * 4,
}  # fmt: skip


class Numbers(SingleTurn[int, EnvironmentConfig]):
    """Problem n has the prompt [n % 90 + 3], scores rise with the place in the group."""

    name = "numbers"

    async def setup(self) -> None:
        self.given = 0

    async def get_next_item(self) -> int | None:
        self.given += 1
        return None if self.config.max_num is not None and self.given > self.config.max_num else self.given

    def prompt(self, item: int) -> tuple[Sequence[int], Sequence[Message]]:
        return [item % 90 + 3], [{"role": "user", "content": str(item)}]

    async def score(self, item: int, trajectories: Sequence[Any]) -> Sequence[float]:
        return [float(index) for index in range(len(trajectories))]

    def held_out(self) -> Sequence[int]:
        return [1, 2]


class Serving:
    """An environment that is served in a thread. ``lines`` is what it said."""

    def __init__(self, url: str, api: str, *, kind: type[Any] = Numbers, **config: Any) -> None:
        self.lines: list[str] = []
        self.summary: Summary | None = None
        self.error: LachesisError | None = None
        self._config = kind.config_class(**{"rollout_server_url": api, "max_token_length": 16, **config})
        self._kind, self._url = kind, url
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(LONG_S)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        client = InferenceClient(ServerConfig(base_url=(self._url,)))
        environment = self._kind(self._config, client=client, tokenizer=TOKENIZER)
        api = RolloutApi(self._config.rollout_server_url, wait_s=self._config.wait_timeout)
        outputs = Outputs(log_dir=self._config.log_dir, groups_path=self._config.data_path_to_save_groups)
        self._started.set()
        try:
            with logged_lines() as self.lines:
                self.summary = await Runner(environment, api=api, outputs=outputs).serve(stop=self._stop)
        except LachesisError as error:
            self.error = error
        finally:
            outputs.close()
            await api.close()
            await client.close()

    def stop(self) -> Summary:
        self._ask_to_stop()
        return self.ended()

    def leave(self) -> None:
        """Stop, if it still runs, however it ends."""
        self._ask_to_stop()
        self._join()

    def _ask_to_stop(self) -> None:
        # Its loop is closed where it has ended by itself.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)

    def _join(self) -> None:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive(), self.lines

    def ended(self) -> Summary:
        self._join()
        if self.error is not None:
            raise self.error
        assert self.summary is not None
        return self.summary

    def heard(self, words: str) -> bool:
        return any(words in line for line in self.lines)


@pytest.fixture
def url() -> Iterator[str]:
    with inference(version=4) as (_, address):
        yield address


Serve = Callable[..., Serving]


@pytest.fixture
def serve(url: str) -> Iterator[Serve]:
    """Serves an environment until the test ends: it would go on to post to the API of the tests after it."""
    begun: list[Serving] = []

    def begin(api: str, *, at: str = url, **config: Any) -> Serving:
        begun.append(Serving(at, api, **config))
        return begun[-1]

    yield begin
    for serving in begun:
        serving.leave()


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[QueueStatus]:
    """What the API has said of its queue."""
    status, seen = RolloutApi.status, []

    async def kept(self: RolloutApi, env_id: int) -> QueueStatus:
        seen.append(await status(self, env_id))
        return seen[-1]

    monkeypatch.setattr(RolloutApi, "status", kept)
    return seen


@pytest.fixture(scope="module")
def lasting() -> Iterator[Api]:
    with rollout_api() as server:
        yield server


@pytest.fixture
def api(lasting: Api) -> Api:
    """A fresh start of the same server."""
    lasting.http.get("/reset_data").raise_for_status()
    return lasting


def test_a_run(serve: Serve, api: Api, tmp_path: Path) -> None:
    """From registration to the goodbye: what the trainer gets is what was sampled."""
    api.start(batch_size=8, num_steps=3)
    serving = serve(api.url, linger=0.0, log_dir=tmp_path, data_path_to_save_groups=tmp_path / "groups.jsonl")
    batches = [until(api.batch) for _ in range(3)]
    summary = serving.ended()
    assert summary.ended == "the trainer has taken its 3 batches" and summary.step == 3
    assert [len(batch) for batch in batches] == [2, 2, 2]
    group = batches[0][0]
    assert group["tokens"] == [[group["tokens"][0][0], 5, 2]] * 4
    assert group["masks"] == [[-100, 5, 2]] * 4
    assert group["inference_logprobs"] == [[1.0, -0.5, -0.5]] * 4
    assert group["scores"] == [0.0, 1.0, 2.0, 3.0]
    assert group["generation_params"] == {"temperature": 1.0}
    assert group["overrides"][0] == {"finish_reason": "stop", "weight_version": {"first": 4, "last": 4}}
    # It said goodbye, so its minimum and weight count no more.
    assert [environment["state"] for environment in api.get("/overview")["environments"]] == ["left"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["values"]["groups"] for line in lines) == summary.counters.groups >= 6
    assert lines[0]["values"]["score/mean"] == 1.5
    assert len((tmp_path / "groups.jsonl").read_text().splitlines()) == summary.counters.groups


def test_the_queue_is_never_more_batches_ahead_than_allowed(
    serve: Serve, api: Api, statuses: list[QueueStatus]
) -> None:
    api.start(batch_size=8)
    serving = serve(api.url, max_batches_offpolicy=2)
    looked_at_full(statuses, 4)
    assert len(api.batch() or ()) == 2
    looked_at_full(statuses, 4)
    summary = serving.stop()
    assert summary.ended == "it was asked to stop"
    assert api.get("/status")["queue_size"] == max(status.queue_size for status in statuses) == 4


def test_groups_that_arrive_behind_the_status_count(
    serve: Serve, api: Api, statuses: list[QueueStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each post is taken in after the queue was counted for a status and before that status is read."""
    api.start(batch_size=8)
    post, status = RolloutApi.post, RolloutApi.status
    held: list[tuple[asyncio.Event, asyncio.Event]] = []

    async def held_post(self: RolloutApi, groups: Sequence[Any]) -> Any:
        go, done = asyncio.Event(), asyncio.Event()
        held.append((go, done))
        await go.wait()
        reply = await post(self, groups)
        done.set()
        return reply

    async def overtaken_status(self: RolloutApi, env_id: int) -> QueueStatus:
        found = await status(self, env_id)
        if held:
            go, done = held.pop()
            go.set()
            await done.wait()
        return found

    monkeypatch.setattr(RolloutApi, "post", held_post)
    monkeypatch.setattr(RolloutApi, "status", overtaken_status)
    serve(api.url, max_batches_offpolicy=2)
    looked_at_full(statuses, 4)
    assert api.get("/status")["queue_size"] == max(status.queue_size for status in statuses) == 4


def looked_at_full(statuses: list[QueueStatus], size: int) -> None:
    """Wait until the queue was seen that long, and a few times more, so that a group too many would have come."""
    seen = len(statuses)
    until(lambda: sum(status.queue_size >= size for status in statuses[seen:]) > 5)


def test_waiting_for_the_trainer_has_a_line_and_an_end(serve: Serve, api: Api) -> None:
    serving = serve(api.url, wait_timeout=0.2)
    with pytest.raises(DeadlineExceeded, match="environment numbers: waiting for a trainer at"):
        serving.ended()
    assert serving.heard("waiting for a trainer to register at")


def test_a_trainer_that_stays_away_ends_it(serve: Serve, api: Api) -> None:
    api.start(batch_size=8)
    with pytest.raises(DeadlineExceeded, match="waiting for the trainer to take a batch"):
        serve(api.url, wait_timeout=0.3).ended()
    assert api.get("/status")["queue_size"] == 6


def test_waiting_for_the_trainer_is_said_from_time_to_time(serve: Serve, api: Api, monkeypatch) -> None:
    monkeypatch.setattr(runner_module, "_REPORT_S", 0.1)
    api.start(batch_size=8)
    serving = serve(api.url)
    until(lambda: serving.heard("(--env.wait_timeout): 6 groups are queued at step 0"))
    serving.stop()


def test_stopped_while_it_waits(serve: Serve, api: Api) -> None:
    serving = serve(api.url)
    until(lambda: serving.heard("waiting for a trainer"))
    assert serving.stop().counters.groups == 0


def test_no_api(serve: Serve) -> None:
    with pytest.raises(DeadlineExceeded, match=r"waiting for the rollout API at http://127.0.0.1:9 \(POST /register"):
        serve("http://127.0.0.1:9", wait_timeout=0.1).ended()


def test_an_api_that_forgot_everything_gets_a_new_registration(serve: Serve) -> None:
    """Killed and started anew without a state directory, while groups are on their way."""
    first = Api(port=free_port())
    first.start(batch_size=8)
    serving = serve(first.url)
    until(first.batch)
    first.stop()
    until(lambda: serving.heard("waiting for the rollout API"))
    with rollout_api(port=first.port) as second:
        until(lambda: serving.heard("registering again"))
        second.start(batch_size=8)
        assert {group["env_id"] for group in until(second.batch)} == {0}
        # What the second one put away for want of a registration was sent to it again.
        assert not serving.stop().counters.set_aside


def test_groups_of_a_registration_that_is_gone_are_sent_again(serve: Serve, api: Api, monkeypatch) -> None:
    """A post that comes before the status is asked for: the API sets it aside, it enters the queue after all."""
    api.start(batch_size=8)
    post, forgotten = RolloutApi.post, []

    async def late(self: RolloutApi, groups: Sequence[Any]) -> Any:
        if not forgotten:
            forgotten.append(len(groups))
            groups = [{**group, "env_id": 77} for group in groups]
        return await post(self, groups)

    monkeypatch.setattr(RolloutApi, "post", late)
    serving = serve(api.url, max_num=4)
    assert serving.ended().counters.groups == 4
    assert api.get("/status")["queue_size"] == 4 and not serving.summary.counters.set_aside


def test_a_full_queue_is_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "RETRY_AFTER_S", 0)
    with rollout_api(max_queued_tokens=120) as api:
        api.start(batch_size=8)
        serving = serve(api.url, max_num=8, max_batches_offpolicy=9)
        until(lambda: serving.heard("429") or api.get("/status")["queued_tokens"] > 60)
        taken: list[Any] = []
        until(lambda: taken.extend(api.batch() or ()) or len(taken) == 8)
        assert serving.ended().counters.groups == 8


def test_groups_that_do_not_fit_together_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued is no batch yet, so that the trainer cannot make room for all the others at once."""
    monkeypatch.setattr(backlog, "RETRY_AFTER_S", 0)
    limit, group = 200, UsableGroup(**FOUR)
    with rollout_api(max_queued_tokens=limit) as server:
        server.start(batch_size=8)

        async def work() -> int:
            api, outputs = RolloutApi(server.url, wait_s=LONG_S), Outputs(log_dir=None, groups_path=None)
            config, counters = EnvironmentConfig(max_token_length=16), Counters()
            membership = Membership(api, name="numbers", config=config)
            sender = Sender(api=api, membership=membership, config=config, outputs=outputs, counters=lambda: counters)
            sender.start()
            sender.put(group)
            while sender.pending:
                await asyncio.sleep(0.005)
            number = limit // server.get("/status")["queued_tokens"]
            for _ in range(number):
                sender.put(group)
            while sender.pending:
                server.batch()
                await asyncio.sleep(0.005)
            await sender.finish(limit_s=LONG_S)
            await api.close()
            return counters.groups - number

        assert asyncio.run(asyncio.wait_for(work(), LONG_S)) == 1


def test_what_the_api_sets_aside_is_counted(serve: Serve, api: Api) -> None:
    class Ragged(UsableGroup):
        def document(self, *, env_id: int | None = None) -> dict[str, Any]:
            return UsableGroup.document(self, env_id=env_id) | {"masks": [[1]] * self.size}

    class Careless(Numbers):
        async def collect_trajectories(self, item: int) -> UsableGroup | None:
            group = await super().collect_trajectories(item)
            assert group is not None
            kind = Ragged if item == 2 else UsableGroup
            return kind(
                tokens=group.tokens, masks=group.masks, scores=group.scores,
                inference_logprobs=group.inference_logprobs,
            )  # fmt: skip

    api.start(batch_size=8)
    serving = serve(api.url, kind=Careless, max_num=3)
    counters = serving.ended().counters
    assert (counters.groups, counters.set_aside.total()) == (2, 1)
    assert serving.heard("set a group aside: masks[0] has 1 entry, tokens[0] has 3")


def test_groups_that_are_not_sent(serve: Serve, api: Api) -> None:
    class Flat(Numbers):
        async def score(self, item: int, trajectories: Sequence[Any]) -> Sequence[float]:
            return [1.0] * len(trajectories)

    api.start(batch_size=8)
    serving = serve(api.url, kind=Flat, max_num=2, ensure_scores_are_not_same=True)
    assert serving.ended().counters.dropped.total() == 2 and serving.heard("all scores are the same")
    api.start(batch_size=8, max_token_len=3)
    serving = serve(api.url, max_num=2)
    assert serving.ended().counters.dropped.total() == 2 and serving.heard(
        "longer than the trainer's limit of 3 tokens"
    )
    assert api.get("/status")["queue_size"] == 0


@pytest.mark.parametrize("raised", [ValueError("odd"), DataError("odd")])
def test_failures_are_counted_and_many_in_a_row_end_it(serve: Serve, api: Api, raised: Exception) -> None:
    class Failing(Numbers):
        async def score(self, item: int, trajectories: Sequence[Any]) -> Sequence[float]:
            if item == 2 or item > 4:
                raise raised
            return await super().score(item, trajectories)

    api.start(batch_size=8)
    serving = serve(api.url, kind=Failing, max_num=4)
    counters = serving.ended().counters
    assert (counters.groups, counters.failures) == (3, 1) and serving.heard("odd")
    with pytest.raises(DataError, match="10 groups in a row failed"):
        serve(api.url, kind=Failing, max_batches_offpolicy=20).ended()


def test_a_group_that_takes_too_long_is_given_up(serve: Serve, api: Api) -> None:
    class Slow(Numbers):
        async def collect_trajectories(self, item: int) -> UsableGroup | None:
            if item == 1:
                await asyncio.Event().wait()
            # Made without a wait, so that it cannot take too long on any machine.
            return UsableGroup(**FOUR)

    api.start(batch_size=8)
    serving = serve(api.url, kind=Slow, max_num=2, worker_timeout=0.1)
    counters = serving.ended().counters
    assert (counters.groups, counters.failures) == (1, 1) and serving.heard("took longer than 0.1 s")


def test_no_logprobs_end_it(serve: Serve, api: Api) -> None:
    silent = JSONResponse({"token_ids": [[5, 2]] * 4, "finish_reasons": ["stop"] * 4})
    with inference(reply=lambda route, body: silent) as (_, url):
        api.start(batch_size=8)
        with pytest.raises(EngineError, match="no usable logprobs"):
            serve(api.url, at=url).ended()
    assert api.get("/status")["queue_size"] == 0
    assert [environment["state"] for environment in api.get("/overview")["environments"]] == ["left"]


def test_a_batch_that_no_number_of_groups_fills_is_said(serve: Serve, api: Api) -> None:
    api.start(batch_size=6)
    serving = serve(api.url, max_num=1)
    serving.ended()
    assert serving.heard("not a multiple of the group size 4")


def test_evaluations_while_serving(serve: Serve, api: Api, tmp_path: Path) -> None:
    api.start(batch_size=8)
    serving = serve(api.url, steps_per_eval=2, log_dir=tmp_path)
    for _ in range(2):
        until(api.batch)
    until(lambda: serving.heard("held-out accuracy 0.000 (2 problems)"))
    serving.stop()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (evaluation,) = [line for line in lines if line["type"] == "evaluation"]
    assert evaluation["problems"] == 2 and evaluation["step"] >= 2


def test_what_is_finished_is_sent_before_it_ends(serve: Serve, api: Api, monkeypatch) -> None:
    """Posts are held until it is asked to stop: each arrives once."""
    api.start(batch_size=8)
    held, post = threading.Event(), RolloutApi.post

    async def slow(self: RolloutApi, groups: Sequence[Any]) -> Any:
        held.set()
        await asyncio.sleep(0.1)
        return await post(self, groups)

    monkeypatch.setattr(RolloutApi, "post", slow)
    serving = serve(api.url)
    assert held.wait(LONG_S)
    summary = serving.stop()
    assert summary.counters.groups == api.get("/status")["queue_size"] > 0


class TestTheOriginalsAnswers:
    """What the original answers, and ours does not."""

    def call(self, reply: Callable[[Any], Any], work: Callable[[RolloutApi], Any]) -> Any:
        async def run() -> Any:
            api = RolloutApi("http://api", wait_s=5.0)
            await api._http.aclose()
            api._http = httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(reply))
            try:
                return await work(api)
            finally:
                await api.close()

        return asyncio.run(run())

    def test_an_unknown_environment_is_a_500(self) -> None:
        calls: list[Any] = []

        def reply(request: Any) -> Any:
            calls.append(request)
            return httpx.Response(500, text="Internal Server Error")

        with pytest.raises(api_module.EnvironmentNotRegistered):
            self.call(reply, lambda api: api.status(3))
        assert len(calls) == 3

    def test_posts_are_compressed_and_repeated_under_one_key(self) -> None:
        calls: list[Any] = []

        def reply(request: Any) -> Any:
            calls.append(request)
            if len(calls) < 3:
                return httpx.Response(429 if len(calls) == 1 else 500, headers={"Retry-After": "0"})
            return httpx.Response(200, json={"status": "received", "groups_processed": 1})

        group = {"tokens": [[1] * 2000]}
        self.call(reply, lambda api: api.post([group]))
        assert len({call.headers["idempotency-key"] for call in calls}) == 1
        assert calls[0].headers["content-encoding"] == "gzip"
        assert json.loads(gzip.decompress(calls[0].content)) == [group]

    def test_a_refusal_names_the_field(self) -> None:
        def reply(request: Any) -> Any:
            return httpx.Response(422, json={"detail": [{"loc": ["body", 0, "masks"]}]})

        with pytest.raises(api_module.PostRefused, match="masks"):
            self.call(reply, lambda api: api.post([{}]))


def test_groups_larger_than_a_batch_are_sent_one_a_batch(serve: Serve, api: Api) -> None:
    api.start(batch_size=2, num_steps=2)
    serving = serve(api.url, linger=0.0)
    batches = [until(api.batch) for _ in range(2)]
    assert [[len(group["tokens"]) for group in batch] for batch in batches] == [[4], [4]]
    assert serving.ended().step == 2
    assert serving.heard("groups of 4 are larger than the trainer's batches of 2")


def test_where_the_api_would_keep_them_for_ever_it_ends_and_the_api_hears_why(
    serve: Serve, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = Membership.join

    async def as_the_original(self: Membership, **how: Any) -> Any:
        return replace(await join(self, **how), takes_larger=False)

    monkeypatch.setattr(Membership, "join", as_the_original)
    api.start(batch_size=2)
    with pytest.raises(ConfigError, match="groups of 4 do not fit into the trainer's batches of 2"):
        serve(api.url).ended()
    trainer = api.http.post("/register", json=REGISTRATION | {"acknowledge": True}).json()["uuid"]
    waiting = api.http.get("/batch", headers={"X-Lachesis-Trainer": str(trainer)}).json()["waiting"]
    assert "ended: groups of 4 do not fit" in waiting


def test_it_follows_the_next_trainer_s_batch_size(
    serve: Serve, api: Api, monkeypatch: pytest.MonkeyPatch, statuses: list[QueueStatus]
) -> None:
    monkeypatch.setattr(runner_module, "_LOOK_S", 0.05)
    api.start(batch_size=4)
    serving = serve(api.url, max_batches_offpolicy=1)
    looked_at_full(statuses, 1)
    api.http.post("/register", json=REGISTRATION | {"batch_size": 16}).raise_for_status()
    looked_at_full(statuses, 4)
    serving.stop()
    assert serving.heard("batches of 16 sequences, not 4")
