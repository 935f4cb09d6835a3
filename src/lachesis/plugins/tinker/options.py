"""Options of the server: each field is a flag of ``lachesis tinker-server``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TinkerOptions(BaseModel):
    """Options that say which model to train adapters on, how, and where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Directory or hub id of the base model.")
    name: str | None = Field(default=None, description="Name that clients use for it; unset: --model.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8010, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    dir: Path = Field(default=Path("tinker"), description="Directory of checkpoints.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Device of the model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Number format of the base weights; auto: the checkpoint's, or float32 on the CPU."
    )
    max_model_len: int | None = Field(default=None, ge=1, description="Longest sequence; unset: the model's own.")
    max_num_seqs: int = Field(default=64, ge=1, description="Most completions at the same time.")
    max_tokens_per_microbatch: int = Field(
        default=8192, ge=1, description="Most tokens in one forward pass; lower it if memory is short."
    )
    max_lora_rank: int = Field(default=256, ge=1, description="Largest rank of an adapter that clients may ask for.")
    engine: tuple[str, ...] = Field(
        default=(),
        description="Address of a vLLM server that samples from the same model, with --enable-lora; may be repeated. "
        "Unset: this process samples.",
    )
    unembed: Literal["asked", "never"] = Field(
        default="asked",
        description="When to make adapters of the output layer. vLLM does not serve them: with --engine and `asked`, "
        "this process samples for the runs that ask for one.",
    )
    clients: Path | None = Field(
        default=None, description="TOML file with a table for each client: key_variable, max_runs, max_lora_rank."
    )
    seed: int | None = Field(default=None, description="Seed of adapters and samples for which clients give none.")
    session_timeout: float = Field(
        default=3600.0, ge=1, description="Seconds of silence after which a client's runs are forgotten."
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host name that requests may use, besides addresses and this machine's own; may be repeated.",
    )
