"""CONTRIBUTING says where things are, and the picture of the rooms is that of the source."""

from __future__ import annotations

import re
import sys

import pytest

from tests.paths import DOCS, PACKAGE, ROOT

ROW = re.compile(r"^\| ([^|]+) \| \[`([^`]+)`\]\(src/lachesis/\2\) \| `(\w+)` \|$", flags=re.MULTILINE)
PLACES = ROW.findall((ROOT / "CONTRIBUTING.md").read_text())


def test_the_table_has_at_least_twenty_rows():
    lines = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| ")]
    assert len(PLACES) >= 20
    assert len(lines) == len(PLACES) + 1, "a row names no file, or its link points elsewhere than its text says"


@pytest.mark.parametrize(("what", "file", "name"), PLACES, ids=[what for what, _, _ in PLACES])
def test_it_is_where_the_table_says(what: str, file: str, name: str):
    text = (PACKAGE / file).read_text()
    assert re.search(rf"^\s*(async def|def|class) {name}\b|[\"'.]{name}\b", text, flags=re.MULTILINE), (what, file)


def test_each_folder_says_what_it_is_for():
    silent = [
        str(folder.relative_to(PACKAGE))
        for folder in sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
        if not re.match(r'"""\S[^"]{30,}', (folder / "__init__.py").read_text())
    ]
    assert not silent


def test_the_picture_of_the_rooms_is_drawn_anew_with_every_change(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(DOCS))
    sys.modules.pop("generate_rooms", None)
    import generate_rooms  # type: ignore[import-not-found]

    assert generate_rooms.PICTURE.read_text(encoding="utf-8") == generate_rooms.picture(), "run `make docs`"
