"""One agent: a command with its endpoint and key, behind a wall of its own, ended with all that it started."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.types import Prompt
from lachesis.common.world import launchers_variables
from lachesis.plugins.environments.agents.container import Container
from lachesis.plugins.environments.agents.state import read_state
from lachesis.plugins.sandbox.cell import HOME, Cell, begun, ending, give_away
from lachesis.plugins.sandbox.view import empty_directory
from lachesis.process.managed import ManagedProcess

_LOOK_S = 0.1
_GRACE_S = 2.0
_SHOWN_OUTPUT = 20_000
# Variables of this process that say nothing but how programs are found and how they write.
USUAL = ("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE")
# Begins a command in another directory.
_INTO = ("/bin/sh", "-c", 'cd "$1" && shift && exec "$@"', "sh")


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """What is run for a rollout. ``{prompt}`` and ``{COLUMN}`` in an argument are the task's.

    Args:
        command: program and arguments.
        workdir: is copied for each rollout, which runs in the copy; an empty directory if unset.
        env: variables beside the usual ones (:data:`USUAL`) and those that say where the model is.
        timeout_s: limit of one rollout, in seconds.
        container: where it runs instead of behind a wall.
        cell: the wall around it; its ``box`` is another for each rollout. Without one it is a process like any.
        inherited: names of this process's variables that it gets too.
        told: columns that it is told beside the prompt.
        keep_files: patterns of the files whose texts are kept for the rewards.
        self_reported: whether it may write a reward of its own.
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
                f"source.command: the program {self.command[0]!r} is not there",
                remedy="install it, or give its full path",
            )
        if self.workdir is not None and not self.workdir.is_dir():
            raise ConfigError(f"source.workdir {self.workdir} is no directory", remedy="correct the path")


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How a rollout's command ended, and what it left.

    Args:
        beyond: the limit of its wall that it hit, ``memory`` or ``disk``.
        reward: what it wrote into its reward file, as text.
        files: texts of its files, by their names.
    """

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
    limit_s: float | None,
) -> AgentExit:
    """Run the command to its end, or to its limit, or until ``stop`` says so; all that it started has ended then.

    It finds the task in ``LACHESIS_TASK``, a file of JSON with the prompt and the columns that it is told.
    ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL`` say where the model is, ``OPENAI_API_KEY`` and ``ANTHROPIC_API_KEY``
    who asks. Where it may report a reward, ``LACHESIS_REWARD`` is the file for it.

    Args:
        url: where it reaches the model, but for one that has a network of its own.
        listen: takes the socket at which such a one reaches the model.

    Raises:
        EngineError: the command cannot be run.
        SandboxError: no wall can be put up around it.
    """
    with _directory() as root:
        box, cell = root / "box", agent.cell
        work, task = box / "work", box / "task.json"
        box.mkdir()
        (box / "tmp").mkdir()
        if agent.workdir is None:
            work.mkdir()
        else:
            shutil.copytree(agent.workdir, work, symlinks=True)
        prompt = with_columns(prompt, agent.told)
        task.write_text(json.dumps(task_of(prompt), default=str), encoding="utf-8")
        ended = threading.Event()
        kept = {name: os.environ[name] for name in agent.inherited if name in os.environ}
        seen = box if cell is None else Path(HOME)
        if cell is not None and cell.port is not None:
            url = f"http://127.0.0.1:{cell.port}"
        given = {"LACHESIS_TASK": str(seen / "task.json"), **kept, **agent.env}
        if agent.self_reported:
            given["LACHESIS_REWARD"] = str(seen / "reward")
        told: dict[str, str | None] = {**_endpoint(url, key), **given}
        command, name = filled(agent.command, prompt), root.name
        stdin, control = socket.socketpair()
        if agent.container is not None:
            variables = [variable for variable, value in told.items() if value is not None]
            line = agent.container.command(command, name=name, scratch=box, variables=variables)
            env = dict.fromkeys(launchers_variables(os.environ)) | told  # the rest is docker's, and stays outside
        else:
            env = clean_environment(os.environ, home=seen / "work") | told
            line = [*_INTO, str(work), *command]
            if cell is not None:
                line = replace(cell, box=str(box)).command(tuple(command))
                give_away(box)
        process = ManagedProcess(
            line,
            log_path=root / "output",
            name=f"the agent of prompt {prompt.id}",
            env=env,
            grace_s=_GRACE_S,
            on_death=lambda _: ended.set(),
            stdin=None if cell is None else stdin,
        )
        with stdin, control:
            try:
                process.launch()
                stdin.close()
                if cell is not None and (listener := begun(control)) is not None:
                    listen(listener)
                limit = min(agent.timeout_s, agent.timeout_s if limit_s is None else limit_s)
                end = time.monotonic() + limit
                while not ended.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
                    if time.monotonic() >= end or stop():
                        break
                timed_out = not ended.is_set()
            finally:
                process.stop()
            code, why = (process.exit_code, "exited") if cell is None or timed_out else ending(control)
        if agent.container is not None and timed_out:
            agent.container.remove(name)
        return AgentExit(
            exit_code=code,
            timed_out=timed_out,
            output=_tail(root / "output"),
            reward=read_state(box, ("reward",)).get("reward", "").strip() or None if agent.self_reported else None,
            beyond="" if why == "exited" else why,
            files=read_state(work, agent.keep_files),
        )


@contextmanager
def _directory() -> Iterator[Path]:
    """A new directory, removed in the end whatever an agent has made of it."""
    root = Path(tempfile.mkdtemp(prefix="lachesis-agent-"))
    try:
        yield root
    finally:
        with suppress(OSError):  # a process without a wall may write there still
            empty_directory(str(root))
            root.rmdir()


def clean_environment(environment: Mapping[str, str], *, home: Path) -> dict[str, str | None]:
    """What an agent's environment differs in from this process's: None removes a variable.

    This process has the keys of trackers, hubs and clouds, and where its servers' tokens are; none of it is an agent's.
    """
    usual = {name: value for name, value in environment.items() if name in USUAL or name.startswith("LC_")}
    return dict.fromkeys(environment) | usual | {"HOME": str(home)}


def with_columns(prompt: Prompt, told: frozenset[str]) -> Prompt:
    """The prompt with some of its columns only."""
    return replace(prompt, columns={name: value for name, value in prompt.columns.items() if name in told})


def task_of(prompt: Prompt) -> dict[str, Any]:
    """What an agent is told of its task: the columns, and the prompt as a text and as messages."""
    return {**prompt.columns, "id": prompt.id, "prompt": question(prompt), "messages": list(prompt.messages or ())}


def question(prompt: Prompt) -> str:
    """The prompt as a text: of a conversation, what was said last."""
    return str(prompt.messages[-1]["content"]) if prompt.messages else prompt.text


def filled(command: Sequence[str], prompt: Prompt) -> list[str]:
    """The command with the task's values in it; other braces stay as they are."""
    values = {name: str(value) for name, value in prompt.columns.items()} | {"prompt": question(prompt)}
    made: list[str] = []
    for argument in command:
        for name in values:
            if argument == f"{{{name}}}":
                argument = values[name]
                break
        made.append(argument)
    return made


def _endpoint(url: str, key: str) -> dict[str, str | None]:
    """Where the model is, and nothing of what else this process may have a key for."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": None,
        "OPENAI_ORG_ID": None,
        "OPENAI_PROJECT_ID": None,
        "NO_PROXY": "127.0.0.1,localhost",
        "LACHESIS_MODEL": "policy",
    }


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _SHOWN_OUTPUT))
        return file.read().decode("utf-8", "replace")
