"""Writes configuration.md from the schema and migration.md from the tables of other trainers' names.

Run ``python docs/generate_reference.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lachesis.config.keys import Key, SectionInfo, all_sections, value_in_words
from lachesis.plugins.dialects import DIALECTS
from lachesis.plugins.dialects.defaults import DIFFERENT, IN_CODE
from lachesis.plugins.dialects.table import UNSET, Dialect, Entry

TARGET = Path(__file__).with_name("configuration.md")
MIGRATION = Path(__file__).with_name("migration.md")

INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate_reference.py from src/lachesis/config/schema/; do not edit. -->

A run is described by one YAML file. `lachesis train config.yaml --set optimizer.learning_rate=2e-6` changes
a key for one run: the value is YAML, and the last of several settings of a key wins. `lachesis explain KEY`
shows a row of the tables below.

**Keys.** An unknown key, a key written twice and a value of the wrong type are errors; all that a file
contains are reported at once, with their lines. Nothing is converted: `"30"` is text and no number, `30` a
number and no text. Scalars follow YAML 1.2, so `true` and `false` are the only booleans (`on` and `no` are
text) and `1e-6` is a number. Anchors, aliases and merge keys (`<<: *defaults`) work as everywhere.

**Null** is as good as not written, where it is no value of the key's own.

A file in Axolotl's or TRL's keys is recognized and translated: see [coming from another
trainer](migration.md).

**Paths.** A relative path is relative to the directory of the configuration file, also in `--set`. The one
exception is `run.dir`, which is relative to the current directory. (In a file of another trainer's every path is
relative to the current directory, as it is there, or to the file where nothing is found there.) Values that can
be something else:

- `model.path`, `model.tokenizer`: a path if it begins with `.`, `/` or `~` or if that directory exists, else
  a hub id. With `run.setup`, which builds the model, `model.path` is a path in any case.
- `data.path`, `data.eval_path`, `data.more`: a path if it begins so, if it exists, or if it ends in `.jsonl`,
  `.json`, `.parquet` or `.csv`, else a dataset of the hub.
- `model.chat_template`: a file, unless it holds a `{`; then it is the template itself.
- `rewards.functions`, `run.setup`, `data.transform` and what names [parts of your own](custom.md):
  `FILE.py:FUNCTION`, or `module.function`. A `module.py` beside the configuration or in the current directory
  (in this order) comes before an installed module. A reward with a `/` is a model: a directory or a hub id.

Each run writes the whole configuration, defaults included and with absolute paths, to `config.yaml` in its
directory; that file is a configuration too and starts the same run from anywhere.

**Required** keys are `{required}` and one of `run.steps` and `run.epochs`; with `source.kind: local`, which is
the default, also `data.path` and `rewards.functions`.
"""


MIGRATION_INTRODUCTION = """\
# Coming from another trainer

<!-- Written by docs/generate_reference.py from src/lachesis/plugins/dialects/; do not edit. -->

`lachesis train config.yaml` takes a file in Axolotl's keys or in TRL's names as it stands: its dialect is seen from
its keys, and every key is translated by the tables below. Errors name the line and the key of *your* file; an unknown
key is an error with the nearest known one, and `--set KEY=null` trains without it. `--set` takes a key of the file's
own dialect (`--set trl.beta=0.01`, `--set datasets[0].path=x`) or one of ours (`--set algorithm.beta=0.01`), and
`lachesis explain KEY` knows the names of all trainers. What a run was translated to is in `config.yaml` of its
directory. `null` counts as unset, the last of duplicate keys wins, and unset keys keep the source trainer's defaults,
except for [those below](#defaults-that-differ): a note of the run names them, and the value that restores
theirs. Axolotl's warm-up over 3 % of the steps and its checkpoint each epoch are among what is taken over
(`checkpoint.every_epochs`), and so are TRL's 240 s wait for a server and vLLM's share of 0.3 with `colocate`.

**Keys that mean nothing here** are listed in one note. What cannot be done and bears on something beside the trained
weights, such as an upload, is a warning; what would change what is trained is an error that says what to do. The
tables have each field of the classes that the files are read into: transformers' `TrainingArguments`, TRL's
`GRPOConfig`, `ModelConfig`, `ScriptArguments` and mixtures, Axolotl's `AxolotlInputConfig` (`tests/schemas/`), and the
names that open-r1's recipes have beside them.

**Paths** are relative to the current directory, as they are there; what is not found there is looked for beside the
file.

**Batches.** An optimizer step has rows × accumulation steps × processes completions there, and `batch.prompts_per_step`
prompts here: that number divided by the group size. Where it does not divide, the error names the nearest numbers
that do. The number of processes is `$WORLD_SIZE`; where that is unset it is `num_processes`, a key of either's file or
of `--set`, and else the fewest that make whole groups, with a warning where that is more than one: a recipe for several
devices keeps the size of its steps on one. `generation_batch_size` counts unique prompts in Axolotl and completions in
TRL, `steps_per_generation` micro-batches: what is more than an optimizer step becomes `batch.steps_per_generation`, and
what is less is part of a step, whose completions are all of the same weights there too.

**Length.** Without `max_steps` a run is as long as its epochs say (`run.epochs`).

**Rewards of open-r1's recipes.** A name that Lachesis does not have is looked up in the `REWARD_FUNCS_REGISTRY` of the
checkout that the recipe lies in, and is that function. A recipe that names none has the default of the checkout's own
`GRPOScriptArguments`; outside of one, a file with keys of open-r1's script has its `accuracy`, `format` and
`tag_count`, with a warning. Nothing of the checkout is run for this.

**Servers.** `vllm_mode: server` expects a server at that address: `lachesis vllm-serve config.yaml` starts it from the
same file. `0.0.0.0` as the address of a server is this machine. `colocate` is a vLLM server that the
run starts on the trainer's GPU.

**The sampler's correction** is on with vLLM, as there. In Axolotl's asynchronous trainer truncation has a floor of
1 / cap, which is kept; there its masks have the floor too, which undoes them, and here a mask masks.

**The Atropos trainer's flags** are those of `lachesis grpo`, and of `lachesis run`, which starts the engine, the
rollout API and an environment too. Defaults are those of its documents; where its code has another, the table says
so.

**Rewards** get what that system gives them: in files of Axolotl and TRL the completion of a text prompt is a text, that
of a conversation a list of one message (`rewards.text_completions`).

**The Atropos trainer's KL term** is to the base model, as its documents say; with all weights trained that is a second
copy of the model. Its code takes the policy that sampled, which holds nothing back
(`--set algorithm.kl_reference=sampler`). `--kl-coef 0` leaves the term and the copy out.
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


def render_migration() -> str:
    """The page for those who come from another trainer."""
    return "\n".join([MIGRATION_INTRODUCTION, _defaults(), *(_dialect(dialect) for dialect in DIALECTS)])


def _defaults() -> str:
    """Where what is not written means something else."""
    head = [
        "## Defaults that differ",
        "",
        "| of | key | without it there | without it here |",
        "| --- | --- | --- | --- |",
    ]
    rows = [
        f"| {trainer} | `{key}` | {found.there} | {found.here} |"
        for table in (DIFFERENT, IN_CODE)
        for trainer, keys in table.items()
        for key, found in keys.items()
    ]
    return "\n".join([*head, *rows, ""])


def _dialect(dialect: Dialect) -> str:
    title = dialect.name[0].upper() + dialect.name[1:]
    rows = [f"| {' | '.join(cells)} |" for cells in (_entry(dialect, entry) for entry in dialect.entries.values())]
    head = ["| there | here | default of theirs | what is different |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## {title}", "", *head, *rows, ""])


def _entry(dialect: Dialect, entry: Entry) -> tuple[str, ...]:
    here = (
        f"`{entry.path}`"
        if entry.path
        else {"cannot": "not on this build", "refused": "refused"}.get(entry.treatment, "—")
    )
    default = "" if entry.default is UNSET else f"`{value_in_words(entry.default)}`"
    return f"`{dialect.prefix}{entry.name}`", here, default, entry.note.replace("|", "\\|")


def main() -> None:
    TARGET.write_text(render(), encoding="utf-8")
    MIGRATION.write_text(render_migration(), encoding="utf-8")


if __name__ == "__main__":
    main()
