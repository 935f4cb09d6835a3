"""How long it takes until a model can do what it is rewarded for: `lachesis train` and TRL's GRPOTrainer in turn.

    PYTHONPATH=src python benchmarks/time_to_reward.py [--seeds 0 1 2] [--steps 100] [--target 0.8] [--tiny] [--out F]
                                                       [--only NAME ...] [--trl-rows 128 256 512] [--work DIRECTORY]
                                                       [--engines N] [--ahead N] [--engine-flags '...'] [--prepare]
                                                       [--model DIR] [--trl-attention NAME] [--devices N]

A model of 25 million parameters, trained from scratch here until a fifth of its sampled answers are right, adds two
numbers of five digits and writes its working down, about 40 tokens. Both systems then train it on the same prompts in
the same order, with the same completions a prompt, reward, loss, course of the learning rate and seed, each started as
its users start it, with vLLM on the same GPU (ours in `--engines` servers, `--ahead` batches ahead). TRL chooses its
precision itself; of `--trl-rows`, its batches, the fastest in a few steps before the first seed is taken. Held-out
accuracy is of answers sampled as in training, by Lachesis' evaluator: of ours in the run, of TRL's weights after its
run. Seconds leave evaluating and saving out. "TRL, asynchronous" trains on the first GPU and generates on the second,
as ours does with `--devices 1`. ``--model`` takes SmolLM2-135M-Instruct and the sums of
`examples/smollm2` instead, answered in its own words; held out are 100 of them, answered greedily. ``--prepare``
makes model and problems and ends, so that several of this with the same `--work` may run at a time. ``--tiny`` is a
small model and a few steps, without vLLM, also on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import trl_async
import yaml
from end_to_end import versions
from quickstart_vs_trl import Step, TrlRunner, prompts_in_order, trl_python
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lachesis.config.load import load_config
from lachesis.config.schema import LachesisConfig
from lachesis.metrics.sinks.jsonl import read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
PRETRAINED = REPOSITORY / "examples/smollm2"
PRETRAINED_TOKENS = 32  # of an answer in its own words, at most
OURS, TRL, TRL_ASYNC = "Lachesis", "TRL", "TRL, asynchronous"
DIRECTORIES = {OURS: "lachesis", TRL: "trl", TRL_ASYNC: "trl-asynchronous"}
HELD_OUT = 512
START_ACCURACY = 0.2
SEARCH_STEPS = 6  # of which the first half warms up
IGNORED = -100  # the labels of what is no answer
REWARD = """
def right(completions, answer, **columns):
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(text.strip().rpartition(";")[2] == wanted) for text, wanted in zip(texts, answer)]
"""


@dataclass(frozen=True)
class Course:
    """A run of one system. Seconds since the command, and since training began, at the end of each step."""

    system: str
    seed: int
    since_command: list[float]
    training: list[float]
    accuracy: dict[int, float]

    def reached(self, target: float, *, with_start: bool) -> float:
        """Seconds until an evaluation first found ``target``; infinite where none did."""
        seconds = self.since_command if with_start else self.training
        steps = [step for step, accuracy in sorted(self.accuracy.items()) if accuracy >= target]
        return seconds[max(steps[0], 1) - 1] if steps else math.inf


@dataclass(frozen=True)
class Plan:
    """What one run is made of, as trl_job reads it."""

    options: argparse.Namespace
    system: str
    seed: int

    @property
    def steps(self) -> int:
        return self.options.steps

    @property
    def directory(self) -> Path:
        return self.options.work / f"{DIRECTORIES.get(self.system, self.system.lower())}-{self.seed}"

    def config(self, *, engine: str = "embedded") -> LachesisConfig:
        path = self.directory.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(configuration(self, engine=engine)))
        return load_config(path).config


def worked(a: int, b: int, *, digits: int) -> str:
    """The sum digit by digit from the last, with what is carried, and then the sum."""
    carried, parts = 0, []
    for place in range(digits):
        one, other = a // 10**place % 10, b // 10**place % 10
        total = one + other + carried
        parts.append(f"{one}+{other}+{carried}={total:02d}")
        carried = total // 10
    return ";".join([*parts, str(a + b)])


def problems(*, digits: int, count: int, seed: int) -> list[dict[str, str]]:
    draws, least = random.Random(seed), 10 ** (digits - 1)
    numbers = [(draws.randrange(least, 10 * least), draws.randrange(least, 10 * least)) for _ in range(count)]
    return [{"prompt": f"{a}+{b}:", "answer": str(a + b), "worked": worked(a, b, digits=digits)} for a, b in numbers]


def prepare(options: argparse.Namespace) -> None:
    """The start model, problems and reward, unless they are there."""
    if (options.work / "model/config.json").is_file():
        return
    options.work.mkdir(parents=True, exist_ok=True)
    if options.model is not None:
        prepare_pretrained(options)
        return
    sys.path.insert(0, str(REPOSITORY / "examples/quickstart"))
    quickstart: Any = importlib.import_module("setup")  # for its rows of prompts and answers
    rows = problems(digits=options.digits, count=HELD_OUT + 200_000 // (100 if options.tiny else 1), seed=0)
    held_out, train = rows[:HELD_OUT], rows[HELD_OUT:]
    for name, part in (("eval", held_out), ("train", train)):
        (options.work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (options.work / "reward.py").write_text(REWARD)
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_model(tokenizer, tiny=options.tiny).to(device)
    supervised_start(model, tokenizer, quickstart.encode, train=train, most=options.start_steps)
    model.save_pretrained(options.work / "unfinished")
    tokenizer.save_pretrained(options.work / "unfinished")
    shutil.rmtree(options.work / "model", ignore_errors=True)
    (options.work / "unfinished").rename(options.work / "model")


def prepare_pretrained(options: argparse.Namespace) -> None:
    """A pretrained model as it is, with the example's problems and reward."""
    sys.path.insert(0, str(PRETRAINED))
    example: Any = importlib.import_module("setup")
    train, held_out = example.problems(seed=0)
    example.write_jsonl(options.work / "train.jsonl", train)
    example.write_jsonl(options.work / "eval.jsonl", held_out)
    (options.work / "model").symlink_to(options.model.absolute(), target_is_directory=True)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *"0123456789+=:;"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def small_model(tokenizer: Any, *, tiny: bool) -> Any:
    """25 million parameters in the architecture of Qwen2."""
    shape = (64, 2, 2, 128) if tiny else (512, 8, 8, 1408)
    hidden, layers, heads, intermediate = shape
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads, intermediate_size=intermediate, max_position_embeddings=256,
            tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip


def supervised_start(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    encode: Any,
    *,
    train: list[dict[str, str]],
    most: int,
) -> None:
    """Train on worked answers until START_ACCURACY of sampled ones are right, ``most`` steps.

    How likely the model is to sample what it is about to be taught says when: what it samples at temperature 1 gets
    from hardly ever right to nearly always within twenty steps, and greedily it is right long before.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0, fused=True)
    draws = random.Random(0)
    for _ in range(most):
        rows = [{**row, "answer": row["worked"]} for row in draws.sample(train, min(256, len(train)))]
        input_ids, labels = (tensor.to(model.device) for tensor in encode(tokenizer, rows))
        logits, targets = model(input_ids=input_ids).logits[:, :-1].float(), labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        if float((-losses.detach().sum(1)).exp().mean()) >= START_ACCURACY:
            return
        (losses.sum() / (targets != IGNORED).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if most > 100:
        raise SystemExit(f"after {most} steps the start model is not right in {START_ACCURACY:.0%} of its answers")


def configuration(plan: Plan, *, engine: str) -> dict[str, Any]:
    options = plan.options
    tokens = len(worked(10**options.digits - 1, 10**options.digits - 1, digits=options.digits)) + 4
    reward = f"{options.work / 'reward.py'}:right"
    if options.model is not None:
        tokens, reward = PRETRAINED_TOKENS, f"{PRETRAINED / 'rewards.py'}:right_sum"
    tree: dict[str, Any] = {
        "run": {"name": plan.directory.name, "dir": str(options.work), "steps": options.steps, "seed": plan.seed},
        "model": {"path": str(options.work / "model")},
        "data": {"path": str(options.work / "train.jsonl"), "eval_path": str(options.work / "eval.jsonl")},
        "rewards": {"functions": [reward]},
        "sampling": {"num_generations": 8, "max_completion_length": tokens},
        "batch": {"prompts_per_step": options.prompts},
        "optimizer": {"learning_rate": options.learning_rate, "warmup_steps": 3, "schedule": "constant"},
        "evaluation": {
            "every_steps": options.every,
            "max_problems": 32 if options.tiny else HELD_OUT,
            "temperature": 1.0 if options.model is None else 0.0,
        },
        "checkpoint": {"every_steps": 0, "save_final": False},
    }
    if engine == "vllm":
        tree["engine"] = {
            "kind": "vllm", "port": options.port, "gpu_memory_utilization": 0.3, "data_parallel_size": options.engines,
            "extra_args": shlex.split(options.engine_flags) if options.engine_flags else engine_flags(options),
        }  # fmt: skip
        tree["engine"]["devices"] = options.devices
        alone = options.engines == 1 and options.devices is None
        tree["bridge"] = {"kind": "shared_vllm" if alone else "broadcast"}
    if options.ahead:
        tree["pipeline"] = {"async_prefetch": True, "prefetch_depth": options.ahead}
    return tree


def engine_flags(options: argparse.Namespace) -> list[str]:
    """The cache's size is said, so that its memory is not measured and the other system may run on another GPU.

    Graphs are those of the decode steps alone, for as many sequences as a server has: vLLM's own take seconds to make.
    """
    most = math.ceil(options.prompts * 8 * (1 + options.ahead) / options.engines / 64) * 64
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32, *range(64, most + 1, 64)]}
    return [
        "--max-num-seqs", str(most), "--kv-cache-memory-bytes", "8000000000",
        "--compilation-config", json.dumps(graphs),
    ]  # fmt: skip


def run_ours(plan: Plan) -> Course:
    """`lachesis train` with a file, and what it wrote into metrics.jsonl."""
    plan.config(engine="embedded" if plan.options.tiny else "vllm")
    log = plan.directory.with_suffix(".log")
    began = time.time()
    command = [sys.executable, "-m", "lachesis", "train", str(plan.directory.with_suffix(".yaml")), "--overwrite"]
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment()).returncode
    if code:
        sys.exit(log.read_text(errors="replace")[-4000:])
    found = read_metrics(plan.directory / "metrics.jsonl")
    apart = [line.values["eval_time"] + line.values.get("checkpoint_time", 0.0) for line in found.steps]
    spent = [line.values["step_time"] - other for line, other in zip(found.steps, apart, strict=True)]
    # The first evaluation is before step 1, in no step's time: what is before the first step is start-up without it.
    before = found.steps[0].time - found.steps[0].values["step_time"] - began - first_evaluation(found)
    training = [sum(spent[: i + 1]) for i in range(len(spent))]
    accuracy = {result.step: result.accuracy for result in found.evaluations}
    return Course(OURS, plan.seed, [before + seconds for seconds in training], training, accuracy)


def first_evaluation(found: Any) -> float:
    """Seconds of the evaluation before training, as long as one later on."""
    later = [line.values["eval_time"] for line in found.steps if line.values["eval_time"] > 0.0]
    return statistics.median(later) if later else 0.0


def run_trl(plan: Plan, runner: TrlRunner) -> Course:
    """GRPOTrainer, with vLLM in its process where there is a GPU."""
    began = time.time()
    run = runner.run(plan, threads=plan.options.threads)
    training = [sum(step.seconds for step in run.steps[: i + 1]) for i in range(len(run.steps))]
    before = runner.training_began - began
    return Course(plan.system, plan.seed, [before + seconds for seconds in training], training, run.accuracy)


class AsynchronousTrlRunner(TrlRunner):
    """Trains with TRL's asynchronous trainer on two GPUs. ``options`` are the script's."""

    def __init__(self, options: argparse.Namespace, config: LachesisConfig, *, rows: int) -> None:
        super().__init__(Path(sys.executable), config, rows=rows)
        self.options = options

    def _train(self, plan: Any, job: Mapping[str, Any], *, threads: int) -> list[Step]:
        shutil.rmtree(plan.directory, ignore_errors=True)
        problems = [
            {**prompt.columns, "prompt": [*map(dict, prompt.messages)] if prompt.messages else prompt.text}
            for prompt in prompts_in_order(plan.config())
        ]
        staleness = self.options.trl_staleness
        chosen = {} if staleness is None else {"max_staleness": staleness}
        more = {"torch_attention": self.options.trl_torch_attention, "more": chosen, "problems": problems}
        most = math.ceil(self.options.prompts * 8 / 64) * 64 * 4  # it generates up to four steps ahead
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32, *range(64, 1025, 64)]}
        flags = ["--max-model-len", "256", "--max-num-seqs", str(most), "--compilation-config", json.dumps(graphs)]
        result = trl_async.run({**job, **more}, python=sys.executable, port=self.options.port, flags=flags)
        self.versions, self.training_began = result["versions"], result["began"]
        names = {field.name for field in fields(Step)}
        return [Step(**{name: value for name, value in step.items() if name in names}) for step in result["steps"]]


def fastest_rows(plan: Plan, runner: TrlRunner) -> int:
    """TRL's best batch, found by trying each for a few steps; where one fails, for want of memory say, it is said.

    Of one that is asked for nothing is tried.
    """
    options = plan.options
    if len(options.trl_rows) == 1:
        return options.trl_rows[0]
    short = argparse.Namespace(**{**vars(options), "steps": SEARCH_STEPS})
    seconds: dict[int, float] = {}
    for rows in options.trl_rows:
        try:
            trial = replace(plan, options=short, system=f"{TRL}-{rows}-rows")
            seconds[rows] = runner.seconds(trial, rows=rows, threads=options.threads)
            sys.stderr.write(f"TRL with {rows} rows a forward pass: {seconds[rows]:.3f} s a step\n")
        except SystemExit as error:
            sys.stderr.write(f"TRL with {rows} rows a forward pass failed: {error}\n")
    if not seconds:
        sys.exit(f"TRL ran with none of --trl-rows {' '.join(map(str, options.trl_rows))}")
    return min(seconds, key=lambda rows: seconds[rows])


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(REPOSITORY / "src"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def table(courses: list[Course], *, target: float) -> str:
    """Markdown: a row a system and seed, then the ratios of the medians."""
    lines = [
        f"| | seed | s to {target:.2f}, with start-up | without | held out at the start | at the end |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(courses, key=lambda course: (course.system, course.seed)):
        with_start, without = (one.reached(target, with_start=with_start) for with_start in (True, False))
        first, last = one.accuracy[min(one.accuracy)], one.accuracy[max(one.accuracy)]
        seconds = " | ".join("not reached" if math.isinf(s) else f"{s:.1f}" for s in (with_start, without))
        lines.append(f"| {one.system} | {one.seed} | {seconds} | {first:.3f} | {last:.3f} |")
    for with_start, words in ((True, "with start-up"), (False, "without")):
        ours, *peers = (
            statistics.median(c.reached(target, with_start=with_start) for c in courses if c.system == system)
            if any(c.system == system for c in courses)
            else math.nan
            for system in (OURS, TRL, TRL_ASYNC)
        )
        for name, theirs in zip((TRL, TRL_ASYNC), peers, strict=True):
            if math.isfinite(theirs / ours):
                lines.append(f"\nMedian of {name} over ours, {words}: {theirs / ours:.2f}")
    return "\n".join(lines) + "\n"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=(OURS, TRL, TRL_ASYNC), default=[OURS, TRL])
    parser.add_argument("--devices", default=None, help="a GPU for our engines alone")
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--every", type=int, default=5, help="steps from one evaluation to the next")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--digits", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--start-steps", type=int, default=3000, help="most steps of the supervised start")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--trl-rows", type=int, nargs="+", default=[128, 256, 512],
        help="most completions in one of TRL's forward passes; of several the fastest",
    )  # fmt: skip
    parser.add_argument("--trl-attention", default=None, help="attn_implementation of TRL's model")
    parser.add_argument("--trl-torch-attention", action="store_true", help="where the hub of its kernel is not reached")
    parser.add_argument("--trl-staleness", type=int, help="steps that samples of TRL's asynchronous trainer are old")
    parser.add_argument("--trl-memory", type=float, default=0.3, help="share of the GPU for TRL's vLLM")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL; by default .bench/trl's")
    parser.add_argument("--engines", type=int, default=1, help="our servers, all on the same GPU")
    parser.add_argument("--ahead", type=int, default=0, help="our batches that are generated ahead, at most")
    parser.add_argument("--engine-flags", default="", help="of our servers, in place of those that they have here")
    parser.add_argument("--model", type=Path, default=None, help="SmolLM2-135M-Instruct, to add in its own words")
    parser.add_argument("--prepare", action="store_true", help="make the model that both start from, and end")
    parser.add_argument("--port", type=int, default=9137)
    parser.add_argument("--tiny", action="store_true", help="a small model and a few steps; also on a CPU")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lachesis-time-to-reward")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.every, options.prompts, options.digits, options.start_steps = 4, 2, 4, 2, 10
        options.trl_rows = [16, 32]
    options.work = options.work / ("tiny" if options.tiny else "whole" if options.model is None else "pretrained")
    return options


def main() -> None:
    options = read_options()
    prepare(options)
    if options.prepare:
        return
    plans = [Plan(options, system, seed) for seed in options.seeds for system in options.only]
    runner = None
    if TRL in options.only:
        gpu = torch.cuda.is_available() and not options.tiny
        theirs: dict[str, Any] = {"use_cpu": not gpu}
        if gpu:
            theirs |= {
                "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.trl_memory,
                "vllm_max_model_length": 256, "bf16": None,
            }  # fmt: skip
        if options.trl_attention is not None:
            theirs["model_init_kwargs"] = {"attn_implementation": options.trl_attention}
        plan = next(plan for plan in plans if plan.system == TRL)
        python = options.trl_python or trl_python()
        runner = TrlRunner(python, plan.config(), rows=options.trl_rows[0], arguments=theirs)
        runner.rows = fastest_rows(plan, runner)
    courses = []
    if TRL_ASYNC in options.only:
        plan = next(plan for plan in plans if plan.system == TRL_ASYNC)
        asynchronous = AsynchronousTrlRunner(options, plan.config(), rows=options.trl_rows[0])
    for plan in plans:
        if plan.system == TRL_ASYNC:
            courses.append(run_trl(plan, asynchronous))
        elif plan.system == TRL:
            assert runner is not None
            courses.append(run_trl(plan, runner))
        else:
            courses.append(run_ours(plan))
        sys.stderr.write(json.dumps(asdict(courses[-1])) + "\n")
        if options.out is not None:
            options.out.write_text(json.dumps([asdict(course) for course in courses], indent=1) + "\n")
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    rows = "" if runner is None else f", at most {runner.rows} rows in one of TRL's forward passes"
    sys.stdout.write(f"{place}, {options.steps} steps of {options.prompts} x 8, {versions('trl', 'vllm')}{rows}\n\n")
    sys.stdout.write(table(courses, target=options.target))


if __name__ == "__main__":
    main()
