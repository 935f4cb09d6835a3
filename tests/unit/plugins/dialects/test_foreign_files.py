from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.load import load_config
from lachesis.plugins.dialects.foreign_files import translated

TRL = """\
model_name_or_path: org/model
dataset_name: org/data
reward_funcs: [accuracy_reward, cosine]
max_steps: 10
max_prompt_length: 512
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
max_grad_norm: 0
hub_strategy: every_save
tf32: true
report_to: wandb
wandb_entity: me
"""
AXOLOTL = """\
base_model: org/model
rl: gdpo
datasets: [{path: org/data}, {path: b.jsonl}]
max_steps: 10
micro_batch_size: 2
adapter: lora
trl: {reward_funcs: [rewards.exact], use_vllm: true, num_generations: 8}
"""
VERL = """\
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: org/model, lora_rank: 8}
  actor: {optim: {lr: 1.0e-6}, use_kl_loss: true, kl_loss_coef: 0.001, ppo_mini_batch_size: 64}
  rollout: {name: vllm, n: 5, gpu_memory_utilization: 0.6}
data: {train_files: [train.parquet], train_batch_size: 256, max_response_length: 1024}
trainer: {total_epochs: 3, save_freq: -1, n_gpus_per_node: 8}
"""
OPENRLHF = """\
#!/bin/bash
MODEL="org/model"
python -m openrlhf.cli.train_ppo_ray \\
   --pretrain ${MODEL} \\
   --prompt_data org/data --apply_chat_template \\
   --n_samples_per_prompt 8 --rollout_batch_size 128 \\
   --actor_learning_rate 5e-7 --num_episodes 2 \\
   --advantage_estimator group_norm --init_kl_coef 0 --packing_samples
"""


@pytest.mark.parametrize("text", [TRL, AXOLOTL])
def test_what_is_printed_loads_and_is_the_same(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(text)
    ours = tmp_path / "ours.yaml"
    ours.write_text(translated(theirs))
    again = load_config(ours)
    assert (again.dialect, again.findings) == ("canonical", ())
    assert again.config == load_config(theirs).config
    assert ours.read_text().startswith("# Translated from ")
    ours.write_text(ours.read_text())
    assert translated(ours).strip() in ours.read_text()  # ours stays as it is


def test_verls_files_give_what_is_common(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(VERL)
    text = translated(file)
    assert "# note: trainer.n_gpus_per_node: no influence on training" in text
    ours = tmp_path / "ours.yaml"
    ours.write_text(text)
    config = load_config(ours, overrides=["rewards.functions=[accuracy_reward]"]).config
    assert (config.adapter.kind, config.engine.kind, config.bridge.kind) == ("lora", "vllm", "broadcast")
    assert (config.sampling.num_generations, config.run.epochs) == (5, 3.0)
    assert (config.batch.prompts_per_step, config.batch.steps_per_generation) == (64, 4)
    assert (config.algorithm.beta, config.algorithm.loss_type) == (0.001, "dapo")


def test_scripts_of_openrlhf_give_what_is_common(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(OPENRLHF)
    ours = tmp_path / "ours.yaml"
    ours.write_text(translated(file))
    config = load_config(ours, overrides=["rewards.functions=[accuracy_reward]"]).config
    assert (config.model.path, config.data.path, config.data.conversations) == ("org/model", "org/data", True)
    # 128 completions of a step, where its script does not say.
    assert (config.sampling.num_generations, config.batch.prompts_per_step) == (8, 16)
    assert "packing_samples" in ours.read_text()


def test_their_files_lack_rewards_where_they_are_to_be_run(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(VERL)
    with pytest.raises(ConfigError, match=r"verl\.yaml: rewards\.functions: missing, but required"):
        load_config(file)
    loaded = load_config(file, overrides=["rewards.functions=[accuracy_reward]", "actor_rollout_ref.rollout.n=16"])
    assert loaded.config.sampling.num_generations == 16


@pytest.mark.parametrize(
    ("generated", "step", "expected"),
    [(256, 64, (64, 4)), (64, 64, (64, 1)), (1024, None, (256, 4)), (128, None, (128, 1))],
)
def test_verls_mini_batches_are_optimizer_steps(tmp_path, generated, step, expected):
    """256 prompts, where its file does not say."""
    file = tmp_path / "verl.yaml"
    text = VERL.replace("train_batch_size: 256", f"train_batch_size: {generated}")
    file.write_text(text.replace(", ppo_mini_batch_size: 64", f", ppo_mini_batch_size: {step}" if step else ""))
    ours = tmp_path / "ours.yaml"
    ours.write_text(translated(file))
    batch = load_config(ours, overrides=["rewards.functions=[accuracy_reward]"]).config.batch
    assert (batch.prompts_per_step, batch.steps_per_generation) == expected


def test_mini_batches_that_do_not_divide_are_said(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(VERL.replace("train_batch_size: 256", "train_batch_size: 100"))
    with pytest.raises(ConfigError, match=r"train_batch_size.*100 prompts are not a multiple of .*; 64 or 128 are"):
        translated(file)
    script = tmp_path / "train.sh"
    script.write_text(OPENRLHF.replace("--packing_samples", "--train_batch_size 100"))
    with pytest.raises(ConfigError, match="100 completions are not whole groups of 8"):
        translated(script)


def test_a_script_of_openrlhfs_counts_completions_in_a_step(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(OPENRLHF.replace("--packing_samples", "--train_batch_size 256"))
    assert "prompts_per_step: 32\n  steps_per_generation: 4" in translated(script)


def test_a_script_of_nobody_is_said_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        translated(Path("nowhere.sh"))
    script = tmp_path / "backup.sh"
    script.write_text("rsync --archive --delete /a /b\n")
    with pytest.raises(ConfigError, match="starts no trainer whose arguments Lachesis knows"):
        translated(script)
    script.write_text('cd "$(dirname "$0")"\nTRAINER=train.sh\nexec bash "inner/$TRAINER" "$@"\n')
    with pytest.raises(ConfigError, match=r"knows, but runs inner/train\.sh"):
        translated(script)
    file = tmp_path / "compose.yaml"
    file.write_text("services: {web: {image: x}}\nvolumes: [a]\n")
    with pytest.raises(ConfigError, match="volumes"):
        translated(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m", "verl's data.train_files: missing"),
        ("trl grpo --model_name_or_path $MODEL", r"model_name_or_path \(line 1\): \$MODEL has no value"),
    ],
)
def test_a_script_is_read_wherever_a_file_is(tmp_path, text, expected):
    script = tmp_path / "x.sh"
    script.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(script)
    script.write_text("trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --max_steps 3")
    assert load_config(script).config.run.steps == 3


def test_a_length_in_steps_stands_for_the_epochs_that_a_file_does_not_write(tmp_path):
    file = tmp_path / "trl.yaml"
    file.write_text("model_name_or_path: m\ndataset_name: d\nreward_funcs: [accuracy_reward]\n")
    run = load_config(file, overrides=["run.steps=3"]).config.run
    assert (run.steps, run.epochs) == (3, None)
    file.write_text(file.read_text() + "num_train_epochs: 2\n")
    with pytest.raises(ConfigError, match=r"run\.steps and run\.epochs both set"):
        load_config(file, overrides=["run.steps=3"])


def test_an_emptied_key_of_another_kind_is_no_error(tmp_path):
    file = tmp_path / "trl.yaml"
    file.write_text("model_name_or_path: m\ndataset_name: d\nreward_funcs: [accuracy_reward]\n")
    assert load_config(file, overrides=["engine.max_model_len="]).config.engine.kind == "embedded"


def test_keys_that_contradict_each_other_are_not_translated(tmp_path):
    file = tmp_path / "trl.yaml"
    file.write_text(f"{TRL}warmup_steps: 5\nwarmup_ratio: 0.1\nreward_weights: [1.0]\n")
    with pytest.raises(ConfigError, match=r"(?s)both set the length of warm-up.*rewards\.weights.*has 1 values for 2"):
        translated(file)


def test_numbers_in_quotes_and_an_address_of_ip_6_are_read_as_there(tmp_path):
    file = tmp_path / "trl.yaml"  # argparse converts texts; a URL has brackets around such an address
    more = 'beta: "0.04"\nuse_vllm: true\nvllm_mode: server\nvllm_server_host: "::1"\nvllm_server_port: "8001"\n'
    file.write_text(TRL.replace("max_steps: 10", 'max_steps: "10"') + more)
    config = load_config(file).config
    assert (config.run.steps, config.algorithm.beta) == (10, 0.04)
    assert config.engine.kind == "http" and list(config.engine.urls) == ["http://[::1]:8001"]
    file.write_text(f"{TRL}beta: small\n")
    with pytest.raises(ConfigError, match=r"beta\): expected a number >= 0, got the text 'small'"):
        translated(file)
