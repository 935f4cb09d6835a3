"""Commands that serve until a signal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lachesis.cli.base import PASS_ON, Overrides, app, console, log_findings


@app.command("run-api")
def run_api(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8002,
    state_dir: Annotated[Path | None, typer.Option(help="Keep what is queued here, across restarts.")] = None,
    max_queued_tokens: Annotated[int | None, typer.Option(help="Answer 429 instead of queueing more tokens.")] = None,
    max_body_mb: Annotated[float, typer.Option(help="Refuse larger bodies, in MiB, before or after inflating.")] = 64.0,
    strict: Annotated[bool, typer.Option("--strict", help="Set aside groups that no trainer could use.")] = False,
    ack_timeout: Annotated[
        float, typer.Option(help="Seconds until an unacknowledged batch is handed out again.")
    ] = 600,
    env_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which an environment counts no more.")
    ] = 300,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer for texts on the dashboard.")] = None,
) -> None:
    """Serve the rollout API that Atropos environments push to and trainers pull from."""
    from lachesis.api.server import ServerOptions, serve

    options = ServerOptions(
        host=host,
        port=port,
        state_dir=state_dir,
        max_queued_tokens=max_queued_tokens,
        max_body_mb=max_body_mb,
        strict=strict,
        ack_timeout_s=ack_timeout,
        env_timeout_s=env_timeout,
        tokenizer=tokenizer,
    )
    serve(options, on_ready=lambda url: console.print(f"rollout API at {url}, dashboard at {url}/dashboard"))


@app.command(context_settings=PASS_ON)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Directory or hub id of the model.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 9001,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    engine: Annotated[Literal["vllm", "embedded"], typer.Option(help="What generates.")] = "vllm",
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, if it is not the model's own.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16, float32 or auto.")] = None,
    device: Annotated[str | None, typer.Option(help="Of the embedded engine: cpu, cuda or cuda:N.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and completion together.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most completions at the same time.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of the GPU memory for vLLM.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="GPUs that hold one copy together.")] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs: slower.")] = False,
    enable_lora: Annotated[bool, typer.Option("--enable-lora", help="Let adapters be loaded.")] = False,
    max_lora_rank: Annotated[int | None, typer.Option(help="Largest rank of an adapter.")] = None,
    adapter_root: Annotated[
        list[Path] | None,
        typer.Option(help="Adapters and checkpoints load from inside here only; may be repeated. [default: .]"),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
) -> None:
    """Serve a model for rollouts, so that trainers can change its weights.

    Any further flag is handed on to `vllm serve`. Routes that change weights need the token of the session, which
    clients of the same user on this machine find by themselves.
    """
    from lachesis.run import serve as serving

    options = serving.ServeOptions(
        model=model,
        engine=engine,
        host=host,
        port=port,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=enforce_eager,
        enable_lora=enable_lora,
        max_lora_rank=max_lora_rank,
        adapter_roots=tuple(adapter_root or ()),
        served_model_name=served_model_name,
        arguments=tuple(context.args),
    )
    serving.serve(options, on_ready=console.print)


@app.command("vllm-serve", context_settings=PASS_ON)
def vllm_serve(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML file of a run, in our keys, Axolotl's or TRL's.")],
    overrides: Overrides = None,
    engine: Annotated[
        Literal["vllm", "embedded"] | None, typer.Option(help="What generates, instead of what the file says.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on, instead of the file's.")
    ] = None,
) -> None:
    """Serve the model of a run, as its configuration says: its sections model, engine and vllm.

    Any further flag is handed on to `vllm serve`.
    """
    from lachesis.run import serve as serving

    options, loaded = serving.config_options(
        config, overrides=overrides or [], served_by=engine, port=port, arguments=context.args
    )
    log_findings(loaded.findings)
    serving.serve(options, on_ready=console.print)
