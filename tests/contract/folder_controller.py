"""A controller's part in the arbiter and nothing else: the lease, and a journal of ticks.

It adds a byte to the file TURNS in every turn of its loop, so that a test knows that it goes on.

usage: folder_controller FOLDER NAME TURNS
"""

import asyncio
import contextlib
import sys

from perdure.adapters.shared_folder import open_journal, open_lease
from perdure.model.errors import FencedError, PlatformError
from perdure.service.controller.leading import LeaseLoop

LEASE_S = 0.6


async def count_turns(turns: str) -> None:
    """Say for ever that this process runs."""
    with open(turns, "ab", buffering=0) as file:  # noqa: ASYNC230
        while True:
            file.write(b".")
            await asyncio.sleep(0.02)


async def act(folder: str, name: str, turns: str) -> None:
    """Wait for the lease; then append its term again and again, until it may not."""
    with open_lease(folder) as register, open_journal(folder) as journal:
        loop = LeaseLoop(register, name, LEASE_S)
        running = asyncio.create_task(loop.run())
        turning = asyncio.create_task(count_turns(turns))
        await loop.won.wait()
        lines = await journal.read_all()
        if lines and int(lines[-1].split()[0]) >= loop.lease.term:
            raise FencedError("the journal is in a later term")
        number = len(lines)
        line = f"{loop.lease.term} {name}".encode()
        while True:
            loop.check()
            with contextlib.suppress(PlatformError):  # Then once more, as the journal does.
                id_ = f"{name}-{number}"
                number = await journal.append(line, expected_last=number, message_id=id_)
            await asyncio.sleep(0.02)
            assert not running.done() or loop.over.is_set()
            assert not turning.done()


def main(folder: str, name: str, turns: str) -> None:
    """Begin anew, as another one, wherever it was fenced off."""
    for life in range(1000):
        try:
            asyncio.run(act(folder, f"{name}.{life}", turns))
        except (FencedError, PlatformError):
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
