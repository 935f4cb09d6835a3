"""Loading of configurations: YAML and overrides in; one immutable, resolved tree or one error out."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from lachesis.common.json_values import is_list, is_object
from lachesis.common.types import Finding
from lachesis.common.world import world_size
from lachesis.config.document import Document, read_document, to_yaml
from lachesis.config.installed import schema_of
from lachesis.config.keys import all_sections, without_nulls
from lachesis.config.overrides import apply_overrides
from lachesis.config.paths import resolve_all
from lachesis.config.problems import config_error, located, missing_problems, schema_problems
from lachesis.config.schema import LachesisConfig, MixedSourceConfig

if TYPE_CHECKING:
    from lachesis.plugins.dialects import DialectName
    from lachesis.plugins.dialects.atropos import ManagedEngine

logger = logging.getLogger("lachesis")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration with absolute paths, and the directory of its file.

    ``findings`` are notes and warnings about another trainer's keys that mean something else, or nothing, here.
    ``located`` adds to each canonical key in a message its line, and its name in the dialect, in the file ``name``.
    """

    config: LachesisConfig
    base_dir: Path
    dialect: str = "canonical"
    findings: tuple[Finding, ...] = ()
    located: Callable[[str], str] = field(default=str, compare=False, repr=False)
    name: str = "the configuration"


def load_config(path: str | Path, *, overrides: Sequence[str] = (), processes: int | None = None) -> LoadedConfig:
    """Read a YAML file in any dialect, apply ``a.b=c`` overrides in order, validate, and make paths absolute.

    Paths are resolved as :mod:`lachesis.config.paths` says. No other file is read. An override may name a key of the
    file's dialect, which is then translated with the rest, or a canonical key.

    Args:
        path: the file.
        overrides: of the form ``a.b=c``; ``c`` is YAML.
        processes: number of trainer processes, by which Axolotl and TRL multiply batch sizes. If unset: $WORLD_SIZE,
            else the file's number, else the fewest that make whole groups.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong; the message lists every problem
            with its key and line.
    """
    path = Path(path)
    return load_document(read_file(path), base_dir=path.absolute().parent, overrides=overrides, processes=processes)


def read_file(path: Path) -> Document:
    """Read a YAML file, or a script that starts another trainer; raise ConfigError if it cannot be read."""
    if path.suffix == ".yaml":
        return read_document(path)
    from lachesis.plugins.dialects.scripts import read_any

    return read_any(path)


def load_document(
    document: Document,
    *,
    base_dir: Path,
    overrides: Sequence[str] = (),
    processes: int | None = None,
    keys: Mapping[str, Any] | None = None,
    complete: bool = True,
) -> LoadedConfig:
    """Load a document as :func:`load_config` loads a file; relative paths in it are relative to ``base_dir``.

    Args:
        keys: canonical sections that replace keys of the document after any translation.
        complete: require all keys that a run needs, not only the schema's required ones.
    """
    cwd = Path.cwd()
    dialect = dialect_of(document)
    if dialect == "canonical":
        lay_over(document.data, keys or {})
        apply_overrides(document, overrides)
        put_stages(document, document)
        config = resolve_all(validate(document, complete=complete), base_dir=base_dir, cwd=cwd)
        return LoadedConfig(config, base_dir, located=partial(located, document=document), name=document.name)
    from lachesis.plugins.dialects import apply_ours, findings_of, translate

    theirs = [override for override in overrides if _is_theirs(override, dialect)]
    apply_overrides(document, theirs, row_sections=row_sections(dialect))
    if processes is None and "WORLD_SIZE" in os.environ:
        processes = world_size(os.environ)
    stages = Document(document.name, {"stages": document.data.pop("stages", None)}, document.origins)
    translation = translate(document, dialect=dialect, processes=processes)
    put_stages(stages, translation.document)
    lay_over(translation.document.data, keys or {})
    ours = [override for override in overrides if override not in theirs]
    apply_ours(translation, ours, keys=keys or {})
    config = validate(translation.document, complete=complete)
    config = resolve_all(config, base_dir=base_dir, cwd=cwd, like_theirs=True)
    return LoadedConfig(
        config,
        base_dir,
        dialect=dialect,
        findings=tuple(findings_of(translation, dialect=dialect)),
        located=partial(located, document=translation.document),
        name=document.name,
    )


def dialect_of(document: Document) -> DialectName:
    """Return the dialect of a document's keys, and read values as its trainer does: by YAML 1.1, unlike ours.

    A document with canonical keys only does not import the dialects.

    Raises:
        ConfigError: as :func:`lachesis.plugins.dialects.recognize`.
    """
    sections = {*LachesisConfig.model_fields, "stages"}
    if all(key in sections and not isinstance(value, str | bool) for key, value in document.data.items()):
        return "canonical"
    from lachesis.plugins.dialects import recognize

    found = recognize(document.data)
    if found != "canonical":
        document.take_older()
    return found


def put_stages(source: Document, target: Document) -> None:
    """Move ``stages`` from the top level of ``source`` to ``run.stages`` of ``target``."""
    stages = source.data.pop("stages", None)
    if stages is None:
        return
    place = ("run", "stages")
    run = target.data.setdefault("run", {})
    if not is_object(run):
        return  # the schema check reports this
    if run.get("stages") is not None:
        target.problems.append(f"stages{source.at(place[1:])}: run.stages{target.at(place)} sets the same; keep one")
    run["stages"] = stages
    written = {known: origin for known, origin in source.origins.items() if known[:1] == place[1:]}
    target.origins |= {("run", *known): f"{origin}: stages" for known, origin in written.items()}


def lay_over(data: dict[str, Any], keys: Mapping[str, Any]) -> None:
    """Merge ``keys`` into ``data``: sections recursively; other values replace the old ones."""
    for name, value in keys.items():
        below = data.get(name)
        if isinstance(value, dict) and isinstance(below, dict):
            lay_over(cast(dict[str, Any], below), cast(dict[str, Any], value))
        else:
            data[name] = value


def load_argv(
    argv: Sequence[str], *, overrides: Sequence[str] = (), engine: ManagedEngine | None = None
) -> LoadedConfig:
    """Load a configuration from command-line flags of the Atropos trainer; paths are relative to the current directory.

    Args:
        engine: the engine that the run starts, as for :func:`lachesis.plugins.dialects.atropos.translate_argv`.

    Raises:
        ConfigError: a flag is unknown, or its value is wrong; the message lists every problem.
    """
    from lachesis.plugins.dialects.atropos import leave_out_engine_flags, translate_argv
    from lachesis.plugins.dialects.environment import environment_findings

    translation = translate_argv(argv, engine=engine)
    apply_overrides(translation.document, overrides)
    leave_out_engine_flags(translation)
    cwd = Path.cwd()
    config = resolve_all(validate(translation.document), base_dir=cwd, cwd=cwd, like_theirs=True)
    findings = (*translation.findings, *environment_findings(os.environ))
    places = partial(located, document=translation.document)
    return LoadedConfig(config, cwd, dialect="atropos", findings=findings, located=places)


def log_findings(findings: Iterable[Finding]) -> None:
    """Log findings about a configuration: notes at level info, warnings at level warning."""
    for finding in findings:
        logger.log(logging.INFO if finding.level == "note" else logging.WARNING, "%s", finding.message)


def dump_config(config: LachesisConfig) -> str:
    """Return the whole configuration, defaults included, as YAML that loads back equal."""
    return to_yaml(config.model_dump(mode="python"))


def validate(document: Document, *, complete: bool = True) -> LachesisConfig:
    """Validate a document strictly: text is not converted to a number, nor a number to text.

    ``complete`` requires all keys that a run needs: its length, and data and rewards for the local source.

    Raises:
        ConfigError: the document has problems; the message has a line for each.
    """
    if is_object(algorithm := document.data.get("algorithm")) and "preset" in algorithm:
        from lachesis.config.presets import apply_preset

        apply_preset(document.data)  # apply_preset writes the preset's keys into the document
    repeated = [f"{text}; remove one" for text in document.repeated]
    missing = missing_problems(document) if complete else []
    problems = [*repeated, *document.problems, *missing]
    if document.unread:
        raise config_error(document.name, problems)
    # Through JSON, because strict validation accepts a list for a tuple only there.
    schema = schema_of(document.data)
    text = json.dumps(_with_default_kinds(without_nulls(document.data, [schema])))
    try:
        config = schema.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise config_error(document.name, problems + schema_problems(error, document, schema)) from error
    if problems:
        raise config_error(document.name, problems)
    return config


def _is_theirs(override: str, dialect: DialectName) -> bool:
    """Return True if an override names a key of the file's dialect, or an unknown key."""
    from lachesis.plugins.dialects import keys_of

    path = override.partition("=")[0].strip()
    return path in keys_of(dialect).entries or path.partition(".")[0] not in LachesisConfig.model_fields


def row_sections(dialect: DialectName) -> frozenset[str]:
    """Return the dialect's keys whose values are lists of mappings."""
    from lachesis.plugins.dialects import keys_of

    return keys_of(dialect).row_sections


def _with_default_kinds(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data with the default ``kind`` in each tagged section that has none.

    Tagged sections are at the top level, or at the top level of one of several sources.
    """
    kinds = {section.path: section.default_kind for section in all_sections(LachesisConfig) if section.discriminated}
    whole: dict[str, Any] = {
        name: {"kind": kinds[name], **value} if kinds.get(name) is not None and isinstance(value, dict) else value
        for name, value in data.items()
    }
    if is_list(sources := whole.get("sources")):
        whole["sources"] = [
            _with_default_kinds(without_nulls(one, [MixedSourceConfig])) if is_object(one) else one for one in sources
        ]
    return whole
