"""The controller's process: what it is told by its environment, and how it ends.

It leaves with 0 once `JobEnded` is in the journal, and on SIGTERM; whoever kills it in between
loses nothing. When `perdure run` itself is gone it ends the job, since nobody is left to clean up.
"""

import asyncio
import contextlib
import logging
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from secrets import token_hex
from typing import Any

from perdure.adapters.exporters import PrometheusServer
from perdure.adapters.host import read_state, send_signal
from perdure.adapters.nats import NatsBus, NatsStream, server_config
from perdure.model.bus.wire import Command
from perdure.model.errors import PlatformError
from perdure.model.events import Newest
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.model.report import Snapshot
from perdure.service.access.credentials import is_loopback, make_token
from perdure.service.access.joining import read_admission
from perdure.service.controller.alerts import Alerter
from perdure.service.controller.journal import Journal, Mirror
from perdure.service.controller.loop import ControllerService
from perdure.service.controller.pod_watch import open_watch
from perdure.service.controller.snapshots import SnapshotFiles
from perdure.service.controller.tracking import Trackers
from perdure.service.controller.webhook import Webhook
from perdure.service.curves import CurveFiles
from perdure.service.jobfiles import (
    load_endpoint,
    load_parts,
    load_snapshot,
    load_spec,
    read_document,
    write_document,
)
from perdure.service.jobfolders import paths_of, resolve_home
from perdure.service.part import Tasks, read_run_pid, run_part, watch_process
from perdure.service.ports import STUCK_S
from perdure.service.processes import find_by_argument
from perdure.telemetry.outcome import RUN_LOST

log = logging.getLogger("perdure.controller")

_RETRY_S = 0.1
_FLUSH_S = 5.0
"""Given to the last alerts, once the job has ended."""


def main(job: str) -> int:
    """Run the controller of `job` as a process; return its exit code."""
    return run_part(_main(job), log, "; the journal has everything")


async def _main(job: str) -> None:
    paths = paths_of(resolve_home(), job)
    spec, endpoint = load_spec(paths), load_endpoint(paths, "controller")
    parts = load_parts(paths)
    offset_s = endpoint.clock_offset_s
    incarnation = f"c{os.getpid()}-{token_hex(3)}"
    newest: list[Snapshot] = []
    before = load_snapshot(paths)

    def show(snapshot: Snapshot) -> None:
        newest[:] = [snapshot]
        try:
            write_document(paths.snapshot, snapshot)
        except PlatformError as error:
            log.warning("%s", error)

    def show_newest(newest: Newest) -> None:
        try:
            write_document(paths.newest, newest)
        except PlatformError as error:
            log.warning("%s", error)

    bus = await NatsBus.connect(endpoint, name=f"perdure controller {job}")
    try:
        stream = await _open_stream(bus, job, lambda: restart_server(paths))
        alerter = Alerter(job, spec.alerts)
        service = ControllerService(
            spec,
            bus,
            Journal(
                stream,
                writer=incarnation,
                mirror=Mirror(paths.journal),
                on_stuck=lambda: restart_server(paths),
            ),
            clock=lambda: time.monotonic() + offset_s,
            incarnation=incarnation,
            submitted_s=parts.started_s if parts else time.monotonic() + offset_s,
            show=show,
            note=alerter.note,
            snapshots=SnapshotFiles(paths.snapshots),
            curves=CurveFiles(paths.curves, incarnation),
            show_newest=show_newest,
            known_seq=before.seq if before is not None else 0,
        )
        service.inbox.admit = lambda node: read_admission(spec, paths, node)
        for args in read_document(paths.invited, list[dict[str, Any]]) or ():
            who = "the run before" if "machines" in args else "perdure run"
            service.command(Command(id=f"invite-{args['id']}", kind="invite", args=args, who=who))
        async with _reach_out(spec, paths, service, alerter):
            gone = partial(_end_job, service)
            with _serve_metrics(spec, newest), watch_process(read_run_pid(), gone):
                ended = await service.run()
    finally:
        await bus.close()
    _end_orphans(paths)
    log.info("the job has ended: %s, %s", ended.status, ended.reason)


@contextlib.asynccontextmanager
async def _reach_out(
    spec: JobSpec, paths: JobPaths, service: ControllerService, alerter: Alerter
) -> AsyncIterator[None]:
    """Serve the webhook, watch pods, alert and tell trackers; none can end the controller."""
    tasks, trackers = Tasks(), Trackers(spec, paths)
    trackers.start()
    if alerter.wanted:
        tasks.spawn(alerter.run())
    if (pods := open_watch(service.command)) is not None:
        tasks.spawn(pods.run())
    config = spec.notify
    if config.webhook_port:
        try:
            token = make_token(config.webhook_token_file or paths.webhook_token)
            tls = None
            if not is_loopback(config.webhook_host):
                tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                tls.load_cert_chain(spec.nats.tls_cert, spec.nats.tls_key)
            host, port = config.webhook_host, config.webhook_port
            tasks.spawn(Webhook(service.inbox, host, port, token, tls=tls).run())
        except (PlatformError, OSError) as error:
            log.error("no webhook: %s", error)
    try:
        yield
        if alerter.wanted:
            await alerter.flush(_FLUSH_S)
        await trackers.finish()
    finally:
        await trackers.end()
        await tasks.end()


@contextlib.contextmanager
def _serve_metrics(spec: JobSpec, newest: list[Snapshot]) -> Iterator[None]:
    """Serve the newest picture's figures meanwhile, if the job wants it."""
    server, config = None, spec.metrics
    if config.prometheus_port:
        try:
            server = PrometheusServer(
                lambda: newest[0] if newest else None,
                config.prometheus_host,
                config.prometheus_port,
            )
        except PlatformError as error:
            log.error("no metrics: %s (%s)", error.message, error.hint)
    try:
        yield
    finally:
        if server is not None:
            server.close()


def _end_job(service: ControllerService) -> None:
    """End the job, as `perdure run` is gone: nobody is left to show it, or to clean up."""
    run_pid = read_run_pid()
    log.error("`perdure run` (pid %d) is gone: ending the job", run_pid)
    service.command(Command(id=f"run-{run_pid}-gone", kind="kill", who=RUN_LOST))


async def _open_stream(bus: NatsBus, job: str, on_stuck: Callable[[], object]) -> NatsStream:
    """Return the journal's stream, made where it is not there, however long that takes.

    `on_stuck` is called every `STUCK_S` meanwhile.
    """
    stuck_at_s = time.monotonic() + STUCK_S
    while True:
        try:
            return await NatsStream.open(bus, job)
        except PlatformError as error:
            log.warning("%s; trying again", error)
            if time.monotonic() > stuck_at_s:
                stuck_at_s = time.monotonic() + STUCK_S
                on_stuck()
            await asyncio.sleep(_RETRY_S)


def restart_server(paths: JobPaths) -> None:
    """End the job's nats-server, which refuses to write since its disk was full.

    The supervisor starts it again. Nothing is lost: what it has acknowledged is on disk, and all
    clients reconnect.
    """
    log.error(
        "journal writes are stuck: restarting the nats-server of %s, if it is here", paths.nats
    )
    _end_server(paths)


def _end_orphans(paths: JobPaths) -> None:
    """End the nats-server, which watches nobody, if our parent is gone."""
    run_pid = read_run_pid()
    if run_pid and read_state(run_pid) in "XZ":
        _end_server(paths)


def _end_server(paths: JobPaths) -> None:
    """End the job's own nats-server, found by argument: a full disk makes pids in files old."""
    for pid in find_by_argument(server_config(paths.nats)):
        send_signal(pid, signal.SIGTERM)
