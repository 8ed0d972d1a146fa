"""Metrics out of perdure, each through a library that may or may not be installed.

Prometheus by prometheus-client; experiment trackers have a module of their own (`trackers`). No
library is imported before it is asked for. One that is missing is named with the command that
installs it.
"""

import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from perdure.model.errors import PlatformError
from perdure.model.report import Snapshot
from perdure.telemetry.monitoring import RANKS_MAX, list_metrics

PACKAGES = {
    "prometheus-client": "a Prometheus endpoint",
    "tensorboard": "incidents and curves for TensorBoard",
    "wandb": "incidents and curves for Weights & Biases",
    "mlflow-skinny": "incidents and curves for MLflow",
    "nvidia-ml-py": "identity and health of GPUs",
}
"""What is optional, and what it is for."""
EXTRAS = {
    "prometheus-client": "'perdure[metrics]'",
    "tensorboard": "'perdure[tensorboard]'",
    "wandb": "'perdure[wandb]'",
    "mlflow-skinny": "'perdure[mlflow]'",
}
"""What installs it."""

_OPEN_MAX = 32
"""Connections to the Prometheus endpoint at a time. One more is closed."""
_READ_S = 5.0
"""Seconds for a request to come."""


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
