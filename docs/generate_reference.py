"""Writes configuration.md from the schema, and migration.md and assets/keys.json from other trainers' tables.

Run ``python docs/generate_reference.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lachesis.config.keys import Key, SectionInfo, all_sections, value_in_words
from lachesis.plugins.dialects import DIALECTS
from lachesis.plugins.dialects.defaults import DIFFERENT, IN_CODE
from lachesis.plugins.dialects.table import UNSET, Dialect, Entry

TARGET = Path(__file__).with_name("configuration.md")
MIGRATION = Path(__file__).with_name("migration.md")
KEYS = Path(__file__).parent / "assets" / "keys.json"

INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate_reference.py from src/lachesis/config/schema/; do not edit. -->

One YAML file describes a run. `lachesis train config.yaml --set optimizer.learning_rate=2e-6` changes a key for one
run, and `lachesis explain KEY` shows a row of these tables.

**Values.** An unknown key, a key written twice and a value of the wrong type are errors, all reported at once with
their lines. Nothing is converted: `"30"` is text, `30` a number. Scalars follow YAML 1.2: only `true` and `false` are
booleans, and `1e-6` is a number. Anchors, aliases and merge keys (`<<: *defaults`) work. Null counts as unset, unless
it is one of the key's own values.

**Paths** are relative to the directory of the file, also in `--set`; `run.dir` is relative to the current directory.
Files in [another trainer's keys](migration.md) keep their rule.

- `model.path`, `model.tokenizer`: a path if it begins with `.`, `/` or `~` or exists, else a hub id.
- `data.path`, `data.eval_path`, `data.more`: a path too if it ends in `.jsonl`, `.json`, `.parquet` or `.csv`.
- `model.chat_template`: a file, or the template itself if it holds a `{`.
- Functions ([custom parts](custom.md)): `FILE.py:FUNCTION`, or `module.function` with a `module.py` beside the
  configuration or installed. A reward with a `/` is a model.

A run writes its whole configuration to `config.yaml` in its directory, which starts the same run from anywhere.

In the tables `KIND`: stands before keys that only this `kind` of the section has.

**Required** keys are `{required}` and one of `run.steps` and `run.epochs`; with `source.kind: local`, which is the
default, also `data.path` and `rewards.functions`.
"""


MIGRATION_INTRODUCTION = """\
# Keys of other trainers

<!-- Written by docs/generate_reference.py from src/lachesis/plugins/dialects/; do not edit. -->

`lachesis train FILE` takes a file in Axolotl's or TRL's keys as it stands. `lachesis translate FILE` prints it in
Lachesis' keys, and does the same for scripts of verl and OpenRLHF. `lachesis grpo` takes the flags of the Atropos
trainer.

In a terminal, `lachesis explain KEY` says what a key of any of them means here. On the site, search all {count} of
them:

<div id="keys" data-source="assets/keys.json"></div>

The [data](assets/keys.json) behind the search is made from the same tables as the translation.

## What happens to a key

- **It has a counterpart**: it is translated. `null` counts as unset, and the last of duplicate keys wins.
- **It means nothing here**: one note lists all of these.
- **It affects something beside training** and cannot be done, such as an upload: a warning.
- **It would change what is trained** and cannot be done: an error, with the line and what to do. `--set KEY=null`
  trains without it.

`--set` takes the file's own keys (`--set trl.beta=0.01`) and ours (`--set algorithm.beta=0.01`). The run directory's
`config.yaml` has the result. Paths are relative to the current directory, as they are there, and then to the file.

## What to know

- **Batches.** Rows x accumulation steps x processes completions become `batch.prompts_per_step` prompts: divide by the
  group size. The number of processes is `$WORLD_SIZE`, or `num_processes`; else the fewest that make whole groups, with
  a warning.
- **Length.** Without `max_steps` a run has `run.epochs` epochs.
- **Servers.** `vllm_mode: server` expects a server: `lachesis vllm-serve FILE` starts it. With `colocate` the run
  starts vLLM itself.
- **Rewards** get texts for text prompts and messages for conversations, as there. Names of open-r1's recipes are looked
  up in their own checkout.
- **The sampler's correction** is on with vLLM, as there.
- **Atropos' KL term** is to the base model, as its documents say; its code takes the policy that sampled (`--set
  algorithm.kl_reference=sampler`). `--kl-coef 0` leaves the term out.

## Defaults that differ

Unset keys keep the defaults of their trainer, except for these. A note of the run names them.
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
    yield "key | type | default | meaning"
    yield "--- | --- | --- | ---"
    yield from (_row(key, discriminated=section.discriminated) for key in section.keys)


def _row(key: Key, *, discriminated: bool) -> str:
    default = {None: "required", "unset": "unset"}.get(key.default, f"`{key.default}`")
    only = " or ".join(f"`{kind}`" for kind in key.kinds)
    # The section's description, just above the table, already tells what each kind is.
    meaning = "Which of the above." if key.name == "kind" and discriminated else key.description
    cells = [f"`{key.name}`", key.type, default, f"{only}: {meaning}" if only else meaning]
    return " | ".join(cell.replace("|", chr(92) + "|") for cell in cells)


def render_migration() -> str:
    """Return the page for those who come from another trainer."""
    count = sum(len(dialect.entries) for dialect in DIALECTS)
    return MIGRATION_INTRODUCTION.replace("{count}", f"{count:,}") + "\n" + _defaults()


def _defaults() -> str:
    """Return the table of unset keys that mean something else here."""
    rows = [
        f"| {trainer} | `{key}` | {found.there} | {found.here} |"
        for table in (DIFFERENT, IN_CODE)
        for trainer, keys in table.items()
        for key, found in keys.items()
    ]
    return "\n".join(["| of | key | without it there | without it here |", "| --- | --- | --- | --- |", *rows, ""])


def render_keys() -> str:
    """Return the data of the search: trainer, key, ours, their default and a note for each key."""
    rows = [[dialect.name, *_entry(dialect, entry)] for dialect in DIALECTS for entry in dialect.entries.values()]
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


def _entry(dialect: Dialect, entry: Entry) -> tuple[str, ...]:
    here = (
        entry.path
        if entry.path
        else {"cannot": "not on this build", "refused": "refused"}.get(entry.treatment, "no effect")
    )
    default = "" if entry.default is UNSET else value_in_words(entry.default)
    return f"{dialect.prefix}{entry.name}", here, default, entry.note


def main() -> None:
    TARGET.write_text(render(), encoding="utf-8")
    MIGRATION.write_text(render_migration(), encoding="utf-8")
    KEYS.parent.mkdir(exist_ok=True)
    KEYS.write_text(render_keys(), encoding="utf-8")


if __name__ == "__main__":
    main()
