"""TRL's trainer over runs of Lachesis: its objects, callbacks, methods and state, on a tiny model."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig, get_peft_model
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, EarlyStoppingCallback, TrainerCallback

from lachesis.common.errors import ConfigError
from lachesis.plugins.trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from lachesis.plugins.trl.objects import lora_keys, quantization_keys
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}


def ones(completions: list[str], **columns: Any) -> list[float]:
    assert all(isinstance(text, str) for text in completions), "a text prompt has text completions in TRL"
    return [float(text.count("1")) for text in completions]


def nothing(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def arguments(place: Path, **further: Any) -> GRPOConfig:
    fields: dict[str, Any] = {"max_steps": 4, "logging_steps": 2, "learning_rate": 1e-4, "use_cpu": True, "bf16": False}
    batch = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}
    fields |= batch | further
    return GRPOConfig(str(place / "run"), **fields)


def trainer(place: Path, *, args: GRPOConfig | None = None, **further: Any) -> GRPOTrainer:
    given: dict[str, Any] = {"model": tiny_model("qwen2"), "processing_class": tiny_tokenizer(), "reward_funcs": ones}
    given |= {"train_dataset": ROWS} | further
    return GRPOTrainer(args=args or arguments(place), **given)


class Told(TrainerCallback):
    """Keeps what it is told, in order."""

    def __init__(self, *, stop_at: int = 0) -> None:
        self.events: list[tuple[str, int]] = []
        self._stop_at = stop_at

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.events.append(("begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.events.append(("step", state.global_step))
        control.should_training_stop = state.global_step == self._stop_at

    def on_log(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.events.append(("log", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.events.append(("end", state.global_step))


def test_a_script_of_rloo_trains_by_it(tmp_path: Path):
    given = {"use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 4, "max_completion_length": 6}
    args = RLOOConfig(str(tmp_path / "run"), normalize_advantages=True, reward_clip_range=(0.0, 1.0), **given)
    objects = {"model": tiny_model("qwen2"), "processing_class": tiny_tokenizer()}
    made = RLOOTrainer(args=args, reward_funcs=ones, train_dataset=ROWS, **objects)
    algorithm = made.run.config.algorithm
    assert (algorithm.baseline, algorithm.scale_rewards, algorithm.reward_clip) == (
        "leave_one_out", "advantages", (0.0, 1.0),
    )  # fmt: skip
    assert (algorithm.beta, algorithm.kl_placement, made.run.config.sampling.num_generations) == (0.05, "reward", 2)
    assert made.train().global_step == 2
    assert max(line.values["grad_norm"] for line in made.run.log.steps) > 0


@pytest.mark.parametrize(("kind", "args"), [(RLOOTrainer, GRPOConfig("r")), (GRPOTrainer, RLOOConfig("r"))])
def test_arguments_of_the_other_trainer_are_refused(kind: type[GRPOTrainer], args: GRPOConfig):
    with pytest.raises(ConfigError, match=f"does not fit {kind.__name__}"):
        kind(model="m", reward_funcs=ones, args=args, train_dataset=ROWS)


def test_a_script_trains_and_saves_with_objects(tmp_path: Path):
    told = Told()
    made = trainer(tmp_path, callbacks=[told])
    output = made.train()
    assert output.global_step == 4 and output.metrics["train_runtime"] > 0
    steps = [("step", 1), ("step", 2), ("log", 2), ("step", 3), ("step", 4), ("log", 4)]
    assert told.events == [("begin", 0), *steps, ("log", 4), ("end", 4)]
    assert [line["step"] for line in made.state.log_history] == [2, 4, 4]
    assert made.state.log_history[-1]["train_loss"] == output.training_loss
    assert {"reward", "loss", "frac_reward_zero_std", "completions/mean_length"} <= made.state.log_history[0].keys()
    assert made.state.log_history[-2]["epoch"] == pytest.approx(4 / len(ROWS))
    made.save_model(str(tmp_path / "saved"))
    model, started = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "saved", made_of(tmp_path)))
    assert not model.lm_head.weight.equal(started.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("1")["input_ids"] == tiny_tokenizer()("1")["input_ids"]


def made_of(place: Path) -> Path:
    """Return where the model object was saved."""
    return place / "run-given" / "model"


def test_a_callback_stops_the_run_after_its_step(tmp_path: Path):
    told = Told(stop_at=2)
    made = trainer(tmp_path, callbacks=[told])
    assert made.train().global_step == 2
    assert ("step", 3) not in told.events
    made.save_model()
    assert (tmp_path / "run" / "model.safetensors").is_file(), "the stopped run's checkpoint, as a model"


def test_what_a_callback_raises_ends_the_run(tmp_path: Path):
    class Broken(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            raise ZeroDivisionError(f"at step {state.global_step}")

    made = trainer(tmp_path, callbacks=[Broken])
    with pytest.raises(ZeroDivisionError, match="at step 2"):
        made.train()
    assert made.run.status.step == 2


def test_early_stopping_and_the_best_model(tmp_path: Path):
    args = arguments(tmp_path, max_steps=12, metric_for_best_model="reward", save_steps=2, **EVALUATED)
    patience = EarlyStoppingCallback(early_stopping_patience=2)
    made = trainer(tmp_path, args=args, eval_dataset=ROWS[:4], reward_funcs=nothing, callbacks=[patience])
    assert made.train().global_step == 6, "the evaluation of step 2 is the best, and two more bring nothing"
    assert (made.state.best_global_step, made.state.best_metric) == (2, 0.0)
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()}
    assert "step_000002" in kept
    made.save_model(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "lachesis.json").read_text()) == {"step": 2}
    evaluated = [line for line in made.state.log_history if "eval_reward" in line]
    assert [line["step"] for line in evaluated] == [2, 4, 6]


def test_evaluate_is_of_the_model_as_it_is(tmp_path: Path):
    made = trainer(tmp_path, eval_dataset=ROWS[:4], peft_config=LoraConfig(r=4))
    before = made.evaluate()
    made.train()
    after, other = made.evaluate(), made.evaluate(ROWS[:2])
    assert before["eval_problems"] == after["eval_problems"] == 4 and other["eval_problems"] == 2
    last = made.run.log.evaluations[-1]
    assert after["eval_reward"] == pytest.approx(last.mean_reward)
    assert (tmp_path / "run" / "final" / "adapter_config.json").is_file()
    with pytest.raises(ConfigError, match="no held-out problems"):
        trainer(tmp_path / "without").evaluate()


class Counter:
    """An environment of TRL's kind."""

    def reset(self, **columns: Any) -> str | None:
        self.count = int(columns["start"])
        return None

    def add(self, number: int) -> str:
        """Add to the count.

        Args:
            number: how many.
        """
        self.count += number
        return str(self.count)


def test_environments_of_a_factory_are_played_and_rewarded(tmp_path: Path):
    def counts(environments: list[Counter], **columns: Any) -> list[float]:
        return [float(environment.count) for environment in environments]

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}="
    rows = [{"prompt": [{"role": "user", "content": "1"}], "start": 7}] * 4
    made = trainer(
        tmp_path,
        args=arguments(tmp_path, max_steps=1),
        processing_class=tokenizer,
        train_dataset=rows,
        reward_funcs=counts,
        environment_factory=Counter,
    )
    made.train()
    assert made.state.log_history[-1]["reward"] == 7.0


class Asking(Counter):
    """Asks its own question, and says what an answer is worth."""

    def reset(self, **columns: Any) -> str:
        self.count = 3
        return "Count to four."

    def get_reward(self) -> float:
        return float(self.count)


def test_an_environment_may_own_data_and_reward(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}="
    given = {"processing_class": tokenizer, "train_dataset": None, "reward_funcs": None, "environment_factory": Asking}
    with pytest.raises(ConfigError, match="set max_steps"):
        trainer(tmp_path, args=arguments(tmp_path, max_steps=-1), **given)
    made = trainer(tmp_path, args=arguments(tmp_path, max_steps=1), **given)
    made.train()
    assert made.state.log_history[-1]["reward"] == 3.0


def test_metrics_of_a_reward_have_their_own_names(tmp_path: Path):
    def judge(completions: list[str], log_metric: Any = None, **columns: Any) -> list[float]:
        log_metric("custom_accuracy", 0.75)
        return [1.0] * len(completions)

    made = trainer(tmp_path, args=arguments(tmp_path, max_steps=3), reward_funcs=judge)
    made.train()
    assert [line.get("custom_accuracy") for line in made.state.log_history] == [0.75, 0.75]
    assert [line["step"] for line in made.state.log_history] == [2, 3], "the last line has what was not logged before"


def test_rollout_functions_are_called(tmp_path: Path):
    calls: list[int] = []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        calls.append(len(prompts))
        ids = [[5, 6]] * len(prompts)
        return {"prompt_ids": [[4]] * len(prompts), "completion_ids": ids, "logprobs": [[-1.0, -1.0]] * len(prompts)}

    trainer(tmp_path, args=arguments(tmp_path, max_steps=1), rollout_func=rollout).train()
    assert calls


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train_dataset": None}, "`train_dataset` is required"),
        ({"reward_funcs": None}, "No reward source provided"),
        ({"environment_factory": {"a": Counter, "b": Counter}}, "plays one environment, but got a, b"),
        ({"optimizers": (object(), None)}, "optimizers: Lachesis makes the optimizer"),
        ({"peft_config": LoraConfig(use_dora=True)}, "peft_config: .* without use_dora"),
        ({"peft_config": {"r": 4}}, "peft_config: dict is not a LoraConfig"),
        ({"model": 3}, "model: int is not a transformers model"),
        ({"reward_processing_classes": [None, None]}, "their number .2. must match that of the reward functions .1."),
    ],
)
def test_arguments_that_cannot_be_honoured_are_named(tmp_path: Path, given: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, **given)
    assert re.search(said, str(caught.value))
    assert isinstance(caught.value, ValueError), "scripts that catch TRL's errors catch it"


def test_keys_that_exclude_each_other_are_refused_when_the_trainer_is_built(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"optimizer\.betas .TRL.s adam_beta1. must be below 1"):
        trainer(tmp_path, args=arguments(tmp_path, adam_beta1=1.0))


def weights_of(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_object_that_was_passed_has_the_trained_weights(tmp_path: Path):
    model = tiny_model("qwen2")
    before = weights_of(model)
    made = trainer(tmp_path, model=model)
    made.train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").state_dict()
    assert made.model is model
    assert all(tensor.equal(saved[name]) for name, tensor in weights_of(model).items())
    assert not model.lm_head.weight.equal(before["lm_head.weight"])


def test_an_adapter_that_the_model_has_is_trained_further(tmp_path: Path):
    model = get_peft_model(tiny_model("qwen2"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.01)
    before = weights_of(model)
    made = trainer(tmp_path, model=model, args=arguments(tmp_path, learning_rate=1e-2))
    made.train()
    after = weights_of(made.model)
    changed = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert changed == {name for name in before if "lora_" in name}
    given, trained = (load_peft_weights(str(tmp_path / place)) for place in ("run-given/adapter", "run/final"))
    assert given.keys() == trained.keys(), "the run went on with this adapter"


def test_a_second_adapter_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="pass the base model with peft_config"):
        trainer(tmp_path, model=get_peft_model(tiny_model("qwen2"), LoraConfig(r=4)), peft_config=LoraConfig(r=4))


def test_streams_and_named_datasets(tmp_path: Path):
    """A stream has no length, so the number of steps says how many of its rows are read."""
    stream = IterableDataset.from_generator(lambda: ({"prompt": f"{number}="} for number in count()))
    with pytest.raises(ConfigError, match="set max_steps"):
        trainer(tmp_path, args=arguments(tmp_path, max_steps=-1), train_dataset=stream)
    several = {"easy": ROWS[:2], "hard": ROWS[2:6]}
    with pytest.raises(ConfigError, match="but got easy, hard"):
        trainer(tmp_path, args=arguments(tmp_path, eval_strategy="steps"), eval_dataset=several)
    made = trainer(tmp_path, train_dataset=stream, eval_dataset=several)
    assert [row["prompt"] for row in made.train_dataset] == [f"{number}=" for number in range(16)]
    found = made.evaluate()
    assert (found["eval_easy_problems"], found["eval_hard_problems"]) == (2, 4)


def test_lora_without_targets_adapts_what_peft_would(tmp_path: Path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    keys = lora_keys(LoraConfig(r=4, lora_alpha=8), str(tmp_path))
    assert keys == {
        "use_peft": True,
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
    }


def test_bitsandbytes_configurations_have_keys():
    assert quantization_keys(None) == {}
    assert quantization_keys(BitsAndBytesConfig(load_in_8bit=True)) == {"load_in_8bit": True}
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    nested = BitsAndBytesConfig(**four, bnb_4bit_use_double_quant=True)
    assert quantization_keys(BitsAndBytesConfig(**four)) == four
    assert quantization_keys(nested) == four | {"use_bnb_nested_quant": True}
    with pytest.raises(ConfigError, match="dict is not a BitsAndBytesConfig"):
        quantization_keys({"load_in_4bit": True})


def test_what_trls_scripts_pass_to_the_model_is_translated(tmp_path: Path):
    """TRL's scripts copy ModelConfig's fields into model_init_kwargs, the dtype as torch's own."""
    options = {"revision": "main", "attn_implementation": None, "dtype": torch.bfloat16, "trust_remote_code": False}
    made = trainer(tmp_path, args=arguments(tmp_path, model_init_kwargs=options))
    model = made.run.config.model
    assert (model.revision, model.dtype, model.trust_remote_code) == ("main", "bfloat16", False)
    assert made.accelerator.is_main_process


def test_only_what_the_script_sets_is_translated(tmp_path: Path):
    args = GRPOConfig(str(tmp_path), beta=0.04, load_best_model_at_end=False)
    args.epsilon = 0.3
    mapping = args.to_mapping()
    assert mapping["beta"] == 0.04 and mapping["epsilon"] == 0.3 and mapping["bf16"] is True
    assert not {"num_iterations", "generation_batch_size", "load_best_model_at_end", "seed"} & mapping.keys()


def test_a_field_that_cannot_be_honoured_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="optim_target_modules"):
        trainer(tmp_path, args=arguments(tmp_path, optim_target_modules="all-linear"))


def test_names_of_earlier_versions_are_taken(tmp_path: Path):
    """transformers 5 has no warmup_ratio any more, and most scripts that people share set it."""
    args = arguments(tmp_path, warmup_ratio=0.25, overwrite_output_dir=True, logging_dir="logs", save_safetensors=True)
    assert trainer(tmp_path, args=args).run.config.optimizer.warmup_ratio == 0.25
    assert trainer(tmp_path).run.config.optimizer.warmup_ratio == 0


def test_what_is_trls_own_needs_trl(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match="TrlParser belongs to TRL, which is not installed -> pip install trl"):
        from lachesis.trl import TrlParser  # pyright: ignore  # noqa: F401


def test_scripts_import_it_by_its_public_name():
    assert import_module("lachesis.trl").GRPOTrainer is GRPOTrainer
