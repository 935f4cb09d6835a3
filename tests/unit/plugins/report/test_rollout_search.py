"""Rollouts of a tape: found, read turn by turn, compared, and those that failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lachesis.common.errors import DataError
from lachesis.common.types import Group, Prompt, Sample, StepRecord, VersionSpan
from lachesis.metrics.sinks.jsonl import JsonlSink
from lachesis.metrics.sinks.tape import TapeSink
from lachesis.plugins.environments.openenv_traces import arrays_of
from lachesis.plugins.report.rollout_commands import rollouts
from lachesis.plugins.report.rollout_search import (
    Query,
    conversation,
    failures,
    read_sample,
    read_steps,
    search,
)

CALL = '<tool_call>{"name": "add"}</tool_call>'
TEXTS = {1: CALL, 2: "<|im_start|>tool\n", 3: "5", 4: "so 5", 5: "no"}
MESSAGES = ({"role": "system", "content": "You add."}, {"role": "user", "content": "2+3"})


def sample(ids: tuple[int, ...], reward: float | None, **fields) -> Sample:
    fields = {"finish_reason": "stop", "advantage": 0.5} | fields
    return Sample(
        prompt_ids=(9,),
        completion_ids=ids,
        logprobs=tuple(-0.1 * i for i in ids),
        versions=VersionSpan(3, 4),
        text="".join(TEXTS[i] for i in ids),
        reward=reward,
        rewards=(reward,),
        **fields,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tape = TapeSink(tmp_path / "rollouts", report_groups=1, texts=lambda ids: [TEXTS[i] for i in ids])
    for step in (1, 2):
        turns = sample((1, 2, 3, 4), 0.25 * step, mask=(1, 0, 0, 1))
        first = Group(Prompt("a", (9,), "2+3", messages=MESSAGES, columns={"env_id": 4}), (turns, sample((5,), 0.0)))
        last = sample((4, 5), step - 1.0, finish_reason="length") if step == 2 else sample((5,), None)
        tape.write(StepRecord(step=step, values={}, groups=[first, Group(Prompt("b", (9,), "1+1"), (last,))]))
    return tmp_path


def test_those_of_one_of_several_sources_are_found_by_its_name(tmp_path: Path):
    tape = TapeSink(tmp_path / "rollouts", report_groups=1, texts=lambda ids: [TEXTS[i] for i in ids])
    groups = [Group(Prompt(name, (9,), "1", source=name), (sample((5,), 1.0),)) for name in ("math", "game", "math")]
    tape.write(StepRecord(step=1, values={}, groups=groups))
    assert [hit.place for hit in search(tmp_path, Query(environment="math"))] == ["1:1:1", "1:3:1"]
    assert [hit.place for hit in search(tmp_path, Query(environment="game"))] == ["1:2:1"]
    assert not [*search(tmp_path, Query(environment="code"))]


def test_rollouts_are_written_as_traces_of_openenv(run_dir: Path, tmp_path: Path):
    rollouts(run_dir, steps="2", traces=tmp_path / "traces.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    assert [(line["step"], line["group"], line["reward"]) for line in lines] == [(2, 1, 0.5), (2, 1, 0.0), (2, 2, 1.0)]
    found = arrays_of([line["training_trace"] for line in lines])
    assert (found["completion_ids"][0], found["env_mask"][0]) == ([1, 2, 3, 4], [1, 0, 0, 1])
    assert lines[0]["training_trace"]["turns"][1]["node_id"] == "2:1:1-3"


@pytest.mark.parametrize(
    ("query", "places"),
    [
        (Query(), ["2:1:1", "2:1:2", "2:2:1", "1:1:1", "1:1:2", "1:2:1"]),
        (Query(text="Tool_Call"), ["2:1:1", "1:1:1"]),
        (Query(text="1+1"), ["2:2:1", "1:2:1"]),
        (Query(least=0.25, most=0.5), ["2:1:1", "1:1:1"]),
        (Query(last_step=1, prompt_id="b"), ["1:2:1"]),
        (Query(first_step=2, most=0.0), ["2:1:2"]),
        (Query(environment="4", least=0.5), ["2:1:1"]),
        (Query(environment="5"), []),
    ],
)
def test_what_is_asked_for_is_found_latest_first(run_dir: Path, query: Query, places: list[str]):
    assert [hit.place for hit in search(run_dir, query)] == places


def test_a_conversation_has_its_roles_and_probabilities(run_dir: Path):
    hit, turns = read_sample(run_dir, "2:1:1")
    assert (hit.reward, hit.advantage, hit.versions, hit.tokens) == (0.5, 0.5, (3, 4), 4)
    assert [(turn.role, turn.sampled) for turn in turns] == [
        ("system", False), ("user", False), ("assistant", True), ("tool", False), ("assistant", True),
    ]  # fmt: skip
    assert turns[2].sequence is not None and turns[2].sequence["logprobs"] == [-0.1]
    assert turns[3].sequence is not None and turns[3].sequence["logprobs"] == [None, None], "what was given has none"
    assert turns[4].text == "so 5"


@pytest.mark.parametrize(
    ("call", "given", "role"),
    [
        ('<|python_tag|>{"name": "add", "parameters": {}}', "<|start_header_id|>ipython<|end_header_id|>5", "ipython"),
        ('[TOOL_CALLS][{"name": "add", "arguments": {}}]', "[TOOL_RESULTS]5[/TOOL_RESULTS]", "tool"),
    ],
)
def test_a_conversation_of_llama_or_mistral_has_its_roles(call: str, given: str, role: str):
    fields = {"text": call + given, "completion_ids": [1, 2], "logprobs": [-0.1, -0.2], "mask": [1, 0]}
    _, said, answer = conversation({"text": "2+3"}, fields, texts={1: call, 2: given})
    assert (said.role, said.text, answer.role) == ("assistant", call, role)


def test_texts_of_tokens_are_known_from_other_rollouts_of_the_step(run_dir: Path):
    _, turns = read_sample(run_dir, "2:2:1")
    assert turns[-1].sequence is not None and turns[-1].sequence["pieces"] == ["so 5", "no"]
    path = run_dir / "rollouts" / "step_000002.jsonl"
    path.write_text(path.read_text().splitlines()[1] + "\n")
    _, alone = read_sample(run_dir, "2:1:1")
    assert alone[-1].sequence is None and alone[-1].text == "so 5no"


def test_failures_have_the_step_in_whose_time_they_were(run_dir: Path):
    sink = JsonlSink(run_dir / "metrics.jsonl")
    for step in (1, 2):
        sink.write(StepRecord(step=step, values={}, ended=10.0 * step))
    sink.close()
    told = [(5.0, "crash"), (15.0, "timeout"), (25.0, "crash")]
    lines = [{"time": at, "cause": cause, "prompt": "a", "message": f"at {at}"} for at, cause in told]
    (run_dir / "failures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"time": ')
    assert [(one.step, one.cause) for one in failures(run_dir)] == [(None, "crash"), (2, "timeout"), (1, "crash")]
    assert [one.message for one in failures(run_dir)] == ["at 25.0", "at 15.0", "at 5.0"]
    (run_dir / "failures.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"line 1: not a failed rollout"):
        failures(run_dir)


def test_a_run_without_tape_says_so(tmp_path: Path):
    with pytest.raises(DataError, match=r"has no rollouts.*logging\.tape"):
        next(search(tmp_path, Query()))
    assert failures(tmp_path) == []


def test_steps_are_one_or_a_range():
    assert [read_steps(words) for words in (None, "3", "3-12")] == [(None, None), (3, 3), (3, 12)]
