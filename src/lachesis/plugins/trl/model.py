"""The model of a script: the object that it passed, or a loaded one, with the weights that a run has trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lachesis.common.errors import ModelError
from lachesis.common.hub import can_see, language_model_class
from lachesis.plugins.trl.objects import ArgumentError, save_tokenizer


class ScriptModel:
    """Model that a script passes, looks at and saves, kept equal to what its run has trained.

    A run trains a copy, on its own device. A model that was passed as an object gets the trained weights when the run
    ends, as TRL trains that object itself; a model given by name is loaded on first use.

    Args:
        given: id on the hub, directory, or a model of transformers or peft.
        processing_class: its tokenizer or processor; the model's own if ``None``.
        peft_config: the adapter to train; ``None`` for all weights, or for the adapter that ``given`` has.
        place: directory into which a model that is an object is written for the run.

    Attributes:
        path: where the run reads the model.
        tokenizer: where the run reads the tokenizer, if it differs.
        adapter: directory of the adapter that the run continues, if the script passed one.
        peft_config: the adapter's configuration.

    Raises:
        ConfigError: ``given`` is neither a path nor such a model, or has an adapter and another one was requested.
    """

    def __init__(self, given: Any, *, processing_class: Any, peft_config: Any, place: Path) -> None:
        self.tokenizer: str | None = None
        self.adapter: str | None = None
        self.peft_config = peft_config
        self._object: PreTrainedModel | PeftModel | None = None
        self._trained: Path | None = None
        if isinstance(given, str | Path):
            self.path = str(given)
            if processing_class is not None:
                self.tokenizer = save_tokenizer(processing_class, place)
            return
        if not isinstance(given, PreTrainedModel | PeftModel):
            raise ArgumentError(
                f"model: {type(given).__name__} is not a transformers model",
                remedy="pass one, its hub id or its directory",
            )
        self._object, self.path = given, str(place)
        if isinstance(given, PeftModel):
            self._take_adapter(given, place.with_name("adapter"))
        base = copy.deepcopy(given).unload() if isinstance(given, PeftModel) else given
        base.save_pretrained(self.path)
        save_tokenizer(processing_class or AutoTokenizer.from_pretrained(base.name_or_path), place)

    def _take_adapter(self, model: PeftModel, place: Path) -> None:
        if self.peft_config is not None:
            raise ArgumentError(
                "peft_config: the model is a PeftModel, which already has an adapter",
                remedy="pass the base model with peft_config, or the PeftModel without",
            )
        if list(model.peft_config) != ["default"]:
            raise ArgumentError(
                f"model: this PeftModel has the adapters {', '.join(model.peft_config)}, but only default is trained",
                remedy="merge the others, or pass the base model with peft_config",
            )
        self.peft_config = model.peft_config["default"]
        model.save_pretrained(str(place))
        self.adapter = str(place)

    def current(self) -> PreTrainedModel | PeftModel:
        """Return the model, with its adapter; load it first, on the CPU, if it was named and is not loaded yet."""
        model = self._object
        if model is None:
            model = language_model_class(AutoConfig.from_pretrained(self.path)).from_pretrained(self.path)
            assert isinstance(model, PreTrainedModel)
        if isinstance(self.peft_config, LoraConfig) and not isinstance(model, PeftModel):
            model = get_peft_model(model, self.peft_config)
        self._object = model
        if self._trained is not None:
            trained, self._trained = self._trained, None
            self.take(trained)
        return model

    def take(self, trained: Path) -> None:
        """Load the weights, or the adapter, that a run has written into the object, or later when it is loaded.

        Raises:
            ModelError: the weights and the object are of different models.
        """
        if self._object is None:
            self._trained = trained
            return
        model = self.current()
        if isinstance(model, PeftModel):
            found = set_peft_model_state_dict(model, load_peft_weights(str(trained), device="cpu"))
        else:
            kind: Any = type(model) if can_see(model.config) else AutoModelForCausalLM
            weights = kind.from_pretrained(trained, dtype=model.dtype).state_dict()
            found = model.load_state_dict(weights, strict=False)
        unknown = list(found.unexpected_keys)
        if unknown:
            raise ModelError(
                f"{trained} has weights that the script's model lacks: {', '.join(unknown[:3])}",
                remedy="load the trained model from that directory",
            )
