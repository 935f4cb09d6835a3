"""Images with vLLM: its logprobs are the trainer's, on the same tokens, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.objects import NamedObjects
from lachesis.common.prompt_images import with_later
from lachesis.common.types import GenerationRequest, Group, Prompt, Sample, SamplingParams
from lachesis.config.schema import ModelConfig
from lachesis.engines.base import Engine
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.engines.http.client import HttpEngine
from lachesis.plugins.vision.reading import ImageReader
from lachesis.rollouts.datasets import load_problems
from lachesis.train.batch import pack
from lachesis.train.model.forward import loss_token_logprobs, plan_forward
from tests import pictures
from tests.contracts.servers import TOKEN
from tests.contracts.vllm_server import needs_vllm, start_vllm

# vLLM's attention on the CPU knows no heads smaller than 32.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96, "initializer_range": 0.15}


@dataclass(frozen=True, slots=True)
class Served:
    """An engine, and the model that it serves."""

    engine: Engine
    model: PreTrainedModel
    place: Path


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=[needs_vllm])])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("images")
    place, model = pictures.save(directory / "model", **SIZES), pictures.model(**SIZES)
    if request.param == "embedded":
        engine = EmbeddedEngine(model, eos_token_ids=[1], pad_token_id=0, max_batch_size=8, max_context=100)
        yield Served(engine, model, place)
        return
    log = directory / "server.log"
    with start_vllm(place, directory, directory / "sessions", log, lora=False) as url:
        engine = HttpEngine([url], token=TOKEN)
        yield Served(engine, model, place)
        engine.close()


def prompts(place: Path) -> list[Prompt]:
    """One image, two images of different sizes, and a text."""
    rows = [
        {"prompt": [{"role": "user", "content": "what colour"}], "images": [pictures.picture("red")]},
        {
            "prompt": [{"role": "user", "content": "what colour"}],
            "images": [pictures.picture("blue", size=(24, 12)), pictures.picture("yellow")],
        },
        {"prompt": [{"role": "user", "content": "what colour"}], "images": None},
    ]
    given, tokenizer = NamedObjects(), pictures.tokenizer()
    reader = ImageReader(ModelConfig(path=str(place)), tokenizer)
    return load_problems(given.give("data", rows), tokenizer=tokenizer, images=reader)


def sampled(served: Served, asked: list[Prompt]) -> list[Group]:
    params = SamplingParams(max_tokens=6, stop_token_ids=(2,))
    requests = [GenerationRequest(one.token_ids, params, 3, seed, images=one.images) for seed, one in enumerate(asked)]
    answers = served.engine.generate(requests, deadline=Deadline("contract: images", 120.0))
    return [
        Group(
            prompt,
            tuple(
                Sample(prompt.token_ids, one.token_ids, one.logprobs, one.finish_reason, one.versions, advantage=1.0)
                for one in answer
            ),
        )
        for prompt, answer in zip(asked, answers, strict=True)
    ]


@torch.no_grad()
def largest_difference(served: Served, groups: list[Group]) -> float:
    plan = plan_forward(served.model, packing="padded")
    batch = pack(groups, max_tokens=1 << 20, share_prefixes=False)
    found = [(loss_token_logprobs(served.model, one, plan=plan).logprobs, one) for one in batch.micro_batches]
    return max(float((logprobs - micro.sampling_logprobs).abs().max()) for logprobs, micro in found)


@pytest.mark.timeout(600)
def test_logprobs_with_images_are_the_trainers(served: Served):
    asked = prompts(served.place)
    groups = sampled(served, asked)
    assert all(len(sample.completion_ids) > 0 for group in groups for sample in group.samples)
    assert largest_difference(served, groups) < 1e-3
    # The image counts: with another one in its place the trainer's logprobs are others.
    green = [{"prompt": [{"role": "user", "content": "what colour"}], "images": [pictures.picture("green")]}]
    given, tokenizer = NamedObjects(), pictures.tokenizer()
    reader = ImageReader(ModelConfig(path=str(served.place)), tokenizer)
    (other,) = load_problems(given.give("data", green), tokenizer=tokenizer, images=reader)
    assert largest_difference(served, [Group(other, groups[0].samples)]) > 1e-2


@pytest.mark.timeout(600)
def test_images_of_a_tools_answer_are_seen_after_those_of_the_prompt(served: Served):
    """Of the second turn alone the logprobs are compared: the first is the same as above."""
    first, two, text = prompts(served.place)
    turns: list[Prompt] = []
    for prompt, answer in ((first, two), (text, first)):
        assert answer.images is not None
        later = (replace(answer.images, first=len(prompt.token_ids)),)
        turns.append(
            replace(prompt, token_ids=prompt.token_ids + answer.token_ids, images=with_later(prompt.images, later))
        )
    groups = sampled(served, turns)
    assert largest_difference(served, groups) < 1e-3


@pytest.mark.timeout(600)
def test_other_counts_are_an_error_with_both(served: Served):
    if isinstance(served.engine, EmbeddedEngine):
        pytest.skip("it computes with the trainer's own model, which takes what the processor made")
    first = prompts(served.place)[0]
    assert first.images is not None
    fewer = tuple(token for place, token in enumerate(first.token_ids) if place != first.token_ids.index(2))
    request = GenerationRequest(fewer, SamplingParams(max_tokens=2), images=first.images)
    words = rf"expects {pictures.PER_IMAGE} placeholders .* made {pictures.PER_IMAGE - 1}"
    with pytest.raises(EngineError, match=words) as caught:
        served.engine.generate([request], deadline=Deadline("contract: images", 120.0))
    assert "preprocessor_config.json" in caught.value.remedy
    assert sampled(served, [first]), "and the server goes on"
