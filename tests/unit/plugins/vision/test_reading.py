"""Images of rows become a prompt's tokens and inputs, or an error that says why not."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests import pictures

from lachesis.common.errors import ConfigError, DataError
from lachesis.common.objects import NamedObjects
from lachesis.common.types import Prompt
from lachesis.config.schema import ModelConfig
from lachesis.plugins.vision.reading import ImageReader
from lachesis.rollouts.datasets import load_problems
from lachesis.rollouts.datasets.formats import Problem

ASK = [{"role": "user", "content": "what colour"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    pictures.processor().save_pretrained(place)
    pictures.model().config.save_pretrained(place)
    return place


@pytest.fixture
def load(model: Path, tmp_path: Path) -> Callable[..., Prompt]:
    def loaded(**row: Any) -> Prompt:
        given = NamedObjects()
        tokenizer = pictures.tokenizer()
        reader = ImageReader(ModelConfig(path=str(model)), tokenizer)
        (found,) = load_problems(given.give("data", [row]), tokenizer=tokenizer, images=reader, base_dir=tmp_path)
        return found

    return loaded


def test_all_ways_of_giving_an_image_are_one(load: Callable[..., Prompt], tmp_path: Path):
    (tmp_path / "red.png").write_bytes(pictures.png("red"))
    image, png = pictures.picture("red"), pictures.png("red")
    encoded = base64.b64encode(png).decode()
    ways = [image, png, {"bytes": png, "path": None}, {"bytes": None, "path": "red.png"}, "red.png"]
    ways += [f"data:image/png;base64,{encoded}"]
    found = [load(prompt=ASK, images=[way]) for way in ways]
    found += [load(prompt=ASK, image=image)]
    found += [load(prompt=[{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text",
              "text": "what colour"}]}])]  # fmt: skip
    found += [
        load(prompt=[{"role": "user", "content": [{"type": "image", **held}, {"type": "text", "text": "what colour"}]}])
        for held in ({"path": "red.png"}, {"url": ways[-1]}, {"base64": encoded})
    ]
    found += [load(prompt="user <image> what colour  assistant", images=[image])]
    for prompt in found:
        assert prompt.token_ids == found[0].token_ids
        assert prompt.token_ids.count(2) == pictures.PER_IMAGE
        assert np.array_equal(pixels(prompt), pixels(found[0]))
    assert not np.array_equal(pixels(load(prompt=ASK, images=[pictures.picture("blue")])), pixels(found[0]))


@pytest.mark.parametrize(("token", "refused"), [(2, True), (6, False), (999, False)], ids=["special", "word", "none"])
def test_only_a_special_token_of_the_tokenizer_stands_for_an_image(tmp_path: Path, token: int, refused: bool):
    """The word is a colour: a configuration made for another tokenizer may name any."""
    pictures.model().config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"image_token_id": token}))
    reader = ImageReader(ModelConfig(path=str(tmp_path)), pictures.tokenizer())
    told = Problem("row 1", 0, "prompt", [{"role": "user", "content": "what <image> red"}], {})
    if refused:
        with pytest.raises(DataError, match="the prompt has <image>, which stands for an image"):
            reader.prepare(told, directory=tmp_path)
    else:
        assert reader.prepare(told, directory=tmp_path)[1] == []


def test_an_answer_of_a_tool_has_its_images_in_their_places(load: Callable[..., Prompt], model: Path, tmp_path: Path):
    reader, tokenizer = ImageReader(ModelConfig(path=str(model)), pictures.tokenizer()), pictures.tokenizer()
    (tmp_path / "red.png").write_bytes(pictures.png("red"))
    wanted = load(prompt=ASK, images=[pictures.picture("red")])
    for held in ({"image": pictures.picture("red")}, {"path": str(tmp_path / "red.png")}):
        ids, images = reader.answer("user <image> what colour", messages=[], given=[{"type": "image", **held}])
        assert np.array_equal(images.inputs["pixel_values"], pixels(wanted))
        assert ids == wanted.token_ids[: len(ids)]
        assert tokenizer.decode(ids).startswith("user")
    given = [{"type": "image", "image": pictures.picture("red")}]
    with pytest.raises(DataError, match="the text <image>, which stands for an image"):
        reader.answer("<image> <image>", messages=[{"role": "tool", "content": "<image>"}], given=given)
    with pytest.raises(ConfigError, match="answered with 1 images, for which the chat template writes 0 places"):
        reader.answer("what colour", messages=[], given=given)
    with pytest.raises(DataError, match=r"'none\.png' cannot be read"):
        reader.answer("<image>", messages=[], given=[{"type": "image", "path": "none.png"}])


def pixels(prompt: Prompt) -> np.ndarray:
    assert prompt.images is not None
    return prompt.images.inputs["pixel_values"]


def test_rewards_get_the_column_and_messages_have_no_pixels(load: Callable[..., Prompt]):
    image = pictures.picture("red")
    found = load(prompt=ASK, images=[image])
    assert found.columns["images"] == [image]
    assert found.messages == (
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what colour"}]},
    )


def test_rewards_get_pictures_of_what_arrow_has(load: Callable[..., Prompt]):
    held = {"bytes": pictures.png("red"), "path": None}
    assert load(prompt=ASK, image=held).columns["image"].size == (pictures.SIZE, pictures.SIZE)
    assert [one.size for one in load(prompt=ASK, images=[held]).columns["images"]] == [(pictures.SIZE, pictures.SIZE)]


def test_rewards_get_the_images_of_parts_too(load: Callable[..., Prompt]):
    held = {"bytes": pictures.png("red"), "path": None}
    for image in (pictures.picture("red"), held):
        found = load(prompt=[{"role": "user", "content": [{"type": "image", "image": image}]}])
        assert [one.size for one in found.columns["images"]] == [(pictures.SIZE, pictures.SIZE)]


def test_pages_and_engines_are_told_of_each_image(load: Callable[..., Prompt]):
    wide = pictures.picture("green", size=(512, 256))
    found = load(prompt=ASK, images=[pictures.picture("red"), wide]).images
    assert found is not None
    assert found.sizes == [(pictures.SIZE, pictures.SIZE), (512, 256)]
    small = [Image.open(io.BytesIO(base64.b64decode(one.partition("base64,")[2]))) for one in found.thumbnails]
    assert [one.size for one in small] == [(pictures.SIZE, pictures.SIZE), (128, 64)]
    red, green, blue = small[1].convert("RGB").resize((1, 1)).getpixel((0, 0))
    assert green > 100 > red + blue


def test_the_processors_rule_counts_what_the_processor_makes(model: Path, load: Callable[..., Prompt]):
    reader = ImageReader(ModelConfig(path=str(model)), pictures.tokenizer())
    (one,) = reader.placeholders([pictures.picture("red")])
    without = load(prompt="user what colour  assistant").token_ids
    assert len(load(prompt=ASK, images=[pictures.picture("red")]).token_ids) == len(without) + one


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_what_is_transparent_is_white_in_every_mode(load: Callable[..., Prompt]):
    white = pixels(load(prompt=ASK, images=[pictures.picture("white")]))
    size = (pictures.SIZE, pictures.SIZE)
    for given in (Image.new("RGBA", size, (255, 0, 0, 0)), Image.new("LA", size, (9, 0))):
        assert np.array_equal(pixels(load(prompt=ASK, images=[file_of(given, "PNG")])), white)
    palette = file_of(Image.new("P", size), "GIF", transparency=0)
    assert np.array_equal(pixels(load(prompt=ASK, images=[palette])), white)


def test_pictures_are_turned_as_their_exif_data_say(load: Callable[..., Prompt]):
    half = pictures.picture("red")
    half.paste("blue", (0, 0, pictures.SIZE, pictures.SIZE // 2))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned = file_of(half, "PNG", exif=exif)
    assert np.array_equal(
        pixels(load(prompt=ASK, images=[turned])), pixels(load(prompt=ASK, images=[half.rotate(180)]))
    )


def test_a_row_without_images_is_a_text(load: Callable[..., Prompt]):
    assert load(prompt=ASK, images=None).images is None
    assert load(prompt=ASK, images=[]).images is None


PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": PARTS, "images": [pictures.png("red")]}, "2 image parts, but the row has 1 images"),
        ({"prompt": PARTS}, "2 image parts, but the row has 0 images"),
        ({"prompt": "what colour", "images": [pictures.png("red")]}, "0 places for images .* has 1 images"),
        ({"prompt": ASK, "images": [b"no image"]}, "cannot be read"),
        ({"prompt": ASK, "images": ["missing.png"]}, "'missing.png' cannot be read"),
        ({"prompt": ASK, "images": ["https://example.org/a.png"]}, "is an address"),
        ({"prompt": ASK, "images": [3]}, "an image is a number"),
        ({"prompt": ASK, "images": [[pictures.png("red")]]}, "an image is a list"),
        ({"prompt": ASK, "images": ["A" * 9_000]}, "the image 'A{80}' cannot be read: File name too long"),
        ({"prompt": ASK, "images": ["data:image/png;base64,AAAA"]}, "cannot be read: cannot identify image file ->"),
        ({"prompt": ASK, "images": [pictures.png("red")[:45]]}, "cannot be read"),
        ({"prompt": ASK, "images": [Image.new("RGB", (0, 4))]}, r"cannot be read: .* size \(0, 4\)"),
        ({"prompt": ASK, "images": [Image.new("I;16", (4, 4), 3000)]}, "cannot be read: its mode is I;16"),
        ({"prompt": [{"role": "user", "content": "<image> what colour"}]}, "has <image>, .* the row has no images"),
        ({"prompt": "user <image> assistant", "images": None}, "has <image>, .* the row has no images"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "url": "http://a.b/c"}]}]}, "is an address"),
        ({"prompt": ASK, "video": ["a.mp4"]}, "column 'video' .* text and images"),
        ({"prompt": [{"role": "system", "content": "a"}], "images": [pictures.png("red")]}, "no user message"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}], "images": ["b.png"]},
            "both in the column 'images' and in parts",
        ),
    ],
)
def test_what_cannot_be_shown_is_an_error(load: Callable[..., Prompt], row: dict[str, Any], words: str):
    with pytest.raises(DataError, match=f"row 1: .*{words}"):
        load(**row)
