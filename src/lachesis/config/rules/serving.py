"""Rules about engines and the transfer of weights to them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lachesis.common.errors import ConfigError
from lachesis.common.http import server_url
from lachesis.config.rules.base import Rule, Said, note, problem, warning
from lachesis.config.schema import (
    SERVERS_DNS,
    SERVERS_FILE,
    ChannelBridgeConfig,
    LachesisConfig,
    VllmEngineConfig,
)

# A GPU index, or the UUID of a GPU or of a MIG instance.
_DEVICE = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


def _addresses(config: LachesisConfig) -> Iterator[Said]:
    """Check that addresses are valid, because a run would wait in vain for a wrong one."""
    named: dict[str, str] = {}
    if config.engine.kind == "http":
        urls = [url for url in config.engine.urls if not url.startswith(SERVERS_FILE)]
        named = {f"engine.urls {url}": url.removeprefix(SERVERS_DNS) for url in urls}
    if config.source.kind == "atropos":
        named[f"source.url {config.source.url}"] = config.source.url
    for key, url in named.items():
        try:
            server_url(url)
        except ConfigError:
            yield problem(f"{key} is not an address of a server; write it as http://127.0.0.1:PORT")


def _devices(config: LachesisConfig) -> Iterator[Said]:
    """Check that devices are valid CUDA names; otherwise vLLM sees no GPU, and its error does not say why."""
    if config.engine.kind == "vllm" and config.engine.devices is not None:
        wrong = [device for device in config.engine.devices.split(",") if not _DEVICE.fullmatch(device.strip())]
        if wrong:
            yield problem(
                f"engine.devices {config.engine.devices}: {wrong[0]!r} is not a CUDA_VISIBLE_DEVICES entry; "
                "write its number, as in 0 or 2,3"
            )


def _shared(config: LachesisConfig) -> Iterator[Said]:
    """Check that a single copy of the weights is in one engine, in which trainer and engine share tensors."""
    bridge, engine = config.bridge, config.engine
    if not config.shares_weights or engine.kind != "http":
        return
    if any(entry.startswith((SERVERS_DNS, SERVERS_FILE)) for entry in engine.urls):
        key = "bridge.kind shared_vllm" if bridge.kind == "shared_vllm" else "bridge.share_base"
        yield problem(f"{key} has one copy of the weights, but engine.urls can mean several servers; name one")


def _engine(config: LachesisConfig) -> Iterator[Said]:
    engine = config.engine
    if engine.kind == "vllm" and engine.data_parallel_size > 1:
        yield from _copies(config, engine)
    yield from _context(config)


def _rounded(config: LachesisConfig) -> Iterator[Said]:
    """Check engines that compute in 8 bits: their weights, or keys and values, differ from the trainer's."""
    engine, bridge = config.engine, config.bridge
    if engine.kind != "vllm" or not engine.rounds:
        return
    if engine.quantization != "none":
        if bridge.kind == "shared_vllm" or getattr(bridge, "share_base", False):
            key = "bridge.kind shared_vllm" if bridge.kind == "shared_vllm" else "bridge.share_base"
            yield problem(
                f"{key} trains the engine's own tensors, which have 8 bits with engine.quantization "
                f"{engine.quantization}; set bridge.kind: broadcast, or remove engine.quantization"
            )
        if "float32" in (engine.dtype, config.model.dtype if engine.dtype == "auto" else engine.dtype):
            yield problem(
                f"engine.quantization {engine.quantization}: vLLM quantizes 16-bit weights, but these are float32; set "
                "engine.dtype: bfloat16"
            )
    key = f"engine.{'quantization' if engine.quantization != 'none' else 'kv_cache_dtype'} fp8"
    if config.algorithm.sampler_correction == "none":
        yield warning(
            f"{key}: samples come from a policy slightly different from the trained one, and "
            "algorithm.sampler_correction is none; set it to token_truncate"
        )
    else:
        yield note(
            f"{key}: samples come from a policy slightly different from the trained one; the loss is corrected for it "
            f"(algorithm.sampler_correction {config.algorithm.sampler_correction}), logprob_diff_mean measures the "
            "difference, and the proof of sync has a larger tolerance for its canary"
        )


def _copies(config: LachesisConfig, engine: VllmEngineConfig) -> Iterator[Said]:
    """Check that each copy of the model has its own GPUs."""
    needed = engine.data_parallel_size * engine.tensor_parallel_size
    words = (
        f"engine.data_parallel_size {engine.data_parallel_size} starts that many servers with "
        f"{engine.tensor_parallel_size} GPU(s) each"
    )
    if engine.devices is None:
        return
    if len(engine.devices.split(",")) != needed:
        yield problem(f"{words}, but engine.devices {engine.devices} does not name {needed}; name {needed} GPUs")
    elif engine.servers_on_own_card > 1:
        yield from _crowded(config, engine)


def _crowded(config: LachesisConfig, engine: VllmEngineConfig) -> Iterator[Said]:
    """Check configurations with several servers on one GPU that is not the trainer's."""
    where = f"engine.devices {engine.devices} puts several servers on one GPU"
    if engine.tensor_parallel_size > 1:
        yield problem(f"{where}, but with engine.tensor_parallel_size each worker needs its own; name each GPU once")
    if isinstance(config.bridge, ChannelBridgeConfig) and config.bridge.transport in ("nccl", "ipc"):
        yield problem(
            f"{where}, which bridge.transport {config.bridge.transport} does not support; remove it, or set gloo"
        )


def _context(config: LachesisConfig) -> Iterator[Said]:
    """Check that the engine accepts the longest possible sequences."""
    engine, source = config.engine, config.source
    if (engine.kind != "vllm" and engine.kind != "embedded_server") or engine.max_model_len is None:
        return
    if source.kind == "atropos":
        return  # environments are told another length
    longest = (config.data.max_prompt_length or 1) + config.sampling.max_completion_length
    if engine.max_model_len < longest:
        yield problem(
            f"engine.max_model_len {engine.max_model_len} is less than the longest prompt and completion together "
            f"({longest} tokens); raise it, or lower data.max_prompt_length or sampling.max_completion_length"
        )


SERVING_RULES: tuple[Rule, ...] = (*(_addresses, _devices, _shared, _engine, _rounded),)
