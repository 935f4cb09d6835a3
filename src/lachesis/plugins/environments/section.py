"""Sections of agents, of environments that the model steps, and of servers of tools."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lachesis.config.section import (
    EpisodesSourceConfig,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class McpServerConfig(Section):
    """An MCP server whose tools the model may call: a process, or an address."""

    command: list[str] = Field(
        default_factory=list[str], description="Program and arguments of a server that speaks over standard streams."
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Its environment variables, besides PATH, HOME and the like."
    )
    url: str = Field(default="", description="Address of a server that speaks streamable HTTP, such as its /mcp.")
    headers: dict[str, str] = Field(default_factory=dict, description="Sent with each request.")


class AgentSourceConfig(Section):
    """Prompts from a dataset, rollouts by a program that talks to the model as if it were OpenAI or Anthropic."""

    kind: Literal["agent"] = "agent"
    command: list[str] = Field(
        min_length=1,
        description="Program and arguments of one rollout; `{prompt}` and `{COLUMN}` are the task's. It gets "
        "OPENAI_BASE_URL, ANTHROPIC_BASE_URL, its own key, and the task in the file LACHESIS_TASK.",
    )
    workdir: str | None = Field(
        default=None, description="Directory; each rollout runs in a copy of it; an empty one if unset."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Further environment variables.")
    inherit_env: list[str] = Field(
        default_factory=list,
        description="Names of the trainer's environment variables that the program gets too. Otherwise it has PATH, "
        "the language, `env` and the model's address, but no keys of the trainer.",
    )
    columns: list[str] = Field(
        default_factory=list,
        description="Columns that the program finds in LACHESIS_TASK besides the prompt. Columns that rewards use or "
        "that are named like answers (answer, solution, tests) must be listed here to be used in `command`.",
    )
    wall: Literal["namespaces", "none"] = Field(
        default="namespaces",
        description="Sandbox of the program: separate files, processes and network, from which it reaches only the "
        "model; if none works here, the run ends. `none`: the program can do whatever you can.",
    )
    network: Literal["proxy", "open"] = Field(
        default="proxy", description="Network in the sandbox: only the model, or all that this machine reaches."
    )
    readable: list[str] = Field(
        default_factory=list,
        description="Files and directories that it may read in the sandbox, besides the system's, this Python's, "
        "`workdir` and the files in `command`.",
    )
    memory_mb: PositiveInt = Field(default=4096, description="Memory of a rollout's processes in the sandbox, in MiB.")
    disk_mb: PositiveInt = Field(default=1024, description="Files and output of a rollout in the sandbox, in MiB.")
    keep_files: list[str] = Field(
        default_factory=list,
        description="Patterns such as `*.py` of files that rewards get as the column `files`, by name; at most 4 MiB "
        "a rollout.",
    )
    self_reported: bool = Field(
        default=False,
        description="Let rewards use its exit code and the number in its file LACHESIS_REWARD; a model can fake both.",
    )
    container: str | None = Field(
        default=None,
        description="`docker:IMAGE` or `podman:IMAGE`: the command runs in a container of the image instead of the "
        "sandbox, with this machine's network and the rollout's directory.",
    )
    timeout_s: PositiveFloat = Field(
        default=600.0, description="Limit of one rollout, in seconds; then the program and its process group are ended."
    )
    nonzero_exit: Literal["exclude", "score"] = Field(
        default="exclude",
        description="Treatment of an exit code above 0: the rollout counts as failed and is left out, or it is scored.",
    )
    retries: NonNegativeInt = Field(default=2, description="Replays of a failed rollout.")
    max_concurrent: PositiveInt = Field(default=32, description="Most programs at the same time.")
    tool_parser: str = Field(default="hermes", description="Format of the model's tool calls, as with kind local.")
    host: str = Field(
        default="127.0.0.1",
        description="Address at which the proxy listens, on a free port; containers must be able to reach it.",
    )


class VerifiersSourceConfig(EpisodesSourceConfig):
    """An environment of the library verifiers, whose tasks, tools and rubric replace `data` and `rewards`."""

    kind: Literal["verifiers"] = "verifiers"
    environment: str = Field(description="Id of an installed environment or task set, or a `.py` file with one.")
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the environment: keywords of its `load_environment` in verifiers 0.1, its `env` "
        "section (`taskset`, `agent`, ...) in 0.4 and later.",
    )
    renderer: dict[str, Any] = Field(
        default_factory=lambda: {"name": "auto"},
        description="Name and fields of the renderer that makes tokens of conversations; `auto` takes the library's "
        "for the model, or else the chat template.",
    )


class StepsSourceConfig(EpisodesSourceConfig):
    """An environment that the model steps, turn by turn: of Gymnasium's, TRL's or OpenEnv's kind."""

    kind: Literal["steps"] = "steps"
    environment: str = Field(
        description="Import path or `FILE.py:NAME` of the class, or of a function that makes an environment: a new one "
        "for each rollout. Or the address of an OpenEnv server, as `http://127.0.0.1:8000`."
    )
    interface: Literal["auto", "gymnasium", "trl", "openenv"] = Field(
        default="auto",
        description="Interface of the environment. `auto` decides by its methods: `reset` and `step` on text are "
        "Gymnasium's, `reset` and tool methods TRL's; an address is OpenEnv's.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the class or function, which also gets the task's columns that it names, "
        "and `tokenizer`. For an OpenEnv server: `action` and `observation`, the fields of text.",
    )
    tasks: str | None = Field(
        default=None,
        description="File (JSONL, JSON, Parquet or CSV) with a row for each task, whose columns `reset` gets; unset: "
        "`max_tasks` numbers, each the `seed` of a task.",
    )
    max_turns: PositiveInt = Field(default=8, description="Most turns of the model in a rollout.")
    turn_advantage: NonNegativeFloat = Field(
        default=0.0,
        description="Weight of each turn's own advantage (its step's reward among the group's turns of the same "
        "number), added to that of the whole rollout; 0: none.",
    )
    turns_apart: bool = Field(
        default=False,
        description="With `turn_advantage`: rewards before the last step count only for their turns (MT-GRPO).",
    )
    turn_tokens: PositiveInt | None = Field(
        default=None,
        description="Most tokens of a turn; `sampling.max_completion_length` bounds the whole rollout.",
    )
    tool_parser: str = Field(
        default="hermes", description="Format of the model's calls of methods, as with kind local; for TRL's interface."
    )
