"""The live page in a real browser, before its real server, while runs go on."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn

from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.metrics.sinks.tape import read_groups, tape_files, write_groups
from lachesis.plugins.report.watch import Watch
from lachesis.run.requests import is_asked
from lachesis.run.sinks import keep_evaluation
from tests.browser.local import browser  # noqa: F401  # the one that reaches this machine
from tests.browser.test_report import Page
from tests.waiting import LONG_S, until

CALL = '{"name": "add", "parameters": {"a": 2, "b": 3}}'
TURNS = {
    1: f"<|python_tag|>{CALL}<|eom_id|>",
    2: "<|start_header_id|>ipython<|end_header_id|>",
    3: "5<b>",
    4: "It is 5.",
}
ASKED = ({"role": "system", "content": "You have add."}, {"role": "user", "content": "2+3?"})
CONVERSATION_STEP = 9


def add_conversation(run_dir: Path) -> None:
    """One step of the tape is of a rollout of two turns, between which a tool has answered."""
    turns = Sample(
        prompt_ids=(9,),
        completion_ids=tuple(TURNS),
        logprobs=(-0.2, -9.0, -9.0, -0.1),
        mask=(1, 0, 0, 1),
        finish_reason="stop",
        versions=VersionSpan(8, 8),
        text="".join(TURNS.values()),
        rewards=(1.0,),
        reward=1.0,
        advantage=0.0,
    )
    group = Group(Prompt("with a tool", (9,), "2+3?", messages=ASKED), (turns,))
    write_groups(
        run_dir / "rollouts", CONVERSATION_STEP, [group], texts=lambda ids: [TURNS[i] for i in ids], with_texts=1
    )


@pytest.fixture(scope="module")
def runs(make_run: Callable[[int], Path]) -> Iterator[list[Path]]:
    """Two runs; the first goes on, as far as one can see: a process that sleeps is its trainer."""
    paths = [make_run(30), make_run(20)]
    add_conversation(paths[0])
    keep_evaluation(paths[0], 30, [*read_groups(tape_files(paths[0] / "rollouts")[30])][:2])
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    state = {
        "status": "running",
        "pid": trainer.pid,
        "host": socket.gethostname(),
        "began": time.time() + 1,
        "step": 30,
    }
    (paths[0] / "state.json").write_text(json.dumps(state | {"steps": 60}))
    waits = [
        {"name": "the trainer's wait for a batch", "since": time.time() - 5, "limit_s": 600.0, "background": False}
    ]
    engines = [{"url": "http://10.0.0.1:9001", "state": "serving", "version": 30, "in_flight": 4, "completed": 120}]
    engines.append({"url": "http://10.0.0.2:9001", "state": "suspect", "version": 29, "reason": "no answer for 12 s"})
    live = {"pid": trainer.pid, "time": time.time(), "waits": waits, "engines": engines}
    (paths[0] / "live.json").write_text(json.dumps(live))
    yield paths
    trainer.terminate()
    trainer.wait()


@pytest.fixture(scope="module")
def address(runs: list[Path]) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Watch(runs, token="secret").app(), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(LONG_S)


@pytest.fixture
def page(browser: Page, address: str) -> Iterator[Page]:  # noqa: F811
    browser.complaints(), browser.requests()
    browser.viewport(width=1280, height=1000)
    browser.driver.get("about:blank")
    browser.driver.get(f"{address}#token=secret")
    until(lambda: browser.ask("document.querySelectorAll('[data-chart=reward] path.line').length") > 0)
    yield browser
    assert browser.complaints() == []
    assert {url.partition("?")[0].rpartition("/")[0] + "/" for url in browser.requests()} <= {address}


@contextmanager
def forwarded(to: int) -> Iterator[int]:
    """A port of this machine from which all bytes go to another, and back."""

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", to)) as there:
                back = threading.Thread(target=pump, args=(there, self.request), daemon=True)
                back.start()
                pump(self.request, there)
                back.join(LONG_S)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Forward) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):  # the other side has gone
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def add_step(run_dir: Path) -> int:
    last = read_metrics(run_dir / "metrics.jsonl").steps[-1]
    line: dict[str, Any] = {"type": "step", "step": last.step + 1, "time": last.time + 1, "values": dict(last.values)}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return last.step + 1


def test_curves_grow_without_loading_the_page_anew(page: Page, runs: list[Path]):
    page.driver.execute_script("window.marked = true; document.querySelector('#body details').open = true")
    page.driver.execute_script("byId('previous').click()")
    chosen = page.text("#step-label")
    step = add_step(runs[0])
    until(lambda: page.ask("report.charts[0].series[0].x.at(-1)") == step)
    assert page.ask("window.marked && document.querySelector('#body details').open")
    assert page.text("#step-label") == chosen, "what one reads stays"


def test_it_says_what_is_waited_for_and_until_when(page: Page):
    lead, waits = page.text("#lead"), page.text("#waits")
    assert "running" in lead and "of 60" in lead and "reward" in lead
    assert "the trainer's wait for a batch" in waits and "deadline 10m" in waits


def test_it_shows_the_fleet_of_engines_and_how_near_a_deadline_is(page: Page):
    rows = page.ask("[...document.querySelectorAll('#fleet tr.engine')].map((row) => row.textContent)")
    assert ["serving" in rows[0], "no answer for 12 s" in rows[1], len(rows)] == [True, True, 2]
    share = page.ask("document.querySelector('#waits meter').value")
    assert 0 < share < 0.9


def test_the_button_pauses_the_run_and_lets_it_go_on(page: Page, runs: list[Path]):
    assert page.text("#pause") == "Pause after this step"
    page.driver.execute_script("byId('pause').click()")
    until(lambda: page.text("#pause") == "Resume")
    assert is_asked(runs[0], "pause")
    page.driver.execute_script("byId('pause').click()")
    until(lambda: page.text("#pause") == "Pause after this step")
    assert not is_asked(runs[0], "pause")


def test_runs_side_by_side_and_the_history_of_a_prompt(page: Page, runs: list[Path]):
    page.driver.execute_script("byId('history').click()")
    until(lambda: page.ask("document.querySelectorAll('#found button').length") > 1)
    assert page.ask("byId('search').elements.prompt.value") == page.ask("page.prompt")
    page.driver.execute_script("[...document.querySelectorAll('#runs button')].at(-1).click()")
    until(lambda: page.ask("document.querySelectorAll('[data-chart=reward] path.line:not(.raw)').length") == 2)
    assert "run.steps" in page.text("#differences")
    page.driver.execute_script("document.querySelectorAll('#runs button')[1].click()")
    until(lambda: page.ask("report.charts[0].series[0].x.at(-1)") == 20)


def test_a_rollout_is_found_read_turn_by_turn_and_compared_with_another_step(page: Page, runs: list[Path]):
    step = 7
    path = tape_files(runs[0] / "rollouts")[step]
    told = json.loads(path.read_text().splitlines()[0])
    page.driver.execute_script(
        "document.querySelector('.search').open = true; const form = byId('search');"
        f"form.elements.steps.value = '{step}'; form.elements.prompt.value = '{told['prompt']['id']}';"
        "form.requestSubmit()"
    )
    until(lambda: page.ask("document.querySelectorAll('#found button').length") == len(told["samples"]))
    page.driver.execute_script("document.querySelector('#found button').click()")
    until(lambda: page.ask("document.querySelectorAll('#one .turn.sampled .t').length") > 0)
    assert page.text("#one .turn pre") == told["prompt"]["text"]
    assert f"{step}:1:1" in page.text("#one .facts-of-one") and "advantage" in page.text("#one .facts-of-one")


def test_a_rollout_with_a_tool_is_shown_turn_by_turn_with_its_call(page: Page):
    page.driver.execute_script(
        "document.querySelector('.search').open = true; const form = byId('search');"
        "form.elements.find.value = 'python_tag'; form.requestSubmit()"
    )
    until(lambda: page.ask("document.querySelectorAll('#found button').length") == 1)
    assert page.text("#found button") == f"{CONVERSATION_STEP}:1:1"
    page.driver.execute_script("document.querySelector('#found button').click()")
    until(lambda: page.ask("document.querySelectorAll('#one .turn').length") == 5)
    turns = page.ask(
        "[...document.querySelectorAll('#one .turn')].map((turn) => [turn.querySelector('h3').textContent,"
        " turn.classList.contains('sampled'), turn.querySelector('pre').textContent])"
    )
    assert turns == [
        ["system", False, "You have add."],
        ["user", False, "2+3?"],
        ["assistant", True, TURNS[1]],
        ["ipython", False, TURNS[2] + TURNS[3]],
        ["assistant", True, TURNS[4]],
    ]
    assert CALL in turns[2][2]
    classes = page.ask("[...document.querySelectorAll('#one .turn .t')].map((token) => token.className)")
    assert len(classes) == len(TURNS) and classes[0] != classes[1], "what was given has no colour of a probability"


def test_it_shows_what_was_held_out_logged_and_measured(page: Page, runs: list[Path]):
    held_out = page.ask("[...document.querySelectorAll('#held-out tr')].slice(1).map((row) => row.textContent.trim())")
    kept = [
        group
        for line in (runs[0] / "evaluations" / "step_000030.jsonl").read_text().splitlines()
        for group in [json.loads(line)]
    ]
    assert len(held_out) == sum(len(group["samples"]) for group in kept)
    assert "digits" in page.text("#samples"), "values of log_extra"
    titles = page.ask("[...document.querySelectorAll('.chart h3')].map((title) => title.firstChild.data)")
    assert {"letters", "Rewards by environment", "Staleness", "Training by rank"} <= set(titles)
    assert page.ask("document.querySelectorAll('#spread rect').length") > 0


def test_without_the_token_it_only_shows(page: Page, address: str, runs: list[Path]):
    page.driver.get("about:blank")
    page.driver.get(address)
    until(lambda: page.ask("document.querySelectorAll('[data-chart=reward] path.line').length") > 0)
    hidden = page.ask("['checkpoint', 'pause', 'stop'].map((id) => byId(id).hidden)")
    assert hidden == [True, True, True]
    assert httpx.post(f"{address}checkpoint?run=0").status_code == 403
    assert not is_asked(runs[0], "checkpoint")


def test_through_a_forwarded_port_as_ssh_makes_it(page: Page, address: str, runs: list[Path]):
    """`ssh -L PORT:127.0.0.1:8010`: all that the page asks for goes to the port that it was loaded from."""
    with forwarded(int(address.rsplit(":", 1)[1].strip("/"))) as port:
        page.driver.get("about:blank")
        page.requests()
        page.driver.get(f"http://127.0.0.1:{port}/#token=secret")
        until(lambda: page.ask("document.querySelectorAll('[data-chart=reward] path.line').length") > 0)
        page.driver.execute_script("byId('checkpoint').click()")
        until(lambda: is_asked(runs[0], "checkpoint"))
        page.driver.get("about:blank")
        assert {urlsplit(url).netloc for url in page.requests()} == {f"127.0.0.1:{port}"}


def test_on_a_phone_in_the_dark_nothing_is_cut_off(page: Page):
    page.viewport(width=390, height=844, dark=True)
    until(lambda: page.ask("document.documentElement.scrollWidth") <= 390)
    assert page.ask("document.querySelector('.watch').clientHeight") < 200, "it stays in view, and leaves room to read"
    lead = "Math.max(...[...document.querySelectorAll('#lead dd')].map((one) => one.getBoundingClientRect().bottom))"
    assert page.ask(lead) < 844, "state and reward are on the first screen"
    cut = "[...document.querySelectorAll('.series')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert page.ask(cut) == 0
    paper = page.ask("getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in paper.removeprefix("rgb(").removesuffix(")").split(",")) < 60


def test_the_button_stops_the_run(page: Page, runs: list[Path]):
    page.driver.execute_script("byId('stop').click()")
    until(lambda: "requested" in page.text("#connection"))
    assert is_asked(runs[0], "stop")
