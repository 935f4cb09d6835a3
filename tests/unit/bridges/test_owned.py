"""Engines whose processes belong to a bridge."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lachesis.bridges.owned import OwnedEngine
from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from tests.unit.bridges.fake_engine import FakeHttpEngine, FakeProcess, FakeServer
from tests.waiting import LONG_S


def build(number: int = 2) -> tuple[OwnedEngine, list[FakeProcess]]:
    servers = [FakeServer(number=i) for i in range(number)]
    processes = [FakeProcess(server) for server in servers]
    engine = FakeHttpEngine(*servers)
    return OwnedEngine(engine=engine, processes=processes, owner="run 7"), processes  # type: ignore[arg-type]


def within() -> Deadline:
    return Deadline("test: a start", LONG_S)


def test_all_servers_are_started_claimed_and_met_anew():
    owned, processes = build()
    owned.restart(deadline=within())
    first = owned.engine.session_id
    owned.restart(deadline=within())
    assert owned.engine.session_id != first
    assert [process.starts for process in processes] == [2, 2]
    assert {process.server.owner for process in processes} == {"run 7"}


def test_each_server_gets_the_command_for_its_number():
    owned, processes = build()
    owned.restart(deadline=within(), command=lambda i, path: ("serve", f"{path}-{i}"), checkpoint=Path("base"))
    assert [process.command for process in processes] == [("serve", "base-0"), ("serve", "base-1")]


def test_where_one_server_does_not_start_none_is_left():
    owned, processes = build()
    processes[1].dies_at_start = 1
    with pytest.raises(EngineError, match="out of memory"):
        owned.restart(deadline=within())
    assert [process.pid for process in processes] == [None, None]


def test_a_death_is_noticed_also_a_moment_after_the_connection_broke():
    owned, processes = build()
    owned.restart(deadline=within())
    assert not owned.died(within_s=0.01)
    threading.Timer(0.1, processes[1].stop).start()
    assert owned.died(within_s=LONG_S)


def test_logs_move_while_they_are_written_and_older_ones_stay(tmp_path):
    owned, processes = build()
    writers = []
    for number, process in enumerate(processes):
        process.log_path = tmp_path / f".{number}.log"
        writers.append(process.log_path.open("a", buffering=1))
        writers[-1].write("before\n")
    target = tmp_path / "logs" / "engine.log"
    target.parent.mkdir()
    target.write_text("of the run before it was resumed")
    owned.move_log(target)
    for writer in writers:
        writer.write("after\n")
        writer.close()
    assert target.read_text() == (tmp_path / "logs" / "engine-1.log").read_text() == "before\nafter\n"
    assert (tmp_path / "logs" / "engine-before.log").read_text() == "of the run before it was resumed"
    assert processes[0].log_path == target


def test_a_log_that_cannot_be_moved_is_an_error_in_words(tmp_path):
    owned, processes = build(1)
    processes[0].log_path = tmp_path / "never written"
    with pytest.raises(EngineError, match="cannot be moved"):
        owned.move_log(tmp_path / "engine.log")
