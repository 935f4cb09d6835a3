"""What has to hold of tokens that vLLM guessed and verified: whose they are, and how often each comes."""

from __future__ import annotations

from contextlib import closing

import torch
from transformers import PreTrainedModel

from lachesis.common.deadline import Deadline
from lachesis.common.types import GenerationRequest, SamplingParams
from lachesis.engines.http.client import HttpEngine
from lachesis.metrics.values import reduce_metrics
from tests.contracts.servers import TOKEN, Server
from tests.contracts.test_server_contract import soon

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
# Of a hundred steps, on a machine that has other work.
GENERATED_S = 240.0


def check_guesses(server: Server, model: PreTrainedModel, *, tolerance: float) -> None:
    """A server that was started with DRAFTS samples from the model, and counts its guesses."""
    with closing(HttpEngine([str(server.http.base_url)], token=TOKEN)) as engine:
        engine.connect(deadline=soon())
        for temperature in (0.5, 1.0):
            check_sampling(engine, model, temperature=temperature, tolerance=tolerance)
        found = reduce_metrics(engine.metrics())
    drafted = server.get("/bridge/info")["drafted"]
    assert 0 < drafted["accepted"] < drafted["tokens"] <= 4 * drafted["passes"]
    assert 0 < found["draft_acceptance"] < 1 < found["draft_length"] < 5
    assert 0 < found["draft_share"] < 1


@torch.no_grad()
def check_sampling(engine: HttpEngine, model: PreTrainedModel, *, temperature: float, tolerance: float) -> None:
    """Each logprob is the model's; sums of logprobs and of right guesses are, to four standard deviations."""
    prompt = (5, 6, 7, 8) * 6
    params = SamplingParams(64, temperature=temperature, extra={"ignore_eos": True})
    request = GenerationRequest(prompt, params, n=48, seed=1)
    (completions,) = engine.generate([request], deadline=Deadline("tokens that were guessed", GENERATED_S))
    tokens = torch.tensor([[*prompt, *completion.token_ids] for completion in completions])
    logits = model(input_ids=tokens).logits[:, len(prompt) - 1 : -1].double() / temperature
    logprobs, sampled = logits.log_softmax(-1), tokens[:, len(prompt) :, None]
    own = logprobs.gather(-1, sampled)[..., 0]
    read = torch.tensor([completion.logprobs for completion in completions], dtype=torch.float64)
    off = (own - read).abs()
    assert off.max() <= tolerance and off.mean() <= tolerance / 4
    mean = (logprobs.exp() * logprobs).sum(-1)
    spread = (logprobs.exp() * logprobs.square()).sum(-1) - mean.square()
    assert abs(deviations(own.flatten().tolist(), mean.flatten().tolist(), spread.flatten().tolist())) < 4
    right: list[float] = []
    chances: list[float] = []
    for row, chance in zip(tokens.tolist(), logprobs.exp().tolist(), strict=True):
        for place, probabilities in enumerate(chance, start=len(prompt)):
            if (guessed := guess(row[:place])) is not None:
                right.append(float(row[place] == guessed))
                chances.append(probabilities[guessed])
    assert abs(deviations(right, chances, [p * (1 - p) for p in chances])) < 4


def guess(tokens: list[int]) -> int | None:
    """What came after the longest of the n-grams at the end that was there before, as vLLM looks them up."""
    for size in (3, 2, 1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size]
    return None


def deviations(values: list[float], expected: list[float], variances: list[float]) -> float:
    """By how many standard deviations the sum of what was sampled differs from what was to be expected."""
    return (sum(values) - sum(expected)) / sum(variances) ** 0.5
