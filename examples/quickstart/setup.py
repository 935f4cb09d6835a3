"""What the quickstart trains on: a small model with a head start, and addition problems.

The answer is written with its least significant digit first: `37+45=` wants `28`, for 82. A small model
learns that quickly. `prepare` runs before the training does; what it makes is kept in `.cache/`.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "0123456789+= "
SPECIAL = ["<pad>", "<bos>", "<eos>"]
HELD_OUT = 512
# Sampled accuracy at which the supervised start ends: enough right answers to learn from, much left to learn.
START_ACCURACY = 0.25


def prepare(model_path: str) -> None:
    """Make the model directory and, beside it, train.jsonl and eval.jsonl, unless they are there."""
    directory = Path(model_path)
    if (directory / "config.json").is_file():
        return
    torch.manual_seed(0)
    train, held_out = problems(seed=0)
    directory.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(directory.parent / "train.jsonl", train)
    write_jsonl(directory.parent / "eval.jsonl", held_out)
    tokenizer = character_tokenizer()
    model = small_model(tokenizer)
    supervised_start(model, tokenizer, train=train, held_out=held_out)
    unfinished = directory.with_name(directory.name + ".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)


def problems(*, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All sums of two numbers below 100, shuffled: those to train on, and those held out."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]} for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def small_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """1.8 million parameters in the architecture of Qwen2."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=512,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen2ForCausalLM(config)


def supervised_start(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    train: list[dict[str, str]],
    held_out: list[dict[str, str]],
    max_steps: int = 3000,
) -> None:
    """Train on right answers until START_ACCURACY of sampled answers to held-out problems are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    generator = random.Random(0)
    for step in range(max_steps):
        model.train()
        input_ids, labels = encode(tokenizer, generator.sample(train, 256))
        logits = model(input_ids=input_ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        if step % 20 == 19 and sampled_accuracy(model, tokenizer, held_out) >= START_ACCURACY:
            break
    model.eval()


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [B, L], and labels [B, L] that are -100 on the prompt and the padding."""
    pad = tokenizer.pad_token_id
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    answers = [[*tokenizer.encode(row["answer"]), tokenizer.eos_token_id] for row in rows]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    input_ids, labels = torch.full((len(rows), length), pad), torch.full((len(rows), length), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels


@torch.no_grad()
def sampled_accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> float:
    """Share of problems whose sampled answer would be right: the mean probability of the right answer."""
    model.eval()
    input_ids, labels = encode(tokenizer, rows)
    log_p = model(input_ids=input_ids).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    token_log_p = log_p.gather(2, targets.clamp_min(0)[..., None]).squeeze(-1)
    return float(token_log_p.masked_fill(targets < 0, 0.0).sum(1).exp().mean())
