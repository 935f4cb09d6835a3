"""Benchmarks: the table, mean@k and pass@k with intervals, comparisons, and the suite on a fake engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from lachesis.common.errors import ConfigError, DataError, DependencyError, EngineError
from lachesis.common.types import GenerationRequest, Group, Prompt, Sample, SamplingParams, VersionSpan
from lachesis.metrics.names import benchmark_words, gain_words
from lachesis.plugins.benchmarks import evaluate as evaluations
from lachesis.plugins.benchmarks.evaluate import Asked, require_apart
from lachesis.plugins.benchmarks.results import Score, comparisons, gains, read_results, write_results
from lachesis.plugins.benchmarks.section import BenchmarkConfig, BenchmarkName
from lachesis.plugins.benchmarks.statistics import by_permutation, compare, estimate, mcnemar, pass_at
from lachesis.plugins.benchmarks.suite import Suite
from lachesis.plugins.benchmarks.table import benchmarks, dataset_of, follows_instructions, problems_of
from lachesis.plugins.sinks.evaluation import evaluation_values
from tests.fakes import FakeEngine
from tests.tiny import tiny_tokenizer

ROWS = [
    {"question": "Two and two?", "answer": "It is <<2+2=4>>4.\n#### 4"},
    {"question": "A thousand more than {0}?", "answer": "#### 1,000"},
]


def gsm8k(directory: Path, rows: Sequence[dict[str, str]] = ROWS, **options: Any) -> BenchmarkConfig:
    path = directory / "test.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return BenchmarkConfig(name="gsm8k", path=str(path), **options)


def test_the_table_has_the_names_that_a_configuration_may_have():
    assert tuple(benchmarks()) == get_args(BenchmarkName)


def test_a_row_gets_its_prompt_and_its_solution(tmp_path: Path):
    first, second = problems_of(gsm8k(tmp_path), tokenizer=tiny_tokenizer(), room=10_000)
    assert first.text.startswith("Two and two?\n\nPlease reason step by step")
    assert first.text.endswith("within \\boxed{}.")
    assert (first.columns["solution"], second.columns["solution"]) == ("$4$", "$1,000$")
    assert second.text.startswith("A thousand more than {0}?")


def test_the_hub_is_asked_unless_a_path_is_named(tmp_path: Path):
    hub = dataset_of(BenchmarkConfig(name="gsm8k"))
    assert (hub.path, hub.name, hub.split) == ("openai/gsm8k", "main", "test")
    file = dataset_of(gsm8k(tmp_path, split="train[:1]"))
    assert (file.path, file.name, file.split) == (str(tmp_path / "test.jsonl"), None, "train[:1]")


def test_a_dataset_without_the_columns_is_refused(tmp_path: Path):
    for row, missing, there in (
        ({"text": "?", "answer": "1"}, "question", "text, answer"),
        ({"question": "?"}, "answer", "question"),
    ):
        with pytest.raises(DataError) as raised:
            problems_of(gsm8k(tmp_path, [row]), tokenizer=tiny_tokenizer(), room=100)
        assert (
            raised.value.message == f"{tmp_path / 'test.jsonl'}, line 1: there is no column '{missing}', only {there}"
        )
        assert raised.value.remedy == "name columns as in openai/gsm8k"


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"), [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (5, 2, 3, 0.9), (4, 0, 4, 0.0), (4, 3, 2, 1.0)]
)
def test_pass_at_k_is_the_unbiased_estimate(n: int, c: int, k: int, expected: float):
    """Chen et al. 2021: 1 - C(n-c, k)/C(n, k); of 5 with 2 right three miss both in 1 of 10 draws."""
    assert pass_at(k, samples=n, right=c) == pytest.approx(expected)


def test_intervals_are_wilson_s_for_one_sample_and_by_problem_for_several():
    one = estimate([1.0] * 7 + [0.0] * 3)
    assert (one.value, one.low, one.high) == pytest.approx((0.7, 0.3968, 0.8922), abs=1e-4)
    several = estimate([0.5, 0.75, 0.25, 0.5], samples=4)
    # 0.5·0.5 / (0.03125/4) = 32 independent ones, of which there are 16 at most: as of 8 in 16.
    as_of_16 = estimate([1.0] * 8 + [0.0] * 8)
    assert (several.value, several.low, several.high) == (0.5, as_of_16.low, as_of_16.high)
    spread = estimate([0.75, 0.25, 0.75, 0.25, 0.0, 1.0], samples=100)  # 0.25 / (0.75/6/6) = 12
    as_of_12 = estimate([1.0] * 6 + [0.0] * 6)
    assert (spread.low, spread.high) == pytest.approx((as_of_12.low, as_of_12.high))


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.0], [1.0]])
def test_alike_problems_are_no_certainty(values: list[float]):
    found = estimate(values, samples=64)
    assert found.high - found.low == pytest.approx(
        {1: 0.890758 if values == [0.5] else 0.793451, 2: 0.657620}[len(values)], abs=1e-4
    )


def test_an_interval_holds_the_true_mean_as_often_as_it_says():
    """Thirty problems that few models solve, as of AIME: the normal interval held it in 88 of 100."""
    dice, held = np.random.default_rng(0), 0
    for _ in range(1000):
        shares = dice.binomial(16, dice.beta(0.2, 4, size=30)) / 16
        found = estimate(shares.tolist(), samples=16)
        held += found.low <= 0.2 / 4.2 <= found.high
    assert 0.90 <= held / 1000 <= 0.97


def test_mcnemar_is_exact():
    """Binomial with a half: 10 gained and 2 lost is 2·(1 + 12 + 66)/4096."""
    assert mcnemar(10, 2) == pytest.approx(2 * 79 / 4096)
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 0) == 1.0


def test_a_comparison_says_whether_a_gain_is_more_than_chance():
    after, before = [1.0] * 60 + [0.0] * 40, [1.0] * 40 + [0.0] * 60
    gain = compare(after, before)
    assert (gain.gain, gain.test) == (pytest.approx(0.2), "exact McNemar test")
    assert gain.p == pytest.approx(2 / 2**20)
    assert gain.sentence().endswith("a gain beyond chance")
    assert "n" not in gain.sentence()[:1]
    assert "on 100 problems" in gain.sentence()
    assert compare(before, after).sentence().endswith("a loss beyond chance")
    assert compare([1.0, 0.0, 1.0], [0.0, 1.0, 0.0]).sentence().endswith("not more than chance")
    sampled = compare([0.75] * 40, [0.5] * 40)
    assert (sampled.test, sampled.low, sampled.high) == ("permutation test", 0.25, 0.25)
    assert 0 < sampled.p < 0.01
    assert compare([0.75, 0.25] * 10, [0.25, 0.75] * 10).p > 0.5


def test_a_gain_on_few_problems_is_not_more_than_chance():
    """All four gained a quarter, which of 2^4 signs two do; a bootstrap of them never draws a loss."""
    few = compare([1.0, 1.0, 1.0, 0.5], [0.75, 0.75, 0.75, 0.25])
    assert few.p == 2 / 2**4
    assert few.sentence().endswith("not more than chance")
    assert compare([0.5], [0.25]).p == compare([0.5], [0.5]).p == 1.0


@pytest.mark.parametrize(("gained", "lost"), [(1, 0), (5, 1), (3, 3), (9, 2), (16, 6)])
def test_the_permutation_test_of_right_and_wrong_is_mcnemar_s(gained: int, lost: int):
    found = by_permutation(np.array([1.0] * gained + [-1.0] * lost))
    assert found == pytest.approx(mcnemar(gained, lost), abs=1e-12 if gained + lost < 13 else 0.01)


def scored(*rewards: Sequence[float | None], samples: int = 2) -> Score:
    groups = [
        Group(Prompt(str(i), (1,), ""), tuple(
            Sample((1,), (5, 6), (-1.0, -1.0), "stop", VersionSpan(0, 0), reward=reward) for reward in of_one
        ))
        for i, of_one in enumerate(rewards)
    ]  # fmt: skip
    return Score.of(groups, source="gsm8k:test", samples=samples)


def test_a_score_counts_what_was_judged():
    score = scored((1.0, 0.0), (None, 1.0), (None, None), (0.0, 0.5))
    assert score.right == {"0": (1, 2), "1": (1, 1), "3": (0, 2)}
    assert score.mean.value == pytest.approx(0.5)
    assert score.passed is not None
    assert score.passed.value == pytest.approx(0.5)  # of the two problems with both samples
    assert score.sentence().startswith("mean@2 50 % (")
    assert score.sentence().endswith("n = 3 problems")
    with pytest.raises(DataError, match="judged"):
        scored((None, None))


def test_results_are_read_as_they_were_written_and_compared_by_problem(tmp_path: Path):
    first = {"gsm8k": scored(*[(1.0,)] * 12, (0.0,), samples=1)}
    second = {"gsm8k": scored(*[(0.0,)] * 12, samples=1), "aime24": scored((1.0,), samples=1)}
    write_results(tmp_path / "a", first, model="a")
    assert read_results(tmp_path / "a") == first
    (found,) = comparisons(first, second).values()
    assert (found.problems, found.gain) == (12, 1.0)
    with pytest.raises(DataError, match="no benchmark in common"):
        comparisons(first, {"aime24": second["aime24"]})
    with pytest.raises(DataError, match=r"is gsm8k:test in one result, but mine\.jsonl:train"):
        comparisons(first, {"gsm8k": Score("mine.jsonl:train", 1, {"0": (1, 1)}, 2.0)})
    (tmp_path / "a/results.json").write_text("{}")
    with pytest.raises(DataError, match="not a result of benchmarks"):
        read_results(tmp_path / "a")


def test_a_suite_evaluates_each_benchmark_with_the_engine(tmp_path: Path):
    tokenizer = tiny_tokenizer()

    def answer(request: GenerationRequest, index: int) -> Sequence[int]:
        right = "two" in tokenizer.decode(list(request.prompt_ids)).lower() and index == 0
        return tokenizer.encode("\\boxed{4}" if right else "\\boxed{5}", add_special_tokens=False)

    written: list[tuple[int, Any]] = []
    suite = Suite(
        asked=[gsm8k(tmp_path, samples=2)],
        engine=FakeEngine(answer),
        tokenizer=tokenizer,
        params=SamplingParams(max_tokens=16, temperature=1.0),
        context=10_000,
        written=lambda step, scores: written.append((step, scores)),
    )
    result = suite.run(3)
    suite.close()
    assert (result.step, result.problems, result.accuracy) == (3, 2, 0.25)
    values = evaluation_values(result)
    assert values["evaluation/gsm8k/mean"] == 0.25
    assert values["evaluation/gsm8k/pass_at_k"] == 0.5
    assert values["evaluation/gsm8k/problems"] == 2
    (words,) = benchmark_words(result)
    assert words.startswith("gsm8k 25 % (")
    assert words.endswith("n = 2)")
    ((step, scores),) = written
    assert step == 3
    assert scores["gsm8k"].right == {"0": (1, 2), "1": (0, 2)}


def test_gains_are_measured_from_the_first_result():
    now, first = scored(*[(1.0,)] * 12, samples=1), scored(*[(0.0,)] * 10, (1.0,), (1.0,), samples=1)
    found = gains({"gsm8k": now, "aime24": now}, {"gsm8k": first})
    assert found.keys() == {"gsm8k"}
    assert found["gsm8k"]["gain"] == pytest.approx(10 / 12)
    assert found["gsm8k"]["gain_p"] == mcnemar(10, 0)
    assert gain_words(found["gsm8k"]).endswith("p = 0.002: a gain beyond chance")
    assert gains({"gsm8k": now}, {"gsm8k": replace(first, source="another")}) == gains({"gsm8k": now}, {}) == {}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"benchmarks": ["gsm9k"]}, "gsm9k is not a benchmark"),
        ({"benchmarks": ["gsm8k", "gsm8k=a.jsonl"]}, "given twice"),
        ({"samples": 4, "temperature": 0.0}, "4 greedy samples are all equal"),
        ({"benchmarks": ["gsm8k", "ifeval=a.jsonl"]}, "ifeval needs if-verifiable.*pip install if-verifiable"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(asked: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "if_verifiable", None)
    options = {"benchmarks": ["gsm8k"], "samples": 1, "temperature": 0.0, "max_tokens": 8, "limit": None}
    with pytest.raises(ConfigError, match=named):
        Asked(**{**options, **asked}, engine="embedded").configs()


def test_ifeval_asks_the_library_that_checks_instructions(monkeypatch: pytest.MonkeyPatch):
    def evaluate(name: str, sample: Any, text: str) -> tuple[list[Any], Any]:
        assert (name, sample.prompt) == ("ifeval", "Say hi.")
        return [], SimpleNamespace(binary_strict=float(sample.instruction_id_list[0] in text))

    columns = {"instruction_id_list": [["hi"], ["ho"]], "kwargs": [[{}], [{}]], "prompt": ["Say hi."] * 2}
    monkeypatch.setitem(sys.modules, "if_verifiable", None)
    with pytest.raises(DependencyError, match="pip install if-verifiable"):
        follows_instructions(["hi", "hi"], **columns)
    monkeypatch.setitem(sys.modules, "if_verifiable", SimpleNamespace(evaluate_output_for_sample=evaluate))
    assert follows_instructions(["hi", "hi"], **columns) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("model", "against", "out"),
    [("a/model", "b/model", None), ("model", "evals/model", None), ("a", "evals/b", "evals/b")],
)
def test_results_do_not_replace_those_they_are_compared_with(
    model: str, against: str, out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("evals/model", "evals/b"):
        write_results(Path(name), {"gsm8k": scored((1.0,), samples=1)}, model="earlier")
    with pytest.raises(ConfigError, match="would both be in"):
        require_apart(model, against, out=None if out is None else Path(out))
    require_apart(model, against, out=Path("elsewhere"))


class FailingServer:
    """A server that ends before it answers."""

    def __init__(self, command: Sequence[str], *, url: str, log_path: Path) -> None:
        self.log_path = log_path

    def start(self, *, deadline: object) -> None:
        self.log_path.write_text("why it ended")
        raise EngineError(f"the end of its log {self.log_path}", remedy="read it")

    def stop(self) -> None:
        pass


def test_the_log_of_a_server_that_fails_stays_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluations, "ManagedProcess", FailingServer)
    asked = Asked(["gsm8k"], samples=1, temperature=0.0, max_tokens=8, limit=None, engine="embedded")
    with pytest.raises(EngineError, match=r"engine\.log"):
        evaluations.evaluate("org/model", asked, out=tmp_path / "results")
    assert (tmp_path / "results" / "engine.log").read_text() == "why it ended"
