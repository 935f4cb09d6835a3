"""verl's and OpenRLHF's files: translated exactly, or refused by the name of the key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lachesis.common.errors import ConfigError
from lachesis.plugins.dialects.foreign_files import keys_in, translated

VERL = """\
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet \\
    data.train_batch_size=512 actor_rollout_ref.model.path=some/model actor_rollout_ref.rollout.n=16 {}
"""
OPENRLHF = """\
ray job submit --address=http://127.0.0.1:8265 --working-dir /x -- python3 -m openrlhf.cli.train_ppo_ray \\
    --actor.model_name_or_path some/model --data.prompt_dataset org/prompts --rollout.n_samples_per_prompt 8 \\
    --rollout.batch_size 128 --algo.advantage.estimator group_norm --algo.kl.init_coef 0 {}
"""
ACTOR = "actor_rollout_ref.actor."


def ours(tmp_path: Path, script: str) -> dict[str, dict[str, object]]:
    file = tmp_path / "train.sh"
    file.write_text(script)
    return yaml.safe_load(translated(file))


def value(found: dict[str, dict[str, object]], path: str) -> object:
    section, key = path.split(".")
    return found.get(section, {}).get(key)


@pytest.mark.parametrize(
    ("also", "expected"),
    [
        ("", {"algorithm.loss_type": "dapo", "algorithm.delta": 3.0, "algorithm.epsilon": 0.2, "run.epochs": 30.0}),
        ("", {"optimizer.weight_decay": 0.01, "optimizer.learning_rate": 1e-6, "sampling.max_completion_length": 512}),
        (
            f"{ACTOR}policy_loss.loss_mode=gspo {ACTOR}loss_agg_mode=seq-mean-token-mean {ACTOR}clip_ratio_low=3e-4 "
            f"{ACTOR}clip_ratio_high=4e-4",
            {"algorithm.importance_sampling_level": "sequence", "algorithm.epsilon": 3e-4, "algorithm.delta": None,
             "algorithm.epsilon_high": 4e-4, "algorithm.loss_type": "grpo"},
        ),
        (
            f"{ACTOR}policy_loss.loss_mode=cispo {ACTOR}clip_ratio_low=10 {ACTOR}clip_ratio_high=0.2",
            {"algorithm.loss_type": "cispo", "algorithm.epsilon_high": 1.2},
        ),
        # What follows is as verl's core_algos.py and actor.yaml have it.
        (f"{ACTOR}policy_loss.loss_mode=gspo", {"algorithm.loss_type": "grpo", "algorithm.normalization": None}),
        (
            f"{ACTOR}policy_loss.loss_mode=clip-cov {ACTOR}policy_loss.clip_cov_lb=2 {ACTOR}clip_ratio_low=1.0",
            {"algorithm.loss_type": "clip_cov", "algorithm.cov_share": 2e-4, "algorithm.cov_low": 2,
             "algorithm.cov_high": 5.0, "algorithm.epsilon": 1.0, "algorithm.normalization": "token_mean"},
        ),
        (
            f"{ACTOR}policy_loss.loss_mode=kl_cov {ACTOR}policy_loss.kl_cov_ratio=0.002",
            {"algorithm.loss_type": "kl_cov", "algorithm.cov_share": 0.002, "algorithm.cov_kl_coef": 0.1},
        ),
        (
            f"{ACTOR}policy_loss.loss_mode=geo_mean {ACTOR}clip_ratio_low=0.4 {ACTOR}clip_ratio_high=0.4",
            {"algorithm.loss_type": "gmpo", "algorithm.epsilon": 0.4, "algorithm.delta": None},
        ),
        (
            f"{ACTOR}policy_loss.loss_mode=dppo_tv {ACTOR}clip_ratio_low=0.15 {ACTOR}clip_ratio_high=0.15 "
            f"{ACTOR}clip_ratio_c=20.0 {ACTOR}loss_agg_mode=seq-mean-token-sum",
            {"algorithm.loss_type": "dppo_tv", "algorithm.epsilon_high": 0.15, "algorithm.delta": 20.0,
             "algorithm.normalization": "sequence_sum"},
        ),
        (
            f"{ACTOR}policy_loss.loss_mode=sapo",
            {"algorithm.loss_type": "sapo", "algorithm.sapo_temperature_pos": 1.0},
        ),
        (
            f"{ACTOR}policy_loss.loss_mode=gpg {ACTOR}loss_agg_mode=seq-mean-token-mean",
            {"algorithm.loss_type": "reinforce", "algorithm.normalization": "sequence_mean"},
        ),
        (f"{ACTOR}loss_agg_mode=seq-mean-token-sum", {"algorithm.normalization": "sequence_sum"}),
        ("algorithm.adv_estimator=opo", {"algorithm.baseline": "length_weighted", "algorithm.scale_rewards": "none"}),
        (
            "algorithm.adv_estimator=reinforce_plus_plus",
            {"algorithm.baseline": "none", "algorithm.scale_rewards": "tokens"},
        ),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", {"algorithm.scale_rewards": "tokens"}),
        ("algorithm.adv_estimator=maxrl", {"algorithm.scale_rewards": "mean"}),
        (
            f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_coef=0.002",
            {"algorithm.beta": 0.002, "algorithm.use_bias_correction_kl": False},
        ),
        (f"{ACTOR}use_kl_loss=False {ACTOR}kl_loss_coef=0.002", {"algorithm.beta": None}),
        (f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", {"algorithm.loss_type": "dr_grpo"}),
        ("algorithm.norm_adv_by_std_in_grpo=False", {"algorithm.scale_rewards": "none"}),
        (f"{ACTOR}optim.lr_scheduler_type=cosine {ACTOR}optim.lr_warmup_steps=-1", {"optimizer.schedule": "cosine"}),
        # A step of ray_trainer.py is a generation, here of 512 prompts: two optimizer steps, times ppo_epochs.
        ("++trainer.total_training_steps=7", {"run.steps": 14, "run.epochs": None}),
        (
            f"trainer.save_freq=20 trainer.test_freq=5 {ACTOR}optim.lr_warmup_steps=10 {ACTOR}ppo_epochs=2 "
            f"data.val_files=b.parquet {ACTOR}optim.lr_warmup_steps_ratio=0.1",
            {"checkpoint.every_steps": 80, "evaluation.every_steps": 20, "optimizer.warmup_steps": 40,
             "optimizer.warmup_ratio": 0.0},
        ),
        (f"trainer.save_freq=-1 {ACTOR}optim.lr_warmup_steps=-1 {ACTOR}optim.lr_warmup_steps_ratio=0.1",
         {"checkpoint.every_steps": 0, "optimizer.warmup_steps": None, "optimizer.warmup_ratio": 0.1}),
        # core_algos.kl_penalty: a plus takes k2's gradient in the loss; in a reward only the value counts.
        (f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_type=k3+", {"algorithm.kl_estimator": "k2"}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl+", {"algorithm.kl_estimator": "k3"}),
        (
            "data.train_files=\"['a.parquet', 'b.parquet']\"",
            {"data.path": "a.parquet", "data.more": [{"path": "b.parquet"}]},
        ),
        (f"{ACTOR}fsdp_config.param_offload=True trainer.n_gpus_per_node=8", {"batch.prompts_per_step": 256}),
        ("data.truncation=left data.filter_overlong_prompts=True", {"data.overlong_prompts": "drop"}),
        ("data.truncation=left", {"data.overlong_prompts": "drop"}),
        ("trainer.experiment_name=run_$(date +%s) --config-name=ppo_megatron_trainer", {"run.name": None}),
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10",
         {"pipeline.refill_zero_signal": 10}),
        (f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_type=mse",
         {"algorithm.kl_estimator": "k2", "algorithm.beta": 0.001, "algorithm.kl_placement": None}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01",
         {"algorithm.kl_placement": "reward", "algorithm.kl_estimator": "k1", "algorithm.beta": 0.01,
          "algorithm.kl_target": None}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl algorithm.kl_ctrl.type=adaptive "
         "algorithm.adv_estimator=reinforce_plus_plus",
         {"algorithm.kl_placement": "reward_to_go", "algorithm.kl_estimator": "k3", "algorithm.beta": 0.001,
          "algorithm.kl_target": 0.1, "algorithm.kl_horizon": 10_000}),
    ],
)  # fmt: skip
def test_verls_keys_are_translated_exactly(tmp_path: Path, also: str, expected: dict[str, object]):
    found = ours(tmp_path, VERL.format(also))
    assert {path: value(found, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("also", "named"),
    [
        ("algorithm.adv_estimator=gae", "adv_estimator (line 1): gae trains a critic"),
        ("algorithm.adv_estimator=remax", "adv_estimator (line 1): remax has no counterpart"),
        ("algorithm.adv_estimator=gpg", "adv_estimator (line 1): gpg scales by the number of rewards that are not 0"),
        (f"{ACTOR}policy_loss.loss_mode=bypass_mode", "loss_mode (line 2): bypass_mode has no counterpart"),
        (f"{ACTOR}policy_loss.loss_mode=cispo", "clip_ratio_low: 0.2 bounds the ratio from below"),
        (f"{ACTOR}loss_agg_mode=token-sum", "loss_agg_mode (line 2): token-sum has no counterpart"),
        (f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_type=abs", "(line 2): the text 'abs' has no counterpart"),
        (f"{ACTOR}use_kl_loss=True algorithm.use_kl_in_reward=True", "use_kl_in_reward (line 2): Lachesis has one KL"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "rollout_rs (line 2): has no counterpart"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "multi_turn.enable"),
        ("reward_model.enable=True", "reward_model.enable"),
        ("reward_model.overlong_buffer.enable=True", "overlong_buffer.enable"),
        ("--config-name=mine --config-path=.", "no configuration file mine.yaml, from which train.sh"),
        ("algorithm.new_thing=1", "algorithm.new_thing (line 2): not a key of verl"),
        ("trainer.total_epochs=${EPOCHS}", "trainer.total_epochs (line 2): ${EPOCHS} has no value in the file"),
        (f"{ACTOR}optim.lr=$(cat rate)", "optim.lr (line 2): $(cat rate) has no value in the file"),
    ],
)
def test_what_would_train_something_else_is_refused_by_name(tmp_path: Path, also: str, named: str):
    with pytest.raises(ConfigError) as caught:
        ours(tmp_path, VERL.format(also))
    assert named in caught.value.message and "train.sh" in caught.value.message


EARLY = f"{ACTOR}fsdp_config.grad_offload=False"


@pytest.mark.parametrize(
    ("also", "expected"),
    [
        # As ppo_trainer.yaml and ray_trainer.py of verl 0.2.0.post2 have it.
        (
            "",
            {"algorithm.entropy_coef": 0.001, "algorithm.delta": None, "algorithm.kl_placement": "reward",
             "algorithm.beta": 0.001, "algorithm.kl_estimator": "k1", "data.overlong_prompts": "drop"},
        ),
        (f"{ACTOR}use_kl_loss=True {ACTOR}clip_ratio=0.1", {"algorithm.kl_placement": None, "algorithm.epsilon": 0.1,
          "algorithm.epsilon_high": 0.1, "algorithm.kl_estimator": "k3"}),
        (f"{ACTOR}entropy_coeff=0 data.filter_overlong_prompts=False {ACTOR}clip_ratio_c=3.0",
         {"algorithm.entropy_coef": 0, "algorithm.delta": 3.0, "data.overlong_prompts": "error"}),
        (f"data.train_batch_size=16 {ACTOR}ppo_mini_batch_size=256", {"batch.prompts_per_step": 16}),
    ],
)  # fmt: skip
def test_a_file_of_verl_up_to_03_has_that_versions_defaults(tmp_path: Path, also: str, expected: dict[str, object]):
    file = tmp_path / "train.sh"
    file.write_text(VERL.format(f"{EARLY} {also}"))
    text = translated(file)
    found = yaml.safe_load(text)
    assert {path: value(found, path) for path in expected} == expected
    assert "fsdp_config.grad_offload: a key of verl up to 0.3, whose defaults are taken" in text


def test_a_coefficient_that_counted_in_verl_up_to_03_is_warned_of(tmp_path: Path):
    file = tmp_path / "train.sh"
    file.write_text(VERL.format("algorithm.kl_ctrl.kl_coef=0.001"))
    assert "kl_coef: counts with algorithm.use_kl_in_reward from verl 0.4 on" in translated(file)
    file.write_text(VERL.format("algorithm.kl_ctrl.kl_coef=0.001 algorithm.use_kl_in_reward=False"))
    assert "kl_coef: counts" not in translated(file)


def test_text_where_a_number_belongs_is_an_error_of_the_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="total_epochs"):
        ours(tmp_path, VERL.format("trainer.total_epochs=many"))


@pytest.mark.parametrize(
    ("also", "expected"),
    [
        ("", {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": 0.1, "optimizer.warmup_ratio": 0.03,
              "optimizer.betas": [0.9, 0.95], "algorithm.loss_type": "dapo", "algorithm.beta": None}),
        ("", {"batch.prompts_per_step": 16, "batch.steps_per_generation": 8, "sampling.max_completion_length": 2048}),
        ("--algo.advantage.estimator reinforce_baseline", {"algorithm.scale_rewards": "tokens"}),
        ("--algo.advantage.estimator reinforce", {"algorithm.baseline": "none", "algorithm.scale_rewards": "tokens"}),
        ("--algo.advantage.estimator rloo",
         {"algorithm.baseline": "leave_one_out", "algorithm.scale_rewards": "none"}),
        ("--actor.eps_clip_low_high 0.2 0.27", {"algorithm.epsilon": 0.2, "algorithm.epsilon_high": 0.27}),
        ("--algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3",
         {"algorithm.beta": 0.001, "algorithm.kl_estimator": "k3", "algorithm.use_bias_correction_kl": False}),
        ("--algo.kl.init_coef 0.01 --algo.kl.target 0.1",
         {"algorithm.kl_placement": "reward_to_go", "algorithm.kl_estimator": "k1", "algorithm.kl_target": 0.1,
          "algorithm.kl_horizon": 10_000}),
        ("--algo.advantage.estimator dr_grpo", {"algorithm.scale_rewards": "none"}),
        ("--actor.policy_loss_type gspo", {"algorithm.importance_sampling_level": "sequence"}),
        ("--actor.lr_scheduler constant", {"optimizer.schedule": "constant", "optimizer.warmup_ratio": 0.0}),
        ("--rollout.max_new_tokens 512", {"sampling.max_completion_length": 512}),
        ("--max_new_tokens 512", {"sampling.max_completion_length": 512}),
        ("--actor.loss_agg_mode seq-mean-token-mean", {"algorithm.loss_type": "grpo"}),
        ("--ref_pretrain some/model", {"model.path": "some/model"}),
    ],
)  # fmt: skip
def test_openrlhfs_flags_are_translated_with_its_own_defaults(tmp_path: Path, also: str, expected: dict[str, object]):
    found = ours(tmp_path, OPENRLHF.format(also))
    assert {path: value(found, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("also", "named"),
    [
        ("--algo.advantage.estimator gae", "gae trains a critic"),
        ("--reward.model_name_or_path org/rm", "reward.model_name_or_path"),
        ("--train.async_enable", "train.async_enable"),
        ("--some.new_flag 3", "--some.new_flag (line 3): not a key of OpenRLHF"),
        ("--train.batch_size 100", "100 completions are not whole groups of 8"),
        ("--ref_pretrain other/model", "--ref_pretrain (line 3): the reference is the model from before training"),
        ("--partial_rollout", "--partial_rollout (line 3): write pipeline keys"),
        (
            "--algo.advantage.is_correction_level seq",
            "is_correction_level (line 3): leaves out a completion by its mean ratio",
        ),
        (
            "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis",
            "is_correction_type (line 3): leaves out a completion by its mean ratio",
        ),
        (
            "--algo.advantage.is_correction_level token --algo.advantage.is_correction_gating tv",
            "is_correction_gating (line 3): bounds are of the ratio here",
        ),
        ("--algo.kl.unbiased_gradient", "unbiased_gradient (line 3): algorithm.use_bias_correction_kl is like it"),
        ("--actor.loss_agg_mode token-sum", "loss_agg_mode (line 3): the text 'token-sum' has no counterpart"),
    ],
)
def test_what_openrlhf_would_train_otherwise_is_refused_by_name(tmp_path: Path, also: str, named: str):
    with pytest.raises(ConfigError) as caught:
        ours(tmp_path, OPENRLHF.format(also))
    assert named in caught.value.message


def test_the_kl_of_openrlhf_is_in_the_reward_where_nothing_is_said(tmp_path: Path):
    found = ours(tmp_path, OPENRLHF.replace("--algo.kl.init_coef 0", "").format(""))
    expected = {"kl_placement": "reward_to_go", "kl_estimator": "k1", "beta": 0.01, "kl_target": None}
    assert {name: value(found, f"algorithm.{name}") for name in expected} == expected


def test_two_weights_of_a_trl_script_are_a_list(tmp_path: Path):
    script = (
        "trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward think_format_reward {} 0.5"
    )
    found = ours(tmp_path, script.format("--reward_weights 1.0"))
    assert found["rewards"]["weights"] == [1.0, 0.5]


def test_a_script_reads_the_file_that_it_names_and_its_flags_count(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(
        "model_name_or_path: m\ndataset_name: d\nreward_funcs: [accuracy]\nlearning_rate: 1.0e-5\nmax_steps: 3\n"
    )
    line = "accelerate launch --config_file zero3.yaml --num_processes 4 src/open_r1/grpo.py --config recipe.yaml {}"
    found = ours(tmp_path, line.format("--learning_rate 1e-6"))
    assert (found["optimizer"]["learning_rate"], found["run"]["steps"]) == (1e-6, 3)
    with pytest.raises(ConfigError, match=r"no configuration file other\.yaml"):
        ours(tmp_path, line.format("").replace("recipe.yaml", "other.yaml"))
    with pytest.raises(
        ConfigError, match=r"file c/\$\{2:\?which\}\.yaml of train\.sh depends on how the script is called"
    ):
        ours(tmp_path, line.format("").replace("recipe.yaml", "c/${2:?which}.yaml"))


@pytest.mark.parametrize(("written", "bound"), [("", 0.2), ("epsilon: 0.3\n", 0.3), ("epsilon_high: 4.0\n", 4.0)])
def test_cispo_has_the_bound_of_trl(tmp_path: Path, written: str, bound: float):
    file = tmp_path / "trl.yaml"
    file.write_text(
        f"model_name_or_path: m\ndataset_name: d\nreward_funcs: [accuracy_reward]\nloss_type: cispo\n{written}"
    )
    text = translated(file)
    assert yaml.safe_load(text)["algorithm"]["epsilon_high"] == bound
    told = f"TRL bounds the ratio by {bound} without epsilon_high; Lachesis' own is 5.0 (--set epsilon_high=5.0)"
    assert (told in " ".join(text.replace("#", "").split())) == ("epsilon_high" not in written)


def test_luspo_is_a_normalization_and_vespo_an_example(tmp_path: Path):
    file = tmp_path / "trl.yaml"
    text = "model_name_or_path: m\ndataset_name: d\nreward_funcs: [accuracy_reward]\nvespo_k_pos: 1.0\nloss_type: {}\n"
    file.write_text(text.format("luspo"))
    algorithm = yaml.safe_load(translated(file))["algorithm"]
    assert (algorithm["loss_type"], algorithm["normalization"]) == ("grpo", "sequence_sum")
    file.write_text(text.format("vespo"))
    with pytest.raises(ConfigError, match=r"loss_type .line 5.: VESPO is here an example of a custom loss"):
        translated(file)


@pytest.mark.parametrize("host", ["http://foo", "foo:8000", "foo/v1"])
def test_a_host_that_is_a_url_is_an_error(tmp_path: Path, host: str):
    file = tmp_path / "trl.yaml"
    file.write_text(
        "model_name_or_path: m\ndataset_name: d\nreward_funcs: [accuracy_reward]\nuse_vllm: true\nvllm_mode: server\n"
        f'vllm_server_host: "{host}"\n'
    )
    with pytest.raises(ConfigError, match="expected the name or address of a host"):
        translated(file)


@pytest.mark.parametrize(
    ("also", "path", "expected"),
    [
        ('trainer.experiment_name="run-$(date +%Y%m%d)"', "run.name", None),
        ("--config-path=config --config-name=ppo_megatron_trainer.yaml", "sampling.num_generations", 16),
        (f"{ACTOR}optim.clip_grad=0.5 {ACTOR}optim.lr_decay_style=cosine", "optimizer.max_grad_norm", 0.5),
        ("trainer.experiment_name=a${SUFFIX:+-}b", "run.name", "ab"),
        ("trainer.max_actor_ckpt_to_keep=0", "checkpoint.keep_last", None),
    ],
)
def test_what_verls_own_scripts_write_beside_the_keys(tmp_path: Path, also: str, path: str, expected: object):
    assert value(ours(tmp_path, VERL.format(also)), path) == expected


def test_a_base_file_that_is_not_read_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="no configuration file gsm8k_multiturn_grpo"):
        ours(tmp_path, VERL.format("--config-name=gsm8k_multiturn_grpo"))


def test_openrlhf_counts_checkpoints_in_generations(tmp_path: Path):
    """Its trainer's global step is a rollout batch, here of 128 prompts in 8 optimizer steps, done twice."""
    script = OPENRLHF.format("--train.batch_size 128 --ckpt.save_steps 10 --eval.steps 5 --train.max_epochs 2")
    found = ours(tmp_path, script)
    assert value(found, "checkpoint.every_steps") == 160 and value(found, "evaluation.every_steps") is None
    found = ours(tmp_path, script.replace("--eval.steps", "--eval.dataset d --eval.steps"))
    assert value(found, "evaluation.every_steps") == 80


def test_a_value_that_only_bash_knows_is_the_one_problem(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        ours(tmp_path, VERL.format("").replace("rollout.n=16", "rollout.n=$N"))
    assert "rollout.n" in caught.value.message and "got the number 1" not in caught.value.message


def test_a_script_of_prime_rl_names_its_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"starts a trainer with configs/rl\.toml -> give that file"):
        ours(tmp_path, "uv run rl @ configs/rl.toml --max-steps 10\n")


def test_verls_rloo_compares_with_the_others_and_divides_by_nothing(tmp_path: Path):
    found = ours(tmp_path, VERL.format("algorithm.adv_estimator=rloo"))
    assert value(found, "algorithm.baseline") == "leave_one_out"
    assert value(found, "algorithm.scale_rewards") == "none"


SWIFT = "rlhf_type: grpo\nmodel: org/m\ndataset: org/d#100\nnum_generations: 4\ntuner_type: lora\n"


@pytest.mark.parametrize("name", ["swift.yaml", "swift.sh"])
def test_ms_swifts_arguments_have_its_own_defaults(tmp_path: Path, name: str):
    file = tmp_path / name
    words = " ".join(f"--{line.replace(': ', ' ')}" for line in SWIFT.splitlines())
    file.write_text(f"NPROC_PER_NODE=4 swift rlhf {words}" if name.endswith("sh") else f"{SWIFT}num_processes: 4\n")
    found = yaml.safe_load(translated(file))
    expected = {
        "algorithm.beta": 0.04, "algorithm.loss_type": "grpo", "sampling.temperature": 0.9,
        "optimizer.schedule": "cosine", "optimizer.learning_rate": 1e-4, "optimizer.weight_decay": 0.1,
        "optimizer.betas": [0.9, 0.95], "adapter.r": 8,
        "adapter.alpha": 32, "data.path": "org/d", "data.split": "train[:100]", "batch.prompts_per_step": 1,
        "run.epochs": 3.0, "rewards.functions": None,
    }  # fmt: skip
    assert {path: value(found, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("also", "named"),
    [
        ("multi_turn_scheduler: mine", "multi_turn_scheduler (line 6)"),
        ("async_generate: true", "async_generate (line 6)"),
        ("new_thing: 1", "new_thing (line 6): not a key"),
        ("tuner_type: dora", "expected full or lora"),
        ("rlhf_type: dpo", "rlhf_type (line 6): Lachesis trains with GRPO"),
    ],
)
def test_what_ms_swift_would_train_otherwise_is_refused_by_name(tmp_path: Path, also: str, named: str):
    file = tmp_path / "swift.yaml"
    file.write_text(f"{SWIFT}{also}\n" if "tuner" not in also else SWIFT.replace("tuner_type: lora", also))
    with pytest.raises(ConfigError) as caught:
        translated(file)
    assert named in caught.value.message


def test_prime_rls_files_are_named_with_what_is_the_same_here(tmp_path: Path):
    file = tmp_path / "rl.toml"
    file.write_text(
        'max_steps = 20\n[model]\nname = "org/m"\n[orchestrator]\nbatch_size = 128\ngroup_size = 16\n'
        '[[orchestrator.train.source]]\nname = "x"\n[trainer.optim]\nlr = 3e-6\n'
    )
    with pytest.raises(ConfigError, match="a configuration of prime-rl") as caught:
        translated(file)
    assert "orchestrator.train.source: environments are source.env" in caught.value.message
    assert "run.steps: 20, model.path: org/m, sampling.num_generations: 16" in str(caught.value)
    file.write_text("[project]\nname = 'x'\n")
    with pytest.raises(ConfigError, match="not TOML of a known trainer"):
        translated(file)
    file.write_text("[broken")
    with pytest.raises(ConfigError, match="cannot read"):
        translated(file)


def test_a_file_of_an_atropos_environment_is_named(tmp_path: Path):
    file = tmp_path / "env.yaml"
    file.write_text("env: {group_size: 8}\nopenai: [{model_name: m}]\nslurm: false\n")
    with pytest.raises(ConfigError, match="a file of an Atropos environment"):
        translated(file)


@pytest.mark.parametrize(
    ("also", "expected"),
    [
        ("algorithm.rollout_correction.rollout_is=token", ("token_truncate", 2.0, None)),
        (
            "algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=5.0",
            ("sequence_truncate", 5.0, None),
        ),
        (
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_3.0",
            ("token_mask", 3.0, 0.5),
        ),
        (f"{ACTOR}tis_imp_ratio_cap=4", ("token_truncate", 4, None)),
        ("", ("none", None, None)),
    ],
)
def test_verls_correction_for_its_sampler(tmp_path: Path, also: str, expected: tuple[object, ...]):
    found = ours(tmp_path, VERL.format(also))
    keys = ("sampler_correction", "sampler_correction_max", "sampler_correction_min")
    assert tuple(value(found, f"algorithm.{key}") for key in keys) == expected


@pytest.mark.parametrize(
    ("also", "path", "expected"),
    [
        (f"{ACTOR}strategy=veomni", "optimizer.schedule", "cosine"),
        ("model_engine=megatron", "optimizer.schedule", "constant"),
        (f"{ACTOR}optim.lr_decay_style=linear {ACTOR}optim.min_lr=1e-7", "optimizer.min_lr_ratio", 0.1),
        (f"{ACTOR}fsdp_config.model_dtype=bfloat16", "optimizer.weight_update", "plain"),
        (f"{ACTOR}router_replay.mode=R3", "algorithm.router_replay", True),
        ("actor_rollout_ref.model.lora_adapter_path=/a", "adapter.path", "/a"),
        ("+actor_rollout_ref.rollout.repetition_penalty=1.1", "sampling.repetition_penalty", 1.1),
        ("~trainer.total_epochs", "run.epochs", 30.0),
        (f"{ACTOR}policy_loss.loss_mode=sapo {ACTOR}policy_loss.tau_neg=1.1", "algorithm.sapo_temperature_neg", 1.1),
        (f"{ACTOR}policy_loss.loss_mode=sapo {ACTOR}tau_neg=1.2", "algorithm.sapo_temperature_neg", 1.2),
        ("'data.max_prompt_length=${data.max_response_length}' data.max_response_length=77",
         "data.max_prompt_length", 77),
        ("'+data.apply_chat_template_kwargs={enable_thinking:False}'",
         "data.chat_template_kwargs", {"enable_thinking": False}),
        ("data.train_files=[a.parquet,b.parquet]", "data.more", [{"path": "b.parquet"}]),
        (f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm {ACTOR}loss_scale_factor=512", "algorithm.loss_type",
         "dr_grpo"),
    ],
)  # fmt: skip
def test_more_of_verl_is_translated(tmp_path: Path, also: str, path: str, expected: object):
    assert value(ours(tmp_path, VERL.format(also)), path) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("also", "named"),
    [
        (f"{ACTOR}clip_ratio=0.3", "0.3 has no effect in verl"),
        ("data.image_key=images", "prompts with images"),
        ("trainer.critic_warmup=10", "critic_warmup"),
        (f"{ACTOR}megatron.override_transformer_config.moe_aux_loss_coeff=0.001", "moe_aux_loss_coeff"),
        ("algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.9", "algorithm.gamma"),
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.metric=length", "filter_groups.metric"),
        (f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm {ACTOR}loss_scale_factor=9", "loss_scale_factor"),
        (f"{ACTOR}optim.optimizer=muon", "only AdamW is translated"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "default_agent_loop"),
        ("distillation.enabled=True", "distillation.enabled"),
        ("+algorithm.loss.new_thing=1", "algorithm.loss.new_thing (line 2): not a key of verl"),
    ],
)
def test_more_of_verl_is_refused_by_name(tmp_path: Path, also: str, named: str):
    with pytest.raises(ConfigError) as caught:
        ours(tmp_path, VERL.format(also))
    assert named in caught.value.message


def test_a_trainer_of_verls_recipes_with_a_loss_of_its_own_is_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError,
        match=r"starts recipe\.prime\.main_prime, a trainer with its own loss, unknown to Lachesis",
    ):
        ours(tmp_path, VERL.format("").replace("verl.trainer.main_ppo", "recipe.prime.main_prime"))


def test_a_script_that_starts_two_trainings_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="starts 2 trainings"):
        ours(tmp_path, VERL.format("") + "\n" + VERL.format("trainer.total_epochs=2"))


def test_arguments_behind_a_branch_that_only_bash_knows_are_named(tmp_path: Path):
    script = f"if grep -q big f; then MORE='{ACTOR}optim.lr=1e-6'; fi\n{VERL.format('$MORE')}"
    with pytest.raises(ConfigError, match=r"\$MORE: has no value in the file"):
        ours(tmp_path, script)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (VERL.format("data.truncation=right"), "data.truncation"),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --max_length 99", "max_length"),
        (
            "trl grpo --model_name_or_path m --dataset_name d --reward_funcs a.b --max_prompt_length 99",
            "max_prompt_length",
        ),
    ],
)
def test_prompts_that_others_cut_are_left_out_with_a_warning(tmp_path: Path, text: str, name: str):
    file = tmp_path / "train.sh"
    file.write_text(text)
    found = translated(file)
    assert f"# warning: {name}: longer prompts are left out here" in found
    assert yaml.safe_load(found)["data"]["overlong_prompts"] == "drop"


@pytest.mark.parametrize(
    ("text", "data", "warned"),
    [
        (VERL.format("data.train_max_samples=50"), {"split": "train[:50]"}, "draws them at random"),
        (VERL.format("data.train_max_samples=50 data.shuffle=False"), {"split": "train[:50]"}, ""),
        (VERL.format("data.train_max_samples=-1"), {"split": None}, ""),
        ("swift rlhf --rlhf_type grpo --model m --dataset hf::o/d:main#50", {"path": "o/d", "name": "main"}, "random"),
        ("swift rlhf --rlhf_type grpo --model m --dataset d#5 --dataset_shuffle false", {"split": "train[:5]"}, ""),
        ("swift rlhf --rlhf_type grpo --model m --dataset a#5 b", {"split": "train[:5]", "more": [{"path": "b"}]},
         "random"),
    ],
)  # fmt: skip
def test_a_number_of_rows_is_a_part_of_the_split(tmp_path: Path, text: str, data: dict[str, object], warned: str):
    (tmp_path / "train.sh").write_text(text)
    found = translated(tmp_path / "train.sh")
    given = yaml.safe_load(found)["data"]
    assert {key: given.get(key) for key in data} == data
    assert ("draws them at random" in found) == bool(warned)


def test_rows_of_several_files_of_verls_are_refused(tmp_path: Path):
    script = VERL.format("data.train_max_samples=50").replace("train.parquet", "[a.parquet,b.parquet]")
    with pytest.raises(ConfigError, match="counts the rows of all files together"):
        ours(tmp_path, script)


@pytest.mark.parametrize("between", ["\n# actor_rollout_ref.actor.optim.lr=3e-6 \\\n", "\n\n", " \\ \n"])
def test_arguments_that_bash_does_not_hand_to_the_trainer_are_an_error(tmp_path: Path, between: str):
    script = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo{between}  {ACTOR}optim.lr=1e-6"
    with pytest.raises(ConfigError, match=r"actor\.optim\.lr=1e-6 starts a new command"):
        ours(tmp_path, script)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trl dpo --model_name_or_path m --beta 0.1", "starts trl dpo, which trains on preferences"),
        ("accelerate launch sft.py --model_name_or_path m", "starts sft.py, which trains on given answers"),
        ("deepspeed --module openrlhf.cli.train_rm --pretrain m", "openrlhf.cli.train_rm, which trains a reward model"),
        ("swift rlhf --rlhf_type kto --model m", "starts swift rlhf, which trains on preferences"),
        ("swift sft --model m", "starts swift sft"),
        (
            "megatron rlhf --rlhf_type grpo --model m",
            "which has Megatron's arguments, not those of `swift rlhf`",
        ),
    ],
)
def test_a_trainer_by_another_method_is_refused_with_its_name(tmp_path: Path, line: str, said: str):
    with pytest.raises(ConfigError) as caught:
        ours(tmp_path, line)
    assert said in caught.value.message


RLOO = "--model_name_or_path m --dataset_name d --reward_funcs a.b --per_device_train_batch_size 4"


@pytest.mark.parametrize("start", ["trl rloo", "python -m trl.scripts.rloo", "accelerate launch examples/rloo.py"])
def test_a_script_of_trls_rloo_has_its_defaults_and_its_algorithm(tmp_path: Path, start: str):
    found = ours(tmp_path, f"{start} {RLOO} --normalize_advantages --reward_clip_range -1 1")
    assert found["algorithm"] == {
        "loss_type": "grpo", "importance_sampling_level": "sequence_product", "baseline": "leave_one_out",
        "scale_rewards": "advantages", "reward_clip": [-1, 1], "beta": 0.05, "kl_placement": "reward",
        "sampler_correction": "none", "router_aux_loss_coef": "model",
    }  # fmt: skip
    assert found["sampling"]["num_generations"] == 2
    assert found["batch"] == {"micro_batch_size": 4, "prompts_per_step": 2}


def test_without_a_kl_trls_rloo_has_no_place_for_it(tmp_path: Path):
    assert "kl_placement" not in ours(tmp_path, f"trl rloo {RLOO} --beta 0")["algorithm"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"trl grpo {RLOO} --normalize_advantages", "normalize_advantages.*of TRL's RLOOTrainer"),
        (f"trl rloo {RLOO} --loss_type dapo", "loss_type.*a key of GRPOConfig, which TRL's RLOOConfig lacks"),
        (f"trl rloo {RLOO} --rloo_k 2", "rloo_k.*num_generations"),
    ],
)
def test_keys_of_the_other_trainer_of_trls_are_refused_by_name(tmp_path: Path, line: str, said: str):
    with pytest.raises(ConfigError, match=said):
        ours(tmp_path, line)


def test_a_file_of_verls_is_read_below_the_words_of_a_script(tmp_path: Path):
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\ndefaults: [ppo_trainer, base, _self_]\n"
        "data: {max_prompt_length: 99, max_response_length: '${data.max_prompt_length}'}\n"
        "actor_rollout_ref: {actor: {_target_: a.B, clip_ratio_low: 0.1}, rollout: {name: '???'}}\n"
    )
    (folder / "base.yaml").write_text("data: {max_prompt_length: 5}\ntrainer: {total_epochs: 4}\n")
    found = ours(tmp_path, VERL.format("--config-path=config --config-name=mine trainer.save_freq=7"))
    paths = ("data.max_prompt_length", "sampling.max_completion_length", "run.epochs", "algorithm.epsilon")
    assert [value(found, path) for path in paths] == [99, 99, 4.0, 0.1]
    (folder / "mine.yaml").write_text("actor_rollout_ref: {actor: {policy_loss: {loss_mode: mine}}}\n")
    with pytest.raises(ConfigError, match=r"loss_mode \(mine\.yaml, line 1\): mine has no counterpart"):
        ours(tmp_path, VERL.format("--config-path=config --config-name=mine"))


@pytest.mark.parametrize(
    ("also", "expected"),
    [
        ("--algo.advantage.is_correction_enable", ("token_truncate", 5.0, 0.5)),
        ("--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop "
         "--algo.advantage.is_correction_threshold 0.2 3", ("token_mask", 3, 0.2)),
        ("", ("none", None, None)),
        # From 0.11.1 on.
        ("--algo.advantage.is_correction_level token", ("token_mask", 5.0, 0.5)),
        ("--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip "
         "--algo.advantage.is_correction_threshold 4", ("token_truncate", 4, None)),
        # 0.9.0 to 0.9.2 have one bound, 0.9.3 and later two.
        ("--enable_vllm_is_correction --vllm_is_truncated_threshold 2", ("token_truncate", 2, None)),
        ("--enable_vllm_is_correction", ("token_truncate", 5.0, 0.5)),
    ],
)  # fmt: skip
def test_openrlhfs_correction_for_its_sampler(tmp_path: Path, also: str, expected: tuple[object, ...]):
    found = ours(tmp_path, OPENRLHF.format(also))
    keys = ("sampler_correction", "sampler_correction_max", "sampler_correction_min")
    assert tuple(value(found, f"algorithm.{key}") for key in keys) == expected


def test_one_weight_of_a_script_is_a_list(tmp_path: Path):
    script = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --reward_weights 2"
    assert ours(tmp_path, script)["rewards"]["weights"] == [2]


def test_a_trainer_that_generates_ahead_is_told_how_here(tmp_path: Path):
    script = VERL.replace("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo")
    with pytest.raises(ConfigError, match="main_ppo, which generates while it trains") as caught:
        ours(tmp_path, script.format(""))
    assert "pipeline.async_prefetch" in caught.value.remedy


def test_the_keys_of_a_script_of_ms_swifts_are_explained(tmp_path: Path):
    file = tmp_path / "train.sh"
    file.write_text(
        "swift rlhf --rlhf_type grpo --model $MODEL --dataset d --overlong_filter true --async_generate true"
    )
    assert list(keys_in(file)) == [
        "rlhf_type: grpo  ->  nothing here, with this value",
        "model: $MODEL  ->  model.path",
        "dataset: d  ->  data.path",
        "overlong_filter: true  ->  algorithm.mask_truncated",
        "async_generate: true  ->  refused (write pipeline.async_prefetch and max_staleness, and remove this)",
    ]
    with pytest.raises(ConfigError, match=r"model \(line 1\): \$MODEL has no value in the file"):
        translated(file)


def test_ms_swifts_own_name_for_full_sharding(tmp_path: Path):
    (tmp_path / "swift.yaml").write_text(f"{SWIFT}fsdp: fsdp2\n")
    assert value(yaml.safe_load(translated(tmp_path / "swift.yaml")), "distributed.strategy") == "shard"


def test_the_processes_of_a_launcher_are_counted(tmp_path: Path):
    line = "accelerate launch --num_processes 4 grpo.py --model_name_or_path m --dataset_name d --reward_funcs a.b {}"
    found = ours(tmp_path, line.format("--per_device_train_batch_size 8 --num_generations 8"))
    assert found["batch"]["prompts_per_step"] == 4
    torchrun = line.replace("accelerate launch --num_processes 4", "torchrun --nproc_per_node=2 --nnodes 2")
    assert ours(tmp_path, torchrun.format(""))["batch"]["prompts_per_step"] == 4
