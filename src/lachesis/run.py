"""The composition root: reads a configuration, builds the parts, wires them. No algorithm."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from lachesis.bridges.base import Bridge
from lachesis.bridges.in_process import InProcessBridge
from lachesis.bridges.proof import SyncProof
from lachesis.config.load import LoadedConfig, dump_config
from lachesis.config.rules import check, learning_rate
from lachesis.config.schema import LachesisConfig
from lachesis.engines.base import Engine
from lachesis.engines.embedded import EmbeddedEngine
from lachesis.errors import ConfigError, DataError
from lachesis.files import write_atomic
from lachesis.metrics.base import Sink
from lachesis.metrics.console import ConsoleSink
from lachesis.metrics.health import HealthMonitor
from lachesis.metrics.hub import MetricsHub
from lachesis.metrics.jsonl import JsonlSink, read_metrics
from lachesis.metrics.report import ReportSink, write_report
from lachesis.metrics.tape import TapeSink, TokenTexts, token_texts
from lachesis.metrics.telemetry import Telemetry
from lachesis.metrics.tensorboard import TensorBoardSink
from lachesis.metrics.wandb import WandbSink
from lachesis.pipeline.feed import SynchronousFeed
from lachesis.pipeline.scoring import assign_advantages
from lachesis.rollouts.datasets import PromptStream, load_problems, split_eval
from lachesis.rollouts.evaluate import Evaluator, ScheduledEvaluation
from lachesis.rollouts.generation import TextDecoder, text_decoder
from lachesis.rollouts.imports import load_function
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards import Rewarder, load_reward
from lachesis.rundir import RunDirectory, open_run
from lachesis.train.advantage import group_advantages
from lachesis.train.backends.single import SingleDevice
from lachesis.train.batch import Batch, pack
from lachesis.train.checkpoint import CheckpointManager, save_model
from lachesis.train.loop import Trainer
from lachesis.train.loss_options import LossOptions
from lachesis.train.model import LoadedModel, eos_token_ids, load_model, load_tokenizer
from lachesis.train.optimizer import build_optimizer
from lachesis.train.policy import Policy
from lachesis.train.resume import RunCheckpoints
from lachesis.types import EvalResult, Group, Prompt, SamplingParams, StepRecord

logger = logging.getLogger("lachesis")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended. ``evaluations`` are those on held-out problems, from before the first step on."""

    run_dir: Path
    report: Path
    steps: int
    finished: bool
    seconds: float
    evaluations: tuple[EvalResult, ...]


def train(
    loaded: LoadedConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> RunSummary:
    """Train as the configuration says, in its run directory.

    Args:
        loaded: the configuration.
        resume: go on from the last checkpoint in the run directory.
        overwrite: delete a run that is there already.
        console: where progress is shown; ``None`` shows nothing.
        stop_requested: asked after each step; True saves a checkpoint and ends the run early.

    Raises:
        LachesisError: one of its subclasses, for everything that can be wrong; what was trained until the last
            checkpoint is kept.
    """
    config = loaded.config
    findings = check(config)
    run = open_run(Path(config.run.dir) / config.run.name, resume=resume, overwrite=overwrite)
    handler = _log_to(run)
    for finding in findings:
        logger.warning("%s", finding.message)
    write_atomic(run.files["config"], dump_config(config))
    try:
        summary = _train(config, run=run, resume=resume, console=console, stop_requested=stop_requested)
    except BaseException as error:
        run.update(status="failed", error=f"{type(error).__name__}: {error}")
        logger.error("%s: %s", type(error).__name__, error)
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
    run.update(status="finished" if summary.finished else "stopped", step=summary.steps)
    return summary


def _train(
    config: LachesisConfig,
    *,
    run: RunDirectory,
    resume: bool,
    console: Console | None,
    stop_requested: Callable[[], bool],
) -> RunSummary:
    seed_everything(config.run.seed)
    if config.run.setup is not None:
        load_function(config.run.setup)(config.model.path)
    train_problems, held_out = load_data(config)
    rewarder = build_rewarder(config)
    bridge = build_bridge(config)
    policy = bridge.prepare(partial(build_policy, config))
    engine, tokenizer = bridge.engine, policy.loaded.tokenizer
    decode = text_decoder(tokenizer)
    params = sampling_params(config)
    feed = SynchronousFeed(
        source=LocalSource(
            stream=PromptStream(train_problems, seed=config.run.seed, shuffle=config.data.shuffle),
            engine=engine,
            rewarder=rewarder,
            params=params,
            num_generations=config.sampling.num_generations,
            seed=config.run.seed,
            decode=decode,
            generation_s=config.deadlines.generation_s,
        ),
        prompts_per_step=config.batch.prompts_per_step,
        advantages=partial(assign_advantages, compute=advantage_function(config)),
        pack=partial(pack_batch, config=config, share_prompts=policy.plan.packed),
        batch_deadline_s=config.deadlines.batch_s,
    )
    evaluation = ScheduledEvaluation(
        build_evaluator(config, held_out=held_out, engine=engine, rewarder=rewarder, decode=decode)
        if held_out
        else None,
        every_steps=config.evaluation.every_steps,
        last_step=config.run.steps,
    )
    checkpoints = RunCheckpoints(
        CheckpointManager(run.files["checkpoints"], keep_last=config.checkpoint.keep_last),
        policy=policy,
        feed=feed,
        every_steps=config.checkpoint.every_steps,
    )
    start = checkpoints.restore() if resume else 0
    hub = build_sinks(config, run=run, start=start, console=console, texts=token_texts(tokenizer))
    telemetry = Telemetry(
        hub=hub,
        reduce=policy.backend.reduce,
        reward_names=rewarder.names,
        device_memory=_device_memory if policy.device.type == "cuda" else None,
    )
    trainer = Trainer(
        policy=policy,
        feed=feed,
        bridge=bridge,
        evaluation=evaluation,
        checkpoints=checkpoints,
        telemetry=telemetry,
        stop_requested=stop_requested,
    )
    run.update(status="running", step=start)
    try:
        started = time.perf_counter()
        step = trainer.train(start=start, steps=config.run.steps)
        seconds = time.perf_counter() - started
        finished = step >= config.run.steps
        if finished and config.checkpoint.save_final:
            save_model(policy.model, tokenizer, run.files["final"])
    finally:
        hub.close()
        feed.close()
        bridge.close()
        rewarder.close()
    return RunSummary(
        run_dir=run.path,
        report=write_report(run.path),
        steps=step,
        finished=finished,
        seconds=seconds,
        evaluations=tuple(read_metrics(run.files["metrics"]).evaluations),
    )


def seed_everything(seed: int) -> None:
    """Seed the global generators. Sampling and data order have generators of their own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def load_data(config: LachesisConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Problems to train on, and those held out."""
    tokenizer = load_tokenizer(config.model)
    load = partial(
        load_problems,
        prompt_column=config.data.prompt_column,
        tokenizer=tokenizer,
        chat_template_kwargs=config.data.chat_template_kwargs,
        max_prompt_length=config.data.max_prompt_length,
        overlong=config.data.overlong_prompts,
    )
    problems = load(config.data.path)
    if config.data.eval_path is not None:
        return problems, load(config.data.eval_path)
    if config.data.eval_size >= len(problems):
        raise DataError(
            f"data.eval_size is {config.data.eval_size}, but {config.data.path} has {len(problems)} problems",
            remedy="lower data.eval_size, so that something remains to train on",
        )
    return split_eval(problems, config.data.eval_size, seed=config.run.seed)


def build_rewarder(config: LachesisConfig) -> Rewarder:
    """The reward functions with their weights."""
    return Rewarder(
        [load_reward(spec) for spec in config.rewards.functions],
        weights=config.rewards.weights,
        timeout_s=config.rewards.timeout_s,
        on_error=config.rewards.on_error,
    )


def build_policy(config: LachesisConfig) -> Policy:
    """Load the model and make it learn."""
    loaded = load_model(config.model, config.adapter)
    compile_layers = config.model.compile == "on" or (
        config.model.compile == "auto" and next(loaded.transformer.parameters()).is_cuda
    )
    return Policy(
        loaded,
        backend=SingleDevice(),
        optimizer_builder=partial(
            build_optimizer,
            config=config.optimizer,
            learning_rate=learning_rate(config),
            total_steps=config.run.steps,
        ),
        options=loss_options(config),
        packing=config.model.packing,
        compile_layers=compile_layers,
    )


def build_bridge(config: LachesisConfig) -> Bridge[Policy]:
    """The bridge, which builds the engine once the policy exists."""
    return InProcessBridge(
        engine_builder=partial(build_engine, config),
        proof_builder=build_proof if config.bridge.proof else None,
    )


def build_engine(config: LachesisConfig, policy: Policy) -> Engine:
    """The embedded engine around the policy's model."""
    loaded = policy.loaded
    limit = context_length(loaded)
    longest = limit - config.sampling.max_completion_length
    if longest < 1:
        raise ConfigError(
            f"sampling.max_completion_length is {config.sampling.max_completion_length}, the model's context "
            f"{limit} tokens: no room for a prompt",
            remedy="lower sampling.max_completion_length",
        )
    return EmbeddedEngine(
        loaded.transformer,
        eos_token_ids=eos_token_ids(loaded),
        pad_token_id=loaded.tokenizer.pad_token_id,
        max_batch_size=config.engine.max_batch_size,
        max_context=limit,
        decode=loaded.tokenizer.decode,
        session_id=secrets.token_hex(8),
    )


def build_proof(policy: Policy, engine: Engine) -> SyncProof:
    """Proof of sync on a fixed prompt of ordinary tokens."""
    vocab_size = policy.transformer.config.get_text_config().vocab_size
    return SyncProof(
        token_ids=[(7 * i + 5) % vocab_size for i in range(min(16, context_length(policy.loaded)))],
        trainer=policy.canary,
        engine=engine.canary,
        session_id=engine.health().session_id,
        dtype=str(policy.transformer.dtype).removeprefix("torch."),
    )


def context_length(loaded: LoadedModel) -> int:
    """Tokens that fit into the model; architectures without such a limit get a very large one."""
    text_config = loaded.transformer.config.get_text_config()
    return getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "n_positions", 1 << 30)


def build_evaluator(
    config: LachesisConfig, *, held_out: Sequence[Prompt], engine: Engine, rewarder: Rewarder, decode: TextDecoder
) -> Evaluator:
    """One completion for each held-out problem, greedy unless configured otherwise."""
    return Evaluator(
        held_out,
        engine=engine,
        rewarder=rewarder,
        decode=decode,
        params=replace(sampling_params(config), temperature=config.evaluation.temperature),
        success_reward=config.evaluation.success_reward,
        limit=config.evaluation.max_problems,
        seed=config.run.seed,
        generation_s=config.deadlines.generation_s,
    )


def build_sinks(
    config: LachesisConfig, *, run: RunDirectory, start: int, console: Console | None, texts: TokenTexts
) -> MetricsHub:
    """Everything that is told of a step, and the health rules. ``start`` > 0 keeps what is there up to it."""
    files, logging_config = run.files, config.logging
    resume_step = start if start > 0 else None
    sinks: list[Sink] = [JsonlSink(files["metrics"], resume_step=resume_step)]
    if logging_config.tape:
        sinks.append(
            TapeSink(
                files["rollouts"], resume_step=resume_step, report_groups=logging_config.report_groups, texts=texts
            )
        )
    if logging_config.tensorboard:
        sinks.append(TensorBoardSink(files["tensorboard"], resume_step=resume_step))
    if logging_config.wandb is not None:
        sinks.append(
            WandbSink(
                logging_config.wandb,
                run_dir=run.path,
                run_name=config.run.name,
                settings=config.model_dump(mode="json"),
                resume_step=resume_step,
            )
        )
    sinks += [StateSink(run), ReportSink(run.path, logging_config.report_every_steps)]
    if console is not None:
        sinks.append(
            ConsoleSink(console, config.run.steps, every_steps=logging_config.every_steps, title=config.run.name)
        )
    return MetricsHub(sinks, monitor=HealthMonitor())


class StateSink(Sink):
    """Keeps state.json up to date."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def write(self, record: StepRecord) -> None:
        self._run.update(step=record.step)


def loss_options(config: LachesisConfig) -> LossOptions:
    """The loss's options from the algorithm section."""
    algorithm = config.algorithm
    return LossOptions(
        loss_type=algorithm.loss_type,
        importance_sampling_level=algorithm.importance_sampling_level,
        epsilon=algorithm.epsilon,
        epsilon_high=algorithm.epsilon_high,
        beta=algorithm.beta,
        use_bias_correction_kl=algorithm.use_bias_correction_kl,
        max_completion_length=config.sampling.max_completion_length,
    )


def sampling_params(config: LachesisConfig) -> SamplingParams:
    """How training samples."""
    sampling = config.sampling
    return SamplingParams(
        max_tokens=sampling.max_completion_length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop=tuple(sampling.stop),
    )


def advantage_function(
    config: LachesisConfig,
) -> Callable[[Sequence[Sequence[float | None]], Sequence[int]], list[float]]:
    """From rewards [N][K] (None: not judged) and group numbers [N] to advantages [N]."""
    weights = config.rewards.weights

    def compute(rewards: Sequence[Sequence[float | None]], group: Sequence[int]) -> list[float]:
        known = [[float("nan") if value is None else value for value in row] for row in rewards]
        return group_advantages(
            torch.tensor(known, dtype=torch.float64),
            group=torch.tensor(group),
            weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
            scale_rewards=config.algorithm.scale_rewards,
            aggregation=config.algorithm.aggregation,
        ).tolist()

    return compute


def pack_batch(groups: Sequence[Group], *, config: LachesisConfig, share_prompts: bool) -> Batch:
    """Pack as the batch section says. With a KL term every sequence has a gradient, so none is left out."""
    return pack(
        groups,
        max_tokens=config.batch.max_tokens_per_microbatch,
        max_rows=config.batch.micro_batch_size,
        skip_zero_advantage=config.algorithm.skip_zero_advantage and config.algorithm.beta == 0,
        share_prompts=share_prompts,
    )


def _device_memory() -> tuple[int, int]:
    """Bytes allocated at the peak since the last call, and reserved."""
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return allocated, reserved


def _log_to(run: RunDirectory) -> logging.Handler:
    """Everything that Lachesis logs goes to logs/trainer.log too."""
    handler = logging.FileHandler(run.files["logs"] / "trainer.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    return handler
