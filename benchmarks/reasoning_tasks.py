"""What a small model learns of three tasks of reasoning-gym, scored by the library itself, on CPU cores.

    python benchmarks/reasoning_tasks.py [--tiny] [--steps 150] [--only TASK ...] [--seed 0]

For each task a model of 0.4 million parameters is made from scratch, gets a short supervised start on problems of one
seed, and is trained by GRPO on problems of another; held out are those of a third. Prints a table row for each task.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

import lachesis
from lachesis.common import procedural
from lachesis.metrics.sinks.jsonl import MetricsLog, read_metrics

TASKS = {
    "chain_sum": "chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1",
    "leg_counting": "leg_counting?min_animals=1&max_animals=2&max_instances=3",
    "spell_backward": "spell_backward?min_word_len=3&max_word_len=4",
}
# Seeds: of the supervised start, of training, of what is held out.
SHOWN, TRAINED, HELD_OUT = 2, 0, 1
# The supervised start ends where so many of the sampled answers to problems of its own kind are right.
START = 0.25
ENDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--tiny", action="store_true", help="two steps of each, to see that it runs")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    head = "| task | steps | rollouts a step | reward, first and last 5 steps | held out | s a step |"
    sys.stdout.write(f"reasoning-gym {version('reasoning-gym')}, torch {torch.__version__}\n")
    sys.stdout.write(f"{head}\n|---|---|---|---|---|---|\n")
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="lachesis-reasoning-gym-") as directory:
            steps = 2 if options.tiny else options.steps
            prepare(TASKS[name], Path(directory) / "model", seed=options.seed, longest=3 if options.tiny else 1500)
            metrics = train(TASKS[name], Path(directory), steps=steps, seed=options.seed)
        sys.stdout.write(row(name, metrics) + "\n")
        sys.stdout.flush()


def train(task: str, directory: Path, *, steps: int, seed: int) -> MetricsLog:
    """A run of Lachesis on the task; its metrics."""
    run = lachesis.train(
        model={"path": str(directory / "model")},
        data={
            "path": f"{procedural.PREFIX}{task}&size=2000&seed={TRAINED}",
            "eval_path": f"{procedural.PREFIX}{task}&size=100&seed={HELD_OUT}",
        },
        rewards=["lachesis.rollouts.rewards.reasoning_gym.score"],
        run={"name": "task", "dir": str(directory), "steps": steps, "seed": seed},
        sampling={"num_generations": 8, "max_completion_length": 8},
        batch={"prompts_per_step": 16},
        algorithm={"beta": 0.001},
        optimizer={"learning_rate": 3e-4, "warmup_steps": 3},
        evaluation={"temperature": 1.0, "every_steps": steps},
    )
    run.wait()
    return read_metrics(directory / "task" / "metrics.jsonl")


def row(name: str, metrics: MetricsLog) -> str:
    """A line of the table: means of the ends, the median step."""
    steps = [record.values for record in metrics.steps]
    rewards = [values["reward"] for values in steps]
    before, after = (metrics.evaluations[place].mean_reward for place in (0, -1))
    seconds = sorted(values["step_time"] for values in steps)[len(steps) // 2]
    rollouts = steps[0]["tokens_trained"] / steps[0]["completion_length/mean"]
    ends = f"{mean(rewards[:ENDS]):.3f} to {mean(rewards[-ENDS:]):.3f}"
    return f"| {name} | {len(steps)} | {round(rollouts)} | {ends} | {before:.3f} to {after:.3f} | {seconds:.2f} |"


def prepare(task: str, directory: Path, *, seed: int, longest: int) -> None:
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
    """Train on answers until the mean probability of one to a problem that was not shown is START."""
    training, others = shown[:-100], shown[-100:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step, chosen in enumerate(batches(training, seed=seed)):
        loss = -answer_logprobs(model, tokenizer, chosen, each_token=True).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 or step >= longest:
            with torch.no_grad():
                right = float(answer_logprobs(model, tokenizer, others, each_token=False).exp().mean())
            if step % 100 == 99 or right >= START or step >= longest:
                sys.stderr.write(f"supervised start: {step + 1} steps, p(answer) {right:.3f}\n")
            if right >= START or step >= longest:
                return


def batches(rows: Sequence[dict[str, Any]], *, seed: int) -> Iterator[list[dict[str, Any]]]:
    source = random.Random(seed)
    while True:
        yield source.sample(list(rows), 64)


def answer_logprobs(
    model: Olmo2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[dict[str, Any]], *, each_token: bool
) -> Tensor:
    """Of the reference answers: of each of their tokens [T], or of each whole one [B]."""
    prompts = [tokenizer.encode(entry["question"]) for entry in rows]
    answers = [[*tokenizer.encode(entry["answer"]), tokenizer.eos_token_id] for entry in rows]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[i, len(prompt) : len(prompt) + len(answer)] = True
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(-1)
    return logprobs[mask[:, 1:]] if each_token else logprobs.masked_fill(~mask[:, 1:], 0.0).sum(1)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
