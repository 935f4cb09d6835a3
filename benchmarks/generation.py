"""How fast tokens with their logprobs reach the trainer, beside vLLM in one process.

    PYTHONPATH=src python benchmarks/generation.py [--size 1.5B|8B] [--tiny] [--in-flight N ...] [--out FILE.json]
        [--prompt N] [--tokens N] [--quantization fp8] [--kv-cache-dtype fp8]
        [--temperature T] [--port N] [--profile] [--model-dir DIR --problems FILE.jsonl] [--engines N]

All generate the same: sequences of equal length (128 tokens of prompt, 8 completions a prompt, 512 new tokens), with a
model of random bf16 weights. ``--model-dir`` and ``--problems`` take a pretrained model and prompts in its chat
template instead, and then completions end where the model ends them, or at ``--tokens``. ``--engines`` adds rows of
several engines on the same GPU, each with its share of the prompts, on both sides.

"In process" is ``vllm.LLM.generate``; with logprobs they are of the distribution sampled from
(``processed_logprobs``), as training needs them. "Our server" is ``lachesis vllm-serve`` asked by the trainer's
client, from another process; what it answers are token ids, logprobs and weight versions. Requests have seeds, except
in the row without: vLLM draws the noise of each seeded sequence by itself, our server that of all at once.

``--profile`` says as well where the time of decode steps goes, kernel by kernel, in vLLM in one process, in 8 bits
where ``--quantization`` or ``--kv-cache-dtype`` say so (kernel_times.py; on a GPU).

Each engine runs in a process of its own. "Busy" is the share of one core that the busiest process took besides the
GPU: near 1.0 it is Python that sets the speed. Where completions are short (`--tokens 6`) it is the work for each
request that counts: `cpu_s` in the results has the seconds of CPU that each process took for a round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import torch
from architectures import LLAMA_3_1_8B, QWEN2_5_1_5B
from kernel_times import kernels_in
from kernel_times import table as kernel_table
from needs_gpu import require_gpu

from lachesis.common.deadline import Deadline
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.engines.http.client import HttpEngine
from lachesis.process.managed import ManagedProcess, launch_together, wait_together

PORT = 9111
COMPLETIONS = 8
START_S = 420.0
# Share of the GPU's memory for an engine alone; several say the size of their caches, so that it is not measured.
MEMORY, CACHE_BYTES = 0.85, 8_000_000_000
SIZES = {"1.5B": ("qwen2", QWEN2_5_1_5B), "8B": ("llama", LLAMA_3_1_8B)}
# name: fields of vLLM's SamplingParams
IN_PROCESS: dict[str, dict[str, Any]] = {
    "in process, without logprobs": {"detokenize": False},
    "in process, without logprobs or seeds": {"detokenize": False, "seed": None},
    "in process, without logprobs, with text": {},
    "in process, logprobs": {"logprobs": 0},
    "in process, logprobs, no text": {"logprobs": 0, "detokenize": False},
    "in process, flat logprobs, no text": {"logprobs": 0, "detokenize": False, "flat_logprobs": True},
}
SERVER = "our server"
MATCH = "in process, without logprobs"
# By the values of --quantization and --kv-cache-dtype, as engine.quantization and engine.kv_cache_dtype have them.
FLAGS = {"fp8": ["--quantization", "fp8_per_channel"], "fp8 cache": ["--kv-cache-dtype", "fp8"]}
# Of --profile: decode steps, and how many there are before, with the prefill.
PROFILED, SKIPPED = 32, 64


def make_model(directory: Path, *, size: str, tiny: bool) -> None:
    """Write a model with random weights and a tokenizer that knows its first ids."""
    from tests.tiny import tiny_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = SIZES[size]
    if tiny:
        fields = fields | {
            "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        }  # fmt: skip
    config = AutoConfig.for_model(
        kind, **fields, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="4GB")
    tiny_tokenizer().save_pretrained(directory)


class Busy:
    """Seconds of CPU of every process below this one, by what it is."""

    def __init__(self) -> None:
        self._before = self._read()
        self._started = time.perf_counter()

    def share(self) -> dict[str, float]:
        """CPU seconds a second since the start, of those that took a tenth of a core or more."""
        seconds = time.perf_counter() - self._started
        shares = {name: taken / seconds for name, taken in self._taken().items()}
        return {name.partition(" ")[2]: round(share, 2) for name, share in shares.items() if share >= 0.1}

    def each(self, rounds: int) -> dict[str, float]:
        """CPU seconds a round since the start, of those that took a hundredth of one or more."""
        each = {name: round(taken / rounds, 3) for name, taken in self._taken().items()}
        return {name: seconds for name, seconds in each.items() if seconds >= 0.01}

    def _taken(self) -> dict[str, float]:
        return {name: now - self._before.get(name, 0.0) for name, now in self._read().items()}

    @staticmethod
    def _read() -> dict[str, float]:
        me = psutil.Process()
        found = {}
        for process in [me, *me.children(recursive=True)]:
            try:
                times = process.cpu_times()
                name = "this process" if process.pid == me.pid else (process.cmdline() or [process.name()])[0]
            except psutil.Error:
                continue
            found[f"{process.pid} {name[:40]}"] = times.user + times.system
        return found


def measure(
    generate: Callable[[list[list[int]], int, int], int], arguments: argparse.Namespace
) -> dict[int, dict[str, Any]]:
    """New tokens a second by sequences in flight: median of the repeats, after a short one that warms up.

    Args:
        generate: completes prompts, so many times each, with so many tokens; returns how many there were.
        arguments: of the command.
    """
    source = random.Random(0)
    found: dict[int, dict[str, Any]] = {}
    for number in arguments.in_flight:
        each = min(number, COMPLETIONS)
        rates: list[float] = []
        all_rounds = Busy()
        for repeat in range(1 + arguments.repeats):
            length = arguments.tokens if repeat else min(32, arguments.tokens)
            prompts = [[source.randrange(10, 500) for _ in range(arguments.prompt)] for _ in range(number // each)]
            if repeat == 1:
                all_rounds = Busy()
            busy = Busy()
            if arguments.problems is not None:
                prompts = drawn(arguments, count=number // each, source=source)
            started = time.perf_counter()
            tokens = generate(prompts, each, length)
            rates.append(tokens / (time.perf_counter() - started))
            if repeat == arguments.repeats:
                found[number] = {
                    "rate": statistics.median(rates[1:]), "all": rates, "busy": busy.share(),
                    "cpu_s": all_rounds.each(arguments.repeats),
                }  # fmt: skip
    return found


@cache
def encoded(problems: Path, model: Path) -> list[list[int]]:
    """Return the prompts of a file of problems, as token ids in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [
        tokenizer.apply_chat_template(json.loads(line)["prompt"], tokenize=False, add_generation_prompt=True)
        for line in problems.read_text().splitlines()
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def drawn(arguments: argparse.Namespace, *, count: int, source: random.Random) -> list[list[int]]:
    return source.choices(encoded(arguments.problems, arguments.model_dir), k=count)


def started(arguments: argparse.Namespace, **options: Any) -> Any:
    """vLLM in this process."""
    import vllm

    return vllm.LLM(
        str(arguments.model_dir), dtype="bfloat16", max_model_len=1024, max_num_seqs=1024, seed=0,
        logprobs_mode="processed_logprobs", enforce_eager=not torch.cuda.is_available(),
        disable_log_stats=True, **{"gpu_memory_utilization": MEMORY, **options},
    )  # fmt: skip


def generated(llm: Any, prompts: list[list[int]], each: int, length: int, **fields: Any) -> int:
    """Complete the prompts; the tokens that there were."""
    import vllm

    params = vllm.SamplingParams(n=each, max_tokens=length, **{"seed": 1, **fields})
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return sum(len(one.token_ids) for output in outputs for one in output.outputs)


def in_process(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    llm, results = started(arguments), list[dict[str, Any]]()
    for name, fields in IN_PROCESS.items():
        if arguments.only and name not in arguments.only:
            continue
        generate = partial(generated, llm, **sampled(arguments), **fields)
        results.append({"name": name, "rates": measure(generate, arguments)})
        sys.stderr.write(json.dumps(results[-1]) + "\n")
    return results


def sampled(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how all rows sample: of random weights no completion ends before its last token."""
    return {"temperature": arguments.temperature, "ignore_eos": arguments.problems is None}


def in_several_processes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of several engines, in a process each with its share of the prompts."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(arguments.engines)]
    workers = [spawn.Process(target=generate_for, args=(arguments, theirs)) for _, theirs in pipes]
    for worker in workers:
        worker.start()
    ours = [mine for mine, _ in pipes]
    results = list[dict[str, Any]]()
    try:
        for name, fields in several_in_process(arguments).items():

            def generate(prompts: list[list[int]], each: int, length: int, fields: dict[str, Any] = fields) -> int:
                for number, pipe in enumerate(ours):
                    pipe.send((prompts[number :: len(ours)], each, length, fields))
                return sum(pipe.recv() for pipe in ours)

            results.append({"name": name, "rates": measure(generate, arguments)})
    finally:
        for pipe in ours:
            pipe.send(None)
        for worker in workers:
            worker.join(30)
            worker.kill()
    return results


def generate_for(arguments: argparse.Namespace, pipe: Any) -> None:
    """Complete what comes through a pipe, until None does."""
    share = MEMORY / arguments.engines
    llm = started(arguments, kv_cache_memory_bytes=CACHE_BYTES, gpu_memory_utilization=share)
    while (work := pipe.recv()) is not None:
        prompts, each, length, fields = work
        pipe.send(generated(llm, prompts, each, length, **sampled(arguments), **fields))
    llm.llm_engine.engine_core.shutdown()  # else its processes are waited for when this one ends


def several_in_process(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the rows of several engines in processes of their own that are asked for, as IN_PROCESS has them."""
    rows = {f"{name}, {arguments.engines} engines": fields for name, fields in IN_PROCESS.items()}
    asked = {name: fields for name, fields in rows.items() if not arguments.only or name in arguments.only}
    return asked if arguments.engines > 1 else {}


def profiled(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """By sequences in flight: kernels of decode steps, as Markdown, and seconds of a step without a profiler."""
    directory = arguments.logs / "profile"
    shutil.rmtree(directory, ignore_errors=True)
    quantization = "fp8_per_channel" if arguments.quantization == "fp8" else None
    profiler = {
        "profiler": "torch", "torch_profiler_dir": str(directory.resolve()), "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False, "delay_iterations": SKIPPED, "max_iterations": PROFILED,
    }  # fmt: skip
    llm = started(
        arguments, profiler_config=profiler, quantization=quantization, kv_cache_dtype=arguments.kv_cache_dtype
    )
    results = []
    for number in arguments.in_flight:
        each = min(number, COMPLETIONS)
        prompts = [[10 + i % 400] * arguments.prompt for i in range(number // each)]
        length = SKIPPED + 2 * PROFILED
        times: list[float] = []
        for tokens in (length, SKIPPED, length):  # the first warms up; what the others differ by are decode steps alone
            begun = time.perf_counter()
            generated(llm, prompts, each, tokens, detokenize=False, temperature=arguments.temperature, ignore_eos=True)
            times.append(time.perf_counter() - begun)
        before = {*directory.rglob("*.json")}
        llm.start_profile()
        generated(llm, prompts, each, length, detokenize=False, temperature=arguments.temperature, ignore_eos=True)
        llm.stop_profile()
        traces = {*directory.rglob("*.json")} - before
        kernels, span = max((kernels_in(trace) for trace in traces), key=lambda found: len(found[0]))
        step = (times[2] - times[1]) / (length - SKIPPED)
        said = f"A decode step of {number} sequences takes {step * 1e3:.1f} ms without a profiler.\n\n"
        lines = kernel_table(kernels, seconds=span, what=f"{PROFILED} decode steps")
        results.append({"in_flight": number, "step_s": step, "lines": said + lines})
    return results


def server_rows(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Rows of the server, and the flags that make them: as the model is, then in 8 bits what is asked to be."""
    wanted = {"fp8": arguments.quantization == "fp8", "fp8 cache": arguments.kv_cache_dtype == "fp8"}
    asked = [name for name, there in wanted.items() if there]
    rows = {SERVER: arguments.server_flags}
    if asked:
        rows[f"{SERVER}, {' and '.join(asked)}"] = [
            *arguments.server_flags,
            *(f for name in asked for f in FLAGS[name]),
        ]
    if arguments.engines > 1:
        flags = [*arguments.server_flags, "--kv-cache-memory-bytes", str(CACHE_BYTES)]
        rows[f"{SERVER}, {arguments.engines} engines"] = flags
    return rows


def through_server(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [serve_row(name, flags, arguments) for name, flags in server_rows(arguments).items()]


def serve_row(name: str, flags: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    count = arguments.engines if name == f"{SERVER}, {arguments.engines} engines" else 1
    with ExitStack() as servers:
        begun = time.perf_counter()
        processes = {
            f"http://127.0.0.1:{port}": server(port, flags, arguments, share=MEMORY / count)
            for port in ports(arguments, count)
        }
        for process in processes.values():
            servers.callback(process.stop)
        launch_together(processes.values())
        wait_together(processes.values(), deadline=Deadline("the start of our server", START_S))
        start_s = time.perf_counter() - begun
        engine = servers.enter_context(closing(HttpEngine([*processes], max_in_flight=4096)))
        engine.connect(deadline=Deadline("asking our server", 60))

        def generate(prompts: list[list[int]], each: int, length: int) -> int:
            extra = {"ignore_eos": True} if arguments.problems is None else {}
            params = SamplingParams(length, temperature=arguments.temperature, extra=extra)
            requests = [GenerationRequest(tuple(p), params, n=each, seed=i) for i, p in enumerate(prompts)]
            groups = engine.generate(requests, deadline=Deadline("generation", 600))
            assert all(len(one.logprobs) == len(one.token_ids) for group in groups for one in group)
            return sum(len(one.token_ids) for group in groups for one in group)

        rates = measure(generate, arguments)
        return {"name": name, "rates": rates, "start_s": start_s}


def ports(arguments: argparse.Namespace, count: int) -> range:
    return range(arguments.port, arguments.port + count)


def server(port: int, flags: list[str], arguments: argparse.Namespace, *, share: float) -> ManagedProcess:
    command = [
        sys.executable, "-m", "lachesis.plugins.serving.vllm_launch", str(arguments.model_dir), "--port", str(port),
        "--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "1024",
        "--gpu-memory-utilization", f"{share:.2f}", *(["--enforce-eager"] if not torch.cuda.is_available() else []),
        *flags,
    ]  # fmt: skip
    return ManagedProcess(command, url=f"http://127.0.0.1:{port}", log_path=arguments.logs / f"server-{port}.log")


def table(results: list[dict[str, Any]], in_flight: list[int]) -> str:
    """Markdown: tokens a second, and the server's over those without logprobs."""
    rates = {
        result["name"]: {int(number): entry["rate"] for number, entry in result["rates"].items()} for result in results
    }
    lines = ["| tokens/s, in flight | " + " | ".join(map(str, in_flight)) + " |", "|---|" + "---|" * len(in_flight)]
    lines += [f"| {name} | " + " | ".join(f"{row[n]:,.0f}" for n in in_flight) + " |" for name, row in rates.items()]
    for name in [name for name in rates if name in (MATCH, *(f"{MATCH}, {n} engines" for n in range(2, 9)))]:
        ours = SERVER + name.removeprefix(MATCH)
        if ours in rates:
            ratios = [f"{rates[ours][n] / rates[name][n]:.2f}" for n in in_flight]
            lines.append(f"| {ours}, over {name} | " + " | ".join(ratios) + " |")
    for name in rates if SERVER in rates else ():
        if name.startswith(f"{SERVER}, "):
            ratios = [f"{rates[name][n] / rates[SERVER][n]:.2f}" for n in in_flight]
            lines.append(f"| {name}, over {SERVER} | " + " | ".join(ratios) + " |")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return "\n".join(lines) + f"\n\n{gpu}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], default="1.5B")
    parser.add_argument("--tiny", action="store_true", help="a small model, a few tokens; also on a CPU")
    parser.add_argument("--in-flight", type=int, nargs="+", default=None)
    parser.add_argument("--prompt", type=int, default=None, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=None, help="new tokens of a completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=None, help=f"rows, or none: {SERVER}, {', '.join(IN_PROCESS)}")
    parser.add_argument("--server-flags", nargs="*", default=[])
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none", help="one more row of the server")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="in that row")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true", help="where the time of decode steps goes, by kernels")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--model-dir", type=Path, default=None, help="a model in place of one with random weights")
    parser.add_argument("--problems", type=Path, default=None, help="JSON lines with messages under `prompt`")
    parser.add_argument("--engines", type=int, default=1, help="rows of so many engines on the GPU as well")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "lachesis-generation")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--part", choices=[*PARTS], default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = {*IN_PROCESS, *several_in_process(argparse.Namespace(only=None, engines=arguments.engines))}
    if unknown := set(arguments.only or ()) - {*known, *server_rows(arguments)}:
        parser.error(f"--only: there is no row {', '.join(sorted(unknown))}")
    if arguments.profile and not torch.cuda.is_available():
        parser.error("--profile is of kernels, and there is no GPU")
    require_gpu(tiny=arguments.tiny)
    arguments.logs.mkdir(parents=True, exist_ok=True)
    arguments.prompt = arguments.prompt or (16 if arguments.tiny else 128)
    arguments.tokens = arguments.tokens or (24 if arguments.tiny else 512)
    arguments.in_flight = arguments.in_flight or ([1, 64] if arguments.tiny else [1, 64, 256, 1024])
    arguments.model_dir = (
        arguments.model_dir or arguments.logs / f"model-{'tiny' if arguments.tiny else arguments.size}"
    )
    if arguments.part is not None:
        found = PARTS[arguments.part](arguments)
        arguments.out.write_text(json.dumps(found))
        return
    if not (arguments.model_dir / "config.json").exists():
        make_model(arguments.model_dir, size=arguments.size, tiny=arguments.tiny)
    results, profiles = list[dict[str, Any]](), list[dict[str, Any]]()
    rows = {"process": IN_PROCESS, "several": several_in_process(arguments), "server": server_rows(arguments)}
    for part, named in rows.items():
        names = [*named]
        if not names or (arguments.only is not None and not set(names) & set(arguments.only)):
            continue
        results += run_part(part, arguments)
        sys.stderr.write(json.dumps(results[-len(names) :]) + "\n")
    if arguments.profile:
        profiles = run_part("profile", arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results + profiles))
    if results:
        sys.stdout.write(table(results, arguments.in_flight))
    sys.stdout.writelines("\n" + one["lines"] for one in profiles)


PARTS = {
    "process": in_process, "several": in_several_processes, "server": through_server, "profile": profiled,
}  # fmt: skip


def run_part(part: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What this command finds in a process of its own; its log is beside the servers'."""
    out, log = arguments.logs / f"{part}.json", arguments.logs / f"{part}.log"
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--out", str(out)]
    command += ["--model-dir", str(arguments.model_dir)]
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment())
    if done.returncode:
        sys.exit(f"{part} failed:\n{log.read_text()[-3000:]}")
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def environment() -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}


if __name__ == "__main__":
    main()
