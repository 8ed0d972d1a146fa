"""How long an append to the journal takes while a subscriber of it is stuck."""

import asyncio
import tempfile
from pathlib import Path

from bench.gates.gate import Gate
from tests.contract.test_roles import Site, append_beside_a_stuck_one


def measure_append() -> float:
    """Return the seconds of the slowest of 120 appends of 500 kB."""

    async def run(site: Site) -> float:
        try:
            return await append_beside_a_stuck_one(site)
        finally:
            await site.close()

    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        try:
            site.start()
            return asyncio.run(run(site))
        finally:
            site.kill()


GATES = (Gate("append-beside-stuck", "s", bound=1.5, measure=measure_append),)
