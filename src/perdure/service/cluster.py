"""The parts of which a job has several where no node may stop its decisions.

A part of a node is named after it: `nats-server 1`, `controller 1`. Where there is one of each,
which no node owns, it is `nats-server` and `controller`.
"""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping

from perdure.model.job import JobSpec
from perdure.model.platforms.slurm import read_allocation
from perdure.service.jobfiles import Parts
from perdure.service.processes import Child

_CLOSE_S = 3.0


def list_parts(kind: str, spec: JobSpec) -> list[str]:
    """Return the names of the parts of one kind: `nats-server` or `controller`."""
    if spec.bus.replicas == 1:
        return [kind]
    return [f"{kind} {node}" for node in range(spec.bus.replicas)]


def find_servers(children: Iterable[Child]) -> list[Child]:
    """Return the nats-servers."""
    return [child for child in children if child.part.startswith("nats-server")]


def end_standbys(children: Iterable[Child]) -> None:
    """End the controllers that still wait, once the job has ended."""
    for child in children:
        if child.part.startswith("controller") and child.pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)


def end_servers(servers: Iterable[Child]) -> None:
    """Let each close its store, all at the same time; kill those that do not."""
    servers = list(servers)
    for server in servers:
        server.process.terminate()
    for server in servers:
        try:
            server.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            server.process.kill()


def make_parts(children: Mapping[str, Child], started_s: float) -> Parts:
    """Return who runs the job now."""

    def find(kind: str) -> int:
        child = children.get(kind) or children.get(f"{kind} 0")
        return child.pid if child else 0

    return Parts(
        started_s=started_s,
        run=os.getpid(),
        nats=find("nats-server"),
        controller=find("controller"),
        agents={
            int(part.split()[1]): child.pid
            for part, child in children.items()
            if part.startswith("agent")
        },
        slurm=read_allocation(os.environ),
        host=socket.gethostname(),
    )
