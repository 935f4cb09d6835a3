"""What a small model learns of three tasks of reasoning-gym, scored by the library itself, on CPU cores.

    python benchmarks/reasoning_tasks.py [--tiny] [--steps 40] [--only TASK ...] [--seeds 1 2 3]

For each task a model of 0.4 million parameters is made from scratch and gets a supervised start on problems of one
seed: right answers until it knows most of them, then for a few steps answers of other problems, until what is right is
one of several things that it may say. GRPO trains it on problems of another seed, its reward the task's own score;
held out are 200 problems of a third. Prints a table row for each task and seed: the start is the same for all seeds,
which are those of the order of problems and of sampling.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

import lachesis
from lachesis.metrics.sinks.jsonl import MetricsLog, read_metrics
from lachesis.rollouts import procedural

TASKS = {
    "chain_sum": "chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1",
    "products": "products?min_terms=2&max_terms=2&min_digits=1&max_digits=1",
    "spell_backward": "spell_backward?min_word_len=3&max_word_len=4",
}
# Seeds: of the supervised start's problems, of those trained on, of what is held out.
SHOWN, TRAINED, HELD_OUT = 2, 0, 1
START_SEED = 0
# The supervised start learns the task until so many of the answers sampled to problems of its kind would be right. Then
# it is shown answers of which so many are those of other problems, until so few would be.
KNOWN, MISLED, START = 0.8, 0.8, 0.15
ENDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--tiny", action="store_true", help="two steps of each, to see that it runs")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps, longest = (2, 3) if options.tiny else (options.steps, 3000)
    head = "| task | seed | held out, before and after | reward, first and last 5 steps | steps | s a step |"
    sys.stdout.write(f"reasoning-gym {version('reasoning-gym')}, torch {torch.__version__}\n")
    sys.stdout.write(f"{head}\n|---|---|---|---|---|---|\n")
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="lachesis-reasoning-gym-") as directory:
            prepare(TASKS[name], Path(directory) / "model", longest=longest)
            for seed in options.seeds:
                metrics = train(TASKS[name], Path(directory), steps=steps, seed=seed)
                sys.stdout.write(row(name, seed, metrics) + "\n")
                sys.stdout.flush()


def train(task: str, directory: Path, *, steps: int, seed: int) -> MetricsLog:
    """A run of Lachesis on the task; its metrics."""
    run = lachesis.train(
        model={"path": str(directory / "model")},
        data={
            "path": f"{procedural.PREFIX}{task}&size=2000&seed={TRAINED}",
            "eval_path": f"{procedural.PREFIX}{task}&size=200&seed={HELD_OUT}",
        },
        rewards=["lachesis.rollouts.rewards.reasoning_gym.score"],
        run={"name": f"seed-{seed}", "dir": str(directory), "steps": steps, "seed": seed},
        sampling={"num_generations": 8, "max_completion_length": 8},
        batch={"prompts_per_step": 32},
        algorithm={"beta": 0.001},
        optimizer={"learning_rate": 5e-4, "warmup_steps": 3},
        evaluation={"temperature": 1.0, "every_steps": steps},
        checkpoint={"save_final": False},
    )
    run.wait()
    return read_metrics(directory / f"seed-{seed}" / "metrics.jsonl")


def row(name: str, seed: int, metrics: MetricsLog) -> str:
    """A line of the table: means of the ends, the median step."""
    steps = [record.values for record in metrics.steps]
    rewards = [values["reward"] for values in steps]
    before, after = (metrics.evaluations[place].mean_reward for place in (0, -1))
    seconds = sorted(values["step_time"] for values in steps)[len(steps) // 2]
    ends = f"{mean(rewards[:ENDS]):.3f} to {mean(rewards[-ENDS:]):.3f}"
    held_out = f"{before:.3f} to {after:.3f} ({after - before:+.3f})"
    return f"| {name} | {seed} | {held_out} | {ends} | {len(steps)} | {seconds:.2f} |"


def prepare(task: str, directory: Path, *, longest: int, seed: int = START_SEED) -> None:
    """Make the model: a tokenizer of the task's words and characters, random weights, a supervised start."""
    torch.manual_seed(seed)
    shown = entries(task, seed=SHOWN, size=2000)
    tokenizer = word_tokenizer(shown)
    model = small_model(tokenizer)
    supervised_start(model, tokenizer, shown, longest=longest, seed=seed)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def entries(task: str, *, seed: int, size: int) -> list[dict[str, Any]]:
    (parsed,) = procedural.parse_tasks(f"{task}&size={size}&seed={seed}")
    return list(procedural.entries(parsed))


def word_tokenizer(shown: Sequence[dict[str, Any]]) -> PreTrainedTokenizerFast:
    """A token for each word that many questions have, and for each character."""
    words = Counter(word for entry in shown for word in re.findall(r" ?[A-Za-z]{4,}", entry["question"]))
    common = sorted((word for word, count in words.items() if count > len(shown) / 50), key=len, reverse=True)
    splitter = pre_tokenizers.Split(Regex("|".join([*map(re.escape, common), r"[\s\S]"])), behavior="isolated")
    texts = [entry[name] for entry in shown for name in ("question", "answer")]
    characters = set(map(chr, range(32, 127))) | {"\n"}
    pieces = sorted({piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)} | characters)
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def small_model(tokenizer: PreTrainedTokenizerFast) -> Olmo2ForCausalLM:
    """0.4 million parameters."""
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<{name}>") for name in ("pad", "bos", "eos")}
    config = Olmo2Config(
        vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=256, max_position_embeddings=256, tie_word_embeddings=True,
        **ids,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return Olmo2ForCausalLM(config)


def supervised_start(
    model: Olmo2ForCausalLM, tokenizer: PreTrainedTokenizerFast, shown: Sequence[dict[str, Any]], *, longest: int,
    seed: int,
) -> None:  # fmt: skip
    """Train on right answers until the mean probability of one to a problem not shown is KNOWN, then on MISLED ones."""
    pairs = [Pair.of(entry, tokenizer) for entry in shown]
    training, others = pairs[:-100], pairs[-100:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    source, known = random.Random(seed), False
    for step in range(1, longest + 1):
        loss = -answer_logprobs(model, batch(training, source, misled=MISLED if known else 0.0), each_token=True).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if known or step % 20 == 0:
            with torch.no_grad():
                right = float(answer_logprobs(model, others, each_token=False).exp().mean())
            if step % 100 == 0 or known or right >= KNOWN:
                sys.stderr.write(f"supervised start: {step} steps, p(answer) {right:.3f}\n")
            if known and right <= START:
                return
            known |= right >= KNOWN


@dataclass(frozen=True, slots=True)
class Pair:
    """Token ids of a problem, and of an answer with the end."""

    prompt: list[int]
    answer: list[int]

    @staticmethod
    def of(entry: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> Pair:
        answer = [*tokenizer.encode(entry["answer"]), tokenizer.convert_tokens_to_ids("<eos>")]
        return Pair(tokenizer.encode(entry["question"]), answer)


def batch(pairs: Sequence[Pair], source: random.Random, *, misled: float) -> list[Pair]:
    """Pairs of which the share ``misled`` have the answer of another problem."""
    chosen = source.sample(list(pairs), 64)
    return [Pair(pair.prompt, source.choice(pairs).answer) if source.random() < misled else pair for pair in chosen]


def answer_logprobs(model: Olmo2ForCausalLM, pairs: Sequence[Pair], *, each_token: bool) -> Tensor:
    """Of the answers: of each of their tokens [T], or of each whole one [B]."""
    length = max(len(pair.prompt) + len(pair.answer) for pair in pairs)
    ids, mask = torch.zeros(len(pairs), length, dtype=torch.long), torch.zeros(len(pairs), length, dtype=torch.bool)
    for i, pair in enumerate(pairs):
        begin, end = len(pair.prompt), len(pair.prompt) + len(pair.answer)
        ids[i, :end] = torch.tensor(pair.prompt + pair.answer)
        mask[i, begin:end] = True
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(-1)
    return logprobs[mask[:, 1:]] if each_token else logprobs.masked_fill(~mask[:, 1:], 0.0).sum(1)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
