"""Comparison of a checkpoint's tensors with those that the model loads: none may be missing or left over."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from lachesis.common.errors import ModelError

# Words that wrappers in training programs add inside the names of parameters.
_WRAPPERS = re.compile(
    r"(?:(?<=^)|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|base_model\.model)\."
)


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
        there = f"; {len(unknown)} tensors there are unknown to the model (first: {unknown[0]})" if unknown else ""
        raise ModelError(
            f"{len(missing)} of {total} tensors of {model} are not in the files of {path!r} (first: {missing[0]}) "
            f"and would start from random numbers{there}",
            remedy=_prefix_words(missing, unknown)
            or "use a checkpoint that has them, or correct its config.json if that describes another model",
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


def _prefix_words(missing: Collection[str], unknown: Collection[str]) -> str | None:
    """Return a remedy that names the prefix, or wrappers' words inside names, that hide the missing tensors, if any."""
    names, first = {*unknown}, min(missing)
    for prefix in (name.removesuffix(first) for name in names if name.endswith(first)):
        if all(f"{prefix}{name}" in names for name in missing):
            return (
                f"remove the prefix {prefix!r} from the names of its tensors (load_file, rename, save_file of "
                "safetensors.torch); a wrapper in the program that saved them added it"
            )
    hidden = {_WRAPPERS.sub("", name): name for name in names}
    if not all(name in hidden for name in missing):
        return None
    return (
        f"rename its tensors (load_file, save_file of safetensors.torch): {hidden[first]!r} is {first!r}, and so on; "
        "wrappers in the program that saved them added the rest"
    )
