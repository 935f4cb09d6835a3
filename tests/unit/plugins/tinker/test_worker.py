"""Requests of a run in their order."""

from __future__ import annotations

from lachesis.plugins.tinker.worker import Answer, Job, Sequenced


def test_requests_are_done_in_the_order_of_their_numbers():
    done: list[int] = []
    requests = Sequenced(lambda job: done.append(job.work()))
    for number in (3, 1, 4, 2):
        requests.add(number, Job(lambda number=number: number, lambda _: Answer(b"")))
    assert done == [1, 2, 3, 4]
