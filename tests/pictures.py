"""A tiny model for images and text, with its processor, and pictures of one colour: nothing is downloaded."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

COLOURS = ("red", "green", "blue", "yellow")
WORDS = ("<pad>", "<eos>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}"
    "{% endif %} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
SIZE, PATCH, MERGE = 16, 4, 2
PER_IMAGE = (SIZE // PATCH // MERGE) ** 2


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word."""
    words = [*WORDS, *COLOURS, "user", "system", "assistant", "what", "colour", "\n"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=list(WORDS[2:])
    )
    found.chat_template = TEMPLATE
    return found


def model(*, seed: int = 0, **sizes: object) -> PreTrainedModel:
    """An Idefics3, the architecture of SmolVLM, of two layers and a tower of one; ``sizes`` are of its text model."""
    text = {"model_type": "llama", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    text |= {"bos_token_id": None, "eos_token_id": 1, "max_position_embeddings": 128, "initializer_range": 0.2, **sizes}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    tower |= {"image_size": SIZE, "patch_size": PATCH, "initializer_range": 0.2}
    config = AutoConfig.for_model(
        "idefics3", text_config=text, vision_config=tower, scale_factor=MERGE, image_token_id=2, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoModelForImageTextToText.from_config(config).eval()
    return made


def processor() -> Idefics3Processor:
    """The model's processor, which needs Pillow alone."""
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": SIZE}, max_image_size={"longest_edge": SIZE}
    )
    return Idefics3Processor(images, tokenizer(), image_seq_len=PER_IMAGE, chat_template=TEMPLATE)


def save(directory: Path, **sizes: object) -> Path:
    """Write model, tokenizer and processor."""
    for part in (model(**sizes), processor(), tokenizer()):
        part.save_pretrained(directory)
    return directory


def picture(colour: str, *, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    return Image.new("RGB", size, colour)


def png(colour: str) -> bytes:
    file = io.BytesIO()
    picture(colour).save(file, "PNG")
    return file.getvalue()
