"""Sections about rollouts, from source to batch: data, sampling, rewards, pipeline."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lachesis.common.types import SamplingParams
from lachesis.config.schema.training import Aggregation, Baseline, ScaleRewards
from lachesis.config.section import (
    CustomPart,
    Fraction,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Section,
)
from lachesis.plugins.atropos.section import AtroposSourceConfig
from lachesis.plugins.environments.section import (
    AgentSourceConfig,
    McpServerConfig,
    StepsSourceConfig,
    VerifiersSourceConfig,
)

# Names that may be used in metric names and in paths.
SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"

DatasetFormat = Literal[
    "auto", "prompt", "instruction_response", "input_output", "problem_solution", "question_answer", "messages"
]


class DatasetConfig(Section):
    """The section of one of several datasets."""

    path: str = Field(description="As `data.path`.")
    name: str | None = Field(default=None, description="As `data.name`.")
    split: str = Field(default="train", description="As `data.split`.")
    format: DatasetFormat = Field(default="auto", description="As `data.format`.")
    transform: str | None = Field(default=None, description="As `data.transform`.")
    prompt_column: str = Field(default="prompt", description="As `data.prompt_column`.")


class DataConfig(Section):
    """The source of prompts."""

    path: str | None = Field(
        default=None,
        description="File of problems (JSONL, JSON, Parquet or CSV), name of a dataset on the hub, or tasks of "
        "reasoning-gym, such as `reasoning_gym:chain_sum?size=500,leg_counting`. Required with source.kind local.",
    )
    name: str | None = Field(default=None, description="Configuration, such as `main`, if a dataset has several.")
    split: str = Field(default="train", description="Split to use; `train[:1000]` is a part of one.")
    format: DatasetFormat = Field(
        default="auto",
        description="The columns: a prompt, or a question and its answer under those names; `auto` detects them. "
        "Rewards get the answer under its own name and as `answer`; with `question_answer` also as `solution`.",
    )
    transform: str | None = Field(
        default=None,
        description="Import path or `FILE.py:FUNCTION` of a function that takes the configuration and returns "
        '`(row -> row, {"remove_columns": [...]})`; the new row has a prompt.',
    )
    prompt_column: str = Field(default="prompt", description="Column with the prompt: text, or a list of messages.")
    system_prompt: str | None = Field(default=None, description="System message put before every prompt without one.")
    conversations: bool | None = Field(
        default=None,
        description="`true` sends a text prompt as a user message through the chat template; `false` continues the "
        "text as it is. Unset: `true` if the tokenizer has a template and `rewards.text_completions` is not `text`. "
        "Files of Axolotl and TRL set `false`.",
    )
    more: list[DatasetConfig] = Field(
        default_factory=list[DatasetConfig],
        description="Further datasets; their problems are added to those of `path`.",
    )
    prepared_path: str | None = Field(
        default=None, description="Directory for prepared problems, so that the next run need not prepare them."
    )
    processes: PositiveInt | None = Field(default=None, description="Processes that prepare the data; one if unset.")
    eval_path: str | None = Field(default=None, description="As `path`, for the held-out problems.")
    eval_split: str | None = Field(
        default=None, description="Split with the held-out problems, in `eval_path` if set, else in `path`."
    )
    eval_size: NonNegativeInt | OpenFraction = Field(
        default=0,
        description="Problems to hold out from the end, after shuffling: a count, or a share below 1.",
    )
    filter: dict[str, Any] = Field(
        default_factory=dict,
        description="Keep only problems whose column has this value, one of these values, or a value in `{min: a, max: "
        "b}`; for a column of lists, such as tags, one item must match. Held-out files are not filtered.",
    )
    order: str | None = Field(
        default=None,
        description="Column to sort by, from low to high: a number, or a text such as easy or hard.",
    )
    curriculum: Literal["none", "pass_rate"] = Field(
        default="none",
        description="`pass_rate` mostly skips problems that the model always or never solves: each is drawn with "
        "probability 4 r (1 - r), at least 0.1, for its running pass rate r (see `evaluation.success_reward`).",
    )
    shuffle: bool = Field(default=True, description="Shuffle the problems in each epoch.")
    max_prompt_length: PositiveInt | None = Field(
        default=None, description="Longest prompt, in tokens. Unset: the model's context minus the longest completion."
    )
    overlong_prompts: Literal["error", "drop"] = Field(
        default="error", description="What to do with prompts that are too long: raise an error, or drop and count."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra variables for the chat template."
    )

    @property
    def evaluates(self) -> bool:
        """Return True if there are held-out problems."""
        return self.eval_path is not None or self.eval_split is not None or self.eval_size > 0


class LocalSourceConfig(Section):
    """Prompts from a dataset, completions from the engine, rewards from Python functions."""

    kind: Literal["local"] = "local"
    rollout_func: CustomPart | None = Field(
        default=None,
        description="Import path or `FILE.py:FUNCTION` of a function that generates the completions itself.",
    )
    tools: list[str | McpServerConfig] = Field(
        default_factory=list[str | McpServerConfig],
        description="Import paths or `FILE.py:FUNCTION` of functions that the model may call; it sees docstring and "
        "types. `command: [PROGRAM, ...], env: {...}` or `url: ..., headers: {...}` adds all tools of an MCP "
        "server.",
    )
    tool_parser: str = Field(
        default="hermes",
        description="How the model writes a call: `hermes` (`<tool_call>{...}</tool_call>`, as Qwen does), `vllm:NAME` "
        "for a parser of vLLM's by the name of its `--tool-call-parser`, or a function that finds the calls in a text.",
    )
    max_turns: PositiveInt = Field(
        default=8, description="Maximum model turns in a rollout with tools; a call in the last one is not answered."
    )
    tool_timeout_s: PositiveFloat = Field(
        default=30.0, description="Time limit of a tool call, in seconds; the model gets an error if it is exceeded."
    )
    tool_result_tokens: PositiveInt = Field(
        default=512, description="Longest answer of a tool, in tokens; longer ones are cut."
    )
    rollout_timeout_s: PositiveFloat | None = Field(
        default=None, description="With tools: time after which a rollout gets no further turn, in seconds."
    )


SourceConfig = Annotated[
    LocalSourceConfig | AgentSourceConfig | AtroposSourceConfig | VerifiersSourceConfig | StepsSourceConfig,
    Field(discriminator="kind"),
]


# Names of built-in rewards, usable without a module; see lachesis.rollouts.rewards.built_in.
NAMED_REWARDS = (
    *("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"),
    *("get_cosine_scaled_reward", "get_repetition_penalty_reward", "accuracy", "format", "tag_count"),
    *("reasoning_steps", "length", "code", "binary_code", "code_format", "soft_overlong_punishment", "cosine"),
    "repetition_penalty",
)


class RewardsConfig(Section):
    """The scoring of completions."""

    functions: list[str | dict[str, Any]] = Field(
        default_factory=list[str | dict[str, Any]],
        description="Import paths or `FILE.py:FUNCTION`, relative to the config; names of rewards of TRL and open-r1; "
        "or sequence-classification models: a directory, or a hub id with a `/`. `{function: ..., kwargs: {...}}` "
        "passes arguments to the function, or to a factory. Required with source.kind local.",
    )
    text_completions: Literal["messages", "text"] = Field(
        default="messages",
        description="Form in which functions get the completion of a text prompt: a list with one message, or the text "
        "itself, as in TRL and Axolotl (their files set `text`).",
    )
    special_tokens: Literal["remove", "keep"] = Field(
        default="remove",
        description="Special tokens in the text that functions and stepped environments get: `remove` them, as TRL "
        "does, or `keep` those that the model wrote, such as `[THINK]`. Begin, end and padding tokens are always "
        "removed; agents' messages keep all but the end token.",
    )
    weights: list[float] | None = Field(default=None, description="One weight per function; all 1 if unset.")
    num_workers: NonNegativeInt | None = Field(
        default=None,
        description="Number of subprocesses that call the functions, each in its main thread (so `signal.alarm` "
        "works); 0: a thread of the run. Unset: one subprocess if the functions can be imported there and share "
        "nothing with other parts.",
    )
    on_error: Literal["fail", "drop_group"] = Field(
        default="fail",
        description="If a reward raises, hangs or returns NaN: stop the run, or drop the group. It is never scored 0.",
    )
    timeout_s: PositiveFloat = Field(default=60.0, description="Time limit of one call of a reward function.")
    sandbox: str = Field(
        default="auto",
        description="Sandbox for the model's code in rewards: `auto` takes the best that works here (or refuses), "
        "`namespaces`, `landlock`, or `none`.",
    )
    model_device: str = Field(
        default="auto", description="Device of reward models, such as `cpu` or `cuda:1`; `auto` takes the trainer's."
    )
    model_batch_size: PositiveInt = Field(default=16, description="Texts per forward pass of a reward model.")


class SourceAlgorithmConfig(Section):
    """The advantages for one of several sources; unset keys take the value in `algorithm`."""

    advantage: CustomPart | None = Field(default=None, description="As `algorithm.advantage`.")
    scale_rewards: ScaleRewards | None = Field(
        default=None, description="As `algorithm.scale_rewards`; `batch` and `tokens` include only this source."
    )
    baseline: Baseline | None = Field(default=None, description="As `algorithm.baseline`.")
    aggregation: Aggregation | None = Field(default=None, description="As `algorithm.aggregation`.")


class MixedSourceConfig(Section):
    """The section of one of several sources, with its own data, rewards and algorithm."""

    name: str = Field(
        pattern=SOURCE_NAME, description="Name in metrics, findings and pages: letters, digits, `_`, `-` and `.`."
    )
    weight: PositiveFloat = Field(
        default=1.0, description="Share of the prompts, relative to the weights of the other sources."
    )
    max_unfinished: PositiveInt | None = Field(
        default=None,
        description="With `pipeline.async_prefetch`: while this many groups are unfinished, other sources take this "
        "one's turns. Unset keeps the shares: batches wait for a slow source to respect `pipeline.max_staleness`.",
    )
    max_completion_length: PositiveInt | None = Field(
        default=None, description="As `sampling.max_completion_length`, and at most that."
    )
    source: SourceConfig = Field(default_factory=LocalSourceConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    algorithm: SourceAlgorithmConfig = Field(default_factory=SourceAlgorithmConfig)


class SamplingConfig(Section):
    """The sampling of completions in training."""

    num_generations: Annotated[int, Field(ge=2)] = Field(default=8, description="Completions per prompt (group size).")
    max_completion_length: PositiveInt = Field(default=256, description="Longest completion in tokens.")
    temperature: PositiveFloat = Field(default=1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus sampling; 1 cuts nothing.")
    top_k: NonNegativeInt = Field(default=0, description="Sample among the k likeliest tokens; 0 cuts nothing.")
    min_p: Fraction = Field(default=0.0, description="Drop tokens below min_p times the likeliest; 0 cuts nothing.")
    repetition_penalty: PositiveFloat = Field(default=1.0, description="Repetition penalty, a factor; 1: none.")
    stop_token_ids: list[int] = Field(default_factory=list[int], description="Further token ids that end a completion.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a completion.")
    min_tokens: NonNegativeInt = Field(default=0, description="No completion ends before this many tokens.")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = Field(
        default=0.0, description="Subtracted from the logits of tokens that are in the completion already; 0: nothing."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = Field(
        default=0.0, description="Subtracted from the logits of a token for each time that it occurred; 0: nothing."
    )
    guided_regex: str | None = Field(
        default=None,
        description="With vLLM: completions must match this regular expression as a whole, unless they are cut off.",
    )
    generation_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of vLLM's SamplingParams, under vLLM's names."
    )

    def params(self) -> SamplingParams:
        """Return the sampling parameters of a request to an engine."""
        return SamplingParams(
            max_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop_token_ids=tuple(self.stop_token_ids),
            stop=tuple(self.stop),
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            guided_regex=self.guided_regex,
            extra=self.generation_kwargs,
        )


class PipelineConfig(Section):
    """The overlap of generation, scoring and training, and the treatment of groups without signal."""

    async_prefetch: bool = Field(
        default=False,
        description="Generate while the trainer trains; a step begins once its batch is complete.",
    )
    prefetch_depth: PositiveInt = Field(default=1, description="Number of batches that may be generated ahead.")
    max_staleness: NonNegativeInt | None = Field(
        default=4,
        description="With `async_prefetch`: the most weight versions between a sample's first token and the policy "
        "that trains on it; 0 is synchronous, unset leaves the bound to `prefetch_depth`.",
    )
    streaming: bool = Field(
        default=False, description="Score groups as they finish, while others are still being generated."
    )
    streaming_min_groups: PositiveInt = Field(
        default=1, description="Minimum number of groups to score together; the last call may have fewer."
    )
    refill_zero_signal: NonNegativeInt = Field(
        default=0,
        description="Replace groups with equal rewards (dynamic sampling), in at most N further rounds per batch.",
    )
    replay_size: NonNegativeInt = Field(
        default=0, description="Number of groups with signal to keep as replacements for groups without; 0 keeps none."
    )
    replay_recompute_logps: bool = Field(
        default=True, description="Recompute the old logprobs of replayed groups with the current weights."
    )
    reroll_start_fraction: Fraction = Field(
        default=1.0,
        description="Share of the steps after which prompts without a success are tried again; 1: never.",
    )
    reroll_max_groups: PositiveInt = Field(default=1, description="Maximum number of retried prompts in a batch.")
