from __future__ import annotations

import pytest

from lachesis.common.errors import ConfigError
from lachesis.config.rules import check, learning_rate

LORA = {"kind": "lora"}
VLLM = {"kind": "vllm"}
HTTP = {"kind": "http"}
SHARED = {"kind": "shared_vllm"}
ATROPOS = {"kind": "atropos"}
SFT = {"stages": ["sft", "grpo"]}
ASYNC = {
    "engine": HTTP,
    "bridge": {"kind": "broadcast"},
    "pipeline": {"async_prefetch": True},
    "algorithm": {"sampler_correction": "token_truncate"},
}


def test_the_defaults_have_nothing_to_complain_about(build):
    assert check(build()) == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"run": {"name": "../up"}}, "run.name '../up' must be a directory name"),
        ({"run": {"name": ""}}, "run.name '' must be a directory name"),
        (
            {"run": {"setup": "prepare"}},
            "run.setup: 'prepare' is neither FILE.py:FUNCTION nor module.function",
        ),
        ({"rewards": {"functions": ["a.b", "c:d"]}}, "rewards.functions[1]: 'c:d' is neither"),
        ({"rewards": {"weights": [1.0, 2.0]}}, "rewards.weights has 2 values for 1 rewards.functions"),
        ({"rewards": {"weights": [0.0]}}, "rewards.weights are all 0"),
        ({"model": {"chat_template": "/no/such.jinja"}}, "model.chat_template: '/no/such.jinja' is neither a file nor"),
        (
            {"model": {"gradient_checkpointing": True, "activations": "selective"}},
            "model.gradient_checkpointing: true means model.activations: recompute, but that is selective",
        ),
        ({"data": {"eval_path": "e.jsonl", "eval_size": 5}}, "data.eval_path and data.eval_size both"),
        (
            {"evaluation": {"every_steps": 5}},
            "evaluation.every_steps is 5 but there are no held-out problems",
        ),
        ({"optimizer": {"warmup_steps": 2, "warmup_ratio": 0.1}}, "warmup_ratio 0.1 both set the length of warm-up"),
        ({"optimizer": {"betas": (0.9, 1.0)}}, "optimizer.betas must be below 1"),
        (
            {"model": {"dtype": "float16"}, "optimizer": {"weight_update": "stochastic_rounding"}},
            "stochastic_rounding is for bfloat16, but model.dtype is float16",
        ),
        ({"rewards": {"functions": ["acuracy"]}}, "'acuracy' is neither FILE.py:FUNCTION nor module.function"),
        (
            {"rewards": {"functions": [{"functoin": "accuracy"}]}},
            "expected `function` and `kwargs`, a mapping",
        ),
        ({"data": {"transform": "prompts"}}, "data.transform: 'prompts' is neither FILE.py:FUNCTION"),
        ({"data": {"more": [{"path": "b.jsonl", "transform": "f"}]}}, "data.more[0].transform: 'f' is neither"),
        ({"data": {"path": None, "more": [{"path": "b.jsonl"}]}}, "data.more adds to data.path"),
        ({"algorithm": {"loss": "mine"}}, "algorithm.loss: 'mine' is neither"),
        ({"run": {"stages": ["sft"]}}, "run.stages ['sft']: a run is [grpo], or [sft, grpo]"),
        (
            {"source": ATROPOS, "rewards": {"special_tokens": "keep"}},
            "rewards.special_tokens keep does nothing with source.kind atropos",
        ),
        ({"run": SFT, "source": ATROPOS}, "environments would wait for the end of the sft stage"),
        (
            {"algorithm": {"router_replay": True}, "source": ATROPOS},
            "algorithm.router_replay with source.kind atropos: rollouts posted",
        ),
        (
            {"algorithm": {"router_replay": True}, "source": {"kind": "local", "rollout_func": "a.b"}},
            "algorithm.router_replay with source.rollout_func: its result does not say",
        ),
        ({"run": SFT, "source": {"kind": "verifiers", "environment": "x"}}, "sft.path is unset"),
        (
            {"algorithm": {"teacher": {"model": "big", "estimate": "sampled", "beta": 0.5}}},
            "estimate sampled is for the reverse KL, but beta is 0.5",
        ),
        (
            {"algorithm": {"teacher": {"model": "big", "weight": 0}}},
            "algorithm.teacher.weight is 0, so the teacher teaches nothing",
        ),
        ({"algorithm": {"teacher": {"weight": 1}}}, "algorithm.teacher.kind is model, but algorithm.teacher.model is"),
        ({"algorithm": {"teacher": {"model": "big", "url": "http://a:1"}}}, "url is set, but algorithm.teacher.kind"),
        ({"algorithm": {"teacher": {"kind": "rollouts"}}}, "but source.kind is local; set source.kind: atropos"),
        ({"algorithm": {"teacher": {"kind": "url", "url": "http://a:1"}}}, "needs the whole vocabulary, which no"),
        (
            {
                "algorithm": {"teacher": {"kind": "url", "url": "http://a:1", "top_k": 20}},
                "sampling": {"temperature": 0.7},
            },
            "sampling.temperature is 0.7, but a server gives teacher logprobs only at temperature 1",
        ),
        ({"source": {"kind": "local", "rollout_func": "f"}}, "source.rollout_func: 'f' is neither"),
        ({"source": {"kind": "local", "max_turns": 3}}, "source.max_turns have no effect without source.tools"),
        (
            {"source": {"kind": "local", "tools": ["a.b"], "rollout_func": "c.d"}},
            "source.tools and source.rollout_func both define",
        ),
        (
            {
                "source": {"kind": "agent", "command": ["a"]},
                "rewards": {"functions": ["lachesis.plugins.environments.agents.rewards.exit_code"]},
            },
            "source.nonzero_exit exclude drops all except 0",
        ),
        (
            {
                "source": {"kind": "agent", "command": ["a"]},
                "rewards": {"functions": ["lachesis.rollouts.agent.rewards.reported"]},
            },
            "trusts a score that the agent reports",
        ),
        (
            {"source": {"kind": "agent", "command": ["a"], "wall": "none", "network": "open", "disk_mb": 9}},
            "source.network, source.disk_mb configure the sandbox, but source.wall none has none",
        ),
        ({"source": {"kind": "local", "tools": ["a"]}}, "source.tools[0]: 'a' is neither"),
        ({"data": {"eval_split": "test", "eval_size": 0.1}}, "data.eval_split and data.eval_size both"),
        ({"evaluation": {"samples_per_problem": 4}}, "all samples of a problem would be identical"),
        ({"checkpoint": {"save_final": False, "hub": {"repo": "a/b"}}}, "uploads the final model, but"),
        ({"sampling": {"guided_regex": "a+"}}, "sampling.guided_regex needs vLLM, but engine.kind is embedded"),
        (
            {"sampling": {"generation_kwargs": {"bad_words": ["x"]}}},
            "sampling.generation_kwargs needs vLLM, but engine.kind is embedded",
        ),
        (
            {"engine": VLLM, "bridge": SHARED, "sampling": {"generation_kwargs": {"top_p": 0.5, "n": 2}}},
            "sampling.generation_kwargs.top_p has its own key",
        ),
        ({"sampling": {"min_tokens": 300}}, "sampling.min_tokens 300 is more than max_completion_length 256"),
        ({"algorithm": {"kl_reference": "ema"}}, "kl_reference is ema, but algorithm.beta is 0"),
        ({"algorithm": {"top_entropy_quantile": 0.0}}, "trains on no token"),
        (
            {"algorithm": {"sampler_correction": "token_mask", "sampler_correction_max": None}},
            "sampler_correction token_mask has no bound",
        ),
        (
            {"algorithm": {"sampler_correction": "token_mask", "sampler_correction_min": 3.0}},
            "sampler_correction_min 3 is not below sampler_correction_max 3",
        ),
        (
            {"algorithm": {"loss_type": "dppo_tv", "importance_sampling_level": "sequence"}},
            "importance_sampling_level sequence does nothing with loss_type dppo_tv",
        ),
        (
            {"algorithm": {"loss_type": "gmpo", "top_entropy_quantile": 0.2}},
            "top_entropy_quantile with loss_type gmpo",
        ),
        (
            {"data": {"curriculum": "pass_rate"}, "source": {"kind": "atropos", "batch_size": 8}},
            "data.curriculum pass_rate needs problems that this run draws and scores itself",
        ),
        ({"algorithm": {"loss_type": "clip_cov", "cov_low": 5.0}}, "cov_low 5 is not below cov_high 5"),
        (
            {"algorithm": {"loss_type": "kl_cov", "teacher": {"model": "m", "estimate": "sampled"}}},
            "estimate sampled adds to the advantages by which loss_type kl_cov selects tokens",
        ),
        ({"model": {"quantization": "nf4"}}, "model.quantization nf4 makes weights untrainable"),
        (
            {"model": {"quantization": "nf4", "matmul_dtype": "float8"}, "adapter": {"kind": "lora"}},
            "model.matmul_dtype float8: with model.quantization nf4 the linear layers already use",
        ),
        *(
            (
                {
                    "model": {"quantization": "nf4"},
                    "adapter": {"kind": "lora"},
                    "engine": VLLM,
                    "bridge": {"kind": kind},
                },
                f"bridge.kind {kind} sends all weights with the adapter merged into them",
            )
            for kind in ("broadcast", "none", "reload")
        ),
        (
            {
                "model": {"quantization": "int8"},
                "adapter": {"kind": "lora"},
                "engine": VLLM,
                "bridge": {"kind": "lora_only", "share_base": True},
            },
            "bridge.share_base shares the engine's weights, which are not quantized, but model.quantization is int8",
        ),
        (
            {"pipeline": {"async_prefetch": True, "max_staleness": 3}, "algorithm": {"num_iterations": 5}},
            "and 5 step(s) on each generation make samples up to 4 versions old at their last use even without",
        ),
        (
            {**ASYNC, "bridge": {"kind": "broadcast", "every_steps": 6}},
            "every_steps 6 and 1 step(s) on each generation make samples up to 5 versions old at their last use",
        ),
        (
            {"pipeline": {"reroll_start_fraction": 0.5, "reroll_max_groups": 33}},
            "reroll_max_groups 33 is more than the 32 prompts that are",
        ),
        (
            {"source": ATROPOS, "pipeline": {"reroll_start_fraction": 0.5}},
            "the protocol of source.kind atropos cannot send a prompt again",
        ),
        (
            {"source": ATROPOS, "run": {"steps": None, "epochs": 1.0}},
            "source.kind atropos does not have; set run.steps",
        ),
        ({"source": ATROPOS, "data": {"eval_size": 5}, "rewards": {"functions": []}}, "which is not set; set it"),
        ({"engine": VLLM}, "in_process works only in the trainer's own process, but engine.kind is vllm"),
        ({"bridge": SHARED}, "engine.kind embedded uses the trainer's own weights and needs bridge.kind in_process"),
        ({"engine": VLLM, "bridge": {"kind": "lora_only"}}, "transfers adapters only, and adapter.kind is none"),
        ({"engine": HTTP, "bridge": {"kind": "none"}}, "engine.kind http is not the run's to restart"),
        ({"engine": HTTP, "bridge": {"kind": "none"}}, "set engine.kind: vllm or"),
        ({"engine": {**VLLM, "tensor_parallel_size": 2}, "bridge": SHARED}, "holds slices that no layer"),
        ({"engine": {**VLLM, "data_parallel_size": 2}, "bridge": SHARED}, "data_parallel_size 2 makes several"),
        (
            {
                "engine": {**VLLM, "data_parallel_size": 2, "tensor_parallel_size": 2, "devices": "1,2,3"},
                "bridge": {"kind": "broadcast"},
            },
            "engine.devices 1,2,3 does not name 4; name 4 GPUs",
        ),
        (
            {
                "engine": {**VLLM, "data_parallel_size": 2, "tensor_parallel_size": 2, "devices": "1,2,2,1"},
                "bridge": {"kind": "broadcast"},
            },
            "puts several servers on one GPU, but with engine.tensor_parallel_size each worker needs its own",
        ),
        (
            {
                "engine": {**VLLM, "data_parallel_size": 2, "devices": "1,1"},
                "bridge": {"kind": "broadcast", "transport": "nccl"},
            },
            "engine.devices 1,1 puts several servers on one GPU, which bridge.transport nccl does not support",
        ),
        ({"engine": {**VLLM, "devices": "cuda:1"}, "bridge": {"kind": "broadcast"}}, "'cuda:1' is not a CUDA_VIS"),
        ({"engine": {**VLLM, "enable_sleep_mode": True}, "bridge": SHARED}, "a sleeping engine frees the tensors"),
        (
            {"engine": {**VLLM, "quantization": "fp8"}, "bridge": SHARED},
            "bridge.kind shared_vllm trains the engine's own tensors, which have 8 bits with engine.quantization fp8",
        ),
        (
            {
                "engine": {**VLLM, "quantization": "fp8"},
                "bridge": {"kind": "lora_only", "share_base": True},
                "adapter": {"kind": "lora"},
            },
            "bridge.share_base trains the engine's own tensors",
        ),
        (
            {"engine": {**VLLM, "quantization": "fp8", "dtype": "float32"}, "bridge": {"kind": "broadcast"}},
            "vLLM quantizes 16-bit weights, but these are float32",
        ),
        (
            {"engine": {**VLLM, "enable_sleep_mode": True}, "bridge": {"kind": "broadcast"}, "source": ATROPOS},
            "environments of source.kind atropos send requests at any time",
        ),
        (
            {
                "engine": {**VLLM, "enable_sleep_mode": True},
                "bridge": {"kind": "broadcast"},
                "pipeline": {"async_prefetch": True},
            },
            "pipeline.async_prefetch it must generate then",
        ),
        (
            {
                "engine": {**VLLM, "enable_sleep_mode": True},
                "bridge": {"kind": "broadcast"},
                "model": {"device": "cpu"},
            },
            "frees GPU memory, but model.device is cpu",
        ),
        ({"engine": VLLM, "bridge": SHARED, "adapter": {"kind": "lora"}}, "use lora_only with share_base"),
        (
            {
                "engine": {**VLLM, "tensor_parallel_size": 2},
                "bridge": {"kind": "lora_only", "share_base": True},
                "adapter": {"kind": "lora"},
            },
            "bridge.share_base gives the trainer the engine's own tensors",
        ),
        (
            {"engine": {**VLLM, "max_model_len": 200}, "bridge": SHARED},
            "engine.max_model_len 200 is less than the longest prompt and completion together (257",
        ),
        ({"algorithm": {"kl_placement": "reward"}}, "kl_placement is set, but algorithm.beta is 0"),
        (
            {"algorithm": {"beta": 0.1, "kl_placement": "reward", "aggregation": "normalize_then_sum"}},
            "a KL term cannot be normalized as a reward",
        ),
        (
            {"algorithm": {"beta": 0.1, "kl_placement": "reward", "kl_reference": "sampler"}},
            "no divergence from it",
        ),
    ],
)
def test_what_cannot_work_is_refused(build, sections, expected):
    with pytest.raises(ConfigError) as caught:
        check(build(**sections))
    assert expected in caught.value.message


def test_all_problems_are_told_at_once(build):
    with pytest.raises(ConfigError) as caught:
        check(build(rewards={"weights": [0.0]}, optimizer={"betas": (0.9, 1.0)}))
    assert caught.value.message.splitlines()[0] == "the configuration cannot work: 2 problems"


@pytest.mark.parametrize(
    ("sections", "level", "rule", "expected"),
    [
        (
            {"sampling": {"top_p": 0.9, "top_k": 50}},
            "warning",
            "truncated_sampling",
            "sampling.top_p 0.9, sampl",
        ),
        (
            {"engine": {**VLLM, "quantization": "fp8"}, "bridge": {"kind": "broadcast"}},
            "note",
            "rounded",
            "the loss is corrected for it (algorithm.sampler_correction token_truncate)",
        ),
        (
            {
                "engine": {**VLLM, "kv_cache_dtype": "fp8"},
                "bridge": {"kind": "broadcast"},
                "algorithm": {"sampler_correction": "none"},
            },
            "warning",
            "rounded",
            "engine.kv_cache_dtype fp8: samples come from a policy slightly different from the trained one",
        ),
        ({"sampling": {"min_p": 0.1}}, "warning", "truncated_sampling", "sampling.min_p 0.1: "),
        ({"sampling": {"repetition_penalty": 1.1}}, "warning", "truncated_sampling", "ratios are biased"),
        ({"sampling": {"num_generations": 2}}, "note", "group_size", "+0.71 or -0.71"),
        ({"data": {"eval_path": "train.jsonl"}}, "warning", "held_out", "on the training problems"),
        (
            {"data": {"eval_size": 5}, "evaluation": {"every_steps": 11}},
            "note",
            "held_out",
            "before and after",
        ),
        ({"optimizer": {"min_lr_ratio": 0.1}}, "warning", "schedule", "has no effect with schedule constant"),
        ({"optimizer": {"warmup_steps": 11}}, "warning", "schedule", "run.steps 10: warm-up is cut to the whole run"),
        (
            {"optimizer": {"decay_steps": 1}},
            "warning",
            "schedule",
            "decay_steps do nothing with optimizer.schedule",
        ),
        (
            {"optimizer": {"kind": "adafactor", "eps": 1e-6}},
            "warning",
            "optimizer",
            "optimizer.eps do nothing",
        ),
        (
            {"optimizer": {"kind": "adamw_cpu"}, "model": {"device": "cpu"}},
            "note",
            "optimizer",
            "adamw_cpu is the same as adamw if the model is on the CPU",
        ),
        ({"optimizer": {"learning_rate": 2e-4}}, "warning", "learning_rate", "nothing holds the policy near"),
        ({"adapter": {**LORA, "dropout": 0.1}}, "warning", "adapter", "ratios are noisy"),
        (
            {"model": {"dtype": "float32"}, "optimizer": {"weight_update": "stochastic_rounding"}},
            "note",
            "weight_update",
            "model.dtype is float32 already",
        ),
        (
            {"batch": {"max_tokens_per_microbatch": 128}},
            "note",
            "microbatch",
            "the longest possible sequence (256 tokens)",
        ),
        (
            {"algorithm": {"baseline": "none", "scale_rewards": "none"}, "pipeline": {"refill_zero_signal": 3}},
            "warning",
            "algorithm",
            "with algorithm.baseline none they have a gradient too",
        ),
        (
            {"algorithm": {"baseline": "none"}},
            "warning",
            "algorithm",
            "where all are 1, advantages are 10000; set scale_rewards to none or tokens",
        ),
        (
            {"algorithm": {"loss_type": "kl_cov", "delta": 4.0}},
            "warning",
            "loss",
            "algorithm.delta does nothing with loss_type kl_cov",
        ),
        (
            {"algorithm": {"importance_sampling_level": "sequence", "loss_type": "dapo"}},
            "warning",
            "algorithm",
            "GSPO is defined with loss_type grpo",
        ),
        (
            {"algorithm": {"aggregation": "normalize_then_sum", "scale_rewards": "none"}},
            "warning",
            "algorithm",
            "scale_rewards none does nothing",
        ),
        ({"algorithm": {"epsilon": 1.0}}, "warning", "algorithm", "never clips below"),
        ({"algorithm": {"epsilon_high": 0.1}}, "note", "algorithm", "is below epsilon 0.2"),
        ({"deadlines": {"batch_s": 10.0}}, "warning", "deadlines", "ends before generation has to"),
        ({"checkpoint": {"save_final": False}}, "warning", "checkpoint", "no trained weights remain"),
        ({"checkpoint": {"every_steps": 11}}, "note", "checkpoint", "more than run.steps 10"),
        ({"checkpoint": {"keep_last": 5}}, "note", "checkpoint", "keep_last does nothing"),
        (
            {"checkpoint": {"every_steps": 5, "every_epochs": 1.0}},
            "note",
            "checkpoint",
            "has no effect beside every_steps",
        ),
        (
            {"data": {"transform": "a.b", "format": "messages"}},
            "warning",
            "data",
            "data.format messages does nothing: data.transform makes the prompts",
        ),
        ({"data": {"eval_split": "train"}}, "warning", "held_out", "data.eval_split is data.split"),
        ({"sampling": {"top_p": 0.9}}, "warning", "truncated_sampling", "sampling.top_p 0.9: "),
        ({"algorithm": {"loss": "a.b", "loss_type": "dapo"}}, "warning", "loss", "algorithm.loss replaces it"),
        (
            {"algorithm": {"loss_type": "cispo", "epsilon_high": 0.5}},
            "warning",
            "loss",
            "every weight is at most 0.5; 5 is usual",
        ),
        (
            {"algorithm": {"teacher": {"model": "big", "estimate": "sampled", "top_k": 5}}},
            "warning",
            "teacher",
            "top_k does nothing with estimate sampled",
        ),
        (
            {"algorithm": {"teacher": {"model": "big", "estimate": "sampled", "clip": 0.05}}},
            "warning",
            "teacher",
            "clip does nothing with estimate sampled",
        ),
        ({"sft": {"steps": 5, "column": "x"}}, "warning", "stages", "sft.steps, sft.column do nothing without sft"),
        (
            {"algorithm": {"teacher": {"model": "big", "column": "x"}}},
            "note",
            "teacher",
            "does nothing without weights",
        ),
        ({"algorithm": {"sapo_temperature_pos": 2.0}}, "note", "loss", "algorithm.sapo_temperature_pos do nothing"),
        (
            {"algorithm": {"loss_type": "cispo", "delta": 2.0}},
            "warning",
            "loss",
            "algorithm.delta does nothing with loss_type cispo",
        ),
        (
            {"algorithm": {"loss_type": "sapo", "epsilon": 0.1, "epsilon_high": 0.3}},
            "warning",
            "loss",
            "algorithm.epsilon, algorithm.epsilon_high do nothing with loss_type sapo",
        ),
        ({"algorithm": {"kl_reference": "sampler"}}, "warning", "reference", "while algorithm.beta is 0"),
        ({"algorithm": {"beta": 0.1, "kl_horizon": 9}}, "warning", "reference", "nothing without algorithm.kl_target"),
        ({"evaluation": {"max_problems": 9}}, "note", "held_out", "evaluation.max_problems do nothing without"),
        (
            {"sampling": {"guided_regex": "a+", "min_tokens": 2}, "engine": VLLM, "bridge": SHARED},
            "warning",
            "truncated_sampling",
            "sampling.min_tokens, sampling.guided_regex: the engine's logprobs are for the truncated distribution",
        ),
        ({"algorithm": {"delta": 1.1}}, "warning", "loss", "delta 1.1 is not above 1 + epsilon, with epsilon 0.2"),
        ({"algorithm": {"ref_sync_steps": 8}}, "note", "reference", "ref_sync_steps does nothing"),
        ({"algorithm": {"sampler_correction_min": 0.1}}, "note", "sampler_correction", "does nothing with sampler"),
        (
            {"algorithm": {"num_iterations": 4}},
            "note",
            "iterations",
            "only 2 are done on the last generation; 8 or 12 steps would be complete",
        ),
        ({"pipeline": {"prefetch_depth": 2}}, "note", "prefetch", "while pipeline.async_prefetch is false"),
        (
            {**ASYNC, "algorithm": {}},
            "note",
            "prefetch",
            "token_truncate weights each token by how its probability has",
        ),
        (
            {**ASYNC, "algorithm": {"sampler_correction": "none"}},
            "warning",
            "prefetch",
            "the clip drops tokens only because they are old",
        ),
        (
            {**ASYNC, "pipeline": {"async_prefetch": True, "prefetch_depth": 5}},
            "warning",
            "prefetch",
            "samples up to 5 versions old, but max_staleness 4 allows only 4 batch(es) ahead",
        ),
        (
            {**ASYNC, "pipeline": {"async_prefetch": True, "max_staleness": 0}},
            "note",
            "prefetch",
            "as synchronous as without async_prefetch; one batch ahead makes samples up to 1 versions old",
        ),
        (
            {**ASYNC, "engine": {"kind": "embedded"}, "bridge": {"kind": "in_process"}},
            "warning",
            "prefetch",
            "so they barely overlap",
        ),
        ({"pipeline": {"streaming_min_groups": 2}}, "note", "streaming", "while pipeline.streaming is false"),
        (
            {"pipeline": {"streaming": True, "streaming_min_groups": 32}},
            "warning",
            "streaming",
            "streaming_min_groups 32 is not below the 32 prompts that are generated at once, so no group",
        ),
        (
            {"pipeline": {"streaming": True, "streaming_min_groups": 1}, "batch": {"prompts_per_step": 1}},
            "warning",
            "streaming",
            "not below the one prompt that is generated at once, so no group is scored before all are "
            "generated; raise batch.prompts_per_step",
        ),
        (
            {"pipeline": {"streaming": True}, "source": {"kind": "local", "rollout_func": "agents.solve"}},
            "warning",
            "streaming",
            "does nothing with source.rollout_func",
        ),
        ({"pipeline": {"replay_recompute_logps": False}}, "note", "replay", "while pipeline.replay_size is 0"),
        (
            {"pipeline": {"replay_size": 8, "replay_recompute_logps": False}},
            "warning",
            "replay",
            "the clip drops most tokens",
        ),
        (
            {"pipeline": {"replay_size": 8, "refill_zero_signal": 1}},
            "note",
            "replay",
            "first with new groups, then with replayed",
        ),
        ({"pipeline": {"reroll_max_groups": 2}}, "note", "reroll", "while pipeline.reroll_start_fraction is 1"),
        ({"rewards": {"num_workers": 33}}, "note", "source", "some workers stay idle"),
        (
            {"source": ATROPOS, "engine": {"kind": "embedded_server"}, "bridge": SHARED},
            "warning",
            "source",
            "data and rewards have no effect with source.kind atropos",
        ),
        ({"engine": {**VLLM, "enforce_eager": True}, "bridge": SHARED}, "note", "engine", "several times slower"),
        (
            {"engine": HTTP, "bridge": {"kind": "reload", "every_steps": 11}},
            "warning",
            "engine",
            "never gets new weights",
        ),
        ({"bridge": {"kind": "in_process", "proof": False}}, "warning", "bridge", "stale weights would go unnoticed"),
    ],
)
def test_what_is_odd_is_said(build, sections, level, rule, expected):
    (finding,) = check(build(**sections))
    assert (finding.level, finding.rule) == (level, rule)
    assert expected in finding.message


@pytest.mark.parametrize("address", ["abc", "abc:8002", "http://127.0.0.1:99999", "http://127.0.0.1:x", "http://"])
def test_an_address_that_is_none_is_a_problem_before_anything_waits_for_it(build, address):
    for url in (address, f"dns+{address}"):
        with pytest.raises(ConfigError) as caught:
            check(build(engine={"kind": "http", "urls": [url]}, bridge={"kind": "broadcast"}))
        assert f"engine.urls {url} is not an address of a server; write it as http" in caught.value.message
    source = {**ATROPOS, "url": address}
    with pytest.raises(ConfigError) as caught:
        check(build(source=source, engine={"kind": "embedded_server"}, bridge=SHARED))
    assert f"source.url {address} is not an address of a server" in caught.value.message


def test_servers_that_a_file_names_are_no_addresses_yet(build):
    assert not check(build(engine={"kind": "http", "urls": ["file:servers.txt"]}, bridge={"kind": "broadcast"}))


def test_streaming_is_for_what_is_generated_here(build):
    found = check(
        build(source=ATROPOS, engine={"kind": "embedded_server"}, bridge=SHARED, pipeline={"streaming": True})
    )
    assert [one.message for one in found if one.rule == "streaming"] == [
        "pipeline.streaming does nothing with source.kind atropos: the environments score their groups"
    ]


@pytest.mark.parametrize(
    "sections",
    [
        {"pipeline": {"streaming": True, "streaming_min_groups": 31}},
        {"adapter": LORA, "optimizer": {"learning_rate": 2e-4}},
        {"optimizer": {"learning_rate": 2e-4}, "algorithm": {"beta": 0.04}},
        {"optimizer": {"weight_update": "plain"}, "model": {"dtype": "float32"}},
        {"optimizer": {"weight_update": "plain"}, "model": {"device": "cpu"}},
        {"optimizer": {"weight_update": "plain"}, "model": {"dtype": "bfloat16"}, "adapter": LORA},
        {"optimizer": {"weight_update": "plain", "learning_rate": 5e-5}, "model": {"dtype": "bfloat16"}},
        {"optimizer": {"weight_update": "stochastic_rounding"}, "model": {"dtype": "bfloat16"}},
        {"checkpoint": {"every_steps": 5, "keep_last": 5}},
        {"rewards": {"functions": ["a.b", "/x y/c.py:d"], "weights": [1.0, 0.0]}},
        {"model": {"chat_template": "{{ x }}"}},
        {"rewards": {"functions": ["OpenAssistant/reward-model-deberta-v3-large-v2", "/models/rm"]}},
        {"engine": VLLM, "bridge": SHARED},
        {"engine": {"kind": "embedded_server"}, "bridge": SHARED},
        {"engine": VLLM, "bridge": {"kind": "none"}},
        {"engine": HTTP, "bridge": {"kind": "lora_only"}, "adapter": LORA},
        {"engine": HTTP, "bridge": {"kind": "broadcast"}, "sampling": {"generation_kwargs": {"bad_words": ["x"]}}},
        ASYNC,
        {"pipeline": {"replay_size": 100, "reroll_start_fraction": 0.5}},
        {**ASYNC, "bridge": {"kind": "broadcast", "every_steps": 4}},
        {"algorithm": {"kl_reference": "ema", "beta": 0.1, "ref_sync_steps": 8}},
        {"run": {"steps": None, "epochs": 2.0}, "checkpoint": {"every_steps": 5}, "evaluation": {"every_steps": 0}},
        {"evaluation": {"samples_per_problem": 4, "temperature": 1.0}, "data": {"path": "a.jsonl", "eval_size": 8}},
        {"optimizer": {"kind": "adafactor"}},
    ],
)
def test_what_is_fine_is_not_mentioned(build, sections):
    assert check(build(**sections)) == []


def test_vanishing_updates_come_with_their_numbers(build):
    """1e-6 * 2^9 = 5.12e-4: half the spacing of bfloat16 is at least 2^-9 of a weight."""
    (finding,) = check(build(model={"dtype": "bfloat16"}, optimizer={"weight_update": "plain"}))
    assert finding.level == "warning"
    assert "2^-9·|w|" in finding.message
    assert "at learning rate 1e-06 no weight beyond 5.1e-04 ever changes" in finding.message


def test_vanishing_updates_are_conditional_where_the_dtype_is_the_checkpoints(build):
    (finding,) = check(build(optimizer={"weight_update": "plain"}))
    assert "if the checkpoint is bfloat16" in finding.message


def test_vanishing_updates_of_float16_are_smaller(build):
    (finding,) = check(build(model={"dtype": "float16"}, optimizer={"weight_update": "plain"}))
    assert "no weight beyond 4.1e-03" in finding.message


def test_a_bridge_that_transfers_adapters_only(build):
    sections = {"engine": HTTP, "bridge": {"kind": "lora_only"}}
    assert check(build(adapter=LORA, **sections)) == []
    with pytest.raises(ConfigError, match="transfers adapters only, and adapter"):
        check(build(**sections))


def test_a_template_file_that_is_there(build, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ x }}")
    assert check(build(model={"chat_template": str(path)})) == []


def test_learning_rate(build):
    assert learning_rate(build()) == 1e-6
    assert learning_rate(build(adapter=LORA)) == 1e-5
    assert learning_rate(build(adapter=LORA, optimizer={"learning_rate": 3e-4})) == 3e-4


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantized_base_weights_beside_an_engine_that_has_whole_ones(build, kind):
    sections = {"adapter": LORA, "model": {"quantization": kind}}
    assert check(build(**sections)) == []
    (finding,) = check(build(**sections, engine=VLLM, bridge={"kind": "lora_only"}))
    assert (finding.rule, finding.level) == ("quantization", "warning")
    assert "has the unquantized base weights" in finding.message
    assert finding.message.endswith("set algorithm.sampler_correction: token_truncate")
    corrected = {"sampler_correction": "token_truncate"}
    (finding,) = check(build(**sections, engine=VLLM, bridge={"kind": "lora_nccl"}, algorithm=corrected))
    assert finding.message.endswith("a larger tolerance for its canary")


def test_float8_products(build):
    corrected = {"algorithm": {"sampler_correction": "token_truncate"}}
    assert check(build(model={"matmul_dtype": "float8"}, **corrected)) == []
    (finding,) = check(build(model={"matmul_dtype": "float8_rowwise"}))
    assert (finding.rule, finding.level) == ("float8", "warning")
    assert finding.message.endswith("set algorithm.sampler_correction: token_truncate")
    assert finding.message.startswith("model.matmul_dtype float8_rowwise affects training only")
    options = {"matmul_dtype": "float8", "device": "cpu", "compile": "off"}
    emulated, uncompiled = check(build(model=options, **corrected))
    assert emulated.level == "warning" and "is emulated with model.device cpu" in emulated.message
    assert uncompiled.level == "note" and "gains little with model.compile off" in uncompiled.message


VERIFIERS = {"source": {"kind": "verifiers", "environment": "gsm8k"}}
NO_DATASET = {"data": {"path": None}, "rewards": {"functions": []}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, "data and rewards are for datasets"),
        ({**NO_DATASET, "run": {"steps": None, "epochs": 1.0}}, "run.epochs counts problems of a dataset"),
        ({**NO_DATASET, "checkpoint": {"every_epochs": 1.0}}, "checkpoint.every_epochs counts problems of a dataset"),
        ({**NO_DATASET, "evaluation": {"samples_per_problem": 4, "temperature": 1.0}}, "played once each, greedily"),
        ({**NO_DATASET, "evaluation": {"every_steps": 5}}, "there are no held-out problems"),
        (
            {"data": {"path": None}, "rewards": {"functions": [], "special_tokens": "keep"}},
            "rewards.special_tokens keep does nothing with source.kind verifiers",
        ),
    ],
)
def test_an_environment_has_tasks_and_rewards_of_its_own(build, sections, expected):
    with pytest.raises(ConfigError, match=expected):
        check(build(**VERIFIERS, **sections))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"data": {"path": "a.jsonl"}}, "name them in source.tasks"),
        ({"data": {"path": None}, "rewards": {"functions": ["a.b"], "num_workers": 2}}, "cannot be sent to other"),
        ({**NO_DATASET, "source": {"kind": "steps", "environment": "guess"}}, "source.environment: 'guess' is"),
    ],
)
def test_what_is_stepped_has_tasks_of_its_own_and_may_have_reward_functions(build, sections, expected):
    stepped = {"source": {"kind": "steps", "environment": "a.B"}}
    with pytest.raises(ConfigError, match=expected):
        check(build(**(stepped | sections)))
    assert check(build(**stepped, data={"path": None}, rewards={"functions": ["a.b"]})) == []


def test_an_environment_may_hold_tasks_out(build):
    held_out = {"source": VERIFIERS["source"] | {"eval_tasks": 4}, "evaluation": {"every_steps": 5}}
    assert check(build(**NO_DATASET, **held_out)) == []
    (finding,) = check(build(**NO_DATASET, **VERIFIERS, pipeline={"streaming": True}))
    assert "rollouts are scored as they end" in finding.message
