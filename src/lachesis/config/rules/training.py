"""Rules about training: optimizer, loss, reference, adapter, memory, deadlines and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from lachesis.config.rules.base import Rule, Said, changed, note, problem, warning
from lachesis.config.schema import LachesisConfig, TeacherConfig
from lachesis.config.schema.training import placeholders
from lachesis.config.steps import steps_per_batch

DEFAULT_LEARNING_RATE = 1e-6
DEFAULT_LORA_LEARNING_RATE = 1e-5

# Above these, a policy without KL term has been seen to become unstable, small models included.
_LARGE_LEARNING_RATE = {"none": 1e-4, "lora": 1e-3}
_SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11}
_ORDINARY_WEIGHT = 0.02  # the usual standard deviation of initialization, and near it after pretraining


def learning_rate(config: LachesisConfig) -> float:
    """Return the peak learning rate: the configured one, or 1e-6, or 1e-5 with LoRA."""
    if config.optimizer.learning_rate is not None:
        return config.optimizer.learning_rate
    return DEFAULT_LORA_LEARNING_RATE if config.adapter.kind == "lora" else DEFAULT_LEARNING_RATE


def _schedule(config: LachesisConfig) -> Iterator[Said]:
    optimizer, steps = config.optimizer, config.run.steps
    if steps is not None and optimizer.warmup_steps > steps:
        yield warning(
            f"optimizer.warmup_steps {optimizer.warmup_steps} is more than run.steps {steps}: warm-up is cut to it, "
            "and the learning rate reaches its peak at the last step"
        )
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        yield problem(
            f"optimizer.warmup_steps {optimizer.warmup_steps} and warmup_ratio {optimizer.warmup_ratio:g} both say how "
            "long to warm up; give one of them"
        )
    if optimizer.min_lr_ratio > 0 and optimizer.schedule == "constant":
        yield warning(
            f"optimizer.min_lr_ratio {optimizer.min_lr_ratio:g} does nothing with schedule constant; "
            "use linear or cosine"
        )
    names = ("stable_steps", "decay_steps", "decay")
    if optimizer.schedule != "warmup_stable_decay" and (unused := changed(config, "optimizer", *names)):
        yield warning(f"{' and '.join(unused)} do nothing with optimizer.schedule {optimizer.schedule}")


def _optimizer(config: LachesisConfig) -> Iterator[Said]:
    optimizer = config.optimizer
    if optimizer.function is not None:
        if unused := changed(config, "optimizer", "kind", "scale_parameter"):
            yield warning(f"{' and '.join(unused)} do nothing with optimizer.function")
        return
    if optimizer.kind != "adafactor" and 1.0 in optimizer.betas:
        yield problem("optimizer.betas must be below 1: a moment with decay 1 never moves")
    if optimizer.kind == "adafactor":
        if ignored := changed(config, "optimizer", "betas", "eps"):
            yield warning(f"{' and '.join(ignored)} do nothing with optimizer.kind adafactor")
    elif optimizer.scale_parameter:
        yield warning(f"optimizer.scale_parameter does nothing with optimizer.kind {optimizer.kind}")
    if optimizer.kind == "adamw_cpu" and config.model.device == "cpu":
        yield note("optimizer.kind adamw_cpu is adamw where the model is on the CPU")


def _learning_rate(config: LachesisConfig) -> Iterator[Said]:
    rate, limit = learning_rate(config), _LARGE_LEARNING_RATE[config.adapter.kind]
    if config.algorithm.beta == 0 and rate > limit:
        yield warning(
            f"optimizer.learning_rate {rate:g} is above {limit:g} and algorithm.beta is 0, so nothing holds "
            "the policy near the base model; lower the rate or set beta (0.01 to 0.04 is common)"
        )


def _vanishing_updates(config: LachesisConfig) -> Iterator[Said]:
    """Warn of updates that rounding loses: those below half the spacing of a weight's neighbours.

    With p significand bits the neighbours of w are between 2^-p·|w| and 2^(1-p)·|w| apart (IEEE 754), and
    an AdamW step is about the learning rate. So every weight above ``learning_rate · 2^(p+1)`` stands still.
    """
    dtype, on_cpu = config.model.dtype, config.model.device == "cpu"
    # peft keeps the adapters of 16-bit models in float32, so only full fine-tuning updates 16-bit weights.
    if config.optimizer.weight_update != "plain" or config.adapter.kind != "none":
        return
    if dtype == "float32" or (dtype == "auto" and on_cpu):
        return
    assumed = "bfloat16" if dtype == "auto" else dtype
    bits, rate = _SIGNIFICAND_BITS[assumed], learning_rate(config)
    frozen_above = rate * 2 ** (bits + 1)
    if frozen_above > _ORDINARY_WEIGHT:
        return
    condition = f"if the checkpoint is {assumed}, " if dtype == "auto" else ""
    yield warning(
        f"optimizer.weight_update is plain: {condition}a {assumed} weight w takes no step below about "
        f"2^-{bits + 1}·|w|, so at learning rate {rate:g} every weight beyond {frozen_above:.1e} stands "
        f"still (ordinary weights are near {_ORDINARY_WEIGHT:g}); use fp32_master or stochastic_rounding"
    )


def _weight_update(config: LachesisConfig) -> Iterator[Said]:
    update, dtype = config.optimizer.weight_update, config.model.dtype
    if config.adapter.kind == "none" and update == "stochastic_rounding" and dtype == "float16":
        yield problem(
            "optimizer.weight_update stochastic_rounding is for bfloat16 and model.dtype is float16; "
            "use fp32_master, or bfloat16"
        )
    if update in ("stochastic_rounding", "fp32_master") and dtype == "float32":
        yield note(f"optimizer.weight_update {update} does nothing: model.dtype is float32 already")


def _preset(config: LachesisConfig) -> Iterator[Said]:
    if config.algorithm.preset is not None:
        from lachesis.config.presets import preset_in_words

        yield note(preset_in_words(config))


def _algorithm(config: LachesisConfig) -> Iterator[Said]:
    algorithm = config.algorithm
    level = algorithm.importance_sampling_level
    if level != "token" and algorithm.loss_type in _TOKEN_RATIO and algorithm.loss is None:
        yield problem(
            f"algorithm.importance_sampling_level {level} does nothing with loss_type {algorithm.loss_type}, which has "
            "no ratio of a sequence; remove one of them"
        )
    elif (
        level != "token"
        and (algorithm.loss_type, algorithm.normalization) != ("grpo", None)
        and (algorithm.normalization != "sequence_mean")
    ):
        yield warning(
            f"algorithm.importance_sampling_level {level} with loss_type {algorithm.loss_type} weights "
            "sequences by their length; GSPO is defined with loss_type grpo"
        )
    if algorithm.aggregation == "normalize_then_sum" and algorithm.scale_rewards != "group":
        yield warning(
            f"algorithm.scale_rewards {algorithm.scale_rewards} does nothing with aggregation "
            "normalize_then_sum, which always divides by the group's and then the batch's deviation"
        )
    if algorithm.baseline == "none" and config.pipeline.refill_zero_signal:
        yield warning(
            "pipeline.refill_zero_signal replaces groups of equal rewards, and with algorithm.baseline none they teach "
            "too; remove one of them"
        )
    if algorithm.reward_clip is not None and algorithm.reward_clip[0] >= algorithm.reward_clip[1]:
        yield problem(f"algorithm.reward_clip {list(algorithm.reward_clip)}: write the lower bound first")
    if algorithm.aggregation == "normalize_then_sum" and algorithm.reward_clip is not None:
        yield problem("algorithm.reward_clip with aggregation normalize_then_sum, which has no sum; remove one of them")
    if algorithm.aggregation == "normalize_then_sum" and algorithm.baseline != "group_mean":
        yield warning("algorithm.baseline does nothing with aggregation normalize_then_sum, which takes off the mean")
    if algorithm.epsilon >= 1:
        yield warning(f"algorithm.epsilon {algorithm.epsilon:g} never clips below: a ratio is never less than 0")
    if algorithm.epsilon_high is not None and algorithm.epsilon_high < algorithm.epsilon:
        yield note(
            f"algorithm.epsilon_high {algorithm.epsilon_high:g} is below epsilon {algorithm.epsilon:g}; "
            "clip-higher needs it above"
        )


# What a loss type that does not clip as PPO does has no use for.
_WITHOUT_CLIP = {
    "cispo": ("epsilon", "delta"),
    "sapo": ("epsilon", "epsilon_high", "delta"),
    "reinforce": ("epsilon", "epsilon_high", "delta"),
    "kl_cov": ("epsilon", "epsilon_high", "delta"),
    "gmpo": ("delta",),
}
# Those that have a ratio of each token, or none.
_TOKEN_RATIO = ("gmpo", "reinforce", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
# Keys of one loss type, or of two.
_OWN_KEYS = {
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "clip_cov": ("cov_share", "cov_low", "cov_high"),
    "kl_cov": ("cov_share", "cov_kl_coef"),
}


def _loss(config: LachesisConfig) -> Iterator[Said]:
    algorithm = config.algorithm
    if algorithm.advantage is not None and (
        unused := changed(config, "algorithm", "scale_rewards", "baseline", "aggregation", "reward_clip")
    ):
        yield warning(f"{' and '.join(unused)} do nothing with algorithm.advantage")
    if algorithm.loss is not None and changed(config, "algorithm", "loss_type"):
        yield warning(f"algorithm.loss_type {algorithm.loss_type} does nothing: algorithm.loss takes its place")
    bound = algorithm.epsilon_high
    if algorithm.loss_type == "cispo" and bound is not None and bound < 1:
        yield warning(
            f"algorithm.epsilon_high {bound:g}: with loss_type cispo it is the bound of the ratio itself, so every "
            f"weight is at most {bound:g}; 5 is usual, and taken if it is unset"
        )
    used = _OWN_KEYS.get(algorithm.loss_type, ())
    names = [name for keys in _OWN_KEYS.values() for name in keys if name not in used]
    if keys := changed(config, "algorithm", *dict.fromkeys(names)):
        yield note(f"{', '.join(keys)} do nothing with loss_type {algorithm.loss_type}")
    if algorithm.cov_low >= algorithm.cov_high:
        yield problem(
            f"algorithm.cov_low {algorithm.cov_low:g} is not below cov_high {algorithm.cov_high:g}, so no token is "
            "between them; lower it"
        )
    if algorithm.loss_type == "gmpo" and algorithm.top_entropy_quantile < 1:
        yield problem(
            "algorithm.top_entropy_quantile with loss_type gmpo: the ratio is of a whole sequence, and tokens cannot "
            "be left out of it; remove one of them"
        )
    if algorithm.loss_type in ("clip_cov", "kl_cov") and algorithm.teacher and algorithm.teacher.estimate == "sampled":
        yield problem(
            f"algorithm.teacher.estimate sampled adds to the advantages that loss_type {algorithm.loss_type} chooses "
            "tokens by; set estimate: exact"
        )
    unused = changed(config, "algorithm", *_WITHOUT_CLIP.get(algorithm.loss_type, ()))
    if unused and algorithm.loss is None:
        yield warning(
            f"{', '.join(unused)} do{'es' if len(unused) == 1 else ''} nothing with loss_type {algorithm.loss_type}, "
            "which does not clip the ratio so; remove it, or take another loss_type"
        )
    if algorithm.top_entropy_quantile == 0:
        yield problem("algorithm.top_entropy_quantile 0 trains on no token; 1 is all")
    if algorithm.delta is not None and algorithm.delta <= 1 + algorithm.epsilon:
        yield warning(
            f"algorithm.delta {algorithm.delta:g} is not above 1 + epsilon {1 + algorithm.epsilon:g}, so it cuts where "
            "the clip would not have yet"
        )


def _reference(config: LachesisConfig) -> Iterator[Said]:
    algorithm = config.algorithm
    if algorithm.kl_reference == "ema" and not algorithm.holds_reference:
        yield problem("algorithm.kl_reference is ema and beta 0, so no reference is used; set beta")
    if algorithm.kl_reference == "sampler" and algorithm.beta == 0:
        yield warning("algorithm.kl_reference sampler does nothing while algorithm.beta is 0; set beta")
    if algorithm.beta == 0:
        for key in changed(config, "algorithm", "kl_placement", "kl_estimator", "kl_target", "kl_horizon"):
            yield problem(f"{key} is set and algorithm.beta 0, so no KL is measured; set beta, or remove it")
    elif algorithm.kl_placement != "loss":
        yield from _kl_in_reward(config)
    if algorithm.kl_target is None:
        for key in changed(config, "algorithm", "kl_horizon"):
            yield warning(f"{key} does nothing without algorithm.kl_target; set it, or remove this")
    if algorithm.kl_reference != "ema":
        for key in changed(config, "algorithm", "ref_mixup_alpha", "ref_sync_steps"):
            yield note(f"{key} does nothing with kl_reference {algorithm.kl_reference}")


def _kl_in_reward(config: LachesisConfig) -> Iterator[Said]:
    """Yield what does not go with a KL term in the reward."""
    algorithm = config.algorithm
    place = f"algorithm.kl_placement {algorithm.kl_placement}"
    if algorithm.kl_reference == "sampler":
        yield problem(f"{place} with kl_reference sampler: completions have no divergence from it yet; take base")
    if algorithm.advantage is not None:
        yield problem(f"{place}: algorithm.advantage computes advantages itself; remove one of them")
    if algorithm.aggregation == "normalize_then_sum":
        yield problem(f"{place} with aggregation normalize_then_sum: a KL cannot be normalized as a reward; sum first")
    if algorithm.kl_placement == "reward_to_go" and algorithm.scale_rewards == "signal":
        yield problem(f"{place} with scale_rewards signal: every token has a signal then; take another scale")
    for key in changed(config, "algorithm", "use_bias_correction_kl"):
        yield warning(f"{key} does nothing with {place}; remove it")


def _stages(config: LachesisConfig) -> Iterator[Said]:
    if config.run.stages not in (["grpo"], ["sft", "grpo"]):
        yield problem(f"run.stages {config.run.stages}: a run is [grpo], or [sft, grpo]")
    if not config.sft_steps:
        if unused := changed(config, "sft", *type(config.sft).model_fields):
            yield warning(f"{', '.join(unused)} do{'es' if len(unused) == 1 else ''} nothing without sft in run.stages")
    elif config.source.kind == "atropos":
        yield problem(
            "run.stages [sft, grpo] with source.kind atropos: environments would wait for the end of the start; train "
            "a model by source.kind local first"
        )
    elif config.source.kind == "verifiers" and config.sft.path is None:
        yield problem("sft.path is unset, and source.kind verifiers has no data.path to take answers from; set it")


def _teacher(config: LachesisConfig) -> Iterator[Said]:
    teacher = config.algorithm.teacher
    if teacher is None:
        return
    yield from _place_of_teacher(config, teacher)
    if teacher.estimate == "sampled" and teacher.beta != 1:
        yield problem(
            f"algorithm.teacher.estimate sampled is of the reverse KL, and beta is {teacher.beta:g}; set beta: 1, or "
            "estimate: exact"
        )
    for key in ("top_k", "clip"):
        if teacher.estimate == "sampled" and getattr(teacher, key) is not None:
            yield warning(
                f"algorithm.teacher.{key} does nothing with estimate sampled, which asks for the sampled token"
            )
    if not any((teacher.weight, *teacher.weights.values())):
        yield problem("algorithm.teacher.weight is 0, so nothing is learned from the teacher; raise it, or remove it")
    if not teacher.weights and not teacher.reward_weights and teacher.column != "env_id":
        yield note("algorithm.teacher.column does nothing without weights or reward_weights")


def _own_teacher(config: LachesisConfig, teacher: TeacherConfig) -> Iterator[Said]:
    """Yield what does not go with a teacher that is the policy itself."""
    key = "algorithm.teacher"
    if not teacher.prompts:
        yield problem(f'{key}.kind is self, and {key}.prompts is not set; write one, as ["{{prompt}} {{answer}}"]')
    for text in teacher.prompts:
        try:
            names = placeholders(text)
        except ValueError as error:
            yield problem(f"{key}.prompts {text!r}: {error}; double braces that name no column")
            continue
        if not names - {"prompt"}:
            yield problem(f"{key}.prompts {text!r} tells the teacher nothing more: name a column, or {{solution}}")
    if teacher.model is not None:
        yield problem(f"{key}.model is set, and {key}.kind is self; remove one of them")
    if teacher.weights_of == "reference" and config.algorithm.kl_reference == "sampler":
        yield problem(f"{key}.weights_of reference with kl_reference sampler, which is not held; take base or ema")
    for path, differs in (
        ("algorithm.router_replay", config.algorithm.router_replay),
        ("model.vision", config.model.sees_images),
        ("distributed.context_parallel_size", config.distributed.context_parallel_size > 1),
    ):
        if differs:
            yield problem(f"{key}.kind self does not go with {path}; remove one of them")


def _place_of_teacher(config: LachesisConfig, teacher: TeacherConfig) -> Iterator[Said]:
    """Check that the teacher is named, and that its kind supports the options."""
    key = "algorithm.teacher"
    needed = {"model": teacher.model, "url": teacher.url}
    if needed.get(teacher.kind, "") is None:
        yield problem(f"{key}.kind is {teacher.kind}, and {key}.{teacher.kind} is not set; set it")
    if teacher.url is not None and teacher.kind != "url":
        yield problem(f"{key}.url is set, and {key}.kind is {teacher.kind}; write kind: url, or remove the address")
    if teacher.kind != "model" and teacher.revision is not None:
        yield warning(f"{key}.revision does nothing with kind {teacher.kind}")
    if teacher.kind == "rollouts" and teacher.model is not None:
        yield warning(f"{key}.model does nothing with kind rollouts, which bring their teacher's logprobs")
    if teacher.kind == "rollouts" and config.source.kind != "atropos":
        yield problem(
            f"{key}.kind rollouts takes what environments post to the rollout API, and source.kind is "
            f"{config.source.kind}; set source.kind: atropos, or another kind of teacher"
        )
    if teacher.kind == "self":
        yield from _own_teacher(config, teacher)
    elif teacher.prompts:
        yield problem(f"{key}.prompts is set, and {key}.kind is {teacher.kind}; write kind: self, or remove them")
    if teacher.kind == "url" and teacher.estimate == "exact" and teacher.top_k is None:
        yield problem(
            f"{key}.estimate exact without top_k is over the whole vocabulary, which no server sends for each token; "
            f"set {key}.top_k (20 is vLLM's limit, unless it has --max-logprobs), or estimate: sampled"
        )
    if teacher.kind == "url" and config.sampling.temperature not in (0.0, 1.0) and config.source.kind != "atropos":
        yield problem(
            f"sampling.temperature is {config.sampling.temperature:g}, and a server gives its teacher's logprobs at "
            f"temperature 1 only, of which those of another do not follow; set it to 1, or {key}.kind: model"
        )


def _sampler_correction(config: LachesisConfig) -> Iterator[Said]:
    algorithm = config.algorithm
    low, high = algorithm.sampler_correction_min, algorithm.sampler_correction_max
    if algorithm.sampler_correction == "none":
        for key in changed(config, "algorithm", "sampler_correction_min", "sampler_correction_max"):
            yield note(f"{key} does nothing with sampler_correction none")
        return
    if low is None and high is None:
        yield problem(
            f"algorithm.sampler_correction {algorithm.sampler_correction} has no bound; set sampler_correction_max"
        )
    if low is not None and high is not None and low >= high:
        yield problem(
            f"algorithm.sampler_correction_min {low:g} is not below sampler_correction_max {high:g}; lower it"
        )


def _router_replay(config: LachesisConfig) -> Iterator[Said]:
    """Check that samples come with the experts used; that the model has experts shows when it is loaded."""
    if not config.algorithm.router_replay:
        return
    key = "algorithm.router_replay"
    if config.source.kind == "atropos":
        yield problem(
            f"{key} with source.kind atropos: what environments post to the rollout API does not say which experts "
            "were used; remove it"
        )
    if config.source.kind == "local" and config.source.rollout_func is not None:
        yield problem(
            f"{key} with source.rollout_func: its result does not say which experts were used; remove one of them"
        )
    if config.engine.kind == "custom":
        yield note(f"{key} needs the experts of each completion (`routed`) from engine.function")


def _iterations(config: LachesisConfig) -> Iterator[Said]:
    uses, steps = steps_per_batch(config), config.run.steps
    if steps is not None and steps % uses:
        yield note(
            f"run.steps {steps} is not a multiple of the {uses} steps on each generation (batch.steps_per_generation x "
            f"algorithm.num_iterations): of the last one {steps % uses} are done; {steps // uses * uses or uses} or "
            f"{-(-steps // uses) * uses} steps are"
        )


def _adapter(config: LachesisConfig) -> Iterator[Said]:
    if config.adapter.kind == "lora" and config.adapter.dropout > 0:
        yield warning(
            f"adapter.dropout {config.adapter.dropout:g} is on while training and off while sampling, so "
            "ratios are noisy before the policy has moved; 0 is usual with RL"
        )


def _quantization(config: LachesisConfig) -> Iterator[Said]:
    model = config.model
    if model.quantization == "none":
        return
    if config.adapter.kind == "none":
        yield problem(
            f"model.quantization {model.quantization} holds weights that cannot be trained, and adapter.kind is none; "
            "set adapter.kind: lora, or remove model.quantization"
        )
    if config.engine.place != "trainer":
        corrected = config.algorithm.sampler_correction != "none"
        yield warning(
            f"model.quantization {model.quantization}: engine.kind {config.engine.kind} holds the base weights as they "
            "were, so samples come from a policy that is not quite the trained one, and the proof of sync allows its "
            "canary a larger difference" + ("" if corrected else "; set algorithm.sampler_correction: token_truncate")
        )


def _float8(config: LachesisConfig) -> Iterator[Said]:
    if config.model.matmul_dtype == "auto":
        return
    key = f"model.matmul_dtype {config.model.matmul_dtype}"
    if config.model.quantization != "none":
        yield problem(
            f"{key}: with model.quantization {config.model.quantization} the linear layers use their own matrix "
            "products; remove one of the two"
        )
    if config.model.device == "cpu":
        yield warning(f"{key} is emulated with model.device cpu: it rounds as a GPU does, and is slower")
    if config.model.compile == "off":
        yield note(f"{key} gains little with model.compile off: roundings then take separate passes")
    if config.algorithm.sampler_correction == "none":
        yield warning(
            f"{key} is for training alone: the engine samples in model.dtype, so from a policy that is not quite the "
            "trained one; set algorithm.sampler_correction: token_truncate"
        )


def _microbatch(config: LachesisConfig) -> Iterator[Said]:
    budget = config.batch.max_tokens_per_microbatch
    longest = (config.data.max_prompt_length or 0) + config.sampling.max_completion_length
    if config.source.kind == "atropos":
        longest = config.source.max_sequence_length
    if budget < longest:
        yield note(
            f"batch.max_tokens_per_microbatch {budget} is less than one longest sequence ({longest} tokens): "
            "such a sequence goes alone and sets the peak memory"
        )


def _deadlines(config: LachesisConfig) -> Iterator[Said]:
    deadlines = config.deadlines
    if deadlines.batch_s < deadlines.generation_s:
        yield warning(
            f"deadlines.batch_s {deadlines.batch_s:g} is less than generation_s {deadlines.generation_s:g}, "
            "so the wait for a batch ends before generation may; raise it"
        )


def _checkpoint(config: LachesisConfig) -> Iterator[Said]:
    checkpoint, steps = config.checkpoint, config.run.steps
    periodic = config.saves_on_the_way
    if not checkpoint.save_final and not periodic:
        yield warning("checkpoint.save_final is false and every_steps 0: a run that ends leaves no trained weights")
    if checkpoint.hub is not None and not checkpoint.save_final:
        yield problem("checkpoint.hub uploads the final model, and checkpoint.save_final is false; set it to true")
    if steps is not None and (checkpoint.every_steps or 0) > steps:
        yield note(
            f"checkpoint.every_steps {checkpoint.every_steps} is more than run.steps {steps}: no checkpoint "
            "is written unless the run is stopped"
        )
    if not periodic and changed(config, "checkpoint", "keep_last"):
        yield note("checkpoint.keep_last does nothing while checkpoint.every_steps is 0")
    if checkpoint.every_steps is not None and checkpoint.every_epochs is not None:
        yield note("checkpoint.every_epochs does nothing beside every_steps, which counts")
    if checkpoint.max_share is not None and (checkpoint.every_steps is not None or checkpoint.every_epochs is not None):
        yield note("checkpoint.max_share does nothing beside every_steps or every_epochs, which count")


TRAINING_RULES: tuple[Rule, ...] = (
    *(_schedule, _optimizer, _learning_rate, _vanishing_updates, _weight_update),
    *(
        _preset,
        _algorithm,
        _loss,
        _reference,
        _stages,
        _teacher,
        _sampler_correction,
        _router_replay,
        _iterations,
        _adapter,
        _float8,
        _quantization,
    ),
    *(_microbatch, _deadlines, _checkpoint),
)
