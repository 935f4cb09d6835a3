"""How fast weights reach vLLM, what decoding costs meanwhile, and what memory it takes: each bridge, side by side.

    PYTHONPATH=src python benchmarks/bridges.py [--tiny] [--two-gpus] [--only NAME ...] [--port N] [--out FILE.json]

The model is the architecture of Llama 3.1 8B with random bf16 weights (deviation 0.02; embeddings 1, and what a layer
adds to the residual stream 15 % of it, as in trained models), written once to ``--model-dir``. Stock vLLM (``vllm
serve``, nothing of ours loaded) and our server answer the same requests over the same route, ``/v1/completions``: 64
tokens of prompt, 256 new tokens, 1, 64 and 256 at a time.

Every part runs in a process of its own, so that none inherits memory of another. ``--tiny`` runs the same code with a
small model and few tokens, on the CPU if there is no GPU. The exit code is 1 where a part failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from architectures import LLAMA_3_1_8B
from needs_gpu import require_gpu
from transformers import LlamaConfig, LlamaForCausalLM

from lachesis.bridges.fleet_proof import FleetProof
from lachesis.bridges.proof import NO_DIGESTS
from lachesis.common.deadline import Deadline
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.config.load import load_config
from lachesis.config.schema import LachesisConfig
from lachesis.engines.http.client import HttpEngine
from lachesis.process.managed import ManagedProcess
from lachesis.run.context import EngineSide, RunPlace
from lachesis.run.parts import build_policy
from lachesis.run.servers import build_servers
from lachesis.train.policy import Policy

PORT = 9101
PROMPT_TOKENS = 64
START_S = 420.0
LORA = {"kind": "lora", "r": 16, "alpha": 32, "targets": "all-linear"}
NO_LORA = {"kind": "none"}

# name: bridge section, adapter section, extra flags of the server
BRIDGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared_vllm": ({"kind": "shared_vllm"}, NO_LORA),
    "lora_only": ({"kind": "lora_only"}, LORA),
    "lora_only, share_base": ({"kind": "lora_only", "share_base": True}, LORA),
    "lora_nccl": ({"kind": "lora_nccl"}, LORA),
    "broadcast": ({"kind": "broadcast"}, NO_LORA),
    "broadcast, by the host": ({"kind": "broadcast", "staging": "host"}, NO_LORA),
    "broadcast, sleeping": ({"kind": "broadcast"}, NO_LORA),
    "reload": ({"kind": "reload"}, NO_LORA),
    "none (restart)": ({"kind": "none", "every_steps": 1}, NO_LORA),
}
CPU_FLAGS = ["--enforce-eager", "--no-enable-chunked-prefill"]
# name: what the engine has beyond the defaults
ENGINE_OPTIONS = {"broadcast, sleeping": {"enable_sleep_mode": True}}
STOCK = {"stock vLLM": False, "stock vLLM, its own LoRA": True}
SLOW = {
    "reload": 3,
    "none (restart)": 1,
    "broadcast": 10,
    "broadcast, by the host": 10,
    "broadcast, sleeping": 20,
}
TWO_GPUS = ("lora_nccl", "broadcast", "broadcast, by the host")


def make_model(directory: Path, *, tiny: bool) -> None:
    """Write the model and a tokenizer whose ids it knows."""
    from tests.tiny import tiny_tokenizer

    size: dict[str, Any] = dict(LLAMA_3_1_8B)
    if tiny:
        size |= {
            "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        }  # fmt: skip
    config = LlamaConfig(
        **size, max_position_embeddings=8192, rms_norm_eps=1e-5,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # As in trained models, a layer adds a fraction of what is there (about 15 %): it does not replace it.
            if "embed_tokens" in name:
                parameter.div_(config.initializer_range)
            elif "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.07)
    model.save_pretrained(directory, max_shard_size="4GB")
    tiny_tokenizer().save_pretrained(directory)


def configuration(
    name: str, model: Path, *, devices: str | None, port: int = PORT, eager: bool = False
) -> LachesisConfig:
    bridge, adapter = BRIDGES[name]
    tree = {
        "run": {"steps": 1, "name": "bridges", "dir": str(model.parent / "runs")},
        "model": {"path": str(model), "compile": "off", "dtype": "bfloat16"},
        "adapter": adapter,
        "data": {"path": __file__},
        "rewards": {"functions": ["a.b"]},
        "engine": {
            "kind": "vllm", "port": port, "max_model_len": 1024, "devices": devices,
            "gpu_memory_utilization": 0.4, "enforce_eager": eager,
            "extra_args": ["--max-num-seqs", "256", *(CPU_FLAGS if not torch.cuda.is_available() else [])],
            **ENGINE_OPTIONS.get(name, {}),
        },
        "bridge": bridge,
        # Nothing is learned here: the cheapest optimizer in memory.
        "optimizer": {"kind": "adafactor" if adapter == NO_LORA else "adamw", "weight_update": "plain"},
        "deadlines": {"sync_s": 300, "engine_start_s": START_S},
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(tree, file)
        file.flush()
        return load_config(file.name).config


@contextmanager
def stock_server(model: Path, adapter: Path | None, *, port: int, log: Path) -> Iterator[str]:
    """vLLM's own server without anything of ours; the name of the model to ask for."""
    code = (
        "import importlib,sys;"
        "c=importlib.import_module('vllm.entrypoints.cli.serve').ServeSubcommand();"
        "p=importlib.import_module('vllm.utils.argparse_utils').FlexibleArgumentParser(prog='vllm');"
        "c.subparser_init(p.add_subparsers(required=True,dest='subparser'));"
        "a=p.parse_args(['serve',*sys.argv[1:]]);c.validate(a);c.cmd(a)"
    )
    arguments = [
        str(model), "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--dtype", "bfloat16",
        "--gpu-memory-utilization", "0.4", "--max-num-seqs", "256",
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    arguments += CPU_FLAGS if not torch.cuda.is_available() else []
    if adapter is not None:
        arguments += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "16", "--lora-modules", f"a={adapter}"]
    process = ManagedProcess([sys.executable, "-c", code, *arguments], url=f"http://127.0.0.1:{port}", log_path=log)
    process.start(deadline=Deadline("the start of stock vLLM", START_S))
    try:
        yield "a" if adapter is not None else str(model)
    finally:
        process.stop()


def decode_rates(model: str, arguments: argparse.Namespace) -> dict[int, float]:
    """New tokens a second by number of requests at a time: median of the repeats after one that warms up."""
    url, tokens = f"http://127.0.0.1:{arguments.port}/v1/completions", arguments.tokens
    source = random.Random(0)
    rates = {}
    with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        def complete(prompt: Sequence[int]) -> int:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
            reply = client.post(url, json=body)
            reply.raise_for_status()
            return reply.json()["usage"]["completion_tokens"]

        for number in arguments.in_flight:
            found = []
            with ThreadPoolExecutor(number) as pool:
                for _ in range(1 + arguments.repeats):
                    prompts = drawn_prompts(number, source, arguments)
                    started = time.perf_counter()
                    completed = sum(pool.map(complete, prompts))
                    found.append(completed / (time.perf_counter() - started))
            rates[number] = statistics.median(found[1:])
    return rates


def change(policy: Policy) -> None:
    """Stands for an optimizer step: every trained tensor changes a little, as learning changes it."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=2e-4)
    if policy.device.type == "cuda":
        torch.cuda.synchronize()


def drawn_prompts(count: int, source: random.Random, arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    known = 512 if arguments.tiny else LLAMA_3_1_8B["vocab_size"]
    return [tuple(source.randrange(10, known) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


def logprob_difference(policy: Policy, side: EngineSide, arguments: argparse.Namespace) -> tuple[float, float]:
    """Mean and largest absolute difference of the logprobs of 32 sampled completions of 64 tokens, or ``--tokens``."""
    prompts = drawn_prompts(32, random.Random(1), arguments)
    params = SamplingParams(min(64, arguments.tokens))
    requests = [GenerationRequest(prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    completions = side.bridge.engine.generate(requests, deadline=Deadline("generation", 300))
    differences = []
    for prompt, (completion,) in zip(prompts, completions, strict=True):
        ours = policy.canary([*prompt, *completion.token_ids])[len(prompt) - 1 :]
        differences += [abs(a - b) for a, b in zip(ours, completion.logprobs, strict=True)]
    return statistics.fmean(differences), max(differences)


def memory_gb() -> float | None:
    """Memory in use on the first GPU, by all processes."""
    if not torch.cuda.is_available():
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) / 1024


def measure_bridge(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    devices = "1" if arguments.two_gpus else None
    config = configuration(name, arguments.model_dir, devices=devices, port=arguments.port, eager=arguments.eager)
    place = RunPlace(
        directory=Path(config.run.dir) / "bridges", engine_log=arguments.logs / f"{slug(name)}.log", owner="benchmark"
    )
    place.directory.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"name": name, "kind": "bridge"}
    started = time.perf_counter()
    with ExitStack() as closing:
        side = build_servers(config, place=place)
        closing.callback(side.close)
        result["engine start s"] = time.perf_counter() - started
        result["memory, engine alone"] = memory_gb()
        policy = side.bridge.prepare(partial(build_policy, config, weights=side.weights))
        gc.collect()
        result["memory, with trainer"] = memory_gb()
        side.bridge.sync(0)
        result["first sync s"] = report(side)
        updates = min(SLOW.get(name, 20), arguments.updates)
        result["logprobs before"] = logprob_difference(policy, side, arguments)
        timed = []
        cycles: list[tuple[float, float]] = []
        for version in range(1, updates + 1):
            side.bridge.rest()
            if version == 1:
                result["memory, engine asleep"] = memory_gb()
            with side.bridge.update_to(version):
                change(policy)
            timed.append(report(side))
            last = side.bridge.last_report
            if last is not None and last.sleep_seconds is not None and last.wake_seconds is not None:
                cycles.append((last.sleep_seconds, last.wake_seconds))
            if version == 10:
                result["logprobs after ten"] = logprob_difference(policy, side, arguments)
        result |= spread("sync s", [seconds for seconds, _ in timed]) | spread("proof s", [proof for _, proof in timed])
        result |= spread("falling asleep s", [asleep for asleep, _ in cycles])
        result |= spread("waking up s", [awake for _, awake in cycles])
        result["proof parts s"] = proof_parts(side)
        result["memory, after"] = memory_gb()
        result["updates"] = updates
        if name not in SLOW:
            result["busy"] = under_load(policy, side, arguments, first=updates + 1)
            result["decode"] = decode_rates(str(arguments.model_dir), arguments)
        result["logprobs at the end"] = logprob_difference(policy, side, arguments)
    return result


def proof_parts(side: EngineSide) -> dict[str, float]:
    """What the proof asks, one thing after the other."""
    fleet, engine = side.bridge.proof, side.bridge.engine
    assert isinstance(fleet, FleetProof) and isinstance(engine, HttpEngine)
    proof = fleet.of(engine.living[0])
    calls = {
        "trainer canary": lambda: proof.trainer(proof.token_ids()),
        "engine canary": lambda: proof.engine(proof.token_ids(), NO_DIGESTS),
        "trainer digests": proof.trainer_digests,
        "engine canary and digests": lambda: proof.ask_engine(proof.token_ids()),
    }
    found = {}
    for name, call in calls.items():
        started = time.perf_counter()
        call()
        found[name] = time.perf_counter() - started
    return found


def under_load(policy: Policy, side: EngineSide, arguments: argparse.Namespace, *, first: int) -> dict[str, Any]:
    """Updates while 64 requests are being decoded: their seconds, and how many requests were lost (none)."""
    prompts = drawn_prompts(64, random.Random(2), arguments)
    params = SamplingParams(2 * arguments.tokens, extra={"ignore_eos": True})
    requests = [GenerationRequest(prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(side.bridge.engine.generate, requests, deadline=Deadline("generation", 300))
        timed, version = [], first
        while not generating.done() and len(timed) < 20:
            with side.bridge.update_to(version):
                change(policy)
            timed.append(report(side))
            version += 1
        completions = generating.result()
    spans = [completion.versions for (completion,) in completions]
    return (
        spread("sync s", [seconds for seconds, _ in timed])
        | spread("proof s", [proof for _, proof in timed])
        | {
            "updates": len(timed),
            "requests": len(spans),
            "complete": sum(len(completion.token_ids) == params.max_tokens for (completion,) in completions),
            "straddled an update": sum(span.first < span.last for span in spans),
        }
    )


def report(side: EngineSide) -> tuple[float, float]:
    last = side.bridge.last_report
    assert last is not None
    return last.seconds, last.proof_seconds


def spread(name: str, values: list[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}, worst": max(values)} if values else {}


def measure_stock(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    adapter = make_adapter(arguments) if STOCK[name] else None
    log = arguments.logs / f"{slug(name)}.log"
    with stock_server(arguments.model_dir, adapter, port=arguments.port, log=log) as model:
        memory = memory_gb()
        rates = decode_rates(model, arguments)
    return {"name": name, "kind": "stock", "memory, engine alone": memory, "decode": rates}


def make_adapter(arguments: argparse.Namespace) -> Path:
    """An all-linear adapter of rank 16 with weights that do something, as peft saves it."""
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from lachesis.bridges.model_files import adapter_config, save_adapter

    path = arguments.model_dir.parent / "adapter"
    if path.exists():
        return path
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model_dir))
        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    torch.manual_seed(1)
    tensors = {
        name.removeprefix("base_model.model.").replace(".default", ""): torch.randn(p.shape, dtype=torch.bfloat16)
        * 0.01
        for name, p in model.named_parameters()
        if "lora_" in name
    }
    path.mkdir()
    save_adapter(path, tensors=tensors, config=adapter_config(model))
    return path


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--two-gpus", action="store_true", help="engine on GPU 1, trainer on GPU 0")
    parser.add_argument(
        "--eager", action="store_true", help="vLLM without CUDA graphs, which starts sooner: for transfers"
    )
    parser.add_argument("--only", nargs="*", default=None, help="parts by name; all if left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=20, help="at most so many of a bridge; slow ones have fewer")
    parser.add_argument("--in-flight", type=int, nargs="+", default=None, help="so many requests at a time")
    parser.add_argument("--tokens", type=int, default=None, help="new tokens of a request")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "lachesis-bridges" / "model")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "lachesis-bridges" / "logs")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    require_gpu(tiny=arguments.tiny)
    arguments.logs.mkdir(parents=True, exist_ok=True)
    arguments.tokens = arguments.tokens or (32 if arguments.tiny else 256)
    arguments.in_flight = arguments.in_flight or ([1, 64] if arguments.tiny else [1, 64, 256])
    if arguments.part is not None:
        measure = measure_stock if arguments.part in STOCK else measure_bridge
        arguments.out.write_text(json.dumps(measure(arguments.part, arguments)))
        return
    if not (arguments.model_dir / "config.json").exists():
        started = time.perf_counter()
        make_model(arguments.model_dir, tiny=arguments.tiny)
        torch.cuda.empty_cache()  # parts have the GPU to themselves
        say(f"model written in {time.perf_counter() - started:.0f} s")
    parts = [*STOCK, *BRIDGES] if not arguments.two_gpus else list(TWO_GPUS)
    results = [run_part(part, arguments) for part in parts if arguments.only is None or part in arguments.only]
    sys.stdout.write(table(results, in_flight=arguments.in_flight))
    if any("failed" in result for result in results):
        sys.exit(1)


def run_part(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own; a failure is part of the result."""
    started = time.perf_counter()
    out = arguments.logs / f"{slug(name)}.json"
    out.unlink(missing_ok=True)
    # Of options that are given twice the later one counts.
    command = [sys.executable, __file__, *sys.argv[1:], "--part", name, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0 and out.exists():
        result = json.loads(out.read_text())
    else:
        result: dict[str, Any] = {"name": name, "failed": done.stderr.strip()[-2000:]}
    result["part s"] = time.perf_counter() - started
    say(json.dumps(result))
    if arguments.out is not None:
        with arguments.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return result


def table(results: list[dict[str, Any]], *, in_flight: list[int]) -> str:
    """Markdown."""

    def milliseconds(result: dict[str, Any], name: str) -> str:
        return f"{1000 * result[name]:.1f} (worst {1000 * result[f'{name}, worst']:.1f})" if name in result else ""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = [
        f"| | decode {' / '.join(map(str, in_flight))}, tokens/s | sync, ms | proof, ms | logprob difference, mean "
        "| engine alone, GB | with trainer, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if "failed" in result:
            lines.append(f"| {result['name']} | failed | | | | | |")
            continue
        decode = result.get("decode", {})
        rates = " / ".join(f"{rate:,.0f}" for rate in decode.values())
        probs = result.get("logprobs after ten") or result.get("logprobs at the end")
        lines.append(
            f"| {result['name']} | {rates} | {milliseconds(result, 'sync s')} | {milliseconds(result, 'proof s')} "
            f"| {number(probs[0] if probs else None, '.4f')} | {number(result.get('memory, engine alone'), '.1f')} "
            f"| {number(result.get('memory, with trainer'), '.1f')} |"
        )
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%d %B %Y')}"
    return "\n".join(lines) + f"\n\n{versions}\n"


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
