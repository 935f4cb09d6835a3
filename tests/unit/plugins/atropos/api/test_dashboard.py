from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from lachesis.common.errors import ConfigError
from lachesis.plugins.atropos.api.dashboard import load_pieces, view
from lachesis.plugins.atropos.api.entries import HeldGroup, StoredGroup
from tests.unit.plugins.atropos.api.processes import scored


def held(**fields) -> HeldGroup:
    group = scored(2) | fields
    text = json.dumps(group).encode()
    return HeldGroup(number=3, group=StoredGroup(text, sequences=len(group["tokens"]), tokens=6, env_id=None))


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory) -> str:
    """A byte-level tokenizer whose ids are bytes, so that one character may take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_pieces_of_text(bytes_tokenizer: str):
    pieces = load_pieces(bytes_tokenizer)
    encode = Tokenizer.from_file(bytes_tokenizer).encode
    found = pieces(encode("aé✓ b<|end|>").ids)
    assert "".join(found) == "aé✓ b<|end|>" and len(found) == 9 and found[-1] == "<|end|>"
    assert pieces([9999]) == ["<9999?>"]


def test_missing_tokenizer():
    with pytest.raises(ConfigError, match="--tokenizer /no/such"):
        load_pieces("/no/such/directory")


def test_best_scores_first_with_what_was_given():
    shown = view(held(scores=[0.0, 1.0]), environment="math_0", pieces=None)
    assert (shown["environment"], shown["size"], shown["has_text"]) == ("math_0", 2, False)
    first = shown["sequences"][0]
    assert (first["index"], first["score"], first["tokens"], first["trained"]) == (1, 1.0, 3, 2)
    assert first["pieces"] == ["0", "0", "0"] and first["given"] == [0]
    assert first["logprobs"] == [None, -0.25, -0.25]


def test_long_sequences_are_cut_around_the_first_trained_token():
    mask = [-100] * 500 + [1] * 1000
    shown = view(
        held(tokens=[list(range(1500))] * 2, masks=[mask] * 2, inference_logprobs=None), environment="", pieces=None
    )
    first = shown["sequences"][0]
    assert (first["before"], first["after"], len(first["pieces"])) == (440, 600, 460)
    assert first["pieces"][60] == "500" and first["given"] == list(range(60)) and set(first["logprobs"]) == {None}


def test_ragged_and_large_groups():
    shown = view(held(masks=[], scores=[0.5], inference_logprobs=[[-1.0]]), environment="", pieces=None)
    assert [sequence["score"] for sequence in shown["sequences"]] == [0.5, None]
    assert shown["sequences"][0]["trained"] == 0
    many = scored(20)
    many["scores"] = [float(number) for number in range(20)]
    shown = view(held(**many), environment="", pieces=None)
    assert [sequence["score"] for sequence in shown["sequences"]] == [19.0, 18.0, 17.0, 16.0, 3.0, 2.0, 1.0, 0.0]


def test_very_large_groups_are_not_read():
    text = b'{"tokens": ' + b" " * (9 << 20)
    large = HeldGroup(number=0, group=StoredGroup(json=text, sequences=4, tokens=9, env_id=None))
    assert view(large, environment="", pieces=None)["sequences"] == []
