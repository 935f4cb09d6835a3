"""What vLLM 0.26 and 0.32 give, by the shapes seen there: one row of experts less than there are tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lachesis.common.errors import EngineError
from lachesis.engines.vllm.routed_experts import read_routes, returns_routes


def output(chosen: np.ndarray | None, *, prompt: int = 3, tokens: int = 2) -> Any:
    completion = SimpleNamespace(token_ids=[5] * tokens, routed_experts=chosen)
    return SimpleNamespace(prompt_token_ids=[4] * prompt, outputs=[completion])


def routes(rows: int, *, layers: int = 3, dense: int = 1) -> np.ndarray:
    """As vLLM counts decoder layers: those without experts have zeros."""
    chosen = np.stack([np.arange(rows), np.arange(rows) + 7], axis=-1)[:, None].repeat(layers, axis=1)
    chosen[:, :dense] = 0
    return chosen.astype(np.uint8)


def test_they_are_of_all_tokens_but_the_last():
    found = read_routes(output(routes(4)))
    assert found is not None and np.array_equal(found.chosen, routes(4))


def test_what_stop_strings_cut_off_is_cut_off_here_too():
    found = read_routes(output(routes(6)))
    assert found is not None and len(found) == 4


def test_a_request_without_a_token_has_none():
    assert read_routes(output(None, tokens=0)) is None


@pytest.mark.parametrize(("chosen", "number"), [(None, 0), (routes(3), 3)])
def test_too_few_are_an_error(chosen: np.ndarray | None, number: int):
    with pytest.raises(EngineError, match=f"the experts of {number} of 4 tokens"):
        read_routes(output(chosen))


def test_kernels_that_show_none_leave_zeros_which_is_an_error():
    """As those of vLLM 0.26 for the CPU do."""
    with pytest.raises(EngineError, match="one expert twice in each layer"):
        read_routes(output(np.zeros((4, 3, 2), dtype=np.uint8)))


@pytest.mark.parametrize("asked", [False, True])
def test_the_option_is_where_the_version_has_it(asked: bool):
    flag = SimpleNamespace(enable_return_routed_experts=asked)
    assert returns_routes(SimpleNamespace(model_config=flag)) is asked  # 0.26
    assert returns_routes(SimpleNamespace(model_config=SimpleNamespace(), aux_output_config=flag)) is asked  # 0.32
