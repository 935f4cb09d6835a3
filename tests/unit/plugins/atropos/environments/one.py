"""One shipped environment and what it asks: a fake server, the tiny tokenizer, a few rows of GSM8K."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lachesis.plugins.atropos.environments.client import InferenceClient
from lachesis.plugins.atropos.environments.settings import ServerConfig
from tests.tiny import EOS_ID, tiny_tokenizer
from tests.unit.plugins.atropos.environments.servers import FakeInference, inference

TOKENIZER = tiny_tokenizer()


def ids(text: str, *, end: bool = True) -> list[int]:
    return TOKENIZER.encode(text) + [EOS_ID] * end


@contextmanager
def served(kind: type[Any], answer: Any, **config: Any) -> Iterator[tuple[FakeInference, Callable[..., Any]]]:
    """The fake server, and a function that runs work on an environment of it."""
    with inference(answer=answer) as (fake, url):

        def run(work: Callable[[Any], Awaitable[Any]]) -> Any:
            async def inner() -> Any:
                client = InferenceClient(ServerConfig(base_url=(url,)))
                environment = kind(kind.config_class(**config), client=client, tokenizer=TOKENIZER)
                try:
                    await environment.setup()
                    return await work(environment)
                finally:
                    await environment.close()
                    await client.close()

            return asyncio.run(inner())

        yield fake, run


async def one_group(environment: Any) -> Any:
    item = await environment.get_next_item()
    return item, await environment.collect_trajectories(item)


def gsm8k(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    rows = [{"question": f"What is {n} times 1,000?", "answer": f"Easy.\n#### {n},000"} for n in range(1, 5)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "test.jsonl").write_text(json.dumps(rows[0]) + "\n\n")
    return directory
