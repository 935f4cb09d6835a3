"""The rollout API side by side with the original: groups a second end to end, and what a backlog costs.

    python -m venv original && original/bin/pip install atroposlib==0.4.0
    python benchmarks/api.py --original original/bin/python [--repeats 3] [--groups 512]
    python benchmarks/api.py --tiny

Each case is run on a fresh server, the servers in turn. Without ``--original`` only ours is measured. Groups are
8 sequences of 512 tokens, posted gzipped as the original's environments do, on kept-alive connections; bodies are
made, and replies are checked, off the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

SEQUENCES = 8
REGISTRATION = {
    "wandb_group": "bench", "wandb_project": "bench", "max_token_len": 4096, "checkpoint_dir": "",
    "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1,
}  # fmt: skip
OURS = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).resolve().parents[1] / "src")!r})
from lachesis.plugins.atropos.api.server import ServerOptions, serve
serve(ServerOptions(port=int(sys.argv[1]), state_dir=Path(sys.argv[2]) if sys.argv[2:] else None))
"""


@dataclass(frozen=True)
class Server:
    """A server to measure: its name, and its command for a port and an empty directory."""

    name: str
    command: Callable[[int, str], list[str]]


@dataclass(frozen=True)
class Case:
    """A load: sequences a batch, posts at a time, whether replies may be gzipped, all posts before all pulls."""

    name: str
    batch_size: int = 64
    concurrency: int = 8
    gzip_replies: bool = True
    post_first: bool = False


CASES = (
    Case("B64 C1", concurrency=1),
    Case("B64 C8"),
    Case("B64 C32", concurrency=32),
    Case("B256 C8", batch_size=256),
    Case("B64 C8, post then pull", post_first=True),
    Case("B64 C8, plain replies", gzip_replies=False),
)


@dataclass
class Measured:
    """One run of one case. Times in seconds; ``cpu`` is that of the server."""

    groups: int
    seconds: float = 0.0
    posting: float = 0.0
    cpu: float = 0.0
    rss_mib: float = 0.0
    peak_mib: float = 0.0
    posts: list[float] = field(default_factory=list)
    pulls: list[float] = field(default_factory=list)


class Connection:
    """A kept-alive HTTP connection: one request at a time, the reply's body as it came."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", headers: Sequence[str] = ()) -> tuple[bool, bytes]:
        """Returns whether the body is gzipped, and the body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        reader, writer = self._streams
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(body)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if not head.startswith("http/1.1 200"):
            raise RuntimeError(f"{method} {path}: {head.splitlines()[0]}")
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        return "content-encoding: gzip" in head, await reader.readexactly(length)

    async def json(self, method: str, path: str, value: object = None) -> dict:
        _, body = await self.ask(method, path, b"" if value is None else json.dumps(value).encode())
        return json.loads(body)


def scored_group(chance: random.Random, *, tokens: int, env_id: int | None = None) -> dict:
    """A group as the original's environments send it: the first eighth of each sequence is the prompt."""
    rows = [[chance.randrange(150_000) for _ in range(tokens)] for _ in range(SEQUENCES)]
    prompt = tokens // 8
    return {
        "tokens": rows,
        "masks": [[-100] * prompt + row[prompt:] for row in rows],
        "scores": [chance.random() for _ in rows],
        "inference_logprobs": [
            [1.0] * prompt + [-chance.expovariate(1.5) for _ in range(tokens - prompt)] for _ in rows
        ],
        "ref_logprobs": None, "overrides": None, "group_overrides": None, "env_id": env_id,
    }  # fmt: skip


@contextmanager
def running(server: Server) -> Iterator[tuple[int, int]]:
    """A fresh server: its port and its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            server.command(port, directory), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=directory
        )
        try:
            wait_for(port, process)
            yield port, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=20)


def wait_for(port: int, process: subprocess.Popen) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{process.args} did not start")


async def load(port: int, pid: int, case: Case, bodies: list[bytes], expected: set[str]) -> Measured:
    """Post all bodies and pull all batches; then check that what came out is what went in."""
    result = Measured(groups=len(bodies))
    trainer = Connection(port)
    await trainer.json("POST", "/register", {**REGISTRATION, "batch_size": case.batch_size})
    await trainer.json("GET", "/batch")
    waiting = iter(bodies)
    replies: list[tuple[bool, bytes]] = []

    async def post() -> None:
        connection = Connection(port)
        for body in waiting:
            start = time.perf_counter()
            await connection.ask("POST", "/scored_data", body, ["Content-Encoding: gzip"])
            result.posts.append(time.perf_counter() - start)
        result.posting = time.perf_counter() - began

    async def pull() -> None:
        accept = ["Accept-Encoding: gzip"] if case.gzip_replies else []
        while len(replies) < len(bodies) * SEQUENCES // case.batch_size:
            start = time.perf_counter()
            reply = await trainer.ask("GET", "/batch", headers=accept)
            if len(reply[1]) < 100:
                await asyncio.sleep(0.005)
                continue
            result.pulls.append(time.perf_counter() - start)
            replies.append(reply)

    cpu = cpu_seconds(pid)
    began = time.perf_counter()
    posting = asyncio.gather(*(post() for _ in range(case.concurrency)))
    if case.post_first:
        await posting
    await asyncio.gather(posting, pull())
    result.seconds = time.perf_counter() - began
    result.cpu = cpu_seconds(pid) - cpu
    result.rss_mib, result.peak_mib = memory_mib(pid)
    check(replies, expected)
    return result


def check(replies: list[tuple[bool, bytes]], expected: set[str]) -> None:
    """Every group came back once, to the digit."""
    groups = [
        json.dumps([group["tokens"], group["inference_logprobs"], group["scores"]])
        for zipped, body in replies
        for group in json.loads(gzip.decompress(body) if zipped else body)["batch"]
    ]
    if len(groups) != len(expected) or set(groups) != expected:
        raise RuntimeError("groups were lost, doubled or altered")


async def first_batch(port: int, *, groups: int, minimum: float | None) -> dict[str, float]:
    """Milliseconds of GET /batch with so many groups of 8 x 64 tokens queued: the first, and the median of 20."""
    connection, chance = Connection(port), random.Random(groups)
    await connection.json("POST", "/register", {**REGISTRATION, "batch_size": 64})
    await connection.json("GET", "/batch")
    asked = {"max_token_length": 64, "desired_name": "bench", "weight": 1.0, "group_size": SEQUENCES}
    answer = await connection.json("POST", "/register-env", {**asked, "min_batch_allocation": minimum})
    body = json.dumps([scored_group(chance, tokens=64, env_id=answer["env_id"]) for _ in range(100)]).encode()
    for _ in range(groups // 100):
        await connection.ask("POST", "/scored_data_list", body)
    times = []
    for _ in range(21):
        start = time.perf_counter()
        _, reply = await connection.ask("GET", "/batch")
        times.append(1e3 * (time.perf_counter() - start))
        if len(reply) < 100:
            raise RuntimeError("no batch")
    return {"first": times[0], "later": statistics.median(times[1:])}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident memory now and at its highest."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return tuple(int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def throughput(servers: list[Server], options: argparse.Namespace) -> list[dict]:
    """All cases, the servers in turn so that a busy machine troubles them alike; medians over the repeats."""
    chance = random.Random(0)
    groups = [scored_group(chance, tokens=512) for _ in range(options.groups)]
    bodies = [gzip.compress(json.dumps(group).encode()) for group in groups]
    expected = {json.dumps([group["tokens"], group["inference_logprobs"], group["scores"]]) for group in groups}
    rows = []
    for case in [case for case in CASES if not options.case or case.name in options.case]:
        runs: dict[str, list[Measured]] = {server.name: [] for server in servers}
        for _ in range(options.repeats):
            for server in servers:
                with running(server) as (port, pid):
                    runs[server.name].append(asyncio.run(load(port, pid, case, bodies, expected)))
        for server in servers:
            rows.append(summary(case, server, runs[server.name]))
            show(rows[-1])
    return rows


def summary(case: Case, server: Server, runs: list[Measured]) -> dict:
    def middle(value: Callable[[Measured], float]) -> float:
        return round(statistics.median(value(run) for run in runs), 3)

    return {
        "case": case.name,
        "server": server.name,
        "groups_per_s": middle(lambda run: run.groups / run.seconds),
        "fastest_groups_per_s": round(max(run.groups / run.seconds for run in runs), 3),
        "posts_per_s": middle(lambda run: run.groups / run.posting),
        "server_cpu_ms_a_group": middle(lambda run: 1e3 * run.cpu / run.groups),
        "post_ms_p50": middle(lambda run: 1e3 * quantile(run.posts, 0.5)),
        "post_ms_p99": middle(lambda run: 1e3 * quantile(run.posts, 0.99)),
        "batch_ms_p50": middle(lambda run: 1e3 * quantile(run.pulls, 0.5)),
        "batch_ms_p99": middle(lambda run: 1e3 * quantile(run.pulls, 0.99)),
        "rss_mib": middle(lambda run: run.rss_mib),
        "peak_mib": middle(lambda run: run.peak_mib),
    }


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def backlog(servers: list[Server], options: argparse.Namespace) -> list[dict]:
    rows = []
    for minimum in (None, 0.5):
        for groups in options.backlog:
            for server in servers:
                if server.name == "original" and groups > (1000 if minimum else 5000):
                    continue
                with running(server) as (port, pid):
                    idle = memory_mib(pid)[0]
                    times = asyncio.run(first_batch(port, groups=groups, minimum=minimum))
                    held = memory_mib(pid)[0] - idle
                rows.append(
                    {
                        "server": server.name, "minimum": minimum, "queued_groups": groups,
                        "first_batch_ms": round(times["first"], 2), "later_batch_ms": round(times["later"], 2),
                        "bytes_a_token": round(held * (1 << 20) / (groups * SEQUENCES * 64), 1),
                    }
                )  # fmt: skip
                show(rows[-1])
    return rows


def show(row: dict) -> None:
    sys.stdout.write("  ".join(f"{name} {value}" for name, value in row.items()) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original", help="a Python that has atroposlib")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", type=int, default=512, help="a multiple of 32")
    parser.add_argument("--case", action="append", help="only this case; may be given again")
    parser.add_argument("--backlog", type=int, nargs="*", default=[500, 5000, 50000], help="numbers of queued groups")
    parser.add_argument("--out", type=Path, help="also write all figures here, as JSON")
    parser.add_argument("--tiny", action="store_true", help="32 groups of one case, one server: that it runs")
    options = parser.parse_args()
    if options.tiny:
        options.repeats, options.groups, options.case, options.backlog = 1, 32, [CASES[1].name], [200]
    if options.groups % 32:
        parser.error("--groups has to be a multiple of 32")
    servers = [
        Server("ours", lambda port, _: [sys.executable, "-c", OURS, str(port)]),
        Server("ours, durable", lambda port, place: [sys.executable, "-c", OURS, str(port), place]),
    ]
    if options.tiny:
        del servers[0]
    if options.original:
        arguments = ["-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port"]
        servers.insert(0, Server("original", lambda port, _: [options.original, *arguments, str(port)]))
    figures = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "cases": [asdict(case) for case in CASES],
        "throughput": throughput(servers, options) if options.repeats else [],
        "backlog": backlog(servers, options),
    }
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
