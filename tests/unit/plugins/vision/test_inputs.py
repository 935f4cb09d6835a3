"""The engine's rows and the trainer's are shown the same images at the same positions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import pictures
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, Qwen2VLImageProcessorPil

from lachesis.common.deadline import Deadline
from lachesis.common.errors import ModelError
from lachesis.common.group_codec import decode_group, encode_group
from lachesis.common.prompt_images import PromptImages, with_later
from lachesis.common.types import GenerationRequest, Group, Prompt, Sample, SamplingParams
from lachesis.engines.embedded.engine import EmbeddedEngine
from lachesis.engines.http.dispatch import request_body
from lachesis.engines.serving.bodies import Refused
from lachesis.engines.serving.generation import GenerateBody, parse_sampled
from lachesis.plugins.vision.inputs import image_inputs, joined
from lachesis.plugins.vision.settle import placeholders
from lachesis.train.batch import pack
from lachesis.train.model.forward import loss_token_logprobs, plan_forward

IMAGE = 3
_FIELDS = ("seed", "temperature", "max_tokens", "skip_special_tokens")


def qwen_prompt(number: int, colour: str, size: tuple[int, int]) -> Prompt:
    """A prompt for a model with a position each for time, height and width."""
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024)
    made = images(images=[pictures.picture(colour, size=size)], return_tensors="np")
    inputs = {name: np.asarray(made[name]) for name in ("pixel_values", "image_grid_thw")}
    places = int(inputs["image_grid_thw"].prod()) // 4
    types = np.array([0, 0, *[1] * places, 0, 0])
    ids = (7, 5, *[IMAGE] * places, 6, 9)
    thumbnails = ["data:image/jpeg;base64,AA=="]
    return Prompt(str(number), ids, "", images=PromptImages(inputs, {"mm_token_type_ids": types}, [size], thumbnails))


def qwen() -> PreTrainedModel:
    text = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 1, "bos_token_id": None}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    tower |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [0], "initializer_range": 0.25}
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=text | {"initializer_range": 0.25}, vision_config=tower, image_token_id=IMAGE,
        video_token_id=4, vision_start_token_id=5, vision_end_token_id=6, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config).eval()


PROMPTS = [
    qwen_prompt(0, "red", (16, 24)),
    qwen_prompt(1, "blue", (32, 16)),
    qwen_prompt(2, "green", (16, 24)),
    Prompt("3", (7, 9, 10), ""),
]


def sampled(model: PreTrainedModel, prompts: list[Prompt]) -> list[Group]:
    """Three completions of each prompt by the embedded engine."""
    engine = EmbeddedEngine(model, eos_token_ids=[1], pad_token_id=0, max_batch_size=16, max_context=100)
    params = SamplingParams(max_tokens=8, stop_token_ids=placeholders(model.config))
    requests = [
        GenerationRequest(one.token_ids, params, 3, seed, images=one.images) for seed, one in enumerate(prompts)
    ]
    answers = engine.generate(requests, deadline=Deadline("test", 60.0, "none"))
    return [
        Group(
            prompt,
            tuple(
                Sample(prompt.token_ids, one.token_ids, one.logprobs, one.finish_reason, one.versions, advantage=1.0)
                for one in answer
            ),
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def largest_difference(model: PreTrainedModel, groups: list[Group]) -> float:
    """The trainer's logprobs against those of the samples."""
    plan = plan_forward(model, packing="padded")
    batch = pack(groups, max_tokens=1 << 20, share_prefixes=False)
    with torch.no_grad():
        found = [(loss_token_logprobs(model, one, plan=plan).logprobs, one) for one in batch.micro_batches]
    return max(float((logprobs - micro.sampling_logprobs).abs().max()) for logprobs, micro in found)


def test_the_trainer_has_the_logprobs_of_the_engine():
    model = qwen()
    groups = sampled(model, PROMPTS)
    assert largest_difference(model, groups) < 1e-4
    # Prompts 0 and 2 have the same tokens: with each other's picture the logprobs are others.
    swapped = [Group(PROMPTS[2], groups[0].samples), Group(PROMPTS[0], groups[2].samples)]
    assert largest_difference(model, swapped) > 1e-2


@torch.no_grad()
def test_they_are_those_of_transformers_alone():
    model = qwen()
    (group,) = sampled(model, PROMPTS[:1])
    prompt, sample = group.prompt, group.samples[0]
    assert prompt.images is not None
    ids = torch.tensor([prompt.token_ids + sample.completion_ids])
    types = torch.zeros_like(ids)
    types[0, : len(prompt.token_ids)] = torch.from_numpy(prompt.images.token_types["mm_token_type_ids"])
    shown = {name: torch.from_numpy(value) for name, value in prompt.images.inputs.items()}
    # The last token is no input: it may be a placeholder.
    output = model(input_ids=ids[:, :-1], mm_token_type_ids=types[:, :-1], **shown)
    logits = output.logits[0, len(prompt.token_ids) - 1 :]
    own = logits.log_softmax(-1).gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
    assert torch.allclose(own, torch.tensor(sample.logprobs), atol=1e-4)


def test_a_completion_ends_with_a_placeholder_that_it_samples():
    assert placeholders(qwen().config) == (IMAGE, 4)


def test_images_survive_a_checkpoint():
    group = Group(PROMPTS[0], ())
    found = decode_group(encode_group(group)).prompt.images
    assert found is not None
    assert PROMPTS[0].images is not None
    for name, value in PROMPTS[0].images.inputs.items():
        assert np.array_equal(found.inputs[name], value)
        assert found.inputs[name].dtype == value.dtype
    assert (found.sizes, found.thumbnails) == (PROMPTS[0].images.sizes, PROMPTS[0].images.thumbnails)
    shown = encode_group(group, whole=False)["prompt"]
    assert "images" not in shown
    assert shown["thumbnails"] == ["data:image/jpeg;base64,AA=="]


def later(sample: Sample, prompt: Prompt) -> Sample:
    """A sample after which a tool answered with the prompt's image, before a last turn of one token."""
    assert prompt.images is not None
    said = tuple(token for token in sample.completion_ids if token != IMAGE)
    given = (*said, *prompt.token_ids)
    return replace(
        sample,
        completion_ids=(*given, 9),
        logprobs=(*[0.0] * len(given), -1.0),
        mask=(*[0] * len(given), 1),
        images=(replace(prompt.images, first=len(sample.prompt_ids) + len(said)),),
    )


def test_images_of_later_answers_are_seen_where_they_are():
    """Of a sample after a prompt with an image, and of one after a text alone."""
    model = qwen()
    groups = [
        Group(one.prompt, tuple(later(sample, PROMPTS[1]) for sample in one.samples))
        for one in sampled(model, [PROMPTS[0], PROMPTS[3]])
    ]
    turns = [
        GenerationRequest(
            (*sample.prompt_ids, *sample.completion_ids[:-1]),
            SamplingParams(max_tokens=1),
            images=with_later(group.prompt.images, sample.images),
        )
        for group in groups
        for sample in group.samples
    ]
    engine = EmbeddedEngine(model, eos_token_ids=[1], pad_token_id=0, max_batch_size=16, max_context=100)
    answers = iter(engine.generate(turns, deadline=Deadline("test", 60.0, "none")))
    as_sampled = [
        replace(
            group,
            samples=tuple(
                replace(
                    sample,
                    completion_ids=(*sample.completion_ids[:-1], *answer.token_ids),
                    logprobs=(*sample.logprobs[:-1], *answer.logprobs),
                )
                for sample in group.samples
                for (answer,) in [next(answers)]
            ),
        )
        for group in groups
    ]
    assert largest_difference(model, as_sampled) < 1e-4
    found = decode_group(encode_group(as_sampled[0]))
    assert largest_difference(model, [found]) < 1e-4, "from a checkpoint too"
    other = [
        replace(sample, images=(replace(PROMPTS[2].images, first=sample.images[0].first),)) for sample in found.samples
    ]
    with pytest.raises(ValueError, match="image tokens do not match"):
        largest_difference(model, [replace(found, samples=tuple(other))])
    shown = encode_group(as_sampled[0], whole=False)["samples"][0]
    assert "images" not in shown
    assert shown["thumbnails"] == ["data:image/jpeg;base64,AA=="]


def test_images_go_to_a_server_and_come_out_as_they_were():
    prompt = PROMPTS[1]
    assert prompt.images is not None
    sent = json.loads(
        json.dumps(request_body(GenerationRequest(prompt.token_ids, SamplingParams(4), images=prompt.images)))
    )
    found = parse_sampled(
        GenerateBody, sent, sampling_fields={"seed", "temperature", "max_tokens", "skip_special_tokens"}
    )
    assert found.images is not None
    assert found.images.sizes == [(32, 16)]
    for name, value in prompt.images.inputs.items():
        assert np.array_equal(found.images.inputs[name], value)
    with pytest.raises(Refused, match="the images cannot be read"):
        parse_sampled(GenerateBody, sent | {"images": {"inputs": {"pixel_values": [1]}}}, sampling_fields=_FIELDS)
    with pytest.raises(Refused, match="images"):
        parse_sampled(GenerateBody, sent | {"images": "a.png"}, sampling_fields=_FIELDS)


def test_inputs_of_other_sizes_are_padded_with_zeros():
    found = joined([torch.ones(1, 2, 2), torch.ones(1, 1, 3)])
    assert found.tolist() == [[[1, 1, 0], [1, 1, 0]], [[1, 1, 1], [0, 0, 0]]]


def test_token_types_that_do_not_fit_are_an_error_with_both_numbers():
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ModelError, match=r"counts 10 tokens up to the end of the images, .* has 2"):
        image_inputs(qwen(), [PROMPTS[0].images], ids=ids, valid=torch.ones(1, 2, dtype=torch.bool))
