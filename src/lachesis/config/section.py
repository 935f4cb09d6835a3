"""The types and the base class of all sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# A part of the user's own: its name, or ``{function: NAME, kwargs: {...}}``; see lachesis.config.custom.
CustomPart = str | dict[str, Any]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """Base of all sections, strict about keys and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
