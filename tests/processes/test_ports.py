"""Tests that run side by side start servers on ports of their own."""

from __future__ import annotations

import itertools
import os
from multiprocessing import Pipe

import pytest

from tests import ports
from tests.ports import free_port, free_ports


def test_no_port_is_drawn_by_two_processes(monkeypatch: pytest.MonkeyPatch):
    mine, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ports._numbers = itertools.count()
        theirs.send([free_port() for _ in range(20)])
        theirs.recv()
        os._exit(0)
    try:
        others = mine.recv()
        monkeypatch.setattr(ports, "_numbers", itertools.count())
        own = {free_port() for _ in range(20)}
        first = free_ports(3)
        assert not {*own, first, first + 1, first + 2} & {*others} and len(own) == 20
    finally:
        mine.send("end")
        os.waitpid(pid, 0)
    monkeypatch.setattr(ports, "_numbers", itertools.count())
    assert {*others} & {free_port() for _ in range(40)}, "what has ended keeps none"
