"""The agent's line to its node's keeper: attached to where one lives, started where none does.

A keeper's death is seen as the end of its socket and confirmed by its pidfd; whatever it had
started is then killed before anybody hears of it, so that "the keeper is gone" means that the
node is empty.

A keeper that lives and says nothing (stopped, or stuck) is seen by the questions that it leaves
unanswered. Silence is counted in looks, not by the clock, so that an agent that was itself
stopped, or a machine that was asleep, does not take its own absence for the keeper's.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping

from perdure.adapters.host import end_leftovers, read_start_time, read_state
from perdure.agent.messages import KeeperSilent
from perdure.model.bus.wire import (
    FromKeeper,
    KeeperSpawned,
    KeeperState,
    KeeperStatus,
    ToKeeper,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.service.part import LINE_MAX, DropLog, read_line, wait_event

log = logging.getLogger("perdure.agent")

_CONNECT_RETRY_S = 0.01
_RESTART_S_MAX = 5.0
_DEATH_S = 1.0
_LEFTOVERS_S = 10.0
LOOK_S = 0.5
STOPPED_LOOKS = 5
"""Looks without an answer until a keeper in state T is said to be silent."""
SILENT_LOOKS = 30
"""The same in any other state: a machine may be that slow."""


class KeeperLink:
    """One keeper after another. What happens comes out of `up`, `said` and `gone`.

    `gone` is told when it died, by CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        path: str,
        command: list[str],
        *,
        env: Mapping[str, str],
        log_path: str,
        marks: Mapping[str, str],
        up: Callable[[KeeperState], None],
        said: Callable[[FromKeeper], None],
        gone: Callable[[float], None],
        silent: Callable[[KeeperSilent], None],
        heard: Callable[[], None],
    ) -> None:
        """Look for it at `path`, start it by `command`; `marks` tell its descendants."""
        self._drops = DropLog(log)
        self._silent, self._heard = silent, heard
        self._looks = 0
        """Looks at the keeper since it last said anything."""
        self._greeted = False
        self._path, self._command, self._env, self._log_path = path, command, env, log_path
        self._marks = marks
        self._up, self._said, self._gone = up, said, gone
        self._writer: asyncio.StreamWriter | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._pidfd = -1
        self._dead = asyncio.Event()
        self._dead.set()
        self._died_s = 0.0
        """When it was seen dead, by CLOCK_MONOTONIC."""
        self._known: dict[int, int] = {}
        """Pid -> start time of every rank it has told of."""
        self._ranks: dict[int, int] = {}
        """Rank -> pid, of its newest generation."""

    def send(self, message: ToKeeper) -> None:
        """Send `message`; lost with the connection, whose successor begins with a state."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message) + b"\n")

    async def run(self) -> None:
        """Hold the line until the keeper is gone."""
        while True:
            reader, writer = await self._connect()
            self._writer, self._greeted = writer, False
            self._hold(_read_peer_pid(writer))
            self.send(KeeperStatus())
            watch = asyncio.create_task(self._watch())
            try:
                await self._listen(reader)
            except OSError as error:
                log.error("keeper: %s", error)
            finally:
                watch.cancel()
                self._writer = None
                writer.close()
            if self._pidfd >= 0 and await self.wait_death(_DEATH_S):
                break
            log.warning("the keeper hung up; connecting again")
            await asyncio.sleep(_CONNECT_RETRY_S)
        await self._bury()
        self._gone(self._died_s)

    async def wait_death(self, timeout_s: float) -> bool:
        """Return whether the keeper is dead within `timeout_s` (or was never there)."""
        return await wait_event(self._dead, timeout_s)

    def close(self) -> None:
        """Hang up and touch nothing: the keeper goes on."""
        if self._writer is not None:
            self._writer.close()
        self._close_pidfd()

    async def end(self, timeout_s: float) -> None:
        """Wait for a keeper that was told to exit; kill it and its own after `timeout_s`."""
        if not await self.wait_death(timeout_s):
            self.kill("does not leave")
            await self.wait_death(_DEATH_S)
        await self._bury()

    def kill(self, reason: str) -> None:
        """Kill the keeper; its end is then seen like any other."""
        log.error("killing the keeper (pid %d): it %s", self._pid, reason)
        with contextlib.suppress(OSError):  # It is gone already, or there is none.
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    # --- silence ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ask again and again; say so while there is no answer."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._looks += 1
            if self._looks % 2:
                self.send(KeeperStatus())
            state = read_state(self._pid)
            limit = STOPPED_LOOKS if state == "T" else SILENT_LOOKS
            if self._looks >= limit and state not in "ZX":
                ended = sorted(r for r, pid in self._ranks.items() if read_state(pid) == "Z")
                self._silent(
                    KeeperSilent(
                        pid=self._pid,
                        state=state,
                        silent_s=self._looks * LOOK_S,
                        ended=tuple(ended),
                    )
                )

    def _note_voice(self) -> None:
        looks, self._looks = self._looks, 0
        if looks >= STOPPED_LOOKS:
            self._heard()

    # --- connecting ---------------------------------------------------------------------------

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        wait_s = 0.1
        while True:
            with contextlib.suppress(OSError):
                return await asyncio.open_unix_connection(self._path, limit=LINE_MAX)
            if self._child is not None and (code := self._child.poll()) is not None:
                # Its last words are in its log; perhaps another one lives and is not ready yet.
                log.warning("a keeper ended with exit code %s: see %s", code, self._log_path)
                self._child = None
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RESTART_S_MAX)
            elif self._child is None:
                self._start()
            await asyncio.sleep(_CONNECT_RETRY_S)

    def _start(self) -> None:
        try:
            with open(self._log_path, "ab") as out:
                self._child = subprocess.Popen(
                    self._command,
                    env=dict(self._env),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
        except OSError as error:
            log.error("cannot start the keeper: %s", error)

    # --- hearing ------------------------------------------------------------------------------

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await read_line(reader):
            self._note_voice()
            try:
                message: FromKeeper = decode(line, FromKeeper)
            except ProtocolError as error:
                self._drops.note(f"of keeper {self._pid}: {error}")
                continue
            if isinstance(message, KeeperState):
                if not self._hold(message.pid):
                    return
                self._note(message.running)
                if not self._greeted:
                    self._greeted = True
                    self._up(message)
            else:
                if isinstance(message, KeeperSpawned):
                    self._note(self._ranks | message.pids if message.beside else message.pids)
                self._said(message)

    def _hold(self, pid: int) -> bool:
        """Watch over the keeper with this pid; False where it died since."""
        if pid != self._pid:
            self._close_pidfd()
            try:
                self._pidfd = os.pidfd_open(pid)
            except OSError:
                return False
            self._pid, self._dead, self._looks = pid, asyncio.Event(), 0
            asyncio.get_running_loop().add_reader(self._pidfd, self._note_death)
        return True

    def _note(self, pids: Mapping[int, int]) -> None:
        if pids == self._ranks:
            return
        self._ranks = dict(pids)
        self._known = {pid: read_start_time(pid) for pid in pids.values()}

    def _note_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._died_s = time.monotonic()
        self._dead.set()

    async def _bury(self) -> None:
        """Leave nothing of the dead keeper: its zombie, its ranks, what they had started."""
        known = {pid: start for pid, start in self._known.items() if start}
        killed = await asyncio.to_thread(end_leftovers, known, self._marks, timeout_s=_LEFTOVERS_S)
        if killed:
            log.warning("killed what the keeper had left: pids %s", killed)
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        self._known.clear()
        self._ranks.clear()
        self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._pid, self._pidfd = 0, -1


def _read_peer_pid(writer: asyncio.StreamWriter) -> int:
    """Return the pid of who listens at the other end, who need not be able to answer."""
    peer: socket.socket = writer.get_extra_info("socket")
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)
