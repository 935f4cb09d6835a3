"""ms-swift's arguments for GRPO: TRL's under other names and with other defaults, so they are translated through TRL's.

Its rewards have another form, and are left out. Read from ms-swift 4.
"""

from __future__ import annotations

import re
from dataclasses import replace

from lachesis.common.json_values import is_list
from lachesis.config.document import Document, describe
from lachesis.plugins.dialects import trl
from lachesis.plugins.dialects.mixtures import put_dropped_prompts
from lachesis.plugins.dialects.table import Dialect, Translation, read_names
from lachesis.plugins.dialects.words import read_table

_TABLES = read_table("swift")
_OWN = {entry.name: entry for entry in read_names("swift", "arguments")}
# Arguments that are read in this file.
_HERE = {entry.name: entry for entry in read_names("swift", "here")}
_RENAMED = {
    own: replace(trl.TRL.entries[name], name=own) for own, name in _TABLES["names"].items() if name in trl.TRL.entries
}
NAMES = Dialect("ms-swift", list((_RENAMED | _HERE | _OWN).values()))
SWIFT = Dialect("ms-swift", list((dict(trl.TRL.entries) | dict(NAMES.entries)).values()))
_RATES = {"full": 1e-5}  # of ms-swift's tuner_type; 1e-4 for every other
_TUNERS = {"full": False, "lora": True}
_DATASET = re.compile(r"(?:(?:hf|ms)::)?([^:#]+)(?::([^#]+))?(?:#(\d+))?", re.IGNORECASE)


def translate(document: Document) -> Translation:
    """Translate ms-swift's document to a canonical one, except its rewards."""
    theirs = Document(document.name, dict(_TABLES["defaults"]), problems=list(document.problems))
    for name, value in document.data.items():
        entry = _OWN.get(name)
        if entry is not None and entry.treatment == "refused" and entry.asks(value):
            theirs.problems.append(f"{name}{document.at((name,))}: {entry.note}")
        if entry is None and name not in _HERE:
            renamed = _TABLES["names"].get(name, name)
            theirs.data[renamed] = value
            theirs.origins |= {(renamed, *rest): at for (first, *rest), at in document.origins.items() if first == name}
    tuner = document.data.get("tuner_type", document.data.get("train_type", "lora"))
    if tuner not in _TUNERS:
        at = document.at(("tuner_type",))
        theirs.problems.append(f"tuner_type{at}: expected full or lora, got {describe(tuner)}")
    theirs.data |= {"use_peft": _TUNERS.get(tuner, False)}
    theirs.data.setdefault("learning_rate", _RATES.get(tuner, 1e-4))
    theirs.data.setdefault("reward_funcs", [])
    if theirs.data.get("fsdp") == "fsdp2":  # its own name for full sharding with its settings
        theirs.data["fsdp"] = "full_shard"
    _put_data(theirs)
    processes = theirs.data.get("num_processes")
    translation = trl.translate(theirs, processes=processes if isinstance(processes, int) else None)
    translation.document.data.pop("rewards", None)
    if "enable_thinking" in document.data:
        thinks = {"enable_thinking": document.data["enable_thinking"]}
        translation.put("data.chat_template_kwargs", thinks, "chat_template_kwargs")
    translation.document.data.setdefault("data", {})["conversations"] = True
    _say_sampled(translation, document)
    if (length := document.data.get("max_length")) is not None:
        translation.put("data.max_prompt_length", length, "max_length")
        if document.data.get("truncation_strategy", "left") == "delete":
            translation.put("data.overlong_prompts", "drop", "truncation_strategy")
        else:
            put_dropped_prompts(translation, "max_length")
    return translation


def _put_data(theirs: Document) -> None:
    """Set the datasets, each written as ``HUB::PATH:SUBSET#ROWS``."""
    given = theirs.data.get("dataset_name")
    names = given if is_list(given) else [given]
    found = [match for name in names if isinstance(name, str) and (match := _DATASET.fullmatch(name)) is not None]
    if len(found) != len(names):
        return  # reported as a value of another type
    parts = [{"path": one[1], "name": one[2], "split": one[3] and f"train[:{one[3]}]"} for one in found]
    if len(parts) > 1:
        theirs.data.pop("dataset_name")
        theirs.data["datasets"] = parts
    elif parts:
        renamed = {"dataset_name": "path", "dataset_config": "name", "dataset_train_split": "split"}
        theirs.data |= {name: parts[0][key] for name, key in renamed.items() if parts[0][key]}


def _say_sampled(translation: Translation, document: Document) -> None:
    """Warn of rows that ms-swift samples: it shuffles unless told otherwise, and repeats rows of a short dataset."""
    if "#" in str(document.data.get("dataset")) and document.data.get("dataset_shuffle", True) is not False:
        text = "#N takes the first N rows here; ms-swift draws them at random unless dataset_shuffle is false"
        translation.warning("dataset", text)
