"""What the doctor looks at. Its proof of learning is a run, and in tests/e2e."""

from __future__ import annotations

import compileall
import importlib.metadata
import importlib.util
import json
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from lachesis import cli
from lachesis.common.errors import ModelError
from lachesis.config.load import load_config
from lachesis.config.rules import check
from lachesis.plugins.checks import doctor
from lachesis.plugins.checks.doctor import (
    Check,
    inspect_agents_wall,
    inspect_config,
    inspect_installation,
    prove_learning,
    write_proof,
)
from tests.logs import handlers_kept
from tests.walls import needs_namespaces


def by_subject(checks: list[Check]) -> dict[str, Check]:
    found = {one.subject: one for one in checks}
    assert len(found) == len(checks), "no subject twice"
    return found


def without_package(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package in (missing, f"{missing}-cpu"):
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_check_is_told_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch):
    """Who gives up while one of them waits has seen all that came before."""

    def given_up() -> list[Check]:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "inspect_sandbox", given_up)
    told: list[Check] = []
    with pytest.raises(KeyboardInterrupt):
        told.extend(doctor.examine(None, proof=True))
    assert [one.subject for one in told] == [one.subject for one in inspect_installation()]


class TestInstallation:
    def test_versions_devices_and_disk_are_told(self):
        checks = by_subject(inspect_installation())
        for package in doctor.REQUIRED:
            assert checks[package].message == importlib.metadata.version(package)
        assert checks["cpu"].message == f"{torch.get_num_threads()} threads"
        assert "GB free" in checks["disk"].message
        assert not any(one.failed for one in checks.values())

    @pytest.mark.parametrize("compiled", [True, False])
    @pytest.mark.parametrize("kept", [True, False])
    def test_whether_modules_are_compiled(
        self, compiled: bool, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        package = tmp_path / "torch"
        package.mkdir()
        (package / "__init__.py").write_text("")
        if compiled:
            compileall.compile_dir(package, quiet=1)
        spec = importlib.util.spec_from_file_location("torch", package / "__init__.py")
        monkeypatch.setattr(doctor.util, "find_spec", {"torch": spec}.get)
        monkeypatch.setattr(sys, "dont_write_bytecode", kept)
        found = doctor.inspect_bytecode()
        assert not found.failed
        assert (found.message == "torch: compiled") is compiled
        assert (f"compileall -q -j 0 {package}" in found.message) is not compiled
        assert ("unset PYTHONDONTWRITEBYTECODE" in found.message) is (kept and not compiled)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu_it_says_where_training_runs(self):
        check_ = by_subject(inspect_installation())["gpu"]
        assert "runs on the CPU" in check_.message
        assert torch.__version__ in check_.message
        assert not check_.failed

    def test_gpus_are_told_with_name_memory_and_precision(self, monkeypatch: pytest.MonkeyPatch):
        properties = SimpleNamespace(name="H200", total_memory=140 * 10**9)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (130 * 10**9, 140 * 10**9))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        checks = by_subject(inspect_installation())
        assert checks["cuda:0"].message == "H200, 130 of 140 GB free, bf16"
        assert "cuda:1" in checks
        assert "gpu" not in checks

    def test_a_required_package_that_is_missing_is_a_failure_with_a_remedy(self, monkeypatch: pytest.MonkeyPatch):
        without_package(monkeypatch, "peft")
        checks = by_subject(inspect_installation())
        assert checks["peft"].failed
        assert "pip install" in checks["peft"].message
        assert [subject for subject, one in checks.items() if one.failed] == ["peft"]

    @pytest.mark.parametrize("package", sorted(doctor.OPTIONAL))
    def test_an_optional_one_is_not(self, monkeypatch: pytest.MonkeyPatch, package: str):
        without_package(monkeypatch, package)
        found = by_subject(inspect_installation())[package]
        assert not found.failed
        assert found.message == f"not installed ({doctor.OPTIONAL[package]})"

    def test_a_disk_that_is_nearly_full_is_a_failure(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
        found = by_subject(inspect_installation())["disk"]
        assert found.failed
        assert "0.5 GB free" in found.message


class TestConfiguration:
    @pytest.fixture
    def proof(self, tmp_path: Path) -> Path:
        return write_proof(tmp_path)

    def test_the_proofs_own_is_valid_and_its_warnings_are_shown(self, proof: Path):
        first, *rest = inspect_config(proof)
        assert first == Check(str(proof), "valid")
        assert {one.subject for one in rest} == {finding.rule for finding in check(load_config(proof).config)}
        assert not any(one.failed for one in rest)

    def test_a_package_that_it_needs_and_that_is_missing_is_a_failure(
        self, proof: Path, monkeypatch: pytest.MonkeyPatch
    ):
        quantized = proof.read_text().replace("model:\n", "adapter: {kind: lora}\nmodel:\n  quantization: nf4\n")
        proof.write_text(quantized)
        assert not any(one.failed for one in inspect_config(proof))
        without_package(monkeypatch, "bitsandbytes")
        (failed,) = (one for one in inspect_config(proof) if one.failed)
        assert failed.subject == "bitsandbytes"
        assert "model.quantization nf4 needs it: pip install bitsandbytes" in failed.message

    def test_so_is_torchao_where_products_are_to_be_in_float8(self, proof: Path, monkeypatch: pytest.MonkeyPatch):
        proof.write_text(proof.read_text().replace("model:\n", "model:\n  matmul_dtype: float8\n"))
        assert not any(one.failed for one in inspect_config(proof))
        without_package(monkeypatch, "torchao")
        (failed,) = (one for one in inspect_config(proof) if one.failed)
        assert failed.subject == "torchao"
        assert "model.matmul_dtype float8 needs it: pip install torchao" in failed.message

    def test_what_does_not_parse_is_a_failure(self, proof: Path):
        proof.write_text(proof.read_text() + "\nalgoritm: {}\n")
        (found,) = inspect_config(proof)
        assert found.failed
        assert "algorithm" in found.message

    def test_what_does_not_fit_together_is_a_failure(self, proof: Path):
        proof.write_text(proof.read_text() + "\npipeline: {reroll_start_fraction: 0.5, reroll_max_groups: 99}\n")
        (found,) = inspect_config(proof)
        assert found.failed
        assert "reroll_max_groups 99" in found.message

    def test_a_missing_file_is_a_failure(self, tmp_path: Path):
        (found,) = inspect_config(tmp_path / "none.yaml")
        assert found.failed
        assert "no configuration file" in found.message


class TestAnswer:
    @pytest.fixture
    def answer(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str]]:
        path = write_proof(tmp_path)

        def run(*options: str, checks: Sequence[Check]) -> tuple[int, str]:
            for part in ("inspect_installation", "inspect_sandbox", "inspect_agents_wall"):
                monkeypatch.setattr(doctor, part, list)
            monkeypatch.setattr(doctor, "inspect_config", lambda config: checks)
            monkeypatch.setattr(sys, "argv", ["lachesis", "doctor", str(path), "--no-proof", *options])
            with handlers_kept(), pytest.raises(SystemExit) as exit_:
                cli.main()
            return int(exit_.value.code or 0), capsys.readouterr().out

        return run

    def test_each_check_is_a_line_and_one_that_failed_is_the_exit_code(self, answer: Callable[..., tuple[int, str]]):
        checks = [Check("config", "valid"), Check("torchao", "no", failed=True)]
        code, out = answer(checks=checks)
        assert code == 1
        assert [line.split() for line in out.splitlines()] == [["ok", "config", "valid"], ["fail", "torchao", "no"]]
        assert answer(checks=checks[:1])[0] == 0

    def test_the_json_has_them(self, answer: Callable[..., tuple[int, str]]):
        found = json.loads(answer("--json", checks=[Check("config", "valid")])[1])
        assert found["checks"] == [{"subject": "config", "message": "valid", "failed": False}]


class TestProof:
    def test_its_model_and_tokenizer_fit_each_other(self, tmp_path: Path):
        config = load_config(write_proof(tmp_path)).config
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        assert tokenizer("abcd")["input_ids"] == [2, 3, 4, 5]
        assert tokenizer.decode([2, 3, 2]).replace(" ", "") == "aba"
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)

    def test_it_is_the_same_every_time(self, tmp_path: Path):
        first, second = (write_proof(tmp_path / name).parent / "model" / "model.safetensors" for name in "ab")
        assert first.read_bytes() == second.read_bytes()

    def test_an_error_of_the_run_is_a_failure_and_the_log_speaks_again(self, monkeypatch: pytest.MonkeyPatch):
        def train(*arguments, **options):
            raise ModelError("no model", remedy="find one")

        monkeypatch.setattr(doctor, "train", train)
        assert prove_learning() == Check("learning", "no model -> find one", failed=True)
        assert not logging.getLogger("lachesis").disabled


@needs_namespaces
def test_the_wall_of_agents_is_tried_and_its_lines_are_told_apart_from_the_sandboxs():
    first, *tried = inspect_agents_wall()
    assert first.subject == "agents' wall" and "10 of 10 escapes blocked" in first.message and not first.failed
    assert len(tried) == 10 and {one.message for one in tried} == {"escape held"}
    assert "agents' wall: use the network" in {one.subject for one in tried}
