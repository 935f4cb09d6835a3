"""Writes configuration.md from the schema: ``python docs/generate_reference.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lachesis.config.keys import Key, SectionInfo, all_sections

TARGET = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate_reference.py from src/lachesis/config/schema.py; do not edit. -->

A run is described by one YAML file. `lachesis train config.yaml --set optimizer.learning_rate=2e-6` changes
a key for one run: the value is YAML, and the last of several settings of a key wins. `lachesis explain KEY`
shows a row of the tables below.

**Keys.** An unknown key, a key written twice and a value of the wrong type are errors; all that a file
contains are reported at once, with their lines. Nothing is converted: `"30"` is text and no number, `30` a
number and no text. Scalars follow YAML 1.2, so `true` and `false` are the only booleans (`on` and `no` are
text) and `1e-6` is a number.

**Paths.** A relative path is relative to the directory of the configuration file, also in `--set`. The one
exception is `run.dir`, which is relative to the current directory. Values that can be something else:

- `model.path`, `model.tokenizer`: a path if it begins with `.`, `/` or `~` or if that directory exists, else
  a hub id. With `run.setup`, which builds the model, `model.path` is a path in any case.
- `model.chat_template`: a file, unless it holds a `{`; then it is the template itself.
- `rewards.functions`, `run.setup`: `FILE.py:FUNCTION`, or `module.function`. A `module.py` beside the
  configuration or in the current directory (in this order) comes before an installed module.

Each run writes the whole configuration, defaults included and with absolute paths, to `config.yaml` in its
directory; that file is a configuration too and starts the same run from anywhere.

**Required** keys are `{required}`.
"""


def render() -> str:
    """The whole page."""
    sections = [section for section in all_sections() if section.path]
    required = "`, `".join(
        key.path
        for section in sections
        if section.required
        for key in section.keys
        if key.default is None and not key.kinds
    )
    parts = [INTRODUCTION.replace("{required}", required), *(_section(section) for section in sections)]
    return "\n".join(parts)


def _section(section: SectionInfo) -> str:
    return "\n".join([f"## `{section.path}`", "", section.description, "", *_table(section), ""])


def _table(section: SectionInfo) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    yield from (_row(key, discriminated=section.discriminated) for key in section.keys)


def _row(key: Key, *, discriminated: bool) -> str:
    default = {None: "required", "unset": "unset"}.get(key.default, f"`{key.default}`")
    only = " or ".join(f"`{kind}`" for kind in key.kinds)
    # The section's description, just above the table, already tells what each kind is.
    meaning = "Which of the above." if key.name == "kind" and discriminated else key.description
    cells = [f"`{key.name}`", key.type, default, f"With kind {only}: {meaning}" if only else meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    TARGET.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
