"""The keys with which transformers uploads a model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import PurePath

from lachesis.config.document import describe
from lachesis.plugins.dialects.table import Translation

# TrainingArguments' default directory, whose name is also the default repository.
_OUTPUT_DIR = "trainer_output"
_ONCE = "the model is uploaded once, after the run's last step"
_STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")


def put_axolotl_hub(translation: Translation) -> None:
    """Set the upload: Axolotl uploads if ``hub_model_id`` is set, to a private repository."""
    if translation.has("hub_model_id"):
        if _put_repository(translation, translation.value("hub_model_id"), "hub_model_id"):
            translation.put("checkpoint.hub.private", True, "hub_model_id")
        _put_others(translation)


def put_hub(translation: Translation) -> None:
    """Set the upload, which transformers makes if ``push_to_hub`` is set."""
    if not translation.switch("push_to_hub"):
        return
    name = next((one for one in ("hub_model_id", "push_to_hub_model_id") if translation.has(one)), "push_to_hub")
    output_dir = PurePath(translation.text("output_dir", _OUTPUT_DIR)).name
    repo = output_dir if name == "push_to_hub" else translation.text(name, output_dir)
    owner = translation.value("push_to_hub_organization")
    private = translation.value("hub_private_repo")
    owned = repo if owner is None or "/" in repo else f"{owner}/{repo}"
    if _put_repository(translation, owned, name) and private is not None:
        translation.put("checkpoint.hub.private", private, "hub_private_repo")
    _put_others(translation)


def _put_repository(translation: Translation, repo: object, name: str) -> bool:
    """Set the repository; return False if its name has a ``${VERSION}`` that a script has yet to fill in."""
    if isinstance(repo, str) and "${" in repo:
        text = f"{describe(repo)} is not yet a repository's name, so nothing is uploaded; use `lachesis push` later"
        translation.warning(name, text)
        return False
    translation.put("checkpoint.hub.repo", repo, name)
    return True


def _put_others(translation: Translation) -> None:
    revision = translation.value("hub_revision")
    if revision is not None and translation.document.data.get("checkpoint", {}).get("hub"):
        translation.put("checkpoint.hub.revision", revision, "hub_revision")
    strategy = translation.value("hub_strategy", "end")
    if strategy not in _STRATEGIES:
        translation.problem("hub_strategy", f"expected {', '.join(_STRATEGIES)}, got {describe(strategy)}")
    elif strategy in ("checkpoint", "all_checkpoints"):
        translation.warning("hub_strategy", f"{_ONCE}; checkpoints stay in the run's directory")
    elif strategy == "every_save":
        translation.note("hub_strategy", _ONCE)
