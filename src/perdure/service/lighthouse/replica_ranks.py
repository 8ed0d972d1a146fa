"""The ears for ranks that others have started: what an agent is to a node's ranks.

They speak as perdure's own ranks do (`service/agent/ranks.py`), over a unix socket that a link in
this user's private directory leads to, by where the lighthouse is. The lighthouse has such ears on
its own machine, and on others each machine's relay (`replica_relay.py`). Each life of a
group is here what a node is in an agent: one keeper's view, with the ranks that have a line.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from perdure.adapters.devices import read_machine_id
from perdure.adapters.host import read_state
from perdure.agent.messages import Request, TellWorker, WorkerSaid
from perdure.agent.relay import answer_worker, relay, relay_boundary
from perdure.agent.state import AgentState, KeeperView, NodeIdentity
from perdure.files.private import find_private
from perdure.model.bus.wire import (
    ReplicaHello,
    ReplicaWelcome,
    WorkerHello,
    WorkerSignal,
)
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.model.orders import Order, RankOrder, SendBoundary
from perdure.model.paths import JobPaths, lighthouse_door
from perdure.service.agent.outbox import Outbox
from perdure.service.agent.ranks import WorkerServer

log = logging.getLogger("perdure.lighthouse")

_LIVES_KEPT = 64
"""Lives of groups that have ended, and whose agreements are remembered."""
_SETTLE_S = 0.2
"""After the end of a line, until it is looked whether its process has ended, too."""


@dataclass(slots=True)
class _Life:
    group: int
    state: AgentState = field(default_factory=AgentState)


class ReplicaRanks:
    """The ranks that have a line, and what is passed on to them."""

    def __init__(
        self,
        spec: JobSpec,
        outbox: Outbox,
        *,
        clock: Callable[[], float],
        clock_offset_s: float,
        find: Callable[[str], Awaitable[tuple[int, int]]],
        ended: Callable[[int, str], None],
        place: int = -1,
    ) -> None:
        """Serve ranks of `spec`, at the place of this machine where it is not the lighthouse's.

        `find` returns group and life of a replica id, -1 where it is not known; `ended` hears
        that the process of a life has ended, and how that is known.
        """
        self._place = place
        self._spec, self._clock, self._offset_s = spec, clock, clock_offset_s
        self._find, self._ended = find, ended
        self._lives: dict[int, _Life] = {}
        self._server = WorkerServer(
            spec.name, outbox, self._hear, admit=self._admit, gone=self._note_gone
        )

    async def start(self, paths: JobPaths, port: int, name: str, address: str = "") -> None:
        """Listen, where the ranks look for the lighthouse on this port; `name` is of the line."""
        self._server.job = name
        path = os.path.join(paths.sockets, "ranks")
        door = lighthouse_door(find_private("/tmp"), port, address)
        await self._server.start(path)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(door)
            os.symlink(path, door)
        except OSError as error:
            raise PlatformError(f"cannot make {door}: {error.strerror}") from error

    async def close(self) -> None:
        """Hang up."""
        await self._server.close()

    def take(self, order: Order) -> bool:
        """Pass an order on to those that it is for; return whether any of them has a line."""
        passed = False
        for life, known in self._lives.items():
            if isinstance(order, RankOrder) and order.generation != life:
                continue
            if isinstance(order, SendBoundary):
                requests = relay_boundary(known.state, order)
            else:
                requests = relay(known.state, order)
            keeper = known.state.keeper
            passed |= keeper is not None and any(order.is_for(life, r) for r in keeper.running)
            self._do(requests)
        return passed

    @property
    def lines(self) -> dict[int, int]:
        """Rank -> life, of those that have a line and whose process lives."""
        known = sorted(self._lives.items())
        return {
            rank: life for life, k in known if k.state.keeper for rank in k.state.keeper.running
        }

    def tell_groups(self, groups: tuple[int, ...], order: Order) -> None:
        """Have every rank of these groups that has a line carry out `order`."""
        for known in self._lives.values():
            if known.group in groups:
                self._do(relay(known.state, order))

    def _do(self, requests: list[Request]) -> None:
        for request in requests:
            if isinstance(request, TellWorker):
                self._server.send(request.rank, request.message)

    # --- in -----------------------------------------------------------------------------------

    async def _admit(self, hello: ReplicaHello) -> ReplicaWelcome:
        nproc = self._spec.nproc
        if hello.ranks != nproc or not 0 <= hello.local_rank < nproc:
            return ReplicaWelcome(
                refusal=f"its group has {hello.ranks} ranks, and job {self._spec.name} was served "
                f"for {nproc}: perdure serve -n {hello.ranks}"
            )
        group, life = await self._find(hello.replica)
        if life < 0:
            return ReplicaWelcome(refusal=f"the lighthouse does not know {hello.replica}")
        slot = hello.local_rank
        return ReplicaWelcome(
            job=self._spec.name,
            line=self._server.job,
            rank=group * nproc + slot,
            generation=life,
            clock_offset_s=self._offset_s,
            device=f"cpu-{read_machine_id()}-{group}-{slot}",
            place=self._place,
        )

    def _hear(self, said: WorkerSaid) -> None:
        if isinstance(said.message, WorkerSignal):
            return  # Its signals are for who has started it.
        group = said.rank // self._spec.nproc
        known = self._lives.get(said.generation)
        if known is None:
            known = self._lives[said.generation] = _Life(group)
            known.state.keeper = KeeperView(pid=0, generation=said.generation)
            self._forget_ended()
        keeper = known.state.keeper
        if isinstance(said.message, WorkerHello) and keeper is not None:
            keeper.running[said.rank] = said.message.pid
            log.info("rank %d of life %d has a line", said.rank, said.generation)
        identity = NodeIdentity(node=group, incarnation="")
        self._do(answer_worker(known.state, identity, self._clock(), said))

    def _forget_ended(self) -> None:
        """Forget the oldest lives that a newer one has followed, or whose ranks have ended."""
        lives = sorted(self._lives.items())
        newest = {known.group: life for life, known in lives}
        runs = {life for life, known in lives if (k := known.state.keeper) and k.running}
        ended = [life for life, known in lives if newest[known.group] != life or life not in runs]
        for life in ended[: max(0, len(ended) - _LIVES_KEPT)]:
            del self._lives[life]

    def _note_gone(self, hello: WorkerHello) -> None:
        """Look, in a moment, whether a line has ended with its process."""
        asyncio.get_running_loop().call_later(_SETTLE_S, self._look, hello)

    def _look(self, hello: WorkerHello) -> None:
        known = self._lives.get(hello.generation)
        keeper = known.state.keeper if known is not None else None
        if keeper is None or keeper.running.get(hello.rank) != hello.pid:
            return
        if read_state(hello.pid) in "XZ":
            del keeper.running[hello.rank]
            self._ended(hello.generation, f"rank {hello.rank}: its process has ended")
