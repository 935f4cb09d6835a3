"""Loading of the trained model and its tokenizer, or attaching a model to existing tensors."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    FineGrainedFP8Config,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.quantization_config import CompressedTensorsConfig, Mxfp4Config

from lachesis.bridges.model_files import save_companions, write_checkpoint
from lachesis.bridges.sent_weights import as_saved, full_weights, saved_shapes
from lachesis.common.chatter import without_chatter
from lachesis.common.device import resolve_device
from lachesis.common.errors import ConfigError, ModelError, first_line
from lachesis.common.hub import (
    cache_alone_where_the_hub_is_away,
    can_see,
    config_here,
    described_path,
    language_model_class,
    load_errors,
)
from lachesis.config.schema import AdapterConfig, LoraAdapterConfig, ModelConfig, NoAdapterConfig, TeacherConfig
from lachesis.train.distributed.strategy import text_part
from lachesis.train.model.activations import keep_activations
from lachesis.train.model.float8 import Float8Switch, compute_in_float8
from lachesis.train.model.loaded_names import require_same_names
from lachesis.train.model.lora import add_lora, named_layers
from lachesis.train.model.quantization import (
    Quantization,
    held_bytes,
    quantization_config,
    quantized_layers,
    require_bitsandbytes,
    settle,
)
from lachesis.train.model.repeatable import make_repeatable
from lachesis.train.model.saved_check import Content, check_saved, noting
from lachesis.train.model.saved_rows import SavedRows, fill_buffers, find_rows, tensor_files, untouched
from lachesis.train.model.whole_checkpoint import WholeCheckpoint, find_whole, processor_files

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)

# Quantizations whose layers cannot be trained with a GPU's kernels for them; such checkpoints are converted to 16 bits.
_DEQUANTIZED = {
    "fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config, "compressed-tensors": CompressedTensorsConfig
}  # fmt: skip


class WeightSource(Protocol):
    """Source of tensors to attach a model to, such as :class:`lachesis.bridges.shared.EngineWeights`."""

    @property
    def dtype(self) -> torch.dtype: ...

    def attach(self, model: PreTrainedModel) -> int: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model ready to be wrapped by a policy.

    ``model`` is the part that is saved (a PeftModel with LoRA), ``transformer`` the causal LM inside it. ``float8``
    switches its linear layers to float8, if ``model.matmul_dtype`` says so. ``unread`` fills in base weights that were
    not loaded, once the model is sharded; until then they are undefined. ``whole`` is the checkpoint around the model,
    if it has more, such as a tower for images. ``continued``: the adapter was trained before, so the model that
    training starts from includes it. ``processors``: files that are saved with a model that sees images.
    """

    model: PreTrainedModel | PeftModel
    transformer: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    float8: Float8Switch = field(default_factory=Float8Switch)
    unread: SavedRows | None = None
    whole: WholeCheckpoint | None = None
    continued: bool = False
    processors: tuple[Path, ...] = ()

    def writer(self) -> Callable[[Path], None] | None:
        """Return the writer of the checkpoint around the model; None if the model is all of it."""
        whole = self.whole
        if whole is None or self.model is not self.transformer:
            return None
        return partial(write_whole, self.transformer, self.tokenizer, whole, full_weights(self.transformer))


def write_whole(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    whole: WholeCheckpoint | None,
    weights: Iterable[tuple[str, Tensor]],
    directory: Path,
) -> None:
    """Write a checkpoint of these weights, within the checkpoint around the model, if any.

    Raises:
        CheckpointError: a tensor that was read back differs from the saved one.
    """
    saved, contents = as_saved(model, weights), dict[str, Content]()
    write_checkpoint(directory, noting(saved if whole is None else whole.tensors(saved), contents))
    check_saved(directory, contents)
    save_companions(model, tokenizer, directory)
    if whole is not None:
        whole.write_companions(directory)


def load_model(
    config: ModelConfig, adapter: AdapterConfig, *, weights: WeightSource | None = None, sharded: bool = False
) -> LoadedModel:
    """Load, check and adapt a model.

    With ``weights`` nothing is loaded: the parameters are those tensors.

    Args:
        sharded: the model will be sharded: it stays in CPU memory, in its final dtype, and each rank reads only its own
            rows afterwards if the files allow it (:attr:`LoadedModel.unread`).

    Raises:
        ModelError: no such model, no causal LM, no pad token, adapter targets that match nothing, or no
            float8 products.
        DependencyError: quantization lacks bitsandbytes, or float8 products lack torchao.
    """
    _require_no_adapter(config.path)
    tokenizer = load_tokenizer(config)
    if (saved := saved_quantization(config)) and isinstance(adapter, NoAdapterConfig):
        raise ModelError(
            f"the weights of {config.path!r} are saved in {saved}, so they cannot be trained without an adapter",
            remedy="set adapter.kind: lora, or model.path to the checkpoint in 16 bits",
        )
    unread = None
    if weights is None:
        made = _unread_transformer(config) if sharded else None
        transformer, unread = made or (_load_transformer(config, on_cpu=sharded), None)
    else:
        transformer = attached_transformer(config, weights)
        make_repeatable(transformer)
    embeddings, pad = transformer.get_input_embeddings().weight, tokenizer.pad_token_id
    assert isinstance(embeddings, torch.Tensor) and isinstance(pad, int)
    if pad >= (rows := embeddings.shape[0]):
        raise ModelError(
            f"the pad token {tokenizer.pad_token!r} of {config.path!r} has id {pad}, but the model "
            f"has embeddings for only {rows} tokens",
            remedy="set model.pad_token to a token that the model knows, for example its end token",
        )
    whole = whole_checkpoint(transformer, config)
    if whole and adapter.kind == "none" and (method := _saved_in(config).get("quant_method")) in _DEQUANTIZED:
        raise ModelError(
            f"{config.path!r} has weights in {method} and is more than a language model, so weights that were trained "
            "in 16 bits cannot be saved among its other tensors",
            remedy="train an adapter (adapter.kind: lora), or set model.path to the checkpoint in 16 bits",
        )
    loaded = made_trainable(transformer, tokenizer, config=config, adapter=adapter)
    return replace(loaded, unread=unread, whole=whole, processors=_processors(config) if config.sees_images else ())


def processor_source(config: ModelConfig) -> str:
    """Return the place of a model's processor: that of ``model.tokenizer`` if set, else the model's."""
    own = config.tokenizer
    return own if own is not None and processor_files(Path(own)) else config.path


def _processors(config: ModelConfig) -> tuple[Path, ...]:
    path = processor_source(config)
    found = config_here(path, revision=config.revision)
    return processor_files(Path(path) if found is None else found.parent)


def made_trainable(
    transformer: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, config: ModelConfig, adapter: AdapterConfig
) -> LoadedModel:
    """Prepare a model's layers as the configuration says, and add its adapter.

    Raises as :func:`load_model`.
    """
    # Before hooks are added to layers, because this replaces modules.
    float8 = Float8Switch() if config.matmul_dtype == "auto" else compute_in_float8(transformer, config.matmul_dtype)
    keep_activations(transformer, config.kept_activations)
    if config.vision != "trained":
        freeze_other_senses(transformer)
    if config.train_layers is not None:
        train_only(transformer, config.train_layers)
    model = add_lora(transformer, adapter) if isinstance(adapter, LoraAdapterConfig) else transformer
    continued = isinstance(adapter, LoraAdapterConfig) and adapter.path is not None
    return LoadedModel(model=model, transformer=transformer, tokenizer=tokenizer, float8=float8, continued=continued)


def load_teacher(
    teacher: TeacherConfig, config: ModelConfig, *, tokenizer: PreTrainedTokenizerBase, on_cpu: bool = False
) -> PreTrainedModel:
    """Load the frozen teacher of a policy of ``config``, in its dtype and on its device, never quantized.

    Args:
        tokenizer: the policy's, whose token ids the teacher reads.
        on_cpu: as for :func:`load_model`.

    Raises:
        ModelError: no such model, or its tokenizer has other ids for the policy's tokens.
    """
    name = teacher.model
    assert name is not None, "the rules ask for it"
    own = config.model_copy(
        update={"path": name, "revision": teacher.revision, "tokenizer": None, "quantization": "none"}
    )
    theirs, ours = load_tokenizer(own).get_vocab(), tokenizer.get_vocab()
    different = [token for token, number in ours.items() if theirs.get(token, number) != number]
    if different or not ours.keys() & theirs.keys():
        token = (different or [*ours])[0]
        raise ModelError(
            f"the tokenizer of the teacher {name!r} differs from the policy's in {len(different)} tokens: {token!r} is "
            f"{theirs.get(token, 'no token')} there and {ours[token]} here",
            remedy="choose a teacher of the policy's family, because it gets the policy's tokens",
        )
    return _load_transformer(own, on_cpu=on_cpu).requires_grad_(False).eval()


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with a pad token (the end token if need be) and the configured chat template, if any.

    Raises:
        ModelError: it cannot be loaded, lacks a configured token, or has neither pad token nor end token.
    """
    path = config.tokenizer or config.path
    try:
        # A separate tokenizer has separate revisions.
        revision = {} if config.tokenizer else _revision(config)
        with cache_alone_where_the_hub_is_away(path):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code, **revision)
    except (OSError, ValueError, KeyError) as error:
        key = "model.tokenizer" if config.tokenizer else "model.path or model.tokenizer"
        raise ModelError(
            f"no tokenizer could be loaded from {described_path(path)}: {first_line(error)}",
            remedy=f"set {key} to a directory that has one",
        ) from error
    _give_roles(tokenizer, config.special_tokens, path)
    if config.pad_token is not None:
        if config.pad_token not in tokenizer.get_vocab():
            raise ModelError(
                f"model.pad_token {config.pad_token!r} is not in the vocabulary of {path!r}",
                remedy="choose a token that the tokenizer has, such as its end-of-text token",
            )
        tokenizer.pad_token = config.pad_token
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {path!r} has neither a pad token nor an end token",
            remedy="set model.pad_token to a token of its vocabulary, and model.special_tokens.eos_token if it has one",
        )
    if tokenizer.pad_token_id is None:
        # Any token will do, because padding is always masked.
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        template = Path(config.chat_template)
        is_file = len(config.chat_template) < 4096 and template.is_file()
        tokenizer.chat_template = template.read_text() if is_file else config.chat_template
    return tokenizer


def _revision(config: ModelConfig) -> dict[str, Any]:
    return {} if config.revision is None else {"revision": config.revision}


def read_config(config: ModelConfig) -> Any:
    """Return transformers' configuration of the model. Raises ModelError for an adapter's directory."""
    _require_no_adapter(config.path)
    return AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code, **_revision(config))


def _give_roles(tokenizer: PreTrainedTokenizerBase, roles: Mapping[Any, str], path: str) -> None:
    """Set a tokenizer's special tokens. Raises ModelError for a token that the vocabulary does not have."""
    for role, token in roles.items():
        if token not in tokenizer.get_vocab():
            raise ModelError(
                f"model.special_tokens.{role} {token!r} is not in the vocabulary of {path!r}",
                remedy="choose a token that the tokenizer has, or add this one to the saved model",
            )
        setattr(tokenizer, role, token)


def _unread_transformer(config: ModelConfig) -> tuple[PreTrainedModel, SavedRows] | None:
    """Return the model without weights, and their location, or None if it must be loaded whole."""
    if config.quantization != "none" or config.matmul_dtype != "auto" or _saved_in(config):
        return None
    with load_errors(config.path):
        dtype: Any = _dtype(config)
        dtype = read_config(config).dtype if dtype == "auto" else getattr(torch, dtype)
    if dtype is None:
        return None
    model = empty_transformer(config, dtype=dtype)
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        return None
    with load_errors(config.path):
        rows = find_rows(model, config.path, revision=_revision(config), left_out=_is_part(model, config))
    if rows is None:
        return None
    make_repeatable(model)
    return untouched(model), rows


def _dtype(config: ModelConfig) -> str:
    on_cpu = resolve_device(config.device).type == "cpu"
    return "float32" if config.dtype == "auto" and on_cpu else config.dtype


def saved_quantization(config: ModelConfig) -> Quantization | None:
    """Return the quantization that a checkpoint has already, such as a ``*-bnb-4bit`` one; None without any.

    Raises:
        ModelError: its bits differ from ``model.quantization``.
        DependencyError: bitsandbytes is not installed.
    """
    of = _saved_in(config)
    if not of.get("load_in_4bit") and not of.get("load_in_8bit"):
        if of and config.quantization != "none":
            raise ModelError(
                f"the weights of {config.path!r} are already quantized ({of.get('quant_method')}), but "
                f"model.quantization is {config.quantization}",
                remedy="leave out model.quantization, or set model.path to the checkpoint in 16 bits",
            )
        return None  # transformers converts it to 16 bits, or uses other packages for it
    kind: Quantization = "nf4" if of.get("load_in_4bit") else "int8"
    if config.quantization not in ("none", kind):
        raise ModelError(
            f"the weights of {config.path!r} are saved in {kind}, but model.quantization is {config.quantization}",
            remedy=f"set model.quantization: {kind}, or model.path to the checkpoint in 16 bits",
        )
    require_bitsandbytes(f"{config.path!r}, which is saved in {kind},")
    return kind


def _saved_in(config: ModelConfig) -> Mapping[str, Any]:
    """Return a checkpoint's quantization config; empty without one."""
    with load_errors(config.path):
        saved: Any = getattr(read_config(config), "quantization_config", None)
    return saved if isinstance(saved, dict) else {} if saved is None else saved.to_dict()


def _load_transformer(config: ModelConfig, *, on_cpu: bool) -> PreTrainedModel:
    device, dtype = resolve_device(config.device), _dtype(config)
    options: dict[str, Any] = {}
    if saved_quantization(config) is not None:
        options = {"device_map": {"": device}}
    elif made := _DEQUANTIZED.get(str(_saved_in(config).get("quant_method"))):
        options = {"quantization_config": made(dequantize=True)}
    elif config.quantization != "none":
        # Each weight is quantized on its device when it is read, so the whole model never exists in 16 bits.
        options = {"quantization_config": quantization_config(config.quantization), "device_map": {"": device}}
    model, info = read_model(config, dtype=dtype if dtype == "auto" else getattr(torch, dtype), **options)
    require_whole(model, info, config)
    if isinstance(options.get("quantization_config"), CompressedTensorsConfig):
        model = _without_wrappers(model, config)
    elif isinstance(options.get("quantization_config"), tuple(_DEQUANTIZED.values())):
        # transformers would save in fewer bits again, under a configuration that does not say so.
        model._weight_conversions = None
    if getattr(model.config, "is_encoder_decoder", False) or not hasattr(model, "generation_config"):
        raise ModelError(
            f"{config.path!r} is a {type(model).__name__}, which does not continue a text token by token as a causal "
            "language model does",
            remedy="set model.path to a causal language model, or to one for images and text without a decoder apart",
        )
    mend_generation_config(model, config.path)
    make_repeatable(model)
    held = saved_quantization(config) or config.quantization
    if held == "none":
        return model if on_cpu else model.to(device)  # pyright: ignore[reportArgumentType]  # its stub lost self
    settle(model)
    layers, size = len(quantized_layers(model)), held_bytes(model) / 1e9
    logger.info("%d linear layers are kept in %s; the base weights take %.2f GB", layers, held, size)
    return model


def _without_wrappers(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """Return a model of the same weights in plain layers: compressed-tensors' own keep scales and may round inputs."""
    plain, weights = empty_transformer(config, dtype=model.dtype), model.state_dict()
    plain.load_state_dict({name: weights[name].to(model.dtype) for name in plain.state_dict()}, assign=True)
    plain.tie_weights()
    return plain


def read_model(config: ModelConfig, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a model from its files, with transformers' report of the tensors that it has.

    Args:
        options: of ``from_pretrained``; ``device_map="meta"`` compares the tensors and keeps none.

    Raises:
        ModelError: it cannot be loaded. DependencyError: it needs a package that is not installed.
    """
    with load_errors(config.path), without_chatter():
        return language_model_class(read_config(config), images=config.sees_images).from_pretrained(
            config.path,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # require_whole names them
            **_revision(config),
            **options,
        )


def require_whole(model: PreTrainedModel, info: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise ModelError unless the files have the tensors of the model, by the report of :func:`read_model`."""
    total, left_out = len({*model.state_dict()}), _is_part(model, config)
    require_same_names(info, path=config.path, model=type(model).__name__, total=total, left_out=left_out)


def attached_transformer(config: ModelConfig, weights: WeightSource) -> PreTrainedModel:
    """Return the causal language model of ``config.path`` whose parameters are ``weights``; nothing is loaded.

    Raises:
        ModelError: there is no such model, or the weights are of another one or in another dtype.
    """
    dtype = weights.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    model = empty_transformer(config, dtype=dtype)
    weights.attach(model)
    if model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        # Saved buffers, which an engine has among its weights under its own names.
        with load_errors(config.path):
            fill_buffers(model, tensor_files(config.path, _revision(config)) or {})
    return model


def empty_transformer(config: ModelConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the causal language model of ``config.path`` with all parameters on the meta device, ties kept.

    Buffers, such as the frequencies of rotary embeddings, are computed for real, on the CPU: no checkpoint has them.

    Raises:
        ModelError: there is no such model.
    """
    try:
        found = read_config(config)
        found.__dict__.pop("quantization_config", None)
        with init_empty_weights(include_buffers=False):
            model = language_model_class(found, images=config.sees_images).from_config(
                found, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{config.path!r} does not describe a causal language model: {first_line(error)}",
            remedy="set model.path to a directory with config.json, or to a hub id in the cache",
        ) from error
    # Moving parameters to the meta device one by one has untied those that were tied.
    model.tie_weights()
    # A model need not have this file; then its end tokens are those of its config.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(config.path, **_revision(config))
    mend_generation_config(model, config.path)
    return model.eval()


def _is_part(model: PreTrainedModel, config: ModelConfig) -> bool:
    """Return True if the checkpoint has more than the language model, such as a tower for images."""
    found = read_config(config)
    return found.get_text_config() is not found and type(model).__name__ not in (found.architectures or ())


def whole_checkpoint(model: PreTrainedModel, config: ModelConfig) -> WholeCheckpoint | None:
    """Return the checkpoint of ``config.path`` if the model is only a part of it, else None.

    Raises:
        ModelError: not all of the model's tensors are found in it.
    """
    if not _is_part(model, config):
        return None
    with load_errors(config.path):
        files = tensor_files(config.path, _revision(config))
    return find_whole(saved_shapes(model), path=config.path, files=files, revision=_revision(config))


def mend_generation_config(model: PreTrainedModel, path: str) -> None:
    """Repair the model's generation config, so that transformers can save it with the model.

    Some checkpoints on the hub have files that transformers reads but refuses to write: sampling parameters beside
    ``do_sample: false``. Training does not depend on it.

    Raises:
        ModelError: it cannot be repaired.
    """
    generation: Any = model.generation_config
    if generation is None or not (reason := _refusal(generation)):
        return
    generation.do_sample = True
    if after := _refusal(generation):
        raise ModelError(
            f"transformers refuses to save the generation_config.json of {path!r} with the trained model: {after}",
            remedy="correct or remove that file",
        )
    logger.warning(
        "generation_config.json of %s has sampling parameters together with do_sample: false, which transformers "
        "refuses to save (%s): it will be saved with do_sample: true",
        path,
        reason,
    )


def _refusal(generation: GenerationConfig) -> str:
    try:
        generation.validate(strict=True)
    except ValueError as error:
        named = re.findall(r"^- `(\w+)`", str(error), re.MULTILINE)
        return ", ".join(named) or " ".join(str(error).split())[:300]
    return ""


def takes_images(config: ModelConfig) -> bool:
    """Return True if the model of ``config`` can be shown images.

    Raises:
        ConfigError: it cannot, but ``model.vision`` asks for it.
    """
    with load_errors(config.path):
        able = can_see(read_config(config))
    if config.sees_images and not able:
        raise ConfigError(
            f"model.vision is {config.vision}, but {config.path!r} is not a model for images and text",
            remedy="leave out model.vision, or choose such a model",
        )
    return able and config.vision != "text"


def context_length(config: ModelConfig) -> int:
    """Return the model's limit of tokens, a very large number if it has none.

    Raises:
        ModelError: there is no model.
    """
    with load_errors(config.path):
        text_config = read_config(config).get_text_config()
        limits = (getattr(text_config, name, None) for name in ("max_position_embeddings", "n_positions"))
        return next((limit for limit in limits if limit), 1 << 30)


def eos_token_ids(loaded: LoadedModel) -> tuple[int, ...]:
    """Return every token that ends a completion: the generation config's and the tokenizer's.

    Raises:
        ModelError: there is none.
    """
    configured = loaded.transformer.generation_config.eos_token_id if loaded.transformer.generation_config else None
    of_tokenizer = loaded.tokenizer.eos_token_id
    assert of_tokenizer is None or isinstance(of_tokenizer, int)
    ids = {*(configured if isinstance(configured, list) else [configured]), of_tokenizer}
    found = tuple(sorted(i for i in ids if isinstance(i, int)))
    if len(found) < len(ids - {None}):
        raise ModelError(
            f"the end token of the model's generation config is {configured!r}, which is not a token id",
            remedy="write the number of a token, or a list of numbers, as eos_token_id in generation_config.json",
        )
    if not found:
        raise ModelError(
            "neither the model's generation config nor its tokenizer has an end token",
            remedy="set eos_token in the tokenizer, because without an end token completions would not end",
        )
    return found


def _require_no_adapter(path: str) -> None:
    """Raise ModelError if a model's directory has an adapter in place of a model."""
    directory = Path(path)
    file = directory / "adapter_config.json"
    if not file.is_file() or (directory / "config.json").is_file():
        return
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path") or "its base model"
    raise ModelError(
        f"{path!r} is an adapter, not a model",
        remedy=f"to train it further, set model.path: {base}, adapter.kind: lora and adapter.path: {path}; or merge it "
        "(lachesis export --merge) and set model.path to the merged model",
    )


def freeze_other_senses(model: PreTrainedModel) -> None:
    """Freeze all but the language model of a model for images and text."""
    part, head = text_part(model), model.get_output_embeddings()
    if part is model:
        return
    of_text = {id(parameter) for module in (part, head) if module is not None for parameter in module.parameters()}
    frozen = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in of_text]
    for _, parameter in frozen:
        parameter.requires_grad_(False)
    if frozen:
        logger.warning(
            "only the language model of %s is trained: %d of its tensors, such as %s, are frozen and saved as they are",
            type(model).__name__,
            len(frozen),
            frozen[0][0],
        )


def train_only(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Freeze all parameters except those of the decoder layers ``layers``, counted from 0.

    Raises:
        ModelError: the model has no such layer.
    """
    chosen = named_layers(model, layers, key="model.train_layers")
    model.requires_grad_(False)
    for layer in chosen:
        layer.requires_grad_(True)
