"""Rules about inputs: run, model, data, rewards, sampling."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lachesis.common.errors import did_you_mean
from lachesis.common.imports import entry_point_names
from lachesis.common.json_values import is_object
from lachesis.config.custom import custom_parts
from lachesis.config.document import describe
from lachesis.config.paths import is_model_spec
from lachesis.config.rules.base import Rule, Said, changed, problem, warning
from lachesis.config.schema import LachesisConfig, SamplingConfig
from lachesis.config.schema.rollouts import NAMED_REWARDS

_FUNCTION_SPEC = re.compile(r"^(?:.+\.py:[A-Za-z_]\w*|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)$")


def _function_spec(config: LachesisConfig) -> Iterator[Said]:
    named = [("run.setup", config.run.setup), ("data.transform", config.data.transform)]
    named += [(f"data.more[{i}].transform", dataset.transform) for i, dataset in enumerate(config.data.more)]
    if config.source.kind == "steps" and "://" not in config.source.environment:
        named.append(("source.environment", config.source.environment))
    if config.source.kind == "local":
        named += [(f"source.tools[{i}]", tool) for i, tool in enumerate(config.source.tools) if isinstance(tool, str)]
    for key, spec in named:
        if spec is not None and not _FUNCTION_SPEC.match(spec):
            yield problem(f"{key}: {spec!r} is neither FILE.py:FUNCTION nor module.function; write one")


def _custom_parts(config: LachesisConfig) -> Iterator[Said]:
    """Check the form of the names of custom parts; only loading shows that the parts exist."""
    for kind, key, given in custom_parts(config):
        spec = given if isinstance(given, str) else given.get("function")
        malformed = is_object(given) and (
            given.keys() - {"kwargs"} != {"function"} or not is_object(given.get("kwargs") or {})
        )
        if not isinstance(spec, str) or malformed:
            yield problem(f"{key}: expected `function` and `kwargs`, a mapping, got {describe(given)}")
            continue
        is_reward = kind.name == "reward"
        if _FUNCTION_SPEC.match(spec) or (is_reward and (spec in NAMED_REWARDS or is_model_spec(spec))):
            continue
        known = entry_point_names(kind.group)
        if spec in known:
            continue
        names = [*known, *(NAMED_REWARDS if is_reward else ())]
        model = ", nor a model directory or hub id" if is_reward else ""
        yield problem(
            f"{key}: {spec!r} is neither FILE.py:FUNCTION nor module.function{model}, and no installed package has an "
            f"entry point {kind.group} of that name; {did_you_mean(spec, names, otherwise='write one')}"
        )


def _agent(config: LachesisConfig) -> Iterator[Said]:
    if config.source.kind != "agent":
        return
    named = [given if isinstance(given, str) else str(given.get("function")) for given in config.rewards.functions]
    by_code = [spec for spec in named if spec.endswith(("agent.rewards.exit_code", "agents.rewards.exit_code"))]
    reported = [spec for spec in named if spec.endswith(("agent.rewards.reported", "agents.rewards.reported"))]
    if (own := [*by_code, *reported]) and not config.source.self_reported:
        yield problem(
            f"{own[0]} trusts a score that the agent reports, which the policy may learn to fake; set "
            "source.self_reported if you want that, or judge the files it leaves (source.keep_files)"
        )
    if by_code and config.source.nonzero_exit == "exclude":
        yield problem(
            f"{by_code[0]} scores exit codes, but source.nonzero_exit exclude drops all except 0; set it to score"
        )


def _tools(config: LachesisConfig) -> Iterator[Said]:
    """Check how MCP servers are named."""
    tools = config.source.tools if config.source.kind == "local" else []
    for i, server in enumerate(tools):
        if isinstance(server, str):
            continue
        if bool(server.command) == bool(server.url):
            yield problem(f"source.tools[{i}]: an MCP server has either a command or a url; give one")
        elif (server.env and server.url) or (server.headers and server.command):
            yield problem(f"source.tools[{i}]: env needs command, and headers need url; remove the other")


def _data(config: LachesisConfig) -> Iterator[Said]:
    data = config.data
    for key, part in (("data", data), *((f"data.more[{i}]", dataset) for i, dataset in enumerate(data.more))):
        if part.transform is not None and part.format != "auto":
            yield warning(f"{key}.format {part.format} does nothing: {key}.transform makes the prompts")


def _held_out(config: LachesisConfig) -> Iterator[Said]:
    evaluation = config.evaluation
    names = [one if isinstance(one, str) else one.name for one in evaluation.benchmarks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield problem(f"evaluation.benchmarks names {', '.join(twice)} twice; name each once")
    alike = [one.name for one in evaluation.benchmarks if not isinstance(one, str) and (one.samples or 1) > 1]
    if alike and evaluation.temperature == 0:
        yield problem(f"evaluation.benchmarks: greedy samples of {', '.join(alike)} are identical; set a temperature")


def _truncated_sampling(config: LachesisConfig) -> Iterator[Said]:
    sampling = config.sampling
    if config.source.kind == "atropos":  # the environments choose their own sampling for training
        return
    numbers = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    values = sampling.model_dump(include=set(numbers))
    cutting = [f"{key} {values[key.removeprefix('sampling.')]:g}" for key in changed(config, "sampling", *numbers)]
    cutting += changed(config, "sampling", "min_tokens", "guided_regex")
    if cutting:
        yield warning(
            f"{', '.join(cutting)}: the engine's logprobs are for the truncated distribution, the trainer's for the "
            "full one, so ratios are biased from the start and the clip drops tokens whose probability never changed; "
            "train without these keys"
        )


def _engine_sampling(config: LachesisConfig) -> Iterator[Said]:
    for name in sorted(SamplingConfig.model_fields.keys() & config.sampling.generation_kwargs.keys()):
        yield problem(f"sampling.generation_kwargs.{name} has its own key: sampling.{name}")
    for name in sorted({"max_tokens", "n", "logprobs", "seed"} & set(config.sampling.generation_kwargs)):
        yield problem(f"sampling.generation_kwargs.{name} is set by the run itself; remove it")


INPUT_RULES: tuple[Rule, ...] = (
    *(_function_spec, _custom_parts, _agent, _tools, _data, _held_out),
    *(_truncated_sampling, _engine_sampling),
)
