"""Rules about engines, and the way of the weights to them."""

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

# A number, or the name of a GPU or of a part of one.
_DEVICE = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
_OTHER_BRIDGES = "shared_vllm, broadcast or none, or lora_only with LoRA"


def _bridge(config: LachesisConfig) -> Iterator[Said]:
    """Check that the bridge fits the engine and the adapter, by the capabilities it declares."""
    kind, capabilities = config.bridge.kind, config.bridge.capabilities
    engine, place = config.engine.kind, config.engine.place
    if kind == "in_process" and place != "trainer":
        yield problem(
            f"bridge.kind in_process reaches the trainer's own process only, and engine.kind is {engine}; "
            f"set bridge.kind: {_OTHER_BRIDGES}"
        )
    if kind != "in_process" and place == "trainer":
        yield problem(
            f"engine.kind {engine} has the trainer's own weights and no bridge but in_process, and bridge.kind is "
            f"{kind}; remove bridge, or set engine.kind: vllm, embedded_server or http"
        )
    if capabilities.adapter_only and config.adapter.kind == "none":
        yield problem(
            f"bridge.kind {kind} transfers adapters only, and adapter.kind is none; "
            "set adapter.kind: lora or choose another bridge"
        )
    if capabilities.owns_engine and place == "elsewhere":
        yield problem(
            f"bridge.kind {kind} restarts the engine, and engine.kind {engine} is not the run's to restart; "
            "set engine.kind: vllm or embedded_server"
        )
    if not config.bridge.proof:
        yield warning("bridge.proof is false: an engine with stale weights would go unnoticed; turn it on")


def _addresses(config: LachesisConfig) -> Iterator[Said]:
    """Check that addresses are valid, because a run would wait for a wrong one."""
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
    """Check that devices are named as CUDA does; with other names vLLM sees no GPU, and its error does not say so."""
    if config.engine.kind == "vllm" and config.engine.devices is not None:
        wrong = [device for device in config.engine.devices.split(",") if not _DEVICE.fullmatch(device.strip())]
        if wrong:
            yield problem(
                f"engine.devices {config.engine.devices}: {wrong[0]!r} is not a CUDA_VISIBLE_DEVICES entry; "
                "write its number, as in 0 or 2,3"
            )


def _shared(config: LachesisConfig) -> Iterator[Said]:
    """Check bridges with a single copy of the weights, in which trainer and engine share tensors."""
    bridge, engine = config.bridge, config.engine
    shares_base = (bridge.kind == "lora_only" or bridge.kind == "lora_nccl") and bridge.share_base
    if bridge.kind != "shared_vllm" and not shares_base:
        return
    key = "bridge.share_base" if shares_base else "bridge.kind shared_vllm"
    if engine.kind == "vllm" and engine.tensor_parallel_size > 1:
        yield problem(
            f"{key} gives the trainer the engine's own tensors, and with engine.tensor_parallel_size "
            f"{engine.tensor_parallel_size} each GPU holds slices that no layer of the trainer's can use; set it to 1"
        )
    if engine.kind == "http" and any(entry.startswith((SERVERS_DNS, SERVERS_FILE)) for entry in engine.urls):
        yield problem(f"{key} has one copy of the weights, and engine.urls may come to name several; name the server")
    if engine.kind == "vllm" and engine.data_parallel_size > 1:
        yield problem(
            f"{key} has one copy of the weights, and engine.data_parallel_size {engine.data_parallel_size} makes "
            "several; set it to 1"
        )
    if engine.kind == "vllm" and engine.devices is not None:
        yield note(
            f"{key} works on one GPU: engine.devices {engine.devices} has to name the trainer's, and "
            "engine.gpu_memory_utilization to leave it room"
        )
    if engine.kind == "vllm" and engine.enable_sleep_mode:
        yield problem(f"{key}: a sleeping engine gives up the tensors that are trained; remove enable_sleep_mode")
    if bridge.kind == "shared_vllm" and config.adapter.kind != "none":
        yield problem(
            "bridge.kind shared_vllm trains the engine's weights themselves, and adapter.kind is "
            f"{config.adapter.kind}; for LoRA on the engine's weights use lora_only with share_base"
        )
    if config.model.quantization != "none":
        yield problem(
            f"{key}: the engine's weights are not quantized, and model.quantization is {config.model.quantization}; "
            "remove it"
        )


def _merged(config: LachesisConfig) -> Iterator[Said]:
    capabilities = config.bridge.capabilities
    sends_all = not capabilities.adapter_only and not capabilities.shares_storage
    if config.model.quantization != "none" and sends_all:
        yield problem(
            f"bridge.kind {config.bridge.kind} sends all weights with the adapter merged into them, and with "
            f"model.quantization {config.model.quantization} the base's are not there; set bridge.kind: lora_only or "
            "lora_nccl, which send the adapter itself"
        )


def _engine(config: LachesisConfig) -> Iterator[Said]:
    engine = config.engine
    if engine.kind == "vllm" and engine.enforce_eager:
        yield note("engine.enforce_eager: generation is several times slower; CUDA graphs see new weights too")
    if engine.kind == "vllm" and engine.data_parallel_size > 1:
        yield from _copies(config, engine)
    every = getattr(config.bridge, "every_steps", 1)
    if config.run.steps is not None and every > config.run.steps:
        yield warning(
            f"bridge.every_steps {every} is more than run.steps {config.run.steps}: the engine never gets new weights "
            "during the run"
        )
    yield from _context(config)


def _sleep(config: LachesisConfig) -> Iterator[Said]:
    """Check that nobody needs an engine while it sleeps, which is while the trainer computes."""
    engine = config.engine
    if engine.kind != "vllm" or not engine.enable_sleep_mode:
        return
    if config.source.kind == "atropos":
        yield problem(
            "engine.enable_sleep_mode puts the engine to sleep while the trainer computes, and with source.kind "
            "atropos environments ask it at any time; remove enable_sleep_mode"
        )
    if config.pipeline.async_prefetch:
        yield problem(
            "engine.enable_sleep_mode puts the engine to sleep while the trainer computes, and with "
            "pipeline.async_prefetch it generates meanwhile; remove one of the two"
        )
    if config.model.device == "cpu" and engine.devices is None:
        yield problem(
            "engine.enable_sleep_mode gives the memory of a GPU back, and model.device is cpu; remove enable_sleep_mode"
        )
    if engine.devices is not None:
        yield note(
            f"engine.enable_sleep_mode gives memory back on the engine's GPU: engine.devices {engine.devices} has to "
            "name the trainer's, or nothing is gained"
        )


def _rounded(config: LachesisConfig) -> Iterator[Said]:
    """Check engines that compute in 8 bits, whose weights or keys and values differ from the trainer's."""
    engine, bridge = config.engine, config.bridge
    if engine.kind != "vllm" or not engine.rounds:
        return
    if engine.quantization != "none":
        if bridge.kind == "shared_vllm" or getattr(bridge, "share_base", False):
            key = "bridge.kind shared_vllm" if bridge.kind == "shared_vllm" else "bridge.share_base"
            yield problem(
                f"{key} trains the engine's own tensors, and with engine.quantization {engine.quantization} they have "
                "8 bits; set bridge.kind: broadcast, or remove engine.quantization"
            )
        if "float32" in (engine.dtype, config.model.dtype if engine.dtype == "auto" else engine.dtype):
            yield problem(
                f"engine.quantization {engine.quantization}: vLLM rounds weights of 16 bits, and these are float32; "
                "set engine.dtype: bfloat16"
            )
    key = f"engine.{'quantization' if engine.quantization != 'none' else 'kv_cache_dtype'} fp8"
    if config.algorithm.sampler_correction == "none":
        yield warning(
            f"{key}: samples come from a policy that is not quite the trained one, and algorithm.sampler_correction is "
            "none; set it to token_truncate"
        )
    else:
        yield note(
            f"{key}: samples come from a policy that is not quite the trained one; the loss is corrected for it "
            f"(algorithm.sampler_correction {config.algorithm.sampler_correction}), logprob_diff_mean says how far off "
            "it is, and the proof of sync allows its canary a larger difference"
        )


def _copies(config: LachesisConfig, engine: VllmEngineConfig) -> Iterator[Said]:
    """Check that each copy of the model has its own GPUs."""
    needed = engine.data_parallel_size * engine.tensor_parallel_size
    words = (
        f"engine.data_parallel_size {engine.data_parallel_size} starts that many servers with "
        f"{engine.tensor_parallel_size} GPU(s) each"
    )
    if engine.devices is None:
        yield note(
            f"{words}: without engine.devices those of the ranks, one worker beside each (torchrun --nproc-per-node "
            f"{needed}); where one process trains all are on its GPU, or name {needed} others in engine.devices"
        )
    elif len(engine.devices.split(",")) != needed:
        yield problem(f"{words}, and engine.devices {engine.devices} is not {needed}; name {needed} of them")
    elif engine.servers_on_own_card > 1:
        yield from _crowded(config, engine)


def _crowded(config: LachesisConfig, engine: VllmEngineConfig) -> Iterator[Said]:
    """Check several servers on one GPU that is not the trainer's."""
    where = f"engine.devices {engine.devices} puts several servers on one GPU"
    if engine.tensor_parallel_size > 1:
        yield problem(f"{where}, and with engine.tensor_parallel_size each worker needs one; name each GPU once")
    if isinstance(config.bridge, ChannelBridgeConfig) and config.bridge.transport in ("nccl", "ipc"):
        yield problem(
            f"{where}, which bridge.transport {config.bridge.transport} does not reach; leave it out, or set gloo"
        )


def _context(config: LachesisConfig) -> Iterator[Said]:
    """Check that the engine accepts the longest possible sequences."""
    engine, source = config.engine, config.source
    if (engine.kind != "vllm" and engine.kind != "embedded_server") or engine.max_model_len is None:
        return
    if source.kind == "atropos":
        if engine.max_model_len < source.max_sequence_length:
            yield warning(
                f"engine.max_model_len {engine.max_model_len} is less than source.max_sequence_length "
                f"{source.max_sequence_length}, which environments are told: it will refuse longer requests; set both "
                "alike"
            )
        return
    longest = (config.data.max_prompt_length or 1) + config.sampling.max_completion_length
    if engine.max_model_len < longest:
        yield problem(
            f"engine.max_model_len {engine.max_model_len} is less than a longest prompt and completion ({longest} "
            "tokens); raise it, or lower data.max_prompt_length or sampling.max_completion_length"
        )


SERVING_RULES: tuple[Rule, ...] = (
    _addresses,
    _devices,
    _shared,
    _merged,
    _engine,
    _sleep,
    _rounded,
    _bridge,
)
