"""Translation of other trainers' commands to ours: ``axolotl train config.yaml`` is ``lachesis train config.yaml``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.config.document import read_document, to_yaml
from lachesis.plugins.dialects.scripts import flags_of, positive
from lachesis.plugins.dialects.trl import TRAINER_KEY, TRL

Words = Sequence[str]

# Options of `lachesis train` that are not keys of Axolotl.
_OWN = frozenset({"--set", "--smoke", "--resume", "--overwrite"})

# Flags of `axolotl train` that are not keys either.
_LAUNCHER = ("launcher", "num_processes", "accelerate", "no_accelerate")
_LAUNCHED = "-m axolotl.cli.train CONFIG, and grpo.py or rloo.py with the flags of `trl`"
# TRL's trainer that a command starts; TRL's files do not name it.
_TRAINER: Mapping[str, Words] = {"grpo": (), "rloo": (f"--{TRAINER_KEY}", "rloo")}


def command_for(program: str, words: Words) -> list[str]:
    """Return our command that does the same as ``program words``.

    Args:
        program: a key of :data:`PROGRAMS`.
        words: its arguments.

    Raises:
        ConfigError: we have no such command.
    """
    return PROGRAMS[program](list(words))


def _axolotl(words: Words) -> list[str]:
    verb, *rest = words or ["--help"]
    if verb == "train":
        return _axolotl_train(rest)
    if verb == "vllm-serve":
        return ["lachesis", "vllm-serve", *rest]
    if verb == "preprocess":
        # Nothing is preprocessed here; this checks what can be checked before a run.
        return ["lachesis", "plan", *_settings(*_read(rest))]
    raise _nothing(f"axolotl {verb}", "axolotl train, vllm-serve and preprocess")


def _axolotl_train(words: Words) -> list[str]:
    """Return our train command; Axolotl's own flags, and its launcher's after ``--``, give the number of processes."""
    end = words.index("--") if "--" in words else len(words)
    config, flags, own = _read(words[:end])
    launcher = _flags(words[end + 1 :])
    processes = _number_of_processes({**launcher, **flags}, otherwise=_visible_gpus())
    alone = flags.get("launcher") == "python" or "no_accelerate" in flags
    keys = {name: value for name, value in flags.items() if name not in _LAUNCHER}
    return _launched(["lachesis", "train", *_settings(config, keys, own)], 1 if alone else processes)


def _trl(words: Words) -> list[str]:
    verb, *rest = words or ["--help"]
    if verb == "vllm-serve":
        return ["lachesis", "serve", *_served(rest)]
    if verb not in ("grpo", "rloo"):
        raise _nothing(f"trl {verb}", "trl grpo, rloo and vllm-serve")
    return _grpo([*rest, *_TRAINER[verb]])


def _served(words: Words) -> list[str]:
    """Return flags of a server: dashes for underscores, switches without their true, and TRL's default port."""
    flags = {"port": "8000", **_flags(words)}
    given = {name.replace("_", "-"): value for name, value in flags.items() if value.lower() not in ("false", "none")}
    pairs = [[f"--{name}"] if value.lower() == "true" else [f"--{name}", value] for name, value in given.items()]
    return [word for pair in pairs for word in pair]


def _grpo(words: Words, *, processes: int | None = None) -> list[str]:
    """Return our command for TRL's script, or open-r1's with the same flags: a file and flags, or only flags."""
    if words and not words[0].startswith("-"):
        raise _stray(words[0])
    flags = positive(flags_of(words), TRL)
    processes = _number_of_processes(flags, otherwise=_visible_gpus() if processes is None else processes)
    flags.pop("num_processes", None)
    config = flags.pop("config", None)
    if config is None:
        return _launched(["lachesis", "train", _written(flags)], processes)
    settings = (f"--set={key}={json.dumps(value)}" for key, value in flags.items())
    return _launched(["lachesis", "train", config, *settings], processes)


def _accelerate(words: Words) -> list[str]:
    """Return our command for ``launch``; of its flags before the program only the number of processes matters."""
    verb, *rest = words or ["--help"]
    place = next((i for i, word in enumerate(rest) if word == "-m" or word.endswith(".py")), None)
    if verb != "launch" or place is None:
        raise _nothing("accelerate", _LAUNCHED)
    processes = _processes(_flags(rest[:place]))
    program, *after = rest[place + 1 :] if rest[place] == "-m" else rest[place:]
    if program == "axolotl.cli.train":
        return _launched(["lachesis", "train", *_settings(*_read(after))], processes)
    stem = Path(program).stem if program.endswith(".py") else program.removeprefix("trl.scripts.")
    if stem in _TRAINER:
        return _grpo([*after, *_TRAINER[stem]], processes=processes)
    raise _nothing(f"accelerate launch {program}", _LAUNCHED)


def _processes(flags: Mapping[str, str]) -> int:
    """Return the processes of ``accelerate launch``: by its flags, its file, or one for each GPU of the environment."""
    if "num_processes" in flags or "config_file" not in flags:
        return _number_of_processes(flags, otherwise=_visible_gpus())
    return _number_of_processes({**read_document(Path(flags["config_file"])).data, **flags}, otherwise=1)


def _number_of_processes(said: Mapping[str, object], *, otherwise: int) -> int:
    machines, number = (said.get(name) for name in ("num_machines", "num_processes"))
    if str(machines or said.get("nnodes", 1)) != "1":
        raise ConfigError(
            "a command starts only the processes of its machine",
            remedy="start torchrun --nnodes N -m lachesis train on each of them (docs/several-gpus.md)",
        )
    number = number or said.get("nproc_per_node") or otherwise
    if not str(number).isdecimal() or int(str(number)) < 1:
        raise ConfigError(f"{number!r} is not a number of processes", remedy="give a number such as 2")
    return int(str(number))


def _visible_gpus() -> int:
    """Return the number of visible GPUs, which is the default number of processes there."""
    return max(1, len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))


def _launched(command: list[str], processes: int) -> list[str]:
    return command if processes <= 1 else ["torchrun", "--nproc-per-node", str(processes), "-m", *command]


def _read(words: Words) -> tuple[str, dict[str, str], list[str]]:
    """Return CONFIG, the flags that change its keys, and our own options unchanged."""
    if not words or words[0].startswith("-"):
        raise ConfigError("the command names no configuration", remedy="name the YAML file first")
    config, *rest = words
    own: list[str] = []
    theirs: list[str] = []
    for word, before in zip(rest, ["", *rest], strict=False):
        is_own = before == "--set" or word.startswith("--set=") or word in _OWN
        (own if is_own else theirs).append(word)
    return config, _flags(theirs), own


def _settings(config: str, flags: Mapping[str, str], own: Words) -> list[str]:
    return [config, *(f"--set={key}={value}" for key, value in flags.items()), *own]


def _flags(words: Words) -> dict[str, str]:
    """Read ``--flag value``, ``--flag=value`` and ``--flag`` alone, which is true; dashes become underscores."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value if equals else "true"
        elif name:
            found[name] = word if found[name] == "true" else f"{found[name]} {word}"
        else:
            raise _stray(word)
    return found


def _stray(word: str) -> ConfigError:
    return ConfigError(f"{word!r} belongs to no flag", remedy="write it as --flag value")


def _written(flags: Mapping[str, Any]) -> str:
    """Write the flags as keys to a file, since our train command reads only files, and return its path."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="trl-", delete=False) as file:
        file.write(to_yaml(dict(flags)))
    return str(Path(file.name))


def _nothing(what: str, known: str) -> ConfigError:
    return ConfigError(f"Lachesis has no command like `{what}`", remedy=f"known are {known}")


PROGRAMS: Mapping[str, Callable[[Words], list[str]]] = {
    "axolotl": _axolotl,
    "trl": _trl,
    "accelerate": _accelerate,
    "example_trainer.grpo": lambda words: ["lachesis", "grpo", *words],
    "example_trainer.run": lambda words: ["lachesis", "run", *words],
    "example_trainer.vllm_api_server": lambda words: ["lachesis", "serve", *words],
    "environments/gsm8k_server.py": lambda words: ["lachesis", "env", "gsm8k", *words],
}


def main() -> None:
    """Replace this process with our command that does the same as the words."""
    program, *words = sys.argv[1:]
    try:
        command = command_for(program, words)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    # This keeps the same installation, whatever is first on the path.
    own = {"lachesis": ["-m", "lachesis"], "torchrun": ["-m", "torch.distributed.run"]}[command[0]]
    os.execv(sys.executable, [sys.executable, *own, *command[1:]])
