"""Problems that the schema finds in the list of sources, with the keys and lines of each entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lachesis.common.json_values import is_list, is_object
from lachesis.config.document import Document, Place, dotted
from lachesis.config.problems import needed, problems_of, unwritten
from lachesis.config.schema import MixedSourceConfig

Details = Sequence[Mapping[str, Any]]


def problems(document: Document, details: Details | None = None) -> list[str]:
    """Return the problems within entries of the list.

    Args:
        document: with the list. details: the validator's findings in entries. Without it, the problems are keys that
            each source needs beyond the schema's: data and rewards of a local one.
    """
    found: list[str] = []
    for place, entry in _entries(document):
        if details is None:
            inner = unwritten(needed(entry), entry)
        else:
            mine = [{**one, "loc": one["loc"][2:]} for one in details if f"{dotted(one['loc'][:2])}." == place]
            inner = problems_of(mine, entry, MixedSourceConfig)
        found += [f"{place}{problem}" for problem in inner]
    return found


def _entries(document: Document) -> Iterator[tuple[str, Document]]:
    """Yield the beginning of each source's keys, and these keys as a separate document."""
    sources = document.data.get("sources")
    for index, entry in enumerate(sources if is_list(sources) else ()):
        if is_object(entry):
            here: Place = ("sources", index)
            origins = {place[2:]: said for place, said in document.origins.items() if place[:2] == here}
            yield f"{dotted(here)}.", Document(document.name, entry, origins)
