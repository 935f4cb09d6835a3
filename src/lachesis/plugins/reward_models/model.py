"""Sequence-classification models as reward functions: their one number is the reward."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from lachesis.common.errors import ConfigError
from lachesis.common.hub import cache_alone_where_the_hub_is_away


class RewardModel:
    """Reward function ``f(prompts, completions) -> rewards`` of a model with one output.

    A conversation goes through the chat template of the model's own tokenizer. If it has none, the model gets prompt
    and answer as a pair of texts, the way such models are trained.

    Args:
        path: directory or hub id.
        device: ``auto`` takes a GPU if there is one; otherwise a name of torch.
        batch_size: conversations that go through the model at once.

    Raises:
        ConfigError: it cannot be loaded, or has no trained head with one output.
    """

    def __init__(self, path: str, *, device: str = "auto", batch_size: int = 16) -> None:
        import torch

        self._path = path
        self._batch_size = batch_size
        self._device = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer, self._model = _load(path, self._device)
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._limit = positions if isinstance(positions, int) and positions > 0 else None

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Return the model's output for each prompt with its completion, in their order.

        Raises:
            ValueError: a text is longer than the model can take.
        """
        encoded = [self._encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        rewards = [0.0] * len(encoded)
        by_length = sorted(range(len(encoded)), key=lambda index: len(encoded[index]["input_ids"]))
        for start in range(0, len(by_length), self._batch_size):
            batch = by_length[start : start + self._batch_size]
            for index, reward in zip(batch, self._forward([encoded[index] for index in batch]), strict=True):
                rewards[index] = reward
        return rewards

    def _encode(self, prompt: Any, completion: Any) -> dict[str, list[int]]:
        answer = completion if isinstance(completion, str) else completion[0]["content"]
        if self._tokenizer.chat_template is None:
            question = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
            encoding = self._tokenizer(question, answer)
        elif isinstance(prompt, str):
            encoding = self._tokenizer(prompt + answer)
        else:
            encoding = self._tokenizer(self._conversation(prompt, answer), add_special_tokens=False)
        tokens = len(encoding["input_ids"])
        if self._limit is not None and tokens > self._limit:
            raise ValueError(f"{tokens} tokens, but {self._path} takes {self._limit}")
        return dict(encoding)

    def _conversation(self, prompt: Sequence[Any], answer: str) -> str:
        """Render a conversation with the answer, which is joined to an assistant's last message that it continues."""
        messages = list(prompt)
        if messages and messages[-1]["role"] == "assistant":
            answer = messages.pop()["content"] + answer
        messages.append({"role": "assistant", "content": answer})
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False))

    def _forward(self, encoded: Sequence[dict[str, list[int]]]) -> list[float]:
        import torch

        padded = self._tokenizer.pad(list(encoded), padding=True, padding_side="right", return_tensors="pt")
        with torch.inference_mode():
            logits = self._model(**padded.to(self._device)).logits  # [B, 1]
        return logits[:, 0].float().tolist()


def _load(path: str, device: Any) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        with cache_alone_where_the_hub_is_away(path), warnings.catch_warnings():
            tokenizer = AutoTokenizer.from_pretrained(path)
            warnings.simplefilter("ignore")
            model, report = AutoModelForSequenceClassification.from_pretrained(
                path,
                num_labels=1,
                dtype=torch.float32 if device.type == "cpu" else "auto",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:
        raise ConfigError(
            f"the reward model {path} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}",
            remedy="name a directory with a model, or a hub id that is in the cache or can be downloaded",
        ) from error
    untrained = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if untrained:
        raise ConfigError(
            f"the reward model {path} has no trained head with one output ({untrained[0]} is missing or of another "
            "size)",
            remedy="name a sequence-classification model that was trained with num_labels=1",
        )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer, model.eval().requires_grad_(False).to(device)
