"""What reward functions see of special tokens."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from lachesis.rollouts.generation import keeping_decoder, removed_special_tokens, reward_decoder, text_decoder
from tests.tiny import EOS_ID, PAD_ID, tiny_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "<mark>"]})
    return tokenizer


def test_tokens_with_a_meaning_are_kept_and_those_of_the_end_are_not(tokenizer: PreTrainedTokenizerFast):
    think, mark = tokenizer.convert_tokens_to_ids(["[THINK]", "<mark>"])
    ids = [think, *tokenizer.encode("ab", add_special_tokens=False), mark, EOS_ID, PAD_ID]
    assert keeping_decoder(tokenizer)([ids]) == ["[THINK]ab<mark>"]
    assert text_decoder(tokenizer)([ids]) == ["ab"]


def test_tokens_about_reasoning_are_named_where_they_are_taken_out(tokenizer: PreTrainedTokenizerFast):
    assert removed_special_tokens(tokenizer) == ["[THINK]"]
    assert removed_special_tokens(tiny_tokenizer()) == []


def test_other_special_tokens_are_named_once_if_completions_have_them(tokenizer: PreTrainedTokenizerFast, caplog):
    mark = tokenizer.convert_tokens_to_ids("<mark>")
    decode = reward_decoder(tokenizer, "remove")
    assert decode([[7, 8, mark], [7, EOS_ID, PAD_ID]])[0] == decode([[7, 8]])[0]
    assert not caplog.records
    decode([[7, mark, 8]])
    decode([[mark, 8]])
    assert [record.getMessage()[:44] for record in caplog.records] == ["completions have the special tokens <mark>, "]
