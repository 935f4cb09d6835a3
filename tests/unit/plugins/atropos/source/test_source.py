"""The source over the real rollout API in this process, and over one that knows the plain protocol only."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ConfigError, DataError, DeadlineExceeded, EngineError, StopRequested
from lachesis.common.types import Group
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.atropos.api.server import ServerOptions, build_app
from lachesis.plugins.atropos.api.wire import Registration
from lachesis.plugins.atropos.source.client import RolloutApiClient, TrainerRegistration
from lachesis.plugins.atropos.source.convert import Conversion
from lachesis.plugins.atropos.source.source import AtroposSource, build_atropos_source, keep_given_advantages
from tests.ports import free_port
from tests.threads import Thread
from tests.unit.plugins.atropos.environments.servers import client
from tests.waiting import LONG_S

CONVERSION = Conversion(lambda rows: ["" for _ in rows], vocab_size=50, max_length=16, eos_token_ids=frozenset({9}))
REGISTRATION = Registration(
    batch_size=4,
    max_token_len=16,
    checkpoint_dir="c",
    save_checkpoint_interval=2,
    starting_step=0,
    num_steps=50,
    wandb_project="",
    wandb_group="",
)

HTTP = client("")


def group(number: int, **changes: Any) -> dict[str, Any]:
    """Two sequences that tell one group from another by their token."""
    return {
        "tokens": [[1, number], [1, number, 9]],
        "masks": [[-100, number], [-100, number, 9]],
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, -0.5], [1.0, -0.5, -0.1]],
        "group_overrides": {"group_id": str(number)},
        **changes,
    }


class Api:
    """The rollout API in a thread; it can be started anew on its port, with or without what it had."""

    def __init__(self, state_dir: Path | None = None) -> None:
        self._options = ServerOptions(state_dir=state_dir)
        self._server = Thread(build_app(self._options), port=free_port(), lifespan=True)
        self.url = self._server.url

    def post(self, *numbers: int, **changes: Any) -> None:
        for number in numbers:
            HTTP.post(f"{self.url}/scored_data", json=group(number, **changes)).raise_for_status()

    def outstanding(self) -> int:
        return HTTP.get(f"{self.url}/overview").json()["outstanding"]

    def restart(self) -> None:
        port = self._server.port
        self._server.stop()
        self._server = Thread(build_app(self._options), port=port, lifespan=True)

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    yield server
    server.stop()


Make = Callable[..., AtroposSource]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Sources that are closed at the end."""
    made: list[AtroposSource] = []

    def build(url: str, *, watch: Callable[[], None] = lambda: None, **options: Any) -> AtroposSource:
        client = RolloutApiClient(url, watch=watch)
        known: dict[str, Any] = {"registration": REGISTRATION, "conversion": CONVERSION, "wait_s": LONG_S}
        made.append(AtroposSource(client, watch=watch, **known | options))
        return made[-1]

    yield build
    for source in made:
        source.close()


def deadline(limit_s: float = LONG_S) -> Deadline:
    return Deadline("the test's", limit_s)


def ids(groups: list[Group]) -> list[str]:
    return [one.prompt.id for one in groups]


def take(source: AtroposSource) -> list[str]:
    return ids(source.next_groups(1, deadline=deadline()))


def test_groups_have_the_name_of_their_environment(api: Api, make: Make):
    source = make(api.url)
    api.post(1, 2)
    take(source)
    source.report_version(1)  # environments register with a trainer that has begun
    registration = {"max_token_length": 16, "desired_name": "math", "weight": 1.0, "group_size": 2}
    for _ in range(2):
        HTTP.post(f"{api.url}/register-env", json=registration).raise_for_status()
    api.post(3, env_id=1)
    api.post(4)
    columns = [one.prompt.columns for one in source.next_groups(1, deadline=deadline())]
    assert columns == [{"env_id": 1, "environment": "math_1"}, {"env_id": None}]


@pytest.mark.parametrize(("step", "warns"), [(0, True), (3, False)])
def test_groups_from_before_the_run_are_told_of_unless_it_is_resumed(
    api: Api, make: Make, caplog: pytest.LogCaptureFixture, step: int, warns: bool
):
    api.post(1, 2)
    source = make(api.url, registration=REGISTRATION.model_copy(update={"starting_step": step}))
    with caplog.at_level(logging.WARNING, logger="lachesis"):
        assert take(source) == ["1", "2"]
    told = [message for message in caplog.messages if "holds 2 groups from before this run" in message]
    assert bool(told) == warns
    assert all(f"curl {api.url}/reset_data" in message for message in told)


def test_it_registers_and_hands_on_the_groups_of_a_batch(api: Api, make: Make):
    source = make(api.url)
    api.post(3, 4, 5)
    assert take(source) == ["3", "4"]
    assert HTTP.get(f"{api.url}/info").json() == {"batch_size": 4, "max_token_len": 16}
    # Until it is trained on it is the same batch.
    assert take(source) == ["3", "4"]
    source.report_version(1)
    api.post(6)
    assert take(source) == ["5", "6"]


def test_without_checkpoints_a_batch_is_acknowledged_after_its_step(api: Api, make: Make):
    source = make(api.url)
    api.post(3, 4)
    take(source)
    assert api.outstanding() == 1
    source.report_version(1)
    assert api.outstanding() == 0


def test_a_trainer_that_dies_before_its_step_leaves_the_batch_to_the_next(api: Api, make: Make):
    first = make(api.url)
    api.post(3, 4)
    take(first)
    first.close()
    second = make(api.url)
    assert take(second) == ["3", "4"]


def test_a_trainer_that_was_killed_does_not_stand_in_the_way_of_the_corrected_one(api: Api, make: Make):
    """It says no goodbye; with its batch size went what it had asked of the environments."""
    killed = make(api.url, registration=REGISTRATION.model_copy(update={"batch_size": 2}))
    api.post(3, 4)
    assert take(killed) == ["3"]
    corrected = make(api.url)
    first = take(corrected)
    assert HTTP.get(f"{api.url}/info").json()["batch_size"] == 4
    corrected.report_version(1)
    api.post(5, 6)
    assert [*first, *take(corrected)] == ["3", "4", "5"]
    with pytest.raises(EngineError, match="another trainer has registered"):
        killed.report_version(1)
        take(killed)


def test_what_a_checkpoint_does_not_hold_is_trained_on_again_by_the_resumed_run_only(api: Api, make: Make):
    first = make(api.url, with_checkpoints=True)
    api.post(*range(3, 11))
    take(first)
    first.report_version(1)
    saved = first.state_dict()
    assert take(first) == ["5", "6"]
    assert api.outstanding() == 2  # the checkpoint may still be being written
    first.saved()
    first.report_version(2)
    assert api.outstanding() == 1  # the first is safe by now
    first.close()

    resumed = make(api.url, with_checkpoints=True)
    resumed.load_state_dict(saved)
    assert take(resumed) == ["5", "6"]
    resumed.report_version(2)
    assert take(resumed) == ["7", "8"]


def test_a_batch_that_a_checkpoint_holds_is_not_trained_on_again(api: Api, make: Make):
    first = make(api.url, with_checkpoints=True)
    api.post(*range(3, 9))
    take(first)
    first.report_version(1)
    take(first)
    first.report_version(2)
    saved = first.state_dict()
    first.close()  # killed after the checkpoint was written, before anything could be acknowledged
    assert api.outstanding() == 2

    resumed = make(api.url, with_checkpoints=True)
    resumed.load_state_dict(saved)
    assert take(resumed) == ["7", "8"]
    assert resumed.counters()["batches_known"] == 2
    assert api.outstanding() == 1


def test_a_checkpoint_in_the_middle_of_a_batch_s_uses_holds_it(api: Api, make: Make):
    first = make(api.url, with_checkpoints=True)
    api.post(3, 4, 5, 6)
    take(first)
    saved = first.state_dict()
    first.close()
    resumed = make(api.url, with_checkpoints=True)
    resumed.load_state_dict(saved)
    assert take(resumed) == ["5", "6"]


def test_the_end_of_the_run_acknowledges_all(api: Api, make: Make):
    source = make(api.url, with_checkpoints=True)
    api.post(3, 4, 5, 6, 7, 8)
    take(source)
    source.report_version(48)
    take(source)
    source.report_version(49)
    take(source)  # used less often than it might have been, so no version was reported
    assert api.outstanding() == 3
    source.complete()
    assert api.outstanding() == 0


def test_a_trainer_killed_between_its_last_step_and_the_checkpoint_gets_that_batch_again(api: Api, make: Make):
    first = make(api.url, with_checkpoints=True)
    api.post(3, 4, 5, 6)
    take(first)
    first.report_version(49)
    saved = first.state_dict()
    assert take(first) == ["5", "6"]
    first.report_version(50)
    first.close()
    resumed = make(api.url, with_checkpoints=True)
    resumed.load_state_dict(saved)
    assert take(resumed) == ["5", "6"]


def test_an_api_with_a_state_directory_may_die_at_any_time(tmp_path: Path, make: Make):
    api = Api(tmp_path)
    source = make(api.url)
    api.post(*range(3, 9))
    assert take(source) == ["3", "4"]
    api.restart()
    source.report_version(1)
    assert take(source) == ["5", "6"]
    api.restart()
    source.report_version(2)
    assert take(source) == ["7", "8"]
    api.stop()


def test_an_api_that_was_started_anew_is_registered_at_again(api: Api, make: Make, caplog: pytest.LogCaptureFixture):
    source = make(api.url, with_checkpoints=True)
    api.post(3, 4)
    take(source)
    source.report_version(1)
    api.restart()
    # The same number is another batch there.
    registered: list[str] = []

    def post_once() -> None:
        if not registered and HTTP.get(f"{api.url}/info").json()["batch_size"] == 4:
            registered.append("")
            api.post(7, 8)

    source.watch = post_once
    assert take(source) == ["7", "8"]
    assert "registering again" in caplog.text
    # Registered at step 1, one batch since.
    assert HTTP.get(f"{api.url}/status").json()["current_step"] == 2


def test_an_acknowledgement_that_a_new_api_does_not_understand_is_no_failure(api: Api, make: Make):
    source = make(api.url)
    api.post(3, 4)
    take(source)
    api.restart()
    source.report_version(1)
    with pytest.raises(DeadlineExceeded):
        source.next_groups(1, deadline=deadline(0.3))


def test_another_trainer_ends_this_one(api: Api, make: Make):
    first, second = make(api.url), make(api.url)
    api.post(3, 4, 5, 6)
    take(first)
    take(second)
    first.report_version(1)
    with pytest.raises(EngineError, match="another trainer has registered"):
        take(first)


def test_a_trainer_that_ends_gives_way(api: Api, make: Make):
    first = make(api.url)
    api.post(3, 4)
    take(first)
    first.close()
    assert HTTP.get(f"{api.url}/info").json()["batch_size"] == -1
    assert take(make(api.url)) == ["3", "4"], "it was not trained on"


def test_a_group_larger_than_the_batch_is_trained_on_and_said(api: Api, make: Make, caplog: pytest.LogCaptureFixture):
    source = make(api.url, registration=REGISTRATION.model_copy(update={"batch_size": 1}))
    api.post(3)
    assert take(source) == ["3"]
    assert "a group of 2 sequences is larger than the batch of 1" in caplog.text


def test_a_wait_says_what_for_and_ends(api: Api, make: Make, caplog: pytest.LogCaptureFixture):
    source = make(api.url, wait_s=0.4, first_word_s=0.0)
    with pytest.raises(DeadlineExceeded) as raised:
        source.next_groups(1, deadline=deadline())
    assert "the trainer's wait for a batch of 4 sequences" in raised.value.message
    assert "0 of 4 sequences are queued" in raised.value.message
    assert "source.wait_s" in raised.value.remedy
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("no environment has registered yet")


def test_the_limit_of_a_wait_counts_from_the_last_group(
    plain: tuple[PlainApi, str], make: Make, monkeypatch: pytest.MonkeyPatch
):
    """Each time the queue is looked at it has a group more; without that the third look would be too late."""
    api, url = plain
    sizes: list[int] = []
    api.batches = []

    def growing(client: RolloutApiClient, *, deadline: Deadline) -> int:
        sizes.append(len(sizes) + 1)
        if len(sizes) == 5:
            api.batches.append([group(3)])
        return sizes[-1]

    monkeypatch.setattr(RolloutApiClient, "queued", growing)
    source = make(url, wait_s=1.0)
    monkeypatch.setattr("lachesis.plugins.atropos.source.source._FIRST_PAUSE_S", 0.6)
    assert take(source) == ["3"]


def test_sizes_that_do_not_fit_are_named(api: Api, make: Make, caplog: pytest.LogCaptureFixture):
    source = make(api.url, wait_s=0.4, first_word_s=0.0)
    source._register(deadline())
    reply = HTTP.get(f"{api.url}/batch", headers={"X-Lachesis-Trainer": str(source._trainer.uuid)})  # type: ignore[union-attr]
    assert reply.json()["batch"] is None
    environment = {"max_token_length": 9, "desired_name": "e", "weight": 1.0, "group_size": 2}
    assert HTTP.post(f"{api.url}/register-env", json=environment).json()["status"] == "success"
    api.post(3)
    with pytest.raises(DeadlineExceeded):
        source.next_groups(1, deadline=deadline())
    assert "2 of 4 sequences are queued" in caplog.text


def test_what_is_watched_ends_the_wait(api: Api, make: Make):
    def gone() -> None:
        raise EngineError("the engine died")

    with pytest.raises(EngineError, match="the engine died"):
        take(make(api.url, watch=gone))


def test_what_is_watched_ends_the_wait_for_an_api_that_is_away(make: Make):
    calls: list[int] = []

    def gone_at_last() -> None:
        calls.append(1)
        if len(calls) > 3:
            raise EngineError("the API died for good")

    with pytest.raises(EngineError, match="died for good"):
        take(make("http://127.0.0.1:9", watch=gone_at_last))


class Stop:
    """A watch that asks to stop, once it is told to."""

    def __init__(self, *, after: int = 0) -> None:
        self.asked = False
        self._after = after

    def __call__(self) -> None:
        self._after -= 1
        if self.asked or self._after == 0:
            self.asked = True
            raise StopRequested("the run was asked to stop")


def test_a_stop_ends_the_wait_and_changes_nothing(api: Api, make: Make):
    stop = Stop(after=5)
    source = make(api.url, watch=stop, with_checkpoints=True)
    with pytest.raises(StopRequested):
        take(source)
    assert source.state_dict() == {"step": 0, "trained": {}}
    stop.asked = False
    api.post(3, 4)
    assert take(source) == ["3", "4"]


def test_a_stop_in_the_wait_leaves_what_was_trained_on_to_the_checkpoint(api: Api, make: Make):
    stop = Stop()
    first = make(api.url, watch=stop, with_checkpoints=True)
    api.post(3, 4)
    take(first)
    first.report_version(1)
    stop.asked = True
    with pytest.raises(StopRequested):
        take(first)
    saved = first.state_dict()
    assert list(saved["trained"]) == ["0"]
    first.close()
    resumed = make(api.url, with_checkpoints=True)
    resumed.load_state_dict(saved)
    api.post(5, 6)
    assert take(resumed) == ["5", "6"]
    assert resumed.counters()["batches_known"] == 1


def test_a_batch_is_acknowledged_also_where_a_stop_has_been_asked_for(api: Api, make: Make):
    stop = Stop()
    source = make(api.url, watch=stop)
    api.post(3, 4)
    take(source)
    stop.asked = True
    source.report_version(1)
    assert api.outstanding() == 0


def test_an_api_that_takes_requests_and_does_not_answer_can_be_left(make: Make):
    """Nothing of it may be waited for: neither the registration, nor a batch, nor an acknowledgement."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        stop = Stop(after=3)
        source = make(url, watch=stop)
        with pytest.raises(StopRequested):
            take(source)
        source._trainer = TrainerRegistration(uuid=1, acknowledges=True)
        with pytest.raises(StopRequested):
            source._wait_for_batch(deadline())
        source._safe = {0}
        source.report_version(1)
        assert source._safe == {0}


def test_an_api_that_is_away_too_long_is_named(make: Make):
    with pytest.raises(DeadlineExceeded, match="Atropos API not reachable at http"):
        make("http://127.0.0.1:9", wait_s=0.3).next_groups(1, deadline=deadline())


def test_unusable_groups_are_set_aside_and_counted(api: Api, make: Make, caplog: pytest.LogCaptureFixture):
    source = make(api.url)
    api.post(3)
    api.post(4, inference_logprobs=[[1.0, 0.85], [1.0, 0.85, 0.85]])
    assert take(source) == ["3"]
    assert source.counters()["dropped_groups"] == 1
    assert source.counters()["dropped_groups"] == 0
    assert "ref_logprobs at generated positions avg 0.85 (should be negative!)" in caplog.text


def test_a_batch_without_a_usable_group_is_passed_over(api: Api, make: Make):
    source = make(api.url)
    api.post(3, 4, scores=[0.0, 1.0], masks=[[-100, -100], [-100, -100, -100]])
    api.post(5, 6)
    assert take(source) == ["5", "6"]
    assert source.counters()["dropped_groups"] == 2
    source.report_version(1)
    assert api.outstanding() == 0


def test_an_environment_that_sends_nothing_usable_ends_the_run(api: Api, make: Make):
    source = make(api.url)
    api.post(*([3] * 20), masks=[[-100, -100], [-100, -100, -100]])
    with pytest.raises(DataError, match=r"10 batches in a row .* no position of any sequence trains"):
        take(source)


def test_groups_without_logprobs_are_warned_of_once_or_end_the_run(
    api: Api, make: Make, caplog: pytest.LogCaptureFixture
):
    api.post(3, 4, 5, 6, inference_logprobs=None)
    source = make(api.url)
    take(source)
    assert source.counters()["groups_without_logprobs"] == 2
    assert len([r for r in caplog.records if "sends no inference_logprobs" in r.getMessage()]) == 1
    source.report_version(1)
    strict = make(api.url, missing_logprobs="error")
    with pytest.raises(DataError, match="sends no inference_logprobs"):
        take(strict)


class PlainApi:
    """The protocol without Lachesis's additions; ``batches`` are handed out in order."""

    def __init__(self, batches: list[list[dict[str, Any]]]) -> None:
        self.batches = batches
        self.registrations: list[dict[str, Any]] = []
        self.failing: list[int] = []
        self.queued = 2

    def app(self) -> Starlette:
        async def info(request: Request) -> Response:
            return JSONResponse({"batch_size": -1, "max_token_len": -1})

        async def register(request: Request) -> Response:
            self.registrations.append(await request.json())
            return JSONResponse({"uuid": 5})

        async def batch(request: Request) -> Response:
            if self.failing:
                return JSONResponse({"detail": "busy"}, status_code=self.failing.pop(0))
            return JSONResponse({"batch": self.batches.pop(0) if self.batches else None})

        async def status(request: Request) -> Response:
            return JSONResponse({"current_step": 0, "queue_size": self.queued})

        get = {"/info": info, "/batch": batch, "/status": status}
        routes = [Route(path, handler) for path, handler in get.items()]
        return Starlette(routes=[*routes, Route("/register", register, methods=["POST"])])


@pytest.fixture
def plain() -> Iterator[tuple[PlainApi, str]]:
    served = PlainApi([[group(3, group_overrides=None)], [group(4)]])
    server = Thread(served.app())
    yield served, server.url
    server.stop()


def test_the_plain_protocol_is_enough(plain: tuple[PlainApi, str], make: Make, caplog: pytest.LogCaptureFixture):
    api, url = plain
    api.failing = [500, 503]
    source = make(url, first_word_s=0.0)
    source.load_state_dict({"step": 7, "trained": {}})
    assert take(source) == ["0-0"]
    source.report_version(8)
    assert take(source) == ["4"]
    source.report_version(9)
    assert source.state_dict() == {"step": 9, "trained": {}}
    assert api.registrations[0]["starting_step"] == 7
    source.wait_s = 0.4
    with pytest.raises(DeadlineExceeded):
        source.next_groups(1, deadline=deadline())
    assert "2 groups are queued, but their sizes do not add up to a batch yet" in caplog.text


def test_an_empty_queue_of_the_plain_protocol_is_told_with_its_commonest_cause(
    plain: tuple[PlainApi, str], make: Make, caplog: pytest.LogCaptureFixture
):
    api, url = plain
    api.batches, api.queued = [], 0
    with pytest.raises(DeadlineExceeded):
        make(url, wait_s=0.3, first_word_s=0.0).next_groups(1, deadline=deadline())
    (line,) = [message for message in caplog.messages if "waiting for" in message]
    assert "their logs say why (one whose --env.group_size is above the batch of 4 ends at its start)" in line


def config(url: str, **source: Any) -> LachesisConfig:
    return LachesisConfig.model_validate(
        {
            "run": {"steps": 12},
            "model": {"path": "m"},
            "source": {"kind": "atropos", "url": url, **source},
            "logging": {"wandb": {"project": "p", "group": "g"}},
            "checkpoint": {"every_steps": 3},
        }
    )


def test_what_is_configured_is_what_is_asked_for(plain: tuple[PlainApi, str]):
    api, url = plain
    source = build_atropos_source(config(f"{url}/", batch_size=2), conversion=CONVERSION, checkpoint_dir="/c")
    assert ids(source.next_groups(1, deadline=deadline())) == ["0-0"]
    assert api.registrations == [
        {
            "batch_size": 2, "max_token_len": 2048, "checkpoint_dir": "/c", "save_checkpoint_interval": 3,
            "starting_step": 0, "num_steps": 12, "wandb_project": "p", "wandb_group": "g", "acknowledge": True,
        }
    ]  # fmt: skip
    source.close()


def test_an_api_that_is_not_there_is_said_at_once():
    with pytest.raises(EngineError, match="Atropos API not reachable at http") as raised:
        RolloutApiClient("http://127.0.0.1:9").require(limit_s=0.1)
    assert "`lachesis run-api --port 9`" in raised.value.remedy


def test_the_wait_for_an_api_says_so_and_ends_when_the_run_is_to(caplog: pytest.LogCaptureFixture):
    asked = 0

    def watch() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise StopRequested("enough")

    client = RolloutApiClient("http://127.0.0.1:9", watch=watch)
    with caplog.at_level(logging.WARNING), pytest.raises(StopRequested):
        client.require(limit_s=600)
    (line,) = [record.getMessage() for record in caplog.records if "not reachable" in record.getMessage()]
    assert "trying for up to 600 s" in line


def test_something_else_on_that_port_is_told_apart():
    server = Thread(Starlette(routes=[]))
    with pytest.raises(EngineError, match="is not a rollout API"):
        RolloutApiClient(server.url).require(limit_s=LONG_S)
    server.stop()


@pytest.mark.parametrize("address", ["localhost:8002", "http://127.0.0.1:99999", "http://[::1", "http://host:x"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="not an address of a rollout API"):
        RolloutApiClient(address)


def test_logs_of_registration_are_those_that_are_documented(api: Api, make: Make, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "lachesis")
    api.post(3, 4)
    take(make(api.url))
    assert "[Trainer] ✓ Registered with Atropos API at" in caplog.text


def test_given_advantages_survive_those_from_the_scores(api: Api, make: Make):

    api.post(3, overrides=[{"set_advantage_to_zero": True}, {}])
    api.post(4)
    groups = make(api.url).next_groups(1, deadline=deadline())

    def assign(groups: Any) -> list[Group]:
        return [replace(g, samples=tuple(replace(s, advantage=5.0) for s in g.samples)) for g in groups]

    after = keep_given_advantages(assign)(groups)
    assert [[s.advantage for s in g.samples] for g in after] == [[0.0, 5.0], [5.0, 5.0]]
