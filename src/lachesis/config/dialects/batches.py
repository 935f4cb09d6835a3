"""Batch arithmetic: from their rows, accumulation and processes to prompts in an optimizer step."""

from __future__ import annotations

from lachesis.config.dialects.table import Translation


def nearest_multiples(value: int, *, of: int) -> tuple[int, ...]:
    """The multiples of ``of``, at least one, next below and above ``value``; ``value`` itself if it is one."""
    below, above = value // of * of, -(-value // of) * of
    return tuple(dict.fromkeys(number for number in (below, above) if number >= of))


def nearest_divisors(value: int, near: int) -> tuple[int, ...]:
    """The divisors of ``value`` from 2 on that are next below and above ``near``."""
    divisors = [number for number in range(2, value + 1) if value % number == 0]
    below = [number for number in divisors if number <= near][-1:]
    above = [number for number in divisors if number >= near][:1]
    return tuple(dict.fromkeys(below + above))


def put_batch(
    translation: Translation,
    *,
    rows: str,
    accumulation: str,
    generations: str,
    default_rows: int,
    processes: int,
) -> None:
    """Set ``batch.prompts_per_step`` and ``batch.micro_batch_size``.

    One optimizer step there has rows x accumulation x processes completions (TRL's GRPOConfig), which must be
    whole groups: prompts_per_step is that divided by the group size, exactly or not at all.
    """
    micro = translation.whole(rows, default_rows)
    steps = translation.whole(accumulation, 1)
    group = translation.whole(generations, 8)
    if micro is None or steps is None or group is None:
        return
    completions = micro * steps * processes
    translation.put("batch.micro_batch_size", micro, rows)
    if completions % group == 0:
        translation.put("batch.prompts_per_step", completions // group, accumulation)
        return
    unit = micro * processes
    # A group is whole after so many accumulation steps, and after every multiple of them.
    valid = [number for number in range(1, steps + group + 1) if unit * number % group == 0]
    below, above = [n for n in valid if n < steps][-1:], [n for n in valid if n > steps][:1]
    sizes = nearest_divisors(completions, group)
    choices = [f"{accumulation} {' or '.join(map(str, below + above))}"]
    choices += [f"{generations} {' or '.join(map(str, sizes))}"] if sizes else []
    translation.problem(
        accumulation,
        f"{rows} {micro} x {accumulation} {steps} x {processes} process{'es' if processes > 1 else ''} = {completions} "
        f"completions in a step, which is no multiple of {generations} {group}; the nearest that fit: "
        f"{', or '.join(choices)}",
    )


def check_generation_batch(translation: Translation, name: str, *, prompts: int | None, meaning: str) -> None:
    """Generating for several steps at once is not done here: say so where a file asks for it.

    Args:
        name: their key, which is set.
        prompts: its value in prompts; None where it is invalid.
        meaning: what their key counts.
    """
    step = translation.document.data.get("batch", {}).get("prompts_per_step")
    if prompts is None or step is None or prompts == step:
        return
    if prompts % step:
        fitting = " or ".join(map(str, nearest_multiples(prompts, of=step)))
        translation.problem(
            name,
            f"{prompts} prompts ({meaning}) is no multiple of the {step} prompts of an optimizer step; the nearest "
            f"that fit: {fitting} prompts",
        )
        return
    translation.warning(
        name,
        f"{prompts} prompts ({meaning}) are {prompts // step} optimizer steps from one generation there; here each "
        "step generates its own, on newer weights (pipeline.async_prefetch with prefetch_depth generates ahead)",
    )
