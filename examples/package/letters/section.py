"""The section `source` with kind letters: reading it needs neither torch nor the rest of the package."""

from typing import Literal

from pydantic import Field

from lachesis.config.section import EpisodesSourceConfig


class LettersConfig(EpisodesSourceConfig):
    """A task for each letter: continue it."""

    builds = "letters.players.Letters"
    kind: Literal["letters"] = "letters"
    alphabet: str = Field(default="abcd", min_length=1, description="The letters.")
