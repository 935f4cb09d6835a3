"""The composition root: opens the run directory, connects the parts and runs the loop. No algorithms."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from lachesis.common.errors import CheckpointError, EngineError, EngineLost
from lachesis.common.files import write_atomic
from lachesis.common.run_files import run_paths
from lachesis.common.terminal import SafeConsole, SafeFormatter
from lachesis.common.types import EvalResult, Finding, Group, Prompt
from lachesis.config.load import LoadedConfig, dump_config, log_findings
from lachesis.config.rules import check
from lachesis.config.schema import LachesisConfig
from lachesis.config.schema.mesh import derive_mesh
from lachesis.config.steps import total_steps, with_steps
from lachesis.engines.fleet import EngineRow
from lachesis.metrics.hub import DISK_FULL, HubTelemetry
from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.pipeline.feed import Feed
from lachesis.plugins import load
from lachesis.process.garbage import freeze, thaw
from lachesis.rollouts.failures import FailureFile
from lachesis.rollouts.rewards.rewarder import Rewarder
from lachesis.run.context import ALONE, Companions, EngineSide, RunContext, RunPlace
from lachesis.run.directory import (
    LogFile,
    RunDirectory,
    cannot_write,
    claim_run,
    engine_log,
    live_file,
    note_step,
    reason_of,
)
from lachesis.run.engine import build_engine_side, unclaimed_on_error
from lachesis.run.feeds import Rollouts, build_rollouts, build_teach, with_start
from lachesis.run.launch import seed_everything, set_up
from lachesis.run.parts import (
    build_checkpoints,
    build_evaluation,
    build_policy,
    check_custom_parts,
    compiles,
    with_activations,
)
from lachesis.run.pulse import Pulse, pulses_felt
from lachesis.run.questions import questions_of, sample_prompts
from lachesis.run.requests import RequestedPause, either, is_asked, take
from lachesis.run.sinks import build_sinks, keep_evaluation
from lachesis.run.sources import load_data, rewarder_of, template_findings
from lachesis.run.warm_up import EarlyPolicy
from lachesis.train.batch import Batch
from lachesis.train.best import BestModel
from lachesis.train.checkpoint import CheckpointManager
from lachesis.train.loop import Evaluation, PausePoint, Trainer
from lachesis.train.policy import Policy

logger = logging.getLogger("lachesis")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The result of a run. ``evaluations`` are those on held-out problems, starting before the first step.

    ``pushed`` is the hub commit with the model, if the configuration asks for an upload.
    """

    run_dir: Path
    report: Path
    steps: int
    finished: bool
    seconds: float
    evaluations: tuple[EvalResult, ...]
    pushed: str | None = None


def train(
    loaded: LoadedConfig,
    context: RunContext = ALONE,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> RunSummary:
    """Train as configured, in the run directory.

    If an engine dies that the run started and that shares its weights, the run resumes by itself from its last
    checkpoint, up to ``services.restarts`` times.

    Args:
        loaded: the configuration.
        context: the context of the run. ``launched`` is its engine, if :func:`lachesis.run.start.start_run` has called
            ``run.setup`` and started it.
        resume: continue from the last checkpoint in the run directory. Ranks restarted by torchrun always do.
        overwrite: replace an existing run in the directory, once all parts of the new one are built.

    Raises:
        LachesisError: a subclass, for any failure; training up to the last checkpoint is kept.
    """
    findings = [*loaded.findings, *check(loaded.config, located=loaded.located, name=loaded.name)]
    log_findings(findings)
    directory = loaded.config.run.directory
    most = loaded.config.services.restarts if context.world is None else 0  # torchrun restarts ranks
    hub = loaded.config.checkpoint.hub
    if hub is not None:
        from lachesis.plugins.export.push import push_final, warn_of_missing_login

        warn_of_missing_login(hub)
    for restart in range(1, most + 2):
        try:
            summary = _train_once(
                loaded.config,
                context if restart == 1 else replace(context, launched=None),
                findings=findings,
                resume=resume,
                overwrite=overwrite,
            )
        except EngineLost as lost:
            if restart > most:
                raise
            logger.warning("%s", lost.message)
            resume = _can_resume(directory, f"the run resumes %s, with a new engine ({restart} of {most})")
            overwrite = not resume
        else:
            if hub is None or not summary.finished:
                return summary
            # The run itself succeeded, even if its upload fails.
            return replace(summary, pushed=push_final(summary.run_dir, hub))
        finally:
            thaw()
        gc.collect()  # free device memory of the old policy
    raise AssertionError("the last attempt returns or raises")


def _train_once(
    config: LachesisConfig, context: RunContext, *, findings: Sequence[Finding], resume: bool, overwrite: bool
) -> RunSummary:
    """Make one attempt to train. Raise EngineLost if another attempt can resume from a checkpoint."""
    directory, world, companions = config.run.directory, context.world, context.companions
    if world is not None:
        from lachesis.run.ranks import began_before, leading

        if began_before(world, directory, limit_s=config.deadlines.ranks_s):
            words = f"torchrun has restarted all ranks (restart {world.restarts}): the run resumes %s"
            resume = _can_resume(directory, words)
            overwrite = not resume
        meeting = leading(world, config)
    else:
        derive_mesh(config.distributed, ranks=1)
        meeting = nullcontext()
    run = claim_run(directory, resume=resume, overwrite=overwrite)
    stop_requested = either(context.stop_requested, partial(is_asked, run.path, "stop"))
    seed_everything(config.run.seed)
    if context.launched is None:
        set_up(config, console=context.console)
    check_custom_parts(config)
    with ExitStack() as closing:
        leadership = closing.enter_context(meeting)
        context = replace(context, stop_requested=stop_requested, leadership=leadership)
        # Input errors are raised here, before the run directory is touched.
        config, parts = build_parts(config, context, run=run, closing=closing)
        with begin_run(run, resume=resume, engines=parts.side.rows) as log:
            log_findings(parts.findings)
            for finding in (*findings, *parts.findings):
                log.print(f"{finding.level}: {finding.message}", markup=False)
            compiled = "compiled" if compiles(config, device=parts.policy.device) else "not compiled"
            how = f"{parts.policy.plan.told}; its layers are {compiled}"
            log.print(f"model: {how}", markup=False)
            if leadership is not None:
                leadership.job.note_begun(run.path)
            run.update(owner=parts.place.owner, model=how)
            parts.side.keep_log(run.files["logs"] / "engine.log")
            trainer, start = build_trainer(
                config,
                run=run,
                parts=parts,
                resume=resume,
                consoles=[context.console, log],
                stop_requested=stop_requested,
                pause=RequestedPause(run, watch=context.raise_if_stopped),
            )
            closing.callback(trainer.telemetry.close)
            if companions is not None:
                closing.callback(companions.stop)
                companions.start(run.path)
            pulses, last_transfer_s = partial(_pulses, config, parts.side, companions), partial(_last_transfer_s, parts)
            closing.enter_context(pulses_felt(pulses, last_transfer_s=last_transfer_s))
            freeze()
            with engine_losses(parts.side):
                return run_to_end(run, config, trainer=trainer, start=start)


def _pulses(config: LachesisConfig, side: EngineSide, companions: Companions | None) -> list[Pulse]:
    found = [*side.pulses(), *(() if companions is None else companions.pulses())]
    if config.source.kind != "atropos":
        return found
    return [*found, *load("pulses", "atropos")(config.source.url)]


def _last_transfer_s(parts: Parts) -> float | None:
    report = parts.side.bridge.last_report
    return None if report is None else report.seconds + report.proof_seconds


@contextmanager
def engine_losses(side: EngineSide) -> Iterator[None]:
    """Raise EngineLost if an engine dies within the block and the weights are lost with it."""
    try:
        yield
    except EngineLost:
        raise
    except EngineError as error:
        if side.weights is None or side.owned is None or not side.owned.died():
            raise
        raise EngineLost(error.message, remedy=error.remedy) from error


def _can_resume(directory: Path, words: str) -> bool:
    """Return True if there is a checkpoint to resume from, and log where the run resumes, in the place of ``%s``.

    Raise CheckpointError if all are damaged.
    """
    found = CheckpointManager(run_paths(directory)["checkpoints"], keep_last=1).newest() is not None
    logger.warning(words, "from its last checkpoint" if found else "from the start, as it had no checkpoint yet")
    return found


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run that are built before its directory is touched."""

    place: RunPlace
    side: EngineSide
    policy: Policy
    feed: Feed[Batch]
    evaluation: Evaluation
    reward_names: Sequence[str]
    findings: Sequence[Finding] = ()


def build_trainer(
    config: LachesisConfig,
    *,
    run: RunDirectory,
    parts: Parts,
    resume: bool,
    consoles: Sequence[Console | None],
    stop_requested: Callable[[], bool],
    pause: RequestedPause,
) -> tuple[Trainer, int]:
    """Build the training loop from the parts of a run, and return it with its first step."""
    policy = parts.policy
    checkpoints = build_checkpoints(config, run_dir=run.path, policy=policy, feed=parts.feed)
    start = checkpoints.restore() if resume else 0
    write_atomic(run.files["config"], dump_config(config))
    hub = build_sinks(
        config,
        run=run,
        start=start,
        consoles=consoles,
        tokenizer=policy.loaded.tokenizer,
        reward_names=parts.reward_names,
    )
    telemetry = HubTelemetry(
        hub=hub, reward_names=parts.reward_names, device_memory=_device_memory if policy.device.type == "cuda" else None
    )
    trainer = Trainer(
        policy=policy,
        feed=parts.feed,
        bridge=parts.side.bridge,
        evaluation=parts.evaluation,
        checkpoints=checkpoints,
        telemetry=telemetry,
        stop_requested=stop_requested,
        pause=_answering(config, pause, run=run, parts=parts),
        best=_best_model(config, run=run, policy=policy, start=start),
    )
    return trainer, start


def _answering(config: LachesisConfig, pause: RequestedPause, *, run: RunDirectory, parts: Parts) -> PausePoint:
    """Return a pause point that also answers questions to the run's model."""
    questions = questions_of(run.path)
    sample = partial(
        sample_prompts,
        engine=parts.side.bridge.engine,
        tokenizer=parts.policy.loaded.tokenizer,
        template_kwargs=config.data.chat_template_kwargs,
    )

    def between_steps(step: int, meanwhile: Callable[[], None]) -> None:
        questions.answer(sample)
        pause(step, meanwhile)

    return between_steps


def _best_model(config: LachesisConfig, *, run: RunDirectory, policy: Policy, start: int) -> BestModel | None:
    """Return the keeper of the best model, which may also stop the run early; None if neither is configured."""
    if not config.checkpoint.keep_best and config.evaluation.patience is None:
        return None

    def save(step: int) -> None:
        policy.save(run.files["best"])
        note_step(run.files["best"], step)

    best = BestModel(save if config.checkpoint.keep_best else None, config.evaluation.patience)
    if start:
        best.recall(one for one in read_metrics(run.files["metrics"]).evaluations if one.step <= start)
    return best


@dataclass(frozen=True, slots=True)
class RunInput:
    """The prompts of a run, and the scorer of their completions: a rewarder, or the mixture of several sources."""

    problems: Sequence[Prompt]
    held_out: Sequence[Prompt]
    mixture: Any
    rewarder: Rewarder | None

    def findings(self, config: LachesisConfig, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
        """Return the findings about the prompts."""
        if self.mixture is not None:
            return self.mixture.findings(tokenizer)
        return template_findings(config, self.problems, tokenizer)


def build_parts(
    config: LachesisConfig, context: RunContext, *, run: RunDirectory, closing: ExitStack
) -> tuple[LachesisConfig, Parts]:
    """Load the data, start the engine and build the policy. ``closing`` gets everything that must be closed.

    Returns:
        The configuration with a number of steps, and the parts.

    Raises:
        LachesisError: a subclass, for any invalid input.
    """
    config, data = read_input(config, context, closing=closing)
    place = run_place(run)
    with unclaimed_on_error(config, owner=place.owner, claimed_before="owner" in run.state):
        side, policy = build_model(config, context, place=place, problems=data.problems, closing=closing)
        rollouts = _rollouts(config, context, data, place=place, side=side, policy=policy, closing=closing)
        feed = with_start(rollouts.feed, config, problems=data.problems, policy=policy)
        closing.callback(feed.close)
        evaluation = build_evaluation(
            config,
            held_out=data.held_out,
            policy=policy,
            engine=side.bridge.engine,
            rewarder=data.rewarder,
            keep=_sample_keeper(config, place),
            evaluator=rollouts.evaluator,
        )
        closing.callback(evaluation.close)
        findings = data.findings(config, policy.tokenizer)
        return config, Parts(place, side, policy, feed, evaluation, rollouts.reward_names, findings)


def read_input(config: LachesisConfig, context: RunContext, *, closing: ExitStack) -> tuple[LachesisConfig, RunInput]:
    """Load the data and the rewards, and set the configuration keys that depend on them and on the ranks."""
    ranks = 1 if context.leadership is None else context.leadership.world.size
    ending = {"closing": closing, "stop_requested": context.stop_requested}
    mixture = load("sources", "mixture")(config, **ending) if config.sources else None
    problems, held_out = load_data(config) if mixture is None else (mixture.problems, [])
    if config.model.sees_images or any(problem.images for problem in (*problems, *held_out)):
        config = load("images", "settle")(config, [*problems, *held_out], ranks=ranks)
    config = with_steps(config, problems=len(problems))
    config = with_activations(config, devices=ranks)
    rewarder = None
    if mixture is None:
        rewarder = rewarder_of(config, problems=problems, held_out=held_out, **ending)
    return config, RunInput(problems, held_out, mixture, rewarder)


def build_model(
    config: LachesisConfig, context: RunContext, *, place: RunPlace, problems: Sequence[Prompt], closing: ExitStack
) -> tuple[EngineSide, Policy]:
    """Start the engine and build the policy, concurrently unless they share weights."""
    leadership = context.leadership
    early = EarlyPolicy(
        config, build_policy if leadership is None else leadership.build_policy, alone=leadership is None
    )
    side = build_engine_side(
        config,
        place=place,
        sharded=leadership is not None and config.distributed.strategy == "shard",
        context=context,
        meanwhile=early.begin,
        pack_buckets=None if leadership is None else leadership.pack_buckets(config),
        canary_prompt=next((problem.token_ids for problem in problems if problem.token_ids), ()),
    )
    closing.callback(side.close)
    return side, side.bridge.prepare(partial(early.finish, weights=side.weights))


def _rollouts(
    config: LachesisConfig,
    context: RunContext,
    data: RunInput,
    *,
    place: RunPlace,
    side: EngineSide,
    policy: Policy,
    closing: ExitStack,
) -> Rollouts:
    """Build the feed of the mixture, or of the single configured source."""
    teach = build_teach(config, tokenizer=policy.tokenizer, closing=closing)
    if data.mixture is not None:
        keep = _sample_keeper(config, place)
        return data.mixture.build(engine=side.bridge.engine, policy=policy, teach=teach, keep=keep)
    return build_rollouts(
        config,
        problems=data.problems,
        policy=policy,
        side=side,
        rewarder=data.rewarder,
        teach=teach,
        place=place,
        context=context,
    )


def _sample_keeper(config: LachesisConfig, place: RunPlace) -> Callable[[int, Sequence[Group]], None] | None:
    """Return the function that writes the groups of evaluations into the run directory; None if not configured."""
    return partial(keep_evaluation, place.directory) if config.logging.tape else None


def run_place(run: RunDirectory) -> RunPlace:
    """Return the place of the run and its engine. A resumed run keeps the name under which it claimed engines."""
    directory = Path(os.path.abspath(run.path))
    return RunPlace(
        directory=directory,
        engine_log=engine_log(directory),
        owner=run.state.get("owner") or f"{directory.name}-{secrets.token_hex(4)}",
    )


def run_to_end(run: RunDirectory, config: LachesisConfig, *, trainer: Trainer, start: int) -> RunSummary:
    """Train to the end, or until a stop is requested; save the model and close the sinks."""
    run.update(status="running", step=start, steps=total_steps(config))
    started = time.perf_counter()
    with trainer.checkpoints.completed():
        step = trainer.train(start=start, steps=total_steps(config))
    seconds = time.perf_counter() - started
    finished = step >= total_steps(config) or (trainer.best is not None and trainer.best.ended)
    if finished and config.checkpoint.save_final:
        trainer.policy.save(run.files["final"])
        note_step(run.files["final"], step)
    trainer.telemetry.close()  # also writes the report
    run.update(status="finished" if finished else "stopped", step=step)
    if finished:
        trainer.feed.complete()
    evaluations = read_metrics(run.files["metrics"]).evaluations
    return RunSummary(run.path, run.files["report"], step, finished, seconds, evaluations)


@contextmanager
def begin_run(
    run: RunDirectory, *, resume: bool, engines: Callable[[], Sequence[EngineRow]] = tuple
) -> Iterator[Console]:
    """Hold the run directory during the block, and write any error and log messages, also of libraries, to its log.

    Yields a console that writes into that log.
    """
    run.begin(resume=resume)
    handler = LogFile(run.files["logs"] / "trainer.log")
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        with live_file(run.files["live"], engines=engines), FailureFile(run.files["failures"]):
            yield SafeConsole(file=handler.stream, width=1000, highlight=False, soft_wrap=True, force_jupyter=False)
    except BaseException as error:
        failure: BaseException = error
        if isinstance(error, OSError) and (error.errno in DISK_FULL or not run.path.is_dir()):
            failure = cannot_write(run.path, error)
        reason = reason_of(failure)
        handler.handle(logger.makeRecord(logger.name, logging.ERROR, __file__, 0, reason, (), None))
        with suppress(CheckpointError):  # the original error matters more than a full disk
            run.update(status="failed", error=reason)
        if failure is error:
            raise
        raise failure from error
    finally:
        take(run.path, "stop")  # a leftover request must not reach a resumed run
        logging.getLogger().removeHandler(handler)
        handler.close()


def _device_memory() -> tuple[int, int]:
    """Return the peak of allocated bytes since the last call, and the reserved bytes."""
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return allocated, reserved
