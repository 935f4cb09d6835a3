"""Whole steps on a GPU, from prompts to new weights in the engine: `lachesis train` and TRL's GRPOTrainer in turn.

    PYTHONPATH=src python benchmarks/end_to_end.py [--only NAME ...] [--lengths equal|ragged] [--size SIZE] [--tiny]

Each system trains in a process of its own, started as its users start it, with vLLM on the same GPU, or on the one that
`--devices` names (TRL's asynchronous trainer: its server): the same model of random bf16 weights, 32 prompts of 128
tokens, 8 completions each, AdamW.
Equal completions have 512 tokens, which the end token does not cut short; ragged ones end where it is sampled, with a
probability that is the same at every token, or at 2,048 tokens.

`--model DIR` with `--problems FILE` (JSON lines with messages under `prompt`) takes a pretrained model instead, and at
most `--most` tokens: ragged completions then end where the model ends them.

`--size 30B-A3B` is a mixture of experts under an adapter, on the engine's own base weights, which vLLM draws by itself
(`--load-format dummy`): no file has them, and TRL has no part in it. A second table has tokens/s and the share of the
card's peak in forward and backward, by 6 FLOP for each parameter that a token goes through, as such shares are
published, and by the 4 that frozen weights take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import trl_async
import yaml
from architectures import LLAMA_3_1_8B, PEAK_BF16_FLOPS, QWEN2_5_1_5B, QWEN3_30B_A3B
from needs_gpu import require_gpu
from overlap import EOS, PAD, WORDS, favour_end, write_problems

PROMPTS, COMPLETIONS, PROMPT_TOKENS = 32, 8, 128
PROBLEM_TOKENS = 512  # of a prompt of --problems, at most
EQUAL, RAGGED_MOST, RAGGED_MEAN = 512, 2048, 400
# 61 GB of weights, and keys and values of 256 sequences (98 kB a token) beside them.
MIXTURE_ENGINE_SHARE = 0.62
LORA = {"kind": "lora", "r": 16, "alpha": 32, "targets": "all-linear"}
TRL_LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
ENGINE_START_S = 420
REWARD = """
def share_of_ones(completions, **columns):
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [text.count("1") / max(len(text), 1) for text in texts]
"""
MIXTURE = "30B-A3B"
# Room for adapters where this one has any, and not in the experts, whose kernels would compute with zeros.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
OURS, OURS_ASYNC, TRL, TRL_ASYNC = "Lachesis", "Lachesis, asynchronous", "TRL", "TRL, asynchronous"


@dataclass(frozen=True)
class Run:
    """What one system did. Seconds; ``steps`` has every step, the first one included."""

    name: str
    first_step: float  # from the command to the end of the first step
    steps: list[dict[str, float]]
    versions: dict[str, str]

    def median(self, key: str, *, skip: int) -> float:
        return statistics.median(step.get(key, 0.0) for step in self.steps[skip:])

    def mean_step(self, *, skip: int) -> float:
        """Where steps take turns, one that waits and one that has been waited for, no median is a step's price."""
        return statistics.mean(step["seconds"] for step in self.steps[skip:])


def sizes(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    kind, fields = {
        "1.5B": ("qwen2", QWEN2_5_1_5B),
        "8B": ("llama", LLAMA_3_1_8B),
        MIXTURE: ("qwen3_moe", QWEN3_30B_A3B),
    }[options.size]
    if options.tiny and options.size == MIXTURE:
        fields = fields | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    if options.tiny:
        fields = fields | {
            "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        }  # fmt: skip
    # Tied, the row that favours the end token would change what it means as an input.
    return kind, fields | ({"tie_word_embeddings": False} if options.lengths == "ragged" else {})


def write_model(directory: Path, *, options: argparse.Namespace) -> None:
    """Random weights, for ragged lengths such that the end token comes at times, and a tokenizer of a word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    kind, fields = sizes(options)
    config = AutoConfig.for_model(
        kind, **fields, max_position_embeddings=4096, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD
    )
    if drawn_by_engine(options):
        config.architectures, config.dtype = ["Qwen3MoeForCausalLM"], torch.bfloat16
        config.save_pretrained(directory)
    else:
        write_weights(directory, AutoModelForCausalLM, config, options=options)
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {f"t{i}": i for i in range(WORDS, config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    words.save_pretrained(directory / "tokenizer")


def copy_model(directory: Path, model: Path) -> None:
    """A pretrained model, its tokenizer where the others have theirs."""
    from transformers import AutoTokenizer

    shutil.copytree(model, directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory / "tokenizer")


def drawn_by_engine(options: argparse.Namespace) -> bool:
    """Whether no file has the weights: 61 GB of them would be written and read for nothing."""
    return options.size == MIXTURE and not options.tiny


def write_weights(directory: Path, auto: Any, config: Any, *, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = auto.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    if options.lengths == "ragged":
        favour_end(model, mean=options.mean)
    model.save_pretrained(directory, max_shard_size="4GB")
    del model
    if device == "cuda":  # the GPU is for those that are measured
        torch.cuda.empty_cache()


def longest(options: argparse.Namespace) -> int:
    """Tokens of a prompt and its completion together, at most."""
    return (PROMPT_TOKENS if options.problems is None else PROBLEM_TOKENS) + options.most


def our_config(options: argparse.Namespace, *, name: str) -> dict[str, Any]:
    work: Path = options.work
    gpu = torch.cuda.is_available()
    lora = options.size != "1.5B"
    shared = gpu and options.devices is None  # weights in the engine's own memory would train on its GPU
    vllm: dict[str, Any] = {
        "kind": "vllm",
        "port": options.port,
        "max_model_len": longest(options),
        "devices": options.devices,
        "enforce_eager": not gpu,
        "extra_args": ["--max-num-seqs", "1024"] if gpu else ["--max-num-seqs", "64", "--no-enable-chunked-prefill"],
    }
    if options.size == MIXTURE:
        vllm["extra_args"] += ["--lora-target-modules", *ADAPTED]
        vllm["gpu_memory_utilization"] = MIXTURE_ENGINE_SHARE
    if drawn_by_engine(options):
        vllm["extra_args"] += ["--load-format", "dummy"]
    sampling: dict[str, Any] = {"num_generations": COMPLETIONS, "max_completion_length": options.most}
    embedded: dict[str, Any] = {"kind": "embedded_server", "port": options.port}
    if options.lengths == "equal" and options.engine == "vllm":
        sampling["generation_kwargs"] = {"ignore_eos": True}
    tree: dict[str, Any] = {
        "run": {"name": name, "dir": str(work / "runs"), "steps": options.steps},
        "model": {"path": str(work / "model"), "tokenizer": str(work / "model/tokenizer")},
        "adapter": LORA if lora else {"kind": "none"},
        "data": {"path": str(work / "problems.jsonl")},
        "rewards": {"functions": [f"{work / 'reward.py'}:share_of_ones"]},
        "sampling": sampling,
        "batch": {"prompts_per_step": options.prompts},
        "engine": vllm if options.engine == "vllm" else embedded,
        "bridge": {"kind": "lora_only" if lora else "shared_vllm" if shared else "broadcast"},
        "optimizer": {"learning_rate": 1e-7},
        "checkpoint": {"every_steps": 0},  # with shared weights a run has some by default; TRL saves none
        "deadlines": {"engine_start_s": ENGINE_START_S},
    }
    tree["model"]["dtype"] = "bfloat16" if gpu else "float32"
    if options.size == MIXTURE:
        tree["model"]["gradient_checkpointing"] = True
    if lora and options.devices is None:
        tree["bridge"]["share_base"] = True
    if name == "asynchronous":
        tree["pipeline"] = {"async_prefetch": True, "prefetch_depth": 1}
    for setting in options.set:
        key, _, value = setting.partition("=")
        section, _, field = key.partition(".")
        if value:
            tree.setdefault(section, {})[field] = yaml.safe_load(value)
        else:
            tree.get(section, {}).pop(field, None)
    return tree


def run_ours(options: argparse.Namespace, *, system: str) -> Run:
    """`lachesis train` with a file, and what it wrote into metrics.jsonl."""
    from lachesis.metrics.sinks.jsonl import read_metrics

    name = "asynchronous" if system == OURS_ASYNC else "synchronous"
    path = options.work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(our_config(options, name=name)))
    began = time.time()
    execute([sys.executable, "-m", "lachesis", "train", str(path), "--overwrite"], log=options.work / f"{name}.log")
    lines = read_metrics(options.work / "runs" / name / "metrics.jsonl").steps
    steps = [dict(line.values) for line in lines]
    counted = [{"seconds": step["step_time"], **step} for step in steps]
    return Run(system, lines[0].time - began, counted, versions("vllm"))


def run_trl(options: argparse.Namespace) -> Run:
    """GRPOTrainer with vLLM in its process."""
    out = options.work / "trl.json"
    flags = [*sys.argv[1:], "--part", "trl", "--out", str(out)]
    began = time.time()
    execute([options.trl_python, __file__, *flags], log=options.work / "trl.log")
    answer = json.loads(out.read_text())
    return Run(TRL, answer["first"] - began, answer["steps"], answer["versions"])


def run_asynchronous_trl(options: argparse.Namespace) -> Run:
    """AsyncGRPOTrainer on one GPU, its vLLM server on another, both started at once."""
    work, rows = options.work, options.trl_rows
    # Beside the weights, AutoTokenizer would take the architecture's own class, which cannot read these words.
    tokenizer = str(work / "model/tokenizer")
    problems = list(map(json.loads, (work / "problems.jsonl").read_text().splitlines()))
    job = {
        "model": str(work / "model"),
        "tokenizer": tokenizer,
        "problems": problems,
        "reward": f"{work / 'reward.py'}:share_of_ones",
        "steps": options.steps,
        "seed": 0,
        "grpo": {
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": options.prompts * COMPLETIONS // rows,
            "num_generations": COMPLETIONS,
            "max_completion_length": options.most,
            "learning_rate": 1e-7,
        },
        "more": {
            "dtype": "bfloat16",
            "max_staleness": options.trl_staleness,
            "gradient_checkpointing": options.trl_checkpointing,
        },
        "adapter": {**TRL_LORA} if options.size == "8B" else None,
        "torch_attention": options.trl_torch_attention,
        "snapshots": [],
        "directory": str(work / "trl-asynchronous"),
        "result": str(work / "trl-asynchronous.json"),
    }
    flags = ["--tokenizer", tokenizer, "--max-model-len", str(longest(options)), "--max-num-seqs", "1024"]
    if options.size == "8B":
        loras = options.trl_staleness + 2  # its versions, and two more
        flags += ["--enable-lora", "--max-lora-rank", "16", "--max-loras", str(loras)]
    began = time.time()
    if options.devices is None:
        flags += ["--gpu-memory-utilization", str(options.trl_memory)]
    gpu = options.devices or "0"
    answer = trl_async.run(job, python=options.trl_python, port=options.port, flags=flags, server_gpu=gpu)
    return Run(TRL_ASYNC, answer["first"] - began, list(map(in_our_words, answer["steps"])), answer["versions"])


def in_our_words(step: dict[str, float]) -> dict[str, float]:
    return {
        **step,
        "data_fetch_time": step["generation"],
        "generation_time": 0.0,
        "train_time": step["training"],
        "tokens_generated": step["completion_tokens"],
    }


def train_with_trl(options: argparse.Namespace) -> None:
    """TRL's side, in its own process: records a step and when the first one ended."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]
    from trl_side import TimedTrainer, load_reward

    class Timed(TimedTrainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            return GRPOTrainer.create_scheduler(self, num_training_steps, optimizer)

    work: Path = options.work
    log = step_log()
    tokenizer = AutoTokenizer.from_pretrained(work / "model/tokenizer", padding_side="left")
    tokenizer.save_pretrained(work / "model")  # TRL's engine reads both from the model's path
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(work / "model", dtype=dtype),
        processing_class=tokenizer,
        reward_funcs=load_reward(f"{work / 'reward.py'}:share_of_ones"),
        args=trl_arguments(options),
        train_dataset=Dataset.from_list(list(map(json.loads, (work / "problems.jsonl").read_text().splitlines()))),
        callbacks=[log],
        peft_config=trl_adapter() if options.size == "8B" else None,
    )
    log.trainer = trainer
    trainer.train()
    options.out.write_text(json.dumps({"first": log.first, "steps": log.steps, "versions": versions("trl", "vllm")}))


def trl_arguments(options: argparse.Namespace) -> Any:
    """TRL's configuration of the same work."""
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports]

    gpu, rows = torch.cuda.is_available(), options.trl_rows
    return GRPOConfig(
        output_dir=str(options.work / "trl"),
        max_steps=options.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=options.prompts * COMPLETIONS // rows,
        num_generations=COMPLETIONS,
        max_completion_length=options.most,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-7,
        bf16=gpu,
        use_cpu=not gpu,
        gradient_checkpointing=options.trl_checkpointing,
        use_liger_kernel=options.trl_liger,
        use_vllm=gpu,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=options.trl_memory,
        vllm_max_model_length=longest(options),
        generation_kwargs={"ignore_eos": True} if options.lengths == "equal" and gpu else None,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def trl_adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(**TRL_LORA, task_type="CAUSAL_LM")


def step_log() -> Any:
    """A callback of TRL's trainer that keeps seconds, tokens and memory of each step."""
    from transformers import TrainerCallback

    class Log(TrainerCallback):
        """Seconds from the end of a step to the end of the next."""

        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []
            self.first = 0.0
            self.trainer: Any = None

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            gpu = torch.cuda.is_available()
            if gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            counts = self.trainer.counts
            self.steps.append(
                {
                    "seconds": now - self.started,
                    "generation_time": counts["generation"],
                    "train_time": counts["training_step"] - counts["prepare_inputs"],
                    "tokens_generated": counts["completion_tokens"],
                    "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if gpu else 0.0,
                }
            )
            self.first = self.first or time.time()
            counts.clear()
            self.started = now

    return Log()


def versions(*names: str) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for name in ("transformers", *names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def execute(command: list[str], *, log: Path) -> None:
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment()).returncode
    if code:
        sys.exit("\n".join(log.read_text(errors="replace").splitlines()[-40:]) + f"\n\n{command} ended with {code}")


def environment() -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}


COLUMNS = {
    "a step": "seconds",
    "generation": "generation_time",
    "forward and backward": "train_time",
    "waiting": "data_fetch_time",
    "optimizer, transfer, proof": "sync_time",
}


def active_parameters(fields: dict[str, Any]) -> int:
    """Those that a token goes through, embeddings aside."""
    from lachesis.plan.shapes import read_shape

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **fields}))
        shape = read_shape(directory)
    assert shape is not None, "it has just been written"
    idle = shape.layers * (shape.experts - shape.active_experts) * 3 * shape.hidden * shape.intermediate
    return shape.parameters - idle - shape.vocab * shape.hidden


def throughput(runs: list[Run], *, active: int, skip: int) -> str:
    """What forward and backward make of the card, as a table."""
    lines = ["| | tokens in a step | tokens/s | MFU, 6 FLOP | 4 FLOP | other experts |", "|---|---|---|---|---|---|"]
    for run in runs:
        tokens = run.median("tokens_forward", skip=skip)
        speed = tokens / run.median("train_time", skip=skip)
        shares = (f"{flop * active * speed / PEAK_BF16_FLOPS:.1%}" for flop in (6, 4))
        other = f"{run.median('router_replay_difference', skip=skip):.2%}"
        lines.append(f"| {run.name} | {tokens:,.0f} | {speed:,.0f} | {' | '.join(shares)} | {other} |")
    return "\n".join([f"\n{active / 1e9:.2f} billion parameters for each token.\n", *lines, ""])


def table(runs: list[Run], *, skip: int) -> str:
    """Markdown: means and medians after the first steps, the slowest over the median, and the way to the first."""
    heads = ["seconds, median", "a step, mean", *COLUMNS]
    heads += ["slowest over median", "to the end of step 1", "completion tokens a step"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for run in runs:
        cells = [run.name, f"{run.mean_step(skip=skip):.2f}"]
        cells += [f"{run.median(key, skip=skip):.2f}" for key in COLUMNS.values()]
        slowest = max(step["seconds"] for step in run.steps[skip:]) / run.median("seconds", skip=skip)
        tokens = run.median("tokens_generated", skip=skip)
        lines.append("| " + " | ".join([*cells, f"{slowest:.2f}", f"{run.first_step:.0f}", f"{tokens:,.0f}"]) + " |")
    for run in runs:
        for theirs in runs:
            if run.name in (OURS, OURS_ASYNC) and theirs.name in (TRL, TRL_ASYNC):
                ratio = theirs.mean_step(skip=skip) / run.mean_step(skip=skip)
                lines.append(f"\n{run.name}: {ratio:.2f} times as fast a step as {theirs.name}, by the means.")
    return "\n".join(lines) + "\n"


RUNNERS: dict[str, Callable[[argparse.Namespace], Run]] = {
    OURS: partial(run_ours, system=OURS),
    OURS_ASYNC: partial(run_ours, system=OURS_ASYNC),
    TRL: run_trl,
    TRL_ASYNC: run_asynchronous_trl,
}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=("1.5B", "8B", MIXTURE), default="1.5B", help="1.5B trains whole, others by LoRA"
    )
    parser.add_argument("--lengths", choices=("equal", "ragged"), default="equal")
    parser.add_argument("--only", nargs="+", choices=tuple(RUNNERS), default=[OURS, OURS_ASYNC, TRL])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3, help="first steps that medians leave out")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--model", type=Path, default=None, help="a pretrained model")
    parser.add_argument("--problems", type=Path, default=None, help="with --model: its prompts")
    parser.add_argument("--most", type=int, default=None, help="tokens of a completion at most")
    parser.add_argument("--devices", default=None, help="a GPU for our engine alone")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=[VALUE]", help="for our runs")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--trl-rows", type=int, default=16, help="completions in one of TRL's forward passes")
    parser.add_argument("--trl-memory", type=float, default=0.3, help="share of the GPU for TRL's vLLM")
    parser.add_argument("--trl-checkpointing", action="store_true")
    parser.add_argument("--trl-liger", action="store_true")
    parser.add_argument(
        "--trl-staleness", type=int, default=2, help="versions that samples of TRL's asynchronous trainer may be behind"
    )
    parser.add_argument("--trl-torch-attention", action="store_true", help="where the hub of its kernel is not reached")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens; also on a CPU")
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="vllm", help="of our runs")
    parser.add_argument("--port", type=int, default=9127)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lachesis-end-to-end")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--part", choices=("trl",), default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    require_gpu(tiny=options.tiny)
    alone = options.lengths == "equal" and options.devices is None and not {TRL, TRL_ASYNC} & set(options.only)
    if options.size == MIXTURE and not alone:
        parser.error(f"--size {MIXTURE} is on one GPU, with equal lengths, and without TRL: give --only {OURS}")
    if (options.model is None) != (options.problems is None):
        parser.error("--model and --problems go together")
    most = options.most
    options.mean, options.most = RAGGED_MEAN, EQUAL if options.lengths == "equal" else RAGGED_MOST
    if options.tiny:
        options.mean, options.most = 12, 16 if options.lengths == "equal" else 48
    options.most = most or options.most
    what = "tiny" if options.tiny else options.size if options.model is None else options.model.resolve().name
    options.work = options.work / f"{what}-{options.lengths}"
    return options


def main() -> None:
    options = read_options()
    if options.part == "trl":
        train_with_trl(options)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.work / "model/config.json").exists():
        shutil.rmtree(options.work / "model", ignore_errors=True)
        if options.model is None:
            write_model(options.work / "model", options=options)
        else:
            copy_model(options.work / "model", options.model)
    _, fields = sizes(options)
    count, problems = options.prompts * options.steps, options.work / "problems.jsonl"
    if options.problems is None:
        write_problems(problems, count=count, tokens=PROMPT_TOKENS, vocab_size=fields["vocab_size"])
    else:
        shutil.copy(options.problems, problems)
    (options.work / "reward.py").write_text(REWARD)
    runs = []
    for name in options.only:
        runs.append(RUNNERS[name](options))
        sys.stderr.write(json.dumps(asdict(runs[-1])) + "\n")
        if options.out is not None:
            options.out.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    sys.stdout.write(f"{place}, {options.work.name}, {runs[-1].versions}\n\n")
    skip = min(options.skip, options.steps - 1)
    sys.stdout.write(table(runs, skip=skip))
    if options.size == MIXTURE:
        sys.stdout.write(throughput(runs, active=active_parameters(fields), skip=skip))


if __name__ == "__main__":
    main()
