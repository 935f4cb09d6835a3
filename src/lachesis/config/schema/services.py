"""What `lachesis run` starts besides engine and trainer."""

from __future__ import annotations

from pydantic import Field

from lachesis.config.schema.base import NonNegativeInt, PositiveFloat, PositiveInt, Section


class ApiServiceConfig(Section):
    """The rollout API, at the address of `source.url`; it sets aside groups that no trainer could use."""

    max_queued_tokens: PositiveInt | None = Field(
        default=None, description="Have environments wait once so many tokens are queued; no limit if unset."
    )
    max_body_mb: PositiveFloat = Field(default=64.0, description="Largest post, in MiB.")
    ack_timeout_s: PositiveFloat = Field(
        default=600.0, description="Seconds after which a batch that the trainer has lost is handed out again."
    )
    env_timeout_s: PositiveFloat = Field(
        default=300.0, description="Seconds of silence after which an environment counts no more."
    )


class EnvironmentServiceConfig(Section):
    """An environment, as `lachesis env NAME serve ARGS`."""

    name: str = Field(description="A shipped environment, `FILE.py:CLASS` or `module.CLASS`.")
    args: list[str] = Field(
        default_factory=list, description="Its flags; the addresses of API and engine are given to it."
    )


class ServicesConfig(Section):
    """What `lachesis run` starts besides engine and trainer; other commands leave it alone."""

    api: ApiServiceConfig | None = Field(
        default_factory=ApiServiceConfig, description="The rollout API; null where it runs already."
    )
    environment: EnvironmentServiceConfig | None = Field(
        default=None, description="The environment; null where it is started elsewhere."
    )
    start_s: PositiveFloat = Field(default=120.0, description="Longest time until the rollout API answers, in seconds.")
    restarts: NonNegativeInt = Field(
        default=3, description="How often each of the two is started again where it dies; then the run ends."
    )
