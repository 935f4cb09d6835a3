from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lachesis.common.errors import ConfigError
from lachesis.config.document import parse_document
from lachesis.config.load import validate
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.dialects import recognize, translate
from lachesis.plugins.dialects.defaults import default_findings
from lachesis.train.optim.optimizer import build_optimizer

BASE = """\
base_model: org/model
rl: grpo
datasets: [{path: org/data}]
max_steps: 10
micro_batch_size: 8
"""
TRL = "trl:\n  reward_funcs: [rewards.exact]\n"
NO_LENGTH = "max_completion_length: left out, so completions there end with the model's context"


def translated(text: str = "", trl: str = "", *, processes: int = 1) -> LachesisConfig:
    return validate(translation(text, trl, processes=processes).document)


def translation(text: str = "", trl: str = "", *, processes: int = 1):
    """The translation without its warning that most of these files leave the length of completions out."""
    lines = "".join(f"  {line}\n" for line in trl.splitlines())
    document = parse_document(f"{BASE}{TRL}{lines}{text}", name="a.yaml")
    found = translate(document, dialect="axolotl", processes=processes)
    found.findings = [finding for finding in found.findings if NO_LENGTH not in finding.message]
    return found


def message(text: str = "", trl: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        translated(text, trl)
    return caught.value.message


def test_what_is_not_paged_is_said():
    messages = [finding.message for finding in translation("optimizer: paged_adamw_32bit").findings]
    assert any(message.startswith("optimizer: its states are not paged out") for message in messages)
    assert not translation("optimizer: adamw_torch").findings


@pytest.mark.parametrize(
    ("trl", "text", "told"),
    [
        ("", "", True),
        ("max_completion_length: null", "", True),
        ("max_completion_length: 9", "", False),
        ("", "max_completion_length: 9", False),
        ("generation_kwargs: {max_tokens: 9}", "", False),
    ],
)
def test_a_file_without_a_length_of_completions_is_told_what_it_means_there(trl: str, text: str, told: bool):
    document = parse_document(f"{BASE}{TRL}  {trl}\n{text}", name="a.yaml")
    found = translate(document, dialect="axolotl")
    assert any(NO_LENGTH in finding.message for finding in found.findings) == told
    assert validate(found.document).sampling.max_completion_length == (512 if told else 9)


def test_muon_is_taken_where_it_is_the_same():
    optimizer = translated("optimizer: muon\nadapter: lora").optimizer
    assert (optimizer.kind, optimizer.betas) == ("muon", (0.95, 0.95))
    both = translated("optimizer: muon\nadapter: lora\nadam_beta1: 0.9\nadam_beta2: 0.99").optimizer
    assert both.betas == (0.9, 0.99)
    assert "optimizer (line 8): Axolotl's muon trains no norms" in message("optimizer: muon")
    with pytest.raises(ConfigError, match="with 2 processes Axolotl's muon has steps of another size"):
        translated("optimizer: muon\nadapter: lora", processes=2)


def test_muon_s_step_is_axolotl_s(monkeypatch: pytest.MonkeyPatch):
    """By Muon.step of axolotl-contribs-mit 0.0.6, which Axolotl 0.19 requires.

    Both iterate in bfloat16, rounded in another order; in float32 the formulas are the same.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    plain = "lr_scheduler: constant\nwarmup_steps: 0\nmax_grad_norm: 0\nweight_decay: 0.1"
    config = translated(f"optimizer: muon\nadapter: lora\n{plain}").optimizer
    start, rate, decay, momentum = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), 1e-2, 0.1, 0.95
    gradients = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    ours = torch.nn.Parameter(start.clone())
    optimizer = build_optimizer([("lora_A.weight", ours)], config, learning_rate=rate, total_steps=9)
    theirs, buffer = start.clone(), torch.zeros(6, 4)
    for gradient in gradients:
        ours.grad = gradient.clone()
        optimizer.step()
        buffer.mul_(momentum).add_(gradient)
        update = orthogonal(gradient.add(buffer, alpha=momentum))
        theirs.mul_(1 - rate * decay).add_(update, alpha=-rate * 0.2 * math.sqrt(6))
    assert (theirs - start).abs().max() > 1e-3
    torch.testing.assert_close(ours.detach(), theirs, atol=1e-6, rtol=0)


def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    """Their Newton-Schulz iteration of a matrix with more rows than columns."""
    a, b, c = 3.4445, -4.7750, 2.0315
    found = gradient.bfloat16().T
    found = found / (found.norm() + 1e-7)
    for _ in range(5):
        square = found @ found.T
        found = a * found + (b * square + c * square @ square) @ found
    return found.T


def test_weights_are_of_one_dtype():
    assert "fp16 (line 9): true, and so is bf16" in message("bf16: true\nfp16: true")
    assert translated("bf16: true\nbfloat16: true\nfp16: false").model.dtype == "bfloat16"


def test_an_adapter_of_no_layer_is_refused():
    found = message("adapter: lora\nlora_target_modules: []")
    assert "(line 9: lora_target_modules): expected text or non-empty list of text, got a list []" in found
    assert translated("adapter: lora\nlora_target_modules: []\nlora_target_linear: true").adapter.kind == "lora"


def test_the_server_s_keys_of_earlier_versions():
    shares = "vllm_max_model_len: 800\nvllm_gpu_memory_utilization: 0.8\nvllm_device: auto"
    own = f"use_vllm: true\nvllm_mode: colocate\n{shares}"
    engine = translated("vllm: {gpu_memory_utilization: 0.2}", own).engine
    assert engine.kind == "vllm"
    assert (engine.max_model_len, engine.gpu_memory_utilization, engine.devices) == (800, 0.2, None)


def test_the_engine_has_room_for_the_longest_prompt_and_completion():
    served = "use_vllm: true\nvllm_mode: colocate\nmax_completion_length: 500"
    found = translation("sequence_len: 800\nvllm: {max_model_len: 800}", served)
    engine = validate(found.document).engine
    assert engine.kind == "vllm" and engine.max_model_len == 1300
    assert any("max_model_len: 1300 instead of 800" in finding.message for finding in found.findings)


def test_completions_of_texts_are_texts():
    assert translated().rewards.text_completions == "text"


@pytest.mark.parametrize(
    ("data", "dialect"),
    [
        ({"base_model": "m", "adapter": "lora", "optimizer": "adamw"}, "axolotl"),
        ({"trl": {}, "batch": {}}, "canonical"),
        ({"run": {}, "model": {}, "optimizer": {}}, "canonical"),
        ({"model_name_or_path": "m", "learning_rate": 1e-6, "num_generations": 8}, "trl"),
        ({"nonsense": 1}, "canonical"),
        ({}, "canonical"),
    ],
)
def test_whose_file_it_is(data, dialect):
    assert recognize(data) == dialect


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("adapter: qlora", "model.quantization", "nf4"),
        ("adapter: lora\nlora_target_modules: [q_proj]", "adapter.targets", ["q_proj"]),
        ("adapter: lora\npeft_layers_to_transform: [0, 2]", "adapter.layers", [0, 2]),
        ("fp16: true", "model.dtype", "float16"),
        ("fp8: true", "model.matmul_dtype", "float8"),
        ("fp8: false\nfp8_config: {recipe_name: rowwise}", "model.matmul_dtype", "auto"),
        ("fp8: true\nfp8_config: {recipe_name: tensorwise, backend: AO}", "model.matmul_dtype", "float8"),
        ("fp8: true\nfp8_config: {recipe_name: rowwise, pad_inner_dim: true}", "model.matmul_dtype", "float8_rowwise"),
        ("bf16: auto", "model.dtype", "auto"),
        ("bf16: false", "model.dtype", "auto"),
        ("torch_compile: auto", "model.compile", "auto"),
        ("torch_compile: false", "model.compile", "off"),
        ("gradient_checkpointing: offload", "model.gradient_checkpointing", True),
        ("activation_offloading: true\ngradient_checkpointing: true", "model.activations", "offload"),
        ("activation_offloading: legacy", "model.activations", "offload"),
        ("activation_offloading: false\ngradient_checkpointing: true", "model.activations", "keep"),
        ("chat_template: jinja\nchat_template_jinja: '{{ x }}'", "model.chat_template", "{{ x }}"),
        ("optimizer: adamw_bnb_8bit", "optimizer.kind", "adamw_8bit"),
        ("optimizer: paged_adamw_8bit", "optimizer.kind", "adamw_8bit"),
        ("optimizer: paged_adamw_32bit", "optimizer.kind", "adamw"),
        ("lr_scheduler: constant_with_warmup", "optimizer.schedule", "constant"),
        ("", "optimizer.schedule", "cosine"),
        ("warmup_ratio: 0.25", "optimizer.warmup_ratio", 0.25),
        ("learning_rate: '2e-6'", "optimizer.learning_rate", 2e-6),
        ("adam_beta2: 0.95", "optimizer.betas", (0.9, 0.95)),
        ("max_grad_norm: 0", "optimizer.max_grad_norm", None),
        ("max_grad_norm: 0.5", "optimizer.max_grad_norm", 0.5),
        ("save_steps: 0.5", "checkpoint.every_steps", 5),
        ("save_total_limit: 1", "checkpoint.keep_last", 1),
        ("eval_steps: 5\nval_set_size: 2", "evaluation.every_steps", 5),
        ("eval_steps: 5\nval_set_size: 0.0", "evaluation.every_steps", 0),
        ("evals_per_epoch: 2\nval_set_size: 2", "evaluation.every_epochs", 0.5),
        ("eval_strategy: epoch\nval_set_size: 2", "evaluation.every_epochs", 1.0),
        ("evals_per_epoch: 2", "evaluation.every_epochs", None),
        ("", "checkpoint.every_epochs", 1.0),
        ("save_steps: 5", "checkpoint.every_epochs", None),
        ("saves_per_epoch: 4", "checkpoint.every_epochs", 0.25),
        ("save_strategy: 'no'", "checkpoint.every_epochs", None),
        ("save_strategy: steps", "checkpoint.every_steps", 500),
        ("", "checkpoint.keep_last", 4),
        ("save_strategy: 'no'", "checkpoint.keep_last", 2),
        ("", "optimizer.warmup_ratio", 0.03),
        ("warmup_steps: 0", "optimizer.warmup_ratio", 0.0),
        ("val_set_size: 20.0", "data.eval_size", 20),
        ("sequence_len: 99\nexcess_length_strategy: raise", "data.overlong_prompts", "error"),
        ("test_datasets: [{path: e.jsonl, split: test}]", "data.eval_split", "test"),
        ("wandb_project: p\nwandb_name: n", "logging.wandb.name", "n"),
        ("seed: 7", "run.seed", 7),
        ("", "run.seed", 42),
    ],
)
def test_keys_at_the_top(text, path, value):
    assert written(translated(text), path) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp8: e4m3", "fp8 (line 8): expected true or false, got the text 'e4m3'"),
        ("fp8: true\nfp8_config: {recipe_name: rowwise_with_gw_hp}", "'rowwise_with_gw_hp' has no counterpart"),
        ("fp8: true\nfp8_config: {backend: TE}", "'TE' has no counterpart; Lachesis has ao (torchao)"),
        ("fp8: true\nfp8_config: {amax: 0}", "fp8_config.amax (line 9): not a key of Axolotl"),
        ("fp8: true\nfp8_config: {margin: 1}", "an option of TransformerEngine or MS-AMP"),
        ("fp8: true\nfp8_config: {emulate: true}", "follows from the recipe and the device here"),
    ],
)
def test_of_fp8_what_torchao_does_not_do_here_is_refused(text, expected):
    assert expected in message(text)


def test_weights_are_not_gathered_in_fp8():
    text = "fp8: true\nfp8_enable_fsdp_float8_all_gather: true\nfp8_config: {enable_fsdp_float8_all_gather: true}"
    findings = translation(text).findings
    assert [finding.level for finding in findings] == ["warning", "warning"]
    assert all("gathered in their own dtype" in finding.message for finding in findings)


@pytest.mark.parametrize(
    ("trl", "path", "value"),
    [
        ("loss_type: null", "algorithm.loss_type", "dapo"),
        ("loss_type: bnpo", "algorithm.loss_type", "bnpo"),
        ("scale_rewards: true", "algorithm.scale_rewards", "group"),
        ("scale_rewards: false", "algorithm.scale_rewards", "none"),
        ("scale_rewards: batch", "algorithm.scale_rewards", "batch"),
        ("sync_ref_model: true\nbeta: 0.1", "algorithm.kl_reference", "ema"),
        ("sync_ref_model: true", "algorithm.ref_mixup_alpha", 0.9),
        ("sync_ref_model: true", "algorithm.ref_sync_steps", 64),
        ("sync_ref_model: true\nref_model_sync_steps: 8", "algorithm.ref_sync_steps", 8),
        ("ref_model_mixup_alpha: 0.5", "algorithm.ref_mixup_alpha", 0.6),
        ("top_k: -1", "sampling.top_k", 0),
        ("generation_kwargs: {frequency_penalty: 0.5, bad_words: [x]}", "sampling.frequency_penalty", 0.5),
        (
            "generation_kwargs: {stop_token_ids: [3], bad_words: [x]}",
            "sampling.generation_kwargs",
            {"bad_words": ["x"]},
        ),
        ("vllm_guided_decoding_regex: a+", "sampling.guided_regex", "a+"),
        ("rollout_func: env.rollout", "source.rollout_func", "env.rollout"),
        ("log_completions: true", "logging.completions", "all"),
        ("log_completions: true\nnum_completions_to_print: 2", "logging.completions", 2),
        ("log_completions: false\nnum_completions_to_print: 2", "logging.completions", 0),
        ("use_vllm: true\nvllm_server_timeout: 90", "deadlines.generation_s", 90.0),
        ("use_vllm: true\nvllm_server_timeout: 90", "engine.wait_s", 90.0),
        ("reward_num_workers: 1", "rewards.num_workers", 0),
        ("reward_num_workers: 3", "rewards.num_workers", 3),
        ("async_prefetch: true\nvllm_sync_interval: 2", "pipeline.max_staleness", 4),
        ("async_prefetch: true\nvllm_sync_interval: 8\nprefetch_depth: 2", "pipeline.max_staleness", 9),
        ("async_prefetch: true\nprefetch_depth: 3\nnum_iterations: 2", "pipeline.max_staleness", 7),
        ("async_prefetch: true\ngeneration_batch_size: 4", "pipeline.max_staleness", 7),
        ("vllm_sync_interval: 8", "pipeline.max_staleness", 4),
        ("mask_truncated_completions: true", "algorithm.mask_truncated", True),
        ("num_iterations: 2", "algorithm.num_iterations", 2),
        ("use_bias_correction_kl: true", "algorithm.use_bias_correction_kl", True),
        ("max_completion_length: null", "sampling.max_completion_length", 512),
        ("chat_template_kwargs: {enable_thinking: false}", "data.chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_keys_below_trl(trl, path, value):
    assert written(translated(trl=trl), path) == value


@pytest.mark.parametrize(
    ("trl", "engine", "bridge"),
    [
        ("use_vllm: false", "embedded", "in_process"),
        ("use_vllm: false\nvllm_mode: colocate\nvllm_sync_interval: 2", "embedded", "in_process"),
        ("use_vllm: true", "http", "broadcast"),
        ("use_vllm: true\nvllm_lora_sync: true", "http", "lora_only"),
        ("use_vllm: true\nvllm_mode: colocate", "vllm", "broadcast"),
        ("use_vllm: true\nvllm_mode: colocate\nvllm_lora_sync: true", "vllm", "lora_only"),
    ],
)
def test_engine_and_bridge(trl, engine, bridge):
    config = translated(trl=trl)
    assert (config.engine.kind, config.bridge.kind) == (engine, bridge)


@pytest.mark.parametrize(
    ("text", "trl", "url"),
    [
        ("", "", "http://127.0.0.1:8000"),
        ("", "vllm_server_host: gpu7\nvllm_server_port: 9", "http://gpu7:9"),
        ("vllm: {host: 0.0.0.0, port: 8001}", "vllm_server_host: null", "http://127.0.0.1:8001"),
        ("vllm: {host: box, port: 8001}", "vllm_server_port: 8002", "http://box:8002"),
    ],
)
def test_where_the_server_is(text, trl, url):
    config = translated(text, f"use_vllm: true\n{trl}")
    assert config.engine.kind == "http"
    assert config.engine.urls == [url]


def test_a_server_that_listens_elsewhere_than_the_trainer_asks():
    assert not translation("vllm: {port: 8001}", "use_vllm: true\nvllm_server_port: 8001").findings
    (finding,) = translation("vllm: {port: 8001}", "use_vllm: true\nvllm_server_port: 8000").findings
    assert (finding.level, finding.message) == (
        "warning",
        "vllm.port: the server listens at 8001, but the trainer's address is 8000",
    )


def test_trackers_are_translated():
    logging = translated("use_trackio: true\ntrackio_space_id: me/space").logging
    assert logging.trackio is not None
    assert (logging.trackio.project, logging.trackio.space, logging.trackio.name) == ("huggingface", "me/space", None)
    assert translated("trackio_run_name: r").logging.trackio is None


def test_a_held_out_file_is_one_that_is_read():
    found = translation("test_datasets: [{path: json, data_files: [held.jsonl], ds_type: json}]")
    assert found.document.data["data"]["eval_path"] == "held.jsonl"
    assert not [f.message for f in found.findings if "data_files" in f.message]


def test_the_wait_for_a_server_has_their_length():
    assert translated(trl="use_vllm: true").engine.wait_s == 240  # pyright: ignore[reportAttributeAccessIssue]


def test_a_strategy_that_counts_neither_steps_nor_epochs_is_said():
    found = translation("save_strategy: best")
    assert [f.level for f in found.findings] == ["warning"]
    assert "save_strategy: best" in found.findings[0].message


def test_a_server_of_its_own_takes_the_section_of_the_server():
    config = translated("vllm: {port: 8005, tensor_parallel_size: 2}", "use_vllm: true\nvllm_mode: colocate")
    assert config.engine.kind == "vllm"
    assert (config.engine.port, config.engine.tensor_parallel_size) == (8005, 2)


@pytest.mark.parametrize(
    ("trl", "mode", "low", "high"),
    [
        ("use_vllm: false", "none", None, 3.0),
        ("use_vllm: true", "sequence_mask", None, 3.0),
        ("use_vllm: true\nvllm_importance_sampling_correction: false", "none", None, 3.0),
        ("use_vllm: true\nuse_data_producer: true", "token_truncate", pytest.approx(1 / 3), 3.0),
        ("use_vllm: true\nasync_prefetch: true\nvllm_importance_sampling_cap: 2", "token_truncate", 0.5, 2.0),
        ("use_vllm: true\nasync_prefetch: true\nvllm_importance_sampling_mode: token_mask", "token_mask", None, 3.0),
        ("use_vllm: true\nvllm_importance_sampling_clip_min: 0.2", "sequence_mask", 0.2, 3.0),
    ],
)
def test_the_correction_for_the_sampler(trl, mode, low, high):
    """Truncation has a floor in the asynchronous trainer; a mask has none, or it would mask nothing."""
    algorithm = translated(trl=trl).algorithm
    assert (algorithm.sampler_correction, algorithm.sampler_correction_min) == (mode, low)
    assert algorithm.sampler_correction_max == high


@pytest.mark.parametrize(
    ("rows", "accumulation", "processes", "group", "prompts"), [(2, 4, 1, 8, 1), (2, 4, 4, 8, 4), (3, 8, 1, 6, 4)]
)
def test_batches_are_counted_in_prompts(rows, accumulation, processes, group, prompts):
    text = f"micro_batch_size: {rows}\ngradient_accumulation_steps: {accumulation}"
    base = parse_document(f"{BASE.replace('micro_batch_size: 8', '')}{TRL}  num_generations: {group}\n{text}", name="a")
    config = validate(translate(base, dialect="axolotl", processes=processes).document)
    assert (config.batch.prompts_per_step, config.batch.micro_batch_size) == (prompts, rows)
    assert config.batch.prompts_per_step * group == rows * accumulation * processes


def test_a_batch_that_holds_no_whole_groups_names_the_nearest_that_do():
    text = message("gradient_accumulation_steps: 5", "num_generations: 12")
    assert "micro_batch_size 8 x gradient_accumulation_steps 5 x 1 process = 40 completions" in text
    assert "gradient_accumulation_steps 3 or 6, or trl.num_generations 10 or 20" in text
    for steps in (3, 6):
        assert translated(f"gradient_accumulation_steps: {steps}", "num_generations: 12").batch.prompts_per_step
    for group in (10, 20):
        assert translated("gradient_accumulation_steps: 5", f"num_generations: {group}").batch.prompts_per_step


def test_a_generation_batch_counts_prompts():
    assert not translation(trl="generation_batch_size: 1").findings
    assert translated(trl="generation_batch_size: 4").batch.steps_per_generation == 4
    (finding,) = translation(trl="generation_batch_size: 4").findings
    assert finding.level == "warning" and "its code counts completions" in finding.message
    smaller = translation("gradient_accumulation_steps: 4", "generation_batch_size: 2")
    assert (validate(smaller.document).batch.steps_per_generation, smaller.findings) == (1, [])
    text = message("gradient_accumulation_steps: 4", "generation_batch_size: 6")
    assert "not a multiple of the 4 prompts of an optimizer step; the nearest that fit: 4 or 8 prompts" in text


def test_several_datasets():
    text = BASE.replace("[{path: org/data}]", "[{path: a.jsonl, type: x.f}, {path: json, data_files: [b.jsonl]}]") + TRL
    config = validate(translate(parse_document(text, name="a"), dialect="axolotl").document)
    assert (config.data.path, config.data.transform) == ("a.jsonl", "x.f")
    assert [(dataset.path, dataset.transform) for dataset in config.data.more] == [("b.jsonl", None)]


@pytest.mark.parametrize(
    ("text", "trl", "expected"),
    [
        (
            "mirco_batch_size: 2",
            "",
            "mirco_batch_size (line 8): not a key of Axolotl that Lachesis knows; did you mean mi",
        ),
        (
            "",
            "epsilom: 0.1",
            "trl.epsilom (line 8): not a key of Axolotl that Lachesis knows; did you mean trl.epsilon?",
        ),
        ("num_generations: 4", "", "did you mean trl.num_generations?"),
        ("", "beta: x", "algorithm.beta (line 8: trl.beta): expected a number >= 0, got the text 'x'"),
        ("", "loss_type: dapoo", "algorithm.loss_type (line 8: trl.loss_type): expected one of grpo, bnpo"),
        ("", "num_generations: 1.5", "trl.num_generations (line 8): expected a whole number >= 1, got the number 1.5"),
        ("", "use_vllm: true\nvllm_mode: both", "trl.vllm_mode (line 9): expected server or colocate, got 'both'"),
        (
            "vllm: {port: abc}",
            "use_vllm: true\nvllm_server_port: 8000",
            "vllm.port (line 10): expected a port, a number",
        ),
        ("vllm: 3", "", "vllm (line 8): expected keys, got the number 3"),
        ("optimizer: lion", "", "optimizer (line 8): the text 'lion' has no counterpart; Lachesis has adamw,"),
        ("optimizer: adamw_torch_fusedd", "", "did you mean adamw_torch_fused?"),
        ("adapter: ia3", "", "adapter (line 8): the text 'ia3' has no counterpart"),
        (
            "chat_template: llama3",
            "",
            "chat_template (line 8): the text 'llama3' is a template of Axolotl",
        ),
        ("lora_modules_to_save: [lm_head]", "", "lora_modules_to_save (line 8): Lachesis trains plain LoRA"),
        ("output_dir: .", "", "output_dir (line 8): expected a directory for the run alone"),
        ("excess_length_strategy: truncate\nsequence_len: 9", "", "a truncated prompt asks another question"),
        ("test_datasets: [{path: a}, {path: b}]", "", "test_datasets (line 8): Lachesis holds out problems of one"),
        ("special_tokens: {additional_special_tokens: [x]}", "", "Lachesis adds no tokens to a model"),
        ("resume_from_checkpoint: x", "", "resume with `lachesis train CONFIG --resume`"),
        ("", "generation_kwargs: 3", "trl.generation_kwargs (line 8): expected a mapping, got the number 3"),
        ("", "vllm_importance_sampling_correction: 2\nuse_vllm: true", "expected true or false, got the number 2"),
    ],
)
def test_errors_name_the_line_and_the_key_of_the_file(text, trl, expected):
    assert expected in message(text, trl)


@pytest.mark.parametrize(
    ("datasets", "expected"),
    [
        ("[{path: a, type: alpaca}]", "datasets[0].type (line 3): expected the import path of a transform"),
        (
            "[{path: a, typ: x.f}]",
            "datasets[0].typ (line 3): not a key of Axolotl that Lachesis knows; did you mean datasets.type?",
        ),
        ("[3]", "datasets[0] (line 3): expected keys, got the number 3"),
        ("[{path: json, data_files: [a, b]}]", "datasets[0].data_files (line 3): Lachesis reads one file a dataset"),
        ("", "Axolotl's datasets.path (line 3): missing, but required (here data.path)"),
    ],
)
def test_errors_in_datasets(datasets, expected):
    text = BASE.replace("[{path: org/data}]", datasets) + TRL
    with pytest.raises(ConfigError) as caught:
        validate(translate(parse_document(text, name="a.yaml"), dialect="axolotl").document)
    assert expected in caught.value.message


@pytest.mark.parametrize("rl", ["dpo", ""])
def test_other_methods_are_refused(rl):
    text = BASE.replace("rl: grpo", f"rl: {rl}" if rl else "seed: 1") + TRL
    with pytest.raises(ConfigError, match="Lachesis trains with GRPO; write rl: grpo"):
        validate(translate(parse_document(text, name="a.yaml"), dialect="axolotl").document)


@pytest.mark.parametrize(
    ("text", "trl", "name"),
    [
        ("lora_r: 8", "", "lora_r"),
        ("wandb_name: x", "", "wandb_name"),
        ("excess_length_strategy: drop", "", "excess_length_strategy"),
        ("", "ref_model_sync_steps: 8", "trl.ref_model_sync_steps"),
        ("", "vllm_importance_sampling_cap: 2.0", "trl.vllm_importance_sampling_cap"),
        ("chat_template_jinja: '{{ x }}'", "", "chat_template_jinja"),
    ],
)
def test_what_does_nothing_with_the_rest_is_told(text, trl, name):
    (finding,) = translation(text, trl).findings
    assert (finding.level, finding.message) == ("note", f"{name}: has no effect with the rest of this file")


def test_a_held_out_dataset_with_a_type_of_its_own():
    (finding,) = translation("test_datasets: [{path: e.jsonl, type: other.f}]").findings
    assert finding.level == "warning" and "are read like the first of datasets" in finding.message


def test_what_means_nothing_here_is_told_and_null_is_not():
    found = translation(
        "ddp_find_unused_parameters: true\nattn_implementation: null\nfsdp: null", "use_liger_loss: true"
    )
    assert [(finding.level, finding.message) for finding in found.findings] == [
        (
            "note",
            "2 keys without meaning here: ddp_find_unused_parameters, trl.use_liger_loss "
            "(`lachesis explain KEY` says why)",
        )
    ]
    (alone,) = translation("tf32: true").findings
    assert alone.message == "tf32: matrix products are as precise as torch's default"


def written(config: LachesisConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def test_gdpo_normalizes_each_reward_first():
    text = BASE.replace("rl: grpo", "rl: gdpo") + TRL
    config = validate(translate(parse_document(text, name="a.yaml"), dialect="axolotl").document)
    assert config.algorithm.aggregation == "normalize_then_sum"


def test_a_template_of_the_models_family_is_the_tokenizers_own():
    text = BASE.replace("base_model: org/model", "base_model: Qwen/Qwen2.5-3B") + "chat_template: qwen_25\n" + TRL
    found = translate(parse_document(text, name="a.yaml"), dialect="axolotl")
    assert validate(found.document).model.chat_template is None
    assert "the tokenizer's own template" in found.findings[0].message
    chatml = translated("chat_template: chatml").model.chat_template
    assert chatml is not None and "<|im_start|>" in chatml


def test_roles_of_tokens():
    model = translated("special_tokens: {eos_token: '<|end|>', pad_token: '<pad>'}").model
    assert (model.special_tokens, model.pad_token) == ({"eos_token": "<|end|>"}, "<pad>")


def test_plugins_that_bring_kernels_alone_mean_nothing():
    assert not translation("plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: false").findings
    assert "does not run Axolotl's plugins" in message("plugins: [axolotl.integrations.nemo_gym.NemoGymPlugin]")


def test_activations_are_offloaded_to_the_host_alone():
    with pytest.raises(ConfigError, match=r"activation_offloading \(line 8\): the text 'disk' has no"):
        translated("activation_offloading: disk")


def test_keys_of_models_for_images():
    found = translation("processor_type: AutoProcessor")
    assert any("processor_type" in finding.message for finding in found.findings)
    assert validate(found.document).model.vision is None, "frozen, where the data has images"
    assert translated("freeze_mm_modules: true").model.vision == "frozen"
    assert translated("freeze_mm_modules: false").model.vision == "trained"
    sized = translation("image_size: 512")  # its builder of GRPO reads no size: core/builders/rl.py, not causal.py
    assert any("image_size: supervised training reads it" in finding.message for finding in sized.findings)


def test_rl_beta_is_the_weight_of_the_kl_term_unless_trl_beta_is_written():
    # axolotl/core/builders/rl.py of 0.12 to 0.19.
    assert translated("rl_beta: 0.04").algorithm.beta == 0.04
    assert translated("rl_beta: 0.04", "beta: 0.1").algorithm.beta == 0.1


@pytest.mark.parametrize(
    ("text", "trl", "expected"),
    [
        # By the versions of TRL that the wheels of Axolotl 0.7 to 0.19 require, and their GRPOConfig.
        ("flash_attn_fuse_qkv: true", "", "--set trl.beta=0.04 up to 0.11, --set trl.temperature=0.9 up to 0.9"),
        ("eval_table_size: 5", "beta: 0.0\ntemperature: 1.0\ntop_k: 0", "Those were --set trl.loss_type=grpo up to 0.7,"
         " --set trl.loss_type=bnpo up to 0.12"),
        ("s2_attention: true\nrl_beta: 0.1", "use_vllm: true\ntemperature: 1.0\ntop_k: 0\nloss_type: dapo",
         "Those were --set trl.vllm_importance_sampling_correction=false up to 0.12"),
        ("s2_attention: true\nrl_beta: 0.1", "temperature: 1.0\ntop_k: 0\nloss_type: dapo", None),
        ("", "", None),
    ],
)  # fmt: skip
def test_a_file_of_an_old_version_is_told_that_versions_defaults(text: str, trl: str, expected: str | None):
    said = [one.message for one in default_findings(translation(text, trl)) if one.level == "warning"]
    assert said == [] if expected is None else expected in said[0]
