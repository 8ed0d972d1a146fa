"""Metrics out of perdure, each through a library that may or may not be installed.

Prometheus by prometheus-client, traces by opentelemetry-sdk, curves by tensorboard and wandb. None
is imported before it is asked for, and what is missing is said with the command that installs it.
"""

import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from perdure.model.errors import ConfigError, PlatformError
from perdure.model.platforms.traps import Check
from perdure.model.report import Snapshot
from perdure.telemetry.monitoring import RANKS_MAX, IncidentSpan, list_metrics

PACKAGES = {
    "prometheus-client": "a Prometheus endpoint",
    "opentelemetry-sdk": "traces of incidents",
    "tensorboard": "curves of `run.log` for TensorBoard",
    "wandb": "curves of `run.log` for Weights & Biases",
    "nvidia-ml-py": "identity and health of GPUs",
}
"""What is optional, and what it is for."""

Row = tuple[int, dict[str, float], float]
"""Step, values, job time."""


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


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise PlatformError(
            f"{package} is not installed: it is needed for {PACKAGES[package]}",
            hint=f"pip install {package} (or 'perdure[metrics]')",
        ) from None


# --- Prometheus -------------------------------------------------------------------------------


class _Collector:
    """Makes the metrics of the newest snapshot when they are asked for."""

    def __init__(self, look: Callable[[], Snapshot | None], ranks_max: int) -> None:
        self._look, self._ranks_max = look, ranks_max
        self._families = _load("prometheus_client.core", "prometheus-client")

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
    registry = _load("prometheus_client", "prometheus-client").CollectorRegistry()
    registry.register(_Collector(look, ranks_max))
    return registry


def render_prometheus(snapshot: Snapshot, ranks_max: int = RANKS_MAX) -> str:
    """Return `snapshot` in Prometheus' text format.

    Raises:
        PlatformError: prometheus-client is not installed.
    """
    prometheus = _load("prometheus_client", "prometheus-client")
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
        prometheus = _load("prometheus_client", "prometheus-client")
        registry = _make_registry(look, ranks_max)
        try:
            self._server, self._thread = prometheus.start_http_server(port, host, registry)
        except OSError as error:
            raise PlatformError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}", hint="another --port"
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


# --- OpenTelemetry ----------------------------------------------------------------------------


def make_otlp_exporter(url: str) -> Any:
    """Return an exporter to an OpenTelemetry collector, over HTTP.

    Raises:
        PlatformError: it is not installed.
    """
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    endpoint = url if url.rstrip("/").endswith("/v1/traces") else url.rstrip("/") + "/v1/traces"
    return _load(name, "opentelemetry-sdk").OTLPSpanExporter(endpoint=endpoint, timeout=10)


def export_spans(spans: Sequence[IncidentSpan], key: str, exporter: Any) -> None:
    """Export `spans`; ids follow from `key` and the incident, so a second time changes nothing.

    Raises:
        PlatformError: opentelemetry-sdk is not installed, or nobody takes the spans.
    """
    trace = _load("opentelemetry.sdk.trace", "opentelemetry-sdk")
    export = _load("opentelemetry.sdk.trace.export", "opentelemetry-sdk")
    ids: list[int] = []

    generator: Any = trace.id_generator.IdGenerator

    class _Ids(generator):  # type: ignore[misc]
        def generate_trace_id(self) -> int:
            return ids[0]

        def generate_span_id(self) -> int:
            ids[1] += 1
            return ids[1]

    resource = _load("opentelemetry.sdk.resources", "opentelemetry-sdk").Resource.create(
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
    api = _load("opentelemetry.trace", "opentelemetry-sdk")
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


# --- curves -----------------------------------------------------------------------------------


def write_tensorboard(folder: str, rows: Iterable[Row]) -> int:
    """Write rows of `run.log` as events for TensorBoard; return how many.

    Raises:
        PlatformError: tensorboard is not installed, or the folder cannot be written.
    """
    event_pb2 = _load("tensorboard.compat.proto.event_pb2", "tensorboard")
    summary_pb2 = _load("tensorboard.compat.proto.summary_pb2", "tensorboard")
    files = _load("tensorboard.summary.writer.event_file_writer", "tensorboard")
    count = 0
    try:
        writer = files.EventFileWriter(folder)
        for step, values, at_s in rows:
            parts = [
                summary_pb2.Summary.Value(tag=name, simple_value=value)
                for name, value in sorted(values.items())
            ]
            summary = summary_pb2.Summary(value=parts)
            writer.add_event(event_pb2.Event(wall_time=at_s, step=step, summary=summary))
            count += 1
        writer.close()
    except OSError as error:
        raise PlatformError(
            f"cannot write {folder}: {error.strerror}", hint="another folder"
        ) from (error)
    return count


def write_wandb(project: str, name: str, folder: str, rows: Iterable[Row]) -> int:
    """Write rows of `run.log` as a run of Weights & Biases; return how many.

    Offline unless WANDB_MODE says otherwise: `wandb sync` sends them later.

    Raises:
        PlatformError: wandb is not installed.
        ConfigError: it does not want the run.
    """
    wandb = _load("wandb", "wandb")
    mode = os.environ.get("WANDB_MODE", "offline")
    os.makedirs(folder, exist_ok=True)
    try:
        run = wandb.init(
            project=project, name=name, dir=folder, mode=mode, settings=wandb.Settings(silent=True)
        )
        count = 0
        for step, values, _ in rows:
            run.log(values, step=step)
            count += 1
        run.finish()
    except wandb.Error as error:
        raise ConfigError(f"wandb: {error}", hint="WANDB_MODE=offline needs no account") from error
    return count
