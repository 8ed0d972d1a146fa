"""The parts of which a job has several, or only some jobs have one: nats-servers, lighthouses.

Where no node may stop a job's decisions it has several servers and controllers. A part of a node is
named after it: `nats-server 1`, `controller 1`. Where there is one of each, which no node owns, it
is `nats-server` and `controller`. A torchft job's lighthouse is its own, the stock one, or a URL.
"""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping

import msgspec

from perdure.launch.environment import LIGHTHOUSE_URL
from perdure.model.bus.lighthouse import Member
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.model.orders import ReplicaGroup
from perdure.model.paths import JobPaths
from perdure.model.platforms.slurm import read_allocation
from perdure.service.jobfiles import Parts, read_document
from perdure.service.processes import Child

_CLOSE_S = 3.0


def list_parts(kind: str, spec: JobSpec) -> list[str]:
    """Return the names of the parts of one kind: `nats-server` or `controller`."""
    if spec.bus.replicas == 1:
        return [kind]
    return [f"{kind} {node}" for node in range(spec.bus.replicas)]


def list_servers(children: Iterable[Child]) -> list[Child]:
    """Return the nats-servers."""
    return [child for child in children if child.part.startswith("nats-server")]


def end_standbys(children: Iterable[Child]) -> None:
    """End the controllers that still wait, once the job has ended."""
    for child in children:
        if child.part.startswith("controller") and child.pidfd >= 0:
            child.kill()


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

    def pid_of(kind: str) -> int:
        child = children.get(kind) or children.get(f"{kind} 0")
        return child.pid if child else 0

    return Parts(
        started_s=started_s,
        run=os.getpid(),
        nats=pid_of("nats-server"),
        controller=pid_of("controller"),
        agents={
            int(part.split()[1]): child.pid
            for part, child in children.items()
            if part.startswith("agent")
        },
        slurm=read_allocation(os.environ),
        host=socket.gethostname(),
    )


_READY_S = 20.0


class LighthouseFile(msgspec.Struct, frozen=True):
    """`lighthouse.json`: what the next lighthouse has to know."""

    port: int
    ids_until: int = 0
    quorum_id: int = 0
    members: tuple[Member, ...] = ()
    homes: dict[str, tuple[int, int]] = {}
    """Member -> its group, and the generation of its processes."""
    groups: tuple[ReplicaGroup, ...] = ()
    """The controller's newest word on who is held, so that no spare slips in meanwhile."""
    silences: tuple[float, ...] = ()
    """How long members were late so far, seconds: what is patience for."""


async def read_torchft_variables(
    spec: JobSpec, paths: JobPaths, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return what the agents of a torchft job find in their environment, once it is known.

    torchft's manager logs several lines a step unless it is asked not to.

    Raises:
        PlatformError: there is no lighthouse in time.
    """
    if spec.lighthouse is None:
        return {}
    url = spec.lighthouse.url or await _wait_url(paths)
    return {LIGHTHOUSE_URL: url, "RUST_LOG": environ.get("RUST_LOG", "warn")}


async def _wait_url(paths: JobPaths) -> str:
    deadline_s = time.monotonic() + _READY_S
    while (known := read_document(paths.lighthouse, LighthouseFile)) is None:
        if time.monotonic() > deadline_s:
            hint = f"see {paths.log('lighthouse')}"
            raise PlatformError(f"no lighthouse after {_READY_S:g} s", hint=hint)
        await asyncio.sleep(0.01)
    return f"http://127.0.0.1:{known.port}"
