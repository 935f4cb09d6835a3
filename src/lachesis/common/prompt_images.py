"""Record of a prompt's images as inputs of a model."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """Images of a prompt, as processed once by the model's processor for the engine and for training.

    ``inputs`` holds numpy arrays by the name of the model's argument, such as ``pixel_values`` and ``image_grid_thw``.
    ``token_types`` holds, by argument too, a number for each token of the prompt, such as ``mm_token_type_ids``.
    ``sizes`` has the width and height of each image before it was processed, ``thumbnails`` a small picture of each for
    pages, as a ``data:`` address. ``later`` are images further on in the sequence, in the answers of tools: a record
    for each answer, whose tokens begin at the place ``first`` of the sequence.
    """

    inputs: Mapping[str, Any]
    token_types: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sequence[tuple[int, int]] = ()
    thumbnails: Sequence[str] = ()
    first: int = 0
    later: tuple[PromptImages, ...] = ()

    @property
    def records(self) -> tuple[PromptImages, ...]:
        """Return the record of the prompt and those of later answers."""
        return (self, *self.later)

    def encoded(self) -> dict[str, Any]:
        """Return the record as JSON-safe values: each array as dtype, shape and bytes in base 64."""
        return {
            "inputs": {name: _encoded(array) for name, array in self.inputs.items()},
            "token_types": {name: _encoded(array) for name, array in self.token_types.items()},
            "sizes": [list(size) for size in self.sizes],
            "thumbnails": list(self.thumbnails),
            "first": self.first,
            "later": [one.encoded() for one in self.later],
        }

    @classmethod
    def decoded(cls, fields: Mapping[str, Any]) -> PromptImages:
        """Return the record that :meth:`encoded` encoded.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the fields do not form such a record.
        """
        return cls(
            {name: _decoded(*array) for name, array in fields["inputs"].items()},
            {name: _decoded(*array) for name, array in fields["token_types"].items()},
            [(int(width), int(height)) for width, height in fields["sizes"]],
            fields["thumbnails"],
            int(fields.get("first", 0)),
            tuple(map(cls.decoded, fields.get("later", ()))),
        )


def with_later(images: PromptImages | None, later: Sequence[PromptImages]) -> PromptImages | None:
    """Return a prompt's images with those of later answers; None if there are neither."""
    return images if not later else replace(images or PromptImages({}), later=tuple(later))


def _encoded(array: Any) -> list[Any]:
    return [str(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _decoded(dtype: str, shape: Sequence[int], text: str) -> Any:
    import numpy as np  # most readers of groups do not need numpy

    return np.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).reshape(shape)
