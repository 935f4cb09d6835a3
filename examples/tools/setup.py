"""What the example trains on: a small model that guesses or asks its calculator, and multiplications.

Half of what the model has seen before training are guesses, half are calls of the tool with an answer copied from what
it says. Only the second kind is right, which training has to find out.
"""

from __future__ import annotations

import json
import random
import shutil
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

OPEN = '<tool_call>{"name": "calculate", "arguments": {"expression": "'
CLOSE = '"}}</tool_call>'
# Each is one token; all other characters are one each.
WORDS = ["<tools>", "<user>", "<tool>", "<assistant>", "<end>", "calculate", OPEN, CLOSE]
TEMPLATE = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<end>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<assistant>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>
{%- else %}<{{ message.role }}>{{ message.content }}<end>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
HELD_OUT = 16
STEPS = 150


def prepare(model_path: str) -> None:
    """Make the model directory and, beside it, train.jsonl and eval.jsonl, unless they are there."""
    directory = Path(model_path)
    if (directory / "config.json").is_file():
        return
    torch.manual_seed(0)
    rows = problems(seed=0)
    directory.parent.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[HELD_OUT:]), ("eval", rows[:HELD_OUT])):
        (directory.parent / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    tokenizer = word_tokenizer()
    model = small_model(tokenizer)
    supervised_start(model, tokenizer, rows[HELD_OUT:])
    unfinished = directory.with_name(directory.name + ".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)


def problems(*, seed: int) -> list[dict[str, object]]:
    """All products of two digits above 1, shuffled."""
    pairs = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    random.Random(seed).shuffle(pairs)
    return [{"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)} for a, b in pairs]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of the words and for each character."""
    pieces = [*WORDS, *string.printable]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *pieces])}
    pattern = "|".join([*(word.replace("{", r"\{").replace("}", r"\}") for word in WORDS), r"[\s\S]"])
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    made.chat_template = TEMPLATE
    return made


def small_model(tokenizer: PreTrainedTokenizerFast) -> Olmo2ForCausalLM:
    """0.1 million parameters in the architecture of OLMo 2, whose tokenizer transformers loads as it was saved."""
    config = Olmo2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=128,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Olmo2ForCausalLM(config)


def supervised_start(
    model: Olmo2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, object]]
) -> None:
    """Train on rollouts of both kinds: their tokens of the model, not those of prompts and tools."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    source = random.Random(0)
    model.train()
    for _ in range(STEPS):
        input_ids, labels = encode(tokenizer, [demonstration(row, source) for row in source.choices(rows, k=48)])
        logits = model(input_ids=input_ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def demonstration(row: dict[str, object], source: random.Random) -> list[tuple[str, bool]]:
    """The texts of a rollout, and whether the model writes them. The tool's answer is any number, to be copied."""
    question = row["prompt"][0]["content"]  # type: ignore[index]
    asked = f"<tools>calculate<end><user>{question}<end><assistant>"
    number = str(source.randint(4, 81))
    if source.random() < 0.6:
        return [(asked, False), (f"{number}<eos>", True)]
    told = f"<tool>{number}<end><assistant>"
    return [(asked, False), (f"{OPEN}{question}{CLOSE}<eos>", True), (told, False), (f"{number}<eos>", True)]


def encode(tokenizer: PreTrainedTokenizerFast, rollouts: list[list[tuple[str, bool]]]) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [B, L], and labels [B, L] that are -100 but for what the model writes."""
    coded = [[(tokenizer(text)["input_ids"], own) for text, own in rollout] for rollout in rollouts]
    length = max(sum(len(ids) for ids, _ in rollout) for rollout in coded)
    input_ids = torch.full((len(coded), length), tokenizer.pad_token_id)
    labels = torch.full((len(coded), length), -100)
    for i, rollout in enumerate(coded):
        start = 0
        for ids, own in rollout:
            input_ids[i, start : start + len(ids)] = torch.tensor(ids)
            if own:
                labels[i, start : start + len(ids)] = torch.tensor(ids)
            start += len(ids)
    return input_ids, labels
