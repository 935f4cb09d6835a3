"""Write a tiny model for images and text of random weights, and pictures of one colour, into a directory.

python examples/vision/make.py runs/vision
"""

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

COLOURS = ("red", "green", "blue", "yellow")
SIZE, PATCH, MERGE = 16, 4, 2
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word."""
    special = ("<pad>", "<eos>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    words = (*special, *COLOURS, "user", "assistant", "what", "colour", "\n", "?")
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=list(special[2:])
    )
    made.chat_template = TEMPLATE
    return made


def config():
    """Idefics3, the architecture of SmolVLM, with two layers and a tower of one."""
    text = {"model_type": "llama", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    text |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "max_position_embeddings": 128}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    tower |= {"image_size": SIZE, "patch_size": PATCH, "initializer_range": 0.2}
    return AutoConfig.for_model(
        "idefics3",
        text_config=text,
        vision_config=tower,
        scale_factor=MERGE,
        image_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def main(directory: Path) -> None:
    torch.manual_seed(0)
    model = directory / "model"
    AutoModelForImageTextToText.from_config(config()).save_pretrained(model)
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": SIZE}, max_image_size={"longest_edge": SIZE}
    )
    per_image = (SIZE // PATCH // MERGE) ** 2
    Idefics3Processor(images, tokenizer(), image_seq_len=per_image, chat_template=TEMPLATE).save_pretrained(model)
    with (directory / "pictures.jsonl").open("w") as file:
        for colour in COLOURS:
            Image.new("RGB", (SIZE, SIZE), colour).save(directory / f"{colour}.png")
            row = {"prompt": "what colour", "images": [f"{colour}.png"], "answer": colour}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
