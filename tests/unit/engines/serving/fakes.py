"""A served engine without a model: it answers at once, or waits where a test wants it to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from lachesis.engines.serving.backend import (
    AdapterStatus,
    DigestRequest,
    EngineBackend,
    MemoryPart,
    ModelInfo,
    ReceiverSpec,
    ReceiverStatus,
    TensorInfo,
)
from lachesis.engines.serving.generation import GenerateBody, GenerateChunk, GenerateCompletion, GenerateResult
from lachesis.engines.serving.session import Session

INFO = ModelInfo(
    model="/models/tiny", served_names=("tiny",), dtype="float32", vocab_size=100, max_model_len=32,
    tensor_parallel_size=1, device="cpu", lora_enabled=True, max_lora_rank=8,
)  # fmt: skip
SESSION = Session(session_id="s1", token="secret", url="http://127.0.0.1:1", port=1, pid=1)
FIELDS = frozenset({"temperature", "top_p", "top_k", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids",
                    "ignore_eos", "logit_bias"})  # fmt: skip


class FakeServed(EngineBackend):
    """Notes its calls in ``calls``. ``fail`` has errors by the name of the call; ``hold`` keeps calls waiting."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.labels: list[int] = []
        self.fail: dict[str, Exception] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []
        self.requests: list[GenerateBody] = []
        self.chunks = 2
        self.logprobs = (-0.5, float("-inf"))
        self.paused = self.sleeping = False
        self.loaded: AdapterStatus | None = None

    async def _call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments) if arguments else name)
        if name in self.hold:
            try:
                await self.hold[name].wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
        if name in self.fail:
            raise self.fail[name]

    @property
    def kind(self) -> str:
        return "fake"

    @property
    def sampling_fields(self) -> frozenset[str]:
        return FIELDS

    def model_info(self) -> ModelInfo:
        return INFO

    def generated_tokens(self) -> int:
        return 7

    async def generate(self, request: GenerateBody) -> GenerateResult:
        self.requests.append(request)
        await self._call("generate")
        now = time.monotonic()
        one = GenerateCompletion(
            text="ab", token_ids=(7, 8), finish_reason="stop", logprobs=self.logprobs,
            first_token_time=now, last_token_time=now,
        )  # fmt: skip
        ids = request.prompt_token_ids or (1, 2)
        return GenerateResult(prompt=request.prompt, prompt_token_ids=ids, completions=(one,) * request.n)

    async def stream(self, request: GenerateBody) -> AsyncIterator[GenerateChunk]:
        for number in range(self.chunks):
            if number:
                await self._call("stream")
            yield GenerateChunk(
                index=0, text="a", token_ids=(7,), logprobs=(-0.5,), time=time.monotonic(),
                finish_reason="stop" if number == self.chunks - 1 else None,
                prompt_token_ids=None if number else (1, 2),
            )  # fmt: skip

    async def canary(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        await self._call("canary")
        return (-1.0,) * (len(token_ids) - 1)

    async def cached_tokens(self, token_ids: Sequence[int]) -> int:
        return 0

    async def digests(self, request: DigestRequest) -> dict[str, int]:
        await self._call("digests", request)
        return {"w": 255}

    async def load_adapter(self, *, name: str, path: Path) -> None:
        await self._call("load_adapter", name, path)
        self.loaded = AdapterStatus(name, 2, 4.0, path)

    async def unload_adapter(self, *, name: str) -> None:
        await self._call("unload_adapter", name)
        self.loaded = None

    def adapter(self) -> AdapterStatus | None:
        return self.loaded

    async def start_receiver(self, spec: ReceiverSpec) -> None:
        await self._call("start_receiver", spec)

    def receiver(self) -> ReceiverStatus:
        return ReceiverStatus()

    async def receive(self) -> None:
        await self._call("receive")

    async def stop_receiver(self) -> None:
        await self._call("stop_receiver")

    async def export_shared(self, path: Path) -> None:
        await self._call("export_shared", path)

    async def state_dict_info(self) -> dict[str, TensorInfo]:
        return {"w": TensorInfo((2, 3), "float32", "cpu")}

    async def reload(self, path: Path) -> None:
        await self._call("reload", path)

    async def pause(self, mode: str) -> None:
        await self._call("pause", mode)
        self.paused = True

    async def resume(self) -> None:
        await self._call("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self, level: int) -> None:
        await self._call("sleep", level)
        self.sleeping = True

    async def wake_up(self, tags: Sequence[MemoryPart]) -> None:
        await self._call("wake_up", tuple(tags))
        self.sleeping = False

    async def is_sleeping(self) -> bool:
        return self.sleeping

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def label_weights(self, version: int) -> None:
        await self._call("label_weights")
        self.labels.append(version)

    def check_alive(self) -> None:
        if "check_alive" in self.fail:
            raise self.fail["check_alive"]

    async def health(self) -> None:
        await self._call("health")
