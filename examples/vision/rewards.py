"""The reward of the example."""


def named(completions, answer, **columns):
    """Reward the name of the picture's colour. ``columns["images"]`` has the images, as the data gives them."""
    return [float(one[0]["content"].strip() == right) for one, right in zip(completions, answer, strict=True)]
