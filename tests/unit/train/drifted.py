"""Groups as an asynchronous run has them: sampled by a policy that is not quite the trainer's any more."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.train.batch import Batch, MicroBatch
from tests.tiny import VOCAB_SIZE
from tests.unit.train.model.test_forward import plain_logprobs


@torch.no_grad()
def drifted_groups(
    model: PreTrainedModel, *, groups: int = 3, samples: int = 4, noise: float = 0.3, seed: int = 0
) -> list[Group]:
    """Samples whose logprobs are the model's plus noise, ragged, at several temperatures.

    In each group the last sample equals the first, one has tool output in it (masked), one is truncated, and one
    logprob is unknown.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = lambda n: tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist())  # noqa: E731
    made = []
    for g in range(groups):
        prompt = tokens(3 + g)
        drawn = [
            Sample(prompt, tokens(2 + (3 * i + g) % 6), (), "stop", VersionSpan(0, 0), temperature=0.7 if g else 1.0)
            for i in range(samples - 1)
        ]
        drawn.append(drawn[0])
        spread = torch.randn(samples, generator=generator, dtype=torch.float64)
        finished = []
        for i, sample in enumerate(drawn):
            own = plain_logprobs(model, sample)
            sampled = (own + noise * torch.randn(len(own), generator=generator)).tolist()
            finished.append(replace(sample, logprobs=tuple(sampled), advantage=float(spread[i])))
        length = len(finished[1].completion_ids)
        finished[1] = replace(finished[1], mask=tuple(int(t != 1) for t in range(length)))
        finished[2] = replace(finished[2], finish_reason="length", logprobs=(math.nan, *finished[2].logprobs[1:]))
        made.append(Group(Prompt(str(g), prompt, ""), tuple(finished)))
    return made


def used(batch: Batch, iteration: int, *, of: int) -> Batch:
    """The batch in one of several uses."""
    return replace(batch, iteration=iteration, num_iterations=of)


def tokens_of(batch: Batch, name: str) -> torch.Tensor:
    """A field of all micro-batches, end to end."""
    return torch.cat([getattr(micro, name) for micro in batch.micro_batches])


def rows_of(micro: MicroBatch, values: torch.Tensor) -> list[torch.Tensor]:
    """Values [N] by row."""
    return [values[micro.row == row] for row in range(micro.advantages.numel())]
