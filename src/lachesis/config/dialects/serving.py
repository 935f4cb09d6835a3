"""Which engine and bridge a TRL or Axolotl file asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lachesis.config.dialects.table import Translation

# their name of the managed server's option -> ours
ManagedOptions = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Serving:
    """How their file generates.

    Attributes:
        use_vllm, mode: their names of the switches.
        url: the server's address, for mode server; ``url_name`` is where it is written.
        adapter_sync: whether only the adapter is transferred; ``adapter_name`` is where it is written.
        timeout: their name of the wait for that server.
        interval: their name of the number of steps between transfers, if they have one.
        managed: options of a server that the run starts, their names to ours below ``engine.``.
    """

    use_vllm: str
    mode: str
    default_mode: str
    url: str
    url_name: str
    adapter_sync: bool
    adapter_name: str
    timeout: str
    interval: str | None
    managed: ManagedOptions


def put_serving(translation: Translation, serving: Serving) -> None:
    """Set ``engine`` and ``bridge``.

    Without vLLM: the embedded engine. ``server``: the server at that address, to which the adapter is swapped or
    all weights are sent. ``colocate``: a vLLM server of the run's own on the trainer's GPU, with the same bridges.
    """
    if not translation.value(serving.use_vllm):
        options = [
            name for name in (serving.mode, serving.interval, *serving.managed) if name and translation.has(name)
        ]
        if options:
            text = f"nothing to do: {serving.use_vllm} is off, so the trainer's own weights generate"
            translation.note(", ".join(options), text)
        return
    mode = translation.value(serving.mode, serving.default_mode)
    if mode == "server":
        translation.put("engine.kind", "http", serving.use_vllm)
        translation.put("engine.urls", [serving.url], serving.url_name)
        if translation.has(serving.timeout):
            translation.put("engine.wait_s", translation.value(serving.timeout), serving.timeout)
        options = [name for name in serving.managed if translation.has(name) and name != serving.url_name]
        if options:
            translation.note(", ".join(options), "for the server (`lachesis vllm-serve`); the trainer needs none of it")
    elif mode == "colocate":
        translation.put("engine.kind", "vllm", serving.mode)
        for name, option in serving.managed.items():
            if translation.has(name):
                translation.put(f"engine.{option}", translation.value(name), name)
    else:
        translation.problem(serving.mode, f"expected server or colocate, got {mode!r}")
        return
    put_bridge(translation, serving)


def put_bridge(translation: Translation, serving: Serving) -> None:
    """The adapter alone, or all weights, every so many steps."""
    if serving.adapter_sync:
        translation.put("bridge.kind", "lora_only", serving.adapter_name)
    else:
        translation.put("bridge.kind", "broadcast", serving.use_vllm)
    if serving.interval is not None and translation.has(serving.interval):
        translation.put("bridge.every_steps", translation.value(serving.interval), serving.interval)
