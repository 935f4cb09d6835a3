"""Bodies to records and back."""

from __future__ import annotations

import pytest

from lachesis.engines.serving.bodies import Body, parse_object
from lachesis.engines.serving.control_wire import parse_adapter_load, parse_receiver
from lachesis.engines.serving.served import AdapterStatus, LoraSpec, Refused
from lachesis.engines.serving.versions import VersionClock
from lachesis.engines.serving.wire import check_model, check_prompt, parse_digests, parse_generate
from lachesis.transport.records import ReceivedTensor
from tests.unit.engines.serving.fakes import FIELDS, INFO


def generate(**document):
    return parse_generate({"prompt": "a"} | document, sampling_fields=FIELDS)[0]


def test_bodies_are_json_objects():
    assert parse_object(b"") == parse_object(b" \n") == {}
    assert parse_object('{"a": "é"}'.encode()) == {"a": "é"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[]", "not a JSON object"), (b"3", "not a JSON object"), (b"{", "line 1, column 2"), (b"\xff", "UTF-8"),
        (b'{"a": NaN}', "NaN"), (b'{"a": -Infinity}', "Infinity"), (b"[" * 99_999, "nested too deeply"),
        (b'{"a": ' + b"9" * 9999 + b"}", "number too long"),
    ],
)  # fmt: skip
def test_other_bodies_are_refused(raw, message):
    with pytest.raises(Refused, match=message) as caught:
        parse_object(raw)
    assert caught.value.status == 400 and caught.value.remedy


@pytest.mark.parametrize(
    ("call", "value", "wanted"),
    [
        (lambda body: body.text("x"), 3, "a string"), (lambda body: body.text("x"), "", "a string"),
        (lambda body: body.text("x"), "a\0", "a string"), (lambda body: body.integer("x"), True, "a whole number"),
        (lambda body: body.integer("x"), 1.5, "a whole number"), (lambda body: body.integer("x", low=2), 1, "least 2"),
        (lambda body: body.integer("x", high=2), 3, "at most 2"), (lambda body: body.number("x"), "1", "a number"),
        (lambda body: body.integer("x", low=1, high=2), 3, "1 to 2"), (lambda body: body.number("x"), True, "a number"),
        (lambda body: body.flag("x"), 1, "true or false"), (lambda body: body.integers("x"), [1, True], "a list"),
        (lambda body: body.integers("x"), "12", "a list"), (lambda body: body.texts("x"), ["a", 1], "a list"),
        (lambda body: body.choice("x", ("a", "b")), ["a"], "one of a, b"),
        (lambda body: body.mapping("x"), [], "object"), (lambda body: body.sequence("x"), {}, "a list"),
    ],
)  # fmt: skip
def test_fields_of_a_wrong_type_are_refused(call, value, wanted):
    with pytest.raises(Refused, match=wanted) as caught:
        call(Body({"x": value}, known=["x"], where="outer"))
    assert "'outer.x'" in caught.value.message


def test_missing_fields_have_a_default_or_are_refused():
    body = Body({"x": None}, known=["x"])
    assert body.text("x", "default") == "default" and body.integers("x", None) is None
    with pytest.raises(Refused, match="'x' is missing"):
        body.text("x")
    with pytest.raises(Refused, match="unknown field 'xy'") as caught:
        Body({"xy": 1}, known=["xyz", "abc"])
    assert "'xyz'" in caught.value.remedy


def test_a_generate_request_has_what_the_caller_gave_and_nothing_else():
    request = generate(temperature=0.5, stop="x", stop_token_ids=[3], max_tokens=None, n=3, logit_bias={"1": 2.0})
    assert request.sampling == {"temperature": 0.5, "stop": ["x"], "stop_token_ids": [3], "logit_bias": {"1": 2.0}}
    assert (request.n, request.logprobs, request.prompt) == (3, None, "a")
    assert generate(max_completion_tokens=5).sampling == {"max_tokens": 5}
    assert generate(max_new_tokens=5, max_tokens=6).sampling == {"max_tokens": 6}
    assert generate(timeout=3, user="u", tools=None).sampling == {}
    assert generate().request_id != generate().request_id


@pytest.mark.parametrize(
    "document",
    [
        {"n": 0}, {"n": 5000}, {"temperature": -0.1}, {"top_p": 0}, {"top_k": -2}, {"max_tokens": 0},
        {"min_tokens": -1}, {"seed": 1 << 63}, {"stop": [""]}, {"stop_token_ids": [-1]}, {"ignore_eos": 1},
        {"logprobs": -1}, {"prompt": None}, {"prompt": []}, {"prompt": 3},
        {"prompt": {"prompt_token_ids": []}}, {"prompt": {}},
        {"prompt": {"prompt_token_ids": [1], "prompt": "a"}}, {"prompt_token_ids": [1]}, {"temperature": 1e999},
    ],
)  # fmt: skip
def test_requests_that_mean_nothing_are_refused(document):
    with pytest.raises(Refused) as caught:
        generate(**document)
    assert caught.value.status == 400


@pytest.mark.parametrize("name", [None, "tiny", "/models/tiny", "policy", "mine"])
def test_all_names_mean_the_weights_in_force(name):
    check_model(name, info=INFO, adapter=AdapterStatus("mine", 2, 4.0))
    with pytest.raises(Refused, match="no model 'other'") as caught:
        check_model("other", info=INFO, adapter=None)
    assert caught.value.status == 404 and "policy" in caught.value.remedy
    with pytest.raises(Refused):
        check_model("mine", info=INFO, adapter=None)


def test_prompts_have_tokens_that_the_model_knows_and_room_for_the_completion():
    fits = generate(prompt=None, prompt_token_ids=[5] * 30, max_tokens=2)
    check_prompt(fits, info=INFO)
    check_prompt(generate(prompt=None, prompt_token_ids=[99] * 31), info=INFO)
    check_prompt(generate(prompt="text" * 100), info=INFO)
    for wrong in (
        {"prompt_token_ids": [100]},
        {"prompt_token_ids": [5] * 32},
        {"prompt_token_ids": [5], "max_tokens": 32},
    ):
        with pytest.raises(Refused) as caught:
            check_prompt(generate(prompt=None, **wrong), info=INFO)
        assert caught.value.status == 400 and caught.value.remedy


def test_slices_are_of_the_tensor_they_are_named_after():
    request = parse_digests({"slices": {"w": {}, "v": {"name": "u", "start": 2, "rows": 3}}})
    assert request.slices is not None and not request.adapter
    assert [(s.name, s.start, s.rows) for s in request.slices.values()] == [("w", 0, None), ("u", 2, 3)]
    assert parse_digests({"adapter": True}).slices is None
    with pytest.raises(Refused, match=r"slices\.w"):
        parse_digests({"slices": {"w": {"start": -1}}})


def test_adapter_routes_take_either_name():
    load = parse_adapter_load({"lora_path": "/a", "lora_name": "n", "lora_int_id": 3, "weight_version": 2})
    assert (load.path, load.name, load.version) == ("/a", "n", 2)
    load = parse_adapter_load({"adapter_path": "/a"})
    assert (load.name, load.version) == ("policy", None)
    for wrong in ({}, {"adapter_path": "/a", "lora_path": "/b"}, {"adapter_path": "/a", "weight_version": 1 << 60}):
        with pytest.raises(Refused):
            parse_adapter_load(wrong)


def receiver(**changes):
    metadata = {"param_names": ["a", "b"], "param_shapes": [[2, 3], []], "param_dtypes": ["torch.float32", "bfloat16"]}
    body = {"init_method": "tcp://[::1]:29500", "world_size": 3, "rank": 2, "param_metadata": metadata}
    return parse_receiver(body | changes)


def test_receivers():
    spec = receiver()
    assert (spec.kind, spec.backend, spec.rank, spec.lora) == ("full", "nccl", 2, None)
    assert spec.tensors == (ReceivedTensor("a", (2, 3), "float32"), ReceivedTensor("b", (), "bfloat16"))
    by_name = {"param_names": ["a"], "param_shapes": {"a": [2]}, "param_dtypes": {"a": "float16"}, "num_params": 1}
    assert receiver(param_metadata=by_name).tensors == (ReceivedTensor("a", (2,), "float16"),)
    lora = receiver(lora={"r": 4, "alpha": 8, "target_modules": ["q"], "rslora": True}).lora
    assert lora == LoraSpec(4, 8.0, ("q",), rslora=True) and lora.scaling == 4.0


@pytest.mark.parametrize("init_method", ["tcp://a", "tcp://:5", "tcp://a:0", "tcp://a:70000", "file:///x", "env://"])
def test_channels_have_an_address(init_method):
    with pytest.raises(Refused, match="names no address"):
        receiver(init_method=init_method)


def test_versions_are_those_in_force_at_a_moment(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = VersionClock()
    assert clock.current == clock.at(0) == 0
    for moment, version in ((20.0, 4), (30.0, 2)):
        now[0] = moment
        clock.record(version)
    assert [clock.at(moment) for moment in (19.9, 20.0, 29.9, 30.0)] == [0, 4, 4, 2]
    assert clock.span(15, 25) == (0, 4) and clock.current == 2
