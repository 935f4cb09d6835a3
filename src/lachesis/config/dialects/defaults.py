"""Where a key that a file of Axolotl's or TRL's does not write means something else here than there.

A test compares all defaults of the pinned classes with what a file without the key becomes: these are the others.
"""

from __future__ import annotations

from collections.abc import Mapping

# By dialect and key: the default there, and what is done here without it.
DIFFERENT: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Axolotl": {
        "sequence_len": ("512", "a prompt may be as long as the model's context leaves room for"),
        "output_dir": ("./model-out", "the run is in runs/run"),
    },
    "TRL": {
        "dtype": ("float32", "weights are in the dtype of the model's files, with float32 masters beside 16 bits"),
        "torch_compile": ("false", "decoder layers are compiled where it pays"),
        "logging_steps": ("10", "each step is logged"),
        "vllm_server_timeout": ("240.0", "a server that does not answer ends the run at once"),
        "vllm_gpu_memory_utilization": ("0.3", "0.45 beside the trainer, 0.9 on a GPU of its own"),
    },
}
# Of their code and not of their classes.
IN_CODE: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Axolotl": {
        "warmup_ratio": ("0.03, at most 100 steps", "there is no warm-up"),
        "save_strategy": (
            "a checkpoint each epoch",
            "a checkpoint on a stop, and each save_steps where that is written",
        ),
        "save_total_limit": ("4", "the last two checkpoints are kept"),
    },
}
