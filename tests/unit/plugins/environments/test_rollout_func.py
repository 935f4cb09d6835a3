from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError, RewardError
from lachesis.common.types import Group, Prompt, SamplingParams
from lachesis.plugins.environments.rollout_func import Fields, FunctionPlayers, read_fields
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.datasets import PromptStream
from lachesis.rollouts.episodes import EpisodeSource
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder
from tests.fakes import FakeEngine
from tests.tiny import EOS_ID, VOCAB_SIZE, tiny_tokenizer
from tests.waiting import LONG_S

FOREVER = Deadline("test", None)
PARAMS = SamplingParams(max_tokens=6, temperature=0.7)
TOKENIZER = tiny_tokenizer()
TOKENIZER.chat_template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def prompts(count: int = 5) -> list[Prompt]:
    """Texts, and one conversation."""
    made = [Prompt(id=str(i), token_ids=(i + 3, 9), text=f"{i}", columns={"answer": i}) for i in range(count)]
    messages = ({"role": "user", "content": "hello"},)
    return [*made[:-1], Prompt(id="talk", token_ids=(7,), text="[user]hello", messages=messages, columns={"answer": 9})]


def fixed(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """The prompt's length in tokens, and the number of the entry as the reward."""
    count = len(prompts)
    return {
        "prompt_ids": [[4]] * count,
        "completion_ids": [[5, 6, EOS_ID]] * count,
        "logprobs": [[-0.5, -0.25, -0.125]] * count,
        "env_reward": list(range(count)),
    }


def sampled(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    done = trainer.generate(prompts)
    return {name: [one[name] for one in done] for name in ("prompt_ids", "completion_ids", "logprobs")}


def by_environment(env_reward: list[float]) -> list[float]:
    return [float(value) for value in env_reward]


def by_length(completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def source(
    function: Callable[..., Any] = fixed,
    *,
    engine: FakeEngine | None = None,
    reward: Callable[..., Any] = by_environment,
    seed: int = 0,
    by_group: bool = False,
) -> EpisodeSource:
    engine = engine or FakeEngine(version=3)
    players = FunctionPlayers(
        rollout_func=function,
        name="mine.rollout",
        calls=CallBatcher(engine, at_once=1),
        params=PARAMS,
        num_generations=3,
        tokenizer=TOKENIZER,
        decode=lambda token_ids: [" ".join(map(str, ids)) for ids in token_ids],
        version=lambda: engine.health().version,
        eos_token_ids=[EOS_ID],
        vocab_size=VOCAB_SIZE,
        by_group=by_group,
    )
    return EpisodeSource(
        players=players,
        stream=PromptStream(prompts(), seed=seed, shuffle=False),
        rewarder=Rewarder([NamedReward("f", reward)]),
        num_generations=3,
        seed=seed,
        together=not by_group,
    )


class TestContract:
    def test_each_prompt_comes_once_per_completion_as_the_dataset_has_it(self):
        seen = []

        def spy(prompts, trainer):
            seen.append(prompts)
            return fixed(prompts, trainer)

        local = source(spy)
        local.next_groups(2, deadline=FOREVER)
        local.next_groups(3, deadline=FOREVER)
        talk = [{"role": "user", "content": "hello"}]
        assert seen == [["0"] * 3 + ["1"] * 3, ["2"] * 3 + ["3"] * 3 + [talk] * 3]

    def test_what_it_does_to_the_messages_is_not_seen_by_the_next(self):
        seen = []

        def talks(prompts, trainer):
            seen.extend(prompt[0]["content"] for prompt in prompts if not isinstance(prompt, str))
            for prompt in prompts:
                if not isinstance(prompt, str):
                    prompt[0]["content"] += " again"
            return fixed(prompts, trainer)

        local = source(talks)
        for _ in range(2):
            local.next_groups(5, deadline=FOREVER)
        assert seen == ["hello"] * 6

    def test_groups_have_all_that_it_returned(self):
        first, second = source().next_groups(2, deadline=FOREVER)
        assert (first.prompt.id, second.prompt.id) == ("0", "1")
        (sample, *_) = second.samples
        assert (sample.prompt_ids, sample.completion_ids) == ((4,), (5, 6, EOS_ID))
        assert sample.logprobs == (-0.5, -0.25, -0.125)
        assert (sample.versions, sample.finish_reason, sample.temperature) == ((3, 3), "stop", 0.7)
        assert (sample.text, sample.mask) == (f"5 6 {EOS_ID}", None)
        assert first.rewards == (0.0, 1.0, 2.0)
        assert second.rewards == (3.0, 4.0, 5.0)

    def test_traces_of_openenv_take_the_place_of_tokens_logprobs_and_mask(self):
        def traced(prompts, trainer):
            first = {
                "prompt_token_ids": [4],
                "completion_token_ids": [5],
                "per_token_logps": [-0.5],
                "loss_mask": [0, 1],
            }
            second = {
                "prompt_token_ids": [4, 5, 6], "completion_token_ids": [EOS_ID], "per_token_logps": [-0.125],
                "loss_mask": [0, 0, 0, 1],
            }  # fmt: skip
            trace = {"schema_version": 1, "turns": [first | {"node_id": "a"}, second | {"node_id": "b"}]}
            return {"traces": [trace] * len(prompts), "env_reward": list(range(len(prompts)))}

        made = source(traced)
        (group,) = made.next_groups(1, deadline=FOREVER)
        assert group.rewards == (0.0, 1.0, 2.0)
        assert (group.samples[0].completion_ids, group.samples[0].mask) == ((5, 6, EOS_ID), (1, 0, 1))
        assert group.samples[0].logprobs == (-0.5, 0.0, -0.125)
        assert made.counters()["tokens_generated"] == 2 * 3

    def test_a_rollout_that_the_environment_ended_is_whole_and_others_are_cut(self):
        def masked(prompts, trainer):
            count = len(prompts)
            masks = [[1, 0], [0, 1]] * count
            return fixed(prompts, trainer) | {
                "completion_ids": [[5, 6]] * count,
                "logprobs": None,
                "env_mask": masks[:count],
            }

        (group,) = source(masked).next_groups(1, deadline=FOREVER)
        assert [sample.finish_reason for sample in group.samples] == ["stop", "length", "stop"]
        assert [sample.mask for sample in group.samples] == [(1, 0), (0, 1), (1, 0)]
        assert all(math.isnan(value) for sample in group.samples for value in sample.logprobs)

    def test_versions_span_what_happened_meanwhile(self):
        engine = FakeEngine(version=3)

        def updated(prompts, trainer):
            engine.set_version(4)
            return fixed(prompts, trainer)

        (group,) = source(updated, engine=engine).next_groups(1, deadline=FOREVER)
        assert group.samples[0].versions == (3, 4)

    def test_the_trainers_names(self):
        seen = []

        def spy(prompts, trainer):
            seen.append((trainer.num_generations, trainer.args.temperature, trainer.args.max_completion_length,
                         trainer.state.global_step, trainer.processing_class is TOKENIZER))  # fmt: skip
            return fixed(prompts, trainer)

        local = source(spy)
        local.report_version(7)
        local.next_groups(1, deadline=FOREVER)
        assert seen == [(3, 0.7, 6, 7, True)]

    def test_coroutines_are_awaited(self):
        async def later(prompts, trainer):
            return fixed(prompts, trainer)

        assert len(source(later).next_groups(1, deadline=FOREVER)) == 1


class TestGenerating:
    def test_texts_conversations_and_tokens(self):
        engine = FakeEngine()
        asked = ["1+2", [{"role": "user", "content": "hi"}], [7, 8]]

        def function(prompts, trainer):
            done = trainer.generate(asked)
            assert all(len(one["completion_ids"]) == len(one["logprobs"]) for one in done)
            assert done[2]["prompt_ids"] == [7, 8]
            assert isinstance(done[0]["text"], str)
            return fixed(prompts, trainer)

        source(function, engine=engine).next_groups(1, deadline=FOREVER)
        (requests,) = engine.requests
        expected = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in ("1+2", "[user]hi")]
        assert [list(request.prompt_ids) for request in requests] == [*expected, [7, 8]]
        assert [request.params for request in requests] == [PARAMS] * 3

    def test_equal_runs_are_equal_and_completions_differ(self):
        first, same, other = (
            source(sampled, reward=by_length, seed=seed).next_groups(3, deadline=FOREVER) for seed in (0, 0, 1)
        )
        assert first == same
        assert first != other
        assert len({sample.completion_ids for sample in first[0].samples}) > 1

    def test_a_resumed_run_goes_on_exactly(self):
        straight, stopped, resumed = (source(sampled, reward=by_length) for _ in range(3))
        for local in (straight, stopped):
            local.next_groups(2, deadline=FOREVER)
        stopped.report_version(1)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        expected: list[Group] = straight.next_groups(3, deadline=FOREVER)
        assert resumed.next_groups(3, deadline=FOREVER) == expected
        assert resumed.state_dict() == stopped.state_dict() | {
            "requests": 5, "stream": resumed.state_dict()["stream"]
        }  # fmt: skip


class TestFailures:
    def test_one_that_raises(self):
        def broken(prompts, trainer):
            return {}["port"]

        with pytest.raises(
            EngineError, match=r"rollout function 'mine.rollout' raised KeyError: 'port' \(test_rollout_func"
        ):
            source(broken).next_groups(1, deadline=FOREVER)

    def test_one_that_returns_something_else(self):
        with pytest.raises(EngineError, match="returned no 'prompt_ids'"):
            source(lambda prompts, trainer: {}).next_groups(1, deadline=FOREVER)

    def test_one_that_hangs_and_nothing_is_lost(self):
        release = threading.Event()

        def hangs(prompts, trainer):
            release.wait(LONG_S)
            return fixed(prompts, trainer)

        local = source(hangs)
        with pytest.raises(DeadlineExceeded, match=r"took longer than 0\.0.* in the rollout function"):
            local.next_groups(2, deadline=Deadline("test", 0.05))
        release.set()
        assert [group.prompt.id for group in local.next_groups(2, deadline=FOREVER)] == ["0", "1"]

    def test_errors_of_the_engine_come_through(self):
        engine = FakeEngine()

        def generate(*_: Any, **__: Any) -> Any:
            raise EngineError("the engine is gone")

        engine.generate = generate  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"^the engine is gone$"):
            source(sampled, engine=engine, reward=by_length).next_groups(1, deadline=FOREVER)

    def test_a_column_that_nobody_gives(self):
        with pytest.raises(RewardError, match=r"needs 'env_rewards'.* env_reward.* did you mean"):
            source(reward=lambda env_rewards: []).next_groups(1, deadline=FOREVER)


GOOD: dict[str, Any] = {
    "prompt_ids": [[1, 2], [1, 2], [3], [3]],
    "completion_ids": [[5], [6, 7], [8, 9, 9], [4]],
    "logprobs": [[-0.5], [-0.1, -0.2], [0.0, -1.0, -2.0], [-3]],
}


def read(**changes: Any) -> Fields:
    output = {name: value for name, value in (GOOD | changes).items() if value != "absent"}
    return read_fields(output, name="mine.rollout", prompts=2, num_generations=2, vocab_size=10)


def test_good_fields():
    fields = read()
    assert fields.completion_ids == GOOD["completion_ids"]
    assert fields.logprobs[3] == [-3.0]
    assert (fields.env_mask, fields.extras) == (None, {})


def test_tensors_arrays_and_nested_logprobs():
    fields = read(
        completion_ids=torch.tensor([[5, 6]] * 4),
        logprobs=[np.array([-1.0, -0.5]), [[-1.0], [-0.5]], torch.tensor([[-1.0], [-0.5]]), (-1, -0.5)],
        env_mask=torch.tensor([[1, 0]] * 4),
    )
    assert fields.completion_ids == [[5, 6]] * 4
    assert fields.logprobs == [[-1.0, -0.5]] * 4
    assert fields.env_mask == [[1, 0]] * 4


def test_unknown_logprobs_are_nan():
    assert all(math.isnan(value) for row in read(logprobs=None).logprobs for value in row)
    assert math.isnan(read(logprobs=[[math.nan], *GOOD["logprobs"][1:]]).logprobs[0][0])


def test_further_fields_have_a_value_per_completion_or_one_for_all():
    fields = read(env_reward=[1, 2, 3, 4], won=torch.tensor([1, 0, 0, 1]), level="hard", logprob_token_ids=[[1]])
    assert fields.extras == {"env_reward": [1, 2, 3, 4], "won": [1, 0, 0, 1], "level": ["hard"] * 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": "absent"}, "returned no 'prompt_ids'; it returned completion_ids, logprobs"),
        ({"logprobs": "absent"}, "returned no 'logprobs'"),
        ({"completion_ids": [[5]] * 2}, "returned 2 completion_ids for 4 prompts; each prompt is given"),
        ({"completion_ids": [[5]] * 8}, "returned 8 completion_ids for 4 prompts; each prompt is given"),
        ({"completion_ids": [[5]] * 3}, "returned 3 completion_ids for 4 prompts ->"),
        ({"prompt_ids": [[1], [1], [], [1]]}, r"prompt_ids\[2\] is \[\]"),
        ({"completion_ids": [[5], [6, -7], [8, 9, 9], [4]]}, r"completion_ids\[1\] is \[6, -7\]"),
        ({"completion_ids": [[5], [6, 0.5], [8, 9, 9], [4]]}, r"completion_ids\[1\]"),
        ({"completion_ids": [[5], [6, True], [8, 9, 9], [4]]}, r"completion_ids\[1\]"),
        (
            {"completion_ids": [[5], [6, 10], [8, 9, 9], [4]]},
            r"completion_ids\[1\] has the token 10, but the model's vocab",
        ),
        ({"prompt_ids": [[1], [1], [1], [77]]}, r"prompt_ids\[3\] has the token 77, but the model's vocabulary has 10"),
        ({"completion_ids": "text"}, "completion_ids is 'text', not a list"),
        ({"completion_ids": [5, 6, 7, 8]}, "not a list with a list per completion"),
        ({"logprobs": [[-0.5]] * 4}, r"logprobs\[1\] has 1 values for 2 tokens"),
        ({"logprobs": [[-0.5]] * 3}, "returned 3 logprobs for 4 completions"),
        ({"logprobs": [[0.7], *GOOD["logprobs"][1:]]}, r"logprobs\[0\] has 0\.7, which is not a logprob"),
        ({"logprobs": [[-math.inf], *GOOD["logprobs"][1:]]}, r"logprobs\[0\] has -inf"),
        ({"logprobs": [[-1e308], *GOOD["logprobs"][1:]]}, r"logprobs\[0\] has -1e\+308, which no sampled token has"),
        ({"logprobs": [["x"], *GOOD["logprobs"][1:]]}, r"logprobs\[0\] has 'x'"),
        ({"logprobs": [[[-1.0, -2.0]], *GOOD["logprobs"][1:]]}, r"logprobs\[0\] has \[-1\.0, -2\.0\]"),
        ({"env_mask": [[1], [1, 2], [1, 1, 1], [1]]}, r"env_mask\[1\] is \[1, 2\]"),
        ({"env_mask": [[1], [1], [1, 1, 1], [1]]}, r"env_mask\[1\] has 1 values for 2 tokens"),
        ({"env_reward": [1.0] * 3}, "returned 3 values in 'env_reward' for 4 completions"),
    ],
)
def test_each_fault_is_named_with_its_place(changes, message):
    with pytest.raises(EngineError, match=message) as caught:
        read(**changes)
    assert "'mine.rollout'" in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize("output", [None, [{}], "x"])
def test_what_is_no_dictionary(output):
    with pytest.raises(EngineError, match="not a dictionary"):
        read_fields(output, name="f", prompts=1, num_generations=1, vocab_size=10)
