from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.common.errors import ModelError
from lachesis.engines.options import ServeOptions
from lachesis.plugins.embedded_server import app
from lachesis.plugins.embedded_server.app import serve_embedded
from lachesis.transport.bridge_file import read_bridge_file
from tests.tiny import tiny_model, tiny_tokenizer


def test_a_model_that_cannot_run_a_token_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("qwen2")
    del model.model.layers[0].mlp.up_proj  # as an architecture that is half known would have it
    monkeypatch.setattr(app, "load_causal_lm", lambda *_, **__: model)
    tiny_tokenizer().save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    ready: list[str] = []
    with pytest.raises(ModelError, match=r"is loaded, but cannot generate a token: AttributeError.*up_proj"):
        serve_embedded(ServeOptions(model=str(tmp_path), port=0), on_ready=ready.append)
    assert not ready


def test_it_writes_its_bridge_file_at_the_start_where_the_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = tiny_model("qwen2")
    names = {name for name, _ in model.named_parameters()}
    monkeypatch.setattr(app, "load_causal_lm", lambda *_, **__: model)
    tiny_tokenizer().save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    monkeypatch.setenv("LACHESIS_SESSION_DIR", str(tmp_path / "sessions"))
    monkeypatch.setenv("LOGDIR", str(tmp_path / "logs"))

    def end(url: str) -> None:
        raise KeyboardInterrupt

    def serve() -> None:
        with pytest.raises(KeyboardInterrupt):
            serve_embedded(ServeOptions(model=str(tmp_path), port=0), on_ready=end)

    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "0")
    serve()
    assert not (tmp_path / "logs").exists()
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "1")
    serve()
    assert read_bridge_file(tmp_path / "logs" / "vllm_bridge_config.json").tensors.keys() == names
