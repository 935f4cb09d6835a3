"""Commands of ours as processes that have their imports behind them: torch, transformers and peft take seconds each."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from multiprocessing import reduction
from multiprocessing.process import current_process
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from lachesis.process import supervisor
from lachesis.process.workers import ProcessLimits
from tests.forkserver import forked_from, forkserver, take_over

if TYPE_CHECKING:  # it is not needed where commands run
    import pytest

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
# Where that is set, each forked process adds itself to the file that it names: its pid, its words.
REGISTER = "LACHESIS_TESTS_FORKED"
# In a forked process: what descriptors that were passed on are there, by what they were.
received: dict[int, int] = {}
_is_forked = False
# The supervisor of a server, whose other parent has another number.
_SUPERVISE = """
import os, socket, sys
from lachesis.process import supervisor
from tests import warm
_, _, link, _, grace_s, *command = sys.argv
socket, parent = socket.socket(fileno=warm.received[int(link)]), os.getppid()
try:
    supervisor.supervise(socket, is_asked_for=lambda: os.getppid() == parent, grace_s=float(grace_s),
                         start=lambda: warm.ForkedChild(command))
except warm.Forked:
    pass
else:
    raise SystemExit
warm.go_on_as(command)
"""
# A worker process, whose descriptors have other numbers.
_RUN_CHILD = re.compile(r"run_child\((\d+), (\d+), (.*)\)$", re.MULTILINE)
_NO_LIMITS = str(asdict(ProcessLimits()))
_WORKER = """
from lachesis.process.workers import run_child
from tests.warm import received
run_child(received[{}], received[{}], {})
"""
# In a worker process that is forked: the one that has started it, which is not its parent.
STARTED_BY = "LACHESIS_TESTS_STARTED_BY"
COMMAND = "from lachesis.cli import main; main()"
# The servers that it starts are forked, too.
FORKING = f"from tests import warm; warm.fork_servers(); {COMMAND}"
# torchrun, but that its ranks are forked as it is itself. One that has ended is there no more, as the server has waited
# for it: torchrun, which looks first and then sends a signal, counts on finding what nobody has waited for.
TORCHRUN = """
import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as ranks
from contextlib import suppress
from torch.distributed.run import main
from tests import warm
ranks.Popen = warm.Popen
close = ranks.SubprocessHandler.close
def close_what_is_there(rank, death_sig=None):
    with suppress(ProcessLookupError):
        close(rank, death_sig)
ranks.SubprocessHandler.close = close_what_is_there
main()
"""
# A script whose parts (the same one with other arguments), commands of ours and servers are forked as it is itself.
_SCRIPT = """
import os, runpy, sys
from tests import warm
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
warm.fork_parts(sys.argv[0])
warm.fork_servers()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Forked(BaseException):
    """Raised in a forked process, so that it leaves whatever its parent was doing."""


class ForkedChild:
    """Forked child with the methods of ``subprocess.Popen`` that a supervisor uses, the head of a session.

    In the child it raises Forked, whose argument is ``argument``.
    """

    def __init__(self, argument: object) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            supervisor.prepare_child()
            # As Python has them when it begins.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise Forked(argument)

    def poll(self) -> int | None:
        return self._reaped(os.WNOHANG)

    def wait(self) -> int:
        code = self._reaped(0)
        assert code is not None
        return code

    def _reaped(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class _Forked(subprocess.Popen):
    """``subprocess.Popen`` of ``[sys.executable, "-c" or "-m", what, *arguments]`` or a script, forked by a server.

    Environment, directory, arguments, streams, signals and exit are its own, and where its ``PYTHONPATH`` has another
    ``lachesis``, that is imported. What differs: its parent is the server, and so is its command line.
    """

    # What the server imports beyond the usual; of a process that is forked itself there is the usual one only.
    imports = ""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
                       c2pread: int, c2pwrite: int, errread: int, errwrite: int, *rest: Any) -> None:  # fmt: skip
        words = [os.fspath(word) for word in args]
        assert words[0] == sys.executable and not (preexec_fn or shell or executable), words
        streams = [_Stream(given if given >= 0 else own) for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        passed = {descriptor: _Stream(descriptor) for descriptor in pass_fds}
        variables = dict(os.environ if env is None else env)
        # A daemon, so that this process ends it and does not wait for it, should a test leave it behind.
        self._forked = forkserver(["tests.imports"]).Process(
            target=_become,
            args=(words[1:], variables, os.fspath(cwd or os.getcwd()), streams, passed, rest[5]),
            daemon=True,
        )
        with forked_from(self.imports) if self.imports and not _is_forked else nullcontext():
            self._forked.start()
        assert self._forked.pid is not None
        self.pid, self._child_created = self._forked.pid, True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._forked.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


class _ForkedVllm(_Forked):
    """For servers of vLLM, whose imports take most of their start."""

    imports = "tests.imports_vllm"


def go_on_as(command: Sequence[str]) -> NoReturn:
    """In a forked process: be that command, which this process supervises no more."""
    streams = [os.dup(number) for number in range(len(_STREAMS))]
    _become(command[1:], dict(os.environ), os.getcwd(), streams, {}, False)


# CUDA is of no use to a process that was forked from one which has looked for GPUs, as some imports do.
FORKS = shutil.which("nvidia-smi") is None
Popen = _Forked if FORKS else subprocess.Popen
VllmPopen = _ForkedVllm if FORKS else subprocess.Popen


def start_servers(config: pytest.Config) -> None:
    """The servers that fork, before tests are collected: their imports take as long as those of all tests."""
    if FORKS and config.getoption("forks", 0) and not config.option.collectonly:
        forkserver(["tests.imports"])
        if importlib.util.find_spec("vllm"):
            with forked_from(_ForkedVllm.imports):
                pass


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    timeout: float,
    popen: Callable[..., subprocess.Popen[str]] = Popen,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run``, with what it writes captured as text."""
    with popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def script(path: Path, *arguments: str) -> list[str]:
    """``python PATH ARGUMENTS`` as a command that can be forked, and forks in turn its own parts and servers."""
    return [sys.executable, "-c", _SCRIPT, str(path), *arguments]


def fork_parts(path: str) -> None:
    """From now on what this process starts of that script, of our commands and by torchrun is forked."""
    if not FORKS:
        return
    kinds = {(path,): script(Path(path)), ("-m", "lachesis"): [sys.executable, "-c", FORKING],
             ("-m", "torch.distributed.run"): [sys.executable, "-c", TORCHRUN]}  # fmt: skip
    start = subprocess.Popen

    def popen(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        python, *rest = words
        for kind, instead in kinds.items():
            if python == sys.executable and tuple(rest[: len(kind)]) == kind:
                return Popen([*instead, *rest[len(kind) :]], **options)
        return start(words, **options)

    # It stands for a class, of which nobody asks for anything else here.
    subprocess.Popen = popen  # type: ignore[assignment,misc]


def fork_servers(assign: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on servers of ours that this process starts are forked as well, with their supervisors."""
    if not FORKS:
        return
    own = SimpleNamespace(**vars(subprocess) | {"Popen": _supervised})
    assign(importlib.import_module("lachesis.process.managed"), "subprocess", own)


def fork_workers() -> None:
    """From now on processes for reward functions that this process starts are forked."""
    own = SimpleNamespace(**vars(subprocess) | {"Popen": _worker})
    importlib.import_module("lachesis.process.workers").subprocess = own  # type: ignore[attr-defined]


def _worker(words: Sequence[str], **options: Any) -> subprocess.Popen:
    python, *isolated, _, program = words
    begun = _RUN_CHILD.search(program)
    # One that is walled in, or bounded in its memory, has little of what is imported here.
    if python != sys.executable or options["cwd"] is not None or begun is None or begun[3] != _NO_LIMITS:
        return subprocess.Popen(words, **options)
    env = options.pop("env") | {STARTED_BY: str(os.getpid())}
    return Popen([python, *isolated, "-c", _WORKER.format(*begun.groups())], env=env, **options)


def _supervised(words: Sequence[str], **options: Any) -> subprocess.Popen:
    python, _, _, script, *arguments = words
    if arguments[3] != sys.executable:
        return subprocess.Popen(words, **options)
    popen = VllmPopen if _is_vllm(arguments[3:]) else Popen
    return popen([python, "-c", _SUPERVISE, script, *arguments], **options)


def _is_vllm(command: Sequence[str]) -> bool:
    """Whether that is `lachesis serve` of vLLM, which is its default engine."""
    serves = list(command[1:4]) == ["-m", "lachesis", "serve"]
    return serves and "embedded" not in command


def forked(register: Path) -> list[tuple[psutil.Process, list[str]]]:
    """The processes that have added themselves to it and are still there, with the command lines that they have."""
    found = []
    for line in register.read_text().splitlines() if register.exists() else ():
        entry = json.loads(line)
        with suppress(psutil.NoSuchProcess):
            found.append((psutil.Process(entry["pid"]), [sys.executable, *entry["words"]]))
    return found


class _Stream:
    """A file descriptor that goes to the other process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detach, (reduction.DupFd(self._descriptor),)


def _detach(sent: Any) -> int:
    return sent.detach()


def _become(
    words: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    streams: Sequence[int],
    passed: Mapping[int, int],
    session: bool,
) -> NoReturn:
    """In the new process: be what ``python WORDS`` would be, to the end."""
    global _is_forked
    _is_forked = True
    atexit.unregister(os._exit)
    current_process()._config["daemon"] = False
    take_over()
    received.update(passed)
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    unbuffered, outside = "-u" in words[:1], "-P" in words[:1]
    _take(streams, unbuffered=unbuffered or bool(environment.get("PYTHONUNBUFFERED")))
    if register := environment.get(REGISTER):
        with open(register, "a") as file:
            file.write(json.dumps({"pid": os.getpid(), "words": list(words)}) + "\n")
    code = 1
    try:
        own = [] if outside else [directory]
        _look_in([*own, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))])
        _execute(words[unbuffered or outside :])
        code = 0
    except SystemExit as end:
        code = _code(end)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
    _end(code)


def _take(streams: Sequence[int], *, unbuffered: bool) -> None:
    for number, (descriptor, (name, mode)) in enumerate(zip(streams, _STREAMS, strict=True)):
        os.dup2(descriptor, number)
        os.close(descriptor)
        errors = "backslashreplace" if name == "stderr" else "strict"
        stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        if mode == "w" and (unbuffered or name == "stderr"):
            stream.reconfigure(line_buffering=True, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _look_in(paths: Sequence[str]) -> None:
    """Modules come from there first; what was imported of ours from elsewhere is forgotten."""
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    importlib.invalidate_caches()
    known = importlib.import_module("lachesis").__file__ or ""
    ours = [name for name in sys.modules if name.partition(".")[0] == "lachesis"]
    kept = {name: sys.modules.pop(name) for name in ours}
    spec = importlib.util.find_spec("lachesis")
    if spec is not None and spec.origin == known:
        sys.modules.update(kept)
        fork_workers()


def _execute(words: Sequence[str]) -> None:
    kind, what, *arguments = words
    sys.argv = ["-c" if kind == "-c" else what, *arguments]
    if kind.endswith(".py"):
        sys.argv = list(words)
        sys.path.insert(0, os.path.dirname(kind))
        runpy.run_path(kind, run_name="__main__")
        return
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    assert kind == "-c", words
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), main.__dict__)


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _end(code: int) -> NoReturn:
    """As an interpreter ends."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    os._exit(code)
