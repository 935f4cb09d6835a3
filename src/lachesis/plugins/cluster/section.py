"""The section `cluster`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lachesis.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class ClusterConfig(Section):
    """The place where `lachesis run` starts the processes of a run: here, or on the nodes of a Ray cluster."""

    kind: Literal["auto", "local", "ray"] = Field(
        default="auto", description="`auto` is `ray` where the environment variable RAY_ADDRESS is set, else `local`."
    )
    nodes: PositiveInt | None = Field(
        default=None, description="Number of Ray's nodes, including those of the engines; all of them if unset."
    )
    gpus_per_node: PositiveInt | None = Field(
        default=None, description="GPUs to use of each Ray node; all if unset, if every node has the same number."
    )
    ranks_per_node: PositiveInt | None = Field(
        default=None, description="With `model.device: cpu` on Ray; 1 if unset. On GPUs each that trains has a rank."
    )
    engines: PositiveInt = Field(
        default=1,
        description="Servers of `engine.kind: embedded_server` on several nodes; vLLM's are "
        "`engine.data_parallel_size`.",
    )
    restarts: NonNegativeInt = Field(
        default=3,
        description="How often on Ray all ranks, and each other process, are restarted after a failure; a lost node "
        "does not count.",
    )
    wait_s: PositiveFloat = Field(
        default=600.0, description="Longest wait for a place for all ranks on Ray's nodes, in seconds."
    )
    preflight_s: NonNegativeFloat = Field(
        default=60.0, description="Limit of the look at Ray's nodes before anything is started there; 0: none."
    )
    environment: list[str] = Field(
        default_factory=list,
        description="Names of environment variables that processes on Ray's nodes get from here, as HF_TOKEN.",
    )
