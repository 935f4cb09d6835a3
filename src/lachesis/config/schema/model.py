"""Sections about the run, the model and the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lachesis.config.section import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section


class RunConfig(Section):
    """The run as a whole."""

    name: str = Field(default="run", description="Name of the run; its directory is `dir`/`name`.")
    dir: str = Field(default="runs", description="Directory that holds run directories.")
    seed: NonNegativeInt = Field(default=0, description="Seed of all randomness: data order, sampling, dropout.")
    steps: PositiveInt | None = Field(
        default=None, description="Number of optimizer steps. Required unless `epochs` is set."
    )
    epochs: PositiveFloat | None = Field(
        default=None, description="How many times to train on each problem, instead of a number of steps."
    )
    stages: list[Literal["sft", "grpo"]] = Field(
        default=["grpo"], description="Stages of the run: `[grpo]`, or `[sft, grpo]` with a supervised start."
    )
    setup: str | None = Field(
        default=None,
        description="Import path or `FILE.py:FUNCTION` of a function called once with the model path before loading.",
    )

    @property
    def directory(self) -> Path:
        """Return the run directory, DIR/NAME."""
        return Path(self.dir) / self.name


Activations = Literal["auto", "keep", "selective", "recompute", "offload"]
# Activation settings that keep less than everything, from the fastest to the one with the lowest memory use.
SPARING: tuple[Activations, ...] = ("selective", "recompute", "offload")


class ModelConfig(Section):
    """The model to train."""

    path: str = Field(description="Local directory or hub id of a causal language model.")
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of a model on the hub; its main branch if unset."
    )
    tokenizer: str | None = Field(default=None, description="Tokenizer directory or hub id; the model's own if unset.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Dtype of the weights; `auto` is the checkpoint's on GPU and float32 on CPU."
    )
    quantization: Literal["none", "int8", "nf4"] = Field(
        default="none", description="Hold the frozen base weights under LoRA in 8 or 4 bits (bitsandbytes)."
    )
    matmul_dtype: Literal["auto", "float8", "float8_rowwise"] = Field(
        default="auto",
        description="Dtype of matrix products in linear layers while training; `auto` is the weights'. `float8` has a "
        "scale per tensor, `float8_rowwise` one per row (torchao, compute capability 8.9). Faster for large layers.",
    )
    train_layers: list[NonNegativeInt] | None = Field(
        default=None,
        min_length=1,
        description="Train only these decoder layers, counted from 0, without embeddings and head; all weights if "
        "unset.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the trainer's model lives.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    activations: Activations = Field(
        default="keep",
        description="What decoder layers keep for the backward pass: everything (`keep`), inputs and attention "
        "results (`selective`, for long sequences), inputs only (`recompute`), or inputs in host memory (`offload`). "
        "The rest is recomputed. `auto` takes the first that fits on the GPU; on a CPU it is `keep`.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="`true` means `activations: recompute`: less memory, about a third slower.",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="Compile decoder layers with torch.compile; `auto` does so on GPU."
    )
    packing: Literal["auto", "packed", "padded"] = Field(
        default="auto",
        description="`packed` trains on one stream without padding, with each prompt only once per group; `padded` is "
        "for architectures whose attention cannot be replaced; `auto` chooses.",
    )
    vision: Literal["text", "frozen", "trained"] | None = Field(
        default=None,
        description="`frozen` shows the model the data's images and trains its language model, `trained` its image "
        "encoder too; `text` trains on text alone, and refuses images. Unset: `frozen` if the data has images.",
    )
    pad_token: str | None = Field(
        default=None, description="Pad token, from the vocabulary. Unset: the tokenizer's own, else its end token."
    )
    special_tokens: dict[Literal["bos_token", "eos_token", "unk_token"], str] = Field(
        default_factory=dict[Literal["bos_token", "eos_token", "unk_token"], str],
        description="Tokens of the vocabulary to use for these roles instead of the tokenizer's own.",
    )
    chat_template: str | None = Field(
        default=None, description="Jinja chat template (text or file) that replaces the tokenizer's own."
    )

    @property
    def sees_images(self) -> bool:
        """Return True if the model gets images as input."""
        return self.vision in ("frozen", "trained")

    @property
    def kept_activations(self) -> Activations:
        """Return ``activations``, set by either ``activations`` or ``gradient_checkpointing``."""
        return "recompute" if self.gradient_checkpointing else self.activations


class NoAdapterConfig(Section):
    """Full fine-tuning."""

    kind: Literal["none"] = "none"


class LoraAdapterConfig(Section):
    """LoRA through peft; saved as a standard adapter."""

    kind: Literal["lora"] = "lora"
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Directory of a peft LoRA adapter to start from, such as an SFT run's; with `kl_reference: base` "
        "it is part of the base. `r`, `alpha`, `targets` and `layers` must match it.",
    )
    r: PositiveInt = Field(default=16, description="Rank of the update matrices.")
    alpha: PositiveFloat = Field(default=32, description="Scaling: the update is multiplied by alpha / r.")
    dropout: Fraction = Field(default=0.0, description="Dropout on the adapter's input while training.")
    targets: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] = Field(
        default="all-linear",
        description="Names of modules to adapt, or `all-linear`: all linear layers except the head and experts.",
    )
    layers: list[NonNegativeInt] | None = Field(
        default=None, min_length=1, description="Adapt only these decoder layers, counted from 0; all if unset."
    )


AdapterConfig = Annotated[NoAdapterConfig | LoraAdapterConfig, Field(discriminator="kind")]
