"""Which problems a run loads, to train on and to evaluate with."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lachesis.common.sandbox.choice import VARIABLE
from lachesis.config.schema import LachesisConfig
from lachesis.config.steps import with_steps
from lachesis.run.parts import build_reroll, build_reward_functions, build_stream, load_data, pack_batch, repeated
from lachesis.train.distributed.strategy import SingleDevice
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.pipeline.sources import ScriptedSource, group
from tests.unit.train.test_iterations import CountedFeed

ENVIRONMENTS = {
    "source": {"kind": "atropos"},
    "engine": {"kind": "embedded_server"},
    "bridge": {"kind": "shared_vllm"},
}


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """A configuration on a tiny model; ``train.jsonl`` has 10 problems, ``test.jsonl`` 3."""
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    for name, count in (("train", 10), ("test", 3)):
        rows = [json.dumps({"prompt": f"{name}{i}="}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))

    def build(data: dict[str, Any], **sections: Any) -> LachesisConfig:
        paths = {key: str(tmp_path / value) if key.endswith("path") else value for key, value in data.items()}
        return LachesisConfig.model_validate(
            {
                "run": {"steps": 3},
                "model": {"path": str(tmp_path / "model")},
                "sampling": {"max_completion_length": 8},
                "rewards": {"functions": ["a.b"]},
                "data": paths,
                **sections,
            }
        )

    return build


def texts(prompts: list[Any]) -> set[str]:
    return {prompt.columns["prompt"][:-2] for prompt in prompts}


def test_a_dataset_with_a_file_of_its_own_to_evaluate_with(config: Any):
    problems, held_out = load_data(config({"path": "train.jsonl", "eval_path": "test.jsonl"}))
    assert (len(problems), len(held_out)) == (10, 3)
    assert (texts(problems), texts(held_out)) == ({"train"}, {"test"})


def test_a_dataset_of_which_a_part_is_held_out(config: Any):
    problems, held_out = load_data(config({"path": "train.jsonl", "eval_size": 4}))
    assert (len(problems), len(held_out)) == (6, 4)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, 0),
        ({"path": "train.jsonl"}, 0),
        ({"eval_path": "test.jsonl"}, 3),
        ({"path": "train.jsonl", "eval_path": "test.jsonl"}, 3),
        ({"path": "train.jsonl", "eval_size": 4}, 4),
    ],
)
def test_environments_have_problems_of_their_own_and_the_held_out_ones_are_loaded(
    config: Any, data: dict[str, Any], expected: int
):
    problems, held_out = load_data(config(data, **ENVIRONMENTS))
    assert problems == []
    assert len(held_out) == expected


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


@pytest.mark.parametrize(("sandbox", "said"), [("auto", None), ("none", "none"), ("docker:image", "docker:image")])
def test_rewards_use_the_sandbox_of_the_configuration(config, monkeypatch: pytest.MonkeyPatch, sandbox, said):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    functions = ["grpo_code.code_execution_reward_func"]
    build_reward_functions(config({"path": "train.jsonl"}, rewards={"functions": functions, "sandbox": sandbox}))
    assert os.environ.get(VARIABLE) == said


def test_filter_and_order_are_those_of_the_configuration(config: Any):
    made = config({"path": "train.jsonl", "filter": {"prompt": ["train1=", "train7=", "train3="]}, "eval_size": 1})
    problems, held_out = load_data(made)
    assert (len(problems), len(held_out)) == (2, 1)
    problems, _ = load_data(config({"path": "train.jsonl"}))
    ordered = config(
        {"path": "train.jsonl", "order": "prompt", "order_values": [f"train{i}=" for i in range(9, -1, -1)]}
    )
    found = build_stream(ordered, problems).take(10)
    assert [prompt.text for prompt in found] == [f"train{i}=" for i in range(9, -1, -1)]
