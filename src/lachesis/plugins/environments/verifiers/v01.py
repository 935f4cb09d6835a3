"""Environments of verifiers 0.1: ``load_environment``, a dataset, rollouts that leave a state, and a rubric."""

# Types are checked against today's verifiers, which lacks these names.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, cast

import verifiers as vf
from renderers.base import create_renderer, load_tokenizer
from verifiers.clients.renderer_client import RendererClient

from lachesis.common.errors import ConfigError, RewardError
from lachesis.common.types import Prompt
from lachesis.plugins.environments.turn_server import MODEL, SESSION, joined
from lachesis.plugins.environments.verifiers.renderer import ListRenderer
from lachesis.plugins.environments.verifiers.settings import (
    VerifiersPlayers,
    VerifiersSettings,
    environment_id,
    kept_turns,
)
from lachesis.rollouts.episodes import Played, RolloutFailed, cause_of, held_out_last

_NO_KEY = "LACHESIS_NO_KEY"
_PARSERS = ("tool_parser", "reasoning_parser")


class EnvironmentPlayers(VerifiersPlayers):
    """Players of the rollouts of one environment, as with its own ``run_rollout`` and ``run_group``.

    Raises:
        ConfigError: there is no such environment, or its arguments do not fit.
        DataError: there are fewer tasks than ``eval_tasks``.
    """

    def __init__(self, settings: VerifiersSettings) -> None:
        super().__init__(settings)
        self._env = cast(Any, _load(settings))
        note_errors(self._env.rubric)
        self._rows: dict[str, Mapping[str, Any]] = {}
        self._client: RendererClient | None = None

    @property
    def scores_groups(self) -> bool:
        """Return True if the rubric scores all rollouts of a group at once."""
        return bool(self._env.requires_group_rollouts)

    def split(self) -> tuple[list[Prompt], list[Prompt]]:
        """Return the environment's dataset, and the held-out tasks from its evaluation set or the dataset's end."""
        count, limit = self.settings.eval_tasks, self.settings.max_tasks
        training = self._prompts(self._env.get_dataset(), prefix="")[:limit]
        if self._env.eval_dataset_source is None or count == 0:
            return held_out_last(training, count)
        return training, self._prompts(self._env.get_eval_dataset(n=count), prefix="eval-")

    def _prompts(self, dataset: Any, *, prefix: str) -> list[Prompt]:
        prompts: list[Prompt] = []
        for number, row in enumerate(dataset):
            name = f"{prefix}{number}"
            self._rows[name] = row
            columns = {key: value for key, value in row.items() if key != "prompt"}
            prompts.append(Prompt(id=name, token_ids=(), text=_text(row["prompt"]), columns=columns))
        return prompts

    async def start(self) -> None:
        """Start the server in front of the engine, and a client that requests tokens from it."""
        await super().start()
        config = vf.ClientConfig(
            client_type="renderer", api_base_url=f"{self.settings.server.url}/v1", api_key_var=_NO_KEY, max_retries=0
        )
        self._client = RendererClient(config, renderer=_renderer(self.settings))

    async def play(self, prompt: Prompt, *, seed: int, greedy: bool = False) -> Played:
        """Play one rollout. It is scored alone, unless the rubric scores groups: then :meth:`finish` scores it."""
        server, params = self.settings.server, self.settings.params
        # The client passes on only the headers among its sampling arguments.
        name = uuid.uuid4().hex
        sampling = {
            "temperature": 0.0 if greedy else params.temperature,
            "max_tokens": params.max_tokens,
            "seed": seed,
            "extra_headers": {SESSION: name},
        }
        where = f"task {prompt.id}"
        try:
            state = await self._env.rollout(dict(self._rows[prompt.id]), self._client, MODEL, sampling)
        except Exception as error:  # the environment's own code may raise anything, and the library does not catch it
            server.check()
            raise RolloutFailed(f"{where}: {type(error).__name__}: {error}", cause="environment") from error
        finally:
            turns = server.take(name)
        server.check()
        if state.get("timed_out"):
            raise RolloutFailed(f"{where}: the environment's time limit passed", cause="timeout")
        if (error := state.get("error")) is not None:
            reason = error.__cause__ or error
            raise RolloutFailed(f"{where}: {type(error).__name__}: {reason}", cause=cause_of(type(error).__name__))
        sampled = [tuple(step["tokens"]["completion_ids"]) for step in state["trajectory"] if step["tokens"]]
        samples = joined(
            kept_turns(turns, sampled, where=where),
            decode=self.settings.decode,
            temperature=params.temperature if params.temperature > 0 else 1.0,
        )
        if not samples:
            raise RolloutFailed(f"{where}: the model was never asked", cause="empty")
        played = Played(tuple(samples))
        if greedy or not self.scores_groups:
            rubric = self._env.rubric
            await (rubric.score_group([state]) if self.scores_groups else rubric.score_rollout(state))
            if (raised := take_error(state)) is not None:
                raise _unjudged(raised)
            return await self._scored(played, state)
        return replace(played, state=state)

    async def finish(self, played: Sequence[Played]) -> list[Played | RolloutFailed]:
        """Score the finished rollouts of a group whose rubric compares them.

        A rollout on which a reward function raises is excluded: the others are scored again without it.
        """
        if not self.scores_groups:
            return list(played)
        left, failed = list(played), list[RolloutFailed]()
        while left:
            await self._env.rubric.score_group([one.state for one in left])
            errors = [take_error(one.state) for one in left]
            failed += [_unjudged(error) for error in errors if error is not None]
            if errors == [None] * len(left):
                break
            left = [one for one, error in zip(left, errors, strict=True) if error is None]
        return [*[await self._scored(one, one.state) for one in left], *failed]

    async def _scored(self, played: Played, state: Any) -> Played:
        await self._env.rubric.cleanup(state)
        if state.get("reward") is None:
            raise RewardError("the environment's rubric gave a rollout no reward", remedy="give it a reward function")
        reward = float(state["reward"])
        samples = tuple(replace(sample, reward=reward, rewards=(reward,)) for sample in played.samples)
        metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        return Played(samples, metrics=metrics)

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
            await self._env._teardown()
        await super().stop()


def _load(settings: VerifiersSettings) -> Any:
    try:
        return vf.load_environment(environment_id(settings.environment), **settings.args)
    except Exception as error:  # the environment's own modules may raise anything
        raise ConfigError(
            f"source.environment {settings.environment!r} cannot be loaded: {type(error).__name__}: {error}",
            remedy="install its package, or correct source.args",
        ) from error


def _unjudged(error: Exception) -> RolloutFailed:
    return RolloutFailed(f"a reward function raised {type(error).__name__}: {error}", cause="reward")


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(str(message["content"]) for message in prompt)


def _renderer(settings: VerifiersSettings) -> Any:
    """Return the library's renderer if one is named, otherwise one that uses the chat template.

    Raises:
        ConfigError: the library has no such renderer, or it does not take one of the fields.
    """
    tokenizer, fields = load_tokenizer(str(settings.tokenizer)), dict(settings.renderer)
    name: Any = fields.pop("name", "auto")
    parsers = [field for field in _PARSERS if field in fields]
    if parsers and str(name) not in ("auto", "default"):  # the library would ignore them
        raise ConfigError(
            f"source.renderer: {name} parses by itself and takes no {' or '.join(parsers)}",
            remedy="remove it, or set name: default",
        )
    try:
        return ListRenderer(tokenizer, **fields) if name == "auto" else create_renderer(tokenizer, name, **fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"source.renderer: {error}", remedy="correct its name or fields") from error


_RAISED = "lachesis_raised"

State = MutableMapping[str, Any]


def note_errors(rubric: Any) -> None:
    """Make the functions of a rubric, and of its parts, record their errors in the state from now on."""
    for one in _rubrics(rubric):
        one.funcs = [_noting(function, of_groups=one._is_group_func(function)) for function in one.funcs]


def take_error(state: State) -> Exception | None:
    """Return the error of a reward function on a rollout, and forget it."""
    return state.pop(_RAISED, None)


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    inner = [*getattr(rubric, "rubrics", ()), *(one.rubric for one in getattr(rubric, "env_map", {}).values())]
    for one in inner:
        yield from _rubrics(one)


def _noting(function: Callable[..., Any], *, of_groups: bool) -> Callable[..., Awaitable[Any]]:
    """Wrap a function for the rubric, so that it always gets the states that it judges, and notes errors there."""
    wanted = "states" if of_groups else "state"
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    takes = wanted in signature.parameters or any(one.kind is one.VAR_KEYWORD for one in parameters)

    @functools.wraps(function)
    async def noting(**given: Any) -> Any:
        states: Sequence[State] = given[wanted] if of_groups else [given[wanted]]
        arguments = given if takes else {name: value for name, value in given.items() if name != wanted}
        try:
            result = function(**arguments)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:  # a user's function may raise anything
            for state in states:
                state[_RAISED] = error
            raise

    if not takes:
        parameters.append(inspect.Parameter(wanted, inspect.Parameter.KEYWORD_ONLY))
    noting.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return noting
