"""Chat templates that Axolotl brings along, by their names.

``chatml`` is a format that is written down in public, and is written here. The others are those of a family of models,
whose own tokenizers have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lachesis.config.document import describe
from lachesis.plugins.dialects.table import Translation
from lachesis.plugins.dialects.words import read_table

_TEMPLATES = read_table("chat_templates")
CHATML: str = _TEMPLATES["chatml"]
_FAMILIES: Mapping[str, Sequence[str]] = _TEMPLATES["families"]


def put_chat_template(translation: Translation) -> None:
    """Set ``model.chat_template`` where the tokenizer's own is not the one that is asked for."""
    name = "chat_template"
    template = translation.value(name)
    if template is None or str(template).startswith("tokenizer_default"):
        return
    if template == "jinja" and translation.has("chat_template_jinja"):
        translation.copy("chat_template_jinja", "model.chat_template")
    elif template == "chatml":
        translation.put("model.chat_template", CHATML, name)
    elif _is_of_family(str(template), str(translation.value("base_model"))):
        translation.note(name, f"{template} is the tokenizer's own template, for the model is of that family")
    else:
        translation.problem(
            name,
            f"{describe(template)} is a template that Axolotl brings along, and the model's name is not of that "
            "family; write tokenizer_default, or jinja with the template's text or file in chat_template_jinja",
        )


def _is_of_family(template: str, model: str) -> bool:
    words = next((words for family, words in _FAMILIES.items() if template.startswith(family)), ())
    return any(word in model.lower() for word in words)
