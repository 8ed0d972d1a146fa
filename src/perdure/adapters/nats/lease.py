"""The lease's register in JetStream's key-value store, and how a lost leader is replaced at once.

A stream of three replicas has a leader. When its server dies the others wait 4 to 9 s (constants
of nats-server, not settings) before they elect another, and nothing can be written meanwhile.
`ElectionWatch` shortens that: a request for votes in a higher term makes each replica that knows
more than the asker stand for election within 0.1 to 0.8 s. Raft is safe against such a request at
any time, since a replica that was cut off sends one when it comes back. It is sent where a
majority of the replicas answers and none says that it leads, twice in a row. Should a server not
know the message, nothing happens but the wait.
"""

import asyncio
import contextlib
import json
import logging
import struct
from dataclasses import dataclass
from typing import Any

import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from perdure.adapters.nats.bus import NatsBus
from perdure.adapters.nats.server import ACCOUNT
from perdure.adapters.nats.stream import LOST, WRONG_LAST_SEQUENCE
from perdure.model.bus.wire import KEY_LEASE, bucket_lease
from perdure.model.errors import PlatformError

log = logging.getLogger("perdure.nats")

_ANSWER_S = 0.5
_LOOK_S = 0.3
_STATES_S = 0.3
"""Given to the servers to say which of their replicas lead."""
_MISSED = 2
_ELECT_S = 1.5
"""Given to an election before the next one is asked for."""
_NOBODY = b"perdure0"
"""No replica has this name, and its log is empty: nobody votes for it."""


class NatsLease:
    """`LeaseRegister` in a bucket of the job's own; `open` makes it."""

    def __init__(self, bus: NatsBus, job: str, replicas: int) -> None:
        """Use `bus`; nothing is asked yet."""
        self._bus, self._job, self._replicas = bus, job, replicas

    async def open(self) -> None:
        """Make the bucket if it is not there.

        Raises:
            PlatformError: JetStream does not answer, or refuses.
        """
        config = KeyValueConfig(
            bucket=bucket_lease(self._job),
            history=1,
            storage=StorageType.FILE,
            replicas=self._replicas,
            direct=True,
        )
        try:
            js = self._bus.client.jetstream(timeout=2)
            await self._bus.unless_lost(js.create_key_value(config=config))
        except nats.js.errors.BadRequestError as error:
            if error.err_code != 10058:  # It is there.
                raise PlatformError(f"cannot make the lease: {error}") from error
        except LOST as error:
            raise PlatformError(f"cannot make the lease: {error!r}") from error

    def _bucket(self) -> KeyValue:
        js = self._bus.client.jetstream(timeout=_ANSWER_S)
        name = bucket_lease(self._job)
        return KeyValue(name=name, stream=f"KV_{name}", pre=f"$KV.{name}.", js=js, direct=True)

    async def read(self) -> tuple[int, str]:
        """Return revision and holder; (0, "") where nothing was ever written.

        Raises:
            PlatformError: no answer.
        """
        try:
            entry = await self._bus.unless_lost(self._bucket().get(KEY_LEASE))
        except nats.js.errors.KeyNotFoundError:
            return 0, ""
        except LOST as error:
            raise PlatformError(f"cannot read the lease: {error!r}") from error
        return int(entry.revision or 0), (entry.value or b"").decode()

    async def write(self, holder: str, expected: int) -> int | None:
        """Return the new revision; None where the register does not hold `expected`.

        Raises:
            PlatformError: no answer; it may have been written all the same.
        """
        try:
            call = self._bucket().update(KEY_LEASE, holder.encode(), last=expected)
            return int(await self._bus.unless_lost(call))
        except nats.js.errors.KeyWrongLastSequenceError:
            return None
        except nats.js.errors.APIError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                return None
            raise PlatformError(f"cannot write the lease: {error}") from error
        except LOST as error:
            raise PlatformError(f"cannot write the lease: {error!r}") from error


@dataclass(slots=True)
class ElectionWatch:
    """Looks whether each of the job's Raft groups has a leader, and has one elected where not."""

    system: NatsBus
    """Of a user who may speak to the servers themselves."""
    servers: int
    elections: int = 0
    """Asked for so far."""

    async def run(self) -> None:
        """Watch, until cancelled."""
        missed: dict[str, int] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                found = await self._find_leaderless()
                missed = {group: missed.get(group, 0) + 1 for group in found}
                late = {group: found[group] for group in found if missed[group] >= _MISSED}
                if late:
                    await self._elect(late)
                    missed.clear()
                    await asyncio.sleep(_ELECT_S)
            except LOST:
                missed.clear()

    async def _find_leaderless(self) -> dict[str, int]:
        """Return the groups of which a majority answers and none leads, each with its term."""
        answers: list[dict[str, Any]] = []
        complete = asyncio.Event()

        async def note(message: Msg) -> None:
            for groups in (json.loads(message.data).get("data") or {}).values():
                answers.append(groups)
            if len(answers) >= 2 * self.servers:
                complete.set()

        client = self.system.client
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox, cb=note)
        for account in (ACCOUNT, "SYS"):  # The second has the group that makes consumers.
            question = json.dumps({"account": account}).encode()
            await client.publish("$SYS.REQ.SERVER.PING.RAFTZ", question, reply=inbox)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(complete.wait(), _STATES_S)
        await subscription.unsubscribe()
        replicas: dict[str, list[dict[str, Any]]] = {}
        for groups in answers:
            for group, replica in groups.items():
                replicas.setdefault(group, []).append(replica)
        return {
            group: max(int(replica["term"]) for replica in known)
            for group, known in replicas.items()
            if len(known) > self.servers // 2
            and not any(replica["state"] == "LEADER" for replica in known)
        }

    async def _elect(self, groups: dict[str, int]) -> None:
        """Have the replicas stand for election, in the term after the one given."""
        client = self.system.client
        for group, term in groups.items():
            vote = struct.pack("<QQQ", term + 1, 0, 0) + _NOBODY
            await client.publish(f"$NRG.V.{group}", vote, reply=client.new_inbox())
        self.elections += 1
        log.warning("nobody leads %s: asking for an election", ", ".join(sorted(groups)))
