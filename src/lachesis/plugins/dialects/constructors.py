"""Constructor arguments of TRL, peft and Axolotl that are not keys of their files, for ``lachesis explain``."""

from __future__ import annotations

from lachesis.plugins.dialects.table import Dialect, Entry, nothing, refused, together

_ASK = "its arguments are keys of `lachesis.train({...})`; ask for one, as `lachesis explain 'GRPOConfig(beta)'`"

CONSTRUCTORS = Dialect(
    "the TRL library",
    [
        *nothing(_ASK, "GRPOConfig", "GRPOTrainer", "AxolotlGRPOConfig", "AxolotlGRPOTrainer", "LoraConfig"),
        together("train_dataset", "data.path", "from Python: `lachesis.train(..., data=rows)`"),
        together("eval_dataset", "data.eval_path", 'from Python: `data={"path": rows, "eval_path": held_out}`'),
        together("processing_class", "model.tokenizer", "a directory or an id of the hub, if it is not the model's"),
        together("peft_config", "adapter.kind", "lora; LoraConfig's arguments are keys of adapter"),
        Entry("r", "adapter.r"),
        Entry("target_modules", "adapter.targets"),
        together("environment_factory", "source.environment", "with source.kind: steps; the tasks are source.tasks"),
        *nothing("a reward model is loaded with its own tokenizer", "reward_processing_classes"),
        *nothing("log_metric in a reward function adds metrics to those of each step", "compute_metrics"),
        *refused("set optimizer.function and optimizer.schedule_function", "optimizers"),
    ],
)
