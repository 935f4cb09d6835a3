"""Over a directory that looks as a mounted control group does; what the kernel does with it, tests/contracts shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lachesis.plugins.sandbox import cgroup
from lachesis.plugins.sandbox.cgroup import Cgroup, make_cgroup
from lachesis.plugins.sandbox.records import Limits

FILES = ("cgroup.procs", "memory.max", "memory.events", "memory.swap.max", "pids.max", "cgroup.kill")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cgroup | None]:
    """Make a group below a hierarchy whose groups hand on what is said, from the outermost one to our own."""
    root = tmp_path / "cgroup"
    mkdir = Path.mkdir

    def make_and_fill(self: Path, *arguments: int, **options: bool) -> None:
        """As the kernel, which puts files into a new group."""
        mkdir(self, *arguments, **options)
        if self.name.startswith("lachesis-code-"):
            has_cpu = "cpu" in (self.parent / "cgroup.subtree_control").read_text()
            for name in (*FILES, *["cpu.max"] * has_cpu):
                (self / name).write_text("low 0\noom 2\noom_kill 1\n" if name == "memory.events" else "")

    def make(*handed_on: str, own: str = "/user.slice/app.slice") -> Cgroup | None:
        groups = [root, root / "user.slice", root / "user.slice/app.slice"]
        for group, controllers in zip(groups, handed_on, strict=True):
            mkdir(group, parents=True, exist_ok=True)
            (group / "cgroup.subtree_control").write_text(controllers)
        (tmp_path / "mountinfo").write_text(
            f"24 1 0:22 / /proc rw - proc proc rw\n30 24 0:26 / {root} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
        )
        (tmp_path / "own").write_text(f"1:name=systemd:/\n0::{own}\n")
        return make_cgroup(mountinfo=tmp_path / "mountinfo", own=tmp_path / "own")

    monkeypatch.setattr(Path, "mkdir", make_and_fill)
    monkeypatch.setattr(cgroup, "_try_to_enter", lambda group: None)
    return make


def test_it_is_made_in_the_nearest_group_that_hands_on_memory_and_processes(make: Callable[..., Cgroup | None]):
    group = make("cpu memory pids", "memory pids", "memory")
    assert group is not None
    assert (group.path.parent.name, group.path.name) == ("user.slice", f"lachesis-code-{os.getpid()}")
    assert group.layer == "a control group for memory and processes"


def test_a_job_gets_its_limits_and_all_of_it_is_killed(make: Callable[..., Cgroup | None]):
    group = make("", "cpu memory pids", "")
    assert group is not None and group.layer.endswith("and one processor")
    group.restrict(Limits(memory_bytes=1 << 30, scratch_bytes=1 << 20, processes=10))
    group.enter()
    group.kill()
    written = {name: (group.path / name).read_text() for name in FILES}
    assert written["memory.max"] == str((1 << 30) + (1 << 20) + (32 << 20))
    assert (written["pids.max"], written["cgroup.procs"], written["cgroup.kill"]) == ("18", "0", "1")
    assert (written["memory.swap.max"], group.ran_out()) == ("0", 1)


@pytest.mark.parametrize("handed_on", [("", "", ""), ("cpu", "hugetlb", "memory")])
def test_where_nothing_is_handed_on_there_is_none(make: Callable[..., Cgroup | None], handed_on: tuple[str, ...]):
    assert make(*handed_on) is None


def test_without_version_2_there_is_none(tmp_path: Path):
    (tmp_path / "mountinfo").write_text("30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n")
    (tmp_path / "own").write_text("4:memory:/\n")
    assert make_cgroup(mountinfo=tmp_path / "mountinfo", own=tmp_path / "own") is None
    assert make_cgroup(mountinfo=tmp_path / "none", own=tmp_path / "own") is None


def test_one_that_no_process_can_be_moved_to_is_removed(make: Callable[..., Cgroup | None], monkeypatch):
    def refuse(group: Cgroup) -> None:
        for name in (*FILES, "cpu.max"):
            (group.path / name).unlink()  # as the kernel does with the group
        raise PermissionError

    monkeypatch.setattr(cgroup, "_try_to_enter", refuse)
    assert make("", "cpu memory pids", "") is None


def test_groups_of_wardens_that_were_killed_are_swept_up(tmp_path: Path):
    left, living = tmp_path / "lachesis-code-999999999", tmp_path / f"lachesis-code-{os.getpid()}"
    left.mkdir()
    living.mkdir()
    cgroup._sweep(tmp_path)
    assert (left.exists(), living.exists()) == (False, True)
