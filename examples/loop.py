"""A GRPO loop of one's own, from the parts of Lachesis: `python examples/loop.py MODEL PROBLEMS.jsonl`."""

import json
import random
import sys
from pathlib import Path

import lachesis

PROMPTS, SAMPLES, STEPS = 16, 8, 60


def reward(text: str, answer: str) -> float:
    """The share of the answer's characters that are right, from the first to the first wrong one."""
    right = next((i for i, (a, b) in enumerate(zip(text, answer, strict=False)) if a != b), min(len(text), len(answer)))
    return right / max(len(text), len(answer), 1)


def train(
    model: str, problems: list[dict[str, str]], *, steps: int = STEPS, learning_rate: float = 1e-4
) -> list[float]:
    """Train the model on the problems; the mean reward of each step."""
    means = []
    with lachesis.parts(model=model, optimizer={"learning_rate": learning_rate}) as run:
        tokenizer, draws = run.policy.tokenizer, random.Random(0)
        run.bridge.sync(0)  # the engine has the policy's weights, proved
        for step in range(1, steps + 1):
            rows = draws.sample(problems, PROMPTS)
            prompts = [tokenizer.encode(row["prompt"]) for row in rows]
            groups = []
            for row, group in zip(rows, run.engine.sample(prompts, n=SAMPLES, max_tokens=6, seed=step), strict=True):
                texts = tokenizer.batch_decode([s.completion_ids for s in group.samples], skip_special_tokens=True)
                groups.append(group.scored([reward(text, row["answer"]) for text in texts]))
            run.policy.forward_backward(lachesis.assign_advantages(groups))
            with run.bridge.update_to(step):  # on exit the engine has what was learned, or StaleWeights is raised
                run.policy.step()
            means.append(sum(sum(group.rewards) for group in groups) / (PROMPTS * SAMPLES))
            print(f"step {step:3}  reward {means[-1]:.3f}")
        run.policy.save("loop-model")
    return means


if __name__ == "__main__":
    train(sys.argv[1], [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()])
