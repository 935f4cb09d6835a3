"""In place of Modal's cloud: what an environment has deployed there runs in a process of its own on this machine."""

import asyncio
import json
import os
import sys
import tempfile
from types import SimpleNamespace

# The only function that is deployed, in the file of its repository. It prints, so that its result goes to a file.
_CALL = """
import json, sys
sys.path[:0] = json.loads(sys.argv[2])
import lcb_modal_endpoint
result = lcb_modal_endpoint.run_test(*json.load(sys.stdin))
with open(sys.argv[1], "w") as file:
    json.dump(result, file, default=str)
"""


class RemoteError(Exception):
    """A deployed function's process ended before its result was there."""


exception = SimpleNamespace(RemoteError=RemoteError)


class Function:
    """A deployed function."""

    @staticmethod
    def from_name(app: str, name: str) -> SimpleNamespace:
        assert (app, name) == ("joeli-lcb", "run_test"), f"{app} has no function {name}"
        return SimpleNamespace(remote=SimpleNamespace(aio=_call))


class Image:
    """What a function is deployed with."""

    @classmethod
    def debian_slim(cls, **_options: str) -> "Image":
        return cls()

    def pip_install(self, *_packages: str) -> "Image":
        return self


class App:
    """Where functions are deployed."""

    def __init__(self, name: str, image: Image) -> None:
        self.name = name

    def function(self, **_options: object):
        return lambda function: function


async def _call(*arguments: object) -> list[object]:
    with tempfile.TemporaryDirectory() as directory:
        result = os.path.join(directory, "result.json")
        # The directories of the environment's script and of this file.
        paths = json.dumps([sys.path[0], os.path.dirname(os.path.abspath(__file__))])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-E", "-c", _CALL, result, paths,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await process.communicate(json.dumps(arguments).encode())
        if process.returncode or not os.path.exists(result):
            raise RemoteError(f"the function's process ended with {process.returncode}")
        with open(result) as file:
            return json.load(file)
