"""Every flag and variable of the Atropos documents and of its trainer's code does what it says, or says why not."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lachesis.cli import app
from lachesis.common.errors import ConfigError
from lachesis.config.load import LoadedConfig, load_argv, load_config
from lachesis.config.schema import LachesisConfig
from lachesis.engines.options import ServeOptions
from lachesis.plugins.atropos.services import load_words
from lachesis.plugins.dialects.atropos import FLAGS, SERVER, TRAINER
from lachesis.plugins.dialects.atropos_help import help_text
from lachesis.plugins.dialects.environment import ENVIRONMENT
from lachesis.plugins.dialects.explain import explain
from lachesis.plugins.serving import serve
from lachesis.plugins.serving.vllm_launch import plan_launch
from lachesis.transport.bridge_file import BRIDGE_FILE, SHARED_VARIABLE, BridgeFile, search_places, write_bridge_file
from tests.paths import EXAMPLES

# Of the documents, and then of the trainer's code beyond them.
_NAMES = """
model-name weight-bridge-mode single-copy vllm-config-path vllm-port atropos-url training-steps batch-size
gradient-accumulation-steps learning-rate lr seq-len optimizer kl-coef clip-eps lora-r lora-alpha lora-dropout
gpu-memory-utilization vllm-restart-interval save-path use-wandb wandb-project wandb-run-name checkpoint-interval
benchmark device nccl-init-method nccl-world-size nccl-sync-every-step

model warmup-steps adafactor-scale-parameter adafactor-relative-step vllm-gpu vllm-gpu-memory-utilization
max-model-len dtype wandb-group debug-loading log-dir train-layer-indices lora-target-modules lora-layer-indices
trainer-rank world-size init-method num-inference-nodes no-reference-logprobs no-nccl-sync-every-step
"""
TRAINER_FLAGS = _NAMES.split()
LORA, NCCL = "--weight-bridge-mode lora_only", "--weight-bridge-mode lora_nccl"

# Flags, the key that they set, and its value.
SETS: list[tuple[str, str, Any]] = [
    ("--model-name org/other", "model.path", "org/other"),
    ("--model org/other", "model.path", "org/other"),
    ("--weight-bridge-mode lora_only", "bridge.kind", "lora_only"),
    ("--weight-bridge-mode legacy", "bridge.kind", "none"),
    ("--single-copy", "bridge.kind", "shared_vllm"),
    ("--vllm-config-path /x/bridge.json --single-copy", "bridge.config_path", "/x/bridge.json"),
    ("--vllm-port 9005", "engine.port", 9005),
    (f"--vllm-port 9005 {LORA}", "engine.urls", ["http://127.0.0.1:9005"]),
    ("--atropos-url http://host:8005", "source.url", "http://host:8005"),
    ("--training-steps 7", "run.steps", 7),
    ("--batch-size 4", "batch.micro_batch_size", 4),
    ("--gradient-accumulation-steps 8 --batch-size 4", "source.batch_size", 32),
    ("--learning-rate 3e-6", "optimizer.learning_rate", 3e-6),
    ("--lr 3e-6", "optimizer.learning_rate", 3e-6),
    ("--warmup-steps 5", "optimizer.warmup_steps", 5),
    ("--seq-len 512", "source.max_sequence_length", 512),
    ("--optimizer adamw_8bit", "optimizer.kind", "adamw_8bit"),
    ("--adafactor-scale-parameter --optimizer adafactor", "optimizer.scale_parameter", True),
    ("--kl-coef 0.02", "algorithm.beta", 0.02),
    ("--clip-eps 0.3", "algorithm.epsilon", 0.3),
    (f"--lora-r 8 {LORA}", "adapter.r", 8),
    (f"--lora-alpha 8 {LORA}", "adapter.alpha", 8),
    (f"--lora-dropout 0.2 {LORA}", "adapter.dropout", 0.2),
    (f"--lora-target-modules q_proj v_proj {LORA}", "adapter.targets", ["q_proj", "v_proj"]),
    (f"--lora-target-modules=q_proj,v_proj {LORA}", "adapter.targets", ["q_proj", "v_proj"]),
    (f"--lora-target-modules '[q_proj]' {LORA}", "adapter.targets", ["q_proj"]),
    (f"--lora-target-modules all-linear {LORA}", "adapter.targets", "all-linear"),
    (f"--lora-layer-indices 0-2,5 {LORA}", "adapter.layers", [0, 1, 2, 5]),
    (f"--lora-layer-indices '[3, 1]' {LORA}", "adapter.layers", [1, 3]),
    ("--train-layer-indices 3", "model.train_layers", [3]),
    ("--train-layer-indices 20-22,1", "model.train_layers", [1, 20, 21, 22]),
    ("--gpu-memory-utilization 0.4", "engine.gpu_memory_utilization", 0.4),
    ("--vllm-gpu-memory-utilization 0.4", "engine.gpu_memory_utilization", 0.4),
    ("--max-model-len 4096", "engine.max_model_len", 4096),
    ("--vllm-gpu 1", "engine.devices", "1"),
    ("--dtype bfloat16", "model.dtype", "bfloat16"),
    ("--device cuda:0", "model.device", "cuda"),
    ("--vllm-restart-interval 5", "bridge.every_steps", 5),
    ("--save-path /x/mine", "run.name", "mine"),
    ("--save-path /x/mine", "run.dir", "/x"),
    ("--checkpoint-interval 4", "checkpoint.every_steps", 4),
    ("--use-wandb", "logging.wandb.project", "grpo"),
    ("--wandb-project p", "logging.wandb.project", "p"),
    ("--wandb-group 7 --use-wandb", "logging.wandb.group", "7"),
    ("--wandb-run-name n --use-wandb", "logging.wandb.name", "n"),
    (f"--nccl-init-method tcp://a:1 {NCCL}", "bridge.init_method", "tcp://a:1"),
    (f"--init-method tcp://a:1 {NCCL}", "bridge.init_method", "tcp://a:1"),
    (f"--init-method tcp://a:1 --nccl-init-method tcp://a:2 {NCCL}", "bridge.init_method", "tcp://a:2"),
    (f"--init-method env:// {NCCL}", "bridge.init_method", None),
    (f"--nccl-sync-every-step --vllm-restart-interval 5 {NCCL}", "bridge.every_steps", 1),
    (f"--nccl-sync-every-step false --vllm-restart-interval 5 {NCCL}", "bridge.every_steps", 5),
    (f"--no-nccl-sync-every-step --vllm-restart-interval 5 {NCCL}", "bridge.every_steps", 5),
]
# Flags that set nothing, and what is said of them.
SAID = [
    ("--nccl-world-size 2", "counts the engine's processes itself"),
    ("--trainer-rank 0", "torchrun's RANK and WORLD_SIZE"),
    ("--world-size 1", "torchrun's RANK and WORLD_SIZE"),
    ("--num-inference-nodes 0", "engine.urls"),
    ("--log-dir /x", "logs/ of the run directory"),
    ("--debug-loading", "--traceback"),
    ("--no-reference-logprobs", "--kl-coef 0 leaves the KL term out"),
    ("--benchmark", "always measured"),
    (f"--gpu-memory-utilization 0.4 {LORA}", "for the server, which runs already"),
    (f"--max-model-len 9 --vllm-gpu 1 {LORA}", "--max-model-len, --vllm-gpu: for the server, which runs already"),
    ("--vllm-restart-interval 5 --single-copy", "every step updates the engine's own tensors"),
    ("--lora-r 8", "has no effect with the rest"),
    ("--init-method tcp://a:1", "has no effect with the rest"),
]
REFUSED = [
    ("--adafactor-relative-step", "write --learning-rate 0.01"),
    ("--device cuda:1", "CUDA_VISIBLE_DEVICES=1"),
    ("--distill-enabled --distill-coef 0.2", "write the teacher into algorithm.teacher"),
    ("--train-layer-indices 5-2", "expected layers counted from 0, such as 20-31 or 0-3,28-31"),
    ("--train-layer-indices -1", "expected layers counted from 0"),
    (f"--lora-layer-indices last {LORA}", "expected layers counted from 0"),
    ("--vllm-gpu true", "engine.devices"),
]


def value_at(config: LachesisConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def flags_of(text: str) -> list[str]:
    own = shlex.split(text)
    return own if {"--model", "--model-name"} & set(own) else ["--model-name", "org/model", *own]


def first_flag(text: str) -> str:
    return shlex.split(text)[0].partition("=")[0].removeprefix("--")


def test_no_flag_of_the_trainer_is_forgotten():
    shown = {first_flag(text) for text, *_ in [*SETS, *SAID, *REFUSED]}
    assert set(TRAINER_FLAGS) <= shown
    # Upstream's script for a teacher passes these too, though its trainer does not have them.
    assert set(TRAINER.entries) - set(TRAINER_FLAGS) == {"distill-enabled", "distill-coef", "distill-temperature"}


@pytest.mark.parametrize(("text", "path", "expected"), SETS)
@pytest.mark.parametrize("underscores", [False, True])
def test_a_flag_sets_its_key(text: str, path: str, expected: Any, underscores: bool):
    flags = flags_of(text)
    if underscores:
        flags = [flag.replace("-", "_").replace("__", "--", 1) if flag.startswith("--") else flag for flag in flags]
    assert value_at(load_argv(flags).config, path) == expected


@pytest.mark.parametrize(("text", "expected"), SAID)
def test_a_flag_without_effect_says_why(text: str, expected: str):
    (finding,) = load_argv(flags_of(text)).findings
    assert f"--{first_flag(text)}" in finding.message
    assert expected in finding.message


@pytest.mark.parametrize(("text", "expected"), REFUSED)
def test_a_flag_that_cannot_be_meant_is_refused(text: str, expected: str):
    with pytest.raises(ConfigError) as caught:
        load_argv(flags_of(text))
    assert f"--{first_flag(text)}" in caught.value.message
    assert expected in caught.value.message


@pytest.mark.parametrize("name", TRAINER_FLAGS)
def test_a_flag_is_explained_and_in_the_help(name: str):
    names = [alias.name for found in explain(f"--{name}").explanations for alias in found.aliases]
    assert f"--{name}" in names
    assert f"--{name}" in help_text().replace(",", " ").split()


@pytest.mark.parametrize("name", FLAGS.spellings)
def test_two_names_of_a_flag_are_one(name: str):
    with pytest.raises(ConfigError, match="given twice; keep one"):
        load_argv(["--model-name", "m", f"--{name}", "0.5", f"--{FLAGS.spellings[name]}", "0.5"])


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("--gpu-memory-utilization 0.3", "engine.gpu_memory_utilization", 0.3),
        ("--max-model-len 1024", "engine.max_model_len", 1024),
        ("--engine embedded --max-model-len 1024", "engine.max_model_len", 1024),
        ("--vllm-gpu 0", "engine.devices", "0"),
        ("--engine embedded --vllm-port 9005", "engine.port", 9005),
        ("--weight-bridge-mode none --engine embedded", "engine.kind", "embedded_server"),
    ],
)
def test_lachesis_run_gives_the_flags_to_the_engine_that_it_starts(text: str, path: str, expected: Any):
    assert value_at(as_run_loads(text).config, path) == expected


def test_lachesis_run_says_which_flags_the_embedded_engine_has_not():
    (finding,) = as_run_loads("--engine embedded --vllm-gpu 0").findings
    assert finding.message == "--vllm-gpu: has no effect: it is for vLLM, but the run starts the embedded engine"


def as_run_loads(text: str) -> LoadedConfig:
    command: Any = typer.main.get_command(app)
    context = command.commands["run"].make_context("run", ["--model", "m", *shlex.split(text)])
    return load_words(context.args, engine=context.params["engine"])


# --- the vLLM server's flags ---

SERVER_FLAGS: dict[str, tuple[str, Any, list[str]]] = {
    "model": ("org/model", "org/model", ["--model", "org/model"]),
    "port": ("9005", 9005, ["--port", "9005"]),
    "tensor-parallel-size": ("2", 2, ["--tensor-parallel-size", "2"]),
    "dtype": ("bfloat16", "bfloat16", ["--dtype", "bfloat16"]),
    "gpu-memory-utilization": ("0.5", 0.5, ["--gpu-memory-utilization", "0.5"]),
    "max-model-len": ("512", 512, ["--max-model-len", "512"]),
    "enable-lora": ("", True, ["--enable-lora"]),
    "enforce-eager": ("", True, ["--enforce-eager"]),
}


def test_no_flag_of_the_server_is_forgotten():
    assert set(SERVER.entries) == set(SERVER_FLAGS)


@pytest.mark.parametrize("name", SERVER_FLAGS)
def test_lachesis_serve_hands_the_flag_to_vllm(name: str, monkeypatch: pytest.MonkeyPatch):
    served: list[ServeOptions] = []
    monkeypatch.setattr(serve, "serve", lambda options, *, on_ready: served.append(options))
    text, value, words = SERVER_FLAGS[name]
    given = [f"--{name}", text] if text else [f"--{name}"]
    model = [] if name == "model" else ["--model", "m"]
    result = CliRunner().invoke(app, ["serve", *model, *given])
    assert result.exit_code == 0, result.output
    (options,) = served
    assert getattr(options, name.replace("-", "_")) == value
    arguments = serve.vllm_arguments(options)
    start = arguments.index(words[0])
    assert arguments[start : start + len(words)] == words


@pytest.mark.parametrize("value", ["bfloat16", "float16", "auto"])
def test_the_documented_dtypes(value: str):
    assert load_argv(["--model-name", "m", "--dtype", value]).config.model.dtype == value
    assert serve.vllm_arguments(ServeOptions(model="m", dtype=value))[-2:] == ["--dtype", value]


# --- environment variables ---

OBSOLETE = {
    "VLLM_SKIP_WEIGHT_DAEMON": "1",
    "VLLM_USE_V1": "0",
    "NUM_INFERENCE_NODES": "2",
    "VLLM_BRIDGE_CONFIG_PATH": "/x/bridge.json",
}
HANDED_ON = {
    "VLLM_ENABLE_SHARED_WEIGHTS": "1",
    "LOGDIR": "/x",
    "CUDA_VISIBLE_DEVICES": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_LAUNCH_BLOCKING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


def test_no_variable_is_forgotten():
    assert set(ENVIRONMENT.entries) == {*OBSOLETE, *HANDED_ON, *LAUNCHERS}


@pytest.mark.parametrize("name", ENVIRONMENT.entries)
def test_a_variable_is_explained(name: str):
    assert f"${name}" in [alias.name for found in explain(name).explanations for alias in found.aliases]


@pytest.mark.parametrize("name", OBSOLETE)
def test_a_variable_without_effect_is_warned_of(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, OBSOLETE[name])
    (finding,) = load_argv(["--model-name", "m"]).findings
    assert finding.level == "warning"
    assert finding.message.startswith(f"${name}={OBSOLETE[name]} has no effect: ")


def test_what_asks_for_what_is_done_anyway_is_not_warned_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("NUM_INFERENCE_NODES", "0")
    assert load_argv(["--model-name", "m"]).findings == ()


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_variable_reaches_the_engine(name: str):
    plan = plan_launch(["m"], environment={name: HANDED_ON[name]})
    assert plan.environment[name] == HANDED_ON[name]
    assert plan.warnings == ()


def test_the_variables_of_the_bridge_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert SHARED_VARIABLE == "VLLM_ENABLE_SHARED_WEIGHTS"
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    assert search_places()[0].parent == tmp_path


def test_what_a_server_exports_is_in_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    shared = BridgeFile(model="m", session_id="s", url="http://a:1", pid=1, engine="vllm 0.26.0", tensors={})

    def export(options: ServeOptions, *, on_ready: object) -> None:
        write_bridge_file(tmp_path / BRIDGE_FILE, shared)

    monkeypatch.setattr(serve, "serve", export)
    for command in ("serve", "vllm-serve"):
        printed = CliRunner().invoke(app, [command, "--model", "m"]).output
        assert "Exported 0 IPC handles for single-copy mode" in printed


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_launchers_variables_say_whose_they_are(name: str):
    assert "launcher's" in ENVIRONMENT.entries[name].note


def test_the_number_of_processes_counts_in_batches(monkeypatch: pytest.MonkeyPatch):
    path = EXAMPLES / "axolotl" / "gsm8k.yaml"
    one = load_config(path).config.batch.prompts_per_step
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load_config(path).config.batch.prompts_per_step == 2 * one
