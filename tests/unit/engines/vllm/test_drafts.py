"""Logprobs of guessed tokens are held against the model's."""

from __future__ import annotations

import pytest

from lachesis.engines.serving.bodies import Refused
from lachesis.engines.vllm.backend import check_drafted


def test_tokens_that_come_with_other_logprobs_than_the_models_are_refused():
    check_drafted([-1.0, -2.0], [-1.01, -2.2], kind="vllm")
    for wrong in ([-4.6, -4.6], [float("nan"), -2.0]):
        with pytest.raises(Refused, match="with speculative decoding vllm samples from another policy"):
            check_drafted(wrong, [-1.0, -2.0], kind="vllm")
