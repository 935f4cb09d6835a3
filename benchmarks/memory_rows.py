"""What memory.py has measured, file by file, beside what `lachesis plan` says of the same configurations now.

A file is of one run on one machine: its header says which and when, its rows are configurations with what training
them took. The GPU guide and the table of results are made of all of them (docs/generate_gpu_guide.py).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.config.schema import LachesisConfig
from lachesis.plan.plan import Plan, plan

GB = 1e9
MODELS = {
    "1.5B": "Qwen/Qwen2.5-1.5B",
    "3B": "Qwen/Qwen2.5-3B",
    "8B": "Qwen/Qwen3-8B",
    "14B": "Qwen/Qwen3-14B",
    "24B": "mistralai/Mistral-Small-24B-Base-2501",
    "32B": "Qwen/Qwen3-32B",
}
# What a header says, beside the bytes of the card and of CUDA's context.
HEADER = ("gpu", "torch", "transformers", "date")


@dataclass(frozen=True)
class Measurement:
    """One file. Rows are as memory.py writes them."""

    path: Path
    gpu: str
    packages: str
    date: str
    context_bytes: int
    rows: Sequence[dict[str, Any]]

    @property
    def machine(self) -> str:
        """Where, with what and when, in words."""
        return f"{self.gpu}, {self.packages}, {self.date}"


RAW = Path(__file__).with_name("raw")


def kept(directory: Path = RAW) -> list[Measurement]:
    """Return all kept files of measurements, the oldest first."""
    return sorted(map(read, directory.glob("memory*.json")), key=lambda one: (one.date, one.path.name))


def read(path: Path) -> Measurement:
    """One file; ValueError if it does not say where and when it was measured."""
    record = json.loads(path.read_text())
    if missing := [key for key in (*HEADER, "context_bytes", "rows") if key not in record]:
        raise ValueError(f"{path} lacks {', '.join(missing)}: a file of benchmarks/memory.py --out has them")
    packages = ", ".join(
        f"{name} {record[name]}" for name in ("torch", "transformers", "bitsandbytes") if record.get(name)
    )
    return Measurement(
        path=path,
        gpu=record["gpu"],
        packages=packages,
        date=record["date"],
        context_bytes=record["context_bytes"],
        rows=record["rows"],
    )


def configured(fields: dict[str, Any], sections: dict[str, Any], *, directory: str) -> LachesisConfig:
    """The configuration of a model whose ``config.json`` is written into the directory."""
    (Path(directory) / "config.json").write_text(json.dumps(fields))
    basic: dict[str, Any] = {
        "run": {"steps": 10},
        "data": {"path": "none.jsonl"},
        "rewards": {"functions": ["none.none"]},
    }
    return LachesisConfig.model_validate({**basic, **sections, "model": {**sections["model"], "path": directory}})


def plan_of(row: dict[str, Any]) -> Plan:
    """What `lachesis plan` says of a row's configuration."""
    with tempfile.TemporaryDirectory() as directory:
        config = configured(row["architecture"], row["sections"], directory=directory)
        return plan(config, device="cuda", devices=row["devices"])


def planned(row: dict[str, Any]) -> int:
    """Bytes of tensors that `lachesis plan` says a row's trainer holds at most."""
    return plan_of(row).peak("trainer")


def error(row: dict[str, Any]) -> float:
    """Of plan against what was measured, as a share of it: -0.02 where it says 2 % too little."""
    return planned(row) / row["measured"]["peak"] - 1


def largest_error(rows: Iterable[dict[str, Any]]) -> float:
    """Over rows that were measured: on a CPU nothing was."""
    return max((abs(error(row)) for row in rows if row["measured"]["peak"]), default=0.0)


def _gb(size: int | None) -> str:
    """Of some rows it was read too late, and is null."""
    return "      -" if size is None else f"{size / GB:7.2f}"


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    measured = row["measured"]
    gpus = "" if row["devices"] == 1 else f" on {row['devices']}"
    share = f"{error(row):+7.1%}" if measured["peak"] else "      -"
    seconds = min(measured["seconds"], default=0.0)
    return (
        f"{row['name'] + gpus:48s} {measured['peak'] / GB:7.2f} GB, reserved {_gb(measured['reserved'])}, process "
        f"{_gb(measured['process'])}; planned {planned(row) / GB:7.2f} {share}  {seconds:7.3f} s of "
        f"{measured['tokens']:,} tokens"
    )


def compared(measurements: Sequence[Measurement]) -> Iterator[str]:
    """All rows by file, and the largest error over them."""
    for one in measurements:
        yield f"{one.path}: {one.machine}"
        yield from map(line, one.rows)
    rows = [row for one in measurements for row in one.rows]
    yield f"largest error of plan over {len(rows)} rows: {largest_error(rows):.1%}"
