"""The controller's process: what it is told by its environment, and how it ends.

It leaves with 0 once `JobEnded` is in the journal, and on SIGTERM; whoever kills it in between
loses nothing. When `perdure run` itself is gone it ends the job, since nobody is left to clean up.
"""

import contextlib
import itertools
import logging
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Iterator
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
from perdure.service.controller.leading import lead, open_stream, run_while
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
from perdure.service.processes import find_by_argument, find_marked
from perdure.telemetry.outcome import RUN_LOST

log = logging.getLogger("perdure.controller")

_FLUSH_S = 5.0
"""Given to the last alerts, once the job has ended."""


def main(job: str, node: int = 0) -> int:
    """Run the controller of `job` as a process, on `node`; return its exit code."""
    return run_part(_main(job, node), log, "; the journal has everything")


async def _main(job: str, node: int) -> None:
    paths = paths_of(resolve_home(), job)
    spec, endpoint = load_spec(paths), load_endpoint(paths, "controller")
    parts = load_parts(paths)
    offset_s = endpoint.clock_offset_s
    incarnation = f"c{node}-{os.getpid()}-{token_hex(3)}"
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

    async with contextlib.AsyncExitStack() as stack:
        name = f"perdure controller {job}"
        bus = await NatsBus.connect(endpoint, name=name, near=node)
        stack.push_async_callback(bus.close)
        folders = _list_folders(spec, paths)
        turns = itertools.cycle((*folders[node:], *folders[:node]))
        stream = await stack.enter_async_context(
            open_stream(spec, bus, lambda: _start_anew(next(turns)))
        )
        lease = await stack.enter_async_context(lead(spec, paths, bus, incarnation, node))
        alerter = Alerter(job, spec.alerts)
        service = ControllerService(
            spec,
            bus,
            Journal(
                stream,
                writer=incarnation,
                mirror=Mirror(paths.journal, shared=spec.contested),
                on_stuck=(lambda: restart_server(spec, paths, stream))
                if isinstance(stream, NatsStream)
                else None,
            ),
            clock=lambda: time.monotonic() + offset_s,
            incarnation=incarnation,
            submitted_s=parts.started_s if parts else time.monotonic() + offset_s,
            show=show,
            note=alerter.note,
            snapshots=SnapshotFiles(paths.snapshots),
            curves=CurveFiles(paths.curves, incarnation),
            show_newest=show_newest,
            term=lease.lease.term if lease else 0,
            check=lease.check if lease else lambda: None,
            known_seq=before.seq if before is not None else 0,
        )
        service.inbox.admit = lambda node: read_admission(spec, paths, node)
        for args in read_document(paths.invited, list[dict[str, Any]]) or ():
            who = "the run before" if "machines" in args else "perdure run"
            service.command(Command(id=f"invite-{args['id']}", kind="invite", args=args, who=who))
        async with _reach_out(spec, paths, service, alerter):
            gone = partial(_end_job, service)
            with _serve_metrics(spec, newest), watch_process(read_run_pid(), gone):
                ended = await run_while(lease, service.run())
    _end_orphans(spec, paths)
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
                config.ranks_max,
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


async def restart_server(spec: JobSpec, paths: JobPaths, stream: NatsStream) -> None:
    """Have the supervisor start nats-server anew, which refuses to write since its disk was full.

    Nothing is lost: what it has acknowledged is on disk, and all clients reconnect. Of several it
    is the one that leads the journal, if it is on this machine: its disk may hang, while the others
    renew the lease. Where these cannot write either, the lease is over, and this process fenced,
    before anybody comes here: the next one cannot open the journal (`_start_anew`).
    """
    folders = _list_folders(spec, paths)
    leader = await stream.read_leader() if len(folders) > 1 else ""
    for folder in folders:
        if len(folders) == 1 or leader == f"perdure-{spec.name}-{os.path.basename(folder)}":
            _start_anew(folder)


def _start_anew(folder: str) -> None:
    """Have the supervisor start a server anew which does not keep the journal any more.

    While no controller can open the journal all take turns, one at a time: a majority is enough.
    """
    log.error("the journal is stuck: the server of %s is started anew, if it is here", folder)
    _end_servers([folder])


def _list_folders(spec: JobSpec, paths: JobPaths) -> list[str]:
    """Return the folder of each of the job's own nats-servers."""
    if spec.bus.replicas == 1:
        return [paths.nats]
    return [os.path.join(paths.nats, str(node)) for node in range(spec.bus.replicas)]


def _end_orphans(spec: JobSpec, paths: JobPaths) -> None:
    """End what watches nobody if our parent is gone, whoever may still have to reap that one.

    Those are the nats-servers; and before them the controllers that stand by, which would wait for
    the lease of a job without a server.
    """
    run_pid = read_run_pid()
    if not run_pid or read_state(run_pid) not in "XZ":
        return
    for pid in set(find_marked(spec.name, resolve_home())) & set(find_by_argument("controller")):
        send_signal(pid, signal.SIGKILL)
    _end_servers(_list_folders(spec, paths))


def _end_servers(folders: Iterable[str]) -> None:
    """End the job's own nats-servers, found by argument: a full disk makes pids in files old."""
    for folder in folders:
        for pid in find_by_argument(server_config(folder)):
            send_signal(pid, signal.SIGTERM)
