"""Does generation overlap with training: each alone, both at once, and a step of a synchronous and an asynchronous run.

    PYTHONPATH=src python benchmarks/overlap.py [--engine vllm] [--bridge KIND] [--cores 0 1] [--tiny]

One engine in a process of its own, one policy, and the parts that `lachesis train` puts together: rewards, advantages,
packing, optimizer, transfer, proof of sync, metrics, rollouts and report belong to a step. What is measured of one
round follows each other at once, so that a drift of the machine meets all of it. The number of prompts a step is
chosen so that generation and training take about as long; completions all have the same length.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from architectures import QWEN2_5_1_5B
from overlap_table import Alone, Round, Split, next_prompts, split, table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lachesis.common.deadline import Deadline
from lachesis.common.types import Prompt
from lachesis.config.load import load_config
from lachesis.config.schema import LachesisConfig
from lachesis.metrics.hub import HubTelemetry
from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.pipeline.feed import Feed
from lachesis.rollouts.rewards.rewarder import Rewarder
from lachesis.run.directory import claim_run
from lachesis.run.engine import EngineSide, RunPlace, build_engine_side
from lachesis.run.parts import build_evaluation, build_feed, build_policy
from lachesis.run.pause import RequestedPause
from lachesis.run.sinks import build_sinks
from lachesis.run.sources import build_rewarder, build_source, load_data
from lachesis.train.batch import Batch
from lachesis.train.checkpoint import CheckpointManager
from lachesis.train.loop import Trainer
from lachesis.train.policy import Policy
from lachesis.train.resume import RunCheckpoints

FIRST_STEPS = 2  # of a run are not counted: the queue of an asynchronous one fills
PAD, EOS, WORDS = 0, 1, 2  # the first word's id
LORA = {"kind": "lora", "r": 16, "alpha": 32, "targets": "all-linear"}
REWARD = """
def share_of_ones(completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [text.count("1") / max(len(text), 1) for text in texts]
"""
SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512, "tie_word_embeddings": False,
    },
    "1.5B": QWEN2_5_1_5B,
}  # fmt: skip


class Bench:
    """The parts of a run, over one engine; :meth:`rounds` measures them."""

    def __init__(
        self,
        config: LachesisConfig,
        *,
        side: EngineSide,
        policy: Policy,
        rewarder: Rewarder,
        problems: Sequence[Prompt],
    ) -> None:
        self.config = config
        self.side = side
        self.policy = policy
        self.rewarder = rewarder
        self.problems = problems
        self.version = 0

    def with_prompts(self, prompts: int, *, ahead: int = 0) -> LachesisConfig:
        """The configuration of ``prompts`` a step, generating ``ahead`` batches before they are asked for."""
        pipeline = {"async_prefetch": ahead > 0, "prefetch_depth": max(1, ahead)}
        return self.config.model_copy(
            update={
                "batch": self.config.batch.model_copy(update={"prompts_per_step": prompts}),
                "pipeline": self.config.pipeline.model_copy(update=pipeline),
            }
        )

    @property
    def parts(self) -> dict[str, Any]:
        engine = self.side.bridge.engine
        return {"problems": self.problems, "policy": self.policy, "engine": engine, "rewarder": self.rewarder}

    def alone(self, prompts: int, *, repeats: int) -> Alone:
        """Medians of generation with the trainer idle, and of training with the engine idle."""
        config = self.with_prompts(prompts)
        generated = self.generate(config, repeats=repeats)
        batch = build_feed(config, **self.parts, kept=None).next()
        self.train(batch)  # which compiles what these shapes need
        trained = [self.train(batch) for _ in range(repeats)]
        return Alone(prompts, statistics.median(generated), statistics.median(trained))

    def both(self, prompts: int, *, repeats: int) -> Alone:
        """The same at once: what the machine, and one interpreter for client and trainer, can do at best."""
        config = self.with_prompts(prompts)
        batch = build_feed(config, **self.parts, kept=None).next()
        generated: list[float] = []
        thread = threading.Thread(target=lambda: generated.extend(self.generate(config, repeats=repeats)))
        thread.start()
        trained = []
        while thread.is_alive():
            trained.append(self.train(batch))
        return Alone(prompts, statistics.median(generated), statistics.median(trained[:-1] or trained))

    def generate(self, config: LachesisConfig, *, repeats: int) -> list[float]:
        """Seconds of sampling each of so many batches; their rewards are computed and not counted."""
        source = build_source(config, **self.parts)
        seconds = []
        for _ in range(repeats):
            source.next_groups(config.batch.prompts_per_step, deadline=Deadline("generation of a batch", 600))
            seconds.append(source.counters()["generation_time"])
        return seconds

    def train(self, batch: Batch) -> float:
        """Seconds of forward, backward and optimizer step."""
        started = time.perf_counter()
        self.policy.accumulate(batch)
        self.policy.step()
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def run(self, config: LachesisConfig, *, steps: int) -> Split:
        """Some steps of a run, all of `lachesis train` but for the parts that are built before."""
        run = claim_run(Path(config.run.dir) / config.run.name, resume=False, overwrite=True)
        run.begin(resume=False)
        feed: Feed[Batch] = build_feed(config, **self.parts, kept=None)
        tokenizer = self.policy.loaded.tokenizer
        hub = build_sinks(config, run=run, start=0, consoles=[], tokenizer=tokenizer, reward_names=())
        checkpoints = CheckpointManager(run.files["checkpoints"], keep_last=1)
        parts = {name: part for name, part in self.parts.items() if name != "problems"}
        trainer = Trainer(
            policy=self.policy,
            feed=feed,
            bridge=self.side.bridge,
            evaluation=build_evaluation(config, held_out=[], **parts),
            checkpoints=RunCheckpoints(checkpoints, policy=self.policy, feed=feed, every_steps=0),
            telemetry=HubTelemetry(hub=hub, reward_names=self.rewarder.names),
            stop_requested=lambda: False,
            pause=RequestedPause(run, watch=lambda: None),
        )
        try:
            end = self.version + FIRST_STEPS + steps
            self.version = trainer.train(start=self.version, steps=end)
        finally:
            feed.close()
            hub.close()
        lines = read_metrics(run.files["metrics"]).steps
        return split([line.values for line in lines[FIRST_STEPS:]])

    def measure(self, prompts: int, *, steps: int, repeats: int, ahead: int) -> Round:
        """One round."""
        return Round(
            alone=self.alone(prompts, repeats=repeats),
            both=self.both(prompts, repeats=repeats),
            synchronous=self.run(self.with_prompts(prompts), steps=steps),
            asynchronous=self.run(self.with_prompts(prompts, ahead=ahead), steps=steps),
            load=os.getloadavg()[0],
        )

    def tune(self, start: int, *, most: int, tries: int = 5) -> int:
        """The number of prompts at which generation and training take as long, of those tried."""
        points: list[Alone] = []
        prompts = start
        while len(points) < tries and prompts not in [point.prompts for point in points]:
            points.append(self.alone(prompts, repeats=3))
            say(f"{prompts} prompts: generation {points[-1].generation:.3f} s, training {points[-1].training:.3f} s")
            if points[-1].balance > 0.93:
                break
            prompts = next_prompts(points, most=most)
        return max(points, key=lambda point: point.balance).prompts


def write_model(directory: Path, *, size: str, dtype: torch.dtype) -> None:
    """Random weights, and a tokenizer with a word for each token."""
    config = Qwen2Config(
        **SIZES[size], max_position_embeddings=2048, pad_token_id=PAD, bos_token_id=None, eos_token_id=EOS,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM._from_config(config, dtype=dtype)
    if not config.tie_word_embeddings:
        # No completion ends early: every hidden state has a large first channel, which the end token is against.
        with torch.no_grad():
            model.model.embed_tokens.weight.div_(config.initializer_range)
            model.model.embed_tokens.weight[:, 0] = 10.0
            model.lm_head.weight[EOS] = 0.0
            model.lm_head.weight[EOS, 0] = -10.0
    model.save_pretrained(directory, max_shard_size="4GB")
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {f"t{i}": i for i in range(WORDS, config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # In a directory of its own: beside a Qwen2 it would be read as Qwen2's own.
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    words.save_pretrained(directory / "tokenizer")


def write_problems(path: Path, *, count: int, tokens: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(WORDS, vocab_size, (count, tokens), generator=generator).tolist()
    path.write_text("".join(json.dumps({"prompt": " ".join(f"t{i}" for i in row)}) + "\n" for row in drawn))


def configuration(options: argparse.Namespace) -> LachesisConfig:
    """Model, problems, reward and configuration, written to the working directory."""
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    dtype = "bfloat16" if gpu else "float32"
    model = work / f"model-{options.size}-{dtype}"
    if not (model / "config.json").exists():
        write_model(model, size=options.size, dtype=getattr(torch, dtype))
    write_problems(
        work / "problems.jsonl", count=512, tokens=options.prompt_tokens, vocab_size=SIZES[options.size]["vocab_size"]
    )
    (work / "reward.py").write_text(REWARD)
    tree = {
        "run": {"name": "overlap", "dir": str(work / "runs"), "steps": 100_000},
        "model": {"path": str(model), "tokenizer": str(model / "tokenizer"), "dtype": dtype},
        "adapter": LORA if options.bridge.startswith("lora") else {"kind": "none"},
        "data": {"path": str(work / "problems.jsonl")},
        "rewards": {"functions": [f"{work / 'reward.py'}:share_of_ones"]},
        "sampling": {"num_generations": options.generations, "max_completion_length": options.tokens},
        "batch": {"prompts_per_step": 1},
        "engine": engine_section(options, gpu=gpu),
        "bridge": {"kind": options.bridge},
        "optimizer": {"learning_rate": 1e-7},  # what is sampled stays as it is: each run meets the same lengths
        "deadlines": {"engine_start_s": 420},
    }
    if options.engine == "vllm":
        tree["sampling"]["generation_kwargs"] = {"ignore_eos": True}
    path = work / "overlap.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_config(path).config


def engine_section(options: argparse.Namespace, *, gpu: bool) -> dict[str, Any]:
    length = options.prompt_tokens + options.tokens
    if options.engine == "embedded":
        return {"kind": "embedded_server", "port": options.port, "max_batch_size": 1024}
    # vLLM on the CPU has neither graphs to capture nor attention that takes prompts in pieces.
    extra = ["--max-num-seqs", "1024"] if gpu else ["--max-num-seqs", "256", "--no-enable-chunked-prefill"]
    section = {"kind": "vllm", "port": options.port, "max_model_len": length, "enforce_eager": not gpu}
    return section | {"devices": options.devices, "extra_args": extra}


@contextmanager
def bench(options: argparse.Namespace) -> Iterator[Bench]:
    """Start the engine, build the rest on it, and bring the weights over."""
    config = configuration(options)
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        torch.set_num_threads(options.threads)
    trainer_core, engine_core = options.cores or (None, None)
    with ExitStack() as closing:
        pin(engine_core)  # what is started now stays there
        work = options.work / "engine"
        work.mkdir(exist_ok=True)
        place = RunPlace(directory=work, engine_log=options.work / "engine.log", owner=f"overlap-{os.getpid()}")
        started = time.perf_counter()
        side = build_engine_side(config, place=place)
        closing.callback(side.close)
        pin(trainer_core)
        say(f"the engine serves after {time.perf_counter() - started:.0f} s")
        policy = side.bridge.prepare(partial(build_policy, config, weights=side.weights))
        rewarder = build_rewarder(config)
        closing.callback(rewarder.close)
        side.bridge.sync(0)
        yield Bench(config, side=side, policy=policy, rewarder=rewarder, problems=load_data(config)[0])


def pin(core: int | None) -> None:
    """Keep all threads of this process on one core, and what they start."""
    if core is not None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})


def describe(options: argparse.Namespace, prompts: int) -> str:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    cores = "" if options.cores is None else f", trainer on core {options.cores[0]} and engine on {options.cores[1]}"
    apart = "" if options.devices is None else f", engine on GPU {options.devices}"
    return (
        f"{place}{cores}{apart}; engine {options.engine}, bridge `{options.bridge}`, model {options.size}, {prompts} "
        f"prompts x {options.generations} completions of {options.tokens} tokens a step, {options.ahead} batch(es) "
        f"ahead; medians of {options.rounds} rounds of {options.steps} steps. {versions}, {time.strftime('%d %B %Y')}."
    )


def say(text: str) -> None:
    sys.stderr.write(f"[{time.perf_counter() - BEGAN:5.0f} s] {text}\n")
    sys.stderr.flush()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--bridge", default=None, help="bridge.kind; shared_vllm, or with vLLM lora_nccl")
    parser.add_argument("--size", choices=tuple(SIZES), default=None, help="1.5B where there is a GPU, else small")
    parser.add_argument("--devices", default=None, help="the engine's GPU, if not the trainer's (0)")
    parser.add_argument("--cores", type=int, nargs=2, default=None, metavar=("TRAINER", "ENGINE"))
    parser.add_argument("--threads", type=int, default=None, help="of each process; 1 on a CPU")
    parser.add_argument("--prompts", type=int, default=None, help="a step; found by trying if left out")
    parser.add_argument("--most-prompts", type=int, default=96)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of a completion")
    parser.add_argument("--ahead", type=int, default=1, help="pipeline.prefetch_depth")
    parser.add_argument("--rounds", type=int, default=None, help="1 on a GPU, else 5")
    parser.add_argument(
        "--steps", type=int, default=None, help="of each run in a round, after two; 8 on a GPU, else 10"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of what is measured alone, in each round")
    parser.add_argument("--port", type=int, default=9117)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lachesis-overlap")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--tiny", action="store_true", help="one round of two steps, few tokens: that it runs")
    options = parser.parse_args()
    if options.tiny:
        options.prompts, options.tokens, options.rounds, options.steps, options.repeats = 2, 8, 1, 2, 1
    gpu = torch.cuda.is_available()
    options.bridge = options.bridge or ("shared_vllm" if options.engine == "embedded" else "lora_nccl")
    options.size = options.size or ("1.5B" if gpu else "small")
    options.rounds = options.rounds or (1 if gpu else 5)
    options.steps = options.steps or (8 if gpu else 10)
    options.threads = options.threads or (None if gpu else 1)
    return options


def main() -> None:
    options = read_options()
    with bench(options) as parts:
        start = options.prompts or (64 if torch.cuda.is_available() else 4)
        parts.alone(start, repeats=1)  # what is slow the first time: graphs, compiled code, connections
        say("warmed up")
        prompts = options.prompts or parts.tune(start, most=options.most_prompts)
        rounds = []
        for number in range(options.rounds):
            rounds.append(parts.measure(prompts, steps=options.steps, repeats=options.repeats, ahead=options.ahead))
            say(f"round {number + 1}: {rounds[-1].ratio:.3f}")
    if options.out is not None:
        answer = {"options": {name: str(value) for name, value in vars(options).items()}, "prompts": prompts}
        options.out.write_text(json.dumps(answer | {"rounds": [asdict(one) for one in rounds]}, indent=1))
    sys.stdout.write(table(rounds, what=describe(options, prompts)))


BEGAN = time.perf_counter()

if __name__ == "__main__":
    main()
