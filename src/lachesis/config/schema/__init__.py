"""The canonical configuration tree. Every key has a type, a default and a description of one sentence or a few.

Unknown keys are errors, and a configuration is immutable. Checks across sections are in :mod:`lachesis.config.rules`.
"""

# The imports here are the public names of the schema.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from lachesis.config.schema.engines import (
    OWN_GPU_UTILIZATION,
    SERVERS_DNS,
    SERVERS_FILE,
    BridgeCapabilities,
    BridgeConfig,
    BroadcastBridgeConfig,
    ChannelBridgeConfig,
    CustomEngineConfig,
    EmbeddedEngineConfig,
    EmbeddedServerConfig,
    EngineConfig,
    HttpEngineConfig,
    InProcessBridgeConfig,
    LoraBroadcastBridgeConfig,
    LoraSwapBridgeConfig,
    ReloadBridgeConfig,
    RestartBridgeConfig,
    SavedBridgeConfig,
    SharedBridgeConfig,
    VllmEngineConfig,
)
from lachesis.config.schema.model import (
    SPARING,
    Activations,
    AdapterConfig,
    LoraAdapterConfig,
    ModelConfig,
    NoAdapterConfig,
    RunConfig,
)
from lachesis.config.schema.process import (
    CheckpointConfig,
    DeadlinesConfig,
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
)
from lachesis.config.schema.rollouts import (
    DataConfig,
    DatasetConfig,
    LocalSourceConfig,
    MixedSourceConfig,
    PipelineConfig,
    RewardsConfig,
    SamplingConfig,
    SourceConfig,
)
from lachesis.config.schema.training import AlgorithmConfig, BatchConfig, OptimizerConfig, SftConfig, TeacherConfig
from lachesis.config.section import BaseEngineConfig, CustomPart, EpisodesSourceConfig, Section
from lachesis.plugins.atropos.section import ServicesConfig
from lachesis.plugins.environments.section import AgentSourceConfig, McpServerConfig

# The default of ``checkpoint.max_share`` if the trained weights are lost when the engine dies.
CHECKPOINT_SHARE = 0.02


class LachesisConfig(Section):
    """The whole configuration."""

    run: RunConfig
    model: ModelConfig
    adapter: AdapterConfig = Field(default_factory=NoAdapterConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    source: SourceConfig = Field(default_factory=LocalSourceConfig)
    sources: list[MixedSourceConfig] = Field(
        default_factory=list[MixedSourceConfig],
        description="Several sources in one run, each with its own `source`, `data` and `rewards`.",
    )
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    engine: EngineConfig = Field(default_factory=EmbeddedEngineConfig)
    bridge: BridgeConfig = Field(default_factory=InProcessBridgeConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    services: ServicesConfig = Field(default_factory=ServicesConfig)

    @model_validator(mode="after")
    def _corrected(self) -> Self:
        """Set an unset sampler correction if the sampler is 8-bit or older than the policy; DPPO needs none."""
        rounds = isinstance(self.engine, VllmEngineConfig) and self.engine.rounds > 0
        ahead = self.pipeline.async_prefetch and self.source.kind != "atropos"
        older = ahead and not self.algorithm.loss_type.startswith("dppo")  # DPPO's trust region is around the sampler
        if not (rounds or older) or "sampler_correction" in self.algorithm.model_fields_set:
            return self
        algorithm = self.algorithm.model_copy(update={"sampler_correction": "token_truncate"})
        algorithm.model_fields_set.discard("sampler_correction")  # not set by the user; a rule reports it in a note
        return self.model_copy(update={"algorithm": algorithm})

    @property
    def forgets_weights(self) -> bool:
        """Return True if a sleeping engine may drop its weights because every step sends all of them again."""
        if not isinstance(self.engine, VllmEngineConfig) or not self.engine.enable_sleep_mode:
            return False
        return not self.bridge.capabilities.adapter_only and getattr(self.bridge, "every_steps", 1) == 1

    @property
    def shares_weights(self) -> bool:
        """Return True if the trained weights, or the base under the adapter, belong to an engine in another process."""
        if self.bridge.kind == "lora_only" or self.bridge.kind == "lora_nccl":
            return self.bridge.share_base
        return self.bridge.kind == "shared_vllm"

    @property
    def sft_steps(self) -> int:
        """Return the number of supervised optimizer steps, which precede those of ``run.steps``."""
        return self.sft.steps if "sft" in self.run.stages else 0

    @property
    def checkpoint_interval(self) -> int:
        """Return the number of steps between resumable checkpoints; 0 means on stop only.

        ``every_epochs`` is ignored until ``with_steps`` has converted it to steps.
        """
        return self.checkpoint.every_steps or 0

    @property
    def checkpoint_share(self) -> float:
        """Return the share of the time that saving resumable checkpoints may take; 0 if a fixed interval decides."""
        checkpoint = self.checkpoint
        if checkpoint.every_steps is not None or checkpoint.every_epochs is not None:
            return 0.0
        if checkpoint.max_share is not None:
            return checkpoint.max_share
        # If the engine's process dies, memory that it shares with the trainer is lost.
        shared = self.bridge.capabilities.shares_storage or getattr(self.bridge, "share_base", False)
        return CHECKPOINT_SHARE if shared and self.engine.place != "trainer" else 0.0

    @property
    def saves_on_the_way(self) -> bool:
        """Return True if the run saves resumable checkpoints regularly, not only on stop."""
        by_time = self.checkpoint_share > 0
        return by_time or self.checkpoint_interval > 0 or self.checkpoint.every_epochs is not None
