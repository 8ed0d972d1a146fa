"""Metrics out of perdure, each through a library that may or may not be installed.

Prometheus by prometheus-client, traces by opentelemetry-sdk; experiment trackers have a module of
their own (`trackers`). None is imported before it is asked for, and what is missing is said with
the command that installs it.
"""

import hashlib
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from perdure.model.errors import PlatformError
from perdure.model.platforms.traps import Check
from perdure.model.report import Snapshot
from perdure.telemetry.monitoring import RANKS_MAX, IncidentSpan, list_metrics

PACKAGES = {
    "prometheus-client": "a Prometheus endpoint",
    "opentelemetry-sdk": "traces of incidents",
    "tensorboard": "incidents and curves for TensorBoard",
    "wandb": "incidents and curves for Weights & Biases",
    "mlflow-skinny": "incidents and curves for MLflow",
    "nvidia-ml-py": "identity and health of GPUs",
}
"""What is optional, and what it is for."""
EXTRAS = {
    "prometheus-client": "'perdure[metrics]'",
    "opentelemetry-sdk": "'perdure[metrics]'",
    "tensorboard": "'perdure[tensorboard]'",
    "wandb": "'perdure[wandb]'",
    "mlflow-skinny": "'perdure[mlflow]'",
}
"""What installs it."""

_OPEN_MAX = 32
"""Connections to the Prometheus endpoint at a time. One more is closed."""
_READ_S = 5.0
"""Seconds for a request to come."""


def check_exporters() -> Check:
    """Return which of the optional libraries are installed."""
    there, missing = [], []
    for package, use in PACKAGES.items():
        try:
            there.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(f"{package} ({use})")
    evidence = ", ".join(there) or "none of them"
    if not missing:
        return Check(name="metrics out", state="note", evidence=evidence)
    return Check(
        name="metrics out",
        state="note",
        evidence=f"{evidence}; not installed: {', '.join(missing)}",
        mend="pip install 'perdure[metrics]'",
    )


def load_library(module: str, package: str) -> Any:
    """Return a module of an optional package.

    Raises:
        PlatformError: it is not installed; the hint has the command.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise PlatformError(
            f"{package} is not installed: it is needed for {PACKAGES[package]}",
            hint=f"pip install {EXTRAS.get(package, package)}",
        ) from None


# --- Prometheus -------------------------------------------------------------------------------


class _Collector:
    """Makes the metrics of the newest snapshot when they are asked for."""

    def __init__(self, look: Callable[[], Snapshot | None], ranks_max: int) -> None:
        self._look, self._ranks_max = look, ranks_max
        self._families = load_library("prometheus_client.core", "prometheus-client")

    def collect(self) -> Iterator[Any]:
        snapshot = self._look()
        for metric in list_metrics(snapshot, self._ranks_max) if snapshot is not None else ():
            kind = "Counter" if metric.kind == "counter" else "Gauge"
            make = getattr(self._families, f"{kind}MetricFamily")
            family = make(metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.samples:
                family.add_metric(labels, value)
            yield family


def _make_registry(look: Callable[[], Snapshot | None], ranks_max: int) -> Any:
    registry = load_library("prometheus_client", "prometheus-client").CollectorRegistry()
    registry.register(_Collector(look, ranks_max))
    return registry


def render_prometheus(snapshot: Snapshot, ranks_max: int = RANKS_MAX) -> str:
    """Return `snapshot` in Prometheus' text format.

    Raises:
        PlatformError: prometheus-client is not installed.
    """
    prometheus = load_library("prometheus_client", "prometheus-client")
    text: bytes = prometheus.generate_latest(_make_registry(lambda: snapshot, ranks_max))
    return text.decode()


class PrometheusServer:
    """Serves `/metrics` from a thread of its own until closed."""

    def __init__(
        self,
        look: Callable[[], Snapshot | None],
        host: str,
        port: int,
        ranks_max: int = RANKS_MAX,
    ) -> None:
        """Serve what `look` returns; port 0 takes a free one.

        Raises:
            PlatformError: prometheus-client is not installed, or the port is taken.
        """
        prometheus = load_library("prometheus_client", "prometheus-client")
        registry = _make_registry(look, ranks_max)
        try:
            self._server, self._thread = prometheus.start_http_server(port, host, registry)
        except OSError as error:
            raise PlatformError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}", hint="another --port"
            ) from error
        _limit(self._server)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def _limit(server: Any) -> None:
    """Bound the threads of a server that has one for each connection, and the time of each.

    It says nothing of a connection that fails: a stranger would fill the log.
    """
    places = threading.BoundedSemaphore(_OPEN_MAX)
    begin, serve = server.process_request, server.process_request_thread

    def take(request: Any, address: Any) -> None:
        if places.acquire(blocking=False):
            begin(request, address)
        else:
            server.shutdown_request(request)

    def serve_and_leave(request: Any, address: Any) -> None:
        try:
            serve(request, address)
        finally:
            places.release()

    server.RequestHandlerClass = type(
        "Handler", (server.RequestHandlerClass,), {"timeout": _READ_S}
    )
    server.process_request, server.process_request_thread = take, serve_and_leave
    server.handle_error = lambda request, address: None


# --- OpenTelemetry ----------------------------------------------------------------------------


def make_otlp_exporter(url: str) -> Any:
    """Return an exporter to an OpenTelemetry collector, over HTTP.

    Raises:
        PlatformError: it is not installed.
    """
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    endpoint = url if url.rstrip("/").endswith("/v1/traces") else url.rstrip("/") + "/v1/traces"
    return load_library(name, "opentelemetry-sdk").OTLPSpanExporter(endpoint=endpoint, timeout=10)


def export_spans(spans: Sequence[IncidentSpan], key: str, exporter: Any) -> None:
    """Export `spans`; ids follow from `key` and the incident, so a second time changes nothing.

    Raises:
        PlatformError: opentelemetry-sdk is not installed, or nobody takes the spans.
    """
    trace = load_library("opentelemetry.sdk.trace", "opentelemetry-sdk")
    export = load_library("opentelemetry.sdk.trace.export", "opentelemetry-sdk")
    ids: list[int] = []

    generator: Any = trace.id_generator.IdGenerator

    class _Ids(generator):  # type: ignore[misc]
        def generate_trace_id(self) -> int:
            return ids[0]

        def generate_span_id(self) -> int:
            ids[1] += 1
            return ids[1]

    resource = load_library("opentelemetry.sdk.resources", "opentelemetry-sdk").Resource.create(
        {"service.name": "perdure"}
    )
    provider = trace.TracerProvider(id_generator=_Ids(), resource=resource, shutdown_on_exit=False)
    failed: list[bool] = []
    inner = exporter

    sink: Any = export.SpanExporter

    class _Checked(sink):  # type: ignore[misc]
        def export(self, batch: Any) -> Any:
            result = inner.export(batch)
            failed.append(result is not export.SpanExportResult.SUCCESS)
            return result

        def shutdown(self) -> None:
            inner.shutdown()

    provider.add_span_processor(export.BatchSpanProcessor(_Checked()))
    tracer = provider.get_tracer("perdure")
    api = load_library("opentelemetry.trace", "opentelemetry-sdk")
    for span in spans:
        digest = hashlib.sha256(f"{key}/{span.number}".encode()).digest()
        ids[:] = [int.from_bytes(digest[:16]), int.from_bytes(digest[16:23]) << 8]
        root = tracer.start_span(
            span.name, attributes=span.attributes, start_time=_nanos(span.start_s)
        )
        inside = api.set_span_in_context(root)
        for name, start_s, end_s in span.phases:
            tracer.start_span(name, context=inside, start_time=_nanos(start_s)).end(_nanos(end_s))
        root.end(_nanos(span.end_s))
    provider.force_flush()
    provider.shutdown()
    if any(failed):
        raise PlatformError("the collector has not taken the spans", hint="is its URL right?")


def _nanos(at_s: float) -> int:
    return int(at_s * 1e9)
