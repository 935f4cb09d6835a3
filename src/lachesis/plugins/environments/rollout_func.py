"""Rollouts by a function of the user: ``rollout_func(prompts, trainer) -> dict``, the contract of TRL 1.16."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeAlias

from lachesis.common.contracts import load_part
from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError
from lachesis.common.imports import describe_exception
from lachesis.common.json_values import own
from lachesis.common.types import (
    LOWEST_LOGPROB,
    Completion,
    GenerationRequest,
    Prompt,
    Sample,
    SamplingParams,
    VersionSpan,
)
from lachesis.config.schema import CustomPart
from lachesis.plugins.environments.openenv_traces import arrays_of
from lachesis.process.threads import CallOutcome, DaemonThread, fail, loop_event, settle
from lachesis.rollouts.base import ROLLOUTS
from lachesis.rollouts.call_batcher import CallBatcher
from lachesis.rollouts.episodes import Play, Played, Players
from lachesis.rollouts.generation import TextDecoder, generation_requests, read_groups, request_seed
from lachesis.rollouts.rewards.functions import TrainerState, shorten
from lachesis.rollouts.tools.template import Continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RolloutFunction: TypeAlias = Callable[[list[Any], "RolloutTrainer"], Mapping[str, Any]]


_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
# Rounding may lift the logprob of a certain token a little above 0.
_MOST_LOGPROB = 1e-3


@dataclass(frozen=True, slots=True)
class RolloutArgs:
    """Options that a rollout function finds in ``trainer.args``, under TRL's names."""

    num_generations: int
    max_completion_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class RolloutTrainer:
    """Argument ``trainer`` of a rollout function: the tokenizer, the settings, the step, and a way to sample.

    ``processing_class``, ``num_generations``, ``args`` and ``state`` have TRL's names. A new one is made for each
    call, so that an abandoned call cannot disturb the next.

    Args:
        sample: has the engine complete requests.
        seeds: one for each prompt that the function is given.
    """

    def __init__(
        self,
        *,
        processing_class: PreTrainedTokenizerBase,
        args: RolloutArgs,
        state: TrainerState,
        sample: Callable[[Sequence[GenerationRequest]], list[list[Completion]]],
        params: SamplingParams,
        seeds: Sequence[int],
    ) -> None:
        self.processing_class = processing_class
        self.num_generations = args.num_generations
        self.args = args
        self.state = state
        self._sample = sample
        self._params = params
        self._seeds = tuple(seeds)
        self._calls = 0

    def generate(self, prompts: Sequence[Any]) -> list[dict[str, Any]]:
        """Return one completion of each prompt by the policy, sampled as the run does.

        With as many prompts as the function was given, each completion depends only on its prompt and its place in the
        group, not on the rest of the batch.

        Args:
            prompts: texts, lists of messages (which go through the chat template), or lists of token ids.

        Returns:
            For each prompt ``prompt_ids``, ``completion_ids``, ``logprobs`` (of the completion) and ``text``.

        Raises:
            EngineError, DeadlineExceeded.
        """
        problems = [
            Prompt(id=str(number), token_ids=tuple(self._token_ids(prompt)), text="")
            for number, prompt in enumerate(prompts)
        ]
        whole = len(problems) == len(self._seeds)
        places = [(seed, 0) for seed in self._seeds] if whole else [(self._seeds[0], n) for n in range(len(problems))]
        seeds = [request_seed(request_seed(seed, self._calls), number) for seed, number in places]
        self._calls += 1
        requests = generation_requests(problems, params=self._params, num_generations=1, seeds=seeds)
        groups = read_groups(
            problems,
            self._sample(requests),
            params=self._params,
            num_generations=1,
            decode=lambda ids: self.processing_class.batch_decode([*map(list, ids)], skip_special_tokens=True),
        )
        samples = [group.samples[0] for group in groups]
        return [
            {
                "prompt_ids": list(sample.prompt_ids),
                "completion_ids": list(sample.completion_ids),
                "logprobs": list(sample.logprobs),
                "text": sample.text,
            }
            for sample in samples
        ]

    def _token_ids(self, prompt: Any) -> list[int]:
        tokenizer = self.processing_class
        if isinstance(prompt, str):
            return list(tokenizer(prompt)["input_ids"])  # type: ignore[arg-type]
        if prompt and isinstance(prompt[0], int):
            return list(prompt)
        return list(Continuation(tokenizer, {}).whole(prompt))


def build_players(spec: CustomPart, **more: Any) -> FunctionPlayers:
    """Build the players of a rollout function of the configuration; ``more`` are further arguments for them."""
    rollouts = load_part(spec, ROLLOUTS)
    function = update_wrapper(partial(rollouts.function, **rollouts.kwargs), rollouts.function)
    return FunctionPlayers(rollout_func=function, name=rollouts.spec, **more)


@dataclass(frozen=True, slots=True)
class _Group:
    """Group that waits for a call of the function: its requests, and the future of its rollouts."""

    prompt: Prompt
    seeds: Sequence[int]
    rollouts: asyncio.Future[list[Played]]


@dataclass(kw_only=True, eq=False)
class FunctionPlayers(Players):
    """Players whose rollouts a function of the user makes.

    The function gets each prompt once for each of its rollouts, in a row, as in TRL, and a stand-in for the trainer.
    It returns ``prompt_ids``, ``completion_ids`` and ``logprobs`` (``None`` where it does not know them) with one entry
    per received prompt; ``env_mask`` is 0 for tokens that the model did not sample. All other fields are columns for
    the reward functions.

    A resumed run is exact if the function's results are reproducible, as those of ``trainer.generate`` are.

    Args:
        rollout_func: the function; ``name`` is its name in messages.
        num_generations: rollouts of a group, as the function is told.
        version: returns the version of the engine's weights.
        eos_token_ids: a completion that ends with one of them, or with a token of the environment, is whole.
        vocab_size: of the model; no token id may reach it.
        by_group: call the function for each group separately, in concurrent threads; otherwise once for all groups that
            begin together.

    Raises:
        EngineError: the function failed or returned something else.
    """

    rollout_func: RolloutFunction
    name: str
    calls: CallBatcher
    params: SamplingParams
    num_generations: int
    tokenizer: PreTrainedTokenizerBase
    decode: TextDecoder
    version: Callable[[], int]
    eos_token_ids: Collection[int]
    vocab_size: int
    by_group: bool = False

    columns = None  # known from the function's first result

    def __post_init__(self) -> None:
        self.stage = f"in the rollout function {self.name!r}"
        self._step = 0
        self._idle: list[DaemonThread] = []
        self._waiting: list[_Group] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, prompt: Prompt, *, seed: int, numbers: Sequence[int], greedy: bool = False) -> Sequence[Play]:
        if greedy:
            raise EngineError("a rollout function decides itself how it samples", remedy="evaluate without it")
        loop = asyncio.get_running_loop()
        group = _Group(prompt, [request_seed(seed, number) for number in numbers], loop.create_future())
        self._waiting.append(group)
        if len(self._waiting) == 1:
            loop.call_soon(self._call_waiting)
        return [partial(_finished, one) for one in await group.rollouts]

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        (play,) = await self.begin(prompt, seed=seed, numbers=[0], greedy=greedy)
        return await play()

    def report(self, deadline: Deadline) -> None:
        self.calls.deadline = deadline

    def report_version(self, version: int) -> None:
        self._step = version

    async def stop(self) -> None:
        """End the threads that the function runs on. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._idle:
            self._idle.pop().abandon()
        await self.calls.stop()

    def _call_waiting(self) -> None:
        groups, self._waiting = self._waiting, []
        for some in [[group] for group in groups] if self.by_group else [groups]:
            task = asyncio.ensure_future(self._call(some))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _call(self, groups: Sequence[_Group]) -> None:
        try:
            played = iter(await self._rollouts(groups))
        except Exception as error:  # any error goes to the groups that wait
            for group in groups:
                fail(group.rollouts, error)
        else:
            for group in groups:
                settle(group.rollouts, [next(played) for _ in group.seeds])

    async def _rollouts(self, groups: Sequence[_Group]) -> list[Played]:
        """Call the function once for these groups, and return their rollouts in order."""
        first = self.version()
        output = await self._output(groups)
        versions = VersionSpan(first, self.version())
        fields = read_fields(
            output,
            name=self.name,
            prompts=len(groups),
            num_generations=len(groups[0].seeds),
            vocab_size=self.vocab_size,
        )
        texts = self.decode(fields.completion_ids)
        return [
            Played(
                (self._as_sample(fields, index, text, versions),),
                columns={name: [values[index]] for name, values in fields.extras.items()},
                state=fields,  # the whole group: the function is never called for a part of one
            )
            for index, text in enumerate(texts)
        ]

    async def _output(self, groups: Sequence[_Group]) -> object:
        loop = asyncio.get_running_loop()
        trainer = RolloutTrainer(
            processing_class=self.tokenizer,
            args=RolloutArgs(
                num_generations=self.num_generations,
                max_completion_length=self.params.max_tokens,
                temperature=self.params.temperature,
                top_p=self.params.top_p,
                top_k=self.params.top_k,
                min_p=self.params.min_p,
                repetition_penalty=self.params.repetition_penalty,
            ),
            state=TrainerState(global_step=self._step),
            sample=partial(self._sample, loop),
            params=self.params,
            seeds=[seed for group in groups for seed in group.seeds],
        )
        repeated = [group.prompt for group in groups for _ in group.seeds]
        asked = [own(list(prompt.messages)) if prompt.messages else prompt.text for prompt in repeated]
        outcome = await self._outcome(partial(self.rollout_func, asked, trainer))
        if isinstance(outcome.error, EngineError | DeadlineExceeded):
            raise outcome.error
        if outcome.error is not None:
            raise EngineError(
                f"the rollout function {self.name!r} raised {describe_exception(outcome.error, self.rollout_func)}",
                remedy="fix it; FunctionPlayers documents its arguments",
            ) from outcome.error
        return outcome.result

    async def _outcome(self, call: Callable[[], object]) -> CallOutcome:
        """Make a call on an idle or new thread, which is abandoned if the call does not return."""
        thread = self._idle.pop() if self._idle else DaemonThread("rollout function")
        over, ended = loop_event()
        line = thread.submit_all([(call, {})], ended)
        remaining = self.calls.deadline.remaining_s()
        try:
            async with asyncio.timeout(remaining):
                await over.wait()
        except TimeoutError as error:
            message = f"the rollout function {self.name!r} did not return within {remaining:g} s"
            raise DeadlineExceeded(message) from error
        finally:
            self._idle.append(thread) if over.is_set() else thread.abandon()
        return line.outcomes[0]

    def _sample(self, loop: asyncio.AbstractEventLoop, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Have the engine complete requests, from the function's thread, batched with those of other calls."""

        async def all_of_them() -> list[list[Completion]]:
            return await asyncio.gather(*map(self.calls.completions, requests))

        return asyncio.run_coroutine_threadsafe(all_of_them(), loop).result()

    def _as_sample(self, fields: Fields, index: int, text: str, versions: VersionSpan) -> Sample:
        ids = fields.completion_ids[index]
        mask = fields.env_mask[index] if fields.env_mask is not None else None
        whole = ids[-1] in self.eos_token_ids or (mask is not None and mask[-1] == 0)
        return Sample(
            prompt_ids=tuple(fields.prompt_ids[index]),
            completion_ids=tuple(ids),
            logprobs=tuple(fields.logprobs[index]),
            finish_reason="stop" if whole else "length",
            versions=versions,
            text=text,
            mask=None if mask is None else tuple(mask),
            temperature=1.0 if self.params.greedy else self.params.temperature,
        )


async def _finished(played: Played) -> Played:
    return played


@dataclass(frozen=True, slots=True)
class Fields:
    """A rollout of N completions; ``logprobs`` are NaN where unknown, ``extras`` has N values for each name."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]] | None
    extras: dict[str, list[Any]]


def read_fields(output: object, *, name: str, prompts: int, num_generations: int, vocab_size: int) -> Fields:
    """Check the return value of rollout function ``name`` for ``prompts`` prompts, each ``num_generations`` times.

    Lists may be tensors or arrays. Each logprob may be a list of one. ``vocab_size`` is the model's; larger ids belong
    to another tokenizer. OpenEnv's ``traces`` may take the place of tokens, logprobs and mask.

    Raises:
        EngineError: a field is missing, of the wrong type, length or range; the message names field and entry.
    """
    if not isinstance(output, Mapping):
        raise _fault(name, f"returned a {type(output).__name__}, not a dictionary")
    if "traces" in output:
        rest = {key: value for key, value in output.items() if key != "traces"}
        output = rest | arrays_of(output["traces"])
    if missing := [field for field in _REQUIRED if field not in output]:
        raise _fault(name, f"returned no {missing[0]!r}; it returned {', '.join(map(str, output)) or 'nothing'}")
    count = prompts * num_generations
    prompt_ids, completion_ids = (
        _token_lists(output[field], field, name, prompts, num_generations) for field in ("prompt_ids", "completion_ids")
    )
    _check_vocabulary(prompt_ids, "prompt_ids", name, vocab_size)
    _check_vocabulary(completion_ids, "completion_ids", name, vocab_size)
    env_mask = output.get("env_mask")
    logprobs = _logprobs(output["logprobs"], completion_ids, name)
    masks = None if env_mask is None else _masks(env_mask, completion_ids, name)
    for index, row in enumerate(logprobs):
        lowest = min(row if masks is None else compress(row, masks[index]), default=0.0)
        if lowest < LOWEST_LOGPROB:
            raise _fault(name, f"logprobs[{index}] has {lowest:g}, which no sampled token has")
    return Fields(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=logprobs,
        env_mask=masks,
        extras={
            str(field): _extra(field, values, count, name)
            for field, values in output.items()
            if field not in (*_REQUIRED, "env_mask", "logprob_token_ids")
        },
    )


def _token_lists(value: object, field: str, name: str, prompts: int, num_generations: int) -> list[list[int]]:
    rows = _rows(value, field, name)
    count = prompts * num_generations
    if len(rows) != count:
        hint = ""
        if len(rows) == count * num_generations or len(rows) == prompts:
            hint = "; each prompt is given num_generations times, so return one completion per entry"
        raise _fault(name, f"returned {len(rows)} {field} for {count} prompts{hint}")
    for index, row in enumerate(rows):
        if not row or not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in row):
            raise _fault(name, f"{field}[{index}] is {shorten(row)}, not a list of token ids")
    return rows


def _check_vocabulary(rows: Sequence[Sequence[int]], field: str, name: str, vocab_size: int) -> None:
    for index, row in enumerate(rows):
        if (token := max(row)) >= vocab_size:
            raise EngineError(
                f"the rollout function {name!r}: {field}[{index}] has the token {token}, but the model's vocabulary "
                f"has {vocab_size}",
                remedy="use token ids of the model's own tokenizer, trainer.processing_class",
            )


def _logprobs(value: object, completion_ids: Sequence[Sequence[int]], name: str) -> list[list[float]]:
    if value is None:
        return [[math.nan] * len(ids) for ids in completion_ids]
    rows = [[_single(number) for number in row] for row in _rows(value, "logprobs", name)]
    _check_lengths(rows, completion_ids, "logprobs", name)
    for index, row in enumerate(rows):
        for number in row:
            good = isinstance(number, float | int) and not math.isinf(number) and not number > _MOST_LOGPROB
            if not good:
                raise _fault(name, f"logprobs[{index}] has {shorten(number)}, which is not a logprob")
    return [[float(number) for number in row] for row in rows]


def _masks(value: object, completion_ids: Sequence[Sequence[int]], name: str) -> list[list[int]]:
    rows = _rows(value, "env_mask", name)
    _check_lengths(rows, completion_ids, "env_mask", name)
    for index, row in enumerate(rows):
        if any(bit not in (0, 1) for bit in row):
            raise _fault(name, f"env_mask[{index}] is {shorten(row)}, not zeros and ones")
    return [[int(bit) for bit in row] for row in rows]


def _extra(field: object, values: object, count: int, name: str) -> list[Any]:
    """Return a value per completion; anything but a list is the same for all."""
    values = _plain(values)
    if not isinstance(values, list | tuple):
        return [values] * count
    if len(values) != count:
        raise _fault(name, f"returned {len(values)} values in {field!r} for {count} completions")
    return list(values)


def _rows(value: object, field: str, name: str) -> list[Any]:
    value = _plain(value)
    rows = [_plain(row) for row in value] if isinstance(value, list | tuple) else None
    if rows is None or not all(isinstance(row, list | tuple) for row in rows):
        raise _fault(name, f"{field} is {shorten(value)}, not a list with a list per completion")
    return [list(row) for row in rows]


def _check_lengths(
    rows: Sequence[Sequence[Any]], completion_ids: Sequence[Sequence[int]], field: str, name: str
) -> None:
    if len(rows) != len(completion_ids):
        raise _fault(name, f"returned {len(rows)} {field} for {len(completion_ids)} completions")
    for index, (row, ids) in enumerate(zip(rows, completion_ids, strict=True)):
        if len(row) != len(ids):
            raise _fault(name, f"{field}[{index}] has {len(row)} values for {len(ids)} tokens")


def _single(number: Any) -> Any:
    return number[0] if isinstance(number, list | tuple) and len(number) == 1 else number


def _plain(value: Any) -> Any:
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _fault(name: str, what: str) -> EngineError:
    return EngineError(
        f"the rollout function {name!r}: {what}",
        remedy="return prompt_ids, completion_ids and logprobs with one entry for each prompt that it was given",
    )
