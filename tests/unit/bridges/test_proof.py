from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import pytest

from lachesis.bridges.proof import (
    QUANTIZED_TOLERANCE,
    TOLERANCE,
    EngineSays,
    SyncProof,
    coarser_quantization,
    engine_arithmetic,
    largest_difference,
)
from lachesis.common.errors import EngineError, StaleWeights
from lachesis.common.types import CanaryReading
from lachesis.config.schema import LachesisConfig
from lachesis.engines.serving.operations import ServerInfo
from lachesis.engines.serving.served import DigestRequest, ModelInfo

TOKENS = (5, 12, 19)


class Pair:
    """A trainer and an engine whose canary logprobs are set by hand."""

    def __init__(self, *, dtype: str = "float32", quantization: str = "none") -> None:
        self.trainer: Sequence[float] = (-1.0, -2.0)
        self.engine: Sequence[float] = (-1.0, -2.0)
        self.version = 1
        self.session_id = "mine"
        self.asked: list[tuple[int, ...]] = []
        self.digests: dict[str, int] = {}
        self.proof = SyncProof(
            token_ids=list(TOKENS),
            trainer=self._read_trainer,
            engine=self._read_engine,
            session_id="mine",
            dtype=dtype,
            quantization=quantization,
        )

    def _read_trainer(self, token_ids: Sequence[int]) -> Sequence[float]:
        self.asked.append(tuple(token_ids))
        return self.trainer

    def _read_engine(self, token_ids: Sequence[int], wanted: DigestRequest) -> EngineSays:
        self.asked.append(tuple(token_ids))
        reading = CanaryReading(tuple(self.engine), version=self.version, session_id=self.session_id)
        return reading, self.digests if wanted.asks else {}


def test_agreement_is_proved_on_the_canary_with_the_largest_difference():
    pair = Pair()
    pair.engine = (-1.0004, -2.0002)
    assert pair.proof.confirm(version=1) == pytest.approx(0.0004)
    assert pair.asked == [TOKENS, TOKENS]


def test_what_was_proved_is_said_once_a_session(caplog: pytest.LogCaptureFixture):
    pair = Pair()
    caplog.set_level(logging.INFO)
    pair.proof.trainer_digests, pair.proof.wanted = (lambda: pair.digests), DigestRequest(slices=None)
    pair.digests = {"a": 1, "b": 2}
    for _ in range(2):
        pair.proof.confirm(version=1)
    (said,) = [record.getMessage() for record in caplog.records if "[PROOF]" in record.getMessage()]
    assert "session mine has version 1" in said and "digests of 2 tensors agree" in said


def test_an_engine_of_another_session_is_refused():
    pair = Pair()
    pair.session_id = "of-yesterday"
    with pytest.raises(StaleWeights, match="session of-yesterday, this run works with mine") as caught:
        pair.proof.confirm(version=1)
    assert caught.value.remedy


@pytest.mark.parametrize("served", [0, 2])
def test_another_version_is_refused_with_both_numbers(served):
    pair = Pair()
    pair.version = served
    with pytest.raises(StaleWeights, match=f"weight version {served}, the trainer is at 1"):
        pair.proof.confirm(version=1)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCE.items())
def test_the_tolerance_is_that_of_the_dtype(dtype, tolerance):
    pair = Pair(dtype=dtype)
    pair.engine = (-1.0, -2.0 - 0.9 * tolerance)
    assert pair.proof.confirm(version=1) == pytest.approx(0.9 * tolerance)
    pair.engine = (-1.0, -2.0 - 1.1 * tolerance)
    with pytest.raises(StaleWeights, match="differ"):
        pair.proof.confirm(version=1)


def test_a_difference_is_told_with_what_both_computed():
    pair = Pair()
    pair.engine = (-1.0, -2.5)
    with pytest.raises(StaleWeights) as caught:
        pair.proof.confirm(version=1)
    message = str(caught.value)
    assert "by up to 0.5 (allowed 0.001)" in message
    assert "engine [-1.0000, -2.5000]" in message
    assert "trainer [-1.0000, -2.0000]" in message


@pytest.mark.parametrize("side", ["trainer", "engine", "both"])
def test_nan_is_no_agreement(side):
    pair = Pair()
    if side != "engine":
        pair.trainer = (-1.0, math.nan)
    if side != "trainer":
        pair.engine = (-1.0, math.nan)
    with pytest.raises(StaleWeights, match="nan"):
        pair.proof.confirm(version=1)


def test_infinite_logprobs_are_no_agreement():
    pair = Pair()
    pair.trainer = pair.engine = (-1.0, -math.inf)
    with pytest.raises(StaleWeights):
        pair.proof.confirm(version=1)


def test_a_reading_of_another_length_is_refused():
    pair = Pair()
    pair.engine = (-1.0,)
    with pytest.raises(StaleWeights, match="inf"):
        pair.proof.confirm(version=1)


def test_an_engine_that_did_not_move_is_told_with_both_numbers():
    """Each step is within the tolerance of the one before, so only the movement shows it."""
    pair = Pair(dtype="bfloat16")
    pair.trainer, pair.engine = (-1.0, -2.0), (-1.2, -2.0)
    pair.proof.confirm(version=1)
    pair.trainer, pair.version = (-1.4, -2.0), 2
    with pytest.raises(StaleWeights, match=r"version 2 the trainer's .* moved by 0\.4 and the engine's not at all"):
        pair.proof.confirm(version=2)


def test_an_engine_that_moved_along_is_not_accused():
    pair = Pair(dtype="bfloat16")
    pair.trainer, pair.engine = (-1.0, -2.0), (-1.2, -2.0)
    pair.proof.confirm(version=1)
    pair.trainer, pair.engine, pair.version = (-1.4, -2.0), (-1.3, -2.0), 2
    assert pair.proof.confirm(version=2) == pytest.approx(0.1)


def test_weights_that_hardly_moved_need_not_show():
    pair = Pair()
    for version in (1, 2, 3):
        pair.version = version
        assert pair.proof.confirm(version=version) == 0.0


def test_a_failed_proof_is_not_what_the_next_is_compared_with():
    pair = Pair(dtype="bfloat16")
    pair.trainer, pair.engine = (-1.0, -2.0), (-1.2, -2.0)
    pair.proof.confirm(version=1)
    pair.trainer, pair.version = (-1.4, -2.0), 2
    for _ in range(2):
        with pytest.raises(StaleWeights, match="not at all"):
            pair.proof.confirm(version=2)


def test_largest_difference():
    assert largest_difference([1.0, 2.0], [1.5, 1.0]) == 1.0
    assert largest_difference([], []) == 0.0
    assert largest_difference([1.0], [1.0, 2.0]) == math.inf
    assert math.isnan(largest_difference([math.nan, 0.0], [0.0, 5.0]))


def digest_proof(trainer: dict[str, int], engine: dict[str, int], *, concurrent: bool = False) -> SyncProof:
    return SyncProof(
        token_ids=TOKENS,
        trainer=lambda _: (-1.0, -2.0),
        engine=lambda _, wanted: (CanaryReading((-1.0, -2.0), version=1, session_id="mine"), engine),
        session_id="mine",
        dtype="bfloat16",
        trainer_digests=lambda: trainer,
        concurrent=concurrent,
    )


@pytest.mark.parametrize("concurrent", [False, True])
def test_equal_digests_are_proof_and_further_tensors_of_the_engine_do_no_harm(concurrent):
    assert digest_proof({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, concurrent=concurrent).confirm(version=1) == 0


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"a": 1, "c": 3}, r"of 3 tensors in the engine 1 are not there \(b\)"),
        ({"a": 2, "b": 1, "c": 3}, r"2 are not the trainer's \(a, b\)"),
        ({"a": 1, "b": 9}, r"1 are not the trainer's \(b\) and 1 are not there \(c\)"),
    ],
    ids=["dropped", "swapped", "old and dropped"],
)
def test_digests_see_what_a_canary_in_bfloat16_cannot(engine, said):
    with pytest.raises(StaleWeights, match=said) as caught:
        digest_proof({"a": 1, "b": 2, "c": 3}, engine).confirm(version=1)
    assert caught.value.remedy


def test_an_engine_that_fails_while_the_trainer_reads_is_not_lost():
    def broken(token_ids: Sequence[int], wanted: DigestRequest) -> EngineSays:
        raise EngineError("the engine is gone")

    proof = SyncProof(
        token_ids=TOKENS,
        trainer=lambda _: (-1.0, -2.0),
        engine=broken,
        session_id="mine",
        dtype="float32",
        concurrent=True,
    )
    with pytest.raises(EngineError, match="gone"):
        proof.confirm(version=1)


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4", "fp8 with its cache"])
def test_where_one_side_is_quantized_they_may_differ_more_and_not_by_anything(kind):
    pair = Pair(quantization=kind)
    allowed = QUANTIZED_TOLERANCE[kind]
    pair.engine = (-1.0 - 0.9 * allowed, -2.0)
    assert pair.proof.confirm(version=1) == pytest.approx(0.9 * allowed)
    pair.engine = (-1.0 - 1.1 * allowed, -2.0)
    with pytest.raises(StaleWeights, match=f"allowed {allowed:g}"):
        pair.proof.confirm(version=1)


@pytest.mark.parametrize(
    ("trainer", "engine", "expected"),
    [
        ("none", {}, "none"),
        ("none", {"quantization": "fp8"}, "fp8"),
        ("none", {"kv_cache_dtype": "fp8_e4m3"}, "fp8"),
        ("none", {"quantization": "fp8", "kv_cache_dtype": "fp8"}, "fp8 with its cache"),
        ("int8", {"quantization": "fp8"}, "fp8"),
        ("nf4", {"kv_cache_dtype": "fp8"}, "nf4"),
    ],
)
def test_the_coarser_of_trainer_and_engine_says_how_far_apart_they_may_be(trainer, engine, expected):
    model = ModelInfo(
        model="tiny", served_names=(), dtype="bfloat16", vocab_size=8, max_model_len=32, tensor_parallel_size=1,
        device="cuda:0", lora_enabled=True, max_lora_rank=8, **engine,
    )  # fmt: skip
    sections = {"run": {"steps": 1}, "model": {"path": "a", "quantization": trainer}, "adapter": {"kind": "lora"}}
    sections |= {"data": {"path": "a"}, "rewards": {"functions": ["a.b"]}, "engine": {"kind": "vllm"}}
    config = LachesisConfig.model_validate(sections)
    assert coarser_quantization(config, rounds=model.rounds) == expected


@pytest.mark.parametrize(
    ("engine", "device", "dtype", "expected"),
    [
        ("vllm 0.26.0", "cuda:0", "float32", "tf32"),
        ("vllm 0.26.0", "cpu", "float32", "float32"),
        ("vllm 0.26.0", "cuda:0", "bfloat16", "bfloat16"),
        ("embedded", "cuda:0", "float32", "float32"),
    ],
)
def test_vllm_multiplies_float32_in_tf32_on_a_gpu(engine, device, dtype, expected):
    model = ModelInfo(
        model="tiny", served_names=(), dtype=dtype, vocab_size=8, max_model_len=32, tensor_parallel_size=1,
        device=device, lora_enabled=False, max_lora_rank=0,
    )  # fmt: skip
    info = ServerInfo(paused=False, sleeping=False, engine=engine, pid=1, model=model, weight_version=0, session_id="a")
    assert engine_arithmetic(info) == expected
