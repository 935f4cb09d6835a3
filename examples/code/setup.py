"""What the example trains on: a small model with a head start, and descriptions of functions with their tests.

`Write f(x): add 3, square it.` wants any Python function that does that. `prepare` runs before the training does; what
it makes is kept in `.cache/`.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

# What a step is called, and the statement that does it; N is a digit.
STEPS = {
    "add N": "x = x + N",
    "subtract N": "x = x - N",
    "multiply by N": "x = x * N",
    "divide by N": "x = x // N",
    "square it": "x = x * x",
    "negate it": "x = -x",
    "reduce modulo N": "x = x % N",
}
INPUTS = (-7, 2, 13)
HELD_OUT = 64
TRAIN = 800  # and the others are shown with their solutions in the supervised start
# Mean probability of the reference solution at which the supervised start ends: enough that is right to learn from.
START = 0.2
_TOKENS = Regex(r"Write f\(x\):|def f\(x\):|\n    return x|\n    x =| ?(//|[a-z]+|[0-9]|[^a-z0-9])")


def prepare(model_path: str) -> None:
    """Make the model directory and, beside it, train.jsonl and eval.jsonl, unless they are there."""
    directory = Path(model_path)
    if (directory / "config.json").is_file():
        return
    torch.manual_seed(0)
    rows = problems(seed=0)
    held_out, train, shown = rows[:HELD_OUT], rows[HELD_OUT:][:TRAIN], rows[HELD_OUT + TRAIN :]
    directory.parent.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("eval", held_out)):
        (directory.parent / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    tokenizer = word_tokenizer(rows)
    model = small_model(tokenizer)
    supervised_start(model, tokenizer, shown=shown, held_out=held_out)
    unfinished = directory.with_name(directory.name + ".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)


def problems(*, seed: int) -> list[dict[str, object]]:
    """All functions of one or two steps, shuffled: a description, a solution, tests, and how hard it is."""
    written = ((name.replace("N", n), code.replace("N", n)) for name, code in STEPS.items() for n in "23456789")
    steps = list(dict.fromkeys(written))
    chains = [(one,) for one in steps] + [(one, other) for one in steps for other in steps]
    random.Random(seed).shuffle(chains)
    return [problem(chain) for chain in chains]


def problem(chain: tuple[tuple[str, str], ...]) -> dict[str, object]:
    """The row of a function that does some steps, each a name and its statement."""
    code = "\n    ".join(["def f(x):", *(statement for _, statement in chain), "return x"])
    return {
        "prompt": f"Write f(x): {', '.join(name for name, _ in chain)}.\n",
        "response": code,
        "test_cases": [f"assert f({x}) == {value_of(code, x)}" for x in INPUTS],
        "difficulty": len(chain),
        "tags": sorted({name.split()[0] for name, _ in chain}),
    }


def value_of(code: str, x: int) -> int:
    """What the reference solution returns: code of this file, not of a model."""
    namespace: dict[str, object] = {}
    exec(code, namespace)
    return namespace["f"](x)  # type: ignore[operator]


def word_tokenizer(rows: list[dict[str, object]]) -> PreTrainedTokenizerFast:
    """A token for each word, digit and sign of the problems, and one for a new line with its indentation."""
    splitter = pre_tokenizers.Split(_TOKENS, behavior="isolated")
    texts = [str(row[name]) for row in rows for name in ("prompt", "response")]
    pieces = sorted({piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)})
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def small_model(tokenizer: PreTrainedTokenizerFast) -> Olmo2ForCausalLM:
    """0.4 million parameters in the architecture of OLMo 2, whose tokenizer transformers loads as it was saved."""
    config = Olmo2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Olmo2ForCausalLM(config)


def supervised_start(
    model: Olmo2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    shown: list[dict[str, object]],
    held_out: list[dict[str, object]],
    max_steps: int = 2000,
) -> None:
    """Train on reference solutions until START of what is sampled for held-out problems would be the reference."""
    all_ids, all_labels = encode(tokenizer, shown)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    source = random.Random(0)
    for step in range(max_steps):
        model.train()
        chosen = source.sample(range(len(shown)), 64)
        input_ids, labels = all_ids[chosen], all_labels[chosen]
        logits = model(input_ids=input_ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and reference_probability(model, tokenizer, held_out) >= START:
            break
    model.eval()


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, object]]) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [B, L], and labels [B, L] that are -100 on the prompt and the padding."""
    pad = tokenizer.pad_token_id
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    answers = [[*tokenizer.encode(row["response"]), tokenizer.eos_token_id] for row in rows]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    input_ids, labels = torch.full((len(rows), length), pad), torch.full((len(rows), length), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels


@torch.no_grad()
def reference_probability(
    model: Olmo2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, object]]
) -> float:
    """The mean probability that a sampled completion is the reference solution."""
    model.eval()
    input_ids, labels = encode(tokenizer, rows)
    log_p = model(input_ids=input_ids).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    token_log_p = log_p.gather(2, targets.clamp_min(0)[..., None]).squeeze(-1)
    return float(token_log_p.masked_fill(targets < 0, 0.0).sum(1).exp().mean())
