"""ms-swift's arguments for GRPO: TRL's under other names and with other defaults, so they are translated through TRL's.

Its rewards have another form, and are left out. Read from ms-swift 4.
"""

from __future__ import annotations

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
    _put_data(theirs, document)
    processes = theirs.data.get("num_processes")
    translation = trl.translate(theirs, processes=processes if isinstance(processes, int) else None)
    translation.document.data.pop("rewards", None)
    if "enable_thinking" in document.data:
        thinks = {"enable_thinking": document.data["enable_thinking"]}
        translation.put("data.chat_template_kwargs", thinks, "chat_template_kwargs")
    translation.document.data.setdefault("data", {})["conversations"] = True
    if (length := document.data.get("max_length")) is not None:
        translation.put("data.max_prompt_length", length, "max_length")
        if document.data.get("truncation_strategy", "left") == "delete":
            translation.put("data.overlong_prompts", "drop", "truncation_strategy")
        else:
            put_dropped_prompts(translation, "max_length")
    return translation


def _put_data(theirs: Document, document: Document) -> None:
    """Set the dataset, which may end in ``#N`` for its first N rows."""
    name = theirs.data.get("dataset_name")
    if is_list(name) and len(name) == 1:
        name = name[0]
    if is_list(name):
        theirs.data.pop("dataset_name")
        theirs.data["datasets"] = [{"path": str(one)} for one in name]
    elif isinstance(name, str):
        path, part, rows = name.partition("#")
        theirs.data["dataset_name"] = path
        if part:
            theirs.data["dataset_train_split"] = f"train[:{rows}]"
