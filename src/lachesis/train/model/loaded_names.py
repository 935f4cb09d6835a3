"""Comparison of a checkpoint's tensors with those that the model loads: none may be missing or left over."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from lachesis.common.errors import ModelError

# Words that wrappers in training programs add inside the names of parameters.
_WRAPPERS = re.compile(
    r"(?:(?<=^)|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|base_model\.model)\."
)
# The missing tensors by which prefixes are looked for: the first may be a tied weight, which files need not have.
_TRIED = 3


def require_same_names(info: Mapping[str, Any], *, path: str, model: str, total: int, left_out: bool) -> None:
    """Compare the loaded tensors with those of the files.

    Args:
        info: transformers' loading info. It excludes tied weights and those that a class declares as optional.
        model: the name of the model's class.
        total: how many tensors the model has.
        left_out: the checkpoint's architecture has more than this model, so surplus tensors are not an error.

    Raises:
        ModelError: tensors are missing, have other shapes, or are unknown to the model.
    """
    missing, unknown = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    mismatched = sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if missing:
        # A language model's names differ from those of the checkpoint around it by more than a wrapper's words.
        renamed = renaming(info) is not None or (left_out and any(map(_WRAPPERS.search, unknown)))
        there = f"; {len(unknown)} tensors there are unknown to the model (first: {unknown[0]})" if unknown else ""
        raise ModelError(
            f"{len(missing)} of {total} tensors of {model} are not in the files of {path!r} (first: {missing[0]}) "
            f"and would start from random numbers{there}",
            remedy=_rename_words(path, shown=unknown[0])
            if renamed
            else "use a checkpoint that has them, or correct its config.json if that describes another model",
        )
    if mismatched:
        raise ModelError(
            f"{len(mismatched)} tensors in the files of {path!r} have other shapes than in {model} "
            f"(first: {mismatched[0]}) and would start from random numbers",
            remedy="correct config.json, which describes another model than the one in the files",
        )
    if unknown and not left_out:
        raise ModelError(
            f"{len(unknown)} tensors in the files of {path!r} are unknown to {model} (first: {unknown[0]}) and would "
            "be neither trained nor saved",
            remedy="correct config.json if it describes a smaller model, for example num_hidden_layers, or save the "
            "checkpoint without these tensors",
        )


def renaming(info: Mapping[str, Any]) -> Callable[[str], str] | None:
    """Return how to rename tensors of files that have a prefix, or wrappers' words inside, before the missing names.

    None if that finds at most half of the missing tensors. A tied weight may be among these, and not in the files.
    """
    missing, unknown = {*info["missing_keys"]}, {*info["unexpected_keys"]}
    hidden = tuple(f".{name}" for name in sorted(missing)[:_TRIED])
    prefixes = {name.removesuffix(end) + "." for name in unknown for end in hidden if name.endswith(end)}
    ways = [partial(_WRAPPERS.sub, ""), *(methodcaller("removeprefix", prefix) for prefix in sorted(prefixes))]
    found = [len(missing & {rename(name) for name in unknown}) for rename in ways]
    return ways[found.index(max(found))] if max(found) > len(missing) / 2 else None


def _rename_words(path: str, *, shown: str) -> str:
    """Return the remedy for a checkpoint that can be renamed; ``shown`` is one of its names."""
    place = Path(path)
    copy = f"{place if place.is_dir() else place.name}-renamed"
    command = shlex.join(["lachesis", "export", path, copy, "--unwrap"])
    return (
        f"a wrapper in the program that saved them changed the names (such as {shown!r}); write a copy with the "
        f"model's own names by: {command}; then set model.path: {copy}"
    )
