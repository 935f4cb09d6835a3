"""Options of an inference server: each field is a flag of ``lachesis serve``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lachesis.common.http import server_url

EngineName = Literal["vllm", "embedded"]
_FLAGS = {"adapter_roots": "adapter_root", "allowed_hosts": "allowed_host"}
_FLAGS |= {name: name.removesuffix("_s") for name in ("ack_timeout_s", "env_timeout_s")}


class ServeOptions(BaseModel):
    """The options of a server: which model to serve, how and where. ``None`` leaves the choice to the engine.

    ``arguments`` is not a flag: its words are passed to ``vllm serve`` unchanged.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Directory or hub id of the model.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a model on the hub.")
    engine: EngineName = Field(default="vllm", description="The engine that generates.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=9001, ge=0, le=65535, description="Port to listen on.")
    tokenizer: str | None = Field(default=None, description="Tokenizer, if it is not the model's own.")
    dtype: str | None = Field(default=None, description="bfloat16, float16, float32 or auto.")
    device: str | None = Field(default=None, description="Device of the embedded engine: cpu, cuda or cuda:N.")
    max_model_len: int | None = Field(default=None, description="Maximum tokens of prompt and completion together.")
    max_num_seqs: int | None = Field(default=None, description="Maximum number of completions at the same time.")
    gpu_memory_utilization: float | None = Field(default=None, description="Share of the GPU memory for vLLM.")
    tensor_parallel_size: int | None = Field(default=None, description="GPUs that hold one copy of the model together.")
    enforce_eager: bool = Field(default=False, description="Run without CUDA graphs: slower.")
    enable_lora: bool = Field(default=False, description="Let adapters be loaded.")
    max_lora_rank: int | None = Field(default=None, description="Largest rank of an adapter.")
    served_model_name: str | None = Field(default=None, description="Name of the model for clients.")
    adapter_roots: tuple[Path, ...] = Field(
        default=(),
        description="Directory from which adapters and checkpoints may load; may be repeated. [default: .]",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host name that requests may use besides IP addresses and this machine's; may be repeated.",
    )
    arguments: tuple[str, ...] = Field(default=(), exclude=True)

    @property
    def url(self) -> str:
        """Return the address of the server for clients on this machine."""
        return server_url(f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}")

    def command_line(self, *, without: Collection[str] = ()) -> list[str]:
        """Return the options as command-line flags, except for the fields ``without``; ``arguments`` come last."""
        return [*command_line(self.model_dump(exclude=set(without))), *self.arguments]


def flag_of(field: str) -> str:
    """Return the flag of a field: ``--max-model-len`` for ``max_model_len``; plurals and units are dropped."""
    return "--" + _FLAGS.get(field, field).replace("_", "-")


def command_line(values: Mapping[str, Any]) -> list[str]:
    """Return flags named by fields: None and False omit a flag, True gives it no value, a tuple repeats it."""
    words: list[str] = []
    for field, value in values.items():
        if value is True:
            words.append(flag_of(field))
        elif value is not None and value is not False:
            for one in value if isinstance(value, tuple) else (value,):
                words += [flag_of(field), str(one)]
    return words
