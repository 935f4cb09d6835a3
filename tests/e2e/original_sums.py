"""An environment as its users write them, on the original's BaseEnv: sums, by completion and by chat in turn.

It runs in the Python that has atroposlib and knows nothing of ours. ``--env.data_path``: a list of prompts and answers.
"""

import itertools
import json

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, EvalHandlingEnum, ScoredDataGroup

MAX_TOKENS = 6


class SumsConfig(BaseEnvConfig):
    data_path: str = ""


class Sums(BaseEnv):
    name = "sums"
    env_config_cls = SumsConfig

    @classmethod
    def config_init(cls):
        # A list, because a single configuration's address is ignored.
        config = SumsConfig(
            wandb_name="sums", use_wandb=False, ensure_scores_are_not_same=False, eval_handling=EvalHandlingEnum.NONE,
            total_steps=-1,  # as many as the trainer
        )  # fmt: skip
        return config, [APIServerConfig(server_type="vllm")]

    async def setup(self):
        with open(self.config.data_path) as file:
            self.problems = json.load(file)
        self.order = itertools.cycle(range(len(self.problems)))

    async def get_next_item(self):
        return next(self.order)

    async def collect_trajectories(self, item):
        prompt, answer = self.problems[item]
        sampling = {"n": self.config.group_size, "max_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 1.0}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            if item % 2:
                messages = [{"role": "user", "content": prompt}]
                reply = await managed.chat_completion(messages=messages, **sampling)
                texts = [choice.message.content for choice in reply.choices]
            else:
                reply = await managed.completion(prompt=prompt, stop=["\n"], **sampling)
                texts = [choice.text for choice in reply.choices]
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(text == answer) for text in texts],
        )
        return group, []

    async def evaluate(self, *args, **kwargs):
        """The calls that bypass the managed server: the OpenAI client's, and logprobs of a prompt for distillation."""
        prompt = self.problems[0][0]
        sampling = {"n": 2, "max_tokens": 4, "temperature": 0.5, "split": "eval"}
        chat = await self.server.chat_completion(messages=[{"role": "user", "content": prompt}], **sampling)
        text = await self.server.completion(prompt=prompt, **sampling)
        known = await self.server.get_logprobs(prompt=prompt, top_k=3)
        calls = {
            "chat": [choice.message.content for choice in chat.choices],
            "text": [choice.text for choice in text.choices],
            "prompt_tokens": known["prompt_tokens"],
            "ids": known["prompt_topk_token_ids"],
            "logprobs": known["prompt_topk_logprobs"],
        }
        with open("calls.json", "w") as file:
            json.dump(calls, file)


if __name__ == "__main__":
    Sums.cli()
