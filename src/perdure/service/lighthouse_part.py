"""Where the supervisor gets a torchft job's lighthouse from: its own, the stock one, a URL."""

import asyncio
import time

import msgspec

from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.model.lighthouse import Member
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


def needs_lighthouse(spec: JobSpec) -> bool:
    """Whether a lighthouse is a part of this job."""
    return spec.torchft.replicas > 0 and spec.torchft.lighthouse in ("perdure", "stock")


async def wait_lighthouse(spec: JobSpec, paths: JobPaths) -> str:
    """Return the URL of the job's lighthouse, once it has one; empty where none is wanted.

    Raises:
        PlatformError: it is not there in time.
    """
    if not spec.torchft.replicas:
        return ""
    if not needs_lighthouse(spec):
        return spec.torchft.lighthouse
    deadline_s = time.monotonic() + _READY_S
    while (known := read_document(paths.lighthouse, LighthouseFile)) is None:
        if time.monotonic() > deadline_s:
            hint = f"see {paths.log('lighthouse')}"
            raise PlatformError(f"no lighthouse after {_READY_S:g} s", hint=hint)
        await asyncio.sleep(0.01)
    return f"http://127.0.0.1:{known.port}"
