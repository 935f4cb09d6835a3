"""The canary's text: how it begins, how long it is, and who writes it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lachesis.bridges.canary import CanaryText
from lachesis.bridges.proof import bos_of
from tests.tiny import BOS_ID, tiny_model

VOCAB_SIZE = 1000


def likely(prompt: Sequence[int], count: int) -> list[int]:
    return [prompt[0]] * count


def written(prompt: Sequence[int], *, bos: int | None, longest: int = 256) -> tuple[int, ...]:
    return CanaryText(prompt, bos=bos, vocab_size=VOCAB_SIZE, longest=longest).written_by(likely)


def test_without_a_prompt_the_model_writes_on_from_the_token_with_which_its_texts_begin():
    assert written((), bos=2) == (2,) * 33


def test_without_that_token_it_writes_on_from_arbitrary_ones():
    arbitrary = tuple((7 * i + 5) % VOCAB_SIZE for i in range(16))
    assert written((), bos=None) == arbitrary + (5,) * 32


@pytest.mark.parametrize("longest", [256, 40])
def test_a_long_prompt_keeps_its_end_and_the_token_with_which_it_begins(longest: int):
    prompt = (2, *range(10, 200))
    kept = min(64, longest - 32)
    assert written(prompt, bos=2, longest=longest) == (2, *prompt[1 - kept :], *(2,) * 32)


def test_a_prompt_that_begins_otherwise_is_left_as_it_is():
    prompt = tuple(range(10, 200))
    assert written(prompt, bos=2) == (*prompt[-64:], *(prompt[-64],) * 32)
    assert written(prompt[:3], bos=2)[:3] == prompt[:3]


def test_the_first_engine_writes_it_and_the_others_read_the_same():
    text = CanaryText((), bos=2, vocab_size=VOCAB_SIZE, longest=64)
    assert text.written_by(likely) == text.written_by(lambda prompt, count: [9] * count)


@pytest.mark.parametrize(("named", "found"), [(BOS_ID, BOS_ID), (None, None), (10_000, None), (-1, None)])
def test_the_configuration_names_the_token_if_the_vocabulary_has_it(named: int | None, found: int | None):
    model = tiny_model("llama")
    model.config.bos_token_id = named
    assert bos_of(model) == found
