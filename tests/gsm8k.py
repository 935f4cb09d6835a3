"""Real questions of GSM8K, and tiny models that read them: nothing is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lachesis.plugins.atropos.environments.shipped.gsm8k import Gsm8k, Gsm8kConfig, MathProblem, load_split
from tests.tiny import tiny_model

DATA = Path(__file__).parent / "data" / "gsm8k"
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
NOT_THINKING = "<think></think>"
CONTEXT = 768
LEARNED = 4
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}" + NOT_THINKING + "{% endif %}{% endif %}"
)
_CALCULATION = re.compile(r"<<[^>]*>>")
# To the brace that ends the box: one that is never closed is no answer.
_FRACTION = re.compile(r"\\frac\{(-?\d+)\}\{(\d+)\}\}")
_NUMBER = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)\}")


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs learned from these questions and answers, digits one by one, with the chat format of Qwen."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((text for row in rows("train") for text in row.values()), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=END, model_max_length=CONTEXT)
    fast.add_tokens(list(TAGS))
    fast.chat_template = _TEMPLATE
    return fast


def rows(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def write_model(directory: Path, **overrides: int) -> Path:
    """A random model with that tokenizer."""
    words = tokenizer()
    sizes = {"vocab_size": len(words), "max_position_embeddings": CONTEXT}
    ids = {"pad_token_id": words.pad_token_id, "bos_token_id": None, "eos_token_id": words.eos_token_id}
    tiny_model("qwen3", **(sizes | ids | overrides)).save_pretrained(directory)
    words.save_pretrained(directory)
    return directory


@dataclass(frozen=True, slots=True)
class Written:
    """What a model has learned to write after a question of ``split``."""

    problem: MathProblem
    text: str


def answers() -> list[Written]:
    """For each of the first LEARNED questions a right answer and a wrong one, each in a form of its own; and the
    gold solution of the first question that is held out."""
    train, solutions = load_split(str(DATA), "train")[:LEARNED], [row["answer"] for row in rows("train")]
    written = []
    for number, (problem, solution) in enumerate(zip(train, solutions, strict=False)):
        gold = int(problem.answer)
        right = (f"{gold}", f"{gold}.0", f"\\frac{{{2 * gold}}}{{2}}", f"0{gold}")[number % 4]
        wrong = (f"\\boxed{{{gold + 1}}}", f"{gold}", f"\\boxed{{{gold}}} or \\boxed{{{gold}0}}")[number % 3]
        reason = _last_line(solution)
        written += [Written(problem, f"{reason}\n\\boxed{{{right}}}"), Written(problem, f"{reason}\nI say {wrong}")]
    held_out = load_split(str(DATA), "test")[0]
    return [*written, Written(held_out, f"{_last_line(rows('test')[0]['answer'])}\n\\boxed{{{held_out.answer}}}")]


def _last_line(solution: str) -> str:
    """The last line of a solution before its number, without the calculations that are set off in it."""
    return _CALCULATION.sub("", solution.rpartition("\n####")[0].splitlines()[-1])


def number(text: str) -> Fraction:
    """A gold answer."""
    return Fraction(text.replace(",", ""))


def value(text: str) -> Fraction | None:
    """The number in the last box of a text, read without any library; None where there is no closed box, or no number
    in it."""
    boxed = text.rpartition("\\boxed{")[2] if "\\boxed{" in text else ""
    fraction, plain = _FRACTION.match(boxed), _NUMBER.match(boxed)
    if fraction is not None:
        return Fraction(int(fraction[1]), int(fraction[2]))
    return number(plain[1]) if plain is not None else None


def write_learned_model(directory: Path) -> Path:
    """A model that has learned :func:`answers` by heart: right about every other time on the first questions."""
    words = tokenizer()
    environment = Gsm8k(Gsm8kConfig(), client=None, tokenizer=words)  # type: ignore[arg-type]
    learned = answers()
    return write_taught_model(
        directory,
        prompts=[list(environment.prompt(one.problem)[0]) for one in learned],
        texts=[one.text for one in learned],
    )


def write_taught_model(
    directory: Path, *, prompts: Sequence[list[int]], texts: Sequence[str], least: float = 0.7
) -> Path:
    """A model that goes on from each prompt with its text, or with each of its texts equally often, near enough:
    ``least`` is the smallest part of its share that any of them gets."""
    words = tokenizer()
    write_model(directory, hidden_size=64, intermediate_size=128)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    share = torch.tensor([1 / list(prompts).count(prompt) for prompt in prompts])
    inputs, labels = _padded(prompts, [list(words(text + END)["input_ids"]) for text in texts])  # type: ignore[arg-type]
    where = labels[:, 1:] >= 0
    targets, row = labels[:, 1:][where], where.nonzero()[:, 0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    for _ in range(500):
        hidden = model.model(input_ids=inputs).last_hidden_state[:, :-1][where]
        log_p = model.lm_head(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        chosen = torch.zeros(len(prompts)).index_add(0, row, log_p)
        if float((chosen.detach().exp() / share).min()) >= least:
            break
        optimizer.zero_grad()
        (-chosen.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        raise AssertionError("the tiny model did not learn its answers")
    model.save_pretrained(directory)
    return directory


def _padded(prompts: Sequence[list[int]], targets: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels [N, longest]; labels of prompts and padding are -100."""
    length = max(len(p) + len(t) for p, t in zip(prompts, targets, strict=True))
    inputs, labels = torch.zeros(len(prompts), length, dtype=torch.long), torch.full((len(prompts), length), -100)
    for row, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        inputs[row, : len(prompt) + len(target)] = torch.tensor(prompt + target)
        labels[row, len(prompt) : len(prompt) + len(target)] = torch.tensor(target)
    return inputs, labels
