"""Draws rooms.svg from the source: plug-ins, the core's rooms in import order, and which imports which."""

from __future__ import annotations

import ast
from functools import cache
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lachesis"
PICTURE = ROOT / "docs" / "rooms.svg"


def rooms() -> list[str]:
    """From the top down, as the docstring of the package lists them; a test holds that against the folders."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text())) or ""
    return docstring.rpartition(":\n")[2].rstrip(".").replace("\n", " ").split(", ")


ROOMS = rooms()
PLUGINS = sorted(f"plugins/{path.parent.name}" for path in (PACKAGE / "plugins").glob("*/__init__.py"))
ROW, LEFT, TEXT, CELL = 44, 24, 190, 26
COLUMNS = TEXT + 560  # where the dots begin
WIDTH, HEIGHT = COLUMNS + CELL * len(ROOMS) + 24, 100 + ROW * (len(PLUGINS) + len(ROOMS)) + 16


def purpose(room: str) -> str:
    """The first sentence of the room's docstring."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


@cache
def imported_rooms(room: str) -> frozenset[str]:
    """The rooms that files of ``room`` import anything of."""
    found: set[str] = set()
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lachesis."):
                found.add((node.module or "").split(".")[1])
    return frozenset(found - {room})


def text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def row(number: int, room: str) -> list[str]:
    y = 100 + ROW * number
    lines = wrap(purpose(room), 88)
    parts = [f'<rect class="row{number % 2}" x="12" y="{y:g}" width="{WIDTH - 24:g}" height="{ROW:g}"/>']
    parts.append(text(LEFT, y + ROW / 2 + 5, f"{room}/", "name"))
    for line, words in enumerate(lines):
        parts.append(text(TEXT, y + ROW / 2 + 5 + 15 * (line - (len(lines) - 1) / 2), words, "soft"))
    for column, other in enumerate(ROOMS):
        x, middle = COLUMNS + CELL * (column + 0.5), y + ROW / 2
        if other == room:
            parts.append(f'<rect class="own" x="{x - 5:g}" y="{middle - 5:g}" width="10" height="10"/>')
        elif other in imported_rooms(room):
            kind = "dot" if column > number - len(PLUGINS) else "anywhere"
            parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{middle:g}" r="5"/>')
    return parts


def picture() -> str:
    """The whole file."""
    heads = [
        f'<text class="head" transform="translate({COLUMNS + CELL * (n + 0.5) + 4:g},90) rotate(-60)">{room}</text>'
        for n, room in enumerate(ROOMS)
    ]
    rows = [part for number, room in enumerate([*PLUGINS, *ROOMS]) for part in row(number, room)]
    body = "\n  ".join([text(LEFT, 90, "room", "head"), text(TEXT, 90, "what it is for", "head"), *heads, *rows])
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t"
     font-family="system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif" font-size="14">
  <title id="t">Plug-ins and the core's rooms in import order; a dot where a row imports the room of a column</title>
  <style>
    svg {{ --panel: #ffffff; --odd: #f6f8fa; --ink: #1f2328; --soft: #57606a; --dot: #0969da; --own: #9a6700; }}
    @media (prefers-color-scheme: dark) {{
      svg {{ --panel: #0d1117; --odd: #161b22; --ink: #e6edf3; --soft: #9da7b3; --dot: #58a6ff; --own: #d4a72c; }}
    }}
    .panel, .row0 {{ fill: var(--panel); }} .row1 {{ fill: var(--odd); }} text {{ fill: var(--ink); }}
    .name {{ font-weight: 600; }} .soft {{ fill: var(--soft); font-size: 12.5px; }}
    .head {{ fill: var(--soft); font-size: 12.5px; }} .dot {{ fill: var(--dot); }} .own {{ fill: var(--own); }}
    .anywhere {{ fill: none; stroke: var(--dot); stroke-width: 1.5; }}
  </style>
  <rect class="panel" x="0" y="0" width="{WIDTH}" height="{HEIGHT}" rx="10"/>
  {body}
</svg>
"""


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
