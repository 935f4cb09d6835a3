"""A script for TRL with all that its examples of games do: environments, whose methods are tools and whose state is the
reward, an adapter, objects for model and tokenizer."""

import random

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen3-0.6B"


class Counter:
    def reset(self, target: int, **kwargs) -> str:
        self.count, self.target = 0, target
        return f" Start at {random.randint(0, 0)}."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: By how much.

        Returns:
            The counter.
        """
        self.count += step
        return self.count


def reached(environments, **kwargs):
    return [1.0 - abs(env.target - env.count) / env.target for env in environments]


def main() -> None:
    rows = [{"prompt": [{"role": "user", "content": f"Count to {n}."}], "target": n} for n in range(1, 7)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        train_dataset=Dataset.from_list(rows),
        reward_funcs=reached,
        args=GRPOConfig(
            chat_template_kwargs={"enable_thinking": False},
            logging_steps=1,
            log_completions=True,
            num_completions_to_print=2,
            report_to="trackio",
            trackio_space_id="game",
            output_dir="game",
            max_completion_length=2048,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
        ),
        environment_factory=Counter,
        peft_config=LoraConfig(r=4),
    )
    trainer.train()
    trainer.save_model("game")


if __name__ == "__main__":
    main()
