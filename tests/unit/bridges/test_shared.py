from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lachesis.bridges.external import Servers
from lachesis.bridges.proof import SyncProof, canary_alone
from lachesis.bridges.shared import EngineWeights, SharedBridge
from lachesis.common.errors import ConfigError, EngineError, ModelError, StaleWeights, TrainingError
from lachesis.config.schema import LoraAdapterConfig, ModelConfig
from lachesis.engines.http.control import ServerInfo
from lachesis.engines.serving.backend import ModelInfo
from lachesis.train.model.loading import attached_transformer
from lachesis.train.model.lora import add_lora
from lachesis.transport import bridge_file as bridge_file_module
from lachesis.transport.bridge_file import BRIDGE_FILE, write_bridge_file
from lachesis.transport.digest import digests
from lachesis.transport.shared_tensors import SharedFile, export_from_file, share_tensors
from tests.fakes import FakeEngine
from tests.tiny import tiny_model
from tests.unit.transport.sharing import SESSION, bridge_file, exporter

TOKENS = torch.arange(5, 25)[None]


class FakeServer:
    """The control of a server whose engine is in this process: its tensors lie in a file all the same."""

    def __init__(self, tensors: dict[str, torch.Tensor], file: SharedFile, *, engine: str = "embedded") -> None:
        self.exported = {name: export_from_file(tensor, file) for name, tensor in tensors.items()}
        self.engine = engine
        self.session_id = SESSION
        self.tensor_parallel_size = 1
        self.tp_degree = 1
        self.calls: list[Any] = []

    def info(self, *, deadline) -> ServerInfo:
        self.calls.append("info")
        model = ModelInfo(
            model="tiny",
            served_names=(),
            dtype="float32",
            vocab_size=100,
            max_model_len=64,
            tensor_parallel_size=self.tensor_parallel_size,
            device="cpu",
            lora_enabled=False,
            max_lora_rank=0,
        )
        return ServerInfo(
            url="http://s:1", session_id=self.session_id, weight_version=0, paused=False, sleeping=False,
            engine=self.engine, pid=1, model=model,
        )  # fmt: skip

    def claim(self, owner: str, *, takeover: bool = False, deadline) -> None:
        self.calls.append(("claim", owner, takeover))

    def export_shared(self, path: Path, *, deadline) -> None:
        self.calls.append(("export", path))
        self.write(path)

    def write(self, path: Path, **changes: Any) -> None:
        fields = {"session_id": self.session_id, "engine": self.engine, "tp_degree": self.tp_degree}
        write_bridge_file(path, bridge_file(self.exported, **fields | changes))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No bridge file of this machine is found."""
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bridge_file_module, "DEFAULT_DIRECTORY", tmp_path / "default")


@pytest.fixture
def engine_model() -> PreTrainedModel:
    return tiny_model("qwen2")


@pytest.fixture
def server(engine_model, tmp_path) -> Iterator[FakeServer]:
    file = share_tensors(engine_model.parameters(), tmp_path / "memory")
    yield FakeServer(dict(engine_model.named_parameters()), file)
    file.close()


def weights_of(server: FakeServer, tmp_path: Path, **options: Any) -> EngineWeights:
    return EngineWeights(server, owner="this run", export_directory=tmp_path / "run", **options)


def saved(model: PreTrainedModel, tmp_path: Path, *, dtype: Any = "auto") -> ModelConfig:
    """A directory with the model's config.json and nothing else."""
    model.config.save_pretrained(tmp_path / "model")
    return ModelConfig(path=str(tmp_path / "model"), dtype=dtype)


def opened(server: FakeServer, model: PreTrainedModel, tmp_path: Path) -> tuple[EngineWeights, PreTrainedModel]:
    weights = weights_of(server, tmp_path)
    weights.open()
    return weights, attached_transformer(saved(model, tmp_path), weights)


class TestAttaching:
    @pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gpt2", "bloom"])
    @torch.no_grad()
    def test_the_attached_model_computes_what_the_engines_does(self, architecture, tmp_path):
        theirs = tiny_model(architecture)
        file = share_tensors(theirs.parameters(), tmp_path)
        server = FakeServer(dict(theirs.named_parameters()), file)
        _, model = opened(server, theirs, tmp_path)
        model.set_attn_implementation(theirs.config._attn_implementation)  # config.json does not have it
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        assert torch.equal(model(TOKENS).logits, theirs(TOKENS).logits)
        assert model.get_output_embeddings().weight.data_ptr() != 0
        tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
        theirs.get_input_embeddings().weight.mul_(1.5)
        assert torch.equal(model(TOKENS).logits, theirs(TOKENS).logits), "one memory, not a copy"
        file.close()

    def test_it_is_logged_as_documented(self, server, engine_model, tmp_path, caplog):
        with caplog.at_level(logging.INFO, logger="lachesis"):
            opened(server, engine_model, tmp_path)
        assert f"Attached {len(dict(engine_model.named_parameters()))} tensors" in caplog.text

    def test_the_engine_is_claimed_before_its_memory_is_touched(self, server, tmp_path):
        weights = weights_of(server, tmp_path, takeover=True)
        weights.open()
        weights.open()
        path = tmp_path / "run" / BRIDGE_FILE
        assert path.is_file()
        assert server.calls == ["info", ("claim", "this run", True), ("export", path)]

    def test_another_model_is_refused_in_words(self, server, tmp_path):
        weights = weights_of(server, tmp_path)
        weights.open()
        for change in ({"num_hidden_layers": 3}, {"hidden_size": 64}, {"vocab_size": 200}):
            with pytest.raises(ModelError, match="the engine serves another model, with 2 layers, hidden size 32"):
                attached_transformer(saved(tiny_model(**change), tmp_path), weights)

    def test_another_dtype_is_refused(self, server, engine_model, tmp_path):
        weights = weights_of(server, tmp_path)
        weights.open()
        with pytest.raises(ModelError, match="is bfloat16 in the trainer and float32 in the engine") as caught:
            attached_transformer(saved(engine_model, tmp_path, dtype="bfloat16"), weights)
        assert "--dtype bfloat16" in caught.value.remedy

    def test_a_head_of_its_own_beside_tied_embeddings_is_refused(self, tmp_path):
        theirs = tiny_model("llama")
        file = share_tensors(theirs.parameters(), tmp_path)
        server = FakeServer(dict(theirs.named_parameters()), file, engine="vllm 0.32.0")
        ours = tiny_model("llama", tie_word_embeddings=True)
        with pytest.raises(ModelError, match=r"separate lm_head\.weight"):
            opened(server, ours, tmp_path)
        file.close()

    def test_a_model_that_is_not_there_is_an_error(self, server, tmp_path):
        weights = weights_of(server, tmp_path)
        weights.open()
        (tmp_path / "nothing").mkdir()
        with pytest.raises(ModelError, match="does not describe a causal language model"):
            attached_transformer(ModelConfig(path=str(tmp_path / "nothing")), weights)


class TestFinding:
    def test_a_split_engine_is_refused_before_it_is_claimed(self, server, tmp_path):
        server.tensor_parallel_size = 2
        with pytest.raises(ConfigError, match="splits its weights over 2 GPUs: each matrix lies in pieces") as caught:
            weights_of(server, tmp_path).open()
        assert "broadcast" in caught.value.remedy
        assert server.calls == ["info"]

    def test_a_split_export_is_refused(self, server, tmp_path):
        server.tp_degree = 4
        with pytest.raises(ConfigError, match="over 4 GPUs"):
            weights_of(server, tmp_path).open()

    def test_a_file_of_this_session_is_used_as_it_is(self, server, tmp_path):
        server.write(tmp_path / BRIDGE_FILE)
        assert weights_of(server, tmp_path).open().path == Path.cwd() / BRIDGE_FILE
        assert ("export", tmp_path / "run" / BRIDGE_FILE) not in server.calls

    @pytest.mark.parametrize("damage", ["stale", "torn"])
    def test_a_file_that_is_stale_is_made_anew(self, server, tmp_path, damage):
        server.write(tmp_path / BRIDGE_FILE, session_id="of yesterday")
        if damage == "torn":
            (tmp_path / BRIDGE_FILE).write_text("{")
        assert weights_of(server, tmp_path).open().path == tmp_path / "run" / BRIDGE_FILE

    def test_an_explicit_file_that_is_stale_is_an_error(self, server, tmp_path):
        server.write(tmp_path / "mine.json", session_id="of yesterday")
        with pytest.raises(EngineError, match=f"engine session of yesterday wrote it .* session {SESSION} answers"):
            weights_of(server, tmp_path, config_path=tmp_path / "mine.json").open()

    def test_an_explicit_file_that_is_missing_is_an_error(self, server, tmp_path):
        with pytest.raises(EngineError, match="Could not find"):
            weights_of(server, tmp_path, config_path=tmp_path / "mine.json").open()


class CountingEngine(FakeEngine):
    """``calls`` is what was asked of it, in order; ``logprob`` is read from the shared memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(session_id=SESSION)
        self.controls = ("the only server",)
        self.model = model
        self.calls: list[str] = []

    def canary(self, token_ids):
        self.calls.append("canary")
        reading = super().canary(token_ids)
        return type(reading)(tuple(canary(self.model, token_ids)), reading.version, reading.session_id)

    def set_version(self, version: int) -> None:
        self.calls.append(f"set_version {version}")
        super().set_version(version)

    def pause(self, *, mode="keep") -> None:
        self.calls.append(f"pause {mode}")
        super().pause(mode=mode)

    def resume(self) -> None:
        if self._paused:
            self.calls.append("resume")
        super().resume()


@torch.no_grad()
def canary(model: PreTrainedModel, token_ids) -> list[float]:
    ids = torch.tensor([token_ids])
    return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).flatten().tolist()


class TestBridge:
    @pytest.fixture
    def engine(self, engine_model) -> CountingEngine:
        return CountingEngine(engine_model)

    @pytest.fixture
    def bridge(self, server, engine, tmp_path) -> SharedBridge[PreTrainedModel]:
        def proof(policy: PreTrainedModel, engine) -> SyncProof:
            return SyncProof(
                token_ids=lambda: tuple(range(20, 32)),
                trainer=partial(canary, policy),
                engine=canary_alone(engine.canary),
                session_id=SESSION,
                dtype="float32",
            )

        weights = weights_of(server, tmp_path)
        bridge: SharedBridge[PreTrainedModel] = SharedBridge(
            Servers(engine=engine, proof_builder=proof, pause_mode="drain"),  # type: ignore[arg-type]
            weights=weights,
        )
        self.weights = weights
        return bridge

    def prepare(self, bridge, engine_model, tmp_path) -> PreTrainedModel:
        return bridge.prepare(lambda: attached_transformer(saved(engine_model, tmp_path), self.weights))

    @staticmethod
    @torch.no_grad()
    def step(policy: PreTrainedModel, *, scale: float = 1.1) -> None:
        for parameter in policy.parameters():
            parameter.mul_(scale)

    def test_the_optimizer_step_is_the_transfer(self, bridge, engine, engine_model, tmp_path, caplog):
        policy = self.prepare(bridge, engine_model, tmp_path)
        with caplog.at_level(logging.INFO, logger="lachesis"), bridge.update_to(1):
            engine.calls.append("optimizer step")
            self.step(policy)
        expected = ["pause drain", "optimizer step", "set_version 1", "resume", "canary"]
        assert [call for call in engine.calls if call in expected] == expected
        assert digests(dict(policy.named_parameters())) == digests(dict(engine_model.named_parameters()))
        assert "[SINGLE-COPY] Weights updated in-place - step 1" in caplog.text
        assert bridge.last_report is not None and bridge.last_report.canary_error == 0.0

    def test_a_step_that_raises_resumes_and_announces_nothing(self, bridge, engine, engine_model, tmp_path):
        self.prepare(bridge, engine_model, tmp_path)
        with pytest.raises(TrainingError), bridge.update_to(1):
            raise TrainingError("the gradient is not finite")
        assert engine.calls == ["pause drain", "resume"]
        assert engine.health().ready and engine.version == 0

    def test_weights_that_moved_away_are_seen_before_anything_is_announced(
        self, bridge, engine, engine_model, tmp_path
    ):
        policy = self.prepare(bridge, engine_model, tmp_path)
        moved = pytest.raises(ModelError, match=r"model\.norm\.weight no longer lies in the engine's memory")
        with moved, bridge.update_to(1):
            policy.model.norm.weight.data = policy.model.norm.weight.data.clone()
        assert engine.version == 0 and engine.health().ready

    def test_a_policy_on_weights_of_its_own_is_refused(self, bridge):
        with pytest.raises(ModelError, match="never attached"):
            bridge.prepare(lambda: tiny_model("qwen2"))

    def test_a_cast_policy_is_refused(self, bridge, engine_model, tmp_path):
        with pytest.raises(ModelError, match="no longer lies in the engine's memory"):
            bridge.prepare(lambda: attached_transformer(saved(engine_model, tmp_path), self.weights).bfloat16())

    def test_an_engine_that_computes_something_else_is_stale_weights(self, bridge, engine, engine_model, tmp_path):
        self.prepare(bridge, engine_model, tmp_path)
        engine.model = tiny_model("qwen2", seed=5)
        with pytest.raises(StaleWeights):
            bridge.sync(1)
        assert engine.health().ready

    def test_several_servers_are_refused(self, engine, server, tmp_path):
        engine.controls = ("one", "another")
        with pytest.raises(ConfigError, match="shares weights with one engine, but engine"):
            SharedBridge(Servers(engine=engine, proof_builder=None), weights=weights_of(server, tmp_path))

    def test_closing_may_be_repeated_and_leaves_the_policy_alone(self, bridge, engine_model, tmp_path):
        policy = self.prepare(bridge, engine_model, tmp_path)
        bridge.close()
        bridge.close()
        assert torch.isfinite(policy(TOKENS).logits).all()


def test_an_adapter_on_a_shared_base_leaves_the_engines_weights_alone(server, engine_model, tmp_path):
    weights, transformer = opened(server, engine_model, tmp_path)
    before = digests(dict(engine_model.named_parameters()))
    model = add_lora(transformer, LoraAdapterConfig(r=4))
    weights.check_attached()
    trained = [p for p in model.parameters() if p.requires_grad]
    model(input_ids=TOKENS).logits.square().mean().backward()
    with torch.no_grad():
        for parameter in trained:
            assert parameter.grad is not None
            parameter -= parameter.grad
    assert digests(dict(engine_model.named_parameters())) == before
    lora_bytes = sum(p.nbytes for p in trained)
    own = {p.untyped_storage().data_ptr(): p.nbytes for p in model.parameters()}
    engine_storage = next(engine_model.parameters()).untyped_storage().nbytes()
    assert len(own) == len(trained) + 1 and engine_storage > lora_bytes, "the base is in memory once"


def fused_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The tensors that vLLM would have for a Qwen2 model: q, k, v and gate, up fused, the vocabulary padded."""
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        *path, leaf, kind = name.split(".")
        engine_name = ".".join([*path, fused.get(leaf, leaf), kind])
        rows = 128 if leaf in ("embed_tokens", "lm_head") else parameter.shape[0]
        shapes[engine_name] = (shapes.get(engine_name, (0,))[0] + rows, *parameter.shape[1:])
    return shapes


def test_views_of_another_processs_fused_tensors(engine_model, tmp_path):
    path = tmp_path / "other" / BRIDGE_FILE
    with exporter(path, fused_shapes(engine_model)) as other:
        server = FakeServer({}, share_tensors([torch.zeros(1)], tmp_path), engine="vllm 0.26.0")
        weights = EngineWeights(server, owner="run", export_directory=tmp_path, config_path=path)
        weights.open()
        model = attached_transformer(saved(engine_model, tmp_path), weights)
        attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
        q, k, v = (getattr(attention, f"{x}_proj").weight for x in "qkv")
        assert k.data_ptr() == q.data_ptr() + q.nbytes and v.data_ptr() == k.data_ptr() + k.nbytes
        assert mlp.up_proj.weight.data_ptr() == mlp.gate_proj.weight.data_ptr() + mlp.gate_proj.weight.nbytes
        assert model.lm_head.weight.shape == engine_model.lm_head.weight.shape
        before = other.digests()
        with torch.no_grad():
            k += 1.0
            attention.v_proj.bias.zero_()
        after = other.digests()
        changed = {name for name in after if after[name] != before[name]}
        attention_name = "model.layers.1.self_attn.qkv_proj"
        assert changed == {f"{attention_name}.weight", f"{attention_name}.bias"}
        assert weights.slices["model.layers.1.self_attn.k_proj.weight"].start == q.shape[0]
        other.fill("model.norm.weight", 3.0)
        assert (model.model.norm.weight == 3.0).all()
        engine: Any = CountingEngine(engine_model)
        bridge: SharedBridge[Any] = SharedBridge(Servers(engine=engine, proof_builder=None), weights=weights)
        with bridge.update_to(1), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        assert other.digests()["model.norm.weight"] == digests({"": torch.full((32,), 0.25)})[""]
