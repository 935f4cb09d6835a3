"""Names of metrics that have parts, and numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lachesis.common.types import EvalResult

# Beginning of the name of the mean reward of one environment of the rollout API; its name there follows, or its number
# if the API gives no names.
BY_ENVIRONMENT = "reward_of_environment/"
# Beginning of the metrics of one of several sources; its name and the metric's name follow.
BY_SOURCE = "source/"
# Beginnings of times: of one engine, whose host and port follow, and of one rank, whose number follows.
GENERATION_OF, TRAINING_OF = "generation_time/", "train_time/"
# Hits in the prefix caches of all engines, and the beginning of those of one of several.
PREFIX_HITS = "prefix_cache_hit_rate"
PREFIX_HITS_OF = f"{PREFIX_HITS}/"
# Beginnings for transfers: each engine's time to receive, and each rank's time to send, and gigabytes sent.
RECEIVING_OF, SENDING_OF, SENT_BY = "receive_time/", "send_time/", "sent_gb/"


def reward_functions(values: Mapping[str, float]) -> list[str]:
    """Return the names of reward functions that have a mean among the values of a step, in their order."""
    return [
        name[len("rewards/") : -len("/mean")]
        for name in values
        if name.startswith("rewards/") and name.endswith("/mean")
    ]


def benchmark_words(result: EvalResult) -> list[str]:
    """Return "gsm8k 62 % (59 to 65 %, n = 1319)" for each named benchmark of an evaluation, and its gain if known."""
    return [
        f"{name} {format_share(of['mean'])} ({100 * of['mean_low']:.0f} to {100 * of['mean_high']:.0f} %, "
        f"n = {of['problems']:.0f}){', ' + gain_words(of) if 'gain' in of else ''}"
        for name, of in result.benchmarks.items()
    ]


def gain_words(of: Mapping[str, float]) -> str:
    """Return "+6.5 points (+1.5 to +11.5), p = 0.019: a gain beyond chance" of a benchmark's figures."""
    low, high = (f"{100 * of[name]:+.1f}" for name in ("gain_low", "gain_high"))
    verdict = chance_words(of["gain"], p=of["gain_p"])
    return f"{100 * of['gain']:+.1f} points ({low} to {high}), p = {of['gain_p']:.2g}: {verdict}"


def chance_words(gain: float, *, p: float) -> str:
    """Return whether a gain is more than chance, at 5 %."""
    return "not more than chance" if p >= 0.05 else f"a {'gain' if gain > 0 else 'loss'} beyond chance"


def format_number(value: float) -> str:
    """Format a number for people: three significant digits, thousands as 12.3k, tiny ones as 1e-06."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("-inf" if value < 0 else "inf")
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def format_share(value: float) -> str:
    """Format a share in percent: 7 %, 93 %, 99.6 %; more digits only if rounding would give 100 % or 0 %."""
    percent = 100.0 * value
    if not math.isfinite(percent):
        return format_number(percent)
    rounded = round(percent)
    near_edge = rounded in (0, 100) and percent != rounded
    return f"{percent:.1f} %" if near_edge else f"{rounded} %"


def format_seconds(seconds: float) -> str:
    """Format a duration for people: 0.4 s, 42 s, 3m 05s, 2h 10m, 1d 04h."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h"
