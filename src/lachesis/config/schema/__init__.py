"""The canonical configuration tree. Every key has a type, a default and one sentence that says what it does.

Unknown keys are errors; a configuration never changes after it was read. Checks that span sections are in
:mod:`lachesis.config.rules`.
"""

from __future__ import annotations

from pydantic import Field

from lachesis.config.schema.base import Section
from lachesis.config.schema.engines import (
    BridgeConfig,
    BroadcastBridge,
    EmbeddedEngineConfig,
    EmbeddedServerConfig,
    EngineConfig,
    HttpEngineConfig,
    InProcessBridge,
    LoraBroadcastBridge,
    LoraRestartBridge,
    LoraSwapBridge,
    ReloadBridge,
    RestartBridge,
    SharedBridge,
    VllmEngineConfig,
)
from lachesis.config.schema.model import AdapterConfig, LoraAdapter, ModelConfig, NoAdapter, RunConfig
from lachesis.config.schema.pipeline import PipelineConfig
from lachesis.config.schema.process import (
    CheckpointConfig,
    DeadlinesConfig,
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
    WandbConfig,
)
from lachesis.config.schema.rollouts import (
    AtroposSource,
    DataConfig,
    DatasetConfig,
    LocalSource,
    RewardsConfig,
    SamplingConfig,
    SourceConfig,
)
from lachesis.config.schema.services import ApiServiceConfig, EnvironmentServiceConfig, ServicesConfig
from lachesis.config.schema.training import AlgorithmConfig, BatchConfig, OptimizerConfig

__all__ = [
    "AdapterConfig",
    "AlgorithmConfig",
    "ApiServiceConfig",
    "AtroposSource",
    "BatchConfig",
    "BridgeConfig",
    "BroadcastBridge",
    "CheckpointConfig",
    "DataConfig",
    "DatasetConfig",
    "DeadlinesConfig",
    "DistributedConfig",
    "EmbeddedEngineConfig",
    "EmbeddedServerConfig",
    "EngineConfig",
    "EnvironmentServiceConfig",
    "EvaluationConfig",
    "HttpEngineConfig",
    "InProcessBridge",
    "LachesisConfig",
    "LocalSource",
    "LoggingConfig",
    "LoraAdapter",
    "LoraBroadcastBridge",
    "LoraRestartBridge",
    "LoraSwapBridge",
    "ModelConfig",
    "NoAdapter",
    "OptimizerConfig",
    "PipelineConfig",
    "ReloadBridge",
    "RestartBridge",
    "RewardsConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "ServicesConfig",
    "SharedBridge",
    "SourceConfig",
    "VllmEngineConfig",
    "WandbConfig",
]


class LachesisConfig(Section):
    """The whole configuration."""

    run: RunConfig
    model: ModelConfig
    adapter: AdapterConfig = Field(default_factory=NoAdapter)
    data: DataConfig = Field(default_factory=DataConfig)
    source: SourceConfig = Field(default_factory=LocalSource)
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    engine: EngineConfig = Field(default_factory=EmbeddedEngineConfig)
    bridge: BridgeConfig = Field(default_factory=InProcessBridge)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    services: ServicesConfig = Field(default_factory=ServicesConfig)
