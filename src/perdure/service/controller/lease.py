"""The loop around `control/lease.py`: one request to the register at a time, and its answer back.

Where this process may act no more it says so by `over`; whoever acts looks at `check` before each
thing that it does, and is cancelled besides.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol, assert_never

from perdure.control.lease import (
    Fact,
    Lease,
    LeaseDue,
    LeaseRead,
    LeaseRefused,
    LeaseTimes,
    LeaseUnanswered,
    LeaseWritten,
    ReadLease,
    Request,
    StandDown,
    TakeOver,
    WriteLease,
)
from perdure.model.errors import FencedError, PlatformError

log = logging.getLogger("perdure.controller")


class LeaseRegister(Protocol):
    """One value with a revision that only grows, and a write that names the one it replaces."""

    async def read(self) -> tuple[int, str]:
        """Return revision and value; (0, "") where nothing was ever written.

        Raises:
            PlatformError: no answer.
        """
        ...

    async def write(self, holder: str, expected: int) -> int | None:
        """Return the new revision; None where the register does not hold `expected`.

        Raises:
            PlatformError: no answer; it may have been written all the same.
        """
        ...


def make_times(lease_s: float) -> LeaseTimes:
    """Return the times that follow from how long a lease holds."""
    return LeaseTimes(ttl_s=lease_s, renew_s=lease_s / 4, margin_s=lease_s / 5)


class LeaseLoop:
    """One process's side of the lease; `run` is its life."""

    def __init__(
        self,
        register: LeaseRegister,
        me: str,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take part as `me`."""
        self._register, self._clock = register, clock
        self.lease = Lease(me=me, times=make_times(lease_s))
        self.won = asyncio.Event()
        self.over = asyncio.Event()
        self.reason = ""
        self._missing = False

    def check(self) -> None:
        """Return if this process may act at this moment.

        Raises:
            FencedError: it may not, and never may again.
        """
        if not self.lease.may_act(self._clock()):
            raise FencedError(
                self.reason or "the lease was not renewed in time",
                hint="another controller goes on",
            )

    async def run(self) -> None:
        """Take part until this process may act no more."""
        fact: Fact = LeaseDue()
        while not self.over.is_set():
            requests = self.lease.handle(self._clock(), fact)
            fact = LeaseDue()
            for request in requests:
                answer = await self._carry_out(request)
                fact = fact if answer is None else answer
            if isinstance(fact, LeaseDue):
                due_s = self.lease.next_deadline()
                await asyncio.sleep(max(0.0, (due_s or 0.0) - self._clock()))

    async def give_back(self) -> None:
        """Let another one begin at once; this process acts no more."""
        revision, self.lease.state = self.lease.revision, "fenced"
        if revision > 0:
            try:
                await self._register.write("", revision)
            except PlatformError as error:
                log.warning("the lease is not given back: %s", error)

    def _miss(self, error: PlatformError) -> Fact:
        if not self._missing:
            log.warning("%s; trying again", error)
        self._missing = True
        return LeaseUnanswered()

    async def _carry_out(self, request: Request) -> Fact | None:
        match request:
            case ReadLease():
                try:
                    revision, holder = await self._register.read()
                except PlatformError as error:
                    return self._miss(error)
                self._missing = False
                return LeaseRead(revision=revision, holder=holder)
            case WriteLease(expected=expected):
                try:
                    written = await self._register.write(self.lease.me, expected)
                except PlatformError as error:
                    return self._miss(error)
                self._missing = False
                return LeaseRefused() if written is None else LeaseWritten(revision=written)
            case TakeOver(term=term):
                log.info("holds the lease, in term %d", term)
                self.won.set()
            case StandDown(reason=reason):
                log.error("acts no more: %s", reason)
                self.reason = reason
                self.over.set()
            case _:
                assert_never(request)
        return None
