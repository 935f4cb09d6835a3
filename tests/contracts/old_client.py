"""An environment of verifiers 0.1 played by that line's own multi-turn client: ``python old_client.py URL TOKEN``.

Writes each step of each rollout as JSON to its standard output: the ids of prompt and completion, and their logprobs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.clients import resolve_client

TURNS, ROLLOUTS = 3, 4
# Most tokens end a turn: of one that was cut off, no client can go on.
SAMPLING = {"temperature": 1.0, "max_tokens": 24, "extra_body": {"stop_token_ids": list(range(3, 60))}}


class Talk(vf.MultiTurnEnv):
    """Whatever was said, there is more to say."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": "ab"}]


async def main(url: str) -> None:
    rows = [{"question": f"cd{number}", "answer": ""} for number in range(ROLLOUTS)]
    environment: Any = Talk(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[]), max_turns=TURNS)
    config = vf.ClientConfig(
        client_type="openai_chat_completions_token", api_base_url=f"{url}/v1", api_key_var="THE_KEY", max_retries=0
    )
    client = resolve_client(config)
    found: list[list[dict[str, Any]]] = []
    for number, row in enumerate(environment.get_dataset()):
        state = await environment.rollout(dict(row), client, "policy", SAMPLING | {"seed": number})
        assert state.get("error") is None, repr(state["error"].__cause__ or state["error"])
        found.append([dict(step["tokens"]) for step in state["trajectory"]])
    json.dump(found, sys.stdout, default=list)


if __name__ == "__main__":
    os.environ["THE_KEY"] = sys.argv[2]
    asyncio.run(main(sys.argv[1]))
