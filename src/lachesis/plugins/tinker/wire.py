"""Conversion of the protocol's messages, defined by the client's package, from and to this room's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from lachesis.common.errors import DataError
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.plugins.tinker.records import AdamStep, Datum, LoraShape, Pass, PassResult, Sampled, SampleRequest
from lachesis.plugins.tinker.worker import Answer

# Limits of one request: completions, and likeliest tokens at each place of a prompt.
MOST_SAMPLES = 1024
_MOST_TOP = 128
_PROTOBUF = "application/x-protobuf"
_NUMPY: Mapping[int, Any] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


def pass_message(body: bytes) -> pb.ForwardBackwardRequest:
    """Parse a forward or forward_backward. Raises DataError if the body is not one of this kind."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise DataError("the body is not a ForwardBackwardRequest", remedy="use the client tinker 0.38") from error
    return message


def read_pass(message: pb.ForwardBackwardRequest) -> Pass:
    """Read a pass. Raises DataError for images, sounds, sparse tensors, and text among the loss's options."""
    options: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if not value.HasField("number"):
            raise DataError(f"loss_fn_config has the text {value.text!r} in {name!r}", remedy="give a number")
        options[name] = value.number
    return Pass(
        data=[_datum(datum, number) for number, datum in enumerate(message.data)],
        loss=message.loss_fn,
        options=options,
        forward_only=message.forward_only,
    )


def _datum(message: pb.Datum, number: int) -> Datum:
    if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in message.model_input):
        raise DataError(f"datum {number} has an image or a sound: only tokens are served", remedy="leave it out")
    tokens = [
        _numbers(chunk.encoded_text.tokens, np.int32, f"the tokens of datum {number}") for chunk in message.model_input
    ]
    inputs = {name: _tensor(tensor, f"{name} of datum {number}") for name, tensor in message.loss_fn_inputs.items()}
    if "target_tokens" not in inputs:
        raise DataError(f"datum {number} has no target_tokens", remedy="give the token that each position predicts")
    targets = inputs.pop("target_tokens").astype(np.int64)
    if message.loss_fn_inputs.keys() == {"target_tokens"}:
        inputs["weights"] = np.ones(targets.shape)  # as in the service: all tokens count
    return Datum(
        tokens=np.concatenate([*tokens, np.empty(0, np.int32)]).astype(np.int64),
        targets=targets,
        inputs={name: values.astype(np.float32) for name, values in inputs.items()},
    )


def _tensor(message: pb.Tensor, what: str) -> np.ndarray:
    if message.HasField("sparse_csr") or message.dtype not in _NUMPY:
        raise DataError(f"{what} is sparse or of an unknown dtype", remedy="send a dense tensor of float32 or int64")
    values = _numbers(message.dense, _NUMPY[message.dtype], what)
    try:
        return values.reshape(tuple(message.shape)) if message.shape else values
    except ValueError as error:
        raise DataError(
            f"{what} has {values.size} values for shape {list(message.shape)}", remedy="correct it"
        ) from error


def _numbers(content: bytes, dtype: Any, what: str) -> np.ndarray:
    try:
        return np.frombuffer(content, dtype=dtype)
    except ValueError as error:
        size = np.dtype(dtype).itemsize
        wrong = f"{what}: {len(content)} bytes do not divide into numbers of {size} bytes"
        raise DataError(wrong, remedy="correct it") from error


def pass_answer(result: PassResult) -> Answer:
    """Return the logprobs by datum, and the loss; a metric's name says how clients combine several requests."""
    sizes = [logprobs.size * 4 for logprobs in result.logprobs]
    field = pb.BatchedTensor(
        data=b"".join(logprobs.astype(np.float32).tobytes() for logprobs in result.logprobs),
        offsets=np.cumsum([0, *sizes]).astype(np.int64).tobytes(),
        dtype=pb.DTYPE_FLOAT32,
    )
    record = pb.ArrayRecord(type_tag="ArrayRecord", fields={"logprobs": field}, num_datums=len(sizes))
    message = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": result.loss}
    )
    return Answer(message.SerializeToString(), _PROTOBUF)


def lora_shape(config: types.LoraConfig | None, *, seed: int, max_rank: int) -> LoraShape:
    """Read the shape of an adapter. Raises DataError if there is none, as for full training, or its rank is too large.

    Args:
        config: of the request.
        seed: for a request without one.
        max_rank: the largest rank; adapters and their optimizer's state grow with it.
    """
    if config is None:
        raise DataError("only LoRA runs are served", remedy="use create_lora_training_client")
    if config.rank > max_rank:
        raise DataError(
            f"rank {config.rank} is not served: the largest is {max_rank} (--max-lora-rank)",
            remedy="ask for a smaller one",
        )
    return LoraShape(
        rank=config.rank,
        seed=(seed if config.seed is None else config.seed) % 2**63,
        train_unembed=config.train_unembed,
        train_mlp=config.train_mlp,
        train_attn=config.train_attn,
    )


def check_optimizer(config: object) -> None:
    """Raise DataError for a run whose optimizer is not Adam."""
    kind = getattr(config, "type", "adamw")
    if kind != "adamw":
        raise DataError(f"the optimizer {kind!r} is not served here", remedy="use Adam")


def adam_step(params: object) -> AdamStep:
    """Read the parameters of a step. Raises DataError for another optimizer."""
    if not isinstance(params, types.AdamParams):
        raise DataError(
            f"the optimizer {getattr(params, 'type', params)!r} is not served here", remedy="step with AdamParams"
        )
    return AdamStep(**params.model_dump())


def sample_request(body: types.SampleRequest, *, seed: int, max_context: int) -> SampleRequest:
    """Read a request for completions. Raises DataError for options that are not served.

    Args:
        body: of the request.
        seed: for a request without one.
        max_context: limit of completions for which no length is given.
    """
    _refuse_sampling(body)
    for name, count, most in (
        ("num_samples", body.num_samples, MOST_SAMPLES),
        ("topk_prompt_logprobs", body.topk_prompt_logprobs, _MOST_TOP),
    ):
        if not 0 <= count <= most:
            raise DataError(f"{name} is {count}, and at most {most} are served", remedy="ask for fewer, or none")
    prompt = tuple(token for chunk in body.prompt.chunks for token in _tokens(chunk))
    params = body.sampling_params
    room = max(1, max_context - len(prompt))
    return SampleRequest(
        generation=GenerationRequest(
            prompt_ids=prompt,
            params=SamplingParams(
                max_tokens=room if params.max_tokens is None else params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                **_stop(params.stop),
            ),
            n=body.num_samples,
            seed=(seed if params.seed is None else params.seed) % 2**63,
        ),
        prompt_logprobs=(body.prompt_logprobs_last_n or len(prompt)) if body.prompt_logprobs else 0,
        top_prompt_logprobs=body.topk_prompt_logprobs,
    )


def _refuse_sampling(body: types.SampleRequest) -> None:
    unserved = {
        "topk_sample_logprobs": body.topk_sample_logprobs,
        "target_prompt_logprobs": body.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": body.prompt_alt_tokens_k,
        "record_stability_info, which stable_reinforce needs,": body.record_stability_info,
    }
    for name, asked in unserved.items():
        if asked:
            raise DataError(f"{name} is not served here", remedy="sample without it")


def _tokens(chunk: object) -> Sequence[int]:
    if not isinstance(chunk, types.EncodedTextChunk):
        raise DataError(f"the prompt has a {type(chunk).__name__}: only tokens are served", remedy="leave it out")
    return chunk.tokens


def _stop(stop: str | Sequence[str] | Sequence[int] | None) -> dict[str, Any]:
    if stop is None:
        return {}
    if isinstance(stop, str):
        return {"stop": (stop,)}
    if not stop:
        raise DataError("stop=[] is not served: not even the end token would end text", remedy="leave stop out")
    kind = "stop_token_ids" if isinstance(stop[0], int) else "stop"
    return {kind: tuple(stop)}


def sample_answer(sampled: Sampled) -> Answer:
    """Return completions with their logprobs, and the requested logprobs of the prompt."""
    message = pb.SampleResponse(
        sequences=[
            pb.SampledSequence(
                stop_reason=pb.STOP_REASON_STOP if found.finish_reason == "stop" else pb.STOP_REASON_LENGTH,
                tokens=np.asarray(found.token_ids, dtype=np.int32).tobytes(),
                logprobs=np.asarray(found.logprobs, dtype=np.float32).tobytes(),
            )
            for found in sampled.completions
        ]
    )
    if sampled.prompt_logprobs is not None:
        message.prompt_logprobs = sampled.prompt_logprobs.tobytes()
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        length, k = sampled.top_ids.shape
        message.topk_prompt_logprobs.CopyFrom(
            pb.TopkLogprobs(
                token_ids=sampled.top_ids.tobytes(), logprobs=sampled.top_logprobs.tobytes(), k=k, length=length
            )
        )
    return Answer(message.SerializeToString(), _PROTOBUF)


def json_answer(model: BaseModel) -> Answer:
    """Return one of the client's own answers."""
    return Answer(model.model_dump_json(exclude_none=True).encode())
