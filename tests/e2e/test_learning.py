"""Training learns, whatever the loss and the adapter, and what it saves is what it learned."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lachesis.metrics.sinks.tape import read_groups, tape_files
from lachesis.plugins.checks import doctor
from tests.e2e.runs import Main, metrics, quickly, rewards, run_here, untimed, weights, write_reward, write_run
from tests.long import long_but

LETTER_A = 2
FINAL = {"checkpoint": {"save_final": True}}


def rise(run_dir: Path) -> float:
    """How far the mean reward of the last three steps is above that of the first three."""
    found = rewards(run_dir)
    return fmean(found[-3:]) - fmean(found[:3])


@torch.no_grad()
def share_of_a(model: PreTrainedModel | PeftModel, directory: Path) -> float:
    """Of what a model answers, greedily, with nothing but transformers."""
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    prompts = tokenizer([f"{a}{b}" for a in "abcd" for b in "abcd"], return_tensors="pt")
    tokens = model.eval().generate(**prompts, max_new_tokens=8, do_sample=False)[:, 2:]
    letters = tokens >= LETTER_A  # not <pad> and not <eos>
    return float((tokens == LETTER_A).sum() / letters.sum())


def sharpen(directory: Path) -> None:
    """A fresh model's frozen head is too flat for any adapter to make it sure of something."""
    model = Qwen2ForCausalLM.from_pretrained(directory / "model")
    with torch.no_grad():
        model.lm_head.weight *= 10
    model.save_pretrained(directory / "model")


@pytest.mark.parametrize(
    "loss_type",
    long_but(
        ["grpo", "bnpo", "dr_grpo", "dapo"],
        short=["grpo"],
        why="test_loss_types.py::test_every_loss_reaches_what_grpo_reaches: the same losses, held against GRPO",
    ),
)
def test_every_loss_learns(tmp_path: Path, loss_type: str):
    summary = run_here(write_run(tmp_path, **quickly(algorithm={"loss_type": loss_type})))
    assert summary.finished
    assert rise(summary.run_dir) > 0.6


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"importance_sampling_level": "sequence"}},
        {"algorithm": {"scale_rewards": "none", "beta": 0.01}},
        {"optimizer": {"kind": "adafactor", "learning_rate": 1e-2}},
        {"model": {"dtype": "bfloat16"}},
        {"model": {"packing": "padded"}, "batch": {"prompts_per_step": 16, "max_tokens_per_microbatch": 128}},
    ],
    ids=["sequence ratios", "kl", "adafactor", "bfloat16", "padded micro-batches"],
)
def test_so_do_other_settings(tmp_path: Path, sections: dict):
    config = write_run(tmp_path, **quickly(**{"model": {}, **sections}))
    assert rise(run_here(config).run_dir) > 0.6


CORRECTED = {"algorithm": {"sampler_correction": "token_truncate"}}


@pytest.mark.parametrize(
    "streaming",
    [
        pytest.param(
            False,
            id="whole",
            marks=pytest.mark.long(
                "test_it_learns_while_it_generates_ahead_and_goes_on_after_a_stop[streaming]: batches as a whole"
            ),
        ),
        pytest.param(True, id="streaming"),
    ],
)
def test_it_learns_while_it_generates_ahead_and_goes_on_after_a_stop(tmp_path: Path, streaming: bool):
    """In one process, a group at a time; who was in line at the stop is trained on, and no prompt is left out."""
    pipeline = {"async_prefetch": True, "prefetch_depth": 2, "streaming": streaming}
    config = write_run(tmp_path, pipeline=pipeline, **CORRECTED)
    run_here(config, stop_after=10)
    summary = run_here(config, resume=True)
    assert summary.finished and rise(summary.run_dir) > 0.6
    ages = [line.values["staleness"] for line in metrics(summary.run_dir).steps]
    assert 0 < max(ages) <= 2
    trained = [group for path in tape_files(summary.run_dir / "rollouts").values() for group in read_groups(path)]
    times = Counter(group.prompt.id for group in trained)
    assert max(times.values()) - min(times.values()) <= 2, "but for those in line at the end"


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_without_staleness_generating_ahead_is_synchronous_bit_by_bit(tmp_path: Path, streaming: bool):
    ahead = {"async_prefetch": True, "max_staleness": 0, "streaming": streaming, "streaming_min_groups": 2}
    found, trained = [], []
    for name, pipeline in (("plain", {}), ("ahead", ahead)):
        run_dir = run_here(write_run(tmp_path / name, pipeline=pipeline, **CORRECTED, **FINAL), "run.steps=4").run_dir
        values = [line.values for line in metrics(run_dir).steps]
        found.append([{k: v for k, v in one.items() if "_time" not in k and "_per_s" not in k} for one in values])
        trained.append(weights(run_dir))
    assert found[0] == found[1]
    assert trained[0].keys() == trained[1].keys()
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "plain/model").state_dict()
    for name, plain in trained[0].items():
        assert torch.equal(plain, trained[1][name]), name
    assert any(not torch.equal(plain, start[name]) for name, plain in trained[0].items())


def test_memory_does_not_creep_over_lengths_drawn_anew(tmp_path: Path):
    """What is alive between two steps: the weights, the optimizer's state, and no batch of the steps before."""
    body = f"""
import gc, torch
if call % 5 == 1:
    gc.collect()
    alive = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    with open({str(tmp_path / "alive")!r}, "a") as file:
        print(len(alive), sum(one.nbytes for one in alive), file=file)
return shares
"""
    summary = run_here(
        write_run(
            tmp_path,
            run={"steps": 31},
            batch={"prompts_per_step": 4},
            sampling={"max_completion_length": 24, "num_generations": 4},
            optimizer={"learning_rate": 1e-9},  # lengths stay as ragged as they are
            rewards={"functions": [write_reward(tmp_path, body)], "num_workers": 0},  # it counts this process's tensors
        )
    )
    assert len({line.values["tokens_forward"] for line in metrics(summary.run_dir).steps}) > 20
    alive = [tuple(map(int, line.split())) for line in (tmp_path / "alive").read_text().splitlines()]
    assert len(alive) == 7, "the first before any step, the others from the fifth on"
    counts, sizes = zip(*alive[1:], strict=True)
    assert len(set(counts)) == 1, counts
    assert max(sizes[3:]) < 1.05 * max(sizes[:3]), "the last batch, which differs, is a small part of it"


def test_several_steps_of_one_generation_learn_and_their_ratios_are_clipped(tmp_path: Path):
    """GSPO; stopped in the middle of a generation and resumed, bit by bit as it would have gone on."""
    sections = {
        "batch": {"steps_per_generation": 3, "prompts_per_step": 5},
        "algorithm": {"importance_sampling_level": "sequence", "epsilon": 0.003, "epsilon_high": 0.004},
    }
    found = []
    for name, stop in (("straight", None), ("stopped", 10)):
        config = write_run(tmp_path / name, **sections)
        if stop is not None:
            run_here(config, stop_after=stop)
        run_dir = run_here(config, resume=stop is not None).run_dir
        found.append(list(untimed(run_dir)[0].values()))
    assert found[0] == found[1]
    assert rise(run_dir) > 0.5
    clipped = [one.get("clip_fraction_low", 0.0) + one.get("clip_fraction_high", 0.0) for one in found[0]]
    assert max(clipped[::3]) == 0 < min(clipped[1:6:3] + clipped[2:6:3])
    assert {one["staleness"] for one in found[0][2::3]} == {2.0}


def test_full_fine_tuning_saves_a_model_that_transformers_loads(tmp_path: Path):
    summary = run_here(write_run(tmp_path, **FINAL))
    final = summary.run_dir / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    assert isinstance(model, Qwen2ForCausalLM)
    assert AutoTokenizer.from_pretrained(final)("abcd")["input_ids"] == [2, 3, 4, 5]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert share_of_a(base, tmp_path) < 0.5
    assert share_of_a(model, tmp_path) > 0.95


def test_lora_learns_and_saves_an_adapter_that_peft_loads(tmp_path: Path):
    config = write_run(tmp_path, adapter={"kind": "lora", "r": 8}, **FINAL)
    sharpen(tmp_path)
    summary = run_here(config)
    assert rise(summary.run_dir) > 0.4

    final = summary.run_dir / "final"
    assert (final / "adapter_config.json").is_file()
    assert not (final / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert share_of_a(base, tmp_path) < 0.5
    assert share_of_a(PeftModel.from_pretrained(base, str(final)), tmp_path) > 0.95


@pytest.mark.parametrize(
    "adapter",
    [{"kind": "none"}, {"kind": "lora", "r": 8, "targets": ["q_proj", "gate_proj", "up_proj", "down_proj"]}],
    ids=["all weights", "an adapter of each expert"],
)
def test_a_mixture_of_experts_learns(tmp_path: Path, adapter: dict):
    """A Qwen3-MoE, packed, with grouped products; its experts are saved one by one, as files have them.

    The adapter's learns through the experts that the embedded engine used, from groups that were kept for two steps.
    """
    replays = adapter["kind"] == "lora"
    algorithm = {"router_replay": replays, "num_iterations": 2 if replays else 1}
    config = write_run(tmp_path, adapter=adapter, algorithm=algorithm, **FINAL)
    write_mixture(tmp_path / "model", sharp=adapter["kind"] == "lora")
    summary = run_here(config)
    assert rise(summary.run_dir) > 0.4
    lines = metrics(summary.run_dir).steps
    assert all(1 <= one.values["expert_load_max"] <= 4 for one in lines)
    differing = [one.values.get("router_replay_difference") for one in lines]
    # Sampled under the weights of now they are the same; in the second step on them the router has moved.
    assert max(differing[::2]) < 0.01 < max(differing[1::2]) if replays else differing == [None] * len(lines)
    final = summary.run_dir / "final"
    base = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "model")
    assert base.config._experts_implementation == "grouped_mm"
    if adapter["kind"] == "none":
        assert "model.layers.1.mlp.experts.3.up_proj.weight" in weights(summary.run_dir)
        model = AutoModelForCausalLM.from_pretrained(final)
    else:
        model = PeftModel.from_pretrained(base, str(final))
    assert share_of_a(model, tmp_path) > 0.95


def write_mixture(directory: Path, *, sharp: bool) -> None:
    """Four experts, two of which a token goes through, in the place of the doctor's model.

    Its configuration asks for the auxiliary loss; ``sharp`` as :func:`sharpen`.
    """
    torch.manual_seed(0)
    doctors = AutoConfig.from_pretrained(directory).to_dict()
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += ("max_position_embeddings", "pad_token_id", "eos_token_id")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    sizes |= {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{name: doctors[name] for name in kept}, **sizes))
    with torch.no_grad():
        model.lm_head.weight *= 10 if sharp else 1
    model.save_pretrained(directory)


def test_held_out_accuracy_is_measured_before_and_after(tmp_path: Path):
    config = write_run(tmp_path, data={"eval_size": 4}, evaluation={"every_steps": 10, "success_reward": 0.99})
    summary = run_here(config)
    assert [result.step for result in summary.evaluations] == [0, 10, 20, 30]
    assert summary.evaluations[0].accuracy <= 0.25
    assert summary.evaluations[-1].accuracy == 1.0
    assert {result.problems for result in summary.evaluations} == {4}
    tape = tape_files(summary.run_dir / "rollouts").values()
    trained = {group.prompt.text for path in tape for group in read_groups(path)}
    assert len(trained) == 12, "held-out problems are not trained on"


def test_every_step_is_proved_on_policy_and_told(tmp_path: Path):
    summary = run_here(write_run(tmp_path), "run.steps=5")
    lines = metrics(summary.run_dir).steps
    assert [line.step for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        values = line.values
        assert values["weight_version"] == line.step
        assert 0 <= values["canary_error"] < 1e-3
        assert values["staleness"] == 0
        assert values["mean_ratio"] == pytest.approx(1.0, abs=1e-4), "sampled and trained under the same weights"
        assert values["groups"] == 16
        assert values["tokens_trained"] == values["tokens_generated"]
    assert summary.report.is_file()


class TestDoctor:
    def test_it_proves_that_training_learns(self, main: Main, tmp_path: Path):
        outcome = main("doctor", write_run(tmp_path))
        assert outcome.code == 0
        assert outcome.err == ""
        last = outcome.out.splitlines()[-1]
        found = re.fullmatch(r"ok +learning +reward (0\.\d\d) -> (\d\.\d\d) in 30 steps \(\d+ s\)", last)
        assert found, outcome.out
        assert float(found[2]) - float(found[1]) > 0.6

    def test_what_is_wrong_is_shown_and_is_its_exit_code(self, main: Main, tmp_path: Path):
        config = write_run(tmp_path, run={"stepz": 3})
        outcome = main("doctor", config, "--no-proof")
        assert outcome.code == 1
        (line,) = [line for line in outcome.out.splitlines() if line.startswith("fail")]
        assert str(config) in line
        assert "run.stepz" in line
        assert "did you mean" in line

    def test_a_model_that_does_not_learn_is_a_failure(self, main: Main, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(doctor, "PROOF_STEPS", 2)
        outcome = main("doctor")
        assert outcome.code == 1
        assert re.search(r"fail +learning +reward", outcome.out)
