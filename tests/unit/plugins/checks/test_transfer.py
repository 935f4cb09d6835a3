"""Around a transfer that is tried; the transfer itself is in tests/processes."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from lachesis.common.errors import EngineError, StaleWeights
from lachesis.config.schema import LachesisConfig
from lachesis.plugins.checks.transfer import engine_for_trial, sections, trial_directory


@pytest.mark.parametrize(
    "error", [EngineError("it died; its log is {}/a.log"), StaleWeights("stale"), KeyboardInterrupt()]
)
def test_a_log_stays_where_an_error_names_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(type(error)), trial_directory() as directory:
        (directory / "a.log").touch()
        raise EngineError(error.message.format(directory)) if type(error) is EngineError else error
    assert [path.name for path in tmp_path.rglob("*.log")] == (["a.log"] if type(error) is EngineError else [])


def test_the_trial_is_of_the_runs_bridge_device_and_kind_of_adapter(tmp_path: Path):
    config = LachesisConfig.model_validate(
        {
            "run": {"steps": 9},
            "model": {"path": "org/large", "device": "cpu"},
            "adapter": {"kind": "lora", "r": 64},
            "engine": {"kind": "http", "urls": ["http://10.0.0.7:9001"]},
            "bridge": {"kind": "lora_nccl", "every_steps": 5, "share_base": True, "proof": False,
                       "init_method": "tcp://10.0.0.1:29500", "transport": "nccl"},
        }
    )  # fmt: skip
    engine, words = engine_for_trial(config)
    tried = LachesisConfig.model_validate(sections(config, engine, directory=tmp_path, start_s=60.0))
    assert (engine["kind"], words) == ("embedded_server", "an embedded server in the place of engine.urls")
    assert tried.adapter.kind == "lora" and tried.model.path == str(tmp_path / "model") and tried.model.device == "cpu"
    bridge = {"kind": "lora_nccl", "every_steps": 1, "share_base": True, "proof": True, "init_method": None}
    assert tried.bridge.model_dump() == bridge | {"transport": "auto", "staging": "auto"}


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_engine_of_several_workers_is_said_to_be_tried_with_one():
    def words(**engine: int) -> str:
        sections = {"run": {"steps": 1}, "model": {"path": "m", "device": "cpu"}, "bridge": {"kind": "shared_vllm"}}
        return engine_for_trial(LachesisConfig.model_validate(sections | {"engine": {"kind": "vllm"} | engine}))[1]

    assert words() == "a vLLM server"
    said = "a vLLM server of one worker (the 4 of the run are not tried here: train --smoke does)"
    assert words(data_parallel_size=2, tensor_parallel_size=2) == said
