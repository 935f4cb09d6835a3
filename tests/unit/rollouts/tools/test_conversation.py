from __future__ import annotations

import numpy as np
import pytest

from lachesis.common.routed_experts import RoutedExperts
from lachesis.common.types import Completion, VersionSpan
from lachesis.plugins.environments.turn_server import Turn, joined
from lachesis.rollouts.tools.conversation import Conversation


def completion(before: int, *token_ids: int, turn: int) -> Completion:
    """Tokens after ``before`` others, with experts that tell of which turn they are."""
    routed = RoutedExperts.of(np.full((before + len(token_ids) - 1, 1, 2), turn))
    return Completion(token_ids, (-1.0,) * len(token_ids), "stop", VersionSpan(turn, turn), routed=routed)


@pytest.mark.parametrize("kind", ["tools", "turns"])
def test_each_token_of_a_conversation_has_the_experts_that_it_was_first_computed_with(kind: str):
    """The prompt and the first turn but its last token; then that, what was told, and the second turn but its last."""
    first, second = completion(3, 4, 5, turn=1), completion(7, 8, 9, turn=2)
    if kind == "tools":
        conversation = Conversation((1, 2, 3))
        conversation.sample(first)
        conversation.give((6, 7))
        conversation.sample(second)
        sample = conversation.as_sample(text="", temperature=1.0)
    else:
        turns = [Turn((1, 2, 3), first), Turn((1, 2, 3, 4, 5, 6, 7), second)]
        (sample,) = joined(turns, decode=lambda ids: ["" for _ in ids], temperature=1.0)
    assert sample.completion_ids == (4, 5, 6, 7, 8, 9) and sample.mask == (1, 1, 0, 0, 1, 1)
    assert sample.routed is not None and sample.routed.chosen[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert len(sample.routed) == len(sample.prompt_ids) + len(sample.completion_ids) - 1
