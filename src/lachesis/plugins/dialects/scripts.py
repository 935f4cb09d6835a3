"""Reader of the training that a shell script starts, as a document in the trainer's keys with the script's lines."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.json_values import flat, is_list, is_object
from lachesis.config.document import Document, read_document
from lachesis.plugins.dialects.hydra import ASSIGNMENT, DELETION, parse_value, resolved
from lachesis.plugins.dialects.other_systems import other_system
from lachesis.plugins.dialects.shell.interpreter import commands
from lachesis.plugins.dialects.shell.splitting import Command, readable, unknown_in
from lachesis.plugins.dialects.table import Dialect, Entry
from lachesis.plugins.dialects.trl import TRAINER_KEY, TRL
from lachesis.plugins.dialects.words import Words, read_table

# Programs that train by a policy gradient over groups: modules, files and commands.
_TRAINERS = re.compile(
    r"verl[./]trainer[./]main_ppo(_sync)?(\.py)?|(\S*[./])?(dapo|entropy)[./]main_\w+(\.py)?"
    r"|openrlhf\.cli\.train_(ppo|grpo)\w*|(\S*/)?(train_ppo\w*|\w*grpo\w*|rloo|rlhf)\.py|trl (grpo|rloo)"
    r"|trl\.scripts\.(grpo|rloo)|axolotl (train|preprocess)|axolotl\.cli\.train|(swift|megatron) rlhf|swift\.cli\.rlhf"
)


class _Words(Words):
    commands: dict[str, list[str]]
    other_methods: dict[str, list[str]]
    verl_files: frozenset[str]
    switches_of_hydra: dict[str, str]
    model_flags: frozenset[str]
    launchers: frozenset[str]
    run_names: list[str]
    switch_words: dict[str, bool]


_WORDS = _Words.read("scripts")
# An argument that begins a command because the line before it was not continued.
_ARGUMENT = re.compile(
    r"--[a-z][\w.-]*(=|$)|[+~]*(actor_rollout_ref|algorithm|data|trainer|critic|reward_model)\.[\w.]+="
)
_MOST_FILES = 20


def read_any(path: Path) -> Document:
    """Read a file of any trainer: the training that a shell script starts, or YAML.

    Raises:
        ConfigError: as :func:`read_script` and :func:`lachesis.config.document.read_document`.
    """
    if path.suffix == ".toml":
        raise refuse_toml(path)
    if path.suffix not in (".sh", ".bash", ".slurm", ".sbatch"):
        return read_document(path)
    document = read_script(path)
    if other_system(dict(flat(document.data))) is None:
        check_expanded(document, None)
    return document


@dataclass(frozen=True, slots=True)
class Started:
    """A command that starts a training.

    Attributes:
        program: a module, file or command. arguments: the words after it. launcher: the words before it.
    """

    program: str
    arguments: Sequence[str]
    launcher: Sequence[str] = ()


def read_script(path: Path) -> Document:
    """Read the training that a shell script starts; its flags override a file that it names with ``--config``.

    Raises:
        ConfigError: the script cannot be read, starts no known training or several, or names a missing file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", remedy="give a readable file") from error
    try:
        started = _with_config(_started(commands(text, environment=os.environ, script=path), path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", remedy=error.remedy) from error
    document = Document(name=str(path), data={})
    assigned = any(ASSIGNMENT.fullmatch(word) and "." in word.partition("=")[0] for word in started.arguments)
    found = _overrides(started, path, document) if assigned else flags_of(started.arguments)
    config = found.pop("config", None) if not assigned else None
    if not assigned and "num_processes" not in found and (processes := _processes(started.launcher, path)):
        found["num_processes"] = processes
    elif started.program == "swift rlhf" and (told := re.search(r"\bNPROC_PER_NODE=(\d+)\b", text)):
        found.setdefault("num_processes", int(told[1]))
    trainer = re.search(r"(?:^|\W)(grpo|rloo)(?:\.py)?$", started.program)
    if trainer is not None and other_system(found) is None:
        found = {TRAINER_KEY: trainer[1]} | positive(found, TRL)
    elif other_system(found) == "ms-swift":
        found = positive(found, TRL)
    nested = _nested(found)
    if isinstance(config, str):
        below = _beside(path, config)
        document.origins |= {place: f"{config}, {origin}" for place, origin in below.origins.items()}
        document.problems += below.problems
        nested = merged(below.data, nested)
    document.data = nested
    lines = text.splitlines()
    for name in found:
        if (line := _line(name, lines)) is not None:
            document.origins[tuple(name.split("."))] = f"line {line}"
    return document


def _started(found: Sequence[Command], path: Path) -> Started:
    programs = [one for words in found if (one := _program(words)) is not None]
    known = [one for one in programs if _TRAINERS.fullmatch(one.program) and _other_method(one) is None]
    cut_off = next((words[0] for words in found if _ARGUMENT.match(words[0]) and (known or programs)), None)
    if cut_off is not None:
        raise ConfigError(
            f"{readable(cut_off)} starts a new command: bash does not pass it to the trainer",
            remedy="end the line before with a backslash, and move comments and empty lines out of the command",
        )
    if len({tuple(one.arguments) for one in known}) > 1:
        names = ", ".join(dict.fromkeys(one.program for one in known))
        raise ConfigError(f"starts {len(known)} trainings ({names})", remedy="give a script that starts one of them")
    if known:
        return known[0]
    if (foreign := next((one for one in programs if _other_method(one) is not None), None)) is not None:
        megatron = foreign.program == "megatron rlhf"
        other = "that starts `swift rlhf`" if megatron else "that trains with GRPO"
        ours = "" if megatron else ", where Lachesis trains with GRPO and similar methods"
        raise ConfigError(
            f"starts {foreign.program}, {_other_method(foreign)}{ours}",
            remedy=f"give a script {other}, or write its model and data into a file with Lachesis's keys",
        )
    other = max(programs, key=lambda one: len(one.arguments), default=None)
    if other is not None and _is_training(other.arguments):
        late = re.search(r"async|off_policy", other.program)
        why = "which generates while it trains" if late else "a trainer with its own loss, unknown to Lachesis"
        also = ", and pipeline.async_prefetch and max_staleness into its translation" if late else ""
        raise ConfigError(
            f"starts {other.program}, {why}",
            remedy=f"write the keys that are common to verl's main_ppo into a script that starts that{also}",
        )
    # The words come from a function or variable that holds the trainer's name.
    longest = max(found, key=len, default=[])
    if not _is_training(longest) and not _WORDS.model_flags.intersection(longest):
        inner = next((word for words in found for word in words if word.endswith(".sh")), None)
        toml = next((word for word in longest if word.endswith(".toml")), None)
        if toml is not None:
            raise ConfigError(f"starts a trainer with {readable(toml)}", remedy="give that file, if it is prime-rl's")
        raise ConfigError(
            f"starts no trainer whose arguments Lachesis knows{f', but runs {readable(inner)}' if inner else ''}",
            remedy="give a script for TRL, verl, OpenRLHF or ms-swift, or a YAML file; `lachesis grpo` takes the "
            "Atropos trainer's flags directly",
        )
    return Started("", longest)


def _with_config(started: Started) -> Started:
    """Return `axolotl train FILE` with --config before its file, and the flags for its launcher separately."""
    words = list(started.arguments)
    if not started.program.startswith("axolotl") or not words:
        return started
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[1:end] if word not in _WORDS.launchers]
    return Started(started.program, ["--config", words[0], *kept], words[end + 1 :])


def _other_method(started: Started) -> str | None:
    """Return a trainer's method, by its name or type, if it is not GRPO or similar."""
    stem = Path(started.program).stem if started.program.endswith(".py") else started.program.split(".")[-1]
    name, told = stem.lower(), str(flags_of(started.arguments).get("rlhf_type", ""))
    words = {name, told, *re.split(r"[\W_]+", name)} if "grpo" not in f"{name} {told}" else {name}
    return next((method for method, names in _WORDS.other_methods.items() if words.intersection(names)), None)


def _is_training(words: Sequence[str]) -> bool:
    return any(re.match(r"[+~]*(actor_rollout_ref|algorithm)\.", word) for word in words)


def _program(words: Command) -> Started | None:
    """Return the words after ``-m MODULE``, a Python file or ``trl COMMAND``; None without one."""
    for index, word in enumerate(words[:-1]):
        after = words[index + 1]
        if word in ("-m", "--module") and not after.startswith("-"):
            return Started(after, words[index + 2 :], words[:index])
        if word.endswith(".py"):
            return Started(word, words[index + 1 :], words[:index])
        if after in _WORDS.commands.get(Path(word).name, ()):
            return Started(f"{Path(word).name} {after}", words[index + 2 :], words[:index])
    return None


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Read ``--flag value``, ``--flag=value``, ``--flag a b`` and ``--flag``, which is True."""
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            found[name] = _scalar(value) if equals else True
        elif name:
            before = found[name]
            found[name] = (
                _scalar(word) if before is True else [*(before if is_list(before) else [before]), _scalar(word)]
            )
    return found


def positive(flags: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Turn ``--no_KEY`` of a switch into KEY: false, and words such as ``yes``, as their reader does, into switches."""
    negated = {
        name: name.removeprefix("no_") for name in flags if name.startswith("no_") and name not in dialect.entries
    }
    said = {
        name: _WORDS.switch_words.get(value.lower(), value)
        for name, value in flags.items()
        if isinstance(value, str) and not name.endswith("strategy")
    }
    return {negated.get(name, name): name not in negated and said.get(name, value) for name, value in flags.items()}


def _scalar(text: str) -> Any:
    return text if unknown_in(text) is not None or "\n" in text else parse_value(text)


def _processes(launcher: Sequence[str], script: Path) -> int | None:
    """Return the number of processes given to accelerate or torchrun; None if it is not given."""
    flags = flags_of([word for word in launcher if not word.startswith("-n")])
    config = flags.get("config_file")
    if isinstance(config, str):
        with suppress(ConfigError):
            flags = _beside(script, config).data | flags
    each, machines = flags.get("nproc_per_node"), flags.get("nnodes", 1)
    total = flags.get("num_processes", each)
    if not isinstance(total, int) or total < 1:
        return None
    return total * machines if total is each and isinstance(machines, int) else total


def _overrides(started: Started, path: Path, document: Document) -> dict[str, Any]:
    """Return hydra's overrides, over the file that ``--config-name`` names."""
    found: dict[str, Any] = {}
    options: dict[str, str] = {}
    words = list(started.arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        option = next((long for long, short in _WORDS.switches_of_hydra.items() if name in (long, short)), None)
        if option is not None:
            options[option] = value if equals else words.pop(0) if words else ""
        elif match := ASSIGNMENT.fullmatch(word):
            found[match[2]] = None if match[1] == "~" else _scalar(match[3])
        elif match := DELETION.fullmatch(word):
            found[match[1]] = None
        elif unknown_in(word) is not None:
            document.problems.append(f"{readable(word)}: has no value in the file; write its value")
        elif word in ("--multirun", "-m"):
            document.problems.append("--multirun: it starts several runs; keep the values of one")
    for name in [name for name in found if "@" in name or "/" in name]:
        del found[name]  # it chooses one of verl's own parts of the defaults
    name = options.get("--config-name", "ppo_trainer").removesuffix(".yaml")
    if "veomni" in name:
        found.setdefault("model_engine", "veomni")
    if name in _WORDS.verl_files:
        return found
    folder = options.get("--config-path", options.get("--config-dir", "config"))
    below = verl_document(_beside(path, f"{name}.yaml", folders=(folder,)))
    document.origins |= {place: f"{name}.yaml, {origin}" for place, origin in below.origins.items()}
    document.problems += below.problems
    return dict(flat(below.data)) | found


def verl_document(document: Document, *, depth: int = 0) -> Document:
    """Return verl's file over those of its ``defaults``, without hydra's own keys, and with its ``${...}`` replaced.

    Raises:
        ConfigError: a file of the defaults is neither verl's own nor next to it.
    """
    defaults, data = document.data.pop("defaults", []), document.data
    for one in defaults if is_list(defaults) else []:
        name = one if isinstance(one, str) else ""
        if isinstance(one, str) and name.removesuffix(".yaml") not in _WORDS.verl_files and depth < _MOST_FILES:
            below = verl_document(_beside(Path(document.name), f"{name.removesuffix('.yaml')}.yaml"), depth=depth + 1)
            data = merged(below.data, data)
            document.origins = below.origins | document.origins
    data.pop("hydra", None)
    data = _without_targets(data)
    document.data = resolved(data, dict(flat(data)))
    return document


def _without_targets(data: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the classes that sections are read into, and values that a command line must give."""
    kept = {key: value for key, value in data.items() if key != "_target_" and value != "???"}
    return {key: _without_targets(value) if is_object(value) else value for key, value in kept.items()}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``above`` laid over ``below``, section by section."""
    found = dict(below)
    for key, value in above.items():
        inside = found.get(key)
        found[key] = merged(inside, value) if is_object(inside) and is_object(value) else value
    return found


def _nested(names: Mapping[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in names.items():
        *folders, last = name.split(".")
        section = data
        for folder in folders:
            inside = section.get(folder)
            section[folder] = section = inside if is_object(inside) else {}
        section[last] = value
    return data


def _beside(script: Path, config: str, *, folders: Sequence[str] = ("",)) -> Document:
    """Read a file that a script names: from the working directory, the script's folder, or a folder above it.

    Raises:
        ConfigError: it is in none of these places, or cannot be read.
    """
    places = [Path.cwd(), *script.absolute().parents]
    candidates = [place / folder / config for place in places for folder in folders]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None and unknown_in(config) is not None:
        raise ConfigError(
            f"the configuration file {readable(config)} of {script.name} depends on how the script is called",
            remedy="give that file itself, or write its name into the script",
        )
    if found is None:
        raise ConfigError(
            f"no configuration file {readable(config)}, from which {script.name} takes its keys",
            remedy="put it next to the script, or write its keys into the script",
        )
    return read_document(found).take_older()


def _line(name: str, lines: Sequence[str]) -> int | None:
    """Return the number of the first line that writes an argument, from 1."""
    spelled = re.escape(name).replace("_", "[_-]")
    pattern = re.compile(rf"(?<![\w.-])(--|[+~]*){spelled}(?![\w.-])")
    return next((number for number, line in enumerate(lines, 1) if pattern.search(line)), None)


def check_expanded(document: Document, dialect: Dialect | None) -> None:
    """Add a problem for each value that only the shell or hydra knows, for names that have an effect.

    The run's own name, which has a date most often, and the engine's place on a machine are left out instead.
    """
    for name, value in list(flat(document.data)):
        words = [word for word in (value if is_list(value) else [value]) if isinstance(word, str)]
        found = next(filter(None, map(_unexpanded, words)), None)
        entry = None if dialect is None else dialect.entries.get(name)
        if found is None or (dialect is not None and (entry is None or entry.treatment not in ("sets", "together"))):
            continue
        _remove(document.data, name)
        if name in _WORDS.run_names or (entry is not None and entry.path.startswith("engine.")):
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


_TABLES = read_table("prime_rl")
PRIME_RL = Dialect(
    "prime-rl",
    [
        *(Entry(name, path) for name, path in _TABLES["same"].items()),
        *(Entry(name, treatment="refused", note=why) for name, why in _TABLES["otherwise"].items()),
    ],
)


def refuse_toml(path: Path) -> ConfigError:
    """Return the error for a TOML file: its keys with a counterpart here, and those with another form.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", remedy="give a TOML file") from error
    names = dict(flat(data))
    same = [f"{ours}: {names[name]}" for name, ours in _TABLES["same"].items() if name in names]
    sections = ("orchestrator", "trainer", "inference", "optim", "env", "loss", "weight_broadcast")
    if not any(name.partition(".")[0] in sections for name in names):
        return ConfigError(f"{path} is not TOML of a known trainer", remedy="write YAML in Lachesis' keys")
    other = [f"{name}: {why}" for name, why in _TABLES["otherwise"].items() if name in names or any(
        one.startswith(f"{name}.") for one in names)]  # fmt: skip
    return ConfigError(
        "\n".join([f"{path} is a configuration of prime-rl, whose loss and environments have another form", *other]),
        remedy=f"write a configuration in Lachesis' keys; the same here are {', '.join(same) or 'none of them'}",
    )
