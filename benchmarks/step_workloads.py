"""What train_step.py trains on: groups of random tokens, as a step has them, and trajectories of several turns."""

from __future__ import annotations

from functools import partial

import torch

from lachesis.common.types import Group, Prompt, Sample, VersionSpan

GROUPS, GENERATIONS, PROMPT_TOKENS, EQUAL_TOKENS = 8, 8, 128, 512
TREE_GROUPS, TRAJECTORIES, TURNS = 2, 8, 10


def completion_lengths(*, tiny: bool) -> list[int]:
    """64 lengths from 16 to 1,024, more short ones than long ones, so that all tokens are 33,120."""
    longest = 64 if tiny else 1024
    count = GROUPS * GENERATIONS
    lengths = [round(16 + (i / (count - 1)) ** 1.7 * (longest - 16)) for i in range(count)]
    if not tiny:
        excess = sum(lengths) + PROMPT_TOKENS * count - 33_120
        for i in range(abs(excess)):
            lengths[count - 2 - i % (count // 2)] -= 1 if excess > 0 else -1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [lengths[i] for i in order]


def random_tokens(count: int, *, vocab_size: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())


def workload(*, tiny: bool, vocab_size: int, shared_prompts: bool = True, equal: int | None = None) -> list[Group]:
    """Groups with random tokens; with ``shared_prompts=False`` each sequence has a prompt of its own.

    ``equal`` groups of completions that are all as long as in end_to_end.py, where it is given.
    """
    every = [EQUAL_TOKENS] * (equal * GENERATIONS) if equal else completion_lengths(tiny=tiny)
    lengths = [every[start : start + GENERATIONS] for start in range(0, len(every), GENERATIONS)]
    return groups_of(lengths, vocab_size=vocab_size, seed=1, shared_prompts=shared_prompts)


def groups_of(lengths: list[list[int]], *, vocab_size: int, seed: int, shared_prompts: bool = True) -> list[Group]:
    """Random tokens: for each group completions of these lengths."""
    tokens = partial(random_tokens, vocab_size=vocab_size, generator=torch.Generator().manual_seed(seed))
    groups = []
    for g, own in enumerate(lengths):
        prompt = tokens(PROMPT_TOKENS)
        samples = []
        for i, length in enumerate(own):
            samples.append(
                Sample(
                    prompt_ids=prompt if shared_prompts else tokens(PROMPT_TOKENS),
                    completion_ids=tokens(length),
                    logprobs=(float("nan"),) * length,
                    finish_reason="stop",
                    versions=VersionSpan(0, 0),
                    advantage=1.0 if i % 2 else -1.0,
                )
            )
        groups.append(Group(prompt=Prompt(id=str(g), token_ids=prompt, text=""), samples=tuple(samples)))
    return groups


def turns(*, tiny: bool, vocab_size: int) -> list[list[list[tuple[tuple[int, ...], tuple[int, ...]]]]]:
    """For each group and trajectory the turns: all tokens before, and those that are sampled."""
    generator = torch.Generator().manual_seed(2)
    tokens = partial(random_tokens, vocab_size=vocab_size, generator=generator)
    prompt, sampled, observed = (32, 8, 4) if tiny else (512, 128, 64)
    groups = []
    for _ in range(TREE_GROUPS):
        first = tokens(prompt)
        trajectories: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = []
        for number in range(TRAJECTORIES):
            split = number >= TRAJECTORIES // 2
            own = trajectories[number - TRAJECTORIES // 2][: TURNS // 2] if split else []
            while len(own) < TURNS:
                before = own[-1][0] + own[-1][1] + tokens(observed) if own else first
                own = [*own, (before, tokens(sampled))]
            trajectories.append(own)
        groups.append(trajectories)
    return groups


def tree_workload(*, tiny: bool, vocab_size: int, joined: bool) -> list[Group]:
    """Groups of trajectories: a sample for each turn, or with ``joined`` one for each trajectory."""
    groups = []
    for number, trajectories in enumerate(turns(tiny=tiny, vocab_size=vocab_size)):
        prompt = trajectories[0][0][0]
        samples = []
        for place, trajectory in enumerate(trajectories):
            parts = [(before, own, None) for before, own in trajectory]
            if joined:
                whole = trajectory[-1][0] + trajectory[-1][1]
                mask = [0] * len(whole)
                for before, own in trajectory:
                    mask[len(before) : len(before) + len(own)] = [1] * len(own)
                parts = [(prompt, whole[len(prompt) :], tuple(mask[len(prompt) :]))]
            for before, own, counts in parts:
                advantage = 1.0 if place % 2 else -1.0
                unknown = (float("nan"),) * len(own)
                samples.append(
                    Sample(before, own, unknown, "stop", VersionSpan(0, 0), mask=counts, advantage=advantage)
                )
        groups.append(Group(prompt=Prompt(id=str(number), token_ids=prompt, text=""), samples=tuple(samples)))
    return groups
