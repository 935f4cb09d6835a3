"""Environments of Atropos' repository, unchanged, on our API and server, and our trainer takes steps from them.

They are run where ``ATROPOS_CHECKOUT`` names a clone of its repository. What they would download lies in the directory
in which they run, under the hub's names. The model answers right about half of the time, in the form that each wants.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import httpx
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lachesis.metrics.sinks.tape import read_groups, tape_files
from tests.e2e.atropos_runs import Stage, stage, wait_for
from tests.e2e.runs import metrics
from tests.e2e.test_trl_scripts import put
from tests.original import PYTHON, needs_original
from tests.tiny import tiny_model

CHECKOUT = os.environ.get("ATROPOS_CHECKOUT", "")
pytestmark = [
    needs_original,
    pytest.mark.skipif(not CHECKOUT, reason="ATROPOS_CHECKOUT names no clone of github.com/NousResearch/atropos"),
    pytest.mark.timeout(300),
]
SCRIPT = Path(__file__).with_name("atropos_script.py")
PACKAGES = Path(inspect.getfile(datasets)).parents[1]
GROUP, BATCH, STEPS = 4, 8, 2
WIDTH, LENGTH = 64, 16_384
RATE = {"learning_rate": 1e-4}
END = "<|im_end|>"
SPECIALS = ("<|pad|>", "<|im_start|>", END)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def thought(*answers: str, ends: str = "</think>\n") -> dict[str, tuple[str, ...]]:
    """What may follow which token: a turn is a thought and one of the answers.

    Four environments leave out turns of fewer than ten tokens.
    """
    words = ["\n", "<think>", *(f"so{n}," for n in range(8)), ends]
    steps = {one: (other,) for one, other in itertools.pairwise(words)}
    return steps | {ends: answers} | dict.fromkeys(answers, (END,))


@dataclass(frozen=True, slots=True)
class Case:
    """One of its environments.

    Args:
        script: its file.
        says: what its model says: which tokens may follow which, each as likely as the others.
        data: writes what it would download, or what its description has one make, into the working directory, where a
            copy of the script's directory is named ``copy``.
        flags: what of its configuration is changed beside addresses, sizes and evaluations.
        logprobs: whether it sends the logprobs of sampled tokens.
        shows: a text that the prompt or the answer of one rollout in each group has.
        steps: how many are trained.
    """

    script: str
    says: Mapping[str, tuple[str, ...]]
    data: Callable[[], None] = lambda: None
    flags: Mapping[str, str] = field(default_factory=dict)
    logprobs: bool = True
    shows: str = ""
    steps: int = STEPS


def write_questions() -> None:
    right = {"answer": 0, "ground_truth": "A"}
    rows = [
        {"prompt": f"What is {n} + 1?\nA. {n + 1}\nB. {n}", "options": [str(n + 1), str(n)], **right}
        for n in range(100)
    ]
    put("NousResearch/AcademicMCQA", "default", train=rows)


def write_tables() -> None:
    place = Path("wikisql", "data")
    place.mkdir(parents=True)
    table = {"id": "1", "header": ["City", "People"], "rows": [["Oslo", 7], ["Bergen", 3]], "types": ["text", "real"]}
    asked = {"question": "Which city has 7 people?", "table_id": "1", "sql": {"sel": 0, "agg": 0, "conds": [[1, 0, 7]]}}
    for split in ("train", "dev", "test"):
        (place / f"{split}.tables.jsonl").write_text(json.dumps(table) + "\n")
        (place / f"{split}.jsonl").write_text(json.dumps(asked) + "\n")
        (place / f"{split}.db").touch()


def call(number: int) -> str:
    """A tool call in the form that environments bring calls into."""
    return f'<tool_call>\n{{"name":"double","arguments":{{"number":{number}}}}}\n</tool_call>'


def write_calls() -> None:
    conversation = [
        {"from": "system", "value": "There is a tool: double(number)."}, {"from": "human", "value": "Double three."},
        {"from": "gpt", "value": call(3)},
    ]  # fmt: skip
    put("NousResearch/XLAM-Atropos", "default", train=[{"conversations": conversation}] * 120)


def write_turns(dataset: str) -> None:
    """Conversations with two turns that call a tool, and one that says what came out."""
    turn = [{"from": "gpt", "value": f"<think>So.</think>\n{call(3)}"}, {"from": "tool", "value": "6"}]
    conversation = [
        {"from": "system", "value": "There is a tool: double(number)."},
        {"from": "human", "value": "Double three, twice."}, *turn, *turn,
        {"from": "gpt", "value": "<think>So.</think>\nIt is 6."},
    ]  # fmt: skip
    put(dataset, "default", train=[{"conversations": conversation}] * 100)


def write_sums() -> None:
    put("nvidia/AceReason-Math", "default", train=[{"problem": "What is 3 + 3?", "answer": "6"}] * 100)


def write_programs() -> None:
    tests = json.dumps({"input": ["3\n", "5\n"], "output": ["6", "10"]})
    row = {"problem": "Double a number.", "tests": tests, "problem_type": "stdin_stdout", "difficulty": "easy"}
    put("NousResearch/RLVR_Coding_Problems", "default", train=[row] * 4)
    put("NousResearch/lcb_test", "default", test=[row])
    # The indices of problems that are left out, and where it writes.
    Path("copy", "perfect_indices.txt").touch()
    Path("copy", "train_logs").mkdir()


def edit(line: str) -> str:
    return f"### sums.py\n<<<<<<< SEARCH\nreturn a - b\n=======\n{line}\n>>>>>>> REPLACE"


def write_patches() -> None:
    row = {"problem_statement": "It subtracts.", "text": "### sums.py\nreturn a - b", "patch": edit("return a + b")}
    put("NousResearch/SWE-smith-oracle", "default", train=[row] * 4)
    put("princeton-nlp/SWE-bench_Lite_oracle", "default", test=[row])


REGEXES = (r"<answer>[a-z]+</answer>", r"<answer>\d*</answer>", "<answer>.*</answer>", "<answer>(</answer>")
PROGRAMS = ("```python\nprint(2 * int(input()))\n```", "```python\nprint(2 + int(input()))\n```")
QUERIES = (r"\boxed{SELECT City FROM data WHERE People = 7}", r"\boxed{SELECT People FROM data}")
BOXES = ("\n\\boxed{6}", "\n\\boxed{5}")
CALCULATION = '<tool_call>{"name": "calculator", "arguments": {"expr": "3+3"}}</tool_call>'
# It thinks and calls a tool, and goes on from the tool's response within the same thought.
INTERLEAVED = thought(CALCULATION, ends="hm.") | {"</tool_response>\n": ("</think>",), "</think>": BOXES}
INTERLEAVED |= dict.fromkeys(BOXES, (END,))
TOLD = "<|im_start|>tool\n6"
CASES = {
    "code: regular expressions": Case("community/regex_generation/regex_env.py", thought(*REGEXES)),
    "code: queries": Case("community/sql_query_env/sql_query_env.py", thought(*QUERIES), write_tables),
    # It ends at its first log, of an attribute that it never sets: after the first step.
    "code: programs": Case(
        "code_execution_server/coding_server.py", thought(*PROGRAMS), write_programs, logprobs=False, steps=1
    ),
    "code: patches": Case("swe_rl_env.py", thought(edit("return a + b"), edit("return 0")), write_patches),
    "choices": Case(
        "mcqa_thinking_env.py", thought("The best answer is: A", "The best answer is: B"), write_questions
    ),
    "tools: one call": Case("tool_calling_server.py", thought(call(3), call(4)), write_calls),
    "tools: turns": Case(
        "tool_use_multiturn_server.py", thought(call(3), call(4)),
        lambda: write_turns("interstellarninja/toolace_hermes_sequential_tool_use"),
        {"--env.scenario_category": "multistep"}, logprobs=False, shows=TOLD,
    ),
    "tools: turns with advantages of their own": Case(
        "tool_use_turnlevel_advantage_server.py", thought(call(3), call(4)),
        lambda: write_turns("interstellarninja/hermes_reasoning_tool_use"), logprobs=False, shows=TOLD,
    ),
    "tools: called in a thought": Case(
        "tool_use_interleaved_thinking.py", INTERLEAVED, write_sums, logprobs=False,
        shows='<tool_response>{"value": 6}</tool_response>',
    ),
}  # fmt: skip


def write_model(directory: Path, says: Mapping[str, tuple[str, ...]]) -> Path:
    """A model that says what it is told to; all else is a token a byte.

    What comes next depends on the last token alone: each of ``says`` has a direction of its own in the embedding, and
    the head holds the log-probabilities. No layer adds anything, until it is trained.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate((*SPECIALS, *letters))}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    inner.add_tokens([AddedToken(text, normalized=False) for text in says if text != "\n"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=SPECIALS[0])
    tokenizer.chat_template = CHATML
    model = tiny_model(
        "qwen3", vocab_size=len(tokenizer), hidden_size=WIDTH, eos_token_id=2, bos_token_id=None, pad_token_id=0,
        max_position_embeddings=32_768, tie_word_embeddings=False,
    )  # fmt: skip
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        embedding.copy_(torch.eye(WIDTH)[0].expand_as(embedding))
        head.fill_(-20 / WIDTH**0.5)
        for place, (token, following) in enumerate(says.items(), start=1):
            embedding[tokenizer.encode(token)[0]] = torch.eye(WIDTH)[place]
            head[[tokenizer.encode(other)[0] for other in following], place] = 0.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def start_environment(job: Stage, case: Case) -> None:
    flags: dict[str, object] = {
        "--env.rollout_server_url": job.api_url, "--env.tokenizer_name": job.model, "--env.use_wandb": "false",
        "--env.group_size": GROUP, "--env.max_token_length": LENGTH, "--env.eval_handling": "NONE",
        "--env.max_batches_offpolicy": 1, "--env.max_num_workers": 4, "--env.total_steps": -1,
        "--openai.base_url": f"{job.engine_url}/v1", "--openai.model_name": job.model, "--openai.api_key": "x",
        "--openai.server_type": "vllm", "--slurm": "false", **case.flags,
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair]
    script = job.directory / "copy" / Path(case.script).name
    job.start("env", script, "serve", *words, python=(*PYTHON, str(SCRIPT), str(PACKAGES)))


@pytest.mark.parametrize("name", CASES)
def test_an_environment_of_its_repository_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    for variable, value in (("HF_HUB_OFFLINE", "1"), ("HF_DATASETS_CACHE", "cache"), ("WIKISQL_CACHE_DIR", "wikisql")):
        monkeypatch.setenv(variable, value)
    # Some write beside their script.
    Path("copy").mkdir()
    for file in Path(CHECKOUT, "environments", case.script).parent.iterdir():
        if file.is_file():
            shutil.copy(file, "copy")
    case.data()
    model = write_model(tmp_path / "model", case.says)
    with stage(tmp_path, model=model, mode="shared_vllm", steps=case.steps) as job:
        job.start_api("--strict")
        job.start_engine()
        start_environment(job, case)
        source = {"batch_size": BATCH, "missing_logprobs": "error" if case.logprobs else "warn"}
        # Their prompts are long, and they leave out what is longer than the trainer says.
        job.start_trainer(job.write_config(source=source | {"max_sequence_length": LENGTH}, optimizer=RATE))
        ended = [job.processes[name] for name in ("env", "trainer")]
        wait_for(lambda: any(one.poll() is not None for one in ended), "the end of the job", timeout_s=120)
        assert job.wait_trainer(timeout_s=60) == 0, job.log("trainer") + job.log("env")
        status = httpx.get(f"{job.api_url}/status", timeout=60, trust_env=False).json()
        assert status.get("set_aside", 0) == 0 and status["current_step"] == case.steps
    check_steps(job, case)


def check_steps(job: Stage, case: Case) -> None:
    """Whole batches of groups whose scores differ were trained on, and what was trained is what the model said."""
    done = [line.values for line in metrics(job.run_dir).steps]
    assert [step["weight_version"] for step in done] == list(range(1, case.steps + 1))
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in done)
    groups = [group for path in tape_files(job.run_dir / "rollouts").values() for group in read_groups(path)]
    assert sum(len(group.samples) for group in groups) == case.steps * BATCH
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job.model)
    ends = [answer for answer, following in case.says.items() if END in following]
    for group in groups:
        assert len({sample.reward for sample in group.samples}) > 1
        told = [tokenizer.decode([*(one.prompt_ids or group.prompt.token_ids)]) for one in group.samples]
        said = [tokenizer.decode(list(one.completion_ids)) for one in group.samples]
        assert all(any(answer in text for answer in ends) for text in said), said
        assert any(case.shows in one + other for one, other in zip(told, said, strict=True)), told
        logprobs = [logprob for one in group.samples for logprob in one.logprobs]
        assert all(map(math.isfinite, logprobs)) if case.logprobs else all(map(math.isnan, logprobs))
