"""The quickstart's reward."""


def exact_match(completions, answer, **kwargs) -> list[float]:
    """1 where the completion is the answer and nothing else."""
    return [float(completion[0]["content"] == right) for completion, right in zip(completions, answer, strict=True)]
