"""Groups as JSON and back; :mod:`tests.unit.metrics.sinks.test_tape` reads them from files."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy
import pytest

from lachesis.common.group_codec import decode_group, encode_group, json_safe
from lachesis.common.types import Group, Prompt, Sample, VersionSpan


def sample(completion: tuple[int, ...], **fields: Any) -> Sample:
    return Sample(
        prompt_ids=(1, 2),
        completion_ids=completion,
        logprobs=(-0.5,) * len(completion),
        finish_reason="stop",
        versions=VersionSpan(0, 1),
        **fields,
    )


def test_a_group_comes_back_from_json_as_it_was():
    samples = (sample((3, 4), advantage=0.0, token_advantages=(0.0, 0.5)), sample((5,), advantage=1.0, rewards=(None,)))
    inner = Group(Prompt("0", (1, 2), "q", columns={"answer": 3}), samples[:1])
    group = Group(Prompt("1", (1, 2), "q"), samples, replaces=inner, logged={"extracted": ["3", None]})
    assert decode_group(json.loads(json.dumps(encode_group(group)))) == group


@pytest.mark.parametrize(
    ("value", "safe"),
    [
        (numpy.int64(3), 3),
        (numpy.float32(0.5), 0.5),
        ((1, "a"), [1, "a"]),
        (math.nan, "nan"),
        ({1: 2}, "{1: 2}"),
        ({"a": {1}}, {"a": "{1}"}),
        (True, True),
    ],
)
def test_columns_become_json_safe(value: Any, safe: Any) -> None:
    assert json_safe(value) == safe
    assert type(json_safe(value)) is type(safe)
