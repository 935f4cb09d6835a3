"""The section `checkpoint.hub`."""

from __future__ import annotations

from pydantic import Field

from lachesis.config.section import Section

# Of the hub: what it takes as the name of a repository.
REPOSITORY = r"^[\w.-]+(/[\w.-]+)?$"


class HubConfig(Section):
    """The Hugging Face hub, to which the final model goes with a card that says how it was trained."""

    repo: str = Field(pattern=REPOSITORY, description="Repository, `owner/name` or `name`; created if missing.")
    private: bool = Field(default=False, description="If it is created: only its owners see it.")
    revision: str | None = Field(default=None, description="Branch, created if missing; the main one if unset.")
