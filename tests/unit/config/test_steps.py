from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.schema import LachesisConfig
from lachesis.config.steps import batches_ahead, oldest_sample, steps_of, with_steps


@pytest.mark.parametrize(
    ("epochs", "problems", "prompts", "parts", "iterations", "steps"),
    [
        (1, 100, 10, 1, 1, 10),
        (1, 101, 10, 1, 1, 11),
        (0.5, 100, 10, 1, 1, 5),
        (3, 7, 2, 1, 2, 22),
        (0.01, 10, 10, 1, 1, 1),
        (1, 100, 10, 5, 1, 10),
        (1, 101, 10, 5, 2, 30),
    ],
)
def test_steps_of_epochs(build, epochs, problems, prompts, parts, iterations, steps):
    batch = {"prompts_per_step": prompts, "steps_per_generation": parts}
    config = build(batch=batch, algorithm={"num_iterations": iterations})
    assert steps_of(config, epochs=epochs, problems=problems) == steps


def test_an_inexact_product_is_not_rounded_up(build):
    assert steps_of(build(batch={"prompts_per_step": 1}), epochs=0.1 + 0.2, problems=10) == 3


def test_with_steps(build):
    config = build(run={"steps": None, "epochs": 2.0})
    run = with_steps(config, problems=320).run
    assert (run.steps, run.epochs) == (20, None)
    assert with_steps(build(), problems=320).run.steps == 10


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 10), (0.25, 3), (0.001, 1)])
def test_checkpoints_and_evaluations_by_epochs_are_counted_in_steps(build, epochs, steps):
    config = build(checkpoint={"every_epochs": epochs}, evaluation={"every_epochs": epochs}, data={"eval_size": 2})
    counted = with_steps(config, problems=320)
    assert (counted.checkpoint_interval, counted.evaluation.every_steps) == (steps, steps)
    both = build(checkpoint={"every_epochs": epochs, "every_steps": 7}, evaluation={"every_steps": 7})
    counted = with_steps(both, problems=320)
    assert (counted.checkpoint_interval, counted.evaluation.every_steps) == (7, 7)


def test_a_warmup_that_is_longer_than_the_run(build):
    config = build(run={"steps": None, "epochs": 1.0}, optimizer={"warmup_steps": 11})
    with pytest.raises(ConfigError, match=r"are 10 steps, but optimizer\.warmup_steps is 11"):
        with_steps(config, problems=320)


@pytest.mark.parametrize(
    ("every", "depth", "iterations", "limit", "ahead"),
    [
        *((1, 1, 1, 4, 1), (1, 9, 1, 4, 4), (1, 9, 1, 0, 0), (1, 9, 1, None, 9)),
        *((3, 9, 1, 4, 2), (1, 9, 2, 4, 1), (6, 1, 1, 4, 0)),
    ],
)
def test_as_many_batches_are_ahead_as_keep_samples_young(every, depth, iterations, limit, ahead):
    found = batches_ahead(every_steps=every, depth=depth, iterations=iterations, max_staleness=limit)
    assert found == ahead
    if limit is not None and ahead:
        assert oldest_sample(every_steps=every, depth=ahead, iterations=iterations) <= limit


def test_a_run_that_shares_its_weights_with_an_engine_has_checkpoints():
    """They die with the engine. How often is a matter of what saving costs, unless the configuration says."""
    sections = {
        "run": {"steps": 100}, "model": {"path": "m"}, "data": {"path": "p"}, "rewards": {"functions": ["r.f"]},
        "engine": {"kind": "vllm"},
    }  # fmt: skip

    def often(**more: object) -> tuple[int, float]:
        config = LachesisConfig.model_validate(sections | more)
        assert config.saves_on_the_way is any((config.checkpoint_interval, config.checkpoint_share))
        return config.checkpoint_interval, config.checkpoint_share

    shared = {"kind": "shared_vllm"}
    assert often(bridge=shared) == (0, 0.02)
    assert often(bridge=shared, run={"steps": 1, "stages": ["sft", "grpo"]}, sft={"steps": 470}) == (0, 0.02)
    assert often(bridge=shared, checkpoint={"every_steps": 0}) == (0, 0)
    assert often(bridge=shared, checkpoint={"every_steps": 7, "max_share": 0.1}) == (7, 0)
    assert often(bridge=shared, checkpoint={"max_share": 0}) == (0, 0)
    assert often(bridge={"kind": "broadcast"}) == (0, 0)
    assert often(bridge={"kind": "broadcast"}, checkpoint={"max_share": 0.1}) == (0, 0.1)
    assert often(engine={"kind": "embedded"}) == (0, 0)
    lora = {"kind": "lora_only", "share_base": True}
    assert often(bridge=lora, adapter={"kind": "lora"}) == (0, 0.02)
    by_epochs = LachesisConfig.model_validate(sections | {"bridge": shared, "checkpoint": {"every_epochs": 0.5}})
    assert by_epochs.saves_on_the_way and by_epochs.checkpoint_share == 0
