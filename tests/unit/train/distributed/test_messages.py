"""What travels between ranks arrives as it was, and nothing else is read."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lachesis.common.errors import TrainingError
from lachesis.metrics.values import Max, Mean, Sum
from lachesis.train.batch import idle_micro_batch, pack, split
from lachesis.train.distributed.messages import Alive, Answer, Ended, Failed, Turn, decode, encode
from tests.unit.train.model.test_forward import random_groups


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, found.is_meta) == (expected.dtype, expected.shape, expected.is_meta)
        assert expected.is_meta or torch.equal(found.nan_to_num(nan=7.0), expected.cpu().nan_to_num(nan=7.0))
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def parts() -> list[Any]:
    batch = pack(random_groups(groups=3, samples=4, longest=6, seed=1), max_tokens=64)
    return [dataclasses.replace(part, micro_batches=tuple(part.micro_batches)) for part in split(batch, 2)]


@pytest.mark.parametrize(
    "message",
    [
        Turn(0, "build", ({"a": [1, None, True, 0.1], "b": {"c": "ü"}},)),
        Answer(3, parts()[1]),
        dataclasses.replace(parts()[1], micro_batches=(idle_micro_batch(),)),
        Turn(7, "canary", ((1, 2, 3),), parts=True, answers=True),
        Turn(
            8,
            "load_optimizer_state",
            (
                {
                    "parts": [{"state": {0: {"step": torch.tensor(3.0), "m": torch.empty(2, 3, device="meta")}}}],
                    "betas": (0.9, 0.95),
                    "noise": torch.arange(4, dtype=torch.uint8),
                    "half": torch.randn(3, dtype=torch.bfloat16).t(),
                },
            ),
        ),
        Answer(0, {"loss": Sum(1.5), "kl": Mean(0.0, 0.0), "largest": Max(-math.inf), "odd": Sum(math.nan)}),
        Answer(0, [torch.empty(0), torch.zeros(2, 3).t()]),
        Failed("why", "what to do"),
        Alive(),
        (1, "host", 4711),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was(message: Any):
    assert_same(decode(encode(message)), message)


def test_one_tensor_in_two_places_travels():
    tensor = torch.arange(3)
    assert_same(decode(encode([tensor, tensor, tensor[1:]])), [tensor, tensor, tensor[1:]])


def test_what_is_no_record_does_not_travel():
    with pytest.raises(TypeError, match="a object cannot be sent"):
        encode(Answer(0, object()))


class Harmful:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps(Harmful()),
        encode([1])[:-3],
        encode([torch.zeros(3)])[:-3],
        encode([1]).replace(b'"list"', b'"lost"'),
        encode(Ended()).replace(b"Ended", b"Endet"),
        encode(Failed("a", "b")).replace(b"remedy", b"advice"),
    ],
    ids=[
        "empty",
        "a pickle",
        "cut short",
        "a tensor cut short",
        "an unknown kind",
        "an unknown record",
        "an unknown field",
    ],
)
def test_anything_else_is_an_error(data: bytes):
    with pytest.raises(TrainingError, match="cannot be read"):
        decode(data)
