"""Sections about engines and bridges, the ways of the weights to them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lachesis.config.section import BaseEngineConfig, CustomPart, NonNegativeFloat, PositiveInt, Section

Port = Annotated[int, Field(ge=1, le=65535)]
# Entries of engine.urls that stand for several servers, and may stand for others later.
SERVERS_DNS, SERVERS_FILE = "dns+", "file:"
HOST = r"^[A-Za-z0-9._:-]+$"
Host = Annotated[str, Field(pattern=HOST)]


# The share of a GPU's memory for vLLM where that is the trainer's too, and where it is not.
SHARED_GPU_UTILIZATION, OWN_GPU_UTILIZATION = 0.45, 0.9


class EmbeddedEngineConfig(BaseEngineConfig):
    """Generation in the trainer's process with transformers, on the trainer's own weights."""

    place = "trainer"
    kind: Literal["embedded"] = "embedded"
    max_batch_size: PositiveInt = Field(default=512, description="Most sequences decoded at the same time.")


class EmbeddedServerConfig(BaseEngineConfig):
    """The embedded engine in a server process that the run starts and stops."""

    place = "run"
    kind: Literal["embedded_server"] = "embedded_server"
    host: Host = Field(default="127.0.0.1", description="Address that the server binds.")
    port: Port = Field(default=9001, description="Port that the server listens on.")
    max_batch_size: PositiveInt = Field(default=512, description="Most sequences decoded at the same time.")
    max_model_len: PositiveInt | None = Field(
        default=None, description="Longest prompt and completion together; the model's context if unset."
    )


class VllmEngineConfig(BaseEngineConfig):
    """A vLLM server that the run starts and stops."""

    place = "run"
    kind: Literal["vllm"] = "vllm"
    host: Host = Field(default="127.0.0.1", description="Address that the server binds.")
    port: Port = Field(default=9001, description="Port that the server listens on.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="The engine's share of the GPU memory. Unset: 0.9 on a separate GPU; on the trainer's 0.45, or "
        "what the trainer leaves. Servers on one GPU divide it. On a CPU it is a share of the machine's memory.",
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
        description="Free the engine's GPU memory while the trainer computes; weights that are not sent again wait in "
        "host memory.",
    )
    quantization: Literal["none", "fp8"] = Field(
        default="none",
        description="`fp8`: the engine holds and multiplies linear layers in 8 bits, each output with its own scale; "
        "the trainer's are unchanged, and its updates are rounded on arrival.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto", description="`fp8`: the engine's key-value cache in 8 bits, which holds twice as many tokens."
    )
    devices: str | None = Field(
        default=None,
        description="CUDA_VISIBLE_DEVICES of the server; if unset the trainer's, or those of all ranks if it needs "
        "several. Copies of a model may share a GPU: `1,1` puts two on it.",
    )
    extra_args: list[str] = Field(default_factory=list, description="Further arguments for `vllm serve`, unchanged.")

    def servers_on_card(self, *, devices: int) -> int:
        """Return how many of its servers share a card with a trainer of ``devices`` devices.

        These are all copies if a single process trains and ``engine.devices`` is unset.
        """
        return self.data_parallel_size if devices == 1 and self.devices is None else 1

    def usual_share(self, *, devices: int) -> float:
        """Return the default memory share of each server on a card of the trainer's, in whole hundredths."""
        return math.floor(SHARED_GPU_UTILIZATION * 100 / self.servers_on_card(devices=devices)) / 100

    @property
    def flags(self) -> dict[str, str]:
        """Return the words of ``extra_args`` that begin with a dash, by flag name as in vLLM's help."""
        words = (word for word in self.extra_args if word.startswith("-"))
        return {word.partition("=")[0].replace("_", "-"): word for word in words}

    @property
    def servers_on_own_card(self) -> int:
        """Return the largest number of its servers on one of ``devices``."""
        named = [] if self.devices is None else [device.strip() for device in self.devices.split(",")]
        return max(Counter(named).values(), default=1)

    @property
    def own_share(self) -> float:
        """Return the default memory share of each server on a card without the trainer, in whole hundredths."""
        return math.floor(OWN_GPU_UTILIZATION * 100 / self.servers_on_own_card) / 100

    @property
    def rounds(self) -> int:
        """Return how many of two parts compute in 8 bits: the weights, and the keys and values.

        Above 0 the engine samples from a policy that differs from the trained one.
        """
        return (self.quantization != "none") + (self.kv_cache_dtype != "auto")


class HttpEngineConfig(BaseEngineConfig):
    """Servers that already run (`lachesis serve`), here or on other machines."""

    place = "elsewhere"
    kind: Literal["http"] = "http"
    urls: list[str] = Field(
        default=["http://127.0.0.1:9001"],
        min_length=1,
        description="Their addresses, with or without `/v1`; requests go to the least busy. `dns+http://NAME:PORT` is "
        "a server at each address of that name, `file:PATH` one a line; both are looked up again before each "
        "transfer.",
    )
    wait_s: NonNegativeFloat = Field(
        default=0.0, description="Longest wait for servers that are not up yet, in seconds; 0 waits for none."
    )
    takeover: bool = Field(
        default=False, description="Use a server even if another run has claimed it; its weights are overwritten."
    )


class CustomEngineConfig(BaseEngineConfig):
    """A custom engine in the trainer's process, around the model that is trained."""

    place = "trainer"
    kind: Literal["custom"] = "custom"
    function: CustomPart = Field(description="Import path or `FILE.py:NAME` of its factory.")


EngineConfig = Annotated[
    EmbeddedEngineConfig | EmbeddedServerConfig | VllmEngineConfig | HttpEngineConfig | CustomEngineConfig,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True)
class BridgeCapabilities:
    """The properties of a bridge that the rest of the configuration has to fit, known before anything is loaded.

    Args:
        adapter_only: the bridge can transfer adapters only.
        owns_engine: the bridge starts and stops the engine itself.
        shares_storage: the engine reads the trainer's own tensors, so the optimizer step is the transfer.
    """

    adapter_only: bool = False
    owns_engine: bool = False
    shares_storage: bool = False


class BaseBridgeConfig(Section):
    """Keys that all bridges have."""

    capabilities: ClassVar[BridgeCapabilities] = BridgeCapabilities()
    proof: bool = Field(default=True, description="Prove after each update that the engine has the trainer's weights.")


class InProcessBridgeConfig(BaseBridgeConfig):
    """The engine generates with the trainer's own parameters: nothing is transferred, all is proved."""

    capabilities = BridgeCapabilities(shares_storage=True)
    kind: Literal["in_process"] = "in_process"


class SharedBridgeConfig(BaseBridgeConfig):
    """Single copy: the trainer's parameters are the engine's own tensors, in another process."""

    capabilities = BridgeCapabilities(shares_storage=True)
    kind: Literal["shared_vllm"] = "shared_vllm"
    pause: Literal["keep", "drain", "abort"] = Field(
        default="keep",
        description="Requests in flight during an update: continue afterwards, are finished first, or are ended.",
    )
    config_path: str | None = Field(
        default=None,
        description="The engine's vllm_bridge_config.json; unset: looked for in $LOGDIR, here and in the default "
        "place.",
    )


class SavedBridgeConfig(BaseBridgeConfig):
    """Keys of bridges that save weights for the engine to load."""

    every_steps: PositiveInt = Field(default=1, description="Transfer every N optimizer steps.")
    keep_last: PositiveInt = Field(default=1, description="Exported checkpoints kept besides the one being served.")


class LoraSwapBridgeConfig(SavedBridgeConfig):
    """The adapter is saved and swapped into the running engine."""

    capabilities = BridgeCapabilities(adapter_only=True)
    kind: Literal["lora_only"] = "lora_only"
    keep_last: PositiveInt = Field(default=2, description="Saved adapters kept; older ones are deleted.")
    share_base: bool = Field(
        default=False, description="Train on the engine's own base weights: the model is in memory once."
    )


class ChannelBridgeConfig(BaseBridgeConfig):
    """Keys of bridges that send tensors straight into the engine."""

    every_steps: PositiveInt = Field(default=1, description="Transfer every N optimizer steps.")
    init_method: str | None = Field(
        default=None,
        description="Where trainer and engine meet, tcp://HOST:PORT; a free port if unset.",
    )
    transport: Literal["auto", "nccl", "gloo", "ipc"] = Field(
        default="auto",
        description="`nccl` between GPUs, `ipc` on the same GPU, `gloo` on CPU, and for several servers that share "
        "one GPU, which NCCL refuses; `auto` looks at the devices.",
    )
    staging: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="Where the engine stages an incomplete update; `auto`: on the device if it has room.",
    )


class LoraBroadcastBridgeConfig(ChannelBridgeConfig):
    """LoRA tensors are sent straight into the engine, without the disk."""

    capabilities = BridgeCapabilities(adapter_only=True)
    kind: Literal["lora_nccl"] = "lora_nccl"
    share_base: bool = Field(
        default=False, description="Train on the engine's own base weights: the model is in memory once."
    )


class BroadcastBridgeConfig(ChannelBridgeConfig):
    """All weights (LoRA merged into them) are sent straight into the engine."""

    kind: Literal["broadcast"] = "broadcast"
    # More do not bring an engine its weights any sooner: its node takes them in by as many cards as it has, mostly
    # eight. Each takes a communicator on every GPU of every engine.
    senders: int = Field(
        default=1,
        ge=1,
        le=8,
        description="Ranks that send at the same time, each its share. Two have run over NCCL, with engines on two "
        "further GPUs; more over gloo. `ipc` needs one.",
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
