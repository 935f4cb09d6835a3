"""The files of a first run: a commented configuration (``first_run.yaml``), a reward, problems and a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lachesis.common.errors import ConfigError

# Problems of the first run: the answer is the digit in the prompt.
_PROBLEMS = "".join(f'{{"prompt": "{digit}=", "answer": "{digit}"}}\n' for digit in range(10))


def init(directory: str | Path) -> list[Path]:
    """Write config.yaml, rewards.py, model.py and two small datasets, ready to run on a CPU.

    The model is made by model.py when the run begins: nothing is downloaded.

    Args:
        directory: created if it does not exist.

    Returns:
        The files, in the order in which a newcomer should read them.

    Raises:
        ConfigError: a file exists already (then nothing is written), or the directory is not writable.
    """
    directory = Path(directory)
    files = {
        directory / "config.yaml": _shipped("first_run.yaml"),
        directory / "rewards.py": _shipped("first_run_rewards.py.txt"),
        directory / "model.py": _shipped("first_run_model.py.txt"),
        directory / "train.jsonl": _PROBLEMS * 9,
        directory / "eval.jsonl": _PROBLEMS,
    }
    return write_new(files)


def _shipped(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def write_new(files: Mapping[Path, str]) -> list[Path]:
    """Write files and their directories, if none of the files exists.

    Raises:
        ConfigError: a file exists already (then nothing is written), or cannot be written.
    """
    there = [path for path in files if path.exists()]
    if there:
        raise ConfigError(
            f"{', '.join(map(str, there))} would be overwritten", remedy="choose another directory, or move them away"
        )
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {error.filename}: {error.strerror}", remedy="choose another directory"
        ) from error
    return list(files)
