"""What README and the pages say without exception is shown by a test, and what they measured is in the results.

A sentence that says never, always, ever, every, everything or bit for bit has a part in ``SHOWN`` with the test that
holds it, or in ``NO_CLAIM``. A figure with a unit is in ``MEASURED`` with the words around it and what the results say,
or in ``SET`` with the line of the source, or the test, that has the number. Pages that are generated from the source
are held by the tests of what writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.paths import DOCS, ROOT

# Pages of which each row names its tests, or is a change that a test applies.
ELSEWHERE = {"defects.md", "extending.md"}
GENERATED = "<!-- Written by docs/generate_"
ABSOLUTE = re.compile(r"\b(never|always|ever|every|everything|bitwise|bit (?:for|by) bit)\b", re.IGNORECASE)
NUMBER = r"\d+(?:[.,]\d+)*"
UNIT = r" ?(?:[mµ]?s|min|h|%|[KMGT]i?B(?:/s)?|tokens/s|nats|x)(?!\w)| (?:seconds?|minutes?|hours?|times|a second)\b"
FIGURE = re.compile(rf"(?<![\w.,`/=-])(?:{NUMBER} (?:to|and|or) )?{NUMBER}(?:{UNIT}| million\b)|\bto 1e-\d+")
# The same in words, and a factor.
NUMBERS = "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|thirty|forty|fifty|hundred"
IN_WORDS = re.compile(
    rf"\b(?:in|within) an? (?:second|minute|hour)(?: or two)?\b|\b(?:once|twice) a (?:second|minute)\b"
    rf"|\b(?:{NUMBERS}) (?:times a second|seconds|minutes|hours|times|lines)\b|\bfactor of {NUMBER}"
    rf"|\ba (?:third|quarter|tenth) of (?:it|the)\b|\beach tenth\b|\b{NUMBER} [a-z]+ a second\b",
    re.IGNORECASE,
)
# In the tables of what each bridge holds.
COPIES = re.compile(r"(?<![\d.])[12]x(?!\w)")

# A part of each such sentence, and the test that shows it.
LOSS, UPDATES = "unit/train/losses/test_loss.py", "unit/bridges/test_proof.py"
SHOWN = {
    "are compared bit for bit, except": f"{UPDATES}::test_digests_see_what_a_canary_in_bfloat16_cannot",
    "which every other waits on: all end": "e2e/test_sharded.py::"
    "test_a_rank_that_is_killed_ends_all_of_them_with_a_sentence",
    "a resumed run goes on bitwise": "e2e/test_resume.py::test_a_stopped_run_goes_on_exactly",
    "at least one group in every batch": "unit/plugins/atropos/api/test_batching.py::test_minimums",
    "keep the trainer from waiting for ever": "unit/plugins/atropos/api/test_batching.py::"
    "test_mixes_on_which_the_original_waits_for_ever",
    "the step never goes back": "unit/plugins/atropos/api/test_state.py::test_a_registration_takes_no_step_back",
    "one token for every 64 bytes": "unit/plugins/atropos/api/test_batching.py::"
    "test_weight_bounds_the_bytes_of_a_token",
    "its `env_id` was never registered": "unit/plugins/atropos/api/test_state.py::test_strict_sets_aside_and_counts",
    "a post that could never fit gets 413": "unit/plugins/atropos/api/test_state.py::"
    "test_full_queue_refuses_whole_posts",
    "an earlier trainer never acknowledged": "unit/plugins/atropos/source/test_source.py::"
    "test_a_trainer_that_dies_before_its_step_leaves_the_batch_to_the_next",
    "The code's process never has the test": "contracts/test_code_attacks.py::test_no_attack_passes_any_test",
    "everything ends with the test": "contracts/test_sandbox.py::test_a_killed_trainer_takes_everything_with_it",
    "`rollouts/` (every completion": "unit/metrics/sinks/test_tape.py::test_groups_come_back_equal",
    "takes every flag of `vllm serve`": "unit/engines/vllm/test_launch.py::"
    "test_unknown_flags_and_spellings_are_handed_on",
    "`every_steps: N` transfers every N steps": "unit/bridges/test_broadcast.py::test_only_every_nth_version_travels",
    "bytes of every tensor that was to arrive": "unit/transport/test_digest.py::"
    "test_one_changed_bit_of_any_element_is_seen",
    "Nothing is ever tokenized again": "unit/rollouts/test_turn_server.py::"
    "test_turns_that_continue_each_other_are_one_sample_and_what_was_added_is_masked",
    "that every function abstained on": "unit/rollouts/rewards/test_rewarder.py::"
    "test_where_all_abstain_there_is_no_reward",
    "0 is synchronous, bit by bit": "e2e/test_learning.py::"
    "test_without_staleness_generating_ahead_is_synchronous_bit_by_bit",
    "every metric, rollout and weight is the same, bit by bit": "unit/rollouts/test_streaming.py::"
    "test_the_groups_are_those_without_streaming_whatever_is_finished_first",
    "All features together go on bitwise": "e2e/test_resume.py::test_what_works_together_goes_on_exactly_after_kill_9",
    "Everything on this page is run by a test": "e2e/test_tutorials.py::test_what_the_page_says_works",
    "what was loaded goes on bit by bit": "e2e/test_tinker.py::test_a_saved_state_goes_on_bit_by_bit",
    "other runs go on as they would have, bit by bit": "e2e/test_tinker.py::"
    "test_what_fails_in_one_run_changes_no_bit_of_another",
    "A live run writes at least every half minute": "unit/run/test_status.py::test_it_is_a_sign_of_life_even_so",
}
# Not about what Lachesis does: what others do, what a key means, what a page is for, a message that is quoted.
NO_CLAIM = (
    "installs everything into `.venv`",
    "every key.",
    "buffered for ever",
    "queued for ever",
    "Buffered sizes that never add up to",
    "never delivered",
    "(clients never disconnect)",
    "open to every web page",
    "shuffled as ever",
    "sent with every token they cost",
    "evaluate every so many steps",
    "every `ref_sync_steps`",
    "One command for everything",
    "#one-command-for-everything",
    "it never started: look at its log",
    "no completion would ever end",
    "a group takes for ever",
    "`every reward function abstained on all",
    "to every completion of the last",
    "`every completion of … prompts is the same text",
    "falls (59 to 7 %), one text for everything",
    "has one game three times",
    "The first five minutes",
)

# A part of the sentence with its figures, and what the results say of them.
MEASURED = {
    "its packed NCCL sender takes 0.050 s for 8B and ours 0.058, 0.074 and 0.080 with a proof": [
        "| vLLM's packed NCCL sender | 319 | 0.050 (0.111) | 0.074 |",
        "| **0.058** (0.066) | **0.080** |",
    ],
    "took 1.1 ms with two ranks and 3.3 ms with four": ["| 2 | 1.11 |", "| 4 | 3.34 |"],
    "(1.1 and 3.5 ms": ["| 0.79 | 1.14 |", "| 2.36 | 3.53 |"],
    "a step of a 1.5B model went from 6.6 s to 3.5 s": ["| a step | 3.275, **1.881** | 6.584, **3.505** |"],
    "0.58 s": ["0.584 ± 0.007"],
    "TRL 1.16 takes 1.55 s": ["1.550 ± 0.004"],
    "0.16 s": ["0.723 (0.698 to 0.757) | 0.160"],
    "TRL takes 0.72 s": ["0.723 (0.698 to 0.757)"],
    "1.5B model 49,000 a second, 8B 19,700: 1.44 and 0.98": ["**49,431**", "**19,681**", "| 1.44 | 1.13 | 0.98 |"],
    "trains it to more than 90 %": ["held-out accuracy of 0.94, 0.94 and 0.95"],
    "from 35 % to 90 % of held-out problems in 20 steps": ["| held out (100 problems) | 35 % | | 90 % | | 89 % |"],
    "a model of 1.8 million parameters": ["The quickstart's model of 1.8 million parameters"],
    "a LoRA adapter 36 to 73 ms": ["36 (40)", "73 (112)"],
    "6 ms": ["6.3 (7.3)"],
    "73 ms": ["73 (112)"],
    "36 ms": ["36 (40)"],
    "37 ms": ["37 (42)"],
    "0.20 s": ["202 (214)"],
    "0.083 s between two H100s": ["digests in a kernel a tensor, CUDA graphs | **83** (109) |"],
    "10 s": ["10,293 (12,088)"],
    "72 s": ["71,537"],
    "59 s": ["59,161"],
    "+0.8 GB": ["72.1, 72.9 GB", "56.9, 57.7 GB"],
    "204 to 151 tokens/s for one request": ["204 / 9,785", "151 / 7,628"],
    "about 34 ms on the 8B model (48 ms with 64 requests": ["34 (48)"],
    "6.2 s with `float8_rowwise` and 6.5 s with `float8`, in place of 8.1 s": [
        "| **6.200** ± 0.007",
        "| 6.549 ± 0.009",
        "takes 8.07 s",
    ],
    "0.020 to 0.0225 nats": ["0.0202 to\n  0.0225", "0.0130 before and 0.0141"],
    "an 8B model generates 1.2 to 1.3 times as fast": ["| fp8 over bf16 | 1.32 | 1.23 |"],
    "in a minute or two": ["109, 96 and 117 s of training", "64 s with less of it"],
    "About 40 programs a second on two cores": ["| namespaces | 4 calls | 2 | 150 | 41 |"],
    "about a quarter of the decoding speed": ["204 / 9,785", "151 / 7,628"],
    "takes a third of it away": ["0.0202 to\n  0.0225", "0.0130 before and 0.0141"],
    "1 to 3% longer": ["costs 1 to 3 % of a step"],
}
# A part of the sentence with its figures, and where the number is set: "file: line" of the source, or a test.
RESIDUAL = "tests/contracts/formats/test_residual.py"
PROOF, RULES = "src/lachesis/bridges/proof.py", "src/lachesis/metrics/health/rules.py"
CHECKUP = "src/lachesis/run/checkup"
SET = {
    "checked against TRL's own values to 1e-6": (f"tests/{LOSS}", "TOLERANCE = {torch.float64: 1e-6"),
    "shows it to 1e-9": ("tests/unit/train/test_policy.py", "1e-9"),
    "TRL 1.16's (to 1e-9": ("tests/unit/train/losses/test_divergence.py", "abs=1e-9"),
    "1.2 GB for 1,024 tokens": ("tests/unit/plan/test_memory.py", "approx(1.2e9"),
    "24 to 141 GB": ("src/lachesis/plan/cards.py", "CARDS = (24, 40, 48, 80, 141)"),
    "the served one, none, 1200 s": ("src/lachesis/plugins/atropos/environments/settings.py", "Field(1200.0"),
    "1200 s": ("src/lachesis/plugins/atropos/environments/settings.py", "Field(1200.0"),
    "where the other way is more than 3 % faster": ("src/lachesis/engines/vllm/drafts.py", "MARGIN = 0.03"),
    "The canary may differ by 2 nats": (PROOF, '"fp8": 2.0'),
    "4 (NF4) or 0.5 nats (int8)": (PROOF, '"int8": 0.5, "fp8": 2.0, "nf4": 4.0'),
    "9% (NF4) or 0.6% (int8)": ("tests/contracts/formats/test_quantized.py", '{"int8": 0.006, "nf4": 0.09}'),
    "less than 0.15 nats in the mean, and the gradient by less than 30%": (
        "tests/contracts/formats/test_float8.py",
        ".abs().mean() < 0.15\n",
    ),
    "It is waited for, for 30 s": ("src/lachesis/plugins/atropos/source/source.py", "_REACH_S = 30.0"),
    "(healthy: below 30 %)": (RULES, '"clipped_fraction", 0.3'),
    "with `--fit 40` what to change for 40 GB": ("src/lachesis/plan/cards.py", "40"),
    "(50, or 16 MiB)": ("src/lachesis/plugins/atropos/api/backlog.py", "_KEPT_BYTES = 16 << 20"),
    "once a second": ("src/lachesis/plugins/atropos/api/server.py", "_SYNC_S = 1.0"),
    "twice a second": ("src/lachesis/metrics/gpu_meter.py", "PERIOD_S = 0.5"),
    "twenty times a second": ("src/lachesis/plugins/sandbox/job.py", "_LOOK_S = 0.02, 0.05"),
    "made again five times": ("src/lachesis/plugins/sandbox/e2b.py", "_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)"),
    "takes at most 2 % of its time": ("src/lachesis/config/schema/__init__.py", "CHECKPOINT_SHARE = 0.02"),
    "take at most 2 % of the time": ("src/lachesis/config/schema/__init__.py", "CHECKPOINT_SHARE = 0.02"),
    "with 30 s or more between two checkpoints": ("src/lachesis/train/resume.py", "LEAST_S = 30.0"),
    "of less than fifty lines": ("tests/unit/train/test_loop.py", "def test_it_is_as_short_as_the_readme_says"),
    "falls by a factor of 1.25": (RESIDUAL, "(1.0, 1.25, 1.0), (10.0, 1.7, 1.3)"),
    "where the stream is ten times": (RESIDUAL, "(1.0, 1.25, 1.0), (10.0, 1.7, 1.3)"),
    "5 s, all at once": (f"{CHECKUP}/network.py", "LIMIT_S = 5.0"),
    "this machine's, to 5 s": ("src/lachesis/run/checkup/checks.py", "CLOCKS_S = 5.0"),
    "a file of 268 MB": (f"{CHECKUP}/disk.py", "BYTES, LIMIT_S = 256 * 2**20, 8.0"),
    "8 s of writing": (f"{CHECKUP}/disk.py", "BYTES, LIMIT_S = 256 * 2**20, 8.0"),
    "60 s for both": (f"{CHECKUP}/ranks.py", "LIMIT_S = 60.0"),
    "start 60 s, vLLM 600 s": (f"{CHECKUP}/transfer.py", "START_S, VLLM_START_S, SYNC_S = 60.0, 600.0, 30.0"),
    "transfer 30 s": (f"{CHECKUP}/transfer.py", "START_S, VLLM_START_S, SYNC_S = 60.0, 600.0, 30.0"),
    "every two seconds": ("src/lachesis/metrics/report/templates/watch.js", "setTimeout(follow, 2000)"),
}
# Of the table below it.
TRIED = "**128 of 157 (82 %)**, from 52 repositories, passed `plan` unchanged, and 128 (82 % of all) had trained"


@cache
def pages() -> list[Path]:
    found = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if page.name not in ELSEWHERE)]
    return [page for page in found if GENERATED not in page.read_text()]


@cache
def statements(page: Path) -> list[str]:
    """Its sentences and cells of tables, each in one line, without blocks of code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\n(?!\n| *(?:[-*] |\d+\. |[|#>]))\s*", " ", text)
    return [part for line in text.splitlines() for part in re.split(r"(?<=[.!?;])\s+|\s\|\s", line)]


def without(parts: Iterable[str], sentence: str) -> str:
    """What is left of a sentence: of "36 ms" nothing is left out for "6 ms"."""
    for part in parts:
        if part in sentence:
            sentence = re.sub(rf"(?<![\w.,]){re.escape(part)}", "", sentence)
    return sentence


def absolute(sentence: str) -> bool:
    return ABSOLUTE.search(without((*SHOWN, *NO_CLAIM, *SET), sentence)) is not None


def figures(sentence: str) -> list[str]:
    """Those that none of the tables has together with the words around it."""
    rest = COPIES.sub("", without((*MEASURED, *SET, *NO_CLAIM, TRIED), sentence))
    return [*FIGURE.findall(rest), *IN_WORDS.findall(rest)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_what_is_said_without_exception_has_a_test(page: Path):
    unknown = [sentence for sentence in statements(page) if absolute(sentence)]
    assert not unknown, "say it less absolutely, or name the test that shows it"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_what_is_said_in_figures_was_measured_or_is_set(page: Path):
    unknown = [(sentence, found) for sentence in statements(page) if (found := figures(sentence))]
    assert not unknown, "name the row of the results, or where it is set, or leave the figure out"


def test_such_sentences_are_found():
    assert absolute("The engine never waits.")
    assert absolute("It is equal, bit for bit.")
    assert not absolute("`every_steps: 3` is a key, and so is `ever_after`.")
    assert figures("1.5 s, 12 GB, 3 to 4 %, 40,000 tokens/s") == [
        "1.5 s",
        "12 GB",
        "3 to 4 %",
        "40,000 tokens/s",
    ]
    assert figures("It ends within a second, in a loop of fifty lines.") == ["within a second", "fifty lines"]
    assert figures("2 ranks of 8 GPUs with 0.9 and `30 s`, version 0.26.0, step 3") == []


def everything() -> str:
    return "\n".join(sentence for page in pages() for sentence in statements(page))


@pytest.mark.parametrize("part", [*SHOWN, *NO_CLAIM, *MEASURED, *SET, TRIED])
def test_the_sentences_are_still_there(part: str):
    assert part in everything(), "nobody says so any more"


@pytest.mark.parametrize(("part", "test"), SHOWN.items())
def test_the_tests_are_there(part: str, test: str):
    path, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / path).read_text()


@pytest.mark.parametrize(("part", "rows"), MEASURED.items())
def test_what_was_measured_is_in_the_results(part: str, rows: list[str]):
    results = (ROOT / "benchmarks/RESULTS.md").read_text()
    assert [row for row in rows if row not in results] == []


@pytest.mark.parametrize(("part", "place"), SET.items())
def test_what_is_set_is_so(part: str, place: tuple[str, str]):
    path, line = place
    assert line in (ROOT / path).read_text()


def test_the_public_files_are_those_of_the_table():
    cells = [row.split(" | ")[-2:] for row in (DOCS / "public-files.md").read_text().splitlines() if row[:2] == "| "]
    tried = [(plan, steps) for plan, steps in cells if plan == "unchanged" or plan.startswith("refused")]
    unchanged = [steps for plan, steps in tried if plan == "unchanged"]
    counts = (len(unchanged), len(tried), sum(steps.startswith("yes") for steps in unchanged))
    assert counts == tuple(map(int, re.findall(r"\b(?:128|157)\b", TRIED)))
