"""Logprobs are kept from what vLLM itself hands over."""

from __future__ import annotations

from tests.contracts.vllm_server import needs_vllm
from tests.unit.engines.vllm.test_logprobs import Engine

pytestmark = needs_vllm


def test_an_output_that_comes_after_vllm_has_ended_the_request():
    engine = Engine(later=True)
    engine.step({"r": (7, -0.5), "s": (1, -1.0)}, new={"r": (3, "a"), "s": (3, "b")})()
    late = engine.step({"r": (99, -9.0), "s": (2, -2.0)})  # r has ended already, which vLLM learns later
    engine.finished = {"r"}
    last = engine.step({"s": (3, -3.0)})
    assert late().logprobs is None and last().logprobs is None
    assert engine.take("a", 3, [7]) == (-0.5,)
    assert engine.take("b", 3, [1, 2, 3]) == (-1.0, -2.0, -3.0)
