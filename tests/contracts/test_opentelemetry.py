"""What an OpenTelemetry collector is sent: parsed from its protobuf by a stand-in that takes nothing else."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lachesis.common.errors import ConfigError
from lachesis.common.types import StepRecord
from lachesis.plugins.sinks.otel import OpenTelemetrySink
from tests.e2e.runs import metrics, run_here, write_run

REQUESTS: dict[str, Any] = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}


class Collector(ThreadingHTTPServer):
    """Keeps what is posted; another path, type or body is refused."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.values: dict[str, float] = {}
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, message: Any) -> None:
        for part in getattr(message, "resource_spans", ()):
            self.resources.append({a.key: a.value.string_value for a in part.resource.attributes})
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        for part in getattr(message, "resource_metrics", ()):
            for metric in (metric for scope in part.scope_metrics for metric in scope.metrics):
                self.values[metric.name] = metric.gauge.data_points[-1].as_double


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind = REQUESTS.get(self.path)
        if kind is None or self.headers["Content-Type"] != "application/x-protobuf":
            self.send_error(404 if kind is None else 415)
            return
        self.server.take(kind.FromString(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made
        made.shutdown()


def test_a_run_is_traced_and_measured(collector: Collector, tmp_path: Path):
    run = {"name": "traced", "dir": str(tmp_path / "runs"), "steps": 3}
    run_dir = run_here(write_run(tmp_path, run=run, logging={"opentelemetry": collector.url})).run_dir
    steps = [span for span in collector.spans if not span.parent_span_id]
    assert [span.name for span in steps] == ["step 1", "step 2", "step 3"]
    assert all(one["lachesis.run"] == "traced" and one["service.name"] == "lachesis" for one in collector.resources)
    for span, line in zip(steps, metrics(run_dir).steps, strict=True):
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(
            line.values["step_time"], abs=1e-3
        )
        assert abs(span.end_time_unix_nano / 1e9 - time.time()) < 600
        inside = [one for one in collector.spans if one.parent_span_id == span.span_id]
        assert {one.name for one in inside} >= {
            "wait for a batch",
            "forward, backward",
            "generation",
            "transfer",
            "proof",
        }
        assert all(one.trace_id == span.trace_id for one in inside)
    last = metrics(run_dir).steps[-1].values
    assert collector.values["lachesis.step"] == 3.0
    assert collector.values["lachesis.reward"] == pytest.approx(last["reward"])


def test_a_collector_that_is_away_ends_nothing(collector: Collector, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lachesis.plugins.sinks.otel._ANSWER_S", 0.5)
    url = collector.url
    collector.shutdown()
    collector.server_close()
    sink = OpenTelemetrySink(url, run_name="r")
    sink.write(StepRecord(1, {"reward": 0.5, "step_time": 0.1}))
    began = time.monotonic()
    sink.close()
    assert time.monotonic() - began < 30
    with pytest.raises(ConfigError, match=r"logging\.opentelemetry 'nowhere' is no address"):
        OpenTelemetrySink("nowhere", run_name="r")
