"""Writes migration.md and assets/keys.json from the tables of other trainers' keys, and from a comparison of defaults.

Run ``python docs/generate_migration.py``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lachesis.common.json_values import flat, is_object
from lachesis.config.document import Document
from lachesis.config.keys import value_in_words
from lachesis.config.load import load_document
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.dialects import DIALECTS, atropos, openrlhf, verl
from lachesis.plugins.dialects.defaults import DIFFERENT, IN_CODE
from lachesis.plugins.dialects.table import UNSET, Dialect, Entry

MIGRATION = Path(__file__).with_name("migration.md")
KEYS = Path(__file__).parent / "assets" / "keys.json"
Tree = dict[str, Any]

INTRODUCTION = """\
# Keys of other trainers

<!-- Written by docs/generate_migration.py from src/lachesis/plugins/dialects/; do not edit. -->

`lachesis train FILE` and `lachesis plan FILE` take a file or script in Axolotl's or TRL's keys as it stands. Rewards
of verl, OpenRLHF and ms-swift have another signature: their files and scripts train with `--set
rewards.functions=[FILE.py:FUNCTION]`. `lachesis translate FILE` prints any of them in Lachesis' keys. `lachesis grpo`
takes the flags of the Atropos trainer.

In a terminal, `lachesis explain KEY` says what a key of any of them means here, and `lachesis explain FILE` what each
key of a file does. On the site, search all {count} of them:

<div id="keys" data-source="assets/keys.json"></div>

## What happens to a key

- **It has a counterpart**: it is translated. `null` counts as unset, and the last of duplicate keys wins.
- **It means nothing here**: one note lists all of these.
- **It affects something beside training** and cannot be done, such as an upload: a warning.
- **It would change training** and cannot be done: an error, with the line and what to do. `--set KEY=null`
  trains without it.

`--set` takes the file's own keys (`--set trl.beta=0.01`) and ours (`--set algorithm.beta=0.01`). The run directory's
`config.yaml` has the result. Paths are relative to the current directory, as they are there, and then to the file.

- **Batches.** Rows x accumulation steps x processes completions become `batch.prompts_per_step` prompts: divide by the
  group size. The number of processes is `$WORLD_SIZE`, or `num_processes`; else the fewest that make whole groups, with
  a warning.
- **Servers.** `vllm_mode: server` expects a server: `lachesis vllm-serve FILE` starts it. With `colocate` the run
  starts vLLM itself.
- **Rewards** of open-r1's recipes are looked up in their own checkout.
- **Atropos' KL term** is to the base model, as its documents say; its code takes the policy that sampled (`--set
  algorithm.kl_reference=sampler`). `--kl-coef 0` leaves the term out.

## Defaults of each

Our own default of a key, and what a file that leaves its counterpart out makes of it. An empty
field is as here, and – is for what that trainer does not have.
"""

EXCEPTIONS = """\
## Defaults that differ

These alone are not taken over from a file of theirs. A note of the run names them.
"""

# The least that a file of each trainer has.
LEAST: Mapping[str, Tree] = {
    "Lachesis": {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rewards": {"functions": ["a.b"]},
        "run": {"steps": 1},
    },
    "TRL": {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a.b"]},
    "Axolotl": {
        **{"base_model": "m", "rl": "grpo", "datasets": [{"path": "d"}], "micro_batch_size": 8},
        "trl": {"reward_funcs": ["a.b"], "num_generations": 8},
    },
    "verl": {
        "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"n": 8}},
        "data": {"train_files": "d"},
        "algorithm": {"adv_estimator": "grpo"},
    },
    "OpenRLHF": {
        "actor": {"model_name_or_path": "m"},
        "data": {"prompt_dataset": "d"},
        "algo": {"advantage": {"estimator": "group_norm"}},
        "rollout": {"n_samples_per_prompt": 8},
    },
    "Atropos": {"model-name": "m"},
}
# Switches that bring defaults of their own, by the words for them.
SWITCHES: Mapping[str, Mapping[str, Tree]] = {
    "with CISPO": {
        "Lachesis": {"algorithm": {"preset": "cispo"}},
        "TRL": {"loss_type": "cispo"},
        "Axolotl": {"trl": {"loss_type": "cispo"}},
        "verl": {
            "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "cispo"}, "clip_ratio_low": 10}},
        },
    },
    "with LoRA": {
        "Lachesis": {"adapter": {"kind": "lora"}},
        "TRL": {"use_peft": True},
        "verl": {"actor_rollout_ref": {"model": {"lora_rank": 16}}},
        "OpenRLHF": {"ds": {"lora": {"rank": 16}}},
        "Atropos": {"weight-bridge-mode": "lora_only"},
    },
    "with vLLM": {
        "Lachesis": {"engine": {"kind": "vllm"}, "bridge": {"kind": "broadcast"}},
        "TRL": {"use_vllm": True, "vllm_mode": "server"},
        "Axolotl": {"trl": {"use_vllm": True}},
        "verl": {"actor_rollout_ref": {"rollout": {"name": "vllm"}}},
        "OpenRLHF": {"vllm": {"num_engines": 1}},
    },
}
# What a file has to say, where it runs, and what follows from such.
NO_DEFAULTS = {
    *("model.path", "data.path", "data.conversations", "run.dir", "run.name", "sampling.num_generations"),
    *(
        "batch.micro_batch_size",
        "engine.kind",
        "engine.port",
        "engine.takeover",
        "engine.urls",
        "bridge.kind",
        "source.kind",
    ),
    *("algorithm.preset", "rewards.functions", "run.steps", "adapter.kind", "adapter.r"),
}


def render() -> str:
    """Return the page for those who come from another trainer."""
    count = sum(len(dialect.entries) for dialect in DIALECTS)
    parts = [INTRODUCTION.replace("{count}", f"{count:,}"), *compared(), "", EXCEPTIONS, *_exceptions(), ""]
    return "\n".join(parts)


def compared() -> Iterator[str]:
    """Yield the table of the defaults of all trainers, by a comparison of what their least files become."""
    yield f"|key|{'|'.join(LEAST)}|"
    yield f"|---|{'---|' * len(LEAST)}"
    plain = {name: become(name) for name in LEAST}
    for words, switches in {"": {}, **SWITCHES}.items():
        trees = {name: become(name, more) for name, more in switches.items()} if words else plain
        for key in dict.fromkeys(key for tree in trees.values() for key in tree):
            told = {name: tree.get(key, trees["Lachesis"].get(key)) for name, tree in trees.items()}
            changed = any(tree.get(key) != plain[name].get(key) for name, tree in trees.items())
            differs = any(value != told["Lachesis"] for value in told.values())
            if differs and (changed or not words) and key not in NO_DEFAULTS:
                cells = "|".join(_cell(name, told) for name in LEAST)
                yield f"|`{key}`{f' {words}' if words else ''}|{cells}|"


def become(trainer: str, more: Tree | None = None) -> dict[str, object]:
    """Return the keys of ours that the least file of a trainer sets, or all of a run that takes it as it stands."""
    tree = dict(flat(READERS.get(trainer, _loaded)(_joined(LEAST[trainer], more or {}))))
    if tree.get("algorithm.epsilon_high") is None and "algorithm.epsilon" in tree:
        tree["algorithm.epsilon_high"] = tree["algorithm.epsilon"]  # as it counts
    return tree


def _cell(name: str, told: Mapping[str, object]) -> str:
    """Return a trainer's value: nothing where it is ours, a dash for one that has no such switch."""
    if name not in told:
        return "–"
    return "" if name != "Lachesis" and told[name] == told["Lachesis"] else _word(told[name])


def _word(value: object) -> str:
    return "unset" if value is None else value_in_words(value)


def _loaded(data: Tree) -> Tree:
    """Return what a file becomes that a run takes as it stands."""
    return _load(data).model_dump(mode="json")


def _load(data: Tree) -> LachesisConfig:
    return load_document(Document("c.yaml", copy.deepcopy(data)), base_dir=Path("/")).config


def _flags(data: Tree) -> Tree:
    argv = [f"--{name}={value}" for name, value in data.items()]
    return atropos.translate_argv(argv).document.data


# Of those whose rewards have another form a file is translated and not loaded.
READERS: Mapping[str, Callable[[Tree], Tree]] = {
    "verl": lambda data: verl.translate(Document("c", data)).document.data,
    "OpenRLHF": lambda data: openrlhf.translate(Document("c", data)).document.data,
    "Atropos": _flags,
}


def _joined(data: Tree, more: Tree) -> Tree:
    """Return ``data`` with the keys of ``more`` in it, section by section."""
    sections = {key: _joined(data.get(key, {}), value) for key, value in more.items() if is_object(value)}
    return {**data, **more, **sections}


def _exceptions() -> Iterator[str]:
    """Yield the table of unset keys that mean something else here: theirs, and what of ours their value changes."""
    yield "|of|key|without it there|without it here|"
    yield "|---|---|---|---|"
    for table in (DIFFERENT, IN_CODE):
        for trainer, keys in table.items():
            for key, found in keys.items():
                here = ", ".join(f"`{name}: {_word(value)}`" for name, value in changed_by(trainer, key))
                yield f"|{trainer}|`{key}`|{found.there or found.written}|{here}|"


def changed_by(trainer: str, key: str) -> list[tuple[str, object]]:
    """Return the keys of ours, with the values they have without theirs, that the value of the list changes."""
    found = (DIFFERENT[trainer] if key in DIFFERENT[trainer] else IN_CODE[trainer])[key]
    with_it = Document("c.yaml", copy.deepcopy(_joined(LEAST[trainer], MATTERS.get(key, {}))))
    plain = dict(flat(_load(with_it.data).model_dump(mode="json")))
    override = f"{key}={found.written}"
    changed = load_document(with_it, base_dir=Path("/"), overrides=[override]).config.model_dump(mode="json")
    after = dict(flat(changed))
    return [
        (name, value) for name, value in plain.items() if name in after and after[name] != value and name != "run.dir"
    ]


# What else a file has where the key matters.
MATTERS: Mapping[str, Tree] = {
    "vllm.gpu_memory_utilization": {"trl": {"use_vllm": True, "vllm_mode": "colocate"}},
}


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
    MIGRATION.write_text(render(), encoding="utf-8")
    KEYS.parent.mkdir(exist_ok=True)
    KEYS.write_text(render_keys(), encoding="utf-8")


if __name__ == "__main__":
    main()
