"""Rollouts by a function of the user: ``rollout_func(prompts, trainer) -> dict``, the contract of TRL 1.16."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DeadlineExceeded, EngineError
from lachesis.common.imports import describe_exception
from lachesis.common.threads import CallThread
from lachesis.common.types import Group, Prompt, Sample, SamplingParams, VersionSpan
from lachesis.engines.base import Engine
from lachesis.rollouts.generation import generate_groups, request_seed
from lachesis.rollouts.local import LocalSource
from lachesis.rollouts.rewards.attempts import Item, own
from lachesis.rollouts.rewards.functions import TrainerState
from lachesis.rollouts.rollout_fields import Fields, read_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RolloutFunction: TypeAlias = Callable[[list[Any], "RolloutTrainer"], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RolloutArgs:
    """What a rollout function may ask ``trainer.args`` for, under TRL's names."""

    num_generations: int
    max_completion_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class RolloutTrainer:
    """What a rollout function gets as ``trainer``: the tokenizer, the settings, the step, and a way to sample.

    ``processing_class``, ``num_generations``, ``args`` and ``state`` have TRL's names. A new one is made for each
    call, so that a call which was given up on cannot disturb the next.

    Args:
        seeds: one for each prompt that the function is given.
        deadline: of all that the call generates.
    """

    def __init__(
        self,
        *,
        processing_class: PreTrainedTokenizerBase,
        args: RolloutArgs,
        state: TrainerState,
        engine: Engine,
        params: SamplingParams,
        seeds: Sequence[int],
        deadline: Deadline,
    ) -> None:
        self.processing_class = processing_class
        self.num_generations = args.num_generations
        self.args = args
        self.state = state
        self._engine = engine
        self._params = params
        self._seeds = tuple(seeds)
        self._calls = 0
        self._deadline = deadline

    def generate(self, prompts: Sequence[Any]) -> list[dict[str, Any]]:
        """One completion of each prompt by the policy, sampled as the run does.

        With as many prompts as the function was given, the completion of each depends on that prompt and its
        place in the group only, and not on the others of the batch.

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
        groups = generate_groups(
            problems,
            engine=self._engine,
            params=self._params,
            num_generations=1,
            seeds=seeds,
            decode=lambda ids: self.processing_class.batch_decode(ids, skip_special_tokens=True),
            deadline=self._deadline,
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
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]


class CustomSource(LocalSource):
    """A source whose samples come from a function of the user.

    The function gets each prompt ``num_generations`` times in a row, as TRL gives it, and the trainer's
    stand-in. It returns ``prompt_ids``, ``completion_ids`` and ``logprobs`` (``None`` where it does not know
    them) with one entry per prompt that it got; ``env_mask`` is 0 for tokens that the model did not sample.
    All other fields are columns for the reward functions.

    Args:
        rollout_func: the function, and ``name`` what messages call it.
        eos_token_ids: a completion that ends with one of them, or with a token of the environment, is whole.
        vocab_size: of the model; no token id may reach it.

    The other arguments are those of :class:`LocalSource`. Whether a resumed run goes on exactly is up to the
    function: ``trainer.generate`` does.
    """

    def __init__(
        self,
        *,
        rollout_func: RolloutFunction,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        engine: Engine,
        params: SamplingParams,
        num_generations: int,
        **rest: Any,
    ) -> None:
        self._function = rollout_func
        self._name = name
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._args = RolloutArgs(
            num_generations=num_generations,
            max_completion_length=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
        )
        self._thread = CallThread("rollout function")
        super().__init__(engine=engine, params=params, num_generations=num_generations, **rest)

    def close(self) -> None:
        """End the thread that the function runs on. Idempotent."""
        self._thread.close()

    def _check_columns(self) -> None:
        """Columns that reward functions need may come from the rollout function: its first result tells."""

    def _sample(self, prompts: list[Prompt], seeds: list[int], deadline: Deadline) -> list[Item]:
        """Raises EngineError where the function failed or returned something else."""
        repeated = [prompt for prompt in prompts for _ in range(self._num_generations)]
        first = self._engine.health().version
        output = self._call(repeated, seeds, deadline)
        versions = VersionSpan(first, self._engine.health().version)
        fields = read_fields(
            output,
            name=self._name,
            prompts=len(prompts),
            num_generations=self._num_generations,
            vocab_size=self._vocab_size,
        )
        texts = self._decode(fields.completion_ids)
        samples = [self._as_sample(fields, index, texts[index], versions) for index in range(len(repeated))]
        size = self._num_generations
        return [
            Item(
                Group(prompt, tuple(samples[number * size : (number + 1) * size])),
                {key: values[number * size : (number + 1) * size] for key, values in fields.extras.items()},
            )
            for number, prompt in enumerate(prompts)
        ]

    def _call(self, repeated: Sequence[Prompt], seeds: Sequence[int], deadline: Deadline) -> object:
        trainer = RolloutTrainer(
            processing_class=self._tokenizer,
            args=self._args,
            state=TrainerState(global_step=self._step),
            engine=self._engine,
            params=self._params,
            seeds=[request_seed(seed, number) for seed in seeds for number in range(self._num_generations)],
            deadline=deadline,
        )
        asked = [own(list(prompt.messages)) if prompt.messages else prompt.text for prompt in repeated]
        remaining = deadline.remaining_s()
        outcome = self._thread.call(
            lambda prompts, trainer: self._function(prompts, trainer),
            {"prompts": asked, "trainer": trainer},
            timeout_s=remaining,
        )
        if outcome.hung:
            deadline.check(f"in the rollout function {self._name!r}")
            raise DeadlineExceeded(f"the rollout function {self._name!r} did not return within {remaining:g} s")
        if isinstance(outcome.error, EngineError | DeadlineExceeded):
            raise outcome.error
        if outcome.error is not None:
            code = getattr(self._function, "__code__", None)
            raise EngineError(
                f"the rollout function {self._name!r} raised "
                f"{describe_exception(outcome.error, code.co_filename if code else None)}",
                remedy="mend it; what it gets is described with CustomSource",
            ) from outcome.error
        return outcome.result

    def _as_sample(self, fields: Fields, index: int, text: str, versions: VersionSpan) -> Sample:
        ids = fields.completion_ids[index]
        mask = fields.env_mask[index] if fields.env_mask is not None else None
        whole = ids[-1] in self._eos_token_ids or (mask is not None and mask[-1] == 0)
        return Sample(
            prompt_ids=tuple(fields.prompt_ids[index]),
            completion_ids=tuple(ids),
            logprobs=tuple(fields.logprobs[index]),
            finish_reason="stop" if whole else "length",
            versions=versions,
            text=text,
            mask=None if mask is None else tuple(mask),
            temperature=1.0 if self._params.greedy else self._params.temperature,
        )
