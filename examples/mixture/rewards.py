"""The reward of the first source: any even number will do."""


def even(completions, **columns) -> list[float]:
    """1 where the answer is an even number."""
    answers = [messages[-1]["content"] for messages in completions]
    return [float(answer.isdecimal() and int(answer) % 2 == 0) for answer in answers]
