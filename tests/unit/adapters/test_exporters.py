"""Each exporter against the library that it is for."""

import contextlib
import socket
import threading
import urllib.request

import pytest
from tests.waiting import PATIENCE_S, wait_until

from perdure.adapters import exporters
from perdure.adapters.exporters import (
    PrometheusServer,
    render_prometheus,
)
from perdure.model.errors import PlatformError
from perdure.model.report import RankRow, Snapshot

SNAPSHOT = Snapshot(
    1, 'j"x', "running", 9.0, 0.0, 1, 2, 120, 8.0, 1, "resumable", "r",
    ranks=(RankRow(0, 0, 1, "running", "step", 120, 8.0, "", 1.5, 7),),
)  # fmt: skip


def test_prometheus_reads_what_is_served():
    parser = pytest.importorskip("prometheus_client.parser")
    server = PrometheusServer(lambda: SNAPSHOT, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{server.port}/metrics", timeout=PATIENCE_S
        ) as page:
            text = page.read().decode()
        with pytest.raises(PlatformError, match="cannot serve"):
            PrometheusServer(lambda: SNAPSHOT, "127.0.0.1", server.port)
    finally:
        server.close()
    families = {f.name: f for f in parser.text_string_to_metric_families(text)}
    (step,) = families["perdure_step"].samples
    assert (step.labels, step.value) == ({"job": 'j"x'}, 120.0)
    assert families["perdure_restarts"].type == "counter"
    assert text == render_prometheus(SNAPSHOT)


def test_idle_connections_neither_fill_process_or_log_nor_keep_prometheus_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(exporters, "_READ_S", 0.5)
    before = threading.active_count()
    server = PrometheusServer(lambda: SNAPSHOT, "127.0.0.1", 0)
    held = []
    try:
        for _ in range(2 * exporters._OPEN_MAX):
            held.append(socket.create_connection(("127.0.0.1", server.port), PATIENCE_S))
            assert threading.active_count() <= before + exporters._OPEN_MAX + 1

        def read() -> bool:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(
                    f"http://127.0.0.1:{server.port}/metrics", timeout=PATIENCE_S
                ) as page,
            ):
                return b"perdure_step" in page.read()
            return False

        wait_until(read, "metrics")
    finally:
        for sock in held:
            sock.close()
        server.close()
    assert capsys.readouterr().err == ""


def test_what_is_missing_is_said(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(exporters.importlib, "import_module", missing)
    with pytest.raises(PlatformError, match="prometheus-client is not installed") as caught:
        render_prometheus(SNAPSHOT)
    assert "pip install" in caught.value.hint
