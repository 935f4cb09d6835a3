"""A script for TRL with all that its examples of agents do: a command line, tools, rewards that read their turns."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config


def used(completions, **kwargs):
    """Reward the use of the tool."""
    return [float(any(turn.get("tool_calls") for turn in completion)) for completion in completions]


def ended(completions, answer, log_metric=None, **kwargs):
    """Reward a last turn that is the answer."""
    rewards = [float(turns[-1]["content"].strip() == right) for turns, right in zip(completions, answer, strict=False)]
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their sum.
    """
    return a + b


def asked(example):
    return {
        "prompt": [{"role": "user", "content": f"Use the tool. {example['question']}"}],
        "answer": example["answer"].split("####")[-1].strip(),
    }


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    dataset = load_dataset(script_args.dataset_name, script_args.dataset_config, split=script_args.dataset_train_split)
    dataset = dataset.map(asked, remove_columns=dataset.column_names)
    training_args.chat_template_kwargs = {"enable_thinking": False}
    training_args.use_transformers_continuous_batching = True
    training_args.transformers_continuous_batching_config = {"use_cuda_graph": False}
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        train_dataset=dataset,
        eval_dataset=None,
        tools=[add],
        reward_funcs=[used, ended],
        args=training_args,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
