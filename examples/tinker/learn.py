"""A program for `lachesis tinker-server`: GRPO with the client `tinker`, on sums or on differences.

Two people run it at once against one server, each with a key and a task:

    TINKER_API_KEY=tml-alice python learn.py --task sums
    TINKER_API_KEY=tml-bob python learn.py --task differences
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker import types

LARGEST = 20
HELD_OUT = 100
MAX_TOKENS = 32
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Problem:
    """A question to the model, and the number that is right."""

    question: str
    answer: int


def problems(task: str) -> list[Problem]:
    """Return all problems of a task with numbers from 1 to LARGEST, shuffled; the first HELD_OUT are held out."""
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    if task == "sums":
        found = [Problem(f"What is {a} + {b}?", a + b) for a, b in pairs]
    else:
        found = [Problem(f"What is {a + b} - {b}?", a) for a, b in pairs]
    random.Random(0).shuffle(found)
    return found


def reward(text: str, answer: int) -> float:
    """Return 1 if the last number of a text is the answer, else 0."""
    numbers = NUMBER.findall(text)
    return float(bool(numbers) and int(numbers[-1]) == answer)


def prompt_of(tokenizer: Any, problem: Problem) -> list[int]:
    """Return the token ids of a question, as the model's chat template writes it."""
    messages = [{"role": "user", "content": problem.question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def datum(prompt: Sequence[int], sequence: Any, advantage: float) -> types.Datum:
    """Return a sampled answer with its advantage; the tokens of the prompt are not learned from."""
    before, tokens = len(prompt) - 1, [*prompt, *sequence.tokens]
    logprobs = np.array([0.0] * before + list(sequence.logprobs), np.float32)
    advantages = np.array([0.0] * before + [advantage] * len(sequence.tokens), np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "logprobs": logprobs, "advantages": advantages},
    )


def held_out_accuracy(sampler: Any, tokenizer: Any, held_out: Sequence[Problem]) -> float:
    """Return the share of held-out problems that the model answers right, decoded greedily."""
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    asked = [sampler.sample(types.ModelInput.from_ints(prompt_of(tokenizer, one)), 1, params) for one in held_out]
    texts = [tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True) for future in asked]
    return float(np.mean([reward(text, one.answer) for text, one in zip(texts, held_out, strict=True)]))


def train(arguments: argparse.Namespace) -> None:
    """Train an adapter, and print a line of JSON for each step."""
    service = tinker.ServiceClient()
    model = arguments.model or tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    run = service.create_lora_training_client(base_model=model, rank=arguments.rank, seed=arguments.seed).result()
    tokenizer = run.get_tokenizer()
    found = problems(arguments.task)
    held_out, pool, draw = found[:HELD_OUT], found[HELD_OUT:], random.Random(arguments.seed)
    started = time.perf_counter()
    for step in range(arguments.steps + 1):
        sampler = run.save_weights_and_get_sampling_client().result()
        line: dict[str, Any] = {"task": arguments.task, "step": step}
        if step % arguments.every == 0:
            line["held_out"] = held_out_accuracy(sampler, tokenizer, held_out)
        if step < arguments.steps:
            line |= one_step(run, sampler, tokenizer, draw.sample(pool, arguments.prompts), arguments, seed=step)
        line["seconds"] = round(time.perf_counter() - started, 2)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def one_step(
    run: Any, sampler: Any, tokenizer: Any, drawn: Sequence[Problem], arguments: argparse.Namespace, *, seed: int
) -> dict[str, float]:
    """Sample a group of answers to each problem, take the group's mean from their rewards, and make one update."""
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
    prompts = [prompt_of(tokenizer, one) for one in drawn]
    asked = [sampler.sample(types.ModelInput.from_ints(one), arguments.group, params) for one in prompts]
    data, rewards = [], []
    for prompt, problem, future in zip(prompts, drawn, asked, strict=True):
        sequences = future.result().sequences
        texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in sequences]
        group = np.array([reward(text, problem.answer) for text in texts])
        rewards.append(group.mean())
        if group.std() > 0:
            advantages = (group - group.mean()) / group.std()
            data += [datum(prompt, one, value) for one, value in zip(sequences, advantages, strict=True)]
    tokens = sum(len(one.loss_fn_inputs["target_tokens"].data) for one in data)
    if data:
        # The service sums the loss over tokens, and Adam's step does not depend on the scale of the gradient.
        passed = run.forward_backward(data, "importance_sampling")
        stepped = run.optim_step(types.AdamParams(learning_rate=arguments.learning_rate))
        passed.result(), stepped.result()
    return {"reward": float(np.mean(rewards)), "trained_tokens": tokens}


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["sums", "differences"], default="sums")
    parser.add_argument("--model", help="name of the base model; the server's first by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
