"""What an environment is started with: the sections ``env``, ``openai`` and ``slurm`` of its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lachesis.common.errors import ConfigError

ServerType = Literal["vllm", "openai"]


class Settings(BaseModel):
    """Immutable, and without unknown names. Texts of the command line become numbers and booleans."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class EnvironmentConfig(Settings):
    """``--env.*``: what every environment has. Environments add their own fields in a subclass."""

    group_size: int = Field(4, ge=1, description="completions of one problem, scored against each other")
    max_num: int | None = Field(None, ge=1, description="use only the first so many problems of the data")
    max_num_workers: int = Field(-1, ge=-1, description="most groups in the making; -1: as many as staleness allows")
    max_batches_offpolicy: int = Field(3, ge=1, description="most batches ahead of the trainer")
    max_token_length: int = Field(2048, ge=1, description="most tokens of a rollout, prompt included")
    max_new_tokens: int | None = Field(None, ge=1, description="most tokens of a completion; the rest if unset")
    temperature: float = Field(1.0, gt=0, description="at which rollouts are sampled; evaluation is greedy")
    tokenizer_name: str | None = Field(None, description="directory or hub id; that of the served model if unset")
    rollout_server_url: str = Field("http://localhost:8002", description="where the rollout API is")
    wandb_name: str | None = Field(None, description="what this environment is called; its kind if unset")
    use_wandb: bool = Field(False, description="log to Weights & Biases, into the trainer's project and group")
    log_dir: Path | None = Field(None, description="write metrics.jsonl here")
    inference_weight: float = Field(1.0, ge=0, description="share of requests beside other environments")
    min_batch_allocation: float | None = Field(None, ge=0, le=1, description="least share of every batch")
    total_steps: int = Field(-1, ge=-1, description="batches until it ends, groups of `process`; -1: the trainer's")
    steps_per_eval: int = Field(0, ge=0, description="evaluate every so many steps while serving; 0: never")
    eval_num: int = Field(256, ge=1, description="most held-out problems of an evaluation")
    ensure_scores_are_not_same: bool = Field(False, description="drop groups whose scores are all the same")
    include_messages: bool = Field(False, description="send the conversations as text too")
    data_path_to_save_groups: Path | None = Field(None, description="write every group to this JSONL file")
    data_dir_to_save_evals: Path | None = Field(None, description="write the results of evaluations here")
    worker_timeout: float = Field(600.0, gt=0, description="seconds after which a group in the making is given up")
    wait_timeout: float = Field(1800.0, gt=0, description="longest wait for the rollout API and the trainer, seconds")
    linger: float = Field(30.0, ge=0, description="seconds to go on once the trainer has taken all its batches")
    seed: int = Field(0, description="order of the problems")

    @field_validator("rollout_server_url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        parts = urlsplit(url.strip())
        _ = parts.port  # read for its ValueError: a port beyond 65535, or none at all
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it is no address of a rollout API, as http://127.0.0.1:8002")
        return url.strip().rstrip("/")


class ServerConfig(Settings):
    """``--openai.*``: the inference servers."""

    base_url: tuple[str, ...] = Field(
        ("http://localhost:9001",), min_length=1, description="with or without /v1; several separated by commas"
    )
    server_type: ServerType = Field("vllm", description="vllm: /generate; openai: /v1/completions with token ids")
    model_name: str | None = Field(None, description="what the model is called; the server's first if unset")
    api_key: str = Field("", description="sent as a bearer token; empty sends none")
    timeout: float = Field(1200.0, gt=0, description="longest wait for a completion, a restart included, in seconds")
    num_max_requests_at_once: int = Field(512, ge=1, description="most requests in flight")

    @field_validator("base_url", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value


class SlurmConfig(Settings):
    """``--slurm`` and ``--slurm.*``: a limit of the rate of requests."""

    enabled: bool = Field(False, description="only False: name the servers of the nodes in --openai.base_url")
    num_requests_per_time_interval: int | None = Field(None, ge=1, description="most requests begun in an interval")
    time_interval: float = Field(10.0, gt=0, description="length of that interval, in seconds")

    @field_validator("enabled")
    @classmethod
    def _not_enabled(cls, enabled: bool) -> bool:
        if enabled:
            raise ConfigError(
                "--slurm True: servers are not looked up in the job's node list",
                remedy="name them: --openai.base_url http://node1:9001,http://node2:9001",
            )
        return enabled
