"""A lease and a journal on a file system that several nodes share: the arbiter where there are two.

Everything rests on one act: link(2) gives a whole file a name, or says that the name is taken; of
two who want it, one gets it, over NFS too. Locks are not used: a server that restarts, or a cut
connection, loses them without a word. Neither are clocks of files.

A folder is opened anew at each look, upon which NFS asks its server whether it has changed. Should
a look be stale all the same, what follows from it is refused: it costs time and not safety.

A file system that is away may keep a call for ever, so calls are made in a thread of their own.
One that is given up may still be carried out later, like a message that was long under way.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from itertools import cycle
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol, TypeVar

from perdure.adapters.file_thread import FileThread
from perdure.files import create_file, replace_file, sync_path
from perdure.model.errors import FencedError, PlatformError

T = TypeVar("T")

_LEASE_ANSWER_S = 0.5
_JOURNAL_ANSWER_S = 5.0
_KEPT = 50
"""Revisions of the lease that are left: nobody lists a folder for as long as they last."""
_READERS = 16
"""Files read at a time, since over a network each costs a round trip."""
_BATCH = 1000
"""Files read within one time-out."""


class Numbers(Protocol):
    """Numbered contents. A number belongs to whoever claims it first."""

    async def claim(self, number: int, data: bytes) -> bool:
        """Return whether `number` holds `data`: because of this call, or of an earlier one.

        Raises:
            PlatformError: no answer; it may be claimed all the same, also later.
        """

    async def list_taken(self) -> list[int]:
        """Return the numbers that are taken, ascending.

        Raises:
            PlatformError: no answer.
        """

    async def read(self, numbers: Iterable[int]) -> list[bytes]:
        """Return their contents.

        Raises:
            PlatformError: no answer, or one of them is free.
        """

    async def replace(self, number: int, data: bytes) -> None:
        """Have `number` hold `data`; what it held is kept beside it.

        Raises:
            PlatformError: no answer; it may have been done all the same.
        """

    async def drop(self, numbers: Iterable[int]) -> None:
        """Free them, if they are taken.

        Raises:
            PlatformError: no answer.
        """


class NumberedFiles:
    """`Numbers` as files of one folder, each whole and closed before it has its name."""

    def __init__(self, folder: str, *, timeout_s: float, synced: bool) -> None:
        """Use `folder`, which must be there; with `synced` a claim outlives a power cut."""
        self.folder = Path(os.path.expandvars(folder))
        self._timeout_s, self._synced = timeout_s, synced
        self._threads = [FileThread() for _ in range(_READERS)]

    def close(self) -> None:
        """Let the threads end, each as soon as the file system returns from its last call."""
        for thread in self._threads:
            thread.close()

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await self._within(self._threads[0].call(function, *args))

    async def _within(self, calls: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await calls
        except TimeoutError:
            raise PlatformError(f"{self.folder} does not answer") from None
        except OSError as error:
            raise PlatformError(f"{self.folder}: {error.strerror or error}") from error

    async def claim(self, number: int, data: bytes) -> bool:
        """Return whether `number` holds `data`."""
        return await self._call(self.claim_now, number, data)

    def claim_now(self, number: int, data: bytes) -> bool:
        """Do it in the calling thread.

        Raises:
            OSError: the file system refuses.
        """
        path = self.folder / str(number)
        # By this very call it may be there, if the answer was lost and it was resent.
        return create_file(path, data, synced=self._synced) or path.read_bytes() == data

    async def list_taken(self) -> list[int]:
        """Return the numbers that are taken."""
        return await self._call(
            lambda: sorted(int(name) for name in os.listdir(self.folder) if name.isdigit())
        )

    async def read(self, numbers: Iterable[int]) -> list[bytes]:
        """Return their contents."""
        paths = [self.folder / str(number) for number in numbers]
        calls = [
            thread.call(path.read_bytes)
            for thread, path in zip(cycle(self._threads), paths, strict=False)
        ]
        return await self._within(asyncio.gather(*calls))

    async def replace(self, number: int, data: bytes) -> None:
        """Have `number` hold `data`; what it held is there as `NUMBER.damaged`."""
        path = self.folder / str(number)

        def put() -> None:
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                os.link(path, f"{path}.damaged")
            replace_file(path, data, synced=self._synced)
            sync_path(self.folder)

        await self._call(put)

    async def drop(self, numbers: Iterable[int]) -> None:
        """Free them."""
        paths = [self.folder / str(number) for number in numbers]

        def unlink() -> None:
            for path in paths:
                path.unlink(missing_ok=True)

        await self._call(unlink)


class FolderLease:
    """`LeaseRegister`: the highest number is the revision, and its content the holder."""

    def __init__(self, numbers: Numbers, *, kept: int = _KEPT) -> None:
        """Use `numbers`, of which the newest `kept` are left."""
        self._numbers, self._kept = numbers, kept

    async def read(self) -> tuple[int, str]:
        """Return revision and holder; (0, "") where nothing was ever written."""
        taken = await self._numbers.list_taken()
        if not taken:
            return 0, ""
        [data] = await self._numbers.read(taken[-1:])
        return taken[-1], data.decode().partition("\n")[0]

    async def write(self, holder: str, expected: int) -> int | None:
        """Return the new revision; None where the register does not hold `expected`."""
        revision = expected + 1
        data = f"{holder}\n{token_hex(8)}".encode()  # No two writes are alike.
        if not await self._numbers.claim(revision, data):
            return None
        taken = await self._numbers.list_taken()
        if taken[-1:] != [revision]:  # One that was dropped long ago, and is free since.
            await self._numbers.drop([revision])
            return None
        if taken[: -self._kept]:
            await self._numbers.drop(taken[: -self._kept])
        return revision


class FolderStream:
    """`JournalStream`: a message is a number that is never free again."""

    bytes_max = 8 << 20
    """Bytes of a message."""

    def __init__(self, numbers: Numbers) -> None:
        """Use `numbers`."""
        self._numbers = numbers

    async def read_all(self, *, first: int = 1) -> list[bytes]:
        """Return every message from number `first` on, oldest first."""
        return [message async for message in self.read(first=first)]

    async def read(self, *, first: int = 1) -> AsyncIterator[bytes]:
        """Yield every message from number `first` on, oldest first."""
        taken = [number for number in await self._numbers.list_taken() if number >= first]
        next_number = first
        for start in range(0, len(taken), _BATCH):
            numbers = taken[start : start + _BATCH]
            held = dict(zip(numbers, await self._numbers.read(numbers), strict=True))
            for number in range(next_number, numbers[-1] + 1):
                if number not in held:
                    with contextlib.suppress(PlatformError):  # Gone, or missed by a stale look.
                        [held[number]] = await self._numbers.read([number])
                yield held.get(number, b"").partition(b"\n")[2]
            next_number = numbers[-1] + 1

    async def mend(self, messages: list[bytes]) -> int:
        """Have each number hold its message; return the last number.

        A number that is taken stays so meanwhile: nobody's late claim of it fits.
        """
        held = await self.read_all()
        for number, data in enumerate(messages, 1):
            before = held[number - 1] if number <= len(held) else b""
            if before and before != data:
                await self._numbers.replace(number, b"mended\n" + data)
            elif not before and not await self._numbers.claim(number, b"mended\n" + data):
                raise PlatformError(f"the journal's message {number} is there after all")
        return len(messages)

    async def read_last(self) -> bytes | None:
        """Return the newest message; None where there is none."""
        taken = await self._numbers.list_taken()
        found = await self._numbers.read(taken[-1:]) if taken else []
        return found[0].partition(b"\n")[2] if found else None

    async def append(self, data: bytes, *, expected_last: int, message_id: str) -> int:
        """Return the number of the message once it is on disk.

        Raises:
            FencedError: its number is another's.
            PlatformError: no answer; it may be on disk all the same.
        """
        number = expected_last + 1
        if await self._numbers.claim(number, message_id.encode() + b"\n" + data):
            return number
        raise FencedError(
            f"another controller writes this journal: its message {number} is there",
            hint="only one controller a job; this one leaves",
        )


@contextlib.contextmanager
def open_lease(folder: str) -> Iterator[FolderLease]:
    """Give the lease in the run's `folder`. It need not outlive a power cut: nobody acts then."""
    files = NumberedFiles(f"{folder}/lease", timeout_s=_LEASE_ANSWER_S, synced=False)
    with contextlib.closing(files):
        yield FolderLease(files)


@contextlib.contextmanager
def open_journal(folder: str) -> Iterator[FolderStream]:
    """Give the journal in the run's `folder`."""
    files = NumberedFiles(f"{folder}/journal", timeout_s=_JOURNAL_ANSWER_S, synced=True)
    with contextlib.closing(files):
        yield FolderStream(files)


def make_run_folder(base: str, name: str) -> str:
    """Make the folder `name` of one run below `base`, and make sure that it can be an arbiter.

    `base` has to be there: one that was made where a mount is missing would be each node's own.

    Raises:
        PlatformError: it is not there, cannot be written, or gives one name to two files.
    """
    folder = os.path.join(base, name)
    real = os.path.expandvars(folder)
    try:
        os.mkdir(real, 0o700)
        for part in ("lease", "journal", "trial"):
            os.mkdir(os.path.join(real, part), 0o700)
        trial = NumberedFiles(f"{real}/trial", timeout_s=0, synced=True)
        if not trial.claim_now(1, b"one") or trial.claim_now(1, b"two"):
            raise PlatformError(f"{base} gives a name to two files: it cannot be an arbiter")
    except OSError as error:
        raise PlatformError(
            f"cannot use {base} as arbiter: {error.strerror}",
            hint="a folder that is there on all nodes, on a file system with hard links (NFS)",
        ) from error
    return folder
