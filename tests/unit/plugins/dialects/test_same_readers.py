"""`translate`, `plan`, `train` and `explain` take the same files and scripts, or refuse them alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lachesis.common.errors import ConfigError
from lachesis.config.load import load_config
from lachesis.config.objects import load_objects
from lachesis.plan.plan import plan
from lachesis.plugins.dialects.foreign_files import keys_in, translated

REWARDS = "rewards.functions=[accuracy_reward]"
TRL_FILE = """\
model_name_or_path: m
dataset_name: d
reward_funcs: [accuracy_reward]
num_generations: 8
max_steps: 5
"""
VERL_FILE = """\
algorithm: {adv_estimator: grpo}
actor_rollout_ref: {model: {path: m}, actor: {ppo_mini_batch_size: 64}, rollout: {n: 8}}
data: {train_files: [train.parquet], train_batch_size: 256}
trainer: {total_training_steps: 5}
"""
# The name of a file, its text, and a key in it that says how many completions a group has.
FILES: dict[str, tuple[str, str]] = {
    "axolotl.yaml": (
        "base_model: m\nrl: grpo\ndatasets: [{path: d}]\nmicro_batch_size: 8\nmax_steps: 5\n"
        "trl: {reward_funcs: [accuracy_reward], num_generations: 8}\n",
        "trl.num_generations: 8",
    ),
    "axolotl.sh": ("axolotl train axolotl.yaml --launcher python\n", "trl.num_generations: 8"),
    "trl.yaml": (TRL_FILE, "num_generations: 8"),
    "trl.sh": (
        "trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --num_generations 8 "
        "--max_steps 5\n",
        "num_generations: 8",
    ),
    "open_r1.slurm": (
        "#SBATCH --nodes=1\nsrun accelerate launch src/open_r1/grpo.py --config trl.yaml --beta 0.01\n",
        "num_generations: 8",
    ),
    "rloo.sh": (
        "accelerate launch -m trl.scripts.rloo --model_name_or_path m --dataset_name d --num_generations 8 "
        "--reward_funcs accuracy_reward --max_steps 5\n",
        "num_generations: 8",
    ),
    "verl.yaml": (VERL_FILE, "actor_rollout_ref.rollout.n: 8"),
    "verl.sh": (
        "N=8\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet "
        "data.train_batch_size=256 actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=$N "
        "trainer.total_training_steps=5\n",
        "actor_rollout_ref.rollout.n: 8",
    ),
    "verl_over_a_file.sh": (
        "python3 -m verl.trainer.main_ppo --config-path . --config-name verl trainer.save_freq=2\n",
        "actor_rollout_ref.rollout.n: 8",
    ),
    "openrlhf_0_8.sh": (
        "python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --n_samples_per_prompt 8 "
        "--advantage_estimator group_norm --rollout_batch_size 16\n",
        "n_samples_per_prompt: 8",
    ),
    "openrlhf.sh": (
        "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset d "
        "--rollout.n_samples_per_prompt 8 --algo.advantage.estimator rloo --rollout.batch_size 16\n",
        "rollout.n_samples_per_prompt: 8",
    ),
    "swift.sh": (
        "NPROC_PER_NODE=1 swift rlhf --rlhf_type grpo --model m --dataset d --num_generations 8 "
        "--per_device_train_batch_size 8 --max_steps 5\n",
        "num_generations: 8",
    ),
    "swift.yaml": (
        "rlhf_type: grpo\nmodel: m\ndataset: [d]\nnum_generations: 8\nper_device_train_batch_size: 8\nmax_steps: 5\n",
        "num_generations: 8",
    ),
    "ours.yaml": (
        "model: {path: m}\ndata: {path: d}\nrun: {steps: 5}\nsampling: {num_generations: 8}\n"
        "rewards: {functions: [accuracy_reward]}\n",
        "sampling.num_generations: 8",
    ),
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, (text, _) in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_all_commands_take_it_and_understand_the_same(files: Path, name: str):
    # `plan` and `train` load it so; rewards of verl, OpenRLHF and ms-swift have another form and are given.
    loaded = load_config(files / name, overrides=[REWARDS] if REWARDS_LACK in translated(files / name) else [])
    assert (loaded.config.sampling.num_generations, loaded.config.model.path) == (8, "m")
    assert plan(loaded.config, device="cpu").batches
    # `lachesis.train(config=FILE)` from Python.
    from_python = load_objects(files / name, {"rewards": ["accuracy_reward"]}).loaded.config
    assert from_python == load_config(files / name, overrides=[REWARDS]).config

    ours = files / "translated.yaml"
    ours.write_text(translated(files / name))
    written = load_config(ours, overrides=[REWARDS]).config
    assert _without_names(written) == _without_names(loaded.config)

    assert any(line.startswith(f"{FILES[name][1]}  ->  ") for line in keys_in(files / name))


REWARDS_LACK = "rewards have another signature"


def _without_names(config: object) -> object:
    """Return what is trained: without the rewards, which some files lack, and names of runs."""
    tree = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))  # type: ignore[attr-defined]
    return {name: section for name, section in tree.items() if name not in ("rewards", "run", "checkpoint")}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("prime.toml", "max_steps = 5\n[orchestrator]\nbatch_size = 8\n", "a configuration of prime-rl"),
        ("environment.yaml", "env: {group_size: 8}\nopenai: [{model_name: m}]\n", "a file of an Atropos environment"),
        ("accelerate.yaml", "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n", "of accelerate"),
        ("grpo.py", "from trl import GRPOTrainer\n", "a Python script, not a configuration"),
        ("sft.sh", "trl sft --model_name_or_path m --dataset_name d\n", "trains on given answers"),
    ],
)
def test_all_commands_refuse_it_alike(files: Path, name: str, text: str, said: str):
    (files / name).write_text(text)
    for read in (translated, load_config, lambda path: list(keys_in(path)), lambda path: load_objects(path, {})):
        with pytest.raises(ConfigError, match=said):
            read(files / name)


@pytest.mark.parametrize(
    ("key", "said"),
    [("max_staleness: 4", "of AsyncGRPOTrainer"), ("teacher_model_name_or_path: t", "of DistillationTrainer")],
)
def test_all_commands_name_the_trainer_of_such_a_key(files: Path, key: str, said: str):
    (files / "trl.yaml").write_text(f"{TRL_FILE}{key}\n")
    for read in (translated, load_config, lambda path: load_objects(path, {})):
        with pytest.raises(ConfigError, match=said):
            read(files / "trl.yaml")
    assert any(line.startswith(f"{key}  ->  refused") and said in line for line in keys_in(files / "trl.yaml"))


# What YAML 1.1, and argparse and hydra on command lines, read otherwise than YAML 1.2: switches, and numbers with `_`.
OLDER: dict[str, tuple[str, int, bool]] = {
    "axolotl.yaml": (
        "base_model: m\nrl: grpo\ndatasets: [{path: d}]\nmicro_batch_size: 0x8\nmax_steps: 1_000\nbf16: on\n"
        "trl: {reward_funcs: [accuracy_reward], num_generations: 010, use_vllm: no}\n", 1000, True,
    ),
    "trl.yaml": (f"{TRL_FILE.replace('max_steps: 5', 'max_steps: 1_000')}bf16: yes\neval_strategy: no\n", 1000, True),
    "verl.yaml": (VERL_FILE.replace("steps: 5", "steps: 1_000"), 4000, False),
    "trl.sh": (
        "trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --num_generations 8 "
        "--max_steps 1_000 --bf16 yes --use_vllm 0 --eval_strategy no\n", 1000, True,
    ),
    "open_r1.slurm": ("accelerate launch src/open_r1/grpo.py --config trl.yaml --max_steps 1_000\n", 1000, True),
    "swift.yaml": (
        "rlhf_type: grpo\nmodel: m\ndataset: [d]\nnum_generations: 8\nmax_steps: 1_000\nbf16: yes\n", 1000, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_files_are_read_as_their_trainer_reads_them(files: Path, name: str):
    for one in ("trl.yaml", name):
        (files / one).write_text(OLDER[one][0])
    config = load_config(files / name, overrides=[] if "trl" in str(name) else [REWARDS]).config
    assert config.sampling.num_generations == 8
    assert config.run.steps == OLDER[name][1]
    assert (config.model.dtype == "bfloat16") == OLDER[name][2]
    ours = files / "translated.yaml"
    ours.write_text(translated(files / name))
    assert _without_names(load_config(ours, overrides=[REWARDS]).config) == _without_names(config)


def test_the_keys_of_lachesis_are_read_by_yaml_1_2(files: Path):
    (files / "ours.yaml").write_text(f"{FILES['ours.yaml'][0]}logging: {{tensorboard: yes}}\n")
    with pytest.raises(ConfigError, match="tensorboard"):
        load_config(files / "ours.yaml")


def test_a_value_from_python_replaces_what_yaml_1_1_reads(files: Path):
    (files / "trl.yaml").write_text(f"{TRL_FILE}bf16: yes\n")
    assert load_objects(files / "trl.yaml", {"bf16": False}).loaded.config.model.dtype != "bfloat16"


def test_a_merged_value_that_is_replaced_does_not_come_back(files: Path):
    text = TRL_FILE.replace("max_steps: 5", "<<: {max_steps: 1_000, report_to: no}\nmax_steps: 7\nreport_to: none")
    (files / "trl.yaml").write_text(text)
    assert load_config(files / "trl.yaml").config.run.steps == 7


def test_text_that_looks_like_a_number_is_text_where_text_belongs(files: Path):
    (files / "verl.sh").write_text(FILES["verl.sh"][0].replace("\n", " ").replace("N=8 ", "N=8\n")
                                   + " trainer.experiment_name=123 data.prompt_key=1\n")  # fmt: skip
    config = load_config(files / "verl.sh", overrides=[REWARDS]).config
    assert (config.run.name, config.data.prompt_column) == ("123", "1")
