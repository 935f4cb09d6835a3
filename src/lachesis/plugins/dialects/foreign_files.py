"""A file of another trainer's, or a script that starts one, as a configuration of ours, written out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_list, is_object
from lachesis.config.document import Document, apply_overrides, parse_document, read_document, to_yaml
from lachesis.config.load import row_sections, validate
from lachesis.plugins.dialects import recognize, translate
from lachesis.plugins.dialects.defaults import default_findings
from lachesis.plugins.dialects.openrlhf import OPENRLHF
from lachesis.plugins.dialects.other_systems import finish, other_system
from lachesis.plugins.dialects.shell import Command, commands, unknown_in
from lachesis.plugins.dialects.table import Dialect, Translation
from lachesis.plugins.dialects.verl import VERL

# ``a.b=c`` as hydra takes it, or ``--flag=value``; a shell's own ``NAME=value`` is neither.
_ASSIGNMENT = re.compile(r"(--[\w.-]+|\+*[A-Za-z_]\w*(\.\w+)+)=")
_RUN_NAME = "trainer.experiment_name"
# Files of verl's whose defaults of training are those of ppo_trainer.yaml.
_VERL_FILES = ("ppo_trainer", "ppo_megatron_trainer", "ppo_veomni_trainer")


def translated(path: Path, *, overrides: Sequence[str] = ()) -> str:
    """Return the YAML of our keys that means the same, with remarks as comments before it.

    verl's and OpenRLHF's files and scripts are translated as far as possible; the rest is named.

    Raises:
        ConfigError: the file cannot be read, is of an unknown trainer, or asks for something impossible here.
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
            "the Atropos trainer directly",
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
    _check_expanded(document, names, dialect)
    if document.problems:
        raise ConfigError("\n".join(document.problems), remedy="correct the file")
    translation = Translation(document, dialect)
    translation.run()
    finish(translation)
    data = translation.document.data
    if translation.document.problems:
        raise ConfigError("\n".join(translation.document.problems), remedy="correct the file")
    if "steps" in data.setdefault("run", {}):
        data["run"].pop("epochs", None)
    validate(translation.document, complete=False)
    rest = [name for name in names if _has_no_influence(name, dialect)]
    said = [
        *(f"{finding.level}: {finding.message}" for finding in translation.findings),
        f"{system}'s rewards have another signature: write rewards.functions",
        *([f"no influence on training, left out: {', '.join(rest)}"] if rest else []),
    ]
    return _written(f"Translated from {system}'s keys in {Path(document.name).name}.", said, translation)


def _has_no_influence(name: str, dialect: Dialect) -> bool:
    """Return True for names that place processes or logs, and for suboptions of refused options."""
    entry = dialect.entries.get(name)
    return entry is None or (entry.treatment == "together" and not entry.path)


def _check_expanded(document: Document, names: Mapping[str, Any], dialect: Dialect) -> None:
    """Add a problem for each value that only the shell knows, of names that have an influence."""
    for name, value in names.items():
        words = [word for word in (value if is_list(value) else [value]) if isinstance(word, str)]
        found = next(filter(None, map(unknown_in, words)), None)
        if found is not None and not _has_no_influence(name, dialect):
            document.problems.append(
                f"{dialect.prefix}{name}: {found} has no value in the script; export it, or write the value"
            )


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
    """Read the arguments of the trainer that a shell script starts: ``a.b=c``, ``--flag value`` and ``--flag a b``.

    Raises:
        ConfigError: it cannot be read, or a quotation in it is not closed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", remedy="give a readable file") from error
    found = _arguments(_trainer_words(commands(text, environment=os.environ)))
    _check_hydra(found)
    # A name of the run that only the shell knows, by a date most often, says nothing about training.
    if unknown_in(str(found.get(_RUN_NAME, ""))) is not None:
        del found[_RUN_NAME]
    config = found.pop("config", None)
    data = found if any("." in name for name in found) else dict(found)
    if isinstance(config, str):
        data = _config_beside(path, config).data | data
    return Document(name=str(path), data=_nested(data))


def _check_hydra(found: dict[str, Any]) -> None:
    """Take hydra's own options out of verl's arguments.

    Raises:
        ConfigError: they name a file other than verl's own, whose defaults are not known here.
    """
    name = str(found.pop("config-name", "ppo_trainer")).removesuffix(".yaml")
    found.pop("config-path", None)
    if name not in _VERL_FILES:
        raise ConfigError(
            f"the script takes its defaults from {name}.yaml",
            remedy="translate that file, or write its keys into the script",
        )


def _trainer_words(found: Sequence[Command]) -> Sequence[str]:
    """Return what comes after the trainer's name in the command with most arguments."""
    return max((_after_program(words) for words in found), key=len, default=())


def _after_program(words: Command) -> Sequence[str]:
    """Return the words behind ``-m MODULE``, a Python file or ``trl COMMAND``; all words without one."""
    for index, word in enumerate(words[:-1]):
        if word == "-m" and not words[index + 1].startswith("-"):
            return words[index + 2 :]
        if word.endswith(".py") and not words[max(0, index - 1)].startswith("--"):
            return words[index + 1 :]
        if Path(word).name == "trl" and not words[index + 1].startswith("-"):
            return words[index + 2 :]
    return words


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    index = 0
    while index < len(words):
        word, index = words[index], index + 1
        if word.startswith("--") and "=" not in word:
            values = []
            while index < len(words) and not words[index].startswith("--") and not _ASSIGNMENT.match(words[index]):
                values.append(_scalar(words[index]))
                index += 1
            found[word[2:]] = True if not values else values[0] if len(values) == 1 else values
        elif _ASSIGNMENT.match(word):
            name, _, value = word.lstrip("-+~").partition("=")
            found[name] = _scalar(value)
    return found


def _config_beside(script: Path, config: str) -> Document:
    """Read the file that a script names with ``--config``: from the working directory, or beside the script.

    Raises:
        ConfigError: it is in neither place, or cannot be read.
    """
    candidates = [Path(config), script.parent / config]
    return read_document(next((path for path in candidates if path.exists()), candidates[0]))


def _scalar(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if unknown_in(text) is not None:
        return text
    try:
        return parse_document(f"value: {text}", name="value").data["value"]
    except ConfigError:
        return text
