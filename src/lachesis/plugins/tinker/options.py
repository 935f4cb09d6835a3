"""Options of the server: each field is a flag of ``lachesis tinker-server``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TinkerOptions(BaseModel):
    """Options that say which model to train adapters on, how, and where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Directory or hub id of the base model.")
    name: str | None = Field(default=None, description="What clients call it, if not as --model does.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8010, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    dir: Path = Field(default=Path("tinker"), description="Where checkpoints are kept.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the model lives.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Of the base weights; auto is the checkpoint's, and float32 on the CPU."
    )
    max_model_len: int | None = Field(default=None, ge=1, description="Longest sequence; unset: the model's own.")
    max_num_seqs: int = Field(default=64, ge=1, description="Most completions at the same time.")
    max_tokens_per_microbatch: int = Field(
        default=8192, ge=1, description="Most tokens in one forward pass; lower it where memory is short."
    )
    max_lora_rank: int = Field(default=256, ge=1, description="Largest rank of an adapter that clients may ask for.")
    engine: tuple[str, ...] = Field(
        default=(),
        description="Address of a vLLM server of the same model that samples, with --enable-lora; may be repeated. "
        "Without, this process samples.",
    )
    unembed: Literal["asked", "never"] = Field(
        default="asked",
        description="Whether adapters of the output layer are made. vLLM does not serve them: with --engine and "
        "`asked`, runs of clients that ask for one are sampled by this process.",
    )
    clients: Path | None = Field(
        default=None, description="TOML file with a table for each client: key_variable, max_runs, max_lora_rank."
    )
    seed: int | None = Field(default=None, description="Of adapters and samples for which clients give no seed.")
    session_timeout: float = Field(
        default=3600.0, ge=1, description="Seconds of silence after which a client's runs are forgotten."
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host name that requests may use, besides addresses and this machine's own; may be repeated.",
    )
