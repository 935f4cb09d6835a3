"""The section `checkpoint.hub`."""

from __future__ import annotations

from pydantic import Field

from lachesis.config.section import Section

# Names of repositories that the hub accepts.
REPOSITORY = r"^[\w.-]+(/[\w.-]+)?$"


class HubConfig(Section):
    """The Hugging Face hub, to which the final model goes with a card that says how it was trained."""

    repo: str = Field(pattern=REPOSITORY, description="Repository, `owner/name` or `name`; created if missing.")
    private: bool = Field(default=False, description="Only its owners see it, if it is created.")
    revision: str | None = Field(default=None, description="Branch, created if missing; the main one if unset.")
