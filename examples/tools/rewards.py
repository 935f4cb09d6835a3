"""The example's reward: the last message is the answer, whether a tool was asked or not."""


def right(completions, answer, **columns) -> list[float]:
    """1 where the rollout ends with the right number."""
    return [float(messages[-1]["content"] == wanted) for messages, wanted in zip(completions, answer, strict=True)]
