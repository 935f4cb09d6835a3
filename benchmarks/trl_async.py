"""TRL's asynchronous trainer: its half of the comparisons, started by end_to_end.py and time_to_reward.py.

    PYTHON_OF_TRL benchmarks/trl_async.py JOB.json

The trainer has the first GPU, and the vLLM server that it generates with the second, as its users start both. An
adapter travels as files, so that both may be on one GPU; NCCL, which takes whole weights there, wants two. The job
says everything, as for trl_side.py, and the result goes to the file that it names. Its kernel of FlashAttention 3 comes
from a hub; where that is not reached, torch's own kernel for segments of variable length takes its place, the one that
Lachesis computes with.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Templates for tokenizers that have none: the texts of all messages, one after the other.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# How an answer without tool calls is read: all of it is text.
TEXT_RESPONSE = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
SERVER = "vllm.entrypoints.openai.api_server"


@contextmanager
def server(model: str, *, port: int, gpu: str, flags: Sequence[str], log: Path) -> Iterator[None]:
    """Run the trainer's vLLM server, with what its documentation asks for, until the block ends."""
    command = [
        sys.executable, "-m", SERVER, "--model", model, "--port", str(port), "--logprobs-mode", "processed_logprobs",
        "--weight-transfer-config", '{"backend": "nccl"}', *flags,
    ]  # fmt: skip
    asked = {"CUDA_VISIBLE_DEVICES": gpu, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, env={**os.environ, **asked}, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def run(
    job: Mapping[str, Any], *, python: str, port: int, flags: Sequence[str], server_gpu: str = "1"
) -> dict[str, Any]:
    """Start server and trainer at once, and return the trainer's result; the server reads the job's model."""
    directory = Path(job["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    job_file = directory / "job.json"
    job_file.write_text(json.dumps({**job, "server": f"http://localhost:{port}"}))
    log = directory / "trainer.log"
    with (
        server(job["model"], port=port, gpu=server_gpu, flags=flags, log=directory / "server.log"),
        log.open("w") as output,
    ):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
        command = [python, __file__, str(job_file)]
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    if code:
        sys.exit("\n".join(log.read_text(errors="replace").splitlines()[-40:]) + f"\n\n{command} ended with {code}")
    return json.loads(Path(job["result"]).read_text())


def use_torch_attention() -> None:
    """Let the tree of prefixes attend by torch's kernel, which takes the same segments."""
    from torch.nn.attention.varlen import varlen_attn
    from trl.experimental.async_grpo import packing  # pyright: ignore[reportMissingImports]

    class Kernel:
        @staticmethod
        def flash_attn_varlen_func(
            query: Any,
            key: Any,
            value: Any,
            *segments: Any,
            softmax_scale: float,
            window_size: tuple[int, int],
            **rest: Any,
        ) -> Any:
            assert rest == {"causal": True}, f"torch's kernel does not know {rest}"
            return varlen_attn(query, key, value, *segments, scale=softmax_scale, window_size=(window_size[0], 0))

    packing._flash_attn = Kernel


def step_log(snapshots: Sequence[int], directory: Path) -> Any:
    """A callback that keeps seconds and tokens of each step, and the weights where they are asked for."""
    from transformers import TrainerCallback

    class Log(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []
            self.first = self.began = self.started = 0.0
            self.rewards = 0  # of earlier steps
            self.trainer: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.save(0)
            self.began, self.started = time.time(), time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            now, trainer = time.perf_counter(), self.trainer
            rewards = trainer._metrics["train"]["reward"][self.rewards :]
            self.rewards += len(rewards)
            self.steps.append(
                {
                    "seconds": now - self.started,
                    "generation": trainer._rollout_dataset.wait_s,
                    "training": trainer._current_train_step_time,
                    "reward": sum(rewards) / len(rewards),
                    "learning_rate": float(trainer.lr_scheduler.get_last_lr()[0]),
                    "completions": round(trainer._step_samples),
                    "prompt_tokens": 0,
                    "completion_tokens": round(trainer._step_trained_tokens),
                    "forward_tokens": round(trainer._step_forward_tokens),
                    "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
                    "staleness": max(trainer._metrics["train"]["sample/staleness_max"], default=0.0),
                    "dropped": sum(trainer._metrics["train"]["sample/dropped_stale_total"]),
                }
            )
            sys.stderr.write(json.dumps(self.steps[-1]) + "\n")  # for a run that is ended before its last step
            self.first = self.first or time.time()
            self.save(state.global_step)
            # Sending the weights, which comes after this, belongs to the next step.
            self.started = time.perf_counter()

        def save(self, step: int) -> None:
            if step in snapshots:
                torch.save(self.trainer.model.state_dict(), directory / f"{step}.pt")

    return Log()


def arguments(job: Mapping[str, Any]) -> Any:
    """TRL's configuration of the job. What its asynchronous trainer has no argument for, it does in one way."""
    from trl.experimental.async_grpo import AsyncGRPOConfig  # pyright: ignore[reportMissingImports]

    known = {field.name for field in dataclasses.fields(AsyncGRPOConfig)}
    chosen = {
        **{name: value for name, value in job["grpo"].items() if name in known},
        "max_steps": job["steps"],
        "seed": job["seed"],
        "output_dir": job["directory"],
        "vllm_server_base_url": job["server"],
        "token_budget": 0,  # so that each step has as many completions
        "gradient_checkpointing": False,
        "bf16": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **job["more"],
    }
    return AsyncGRPOConfig(**{name: value for name, value in chosen.items() if value is not None})


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
    tokenizer.response_template = TEXT_RESPONSE
    return tokenizer


def as_messages(problem: Mapping[str, Any]) -> dict[str, Any]:
    prompt = problem["prompt"]
    return {**problem, "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}


def load_reward(spec: str) -> Any:
    """The function that ``FILE.py:FUNCTION`` names, from a module that the process of the rollouts can import."""
    file, _, function = spec.rpartition(":")
    sys.path.insert(0, str(Path(file).parent))
    return getattr(importlib.import_module(Path(file).stem), function)


def main() -> None:
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOTrainer  # pyright: ignore[reportMissingImports]

    job = json.loads(Path(sys.argv[1]).read_text())
    rates: Sequence[float] | None = job.get("learning_rates")

    class Timed(AsyncGRPOTrainer):
        """Follows a given course of the learning rate."""

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if rates is None:
                return super().create_scheduler(num_training_steps, optimizer)
            peak = self.args.learning_rate
            course = [rate / peak for rate in rates]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, course.__getitem__)
            return self.lr_scheduler

    if job["torch_attention"]:
        use_torch_attention()
    adapter = None
    if job.get("adapter") is not None:
        from peft import LoraConfig

        adapter = LoraConfig(**job["adapter"], task_type="CAUSAL_LM")
    log = step_log(job["snapshots"], Path(job["directory"]))
    trainer = Timed(
        model=job["model"],
        processing_class=load_tokenizer(job.get("tokenizer", job["model"])),
        reward_funcs=load_reward(job["reward"]),
        args=arguments(job),
        train_dataset=Dataset.from_list(list(map(as_messages, job["problems"]))),
        callbacks=[log],
        peft_config=adapter,
    )
    log.trainer = trainer
    trainer.train()
    from end_to_end import versions

    result = {"steps": log.steps, "first": log.first, "began": log.began, "versions": versions("trl", "vllm")}
    Path(job["result"]).write_text(json.dumps(result | {"threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
