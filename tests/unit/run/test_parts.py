"""How what was generated is packed, repeated and tried again, by the sections of a configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.config.steps import with_steps
from lachesis.run.feeds import build_reroll, repeated
from lachesis.train.distributed.strategy import SingleDevice
from lachesis.train.pack import pack_batch
from tests.unit.pipeline.sources import ScriptedSource, group
from tests.unit.train.test_iterations import CountedFeed


def test_prompts_are_tried_again_in_a_run_that_is_counted_in_epochs_too(config: Any):
    run = {"steps": None, "epochs": 2.0}
    built = config({"path": "train.jsonl"}, run=run, batch={"prompts_per_step": 2},
                   pipeline={"reroll_start_fraction": 0.5})  # fmt: skip
    reroll = build_reroll(with_steps(built, problems=10))
    assert reroll is not None
    reroll.note([group("hard", (0.0, 0.0))])
    source = ScriptedSource()
    for reroll.step, tried in ((4, 0), (5, 1)):  # of 10 steps
        assert reroll.requeue_into(source) == tried
    assert source.back == ["hard"]


@pytest.mark.parametrize(
    ("correction", "recompute", "fresh", "replayed"),
    [("none", True, "s", "trainer"), ("none", False, "s", "s"), ("token_truncate", True, "trainer", "trainer")],
)
def test_old_logprobs_are_the_trainers_where_the_sampler_is_corrected_for(
    config: Any, correction: str, recompute: bool, fresh: str, replayed: str
):
    """What a replayed group or one that was generated ahead is compared with; the sampler's own are there anyway."""
    built = config({"path": "train.jsonl"}, algorithm={"sampler_correction": correction},
                   pipeline={"replay_size": 4, "replay_recompute_logps": recompute})  # fmt: skip
    policy: Any = SimpleNamespace(
        ignores_zero_advantage=False, plan=SimpleNamespace(packed=True), strategy=SingleDevice()
    )
    silent = group("1", (0.0, 0.0))
    for replaces, expected in ((None, fresh), (silent, replayed)):
        one = group("0", (0.0, 1.0))
        one = replace(one, samples=tuple(replace(s, advantage=1.0) for s in one.samples), replaces=replaces)
        (micro,) = pack_batch([one], config=built, policy=policy).micro_batches
        assert micro.sampling_logprobs.tolist() == [-0.5, -0.5]
        assert bool(micro.old_logprobs.isnan().all()) is (expected == "trainer")
        if expected == "s":
            assert micro.old_logprobs.tolist() == [-0.5, -0.5]


def test_the_rounding_of_an_engine_does_not_decide_which_sequences_gspo_clips(config: Any):
    level = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    built = config({"path": "train.jsonl"}, algorithm=level)
    policy: Any = SimpleNamespace(
        ignores_zero_advantage=False, plan=SimpleNamespace(packed=True), strategy=SingleDevice()
    )
    one = group("0", (0.0, 1.0))
    one = replace(one, samples=tuple(replace(sample, advantage=1.0) for sample in one.samples))
    (micro,) = pack_batch([one], config=built, policy=policy).micro_batches
    assert bool(micro.old_logprobs.isnan().all())


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_checkpoint_between_two_batches_fits_any_number_of_uses(config: Any, before: int, after: int):
    def feed(uses: int, inner: CountedFeed) -> Any:
        algorithm = {"num_iterations": uses}
        return repeated(inner, config({"path": "train.jsonl"}, algorithm=algorithm), pack=lambda groups: inner.next())

    first, inner = feed(before, CountedFeed()), CountedFeed()
    for step in range(before):
        first.next()
        first.advance(step + 1)
    second = feed(after, inner)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(after):
        second.next()
        second.advance(before + step + 1)
    assert inner.calls == ["next 2", f"advance {before + after}"]
