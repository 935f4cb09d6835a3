"""The way from a prompt to a batch."""

from __future__ import annotations

from pydantic import Field

from lachesis.config.schema.base import Fraction, NonNegativeInt, PositiveInt, Section


class PipelineConfig(Section):
    """How generation, scoring and training overlap, and what happens to groups without signal."""

    async_prefetch: bool = Field(default=False, description="Generate the next batches while the trainer trains.")
    prefetch_depth: PositiveInt = Field(default=1, description="Batches that may be generated ahead.")
    max_staleness: NonNegativeInt | None = Field(
        default=4,
        description="Drop and count samples that would be trained on when more weight versions old than this; "
        "unset: never.",
    )
    streaming: bool = Field(
        default=False, description="Score groups as they are finished, while others are still being generated."
    )
    streaming_min_groups: PositiveInt = Field(
        default=1, description="Fewest groups that are scored together; the last may be fewer."
    )
    refill_zero_signal: NonNegativeInt = Field(
        default=0,
        description="Replace groups whose rewards are all equal by new ones, in at most N further rounds a batch "
        "(dynamic sampling); 0 keeps them.",
    )
    replay_size: NonNegativeInt = Field(
        default=0, description="Groups with signal that are kept to replace groups without; 0 keeps none."
    )
    replay_recompute_logps: bool = Field(
        default=True, description="Compute the old logprobs of replayed groups anew, with the current weights."
    )
    reroll_start_fraction: Fraction = Field(
        default=1.0,
        description="After this share of the steps, prompts that nothing solved are tried again; 1 never does.",
    )
    reroll_max_groups: PositiveInt = Field(default=1, description="Most prompts of a batch that are such retries.")
