"""The routes that only read: status, canary, digests. Each a function from a body to an answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import lachesis
from lachesis.common.errors import EngineError
from lachesis.engines.serving.control import Control
from lachesis.engines.serving.control_wire import adapter_document, receiver_document, state_dict_document
from lachesis.engines.serving.served import GenerateRequest, Refused
from lachesis.engines.serving.wire import finite, parse_canary, parse_digests

Document = Mapping[str, Any]
_PROBE_S = 30.0
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "LOGDIR", "VLLM_BRIDGE_CONFIG_PATH", "VLLM_ENABLE_SHARED_WEIGHTS", "NUM_INFERENCE_NODES",
)  # fmt: skip


async def health(control: Control, document: Document) -> Document:
    await control.served.health()
    return {}


async def health_generate(control: Control, document: Document) -> Document:
    """One token, or 503 with the reason."""
    if await control.served.is_paused() or await control.served.is_sleeping():
        raise Refused("the engine is paused or asleep", status=503, remedy="resume it or wake it up")
    probe = GenerateRequest(prompt_token_ids=(1,), sampling={"max_tokens": 1}, request_id="health_generate")
    try:
        async with asyncio.timeout(_PROBE_S):
            probed = await control.served.generate(probe)
        for completion in probed.completions:
            _ = [finite(logprob) for logprob in completion.token_logprobs]
    except TimeoutError as error:
        raise Refused(f"no token came within {_PROBE_S:g} s", status=503, remedy="look at the server's log") from error
    except EngineError as error:
        raise Refused(f"no token can be generated: {error.message}", status=503, remedy=error.remedy) from error
    return {}


async def info(control: Control, document: Document) -> Document:
    return {
        **control.stamp,
        "paused": await control.served.is_paused(),
        "sleeping": await control.served.is_sleeping(),
        "owner": control.owner,
        "engine": control.served.kind,
        **asdict(control.served.model_info()),
        "pid": os.getpid(),
        "adapter": adapter_document(control.served.adapter()),
        "lachesis": lachesis.__version__,
    }


async def is_paused(control: Control, document: Document) -> Document:
    return {"paused": await control.served.is_paused(), **control.stamp}


async def is_sleeping(control: Control, document: Document) -> Document:
    return {"sleeping": await control.served.is_sleeping(), **control.stamp}


async def debug(control: Control, document: Document) -> Document:
    """What /bridge/info says, the receiver, and the documented variables as this server sees them."""
    return {
        **await info(control, document),
        "receiver": receiver_document(control.served.receiver()),
        "adapter_roots": [str(root) for root in control.roots],
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }


async def lora_status(control: Control, document: Document) -> Document:
    adapter, described = control.served.adapter(), control.served.model_info()
    return {
        "status": "connected" if adapter else "idle",
        "detail": f"{adapter.name!r} is in force" if adapter else "no adapter is loaded",
        "adapter": adapter_document(adapter),
        "lora_enabled": described.lora_enabled,
        "max_lora_rank": described.max_lora_rank,
        **control.stamp,
    }


async def nccl_status(control: Control, document: Document) -> Document:
    return receiver_document(control.served.receiver()) | control.stamp


async def state_dict_info(control: Control, document: Document) -> Document:
    return state_dict_document(await control.served.state_dict_info()) | control.stamp


async def canary(control: Control, document: Document) -> Document:
    token_ids = parse_canary(document, info=control.served.model_info())
    logprobs = await control.served.canary(token_ids)
    return {"logprobs": [finite(value) for value in logprobs], **control.stamp}


async def digests(control: Control, document: Document) -> Document:
    found = await control.served.digests(parse_digests(document))
    return {"digests": {name: f"{value:016x}" for name, value in found.items()}, **control.stamp}
