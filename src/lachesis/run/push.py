"""A run's model on the Hugging Face hub, with a card that says how it was trained."""

from __future__ import annotations

from pathlib import Path

from httpx import HTTPError
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from lachesis.common.errors import CheckpointError, ConfigError
from lachesis.common.files import write_atomic
from lachesis.common.run_files import run_paths
from lachesis.metrics.report.card import model_card

CARD = "README.md"


def write_card(run_dir: Path) -> Path:
    """Write the card of a run beside its final model.

    Raises:
        CheckpointError: it has no model.
        DataError: there is no run, or its metrics are malformed.
    """
    model = run_paths(run_dir)["final"]
    if not any((model / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise CheckpointError(
            f"{model} holds no model: the run has not ended, or checkpoint.save_final was false",
            remedy=f"write one with `lachesis export {run_dir} {model}`",
        )
    write_atomic(model / CARD, model_card(run_dir))
    return model / CARD


def push(run_dir: Path, *, repo: str, private: bool = False) -> str:
    """Upload the final model or adapter with its card; what is there already becomes an earlier commit.

    Args:
        repo: ``name`` or ``owner/name``; made if it is not there.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError, DataError: as :func:`write_card`.
        ConfigError: the hub refuses, or does not answer.
    """
    model = write_card(run_dir).parent
    api = HfApi()
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        name = Path(run_dir).resolve().name
        done = api.upload_folder(repo_id=made.repo_id, folder_path=model, commit_message=f"The model of the run {name}")
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{repo} could not be pushed to {api.endpoint}: {reason}",
            remedy="log in with `hf auth login` (or set HF_TOKEN), and name a repository that you may write to",
        ) from error
    return str(done.commit_url)
