"""Upload of a run's model to the Hugging Face hub, with a card that says how it was trained."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from lachesis.common.errors import CheckpointError, ConfigError
from lachesis.common.files import write_atomic
from lachesis.common.run_files import run_paths
from lachesis.plugins.export.card import CARD, model_card
from lachesis.plugins.export.section import HubConfig
from lachesis.run.directory import noted_step

logger = logging.getLogger("lachesis")

# Errors of the hub's client without an answer, from httpx or its successor, whichever the client uses.
_NO_ANSWER: tuple[type[Exception], ...] = tuple(
    base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError" and issubclass(base, Exception)
)


def write_card(run_dir: Path, *, repo: str | None = None) -> Path:
    """Write the card of a run beside its final model, with ``repo`` as its id on the hub.

    Raises:
        CheckpointError: the run has no model, or the file that notes the model's step is malformed.
        DataError: the directory holds no run, or its metrics are malformed.
    """
    model = run_paths(run_dir)["final"]
    is_adapter = (model / "adapter_config.json").is_file()
    if not (is_adapter or (model / "config.json").is_file()):
        raise CheckpointError(
            f"{model} has no model: the run has not ended, or checkpoint.save_final was false",
            remedy=f"write one with `lachesis export {run_dir} {model}`",
        )
    # The files decide, not the run: an adapter may have been merged when it was exported to there, or the run may have
    # continued after that.
    write_atomic(
        model / CARD,
        model_card(run_dir, step=noted_step(model), merged=not is_adapter, name=repo if repo and "/" in repo else None),
    )
    return model / CARD


def push(
    run_dir: Path, *, repo: str, private: bool = False, revision: str | None = None, message: str | None = None
) -> str:
    """Upload the final model or adapter with its card; existing files stay in an earlier commit.

    Args:
        repo: ``name`` or ``owner/name``; created if missing. private: make a new repository private.
        revision: the branch, created if missing; the main one if unset.
        message: of the commit; it names the run if unset.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError, DataError: as :func:`write_card`.
        ConfigError: the hub refuses, or does not answer.
    """
    model = write_card(run_dir, repo=repo).parent
    api = HfApi()
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(made.repo_id, branch=revision, exist_ok=True)
        words = message or f"The model of the run {Path(run_dir).resolve().name}"
        done = api.upload_folder(repo_id=made.repo_id, folder_path=model, commit_message=words, revision=revision)
    except (HfHubHTTPError, *_NO_ANSWER, HFValidationError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{repo} could not be pushed to {api.endpoint}: {reason}",
            remedy="check that it can be reached, log in with `hf auth login` (or set HF_TOKEN), and name a repository "
            "that you may write to",
        ) from error
    return str(done.commit_url)


def push_final(run_dir: Path, hub: HubConfig) -> str:
    """Upload the model of a finished run as its configuration asks; return the address of the commit.

    Raises:
        ConfigError: the upload failed; the message says where the model is, the remedy how to try again.
    """
    try:
        return push(run_dir, repo=hub.repo, private=hub.private, revision=hub.revision)
    except ConfigError as error:
        raise ConfigError(
            f"the run has ended and its model is in {run_paths(run_dir)['final']}, but {error.message}",
            remedy=f"{error.remedy}; then: {_command(run_dir, hub)}",
        ) from error


def _command(run_dir: Path, hub: HubConfig) -> str:
    words = ["lachesis", "push", str(run_dir), "--repo", hub.repo, *(["--private"] if hub.private else [])]
    return shlex.join([*words, *(["--revision", hub.revision] if hub.revision else [])])


def warn_of_missing_login(hub: HubConfig) -> None:
    """Warn before a run that the hub will refuse its model if no user is logged in on this machine."""
    if get_token() is None:
        logger.warning(
            "checkpoint.hub: you are not logged in to the Hugging Face hub, so it will refuse the model for %s when "
            "the run ends -> set HF_TOKEN, or log in with `hf auth login` meanwhile",
            hub.repo,
        )
