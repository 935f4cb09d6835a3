"""Code inside vLLM's workers: a single remote call, through which all weight operations go.

Loaded with ``--worker-extension-cls lachesis.engines.vllm.worker.WorkerExtension``. vLLM runs a call between two engine
steps, so that no step sees a partial change.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lachesis.common.errors
from lachesis.common.errors import EngineError, LachesisError, StaleWeights
from lachesis.engines.receiver import Receiver
from lachesis.engines.serving.adapter_files import WEIGHTS_NAME, read_adapter
from lachesis.engines.serving.backend import (
    DigestRequest,
    DigestSlice,
    ReceiverSpec,
    ReceiverStatus,
    Refused,
    check_fits,
)
from lachesis.engines.serving.bodies import error_document
from lachesis.engines.vllm.checkpoint_files import (
    check_architecture,
    read_shapes,
    read_tensors,
    served_shapes,
)
from lachesis.engines.vllm.cuts import find_cuts, named_parameters, reordered_experts, shares, whole_shape
from lachesis.engines.vllm.in_place import InPlaceLoader
from lachesis.engines.vllm.logprobs import WorkerLogprobs
from lachesis.engines.vllm.lora_slots import LoraSlots
from lachesis.process.signals import end_with
from lachesis.transport.digest import Share, digests, share_digests
from lachesis.transport.float8 import FP8
from lachesis.transport.shared_tensors import dtype_name, export_cuda

logger = logging.getLogger(__name__)

# Models with tied embeddings have no parameter of this name, but their checkpoints may.
OUTPUT_HEAD = "lm_head.weight"


class WorkerExtension:
    """A mixin for vLLM's worker class."""

    def lachesis_call(self, method: str, document: str) -> str:
        """Call ``method`` of this worker's :class:`WorkerWeights` with the fields of a JSON object.

        The answer is JSON too, errors included: nothing is pickled and no error ends the engine.
        """
        weights = self.__dict__.get("_lachesis_weights")
        if weights is None:
            weights = self.__dict__["_lachesis_weights"] = WorkerWeights(self)
        return answer(lambda: getattr(weights, method)(**json.loads(document)))


def leave_ranks_uncompiled(sampler: Any) -> None:
    """Make vLLM's sampler count the ranks of sampled tokens with the uncompiled function.

    vLLM compiles the function when the first token with a logprob is sampled. On a CPU with empty caches, that token,
    and the proof of the first weights, would wait more than 10 s for a C++ compiler.
    """
    module: Any = sys.modules[type(sampler).__module__]
    compiled = module.batched_count_greater_than
    module.batched_count_greater_than = getattr(compiled, "_torchdynamo_orig_callable", compiled)


def answer(call: Callable[[], Any]) -> str:
    """Call a function and return its result or error as JSON."""
    try:
        return json.dumps({"result": call()})
    except LachesisError as error:
        return json.dumps(error_document(error) | {"status": getattr(error, "status", None)})
    except Exception as error:
        wrapped = EngineError(f"{type(error).__name__}: {error}", remedy="look at the server's log")
        return json.dumps(error_document(wrapped))


def read_answer(text: str) -> Any:
    """Return the result in an answer.

    Raises:
        LachesisError: the call raised it; the class is preserved.
    """
    document = json.loads(text)
    error = document.get("error")
    if error is None:
        return document["result"]
    if document.get("status") is not None:
        raise Refused(error["message"], status=document["status"], remedy=error["remedy"])
    kind = getattr(lachesis.common.errors, error["type"], EngineError)
    raise kind(error["message"], remedy=error["remedy"])


class WorkerWeights:
    """The weights of one of vLLM's workers. Every public method is a remote call; arguments and results are JSON."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._runner = worker.model_runner
        self._config = worker.vllm_config
        self._device: torch.device = torch.device(worker.device)
        self._rank: int = worker.rank
        self._receiver: Receiver | None = None
        self._slots: LoraSlots | None = None
        self._logprobs: WorkerLogprobs | None = None
        # The places of base weights, once verified with vLLM's loader, and the number of updates copied there.
        self._in_place: InPlaceLoader | None = None
        self._copied = 0

    def install(self, server: int) -> dict[str, Any]:
        """Register the adapter that every request names. Called once, before the first request.

        The worker whose outputs vLLM reads keeps logprobs from then on. On a CPU, token ranks are counted by an
        uncompiled function. It ends with the server, a pid: else it would keep its GPU.
        """
        end_with(server)
        if self._config.lora_config is not None:
            from lachesis.engines.vllm.compat import LoRAModel, PEFTHelper, lora_name_mapper

            model = self._runner.get_model()
            self._slots = LoraSlots(
                worker_loras=self._runner.lora_manager,
                model=model,
                device=self._device,
                tensor_parallel_size=self._tensor_parallel_size,
                lora_model=LoRAModel,
                peft_helper=PEFTHelper,
                name_mapper=lora_name_mapper(model),
            )
            self._slots.clear()
        if self._device.type == "cpu":
            # vLLM's 16-bit attention uses AMX if present, and dies of SIGILL unless the process has requested AMX.
            torch.cpu._init_amx()
            leave_ranks_uncompiled(self._runner.sampler)
        if self._rank == 0:
            self._logprobs = WorkerLogprobs(self._worker)
        return {"device": str(self._device), "keeps_logprobs": self._logprobs is not None}

    def take_logprobs(self, asked: Mapping[str, list[int]], dropped: list[str]) -> dict[str, str]:
        """See :meth:`WorkerLogprobs.take`; the first worker has them."""
        return {} if self._logprobs is None else self._logprobs.take(asked, dropped)

    def load_adapter(self, path: str, name: str) -> dict[str, Any]:
        """Activate the adapter in a directory. Only safetensors are read."""
        slots = self._need_slots()
        files = read_adapter(Path(path), max_rank=self._config.lora_config.max_lora_rank)
        spec = replace(files.spec, name=name)
        slots.load(load_file(files.path / WEIGHTS_NAME, device=str(self._device)), spec)
        return asdict(spec)

    def clear_adapter(self) -> None:
        """Serve the base weights."""
        self._need_slots().clear()

    def make_room(self) -> None:
        """Free the memory that torch keeps of the last update, so that parts that wake up next fit."""
        if self._receiver is not None:
            self._receiver.look_again()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def refresh(self) -> None:
        """Restore the adapter's slots after the weights' memory was dropped and reallocated."""
        if self._slots is not None:
            self._slots.refresh()

    def digests(self, request: Mapping[str, Any]) -> dict[str, int]:
        """Return digests of rows of parameters (without ``slices``: of all non-empty parameters), and of the adapter.

        Raises:
            Refused: (404, 422) as :meth:`DigestSlice.of`; (409) this worker does not hold the parameter's bytes.
        """
        asked = DigestRequest.model_validate(request)
        found: dict[str, Tensor] = {}
        if asked.slices is None or asked.slices:
            held = named_parameters(self._runner.get_model())
            emptied = {name for name, tensor in held.items() if not tensor.numel()}
            slices = asked.slices or {name: DigestSlice(name) for name in held.keys() - emptied}
            for part in slices.values():
                if part.name in emptied:
                    raise _repacked(f"{part.name!r} cannot be read")
            found |= {name: part.of(held) for name, part in slices.items()}
        if asked.adapter:
            found |= self._need_slots().tensors()
        return digests(found)

    def digest_parts(self, request: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        """Return this worker's parts of the digests of :meth:`digests`, by their place in the tensor.

        Raises:
            Refused: (404) there is no such parameter; (409) its cut is unknown, or the adapter was requested.
        """
        asked = DigestRequest.model_validate(request)
        if asked.adapter:
            self._need_slots().tensors()  # raises: each worker holds only a part of it
        model = self._runner.get_model()
        held, cuts = named_parameters(model), find_cuts(model)
        slices = {name: DigestSlice(name) for name in cuts} if asked.slices is None else asked.slices
        shapes = {name: cut.shape for name, cut in cuts.items()}
        found: dict[tuple[str, str], Share] = {}
        for name, part in slices.items():
            if part.name in held and part.name not in cuts:
                raise _uncut(part.name)
            part.check(shapes)
            found |= {(name, at): share for at, share in shares(held[part.name], cuts[part.name], part).items()}
        if bad := [name for (name, _), share in found.items() if not share.adds_up]:
            raise _uncut(bad[0])
        said = share_digests({f"{name}@{at}": share for (name, at), share in found.items()})
        answer: dict[str, dict[str, int]] = {name: {} for name in slices}
        for name, at in found:
            answer[name][at] = said[f"{name}@{at}"]
        return answer

    def state_dict_info(self) -> dict[str, Any]:
        """Return shape, dtype and device of every parameter; for sharded ones, the shape of the whole.

        The shape is [0] if the bytes are not as in a checkpoint: vLLM emptied the parameter, or may have reordered it.
        """
        model = self._runner.get_model()
        cuts = find_cuts(model) if self._tensor_parallel_size > 1 else None
        reordered = reordered_experts(model)

        def shape(name: str, tensor: Tensor) -> list[int]:
            if name in reordered:
                return [0]
            return list(tensor.shape) if cuts is None else whole_shape(name, cuts)

        return {
            name: {
                "shape": shape(name, tensor),
                "dtype": dtype_name(tensor.dtype),
                "device": str(tensor.device),
            }
            for name, tensor in named_parameters(model).items()
        }

    def export(self) -> dict[str, Any]:
        """Return, for JSON, how another process maps every parameter (:mod:`lachesis.transport.shared_tensors`).

        Raises:
            Refused: (409) the parameters of this engine cannot be shared.
            EngineError: their memory cannot be shared.
        """
        if self._tensor_parallel_size > 1:
            raise Refused(
                f"the weights are split over {self._tensor_parallel_size} GPUs, and a trainer on one of them could "
                "write only that GPU's part, so they cannot be shared",
                status=409,
                remedy="use --tensor-parallel-size 1, or broadcast the weights",
            )
        if self._device.type != "cuda":
            raise _repacked("they cannot be shared")
        held = named_parameters(self._runner.get_model())
        if any(tensor.dtype == FP8 for tensor in held.values()):
            raise Refused(
                "the weights are quantized to 8 bits, so a trainer, which needs them unquantized, cannot share them",
                status=409,
                remedy="start the server without --quantization, or broadcast the weights",
            )
        return {name: export_cuda(parameter).to_json() for name, parameter in held.items()}

    def start_receiver(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Check an announcement against the model, and join the channel in the background."""
        parsed = ReceiverSpec.model_validate(spec)
        if self._receiver is not None:
            self._receiver.check_free()
        if parsed.rank + self._tensor_parallel_size > parsed.world_size:  # other servers' workers may come after ours
            raise Refused(
                f"the channel has world_size {parsed.world_size} and starts at rank {parsed.rank} here, but this "
                f"engine has {self._tensor_parallel_size} workers, each of which is a separate rank",
                status=422,
                remedy=f"send a world_size of at least {parsed.rank + self._tensor_parallel_size}",
            )
        if parsed.backend == "nccl" and self._device.type != "cuda":
            raise Refused("this engine runs on the CPU, without nccl", status=422, remedy="use gloo or ipc")
        shapes = {tensor.name: tensor.shape for tensor in parsed.tensors}
        if parsed.lora is not None:
            self._need_slots().check(shapes, parsed.lora)
        else:
            self._check_reload(shapes, what="the announced update")
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = Receiver(parsed, rank=parsed.rank + self._rank, device=self._device)
        self._in_place, self._copied = None, 0  # the new update may have other tensors
        return self.receiver()

    def receiver(self) -> dict[str, Any]:
        """Return the state of the receiver."""
        status = ReceiverStatus() if self._receiver is None else self._receiver.status
        said = {"state": status.state, "detail": status.detail, "updates": status.updates}
        return said | {"copied": self._copied}

    def receive(self, wait_s: float, load: bool) -> dict[str, Any]:
        """Receive one update from the channel, and ``load`` it if it is complete after ``wait_s`` seconds."""
        if self._receiver is None:
            raise Refused("no receiver was started", status=409, remedy="start one with /nccl/start_receiver")
        tensors = self._receiver.take(wait_s)
        if tensors is None or not load:
            return {"arrived": tensors is not None, "loaded": False}
        lora = self._receiver.spec.lora
        with self._receiver.loading():
            if lora is not None:
                self._need_slots().load(dict(tensors), lora)
            else:
                self._load_update(dict(tensors))
        return self.receiver() | {"arrived": True, "loaded": True, "lora": None if lora is None else asdict(lora)}

    def stop_receiver(self) -> None:
        """Leave the channel."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def reload(self, path: str) -> None:
        """Load a checkpoint directory; the adapter is dropped."""
        directory = Path(path)
        check_architecture(directory, self._config.model_config.hf_config.architectures or ())
        self._check_reload(read_shapes(directory), what=f"the checkpoint in {directory}")
        self._load_base(read_tensors(directory))

    def _check_reload(self, offered: Mapping[str, tuple[int, ...]], *, what: str) -> None:
        from lachesis.engines.vllm.compat import can_reload_under_lora, engine_kind

        if self._slots is not None and not can_reload_under_lora():
            raise Refused(
                f"{engine_kind()} cannot load base weights into an engine with LoRA",
                status=409,
                remedy="start the server without --enable-lora, or send only the adapter",
            )
        wanted = served_shapes(str(self._config.model_config.model))
        if wanted is not None:
            held = named_parameters(self._runner.get_model())
            check_fits(offered, wanted, tied={OUTPUT_HEAD} - held.keys(), what=what)

    def _load_update(self, tensors: Mapping[str, Tensor]) -> None:
        """Load complete new base weights: first with vLLM's loader, later directly to the places it used."""
        if self._in_place is not None:
            with self._replacing_base():
                self._in_place.load(tensors)
            self._copied += 1
            return
        self._load_base(iter(tensors.items()))
        found = InPlaceLoader.find(self._runner.get_model(), {name: tuple(one.shape) for name, one in tensors.items()})
        self._in_place = found if found is not None and found.matches(tensors) else None

    def _load_base(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load new base weights in place with vLLM's loader."""
        self._in_place = None
        with self._replacing_base():
            self._worker.reload_weights(weights_iterator=tensors)
            if self._device.type == "cpu":
                repack_tied(self._runner.get_model())
                repack_experts(self._runner.get_model())

    @contextmanager
    def _replacing_base(self) -> Iterator[None]:
        """Change the base weights inside the context.

        Raises:
            StaleWeights: the change failed, and the weights are incomplete.
        """
        try:
            yield
        except Exception as error:
            raise StaleWeights(
                f"vLLM failed while loading weights, which are now incomplete: {type(error).__name__}: {error}",
                remedy="restart the server",
            ) from error
        finally:
            # vLLM may have dropped every adapter with the old weights.
            if self._slots is not None:
                self._slots.clear()

    @property
    def _tensor_parallel_size(self) -> int:
        return self._config.parallel_config.tensor_parallel_size

    def _need_slots(self) -> LoraSlots:
        if self._slots is None:
            raise Refused("this server was started without LoRA", status=409, remedy="start it with --enable-lora")
        return self._slots


def _uncut(name: str) -> Refused:
    return Refused(
        f"{name!r} has no digest: it is not known how vLLM splits it over the workers, or vLLM has emptied it",
        status=409,
        remedy="prove the transfer with the canary",
    )


def _repacked(what: str) -> Refused:
    return Refused(
        f"vLLM on the CPU repacks the weights of linear layers and leaves the parameters empty, so that {what}",
        status=409,
        remedy="use the embedded engine's server on the CPU",
    )


def repack_tied(model: nn.Module) -> None:
    """Make modules with a tied parameter process it again after loading.

    On the CPU, an output head computes with a packed copy of its weights. Loading makes a new copy only for the module
    named in the checkpoint, the embedding, not for the head tied to it.
    """
    owners: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or id(weight) not in owners:
            owners.add(id(weight))
        elif (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)


def repack_experts(model: nn.Module) -> None:
    """Make expert kernels process their weights again after loading.

    On the CPU they compute with a packed copy, which vLLM 0.32 makes only at the first loading.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
