"""Models of checkpoints, loaded by the libraries that they are for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis.common.errors import CheckpointError, ConfigError, DependencyError
from lachesis.common.types import StepRecord
from lachesis.config.load import dump_config
from lachesis.config.schema import LachesisConfig
from lachesis.metrics.sinks.jsonl import JsonlSink
from lachesis.plugins.export.export import export
from lachesis.plugins.export.push import write_card
from lachesis.run.directory import note_step
from lachesis.train.checkpoint import CheckpointManager
from lachesis.train.model.loading import load_model
from tests.tiny import tiny_model, tiny_tokenizer

TOKENS = torch.tensor([[5, 6, 7, 8, 9]])
MakeRun = Callable[..., tuple[Path, Tensor]]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run with checkpoints of steps 2 and 4, and the logits of its model as it was at the last."""
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")

    def make(dtype: str = "float32", **sections: Any) -> tuple[Path, Tensor]:
        config = LachesisConfig.model_validate(
            {
                "run": {"steps": 8, "dir": str(tmp_path), "name": "run"},
                "model": {"path": str(tmp_path / "base"), "dtype": dtype, "gradient_checkpointing": True},
                "data": {"path": str(tmp_path / "data.jsonl")},
                "rewards": {"functions": ["a.b"]},
                **sections,
            }
        )
        run = tmp_path / "run"
        run.mkdir()
        (run / "config.yaml").write_text(dump_config(config))
        loaded = load_model(config.model, config.adapter)
        trained = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
        manager = CheckpointManager(run / "checkpoints", keep_last=2)
        torch.manual_seed(0)
        for step in (2, 4):
            for parameter in trained.values():
                parameter.data += 0.1 * torch.randn_like(parameter)
            manager.save(step, tensors=trained, state={}, meta={})
        return run, logits(loaded.model.eval())

    return make


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS).logits.float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_all_weights_is_a_model(make_run: MakeRun, dtype: str):
    run, expected = make_run(dtype)
    directory = export(run / "checkpoints" / "step_000004")
    assert directory == run / "models" / "step_000004"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert str(model.dtype) == f"torch.{dtype}"
    assert torch.equal(logits(model), expected)
    assert AutoTokenizer.from_pretrained(directory)("1+2")["input_ids"] == tiny_tokenizer()("1+2")["input_ids"]


def test_of_some_layers_it_is_the_whole_model(make_run: MakeRun, tmp_path: Path):
    run, expected = make_run(model={"path": str(tmp_path / "base"), "train_layers": [1]})
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(export(run))), expected)


def test_of_an_adapter_it_is_an_adapter(make_run: MakeRun, tmp_path: Path):
    run, expected = make_run(adapter={"kind": "lora", "r": 4})
    directory = export(run, tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.allclose(logits(PeftModel.from_pretrained(base, directory)), expected, atol=1e-5)


def test_an_adapter_is_merged_where_that_is_asked_for(make_run: MakeRun, tmp_path: Path):
    run, expected = make_run(adapter={"kind": "lora", "r": 4})
    model = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "out", merge=True))
    assert torch.allclose(logits(model), expected, atol=1e-4)


def test_an_adapter_on_a_tied_head_is_merged_into_a_head_of_its_own(make_run: MakeRun, tmp_path: Path):
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    run, expected = make_run(adapter={"kind": "lora", "r": 4, "targets": ["lm_head", "q_proj"]})
    model = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "out", merge=True))
    assert torch.allclose(logits(model), expected, atol=1e-4)


def test_a_run_stands_for_its_latest_checkpoint_and_each_can_be_named(make_run: MakeRun):
    run, _ = make_run()
    assert export(run).name == "step_000004"
    assert export(run / "checkpoints" / "step_000002").name == "step_000002"


def test_the_card_tells_of_the_steps_until_the_checkpoint(make_run: MakeRun, tmp_path: Path):
    run, _ = make_run(adapter={"kind": "lora", "r": 4})
    assert "Lachesis" not in (export(run, tmp_path / "early") / "README.md").read_text(), "peft's own, without a step"
    lines = JsonlSink(run / "metrics.jsonl")
    for step in range(1, 7):
        lines.write(StepRecord(step=step, values={"reward": step / 10}))
    lines.close()
    card = (export(run / "checkpoints" / "step_000002", tmp_path / "two") / "README.md").read_text()
    assert "| mean reward | 0.1 → 0.2 |" in card and "| steps | 2 of 8 |" in card
    assert "library_name: peft" in card and "GRPO by Lachesis" in card
    merged = (export(run, tmp_path / "four", merge=True) / "README.md").read_text()
    assert "| mean reward | 0.1 → 0.4 |" in merged and "library_name: transformers" in merged


def test_a_model_that_is_pushed_has_the_card_of_its_step(make_run: MakeRun):
    run, _ = make_run()
    lines = JsonlSink(run / "metrics.jsonl")
    for step in range(1, 7):
        lines.write(StepRecord(step=step, values={"reward": step / 10}))
    lines.close()
    for step, rewards in ((2, "0.1 → 0.2"), (4, "0.1 → 0.4")):
        final = export(run / "checkpoints" / f"step_{step:06d}", run / "final")
        card = write_card(run).read_text()
        assert f"| mean reward | {rewards} |" in card and f"| steps | {step} of 8 |" in card
        assert f"The model is that of step {step}. The run continued to step 6; all figures are up to" in card
        assert "0.6" not in card
    (final / "lachesis.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"lachesis\.json does not give the model's step \(KeyError: 'step'\)"):
        write_card(run)
    (final / "lachesis.json").unlink()  # as earlier versions left a model
    card = write_card(run).read_text()
    assert "| mean reward | 0.1 → 0.6 |" in card and "The model is that of" not in card


def test_what_cannot_be_exported_is_said(make_run: MakeRun, tmp_path: Path):
    run, _ = make_run()
    with pytest.raises(ConfigError, match="no adapter to merge"):
        export(run, merge=True)
    with pytest.raises(CheckpointError, match="neither a checkpoint in a run's directory nor a run"):
        export(tmp_path / "base")
    tiny_model("qwen2", hidden_size=16).save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match="is of another model than"):
        export(run)


def test_a_run_without_a_checkpoint_says_where_its_model_is(make_run: MakeRun):
    """A run that has finished has a model, and a checkpoint only if one was asked for."""
    run_dir, _ = make_run()
    for path in (run_dir / "checkpoints").iterdir():
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match=r"has no whole checkpoint -> .*checkpoint\.every_steps"):
        export(run_dir)
    (run_dir / "final").mkdir()
    with pytest.raises(CheckpointError, match=r"is a model already, not a checkpoint -> use .*/final unchanged$"):
        export(run_dir)


def finish(run: Path, *, step: int) -> None:
    """Save the model at the end of a run, as training does, and remove its checkpoints."""
    directory = export(run)
    shutil.copytree(directory, run / "final")
    note_step(run / "final", step)
    shutil.rmtree(directory)
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path)


def test_the_adapter_at_the_end_of_a_run_is_merged(make_run: MakeRun):
    run, expected = make_run(adapter={"kind": "lora", "r": 4})
    finish(run, step=8)
    with pytest.raises(CheckpointError, match=r"is an adapter already, .* -> use .*/final unchanged; --merge adds it"):
        export(run)
    for source in (run, run / "final"):
        directory = export(source, merge=True)
        assert directory == run / "models" / "step_000008"
        model = AutoModelForCausalLM.from_pretrained(directory)
        assert torch.allclose(logits(model), expected, atol=1e-4)


def test_a_merged_model_has_the_dtype_of_its_base(make_run: MakeRun, tmp_path: Path):
    run, _ = make_run(adapter={"kind": "lora", "r": 4})
    tiny_model("qwen2").bfloat16().save_pretrained(tmp_path / "base")
    assert str(AutoModelForCausalLM.from_pretrained(export(run, merge=True), dtype="auto").dtype) == "torch.bfloat16"


CONVERTER = """
import json, pathlib, sys
model, flag, out = sys.argv[1:4]
assert flag == "--outfile" and sys.argv[4:] == ["--outtype", "auto"]
config = json.loads((pathlib.Path(model) / "config.json").read_text())
if config["model_type"] != "qwen2":
    sys.exit("Model is not supported")
pathlib.Path(out).write_bytes(b"GGUF" + config["model_type"].encode())
"""


def test_llama_cpp_converts_the_merged_model(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, _ = make_run(adapter={"kind": "lora", "r": 4})
    finish(run, step=8)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DependencyError, match=r"convert_hf_to_gguf\.py, which is neither in \$LLAMA_CPP"):
        export(run, to="gguf")
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    written = export(run, to="gguf")
    assert written == run / "models" / "step_000008" / "model.gguf" and written.read_bytes() == b"GGUFqwen2"
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER.replace("qwen2", "llama"))
    with pytest.raises(DependencyError, match=r"could not convert .*: Model is not supported"):
        export(run, tmp_path / "other", to="gguf")
    assert not list((tmp_path / "other").glob("*gguf*"))


def test_the_card_says_how_the_model_is_loaded_and_names_rewards_as_they_were_given(make_run: MakeRun):
    run, _ = make_run(adapter={"kind": "lora", "r": 4}, rewards={"functions": ["given.call1.exact", "a.b"]})
    lines = JsonlSink(run / "metrics.jsonl")
    lines.write(StepRecord(step=1, values={"reward": 0.1}))
    lines.close()
    adapter = (export(run) / "README.md").read_text()
    assert "Rewards: `exact`, `a.b`." in adapter
    assert "```python\nfrom peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n\n" in adapter
    assert "--enable-lora --max-lora-rank 4 --lora-modules run=MODEL" in adapter
    merged = (export(run, merge=True) / "README.md").read_text()
    assert (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n" in merged
        and "vllm serve MODEL\n" in merged
    )
