"""An agent's part in sending what torch has compiled from a node of the job to one that has not.

A node that comes to a running job, or stands in for another, asks before its first ranks start. It
asks only agents that `perdure run` itself has started: from there it has the script and its
environment as well, so that what it executes is nobody else's than before. To such an agent the
bus lets only agents of the job speak, and brings the answer back to who asked.

A start waits for `WAIT_S` at most; what comes later is found as well, unless it is compiled by
then. Whatever goes wrong, ranks start and compile. Nothing is asked between nodes of one machine,
which share the folder.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from perdure.adapters.file_thread import FileThread
from perdure.adapters.host import read_boot_id
from perdure.adapters.transfer import Listener, Wire, open_wire
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError, RequestError
from perdure.model.job import JobSpec
from perdure.model.signals.compiled import (
    CompiledAsk,
    CompiledDoor,
    explain_difference,
    subject_compiled,
)
from perdure.service.compiled import (
    Taken,
    has_compiled,
    name_folder,
    receive_compiled,
    send_compiled,
)
from perdure.service.part import Tasks
from perdure.service.ports import Bus, Reply

log = logging.getLogger("perdure.agent")

WAIT_S = 5.0
"""For so long a start waits at most."""
TAKE_S = 30.0
"""After so long nothing more is taken: the ranks have compiled it by then."""
_SILENT_S, _AGAIN_S = 0.5, 0.2
"""For so long silent nodes are waited for, all together; and before a busy one is asked again."""
_REACH_S, _HELLO = 1.2, b"!"
"""For connecting and the first byte: the kernel sends a lost packet again after one second."""
_ASKED_MAX = 3
"""Nodes that are asked, one after another."""
_LISTENERS_MAX = 4
"""Nodes to which it is sent at a time."""
_SAID_S = 1.0
"""A wait of as long is told of with the ranks' start."""
_KEY_BYTES = 32
_SAME_FOLDER = "the folder is the same"
_NOTHING = "nothing is compiled there"


class CompiledSharing:
    """Takes what another node has compiled, and gives what this one has."""

    def __init__(
        self,
        bus: Bus,
        spec: JobSpec,
        node: int,
        *,
        folders: Mapping[str, Path],
        fingerprint: Callable[[], dict[str, str]],
        address: Callable[[], str],
        alone: bool,
        aside: Callable[[str, str, object], None],
    ) -> None:
        """Share `folders`; `address` is where this node's ranks can be reached.

        `alone`: no node of the job is on another machine than this one, but for those that join.
        `aside` is told of what another node sends and nobody may take.
        """
        self._bus, self._job, self._node, self._address = bus, spec.name, node, address
        self._folders, self._aside, self._read_fingerprint = dict(folders), aside, fingerprint
        self._fingerprint = dict[str, str]()
        self._gives = bool(folders) and node < spec.local_nodes and spec.num_nodes > 1
        others = [n for n in range(spec.local_nodes) if n != node]
        first = node % max(1, len(others))  # Not all ask the same one.
        self._sources = [*others[first:], *others[:first]][:_ASKED_MAX] if folders else []
        if alone and node < spec.local_nodes:
            self._sources = []
        self._began = False
        self._tasks, self._listeners = Tasks(), dict[str, Listener]()

    async def start(self) -> None:
        """Serve who asks, where this node is one to ask."""
        if self._gives:
            subject = subject_compiled(self._job, self._node, "*")
            await self._bus.serve_each(subject, self._take_ask)
            self._tasks.spawn(self._know_fingerprint())

    async def close(self) -> None:
        """Drop what is under way; threads are left behind, and end by their deadlines."""
        await self._tasks.end()

    # --- taking -------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether ranks that are about to start may find what others have compiled."""
        return bool(self._sources) and not self._began

    async def wait(self) -> str:
        """Take what there is, and return what is to be said of the time that it took.

        It is done once: what this node's ranks compile from then on is their own.
        """
        self._began = True
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        taking = self._tasks.spawn(self._take(began_s + TAKE_S))
        await asyncio.wait({taking}, timeout=WAIT_S)
        waited_s = loop.time() - began_s
        return (
            f"waited {waited_s:.2f} s for what another node has compiled"
            if waited_s >= _SAID_S
            else ""
        )

    async def _take(self, end_s: float) -> None:
        """Ask one node after another until one has something, and who is busy once more."""
        loop = asyncio.get_running_loop()
        try:
            await self._know_fingerprint()
            sources = self._sources
            while sources:
                busy = list[int]()
                for source in sources:
                    if await self._take_from(source, end_s, busy):
                        return
                sources = busy if loop.time() + _AGAIN_S < end_s else []
                await asyncio.sleep(_AGAIN_S if sources else 0.0)
        except Exception:  # It is no reason for ranks not to start.
            log.exception("what other nodes have compiled cannot be taken")

    async def _take_from(self, source: int, end_s: float, busy: list[int]) -> bool:
        """Return whether nobody else has to be asked; who is `busy` may be asked once more."""
        loop, taken = asyncio.get_running_loop(), Taken()
        began_s, problem = loop.time(), ""
        try:
            door = await self._ask(source)
            if door.busy:
                busy.append(source)
                return False
            if door.error == _SAME_FOLDER:
                return True
            if door.error:
                raise PlatformError(door.error)
            if why := explain_difference(self._fingerprint, door.fingerprint):
                raise ProtocolError(f"what it was made for is another: {why}")
            thread = FileThread()
            try:
                await thread.call(self._receive, door, end_s - loop.time(), taken)
            finally:
                thread.close()
        except ProtocolError as error:
            self._aside("compiled", f"node {source}", error.message)
            problem = error.message
        except (RequestError, PlatformError) as error:
            problem = error.message
        except OSError as error:
            problem = error.strerror or str(error)
        log.info(
            "what node %d has compiled: %d of %d files are taken, %.1f MB in %.2f s%s",
            *(source, taken.files, taken.offered, taken.bytes / 1e6, loop.time() - began_s),
            "".join(f"; {each}" for each in (_tell_skipped(taken), problem) if each),
        )
        return taken.offered > 0 and not problem

    async def _ask(self, source: int) -> CompiledDoor:
        subject = subject_compiled(self._job, source, self._node)
        ask = encode(CompiledAsk(self._fingerprint, *self._describe_place()))
        door: CompiledDoor = decode(
            await self._bus.request(subject, ask, timeout_s=_SILENT_S / len(self._sources)),
            CompiledDoor,
        )
        return door

    def _receive(self, door: CompiledDoor, deadline_s: float, taken: Taken) -> None:
        """Take what there is behind `door`; in a thread."""
        end_s = time.monotonic() + deadline_s
        try:
            key = bytes.fromhex(door.key)
        except ValueError:
            raise ProtocolError("a key that is none") from None
        with open_wire(
            door.host,
            door.port,
            door.token,
            source=self._address(),
            deadline_s=min(deadline_s, _REACH_S),
        ) as wire:
            wire.receive(len(_HELLO))  # A firewall may have answered.
            wire.end_s = end_s
            receive_compiled(wire, self._folders, key, taken)

    async def _know_fingerprint(self) -> None:
        self._fingerprint = self._fingerprint or await asyncio.to_thread(self._read_fingerprint)

    def _describe_place(self) -> tuple[str, str]:
        """Return the path of the cache, and what names its folder."""
        folder = next(iter(self._folders.values())).parent
        return str(folder), name_folder(folder, read_boot_id())

    # --- giving -------------------------------------------------------------------------------

    def _take_ask(self, asker: str, data: bytes, reply: Reply) -> None:
        if asker.isdecimal():  # Nobody else asks.
            self._tasks.spawn(self._open(asker, data, reply))

    async def _open(self, asker: str, data: bytes, reply: Reply) -> None:
        """Open a door to `asker`, in the place of the one that it had.

        Until that one's thread has ended it is told to ask once more, so that none has two.
        """
        key = secrets.token_bytes(_KEY_BYTES)
        try:
            ask: CompiledAsk = decode(data, CompiledAsk)
            await self._know_fingerprint()
            place, folder_id = self._describe_place()
            if folder_id and ask.folder_id == folder_id:
                raise PlatformError(_SAME_FOLDER)
            if why := explain_difference(ask.fingerprint, self._fingerprint):
                raise PlatformError(f"what it was made for is another: {why}")
            sent = set(self._folders) if ask.place == place else set(self._folders) - {"triton"}
            if not await asyncio.to_thread(has_compiled, self._folders, sent=sent):
                raise PlatformError(_NOTHING)
            if old := self._listeners.get(asker):
                old.close()
            if old or len(self._listeners) >= _LISTENERS_MAX:
                await reply(encode(CompiledDoor(error="it sends to others", busy=True)))
                return
            listener = Listener(self._address() or "127.0.0.1")
        except (ProtocolError, PlatformError) as error:
            await reply(encode(CompiledDoor(error=error.message)))
            return
        send = partial(self._send, key=key, sent=sent, node=asker)
        thread = FileThread()
        self._listeners[asker] = listener
        try:
            door = CompiledDoor(
                self._fingerprint, listener.host, listener.port, listener.token, key.hex()
            )
            await reply(encode(door))
            await thread.call(listener.serve, send, TAKE_S)
        finally:
            listener.close()
            del self._listeners[asker]
            thread.close()

    def _send(self, wire: Wire, *, key: bytes, sent: set[str], node: str) -> None:
        """Send to who has connected; in a thread."""
        try:
            wire.send(_HELLO)  # To find what there is may take long.
            send_compiled(wire, self._folders, key, sent=sent)
        except ProtocolError as error:
            log.warning("what is compiled here was not sent to node %s: %s", node, error.message)


def _tell_skipped(taken: Taken) -> str:
    return f"the names of {taken.skipped} cannot be written here" if taken.skipped else ""
