"""The types and base classes of all sections, including those of plug-ins and installed packages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# A custom part: its name, or ``{function: NAME, kwargs: {...}}``; see lachesis.config.custom.
CustomPart = str | dict[str, Any]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """Base class of all sections: unknown keys are errors, and instances are immutable.

    In a section of an installed package, ``builds`` names the function or class that makes the part, as
    ``module.NAME``; see :mod:`lachesis.config.installed`.
    """

    builds: ClassVar[str] = ""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class BaseEngineConfig(Section):
    """Base class of engine sections.

    ``place`` says where the engine runs: in the ``trainer``'s process, on servers that the ``run`` starts and stops, or
    on servers that run ``elsewhere``.
    """

    place: ClassVar[Literal["trainer", "run", "elsewhere"]]


class EpisodesSourceConfig(Section):
    """Base class of sections for environments with their own tasks, which exclude `data` and `rewards`."""

    max_tasks: PositiveInt | None = Field(
        default=None, description="Use only the first N tasks; needed if an environment has unlimited ones."
    )
    eval_tasks: NonNegativeInt = Field(
        default=0, description="Tasks that are held out: of the environment's evaluation set, or else its last ones."
    )
    max_concurrent: PositiveInt = Field(default=128, description="Most rollouts at the same time.")
    refill_rounds: NonNegativeInt = Field(
        default=1,
        description="Replays of failed rollouts. A group that then has fewer than two is dropped.",
    )
    rollout_s: PositiveFloat | None = Field(
        default=600.0, description="Limit of one rollout, in seconds; a longer one fails."
    )
