"""OpenTelemetry: the phases of each step as spans and its values as gauges, sent to a collector by OTLP over HTTP."""

from __future__ import annotations

import importlib
import re
from typing import Any

from lachesis.common.errors import ConfigError, DependencyError
from lachesis.common.http import server_url
from lachesis.common.types import EvalResult, StepRecord
from lachesis.metrics.hub import Sink
from lachesis.metrics.names import evaluation_values
from lachesis.metrics.sinks.jsonl import StepLine
from lachesis.plugins.report.timeline import Event, step_events, timeline_rows

# How often gauges are sent, as they are then; spans are sent when some have gathered, and all at the end.
_EVERY_MS = 5000
_ANSWER_S = 5.0


class OpenTelemetrySink(Sink):
    """Sends traces in the library's own threads: training waits only at its end, and then not for long.

    Each step is a separate trace. The library logs a collector that does not answer, and reads headers, such
    as a key, from OTEL_EXPORTER_OTLP_HEADERS.

    Args:
        url: of the collector, without ``/v1/traces``.
        run_name: the attribute ``lachesis.run`` of all traces.

    Raises:
        DependencyError: the SDK or its exporter is not installed.
        ConfigError: ``url`` is not an address.
    """

    def __init__(self, url: str, *, run_name: str) -> None:
        try:
            address = server_url(url)
        except ConfigError as error:
            raise ConfigError(
                f"logging.opentelemetry {url!r} is no address of a collector", remedy="write http://127.0.0.1:4318"
            ) from error
        try:
            sdk = {name: importlib.import_module(f"opentelemetry.{module}") for name, module in _MODULES.items()}
        except ImportError as error:
            raise DependencyError(
                f"logging.opentelemetry is set but the SDK cannot be imported: {error}",
                remedy='pip install "lachesis[otel]", or remove logging.opentelemetry',
            ) from error
        resource = sdk["resources"].Resource.create({"service.name": "lachesis", "lachesis.run": run_name})
        self._in_span = sdk["api"].set_span_in_context
        self._traces: Any = sdk["trace"].TracerProvider(resource=resource, shutdown_on_exit=False)
        spans = sdk["spans"].OTLPSpanExporter(endpoint=f"{address}/v1/traces", timeout=_ANSWER_S)
        self._traces.add_span_processor(sdk["export"].BatchSpanProcessor(spans))
        values = sdk["values"].OTLPMetricExporter(endpoint=f"{address}/v1/metrics", timeout=_ANSWER_S)
        reader = sdk["readers"].PeriodicExportingMetricReader(values, export_interval_millis=_EVERY_MS)
        self._meters: Any = sdk["metrics"].MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._tracer, self._meter = self._traces.get_tracer("lachesis"), self._meters.get_meter("lachesis")
        self._gauges: dict[str, Any] = {}
        self._ends: dict[int, float] = {}

    def write(self, record: StepRecord) -> None:
        values = {"step": float(record.step), **record.values}
        if record.evaluation is not None:
            values |= evaluation_values(record.evaluation)
        self._measure(values)
        if record.values.get("step_time", 0.0) > 0:
            line = StepLine(record.step, record.ended, dict(record.values))
            events = step_events(line, origin=0.0, ends=self._ends, rows=timeline_rows([line]))
            self._trace([event for event in events if event["ph"] == "X"])

    def evaluation(self, result: EvalResult) -> None:
        self._measure(evaluation_values(result))

    def close(self) -> None:
        self._traces.shutdown()
        self._meters.shutdown()

    def _measure(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = self._meter.create_gauge(instrument_name(name))
            gauge.set(value)

    def _trace(self, events: list[Event]) -> None:
        """Send one trace; its first event is the step, which contains the others."""
        context = None
        whole: Any = None
        for event in events:
            begin, end = round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"]))
            attributes = {f"lachesis.{name}": value for name, value in event["args"].items()}
            span = self._tracer.start_span(
                event["name"],
                context=context,
                start_time=begin,
                attributes={"lachesis.thread": event["cat"]} | attributes,
            )
            if whole is None:
                whole, context, last = span, self._in_span(span), end
            else:
                span.end(end_time=end)
        if whole is not None:
            whole.end(end_time=last)


_MODULES = {
    "api": "trace",
    "trace": "sdk.trace",
    "export": "sdk.trace.export",
    "metrics": "sdk.metrics",
    "readers": "sdk.metrics.export",
    "resources": "sdk.resources",
    "spans": "exporter.otlp.proto.http.trace_exporter",
    "values": "exporter.otlp.proto.http.metric_exporter",
}


def instrument_name(name: str) -> str:
    """``lachesis.`` and the name in the letters that OpenTelemetry allows, 255 at most."""
    return re.sub(r"[^\w.\-/]", "_", f"lachesis.{name}", flags=re.ASCII)[:255]
