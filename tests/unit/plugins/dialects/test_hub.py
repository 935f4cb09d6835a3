"""Other trainers' keys of the Hugging Face hub."""

from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.document import parse_document
from lachesis.config.load import validate
from lachesis.plugins.dialects import translate
from lachesis.plugins.export.section import HubConfig
from tests.unit.plugins.dialects import test_axolotl, test_trl

TRL = test_trl.BASE
AXOLOTL = test_axolotl.BASE + test_axolotl.TRL


def hub(base: str, dialect: str, text: str) -> tuple[HubConfig | None, list[str]]:
    """What becomes of it, and what is said of names of the hub."""
    found = translate(parse_document(f"{base}{text}", name="t"), dialect=dialect)  # type: ignore[arg-type]
    said = [f"{one.level}: {one.message}" for one in found.findings if "hub" in one.message]
    return validate(found.document).checkpoint.hub, said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("output_dir: out/first\npush_to_hub: true", HubConfig(repo="first")),
        ("push_to_hub: true", HubConfig(repo="trainer_output")),
        ("push_to_hub: true\nhub_model_id: me/m\nhub_strategy: end", HubConfig(repo="me/m")),
        (
            "push_to_hub: true\nhub_model_id: m\nhub_private_repo: true\nhub_revision: v2\nhub_always_push: false",
            HubConfig(repo="m", private=True, revision="v2"),
        ),
        ("push_to_hub: true\npush_to_hub_model_id: m\npush_to_hub_organization: org", HubConfig(repo="org/m")),
        ("push_to_hub: false", None),
    ],
)
def test_trl_uploads_where_push_to_hub_says_so(text: str, expected: HubConfig | None):
    assert hub(TRL, "trl", text) == (expected, [])


def test_axolotl_uploads_to_hub_model_id_which_is_private():
    assert hub(AXOLOTL, "axolotl", "hub_model_id: me/m") == (HubConfig(repo="me/m", private=True), [])
    _, said = hub(AXOLOTL, "axolotl", "hub_strategy: end")
    assert said == ["note: hub_strategy: has no effect with the rest of this file"]


def test_what_is_otherwise_is_said():
    once = "the model is uploaded once, after the run's last step"
    _, said = hub(TRL, "trl", "push_to_hub: true\nhub_strategy: every_save")
    assert said == [f"note: hub_strategy: {once}"]
    _, said = hub(TRL, "trl", "push_to_hub: true\nhub_strategy: all_checkpoints\nhub_token: hf_x")
    assert said[0].startswith("warning: hub_token: a token in a file goes wherever the file goes: set HF_TOKEN")
    assert said[1] == f"warning: hub_strategy: {once}; checkpoints stay in the run's directory"
    found, said = hub(TRL, "trl", "hub_model_id: me/m")
    assert found is None and said == ["note: hub_model_id: has no effect with the rest of this file"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("push_to_hub: true\nhub_strategy: often", "expected end, every_save, checkpoint, all_checkpoints, got"),
        ("push_to_hub: maybe", "expected true or false"),
        ("push_to_hub: true\nhub_model_id: a/b/c", "checkpoint.hub.repo"),
    ],
)
def test_what_is_none_of_theirs_is_an_error(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        hub(TRL, "trl", text)


@pytest.mark.parametrize(
    ("base", "dialect"), [(f"{TRL}push_to_hub: true\nhub_revision: v1\n", "trl"), (AXOLOTL, "axolotl")]
)
def test_a_name_that_a_script_has_to_fill_in_uploads_nothing(base: str, dialect: str):
    found, (said,) = hub(base, dialect, "hub_model_id: me/m_${VERSION}")
    assert found is None and "is not yet a repository's name, so nothing is uploaded" in said
