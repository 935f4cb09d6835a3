"""One program, or one test of some code, behind the walls: two processes, of which only the second runs the code.

The warden forks the *judge* and ends all of it at a limit. The judge is the first process of a new namespace, so that
nothing inside can end it, and everything inside ends with it; it puts up the walls, and reads the test or the input
only once the *subject*, forked from it, is separate and keeps only a socket to it.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.plugins.sandbox import kernel
from lachesis.plugins.sandbox.cgroup import Cgroup
from lachesis.plugins.sandbox.filters import contain_code, deny_system_calls, restrict_paths
from lachesis.plugins.sandbox.judge import judge
from lachesis.plugins.sandbox.link import MAX_REQUEST_BYTES, LinkClosed, receive, receive_part, send
from lachesis.plugins.sandbox.records import Limits, Verdict
from lachesis.plugins.sandbox.subject import answer, load_module
from lachesis.plugins.sandbox.view import View, empty_directory, mount_scratch, new_directory, size_of
from lachesis.process.workers import end_with_parent

_FIRST_LOOK_S, _LOOK_S = 0.02, 0.05
_REAP_S = 5.0
_CHUNK = 1 << 16
NOBODY = 65534
# Exit codes of our own process when it raised, and when the code had left it no directory to work in.
_FAILED, _SPOILED = 70, 71
# Seconds within which the judge must have received its request.
REQUEST_S = 120.0
# Each may be a socket with a full buffer, which no process's memory includes.
_OPEN_FILES = 128
_STACK_BYTES = 64 << 20
_PAGE = resource.getpagesize()
_OWN_SPACE: dict[str, int] = {}
ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}


@dataclass(frozen=True, slots=True)
class Walls:
    """Walls around all jobs.

    Args:
        view: the files that a job can see.
        contained: each job has its own namespaces; otherwise only Landlock and the filter of system calls confine it.
        nobody: there is a user without rights that the job can become.
        filtered: Landlock and the filter are used; without them there is no wall, only limits.
        group: control group that holds the job to its limits, if one could be made.
    """

    view: View
    contained: bool
    nobody: bool
    filtered: bool = True
    group: Cgroup | None = None


def run_job(requests: socket.socket, header: Mapping[str, Any], walls: Walls) -> None:
    """Have a judge run the request that comes over ``requests``, and answer there.

    Runs in the warden, which reads nothing of the request.
    """
    limits = Limits(**header["limits"])
    started = time.monotonic()
    scratch = walls.view.scratch if walls.contained else new_directory()
    report, theirs = socket.socketpair()
    lifeline, held = os.pipe()
    if walls.contained:
        kernel.use_new_process_namespace()
    base = memory_of(os.getpid()) + header["held_bytes"]
    if walls.group is not None:
        walls.group.restrict(limits, held_bytes=header["held_bytes"])
    child = os.fork()
    if child == 0:
        os.close(held)
        end_with(lambda: _run_judge(requests, theirs, header, walls, scratch, lifeline))
    os.setpgid(child, child)  # here too, because the group may be killed before the child has run
    theirs.close()
    os.close(lifeline)
    try:
        found = _watch(report, child, limits, base=base, walls=walls, scratch=scratch)
    finally:
        _end_all(child, walls)
        os.close(held)
        if not walls.contained:
            with contextlib.suppress(FileNotFoundError):  # without a wall, the code may have removed it
                empty_directory(scratch)
                os.rmdir(scratch)
        report.close()
    send(requests, {**found, "seconds": time.monotonic() - started}, max_bytes=MAX_REQUEST_BYTES)


def _watch(
    report: socket.socket, judge_pid: int, limits: Limits, *, base: int, walls: Walls, scratch: str
) -> dict[str, Any]:
    """Return the judge's reports, and the limit that the program hit, if any.

    The program's time begins when the judge has its request. The ending ``died`` means that the judge failed, for which
    the program is not to blame.
    """
    verdicts: list[Any] = []
    begun, end = False, time.monotonic() + REQUEST_S
    ran_out = walls.group.ran_out() if walls.group else 0
    look_s = _FIRST_LOOK_S
    ready = select.poll()
    ready.register(report, select.POLLIN | select.POLLHUP)
    while (left_s := end - time.monotonic()) > 0:
        if ready.poll(1000 * min(look_s, left_s)):
            try:
                found = receive(report)
            except LinkClosed:
                if walls.group and walls.group.ran_out() > ran_out:
                    return {"verdicts": verdicts, "ending": "memory"}
                return {"verdicts": verdicts, **_ending_of(judge_pid)}
            if walls.group and walls.group.ran_out() > ran_out:
                return {"verdicts": verdicts, "ending": "memory"}
            if "ending" in found:
                return {"verdicts": verdicts, **found}
            if "begun" in found:
                begun, end = True, time.monotonic() + limits.wall_s
            else:
                verdicts.append(found)
            continue
        look_s = _LOOK_S
        processes = _processes(walls, judge_pid)
        if not walls.contained and len(processes) > limits.processes + 4:
            return {"verdicts": verdicts, "ending": "scratch"}
        if sum(max(memory_of(pid) - base, 0) for pid in processes) > limits.memory_bytes:
            return {"verdicts": verdicts, "ending": "memory"}
        if not walls.contained and size_of(Path(scratch), unreadable=math.inf) > limits.scratch_bytes:
            return {"verdicts": verdicts, "ending": "scratch"}
    if not begun:
        return {"verdicts": verdicts, "ending": "died", "detail": f"its request did not come within {REQUEST_S:g} s"}
    return {"verdicts": verdicts, "ending": "wall"}


def _ending_of(judge_pid: int) -> dict[str, str]:
    """Return how the judge ended: ``left`` by a test that ends its process, or else ``died``.

    The code cannot cause it: its signals do not reach the judge, and the files it leaves are reported separately.
    """
    code = os.waitstatus_to_exitcode(os.waitpid(judge_pid, 0)[1])
    if code < 0:
        return {"ending": "died", "detail": f"the judge was killed by {signal.Signals(-code).name}"}
    return {"ending": "died", "detail": "the judge failed"} if code == _FAILED else {"ending": "left"}


def _processes(walls: Walls, judge_pid: int) -> list[int]:
    """Return a job's processes: all others of the namespace, or those of the judge's group."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    if walls.contained:
        return [pid for pid in pids if pid != os.getpid()]
    return [pid for pid in pids if _group_of(pid) == judge_pid]


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process, 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _end_all(judge_pid: int, walls: Walls) -> None:
    """Kill a job's processes, all at once, so that none forks another meanwhile, and wait until they are gone."""
    end = time.monotonic() + _REAP_S
    if walls.group is not None:
        walls.group.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(judge_pid, signal.SIGKILL)
    while not walls.contained and _processes(walls, judge_pid) and time.monotonic() < end:
        _reap(judge_pid)
        time.sleep(0.001)
    while not _reap(judge_pid):
        if time.monotonic() > end:
            raise OSError("a killed process does not end")
        time.sleep(0.0005)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _reap(pid: int) -> bool:
    """Return True if a child that has ended was reaped, or if there is no such child."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return pid > 0


def _run_judge(
    requests: socket.socket, report: socket.socket, header: Mapping[str, Any], walls: Walls, scratch: str, lifeline: int
) -> None:
    kernel.die_with_parent()
    kernel.take_usual_priority()
    os.setpgid(0, 0)
    end_with_parent(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the only signal that can reach it
    _enter(walls, Limits(**header["limits"]), scratch)
    run = _judge_tests if header["kind"] == "tests" else _run_programs
    run(requests, report, header, walls)


def _enter(walls: Walls, limits: Limits, scratch: str) -> None:
    """Put up the walls around this process and its children."""
    if walls.group is not None:
        walls.group.enter()
    if walls.contained:
        kernel.unshare(kernel.CLONE_NEWNS)
        mount_scratch(walls.view, limits.scratch_bytes)
    os.chdir(scratch)
    os.environ.clear()
    os.environ.update(ENVIRONMENT, HOME=scratch, TMPDIR=scratch)
    if walls.nobody:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if not walls.filtered:
        return
    kernel.gain_nothing()
    kernel.drop_capabilities()
    kernel.hide_memory()
    readable = ["/"] if walls.contained else list(walls.view.readable)
    writable = [scratch, "/dev/null", *(["/dev/shm"] if walls.contained else [])]
    devices = [path for path in ("/dev/random", "/dev/urandom", "/dev/full") if os.path.exists(path)]
    version = restrict_paths([*readable, *devices], writable)
    deny_system_calls(contained=walls.contained, signals_contained=walls.contained or version >= 6)


def _limit(limits: Limits) -> None:
    """Set the limits for the subject, and for each process that it starts."""
    # Limits of a warden without separate users count its processes too.
    limit(resource.RLIMIT_NPROC, limits.processes + 4)
    limit(resource.RLIMIT_CPU, max(1, round(limits.cpu_s + 0.5)))
    limit(resource.RLIMIT_AS, limits.memory_bytes + _OWN_SPACE.get("bytes", 1 << 30))
    limit(resource.RLIMIT_STACK, _STACK_BYTES)
    limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    limit(resource.RLIMIT_FSIZE, limits.scratch_bytes)
    limit(resource.RLIMIT_CORE, 0)


def limit(kind: int, value: int) -> None:
    """Set a limit for good, unless there is a lower one."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def measure_own_space() -> None:
    """Measure the address space of the warm interpreter, which is added to a program's limit."""
    _OWN_SPACE["bytes"] = int(Path("/proc/self/statm").read_bytes().split()[0]) * _PAGE


def _judge_tests(requests: socket.socket, report: socket.socket, header: Mapping[str, Any], walls: Walls) -> None:
    """Run each test with a new process for the code, forked by one that never holds a secret."""
    pairs = [socket.socketpair() for _ in range(header["count"])]
    control, theirs = socket.socketpair()
    forker = os.fork()
    if forker == 0:
        end_with(lambda: _fork_subjects(theirs, [pair[1] for pair in pairs], Limits(**header["limits"]), walls))
    theirs.close()
    for _, link in pairs:
        link.close()
    job = receive(requests, max_bytes=MAX_REQUEST_BYTES)
    requests.close()
    _silence()
    send(report, {"begun": True})
    for number, (test, (link, _)) in enumerate(zip(job["tests"], pairs, strict=True)):
        try:
            control.send(b"x")
        except OSError:
            verdict = Verdict(False, "the code of another test ended all processes, or left no directory to work in")
        else:
            verdict = judge(link, job["code"], test, job["imports"])
        _reap_all(forker)
        send(report, {"number": number, "passed": verdict.passed, "reason": verdict.reason})
        link.close()
    send(report, {"ending": "exited"})


def _reap_all(forker: int) -> None:
    """Note the children that have ended. Raises OSError if the forker has failed, for reasons other than the code."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == forker and os.waitstatus_to_exitcode(status) == _FAILED:
            raise OSError("no process could be forked for a test")


def _fork_subjects(control: socket.socket, links: list[socket.socket], limits: Limits, walls: Walls) -> None:
    """Fork a process for each test when its time has come, after ending all that the previous one left."""
    _keep_only([control.fileno(), *(link.fileno() for link in links)])
    _silence()
    subject = 0
    while links and control.recv(1):
        if subject and not _clean_up(subject, walls):
            kernel.end_process(_SPOILED)
        subject = os.fork()
        if subject == 0:
            end_with(lambda: _become_subject(links[0], limits, walls))
        links.pop(0).close()


def _clean_up(subject: int, walls: Walls) -> bool:
    """End the processes of a test and remove its files; return False if the files cannot be removed."""
    if walls.contained and os.getppid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all processes of the namespace but this one and the first
    else:
        _kill(subject)
    os.waitpid(subject, 0)
    return _empty_scratch(walls)


def _empty_scratch(walls: Walls) -> bool:
    """Remove all files of the code, in its directory and in shared memory. Returns False if one cannot be removed."""
    try:
        here = os.stat(".")
        empty_directory(".")
        if walls.contained:
            empty_directory("/dev/shm", keep=(here.st_dev, here.st_ino))
    except OSError:  # everything there belongs to the code
        return False
    return True


def _keep_only(descriptors: list[int]) -> None:
    """Close all other descriptors, except for the standard streams."""
    last = 2
    for descriptor in [*sorted(descriptors), 1 << 16]:
        os.closerange(last + 1, descriptor)
        last = descriptor


def _become_subject(link: socket.socket, limits: Limits, walls: Walls) -> None:
    _keep_only([link.fileno()])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if walls.filtered and not walls.contained:
        contain_code()
    _limit(limits)
    answer(link)


def _silence() -> None:
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.close(nothing)


def _run_programs(requests: socket.socket, report: socket.socket, header: Mapping[str, Any], walls: Walls) -> None:
    """Run a program with each of its inputs, each time in a new process, from which nothing needs to be hidden."""
    limits = Limits(**header["limits"])
    program = receive(requests, max_bytes=MAX_REQUEST_BYTES)
    stdins = [receive_part(requests) for _ in range(program["inputs"])]
    requests.close()
    send(report, {"begun": True})
    for number, stdin in enumerate(stdins):
        if number and not _end_leftovers(walls):
            send(report, {"ending": "scratch"})
            return
        started, used_s = time.monotonic(), _used_s()
        outcome = _run_program(program, stdin, limits, walls)
        if outcome["exit_code"] == -signal.SIGXCPU or (
            outcome["exit_code"] == -signal.SIGKILL
            and outcome["ending"] == "exited"
            and _used_s() - used_s > limits.cpu_s
        ):
            outcome["ending"] = "cpu"
        send(report, {"number": number, "outcome": outcome | {"seconds": time.monotonic() - started}})
    send(report, {"ending": "exited"})


def _end_leftovers(walls: Walls) -> bool:
    """End the processes of the last input, and remove its files. Returns False if they cannot be removed."""
    if walls.contained and os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all processes of the namespace but this one
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):  # until no process is left that could still write
                pass
    while _reap(-1):
        pass
    return _empty_scratch(walls)


def _run_program(program: Mapping[str, Any], stdin: bytes, limits: Limits, walls: Walls) -> dict[str, Any]:
    pipes = [os.pipe() for _ in range(3)]
    theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
    subject = os.fork()
    if subject == 0:
        end_with(lambda: _become_program(program, theirs, limits, walls))
    for descriptor in theirs:
        os.close(descriptor)
    outputs = (pipes[1][0], pipes[2][0])
    stdout, stderr, ending = _exchange(pipes[0][1], outputs, stdin, limits.output_bytes, subject)
    for descriptor in outputs:
        os.close(descriptor)
    if ending == "output":
        _kill(subject)
    code = os.waitstatus_to_exitcode(os.waitpid(subject, 0)[1])
    return {"ending": ending, "exit_code": code, "stdout": stdout.hex(), "stderr": stderr.hex()}


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _exchange(
    stdin: int, outputs: tuple[int, int], content: bytes, limit: int, subject: int
) -> tuple[bytes, bytes, str]:
    """Write a program's input and read its outputs until it has ended, even if its children keep them open."""
    found = {output: bytearray() for output in outputs}
    poller = select.poll()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for descriptor in (stdin, *outputs):
        os.set_blocking(descriptor, False)
    for output in outputs:
        poller.register(output, select.POLLIN)
    poller.register(stdin, select.POLLOUT)
    open_outputs, left, ended, ending = set(outputs), memoryview(content), False, "exited"
    while open_outputs and ending == "exited":
        ready = poller.poll(0 if ended else 1000 * _LOOK_S)
        if not ready:
            if ended:
                break
            ended = os.waitid(os.P_PID, subject, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            continue
        for descriptor, _ in ready:
            if descriptor == stdin:
                try:
                    left = left[os.write(stdin, left[:_CHUNK]) :]
                except BrokenPipeError:
                    left = memoryview(b"")
                if not left:
                    poller.unregister(stdin)
                    os.close(stdin)
                    stdin = -1
                continue
            part = os.read(descriptor, _CHUNK)
            found[descriptor] += part
            if not part:
                poller.unregister(descriptor)
                open_outputs.discard(descriptor)
            if len(found[descriptor]) > limit:
                ending = "output"
    if stdin >= 0:
        os.close(stdin)
    return bytes(found[outputs[0]][:limit]), bytes(found[outputs[1]][:limit]), ending


def _become_program(program: Mapping[str, Any], streams: list[int], limits: Limits, walls: Walls) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    _keep_only([])
    for name, content in program["files"].items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes.fromhex(content))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if walls.filtered and not walls.contained:
        contain_code()
    _limit(limits)
    if program["argv"]:
        os.execvp(program["argv"][0], program["argv"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv[:] = ["main.py"]
    code = _exit_code_of(program["source"])
    sys.stdout.flush()
    sys.stderr.flush()
    kernel.end_process(code)


def _exit_code_of(source: str) -> int:
    """Run a script as Python does: wait for its threads and call its exit handlers."""
    import atexit
    import threading
    import traceback

    code = 0
    try:
        load_module(source, "__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def end_with(run: Any) -> None:
    """Call a function in a forked process, and end the process whatever happens."""
    code = _FAILED
    try:
        run()
        code = 0
    finally:
        kernel.end_process(code)
