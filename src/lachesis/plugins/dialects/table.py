"""Tables of another trainer's names, and the translation of its configuration by them.

An entry gives the canonical key that a name sets, the conversion of its value, and any difference in meaning. The
dialect's code translates values that depend on several keys, which it finds by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from lachesis.common.errors import ConfigError, nearest
from lachesis.common.json_values import is_list, is_object
from lachesis.common.types import Finding
from lachesis.config.document import FROM_PYTHON, Document, Place, describe, dotted
from lachesis.config.keys import find_keys
from lachesis.plugins.dialects import convert as converters
from lachesis.plugins.dialects.convert import UNSET
from lachesis.plugins.dialects.words import read_table

Convert = Callable[[Any], Any]
Treatment = Literal["sets", "together", "nothing", "cannot", "refused"]


def same(value: Any) -> Any:
    """Return their value unchanged."""
    return value


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of the table: one of their names.

    Attributes:
        name: dotted, as in their file; a flag without its dashes.
        path: the canonical key that it sets; empty if it sets none.
        treatment: ``sets`` that key; is translated ``together`` with others; means ``nothing`` here (one note lists
            all such names); ``cannot`` be honoured (a warning); or is ``refused`` (an error). The last three apply only
            to values that request something: not to null, false and empty values, and the last two not to 0.
        convert: their value to ours; raises ConfigError for a value that has no counterpart.
        default: our value if their file does not set it, if that differs from our own default.
        note: its meaning here, if that differs.
        fine: further values with which a refused name has no effect.
    """

    name: str
    path: str = ""
    treatment: Treatment = "sets"
    convert: Convert = same
    default: Any = UNSET
    note: str = ""
    fine: tuple[Any, ...] = ()

    def asks(self, value: Any) -> bool:
        """Return True if a value of it requests something."""
        told = self.treatment == "nothing" and type(value) in (int, float)
        return (bool(value) or told) and value not in self.fine

    @property
    def in_words(self) -> str:
        """Return our key that it sets, or what happens to it instead, with its note."""
        instead = {"nothing": "nothing here", "cannot": "not honoured", "refused": "refused"}
        what = self.path or instead.get(self.treatment, "nothing by itself")
        return f"{what} ({self.note})" if self.note else what


def read_names(file: str, *sections: str, prefix: str = "") -> Iterator[Entry]:
    """Yield the entries of ``names/FILE.toml``: of the sections named, or of all, in their order.

    A section is a list of rows. A row has one treatment with its names: a list, or a table of each name's key of ours
    or of an entry's attributes, which take precedence over the row's. ``convert`` names a function of
    :mod:`lachesis.plugins.dialects.convert`.
    """
    document = read_table(file)
    for section in sections or [section for section in document if section != "words"]:
        for row in document[section]:
            treatment: Treatment = next(one for one in get_args(Treatment) if one in row)
            for name in row[treatment]:
                own: Any = row[treatment][name] if is_object(row[treatment]) else {}
                attributes = {"key": own} if isinstance(own, str) else own
                yield _entry(f"{prefix}{row.get('under', '')}{name}", treatment, row | attributes)


def _entry(name: str, treatment: Treatment, row: Mapping[str, Any]) -> Entry:
    convert: Convert = getattr(converters, row["convert"]) if "convert" in row else same
    default, fine = row.get("default", UNSET), tuple(row.get("fine", ()))
    return Entry(name, row.get("key", ""), treatment, convert, default, row.get("note", ""), fine)


class Dialect:
    """The names of one trainer.

    Args:
        name: its usual name. entries: its names.
        row_sections: sections that are lists of mappings.
        open_sections: sections whose other keys are accepted unchecked, because they belong to a library.
        prefix: prefix of its names, ``--`` for flags.
        aliases: other names for some of them that a file may use.
    """

    known: ClassVar[list[Dialect]] = []

    def __init__(
        self,
        name: str,
        entries: Sequence[Entry],
        *,
        row_sections: Sequence[str] = (),
        open_sections: Sequence[str] = (),
        prefix: str = "",
        aliases: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.known.append(self)
        self.name = name
        self.aliases = aliases
        self.entries: Mapping[str, Entry] = {entry.name: entry for entry in entries}
        self.row_sections = frozenset(row_sections)
        self.open_sections = frozenset(open_sections)
        self.prefix = prefix
        self.by_path: dict[str, list[Entry]] = {}
        for entry in entries:
            self.by_path.setdefault(entry.path, []).append(entry)
        self.defaulted = frozenset(entry.name for entry in entries if entry.default is not UNSET)
        # The names that can be at the top of one of their files.
        self.top_level = frozenset(name.partition(".")[0] for name in self.entries) | self.open_sections
        self._parents = {
            name[:end] for name in self.entries for end, letter in enumerate(name) if letter == "."
        } | self.open_sections

    def is_section(self, name: str) -> bool:
        """Return True if the name has further names below it."""
        return name in self._parents

    def nearest(self, name: str) -> str | None:
        """Return the name most like ``name``: by its last part, as another trainer's for the same, or by letters."""
        by_last = {known.rpartition(".")[2]: known for known in reversed(list(self.entries))}
        last = name.rpartition(".")[2]
        if last in by_last:
            return by_last[last]
        others = [entry for dialect in Dialect.known for entry in dialect.entries.values() if entry.path]
        paths = [entry.path for entry in others if entry.name.rpartition(".")[2].replace("-", "_") == last]
        same_key = next((one for path in paths for one in self.by_path.get(path, ()) if one.treatment == "sets"), None)
        close = same_key.name if same_key is not None else nearest(name, self.entries)
        if close is None and (ending := nearest(last, by_last)) is not None:
            close = by_last[ending]
        return close


class Translation:
    """Translation in progress of a foreign document to a canonical one, with all findings about it.

    ``document`` is canonical, but the places of its values are in the foreign file's lines and names.
    """

    def __init__(self, theirs: Document, dialect: Dialect) -> None:
        self.dialect = dialect
        self.document = Document(name=theirs.name, data={}, problems=list(theirs.problems))
        self.document.spelled = self._spelled
        # As in their reader.
        self.findings = [_finding("warning", f"{text}; the last one counts, as there") for text in theirs.repeated]
        self._nothing: list[Entry] = []
        self._theirs = theirs
        self._values: dict[str, Any] = {}
        self._used: set[str] = set()
        self._flatten(theirs.data, place=())

    def run(self) -> None:
        """Translate every name that does not depend on others, and their defaults that differ from ours."""
        # A file has a few of hundreds of names.
        told = self._values.keys() | self.dialect.defaulted
        for name in filter(told.__contains__, self.dialect.entries):
            entry, value = self.dialect.entries[name], self._values.get(name)
            if value is None:
                if entry.default is not UNSET and entry.path:
                    self.put(entry.path, entry.default, name)
            elif entry.treatment == "sets":
                self.put_converted(entry.path, value, name, entry.convert)
            elif entry.asks(value):
                self._say(entry)

    def finish(self) -> None:
        """Report names without a meaning here, and names without effect in the rest of the file."""
        self._say_nothing()
        for name, value in self._values.items():
            entry = self.dialect.entries.get(name)
            if entry is None or entry.treatment != "together" or name in self._used:
                continue
            if value is not None and value is not False:
                self.note(name, "has no effect with the rest of this file")

    def written(self, name: str) -> str:
        """Return the name that their file has for it: its own, or an alias if the file has only that."""
        names = (name, *self.dialect.aliases.get(name, ()))
        return next((one for one in names if self._values.get(one) is not None), name)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value in their file, and mark it as used; null counts as unset."""
        name = self.written(name)
        self._used.add(name)
        found = self._values.get(name)
        return default if found is None else found

    def has(self, name: str) -> bool:
        return self._values.get(self.written(name)) is not None

    def whole(self, name: str, default: int) -> int | None:
        """Return a whole number of at least 1; for any other value add a problem, and return None."""
        value = _number(self.value(name, default))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problem(name, f"expected a whole number >= 1, got {describe(value)}")
            return None
        return value

    def switch(self, name: str, *others: str) -> bool | str | None:
        """Return True, False or one of ``others``; None if it is unset, or, with a problem, for any other value."""
        value = self.value(name)
        if value is None or isinstance(value, bool) or value in others:
            return value
        if value in (0, 1):
            return bool(value)
        self.problem(name, f"expected {' or '.join(['true', 'false', *others])}, got {describe(value)}")
        return None

    def text(self, name: str, default: str) -> str:
        """Return a text; the default if it is unset, or, with a problem, for any other value."""
        value = self.value(name, default)
        if isinstance(value, str):
            return value
        self.problem(name, f"expected text, got {describe(value)}")
        return default

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a mapping; an empty one if it is unset, or, with a problem, for any other value."""
        value = self.value(name, {})
        if is_object(value):
            return value
        self.problem(name, f"expected a mapping, got {describe(value)}")
        return {}

    def put(self, path: str, value: Any, name: str) -> None:
        """Set a canonical key by their ``name`` (or its default)."""
        place = tuple(path.split("."))
        data = self.document.data
        for part in place[:-1]:
            data = data.setdefault(part, {})
        data[place[-1]] = _fitting(path, value)
        self.document.origins[place] = self.origin(name)

    def put_converted(self, path: str, value: Any, name: str, convert: Convert) -> None:
        """Set a canonical key to their converted value unless it is null; report a value without counterpart."""
        try:
            converted = UNSET if value is None else convert(value)
        except ConfigError as error:
            self.problem(name, str(error))
            return
        if converted is not UNSET:
            self.put(path, converted, name)

    def copy(self, name: str, path: str) -> None:
        """Set a canonical key to their value of ``name``, if the file has one."""
        if self.has(name):
            self.put(path, self.value(name), name)

    def put_entry(self, name: str, default: Any = UNSET) -> None:
        """Set the key of an entry that is translated together with others, as the entry converts it.

        Args:
            default: the value if their file has none.
        """
        entry, value = self.dialect.entries[name], self.value(name)
        if value is not None:
            self.put_converted(entry.path, value, name, entry.convert)
        elif default is not UNSET:
            self.put(entry.path, default, name)

    def origin(self, name: str) -> str:
        """Return ``line 7: trl.beta``, or a note that it is their default."""
        name = self.written(name)
        in_row = "[" in name
        written = self._theirs.at(_place(name)).strip(" ()") if in_row or self.has(name) else ""
        label = f"{self.dialect.prefix}{name}"
        if not written:
            return f"{self.dialect.name}'s {label}"
        return written if written.endswith(label) else f"{written}: {label}"

    def _spelled(self, path: str) -> str | None:
        """Return ``trl.reward_funcs (line 8)``: their name for our key, with the line of the section around it."""
        names = (entry.name for entry in self.dialect.by_path.get(path, ()) if entry.treatment in ("sets", "together"))
        name = next(names, None)
        return None if name is None else f"{self.dialect.name}'s {self.dialect.prefix}{name}{self._around(name)}"

    def _around(self, name: str) -> str:
        return "" if self.dialect.prefix else self._theirs.at(_place(name)[:-1])

    def problem(self, name: str, message: str) -> None:
        name = self.written(name)
        self._used.add(name)
        label = f"{self.dialect.prefix}{name}"
        at = self._theirs.at(_place(name))
        self.document.problems.append(f"{label}{'' if label in at else at}: {message}")

    def warning(self, name: str, message: str) -> None:
        self._find("warning", name, message)

    def note(self, name: str, message: str) -> None:
        self._find("note", name, message)

    def unknown(self, name: str) -> None:
        argument = constructors().entries.get(name)
        if argument is not None and argument.path:
            return self.problem(name, f"an argument of TRL's trainer, here {argument.path}: {argument.note}")
        closest = self.dialect.nearest(name)
        hint = f"; did you mean {self.dialect.prefix}{closest}?" if closest else "."
        if not self.dialect.prefix:
            null = "None" if self.document.name == FROM_PYTHON else "null"
            without = self.document.setting(name, null)
            hint += f" If it is for your own trainer, {without} trains without its effect there"
        self.problem(name, f"not a key of {self.dialect.name} that Lachesis knows{hint}")

    def _find(self, level: Literal["note", "warning"], name: str, message: str) -> None:
        names = [self.written(one) for one in name.split(", ")]
        self._used.update(names)
        text = f"{', '.join(self.dialect.prefix + one for one in names)}: {message}"
        self.findings.append(_finding(level, text))

    def _say(self, entry: Entry) -> None:
        if entry.treatment == "nothing":
            self._nothing.append(entry)
            return
        say = {"cannot": self.warning, "refused": self.problem}.get(entry.treatment)
        if say is not None:
            say(entry.name, entry.note)

    def _say_nothing(self) -> None:
        """Note names without effect, each with its reason; several in one note."""
        if len(self._nothing) == 1:
            self.note(self._nothing[0].name, self._nothing[0].note)
        elif self._nothing:
            names = ", ".join(self.dialect.prefix + entry.name for entry in self._nothing)
            what = "flags" if self.dialect.prefix else "keys"
            text = f"{len(self._nothing)} {what} without meaning here: {names} (`lachesis explain KEY` says why)"
            self.findings.append(_finding("note", text))

    def _flatten(self, data: Mapping[str, Any], *, place: Place) -> None:
        for key, value in data.items():
            here = (*place, key)
            name = dotted(here)
            if name in self.dialect.row_sections:
                self._rows(name, value)
            elif is_object(value) and self.dialect.is_section(name):
                self._flatten(value, place=here)
            elif name in self.dialect.entries:
                self._values[name] = value
            elif self.dialect.is_section(name):
                if value is not None:
                    self.problem(name, f"expected keys, got {describe(value)}")
            elif value is not None and name.rpartition(".")[0] not in self.dialect.open_sections:
                self.unknown(_only_leaf(name, value))

    def _rows(self, name: str, rows: Any) -> None:
        """Read a list of mappings, whose keys are entries ``name.key``."""
        if not is_list(rows):
            if rows is not None:
                self.problem(name, f"expected a list, got {describe(rows)}; write each item after a dash")
            return
        self._values[name] = rows
        for index, row in enumerate(rows):
            if not is_object(row):
                self.problem(f"{name}[{index}]", f"expected keys, got {describe(row)}")
                continue
            for key, value in row.items():
                self._cell(f"{name}.{key}", f"{name}[{index}].{key}", value)

    def _cell(self, known: str, name: str, value: Any) -> None:
        """Read one key of a mapping in a list."""
        entry = self.dialect.entries.get(known)
        if entry is None and value is not None:
            self.unknown(name)
        elif entry is not None and entry.treatment == "refused" and entry.asks(value):
            self.problem(name, entry.note)
        elif entry is not None and entry.treatment == "nothing" and entry.asks(value) and entry not in self._nothing:
            self._nothing.append(entry)


def _fitting(path: str, value: Any) -> Any:
    """Return a value of the type of our key, as their readers convert it: 1 is true, 7 is the text of a name."""
    if type(value) in (int, float) or isinstance(value, str):
        types = " or ".join(key.type for key in find_keys(path))
        if "true or false" in types and value in (0, 1):
            return bool(value)
        if "number" in types and "text" not in types:
            return _number(value)
        if types in ("text", "text or null"):
            return str(value)
    return value


def _number(value: Any) -> Any:
    """Return the number in a text such as ``1_000``, and other values unchanged."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return kind(value)
    return value


def _only_leaf(name: str, value: Any) -> str:
    """Return the dotted name of the one value below ``name``, as in a flag; ``name`` if there are several."""
    while is_object(value) and len(value) == 1:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name


def _finding(level: Literal["note", "warning"], text: str) -> Finding:
    return Finding(level=level, rule="dialect", message=text)


def _place(name: str) -> Place:
    """Return ``("datasets", 0, "path")`` for ``datasets[0].path``."""
    parts: list[str | int] = []
    for part in name.split("."):
        head, bracket, index = part.partition("[")
        parts.append(head)
        if bracket:
            parts.append(int(index.rstrip("]")))
    return tuple(parts)


@cache
def constructors() -> Dialect:
    """Return the arguments of constructors of TRL, peft and Axolotl, which files do not have."""
    return Dialect("the TRL library", list(read_names("constructors")))
