"""Two vLLM servers of two workers each: what each of the four holds of every update.

Run by hand: ``python -m pytest tests/fleets``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.bridges.broadcast import BroadcastBridge
from lachesis.bridges.senders import SenderRanks
from lachesis.common.errors import StaleWeights
from tests import warm
from tests.contracts.bridge_cases import CANARY, TINY, TOLERANCE, Case, Live, build, soon
from tests.contracts.bridge_faults import Tampering
from tests.contracts.servers import TOKEN, python_path
from tests.contracts.vllm_server import ENVIRONMENT, build_model, entry_point, needs_vllm
from tests.sender_ranks import ThreadRanks
from tests.tiny import tiny_tokenizer

pytestmark = [needs_vllm, pytest.mark.timeout(900)]
SERVERS = WORKERS = 2


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A run's bridge over servers that it starts, after its first synchronization."""
    build_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    installed = entry_point(tmp_path, plugin="tests.fleets.plain_linear:keep_weights")
    own = {"LACHESIS_SESSION_TOKEN": TOKEN, "LACHESIS_SESSION_DIR": str(tmp_path / "sessions")}
    for name, value in {**ENVIRONMENT, **own, "PYTHONPATH": python_path(installed)}.items():
        monkeypatch.setenv(name, value)
    warm.fork_servers(monkeypatch.setattr)
    tampering = Tampering()
    tampering.install(monkeypatch)
    case = Case("vllm", {"kind": "broadcast"}, two=True, owned=True, workers=WORKERS)
    built = build(case, model=tmp_path / "model", directory=tmp_path / "run", servers=[], tampering=tampering)
    try:
        built.bridge.sync(0)
        yield built
    finally:
        built.side.close()


def check(live: Live, *, copied: int) -> None:
    """Each server serves the trainer's weights, by its canary and the digests that its workers' parts add up to."""
    controls = live.remote.controls
    assert len(controls) == SERVERS
    report = live.bridge.last_report
    assert report is not None and report.version == live.version and len(report.engines) == SERVERS
    for control in controls:
        reading = control.canary(CANARY, deadline=soon("one server's canary"))
        assert reading.version == live.version
        assert reading.logprobs == pytest.approx(live.policy.canary(CANARY), abs=TOLERANCE)
        digests = live.digests(control)
        assert digests is not None
        ours, theirs = digests
        assert ours and {name: theirs.get(name) for name in ours} == ours
        assert control.receiver_status(deadline=soon("a server's channel")).copied == copied
    for completion in live.generate():
        assert completion.versions == (live.version, live.version)


def test_two_servers_of_two_workers_take_each_update_and_are_proved_by_digests(live: Live):
    """All of it after the first is copied to its places on each worker; then three ranks send a share each."""
    for control in live.remote.controls:
        assert control.info(deadline=soon("a server")).model.tensor_parallel_size == WORKERS
    for number in range(1, 3):
        live.update()
        check(live, copied=number)
    before = live.policy.canary(CANARY)
    with pytest.raises(StaleWeights, match="from the trainer's"):
        live.update(scale=TINY, fault="swapped")
    assert live.policy.canary(CANARY) == pytest.approx(before, abs=TOLERANCE), "no canary could have seen it"
    assert isinstance(live.bridge, BroadcastBridge)
    ranks = ThreadRanks(live.policy.model, ranks=3)
    live.bridge._sender_ranks = SenderRanks(lambda _: ranks, most=8)
    live.bridge._disconnect()
    for number in range(2):
        live.update()
        check(live, copied=number)
        report = live.bridge.last_report
        assert report is not None and all(report.ranks[rank].num_bytes for rank in range(3))
