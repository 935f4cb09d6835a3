from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.document import parse_document
from lachesis.config.load import validate
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.dialects import translate
from lachesis.plugins.dialects.defaults import default_findings

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


@pytest.mark.parametrize(("device", "devices"), [("auto", None), ("cuda", None), ("cuda:1", "1")])
def test_the_gpu_of_earlier_versions_is_one_of_cudas(device: str, devices: str | None):
    engine = translated(f"use_vllm: true\nvllm_device: {device}").engine
    assert engine.kind == "vllm" and engine.devices == devices


def test_deepspeeds_name_of_the_largest_gradient_counts_where_theirs_is_not_written():
    assert translated("gradient_clipping: 0.5").optimizer.max_grad_norm == 0.5
    assert translated("gradient_clipping: 0.5\nmax_grad_norm: 0.2").optimizer.max_grad_norm == 0.2


def test_what_is_no_gpu_is_refused():
    assert "vllm_device (line 6): expected auto or cuda:N, got the text 'xpu'" in message(
        "use_vllm: true\nvllm_device: xpu"
    )


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
        "path": None,
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


def test_several_evaluated_completions_of_a_problem_are_sampled_as_in_training():
    evaluation = translated("num_generations_eval: 2\ntemperature: 0.7").evaluation
    assert (evaluation.samples_per_problem, evaluation.temperature) == (2, 0.7)
    assert translated("num_generations_eval: 2").evaluation.temperature == 1.0
    assert translated("num_generations_eval: 1").evaluation.temperature == 0.0


def test_trackers_are_translated():
    logging = translated("report_to: [trackio, tensorboard]\nrun_name: r\ntrackio_space_id: me/space").logging
    assert logging.trackio is not None
    assert (logging.trackio.project, logging.trackio.space, logging.trackio.name) == ("huggingface", "me/space", "r")
    assert logging.tensorboard


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("use_vllm: true", "engine.gpu_memory_utilization", 0.3),
        ("use_vllm: true\nvllm_gpu_memory_utilization: 0.5", "engine.gpu_memory_utilization", 0.5),
        ("use_vllm: true\nvllm_mode: server", "engine.wait_s", 240.0),
        ("use_vllm: true\nvllm_mode: server\nvllm_server_timeout: 5", "engine.wait_s", 5),
        ("", "checkpoint.every_steps", 500),
        ("save_strategy: epoch", "checkpoint.every_epochs", 1.0),
        ("save_strategy: epoch", "checkpoint.every_steps", None),
        ("eval_strategy: epoch", "evaluation.every_epochs", 1.0),
    ],
)
def test_defaults_are_theirs(text, path, value):
    section, key = path.split(".")
    assert getattr(getattr(translated(text), section), key) == value


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
    ("text", "processes", "prompts", "steps"),
    [
        ("generation_batch_size: 8", 1, 1, 1),
        ("generation_batch_size: 32", 1, 1, 4),
        ("steps_per_generation: 4", 1, 1, 4),
        ("steps_per_generation: 1", 2, 2, 1),
        ("gradient_accumulation_steps: 4\nsteps_per_generation: 8", 1, 4, 2),
        ("gradient_accumulation_steps: 4\nsteps_per_generation: 2", 1, 4, 1),
    ],
)
def test_a_generation_batch_counts_completions(text, processes, prompts, steps):
    """A smaller one than a step is part of it: the weights are the same, so here it is one generation."""
    found = translation(text, processes=processes)
    batch = validate(found.document).batch
    assert (batch.prompts_per_step, batch.steps_per_generation, found.findings) == (prompts, steps, [])


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
            "num_generation (line 5): not a key of TRL that Lachesis knows; did you mean num_generations?",
        ),
        ("kl_coef: 0.1", "kl_coef (line 5): not a key of TRL that Lachesis knows; did you mean beta?"),
        ("lr: 0.1", "lr (line 5): not a key of TRL that Lachesis knows; did you mean learning_rate?"),
        ("tools: [f]", 'an argument of TRL\'s trainer, here source.tools: from Python: `source={"tools"'),
        ("generation_batch_size: 12", "12 completions are not a multiple of num_generations 8"),
        ("generation_batch_size: 8\nsteps_per_generation: 1", "TRL takes one of them"),
        ("num_generations: 3", "= 8 completions in a step, not a multiple of num_generations 3"),
        ("model_init_kwargs: {rope_scaling: x}", "model_init_kwargs (line 5): rope_scaling has no counterpart"),
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
    found = translation("log_completions_hub_repo: a/b\nreport_to: comet_ml").findings
    levels = {f.message.split(":")[0]: f.level for f in found}
    assert levels == {"log_completions_hub_repo": "warning", "report_to": "warning"}


MIXTURE = "datasets: [{path: org/a, split: 'train[:10]'}, {path: json, data_files: [b.jsonl], columns: [prompt]}]"


def test_a_mixture_is_several_datasets():
    text = BASE.replace("dataset_name: org/data\n", "") + MIXTURE + "\ntest_split_size: 0.1\nstreaming: true"
    data = validate(translate(parse_document(text, name="t"), dialect="trl").document).data
    assert (data.path, data.split, data.eval_size) == ("org/a", "train[:10]", 0.1)
    assert [one.path for one in data.more] == ["b.jsonl"]


def test_a_mixture_of_open_r1():
    text = "dataset_mixture: {datasets: [{id: org/a, config: main}, {id: org/b, weight: 1.0}], test_split_size: 5}"
    data = translated(text).data
    assert (data.path, data.name, data.more[0].path, data.eval_size) == ("org/a", "main", "org/b", 5)
    assert "org/b has weight 0.5" in message("dataset_mixture: {datasets: [{id: org/b, weight: 0.5}]}")


def test_a_prompt_column_of_open_r1_is_the_users_message():
    data = translated("dataset_prompt_column: problem\nsystem_prompt: Think.\nmax_prompt_length: 512").data
    assert (data.prompt_column, data.conversations, data.system_prompt) == ("problem", True, "Think.")
    assert (data.max_prompt_length, data.overlong_prompts) == (512, "drop")


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        ("cosine_with_min_lr", "{min_lr_rate: 0.1, num_cycles: 0.5}", {"schedule": "cosine", "min_lr_ratio": 0.1}),
        ("cosine_with_min_lr", "{min_lr: 1.0e-7}", {"min_lr_ratio": 0.1}),
        (
            "warmup_stable_decay",
            "{num_stable_steps: 6, num_decay_steps: 3, decay_type: linear}",
            {"schedule": "warmup_stable_decay", "stable_steps": 6, "decay_steps": 3, "decay": "linear"},
        ),
    ],
)
def test_arguments_of_schedules(schedule, options, expected):
    optimizer = translated(f"lr_scheduler_type: {schedule}\nlr_scheduler_kwargs: {options}").optimizer
    assert {name: pytest.approx(getattr(optimizer, name)) for name in expected} == expected


def test_an_argument_of_a_schedule_that_it_does_not_have_is_refused():
    assert "num_cycles has no counterpart" in message("lr_scheduler_kwargs: {num_cycles: 3}")
    assert "num_decay_steps has no counterpart with lr_scheduler_type None" in message(
        "lr_scheduler_kwargs: {num_decay_steps: 3}"
    )


def test_a_file_for_several_processes_counts_them():
    text = "per_device_train_batch_size: 16\ngradient_accumulation_steps: 4\nnum_generations: 14"
    alone = translation(text, processes=None)
    assert alone.document.data["batch"] == {"micro_batch_size": 16, "prompts_per_step": 32}
    (finding,) = alone.findings
    assert finding.level == "warning" and "so 7 are assumed" in finding.message
    written = translation(f"{text}\nnum_processes: 14", processes=None)
    assert written.document.data["batch"]["prompts_per_step"] == 64
    assert "= 64 completions in a step, not a multiple" in message(text)  # one process, and no more


def test_reports_of_open_r1():
    wandb = translated("report_to: [wandb]\nwandb_project: p\nwandb_entity: e\nwandb_run_group: g").logging.wandb
    assert wandb is not None and (wandb.project, wandb.entity, wandb.group) == ("p", "e", "g")


def test_a_key_written_twice_counts_as_there():
    found = translation("do_eval: false\ndo_eval: true\nbeta: 0.1\nbeta: 0.2")
    assert found.document.data["algorithm"]["beta"] == 0.2
    assert [one.level for one in found.findings if "written twice" in one.message] == ["warning", "warning"]


def test_nulls_and_zeros_ask_for_nothing():
    quiet = "neftune_noise_alpha: 0.0\nresume_from_checkpoint: null\ntf32: false\nnot_a_key: null\ncallbacks: []"
    assert not translation(quiet).findings
    assert translated(quiet).run.steps == 10
    assert "puts no noise on embeddings" in message("neftune_noise_alpha: 5")


def test_rewards_of_open_r1_get_the_arguments_of_the_file():
    base = BASE.replace("reward_funcs: rewards.exact", "reward_funcs: [accuracy, cosine, soft_overlong_punishment]")
    text = base + "cosine_max_len: 2000\nmax_completion_len: 64\nsoft_punish_cache: 8"
    functions = validate(translate(parse_document(text, name="t"), dialect="trl").document).rewards.functions
    assert functions[0] == "accuracy"
    assert isinstance(functions[1], dict) and functions[1]["kwargs"]["max_len"] == 2000
    assert functions[2] == {
        "function": "soft_overlong_punishment",
        "kwargs": {"max_completion_len": 64, "soft_punish_cache": 8},
    }


@pytest.mark.parametrize(
    ("text", "processes", "copies"),
    [
        ("vllm_tensor_parallel_size: 2", 4, 2),
        ("vllm_tensor_parallel_size: 2", 2, 1),
        ("vllm_tensor_parallel_size: 2", 1, 1),
        ("vllm_tensor_parallel_size: 2\nvllm_device: cuda:3", 4, 1),
        ("vllm_tensor_parallel_size: 2\nvllm_mode: server", 4, None),
        ("", 4, 1),
    ],
)
def test_processes_have_an_engine_for_each_so_many_as_hold_it(text: str, processes: int, copies: int | None):
    engine = translated(f"use_vllm: true\nper_device_train_batch_size: 8\n{text}", processes=processes).engine
    assert getattr(engine, "data_parallel_size", None) == copies


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm_device: auto\nuse_vllm: true", "up to 0.17; what the file leaves out has the defaults of 1.16 here"),
        ("vllm_device: auto\nuse_vllm: true", "Those were --set beta=0.04 up to 0.18, --set temperature=0.9 up to 0.17,"
         " --set top_k=50 up to 0.17, --set max_completion_length=256 up to 1.9, --set loss_type=grpo up to 0.15,"
         " --set loss_type=bnpo up to 0.21"),
        ("vllm_device: auto\nuse_vllm: true\nbeta: 0.0", "Those were --set temperature=0.9 up to 0.17"),
        ("wandb_log_unique_prompts: true\nuse_vllm: true", "--set vllm_mode=server up to 0.29"),
        ("use_vllm: true", None),
        # By GRPOConfig of the wheels of 0.18.2 to 0.27.2.
        ("max_prompt_length: 512", "--set beta=0.04 up to 0.18, --set temperature=0.9 up to 0.17"),
        ("max_prompt_length: 512\nbeta: 0.1\nloss_type: dr_grpo\ntemperature: 1.0\ntop_k: 0\nmax_completion_length: 9\n"
         "use_bias_correction_kl: true", None),
        ("max_prompt_length: 512\nbeta: 0.1\nloss_type: dapo\nuse_vllm: true",
         "vllm_importance_sampling_correction=false up to 0.22, --set vllm_importance_sampling_mode=token_truncate"),
        ("max_prompt_length: 512\nbeta: 0.1\nloss_type: dapo\ntrl_trainer: rloo", None),
    ],
)  # fmt: skip
def test_a_file_of_an_old_version_is_told_that_versions_defaults(text: str, expected: str | None):
    warnings = [one.message for one in default_findings(translation(text)) if one.level == "warning"]
    warnings = [one for one in warnings if "is a key of TRL up to" in one]
    assert warnings == [] if expected is None else expected in warnings[0]
