"""The routes that change weights or stop generation: each a function from a body to an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from lachesis.engines.serving.adapter_files import read_adapter
from lachesis.engines.serving.bodies import Body
from lachesis.engines.serving.control import Control
from lachesis.engines.serving.control_wire import (
    adapter_document,
    parse_adapter_load,
    parse_receiver,
    parse_version,
    receiver_document,
)
from lachesis.engines.serving.served import Refused

Document = Mapping[str, Any]


async def claim(control: Control, document: Document) -> Document:
    body = Body(document, known={"owner", "takeover"})
    control.claim(body.text("owner"), takeover=body.flag("takeover", False))
    return {"owner": control.owner, **control.stamp}


async def release(control: Control, document: Document) -> Document:
    control.release(Body(document, known={"owner"}).text("owner"))
    return {"owner": control.owner, **control.stamp}


async def load_adapter(control: Control, document: Document) -> Document:
    load = parse_adapter_load(document)
    path = control.inside_roots(load.path)
    max_rank = _max_rank(control)

    async def change() -> None:
        await asyncio.to_thread(read_adapter, path, max_rank=max_rank)
        await control.served.load_adapter(name=load.name, path=path)

    await control.change_weights(f"loading adapter {load.name!r}", change, version=load.version)
    return _adapter_loaded(control)


async def unload_adapter(control: Control, document: Document) -> Document:
    body = Body(document, known={"adapter_name", "lora_name", "lora_int_id", "weight_version"})
    loaded = control.served.adapter()
    name = body.text("adapter_name", None) or body.text("lora_name", None) or (loaded.name if loaded else None)
    if name is None:
        raise Refused("no adapter is loaded", status=404, remedy="the base weights are served already")
    version = parse_version(body, required=False)
    await control.change_weights(
        f"unloading adapter {name!r}", lambda: control.served.unload_adapter(name=name), version=version
    )
    return _adapter_loaded(control)


async def start_receiver(control: Control, document: Document) -> Document:
    spec = parse_receiver(document)
    if spec.lora is not None and spec.lora.r > (max_rank := _max_rank(control)):
        raise Refused(
            f"lora.r is {spec.lora.r}, the server holds up to {max_rank}",
            status=422,
            remedy=f"start the server with --max-lora-rank {spec.lora.r}",
        )
    await control.served.start_receiver(spec)
    return receiver_document(control.served.receiver()) | control.stamp


async def receive(control: Control, document: Document) -> Document:
    version = parse_version(Body(document, known={"weight_version"}))
    await control.change_weights("receiving an update", control.served.receive, version=version)
    return receiver_document(control.served.receiver()) | control.stamp


async def stop_receiver(control: Control, document: Document) -> Document:
    Body(document, known=())
    await control.served.stop_receiver()
    return receiver_document(control.served.receiver()) | control.stamp


async def export(control: Control, document: Document) -> Document:
    path = control.inside_roots(Body(document, known={"path"}).text("path"))
    await control.served.export_shared(path)
    return {"path": str(path), **control.stamp}


async def pause(control: Control, document: Document) -> Document:
    await control.served.pause(Body(document, known={"mode"}).choice("mode", ("keep", "drain", "abort"), "keep"))
    return {"paused": True, **control.stamp}


async def resume(control: Control, document: Document) -> Document:
    Body(document, known=())
    await control.served.resume()
    return {"paused": False, **control.stamp}


async def sleep(control: Control, document: Document) -> Document:
    await control.served.sleep(Body(document, known={"level"}).integer("level", 1, low=1, high=2))
    return {"sleeping": True, **control.stamp}


async def wake_up(control: Control, document: Document) -> Document:
    Body(document, known=())
    await control.served.wake_up()
    return {"sleeping": False, **control.stamp}


async def reload(control: Control, document: Document) -> Document:
    body = Body(document, known={"path", "weight_version"})
    path = control.inside_roots(body.text("path"))
    version = parse_version(body, required=False)
    await control.change_weights(f"loading {path}", lambda: control.served.reload(path), version=version)
    return {"path": str(path), **control.stamp}


async def set_version(control: Control, document: Document) -> Document:
    version = parse_version(Body(document, known={"weight_version"}))

    async def changed_already() -> None:
        """Shared storage: the trainer has written the weights itself."""

    await control.change_weights("setting the version", changed_already, version=version)
    return dict(control.stamp)


def _max_rank(control: Control) -> int:
    info = control.served.model_info()
    if not info.lora_enabled:
        raise Refused("this server was started without LoRA", status=409, remedy="start it with --enable-lora")
    return info.max_lora_rank


def _adapter_loaded(control: Control) -> Document:
    return {"status": "success", "adapter": adapter_document(control.served.adapter()), **control.stamp}
