"""An environment that asks a teacher: the sums of ``arithmetic``, and of each token what a second model says of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from lachesis.plugins.atropos.environments.records import UsableGroup
from lachesis.plugins.atropos.environments.shipped.arithmetic import Arithmetic, Sum

# How many tokens the teacher names at each position, as vLLM does at most by itself.
NAMED = 20


class TaughtSums(Arithmetic):
    """As Atropos' environments with a teacher: ``distill_token_ids`` and ``distill_logprobs`` beside the scores."""

    name = "teacher_sums"

    async def setup(self) -> None:
        await super().setup()
        self._teacher = AutoModelForCausalLM.from_pretrained(os.environ["TEACHER"]).eval()

    async def collect_trajectories(self, item: Sum) -> UsableGroup | None:
        group = await super().collect_trajectories(item)
        if group is None:
            return None
        said = [self._says(tokens) for tokens in group.tokens]
        fields = {"distill_token_ids": [ids for ids, _ in said], "distill_logprobs": [values for _, values in said]}
        return group.model_copy(update=fields)

    @torch.no_grad()
    def _says(self, tokens: Sequence[int]) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest tokens at each position, [positions][NAMED], and their logprobs; nothing of the first one."""
        logprobs = self._teacher(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
        top = logprobs.topk(min(NAMED, logprobs.shape[-1]))
        return [[], *top.indices.tolist()], [[], *top.values.tolist()]
