"""Where the supervisor gets a torchft job's lighthouse from: its own, the stock one, a URL."""

import asyncio
import time
from collections.abc import Mapping

import msgspec

from perdure.model.bus.lighthouse import Member
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.model.orders import ReplicaGroup
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import read_document

LIGHTHOUSE_URL = "PERDURE_LIGHTHOUSE"
"""Where agents, and by them ranks, find it."""
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


def needs_lighthouse(spec: JobSpec) -> bool:
    """Whether a lighthouse is a part of this job."""
    return spec.groups > 0 and spec.torchft.lighthouse in ("perdure", "stock")


async def find_torchft(
    spec: JobSpec, paths: JobPaths, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return what the agents of a torchft job find in their environment, once it is known.

    torchft's manager logs several lines a step unless it is asked not to.

    Raises:
        PlatformError: there is no lighthouse in time.
    """
    if not spec.groups:
        return {}
    url = await _wait_url(spec, paths)
    return {LIGHTHOUSE_URL: url, "RUST_LOG": environ.get("RUST_LOG", "warn")}


async def _wait_url(spec: JobSpec, paths: JobPaths) -> str:
    if not needs_lighthouse(spec):
        return spec.torchft.lighthouse
    deadline_s = time.monotonic() + _READY_S
    while (known := read_document(paths.lighthouse, LighthouseFile)) is None:
        if time.monotonic() > deadline_s:
            hint = f"see {paths.log('lighthouse')}"
            raise PlatformError(f"no lighthouse after {_READY_S:g} s", hint=hint)
        await asyncio.sleep(0.01)
    return f"http://127.0.0.1:{known.port}"
