"""Sections about engines, and about bridges, which bring the trained weights to them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lachesis.config.section import BaseEngineConfig, CustomPart, NonNegativeFloat, PositiveInt, Section

Port = Annotated[int, Field(ge=1, le=65535)]
# Prefixes of engine.urls entries that stand for a set of servers, which may change.
SERVERS_DNS, SERVERS_FILE = "dns+", "file:"
HOST = r"^[A-Za-z0-9._:-]+$"
Host = Annotated[str, Field(pattern=HOST)]


# The default share of GPU memory for vLLM on the trainer's GPU, and on another GPU.
SHARED_GPU_UTILIZATION, OWN_GPU_UTILIZATION = 0.45, 0.9


class EmbeddedEngineConfig(BaseEngineConfig):
    """Generation with transformers in the trainer's process, on the trainer's own weights."""

    place = "trainer"
    kind: Literal["embedded"] = "embedded"
    max_batch_size: PositiveInt = Field(default=512, description="Maximum number of sequences decoded at once.")


class EmbeddedServerConfig(BaseEngineConfig):
    """The embedded engine in a server process that the run starts and stops."""

    place = "run"
    kind: Literal["embedded_server"] = "embedded_server"
    host: Host = Field(default="127.0.0.1", description="Address that the server binds to.")
    port: Port = Field(default=9001, description="Port that the server listens on.")
    max_batch_size: PositiveInt = Field(default=512, description="Maximum number of sequences decoded at once.")
    max_model_len: PositiveInt | None = Field(
        default=None, description="Longest prompt and completion together; the model's context if unset."
    )


class VllmEngineConfig(BaseEngineConfig):
    """A vLLM server that the run starts and stops."""

    place = "run"
    kind: Literal["vllm"] = "vllm"
    host: Host = Field(default="127.0.0.1", description="Address that the server binds to.")
    port: Port = Field(default=9001, description="Port that the server listens on.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="The engine's share of GPU memory. Unset: 0.9 on a separate GPU; on the trainer's 0.45, or what "
        "the trainer leaves free. Servers on one GPU divide it. On a CPU: share of the machine's memory.",
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="Longest prompt and completion together; the model's context if unset."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Dtype of the engine's weights; `auto` takes the trainer's."
    )
    tensor_parallel_size: PositiveInt = Field(default=1, description="GPUs that hold one copy of the model together.")
    data_parallel_size: PositiveInt = Field(
        default=1, description="Copies of the model that share the requests: servers on the ports from `port` on."
    )
    enforce_eager: bool = Field(
        default=False, description="Run without CUDA graphs: much slower, and needed by none of the bridges."
    )
    enable_sleep_mode: bool = Field(
        default=False,
        description="Free the engine's GPU memory while the trainer computes; weights that are not sent again move to "
        "host memory.",
    )
    quantization: Literal["none", "fp8"] = Field(
        default="none",
        description="`fp8`: the engine stores and multiplies linear layers in 8 bits, with one scale per output; the "
        "trainer's weights are unchanged, and updates are rounded on arrival.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto", description="`fp8`: an 8-bit key-value cache, which holds twice as many tokens."
    )
    devices: str | None = Field(
        default=None,
        description="CUDA_VISIBLE_DEVICES of the server. Unset: the trainer's GPU, or those of all ranks if the engine "
        "needs several. Copies of a model may share a GPU: `1,1` puts two on GPU 1.",
    )
    extra_args: list[str] = Field(default_factory=list, description="Further arguments to pass to `vllm serve`.")

    def servers_on_card(self, *, devices: int) -> int:
        """Return how many of the engine's servers share the GPU of a trainer with ``devices`` devices.

        If a single process trains and ``engine.devices`` is unset, all copies share its GPU.
        """
        return self.data_parallel_size if devices == 1 and self.devices is None else 1

    def usual_share(self, *, devices: int) -> float:
        """Return the default memory share of each server on a trainer's GPU, rounded to hundredths."""
        return math.floor(SHARED_GPU_UTILIZATION * 100 / self.servers_on_card(devices=devices)) / 100

    @property
    def flags(self) -> dict[str, str]:
        """Return the flags in ``extra_args`` as written, by flag name as in vLLM's help."""
        words = (word for word in self.extra_args if word.startswith("-"))
        return {word.partition("=")[0].replace("_", "-"): word for word in words}

    @property
    def servers_on_own_card(self) -> int:
        """Return the largest number of the engine's servers on any one of ``devices``."""
        named = [] if self.devices is None else [device.strip() for device in self.devices.split(",")]
        return max(Counter(named).values(), default=1)

    @property
    def own_share(self) -> float:
        """Return the default memory share of each server on a GPU without a trainer, rounded to hundredths."""
        return math.floor(OWN_GPU_UTILIZATION * 100 / self.servers_on_own_card) / 100

    @property
    def rounds(self) -> int:
        """Return how many of these two are in 8 bits: the weights, and the key-value cache.

        If above 0, the engine samples from a policy that differs from the trained one.
        """
        return (self.quantization != "none") + (self.kv_cache_dtype != "auto")


class HttpEngineConfig(BaseEngineConfig):
    """Servers that already run (`lachesis serve`), here or on other machines."""

    place = "elsewhere"
    kind: Literal["http"] = "http"
    urls: list[str] = Field(
        default=["http://127.0.0.1:9001"],
        min_length=1,
        description="Addresses of the servers, with or without `/v1`; requests go to the least busy one. "
        "`dns+http://NAME:PORT` stands for a server at each IP address of that name, `file:PATH` for the addresses in "
        "a file, one per line; both are looked up again before each transfer.",
    )
    wait_s: NonNegativeFloat = Field(
        default=0.0, description="How long to wait for servers that are not up yet, in seconds; 0 does not wait."
    )
    takeover: bool = Field(
        default=False, description="Use a server even if another run has claimed it; its weights are overwritten."
    )


class CustomEngineConfig(BaseEngineConfig):
    """A custom engine in the trainer's process, built around the trained model."""

    place = "trainer"
    kind: Literal["custom"] = "custom"
    function: CustomPart = Field(description="Import path or `FILE.py:NAME` of the engine's factory.")


EngineConfig = Annotated[
    EmbeddedEngineConfig | EmbeddedServerConfig | VllmEngineConfig | HttpEngineConfig | CustomEngineConfig,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True)
class BridgeCapabilities:
    """The properties of a bridge that constrain the rest of the configuration; known before anything is loaded.

    Args:
        adapter_only: the bridge can transfer adapters only.
        owns_engine: the bridge starts and stops the engine itself.
        shares_storage: the engine reads the trainer's own tensors, so an optimizer step needs no transfer.
    """

    adapter_only: bool = False
    owns_engine: bool = False
    shares_storage: bool = False


class BaseBridgeConfig(Section):
    """Base class of bridge sections."""

    capabilities: ClassVar[BridgeCapabilities] = BridgeCapabilities()
    proof: bool = Field(default=True, description="Prove after each update that the engine has the trainer's weights.")


class InProcessBridgeConfig(BaseBridgeConfig):
    """The engine generates with the trainer's own parameters: no transfer, but every update is proved."""

    capabilities = BridgeCapabilities(shares_storage=True)
    kind: Literal["in_process"] = "in_process"


class SharedBridgeConfig(BaseBridgeConfig):
    """Single copy: the trainer's parameters are the engine's own tensors, in another process."""

    capabilities = BridgeCapabilities(shares_storage=True)
    kind: Literal["shared_vllm"] = "shared_vllm"
    pause: Literal["keep", "drain", "abort"] = Field(
        default="keep",
        description="Requests in flight during an update: paused and continued afterwards, finished first, or aborted.",
    )
    config_path: str | None = Field(
        default=None,
        description="Path of the engine's vllm_bridge_config.json. Unset: searched for in $LOGDIR, the current "
        "directory and the default place.",
    )


class SavedBridgeConfig(BaseBridgeConfig):
    """Base class of bridges that save weights to disk for the engine to load."""

    every_steps: PositiveInt = Field(default=1, description="Transfer every N optimizer steps.")
    keep_last: PositiveInt = Field(default=1, description="Exported checkpoints to keep besides the one served.")


class LoraSwapBridgeConfig(SavedBridgeConfig):
    """The adapter is saved and swapped into the running engine."""

    capabilities = BridgeCapabilities(adapter_only=True)
    kind: Literal["lora_only"] = "lora_only"
    keep_last: PositiveInt = Field(default=2, description="Number of saved adapters kept; older ones are deleted.")
    share_base: bool = Field(
        default=False, description="Train on the engine's own base weights, so that the model is in memory only once."
    )


class ChannelBridgeConfig(BaseBridgeConfig):
    """Base class of bridges that send tensors directly into the engine."""

    every_steps: PositiveInt = Field(default=1, description="Transfer every N optimizer steps.")
    init_method: str | None = Field(
        default=None,
        description="Rendezvous address of trainer and engine, tcp://HOST:PORT; a free port if unset.",
    )
    transport: Literal["auto", "nccl", "gloo", "ipc"] = Field(
        default="auto",
        description="`nccl` between GPUs, `ipc` on the same GPU, `gloo` on CPU or for several servers on one GPU, "
        "which NCCL refuses; `auto` chooses by the devices.",
    )
    staging: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="Where the engine keeps an update until it is complete; `auto`: on the device if it has room.",
    )


class LoraBroadcastBridgeConfig(ChannelBridgeConfig):
    """LoRA tensors are sent directly into the engine, without the disk."""

    capabilities = BridgeCapabilities(adapter_only=True)
    kind: Literal["lora_nccl"] = "lora_nccl"
    share_base: bool = Field(
        default=False, description="Train on the engine's own base weights, so that the model is in memory only once."
    )


class BroadcastBridgeConfig(ChannelBridgeConfig):
    """All weights, with LoRA merged into them, are sent directly into the engine."""

    kind: Literal["broadcast"] = "broadcast"
    # More senders are not faster: an engine's node receives through its network cards, usually eight. Each sender
    # needs a communicator on every GPU of every engine.
    senders: int = Field(
        default=1,
        ge=1,
        le=8,
        description="Number of ranks that send at the same time, each a share of the weights. Two were tested over "
        "NCCL, with engines on two further GPUs; more over gloo. `ipc` needs one.",
    )


class RestartBridgeConfig(SavedBridgeConfig):
    """A checkpoint is written and the engine restarted on it."""

    capabilities = BridgeCapabilities(owns_engine=True)
    kind: Literal["none"] = "none"
    every_steps: PositiveInt = Field(default=3, description="Restart every N optimizer steps.")


class ReloadBridgeConfig(SavedBridgeConfig):
    """A checkpoint is written and loaded into the running engine."""

    kind: Literal["reload"] = "reload"


BridgeConfig = Annotated[
    InProcessBridgeConfig
    | SharedBridgeConfig
    | LoraSwapBridgeConfig
    | LoraBroadcastBridgeConfig
    | BroadcastBridgeConfig
    | RestartBridgeConfig
    | ReloadBridgeConfig,
    Field(discriminator="kind"),
]
