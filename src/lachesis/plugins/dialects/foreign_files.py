"""A file of another trainer's, or a script that starts one, as a configuration of ours, written out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_object
from lachesis.config.document import Document, apply_overrides, parse_document, read_document, to_yaml
from lachesis.config.load import row_sections, validate
from lachesis.plugins.dialects import recognize, translate
from lachesis.plugins.dialects.defaults import default_findings
from lachesis.plugins.dialects.other_systems import OPENRLHF, VERL, other_system, put_generation
from lachesis.plugins.dialects.table import Translation

# ``a.b=c`` as hydra takes it, or ``--flag=value``; a shell's own ``NAME=value`` is neither.
_ASSIGNMENT = re.compile(r"(--[\w.-]+|\+*[A-Za-z_]\w*(\.\w+)+)=")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")


def translated(path: Path, *, overrides: Sequence[str] = ()) -> str:
    """The YAML of our keys that says the same, with what else there is to say as comments before it.

    verl's and OpenRLHF's files and scripts give what is common; the rest is named.

    Raises:
        ConfigError: the file cannot be read, is of nobody known, or says something that cannot be done.
    """
    document = _script(path) if path.suffix == ".sh" else read_document(path)
    names = dict(_flat(document.data))
    if (system := other_system(names)) is not None:
        return _of_other_system(document, names, system)
    dialect = recognize(document.data)
    if dialect == "canonical" and path.suffix == ".sh":
        raise ConfigError(
            f"{path} starts no trainer whose arguments Lachesis knows",
            remedy="give a script of TRL's, verl's or OpenRLHF's, or a YAML file; `lachesis grpo` takes the flags of "
            "the Atropos trainer as they are",
        )
    apply_overrides(document, overrides, row_sections=() if dialect == "canonical" else row_sections(dialect))
    if dialect == "canonical":
        validate(document, complete=False)
        return to_yaml(document.data)
    translation = translate(document, dialect=dialect, processes=None)
    validate(translation.document, complete=False)
    findings = (*translation.findings, *default_findings(translation))
    said = [f"{finding.level}: {finding.message}" for finding in findings]
    return _written(f"Translated from {translation.dialect.name}'s keys in {path.name}.", said, translation)


def _of_other_system(document: Document, names: Mapping[str, Any], system: str) -> str:
    dialect = VERL if system == "verl" else OPENRLHF
    known = {name: value for name, value in names.items() if name in dialect.entries}
    translation = Translation(Document(name=document.name, data=_nested(known)), dialect)
    translation.run()
    put_generation(translation)
    data = translation.document.data
    if translation.document.problems:
        raise ConfigError("\n".join(translation.document.problems), remedy="correct the file")
    if "steps" in data.setdefault("run", {}):
        data["run"].pop("epochs", None)
    if names.get("actor_rollout_ref.actor.use_kl_loss") is False:
        data.get("algorithm", {}).pop("beta", None)
    if "r" in data.get("adapter", {}):
        data["adapter"]["kind"] = "lora"
    else:
        data.pop("adapter", None)
    if data.get("engine", {}).get("kind") == "vllm":
        data["bridge"] = {"kind": "broadcast"}
    else:
        data.pop("engine", None)
    rest = [name for name in names if name not in known]
    said = [
        f"{system}'s rewards have another signature: write rewards.functions, and run.steps or run.epochs if missing",
        f"{len(rest)} keys were not translated: {', '.join(rest)}",
    ]
    return _written(f"What is common of {system}'s file {Path(document.name).name}.", said, translation)


def _written(title: str, said: Sequence[str], translation: Translation) -> str:
    comments = [f"# {line}" for text in (title, *said) for line in text.splitlines()]
    return "\n".join([*comments, to_yaml(translation.document.data)])


def _flat(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{before}{key}"
        if is_object(value):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _nested(names: Mapping[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in names.items():
        *folders, last = name.split(".")
        section = data
        for folder in folders:
            section = section.setdefault(folder, {})
        section[last] = value
    return data


def _script(path: Path) -> Document:
    """The arguments of the commands in a shell script: ``a.b=c`` and ``--flag value``, its own variables filled in.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", remedy="give a readable file") from error
    found: dict[str, Any] = {}
    variables = dict(re.findall(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=[\"']?([^\"'\n(]*)", text, re.MULTILINE))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    words = [_filled(word, variables) for line in lines for word in _words(line)]
    for index, word in enumerate(words):
        after = words[index + 1] if index + 1 < len(words) else "--"
        if word.startswith("--") and "=" not in word:
            found[word[2:]] = True if after.startswith("--") or after == ")" else _scalar(after)
        elif _ASSIGNMENT.match(word):
            name, _, value = word.lstrip("-+").partition("=")
            found[name] = _scalar(value)
    return Document(name=str(path), data=found)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation over several lines: none of ours to read
        return []


def _filled(word: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), word)


def _scalar(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return parse_document(f"value: {text}", name="value").data["value"]
    except ConfigError:
        return text
