from __future__ import annotations

import json

import pytest

from lachesis.common.errors import ConfigError
from lachesis.plan.memory import checkpoint_bytes, export_bytes, trainable_parameters, weight_bytes
from lachesis.plan.plan import plan, size_text
from lachesis.plan.shapes import read_shape
from lachesis.plugins.planning.plan_text import plan_lines

# Qwen2.5-1.5B: 1,543,714,304 parameters by its model card's count of tensors.
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {**LLAMA, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
LORA = {"kind": "lora", "r": 16}


@pytest.fixture
def model(tmp_path):
    def write(data) -> str:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(data if isinstance(data, str) else json.dumps(data))
        return str(directory)

    return write


@pytest.mark.parametrize(
    ("data", "parameters"),
    [(QWEN, 1_543_714_304), (LLAMA, 8_030_261_248), (MIXTRAL, 46_702_792_704), ({"text_config": LLAMA}, 8_030_261_248)],
)
def test_parameters(model, data, parameters):
    shape = read_shape(model(data))
    assert shape is not None and shape.parameters == parameters


def test_parameters_of_lora(model):
    """Rank 16 on all linear layers of Llama-3.1-8B: peft counts 41,943,040; on queries and values 6,815,744."""
    shape = read_shape(model(LLAMA))
    assert shape is not None
    assert shape.lora_parameters(rank=16, targets="all-linear") == 41_943_040
    assert shape.lora_parameters(rank=16, targets=["q_proj", "v_proj"]) == 6_815_744


def test_parameters_of_some_layers(model, build):
    """Without embeddings, head and last norm a layer of Llama-3.1-8B has a 32nd of the rest: 218,112,000."""
    path = model(LLAMA)
    shape = read_shape(path)
    assert shape is not None
    two = build(model={"path": path, "train_layers": [0, 31]})
    assert trainable_parameters(two, shape) == 2 * 218_112_000
    four = build(adapter={**LORA, "layers": [1, 2, 3, 4]})
    assert trainable_parameters(four, shape) == 41_943_040 // 8


def test_a_model_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert read_shape("org/model") is None
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN))
    shape = read_shape("org/model")
    assert shape is not None and shape.layers == 28


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"hidden_size": "many", "num_attention_heads": 1}'])
def test_a_config_that_cannot_be_read(model, text):
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(model(text))


def test_the_batches(build, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = build(
        run={"steps": 10},
        data={"max_prompt_length": 256},
        batch={"prompts_per_step": 4, "max_tokens_per_microbatch": 2048},
        evaluation={"every_steps": 5},
    )
    planned = plan(config, device="cpu")
    batches = planned.batches
    assert (batches.prompts, batches.completions, batches.tokens) == (4, 32, 32 * 512)
    assert (batches.micro_batches, batches.steps, batches.transfers, batches.evaluations) == (8, 10, 10, 0)
    assert planned.shape is None and planned.memory == () and planned.checkpoint is None
    (note,) = planned.notes
    assert "org/model has no config.json here and the hub did not provide one" in note
    made = config.model_copy(update={"run": config.run.model_copy(update={"setup": "first/model.py:build"})})
    (note,) = plan(made, device="cpu").notes
    assert "org/model is made by run.setup (first/model.py:build) when the run begins" in note and "hub" not in note
    capped = config.model_copy(update={"batch": config.batch.model_copy(update={"micro_batch_size": 2})})
    assert plan(capped, device="cpu").batches.micro_batches == 16
    assert plan(capped, device="cpu").lengths.microbatch == 1024


def test_epochs_are_counted_where_the_data_is_a_file(build, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n" * 100 + "\n")
    run = {"steps": None, "epochs": 2.0}
    planned = plan(build(run=run, data={"path": str(path), "eval_size": 0.2}, batch={"prompts_per_step": 16}))
    assert (planned.batches.problems, planned.batches.steps) == (80, 10)
    unknown = plan(build(run=run))
    assert (unknown.batches.problems, unknown.batches.steps) == (None, None)
    assert any("known once the data is read" in note for note in unknown.notes)


def test_full_fine_tuning_takes_sixteen_bytes_a_parameter(build, model):
    """Weights and gradients in bfloat16, float32 masters and two moments."""
    config = build(model={"path": model(QWEN)})
    planned = plan(config, device="cuda")
    held = {part.name: part.bytes for part in planned.memory if part.place == "trainer"}
    parameters = 1_543_714_304
    assert held["weights"] == held["gradients"] == 2 * parameters
    assert held["optimizer states"] == 12 * parameters
    assert "reference" not in held
    passing = {"activations", "logits chunk"}
    assert planned.peak("trainer") == sum(size for name, size in held.items() if name != "update")
    assert sum(planned.at("update", "trainer")) == sum(size for name, size in held.items() if name not in passing)


def held_by_the_trainer(planned) -> dict[str, int]:
    return {part.name: part.bytes for part in planned.memory if part.place == "trainer"}


def test_each_of_several_devices_holds_a_part(build, model):
    config = build(model={"path": model(QWEN)}, algorithm={"beta": 0.1})
    alone, four = (held_by_the_trainer(plan(config, device="cuda", devices=devices)) for devices in (1, 4))
    for name in ("weights", "gradients", "optimizer states", "reference"):
        assert four[name] == -(-alone[name] // 4), name
    for name in ("activations", "logits chunk"):
        assert four[name] == alone[name], name
    # The embedding, the last norm and two layers in bfloat16.
    outside = 151936 * 1536 + 1536
    layer = (1_543_714_304 - outside) // 28
    # On their way to the others the gradients of a layer are there whole, and once more in float32.
    assert four["gathered weights"] == 2 * (outside + 2 * layer) + (2 + 4) * layer


@pytest.mark.parametrize(
    ("distributed", "expected"),
    [
        ({"strategy": "replicate"}, {"weights": 2.0, "gradients": 2.0}),
        # Replicas that are added up once a step keep what there is of it in float32.
        ({"shard_size": 2}, {"weights": 1.0, "gradients": 2.0}),
        ({"replicate_size": 4}, {"weights": 2.0, "gradients": 4.0}),
        ({"context_parallel_size": 2}, {"weights": 0.5, "gradients": 0.5}),
        ({"context_parallel_size": 2, "shard_size": 1}, {"weights": 1.0}),
        ({"context_parallel_size": 2, "strategy": "replicate"}, {"weights": 2.0}),
        ({"reshard_after_forward": False}, {"weights": 0.5}),
        ({"cpu_offload": True}, {"weights": None, "optimizer states": None}),
    ],
)
def test_how_it_is_sharded_says_what_a_device_holds(build, model, distributed, expected):
    """In bytes a parameter."""
    config = build(model={"path": model(QWEN)}, distributed=distributed)
    held = held_by_the_trainer(plan(config, device="cuda", devices=4))
    for name, size in expected.items():
        assert held.get(name) == (None if size is None else int(size * 1_543_714_304)), name


@pytest.mark.parametrize(
    ("sections", "copies"), [({}, 1), ({"engine": {"kind": "http"}, "bridge": {"kind": "reload"}}, 1)]
)
def test_beside_a_sharded_trainer_every_engine_has_a_whole_model(build, model, sections, copies):
    planned = plan(build(model={"path": model(QWEN)}, **sections), device="cuda", devices=2)
    weights = [part for part in planned.memory if part.place == "engine" and part.name == "weights"]
    assert [part.bytes for part in weights] == [2 * 1_543_714_304] * copies


def test_devices_that_share_a_micro_batch_have_a_part_of_its_tokens(build, model):
    """Qwen2.5 1.5B has 2 heads of keys and values: of four devices each has half a head's worth more than its part."""
    config = build(model={"path": model(QWEN), "compile": "off"}, sampling={"max_completion_length": 16_384})
    shared = build(
        model={"path": model(QWEN), "compile": "off"},
        sampling={"max_completion_length": 16_384},
        distributed={"context_parallel_size": 4},
    )
    alone, four = (plan(one, device="cuda", devices=4) for one in (config, shared))
    one, each = held_by_the_trainer(alone), held_by_the_trainer(four)
    assert one["activations"] / 4 < each["activations"] < one["activations"] / 3
    assert each["logits chunk"] < one["logits chunk"]
    assert each["optimizer states"] == one["optimizer states"]
    text = "\n".join(plan_lines(four))
    assert f"{alone.batches.micro_batches:,} passes of each device" in text
    assert "each of 4 devices, context 4" in text
    with pytest.raises(ConfigError, match="12 attention heads and 2 key-value heads"):
        plan(build(model={"path": model(QWEN)}, distributed={"context_parallel_size": 5}), device="cuda", devices=5)


def test_devices_that_share_experts_gather_and_compute_a_part_of_them(build, model):
    path = model(QWEN | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024})
    alone, shared = (
        plan(build(model={"path": path}, distributed=sizes), device="cuda", devices=4)
        for sizes in ({}, {"expert_parallel_size": 4})
    )
    assert "experts over 4" in "\n".join(plan_lines(shared))
    before, after = held_by_the_trainer(alone), held_by_the_trainer(shared)
    assert after["weights"] == before["weights"]
    experts = 8 * 3 * 1536 * 1024
    # Two layers of weights, and gradients of one, in 16 bits and in float32.
    assert before["gathered weights"] - after["gathered weights"] == experts * 3 // 4 * (2 * 2 + 2 + 4)


def test_the_text_says_of_how_many_devices(build, model):
    text = "\n".join(plan_lines(plan(build(model={"path": model(QWEN)}), device="cuda", devices=4)))
    assert "memory of the trainer (cuda, each of 4 devices): " in text
    assert "memory of the engine (cuda): " in text
    assert "passes of each device" in text
    config = build(model={"path": model(QWEN)}, distributed={"shard_size": 2})
    text = "\n".join(plan_lines(plan(config, device="cuda", devices=4)))
    assert "each of 4 devices, replicate 2 x shard 2" in text
    with pytest.raises(ConfigError, match="which is not a multiple"):
        plan(config, device="cuda", devices=3)


@pytest.mark.parametrize(
    ("sections", "name", "per_parameter"),
    [
        ({"optimizer": {"kind": "adamw_8bit"}}, "optimizer states", 6),
        ({"optimizer": {"weight_update": "plain"}}, "optimizer states", 4),
        ({"optimizer": {"weight_update": "stochastic_rounding"}}, "optimizer states", 8),
        ({"algorithm": {"beta": 0.1}}, "reference", 2),
        ({"model": {"dtype": "float32"}}, "optimizer states", 8),
        ({"model": {"dtype": "float32"}}, "weights", 4),
    ],
)
def test_bytes_a_parameter(build, model, sections, name, per_parameter):
    sections = {**sections, "model": {"path": model(QWEN), **sections.get("model", {})}}
    parts = {part.name: part.bytes for part in plan(build(**sections), device="cuda").memory if part.place == "trainer"}
    assert parts[name] == per_parameter * 1_543_714_304


def test_an_optimizer_on_the_cpu_takes_none_of_the_gpu_and_its_checkpoint_is_whole(build, model):
    config = build(model={"path": model(QWEN)}, optimizer={"kind": "adamw_cpu"})
    planned = plan(config, device="cuda")
    assert "optimizer states" not in [part.name for part in planned.memory]
    assert planned.checkpoint == 14 * 1_543_714_304


def test_activations_of_a_measured_step(build, model):
    """On an H200 a micro-batch of 8,192 tokens took about 16 GB more than none."""
    planned = plan(build(model={"path": model(QWEN)}), device="cuda")
    (activations,) = (part.bytes for part in planned.memory if part.name == "activations")
    assert 14e9 < activations < 20e9
    recomputed = plan(build(model={"path": model(QWEN), "gradient_checkpointing": True}), device="cuda")
    (fewer,) = (part.bytes for part in recomputed.memory if part.name == "activations")
    assert fewer < activations / 10


def test_layers_that_run_twice_keep_their_input_and_what_attention_gives_or_two_inputs(build, model):
    def activations(**options) -> int:
        planned = plan(build(model={"path": model(QWEN), **options}), device="cuda")
        (found,) = (part.bytes for part in planned.memory if part.name == "activations")
        return found

    tokens, layers, hidden, heads = 8192, 28, 1536, 12
    of_attention = tokens * layers * (2 * hidden + 4 * heads)  # 12 heads of 128, and a float32 of each
    assert activations(activations="selective") - activations(activations="recompute") == of_attention
    assert activations(activations="recompute") == activations(gradient_checkpointing=True)
    of_inputs = tokens * (layers - 2) * 2 * hidden  # of a layer that runs and of the one before it they are there
    assert activations(activations="recompute") - activations(activations="offload") == of_inputs
    offloading = build(model={"path": model(QWEN), "activations": "offload"})
    said = [plan(offloading, device=device, devices=devices).notes for device, devices in (("cuda", 1), ("cuda", 2))]
    assert ["offload takes 704.6 MB of the host's memory, which is pinned" in " ".join(notes) for notes in said] == [
        True,
        False,
    ]
    assert "704.6 MB of the host's memory for each of the 2 devices" in " ".join(said[1])
    assert "host's memory" not in " ".join(plan(offloading, device="cpu").notes)


def test_what_is_kept_in_host_memory_is_said(build, model):
    """Masters and both moments of 1,543,714,304 parameters; with all of it, weights and gradients too."""
    path = {"path": model(QWEN)}

    def said(devices: int, **sections: object) -> str:
        return " ".join(plan(build(model=path, **sections), device="cuda", devices=devices).notes)

    on_host = {"optimizer": {"kind": "adamw_cpu"}}
    assert "optimizer.kind: adamw_cpu keeps 18.5 GB in host memory" in said(1, **on_host)
    assert "optimizer.kind: adamw_cpu keeps 18.5 GB in host memory, over all devices" in said(4, **on_host)
    assert "cpu_offload keeps 24.7 GB in host memory" in said(2, distributed={"cpu_offload": True})
    assert "in host memory" not in said(2)


def test_what_the_head_keeps_of_all_weights_is_counted_but_where_memory_is_spared(build, model):
    def of_head(**options) -> int:
        planned = plan(build(model={"path": model(QWEN), **options}), device="cuda")
        (found,) = (part.bytes for part in planned.memory if part.name == "logits chunk")
        return found

    kept, rounded_weight, chunk = 2 * 8192 * 151_936, 2 * 151_936 * 1536, (4 + 2) * (1 << 27)
    assert of_head() - of_head(activations="recompute") == kept + rounded_weight - chunk


def test_lora_trains_and_saves_the_adapter_alone(build, model):
    config = build(model={"path": model(LLAMA)}, adapter=LORA, algorithm={"beta": 0.1})
    planned = plan(config, device="cuda")
    parts = {part.name: part.bytes for part in planned.memory if part.place == "trainer"}
    assert parts["weights"] == 2 * 8_030_261_248
    assert parts["adapter"] == parts["gradients"] == 2 * 41_943_040
    assert parts["optimizer states"] == 12 * 41_943_040
    assert "reference" not in parts  # the base model is there already
    assert planned.export == 2 * 41_943_040
    assert planned.checkpoint == 14 * 41_943_040


@pytest.mark.parametrize(
    ("kind", "matrices"),
    [
        ("int8", 6_979_321_856 + 4 * 43_008 * 32),  # a float32 for each row: 43,008 in a layer
        ("nf4", 6_979_321_856 // 2 + 6_979_321_856 // 64 + 4 * 6_979_321_856 // 16_384 + 1092 * 7 * 32),
    ],
)
def test_quantized_weights_are_counted_with_their_scales(build, model, kind, matrices):
    """Of Llama-3.1-8B: embeddings, head and norms, 1,050,939,392 weights, stay in 16 bits."""
    planned = plan(build(model={"path": model(LLAMA), "quantization": kind}, adapter=LORA), device="cuda")
    parts = {part.name: part.bytes for part in planned.memory if part.place == "trainer"}
    assert parts["weights"] == matrices + 2 * 1_050_939_392
    assert parts["dequantized matrix"] == 2 * 4096 * 14336


def test_experts_are_not_quantized(build, model):
    shape = read_shape(model(MIXTRAL))
    assert shape is not None and sum(rows * columns for rows, columns in shape.quantizable) == 41_943_040
    planned = plan(build(model={"path": model(MIXTRAL), "quantization": "nf4"}, adapter=LORA), device="cuda")
    (weights,) = (part.bytes for part in planned.memory if part.place == "trainer" and part.name == "weights")
    assert weights > 0.95 * 2 * shape.parameters


@pytest.mark.parametrize(
    ("engine", "bridge", "adapter", "copies"),
    [
        ("embedded", "in_process", "none", 1),
        ("vllm", "shared_vllm", "none", 1),
        ("vllm", "broadcast", "none", 2),
        ("vllm", "lora_only", "lora", 2),
        ("http", "reload", "none", 2),
    ],
)
def test_the_engine_has_weights_of_its_own_or_the_trainers(build, model, engine, bridge, adapter, copies):
    sections = {"engine": {"kind": engine}, "bridge": {"kind": bridge}, "adapter": {"kind": adapter}}
    planned = plan(build(model={"path": model(QWEN)}, **sections), device="cuda")
    assert [part.name for part in planned.memory].count("weights") == copies


def test_the_cache_holds_a_whole_batch(build, model):
    """28 layers, 2 heads of 128, keys and values, two bytes: 28,672 bytes a token."""
    config = build(model={"path": model(QWEN)}, data={"max_prompt_length": 256})
    (cache,) = (part.bytes for part in plan(config, device="cuda").memory if part.name == "KV cache")
    assert cache == 28_672 * 256 * 512


def test_what_does_not_divide_comes_with_the_nearest_that_does(build, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n" * 100)
    config = build(
        run={"steps": 10},
        data={"path": str(path), "max_prompt_length": 8},
        batch={"prompts_per_step": 32, "micro_batch_size": 5},
        algorithm={"num_iterations": 4},
    )
    first, second, third, _ = plan(config).notes
    assert "10 steps are not a multiple of the 4 steps of a generation; 8 or 12 are" in first
    assert (
        "100 problems are not a multiple of the 32 prompts that are generated at once" in second
        and "25 or 50 divide them" in second
    )
    assert "batch.micro_batch_size 5 does not divide 256; 4 or 8 do" in third


def test_data_that_is_not_here_is_named(build, tmp_path):
    gone, held_out = str(tmp_path / "gone.jsonl"), str(tmp_path / "held_out.jsonl")
    data = {"path": gone, "eval_path": held_out, "eval_split": None}
    notes = plan(build(data=data)).notes
    assert {f"{path} does not exist, so the run would be refused" for path in (gone, held_out)} <= set(notes)
    setup = build(data=data, run={"steps": 1, "setup": "prepare.py:write"})
    assert f"{gone} does not exist: run.setup has to write it" in plan(setup).notes
    (tmp_path / "gone.jsonl").write_text('{"prompt": "1+1="}\n')
    assert not [note for note in plan(build(data={"path": gone})).notes if "does not exist" in note]
    assert not [note for note in plan(build(data={"path": "openai/gsm8k"})).notes if "does not exist" in note]


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"),
                                             (80 * 10**9, "80.0 GB"), (3 * 10**12, "3000.0 GB")])  # fmt: skip
def test_sizes_are_in_units_of_1000_as_those_of_cards_are(count: int, text: str):
    assert size_text(count) == text


def test_completions_as_long_as_the_context(build, model):
    """The run would be refused: that is not the time to say how long prompts may be."""
    config = build(model={"path": model(QWEN)}, sampling={"max_completion_length": 32768})
    (note,) = plan(config).notes
    assert "leaves no room for a prompt in the model's context of 32768 tokens" in note


def test_a_batch_of_environments(build):
    config = build(source={"kind": "atropos", "batch_size": 18, "max_sequence_length": 1000})
    planned = plan(config)
    assert (planned.batches.completions, planned.lengths.longest) == (18, 1000)
    assert any("source.batch_size 18 is not a multiple of sampling.num_generations 8" in note for note in planned.notes)


def test_the_text(build, model):
    config = build(
        model={"path": model(QWEN)},
        data={"max_prompt_length": 256},
        engine={"kind": "http"},
        bridge={"kind": "reload", "every_steps": 2},
        checkpoint={"every_steps": 5, "keep_last": 3},
    )
    text = "\n".join(plan_lines(plan(config, device="cuda")))
    for expected in (
        "32 prompts, 256 completions, at most 131,072 tokens in 16 micro-batches of up to 8,192",
        "10 optimizer steps",
        "2,560 completions trained on, 5 weight transfers, 0 evaluations",
        "parameters    1,543,714,304, of which 1,543,714,304 are trained",
        "optimizer states     18.5 GB",
        "checkpoint           21.6 GB  x 3 kept",
        "transfers             3.1 GB  x 2 kept",
    ):
        assert expected in text
    assert "unknown" in "\n".join(plan_lines(plan(build(run={"steps": None, "epochs": 1.0}))))


def test_widths(build, model):
    config = build(model={"path": model(QWEN)})
    shape = read_shape(config.model.path)
    assert shape is not None
    assert (weight_bytes(config, shape, device="cuda"), weight_bytes(config, shape, device="cpu")) == (2, 4)
    assert export_bytes(config, shape, device="cuda") == 2 * shape.parameters
    assert checkpoint_bytes(config, shape, device="cpu") == 12 * shape.parameters


@pytest.mark.parametrize("kind", ["lora_only", "lora_nccl"])
@pytest.mark.parametrize(("share_base", "copies"), [(False, 2), (True, 1)])
def test_adapters_take_two_copies_of_the_base_or_one_that_is_shared(build, model, kind, share_base, copies):
    planned = plan(
        build(
            model={"path": model(QWEN)}, adapter={"kind": "lora"}, engine={"kind": "vllm"},
            bridge={"kind": kind, "share_base": share_base},
        ),
        device="cuda",
    )  # fmt: skip
    base = 2 * 1_543_714_304
    assert sum(base <= part.bytes < 1.1 * base for part in planned.memory if part.name == "weights") == copies


@pytest.mark.parametrize(("device", "noticed"), [("cuda", True), ("cpu", False)])
def test_an_engine_on_the_card_of_a_rank_is_noticed(build, model, monkeypatch, device, noticed):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = build(model={"path": model(QWEN)}, engine={"kind": "vllm", "devices": "1"}, bridge={"kind": "broadcast"})
    lines = plan_lines(plan(config, device=device, devices=2))
    assert any("note: engine.devices 1 puts the engine on the GPU of rank 1" in line for line in lines) is noticed


@pytest.mark.parametrize(
    ("engine", "devices", "said"),
    [
        ({"tensor_parallel_size": 2, "enable_sleep_mode": True}, 2, "it sleeps while they train; their weights and"),
        ({"data_parallel_size": 2}, 2, "and holds its share while they train; with engine.enable_sleep_mode"),
        ({"tensor_parallel_size": 2}, 4, "takes 2 GPUs, but 4 ranks train: "),
        ({"tensor_parallel_size": 2, "devices": "4,5"}, 2, None),
        ({}, 2, "only on the first of the 2 devices, and the others wait while it generates; engine.data_par"),
        ({}, 1, None),
    ],
)
def test_an_engine_on_the_gpus_of_all_devices_is_said(build, engine: dict, devices: int, said: str | None):
    config = build(engine={"kind": "vllm", **engine}, bridge={"kind": "broadcast"})
    notes = plan(config, device="cuda", devices=devices).notes
    found = [note for note in notes if "vLLM is" in note or "ranks train" in note]
    assert (not found) if said is None else (len(found) == 1 and said in found[0])
    assert not [note for note in plan(config, device="cpu", devices=devices).notes if note in found]
