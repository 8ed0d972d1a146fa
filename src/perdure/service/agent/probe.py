"""An agent's part of an active probe: paired transfers between agents, beside the training.

The sending agent asks the other on the bus for a listener and connects to it; both ends use the
address that their ranks' traffic uses, so that the same card is tested. All of it runs in threads
and ends by the order's deadline. An agent listens only while a listener is open, and opens one only
for whom the controller has ordered to ask, in an order that both nodes have. A node that cannot be
asked was not measured, which is said and proves nothing of the network between the two.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from perdure.adapters.network.transfer import (
    Listener,
    Transfer,
    answer_transfer,
    run_arithmetic,
    run_transfer,
)
from perdure.agent.probe import ProbePart, ProbeParts
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError, RequestError
from perdure.model.events import ProbeEnded
from perdure.model.orders import RunProbe
from perdure.model.signals.links import PairProbe, ProbeAsk, ProbeDoor, subject_probe
from perdure.service.part import Tasks
from perdure.service.ports import Bus, Reply

log = logging.getLogger("perdure.agent")

LISTENERS_MAX = 4
_ASK_S = 0.5
_BYTES_MAX = 1 << 30
_DEADLINE_MAX_S = 30.0
_COMPUTE_SHARE = 0.5
"""Of a round's deadline; the transfers have the rest."""


class Prober:
    """Carries out this node's parts."""

    def __init__(
        self,
        bus: Bus,
        job: str,
        node: int,
        *,
        address: Callable[[], str],
        report: Callable[[ProbeEnded], None],
        now: Callable[[], float],
    ) -> None:
        """Answer by `report`; `address` is where this node's ranks can be reached."""
        self._bus, self._job, self._node = bus, job, node
        self._address, self._report, self._now = address, report, now
        self._parts = ProbeParts(node)
        self._tasks = Tasks()
        self._listeners = 0

    async def start(self) -> None:
        """Serve listeners to whoever asks."""
        await self._bus.serve(subject_probe(self._job, self._node), self._take_ask)

    def take(self, order: RunProbe) -> None:
        """Carry out this node's part of `order`, once."""
        part = self._parts.take(order)
        if part is not None:
            self._tasks.spawn(self._run(part))

    async def close(self) -> None:
        """Drop what is under way; threads end by their deadlines."""
        await self._tasks.end()

    # --- sending ------------------------------------------------------------------------------

    async def _run(self, part: ProbePart) -> None:
        """First compute, then send: one must not disturb the other."""
        loop, errors = asyncio.get_running_loop(), list[str]()
        end_s = loop.time() + min(part.order.deadline_s, _DEADLINE_MAX_S)
        compute_s = None
        if part.computes:
            share_s = (end_s - loop.time()) * _COMPUTE_SHARE
            compute_s = await asyncio.to_thread(run_arithmetic, share_s)
        pairs: list[PairProbe] = []
        for dst in part.destinations:
            try:
                moved = await self._send(part.order, dst, end_s)
            except (RequestError, ProtocolError, PlatformError) as error:
                errors.append(f"node {dst} was not measured: {error.message}")
                continue
            if moved.error:
                errors.append(f"node {self._node} to node {dst}: {moved.error}")
            pairs += _make_pairs(part.order, self._node, dst, moved)
        event = part.end(self._now(), tuple(pairs), compute_s, "; ".join(errors))
        log.info("probe: %.300s", event)
        self._report(event)

    async def _send(self, order: RunProbe, dst: int, end_s: float) -> Transfer:
        loop = asyncio.get_running_loop()
        size = min(order.bytes, _BYTES_MAX)
        ask = ProbeAsk(order.id, order.round, self._node, size, end_s - loop.time())
        while True:
            try:
                answer = await self._bus.request(
                    subject_probe(self._job, dst), encode(ask), timeout_s=_ASK_S
                )
                break
            except RequestError:
                if loop.time() + _ASK_S > end_s:
                    raise
                await asyncio.sleep(0.05)
        listener: ProbeDoor = decode(answer, ProbeDoor)
        if listener.error:
            raise PlatformError(listener.error)
        return await asyncio.to_thread(
            run_transfer,
            listener.host,
            listener.port,
            listener.token,
            source=self._address(),
            size=size,
            deadline_s=end_s - loop.time(),
        )

    # --- receiving ----------------------------------------------------------------------------

    def _take_ask(self, data: bytes, reply: Reply) -> None:
        self._tasks.spawn(self._open(data, reply))

    async def _open(self, data: bytes, reply: Reply) -> None:
        try:
            ask: ProbeAsk = decode(data, ProbeAsk)
            if not self._parts.expects(ask.id, ask.round, ask.src):
                # Or the order is still on its way: whoever may ask, asks again.
                log.warning("probe: nobody has ordered %.100s", ask)
                return
            if self._listeners >= LISTENERS_MAX:
                raise PlatformError(f"node {self._node} has {LISTENERS_MAX} listeners open")
            listener = Listener(self._address() or "127.0.0.1")
        except (ProtocolError, PlatformError) as error:
            await reply(encode(ProbeDoor(error=error.message)))
            return
        self._listeners += 1
        try:
            await reply(encode(ProbeDoor(listener.host, listener.port, listener.token)))
            answer = partial(answer_transfer, size=min(ask.bytes, _BYTES_MAX))
            deadline_s = min(ask.deadline_s, _DEADLINE_MAX_S)
            await asyncio.to_thread(listener.serve, answer, deadline_s)
        finally:
            self._listeners -= 1


def _make_pairs(order: RunProbe, src: int, dst: int, moved: Transfer) -> list[PairProbe]:
    """Return both directions; the way back was not tried where the way there did not end."""
    pairs = [PairProbe(order.round, src, dst, order.bytes, moved.there_s, moved.rtt_s)]
    if moved.there_s:
        pairs.append(PairProbe(order.round, dst, src, order.bytes, moved.back_s, moved.rtt_s))
    return pairs
