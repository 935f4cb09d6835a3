"""Shape of a model, which determines its memory, from its config.json. Nothing is loaded."""

from __future__ import annotations

import json
import logging
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lachesis.common.errors import ConfigError, first_line
from lachesis.common.json_values import is_object
from lachesis.config.schema import LachesisConfig

_log = logging.getLogger("lachesis")
# Seconds that the hub may take to send a file of 1 kB.
_HUB_LIMIT_S = 5
# The linear layers of a feed-forward part, or of each of its experts.
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    """Shape of an image encoder: widths in elements.

    ``patch`` is a patch's number of values, ``merged`` the number of patches that become one token of the decoder;
    ``around`` counts the parameters besides the layers. ``matrices`` are those of a feed-forward part: three if gated.
    """

    layers: int
    hidden: int
    intermediate: int
    matrices: int
    patch: int
    merged: int
    around: int

    @property
    def parameters(self) -> int:
        """Return the parameters of the encoder and of its connection to the decoder."""
        layer = self.hidden * (4 * self.hidden + self.matrices * self.intermediate + 8) + 2 * self.intermediate
        return self.layers * layer + self.patch * self.hidden + self.around

    @property
    def layer_elements(self) -> int:
        """Return the elements that the backward pass of one layer keeps for each patch."""
        return 8 * self.hidden + 2 * (self.matrices - 1) * self.intermediate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of a decoder: widths in elements, ``dtype`` that of the checkpoint.

    ``experts`` is the number in a layer, ``active_experts`` the number for each token; both are one without a mixture.
    ``qk_norm``: queries and keys are normalized, as in Qwen3. ``kind`` is the ``model_type`` of its text model.
    ``tower`` is its image encoder, if config.json describes one.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int | None
    tied: bool
    attention_bias: bool
    experts: int
    active_experts: int
    dtype: str
    qk_norm: bool = False
    kind: str = ""
    tower: TowerShape | None = None

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of the linear layers of one decoder layer (of one expert)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def quantizable(self) -> list[tuple[int, int]]:
        """Return inputs and outputs of the quantizable ones: not a mixture's experts, which are fused."""
        return self.targeted("all-linear")

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of one decoder layer with a gated feed-forward part."""
        matrices = {name: rows * columns for name, (rows, columns) in self.linears.items()}
        feed_forward = sum(matrices[name] for name in FEED_FORWARD)
        attention = sum(matrices[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        bias = (self.heads + 2 * self.kv_heads) * self.head_dim if self.attention_bias else 0
        router = self.hidden * self.experts if self.experts > 1 else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return attention + bias + feed_forward * self.experts + router + norms

    @property
    def parameters(self) -> int:
        """Return the parameters of the whole model: embeddings, layers, norms, head."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    @property
    def outside_parameters(self) -> int:
        """Return the parameters of embeddings, head and last norm."""
        return self.parameters - self.layers * self.layer_parameters

    @property
    def kv_elements_per_token(self) -> int:
        """Return the elements of keys and values of one token in all layers."""
        return 2 * self.kv_heads * self.head_dim * self.layers

    def lora_parameters(self, *, rank: int, targets: str | list[str]) -> int:
        """Return the parameters of LoRA's two matrices on each target, in all layers.

        A mixture's experts are fused and not linear layers.
        """
        return self.layers * sum(rank * sum(sides) for sides in self.targeted(targets))

    def targeted(self, targets: str | list[str]) -> list[tuple[int, int]]:
        """Return inputs and outputs of the linear layers of a decoder layer that an adapter's targets name."""
        fused = FEED_FORWARD if self.experts > 1 else ()
        named = self.linears if targets == "all-linear" else [targets] if isinstance(targets, str) else targets
        plain = [name.rpartition(".")[2] for name in named]
        return [self.linears[name] for name in plain if name in self.linears and name not in fused]


def read_shape(model: str, *, revision: str | None = None) -> ModelShape | None:
    """Return the shape that :func:`find_shape` finds, without its place."""
    found = find_shape(model, revision=revision)
    return None if found is None else found.shape


@dataclass(frozen=True, slots=True)
class FoundShape:
    """Shape and the place where it was found: a directory, the hub's cache, the hub, or the table of known models."""

    shape: ModelShape
    source: Literal["directory", "cache", "hub", "table"]


def find_shape(model: str, *, revision: str | None = None, ask_hub: bool = False) -> FoundShape | None:
    """Return the shape of a model directory or of a model of the hub; None if it is unknown.

    The order of the search is: the directory, the hub's cache, the hub itself (a file of about 1 kB), and the table of
    ``architectures.toml``, which has some models by their exact names.

    Args:
        revision: of a model of the hub; its main branch if unset.
        ask_hub: True allows a request to the hub.

    Raises:
        ConfigError: the config.json cannot be read, or does not describe a decoder with the usual keys.
    """
    local, cached = Path(model) / "config.json", _cached_config(model)
    if local.is_file():
        return FoundShape(_read(local), "directory")
    if cached is not None:
        return FoundShape(_read(cached), "cache")
    # Loading the hub's library for a path would take a third of a plan's time.
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    asked = _config_of_hub(model, revision) if ask_hub and not is_path else None
    if asked is not None:
        return FoundShape(_parse(asked, where=f"config.json of {model} on the hub"), "hub")
    known = known_architecture(model)
    return None if known is None else FoundShape(_shape(known, dtype=str(known["dtype"])), "table")


@cache
def _known_architectures() -> Mapping[str, Mapping[str, Any]]:
    """Return the memory-related fields of the ``config.json`` of well-known models, by hub id."""
    document = tomllib.loads(Path(__file__).with_name("architectures.toml").read_text(encoding="utf-8"))
    return {
        model: {"dtype": "bfloat16", **{key: value for key, value in fields.items() if key != "also"}}
        for name, fields in document.items()
        for model in (name, *fields.get("also", ()))
    }


def known_architecture(model: str) -> dict[str, Any] | None:
    """Return the memory-related fields of a model's ``config.json``; None if its exact name is unknown."""
    found = _known_architectures().get(model)
    return None if found is None else dict(found)


def unknown_shape(config: LachesisConfig) -> ConfigError:
    """Return an error with the reason why the shape of a run's model is unknown, and a remedy."""
    reason = f"{config.model.path} has no config.json here and the hub did not provide one"
    remedy = "name a local directory, or download its config.json on a machine with network access"
    if (setup := config.run.setup) is not None:
        reason = f"{config.model.path} is made by run.setup ({setup}) when the run begins, and does not exist yet"
        remedy = "try again once the run has begun"
    return ConfigError(f"{reason}, so memory and disk are not known", remedy=remedy)


def require_shape(config: LachesisConfig, found: FoundShape | None) -> FoundShape:
    """Return the shape that was found. Raises ConfigError if none was."""
    if found is None:
        raise unknown_shape(config)
    return found


def _read(path: Path) -> ModelShape:
    try:
        return _parse(path.read_text(encoding="utf-8"), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", remedy="give a complete model directory") from error


def _parse(content: str, *, where: str) -> ModelShape:
    try:
        data = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"cannot read {where}: {error}", remedy="give a complete model directory") from error
    if not is_object(data):
        raise ConfigError(f"{where} is not a mapping", remedy="give a complete model directory")
    text = data.get("text_config", data)
    try:
        shape = _shape(text, dtype=str(text.get("dtype") or data.get("dtype") or data.get("torch_dtype") or "bfloat16"))
        return replace(shape, tower=_tower(data, out=shape.hidden))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: no decoder whose memory is known: {error!r}", remedy="plan without it, from the batches alone"
        ) from error


def _shape(data: Mapping[str, Any], *, dtype: str) -> ModelShape:
    heads, hidden = int(data["num_attention_heads"]), int(data["hidden_size"])
    experts = int(data.get("num_local_experts") or data.get("num_experts") or 1)
    width = data.get("moe_intermediate_size") if experts > 1 else None
    return ModelShape(
        layers=int(data["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(width or data["intermediate_size"]),
        heads=heads,
        kv_heads=int(data.get("num_key_value_heads") or heads),
        head_dim=int(data.get("head_dim") or hidden // heads),
        vocab=int(data["vocab_size"]),
        context=int(data["max_position_embeddings"]) if data.get("max_position_embeddings") else None,
        tied=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bool(data.get("attention_bias", data.get("model_type") == "qwen2")),
        experts=experts,
        active_experts=int(data.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        dtype=dtype.removeprefix("torch."),
        qk_norm=str(data.get("model_type", "")).startswith("qwen3"),
        kind=str(data.get("model_type", "")),
    )


def _tower(data: Mapping[str, Any], *, out: int) -> TowerShape | None:
    """Return the shape of the image encoder for a decoder ``out`` wide; None if its usual keys are missing."""
    vision = data.get("vision_config")
    layers = None if vision is None else vision.get("depth") or vision.get("num_hidden_layers")
    if vision is None or not layers or not {"patch_size", "hidden_size"} <= vision.keys():
        return None
    hidden = int(vision.get("embed_dim") or vision["hidden_size"])
    patch, size = (
        one[0] if isinstance(one, list) else one or 0 for one in map(vision.get, ("patch_size", "image_size"))
    )
    merge = vision.get("spatial_merge_size") or data.get("spatial_merge_size") or data.get("scale_factor") or 1
    side, pooled = size // patch, data.get("mm_tokens_per_image")
    places = int(vision.get("num_position_embeddings") or side**2)
    # Qwen's mergers, one more for each layer that the decoder sees, have two matrices, like Llava's projectors.
    wide, mergers = (1 if pooled else merge**2) * hidden, 1 + len(vision.get("deepstack_visual_indexes") or ())
    joint = mergers * wide * (out + wide * ("spatial_merge_size" in vision)) + out**2 * ("projector_hidden_act" in data)
    return TowerShape(
        layers=int(layers),
        hidden=hidden,
        intermediate=int(vision.get("intermediate_size") or hidden * vision.get("mlp_ratio", 4)),
        matrices=3 if vision.get("hidden_act") == "silu" or vision.get("model_type") == "pixtral" else 2,
        patch=int(vision.get("in_channels") or 3) * patch**2 * int(vision.get("temporal_patch_size") or 1),
        merged=max(1, side**2 // int(pooled)) if pooled else merge**2,
        around=places * hidden + joint,
    )


def _cached_config(model: str) -> Path | None:
    """Return ``config.json`` in the newest snapshot of the hub's cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted(
        (cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json"),
        key=lambda path: path.stat().st_mtime,
    )
    return found[-1] if found else None


def _config_of_hub(model: str, revision: str | None) -> str | None:
    """Return the text of a config on the hub; None if the hub does not answer, or refuses access to the model."""
    import httpx
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import build_hf_headers  # pyright: ignore[reportUnknownVariableType]  # its agents' dict

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        # Not hf_hub_download, which retries for half a minute without a network.
        url = hf_hub_url(model, "config.json", revision=revision)
        answer = httpx.get(url, headers=build_hf_headers(), follow_redirects=True, timeout=_HUB_LIMIT_S)
        answer.raise_for_status()
    except (httpx.HTTPError, HFValidationError) as error:
        _log.info("the hub did not provide config.json of %s: %s", model, first_line(error))
        return None
    return answer.text
