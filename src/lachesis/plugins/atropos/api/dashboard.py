"""Page at /dashboard: the queue, its environments, its speed, and the latest group token by token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from starlette.responses import HTMLResponse, Response

from lachesis.common.errors import ConfigError
from lachesis.plugins.atropos.api.entries import HeldGroup
from lachesis.plugins.atropos.api.environments import RegisteredEnvironment
from lachesis.plugins.atropos.api.metrics import History
from lachesis.plugins.atropos.api.scored_group import UNTRAINED
from lachesis.plugins.atropos.api.state import RolloutState
from lachesis.web.pages import render_page
from lachesis.web.tokens import best_and_worst, token_spans

Pieces: TypeAlias = Callable[[Sequence[int]], list[str]]

_SEQUENCES = 8
_BEFORE = 60
_AFTER = 400
_LARGEST = 8 << 20
TEMPLATE = Path(__file__).parent / "templates" / "dashboard.html.j2"
_MISFITS = 12


def load_pieces(name: str) -> Pieces:
    """Return a function from token ids to the text that each adds, for a tokenizer.json, its directory or a hub name.

    The last token of a character of several tokens has its text. Loads no torch.

    Raises:
        ConfigError: the tokenizer does not exist, or has no tokenizer.json.
    """
    import tokenizers
    from tokenizers.decoders import DecodeStream

    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        found = (
            tokenizers.Tokenizer.from_file(str(file)) if path.exists() else tokenizers.Tokenizer.from_pretrained(name)
        )
    except Exception as error:
        # The library raises bare exceptions for missing files, bad JSON and an unreachable hub alike.
        remedy = "give the directory of a model that has a tokenizer.json, or leave it out to see token ids"
        raise ConfigError(f"--tokenizer {name}: {error}", remedy=remedy) from error

    def pieces(ids: Sequence[int]) -> list[str]:
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(found, token) or "" if found.id_to_token(token) else f"<{token}?>" for token in ids]

    return pieces


def view(held: HeldGroup, *, environment: str, pieces: Pieces | None) -> dict[str, Any]:
    """Return the sequences of a group, best scores first, eight at most, cut to a readable length.

    Empty for a group beyond 8 MiB: reading it would hold up those who post and pull.
    """
    count = held.group.sequences
    shown: list[dict[str, Any]] = []
    if len(held.group.json) <= _LARGEST:
        group = json.loads(held.group.json)
        indices = best_and_worst(range(count), score=lambda index: _row(group["scores"], index), limit=_SEQUENCES)
        shown = [_sequence(group, index, pieces) for index in indices]
    has_text = pieces is not None and bool(shown)
    return {"environment": environment, "size": count, "has_text": has_text, "sequences": shown}


def _sequence(group: dict[str, Any], index: int, pieces: Pieces | None) -> dict[str, Any]:
    """One sequence around the first token that is trained on: a little before, more after."""
    tokens = group["tokens"][index]
    mask: list[Any] = _row(group["masks"], index) or []
    logprobs: list[Any] = _row(group["inference_logprobs"], index) or []
    given = [at >= len(mask) or mask[at] == UNTRAINED for at in range(len(tokens))]
    first = given.index(False) if False in given else 0
    start, end = max(0, first - _BEFORE), min(len(tokens), first + _AFTER)
    return {
        "index": index,
        "score": _row(group["scores"], index),
        "tokens": len(tokens),
        "trained": len(tokens) - sum(given),
        **token_spans(
            (pieces or _ids)(tokens[start:end]),
            logprobs[start:],
            given=given[start:end],
            before=start,
            after=len(tokens) - end,
        ),
    }


def _row(rows: Sequence[Any] | None, index: int) -> Any:
    return rows[index] if rows and index < len(rows) else None


def _ids(tokens: Sequence[int]) -> list[str]:
    return [str(token) for token in tokens]


class Dashboard:
    """Renders the page once; its figures anew each time, the latest rollout only when it is another one."""

    def __init__(self, state: RolloutState, history: History, pieces: Pieces | None) -> None:
        self._state = state
        self._history = history
        self._pieces = pieces
        self._page = render_page(TEMPLATE)
        self._started = time.time()
        self._shown: tuple[str, dict[str, Any]] = ("", {})

    def page(self) -> Response:
        """Return the page: one file that requests nothing but its figures."""
        return HTMLResponse(self._page, headers={"Cache-Control": "no-cache"})

    def data(self, *, known: str, now: float) -> bytes:
        """Return the figures as JSON, without the latest rollout if the page already shows it (``known``)."""
        state = self._state
        latest = state.backlog.latest
        key = f"{state.epoch}-{latest.number}" if latest else ""
        figures = {
            "now": time.time(),
            "uptime_s": time.time() - self._started,
            "run": self._run(),
            "waiting": state.waiting(now),
            "queue": self._queue(),
            "environments": [self._environment(env, now) for env in state.environments],
            "rates": self._history.rates(state, now),
            "curves": self._history.curves(now),
            "set_aside": self._set_aside(),
            "latest_key": key,
            "latest": self._view(latest, key) if latest and key != known else None,
        }
        return json.dumps(figures, separators=(",", ":")).encode()

    def _run(self) -> dict[str, Any]:
        asked = self._state.registration
        facts = {"registered": asked is not None, "started": self._state.started, "step": self._state.step}
        if asked is not None:
            names = ("wandb_project", "wandb_group", "batch_size", "max_token_len", "num_steps", "acknowledge")
            facts |= {name: getattr(asked, name) for name in names}
        return facts

    def _queue(self) -> dict[str, Any]:
        state = self._state
        queued = state.backlog.queue.sequences
        return {
            "groups": len(state.backlog.queue),
            "sequences": sum(queued.values()),
            "others": sum(count for env_id, count in queued.items() if state.environments.get(env_id) is None),
            "tokens": state.backlog.queue.tokens,
            "weight": state.backlog.weight,
            "limit": state.backlog.limit,
            "full": state.backlog.received.full,
            "outstanding": len(state.deliveries.outstanding),
            "redelivered": state.deliveries.redelivered,
            "delivered": state.delivered.batches,
        }

    def _environment(self, env: RegisteredEnvironment, now: float) -> dict[str, Any]:
        backlog, present = self._state.backlog, self._state.environments.present(now)
        shares = sum(other.share for other in present)
        return {
            "name": env.name,
            "state": "left" if not env.connected else "here" if env in present else "silent",
            "silent_s": round(now - env.last_seen, 1),
            "group_size": env.asked.group_size,
            "weight": env.share / shares if shares and env in present else 0.0,
            "minimum": env.asked.min_batch_allocation,
            "queued": backlog.queue.sequences.get(env.id, 0),
            "buffered": sum(held.group.sequences for held in backlog.buffers.get(env.id, ())),
            "groups": env.groups,
            "tokens": env.tokens,
            "set_aside": env.set_aside,
            "score": env.score,
        }

    def _set_aside(self) -> dict[str, Any]:
        kept = self._state.backlog.set_aside
        last = [
            {"at": misfit.at, "environment": misfit.environment, "reason": misfit.reason}
            for misfit in list(kept.last)[-_MISFITS:]
        ]
        return {"count": kept.count, "strict": self._state.limits.strict, "last": last[::-1]}

    def _view(self, latest: HeldGroup, key: str) -> dict[str, Any]:
        """Return the view of the latest group, prepared once for all viewers."""
        if self._shown[0] != key:
            environment = self._state.environments.get(latest.group.env_id)
            name = environment.name if environment else ""
            self._shown = key, view(latest, environment=name, pieces=self._pieces)
        return self._shown[1]
