"""Writer of OpenEnv's ``TrainingTrace`` (0.10, schema 1): the calls of a model in one rollout. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from lachesis.common.types import Sample


def trace_of(sample: Sample, *, name: str) -> dict[str, Any]:
    """Return a sample as a trace: a turn for each stretch of tokens that the model sampled, named after ``name``."""
    return {"schema_version": 1, "turns": list(_calls(sample, name))}


def _calls(sample: Sample, name: str) -> Iterator[dict[str, Any]]:
    ids, place = sample.completion_ids, 0
    for own, bits in groupby(sample.loss_mask()):
        start, place = place, place + len(list(bits))
        if own:
            prompt = [*sample.prompt_ids, *ids[:start]]
            yield {
                "node_id": f"{name}-{start}",
                "prompt_token_ids": prompt,
                "completion_token_ids": list(ids[start:place]),
                "per_token_logps": list(sample.logprobs[start:place]),
                "loss_mask": [0] * len(prompt) + [1] * (place - start),
            }
