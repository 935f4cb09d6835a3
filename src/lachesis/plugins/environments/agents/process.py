"""Process of one agent: a command with its endpoint and key, in a separate directory, ended with all its children."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.types import Prompt
from lachesis.common.world import launchers_variables
from lachesis.plugins.environments.agents.container import Container
from lachesis.plugins.sandbox.cell import HOME, Cell, begun, ending, give_away
from lachesis.plugins.sandbox.view import empty_directory
from lachesis.process.managed import ManagedProcess

_LOOK_S = 0.1
_GRACE_S = 2.0
_SHOWN_OUTPUT = 20_000
# Harmless variables of this process: how programs are found, and how they write text.
USUAL = ("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE")
# Shell command that starts a program in another directory.
_INTO = ("/bin/sh", "-c", 'cd "$1" && shift && exec "$@"', "sh")


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """Command of a rollout. ``{prompt}`` and ``{COLUMN}`` in an argument become the task's.

    Args:
        command: program and arguments.
        workdir: directory that each rollout gets a copy of; empty if unset.
        env: variables besides the usual ones (:data:`USUAL`) and those with the model's address.
        timeout_s: limit of one rollout, in seconds.
        container: for the command; a process of this machine if unset.
        inherited: names of this process's variables that the command gets too.
        told: columns that the command gets, which rewards are not computed from.
    """

    command: tuple[str, ...]
    workdir: Path | None
    env: Mapping[str, str]
    timeout_s: float
    container: Container | None = None
    cell: Cell | None = None
    inherited: Sequence[str] = ()
    told: frozenset[str] = frozenset()
    keep_files: tuple[str, ...] = ()
    self_reported: bool = False

    def __post_init__(self) -> None:
        if self.container is None and shutil.which(self.command[0]) is None:
            raise ConfigError(
                f"source.command: the program {self.command[0]!r} does not exist",
                remedy="install it, or give its full path",
            )
        if self.workdir is not None and not self.workdir.is_dir():
            raise ConfigError(f"source.workdir {self.workdir} is not a directory", remedy="correct the path")


@dataclass(frozen=True, slots=True)
class AgentExit:
    """Outcome of a rollout's command. ``reward`` is the text of its reward file."""

    exit_code: int | None
    timed_out: bool
    output: str
    reward: str | None = None
    beyond: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


def run_agent(
    agent: AgentCommand,
    prompt: Prompt,
    *,
    url: str,
    key: str,
    listen: Callable[[socket.socket], None],
    stop: Callable[[], bool],
) -> AgentExit:
    """Run the command until it ends, its limit passes or ``stop`` returns True; then end all its processes.

    ``LACHESIS_TASK`` names a JSON file with the prompt and the columns that the agent may see. ``OPENAI_BASE_URL``,
    ``ANTHROPIC_BASE_URL`` and ``GOOGLE_GEMINI_BASE_URL`` are the model's address, ``OPENAI_API_KEY``,
    ``ANTHROPIC_API_KEY`` and ``GEMINI_API_KEY`` identify the rollout. If it may report a reward, ``LACHESIS_REWARD`` is
    the file for it.

    Args:
        agent: the command.
        prompt: the task.
        url: the model's address, for agents without a separate network.
        key: of the rollout.
        listen: takes the socket by which an agent with a separate network reaches the model.
        stop: asked repeatedly.

    Raises:
        EngineError: the command cannot be run.
        SandboxError: the sandbox cannot be set up.
    """
    with _directory() as root:
        box = root / "box"
        prompt = with_columns(prompt, agent.told)
        _lay_out(box, agent, prompt)
        line, env = _command_line(agent, prompt, box=box, told=_variables(agent, box=box, url=url, key=key))
        name = f"the agent of prompt {prompt.id}"
        start = partial(ManagedProcess, line, log_path=root / "output", name=name, env=env, grace_s=_GRACE_S)
        timed_out, code, why = _run(start, agent, listen=listen, stop=stop)
        if agent.container is not None and timed_out:
            agent.container.remove(root.name)
        return AgentExit(
            exit_code=code,
            timed_out=timed_out,
            output=_tail(root / "output"),
            reward=read_state(box, ("reward",)).get("reward", "").strip() or None if agent.self_reported else None,
            beyond="" if why == "exited" else why,
            files=read_state(box / "work", agent.keep_files),
        )


def _run(
    start: Callable[..., ManagedProcess],
    agent: AgentCommand,
    *,
    listen: Callable[[socket.socket], None],
    stop: Callable[[], bool],
) -> tuple[bool, int | None, str]:
    """Run an agent's process to its end; return True if it was killed, its exit code, and the reason."""
    ended, cell = threading.Event(), agent.cell
    stdin, control = socket.socketpair()
    with stdin, control:
        process = start(on_death=lambda _: ended.set(), stdin=None if cell is None else stdin)
        try:
            process.launch()
            stdin.close()
            if cell is not None and (listener := begun(control)) is not None:
                listen(listener)
            timed_out = not _wait(ended, stop=stop, limit_s=agent.timeout_s)
        finally:
            process.stop()
        code, why = (process.exit_code, "exited") if cell is None or timed_out else ending(control)
    return timed_out, code, why


def _lay_out(box: Path, agent: AgentCommand, prompt: Prompt) -> None:
    """Make the directory that an agent sees: its files in ``work``, an empty ``tmp``, and the task."""
    (box / "tmp").mkdir(parents=True)
    if agent.workdir is None:
        (box / "work").mkdir()
    else:
        shutil.copytree(agent.workdir, box / "work", symlinks=True)
    (box / "task.json").write_text(json.dumps(task_of(prompt), default=str), encoding="utf-8")


def _variables(agent: AgentCommand, *, box: Path, url: str, key: str) -> dict[str, str | None]:
    """Return an agent's environment variables besides the usual ones; ``None`` unsets one."""
    cell = agent.cell
    seen = box if cell is None else Path(HOME)
    if cell is not None and cell.port is not None:
        url = f"http://127.0.0.1:{cell.port}"
    told: dict[str, str | None] = {**_endpoint(url, key), "LACHESIS_TASK": str(seen / "task.json")}
    told |= {name: os.environ[name] for name in agent.inherited if name in os.environ}
    told |= agent.env
    if agent.self_reported:
        told["LACHESIS_REWARD"] = str(seen / "reward")
    return told


def _command_line(
    agent: AgentCommand, prompt: Prompt, *, box: Path, told: dict[str, str | None]
) -> tuple[list[str], dict[str, str | None]]:
    """Return the command line and the environment of the process: the agent, its container or its sandbox."""
    command = filled(agent.command, prompt)
    if agent.container is not None:
        variables = [variable for variable, value in told.items() if value is not None]
        line = agent.container.command(command, name=box.parent.name, scratch=box, variables=variables)
        return line, dict.fromkeys(launchers_variables(os.environ)) | told  # the rest is for docker, and stays outside
    env = clean_environment(os.environ, home=(box if agent.cell is None else Path(HOME)) / "work") | told
    if agent.cell is None:
        return [*_INTO, str(box / "work"), *command], env
    give_away(box)
    return replace(agent.cell, box=str(box)).command(tuple(command)), env


def _wait(ended: threading.Event, *, stop: Callable[[], bool], limit_s: float) -> bool:
    """Wait until the command has ended; return False at its limit, or on a request to stop."""
    end = time.monotonic() + limit_s
    while not ended.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
        if time.monotonic() >= end or stop():
            break
    return ended.is_set()


@contextmanager
def _directory() -> Iterator[Path]:
    """Make a new directory, and remove it in the end, whatever an agent did to it."""
    root = Path(tempfile.mkdtemp(prefix="lachesis-agent-"))
    try:
        yield root
    finally:
        with suppress(OSError):  # a process without a sandbox may still write there
            empty_directory(str(root))
            root.rmdir()


def clean_environment(environment: Mapping[str, str], *, home: Path) -> dict[str, str | None]:
    """Return an agent's changes to this process's environment variables: None removes one.

    No agent may see this process's keys for trackers, hubs and clouds, or its servers' tokens.
    """
    usual = {name: value for name, value in environment.items() if name in USUAL or name.startswith("LC_")}
    return dict.fromkeys(environment) | usual | {"HOME": str(home)}


def with_columns(prompt: Prompt, told: frozenset[str]) -> Prompt:
    """Return the prompt with only some of its columns."""
    return replace(prompt, columns={name: value for name, value in prompt.columns.items() if name in told})


def task_of(prompt: Prompt) -> dict[str, Any]:
    """Return an agent's view of its task: the columns, and the prompt as a text and as messages."""
    return {**prompt.columns, "id": prompt.id, "prompt": question(prompt), "messages": list(prompt.messages or ())}


def question(prompt: Prompt) -> str:
    """Return the prompt as a text: the last message of a conversation."""
    return str(prompt.messages[-1]["content"]) if prompt.messages else prompt.text


def filled(command: Sequence[str], prompt: Prompt) -> list[str]:
    """Return the command with the task's values filled in; other braces stay."""
    values = {name: str(value) for name, value in prompt.columns.items()} | {"prompt": question(prompt)}
    made: list[str] = []
    for argument in command:
        for name in values:
            if argument == f"{{{name}}}":
                argument = values[name]
                break
        made.append(argument)
    return made


_REMOVED = ("ANTHROPIC_AUTH_TOKEN", "GOOGLE_API_KEY", "GOOGLE_GENAI_USE_VERTEXAI", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")


def _endpoint(url: str, key: str) -> dict[str, str | None]:
    """Return variables with the model's address, and without other keys that this process may have."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
        **dict.fromkeys(_REMOVED),
        "NO_PROXY": "127.0.0.1,localhost",
        "LACHESIS_MODEL": "policy",
    }


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _SHOWN_OUTPUT))
        return file.read().decode("utf-8", "replace")


# Limit of all files of a rollout together, which are kept with its group.
MAX_BYTES = 4 << 20
_MAX_ENTRIES, _DEEPEST = 100_000, 32


def read_state(directory: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Return the texts of the files that match one of the patterns, by their paths in the directory.

    Only plain files count, links are not followed, and files beyond :data:`MAX_BYTES` in all are ignored. Bytes that
    are not UTF-8 are replaced.
    """
    found: dict[str, str] = {}
    left, entries = MAX_BYTES, 0
    if not patterns:
        return found
    for place, directories, names, descriptor in os.fwalk(directory, follow_symlinks=False):
        inside = os.path.relpath(place, directory)
        if inside.count("/") >= _DEEPEST - 1:
            directories.clear()
        directories.sort()
        entries += len(names) + len(directories)
        if entries > _MAX_ENTRIES:
            break
        for name in sorted(names):
            path = name if inside == "." else f"{inside}/{name}"
            if not any(fnmatchcase(path, pattern) for pattern in patterns):
                continue
            content = _content(name, descriptor, left)
            if content is not None:
                left -= len(content)
                found[path.encode("utf-8", "replace").decode()] = content.decode("utf-8", "replace")
    return found


def _content(name: str, place: int, most: int) -> bytes | None:
    """Return the content of a plain file of at most ``most`` bytes; ``None`` for any other."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    except OSError:
        return None
    with os.fdopen(file, "rb") as stream:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            return None
        content = stream.read(most + 1)
    return content if len(content) <= most else None
