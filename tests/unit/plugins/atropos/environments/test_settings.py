"""Flags and files become settings, and whatever is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.errors import ConfigError
from lachesis.plugins.atropos.environments.settings import describe, parse_options
from lachesis.plugins.atropos.environments.shipped.arithmetic import ArithmeticConfig
from lachesis.plugins.atropos.environments.shipped.gsm8k import Gsm8kConfig

# As the documents write them.
DOCUMENTED = """
--env.group_size 4 --env.max_num 200 --env.tokenizer_name Qwen/Qwen2.5-14B-Instruct --env.use_wandb False
--slurm.num_requests_per_time_interval 16 --slurm.time_interval 10 --openai.api_key dummy --slurm False
--openai.base_url http://localhost:9001 --openai.model_name NousResearch/Hermes-3-Llama-3.1-8B
--openai.server_type vllm --env.rollout_server_url http://localhost:8002/
"""


def parsed(*words: str):
    return parse_options(words, env_class=Gsm8kConfig)


def test_documented_flags():
    options = parsed(*DOCUMENTED.split())
    assert (options.env.group_size, options.env.max_num, options.env.use_wandb) == (4, 200, False)
    assert options.env.rollout_server_url == "http://localhost:8002"
    assert options.openai.base_url == ("http://localhost:9001",)
    assert options.openai.server_type == "vllm"
    assert (options.slurm.num_requests_per_time_interval, options.slurm.time_interval) == (16, 10.0)


@pytest.mark.parametrize("flag", ["--env.group-size=7", "--env.group_size=7", "--env.group-size 7"])
def test_spellings(flag):
    assert parsed(*flag.split()).env.group_size == 7


def test_switches_negatives_and_none():
    env = parsed("--env.use-wandb", "--env.total_steps", "-1", "--env.max_num", "None").env
    assert (env.use_wandb, env.total_steps, env.max_num) == (True, -1, None)


def test_several_servers():
    assert parsed("--openai.base_url", "http://a:1/v1, http://b:2").openai.base_url == ("http://a:1/v1", "http://b:2")


def test_environments_have_defaults_of_their_own():
    assert parse_options([], env_class=ArithmeticConfig).env.max_new_tokens == 6
    assert parsed().env.max_new_tokens is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--env.group_sise 4", "unknown flag --env.group_sise -> did you mean --env.group_size?"),
        ("--opena.base_url http://x:1", "did you mean --openai.base_url?"),
        ("stray", "unknown flag stray"),
        ("--env.teacher_enabled true", "write the teacher's server into the trainer's algorithm.teacher"),
        ("--teacher.base_url http://a", "no counterpart -> leave it out, and write the teacher's server"),
        ("--env.group_size 0", "--env.group_size is '0'"),
        ("--env.group_size", "--env.group_size is 'True'"),
        ("--env.group_size 2 --env.group-size 3", "given twice: 2 and 3"),
        ("--slurm True", "servers are not looked up"),
        ("--openai.server_type sglang", "--openai.server_type is 'sglang'"),
        ("--env.temperature nan", "--env.temperature"),
        ("--config nowhere.yaml", "nowhere.yaml cannot be read"),
    ],
)
def test_what_is_wrong_is_named(words, message):
    with pytest.raises(ConfigError) as caught:
        parsed(*words.split())
    assert message in str(caught.value)


def write(directory: Path, text: str) -> str:
    path = directory / "env.yaml"
    path.write_text(text)
    return str(path)


def test_file_and_flags(tmp_path):
    servers = "openai:\n- {base_url: 'http://a:1/v1', api_key: x}\n- {base_url: 'http://b:1/v1', api_key: x}\n"
    path = write(tmp_path, f"env: {{group-size: 3, max_num: 5}}\n{servers}slurm: false\n")
    options = parsed("--config", path, "--env.group_size", "9")
    assert (options.env.group_size, options.env.max_num) == (9, 5)
    assert options.openai.base_url == ("http://a:1/v1", "http://b:1/v1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env: {group_sise: 3}", "env.group_sise -> did you mean env.group_size?"),
        ("envs: {}", "did you mean env?"),
        ("[]", "is not a mapping"),
        ("openai: [{base_url: 'http://a:1'}, {base_url: 'http://b:1', api_key: y}]", "differ in more than base_url"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        parsed("--config", write(tmp_path, text))
    assert message in str(caught.value)


def test_names_of_atropos_that_do_nothing_here_are_left_out_with_a_warning(tmp_path, caplog):
    path = write(tmp_path, "env: {group_size: 8, batch_size: 64}\nopenai: {weight: 1.0}\n")
    options = parsed("--config", path, "--env.max_num_workers_per_node", "24", "--env.eval_limit_ratio=0.1")
    assert options.env.group_size == 8
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "--env.max_num_workers_per_node does nothing here", "--env.eval_limit_ratio does nothing here",
        f"{path}: env.batch_size does nothing here", f"{path}: openai.weight does nothing here",
    ]  # fmt: skip


def test_every_flag_is_described():
    rows = describe(Gsm8kConfig)
    assert ("--env.data", "openai/gsm8k") in {(flag, default) for flag, default, _ in rows}
    assert all(meaning for _, _, meaning in rows)


@pytest.mark.parametrize("text", ["openai: [{base_url: 'http://a:1'}]", "openai: {base_url: 'http://a:1'}"])
def test_a_single_server_in_a_file_is_the_one_that_is_asked(tmp_path, text):
    """The original asks ports of its own choice unless there are two."""
    assert parsed("--config", write(tmp_path, text)).openai.base_url == ("http://a:1",)


@pytest.mark.parametrize("address", ["localhost:8002", "http://127.0.0.1:99999", "http://[::1", "http://host:x", ""])
def test_an_address_of_the_rollout_api_that_is_none_is_refused(address: str):
    with pytest.raises(ConfigError, match=r"--env\.rollout_server_url is") as raised:
        parse_options(["--env.rollout_server_url", address], env_class=ArithmeticConfig)
    assert "Value error" not in raised.value.message
