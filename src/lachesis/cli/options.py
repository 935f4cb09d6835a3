"""Command-line options made from the fields of a record; ``--set`` is in :mod:`lachesis.config.document`."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lachesis.engines.options import flag_of


def with_options(model: type[BaseModel]) -> Callable[[Any], Any]:
    """Return a decorator that replaces a command's ``**values`` by an option for each field of ``model``."""

    def parameter(name: str, field: FieldInfo) -> Parameter:
        many = get_origin(field.annotation) is tuple
        kind: Any = list[get_args(field.annotation)[0]] | None if many else field.annotation
        lowest: Any = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
        highest: Any = next((bound.le for bound in field.metadata if isinstance(bound, Le)), None)
        option = typer.Option(flag_of(name), help=field.description, min=lowest, max=highest)
        default = Parameter.empty if field.is_required() else None if many else field.default
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])

    def decorate(command: Any) -> Any:
        own = [p for p in signature(command, eval_str=True).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        options = [parameter(name, field) for name, field in model.model_fields.items() if not field.exclude]
        command.__signature__ = Signature([*own, *options])
        return command

    return decorate
