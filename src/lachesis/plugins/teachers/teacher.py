"""A run's teacher behind an address: its logprobs are written into the samples before they are packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from lachesis.common.deadline import Deadline
from lachesis.common.errors import DataError
from lachesis.common.teacher_logprobs import TeacherLogprobs, teacher_logprobs
from lachesis.common.types import Group
from lachesis.config.schema import LachesisConfig, TeacherConfig
from lachesis.plugins.teachers.server import KEY_VARIABLE, TeacherServer
from lachesis.train.losses.teacher import shares

_SETTING = "deadlines.teacher_s"
# A wrong address is reported early.
_FIRST_ANSWER_S = 60.0
_COMPARED = 4096


@dataclass(frozen=True, slots=True, eq=False)
class RemoteTeacher:
    """A teacher behind an address.

    Attributes:
        server: client of the teacher's server.
        options: the environments that it teaches, with their weights.
        top_k: number of tokens kept at each position; 0 keeps only the sampled token.
        limit_s: limit for one batch, in seconds.
    """

    server: TeacherServer
    options: TeacherConfig
    top_k: int
    limit_s: float

    def teach(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the teacher's logprobs in samples that it teaches and that lack them.

        Raises:
            DataError: a sample's temperature is not 1, so that the teacher's logprobs are not known.
            EngineError, DeadlineExceeded: the server cannot be a teacher, or does not answer.
        """
        weight = shares(self.options)
        samples = [s for group in groups if weight(group).teacher for s in group.samples if s.teacher is None]
        for sample in samples:
            if sample.temperature not in (0.0, 1.0):
                raise DataError(
                    f"a sample has temperature {sample.temperature:g}, but the teacher at {self.server.url} gives "
                    "logprobs only at temperature 1",
                    remedy="generate at temperature 1, or load the teacher as a model (algorithm.teacher.kind: model)",
                )
        lessons = self._ask(list(dict.fromkeys((s.prompt_ids, s.completion_ids) for s in samples)))
        return [_with_lessons(group, lessons) if weight(group).teacher else group for group in groups]

    def _ask(self, sequences: Sequence[_Sequence]) -> dict[_Sequence, TeacherLogprobs]:
        deadline = Deadline(f"the logprobs of a batch by the teacher at {self.server.url}", self.limit_s, _SETTING)
        tops = self.server.tops([prompt + completion for prompt, completion in sequences], deadline=deadline)
        return {
            (prompt, completion): teacher_logprobs(top[len(prompt) - 1 :], completion, top_k=self.top_k)
            for (prompt, completion), top in zip(sequences, tops, strict=True)
        }


_Sequence = tuple[tuple[int, ...], tuple[int, ...]]


def _with_lessons(group: Group, lessons: dict[_Sequence, TeacherLogprobs]) -> Group:
    samples = (
        s if s.teacher is not None else replace(s, teacher=lessons[s.prompt_ids, s.completion_ids])
        for s in group.samples
    )
    return replace(group, samples=tuple(samples))


def build_teach(
    config: LachesisConfig, *, tokenizer: PreTrainedTokenizerBase, closing: ExitStack
) -> Callable[[Sequence[Group]], Sequence[Group]]:
    """Connect to the teacher of ``algorithm.teacher.url``, once it has shown the policy's tokenizer.

    ``closing`` closes its connections.

    Raises:
        ModelError: its tokenizer differs.
        EngineError, DeadlineExceeded: it does not answer.
    """
    options, limit_s = config.algorithm.teacher, config.deadlines.teacher_s
    assert options is not None and options.url is not None, "the rules require it"
    top_k = 0 if options.estimate == "sampled" else options.top_k or 0
    key = os.environ.get(KEY_VARIABLE, "")
    server = TeacherServer(options.url, model=options.model, top_k=top_k, key=key)
    closing.callback(server.close)
    deadline = Deadline(f"the first answer of the teacher at {server.url}", min(limit_s, _FIRST_ANSWER_S), _SETTING)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    server.check_tokenizer(_texts(tokenizer), encode=encode, deadline=deadline)
    return RemoteTeacher(server, options, top_k, limit_s).teach


def _texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of evenly spaced tokens, without special tokens and parts of a character."""
    special = set(tokenizer.all_special_tokens)
    step = max(1, -(-len(tokenizer) // _COMPARED))
    texts = [str(tokenizer.decode([number])) for number in range(0, len(tokenizer), step)]
    return [text for text in texts if text.strip() and "\ufffd" not in text and text not in special]
