"""Conversations as tokens for any chat template: later turns are appended to the sampled tokens, unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from renderers.base import RenderedTokens
from renderers.default import DefaultRenderer

Apply = Callable[..., list[int]]
Parts = list[tuple[int, list[int]]]

_CLOSED = "x"


class TemplateRenderer(DefaultRenderer):
    """Renderer of a model that the library ``renderers`` does not know.

    The library's default renders the whole conversation anew each turn, and the tokens of a text may differ from
    those that were sampled. This one renders only the environment's additions.
    """

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
    ) -> Any:
        """Return the prompt of the next turn, or ``None`` if the template's tokens in between are unknown."""
        parts = added_tokens(
            new_messages,
            apply=lambda messages, **options: self._apply(messages, tools=tools, **options),
            stop_ids=self.get_stop_token_ids(),
            ended=previous_completion_ids,
        )
        if parts is None:
            return None
        return self._continued([*previous_prompt_ids, *previous_completion_ids], parts, new_messages)

    def _continued(self, known: list[int], parts: Parts, messages: Sequence[Mapping[str, Any]]) -> Any:
        return RenderedTokens(
            token_ids=[*known, *(token for _, part in parts for token in part)],
            message_indices=[*(-1 for _ in known), *(index for index, part in parts for _ in part)],
            message_roles=[str(message.get("role") or "") for message in messages],
        )


# Today's renderers need to know to which of their typed configurations the fields belong.
try:
    from renderers.configs import DefaultRendererConfig

    TemplateRenderer.config_class = DefaultRendererConfig  # type: ignore[attr-defined]
except ImportError:  # renderers of 0.1 take the fields as they are
    pass


class ListRenderer(TemplateRenderer):
    """The same renderer for verifiers 0.1, which reads a plain list of tokens."""

    def _continued(self, known: list[int], parts: Parts, messages: Sequence[Mapping[str, Any]]) -> Any:
        return [*known, *(token for _, part in parts for token in part)]


def added_tokens(
    messages: Sequence[Mapping[str, Any]], *, apply: Apply, stop_ids: Sequence[int], ended: Sequence[int]
) -> Parts | None:
    """Return the tokens that a chat template puts after a completion.

    They are, for each message, its index and tokens, then -1 and the opening of the next completion. ``None`` if the
    template does not merely append, or the completion has not ended.

    Args:
        messages: the new ones.
        apply: the template, from messages to token ids.
        stop_ids: tokens that end a turn of the model; template tokens after them belong to no message.
        ended: the completion; one that was cut off has no end to continue from.
    """
    if not ended or ended[-1] not in stop_ids or not messages:
        return None
    if any(message.get("role") == "assistant" for message in messages):
        return None
    start: list[Mapping[str, Any]] = [_stand_in(messages)]
    base = apply(start)
    ends = [place for place, token in enumerate(base) if token in stop_ids]
    if not ends:
        return None
    parts: Parts = [(-1, base[ends[-1] + 1 :])]
    for index in range(len(messages)):
        longer = apply([*start, *messages[: index + 1]])
        if longer[: len(base)] != base:
            return None
        parts.append((index, longer[len(base) :]))
        base = longer
    opened = apply([*start, *messages], add_generation_prompt=True)
    if opened[: len(base)] != base:
        return None
    return [*parts, (-1, opened[len(base) :])]


def _stand_in(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return an assistant message that these may follow: a template may require the calls that tools answer."""
    calls = [message["tool_call_id"] for message in messages if message.get("tool_call_id")]
    if not calls:
        return {"role": "assistant", "content": _CLOSED}
    functions = [{"id": call, "type": "function", "function": {"name": "f", "arguments": {}}} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": functions}
