"""Players of the source letters."""

import asyncio
from dataclasses import replace

from lachesis import Group, Prompt
from lachesis.common.types import GenerationRequest
from lachesis.rollouts.episodes import Played, TaskPlayers, held_out_last
from lachesis.rollouts.generation import read_groups


class Letters(TaskPlayers):
    """Plays one turn for each letter, which `rewards.functions` judge."""

    def __init__(self, policy, *, section, rewarder):
        self.policy, self.section, self.rewarder = policy, section, rewarder
        self.reward_names = tuple(rewarder.names)

    def split(self):
        encode = self.policy.tokenizer.encode
        tasks = [Prompt(id=one, token_ids=tuple(encode(one)), text=one) for one in self.section.alphabet]
        return held_out_last(tasks, self.section.eval_tasks)

    async def play(self, prompt, *, seed, greedy=False):
        params = replace(self.policy.params, temperature=0.0) if greedy else self.policy.params
        completion = await self.policy.calls.complete(GenerationRequest(prompt.token_ids, params, seed=seed))
        decode = self.policy.tokenizer.batch_decode
        (group,) = read_groups([prompt], [[completion]], params=params, num_generations=1, decode=decode)
        return Played(group.samples, state=prompt)

    async def finish(self, played):
        group = Group(played[0].state, tuple(one.samples[0] for one in played))
        (scored,) = (await asyncio.to_thread(self.rewarder.score, [group])).groups
        return [replace(one, samples=(sample,)) for one, sample in zip(played, scored.samples, strict=True)]
