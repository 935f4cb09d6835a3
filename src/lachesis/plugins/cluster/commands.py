"""The commands ``lachesis cluster slurm`` and ``preflight``: files that start a run on several nodes, and a check."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lachesis.cli.base import Overrides, app, console, print_findings, shown
from lachesis.cli.options import with_options
from lachesis.common.files import write_atomic
from lachesis.config.load import load_config, log_findings
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.cluster.layout import Layout, Machines, derive_layout, engine_ports
from lachesis.plugins.cluster.slurm import SlurmJob, render_slurm

if TYPE_CHECKING:
    from lachesis.plugins.cluster.preflight import PreflightVerdict

cluster_app = typer.Typer(help="A run on several nodes.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster")

Config = Annotated[Path, typer.Argument(help="YAML file with the configuration, on a disk that all nodes share.")]


@cluster_app.command()
@with_options(SlurmJob)
def slurm(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="File to write; printed if unset.")] = None,
    **values: Any,
) -> None:
    """Print a script for sbatch: ranks and engines on their nodes. Requeued, it resumes from the last checkpoint."""
    job = SlurmJob(
        config_path=config.absolute(),
        overrides=tuple(overrides or []),
        directory=Path.cwd(),
        python=sys.executable,
        **{name: value for name, value in values.items() if value is not None},
    )
    loaded, layout = _derived(config, overrides, job.machines)
    text = render_slurm(loaded, layout, job)
    if out is None:
        console.file.write(text)
    else:
        write_atomic(out, text)
        console.print(f"wrote {shown(out)}: {layout.summary}")


@cluster_app.command()
def preflight(
    config: Config,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="How many of the processes train; all if unset.")] = None,
    servers: Annotated[int, typer.Option(min=0, help="Inference servers on each of the other nodes.")] = 0,
    node_names: Annotated[str | None, typer.Option(help="Names of all nodes in order, separated by commas.")] = None,
    within: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time limit of the whole check.")] = 30,
) -> None:
    """Check that the nodes of a run fit together; start it on each node as you start ranks. Rank 0 prints the result.

    Versions, GPUs, ports, an all-reduce, disk, clocks. Exit code 1 if there is a problem.
    """
    from lachesis.plugins.cluster.preflight import find_place, preflight
    from lachesis.train.distributed.job import TOKEN_VARIABLE

    loaded = load_config(config, overrides=overrides or []).config
    ports = engine_ports(loaded, servers=servers)
    names = node_names.split(",") if node_names else ()
    place = find_place(os.environ, ranks=ranks, engine_ports=ports, nodes=names)
    verdict = preflight(loaded, place, within_s=within, token=os.environ.get(TOKEN_VARIABLE, ""))
    failed = False
    if verdict is not None:
        for line in preflight_lines(verdict):
            console.print(line)
        failed = any(finding.level == "problem" for finding in verdict.findings)
        with suppress(typer.Exit):
            print_findings(verdict.findings)
    if place.world.size > 1:  # an all-reduce that hangs would keep the process alive
        console.file.flush()
        os._exit(int(failed))
    raise typer.Exit(int(failed))


def preflight_lines(verdict: PreflightVerdict) -> Iterator[str]:
    """Yield a line for each node that took part, and one for the all-reduce."""
    for node in dict.fromkeys(one.node for one in verdict.facts):
        of_node = [one for one in verdict.facts if one.node == node]
        versions = ", ".join(f"{name} {version}" for name, version in of_node[0].versions.items() if version)
        ranks = sum(not one.engine for one in of_node)
        role = ", ".join([f"{ranks} rank(s)"] * bool(ranks) + ["engines"] * (len(of_node) > ranks))
        free = of_node[0].free_bytes / 1e9
        yield f"{node}  {role}, {of_node[0].gpus} GPU(s), {free:.1f} GB free in run.dir; {versions}"
    if verdict.collective_s is not None:
        yield f"all-reduce of 16 MiB over the ranks: {verdict.collective_s * 1000:.1f} ms"
    if not verdict.findings:
        yield "the nodes fit together"


def _derived(path: Path, overrides: list[str] | None, machines: Machines) -> tuple[LachesisConfig, Layout]:
    """Return the checked configuration and the layout of its nodes; warnings go to standard error."""
    config = load_config(path, overrides=overrides or []).config
    layout = derive_layout(config, machines)
    # Files of Axolotl and TRL multiply batches by the ranks.
    loaded = load_config(path, overrides=overrides or [], processes=layout.ranks if layout.ranks > 1 else None)
    log_findings([*loaded.findings, *check(loaded.config, located=loaded.located, name=loaded.name)])
    return loaded.config, layout
