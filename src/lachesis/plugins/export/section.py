"""The section `checkpoint.hub`."""

from __future__ import annotations

from pydantic import Field

from lachesis.config.section import Section

# Of the hub: what it takes as the name of a repository.
REPOSITORY = r"^[\w.-]+(/[\w.-]+)?$"


class HubConfig(Section):
    """The Hugging Face hub, to which the final model goes with a card that says how it was trained."""

    repo: str = Field(pattern=REPOSITORY, description="Repository, `owner/name` or `name`; made if it is not there.")
    private: bool = Field(default=False, description="Where it is made: only its owners see it.")
    revision: str | None = Field(default=None, description="Branch, made if need be; the main one if unset.")
