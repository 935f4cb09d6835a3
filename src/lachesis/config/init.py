"""A first run to start from: a commented configuration, its reward, its problems, and the model that they need."""

from __future__ import annotations

from pathlib import Path

from lachesis.common.errors import ConfigError
from lachesis.config.templates import CONFIG, MODEL, PROBLEMS, REWARDS


def problem_lines(count: int) -> str:
    """``count`` problems as JSONL: a digit that has to be written down, and which one."""
    return "".join(PROBLEMS[index % len(PROBLEMS)] + "\n" for index in range(count))


def init(directory: str | Path, *, train: int = 90, held_out: int = 10) -> list[Path]:
    """Write config.yaml, rewards.py, model.py and two small datasets, which run at once on a CPU.

    The model is made by model.py when the run begins: nothing is downloaded.

    Args:
        directory: made if it is not there.
        train, held_out: problems to train on, and to measure with.

    Returns:
        The files, in the order to read them in.

    Raises:
        ConfigError: one of them is there already (then nothing is written), or the directory cannot be written to.
    """
    directory = Path(directory)
    files = {
        directory / "config.yaml": CONFIG,
        directory / "rewards.py": REWARDS,
        directory / "model.py": MODEL,
        directory / "train.jsonl": problem_lines(train),
        directory / "eval.jsonl": problem_lines(held_out),
    }
    there = [path for path in files if path.exists()]
    if there:
        raise ConfigError(
            f"{', '.join(map(str, there))} would be overwritten", remedy="choose another directory, or move them away"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {directory}: {error.strerror}", remedy="choose another directory"
        ) from error
    return list(files)
