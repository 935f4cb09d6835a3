"""Which changes make trainer and engine fit on a card: the documents' sizes of models and of cards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lachesis.config.document import Document
from lachesis.config.load import validate
from lachesis.config.overrides import apply_overrides
from lachesis.config.schema import LachesisConfig
from lachesis.plan.cards import GB, CardUse, card_use
from lachesis.plan.plan import plan
from lachesis.plugins.planning.fit import Fit, fit, fit_lines
from lachesis.plugins.planning.plan_text import card_lines

# Llama 3.1 8B, Qwen2.5-14B, Mistral Small 24B.
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "14B": {"hidden_size": 5120, "num_hidden_layers": 48, "intermediate_size": 13824, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064},
    "24B": {"hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 32768, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072},
}  # fmt: skip


def words_of(found: Fit) -> list[str]:
    return [word for *_, words in found.in_words() for word in words]


def configured(directory: Path, size: str) -> dict[str, Any]:
    model = directory / size
    model.mkdir()
    facts = {"model_type": "llama", "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(SHAPES[size] | facts))
    return {
        "run": {"steps": 10},
        "model": {"path": str(model)},
        "data": {"path": "p.jsonl", "max_prompt_length": 256},
        "rewards": {"functions": ["r.f"]},
        "sampling": {"num_generations": 4, "max_completion_length": 256},
        "engine": {"kind": "vllm"},
        "bridge": {"kind": "shared_vllm"},
    }


@pytest.mark.parametrize(
    ("size", "card", "wanted"),
    [
        ("8B", 24, "offload"),
        ("8B", 20, "nf4"),
        ("8B", 32, "share_base"),
        ("8B", 40, "share_base"),
        ("8B", 80, "weight_update=plain"),
        ("14B", 24, "nf4"),
        ("14B", 40, "share_base"),
        ("24B", 24, "nf4"),
        ("24B", 40, "nf4"),
        ("8B", 192, ""),
    ],
)
def test_what_is_proposed_is_a_configuration_that_fits(tmp_path: Path, size: str, card: float, wanted: str):
    data = configured(tmp_path, size)
    found = fit(LachesisConfig.model_validate(data), card_gb=card)
    assert found is not None and found.use.fits and found.use.total <= card * GB
    words = words_of(found)
    assert wanted in " ".join(words) and bool(words) == bool(wanted)
    document = Document(name="the proposal", data=data)
    apply_overrides(document, words)
    proposed = validate(document)
    assert card_use(proposed, plan(proposed, device="cuda"), card_gb=card) == found.use


def test_no_change_is_proposed_without_which_it_fits(tmp_path: Path):
    """Each saves something, but for the engine's share, which is what is left."""
    config = LachesisConfig.model_validate(configured(tmp_path, "8B"))
    found = fit(config, card_gb=24)
    assert found is not None
    saved = {change.words()[0]: bytes_ for change, bytes_ in found.changes}
    assert all(size > 1e8 for word, size in saved.items() if "gpu_memory_utilization" not in word), saved
    lines = fit_lines(found, card_gb=24)
    assert lines[0].startswith("it fits with these: ") and "saves" in "".join(lines)
    roomy = fit(config, card_gb=100)
    assert roomy is not None and not any("adapter" in word for word in words_of(roomy))


def test_what_fits_by_less_than_plans_have_been_wrong_is_called_tight(tmp_path: Path):
    config = LachesisConfig.model_validate(
        configured(tmp_path, "8B") | {"engine": {"kind": "embedded"}, "bridge": {"kind": "in_process"}}
    )
    planned = plan(config, device="cuda")
    needed = card_use(config, planned, card_gb=1000).total / GB
    for card, tight in ((needed * 1.005, True), (needed * 1.06, True), (needed * 1.07, False), (needed * 0.99, False)):
        assert card_use(config, planned, card_gb=card).tight == tight, card
    found = fit(config, card_gb=needed * 1.005)
    assert found is not None and not found.changes
    (whole, *notes) = fit_lines(found, card_gb=needed * 1.005)
    assert whole.startswith("it fits unchanged") and "tight: plans have been up to 6.6% off" in notes[0]
    (room,) = re.findall(r"--fit (\d+)", notes[0])
    roomy = fit(config, card_gb=float(room))
    assert roomy is not None and not card_use(roomy.config, plan(roomy.config, device="cuda"), card_gb=needed).tight


def test_changes_leave_room_for_the_error_of_a_plan(tmp_path: Path):
    """What fits only by less is taken where nothing leaves the room."""
    config = LachesisConfig.model_validate(configured(tmp_path, "14B"))
    sizes = {card: fit(config, card_gb=card) for card in range(14, 60)}
    found = {card: one for card, one in sizes.items() if one is not None}
    tight = {card for card, one in found.items() if one.use.tight}
    assert len(found) > 40 and tight <= {min(found), min(found) + 1}


def test_layers_keep_as_much_as_there_is_room_for(tmp_path: Path):
    """Of the changes that set one key the first that does, though later ones save more."""
    config = LachesisConfig.model_validate(configured(tmp_path, "14B"))
    chosen = []
    for card in (16, 21, 44, 46):
        found = fit(config, card_gb=card)
        assert found is not None and found.use.fits
        chosen.append(found.config.model.activations)
    assert chosen == ["offload", "recompute", "offload", "recompute"]


def test_the_engine_gets_what_the_trainer_leaves(tmp_path: Path):
    """LoRA on the engine's own base takes little, and 0.45 of 40 GB do not hold 14B."""
    data = configured(tmp_path, "14B") | {
        "adapter": {"kind": "lora"}, "bridge": {"kind": "lora_only", "share_base": True},
        "model": {"path": str(tmp_path / "14B"), "gradient_checkpointing": True},
    }  # fmt: skip
    found = fit(LachesisConfig.model_validate(data), card_gb=40)
    assert found is not None
    assert found.use.share is not None and found.use.share * 40 > 29.5 and found.use.total <= 40 * GB
    assert f"engine.gpu_memory_utilization {found.use.share:g}" in fit_lines(found, card_gb=40)[0]


def test_a_share_that_was_set_is_changed_where_it_does_not_fit(tmp_path: Path):
    data = configured(tmp_path, "8B") | {"engine": {"kind": "vllm", "gpu_memory_utilization": 0.9}}
    found = fit(LachesisConfig.model_validate(data), card_gb=192)
    assert found is not None
    (word,) = words_of(found)
    assert 0.1 < float(word.removeprefix("engine.gpu_memory_utilization=")) < 0.9


def test_the_usual_share_stays_where_it_fits(tmp_path: Path):
    """And where nothing would help, so that the error is the engine's own."""
    data = configured(tmp_path, "8B")
    config = LachesisConfig.model_validate(data)
    planned = plan(config, device="cuda")
    shares = [card_use(config, planned, card_gb=card).share for card in (320, 192, 40)]
    assert shares[0] == shares[2] == 0.45 and shares[1] is not None and shares[1] < 0.45


def test_an_engine_elsewhere_is_no_part_of_the_card(tmp_path: Path):
    data = configured(tmp_path, "8B") | {"adapter": {"kind": "lora"}, "bridge": {"kind": "lora_only"}}
    uses = []
    for engine in ({"kind": "vllm"}, {"kind": "vllm", "devices": "1"}):
        config = LachesisConfig.model_validate(data | {"engine": engine})
        uses.append(card_use(config, plan(config, device="cuda"), card_gb=80))
    beside, apart = uses
    assert beside.trainer == apart.trainer and apart.engine == 0
    assert beside.share == 0.27 and beside.engine == round(0.27 * 80 * GB) + 2**30
    assert apart.engine_fits and not card_use(config, plan(config, device="cuda"), card_gb=16).engine_fits


def test_several_servers_beside_a_trainer_have_the_usual_share_together(tmp_path: Path):
    """One process trains, and no other GPUs are named: all copies of the model are on its card."""
    data = configured(tmp_path, "8B") | {"bridge": {"kind": "broadcast"}}
    uses = []
    for copies, devices in ((1, 1), (2, 1), (2, 2)):
        config = LachesisConfig.model_validate(data | {"engine": {"kind": "vllm", "data_parallel_size": copies}})
        uses.append(card_use(config, plan(config, device="cuda", devices=devices), card_gb=400))
    assert [use.share for use in uses] == [0.45, 0.22, 0.45]
    assert uses[1].engine == 2 * (round(0.22 * 400 * GB) + 2**30)
    config = LachesisConfig.model_validate(data | {"engine": {"kind": "vllm", "data_parallel_size": 2}})
    tight = card_use(config, plan(config, device="cuda"), card_gb=230)
    assert tight.share is not None and tight.share < 0.22 and tight.fits


def test_an_update_that_is_kept_aside_is_counted_where_it_is_kept(tmp_path: Path):
    """16 GB of 8B, merged, beside a trainer of 57: on the card, or by the host where there is no room."""
    data = configured(tmp_path, "8B") | {"adapter": {"kind": "lora"}}

    def used(card: float, *, engine: dict[str, Any] | None = None, **bridge: Any) -> CardUse:
        keys = {"engine": {"kind": "vllm", **(engine or {})}, "bridge": {"kind": "broadcast", **bridge}}
        config = LachesisConfig.model_validate(data | keys)
        return card_use(config, plan(config, device="cuda"), card_gb=card)

    set_share = {"gpu_memory_utilization": 0.3}
    roomy, tight = used(200, engine=set_share), used(100, engine=set_share)
    assert roomy.aside == 2 * 8_030_261_248 and roomy.total == roomy.trainer + roomy.engine + roomy.aside
    assert roomy.fits and not roomy.by_host
    assert (tight.aside, tight.by_host, tight.fits) == (0, True, True)
    assert tight.total + roomy.aside > tight.card
    on_card = used(100, engine=set_share, staging="device")
    assert on_card.aside == roomy.aside and not on_card.by_host and not on_card.fits
    assert used(200, engine=set_share, staging="host").aside == 0
    # What the engine gets if nobody says so leaves room for it.
    left = used(110)
    assert left.share is not None and left.share < 0.45 and left.aside == roomy.aside and left.fits
    elsewhere = [used(card, engine={"devices": "1"}) for card in (80, 400)]
    assert [use.by_host for use in elsewhere] == [True, False] and all(use.aside == 0 for use in elsewhere)
    assert (
        elsewhere[0].room_share == 0.76
        and not used(80, engine={"devices": "1", "gpu_memory_utilization": 0.76}).by_host
    )
    assert used(80, engine={"devices": "1", "gpu_memory_utilization": 0.77}).by_host
    assert not used(80, engine={"devices": "1"}, staging="device").engine_fits
    two = used(200, engine={"devices": "1,1", "data_parallel_size": 2})
    assert (two.share, two.room_share, two.by_host) == (0.45, 0.4, True), "two servers on one card"
    running = used(80, engine={"kind": "http"})
    assert running.aside == 0 and not running.by_host, "what share such servers have is not known"
    asleep = used(200, engine={"enable_sleep_mode": True})
    assert asleep.aside == 0 and not asleep.by_host


def test_updates_that_have_to_be_on_the_card_may_wait_on_the_host(tmp_path: Path):
    """An engine in 8 bits cannot share its weights, which would be the first thing to try."""
    keys = {"engine": {"kind": "vllm", "quantization": "fp8"}, "bridge": {"kind": "broadcast", "staging": "device"}}
    small = {"adapter": {"kind": "lora"}, "batch": {"max_tokens_per_microbatch": 2048}}
    config = LachesisConfig.model_validate(configured(tmp_path, "8B") | small | keys)
    found = fit(config, card_gb=52)
    assert found is not None and words_of(found) == ["bridge.staging=host"]
    assert found.changes[0][1] == 2 * 8_030_261_248, "bytes that it saves"


def test_the_plan_says_where_updates_are_kept(tmp_path: Path):
    keys = {"engine": {"kind": "vllm", "gpu_memory_utilization": 0.3}, "bridge": {"kind": "broadcast"}}
    data = configured(tmp_path, "8B") | {"adapter": {"kind": "lora"}} | keys

    def largest(**changed: Any) -> str:
        config = LachesisConfig.model_validate(data | changed)
        return [*card_lines(config, plan(config, device="cuda"))][-1]

    assert largest().endswith("(its share is 0.3), 16.1 GB for an update that it keeps aside")
    assert largest(engine={"kind": "vllm", "gpu_memory_utilization": 0.5}).endswith(
        "; weight updates are staged in host memory"
    )
    elsewhere = largest(engine={"kind": "vllm", "devices": "1"})
    assert elsewhere.endswith(
        "; weight updates are staged in host memory (set engine.gpu_memory_utilization <= 0.86 to keep them on the GPU)"
    )


def test_where_nothing_fits_it_says_so(tmp_path: Path):
    config = LachesisConfig.model_validate(configured(tmp_path, "24B"))
    assert fit(config, card_gb=8) is None
    assert "no tried change fits on 8 GB" in fit_lines(None, card_gb=8)[0]
