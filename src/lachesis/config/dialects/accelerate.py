"""The file that `accelerate launch --config_file` takes: known, so that it can be explained and refused."""

from __future__ import annotations

from lachesis.config.dialects.table import Dialect, cannot, nothing, together

ACCELERATE = Dialect(
    "accelerate",
    [
        together("mixed_precision", "model.dtype", "bf16 weights have fp32 masters (optimizer.weight_update)"),
        *nothing(
            "start `torchrun --nproc-per-node N -m lachesis ...`, or `lachesis train` alone for one process",
            *("distributed_type", "num_processes", "num_machines", "machine_rank", "rdzv_backend", "same_network"),
            *("compute_environment", "main_training_function"),
        ),
        together("use_cpu", "model.device", "true is cpu"),
        *nothing("the command line's --traceback shows where an error came from", "debug"),
        *cannot("there are no TPUs here", "downcast_bf16"),
        *cannot("leave it to taskset or numactl", "enable_cpu_affinity"),
    ],
)
