from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.dialects import translate
from lachesis.config.document import parse_document
from lachesis.config.load import validate
from lachesis.config.schema import LachesisConfig

BASE = "model_name_or_path: org/model\ndataset_name: org/data\nreward_funcs: rewards.exact\nmax_steps: 10\n"


def translation(text: str = "", *, processes: int = 1):
    return translate(parse_document(BASE + text, name="t.yaml"), dialect="trl", processes=processes)


def translated(text: str = "", *, processes: int = 1) -> LachesisConfig:
    return validate(translation(text, processes=processes).document)


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        translated(text)
    return caught.value.message


def test_the_defaults_are_trls():
    config = translated()
    assert config.rewards.functions == ["rewards.exact"]
    assert (config.batch.prompts_per_step, config.batch.micro_batch_size) == (1, 8)
    assert (config.algorithm.loss_type, config.algorithm.sampler_correction) == ("dapo", "none")
    assert (config.optimizer.learning_rate, config.optimizer.schedule) == (1e-6, "linear")
    assert (config.sampling.max_completion_length, config.run.seed) == (512, 42)
    assert (config.checkpoint.every_steps, config.model.gradient_checkpointing) == (500, True)
    assert (config.engine.kind, config.bridge.kind) == ("embedded", "in_process")


def test_completions_of_texts_are_texts():
    assert translated().rewards.text_completions == "text"


def test_with_vllm_the_default_is_a_server_of_its_own():
    config = translated("use_vllm: true\nvllm_max_model_length: 2048")
    assert (config.engine.kind, config.bridge.kind) == ("vllm", "broadcast")
    assert config.engine.kind == "vllm" and config.engine.max_model_len == 2048
    assert config.algorithm.sampler_correction == "sequence_mask"
    assert config.algorithm.sampler_correction_min is None


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("vllm_server_host: box", "http://box:8000"),
        ("vllm_server_base_url: http://box:9/v1", "http://box:9/v1"),
        ("vllm_server_port: 8001", "http://127.0.0.1:8001"),
    ],
)
def test_a_server_elsewhere(text, url):
    config = translated(f"use_vllm: true\nvllm_mode: server\n{text}")
    assert config.engine.kind == "http" and config.engine.urls == [url]


def test_an_adapter_needs_the_switch():
    assert translated("lora_r: 8").adapter.kind == "none"
    adapter = translated("use_peft: true\nlora_r: 8").adapter
    assert adapter.model_dump() == {
        "kind": "lora",
        "r": 8,
        "alpha": 32,
        "dropout": 0.05,
        "targets": "all-linear",
        "layers": None,
    }


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("dtype: bfloat16", "bfloat16"),
        ("model_init_kwargs: {torch_dtype: float16, attn_implementation: sdpa}", "float16"),
        ("bf16: true\ndtype: float32", "float32"),
        ("", "auto"),
    ],
)
def test_dtypes(text, dtype):
    assert translated(text).model.dtype == dtype


def test_epochs_and_steps():
    assert (translated().run.steps, translated().run.epochs) == (10, None)
    run = translated("num_train_epochs: 2").run
    assert run.steps == 10
    text = BASE.replace("max_steps: 10", "max_steps: -1")
    run = validate(translate(parse_document(text, name="t"), dialect="trl").document).run
    assert (run.steps, run.epochs) == (None, 3.0)


@pytest.mark.parametrize(("given", "steps", "ratio"), [("0.25", 0, 0.25), ("0", 0, 0), ("4", 4, 0), ("4.0", 4, 0)])
def test_a_warm_up_below_1_is_a_share_of_the_steps(given, steps, ratio):
    optimizer = translated(f"warmup_steps: {given}").optimizer
    assert (optimizer.warmup_steps, optimizer.warmup_ratio) == (steps, ratio)
    assert translated("warmup_ratio: 0.1").optimizer.warmup_ratio == 0.1


@pytest.mark.parametrize(
    ("text", "processes", "told"),
    [
        ("generation_batch_size: 8", 1, None),
        ("generation_batch_size: 32", 1, "4 prompts (TRL: 32 completions) are 4 optimizer steps"),
        ("steps_per_generation: 4", 1, "4 prompts (TRL: 32 completions) are 4 optimizer steps"),
        ("steps_per_generation: 1", 2, None),
    ],
)
def test_a_generation_batch_counts_completions(text, processes, told):
    findings = translation(text, processes=processes).findings
    assert [told in finding.message for finding in findings] == ([True] if told else [])


def test_evaluation_and_reports():
    config = translated(
        "eval_strategy: steps\neval_steps: 5\ndataset_test_split: validation\nreport_to: [wandb]\nrun_name: r"
    )
    assert (config.evaluation.every_steps, config.data.eval_split) == (5, "validation")
    assert config.logging.wandb is not None and config.logging.wandb.name == "r"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "num_generation: 4",
            "num_generation (line 5): no key of TRL's that Lachesis knows; did you mean num_generations?",
        ),
        ("generation_batch_size: 12", "12 completions are no multiple of num_generations 8"),
        ("generation_batch_size: 8\nsteps_per_generation: 1", "TRL takes one of them"),
        ("num_generations: 3", "= 8 completions in a step, which is no multiple of num_generations 3"),
        ("model_init_kwargs: {revision: x}", "model_init_kwargs (line 5): revision has no counterpart"),
        ("dtype: int4", "dtype (line 5): the text 'int4' has no counterpart"),
        ("lr_scheduler_type: polynomial", "lr_scheduler_type (line 5): the text 'polynomial' has no counterpart"),
        ("warmup_steps: 1.5", "optimizer.warmup_steps (line 5: warmup_steps): expected a whole number"),
        ("reward_model_name_or_path: x", "name the model in reward_funcs"),
        ("temperature: 0", "sampling.temperature (line 5: temperature): expected a number > 0, got the number 0"),
    ],
)
def test_errors_name_the_line_and_the_key_of_the_file(text, expected):
    assert expected in message(text)


def test_what_cannot_be_done_is_a_warning():
    levels = {f.message.split(":")[0]: f.level for f in translation("hub_model_id: x\nreport_to: mlflow").findings}
    assert levels == {"hub_model_id": "warning", "report_to": "warning"}
