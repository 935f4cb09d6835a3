"""What somebody who wrote an unknown name probably meant."""

from __future__ import annotations

from pydantic import BaseModel

from lachesis.common.errors import nearest
from lachesis.config.keys import all_keys, all_sections, find_keys, find_section, join
from lachesis.config.schema import LachesisConfig

_ANYWHERE_CUTOFF = 0.75


def paths_named(name: str, root: type[BaseModel] = LachesisConfig) -> list[str]:
    """Dotted paths of all keys and sections whose last part is ``name``."""
    paths = [section.path for section in all_sections(root)] + [key.path for key in all_keys(root)]
    return list(dict.fromkeys(path for path in paths if path.rpartition(".")[2] == name and path))


def nearest_path(word: str, root: type[BaseModel] = LachesisConfig) -> str | None:
    """The path most like ``word`` in the whole tree, by its full or by its last name."""
    paths = [path for section in all_sections(root) if (path := section.path)]
    paths += [key.path for key in all_keys(root)]
    by_name = {path.rpartition(".")[2]: path for path in reversed(paths)}
    match = nearest(word, [*paths, *by_name], cutoff=_ANYWHERE_CUTOFF)
    return by_name.get(match, match) if match else None


def unknown_key_hint(
    *, section: str, name: str, kind: str | None = None, root: type[BaseModel] = LachesisConfig
) -> str:
    """How to go on after the unknown key ``name`` in ``section``, whose variant is ``kind``."""
    info = find_section(section, root)
    if info is None:
        return f"{section} has no keys of its own"
    parent, dot, last = join(section, name).rpartition(".")
    if dot and "." in name and find_keys(f"{parent}.{last}", root):
        return f"write {last} in a line below {parent.rpartition('.')[2]}:, indented"
    other_kinds = [kind for key in info.keys if key.name == name for kind in key.kinds]
    if other_kinds:
        return f"it belongs to {section}.kind: {' or '.join(other_kinds)}, and here that is {kind}"
    if elsewhere := paths_named(name, root):
        return f"it belongs to {' or '.join(elsewhere)}"
    names = [key.name for key in info.keys if not key.kinds or kind is None or kind in key.kinds]
    names += info.subsections
    if sibling := nearest(name, names):
        return f"did you mean {join(section, sibling)}?"
    if path := nearest_path(name, root):
        return f"did you mean {path}?"
    return f"{section or 'the configuration'} has {', '.join(names)}"
