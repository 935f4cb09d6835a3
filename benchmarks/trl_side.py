"""TRL's half of the comparison: runs inside TRL's own environment, started by quickstart_vs_trl.py.

    PYTHON_OF_TRL benchmarks/trl_side.py JOB.json

The job says everything: the model, the prompts in their order, the sampling, the loss, the learning rate of every
step. The result, one record a step, goes to the file that the job names. Weights are saved at the steps where they
are to be evaluated, which is left to the other half, so that one evaluator judges both systems.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Reward = Callable[..., list[float]]


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that counts its seconds and tokens, and follows a given course of the learning rate."""

    learning_rates: Sequence[float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.counts: Counter[str] = Counter()
        super().__init__(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        peak = self.args.learning_rate
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: self.learning_rates[step] / peak
        )
        return self.lr_scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._measure("training_step"):
            return super().training_step(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        # Called within training_step; what remains of that is forward and backward.
        with self._measure("prepare_inputs"):
            return super()._prepare_inputs(generation_batch)

    def _generate(self, prompts: list) -> Any:
        with self._measure("generation"):
            output = super()._generate(prompts)
        prompt_ids, completion_ids = output[0], output[1]
        self.counts["completions"] += len(completion_ids)
        self.counts["prompt_tokens"] += sum(map(len, prompt_ids))
        self.counts["completion_tokens"] += sum(map(len, completion_ids))
        return output

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.counts["forward_tokens"] += inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        return super().compute_loss(model, inputs, *args, **kwargs)

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.counts[name] += time.perf_counter() - started  # type: ignore[assignment]


class StepLog(TrainerCallback):
    """A record a step, and the weights where they are asked for; saving them is in no step's time."""

    def __init__(self, *, snapshots: Sequence[int], directory: Path) -> None:
        self.steps: list[dict[str, float]] = []
        self._snapshots = frozenset(snapshots)
        self._directory = directory
        self._started = 0.0
        self._rate = 0.0
        self.began = 0.0
        self.trainer: TimedTrainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save(0)
        self.began = time.time()
        self._started = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rate = kwargs["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        counts = self.trainer.counts
        self.steps.append(
            {
                "seconds": seconds,
                "generation": counts["generation"],
                "training": counts["training_step"] - counts["prepare_inputs"],
                "reward": self.trainer._metrics["train"]["reward"][-1],
                "learning_rate": self._rate,
                **{name: counts[name] for name in _TOKENS},
            }
        )
        counts.clear()
        self._save(state.global_step)
        self._started = time.perf_counter()

    def _save(self, step: int) -> None:
        if step in self._snapshots:
            torch.save(self.trainer.model.state_dict(), self._directory / f"{step}.pt")


_TOKENS = ("completions", "prompt_tokens", "completion_tokens", "forward_tokens")


def on_texts(reward: Reward) -> Reward:
    """The quickstart's reward takes messages; TRL gives plain texts where prompts are texts."""

    def wrapped(completions: list[str], **columns: Any) -> list[float]:
        return reward([[{"role": "assistant", "content": text}] for text in completions], **columns)

    return wrapped


def load_reward(spec: str) -> Reward:
    """The function that ``FILE.py:FUNCTION`` names."""
    file, _, function = spec.rpartition(":")
    module_spec = importlib.util.spec_from_file_location("benchmark_rewards", file)
    if module_spec is None or module_spec.loader is None:
        raise SystemExit(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, function)


def arguments(job: dict[str, Any]) -> GRPOConfig:
    """TRL's configuration of the job, with everything off that costs time and does not train."""
    chosen = {
        **job["grpo"],
        "max_steps": job["steps"],
        "seed": job["seed"],
        "output_dir": job["directory"],
        "shuffle_dataset": False,  # the job's prompts are in the order of the other system
        "num_iterations": 1,
        "use_cpu": True,
        "bf16": False,  # both systems train in float32
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | job["more"]
    return GRPOConfig(**{name: value for name, value in chosen.items() if value is not None})


def float32_model(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    directory = Path(job["directory"])
    reward = on_texts(load_reward(job["reward"]))
    reward.__name__ = "reward"
    log = StepLog(snapshots=job["snapshots"], directory=directory)
    trainer = TimedTrainer(
        # Where TRL chooses its precision it is given the path, and else the weights in float32.
        model=job["model"] if job["more"].get("bf16", False) is None else float32_model(job["model"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        reward_funcs=reward,
        args=arguments(job),
        train_dataset=Dataset.from_list(job["problems"]),
        callbacks=[log],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.learning_rates = job["learning_rates"]
    log.trainer = trainer
    trainer.train()
    packages = ("torch", "transformers", "trl")
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    result = {"steps": log.steps, "began": log.began, "versions": versions, "threads": torch.get_num_threads()}
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
