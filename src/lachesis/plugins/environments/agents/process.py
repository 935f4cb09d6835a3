"""One agent: a command with its endpoint and key, in a directory of its own, ended with all that it started."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.types import Prompt
from lachesis.common.world import launchers_variables
from lachesis.plugins.environments.agents.container import Container
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
        container: where it runs; a process of this machine if unset.
        inherited: names of this process's variables that it gets too.
        hidden: columns that it is not told, as rewards are judged by them.
    """

    command: tuple[str, ...]
    workdir: Path | None
    env: Mapping[str, str]
    timeout_s: float
    container: Container | None = None
    inherited: Sequence[str] = ()
    hidden: frozenset[str] = frozenset()

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
    """How a rollout's command ended. ``reward`` is what it wrote into its reward file, as text."""

    exit_code: int | None
    timed_out: bool
    output: str
    reward: str | None


def run_agent(
    agent: AgentCommand, prompt: Prompt, *, url: str, key: str, stop: Callable[[], bool], limit_s: float | None
) -> AgentExit:
    """Run the command to its end, or to its limit, or until ``stop`` says so; its group has ended then.

    It finds the task in ``LACHESIS_TASK``, a file of JSON with the prompt and its columns, and may write a number into
    the file ``LACHESIS_REWARD``. ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL`` say where the model is,
    ``OPENAI_API_KEY`` and ``ANTHROPIC_API_KEY`` who asks.

    Raises:
        EngineError: the command cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="lachesis-agent-", ignore_cleanup_errors=True) as root:
        scratch = Path(root)
        work, task, reward = scratch / "work", scratch / "task.json", scratch / "reward"
        if agent.workdir is None:
            work.mkdir()
        else:
            shutil.copytree(agent.workdir, work, symlinks=True)
        prompt = without(prompt, agent.hidden)
        task.write_text(json.dumps(task_of(prompt), default=str), encoding="utf-8")
        ended = threading.Event()
        kept = {name: os.environ[name] for name in agent.inherited if name in os.environ}
        given = {"LACHESIS_TASK": str(task), "LACHESIS_REWARD": str(reward), **kept, **agent.env}
        told: dict[str, str | None] = {**_endpoint(url, key), **given}
        command, name = filled(agent.command, prompt), scratch.name
        if agent.container is not None:
            variables = [variable for variable, value in told.items() if value is not None]
            command = agent.container.command(command, name=name, scratch=scratch, variables=variables)
            env = dict.fromkeys(launchers_variables(os.environ)) | told  # the rest is docker's, and stays outside
        else:
            env = clean_environment(os.environ, home=work) | told
        process = ManagedProcess(
            [*_INTO, str(work), *command],
            log_path=scratch / "output",
            name=f"the agent of prompt {prompt.id}",
            env=env,
            grace_s=_GRACE_S,
            on_death=lambda _: ended.set(),
        )
        process.launch()
        limit = min(agent.timeout_s, agent.timeout_s if limit_s is None else limit_s)
        end = time.monotonic() + limit
        while not ended.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end or stop():
                break
        timed_out = not ended.is_set()
        process.stop()
        if agent.container is not None and timed_out:
            agent.container.remove(name)
        return AgentExit(process.exit_code, timed_out, _tail(scratch / "output"), _content(reward))


def clean_environment(environment: Mapping[str, str], *, home: Path) -> dict[str, str | None]:
    """What an agent's environment differs in from this process's: None removes a variable.

    This process has the keys of trackers, hubs and clouds, and where its servers' tokens are; none of it is an agent's.
    """
    usual = {name: value for name, value in environment.items() if name in USUAL or name.startswith("LC_")}
    return dict.fromkeys(environment) | usual | {"HOME": str(home)}


def without(prompt: Prompt, hidden: frozenset[str]) -> Prompt:
    """The prompt without some of its columns."""
    return replace(prompt, columns={name: value for name, value in prompt.columns.items() if name not in hidden})


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
    content = path.read_bytes() if path.is_file() else b""
    return content[-_SHOWN_OUTPUT:].decode("utf-8", "replace")


def _content(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None
