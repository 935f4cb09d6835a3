"""What servers of vLLM are forked with: which imports, and whether those leave the GPUs usable."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from lachesis.engines.vllm import preload
from tests.contracts.vllm_server import needs_vllm


class Driver:
    """NVIDIA's, which answers a question with an error's number, 0 being none."""

    def __init__(self, answer: int) -> None:
        self.answer = answer

    def cuDeviceGetCount(self, count: object) -> int:
        return self.answer


def no_driver(name: str) -> Driver:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("driver", "usable"),
    [(no_driver, True), (lambda name: Driver(3), True), (lambda name: Driver(0), False)],
    ids=["no GPU", "not initialized", "initialized"],
)
def test_forked_processes_can_use_gpus_unless_an_import_has(
    driver: Callable[[str], Driver], usable: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ctypes, "CDLL", driver)
    assert preload.is_usable() is usable


@pytest.mark.parametrize(("flags", "stays_away"), [([], True), (["--quantization", "torchao"], False)])
def test_what_the_model_does_without_is_not_imported(
    flags: list[str], stays_away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text("{}")
    imported: list[tuple[str, bool]] = []
    monkeypatch.delitem(sys.modules, "torchao", raising=False)

    def note(name: str) -> ModuleType:
        imported.append((name, "torchao" in sys.modules))
        return ModuleType(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", note)
        preload.load([str(tmp_path), *flags])
        sys.modules.pop("torchao", None)
    assert {away for _, away in imported} == {stays_away}
    assert "vllm.entrypoints.cli.serve" in dict(imported) and "lachesis.cli.serving" in dict(imported)


@needs_vllm
def test_all_of_it_is_there():
    vllm = util.find_spec("vllm")
    assert vllm is not None and vllm.submodule_search_locations is not None
    root = Path(vllm.submodule_search_locations[0]).parent
    theirs = [name for name in preload._MODULES if name.startswith("vllm.")]
    assert theirs and all((root / f"{name.replace('.', '/')}.py").is_file() for name in theirs)
    assert all(util.find_spec(name) for name in preload._MODULES if name not in theirs)
