from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import DataError
from lachesis.common.prompt_images import PromptImages
from lachesis.common.types import UNKNOWN_VERSIONS, EvalResult, Finding, Group, StepRecord
from lachesis.metrics.sinks.jsonl import JsonlSink, StepLine
from lachesis.metrics.sinks.tape import TapeSink
from lachesis.plugins.report.charts import downsample, timing
from lachesis.plugins.report.data import accuracy_interval, descriptors, result_sentence
from lachesis.plugins.report.metric_descriptions import describe
from lachesis.plugins.report.page import ReportSink, write_report
from lachesis.plugins.report.publish import publish
from lachesis.plugins.report.rollouts import MAX_STEPS, MAX_TOKENS

MakeGroup = Callable[..., Group]


def evaluation(step: int, accuracy: float) -> EvalResult:
    return EvalResult(step, accuracy, accuracy, problems=512, mean_length=3.0, seconds=0.4)


def write_run(
    directory: Path,
    *,
    steps: int,
    groups: list[Group] | None = None,
    config: str = "",
    values: Any = None,
    tape_every: int = 1,
) -> Path:
    directory.mkdir(exist_ok=True)
    metrics = JsonlSink(directory / "metrics.jsonl", clock=lambda: 1_780_000_000.0)
    tape = TapeSink(directory / "rollouts", report_groups=2, texts=lambda ids: [f"t{i}" for i in ids])
    metrics.evaluation(evaluation(0, 0.44))
    for step in range(1, steps + 1):
        record = StepRecord(
            step=step,
            values=values or {"reward": 0.5 + 0.001 * step, "reward_std": 0.3, "step_time": 0.2, "train_time": 0.1},
            groups=groups or (),
            evaluation=evaluation(step, 0.93) if step == steps else None,
        )
        metrics.write(record)
        if step % tape_every == 0:
            tape.write(record)
    metrics.close()
    if config:
        (directory / "config.yaml").write_text(config)
    return directory


def data_of(path: Path) -> dict[str, Any]:
    """What the page has embedded for its scripts."""
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', path.read_text(), re.S)
    assert found is not None
    return json.loads(found.group(1))


def test_page_tells_the_run_and_its_result(tmp_path: Path) -> None:
    config = "run: {name: my run, steps: 5}\nmodel: {path: org/model}\nadapter: {kind: lora, r: 16}\n"
    path = write_report(write_run(tmp_path / "r", steps=5, config=config))
    page = path.read_text()
    assert path == tmp_path / "r" / "report.html"
    assert "<h1>my run</h1>" in page and "org/model" in page and "LoRA r=16" in page
    assert "held-out accuracy 0.44 -&gt; 0.93 (512 problems, 5 steps, 1.0 s)" in page
    assert '<span class="from">44 %</span>' in page and ">93 %</strong>" in page
    assert "n = 512 problems, 95 % interval 90 to 95 %" in page
    assert html.escape("run: {name: my run, steps: 5}") in page


def test_page_says_how_the_model_was_run(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "r", steps=2, config="run: {name: r}\n")
    assert "trains packed" not in write_report(run_dir).read_text()
    (run_dir / "state.json").write_text(
        json.dumps({"model": "Qwen3ForCausalLM trains packed; its layers are compiled"})
    )
    assert "Qwen3ForCausalLM trains packed; its layers are compiled." in write_report(run_dir).read_text()
    (run_dir / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state\.json is not JSON"):
        write_report(run_dir)


def test_local_model_is_named_by_the_end_of_its_path() -> None:
    assert descriptors({"model": {"path": "/home/someone/examples/quick/.cache/model"}}) == ["quick/model"]
    assert descriptors({"model": {"path": "org/model"}, "adapter": {"kind": "none"}}) == ["org/model", "all weights"]


@pytest.mark.parametrize(
    ("accuracy", "problems", "expected"),
    [(0.5, 100, (0.4038, 0.5962)), (0.0, 10, (0.0, 0.2775)), (1.0, 10, (0.7225, 1.0)), (0.5, 0, (0.0, 1.0))],
)
def test_an_accuracy_has_the_interval_of_wilson(accuracy: float, problems: int, expected: tuple[float, float]) -> None:
    assert accuracy_interval(accuracy, problems) == pytest.approx(expected, abs=1e-4)


def test_lines_that_do_not_move_are_numbers(tmp_path: Path) -> None:
    values = {"reward": 0.5, "mean_kl": 8.8e-12, "mean_ratio": 1.0, "learning_rate": 1e-5}
    run = write_run(tmp_path, steps=6, values=values)
    charts = {chart["id"]: chart["flat"] for chart in data_of(write_report(run))["charts"]}
    assert charts == {
        "reward": False, "evaluation/accuracy": False, "mean_kl": True, "mean_ratio": True, "learning_rate": True,
    }  # fmt: skip
    moving = JsonlSink(run / "metrics.jsonl", resume_step=6)
    moving.write(StepRecord(step=7, values={"mean_kl": 0.02}))
    moving.close()
    assert not next(one for one in data_of(write_report(run))["charts"] if one["id"] == "mean_kl")["flat"]


def test_published_runs_have_an_index_their_reports_and_a_comparison(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=3, config=f"run: {{name: {name}, steps: 3}}\n") for name in ("a", "b")]
    index = publish(runs, tmp_path / "site").read_text()
    assert {path.name for path in (tmp_path / "site").iterdir()} == {"index.html", "a.html", "b.html", "compare.html"}
    assert re.findall(r'href="([^"#]+\.html)"', index) == ["compare.html", "a.html", "b.html"]
    assert "44 % → <b>93 %</b>" in index and "n = 512 problems" in index
    assert "<h1>a</h1>" in (tmp_path / "site" / "a.html").read_text()


def test_page_asks_nothing_of_the_network(tmp_path: Path, make_group: MakeGroup) -> None:
    page = write_report(write_run(tmp_path, steps=2, groups=[make_group()])).read_text()
    outside = set(re.findall(r"""(?:https?:)?//[\w.]+|@import|(?:src|href)=["'](?!\#|data:)[^"']*""", page))
    assert outside <= {"http://www.w3.org"}  # the name of SVG, which is asked for by nobody
    assert "default-src 'none'" in page


def test_hostile_texts_stay_texts(tmp_path: Path, make_group: MakeGroup) -> None:
    hostile = "</script><script>alert(1)</script><!--\u2028"
    group = make_group((1.0, 0.0), prompt=hostile, texts=[hostile, "\ud800"])
    config = f"run: {{name: {json.dumps(hostile[:30])}}}\n"
    run = write_run(tmp_path, steps=1, groups=[group], config=config)
    sink = JsonlSink(run / "metrics.jsonl", resume_step=1)
    sink.write(StepRecord(step=2, values={}, findings=[Finding("note", "rule", hostile)]))
    sink.close()
    path = write_report(run)
    page = path.read_text()
    assert page.count("<script") == 3 and "<script>alert" not in page and "<!--" not in page
    assert data_of(path)["rollouts"][0]["groups"][0]["prompt"] == hostile


def test_charts_carry_series_band_and_healthy_range(tmp_path: Path) -> None:
    values = {
        "reward": 0.5,
        "reward_std": 0.3,
        "mean_kl": 0.02,
        "loss": math.nan,
        "rewards/a/mean": 1.0,
        "rewards/b/mean": 0.0,
    }
    charts = {
        chart["id"]: chart for chart in data_of(write_report(write_run(tmp_path, steps=3, values=values)))["charts"]
    }
    assert list(charts) == ["reward", "evaluation/accuracy", "rewards/a/mean", "mean_kl", "loss"]
    assert (
        charts["reward"]["series"][0] | {"band": [0.3] * 3, "x": [1, 2, 3], "y": [0.5] * 3}
        == charts["reward"]["series"][0]
    )
    assert charts["mean_kl"]["healthy"] == [0.0, 0.1] and charts["reward"]["healthy"] is None
    assert charts["evaluation/accuracy"]["series"][0]["x"] == [0, 3]
    assert charts["loss"]["series"][0]["y"] == [None] * 3
    assert [series["label"] for series in charts["rewards/a/mean"]["series"]] == ["a", "b"]


def test_findings_are_gathered_by_rule(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1)
    sink = JsonlSink(run / "metrics.jsonl", resume_step=1)
    for step, level, words in ((2, "warning", "early"), (3, "problem", "worst"), (22, "warning", "latest & last")):
        sink.write(StepRecord(step=step, values={}, findings=[Finding(level, "kl_high", words)]))  # type: ignore[arg-type]
    sink.close()
    page = write_report(run).read_text()
    assert "latest &amp; last" in page and "early" not in page
    assert '<li class="warning">' in page and "steps 2 to 22, 3 times" in page, "the latest level, as its words are"


def test_what_was_resolved_stands_last_and_is_not_red(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1)
    sink = JsonlSink(run / "metrics.jsonl", resume_step=1)
    sink.write(StepRecord(step=2, values={}, findings=[Finding("problem", "kl_high", "gone by now")]))
    sink.write(StepRecord(step=3, values={}, findings=[Finding("note", "entropy_off", "still so")]))
    sink.write(StepRecord(step=8, values={}, findings=[Finding("problem", "kl_high", "gone by now", resolved=3)]))
    sink.close()
    page = write_report(run).read_text()
    assert '<li class="problem">' not in page and "problem of step 2, resolved at step 3" in page
    assert page.index("still so") < page.index("gone by now")


def health_of(directory: Path, *steps: dict[str, float]) -> str:
    """What the report says of the health of a run of these steps."""
    directory.mkdir()
    sink = JsonlSink(directory / "metrics.jsonl")
    for number, values in enumerate(steps, start=1):
        sink.write(StepRecord(step=number, values=values))
    sink.close()
    section = write_report(directory).read_text().split('<section id="health">')[1].split("</section>")[0]
    return html.unescape(" ".join(re.sub("<[^>]+>", " ", section).split()))


def test_nothing_to_report_is_said_only_where_all_is_in_its_range(tmp_path: Path) -> None:
    usual = {"grad_norm": 0.5, "reward": 0.5}
    assert "Nothing to report" in health_of(tmp_path / "quiet", usual, usual)
    said = health_of(tmp_path / "loud", usual, {"mean_kl": 0.3, "mean_ratio": 1.5, "entropy": 0.9, "grad_norm": 3.0})
    assert "Nothing to report" not in said
    assert "kl to the sampler 0.3 (usual: 0 to 0.1)" in said and "probability ratio 1.5 (usual: 0.8 to 1.2)" in said
    assert "entropy 0.9" not in said and "gradient norm 3" not in said, "documented of other models, not of this one"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([{"mean_kl": 0.3}, {"mean_kl": 0.05}], "kl to the sampler 0.3 in step 1 (usual: 0 to 0.1)"),
        (
            [{"mean_ratio": ratio} for ratio in (0.7, 0.6, 1.0, 0.79, 0.9)],
            "probability ratio in steps 1 to 4 (3 times, at worst 0.6, usual: 0.8 to 1.2)",
        ),
        ([{"truncated_fraction": 0.9}, {"reward": 0.5}], "truncated 0.9 in step 1 (usual: 0 to 0.25)"),
        ([{"grad_norm": math.nan}, {"grad_norm": 0.5}], "gradient norm NaN in step 1 (usual: 0.001 to 1)"),
        (
            [{"mean_kl": 3.0}, {"mean_kl": math.inf}, {"mean_kl": 0.05}],
            "kl to the sampler in steps 1 to 2 (2 times, at worst NaN, usual: 0 to 0.1)",
        ),
    ],
)
def test_what_was_unusual_before_the_last_step_is_said_with_its_steps(
    tmp_path: Path, steps: list[dict[str, float]], said: str
) -> None:
    assert health_of(tmp_path / "run", *steps).endswith(
        f"No finding. Every value of the last step is where it should be. Unusual before: {said}."
    )


def test_what_is_no_number_is_unusual_in_the_last_step_too(tmp_path: Path) -> None:
    said = health_of(tmp_path / "run", {"grad_norm": 3.0}, {"grad_norm": math.nan, "loss": math.nan})
    assert said.endswith("No finding. Unusual in the last step: gradient norm NaN (usual: 0.001 to 1); loss NaN.")


@pytest.mark.parametrize(
    ("at", "name", "value"),
    [(0, "mean_kl", 0.9), (1, "mean_kl", 3.0), (1500, "truncated_fraction", 0.4), (2999, "mean_kl", 0.2)],
)
def test_no_chart_shows_a_point_outside_of_a_healthy_range_beside_nothing_to_report(
    tmp_path: Path, at: int, name: str, value: float
) -> None:
    """Of 3,000 steps a chart has 2,000 points at most, among them the farthest of each stretch."""
    steps = [{"mean_kl": 0.01, "reward": 0.5, "truncated_fraction": 0.1} for _ in range(3000)]
    steps[at][name] = value
    said = health_of(tmp_path / "run", *steps)
    chart = next(one for one in data_of(tmp_path / "run" / "report.html")["charts"] if one["id"] == name)
    (series,), (low, high) = chart["series"], chart["healthy"]
    off = [step for step, y in zip(series["x"], series["y"], strict=True)
           if y is not None and ((low is not None and y < low) or (high is not None and y > high))]  # fmt: skip
    assert off == [at + 1]
    assert "Nothing to report" not in said and describe(name).title.lower() in said


@pytest.mark.parametrize(("reference", "range_shown"), [(0.01, True), (5.0, False)])
def test_the_range_of_a_chart_is_not_held_against_a_line_that_has_none(
    tmp_path: Path, reference: float, range_shown: bool
):
    """How far a policy is from its start by now says nothing of health; how far it went in a step does."""
    said = health_of(tmp_path / "run", *[{"mean_kl": 0.01, "kl_reference": reference, "grad_norm": 0.5}] * 3)
    chart = next(one for one in data_of(tmp_path / "run" / "report.html")["charts"] if one["id"] == "mean_kl")
    assert [one["name"] for one in chart["series"]] == ["mean_kl", "kl_reference"]
    assert (chart["healthy"] is not None) is range_shown and "Nothing to report" in said


def test_timing_parts_add_up_to_the_step() -> None:
    values = {"step_time": 1.0, "generation_time": 0.3, "reward_time": 0.1, "train_time": 0.4, "sync_time": 0.05}
    lines = [StepLine(step=step, time=0.0, values=values) for step in range(1, 1001)]
    split = timing(lines)
    assert split is not None and len(split["x"]) == 400 and split["x"][-1] == 1000
    assert [part["name"] for part in split["parts"]][-1] == "other"
    assert sum(part["y"][0] for part in split["parts"]) == pytest.approx(1.0)
    assert timing([StepLine(1, 0.0, {"reward": 1.0})]) is None


@pytest.mark.parametrize(
    ("sampling", "waited", "expected"),
    [
        (
            {"generation_time": 0.3, "reward_time": 0.1},
            0.45,
            {"generation_time": 0.3, "reward_time": 0.1, "other": 0.15},
        ),
        ({"generation_time": 0.9, "reward_time": 0.1}, 0.45, {"data_fetch_time": 0.45, "other": 0.1}),
        ({}, 0.45, {"data_fetch_time": 0.45, "other": 0.1}),
        (
            {"generation_time": 0.3, "reward_time": 0.3, "hidden_reward_time": 0.2},
            0.45,
            {"generation_time": 0.3, "reward_time": 0.1, "other": 0.15},
        ),
    ],
    ids=["in the step", "beside training", "by environments", "rewards beside generation"],
)
def test_of_sampling_that_overlaps_training_the_wait_is_shown(
    sampling: dict[str, float], waited: float, expected: dict[str, float]
) -> None:
    values = {"step_time": 1.0, "data_fetch_time": waited, "train_time": 0.4, "sync_time": 0.05, **sampling}
    split = timing([StepLine(1, 0.0, values)])
    assert split is not None
    shown = {part["name"]: part["y"][0] for part in split["parts"]}
    assert shown == pytest.approx({"train_time": 0.4, "sync_time": 0.05, **expected})
    assert sum(shown.values()) == pytest.approx(1.0)


def test_downsampling_keeps_spikes_ends_and_order() -> None:
    values = [0.0] * 100_000
    values[77_777] = 9.0
    values[5] = math.nan
    chosen = downsample(values, limit=2000)
    assert len(chosen) <= 2000 and chosen == sorted(set(chosen))
    assert chosen[0] == 0 and chosen[-1] == 99_999 and 77_777 in chosen
    assert downsample([1.0, 2.0], limit=2000) == [0, 1]


def test_rewards_of_all_completions_are_spread_over_ranges(tmp_path: Path, make_group: MakeGroup) -> None:
    groups = [make_group((0.0, 0.0, 0.04, 1.0)), make_group((0.5, 1.0)), make_group((None, 0.0))]
    run = write_run(tmp_path, steps=1, groups=groups)
    (entry,) = data_of(write_report(run))["rollouts"]
    assert len(entry["groups"]) == 2, "the histogram is of those too that are not shown"
    assert (entry["rewards"]["low"], entry["rewards"]["high"]) == (0.0, 1.0)
    filled = {at: count for at, count in enumerate(entry["rewards"]["counts"]) if count}
    assert filled == {0: 4, 10: 1, 19: 2}
    older = run / "metrics.jsonl"
    lines = [json.loads(line) for line in older.read_text().splitlines()]
    older.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "rewards"}) + "\n" for line in lines))
    assert data_of(write_report(run))["rollouts"][0]["rewards"] is None


def test_environments_and_staleness_have_their_charts(tmp_path: Path) -> None:
    of = "reward_of_environment/"
    values = {"reward": 0.5, "staleness": 2.0, f"{of}1": 0.2, f"{of}gsm8k_0": 0.8, f"{of}10": 0.1, f"{of}2": 0.3}
    charts = {
        chart["title"]: chart for chart in data_of(write_report(write_run(tmp_path, steps=2, values=values)))["charts"]
    }
    assert [line["label"] for line in charts["Rewards by environment"]["series"]] == [
        *(f"Environment {number}" for number in (1, 2, 10)),
        "gsm8k_0",
    ]
    assert charts["Staleness"]["series"][0]["y"] == [2.0, 2.0]
    for index, none in enumerate((0.0, -math.inf)):  # no sample is older than the weights, or no age is known
        run = write_run(tmp_path / str(index), steps=2, values=values | {"staleness": none})
        assert "Staleness" not in {chart["title"] for chart in data_of(write_report(run))["charts"]}


def test_each_engine_has_a_line(tmp_path: Path) -> None:
    values = {f"prefix_cache_hit_rate/{engine}": 0.5 for engine in ("b:0", "b:10", "b:2")}
    charts = {
        chart["title"]: chart for chart in data_of(write_report(write_run(tmp_path, steps=1, values=values)))["charts"]
    }
    found = charts["Prefix cache hits"]
    assert [line["label"] for line in found["series"]] == ["b:0", "b:2", "b:10"]
    assert (found["unit"], found["floor"], found["ceiling"]) == ("share", 0.0, 1.0)


def test_long_runs_are_cut_to_size(tmp_path: Path, make_group: MakeGroup) -> None:
    long = [tuple(range(index, index + 400)) for index in range(10)]
    group = make_group([float(index) for index in range(10)], completions=long)
    run = write_run(tmp_path, steps=64, groups=[group] * 2)
    rollouts = data_of(write_report(run))["rollouts"]
    steps = [entry["step"] for entry in rollouts]
    assert len(steps) == MAX_STEPS and (steps[0], steps[-1]) == (1, 64)
    samples = [sample for entry in rollouts for group in entry["groups"] for sample in group["samples"]]
    assert sum(len(sample["pieces"]) for sample in samples) <= MAX_TOKENS
    assert all(len(sample["pieces"]) == len(sample["logprobs"]) for sample in samples)
    assert all(sample["after"] == 400 - len(sample["pieces"]) for sample in samples)
    shown = [sample["reward"] for sample in rollouts[0]["groups"][0]["samples"]]
    assert shown[0] == 9.0 and shown[-1] == 0.0 and rollouts[0]["groups"][0]["size"] == 10
    assert (run / "report.html").stat().st_size < 5_000_000


def test_300_steps_take_less_than_a_second(tmp_path: Path, make_group: MakeGroup) -> None:
    run = write_run(tmp_path, steps=300, groups=[make_group((0.0, 1.0) * 4)] * 2, tape_every=5)
    start = time.process_time()
    write_report(run)
    assert time.process_time() - start < 1.0


def test_a_run_without_tape_config_or_steps_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "bare", steps=0)
    page = write_report(run).read_text()
    assert "<h1>bare</h1>" in page and 'id="rollouts"' not in page and 'id="timing"' not in page


def test_a_tape_without_token_texts_shows_plain_texts(tmp_path: Path, make_group: MakeGroup) -> None:
    run = write_run(tmp_path, steps=1)
    TapeSink(run / "rollouts").write(StepRecord(step=1, values={}, groups=[make_group()]))
    (group,) = data_of(write_report(run))["rollouts"][0]["groups"]
    assert {sample["text"] for sample in group["samples"]} == {"280", "281"}


def test_weights_that_nobody_knows_have_no_number(tmp_path: Path, make_group: MakeGroup) -> None:
    group = make_group((0.0, 1.0))
    unknown = replace(group.samples[0], versions=UNKNOWN_VERSIONS)
    run = write_run(tmp_path / "run", steps=1, groups=[replace(group, samples=(unknown, group.samples[1]))])
    (shown,) = data_of(write_report(run))["rollouts"][0]["groups"]
    assert {sample["reward"]: sample["version"] for sample in shown["samples"]} == {0.0: "unknown", 1.0: 3}


def test_what_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        write_report(tmp_path)
    run = write_run(tmp_path, steps=1, config="a: [")
    with pytest.raises(DataError, match=r"config\.yaml is not YAML"):
        write_report(run)
    assert not (tmp_path / "report.html").exists()


def test_sink_writes_every_n_steps_and_at_the_end(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1)
    sink, page = ReportSink(run, every_steps=5), run / "report.html"
    sink.write(StepRecord(step=4, values={}))
    assert not page.exists()
    sink.write(StepRecord(step=5, values={}))
    page.unlink()
    sink.close()
    assert not page.exists()  # nothing new since
    sink.write(StepRecord(step=6, values={}))
    sink.close()
    assert page.exists()


@pytest.mark.parametrize(
    ("first", "last", "sentence"),
    [
        (
            evaluation(0, 0.44),
            evaluation(300, 0.934),
            "held-out accuracy 0.44 -> 0.93 (512 problems, 300 steps, 1m 02s)",
        ),
        (evaluation(0, 0.44), evaluation(0, 0.44), "held-out accuracy 0.44 (512 problems, 300 steps, 1m 02s)"),
        (None, None, "no held-out problems (300 steps, 1m 02s)"),
    ],
)
def test_result_in_a_sentence(first: EvalResult | None, last: EvalResult | None, sentence: str) -> None:
    assert result_sentence(first, last, steps=300, seconds=62.3) == sentence


def test_a_finding_links_to_what_it_says_to_change_and_to_what_it_means(tmp_path: Path) -> None:
    config = "run: {name: q, steps: 9}\noptimizer:\n  learning_rate: 0.1\n  schedule:\n    kind: linear\n"
    run = write_run(tmp_path, steps=1, config=config)
    sink = JsonlSink(run / "metrics.jsonl")
    message = "lower optimizer.learning_rate, or raise algorithm.beta (<b>)"
    findings = [Finding("warning", "kl_high", message), Finding("note", "my_rule", "by a rule of one's own")]
    sink.write(StepRecord(step=2, values={}, findings=findings))
    sink.close()
    page = write_report(run).read_text()
    link = '<a href="#key-optimizer.learning_rate" data-place title="its value in this run">optimizer.learning_rate</a>'
    assert f"lower {link}, or raise algorithm.beta (&lt;b&gt;)" in page, "a key that the run has is a link"
    assert '<span id="key-optimizer.learning_rate">  learning_rate: 0.1</span>' in page
    assert '<span id="key-optimizer.schedule.kind">    kind: linear</span>' in page
    assert '<span id="key-run">run: {name: q, steps: 9}</span>' in page, "of several in one line the first"
    assert '<a class="rule" href="#about-kl_high"' in page and '<dt id="about-kl_high">' in page
    assert '<code class="rule">my_rule</code>' in page


def test_what_all_held_out_prompts_begin_with_is_shown_once(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1)
    prompts = [f"system\nYou add.\nuser\n{a} + 1?" for a in (1, 2)]
    lines = [
        {"prompt": {"text": prompt}, "samples": [{"text": "2", "reward": float(number)}]}
        for number, prompt in enumerate(prompts)
    ]
    (run / "evaluations").mkdir()
    (run / "evaluations" / "step_000001.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = write_report(run).read_text()
    assert (
        page.count("You add.") == 1
        and "<td><pre>1 + 1?</pre></td>" in page
        and "All prompts begin with the same text" in page
    )


def test_images_of_a_prompt_are_on_the_page(tmp_path: Path, make_group: MakeGroup) -> None:
    group, small = make_group(), "data:image/jpeg;base64,AAAA"
    answered = replace(group.samples[0], images=(PromptImages({}, thumbnails=[small, small]),))
    seen = replace(group, prompt=replace(group.prompt, images=PromptImages({}, thumbnails=[small])))
    run = write_run(tmp_path, steps=1, groups=[replace(seen, samples=(answered,)), group])
    (entry,) = data_of(write_report(run))["rollouts"]
    assert [one["images"] for one in entry["groups"]] == [[small], []]
    assert [one["images"] for one in entry["groups"][0]["samples"]] == [[small, small]], "those of tools' answers"
