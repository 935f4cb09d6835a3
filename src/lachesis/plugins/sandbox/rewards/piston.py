"""Judges of competitive programming on Piston servers: the rewards that open-r1's recipes call ioi_code and cf_code.

The servers run open-r1's packages ``cms_ioi`` and ``codeforces``, which compile a program and run it on one test; their
addresses are in ``$PISTON_ENDPOINTS``, as there, and each gets ``$PISTON_MAX_REQUESTS_PER_ENDPOINT`` requests at once.
A program that none of them judges is excluded: there that is a score of 0. Where it is so with all, the reward raises.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import httpx

from lachesis.common.errors import ConfigError, RewardError
from lachesis.common.json_values import read_json
from lachesis.rollouts.rewards.functions import Excluded, Reward

Scoring = Literal["pass_fail", "partial", "weighted_sum"]

_ATTEMPTS = 5
_SPARE_S = {"cms_ioi": 3.0, "codeforces": 10.0}
_NO_CODE, _NOT_COMPILED = -1.0, -0.1
_HEADER = "#include <bits/stdc++.h>\n"
_NAMESPACE = "\nusing namespace std;\n\n"


class JudgeLost(RewardError):
    """A program was not judged, for which it cannot be blamed."""


@dataclass(frozen=True, slots=True)
class Piston:
    """Servers that take turns.

    Args:
        urls: of their API, as ``http://host:2000/api/v2``.
        requests: at once, to each.
        pause_s: after the first attempt that failed; twice as long after each further one.
    """

    urls: Sequence[str]
    requests: int = 1
    pause_s: float = 1.0

    @classmethod
    def from_environment(cls) -> Piston:
        """Raises ConfigError where $PISTON_ENDPOINTS names no address."""
        urls = [url.strip().rstrip("/") for url in os.environ.get("PISTON_ENDPOINTS", "").split(",") if url.strip()]
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ConfigError(
                "the rewards ioi_code and cf_code ask Piston servers, and $PISTON_ENDPOINTS has no address of one",
                remedy="set it, as PISTON_ENDPOINTS=http://host:2000/api/v2, several apart by commas",
            )
        return cls(urls, requests=int(os.environ.get("PISTON_MAX_REQUESTS_PER_ENDPOINT", "1")))

    @property
    def at_once(self) -> int:
        return len(self.urls) * self.requests

    def execute(self, request: Mapping[str, Any], *, number: int) -> Mapping[str, Any]:
        """The answer to one request, of the server that is due for its number, or of the next that answers.

        Raises:
            JudgeLost: none did.
        """
        limit = float(request["run_timeout"]) / 1000 + 60
        said = ""
        for attempt in range(_ATTEMPTS):
            url = self.urls[(number + attempt) % len(self.urls)]
            try:
                answer = httpx.post(f"{url}/execute", json=dict(request), timeout=limit, trust_env=False)
                found = read_json(answer.content) if answer.status_code == httpx.codes.OK else None
                if isinstance(found, dict) and "run" in found and not _is_overloaded(found):
                    return found
                said = f"{url} answered {answer.status_code}: {answer.text[:200]}"
            except (httpx.HTTPError, ValueError) as error:
                said = f"{url}: {error or type(error).__name__}"
            time.sleep(self.pause_s * 2**attempt)
        raise JudgeLost(f"no Piston server judged a program: {said}", remedy="start them, or correct $PISTON_ENDPOINTS")


def get_ioi_code_reward(test_batch_size: int = 1) -> Reward:
    """The lowest score of a program over the tests of its subtask, for rows as of the dataset open-r1/ioi.

    Args:
        test_batch_size: tests after which none are run if one of them has a score of 0; -1 runs all.

    Raises:
        ConfigError: there is no Piston server.
    """
    piston = Piston.from_environment()

    def ioi_code_reward(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | Excluded | None]:
        rows = _rows(columns, len(completions))
        jobs = [
            (row, with_includes(code_in(_text(one), "cpp"), row["id"]))
            for one, row in zip(completions, rows, strict=True)
        ]
        return _judged(piston, lambda job: _subtask_score(piston, *job, at_once=test_batch_size), jobs)

    return ioi_code_reward


def get_cf_code_reward(test_batch_size: int = 1, scoring_mode: Scoring = "weighted_sum") -> Reward:
    """A program's score over the tests of its problem, for rows as of the dataset open-r1/codeforces.

    -1 without code, -0.1 where it does not compile; None where there are no tests. Tests that were generated are in the
    folder ``$CF_TESTS_FOLDER``.

    Args:
        test_batch_size: tests after which none are run if one of them has failed, with ``pass_fail``; -1 runs all.
        scoring_mode: ``pass_fail`` is 1 for all tests and stops at the first that fails, ``partial`` their share,
            ``weighted_sum`` 1 for all and a tenth of the share.

    Raises:
        ConfigError: there is no Piston server.
    """
    piston = Piston.from_environment()

    def cf_code_reward(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | Excluded | None]:
        rows = _rows(columns, len(completions))
        jobs = [(row, code_in(_text(one), row.get("language"))) for one, row in zip(completions, rows, strict=True)]
        return _judged(
            piston, lambda job: _problem_score(piston, *job, at_once=test_batch_size, mode=scoring_mode), jobs
        )

    return cf_code_reward


def _judged(piston: Piston, judge: Callable[[Any], float | None], jobs: Sequence[Any]) -> list[float | Excluded | None]:
    """The scores, but for programs that were not judged. Raises JudgeLost where none was."""

    def score(job: Any) -> float | JudgeLost | None:
        try:
            return judge(job)
        except JudgeLost as lost:
            return lost

    with ThreadPoolExecutor(piston.at_once) as pool:
        scores = list(pool.map(score, jobs))
    lost = [one for one in scores if isinstance(one, JudgeLost)]
    if lost and len(lost) == len(scores):
        raise lost[0]
    return [Excluded("judge", one.message) if isinstance(one, JudgeLost) else one for one in scores]


def code_in(text: str, language: str | None) -> str:
    """The last block of code in that language; empty where there is none."""
    blocks = re.findall(rf"```{re.escape(language)}\n(.*?)```", text, re.DOTALL) if language else []
    return str(blocks[-1]) if blocks else ""


def with_includes(code: str, problem: str) -> str:
    """The program with the headers that it needs in any case: the standard library's, and the problem's own."""
    if not code:
        return code
    own = f'#include "{problem}.h"'
    named = "" if own in code else f"{own}\n"
    return _HEADER + named + ("" if "std::" in code or "using namespace std;" in code else _NAMESPACE) + code


def _subtask_score(piston: Piston, row: Mapping[str, Any], code: str, *, at_once: int) -> float:
    tests = _ioi_tests(row) if code else []
    scores: list[float] = []
    for batch in _batches(tests, at_once):
        scores += [_ioi_score(piston.execute(_ioi_request(row, code, test), number=len(scores))) for test in batch]
        if 0.0 in scores:
            return 0.0
    return round(min(scores), int(row["score_precision"])) if scores else 0.0


def _ioi_tests(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Input and output of each test of a subtask: the row's own, else those of open-r1/ioi-test-cases."""
    names, own = row["test_names"], row.get("test_cases")
    if isinstance(own, list):
        return [(str(given), str(wanted)) for given, wanted in own]
    known = own if isinstance(own, dict) else _ioi_tests_of(int(row["year"]))[row["id"]]
    return [(known[name][0], known[name][1]) for name in names]


@cache
def _ioi_tests_of(year: int) -> Mapping[str, Mapping[str, tuple[str, str]]]:
    datasets: Any = importlib.import_module("datasets")

    found: dict[str, dict[str, tuple[str, str]]] = {}
    rows = datasets.load_dataset("open-r1/ioi-test-cases", name=str(year), split="train")
    for row in rows:
        found.setdefault(row["problem_id"], {})[row["test_name"]] = row["test_input"], row["test_output"]
    return found


def _ioi_request(row: Mapping[str, Any], code: str, test: tuple[str, str]) -> dict[str, Any]:
    files = [
        {"name": f"graders/{str(row['id']).lower()}.cpp", "content": code},
        {"name": "input.txt", "content": test[0]},
        *([{"name": "correct_output.txt", "content": test[1]}] if test[1] else []),
        *({"name": name, "content": content} for name, content in row["grader_files"] if content),
    ]
    return _request("cms_ioi", files, seconds=row["time_limit"], spare="cms_ioi") | {
        "run_memory_limit": row["memory_limit"]
    }


def _ioi_score(answer: Mapping[str, Any]) -> float:
    """What the judge prints; 0 for a program that does not compile, or is ended for its time or memory."""
    run = answer["run"]
    if _compile_code(answer) or (run["code"] == 1 and "MemoryError" in run["stderr"]):
        return 0.0
    if run["stdout"]:
        return float(run["stdout"])
    if run["code"] and run.get("signal") != "SIGKILL":
        raise JudgeLost(
            f"the judge on Piston failed with {run['code']}: {run['stderr'][:200]}",
            remedy="look at its package cms_ioi",
        )
    return 0.0


def _problem_score(piston: Piston, row: Mapping[str, Any], code: str, *, at_once: int, mode: Scoring) -> float | None:
    tests = [*(row["official_tests"] or []), *_generated_tests(str(row["id"]))]
    if not tests:
        return None
    if not code:
        return _NO_CODE
    passed = 0
    for batch in _batches(tests, at_once):
        answers = [piston.execute(_cf_request(row, code, test), number=number) for number, test in enumerate(batch)]
        if any(_compile_code(answer) for answer in answers):
            return _NOT_COMPILED
        right = [answer["run"]["code"] == 0 and answer["run"]["stdout"].strip() == "1" for answer in answers]
        if mode == "pass_fail" and not all(right):
            return 0.0
        passed += sum(right)
    share, whole = passed / len(tests), float(passed == len(tests))
    return {"pass_fail": whole, "partial": share, "weighted_sum": whole + 0.1 * share}[mode]


def _generated_tests(problem: str) -> list[Mapping[str, str]]:
    folder = os.environ.get("CF_TESTS_FOLDER")
    if folder is None or not Path(folder).is_dir():
        raise RewardError(
            "cf_code needs the generated tests of open-r1/codeforces, and $CF_TESTS_FOLDER names no folder",
            remedy="download them, and set it to their folder",
        )
    return _generated_of(folder, problem.partition("/")[0]).get(problem, [])


@cache
def _generated_of(folder: str, contest: str) -> Mapping[str, list[Mapping[str, str]]]:
    datasets: Any = importlib.import_module("datasets")

    file = Path(folder) / f"test_cases_{int(contest):04d}.parquet"
    found: dict[str, list[Mapping[str, str]]] = {}
    rows = datasets.load_dataset("parquet", data_files=str(file), split="train") if file.is_file() else ()
    for row in rows:
        found.setdefault(row["problem_id"], []).append({"input": row["input"], "output": row["output"]})
    return found


def _cf_request(row: Mapping[str, Any], code: str, test: Mapping[str, str]) -> dict[str, Any]:
    language = row["language"]
    limits = {"TIME_LIMIT": row["time_limit"], "MEMORY_LIMIT": row["memory_limit"], "INPUT_MODE": row["input_mode"]}
    checker = row.get("generated_checker")
    files = [
        {"name": f"main.{language}", "content": code},
        *([{"name": "checker.py", "content": checker}] if checker else []),
        {"name": "input.txt", "content": test["input"]},
        {"name": "correct_output.txt", "content": test["output"]},
        {"name": "grader_config", "content": "\n".join(f"{key}={value}" for key, value in limits.items())},
    ]
    package = "cf_python3" if language == "python" else "c++17"
    return _request(package, files, seconds=row["time_limit"], spare="codeforces")


def _request(package: str, files: list[dict[str, Any]], *, seconds: float, spare: str) -> dict[str, Any]:
    """The limit of the whole; the judge itself heeds the problem's."""
    timeout = round((float(seconds) + _SPARE_S[spare]) * 1000)
    return {"language": package, "version": "*", "files": files, "run_timeout": timeout}


def _compile_code(answer: Mapping[str, Any]) -> int:
    return int((answer.get("compile") or {}).get("code") or 0)


def _is_overloaded(answer: Mapping[str, Any]) -> bool:
    return "Resource temporarily unavailable" in str(answer["run"].get("stderr", ""))


def _batches(tests: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    step = size if size >= 1 else max(1, len(tests))
    return (tests[start : start + step] for start in range(0, len(tests), step))


def _rows(columns: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """One mapping a completion, of the columns that have a value for each."""
    whole = {
        name: values for name, values in columns.items() if isinstance(values, list | tuple) and len(values) == count
    }
    return [{name: values[index] for name, values in whole.items()} for index in range(count)]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
