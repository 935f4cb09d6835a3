"""The experts that are noted are those of full forward passes over the same tokens."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from lachesis.engines.embedded.engine import EmbeddedEngine, Step
from lachesis.engines.embedded.experts import stacked_experts
from tests.tiny import tiny_model
from tests.unit.engines.embedded.test_engine import make, mixture, soon
from tests.waiting import LONG_S

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}


@torch.no_grad()
def chosen(model: PreTrainedModel, token_ids: tuple[int, ...]) -> np.ndarray:
    """Sorted experts [tokens, layers, k] of a pass over one sequence; zeros in layers without."""
    seen: dict[int, torch.Tensor] = {}
    hooks = [module.register_forward_pre_hook(lambda module, args, layer=layer: seen.update({layer: args[1]}))
             for layer, module in stacked_experts(model).items()]  # fmt: skip
    model(input_ids=torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    found = np.zeros((len(token_ids), model.config.num_hidden_layers, 3), dtype=np.int64)
    for layer, experts in seen.items():
        found[:, layer] = experts.sort(-1).values.numpy()
    return found


def routed(requests):
    return [replace(one, params=replace(one.params, routed_experts=True)) for one in requests]


def check(model: PreTrainedModel, requests, answers) -> int:
    compared = 0
    for request, completions in zip(requests, answers, strict=True):
        for one in completions:
            inputs = (request.prompt_ids + one.token_ids)[:-1]
            assert one.routed is not None and one.routed.chosen.dtype == np.uint8
            assert np.array_equal(np.sort(one.routed.chosen, axis=-1), chosen(model, inputs))
            compared += len(inputs)
    return compared


def test_prompts_of_any_length_rows_that_part_and_rows_that_end():
    model = tiny_model("qwen3_moe", **EXPERTS)
    requests = routed(mixture())
    assert check(model, requests, make(model).generate(requests, deadline=soon())) > 100


def test_samples_have_them_too():
    model = tiny_model("qwen3_moe", **EXPERTS)
    (group,) = make(model).sample([(5, 6, 7)], n=2, max_tokens=4, routed_experts=True)
    for sample in group.samples:
        assert sample.routed is not None
        inputs = (sample.prompt_ids + sample.completion_ids)[:-1]
        assert np.array_equal(np.sort(sample.routed.chosen, axis=-1), chosen(model, inputs))


def test_a_layer_without_experts_has_zeros():
    model = tiny_model("qwen3_moe", mlp_only_layers=[0], **EXPERTS)
    requests = routed(mixture(n=1))
    check(model, requests, make(model).generate(requests, deadline=soon()))


def test_who_does_not_ask_gets_none_and_nothing_is_left_behind():
    model = tiny_model("qwen3_moe", **EXPERTS)
    plain = mixture(n=2)
    mixed = [*routed(plain[:1]), *plain[1:]]
    engine = make(model)
    answers = engine.generate(mixed, deadline=soon())
    assert [one.routed is None for completions in answers for one in completions] == [False] * 2 + [True] * 6
    assert all(one.routed is None for completions in engine.generate(plain, deadline=soon()) for one in completions)
    assert not any(module._forward_pre_hooks for module in stacked_experts(model).values())


def test_a_listener_hears_of_them_with_the_last_token():
    model, steps = tiny_model("qwen3_moe", **EXPERTS), list[Step]()
    requests = routed(mixture(n=2))
    answers = make(model).generate(requests, deadline=soon(), listener=lambda step: steps.append(step) or ())
    heard = {(int(step.requests[row]), int(step.completions[row])): one for step in steps
             for row, one in enumerate(step.routed) if one is not None}  # fmt: skip
    assert all(
        (reason is None) == (one is None) for s in steps for reason, one in zip(s.reasons, s.routed, strict=True)
    )
    for index, completions in enumerate(answers):
        for number, one in enumerate(completions):
            assert one.routed is not None and np.array_equal(heard[index, number].chosen, one.routed.chosen)


def test_what_others_compute_between_two_tokens_is_not_noted():
    """A trainer uses the same modules while the engine gives way."""
    model = tiny_model("qwen3_moe", **EXPERTS)
    engine: EmbeddedEngine = make(model)
    requests, used = routed(mixture(n=1)), threading.Event()

    def meanwhile() -> None:
        with engine.exclusive(), torch.no_grad():
            assert not any(module._forward_pre_hooks for module in stacked_experts(model).values())
            model(input_ids=torch.arange(5, 25)[None])
        used.set()

    thread = threading.Thread(target=meanwhile)

    def listener(step: Step) -> tuple[int, ...]:
        if not thread.ident:
            thread.start()
            while not engine.gate._guests and not used.is_set():
                pass
        return ()

    answers = engine.generate(requests, deadline=soon(), listener=listener)
    assert used.wait(LONG_S)
    thread.join()
    check(model, requests, answers)
