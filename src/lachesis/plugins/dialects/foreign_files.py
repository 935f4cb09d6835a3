"""Translation of another trainer's file, or of a script that starts one, to the text of our configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lachesis.common.json_values import flat, is_list, is_object
from lachesis.config.document import to_yaml
from lachesis.config.keys import find_keys, value_in_words
from lachesis.config.load import dialect_of, row_sections, validate
from lachesis.config.overrides import apply_overrides
from lachesis.config.problems import located
from lachesis.config.rules import check
from lachesis.plugins.dialects import findings_of, keys_of, translate
from lachesis.plugins.dialects.other_systems import OTHER_SYSTEMS
from lachesis.plugins.dialects.scripts import read_any
from lachesis.plugins.dialects.shell.splitting import readable
from lachesis.plugins.dialects.table import Translation


def translated(path: Path, *, overrides: Sequence[str] = ()) -> str:
    """Return YAML in our keys with the same meaning, after findings as comments.

    Raises:
        ConfigError: the file cannot be read, is of an unknown trainer, or asks for something that Lachesis cannot do.
    """
    document = read_any(path)
    dialect = dialect_of(document)
    apply_overrides(document, overrides, row_sections=() if dialect == "canonical" else row_sections(dialect))
    if dialect == "canonical":
        validate(document, complete=False)
        return to_yaml(document.data)
    translation = translate(document, dialect=dialect, processes=None)
    config = validate(translation.document, complete=False)
    check(config, located=partial(located, document=translation.document), name=str(path))
    said = [f"{finding.level}: {finding.message}" for finding in findings_of(translation, dialect=dialect)]
    name = dialect if dialect in OTHER_SYSTEMS else translation.dialect.name
    return _written(f"Translated from {name}'s keys in {path.name}.", said, translation)


def keys_in(path: Path) -> Iterator[str]:
    """Yield a line for each key of a file or script: the key that it sets here, or what happens to it instead.

    Raises:
        ConfigError: as :func:`translated`, except for values.
    """
    document = read_any(path)
    dialect = dialect_of(document)
    rows = frozenset[str]() if dialect == "canonical" else row_sections(dialect)
    for name, value in _leaves(document.data, rows):
        if dialect == "canonical":
            meaning = next((key.description for key in find_keys(name)), "not a key of Lachesis")
        else:
            table = keys_of(dialect)
            entry = table.entries.get(name)
            meaning = entry.in_words if entry else f"no key of {table.name}'s that Lachesis knows"
            if entry and entry.treatment == "refused" and not entry.asks(value):
                meaning = "nothing here, with this value"
        yield f"{name}: {readable(value_in_words(value))}  ->  {meaning}"


def _leaves(data: Mapping[str, Any], rows: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each key, including keys in lists of mappings."""
    for name, value in flat(data):
        if name in rows and is_list(value):
            for row in filter(is_object, value):
                yield from flat(row, f"{name}.")
        else:
            yield name, value


def _written(title: str, said: Sequence[str], translation: Translation) -> str:
    comments = [f"# {line}" for text in (title, *said) for line in text.splitlines()]
    return "\n".join([*comments, to_yaml(translation.document.data)])
