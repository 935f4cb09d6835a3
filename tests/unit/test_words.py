"""Messages, key descriptions, help texts and pages avoid sentence shapes that read as translated."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lachesis
from tests.paths import ROOT

SOURCE = Path(lachesis.__file__).parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHAPES = {
    "of its own": r"\bof (?:its|their|one's) own\b",
    "is no X": r"(?<!there )\b(?:is|are) no (?!longer\b|more\b|better\b|fewer\b|less\b|\w+er than\b)\w",
    "so many a X": r"\bso many an?\b|\bfirst so many\b",
    "what is X is Y": r"(?:^|[.;:] )[Ww]hat (?:is|was|has) \w+(?: \w+){0,4} (?:is|are|stays|counts|goes)\b",
    "goes on": r"\b(?:run|runs|training|it|others|process) (?:goes|go|went) on\b(?! to\b)",
    "somebody": r"\b(?:somebody|nobody) (?:has|had|is|says|said|asked|wants)\b",
}
BANNED = re.compile("|".join(f"(?:{pattern})" for pattern in SHAPES.values()))


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module with their lines, without docstrings: f-strings as one text with {} for values."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            skipped |= {id(first.value)} if isinstance(first, ast.Expr) else set()
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


@pytest.mark.parametrize("room", sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")}))
def test_messages_use_no_shape_that_reads_as_translated(room: str) -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {text}"
        for path in ([SOURCE / room] if room.endswith(".py") else sorted((SOURCE / room).rglob("*.py")))
        for line, text in _texts(ast.parse(path.read_text()))
        if BANNED.search(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_no_shape_that_reads_as_translated(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), start=1)
    found = [f"{page.name}:{number}: {line}" for number, line in lines if BANNED.search(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["it has a rubric of its own", "'x' is no GPU", "so many a batch", "the run goes on"])
def test_a_banned_shape_is_found(text: str) -> None:
    assert BANNED.search(text)
