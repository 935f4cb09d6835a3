"""Mapping from Hugging Face parameters to rows of an engine's tensors. Pure: names and shapes only.

vLLM stores q, k and v of a layer as the rows of one matrix ``qkv_proj``, gate and up as those of
``gate_up_proj``, and pads the vocabulary; everything else has the name and shape of transformers, except a mixture's
experts, which have vLLM's names. The embedded engine uses transformers' names throughout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from lachesis.common.errors import ModelError
from lachesis.engines.serving.backend import DigestSlice

Shape = tuple[int, ...]

_FUSED = {
    member: (fused, members)
    for fused, members in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
    for member in members
}
# Padded to a multiple of 64 rows; the rows of real tokens come first.
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
# Architectures whose vLLM classes were compared with transformers', by model_type. Equal names and shapes alone
# would not do: GPT-2's square matrices are transposed in one of the two.
VLLM_ARCHITECTURES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "granite"}
)
# The same for mixtures, if the kernels of their experts keep transformers' order: vLLM's Triton kernels, its first
# choice on Hopper, do; FlashInfer's, for other cards, do not. Shapes do not show which; vLLM's worker reports it.
VLLM_MIXTURES = frozenset({"qwen3_moe"})
_EXPERTS = {
    "experts.gate_up_proj": "experts.routed_experts.w13_weight",
    "experts.down_proj": "experts.routed_experts.w2_weight",
}
# Prefix of vLLM's names for the language model in most models for images and text.
_LANGUAGE_MODEL = "language_model."
_SHOWN = 4


def map_parameters(
    parameters: Mapping[str, Shape],
    engine: Mapping[str, Shape],
    *,
    model_type: str,
    engine_kind: str,
    mixtures: bool = False,
) -> dict[str, DigestSlice]:
    """Find every parameter in the engine's tensors.

    Args:
        parameters: shapes under transformers' names, tied ones once.
        engine: shapes under the engine's names.
        model_type: transformers' name of the architecture.
        engine_kind: "embedded", or "vllm" with or without a version.
        mixtures: also of an architecture whose experts vLLM's kernels may have put into another order.

    Raises:
        ModelError: vLLM stores this architecture in another way, or the engine serves another model; the
            message says how the two differ.
    """
    identical = not engine_kind.startswith("vllm")
    known = VLLM_ARCHITECTURES | VLLM_MIXTURES if mixtures else VLLM_ARCHITECTURES
    if not identical and model_type not in known:
        raise ModelError(
            f"the weights of a {model_type!r} model cannot be shared: it is not known here how vLLM stores them",
            remedy="use bridge.kind lora_only, broadcast or reload; shared weights exist for "
            f"{', '.join(sorted(VLLM_ARCHITECTURES | VLLM_MIXTURES))}",
        )
    find = _find_identical if identical else _find
    # Where vLLM can serve adapters, it keeps the weights of adapted layers in an inner ``base_layer``.
    own_names = {name.replace(".base_layer.", "."): name for name in engine}
    shapes = {name: engine[own] for name, own in own_names.items()}
    theirs = _served_names(parameters, shapes)
    served = {theirs[name]: shape for name, shape in parameters.items()}
    found = {name: find(theirs[name], served, shapes) for name in parameters}
    problems = [f"{name}: {problem}" for name, problem in found.items() if isinstance(problem, str)]
    if problems:
        shown = "; ".join(problems[:_SHOWN]) + (f"; and {len(problems) - _SHOWN} more" * (len(problems) > _SHOWN))
        raise ModelError(
            f"the engine serves another model, with {describe(engine)}; the trainer's has {describe(parameters)} "
            f"(size mismatch or missing: {shown})",
            remedy="serve the model that is trained: model.path of the trainer and --model of the engine",
        )
    slices = {name: entry for name, entry in found.items() if isinstance(entry, DigestSlice)}
    _check_cover(slices, shapes)
    return {name: replace(entry, name=own_names[entry.name]) for name, entry in slices.items()}


def check_same_model(
    parameters: Mapping[str, Shape], engine: Mapping[str, Shape], *, model_type: str, engine_kind: str
) -> None:
    """Check that an engine serves the model of these parameters, as far as shapes tell.

    It skips tensors that the engine has emptied (vLLM repacks linear layers on the CPU), architectures that vLLM
    stores in an unknown way, and what stands beside a language model. Arguments are as of :func:`map_parameters`.

    Raises:
        ModelError: the engine serves another model; the message says how the two differ.
    """
    if engine_kind.startswith("vllm") and model_type not in VLLM_ARCHITECTURES:
        return
    skipped = {name for name, shape in engine.items() if 0 in shape}
    theirs = _served_names(parameters, engine)
    if _has_language_model(engine):
        skipped |= {name for name in (*engine, *theirs.values()) if not name.startswith(_LANGUAGE_MODEL)}
    map_parameters(
        {name: shape for name, shape in parameters.items() if not skipped & {theirs[name], _fused_name(theirs[name])}},
        {name: shape for name, shape in engine.items() if name not in skipped},
        model_type=model_type,
        engine_kind=engine_kind,
    )


def _has_language_model(engine: Mapping[str, Shape]) -> bool:
    return any(name.startswith(_LANGUAGE_MODEL) for name in engine)


def _served_names(parameters: Mapping[str, Shape], engine: Mapping[str, Shape]) -> dict[str, str]:
    """Return the engine's name of each parameter, before any are fused: models for images have others in vLLM."""
    if not _has_language_model(engine):
        return {name: name for name in parameters}
    return {
        name: f"{_LANGUAGE_MODEL}{name}"
        if name.startswith("lm_head.")
        else name.removeprefix("model.").replace(_LANGUAGE_MODEL, f"{_LANGUAGE_MODEL}model.", 1)
        for name in parameters
    }


def describe(shapes: Mapping[str, Shape]) -> str:
    """Describe a model: its layers, hidden size and vocabulary, if names show them."""
    layers = {int(match.group(1)) for name in shapes if (match := re.search(r"\.(?:layers|h)\.(\d+)\.", name))}
    words = [f"{len(layers)} layers"]
    embedding = next((shape for name, shape in shapes.items() if re.search(r"(embed_tokens|wte)\.weight$", name)), None)
    if embedding is not None and len(embedding) == 2:
        words += [f"hidden size {embedding[1]}", f"{embedding[0]} rows of vocabulary"]
    words.append(f"{sum(prod(shape) for shape in shapes.values()):,} parameters")
    return ", ".join(words)


def _find_identical(
    name: str, parameters: Mapping[str, Shape], engine: Mapping[str, Shape], *, theirs: str | None = None
) -> DigestSlice | str:
    shape, theirs = parameters[name], theirs or name
    if theirs not in engine:
        return f"the engine has no {theirs}"
    if engine[theirs] != shape:
        return f"{list(shape)} here, {list(engine[theirs])} there"
    return DigestSlice(theirs, 0, shape[0] if shape else 1)


def _find(name: str, parameters: Mapping[str, Shape], engine: Mapping[str, Shape]) -> DigestSlice | str:
    prefix, leaf, kind = _split(name)
    if name not in engine and leaf in _FUSED:
        _, members = _FUSED[leaf]
        names = [f"{prefix}.{member}.{kind}" for member in members]
        return _find_rows(_fused_name(name), names, members.index(leaf), parameters, engine)
    if name in engine and name.endswith(_VOCABULARY):
        shape, padded = parameters[name], engine[name]
        if padded[1:] != shape[1:] or padded[0] < shape[0]:
            return f"{list(shape)} here, {list(padded)} there"
        return DigestSlice(name, 0, shape[0])
    return _find_identical(name, parameters, engine, theirs=_expert_name(name))


def _expert_name(name: str) -> str:
    """Return vLLM's name of a mixture's stacked expert weights; any other name unchanged."""
    for ours, theirs in _EXPERTS.items():
        if name.endswith(f".{ours}"):
            return name.removesuffix(ours) + theirs
    return name


def _split(name: str) -> tuple[str, str, str]:
    """Split ``model.layers.0.self_attn.q_proj.weight`` into location, module and kind."""
    *path, leaf, kind = ("", "", *name.split("."))
    return ".".join(part for part in path if part), leaf, kind


def _fused_name(name: str) -> str:
    """Return the name of vLLM's fused tensor with a parameter's rows; the parameter's name if there is none."""
    prefix, leaf, kind = _split(name)
    return f"{prefix}.{_FUSED[leaf][0]}.{kind}" if leaf in _FUSED else name


def _find_rows(
    fused: str, names: Sequence[str], index: int, parameters: Mapping[str, Shape], engine: Mapping[str, Shape]
) -> DigestSlice | str:
    if fused not in engine:
        return f"the engine has no {fused}"
    shapes = [parameters.get(name) for name in names]
    if None in shapes:
        return f"{names[shapes.index(None)]} is missing here"
    rows = [shape[0] for shape in shapes if shape]
    shape = parameters[names[index]]
    if (sum(rows), *shape[1:]) != engine[fused]:
        return f"{' + '.join(map(str, rows))} rows of {list(shape[1:])} here, {fused} {list(engine[fused])} there"
    return DigestSlice(fused, sum(rows[:index]), rows[index])


def _check_cover(slices: Mapping[str, DigestSlice], engine: Mapping[str, Shape]) -> None:
    """Check that every tensor of the engine is mapped.

    The trainer's model may otherwise lack parameters that the engine computes with.
    """
    used = {entry.name for entry in slices.values()}
    # Where embeddings are tied an engine may list the head too; it is the same tensor.
    rest = [name for name in engine if name not in used and not name.endswith("lm_head.weight")]
    if rest:
        raise ModelError(
            f"the engine serves another model: the trainer's model lacks {', '.join(rest[:_SHOWN])}"
            + (f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""),
            remedy="serve the model that is trained: model.path of the trainer and --model of the engine",
        )
