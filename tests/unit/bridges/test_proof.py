from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from lachesis.bridges.canary import History
from lachesis.bridges.fleet_proof import engine_arithmetic
from lachesis.bridges.proof import QUANTIZED_TOLERANCE, TOLERANCE, EngineSays, Proved, SyncProof, coarser_quantization
from lachesis.common.errors import EngineError, StaleWeights
from lachesis.common.types import CanaryReading
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import largest_difference
from lachesis.engines.serving.backend import DigestRequest, ModelInfo
from lachesis.engines.serving.operations import ServerInfo

TOKENS = tuple(range(65))
WEIGHTS, ADAPTER, NONE = DigestRequest(slices=None), DigestRequest(slices={}, adapter=True), None


class Pair:
    """A trainer whose logprobs wander from version to version, and an engine that reads them up to rounding noise.

    Args:
        noise: standard deviation of a logit between both, in nats.
        step: standard deviation of what an update moves a logit by, in nats.
        evidence: the digests that are compared.
    """

    def __init__(
        self,
        *,
        dtype: str = "bfloat16",
        quantization: str = "none",
        noise: float = 0.02,
        step: float = 0.05,
        evidence: DigestRequest | None = NONE,
        adapter: bool = False,
        seed: int = 0,
    ) -> None:
        self._random = random.Random(seed)
        self.noise, self.step = noise, step
        # As a model sees a text that it finds likely: many certain tokens, and a few that are hardly so.
        self.logits = [self._random.gauss(2.0, 3.0) for _ in TOKENS[1:]]
        self.engine_logits = list(self.logits)
        self.version = 1
        self.session_id = "mine"
        self.cached_tokens = 0
        self.asked: list[tuple[int, ...]] = []
        self.digests: dict[str, int] = {"a": 1, "b": 2}
        self.theirs: dict[str, int] | None = None
        self.offset: list[float] = [0.0] * len(self.logits)
        self.proof = SyncProof(
            token_ids=lambda: TOKENS,
            trainer=self._read_trainer,
            engine=self._read_engine,
            session_id="mine",
            dtype=dtype,
            quantization=quantization,
            adapter=adapter,
            **({} if evidence is None else {"wanted": evidence, "trainer_digests": lambda: self.digests}),
        )

    def train(self, *, transferred: bool = True) -> None:
        """Move the trainer by an update, and the engine to where the trainer is if it was transferred."""
        self.version += 1
        self.logits = [value + self._random.gauss(0, self.step) for value in self.logits]
        if transferred:
            self.engine_logits = list(self.logits)

    def confirm(self) -> Proved:
        return self.proof.confirm(version=self.version)

    def settle(self, updates: int = 3) -> None:
        """Make some healthy updates."""
        self.confirm()
        for _ in range(updates):
            self.train()
            self.confirm()

    def _read_trainer(self, token_ids: Sequence[int]) -> Sequence[float]:
        self.asked.append(tuple(token_ids))
        return [logprob(value) for value in self.logits]

    def _read_engine(self, token_ids: Sequence[int], wanted: DigestRequest) -> EngineSays:
        self.asked.append(tuple(token_ids))
        rounded = (value + self._random.gauss(0, self.noise) for value in self.engine_logits)
        logprobs = tuple(logprob(value + off) for value, off in zip(rounded, self.offset, strict=True))
        reading = CanaryReading(logprobs, self.version, self.session_id, cached_tokens=self.cached_tokens)
        return reading, (self.digests if self.theirs is None else self.theirs) if wanted.asks else {}


def logprob(logit: float) -> float:
    """Of one token against all others together."""
    return -math.log1p(math.exp(-logit))


def test_both_sides_read_the_canary_and_the_largest_difference_is_told():
    pair = Pair(noise=0.0)
    pair.offset[3] = 0.01
    proved = pair.confirm()
    assert pair.asked == [TOKENS, TOKENS]
    assert 0 < proved.error <= 0.01 and proved.ratio < 0.1 and not proved.doubt


def test_what_was_proved_is_said_once_a_session(caplog: pytest.LogCaptureFixture):
    pair = Pair(evidence=WEIGHTS)
    caplog.set_level(logging.INFO)
    pair.settle()
    (said,) = [record.getMessage() for record in caplog.records if "[PROOF]" in record.getMessage()]
    assert "session mine has version 1" in said and "digests of 2 tensors agree" in said


def test_an_engine_of_another_session_is_refused():
    pair = Pair()
    pair.session_id = "of-yesterday"
    with pytest.raises(StaleWeights, match="session of-yesterday, but this run works with mine") as caught:
        pair.confirm()
    assert caught.value.remedy


@pytest.mark.parametrize("served", [0, 2])
def test_another_version_is_refused_with_both_numbers(served):
    pair = Pair()
    pair.version = served
    with pytest.raises(StaleWeights, match=f"weight version {served}, but the trainer is at 1"):
        pair.proof.confirm(version=1)


@pytest.mark.parametrize("evidence", [NONE, ADAPTER, WEIGHTS])
@pytest.mark.parametrize("step", [0.0, 1e-3, 0.02, 0.1, 0.5], ids=lambda step: f"moved by {step}")
def test_healthy_training_is_never_accused(evidence: DigestRequest | None, step: float):
    pair = Pair(evidence=evidence, step=step)
    pair.confirm()
    for _ in range(300):
        pair.train()
        assert not pair.confirm().doubt


def test_noise_that_grows_as_the_policy_moves_is_learned():
    pair = Pair()
    pair.confirm()
    for _ in range(200):
        pair.train()
        pair.noise *= 1.01
        assert not pair.confirm().doubt


@pytest.mark.parametrize("evidence", [NONE, ADAPTER])
@pytest.mark.parametrize("noise", [0.0, 0.02], ids=["the same bits", "other requests in its batch"])
@pytest.mark.parametrize("seed", range(20))
def test_an_engine_one_update_behind_is_found_and_named(evidence: DigestRequest | None, noise: float, seed: int):
    pair = Pair(evidence=evidence, step=0.1, noise=noise, seed=seed)
    pair.settle()
    pair.train(transferred=False)
    with pytest.raises(StaleWeights, match="still computes as at version 4") as caught:
        pair.confirm()
    assert ("does not use it" in caught.value.message) == (evidence is ADAPTER)


def test_an_update_too_small_for_16_bits_is_found_by_an_engine_whose_bits_do_not_change():
    pair = Pair(step=1e-6, noise=0.0)
    pair.settle()
    pair.train(transferred=False)
    with pytest.raises(StaleWeights, match="still computes as at version 4"):
        pair.confirm()


@pytest.mark.parametrize("evidence", [NONE, ADAPTER])
@pytest.mark.parametrize("options", [{"adapter": True}, {"quantization": "int8"}], ids=["adapter", "int8"])
def test_an_update_that_the_engine_rounds_away_is_no_engine_that_stands_still(
    evidence: DigestRequest | None, options: dict[str, Any]
):
    pair = Pair(step=1e-4, noise=0.0, evidence=evidence, **options)
    pair.confirm()
    pair.train(transferred=False)
    assert not pair.confirm().doubt


@pytest.mark.parametrize("share", [0.4, 0.0], ids=["moves otherwise", "stands still"])
def test_quantized_weights_move_otherwise_than_the_engine_but_it_moves(share: float):
    still = History(floor=1e-3, absorbs=True, quantized=True)
    trainer, engine = [-5.0] * 16, [-4.0] * 16
    still.add(1, trainer, engine)
    moved = [-5.0 + (0.8 if i % 2 else -0.8) for i in range(16)]
    followed = [-4.0 + (share if i % 4 else -share) for i in range(16)]  # as far as half, mostly another way
    assert still.standing_at(moved, followed, usual=0.1) == (None if share else 1)


def test_an_engine_that_never_used_its_adapter_is_found_by_bits_before_movements_are_clear():
    pair = Pair(step=0.02, noise=0.0, evidence=ADAPTER, adapter=True)
    pair.confirm()
    with pytest.raises(StaleWeights, match="so it has the adapter but does not use it"):
        for _ in range(8):
            pair.train(transferred=False)
            pair.confirm()


def test_an_adapter_that_was_never_used_is_found_once_it_has_moved_enough():
    pair = Pair(evidence=ADAPTER, step=0.01)
    pair.confirm()
    with pytest.raises(StaleWeights, match="so it has the adapter but does not use it"):
        for _ in range(100):
            pair.train(transferred=False)
            pair.confirm()
    assert pair.version < 80


def test_a_few_tokens_that_moved_accuse_nobody():
    pair = Pair(noise=0.0)
    pair.settle()
    pair.version += 1
    pair.logits[:3] = [value + 1e-4 for value in pair.logits[:3]]
    assert not pair.confirm().doubt


@pytest.mark.parametrize(("dtype", "limit"), TOLERANCE.items())
def test_before_anything_was_learned_the_limit_is_that_of_the_arithmetic(dtype: str, limit: float):
    pair = Pair(dtype=dtype, noise=0.0)
    pair.logits = pair.engine_logits = [-20.0] * len(pair.logits)
    pair.offset = [0.9 * limit] * len(pair.logits)
    assert pair.confirm().ratio == pytest.approx(0.9 / 1.02, rel=0.01)
    pair = Pair(dtype=dtype, noise=0.0)
    pair.logits = pair.engine_logits = [-20.0] * len(pair.logits)
    pair.offset = [1.1 * limit] * len(pair.logits)
    with pytest.raises(StaleWeights, match="differ") as caught:
        pair.confirm()
    assert "engine [" in caught.value.message and "trainer [" in caught.value.message


def test_afterwards_it_is_what_this_model_differs_by():
    pair = Pair(noise=0.02)
    pair.settle(10)
    pair.train()
    pair.noise = 0.16  # still below the limit of bfloat16
    with pytest.raises(StaleWeights, match="times what is allowed"):
        pair.confirm()


def test_where_digests_prove_the_weights_a_canary_that_is_off_is_a_doubt():
    pair = Pair(evidence=WEIGHTS)
    pair.settle(10)
    pair.train()
    pair.noise = 0.16
    proved = pair.confirm()
    assert 1 < proved.ratio < 3 and "times what is allowed" in proved.doubt


def test_beyond_what_rounding_can_do_it_ends_the_run_all_the_same():
    pair = Pair(evidence=WEIGHTS)
    pair.settle(10)
    pair.train()
    pair.offset = [1.5 if i % 2 else -1.5 for i in range(len(pair.logits))]
    with pytest.raises(StaleWeights, match="times what is allowed") as caught:
        pair.confirm()
    assert "computes something else" in (caught.value.remedy or "")


def test_with_one_model_the_words_are_of_its_cache():
    pair = Pair()
    pair.proof.one_model = True
    pair.offset = [5.0 if i % 2 else -5.0 for i in range(len(pair.logits))]
    with pytest.raises(StaleWeights, match="at version 1 the logprobs of this model with a KV cache differ"):
        pair.confirm()


@pytest.mark.parametrize("side", ["trainer", "engine", "both"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("evidence", [NONE, WEIGHTS])
def test_what_is_not_finite_is_no_agreement(side: str, value: float, evidence: DigestRequest | None):
    pair = Pair(evidence=evidence, noise=0.0)
    if side != "engine":
        pair.logits[1] = value
    if side != "trainer":
        pair.offset[1] = value
    with pytest.raises(StaleWeights, match=r"not finite|times what is allowed"):
        pair.confirm()


def test_a_reading_of_another_length_is_refused():
    pair = Pair()
    pair.proof.engine = lambda token_ids, wanted: (CanaryReading((-1.0,), version=1, session_id="mine"), {})
    with pytest.raises(StaleWeights):
        pair.confirm()


def test_a_failed_proof_is_not_what_the_next_is_compared_with():
    pair = Pair(step=0.2)
    pair.settle()
    pair.train(transferred=False)
    for _ in range(2):
        with pytest.raises(StaleWeights, match="at version 4"):
            pair.confirm()
    pair.engine_logits = list(pair.logits)
    assert not pair.confirm().doubt


def test_a_prefix_cache_of_the_weights_before_is_refused():
    pair = Pair()
    pair.settle()
    pair.train()
    pair.cached_tokens = 16
    with pytest.raises(StaleWeights, match="prefix cache that holds 16 tokens of the proof's probe"):
        pair.confirm()


def test_asking_twice_for_one_version_finds_the_first_probe_in_the_cache():
    pair = Pair()
    pair.confirm()
    pair.cached_tokens = 16
    assert not pair.confirm().doubt


def test_largest_difference():
    assert largest_difference([1.0, 2.0], [1.5, 1.0]) == 1.0
    assert largest_difference([], []) == 0.0
    assert largest_difference([1.0], [1.0, 2.0]) == math.inf
    assert math.isnan(largest_difference([math.nan, 0.0], [0.0, 5.0]))


def digest_proof(trainer: dict[str, int], engine: dict[str, int], *, concurrent: bool = False) -> SyncProof:
    return SyncProof(
        token_ids=lambda: TOKENS,
        trainer=lambda _: (-1.0, -2.0),
        engine=lambda _, wanted: (CanaryReading((-1.0, -2.0), version=1, session_id="mine"), engine),
        session_id="mine",
        dtype="bfloat16",
        trainer_digests=lambda: trainer,
        wanted=WEIGHTS,
        concurrent=concurrent,
    )


@pytest.mark.parametrize("concurrent", [False, True])
def test_equal_digests_are_proof_and_further_tensors_of_the_engine_do_no_harm(concurrent):
    assert digest_proof({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, concurrent=concurrent).confirm(version=1).error == 0


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"a": 1, "c": 3}, r"of 3 tensors in the engine, 1 is missing \(b\)"),
        ({"a": 2, "b": 1, "c": 3}, r"2 differ from the trainer's \(a, b\): it holds b in place of a"),
        ({"a": 7, "b": 8, "c": 9}, r"3 differ from the trainer's .*: none of them is the trainer's"),
        ({"a": 1, "b": 9}, r"1 differs from the trainer's \(b\) and 1 is missing \(c\)"),
    ],
    ids=["dropped", "swapped", "of another run", "scaled and dropped"],
)
def test_digests_see_what_a_canary_in_bfloat16_cannot(engine, said):
    with pytest.raises(StaleWeights, match=said) as caught:
        digest_proof({"a": 1, "b": 2, "c": 3}, engine).confirm(version=1)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("kept", "said"),
    [("abc", "still holds them as they were"), ("b", "1 differs from the trainer's .*still holds them")],
)
def test_tensors_of_the_update_before_are_told(kept: str, said: str):
    before, now = {"a": 1, "b": 2, "c": 3}, {"a": 4, "b": 5, "c": 6}
    engine = dict(before)
    proof = digest_proof(before, engine)
    proof.confirm(version=1)
    proof.trainer_digests = lambda: now
    engine |= {name: digest for name, digest in now.items() if name not in kept}
    with pytest.raises(StaleWeights, match=said):
        proof.confirm(version=1)


def test_an_engine_that_fails_while_the_trainer_reads_is_not_lost():
    def broken(token_ids: Sequence[int], wanted: DigestRequest) -> EngineSays:
        raise EngineError("the engine is gone")

    proof = SyncProof(
        token_ids=lambda: TOKENS,
        trainer=lambda _: (-1.0, -2.0),
        engine=broken,
        session_id="mine",
        dtype="float32",
        concurrent=True,
    )
    with pytest.raises(EngineError, match="gone"):
        proof.confirm(version=1)


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4", "fp8 with its cache"])
def test_where_one_side_is_quantized_they_may_differ_more_and_not_by_anything(kind: str):
    allowed = QUANTIZED_TOLERANCE[kind]

    def apart(by: float) -> Pair:
        pair = Pair(quantization=kind, noise=0.0)
        pair.logits = pair.engine_logits = [-20.0] * len(pair.logits)
        pair.offset = [by] * len(pair.logits)
        return pair

    assert not apart(0.9 * allowed).confirm().doubt
    with pytest.raises(StaleWeights, match="times what is allowed"):
        apart(1.1 * allowed).confirm()


@pytest.mark.parametrize("seed", range(20))
def test_a_base_in_4_bits_hides_no_adapter_that_is_not_used(seed: int):
    pair = Pair(quantization="nf4", evidence=ADAPTER, step=0.1, noise=0.01, seed=seed)
    draw = random.Random(seed)
    pair.offset = [draw.gauss(0, 1.0) for _ in pair.logits]  # what 4 bits change is the same at each version
    pair.settle(5)
    pair.train(transferred=False)
    with pytest.raises(StaleWeights, match="does not use it"):
        pair.confirm()


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
