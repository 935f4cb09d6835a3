"""Options of an environment: the sections ``env``, ``openai`` and ``slurm``, of flags and of a YAML file."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator
from pydantic.fields import FieldInfo

from lachesis.common.errors import ConfigError, did_you_mean

logger = logging.getLogger("lachesis.plugins.atropos.environments")
ServerType = Literal["vllm", "openai"]
_CONFIG = "config"
# Atropos' names that do nothing here, and names for settings that have another place here.
_OTHERS = tomllib.loads(Path(__file__).with_name("others.toml").read_text(encoding="utf-8"))


class Settings(BaseModel):
    """Immutable settings without unknown names. Strings from the command line become numbers and booleans.

    ``NO_FLAGS`` names fields that do nothing here, so that no flag sets them.
    """

    NO_FLAGS: ClassVar[frozenset[str]] = frozenset()
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class EnvironmentConfig(Settings):
    """Section ``--env.*``, which every environment has. Subclasses add an environment's own fields."""

    group_size: int = Field(4, ge=1, description="completions of one problem, scored against each other")
    max_num: int | None = Field(None, ge=1, description="use only this many problems of the data, from the first")
    max_num_workers: int = Field(-1, ge=-1, description="most groups in progress; -1: as many as staleness allows")
    max_batches_offpolicy: int = Field(3, ge=1, description="most batches ahead of the trainer")
    max_token_length: int = Field(2048, ge=1, description="most tokens of a rollout, prompt included")
    max_new_tokens: int | None = Field(None, ge=1, description="most tokens of a completion; if unset, all left")
    temperature: float = Field(1.0, gt=0, description="sampling temperature of rollouts; evaluation is greedy")
    tokenizer_name: str | None = Field(None, description="directory or hub id; that of the served model if unset")
    rollout_server_url: str = Field("http://localhost:8002", description="address of the rollout API")
    wandb_name: str | None = Field(None, description="name of this environment; its kind if unset")
    use_wandb: bool = Field(False, description="log to Weights & Biases, into the trainer's project and group")
    log_dir: Path | None = Field(None, description="write metrics.jsonl here")
    inference_weight: float = Field(1.0, ge=0, description="weight of this environment when requests are shared out")
    min_batch_allocation: float | None = Field(None, ge=0, le=1, description="smallest share of every batch")
    total_steps: int = Field(-1, ge=-1, description="batches to serve, or groups to `process`; -1: as the trainer")
    steps_per_eval: int = Field(0, ge=0, description="evaluate every this many steps while serving; 0: never")
    eval_num: int = Field(256, ge=1, description="most held-out problems of an evaluation")
    ensure_scores_are_not_same: bool = Field(False, description="drop groups with equal scores")
    include_messages: bool = Field(False, description="send the conversations as text too")
    data_path_to_save_groups: Path | None = Field(None, description="write every group to this JSONL file")
    data_dir_to_save_evals: Path | None = Field(None, description="write results of evaluations to this directory")
    worker_timeout: float = Field(600.0, gt=0, description="seconds after which an unfinished group is dropped")
    wait_timeout: float = Field(1800.0, gt=0, description="longest wait for the rollout API and the trainer, seconds")
    linger: float = Field(30.0, ge=0, description="seconds to continue once the trainer has taken all its batches")
    seed: int = Field(0, description="order of the problems")

    @field_validator("rollout_server_url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        parts = urlsplit(url.strip())
        _ = parts.port  # read for its ValueError: an invalid port
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not an address of a rollout API, such as http://127.0.0.1:8002")
        return url.strip().rstrip("/")


class ServerConfig(Settings):
    """Section ``--openai.*``: the inference servers."""

    base_url: tuple[str, ...] = Field(
        ("http://localhost:9001",), min_length=1, description="with or without /v1; several separated by commas"
    )
    server_type: ServerType = Field("vllm", description="vllm: /generate; openai: /v1/completions with token ids")
    model_name: str | None = Field(None, description="name of the model; the server's first if unset")
    api_key: str = Field("", description="bearer token to send; empty sends none")
    timeout: float = Field(1200.0, gt=0, description="longest wait for a completion, a restart included, in seconds")
    num_max_requests_at_once: int = Field(512, ge=1, description="most requests in flight")

    @field_validator("base_url", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value


class SlurmConfig(Settings):
    """Section ``--slurm`` and ``--slurm.*``: a limit on the rate of requests."""

    enabled: bool = Field(False, description="must be False: name the nodes' servers in --openai.base_url")
    num_requests_per_time_interval: int | None = Field(None, ge=1, description="most requests started in an interval")
    time_interval: float = Field(10.0, gt=0, description="length of that interval, in seconds")

    @field_validator("enabled")
    @classmethod
    def _not_enabled(cls, enabled: bool) -> bool:
        if enabled:
            raise ConfigError(
                "--slurm True: servers are not looked up in the job's node list",
                remedy="name them, as in --openai.base_url http://node1:9001,http://node2:9001",
            )
        return enabled


class EnvironmentOptions(Settings):
    """Options with which an environment is started."""

    env: EnvironmentConfig
    openai: ServerConfig
    slurm: SlurmConfig


def parse_options(words: Sequence[str], *, env_class: type[EnvironmentConfig]) -> EnvironmentOptions:
    """Parse the options in a command line; flags take precedence over the file that ``--config`` names.

    Args:
        words: as in ``["--env.group-size", "8", "--openai.base_url=http://localhost:9001/v1", "--slurm", "False"]``.
        env_class: the environment's own section ``env``.

    Raises:
        ConfigError: a flag is unknown (the message names the nearest known one), is given twice with different values,
            or has no value or one of the wrong kind.
    """
    known = _flags(env_class)
    given = _read_words(words, known=known)
    if _CONFIG in given:
        given = _read_file(Path(given.pop(_CONFIG)), known=known) | given
    sections: dict[str, Any] = {section: {} for section in EnvironmentOptions.model_fields}
    for name, value in given.items():
        section, _, field = name.partition(".")
        sections[section][field or "enabled"] = value
    try:
        return create_model("Options", __base__=EnvironmentOptions, env=(env_class, ...))(**sections)
    except ValidationError as error:
        fault = error.errors()[0]
        flag, reason = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--{flag} is {fault['input']!r}: {reason}", remedy="correct the value") from error


def describe(env_class: type[EnvironmentConfig]) -> list[tuple[str, str, str]]:
    """Return every flag with its default, "" if it has none, and its meaning."""
    rows = []
    for name, field in _flags(env_class).items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        shown = ",".join(default) if isinstance(default, tuple) else default
        rows.append((f"--{name}", "" if shown in (None, "") else str(shown), field.description or ""))
    return rows


def _flags(env_class: type[EnvironmentConfig]) -> dict[str, FieldInfo]:
    """Return the fields that flags set, by the flag's name: ``config``, ``env.group_size``, ``slurm``."""
    flags = {_CONFIG: FieldInfo(default=None, description="a YAML file with the sections env, openai and slurm")}
    sections: dict[str, type[Settings]] = {"env": env_class, "openai": ServerConfig, "slurm": SlurmConfig}
    for section, settings in sections.items():
        for name, field in settings.model_fields.items():
            if name not in settings.NO_FLAGS:
                flags[section if (section, name) == ("slurm", "enabled") else f"{section}.{name}"] = field
    return flags


def _read_words(words: Sequence[str], *, known: Collection[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise _unknown(flag, name, known)
        counts = _counts(flag, name, known)
        if not equals:
            # A flag alone is a switch that is on.
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "True"
        if not counts:
            continue
        if name in given and given[name] != value:
            raise ConfigError(f"--{name} is given twice: {given[name]} and {value}", remedy="give it once")
        given[name] = value
    return {name: None if value in ("None", "null") else value for name, value in given.items()}


def _read_file(path: Path, *, known: Collection[str]) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}", remedy="give a YAML file") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a mapping", remedy="write the sections env, openai and slurm")
    given: dict[str, Any] = {}
    for section, content in document.items():
        if section == "slurm" and isinstance(content, bool):
            given[section] = content
            continue
        if section == "openai" and isinstance(content, list):
            content = _one_section(path, content)
        if section not in EnvironmentOptions.model_fields or not isinstance(content, dict):
            raise _unknown(f"{path}: {section}", str(section), list(EnvironmentOptions.model_fields))
        for field, value in content.items():
            name = f"{section}.{str(field).replace('-', '_')}".replace("slurm.enabled", "slurm")
            if _counts(f"{path}: {name}", name, known):
                given[name] = value
    return given


def _one_section(path: Path, entries: Sequence[Any]) -> Mapping[str, Any]:
    """Read several servers, as the original writes them: a list of sections that differ only in ``base_url``."""
    sections = [dict(entry) for entry in entries if isinstance(entry, dict)]
    urls = [section.pop("base_url", None) for section in sections]
    if not sections or len(sections) < len(entries) or None in urls or any(one != sections[0] for one in sections):
        raise ConfigError(
            f"{path}: the entries of openai differ in more than base_url",
            remedy="give each a base_url, and the same values otherwise",
        )
    return sections[0] | {"base_url": tuple(urls)}


def _counts(shown: str, name: str, known: Collection[str]) -> bool:
    """Return True for a known name; False, with a warning, for one of Atropos' that does nothing here.

    Raises:
        ConfigError: the name is unknown, or stands for something that is configured elsewhere here.
    """
    if name in known:
        return True
    if name not in _OTHERS["nothing"]:
        raise _unknown(shown, name, known)
    logger.warning("%s does nothing here", shown)
    return False


def _unknown(shown: str, name: str, known: Collection[str]) -> ConfigError:
    if elsewhere := _OTHERS["elsewhere"].get(name, _OTHERS["elsewhere"].get(name.partition(".")[0])):
        return ConfigError(f"{shown} has no counterpart", remedy=elsewhere)
    dashes = "--" if shown.startswith("-") else ""
    names = [f"{dashes}{one}" for one in known]
    remedy = did_you_mean(f"{dashes}{name}", names, otherwise=f"known are {', '.join(known)}")
    return ConfigError(f"unknown flag {shown}", remedy=remedy)
