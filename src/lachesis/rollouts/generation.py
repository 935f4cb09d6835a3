"""Generation of unscored groups from prompts: one call of the engine, its answers checked and decoded."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lachesis.common.deadline import Deadline
from lachesis.common.errors import EngineError
from lachesis.common.types import Completion, GenerationRequest, Group, Prompt, Sample, SamplingParams
from lachesis.engines.base import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TextDecoder: TypeAlias = Callable[[Sequence[Sequence[int]]], list[str]]
SpecialTokens: TypeAlias = Literal["remove", "keep"]


def reward_decoder(tokenizer: PreTrainedTokenizerBase, special_tokens: SpecialTokens) -> TextDecoder:
    """Return the decoder of the texts that reward functions get, with or without special tokens.

    If it removes special tokens within completions, other than those of turns, the log names them once.
    """
    if special_tokens == "keep":
        return keeping_decoder(tokenizer)
    decode, of_turns = text_decoder(tokenizer), str(tokenizer.chat_template or "")
    ends = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, *removed_special_tokens(tokenizer))
    unexpected = {
        number: token
        for number, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        if token not in ends and token not in of_turns
    }

    def telling(token_ids: Sequence[Sequence[int]]) -> list[str]:
        if unexpected and (lost := unexpected.keys() & {token for ids in token_ids for token in ids[:-1]}):
            logger.warning(
                "completions have the special tokens %s, which are removed from the text that rewards see; "
                "set rewards.special_tokens: keep to leave them in",
                ", ".join(unexpected[number] for number in sorted(lost)[:8]),
            )
            unexpected.clear()
        return decode(token_ids)

    return telling


def keeping_decoder(tokenizer: PreTrainedTokenizerBase) -> TextDecoder:
    """Return a decoder that keeps special tokens, such as ``[THINK]``, except those of begin, end and padding."""
    left_out: list[Any] = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]

    def decode(token_ids: Sequence[Sequence[int]]) -> list[str]:
        kept = [[token for token in ids if token not in left_out] for ids in token_ids]
        return tokenizer.batch_decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return decode


def removed_special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens about reasoning, answers and tools that :func:`text_decoder` takes out of texts."""
    words = ("think", "reason", "answer", "solution", "tool")
    return [token for token in tokenizer.all_special_tokens if any(word in token.lower() for word in words)]


def text_decoder(tokenizer: PreTrainedTokenizerBase, *, as_sampled: bool = True) -> TextDecoder:
    """Return a decoder of token ids: without special tokens, and with every other character as it was sampled.

    Args:
        as_sampled: ``False`` keeps special tokens, and lets the tokenizer decide whether it removes spaces.
    """
    clean_up = False if as_sampled else tokenizer.clean_up_tokenization_spaces
    fast = None if clean_up else _fast(tokenizer)

    def decode(token_ids: Sequence[Sequence[int]]) -> list[str]:
        if fast is not None:
            return [fast.decode(ids, skip_special_tokens=as_sampled) for ids in token_ids]
        return tokenizer.batch_decode(
            [list(ids) for ids in token_ids], skip_special_tokens=as_sampled, clean_up_tokenization_spaces=clean_up
        )

    return decode


def _fast(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the Rust tokenizer if it alone makes the texts; transformers' wrapper checks each token id first."""
    from transformers import PreTrainedTokenizerFast

    plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("batch_decode", "decode", "_decode")
    )
    return tokenizer.backend_tokenizer if plain else None


def request_seed(run_seed: int, number: int) -> int:
    """Return the seed of request ``number`` of a run: 63 bits, the same in every process."""
    digest = hashlib.blake2b(f"{run_seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def nested_deadline(name: str, outer: Deadline, limit_s: float | None, setting: str) -> Deadline:
    """Return a deadline of ``limit_s`` seconds that does not outlast ``outer``; it names the setting that binds."""
    remaining = outer.remaining_s()
    if remaining is not None and (limit_s is None or remaining < limit_s):
        return Deadline(name=name, limit_s=remaining, setting=outer.setting, outer=outer)
    return Deadline(name=name, limit_s=limit_s, setting=setting, outer=outer)


def generate_groups(
    prompts: Sequence[Prompt],
    *,
    engine: Engine,
    params: SamplingParams,
    num_generations: int,
    seeds: Sequence[int],
    decode: TextDecoder,
    deadline: Deadline,
) -> list[Group]:
    """Generate ``num_generations`` samples for each prompt, with text and without rewards; a seed for each prompt.

    Raises:
        EngineError: the engine's own, or its answer does not match the request.
        DeadlineExceeded: generation took too long.
    """
    requests = generation_requests(prompts, params=params, num_generations=num_generations, seeds=seeds)
    with deadline.waiting():
        answers = engine.generate(requests, deadline=deadline)
    return read_groups(prompts, answers, params=params, num_generations=num_generations, decode=decode)


def generation_requests(
    prompts: Sequence[Prompt], *, params: SamplingParams, num_generations: int, seeds: Sequence[int]
) -> list[GenerationRequest]:
    """Return requests for ``num_generations`` completions of each prompt, each with its seed."""
    return [
        GenerationRequest(prompt.token_ids, params, num_generations, seed, images=prompt.images)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def read_groups(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Completion]],
    *,
    params: SamplingParams,
    num_generations: int,
    decode: TextDecoder,
) -> list[Group]:
    """Convert an engine's answers to these prompts to groups, decoded in one go.

    A sample's temperature is the one that its logprobs belong to: that of ``params``, and 1 when greedy.

    Raises:
        EngineError: the answers do not match the requests.
    """
    _check_answers(answers, prompts, num_generations)
    completions = [completion for answer in answers for completion in answer]
    texts = iter(decode([list(completion.token_ids) for completion in completions]))
    temperature = 1.0 if params.greedy else params.temperature
    return [
        Group(prompt, tuple(_sample(prompt, one, next(texts), temperature) for one in answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _sample(prompt: Prompt, completion: Completion, text: str, temperature: float) -> Sample:
    return Sample(
        prompt_ids=prompt.token_ids,
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        versions=completion.versions,
        routed=completion.routed,
        text=text,
        temperature=temperature,
    )


def _check_answers(answers: Sequence[Sequence[Completion]], prompts: Sequence[Prompt], num_generations: int) -> None:
    if len(answers) != len(prompts):
        raise _engine_fault(f"answered {len(answers)} of {len(prompts)} requests")
    for prompt, answer in zip(prompts, answers, strict=True):
        which = f"of prompt {prompt.id!r}"
        if len(answer) != num_generations:
            raise _engine_fault(f"gave {len(answer)} completions {which}, but {num_generations} were requested")
        for completion in answer:
            tokens, logprobs = len(completion.token_ids), len(completion.logprobs)
            if tokens != logprobs:
                raise _engine_fault(f"gave {logprobs} logprobs for {tokens} tokens of a completion {which}")
            if completion.finish_reason == "abort":
                raise _engine_fault(f"aborted a completion {which} after {tokens} tokens")


def _engine_fault(what: str) -> EngineError:
    return EngineError(f"the engine {what}", remedy="read the engine's log; the request was valid")
