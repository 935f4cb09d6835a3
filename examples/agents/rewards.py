"""1 where the last line that the agent printed is the answer."""


def solved(completions, output, answer, **columns) -> list[float]:
    last = [text.strip().splitlines()[-1:] for text in output]
    return [float(lines == [str(right)]) for lines, right in zip(last, answer, strict=True)]
