"""Names imported from vLLM, and differences between its versions 0.26 and 0.32. Import it only if vLLM is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import vllm
import vllm.envs
from prometheus_client import REGISTRY
from vllm.inputs import TextPrompt as TextPrompt
from vllm.inputs import mm_input as mm_input
from vllm.inputs import tokens_input as tokens_input
from vllm.lora.lora_model import LoRAModel as LoRAModel
from vllm.lora.peft_helper import PEFTHelper as PEFTHelper
from vllm.lora.request import LoRARequest as LoRARequest
from vllm.multimodal.inputs import MultiModalKwargsItems as MultiModalKwargsItems
from vllm.multimodal.processing import ProcessorInputs as ProcessorInputs
from vllm.multimodal.processing import TimingContext as TimingContext
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError
from vllm.v1.outputs import AsyncModelRunnerOutput

from lachesis.engines.serving.backend import Refused
from lachesis.engines.serving.generation import TokenVersions

# From vLLM 0.32 on, completions have the weight version of each token.
LABELS_TOKENS = hasattr(AsyncLLM, "update_weight_version")

# Fields that the server sets itself, or that have no meaning in our answers.
_NOT_FOR_CALLERS = {
    "n", "logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "flat_logprobs",
    "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "routed_experts_prompt_start",
    "trace_decode_token_ids", "watermarking", "logprob_token_ids", "detokenize",
}  # fmt: skip


def token_versions(output: Any) -> tuple[TokenVersions, ...]:
    """Return the weight versions of a finished completion's tokens, 0 before the first label; empty if unknown."""
    found = getattr(output, "weight_versions", None) or ()
    return tuple(TokenVersions(int(s.version) if s.version.isdecimal() else 0, s.start, s.end) for s in found)


def engine_kind() -> str:
    """Return name and version, as in "vllm 0.26.0"."""
    return f"vllm {vllm.__version__}"


def fix_variables() -> None:
    """Stop vLLM from rereading environment variables in this process for each token.

    vLLM's engine and workers do the same once they are ready.
    """
    vllm.envs.enable_envs_cache()


def sampling_fields() -> frozenset[str]:
    """Return the fields of ``SamplingParams`` that a request may set."""
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    return frozenset(name for name in names - _NOT_FOR_CALLERS if not name.startswith("_"))


def parse_sampling(
    fields: Mapping[str, Any],
    *,
    logprobs: int,
    prompt_logprobs: int | None = None,
    delta: bool = False,
    text: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Convert to vLLM's parameters for one completion; vLLM checks types and ranges.

    Args:
        fields: the request's sampling fields.
        logprobs: number of likeliest tokens to return besides the sampled one.
        prompt_logprobs: the same for the prompt; ``None`` for no logprobs.
        delta: True if answers come in pieces.
        text: True to decode tokens; with stop strings they are always decoded.
        extra: data for this package's code in the worker.

    Raises:
        Refused: (400) a field has a value that vLLM does not accept.
    """
    document = {**fields, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    try:
        params = msgspec.convert(document, type=SamplingParams, strict=False)
    except caller_errors() as error:
        raise Refused(f"vLLM refuses the sampling parameters: {error}", remedy="correct the field") from error
    params.output_kind = RequestOutputKind.DELTA if delta else RequestOutputKind.FINAL_ONLY
    params.detokenize = text or bool(params.stop)
    if extra is not None:
        params.extra_args = {**(params.extra_args or {}), **extra}
    return params


def chat_request(document: Mapping[str, Any]) -> Any:
    """Parse vLLM's chat request. Raises the errors of :func:`caller_errors`, including pydantic's."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest.model_validate(document)


def tool_parsers() -> Any:
    """Return vLLM's registry of tool parsers."""
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager


def cached_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer with a cached vocabulary, because vLLM's parsers read the whole vocabulary each time."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


def caller_errors() -> tuple[type[Exception], ...]:
    """Return vLLM's errors for an invalid request: ValueErrors up to 0.26, later also other classes."""
    import vllm.exceptions as exceptions

    root = getattr(exceptions, "VLLMClientError", None)
    return (ValueError, TypeError) if root is None else (ValueError, TypeError, root)


def lora_name_mapper(model: Any) -> Any:
    """Return the model's renames from checkpoint modules to vLLM's, without fusing q, k and v; or None."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    renames = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
    return renames()


def shown_tokens(content: Any, tokenizer: Any) -> list[int]:
    """Return the tokens of an image's place in a prompt that stand for its features; 0.26 may have it as text."""
    full = content.full
    tokens = tokenizer.encode(full, add_special_tokens=False) if isinstance(full, str) else [*full]
    if content.is_embed is None:
        return tokens
    arguments = (tokenizer, full) if len(inspect.signature(content.is_embed).parameters) > 1 else (full,)
    return [token for token, shown in zip(tokens, content.is_embed(*arguments).tolist(), strict=True) if shown]


def can_reload_under_lora() -> bool:
    """Return True if base weights can be reloaded once layers are wrapped for LoRA; 0.26 does not find their names."""
    from vllm.lora.layers import BaseLayerWithLoRA

    return hasattr(BaseLayerWithLoRA, "load_weights")


def later_output(output: AsyncModelRunnerOutput, change: Callable[[Any], Any]) -> AsyncModelRunnerOutput:
    """Return a step's pending output, to which ``change`` is applied once it has been computed."""

    class Changed(AsyncModelRunnerOutput):
        def get_output(self) -> Any:
            return change(output.get_output())

    return Changed()


def generated_tokens() -> int | None:
    """Return the number of generated tokens from vLLM's statistics; ``None`` if they are disabled."""
    name = "vllm:generation_tokens_total"
    families = REGISTRY.restricted_registry([name]).collect()
    counts = [sample.value for family in families for sample in family.samples if sample.name == name]
    return round(sum(counts)) if counts else None
