"""Work that the trainer does while the engine starts, so that the first step can follow soon.

A pass on a short model compiles and loads code for the first step. The policy itself is built too, if it does not
depend on the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from lachesis.common.device import resolve_device
from lachesis.common.hub import language_model_class
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.config.schema import LachesisConfig
from lachesis.run.parts import compiles, policy_of
from lachesis.train.distributed.strategy import SingleDevice
from lachesis.train.model.loading import WeightSource, context_length, load_tokenizer, made_trainable
from lachesis.train.model.repeatable import make_repeatable
from lachesis.train.pack import pack_batch
from lachesis.train.policy import Policy

_LAYERS = 2
_LONGEST = 347  # tokens of a sequence


class BuildPolicy(Protocol):
    def __call__(self, config: LachesisConfig, *, weights: WeightSource | None = None) -> Policy: ...


@dataclass
class EarlyPolicy:
    """The policy of a run, which may be built while the engine starts.

    ``alone`` is True if there are no other ranks, which would have to take part.
    """

    config: LachesisConfig
    build: BuildPolicy
    alone: bool = True
    built: Policy | None = None

    def begin(self) -> None:
        """Do the work that does not depend on the engine."""
        if self.alone:
            warm_up(self.config)
            if needs_no_engine(self.config):
                self.built = self.build(self.config)

    def finish(self, *, weights: WeightSource | None) -> Policy:
        """Return the policy, built on the engine's ``weights`` unless they are None."""
        return self.build(self.config, weights=weights) if self.built is None else self.built


def needs_no_engine(config: LachesisConfig) -> bool:
    """Return True if the policy can be built before the engine without taking GPU memory that the engine counts on."""
    own_memory = config.engine.kind == "vllm" and config.engine.devices is not None
    return not config.shares_weights and (own_memory or resolve_device(config.model.device).type == "cpu")


def warm_up(config: LachesisConfig) -> None:
    """Run a forward and backward pass like the first step's, on a few layers with random weights.

    Other layers of the same kind reuse the compiled code, so the first step does not wait for it. Nothing is done if
    nothing is gained: on a CPU, without compilation, for a model with custom code, for selected layers, or with
    quantized weights. Allocated memory stays with torch's allocator: an engine that measures the GPU while it starts
    must not see memory being freed.
    """
    device = resolve_device(config.model.device)
    if device.type == "cpu" or not compiles(config, device=device) or not _has_short_form(config):
        return
    with torch.random.fork_rng(devices=[device]):  # the run's random numbers stay the same
        pass_once(short_policy(config, device=device), config)


def pass_once(policy: Policy, config: LachesisConfig) -> None:
    """Run a forward and backward pass over two made-up groups."""
    vocab_size = policy.transformer.config.get_text_config().vocab_size
    longest = min(_LONGEST, context_length(config.model))
    groups = [_group(start, longest=longest, vocab_size=vocab_size) for start in (0, 1)]
    policy.accumulate(pack_batch(groups, config=config, policy=policy))


def short_policy(config: LachesisConfig, *, device: torch.device) -> Policy:
    """Build the policy of ``config`` on a model with few layers."""
    loaded = made_trainable(
        _short_model(config, device=device),
        load_tokenizer(config.model),
        config=config.model,
        adapter=config.adapter,
    )
    return policy_of(loaded, config, strategy=SingleDevice())


def _has_short_form(config: LachesisConfig) -> bool:
    model, layers = config.model, getattr(config.adapter, "layers", None)
    return not (model.trust_remote_code or model.train_layers or layers) and model.quantization == "none"


def _short_model(config: LachesisConfig, *, device: torch.device) -> PreTrainedModel:
    found = AutoConfig.from_pretrained(config.model.path)
    shorten(found.get_text_config())
    named = config.model.dtype
    dtype = (found.dtype or torch.float32) if named == "auto" else getattr(torch, named)
    with device:
        model = language_model_class(found).from_config(found, dtype=dtype)
    make_repeatable(model)
    return model.eval()


def shorten(config: PretrainedConfig) -> None:
    """Keep just enough of the first layers to have one of each kind, at least two.

    The vocabulary size stays: the head is compiled for the shape of its weight.
    """
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    layers = max((kinds.index(kind) + 1 for kind in set(kinds)), default=_LAYERS)
    config.num_hidden_layers = min(config.num_hidden_layers, max(layers, _LAYERS))
    if kinds:
        config.layer_types = list(kinds[: config.num_hidden_layers])


def _group(start: int, *, longest: int, vocab_size: int) -> Group:
    """Return a group with a prompt and completions of several lengths, at most ``longest`` tokens in total."""
    prompt = _tokens(longest // 5 + start, start=start, vocab_size=vocab_size)
    samples = []
    for number, share in enumerate((0.3, 0.45, 0.75)):
        completion = _tokens(int(share * longest) - start, start=start + number, vocab_size=vocab_size)
        sample = Sample(prompt, completion, (-1.0,) * len(completion), "stop", VersionSpan(0, 0))
        samples.append(replace(sample, advantage=1.0 if number % 2 else -0.5))
    return Group(Prompt(id=f"warm-up {start}", token_ids=prompt, text=""), tuple(samples))


def _tokens(length: int, *, start: int, vocab_size: int) -> tuple[int, ...]:
    return tuple((start + 5 * i + 3) % vocab_size for i in range(length))
