"""Tokens a second of one client of the Tinker server, and of several at once, sampling and training.

    PYTHONPATH=src python benchmarks/tenants.py [--tiny] [--model DIR] [--tenants 8] [--requests 64] [--tokens 256]
                                                [--rank 32] [--share 0.4] [--port 9601] [--out FILE.json]

Without ``--model`` it is a Qwen3 of 8B with random weights. vLLM's own server samples on the GPU that also holds the
trainer's copy of the base model. Either all requests are of one client with one adapter, or they are shared among
``--tenants`` clients, each with an adapter of its own, proved before its first sample. Training is passes over the same
number of tokens, of one run or of ``--tenants`` runs in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.plugins.tinker.engines import Engines
from lachesis.plugins.tinker.options import TinkerOptions
from lachesis.plugins.tinker.records import AdamStep, Datum, LoraShape, Pass, SampleRequest
from lachesis.plugins.tinker.sampling import Prepared, Sampler, Weights
from lachesis.plugins.tinker.server import load
from lachesis.plugins.tinker.training import Base, TrainingRun

QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 12288, "head_dim": 128, "tie_word_embeddings": False,
    "max_position_embeddings": 4096, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
TINY: dict[str, Any] = QWEN3_8B | {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
SAMPLES = 8
PROMPT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.4, help="of the card's memory for vLLM")
    parser.add_argument("--port", type=int, default=9601)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.tenants, arguments.requests, arguments.tokens, arguments.rank = 2, 4, 8, 4
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        model = arguments.model or random_model(place / "model", TINY if arguments.tiny else QWEN3_8B)
        result = measured(model, place, arguments)
    text = json.dumps(result)
    sys.stdout.write(f"{text}\n")
    if arguments.out:
        arguments.out.write_text(text)


def random_model(place: Path, shape: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(place)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    words = {f"t{number}": number for number in range(shape["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), eos_token="t0", pad_token="t0")
    tokenizer.save_pretrained(place)
    return place


def measured(model: Path, place: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    url = f"http://127.0.0.1:{arguments.port}"
    longest = PROMPT + arguments.tokens
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port",
        str(arguments.port), "--max-model-len", str(longest), "--enable-lora", "--max-loras",
        str(arguments.tenants), "--max-lora-rank", str(max(16, arguments.rank)), "--logprobs-mode",
        "processed_logprobs", "--gpu-memory-utilization", str(arguments.share),
    ]  # fmt: skip
    if arguments.tiny:
        command += ["--enforce-eager"]
    log = (arguments.out or place / "tenants").with_suffix(".vllm.log")
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env=os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_PLUGINS": ""},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(server, url, log)
        options = TinkerOptions(
            model=str(model), dir=place / "saved", engine=(url,), max_model_len=longest, max_num_seqs=8,
            max_tokens_per_microbatch=4096,
        )  # fmt: skip
        base, sampler, engines = load(options)
        assert engines is not None
        try:
            shapes = [LoraShape(rank=arguments.rank, seed=i, train_unembed=False) for i in range(arguments.tenants)]
            runs = [TrainingRun(base, shape) for shape in shapes]
            trained = training(base, runs, arguments)
            return (
                {"machine": machine(), "tenants": arguments.tenants, "rank": arguments.rank}
                | trained
                | sampling(engines, sampler, runs, arguments)
            )
        finally:
            engines.close()
    finally:
        server.terminate()
        server.wait(timeout=60)


def wait_for(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    while True:
        if server.poll() is not None:
            raise SystemExit(f"vLLM ended: {log.read_text()[-3000:]}")
        try:
            if httpx.get(f"{url}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(1)


def training(base: Base, runs: list[TrainingRun], arguments: argparse.Namespace) -> dict[str, float]:
    """Trained tokens a second: passes of 16 sequences and a step, of one run, and of all in turn."""
    random = np.random.default_rng(0)
    length = PROMPT + arguments.tokens - 1

    def passed(run: TrainingRun) -> int:
        data = [
            Datum(
                random.integers(2, base.vocab_size, length),
                random.integers(2, base.vocab_size, length),
                {"weights": np.full(length, 1e-3, np.float32)},
            )
            for _ in range(16)
        ]
        run.forward_backward(Pass(data=data, loss="cross_entropy"))
        run.step(AdamStep(learning_rate=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0))
        return 16 * length

    def rate(order: list[TrainingRun]) -> float:
        synchronize()
        started = time.perf_counter()
        tokens = sum(map(passed, order))
        synchronize()
        return tokens / (time.perf_counter() - started)

    rate(runs)  # optimizers' states, and kernels
    one, all_of_them = rate(runs[:1] * len(runs)), rate(runs)
    return {"train_one": one, "train_all": all_of_them, "train_share": all_of_them / one}


def sampling(
    engines: Engines, sampler: Sampler, runs: list[TrainingRun], arguments: argparse.Namespace
) -> dict[str, float]:
    """Sampled tokens a second by one client and by all, and the seconds until an adapter is proved."""
    weights = [
        Weights(f"run-{number}", lambda run=run: (run.shape, run.weights()), lambda: False)
        for number, run in enumerate(runs)
    ]
    random = np.random.default_rng(1)

    def prepare(one: Weights) -> Future[Prepared]:
        found: Future[Prepared] = Future()
        found.set_result(sampler.prepare(one, directory=engines.directory, canary=engines.canary.token_ids))
        return found

    def request(number: int, tokens: int) -> SampleRequest:
        prompt = tuple(int(token) for token in random.integers(2, 90, PROMPT))
        params = SamplingParams(max_tokens=tokens)
        return SampleRequest(generation=GenerationRequest(prompt_ids=prompt, params=params, n=SAMPLES, seed=number))

    def rate(order: list[Weights]) -> float:
        started = time.perf_counter()
        found = [
            engines.submit(order[number % len(order)], request(number, arguments.tokens), prepare=prepare)
            for number in range(arguments.requests)
        ]
        tokens = sum(len(one.token_ids) for future in found for one in future.result().completions)
        return tokens / (time.perf_counter() - started)

    started = time.perf_counter()
    for one in weights:
        engines.submit(one, request(0, 1), prepare=prepare).result()
    proof_s = (time.perf_counter() - started) / len(weights)
    rate(weights)
    one, all_of_them = rate(weights[:1]), rate(weights)
    again = rate(weights[:1])
    return {
        "sample_one": max(one, again),
        "sample_all": all_of_them,
        "sample_share": all_of_them / max(one, again),
        "proved_in_s": proof_s,
        "worst_difference": max(server.worst for server in engines.servers),
    }


def machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
