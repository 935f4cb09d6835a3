"""Reading of adapter directories without loading tensors: peft's configuration and safetensors' header."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from lachesis.common.json_values import is_object
from lachesis.engines.serving.backend import LoraSpec, Refused

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_MATRIX = re.compile(r"(base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")
_DTYPES = {"F64", "F32", "F16", "BF16"}
# Options of peft that need more than two small matrices. Engines do not support them, so they must be refused.
_NOT_SERVED = (
    "use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "alora_invocation_tokens",
)  # fmt: skip
_open: Any = safe_open  # without types
_PER_MODULE = ("rank_pattern", "alpha_pattern")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A LoRA adapter on disk. ``modules`` maps the dotted name of each adapted module to its (in, out) features."""

    path: Path
    spec: LoraSpec
    base_model: str
    modules: Mapping[str, tuple[int, int]]


def read_adapter(path: Path, *, max_rank: int) -> AdapterFiles:
    """Read and check the adapter in ``path``.

    Raises:
        Refused: (400) a file is missing or damaged; (422) it is not a plain LoRA adapter, its rank is above
            ``max_rank``, or its tensors are not pairs of that rank.
    """
    config = _read_config(path / CONFIG_NAME)
    if config.get("peft_type") != "LORA":
        raise Refused(f"{path} holds a {config.get('peft_type')} adapter", status=422, remedy="use a LoRA adapter")
    if found := [name for name in (*_NOT_SERVED, *_PER_MODULE) if config.get(name)]:
        raise Refused(f"the adapter in {path} uses {', '.join(found)}", status=422, remedy="train a plain LoRA adapter")
    if config.get("bias", "none") != "none":
        raise Refused(f"the adapter in {path} trains biases", status=422, remedy="set bias: none")
    r, alpha = config.get("r"), config.get("lora_alpha")
    if type(r) is not int or r < 1 or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise Refused(f"{path / CONFIG_NAME} has r {r!r} and lora_alpha {alpha!r}", remedy="save the adapter with peft")
    if r > max_rank:
        raise Refused(
            f"the adapter in {path} has rank {r}, but the server takes at most rank {max_rank}",
            status=422,
            remedy=f"start the server with --max-lora-rank {r}",
        )
    modules = adapted_modules(_read_shapes(path / WEIGHTS_NAME), r=r)
    targets = tuple(sorted({module.rpartition(".")[2] for module in modules}))
    return AdapterFiles(
        path=path,
        spec=LoraSpec(r, float(alpha), target_modules=targets, rslora=bool(config.get("use_rslora"))),
        base_model=str(config.get("base_model_name_or_path") or ""),
        modules=modules,
    )


def adapted_module(name: str) -> tuple[str, Literal["A", "B"]]:
    """Return the module of a tensor with peft's name, and which of the two LoRA matrices it is.

    The prefix ``base_model.model.`` and the infix ``.default``, which peft adds in memory, are optional.

    Raises:
        Refused: (422) the tensor is not a LoRA matrix.
    """
    match = _MATRIX.fullmatch(name)
    if match is None:
        raise Refused(f"{name!r} is not a LoRA matrix A or B", status=422, remedy="save a plain LoRA adapter")
    return match["module"], "A" if match["part"] == "A" else "B"


def adapted_modules(shapes: Mapping[str, tuple[int, ...]], *, r: int) -> dict[str, tuple[int, int]]:
    """Return an adapter's modules with their (in, out) features, from the shapes of its tensors by peft's names.

    Raises:
        Refused: (422) the tensors are not pairs of matrices A [r, in] and B [out, r], or there are none.
    """
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        module, part = adapted_module(name)
        pairs.setdefault(module, {})[part] = tuple(shape)
    if not pairs:
        raise Refused("the adapter has no tensors", status=422, remedy="save it again")
    modules: dict[str, tuple[int, int]] = {}
    for module, pair in pairs.items():
        a, b = (pair.get(part, ()) for part in "AB")
        if len(a) != 2 or len(b) != 2 or a[0] != r or b[1] != r:
            raise Refused(
                f"the adapter's tensors of {module!r} have shapes {list(a) or 'none'} and {list(b) or 'none'}, "
                f"not [{r}, in] and [out, {r}]",
                status=422,
                remedy="give A and B of every module, with the announced rank",
            )
        modules[module] = (a[1], b[0])
    return modules


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}", remedy="give a directory that peft saved") from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not JSON: {error}", remedy="save the adapter again") from error
    if not is_object(config):
        raise Refused(f"{path} is not a JSON object", remedy="save the adapter again")
    return config


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the tensors in a safetensors file from its header; all must be floats."""
    try:
        with _open(path, framework="np") as file:
            found: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes: dict[str, tuple[int, ...]] = {name: tuple(part.get_shape()) for name, part in found.items()}
            dtypes: dict[str, str] = {name: part.get_dtype() for name, part in found.items()}
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error}", remedy="save the adapter as safetensors") from error
    except SafetensorError as error:
        remedy = "save the adapter again (pickle is never read)"
        raise Refused(f"{path} is not a complete safetensors file: {error}", remedy=remedy) from error
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise Refused(f"the adapter's tensor {name!r} has dtype {dtype}", status=422, remedy="save it as a float")
    return shapes
