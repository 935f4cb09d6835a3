from __future__ import annotations

import json
from typing import Any

import pytest

from lachesis.plugins.atropos.api.reading import read_groups
from lachesis.plugins.atropos.api.wire import (
    EnvRegistration,
    Refusal,
    Registration,
    parse_group,
    parse_groups,
    parse_record,
)
from tests.unit.plugins.atropos.api.processes import ENVIRONMENT, REGISTRATION, scored


def fault(body: bytes, *, many: bool = False) -> dict[str, Any]:
    with pytest.raises(Refusal) as refused:
        (parse_groups if many else parse_group)(body, check=False)
    assert refused.value.status == 422
    return refused.value.detail[0]


def group(**fields: Any) -> bytes:
    return json.dumps(scored(1) | fields).encode()


def test_a_group_is_kept_as_the_batch_will_carry_it():
    parsed = parse_group(json.dumps(scored(2, mark=7, env_id=3) | {"scores": [1, 0], "extra": 1}).encode(), check=False)
    assert (parsed.sequences, parsed.tokens, parsed.env_id, parsed.score) == (2, 6, 3, 0.5)
    kept = json.loads(parsed.json)
    assert len(kept) == 14 and kept["advantages"] is None and "extra" not in kept
    assert b'"scores":[1.0,0.0]' in parsed.json and b" " not in parsed.json


def test_floats_survive_to_the_last_digit():
    values = [0.1, 1e-300, -2.2250738585072014e-308, 1.7976931348623157e308, 123456789.12345679, -0.0]
    parsed = parse_group(group(scores=values), check=False)
    assert json.loads(parsed.json)["scores"] == values


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite_everywhere(word: str):
    text = json.dumps(scored(1) | {"images": {"a": ["@"]}, "messages": [[{"role": "r", "content": 0}]]})
    assert fault(text.replace('"@"', word).encode())["loc"] == ["body", "images", "a", 0]
    assert fault(text.replace('"content": 0', f'"content": {word}').encode())["loc"][:3] == ["body", "messages", 0]
    assert fault(text.replace("0.5", word).encode())["loc"] == ["body", "scores", 0]


def test_words_that_look_like_bad_numbers_are_fine():
    assert parse_group(group(images="NaN and Infinity"), check=False).sequences == 1


def test_faults_in_lists_name_the_group():
    body = b"[" + group() + b"," + group(scores=["x"]) + b"]"
    assert fault(body, many=True)["loc"] == ["body", 1, "scores", 0]


def test_a_million_faults_are_one():
    with pytest.raises(Refusal) as refused:
        parse_group(group(tokens=[["a"] * 100_000]), check=False)
    assert len(refused.value.detail) == 1


def test_of_a_list_of_millions_the_wrong_ones_are_not_told_apart():
    with pytest.raises(Refusal, match="at most 100000 items"):
        read_groups(b'["a"' + b',"a"' * 300_000 + b"]", False, False)


def test_echo_is_short():
    assert len(fault(group(scores="y" * 10_000))["input"]) < 200
    assert fault(group(scores={"a": [1] * 1000}))["input"] == "<dict>"


@pytest.mark.parametrize(
    "body", [b'"\\ud800"', b'"\xff"', b"[" * 5000, b"{", b'{"tokens": [[1]]} x', b"\xef\xbb\xbf{}"]
)
def test_broken_json(body: bytes):
    assert fault(body)["type"] == "json_invalid"


def test_syntax_errors_name_line_and_column():
    found = fault(b'{"tokens": [[1, 2],\n [3, }]]}')
    assert found["loc"] == ["body"] and "line 2 column 6" in found["msg"]


def test_ids_fit_the_store():
    assert fault(group(env_id=2**63))["loc"] == ["body", "env_id"]


def test_registrations():
    assert parse_record(Registration, json.dumps(REGISTRATION).encode()).acknowledge is False
    for kind, record, name in (
        (Registration, REGISTRATION | {"batch_size": 0}, "batch_size"),
        (EnvRegistration, ENVIRONMENT | {"group_size": 0}, "group_size"),
        (EnvRegistration, ENVIRONMENT | {"desired_name": None}, "desired_name"),
    ):
        with pytest.raises(Refusal) as refused:
            parse_record(kind, json.dumps(record).encode())
        assert refused.value.detail[0]["loc"] == ["body", name]
