"""``GRPOTrainer``: TRL's constructor and methods over a run of Lachesis."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedModel, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerCallback
from transformers.trainer_utils import TrainOutput

from lachesis.plugins.export.export import export
from lachesis.plugins.export.push import push
from lachesis.plugins.trl.arguments import GRPOConfig, RLOOConfig
from lachesis.plugins.trl.callbacks import BestModel, CallbackSink, evaluation_metrics
from lachesis.plugins.trl.model import ScriptModel
from lachesis.plugins.trl.objects import (
    ArgumentError,
    as_list,
    eval_datasets,
    lora_keys,
    quantization_keys,
    reward_list,
    rows_needed,
    stream_rows,
    write_tasks,
)
from lachesis.run.library import Run, load
from lachesis.run.pieces import evaluate_model
from lachesis.run.requests import ask

logger = logging.getLogger("lachesis")


class GRPOTrainer:
    """Trainer that trains as TRL's ``GRPOTrainer`` would, as a run of Lachesis in ``args.output_dir``.

    Models and tokenizers that are passed as objects are saved next to that directory, where the run reads them.

    Args:
        model: id on the hub, directory, or a model of transformers or peft, which has the trained weights at the end.
        reward_funcs: functions, ids or directories of reward models, or such models; one or a list.
        args: the arguments; those of ``GRPOConfig("GRPO")`` if unset.
        train_dataset, eval_dataset: a ``Dataset``, a stream of rows, rows, or a path. The first may be left out if
        environments ask the questions.
        processing_class: the tokenizer; that of ``model`` if unset.
        reward_processing_classes: the tokenizers of reward models.
        callbacks: of transformers. They are called after each step, and may stop the run or save a checkpoint.
        peft_config: a plain ``LoraConfig``.
        quantization_config: bitsandbytes' 8 bits, or 4 bits as nf4, for frozen weights under LoRA.
        tools, rollout_func, environment_factory: as in TRL. With environments the rows are written to a file next to
        the run directory.

    Raises:
        ConfigError: an argument, or a field of ``args``, cannot be honoured.
    """

    arguments: type[GRPOConfig] = GRPOConfig
    """Class of ``args``."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        quantization_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Callable[..., Any] | None = None,
    ) -> None:
        self.args = self._arguments(args)
        _refuse(optimizers=optimizers, environment_factory=environment_factory)
        if train_dataset is None:
            train_dataset = _placeholder_rows(self.args, owned=environment_factory is not None)
        place = Path(f"{str(self.args.output_dir).rstrip('/')}-given")
        self.processing_class, self.eval_dataset = processing_class, eval_dataset
        self.train_dataset = train_dataset = stream_rows(train_dataset, self.args)
        eval_dataset = _only_one(eval_dataset, repeatedly=self.args.eval_strategy != "no")
        if reward_funcs is None and environment_factory is None:
            raise ArgumentError("No reward source provided", remedy="pass one or more reward_funcs")
        self.reward_funcs, self.reward_processing_classes = as_list(reward_funcs), as_list(reward_processing_classes)
        self._model = ScriptModel(
            model, processing_class=processing_class, peft_config=peft_config, place=place / "model"
        )
        self._keys: dict[str, Any] = {
            **self.args.to_mapping(),
            **lora_keys(self._model.peft_config, self._model.path),
            **quantization_keys(quantization_config),
            "model_name_or_path": self._model.path,
        }
        if reward_funcs is not None:
            self._keys["reward_funcs"] = reward_list(reward_funcs, reward_processing_classes, place=place / "reward")
        tokenizer, adapter = self._model.tokenizer, self._model.adapter
        self._sections: dict[str, Any] = {} if tokenizer is None else {"model": {"tokenizer": tokenizer}}
        if adapter is not None:
            self._sections["adapter"] = {"path": adapter}
        if environment_factory is not None:
            tasks = write_tasks(train_dataset, eval_dataset, place=place / "tasks.jsonl")
            self._sections["source"] = _steps(environment_factory, tasks, self.args.max_tool_calling_iterations)
        else:
            self._sections |= _answers(train_dataset, eval_dataset, tools=list(tools or ()), rollout_func=rollout_func)
        counted = hasattr(train_dataset, "__len__") and not isinstance(train_dataset, str)
        self._rows = len(train_dataset) if counted else 0
        if self.args.load_best_model_at_end:
            self._sections["checkpoint"] = {"keep_last": 1_000_000}  # kept until the best one is known
        self._best = _best_model(self.args)
        self.state, self.control = TrainerState(), TrainerControl()
        chosen = [DefaultFlowCallback, *(callbacks or [])]
        self.callback_handler = CallbackHandler(chosen, model, processing_class, None, None)
        self._sink: CallbackSink | None = None
        self._run = load(self._keys, sinks=[self._make_sink], **self._sections)
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def _arguments(self, args: GRPOConfig | None) -> GRPOConfig:
        """Return the arguments of the trainer, or their defaults; refuse those of another trainer."""
        if args is None:
            return self.arguments(self.arguments.__name__.removesuffix("Config"))
        if not isinstance(args, self.arguments) or (type(self) is GRPOTrainer and isinstance(args, RLOOConfig)):
            raise ArgumentError(
                f"args: a {type(args).__name__} does not fit {type(self).__name__}",
                remedy=f"pass a {self.arguments.__name__}",
            )
        return args

    @property
    def model(self) -> PreTrainedModel | PeftModel:
        """Model as trained so far, in host memory."""
        return self._model.current()

    @property
    def accelerator(self) -> PartialState:
        """State of this process, as scripts use it: ``print``, ``is_main_process``, ``wait_for_everyone``."""
        return PartialState()

    @property
    def aux_loss_enabled(self) -> bool:
        """Return True if the load-balancing loss of a mixture of experts is logged."""
        return any("aux_loss" in line for line in self.state.log_history)

    @property
    def hub_model_id(self) -> str:
        """Repository that :meth:`push_to_hub` writes to."""
        return self.args.hub_model_id or self._run.directory.name

    @property
    def run(self) -> Run:
        """Lachesis run behind this trainer, with its metrics, rollouts and report."""
        return self._run

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback. A class is instantiated without arguments."""
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the end, or until a callback stops it. A run in ``args.output_dir`` is replaced.

        Args:
            resume_from_checkpoint: continue from the last checkpoint of that run instead.

        Raises:
            LachesisError: one of its subclasses, if the run failed. Exceptions of callbacks are raised unchanged.
        """
        self.state.max_steps = max(0, self.args.max_steps)  # with epochs it is known only after reading the data
        self.state.num_train_epochs = int(self.args.num_train_epochs)
        self.state.logging_steps = int(self.args.logging_steps)
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        resume = bool(resume_from_checkpoint)
        self._run.start(resume=resume, overwrite=not resume, progress=not self.args.disable_tqdm)
        summary = self._run.wait()
        if self._sink is not None and self._sink.error is not None:
            raise self._sink.error
        if (trained := self._trained()) is not None:
            self._model.take(trained)
        losses = [line.values["loss"] for line in self._run.log.steps if "loss" in line.values]
        metrics = {"train_runtime": summary.seconds, "train_loss": sum(losses) / len(losses) if losses else 0.0}
        self.log({**(self._sink.unlogged() if self._sink else {}), **metrics})
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(summary.steps, metrics["train_loss"], metrics)

    def evaluate(self, eval_dataset: Any = None, *, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Return reward and accuracy of the current model on ``eval_dataset``, or on the constructor's dataset.

        Args:
            eval_dataset: as in the constructor, or several by name, whose metrics are ``eval_NAME_reward`` and so on.
            metric_key_prefix: prefix of the metrics' names.

        Raises:
            ConfigError: there is no such dataset, or it cannot be changed because environments play.
        """
        if eval_dataset is None and isinstance(self.eval_dataset, Mapping):
            eval_dataset = self.eval_dataset
        if eval_dataset is None:
            metrics = self._evaluate(self._sections, metric_key_prefix)
        elif "data" not in self._sections:
            raise ArgumentError(
                "evaluate: eval_dataset cannot be changed if environments play", remedy="pass it to the trainer"
            )
        else:
            metrics = {}
            for name, rows in eval_datasets(eval_dataset).items():
                data = {**self._sections["data"], "eval_path": rows, "eval_split": None}
                prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
                metrics |= self._evaluate({**self._sections, "data": data}, prefix)
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluate(self, sections: Mapping[str, Any], prefix: str) -> dict[str, float]:
        wanted = load(self._keys, **sections)
        found = evaluation_metrics(evaluate_model(wanted.config, self._trained()))
        return {f"{prefix}_{name.removeprefix('eval_')}": value for name, value in found.items()}

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model, or adapter, with its tokenizer; with ``load_best_model_at_end`` the best one.

        Raises:
            CheckpointError: nothing has been trained, or the disk cannot be written.
        """
        target = Path(output_dir or str(self.args.output_dir))
        trained = self._trained()
        if trained is None:
            raise ArgumentError("save_model: nothing has been trained yet", remedy="call train() first")
        shutil.copytree(trained, target, dirs_exist_ok=True)

    def push_to_hub(self, commit_message: str | None = None, **card: Any) -> str:
        """Upload the final model with Lachesis's card; returns the address of the commit.

        Args:
            commit_message: the run's name if unset.
            **card: contents of TRL's own card (``dataset_name`` and so on), which are not used.

        Raises:
            ConfigError: the hub refuses, or does not answer.
        """
        repo = self.hub_model_id
        return push(self._run.directory, repo=repo, private=bool(self.args.hub_private_repo), message=commit_message)

    def log(self, logs: Mapping[str, float]) -> None:
        """Add to the history, and call the callbacks."""
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.callback_handler.on_log(self.args, self.state, self.control, dict(logs))

    def end(self) -> None:
        """Do nothing: trackers and processes, which TRL's scripts close here, have ended with :meth:`train`."""

    def is_world_process_zero(self) -> bool:
        """Return True: a script is one process."""
        return True

    def _trained(self) -> Path | None:
        """Return the directory of the trained model or adapter, the best one if requested; None before training."""
        if self._sink is None:
            return None
        directory, best = self._run.directory, self._best
        if self.args.load_best_model_at_end and best is not None and best.step not in (None, 0, self.state.global_step):
            return export(directory / "checkpoints" / f"step_{best.step:06d}")
        final = directory / "final"
        # A run that was stopped has only a checkpoint.
        return final if final.is_dir() else export(directory)

    def _make_sink(self, run_dir: Path, *, settings: Mapping[str, Any], resume_step: int | None = None) -> CallbackSink:
        if resume_step is None:
            self.state.log_history.clear()
        self.state.max_steps = int(settings["run"]["steps"])
        prompts = int(settings["batch"]["prompts_per_step"])
        self._sink = CallbackSink(
            self.callback_handler,
            args=self.args,
            state=self.state,
            control=self.control,
            best=self._best,
            epoch_of=lambda step: step * prompts / self._rows if self._rows else None,
            stop=self._run.stop,
            save=lambda: ask(run_dir, "checkpoint"),
            keep=partial(_keep_best, run_dir / "checkpoints") if self.args.load_best_model_at_end else None,
        )
        return self._sink


class RLOOTrainer(GRPOTrainer):
    """Trainer like TRL's ``RLOOTrainer``: leave-one-out baselines, ratios of sequences, the KL in the reward."""

    arguments = RLOOConfig


def _refuse(*, optimizers: Sequence[Any], environment_factory: Any) -> None:
    """Refuse arguments that TRL's trainer takes but a run cannot honour."""
    if any(one is not None for one in optimizers):
        raise ArgumentError(
            "optimizers: Lachesis makes the optimizer and its schedule",
            remedy="name them in args (optim, learning_rate, lr_scheduler_type)",
        )
    if isinstance(environment_factory, Mapping):
        names = ", ".join(map(str, cast(Mapping[Any, Any], environment_factory)))
        raise ArgumentError(
            f"environment_factory: a run plays one environment, but got {names}",
            remedy="pass one factory, whose reset() chooses by the row's columns",
        )


def _steps(factory: Callable[..., Any], tasks: tuple[str, int], most_calls: int | None) -> dict[str, Any]:
    """Return the source that plays environments on a file of tasks, the last of which are held out."""
    source = {"kind": "steps", "environment": factory, "tasks": tasks[0], "eval_tasks": tasks[1]}
    return source if most_calls is None else source | {"max_turns": most_calls + 1}


def _answers(
    train_dataset: Any, eval_dataset: Any, *, tools: list[Callable[..., Any]], rollout_func: Callable[..., Any] | None
) -> dict[str, Any]:
    """Return the sections for a dataset's questions, and for their players unless answers are plain completions."""
    held_out = {} if eval_dataset is None else {"eval_path": eval_dataset, "eval_split": None}
    played = {"tools": tools, "rollout_func": rollout_func}
    source = {name: value for name, value in played.items() if value}
    return {"data": {"path": train_dataset, **held_out}} | ({"source": source} if source else {})


def _placeholder_rows(args: GRPOConfig, *, owned: bool) -> list[dict[str, Any]]:
    """Return rows without a question, for environments whose ``reset`` asks it.

    Raises:
        ConfigError: no environment owns the data, or the number of steps is not given.
    """
    if not owned:
        raise ArgumentError("`train_dataset` is required and missing", remedy="pass a Dataset or a list of rows")
    return [{"prompt": [{"role": "user", "content": ""}]}] * rows_needed(args, "the environment owns the data")


def _only_one(eval_dataset: Any, *, repeatedly: bool) -> Any:
    """Return the dataset that a run evaluates on; None if there are several by name, which is an error ``repeatedly``.

    Raises:
        ConfigError: there are several, and the run evaluates while it trains.
    """
    found = {"": None} if eval_dataset is None else eval_datasets(eval_dataset)
    if len(found) > 1 and not repeatedly:
        return None
    if len(found) > 1:
        raise ArgumentError(
            f"eval_dataset: a run evaluates on one dataset, but got {', '.join(found)}",
            remedy="pass one, and the others to evaluate()",
        )
    return next(iter(found.values()))


def _best_model(args: GRPOConfig) -> BestModel | None:
    """Return the record of the best evaluation; by reward if the arguments name no metric or the loss."""
    metric = args.metric_for_best_model
    if metric is None:
        return None
    if metric in ("loss", "eval_loss"):
        logger.warning("metric_for_best_model: GRPO has no loss on held-out problems; eval_reward is used instead")
        args.metric_for_best_model, args.greater_is_better = "reward", True
    return BestModel(str(args.metric_for_best_model), greater_is_better=args.greater_is_better is not False)


def _keep_best(checkpoints: Path, best: int) -> None:
    """Remove all checkpoints except that of the best step and the two latest, one of which may still be written."""
    names = sorted(path.name for path in checkpoints.glob("step_*") if path.name.removeprefix("step_").isdigit())
    for name in names[:-2]:
        if int(name.removeprefix("step_")) != best:
            shutil.rmtree(checkpoints / name, ignore_errors=True)
