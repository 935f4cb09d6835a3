"""Conversion of a model to a GGUF file for llama.cpp and Ollama, by llama.cpp's own converter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from lachesis.common.errors import DependencyError

# Variable with the directory of llama.cpp, if its converter is not on the PATH.
VARIABLE = "LLAMA_CPP"
FILE = "model.gguf"
_CONVERTER = "convert_hf_to_gguf.py"


def find_converter() -> Path:
    """Return the path of ``convert_hf_to_gguf.py``, from $LLAMA_CPP or the PATH.

    Raises:
        DependencyError: it is in neither.
    """
    root = os.environ.get(VARIABLE)
    if root and (script := Path(root).expanduser() / _CONVERTER).is_file():
        return script
    on_path = (Path(directory) / _CONVERTER for directory in os.environ.get("PATH", "").split(os.pathsep))
    found = next((script for script in on_path if script.is_file()), None)
    if found is None:
        raise DependencyError(
            f"GGUF files are written by llama.cpp's {_CONVERTER}, which is neither in ${VARIABLE} nor on the PATH",
            remedy=f"git clone https://github.com/ggml-org/llama.cpp and set {VARIABLE} to its directory",
        )
    return found


def convert_to_gguf(model: Path, out: Path, converter: Path) -> Path:
    """Write the model in a directory as ``out/model.gguf``, in the precision of its weights.

    Raises:
        DependencyError: the converter fails, as for an architecture that it does not know.
    """
    out.mkdir(parents=True, exist_ok=True)
    target, partial = out / FILE, out / f"{FILE}.partial"
    command = [sys.executable, str(converter), str(model), "--outfile", str(partial), "--outtype", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not partial.is_file():
        partial.unlink(missing_ok=True)
        said = (done.stderr or done.stdout).strip().splitlines()
        raise DependencyError(
            f"{converter} could not convert {model}: {said[-1] if said else f'exit code {done.returncode}'}",
            remedy=f"the model itself is in {model}; check that llama.cpp supports it, or update llama.cpp",
        )
    shutil.move(partial, target)
    return target
