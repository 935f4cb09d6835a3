"""vLLM's engine behind our routes: the implementation of :class:`~lachesis.engines.serving.backend.EngineBackend`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_json

from lachesis.common.errors import EngineError, LachesisError, StaleWeights
from lachesis.engines.base import PauseMode
from lachesis.engines.receiver import end_this_process
from lachesis.engines.serving.backend import (
    AdapterStatus,
    DigestRequest,
    MemoryPart,
    ModelInfo,
    ReceiverSpec,
    ReceiverStatus,
    TensorInfo,
)
from lachesis.engines.serving.bodies import Refused
from lachesis.engines.serving.generation import POLICY, GenerateBody, GenerateChunk, GenerateResult
from lachesis.engines.serving.session import Session
from lachesis.engines.vllm import compat
from lachesis.engines.vllm.cuts import add_workers
from lachesis.engines.vllm.gate import Gate
from lachesis.engines.vllm.logprobs import FetchedLogprobs
from lachesis.engines.vllm.lora_slots import ADAPTER_ID
from lachesis.engines.vllm.requests import Generator, engine_is_dead
from lachesis.engines.vllm.routed_experts import returns_routes
from lachesis.engines.vllm.worker import read_answer
from lachesis.transport.bridge_file import BRIDGE_FILE, BridgeFile, write_bridge_file
from lachesis.transport.shared_tensors import SharedTensor

logger = logging.getLogger(__name__)

_FIRST_POLL_S, _LAST_POLL_S = 0.01, 0.2
# An update of 8 billion parameters arrives about 10 ms later, so the first poll is short.
_ARRIVAL_S, _FIRST_LOOK_S = 0.05, 0.003
# Seconds between checks that the engine is alive, during calls that wait for it.
_LOOK_S = 0.5

T = TypeVar("T")


class VllmBackend:
    """A running vLLM, in one server process.

    Args:
        engine: vLLM's ``EngineClient``.
        model: the served model; ``served_names`` are the names that requests may use.
        session: the server's session, which goes into the bridge file.
    """

    def __init__(self, engine: Any, *, model: str, served_names: Sequence[str], session: Session) -> None:
        config = engine.vllm_config
        self._engine = engine
        self._session = session
        self._model = model
        self._lora_config = config.lora_config
        self.lora_request: Any = None
        if self._lora_config is not None:
            # The path is never read: the id is registered as long as the engine lives.
            self.lora_request = compat.LoRARequest(lora_name=POLICY, lora_int_id=ADAPTER_ID, lora_path="in-memory")
        self._generator = Generator(
            engine,
            lora_request=self.lora_request,
            max_model_len=config.model_config.max_model_len,
            caches_prefixes=config.cache_config.enable_prefix_caching,
        )
        self._served_names = tuple(served_names)
        self._device = "unknown"
        self._adapter: AdapterStatus | None = None
        self._receiver = ReceiverStatus()
        self._watching: asyncio.Task[None] | None = None
        self._gate = Gate(engine)
        self._unusable = ""
        self._cache_epoch = 0
        self._cache_is_stale = False
        self._emptying: asyncio.Task[None] | None = None  # asyncio keeps only weak references to tasks
        self.sampling_fields = compat.sampling_fields()
        self.kind = compat.engine_kind()

    @property
    def takes_images(self) -> bool:
        """Return True if the model is one for images and text."""
        return bool(self._engine.model_config.is_multimodal_model)

    async def start(self) -> None:
        """Prepare the workers. Call it before the first request.

        Raises:
            Refused: the engine's parallelism does not allow changes of weights, or it uses speculative decoding.
        """
        if self._engine.vllm_config.speculative_config is not None:
            raise Refused(
                "--speculative-config is not supported: logprobs of guessed tokens may differ from the model's",
                remedy="leave out --speculative-config",
            )
        parallel = self._engine.vllm_config.parallel_config
        for flag, size in (
            ("--data-parallel-size", parallel.data_parallel_size),
            ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ):
            if size > 1:
                raise Refused(
                    f"{flag} is {size}, but weight updates need one engine whose workers each hold all layers",
                    remedy="start one server for each GPU and name all servers, or use --tensor-parallel-size",
                )
        compat.fix_variables()
        installed = await self._call("install", server=os.getpid())
        self._device = installed["device"]
        if installed["keeps_logprobs"]:
            self._generator.fetch_logprobs(FetchedLogprobs(partial(self._call, "take_logprobs")))

    def model_info(self) -> ModelInfo:
        config = self._engine.vllm_config
        return ModelInfo(
            model=self._model,
            served_names=self._served_names,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            vocab_size=config.model_config.get_vocab_size(),
            max_model_len=config.model_config.max_model_len,
            tensor_parallel_size=config.parallel_config.tensor_parallel_size,
            device=self._device,
            lora_enabled=self._lora_config is not None,
            max_lora_rank=self._lora_config.max_lora_rank if self._lora_config is not None else 0,
            quantization=config.model_config.quantization or "none",
            kv_cache_dtype=config.cache_config.cache_dtype,
        )

    # Generation.

    async def wait_until_running(self) -> None:
        """Wait until the engine is neither paused nor asleep. Raise EngineError if it cannot serve any more."""
        self._check_usable()
        if not self._gate.is_open:
            await self._answered(self._gate.wait())
            self._check_usable()

    def generated_tokens(self) -> int | None:
        return compat.generated_tokens()

    async def generate(self, request: GenerateBody) -> GenerateResult:
        if request.routed_experts and not returns_routes(self._engine.vllm_config):
            raise Refused(
                "this server does not report the experts that it used",
                status=422,
                remedy="start it with --enable-return-routed-experts, which takes a mixture of experts, or set "
                "algorithm.router_replay: false",
            )
        await self.wait_until_running()
        return await self._generator.generate(request, cache_salt=self.cache_salt)

    async def stream(self, request: GenerateBody) -> AsyncGenerator[GenerateChunk]:
        await self.wait_until_running()
        async with aclosing(self._generator.stream(request, cache_salt=self.cache_salt)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def canary(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        self._check_usable()
        return await self._answered(self._read_canary(token_ids))

    async def _read_canary(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        async with self._gate.running():
            return await self._generator.canary(token_ids, cache_salt=self.cache_salt)

    async def cached_tokens(self, token_ids: Sequence[int]) -> int:
        config = self._engine.vllm_config
        length = config.cache_config.block_size + 1  # only whole blocks are cached, and never the last token
        if not config.cache_config.enable_prefix_caching or length >= config.model_config.max_model_len:
            return 0
        self._check_usable()
        # Rotated by one, so that it shares no prefix with a real prompt.
        probe = tuple(islice(cycle((*token_ids[1:], token_ids[0])), length))
        async with self._gate.running():
            return await self._answered(self._generator.cached_tokens(probe, cache_salt=self.cache_salt))

    # Weights.

    async def digests(self, request: DigestRequest) -> dict[str, int]:
        if self._engine.vllm_config.parallel_config.tensor_parallel_size == 1:
            return await self._call("digests", request=request)
        return add_workers(await self._call_all("digest_parts", request=request))

    async def state_dict_info(self) -> dict[str, TensorInfo]:
        found = await self._call("state_dict_info")
        return {name: TensorInfo(tuple(info["shape"]), info["dtype"], info["device"]) for name, info in found.items()}

    async def load_adapter(self, *, name: str, path: Path) -> None:
        self._gate.refuse_asleep("no adapter is loaded", without=("weights",))
        spec = await self._call("load_adapter", path=str(path), name=name)
        self._adapter = AdapterStatus(name=name, rank=spec["r"], alpha=spec["alpha"], path=path)

    async def unload_adapter(self, *, name: str) -> None:
        if self._adapter is None or self._adapter.name != name:
            current = f"the active one is {self._adapter.name!r}" if self._adapter else "none is active"
            raise Refused(f"there is no adapter {name!r}; {current}", status=404, remedy="name the active one")
        await self._call("clear_adapter")
        self._adapter = None

    def adapter(self) -> AdapterStatus | None:
        return self._adapter

    async def reload(self, path: Path) -> None:
        self._gate.refuse_asleep("no weights are loaded", without=("weights",))
        await self._change_base("reload", path=str(path))

    async def export_shared(self, path: Path) -> None:
        handles = await self._call("export")
        described = self.model_info()
        bridge = BridgeFile(
            model=described.model,
            session_id=self._session.session_id,
            url=self._session.url,
            pid=self._session.pid,
            engine=self.kind,
            tensors={name: SharedTensor.from_json(name, entry) for name, entry in handles.items()},
            tp_degree=described.tensor_parallel_size,
        )
        await asyncio.to_thread(write_bridge_file, path / BRIDGE_FILE if path.is_dir() else path, bridge)

    # The channel.

    async def start_receiver(self, spec: ReceiverSpec) -> None:
        status = await self._call("start_receiver", spec=spec)
        self._receiver = ReceiverStatus(status["state"], status["detail"], spec)
        self._watching = asyncio.ensure_future(self._watch_receiver())

    def receiver(self) -> ReceiverStatus:
        return self._receiver

    async def receive(self) -> None:
        self._gate.refuse_asleep("no weights are received", without=("weights",))
        if self._receiver.spec is None:
            raise Refused("no receiver was started", status=409, remedy="start one with /nccl/start_receiver")
        try:
            received = await self._receive()
        except BaseException as error:
            if isinstance(error, EngineError) and self._engine.errored:
                end_this_process()  # a dead engine's session never returns
            await self._update_receiver()
            raise
        self._receiver = replace(self._receiver, updates=received["updates"], copied=received["copied"])
        lora = received["lora"]
        if lora is not None:
            self._adapter = AdapterStatus(name=lora["name"], rank=lora["r"], alpha=lora["alpha"])

    async def stop_receiver(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
            self._watching = None
        await self._call("stop_receiver")
        self._receiver = ReceiverStatus()

    # Pausing.

    async def pause(self, mode: PauseMode) -> None:
        await self._answered(self._gate.pause(mode))

    async def resume(self) -> None:
        await self._answered(self._gate.resume())

    async def is_paused(self) -> bool:
        return self._gate.paused

    async def sleep(self, level: int) -> None:
        on_cpu = self._device.startswith("cpu")  # without sleep mode vLLM would stop generating but free nothing
        if not on_cpu and not self._engine.vllm_config.model_config.enable_sleep_mode:
            raise Refused("this server has no sleep mode", status=409, remedy="start it with --enable-sleep-mode")
        if level == 2 and not on_cpu and self._lora_config is not None and not compat.can_reload_under_lora():
            raise Refused(
                f"{self.kind} with LoRA cannot reload the weights that sleep at level 2 discards",
                status=409,
                remedy="use sleep at level 1, which keeps the weights in CPU memory",
            )
        if await self._answered(self._gate.sleep(level)) and level == 2 and not on_cpu:
            self._unusable = "the engine has no weights since it slept at level 2"

    async def wake_up(self, tags: Sequence[MemoryPart]) -> None:
        if self._gate.sleeping:
            await self._call("make_room")
        await self._answered(self._gate.wake_up(tags, lambda: self._call("refresh")))

    async def is_sleeping(self) -> bool:
        return self._gate.sleeping

    # The prefix cache.

    @property
    def cache_salt(self) -> str:
        """Return the salt that every request carries: blocks of the prefix cache match only under their own salt."""
        return f"weights-{self._cache_epoch}"

    async def reset_prefix_cache(self) -> None:
        """Prevent new requests from reading cache entries of old weights.

        vLLM can empty the cache only if no request is in flight, or by recomputing requests in flight. New requests get
        a new salt instead, and those in flight keep their cache. Emptying is started without waiting for it, because it
        may take a step of the requests in flight.
        """
        self._cache_epoch += 1
        self._cache_is_stale = True
        self._emptying = asyncio.ensure_future(self._try_to_empty_cache())
        if self._engine.model_config.is_multimodal_model:
            await self._answered(self._engine.reset_encoder_cache())

    async def label_weights(self, version: int) -> None:
        if compat.LABELS_TOKENS:
            await self._answered(self._engine.update_weight_version(str(version)))

    async def _try_to_empty_cache(self) -> None:
        epoch = self._cache_epoch
        try:
            emptied = await self._answered(self._engine.reset_prefix_cache())
        except LachesisError as error:  # the engine is dead, which the next call reports
            logger.warning("the prefix cache could not be emptied: %s", error.message)
            return
        if epoch == self._cache_epoch:
            self._cache_is_stale = not emptied

    async def empty_stale_cache(self) -> None:
        """Empty the cache, for requests that cannot have a salt; requests in flight are recomputed."""
        if self._cache_is_stale:
            await self._answered(self._engine.reset_prefix_cache(reset_running_requests=True))
            self._cache_is_stale = False

    def check_alive(self) -> None:
        if self._engine.errored:
            raise engine_is_dead(self._engine.dead_error)

    async def health(self) -> None:
        self.check_alive()
        self._check_usable()
        await self._answered(self._engine.check_health())

    async def _answered(self, call: Awaitable[T]) -> T:
        """Await the engine's answer. Raise EngineUnreachable if it dies meanwhile, because vLLM would never return."""
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((answer,), timeout=_LOOK_S))[0]:
                self.check_alive()
            return answer.result()
        except compat.EngineDeadError as error:
            raise engine_is_dead(error) from error
        finally:
            answer.cancel()

    def _check_usable(self) -> None:
        if self._unusable:
            raise EngineError(self._unusable, remedy="reload weights (/bridge/reload) or restart the server")

    async def _change_base(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method on all workers that may replace the base weights, and drop the adapter if it did."""
        try:
            answers = await self._call_all(method, **arguments)
        except StaleWeights as error:
            self._unusable, self._adapter = error.message, None
            raise
        if method == "reload" or (answers[0]["loaded"] and answers[0]["lora"] is None):
            self._unusable, self._adapter = "", None
        return answers

    async def _receive(self) -> Any:
        """Wait until an update has arrived on all workers, then let all of them load it between two steps.

        It is worth pausing the engine for an update that arrives at once, but not for a trainer that still gathers.
        """
        alone = self._engine.vllm_config.parallel_config.tensor_parallel_size == 1
        wait_s, pause = _ARRIVAL_S, _FIRST_LOOK_S
        while True:
            answers = await self._change_base("receive", wait_s=wait_s, load=alone)
            if answers[0]["loaded"]:
                return answers[0]
            if all(answer["arrived"] for answer in answers):
                return (await self._change_base("receive", wait_s=0.0, load=True))[0]
            await asyncio.sleep(pause)
            wait_s, pause = 0.0, min(_LAST_POLL_S, 1.5 * pause)

    async def _watch_receiver(self) -> None:
        pause = _FIRST_POLL_S
        while self._receiver.state == "connecting":
            await asyncio.sleep(pause)
            pause = min(_LAST_POLL_S, 2 * pause)
            await self._update_receiver()

    async def _update_receiver(self) -> None:
        """Set the receiver's state to that of the worker in the worst state."""
        try:
            every = await self._call_all("receiver")
        except LachesisError as error:
            self._receiver = replace(self._receiver, state="error", detail=str(error))
            return
        order = ("connected", "idle", "connecting", "error")
        worst = max(every, key=lambda status: order.index(status["state"]))
        self._receiver = replace(self._receiver, **worst)

    async def _call(self, method: str, **arguments: Any) -> Any:
        """Call all workers, and return the first worker's answer once all have answered without an error."""
        return (await self._call_all(method, **arguments))[0]

    async def _call_all(self, method: str, **arguments: Any) -> list[Any]:
        try:
            answers = await self._answered(
                self._engine.collective_rpc("lachesis_call", args=(method, to_json(arguments).decode()))
            )
        except LachesisError:
            raise
        except Exception as error:
            raise EngineError(
                f"vLLM's workers could not be called: {type(error).__name__}: {error}",
                remedy="look at the server's log",
            ) from error
        return [read_answer(text) for text in answers]
