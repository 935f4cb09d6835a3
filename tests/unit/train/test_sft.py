"""A supervised start: its loss, its order, and what a checkpoint has of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lachesis.common.errors import CheckpointError, DataError
from lachesis.common.types import Prompt
from lachesis.pipeline.feed import Feed
from lachesis.train.batch import Batch, pack
from lachesis.train.sft import StartedFeed, demonstrations
from tests.losses import loss_options
from tests.tiny import EOS_ID, tiny_tokenizer
from tests.unit.train.test_policy import make_policy

TOKENIZER = tiny_tokenizer()


def problems(count: int = 5) -> list[Prompt]:
    texts = [f"{number}+1=" for number in range(count)]
    return [
        Prompt(str(number), tuple(TOKENIZER.encode(text)), text, columns={"answer": str(number + 1)})
        for number, text in enumerate(texts)
    ]


def answers(these: list[Prompt], *, column: str = "answer", longest: int = 20):
    return demonstrations(these, column=column, encode=TOKENIZER.encode, end=EOS_ID, longest=longest)


class Rollouts(Feed[Batch]):
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.advanced: list[int] = []
        self.given = 0
        self.completed = self.safe = False

    def next(self) -> Batch:
        self.given += 1
        return pack(answers(problems(1)), max_tokens=100)

    def advance(self, step: int) -> None:
        self.advanced.append(step)

    def counters(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]

    def saved(self) -> None:
        self.safe = True

    def complete(self) -> None:
        self.completed = True

    def close(self) -> None: ...


def started(feed: Feed[Batch], *, steps: int = 3) -> StartedFeed:
    def packed(groups) -> Batch:
        return pack(groups, max_tokens=100)

    return StartedFeed(feed, answers=answers(problems()), steps=steps, batch_size=2, pack=packed)


def tokens(batch: Batch) -> list[int]:
    return [token for micro in batch.micro_batches for token in micro.input_ids.tolist()]


def test_an_answer_ends_and_is_learned_whole():
    (group, *_) = answers(problems())
    (sample,) = group.samples
    assert sample.completion_ids == (*TOKENIZER.encode("1"), EOS_ID)
    assert sample.loss_mask() == (1, 1) and all(map(math.isnan, sample.logprobs))


def test_what_has_no_answer_or_no_room_is_said():
    with pytest.raises(DataError, match=r"problem 0 has no text in the column 'solution'.*it has answer"):
        answers(problems(), column="solution")
    with pytest.raises(DataError, match=r"have 6 tokens, but the model takes at most 5"):
        answers(problems(), longest=5)


def test_the_start_comes_first_and_the_feed_hears_of_its_own_steps():
    feed = Rollouts()
    run = started(feed)
    kinds = []
    for step in range(1, 6):
        batch = run.next()
        kinds.append((batch.objective, len(batch.groups)))
        run.advance(step)
    assert kinds == [("sft", 0)] * 3 + [("policy", 1)] * 2
    run.saved()
    run.complete()
    assert feed.advanced == [4, 5] and feed.safe and feed.completed


def test_each_epoch_has_every_answer_once_in_an_order_of_its_own():
    run = started(Rollouts(), steps=5)
    drawn = [run._answer(number).prompt.id for number in range(15)]
    epochs = [drawn[start : start + 5] for start in (0, 5, 10)]
    assert all(sorted(epoch) == list("01234") for epoch in epochs) and len(set(map(tuple, epochs))) == 3


def test_it_goes_on_from_a_checkpoint_as_it_would_have():
    straight, stopped = started(Rollouts()), started(Rollouts())
    found = []
    for step in range(1, 4):
        found.append(tokens(straight.next()))
        straight.advance(step)
    stopped.next()
    stopped.advance(1)
    state = stopped.state_dict()
    resumed = started(Rollouts())
    resumed.load_state_dict(state)
    assert tokens(resumed.next()) == found[1]
    with pytest.raises(CheckpointError, match="had no supervised start"):
        resumed.load_state_dict({"feed": {}})


def test_its_gradient_is_that_of_an_advantage_of_one():
    """Of any loss that is a mean over tokens, at a ratio of 1."""
    batch = pack(answers(problems()), max_tokens=100)
    found = []
    for objective in ("sft", "policy"):
        policy = make_policy(options=loss_options(loss_type="dapo"))
        metrics = policy.accumulate(replace(batch, objective=objective))
        found.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
        if objective == "sft":
            assert metrics["sft_loss"].value() == pytest.approx(metrics["loss"].value(), rel=1e-6)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
