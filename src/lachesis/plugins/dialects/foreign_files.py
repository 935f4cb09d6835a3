"""A file of another trainer's, or a script that starts one, as a configuration of ours, written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import is_list
from lachesis.config.document import Document, apply_overrides, read_document, to_yaml
from lachesis.config.load import row_sections, validate
from lachesis.config.problems import config_error
from lachesis.plugins.dialects import recognize, translate
from lachesis.plugins.dialects.defaults import default_findings
from lachesis.plugins.dialects.other_systems import OTHER_SYSTEMS, other_system
from lachesis.plugins.dialects.scripts import flat, read_script, verl_document
from lachesis.plugins.dialects.shell import unknown_in
from lachesis.plugins.dialects.table import Dialect, Translation

_RUN_NAMES = ("trainer.experiment_name", "run_name", "output_dir")


def read_foreign(path: Path) -> Document:
    """Read a file of any trainer: the training that a shell script starts, or YAML.

    Raises:
        ConfigError: as :func:`lachesis.plugins.dialects.scripts.read_script` and
            :func:`lachesis.config.document.read_document`.
    """
    return read_script(path) if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") else read_document(path)


def translated(path: Path, *, overrides: Sequence[str] = ()) -> str:
    """Return the YAML of our keys that means the same, with remarks as comments before it.

    Raises:
        ConfigError: the file cannot be read, is of an unknown trainer, or asks for something impossible here.
    """
    document = read_foreign(path)
    if (system := other_system(dict(flat(document.data)))) is not None:
        return _of_other_system(document, system, overrides)
    dialect = recognize(document.data)
    _check_expanded(document, dict(flat(document.data)))
    apply_overrides(document, overrides, row_sections=() if dialect == "canonical" else row_sections(dialect))
    if dialect == "canonical":
        validate(document, complete=False)
        return to_yaml(document.data)
    translation = translate(document, dialect=dialect, processes=None)
    validate(translation.document, complete=False)
    findings = (*translation.findings, *default_findings(translation))
    said = [f"{finding.level}: {finding.message}" for finding in findings]
    return _written(f"Translated from {translation.dialect.name}'s keys in {path.name}.", said, translation)


def _of_other_system(document: Document, system: str, overrides: Sequence[str]) -> str:
    dialect, translator = OTHER_SYSTEMS[system]
    if system == "verl":
        document = verl_document(document)
    apply_overrides(document, overrides)
    names = dict(flat(document.data))
    _check_expanded(document, names, dialect)
    if document.problems:
        raise config_error(document.name, document.problems)
    translation = translator(document)
    data = translation.document.data
    if translation.document.problems:
        raise config_error(document.name, translation.document.problems)
    if "steps" in data.setdefault("run", {}):
        data["run"].pop("epochs", None)
    validate(translation.document, complete=False)
    said = [
        *(f"{finding.level}: {finding.message}" for finding in translation.findings),
        f"{system}'s rewards have another signature: write rewards.functions",
    ]
    return _written(f"Translated from {system}'s keys in {Path(document.name).name}.", said, translation)


def _check_expanded(document: Document, names: Mapping[str, Any], dialect: Dialect | None = None) -> None:
    """Add a problem for each value that only the shell or hydra knows, of names that have an influence.

    The run's own name, which has a date most often, and the engine's place on a machine are left out instead.
    """
    for name, value in names.items():
        words = [word for word in (value if is_list(value) else [value]) if isinstance(word, str)]
        found = next(filter(None, map(_unexpanded, words)), None)
        entry = None if dialect is None else dialect.entries.get(name)
        if found is None or (dialect is not None and (entry is None or entry.treatment in ("nothing", "cannot"))):
            continue
        if name in _RUN_NAMES or (entry is not None and entry.path.startswith("engine.")):
            _remove(document.data, name)
            continue
        place = tuple(name.split("."))
        document.problems.append(
            f"{dialect.prefix if dialect else ''}{name}{document.at(place)}: {found} has no value in the file; write "
            "the value, or export it before"
        )


def _unexpanded(word: str) -> str | None:
    return unknown_in(word) or (word if word.startswith("${") and word.endswith("}") else None)


def _remove(data: dict[str, Any], name: str) -> None:
    *folders, last = name.split(".")
    for folder in folders:
        data = data[folder]
    del data[last]


def _written(title: str, said: Sequence[str], translation: Translation) -> str:
    comments = [f"# {line}" for text in (title, *said) for line in text.splitlines()]
    return "\n".join([*comments, to_yaml(translation.document.data)])


__all__ = ["ConfigError", "read_foreign", "translated"]
