"""A file of another trainer's, or a script that starts one, as a configuration of ours, written out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lachesis.common.json_values import flat
from lachesis.config.document import Document, apply_overrides, to_yaml
from lachesis.config.load import row_sections, validate
from lachesis.config.problems import config_error
from lachesis.plugins.dialects import recognize, translate
from lachesis.plugins.dialects.defaults import default_findings
from lachesis.plugins.dialects.other_systems import OTHER_SYSTEMS, other_system
from lachesis.plugins.dialects.scripts import check_expanded, read_any, verl_document
from lachesis.plugins.dialects.table import Translation


def translated(path: Path, *, overrides: Sequence[str] = ()) -> str:
    """Return the YAML of our keys that means the same, with remarks as comments before it.

    Raises:
        ConfigError: the file cannot be read, is of an unknown trainer, or asks for something impossible here.
    """
    document = read_any(path)
    if (system := other_system(dict(flat(document.data)))) is not None:
        return _of_other_system(document, system, overrides)
    dialect = recognize(document.data)
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
    check_expanded(document, dialect)
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


def _written(title: str, said: Sequence[str], translation: Translation) -> str:
    comments = [f"# {line}" for text in (title, *said) for line in text.splitlines()]
    return "\n".join([*comments, to_yaml(translation.document.data)])
