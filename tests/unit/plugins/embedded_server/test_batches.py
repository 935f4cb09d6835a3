"""Gathering requests into batches, pausing and cancelling them."""

from __future__ import annotations

import threading

import pytest

from lachesis.common.errors import EngineError
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.plugins.embedded_server.batches import BatchRunner, GrowingText, Job, cut_at_stop
from tests.tiny import PAD_ID, tiny_model
from tests.waiting import LONG_S


class Watched(EmbeddedEngine):
    """Notes the size of each batch, and can be told to fail."""

    def __init__(self, **options) -> None:
        super().__init__(
            tiny_model("qwen2"), eos_token_ids=[], pad_token_id=PAD_ID, max_batch_size=8, max_context=64, **options
        )
        self.batches: list[int] = []
        self.failure: Exception | None = None

    def generate(self, requests, **options):
        if self.failure is not None:
            raise self.failure
        if not self.health().paused:
            self.batches.append(len(requests))
        return super().generate(requests, **options)


@pytest.fixture
def engine():
    return Watched()


@pytest.fixture
def runner(engine):
    made = BatchRunner(engine, max_sequences=8)
    yield made
    made.close()


class Client:
    """Waits for one job."""

    def __init__(self, runner: BatchRunner, *, seed: int = 0, max_tokens: int = 4, n: int = 1, submit: bool = True):
        self.news = threading.Event()
        request = GenerationRequest((5, 6), SamplingParams(max_tokens), n=n, seed=seed)
        self.job = Job(request, top_logprobs=0, notify=self._notify)
        if submit:
            runner.submit(self.job)

    def _notify(self) -> None:
        if self.job.done:
            self.news.set()

    def wait(self) -> Job:
        assert self.news.wait(LONG_S)
        return self.job


def test_requests_that_come_together_share_a_batch(engine, runner):
    runner.pause("keep")
    clients = [Client(runner, seed=i) for i in range(5)]
    engine.resume()
    jobs = [client.wait() for client in clients]
    assert engine.batches == [5]
    assert all(len(job.sequences[0].token_ids) == len(job.sequences[0].times) == 4 for job in jobs)
    assert {job.sequences[0].reason for job in jobs} == {"length"}


def test_a_batch_is_no_larger_than_it_may_be_and_a_larger_request_goes_alone(engine, runner):
    runner.pause("keep")
    clients = [Client(runner, n=n) for n in (3, 3, 3, 12, 1)]
    engine.resume()
    assert [len(client.wait().sequences) for client in clients] == [3, 3, 3, 12, 1]
    assert engine.batches == [2, 1, 1, 1]


def test_what_a_client_gets_does_not_depend_on_the_others(engine, runner):
    alone = Client(runner, seed=3).wait().sequences[0].token_ids
    runner.pause("keep")
    clients = [Client(runner, seed=i) for i in range(6)]
    engine.resume()
    together = [client.wait().sequences[0].token_ids for client in clients]
    assert together[3] == alone and len({tuple(ids) for ids in together}) > 1


def test_abort_ends_those_that_wait_too(engine, runner):
    runner.pause("keep")
    client = Client(runner)
    runner.pause("abort")
    job = client.wait()
    assert job.sequences[0].reason == "abort" and job.sequences[0].token_ids == [] and job.error is None
    engine.resume()
    assert Client(runner).wait().sequences[0].reason == "length"


def test_a_pause_between_gathering_and_generating_loses_nothing(engine, runner):
    """The engine refuses a batch that was gathered just before the pause: it waits, in its order."""
    engine.gate.begin_pause("keep")
    clients = [Client(runner, seed=i) for i in range(2)]
    runner.pause("keep")
    engine.resume()
    assert [client.wait().sequences[0].reason for client in clients] == ["length", "length"]


def test_a_client_that_has_gone_is_not_generated_for(engine, runner):
    runner.pause("keep")
    gone, stays = Client(runner, seed=1), Client(runner, seed=2)
    gone.job.cancelled = True
    engine.resume()
    stays.wait()
    assert engine.batches == [1] and gone.job.sequences[0].token_ids == []


def test_a_failure_reaches_every_client_and_the_next_request_is_served(engine, runner):
    for failure, message in ((EngineError("no logits"), "no logits"), (RuntimeError("out of memory"), "out of memory")):
        engine.failure = failure
        runner.pause("keep")
        clients = [Client(runner) for _ in range(2)]
        engine.resume()
        for client in clients:
            error = client.wait().error
            assert isinstance(error, EngineError) and message in str(error)
    engine.failure = None
    assert Client(runner).wait().sequences[0].reason == "length" and runner.alive


def test_closing_fails_what_waits_and_refuses_the_next(runner):
    runner.pause("keep")
    client = Client(runner)
    runner.close()
    runner.close()
    assert "shutting down" in str(client.wait().error) and not runner.alive
    with pytest.raises(EngineError, match="shutting down"):
        Client(runner)


class TestText:
    @pytest.mark.parametrize(
        ("stop", "include", "expected"),
        [
            ((), False, "hello world"),
            (("wo",), False, "hello "),
            (("wo",), True, "hello wo"),
            (("z", "l"), False, "he"),
        ],
    )
    def test_it_is_cut_at_the_first_stop_string(self, stop, include, expected):
        assert cut_at_stop("hello world", stop, include=include) == expected

    def test_pieces_make_up_the_whole_and_are_never_taken_back(self):
        text = "one END two"
        growing = GrowingText(lambda ids: text[: len(ids)], stop=["END"], include_stop=False)
        pieces = [growing.more(range(i), finished=i == 7) for i in range(1, 8)]
        assert pieces == ["o", "n", "e", " ", "", "", ""]
        growing = GrowingText(lambda ids: text[: len(ids)], stop=["ENTER"], include_stop=False)
        pieces = [growing.more(range(i), finished=i == 11) for i in range(1, 12)]
        assert "".join(pieces) == text and pieces[4:7] == ["", "", "END"]

    def test_half_a_character_is_held_back(self):
        decoded = {1: "a", 2: "a�", 3: "aé"}
        growing = GrowingText(lambda ids: decoded[len(ids)], stop=[], include_stop=False)
        assert [growing.more(range(i), finished=False) for i in (1, 2, 3)] == ["a", "", "é"]
