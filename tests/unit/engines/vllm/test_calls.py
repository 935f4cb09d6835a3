from __future__ import annotations

import pytest
from pydantic_core import from_json, to_json

from lachesis.common.errors import DeadlineExceeded, EngineError, StaleWeights
from lachesis.engines.serving.served import DigestRequest, DigestSlice, LoraSpec, ReceiverSpec, Refused
from lachesis.engines.vllm.calls import answer, read_answer
from lachesis.transport.layout import ReceivedTensor


def raising(error: Exception):
    def call():
        raise error

    return call


def test_a_result_comes_back():
    assert read_answer(answer(lambda: {"a": [1, 2.5, None]})) == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    "error", [StaleWeights("half", remedy="restart"), DeadlineExceeded("late"), EngineError("dead", remedy="look")]
)
def test_an_error_comes_back_as_what_it_was(error):
    with pytest.raises(type(error)) as caught:
        read_answer(answer(raising(error)))
    assert (caught.value.message, caught.value.remedy) == (error.message, error.remedy)
    assert type(caught.value) is type(error)


def test_a_refusal_keeps_its_status():
    with pytest.raises(Refused, match="no") as caught:
        read_answer(answer(raising(Refused("no", status=422, remedy="do"))))
    assert (caught.value.status, caught.value.remedy) == (422, "do")


def test_any_other_error_is_ours_and_named():
    with pytest.raises(EngineError, match="KeyError"):
        read_answer(answer(raising(KeyError("x"))))


@pytest.mark.parametrize("lora", [None, LoraSpec(r=2, alpha=4.0, target_modules=("q", "v"), rslora=True, name="n")])
def test_a_spec_survives_json(lora):
    spec = ReceiverSpec(
        init_method="tcp://h:1",
        world_size=3,
        backend="gloo",
        kind="full" if lora is None else "lora",
        tensors=(ReceivedTensor("a", (2, 3), "float32"), ReceivedTensor("b", (), "bfloat16")),
        lora=lora,
        param_mappings={"a": "b"},
    )
    assert ReceiverSpec.model_validate(from_json(to_json(spec))) == spec


@pytest.mark.parametrize("slices", [None, {}, {"x": DigestSlice("y", 2, 3), "z": DigestSlice("z")}])
def test_slices_survive_json(slices):
    request = DigestRequest(slices=slices)
    assert DigestRequest.model_validate(from_json(to_json(request))) == request
