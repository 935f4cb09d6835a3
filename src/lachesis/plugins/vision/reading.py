"""Images of dataset rows: found in columns and messages, and turned into tokens and inputs by a processor."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lachesis.common.errors import ConfigError, DataError, DependencyError, ModelError, first_line
from lachesis.common.hub import cache_alone_where_the_hub_is_away, config_here
from lachesis.common.prompt_images import PromptImages
from lachesis.common.types import Message
from lachesis.config.schema import ModelConfig
from lachesis.plugins.vision.settle import placeholders
from lachesis.rollouts.datasets.formats import IMAGE_COLUMNS, Problem
from lachesis.rollouts.datasets.rows import describe_type
from lachesis.train.model.loading import processor_source

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

# Keys of an image part in a message that hold the image itself.
_HELD_AS = ("image", "path", "url")
# The longest side of pictures on pages, in pixels.
_THUMBNAIL = 128
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class ImageReader:
    """Reader of prompts with images for one model. Its processor is loaded for the first of them.

    Args:
        config: of the model.
        tokenizer: of the run, which also gets the processor's chat template if it has none.
    """

    def __init__(self, config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._tokenizer = tokenizer

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        path, of_model = processor_source(self._config), self._config.revision
        revision = {} if of_model is None or path != self._config.path else {"revision": of_model}
        try:
            with cache_alone_where_the_hub_is_away(path):
                processor: Any = AutoProcessor.from_pretrained(
                    path, trust_remote_code=self._config.trust_remote_code, **revision
                )
        except ImportError as error:
            raise DependencyError(
                f"the processor of {path!r} needs a package that is not installed: {first_line(error)}",
                remedy="install it (torchvision for models that also take videos), or leave images out of the data",
            ) from error
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(
                f"no processor for images could be loaded from {path!r}: {first_line(error)}",
                remedy="put preprocessor_config.json and the processor's other files next to the model; models that "
                "also take videos need torchvision installed",
            ) from error
        if not hasattr(processor, "image_processor"):
            raise ModelError(
                f"{path!r} has no processor for images, but the data has images",
                remedy="put its preprocessor_config.json next to the model, or leave images out of the data",
            )
        processor.tokenizer = self._tokenizer
        return processor

    @property
    def _mark(self) -> str:
        """Return the text that stands for one image in a rendered prompt."""
        return getattr(self._processor, "boi_token", None) or self._processor.image_token

    @cached_property
    def _marks(self) -> list[str]:
        """Return the tokens that stand for images and videos, by the model's config.json; none if it is not here.

        A token that the tokenizer cuts out of ordinary text is none of these, whatever the configuration says.
        """
        file = config_here(self._config.path, revision=self._config.revision)
        found = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
        added = self._tokenizer.added_tokens_decoder
        return [added[token].content for token in placeholders(SimpleNamespace(**found)) if token in added]

    def prepare(self, problem: Problem, *, directory: Path) -> tuple[Problem, list[Image]]:
        """Return a problem whose messages have a part for each image, without the image, and the images, as RGB.

        Images of the column for which no part stands come before the text of the first user message. Images of parts
        are put into the column ``images``, for rewards. Arrow's encoded images become pictures in the column too.

        Args:
            directory: the base of images' relative paths.

        Raises:
            DataError: an image cannot be read, or their number differs from that of the parts or marks.
        """
        column = next((name for name in IMAGE_COLUMNS if problem.columns.get(name)), None)
        value: Any = None if column is None else problem.columns[column]
        given = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
        prompt = problem.prompt
        inline: list[Any] = []
        if isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt):
            parts = [part for message in prompt for part in _image_parts(message)]
            inline = [one for one in map(_held, parts) if one is not None]
            if inline and given:
                raise DataError(
                    f"{problem.place}: images are both in the column {column!r} and in parts of messages",
                    remedy="keep them in one of the two places",
                )
            if inline:  # for rewards, which get them like those of a column
                column, value, given = IMAGE_COLUMNS[0], inline, inline
            if given and not parts:
                prompt = _with_parts(prompt, len(given), problem.place)
            elif len(parts) != len(given):
                raise DataError(
                    f"{problem.place}: the messages have {len(parts)} image parts, but the row has {len(given)} images",
                    remedy=f"give as many images in the column {column or IMAGE_COLUMNS[0]!r} as the messages have "
                    '{"type": "image"}',
                )
            if given:
                prompt = [_bare(message) for message in prompt]
                if not self._tokenizer.chat_template:
                    self._tokenizer.chat_template = getattr(self._processor, "chat_template", None)
        if not given and (mark := next((one for one in self._marks if one in str(prompt)), None)):
            raise DataError(
                f"{problem.place}: the prompt has {mark}, which stands for an image, but the row has no images",
                remedy=f"put the image into the column {IMAGE_COLUMNS[0]!r}, or leave {mark} out of the text",
            )
        images = [_opened(one, place=problem.place, directory=directory) for one in given]
        columns = problem.columns if column is None else {**problem.columns, column: value}
        if column is not None and any(isinstance(one, Mapping) for one in given):  # `datasets` gives scripts pictures
            columns = {**columns, column: images if isinstance(value, list | tuple) else images[0]}
        return replace(problem, prompt=prompt, columns=columns), images

    def answer(
        self, text: str, *, messages: Sequence[Message], given: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[int, ...], PromptImages]:
        """Return the token ids of rendered answers of tools, placeholders included, and the inputs of their images.

        Args:
            messages: what was rendered, with a part for each image.
            given: those parts with the images.

        Raises:
            DataError: an image cannot be read, or a text stands for one.
            ConfigError: the chat template does not write a place for each image.
        """
        place = "the answer of a tool"
        if mark := next((one for one in (self._mark, *self._marks) if one in str(messages)), None):
            raise DataError(f"{place} has the text {mark}, which stands for an image", remedy="leave it out")
        images = [_opened(_held(part), place=place, directory=Path()) for part in given]
        if (places := text.count(self._mark)) != len(images):
            raise ConfigError(
                f"tools answered with {len(images)} images, for which the chat template writes {places} places",
                remedy="set model.chat_template to one that writes the images of messages of the role tool",
            )
        return self.encode(text, images, place=place, special_tokens=False)

    def placeholders(self, images: Sequence[Image]) -> list[int]:
        """Return the tokens that stand for each image in a prompt, by the processor's own rule.

        Raises:
            ModelError: the processor does not report them.
        """
        sizes = [(image.height, image.width) for image in images]
        try:
            return list(self._processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens)
        except AttributeError as error:
            raise ModelError(
                f"{type(self._processor).__name__} does not report how many tokens an image takes: {first_line(error)}",
                remedy="plan with data.max_prompt_length and data without images",
            ) from error

    def encode(
        self, text: str, images: Sequence[Image], *, place: str, special_tokens: bool
    ) -> tuple[tuple[int, ...], PromptImages]:
        """Return the token ids of a rendered prompt, placeholders of its images included, and the images' inputs.

        Args:
            special_tokens: True if the tokenizer adds its own.

        Raises:
            DataError: the text has a different number of places for images, or the processor fails.
        """
        if (places := text.count(self._mark)) != len(images):
            raise DataError(
                f"{place}: the prompt has {places} places for images ({self._mark}), but the row has {len(images)} "
                "images",
                remedy="write it as messages (data.conversations: true converts a text), or put "
                f"{self._mark} where each image belongs; check model.chat_template",
            )
        try:
            made = self._processor(
                text=[text], images=[list(images)], add_special_tokens=special_tokens, return_tensors="pt"
            )
        except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
            raise DataError(
                f"{place}: the processor failed on the images: {type(error).__name__}: {first_line(error)}",
                remedy="correct that row",
            ) from error
        token_ids = tuple(made.pop("input_ids")[0].tolist())
        made.pop("attention_mask", None)
        types = {name: made.pop(name)[0].numpy() for name in _TOKEN_TYPES if name in made}
        inputs = {name: value.numpy() for name, value in made.items()}
        return token_ids, PromptImages(inputs, types, [one.size for one in images], [_thumbnail(one) for one in images])


def _thumbnail(image: Image) -> str:
    """Return a small picture of an image for pages, as a ``data:`` address."""
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    small.save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _image_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    parts: list[Any] = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


def _held(part: Mapping[str, Any]) -> Any:
    """Return the image that a part holds; None if the column ``images`` has it."""
    if part.get("base64") is not None:
        return f"data:;base64,{part['base64']}"
    return next((part[name] for name in _HELD_AS if part.get(name) is not None), None)


def _with_parts(prompt: Sequence[Mapping[str, Any]], count: int, place: str) -> list[Mapping[str, Any]]:
    """Return messages with ``count`` image parts before the text of the first user message."""
    first = next((i for i, message in enumerate(prompt) if message.get("role") == "user"), None)
    if first is None:
        raise DataError(
            f"{place}: the row has images, but no user message to put them into",
            remedy='add a message of the role "user", or {"type": "image"} parts',
        )
    marked = [{"type": "image"}] * count
    shown = {**prompt[first], "content": [*marked, *_as_parts(prompt[first].get("content"))]}
    return [*prompt[:first], shown, *prompt[first + 1 :]]


def _as_parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content) if isinstance(content, list) else []


def _bare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in parts, with a placeholder for each image."""
    parts = [
        {"type": "image"} if isinstance(part, Mapping) and part.get("type") == "image" else part
        for part in _as_parts(message.get("content"))
    ]
    return {**message, "content": parts}


def _opened(value: Any, *, place: str, directory: Path) -> Image:
    """Return an image in RGB: from a path, a file's bytes, a ``data:`` address, Arrow's ``{"bytes", "path"}``, or PIL.

    As in `datasets`, it is turned as its Exif data say. What is transparent is white, as in vLLM.
    """
    try:
        from PIL import Image as images
        from PIL import ImageOps
    except ImportError as error:
        raise DependencyError(
            "reading images needs Pillow, which is not installed", remedy="pip install pillow"
        ) from error
    source = value
    if isinstance(value, Mapping):
        source = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if not isinstance(source, str | Path | bytes | images.Image):
        raise DataError(
            f"{place}: an image is {describe_type(source)}",
            remedy='give a path, the bytes of a file, {"bytes": ..., "path": ...} or an image of PIL',
        )
    what = "the image" if not isinstance(source, str | Path) else f"the image {str(source)[:80]!r}"
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise DataError(f"{place}: {what} is an address", remedy="download it, and give its path or its bytes")
    try:
        if isinstance(source, str) and source.startswith("data:"):
            source = base64.b64decode(source.partition(",")[2])
        if not isinstance(source, images.Image):
            source = images.open(io.BytesIO(source) if isinstance(source, bytes) else directory / source)
        if source.mode[0] in "IF" or 0 in source.size:
            raise ValueError(f"its mode is {source.mode} and its size {source.size}, but it needs 8 bits and pixels")
        upright = ImageOps.exif_transpose(source)
        if upright.has_transparency_data:
            upright = images.alpha_composite(images.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
        return upright.convert("RGB")
    except (OSError, ValueError, SyntaxError, TypeError, images.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(
            f"{place}: {what} cannot be read: {reason.partition(' <_io')[0]}",
            remedy=f"correct that row; relative paths start at {directory}",
        ) from error
