"""Environment variables that other trainers' documents set: which of them have an effect, and which have not."""

from __future__ import annotations

from collections.abc import Mapping

from lachesis.common.types import Finding
from lachesis.plugins.dialects.table import Dialect, nothing, together

ENVIRONMENT = Dialect(
    "the environment",
    [
        together("LOGDIR", "bridge.config_path", "the first place where the bridge file is looked for, and written"),
        together("CUDA_VISIBLE_DEVICES", "engine.devices", "the GPUs of the trainer, and of an engine that it starts"),
        together(
            "VLLM_ENABLE_SHARED_WEIGHTS",
            "bridge.config_path",
            "1 has a server write its bridge file at the start; the trainer can ask for it at any time",
        ),
        *nothing("weights come over routes of the server: there is no daemon to skip", "VLLM_SKIP_WEIGHT_DAEMON"),
        *nothing("inference servers are counted by their addresses (engine.urls)", "NUM_INFERENCE_NODES"),
        *nothing("vLLM has its V1 engine only", "VLLM_USE_V1"),
        *nothing("set bridge.config_path (--vllm-config-path), and LOGDIR for the server", "VLLM_BRIDGE_CONFIG_PATH"),
        *(
            together(name, "", note)
            for name, note in (
                ("VLLM_WORKER_MULTIPROC_METHOD", "vLLM's own; if unset fork beside an NVIDIA driver, else spawn"),
                ("PYTORCH_CUDA_ALLOC_CONF", "torch's own; expandable segments that cannot be shared are refused"),
                ("CUDA_LAUNCH_BLOCKING", "CUDA's own; 1 makes everything slow"),
                ("TOKENIZERS_PARALLELISM", "the library's own"),
                ("WORLD_SIZE", "the launcher's; batches of Axolotl's and TRL's files are multiplied by it"),
                ("RANK", "the launcher's (torchrun)"),
                ("MASTER_ADDR", "the launcher's; where trainer and engine meet is bridge.init_method"),
                ("MASTER_PORT", "the launcher's; where trainer and engine meet is bridge.init_method"),
            )
        ),
    ],
    prefix="$",
)

# Settings for the default behaviour are not reported.
_AS_IS = {("VLLM_USE_V1", "1"), ("NUM_INFERENCE_NODES", "0"), ("NUM_INFERENCE_NODES", "-1")}


def environment_findings(environment: Mapping[str, str]) -> list[Finding]:
    """Return a warning for each variable that is set and has no effect."""
    return [
        Finding(level="warning", rule="environment", message=f"${name}={environment[name]} has no effect: {entry.note}")
        for name, entry in ENVIRONMENT.entries.items()
        if entry.treatment == "nothing" and name in environment and (name, environment[name]) not in _AS_IS
    ]
