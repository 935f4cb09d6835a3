"""What is said of several sources in one run."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig
from lachesis.config.single_sources import single_configs

MATH = {"name": "math", "data": {"path": "math.jsonl"}, "rewards": {"functions": ["rewards.exact"]}}
GAME = {"name": "game", "source": {"kind": "steps", "environment": "game.py:Game", "max_tasks": 10}}


def build(*sources: dict[str, Any], **sections: Any) -> LachesisConfig:
    run = {"run": {"steps": 10}, "model": {"path": "org/model"}}
    whole = [{**one, "source": {"kind": "local", **one.get("source", {})}} for one in sources]
    return LachesisConfig.model_validate({**run, "sources": whole, **sections})


def test_sources_that_fit_together_are_silent():
    assert check(build(MATH, GAME)) == []


def test_each_is_configured_as_a_run_of_its_own():
    own = {"max_completion_length": 8, "algorithm": {"scale_rewards": "none"}, "weight": 3}
    config = build({**MATH, **own}, GAME, sampling={"max_completion_length": 64}, algorithm={"baseline": "none"})
    math, game = single_configs(config).values()
    assert math.data.path == "math.jsonl" and game.data.path is None
    assert (math.sampling.max_completion_length, game.sampling.max_completion_length) == (8, 64)
    assert (math.algorithm.scale_rewards, game.algorithm.scale_rewards) == ("none", "group")
    assert math.algorithm.baseline == game.algorithm.baseline == "none"


@pytest.mark.parametrize(
    ("sources", "sections", "said"),
    [
        ([MATH], {"data": {"path": "other.jsonl"}}, "data and sources both define the source of groups"),
        ([MATH, MATH], {}, r"sources\[0\] and sources\[1\] have the same name, math"),
        (
            [MATH, {"name": "api", "source": {"kind": "atropos"}}],
            {},
            r"sources\[1\] \(api\) has source.kind atropos, whose rollout API makes whole batches, so sources\[0\] "
            r"\(math\)",
        ),
        (
            [
                {**MATH, "rewards": {**MATH["rewards"], "sandbox": "none"}},
                {**MATH, "name": "code", "rewards": {**MATH["rewards"], "sandbox": "landlock"}},
            ],
            {},
            r"sources\[0\] \(math\) has rewards.sandbox none and sources\[1\] \(code\) has rewards.sandbox landlock",
        ),
        ([MATH, GAME], {"run": {"epochs": 2}}, "run.epochs counts the problems of one dataset, but sources has 2"),
        ([{**MATH, "max_completion_length": 9}], {"sampling": {"max_completion_length": 8}}, "the limit for all"),
        ([{**MATH, "max_unfinished": 2}], {}, "without pipeline.async_prefetch each batch is generated as a whole"),
        (
            [GAME, {**MATH, "data": {"path": "a", "eval_path": "b", "eval_size": 5}}],
            {},
            r"sources\[1\]: data.eval_path and data.eval_size both define",
        ),
        ([MATH, GAME], {"algorithm": {"kl_placement": "reward", "beta": 0.1}}, "algorithm.kl_placement is reward"),
        ([MATH, GAME], {"evaluation": {"every_steps": 5}}, "there are no held-out problems"),
        (
            [MATH, GAME],
            {"algorithm": {"teachers": {"chat": {"model": "org/teacher"}}}},
            "algorithm.teachers.chat: no source has that name; use one of math, game",
        ),
        (
            [MATH, GAME],
            {"algorithm": {"teacher": {"model": "a"}, "teachers": {"math": {"model": "b"}}}},
            "algorithm.teacher and algorithm.teachers both define teachers",
        ),
        (
            [MATH, GAME],
            {"algorithm": {"teachers": {"game": {"kind": "url"}}}},
            r"sources\[1\]: algorithm.teachers.game.kind is url, but algorithm.teachers.game.url is not set",
        ),
        ([GAME], {"algorithm": {"teachers": {"game": {"kind": "rollouts"}}}}, "algorithm.teachers.game.kind rollouts"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(sources: list[dict[str, Any]], sections: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        check(build(*sources, **sections))


def test_a_source_has_its_own_teacher_and_may_have_none():
    config = build(MATH, GAME, algorithm={"teachers": {"math": {"model": "org/teacher", "weight": 0.5}}})
    math, game = single_configs(config).values()
    assert math.algorithm.teacher is not None
    assert (math.algorithm.teacher.weight, game.algorithm.teacher) == (0.5, None)
    assert math.algorithm.teachers == {}
    assert check(config) == []


def test_teachers_by_source_need_sources():
    config = {"run": {"steps": 1}, "model": {"path": "m"}, "data": {"path": "d"}, "rewards": {"functions": ["a.b"]}}
    config |= {"source": {"kind": "local"}, "algorithm": {"teachers": {"math": {"model": "org/teacher"}}}}
    with pytest.raises(ConfigError, match=r"there is no list of sources; write algorithm\.teacher"):
        check(LachesisConfig.model_validate(config))


def test_a_problem_of_all_is_said_once():
    with pytest.raises(ConfigError) as caught:
        check(build(MATH, GAME, sampling={"min_tokens": 300}))
    assert caught.value.message.count("sampling.min_tokens") == 1
    assert "sources" not in caught.value.message


def test_held_out_problems_of_one_source_are_enough():
    held_out = {**MATH, "data": {"path": "math.jsonl", "eval_size": 4}}
    config = build(held_out, GAME, evaluation={"every_steps": 5, "patience": 3}, checkpoint={"keep_best": True})
    assert [finding.message for finding in check(config) if finding.level != "note"] == []


def test_a_small_share_is_told():
    (note,) = check(build({**MATH, "weight": 15}, GAME, batch={"prompts_per_step": 4}))
    assert note.message.startswith("sources[1] (game) has 0.25 of the 4 prompts")
    assert note.message.endswith("a group in one of 4 batches")
