"""Environments of OpenEnv: a server that is reset and stepped over a WebSocket, a session for each episode.

OpenEnv's package requires a web interface, pandas and fastmcp, so this module speaks the protocol itself; contract
tests run it against the real server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from lachesis.common.errors import ConfigError
from lachesis.common.imports import optional_package
from lachesis.common.json_values import read_json
from lachesis.plugins.environments.steps.game import Action, Game, Row, Seen, number, shown
from lachesis.rollouts.episodes import RolloutFailed

_SCHEMA_S = 30.0
_LARGEST = 100 * 2**20  # limit of a message in bytes, as in OpenEnv's own client
_REFUSED = "VALIDATION_ERROR"  # the code for an invalid action: the model's mistake, not a failure
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


@dataclass(frozen=True, slots=True)
class OpenEnvServer:
    """A server, and the fields of its records that hold texts.

    Args:
        url: its address, with scheme, host and port.
        action: the field of an action that gets the model's turn.
        observation: the field of an observation that is shown; ``None``: its only text, or all of it as JSON.
    """

    url: str
    action: str
    observation: str | None = None

    @property
    def address(self) -> str:
        """Address of the server's WebSocket."""
        scheme, _, rest = self.url.rstrip("/").partition("://")
        return f"{_SCHEMES[scheme]}://{rest}/ws"


def is_address(environment: str) -> bool:
    """Return True if an environment's name is its server's address."""
    return environment.partition("://")[0] in _SCHEMES and "://" in environment


def find_server(url: str, args: Mapping[str, Any]) -> OpenEnvServer:
    """Describe a server; ask it for the fields of its actions unless ``args`` give them.

    Raises:
        DependencyError: the package websockets is not installed.
        ConfigError: ``args`` have other names than ``action`` and ``observation``, no server answers, or an action has
            no or several texts.
    """
    why = "OpenEnv's servers need the package websockets"
    optional_package("websockets", why, remedy="pip install 'lachesis[openenv]'")
    if unknown := sorted(args.keys() - {"action", "observation"}):
        raise ConfigError(f"source.args has {unknown[0]!r}", remedy="a server takes only action and observation")
    action = args.get("action")
    return OpenEnvServer(url, _text_field(url) if action is None else str(action), args.get("observation"))


def _text_field(url: str) -> str:
    """Return the one text among the fields of an action, by the server's schema."""
    scheme, _, rest = url.rstrip("/").partition("://")
    address = f"{scheme.replace('ws', 'http', 1)}://{rest}/schema"
    try:
        answer = httpx.get(address, timeout=_SCHEMA_S, trust_env=False).raise_for_status().json()
        fields = answer["action"]["properties"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no OpenEnv server answers at {address}: {type(error).__name__}: {error}",
            remedy="start it, or correct source.environment",
        ) from error
    texts = [name for name, kind in fields.items() if kind.get("type") == "string"]
    if len(texts) != 1:
        raise ConfigError(
            f"an action of {url} has the fields {', '.join(name for name in fields if name != 'metadata')}: it is not "
            "clear which of them is the model's turn",
            remedy="name it in source.args.action, or write a class with reset and step that uses a client",
        )
    return texts[0]


class OpenEnvGame(Game):
    """Session of a server. ``reset`` gets all columns of the task; the server takes those that it knows."""

    def __init__(self, server: OpenEnvServer, row: Row) -> None:
        self._server = server
        self._row = row
        self._socket: Any = None

    async def begin(self) -> Seen:
        from websockets.asyncio.client import connect

        try:
            self._socket = await connect(self._server.address, max_size=_LARGEST, proxy=None)
        except (OSError, TimeoutError) as error:
            raise self._lost(error) from error
        return await self._asked("reset", dict(self._row))

    async def step(self, action: Action) -> Seen:
        return await self._asked("step", {self._server.action: action.text})

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def _asked(self, kind: str, data: dict[str, Any]) -> Seen:
        from websockets.exceptions import WebSocketException

        try:
            await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = read_json(await self._socket.recv())
            found = answer["data"]
        except (OSError, WebSocketException) as error:
            raise self._lost(error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._failed(f"its answer to {kind} is not OpenEnv's ({type(error).__name__}: {error})") from error
        if answer.get("type") == "error":
            return self._refused(kind, found)
        reward = number(found.get("reward") or 0.0, what=self._server.url)
        done = bool(found.get("done"))
        messages = () if done else shown(self._text(found.get("observation") or {}), what=self._server.url)
        return Seen(messages=messages, reward=reward, done=done)

    def _refused(self, kind: str, data: Mapping[str, Any]) -> Seen:
        """Return the server's refusal of an invalid action as an observation for the model."""
        if kind == "step" and data.get("code") == _REFUSED:
            return Seen(messages=shown(f"error: {data.get('message')}", what=self._server.url))
        raise self._failed(f"{kind}: {data.get('message')} ({data.get('code')})")

    def _text(self, observation: Mapping[str, Any]) -> Any:
        name = self._server.observation
        if name is not None and name not in observation:
            raise self._failed(f"an observation has no {name!r}, but {', '.join(observation)}")
        if name is not None:
            return observation[name]
        texts = [value for value in observation.values() if isinstance(value, str) and value]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)

    def _failed(self, why: str) -> RolloutFailed:
        return RolloutFailed(f"{self._server.url}: {why}", cause="environment")

    def _lost(self, error: Exception) -> RolloutFailed:
        return RolloutFailed(f"{self._server.url}: {type(error).__name__}: {error}", cause="connection")
