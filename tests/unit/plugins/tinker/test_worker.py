"""Requests of a run in their order, and lanes that share the worker's time."""

from __future__ import annotations

from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.plugins.tinker.records import LoraShape, SampleRequest
from lachesis.plugins.tinker.sampling import Weights
from lachesis.plugins.tinker.worker import Answer, FairQueue, Job, SampleJob, Sequenced

REQUEST = SampleRequest(generation=GenerationRequest(prompt_ids=(2,), params=SamplingParams(max_tokens=1)))


def job(lane: str, name: str = "") -> Job[str]:
    return Job(lambda: name, lambda found: Answer(found.encode()), lane)


def sampling(lane: str, key: str) -> SampleJob:
    weights = Weights(key, lambda: (LoraShape(rank=1, seed=0), {}), lambda: False)
    return SampleJob(weights, REQUEST, lambda _: Answer(b""), lane)


def lane_of(found: object) -> str:
    assert isinstance(found, Job)
    return found.lane


def served(queue: FairQueue, *, seconds: dict[str, float]) -> list[str]:
    """The lanes of all jobs in the order in which they are done, each taking its lane's seconds."""
    order: list[str] = []
    while len(queue):
        order.append(lane_of(queue.take()))
        queue.charge(order[-1:], seconds[order[-1]])
    return order


def test_requests_are_done_in_the_order_of_their_numbers():
    done: list[int] = []
    requests = Sequenced(lambda job: done.append(job.work()))
    for number in (3, 1, 4, 2):
        requests.add(number, Job(lambda number=number: number, lambda _: Answer(b"")))
    assert done == [1, 2, 3, 4]


def test_a_lane_keeps_its_order():
    queue = FairQueue()
    for name in "abc":
        queue.add(job("one", name))
    taken = [queue.take() for _ in range(3)]
    assert [found.work() for found in taken if isinstance(found, Job)] == ["a", "b", "c"]


def test_many_jobs_of_one_client_do_not_keep_another_waiting():
    queue = FairQueue()
    for _ in range(20):
        queue.add(job("many"))
    queue.add(job("few"))
    queue.add(job("few"))
    assert served(queue, seconds={"many": 1.0, "few": 1.0})[:4] == ["many", "few", "many", "few"]


def test_lanes_share_time_and_not_turns():
    queue = FairQueue()
    for _ in range(9):
        queue.add(job("large"))
        queue.add(job("small"))
    order = served(queue, seconds={"large": 4.0, "small": 1.0})
    assert order[:10].count("small") == 8


def test_an_idle_lane_saves_nothing_up():
    queue = FairQueue()
    queue.add(job("busy"))
    queue.take()
    queue.charge(["busy"], 1000.0)
    queue.add(job("busy"))
    for _ in range(5):
        queue.add(job("late"))
    queue.add(job("busy"))
    assert served(queue, seconds={"busy": 1.0, "late": 1.0})[:4] == ["busy", "late", "busy", "late"]


def test_jobs_that_sample_with_the_same_weights_are_taken_together_from_all_lanes():
    queue = FairQueue()
    for found in (sampling("a", "x"), sampling("b", "y"), sampling("b", "x"), job("c")):
        queue.add(found)
    together = queue.take()
    assert isinstance(together, list)
    assert [found.lane for found in together] == ["a", "b"]
    queue.charge([found.lane for found in together], 3.0)
    assert (queue.used_s("a"), queue.used_s("b")) == (1.5, 1.5)
    assert len(queue) == 2
