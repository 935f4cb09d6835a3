"""The step of the run that a saved model is of, noted in a small file beside its weights."""

from __future__ import annotations

import json
from pathlib import Path

from lachesis.common.errors import CheckpointError
from lachesis.common.files import write_atomic

# A model that is saved in place of another replaces the whole directory, and this file with it.
_FILE = "lachesis.json"


def note_step(model: Path, step: int) -> None:
    """Note in the directory of a model the step that it is of."""
    write_atomic(model / _FILE, json.dumps({"step": step}) + "\n")


def noted_step(model: Path) -> int | None:
    """Return the step that the model is of; ``None`` if it was not noted.

    Raises:
        CheckpointError: the file is malformed.
    """
    path = model / _FILE
    if not path.exists():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} does not say the step of a model ({type(error).__name__}: {error})",
            remedy='write {"step": N} into it, or remove it if the model is of the run\'s last step',
        ) from error
