"""Sections of the source that reads a rollout API, and of the services that `lachesis run` starts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lachesis.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class AtroposSourceConfig(Section):
    """Scored groups that environments push to a rollout API; `data` and `rewards` are only for held-out problems."""

    kind: Literal["atropos"] = "atropos"
    url: str = Field(default="http://127.0.0.1:8002", description="Address of the rollout API.")
    batch_size: PositiveInt | None = Field(
        default=None,
        description="Completions per batch of the API; batch.prompts_per_step x sampling.num_generations if unset.",
    )
    max_sequence_length: PositiveInt = Field(
        default=2048, description="Longest prompt and completion together, as reported to the environments."
    )
    wait_s: PositiveFloat = Field(
        default=3600.0,
        description="Longest wait for environments to fill a batch, in seconds since the last group.",
    )
    missing_logprobs: Literal["warn", "error"] = Field(
        default="warn",
        description="If groups have no behaviour logprobs: use the trainer's own, with a warning, or end the run.",
    )


class ApiServiceConfig(Section):
    """The rollout API, at the address of `source.url`; it sets aside groups that no trainer could use."""

    max_queued_tokens: PositiveInt | None = Field(
        default=None, description="Environments wait once this many tokens are queued; no limit if unset."
    )
    max_body_mb: PositiveFloat = Field(default=64.0, description="Largest post, in MiB.")
    ack_timeout_s: PositiveFloat = Field(
        default=600.0, description="Seconds after which a batch that the trainer has lost is handed out again."
    )
    env_timeout_s: PositiveFloat = Field(
        default=300.0, description="Seconds of silence after which an environment no longer counts."
    )


class EnvironmentServiceConfig(Section):
    """An environment, started as `lachesis env NAME serve ARGS`."""

    name: str = Field(description="A shipped environment, `FILE.py:CLASS` or `module.CLASS`.")
    args: list[str] = Field(default_factory=list, description="Its flags; the addresses of API and engine are added.")


class ServicesConfig(Section):
    """Services that `lachesis run` starts besides engine and trainer; other commands read only `restarts`."""

    api: ApiServiceConfig | None = Field(
        default_factory=ApiServiceConfig, description="The rollout API; null if it runs already."
    )
    environment: EnvironmentServiceConfig | None = Field(
        default=None, description="The environment; null if it is started elsewhere."
    )
    start_s: PositiveFloat = Field(default=120.0, description="Longest time until the rollout API answers, in seconds.")
    restarts: NonNegativeInt = Field(
        default=3,
        description="Most restarts of either service after it dies, and of the run, from its last checkpoint, after "
        "an engine that shares its weights dies.",
    )
