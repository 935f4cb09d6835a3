"""A GRPO loop of one's own, from the parts of Lachesis: `python examples/loop.py MODEL PROBLEMS.jsonl`."""

import json
import random
import sys
from pathlib import Path
from statistics import fmean

import lachesis

PROMPTS, SAMPLES, STEPS = 16, 8, 60


def reward(text: str, answer: str) -> float:
    """The share of the characters that are right, place by place."""
    return sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer), 1)


def train(model: str, problems: list[dict[str, str]], *, steps: int = STEPS, rate: float = 1e-4) -> list[float]:
    """Train the model on the problems; the mean reward of each step."""
    means, draws = [], random.Random(0)
    with lachesis.parts(model=model, optimizer={"learning_rate": rate}) as run:
        run.bridge.sync(0)  # the engine has the policy's weights, proved
        for step in range(1, steps + 1):
            rows = draws.sample(problems, PROMPTS)
            groups = run.sample([row["prompt"] for row in rows], n=SAMPLES, max_tokens=6, seed=step)
            for number, row in enumerate(rows):
                rewards = [reward(sample.text, row["answer"]) for sample in groups[number].samples]
                groups[number] = groups[number].scored(rewards)
            run.policy.forward_backward(lachesis.assign_advantages(groups))
            with run.bridge.update_to(step):  # on exit the engine has what was learned, or StaleWeights is raised
                run.policy.step()
            means.append(fmean(one for group in groups for one in group.rewards))
            print(f"step {step:3}  reward {means[-1]:.3f}")
        run.policy.save("loop-model")
    return means


if __name__ == "__main__":
    train(sys.argv[1], [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()])
