"""Groups as JSON-safe values and back, for the tape and for the pipeline's part of a checkpoint."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lachesis.common.prompt_images import PromptImages
from lachesis.common.types import Group, Prompt, Sample, VersionSpan

if TYPE_CHECKING:
    from lachesis.common.routed_experts import RoutedExperts
    from lachesis.common.teacher_logprobs import TeacherLogprobs

TokenTexts = Callable[[Sequence[int]], Sequence[str]]
"""A function that returns the text of each token id."""


def encode_group(group: Group, *, texts: TokenTexts | None = None, whole: bool = True) -> dict[str, Any]:
    """Return a group as JSON-safe values.

    Args:
        texts: add the text of each completion token as ``pieces``.
        whole: include data with many numbers: the teacher's logprobs, the experts used, and images.
    """
    prompt = group.prompt
    line: dict[str, Any] = {
        "prompt": {
            "id": prompt.id,
            "text": prompt.text,
            "token_ids": prompt.token_ids,
            "columns": {str(name): json_safe(value) for name, value in prompt.columns.items()},
        },
        "samples": [_encode_sample(sample, prompt=prompt, texts=texts, whole=whole) for sample in group.samples],
    }
    if prompt.source:
        line["prompt"]["source"] = prompt.source
    if prompt.messages is not None:
        line["prompt"]["messages"] = json_safe(prompt.messages)
    if prompt.images is not None:
        shown = {"images": prompt.images.encoded()} if whole else {"thumbnails": list(prompt.images.thumbnails)}
        line["prompt"] |= shown
    if group.logged:
        line["logged"] = {str(name): json_safe(list(values)) for name, values in group.logged.items()}
    if group.replaces is not None:
        line["replaces"] = encode_group(group.replaces, whole=whole)
    return line


def _encode_sample(sample: Sample, *, prompt: Prompt, texts: TokenTexts | None, whole: bool) -> dict[str, Any]:
    line: dict[str, Any] = {} if sample.prompt_ids == prompt.token_ids else {"prompt_ids": sample.prompt_ids}
    line |= {
        "completion_ids": sample.completion_ids,
        "logprobs": _finite(sample.logprobs),
        "mask": sample.mask,
        "text": sample.text,
        "finish_reason": sample.finish_reason,
        "versions": sample.versions,
        "temperature": sample.temperature,
        "rewards": _finite(sample.rewards),
        "reward": _known(sample.reward),
        "advantage": _known(sample.advantage),
    }
    if sample.token_advantages is not None:
        line["token_advantages"] = sample.token_advantages
    if whole and sample.teacher is not None:
        line["taught"] = sample.teacher.encoded()
    if whole and sample.routed is not None:
        line["routed"] = sample.routed.encoded()
    if sample.images and whole:
        line["images"] = [one.encoded() for one in sample.images]
    elif sample.images:
        line["thumbnails"] = [small for one in sample.images for small in one.thumbnails]
    if texts is not None:
        line["pieces"] = list(texts(sample.completion_ids))
    return line


def decode_group(line: Mapping[str, Any]) -> Group:
    """Return the group that :func:`encode_group` encoded."""
    prompt = decode_prompt(line["prompt"])
    samples = tuple(_decode_sample(sample, prompt) for sample in line["samples"])
    replaces = decode_group(line["replaces"]) if "replaces" in line else None
    return Group(prompt=prompt, samples=samples, replaces=replaces, logged=line.get("logged", {}))


def decode_prompt(fields: Mapping[str, Any]) -> Prompt:
    """Return the prompt with these fields, as read from JSON."""
    messages = fields.get("messages")
    return Prompt(
        id=fields["id"],
        token_ids=tuple(fields["token_ids"]),
        text=fields["text"],
        messages=None if messages is None else tuple(messages),
        columns=fields["columns"],
        source=fields.get("source", ""),
        images=PromptImages.decoded(fields["images"]) if fields.get("images") else None,
    )


def _decode_sample(line: Mapping[str, Any], prompt: Prompt) -> Sample:
    mask, by_token = line["mask"], line.get("token_advantages")
    return Sample(
        prompt_ids=tuple(line.get("prompt_ids", prompt.token_ids)),
        completion_ids=tuple(line["completion_ids"]),
        logprobs=tuple(math.nan if value is None else value for value in line["logprobs"]),
        finish_reason=line["finish_reason"],
        versions=VersionSpan(*line["versions"]),
        text=line["text"],
        mask=None if mask is None else tuple(mask),
        temperature=line["temperature"],
        rewards=tuple(line["rewards"]),
        reward=line["reward"],
        advantage=line["advantage"],
        token_advantages=None if by_token is None else tuple(by_token),
        teacher=_decode_teacher(line["taught"]) if "taught" in line else None,
        routed=_decode_routed(line["routed"]) if "routed" in line else None,
        images=tuple(map(PromptImages.decoded, line.get("images", ()))),
    )


def _decode_teacher(fields: Mapping[str, Any]) -> TeacherLogprobs:
    from lachesis.common.teacher_logprobs import TeacherLogprobs  # imports numpy, which most readers do not need

    return TeacherLogprobs.decoded(fields)


def _decode_routed(fields: Mapping[str, Any]) -> RoutedExperts:
    from lachesis.common.routed_experts import RoutedExperts  # imports numpy

    return RoutedExperts.decoded(fields)


def json_safe(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: foreign numbers as Python's, values without a JSON type as their repr."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(float(value)):
        return float(value)
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: json_safe(item) for key, item in value.items()}
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else repr(value)


def _finite(values: Sequence[float | None]) -> Sequence[float | None]:
    """Replace NaN, an unknown logprob, with None, because JSON has no NaN."""
    # A sum is finite only if every term is.
    if None not in values and math.isfinite(sum(values)):  # pyright: ignore[reportArgumentType, reportCallIssue]
        return values
    return [_known(value) for value in values]


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
