"""ioi_code and cf_code against a server that answers as Piston does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, RewardError
from lachesis.plugins.sandbox.rewards import piston
from lachesis.plugins.sandbox.rewards.piston import (
    Piston,
    code_in,
    get_cf_code_reward,
    get_ioi_code_reward,
    with_includes,
)
from lachesis.rollouts.rewards.functions import Excluded

CPP = "I think.\n```cpp\nint f() { return 1; }\n```\n"
IOI = {
    "id": "holiday",
    "test_names": ["a", "b"],
    "test_cases": [["1", "x"], ["2", "y"]],
    "score_precision": 2,
    "time_limit": 1.5,
    "memory_limit": 64,
    "grader_files": [["graders/grader.cpp", "g"], ["graders/empty.h", ""]],
}
CODEFORCES = {
    "id": "1/A",
    "language": "cpp",
    "official_tests": [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}],
    "generated_checker": "print(1)",
    "time_limit": 2.0,
    "memory_limit": 256,
    "input_mode": "stdio",
}
Judge = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


class Server(ThreadingHTTPServer):
    """Keeps the requests; ``judge`` says the status and the answer."""

    judge: Judge
    requests: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        status, answer = self.server.judge(request)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def ran(stdout: str, *, code: int = 0, stderr: str = "", signal: str | None = None) -> tuple[int, dict[str, Any]]:
    return 200, {"run": {"stdout": stdout, "stderr": stderr, "code": code, "signal": signal}}


def file_of(request: dict[str, Any], name: str) -> str:
    return next(file["content"] for file in request["files"] if file["name"] == name)


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Handler)
    found.requests = []
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("PISTON_ENDPOINTS", f"http://127.0.0.1:{found.server_port}/api/v2/")
    monkeypatch.setenv("CF_TESTS_FOLDER", str(tmp_path))
    monkeypatch.setattr(piston.time, "sleep", lambda seconds: None)
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def columns(row: dict[str, Any], count: int = 1, **changed: Any) -> dict[str, list[Any]]:
    return {name: [value] * count for name, value in (row | changed).items()}


def test_the_lowest_score_of_the_tests_of_a_subtask(server):
    server.judge = lambda request: ran("0.5" if file_of(request, "input.txt") == "2" else "1")
    reward = get_ioi_code_reward(test_batch_size=2)
    assert reward([[{"role": "assistant", "content": CPP}], "no code"], **columns(IOI, 2)) == [0.5, 0.0]
    request = server.requests[0]
    assert request["language"] == "cms_ioi" and request["run_timeout"] == 4500 and request["run_memory_limit"] == 64
    assert [file["name"] for file in request["files"]] == [
        *("graders/holiday.cpp", "input.txt", "correct_output.txt", "graders/grader.cpp"),
    ]
    assert '#include "holiday.h"' in file_of(request, "graders/holiday.cpp")


def test_no_test_is_run_after_one_without_a_point(server):
    server.judge = lambda request: ran("0")
    assert get_ioi_code_reward(test_batch_size=1)([CPP], **columns(IOI)) == [0.0]
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"compile": {"code": 1, "stderr": "error"}, "run": {"stdout": "", "stderr": "", "code": 0}}),
        ran("", code=1, stderr="MemoryError"),
        ran("", code=137, signal="SIGKILL"),
    ],
)
def test_what_does_not_compile_or_passes_a_limit_scores_nothing(server, answer):
    server.judge = lambda request: answer
    assert get_ioi_code_reward()([CPP], **columns(IOI)) == [0.0]


def test_a_judge_that_fails_is_no_score_of_zero(server):
    server.judge = lambda request: ran("", code=2, stderr="no grader")
    with pytest.raises(RewardError, match="no grader"):
        get_ioi_code_reward()([CPP], **columns(IOI))


def test_a_program_that_is_not_judged_is_excluded_where_others_are(server):
    bad = CPP.replace("1", "666")
    judged = ran("1")
    server.judge = lambda request: ran("", code=2) if "666" in request["files"][0]["content"] else judged
    rows = {name: values * 2 for name, values in columns(IOI).items()}
    found, other = get_ioi_code_reward()([bad, CPP], **rows)
    assert (found, other) == (Excluded("judge"), 1.0)
    assert "failed with 2" in found.why


def test_an_overloaded_server_is_asked_again_and_a_dead_one_is_an_error(server):
    answers = [ran("", stderr="Resource temporarily unavailable"), (500, {}), ran("1"), ran("1")]
    server.judge = lambda request: answers.pop(0)
    assert get_ioi_code_reward()([CPP], **columns(IOI)) == [1.0]
    server.judge = lambda request: (503, {"message": "closed"})
    with pytest.raises(RewardError, match="503"):
        get_ioi_code_reward()([CPP], **columns(IOI))


@pytest.mark.parametrize(("mode", "expected"), [("pass_fail", 0.0), ("partial", 0.5), ("weighted_sum", 0.05)])
def test_modes_of_codeforces(server, mode, expected):
    server.judge = lambda request: ran("1" if file_of(request, "input.txt") == "1" else "0")
    assert get_cf_code_reward(scoring_mode=mode)([CPP], **columns(CODEFORCES)) == [pytest.approx(expected)]
    request = server.requests[0]
    assert request["language"] == "c++17" and file_of(request, "checker.py") == "print(1)"
    assert file_of(request, "grader_config") == "TIME_LIMIT=2.0\nMEMORY_LIMIT=256\nINPUT_MODE=stdio"


def test_all_tests_of_codeforces(server):
    server.judge = lambda request: ran("1")
    assert get_cf_code_reward()([CPP], **columns(CODEFORCES)) == [pytest.approx(1.1)]
    python = columns(CODEFORCES, language="python")
    assert get_cf_code_reward()(
        [
            "```python\nprint(1)\n```",
        ],
        **python,
    ) == [pytest.approx(1.1)]
    assert server.requests[-1]["language"] == "cf_python3"


def test_codeforces_without_code_without_tests_and_without_a_program(server):
    server.judge = lambda request: (200, {"compile": {"code": 1}, "run": {"stdout": "", "stderr": "", "code": 0}})
    reward = get_cf_code_reward()
    assert reward(["nothing"], **columns(CODEFORCES)) == [-1.0]
    assert reward([CPP], **columns(CODEFORCES)) == [-0.1]
    assert reward([CPP], **columns(CODEFORCES, official_tests=[])) == [None]


def test_generated_tests_have_to_be_there(server, monkeypatch):
    monkeypatch.delenv("CF_TESTS_FOLDER")
    with pytest.raises(RewardError, match="CF_TESTS_FOLDER"):
        get_cf_code_reward()([CPP], **columns(CODEFORCES))


@pytest.mark.parametrize("value", ["", "slurm", " , "])
def test_without_an_address_it_is_said_at_the_start(monkeypatch, value):
    monkeypatch.setenv("PISTON_ENDPOINTS", value)
    with pytest.raises(ConfigError, match="PISTON_ENDPOINTS"):
        get_ioi_code_reward()
    with pytest.raises(ConfigError):
        Piston.from_environment()


def test_the_last_block_of_a_language_is_the_program():
    text = "```cpp\na\n```\n```python\nb\n```\n```cpp\nc\n```"
    assert code_in(text, "cpp") == "c\n" and code_in(text, "python") == "b\n"
    assert code_in(text, "java") == "" and code_in(text, None) == ""


def test_headers_are_added_once():
    plain = with_includes("int x;", "p")
    assert plain.startswith("#include <bits/stdc++.h>") and '"p.h"' in plain and "using namespace std" in plain
    assert with_includes('#include "p.h"\nstd::string x;', "p").count('"p.h"') == 1
    assert with_includes("", "p") == ""
