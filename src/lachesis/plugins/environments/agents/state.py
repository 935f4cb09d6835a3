"""Quick reader of the files that an agent leaves in its directory; it follows no links."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

# Of all files of a rollout together: they are kept with its group.
MAX_BYTES = 4 << 20
_MAX_ENTRIES, _DEEPEST = 100_000, 32


def read_state(directory: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Return the texts of the files that match one of the patterns, by their paths in the directory.

    Only plain files count, links are not followed, and files beyond :data:`MAX_BYTES` in all are ignored. Bytes that
    are not UTF-8 are replaced.
    """
    found: dict[str, str] = {}
    left, entries = MAX_BYTES, 0
    if not patterns:
        return found
    for place, directories, names, descriptor in os.fwalk(directory, follow_symlinks=False):
        inside = os.path.relpath(place, directory)
        if inside.count("/") >= _DEEPEST - 1:
            directories.clear()
        directories.sort()
        entries += len(names) + len(directories)
        if entries > _MAX_ENTRIES:
            break
        for name in sorted(names):
            path = name if inside == "." else f"{inside}/{name}"
            if not any(fnmatchcase(path, pattern) for pattern in patterns):
                continue
            content = _content(name, descriptor, left)
            if content is not None:
                left -= len(content)
                found[path.encode("utf-8", "replace").decode()] = content.decode("utf-8", "replace")
    return found


def _content(name: str, place: int, most: int) -> bytes | None:
    """Return the content of a plain file of at most ``most`` bytes; ``None`` for any other."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    except OSError:
        return None
    with os.fdopen(file, "rb") as stream:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            return None
        content = stream.read(most + 1)
    return content if len(content) <= most else None
