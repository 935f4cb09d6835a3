"""A Slurm job: the text of a file for sbatch."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2
from pydantic import BaseModel, ConfigDict, Field

from lachesis.common.errors import ConfigError, DeadlineExceeded, EngineError
from lachesis.config.schema import LachesisConfig, VllmEngineConfig
from lachesis.plugins.cluster.layout import FINAL, Layout, Machines

# Deaths by a signal, as shells and srun report them: a library's crash may be the machine's fault.
_PASSING = (str(EngineError.exit_code), str(DeadlineExceeded.exit_code), "70", "1[2-9][0-9]", "2[0-9][0-9]")
_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
_NAME = re.compile(r"[^\s]+")


class SlurmJob(BaseModel):
    """Options of a Slurm job beyond the configuration: those that are not excluded are flags of the command.

    ``config_path``, ``directory`` (the working directory) and ``python`` (the interpreter that has lachesis) are
    absolute; ``overrides`` are of the form ``a.b=c``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    config_path: Path = Field(exclude=True)
    directory: Path = Field(exclude=True)
    python: str = Field(exclude=True)
    overrides: tuple[str, ...] = Field(default=(), exclude=True)
    nodes: int = Field(default=1, ge=1, description="Number of machines, including those of the engines.")
    gpus_per_node: int = Field(default=0, ge=0, description="GPUs of each machine; 0 with model.device: cpu.")
    ranks_per_node: int | None = Field(default=None, ge=1, description="Ranks of each, on the CPU; 1 if unset.")
    time: str | None = Field(default=None, description="Time limit, as HH:MM:SS or D-HH:MM:SS.")
    partition: str | None = Field(default=None, description="Partition of the nodes.")
    account: str | None = Field(default=None, description="Account that the job is charged to.")
    master_port: int = Field(default=29500, ge=1, le=65535, description="Port of the ranks' rendezvous.")
    notice: int = Field(default=300, ge=1, description="Seconds before the limit when the run saves a checkpoint.")
    restarts: int = Field(default=3, ge=0, description="How often a failed job is queued again.")
    preflight: int = Field(default=30, ge=0, description="Seconds for the preflight on all nodes; 0 skips it.")
    sbatch: tuple[str, ...] = Field(
        default=(), description="A further option of sbatch, as in --sbatch=--qos=high; may be repeated."
    )

    @property
    def machines(self) -> Machines:
        """Return the request for machines."""
        return Machines(self.nodes, self.gpus_per_node, self.ranks_per_node)


def render_slurm(config: LachesisConfig, layout: Layout, job: SlurmJob) -> str:
    """Return the script.

    Raises:
        ConfigError: sbatch does not take an option.
    """
    run_dir = config.run.directory
    engine = config.engine
    return _template().render(
        config=config,
        layout=layout,
        job=job,
        options=_sbatch_options(layout, job, run_dir=run_dir),
        set_keys=[word for override in job.overrides for word in ("--set", override)],
        own_copies=isinstance(engine, VllmEngineConfig) and engine.data_parallel_size > 1,
        passing=_PASSING,
        final=FINAL,
    )


def _sbatch_options(layout: Layout, job: SlurmJob, *, run_dir: Path) -> list[str]:
    """Return the options, each as one word. Nodes are taken whole, because steps share their CPUs and memory."""
    if job.time is not None and not _TIME.fullmatch(job.time):
        raise ConfigError(f"--time {job.time!r} is not a time for sbatch", remedy="write it as HH:MM:SS or D-HH:MM:SS")
    tasks = max(layout.ranks_per_node, layout.servers.per_node if layout.servers else 0)
    values: dict[str, object] = {
        "chdir": job.directory,
        "output": f"{run_dir.name}-slurm-%j.log",
        "nodes": layout.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": layout.gpus or None,
        "mem": 0,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "signal": f"B:USR1@{job.notice}",
        "open-mode": "append",
    }
    given = {name: str(value) for name, value in values.items() if value is not None}
    for name in ("partition", "account"):
        if name in given and not _NAME.fullmatch(given[name]):
            raise ConfigError(f"--{name} {given[name]!r} is not a name", remedy="write it as one word")
    words = [f"--{name}={shlex.quote(value)}" if value else f"--{name}" for name, value in given.items()]
    if wrong := [option for option in job.sbatch if not option.startswith("-") or "\n" in option]:
        raise ConfigError(f"{wrong[0]!r} is not an option for sbatch", remedy="write it as in --sbatch=--qos=high")
    return [*words, "--exclusive", "--requeue", *job.sbatch]


@functools.cache
def _template() -> jinja2.Template:
    """Read the template beside this module; its filter ``sh`` quotes a word, or several, for a shell."""
    environment = jinja2.Environment(
        autoescape=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",  # bash uses {# itself
        comment_end_string="#>",
    )
    environment.filters["sh"] = _quoted
    return environment.from_string(Path(__file__).with_name("slurm.sh.j2").read_text(encoding="utf-8"))


def _quoted(value: str | Sequence[str]) -> str:
    return shlex.quote(value) if isinstance(value, str) else shlex.join(value)
