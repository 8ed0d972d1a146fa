"""Holds a node's ranks: starts them, reaps them, ends them, and outlives the agent.

It is torch-free, has one thread, and decides nothing. An agent connects, asks what there is
(`KeeperStatus`) and gives orders, each idempotent by its generation; a new connection replaces
the old one, and while there is none everything goes on. What must not be lost is a file: the
exit record of each rank is on disk before anybody hears of it.

It leaves when told, when the supervisor of this machine is gone, and when no agent has come for
a minute and nobody is there to start one. Whatever way it ends, its ranks end with it.
"""

import contextlib
import fcntl
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from perdure.adapters.host import read_state, read_text, send_signal
from perdure.failpoints import failpoint
from perdure.files.private import locate_job, make_private
from perdure.keeper import reaping as reap
from perdure.keeper.image import ImageProcess, Warmth, zygote_environ
from perdure.keeper.json_lines import LineSocket
from perdure.keeper.ranks import Ranks
from perdure.model.bus.wire import (
    FromKeeper,
    KeeperExit,
    KeeperKill,
    KeeperSignal,
    KeeperSpawn,
    KeeperStatus,
    KeeperStopped,
    KeeperStore,
    ToKeeper,
)
from perdure.model.errors import PlatformError
from perdure.model.paths import JobPaths
from perdure.worker.start.imports import read_imports
from perdure.worker.system.process import RELAYS, SITE_SIGNALS, set_subreaper, set_title

AGENT_AWAY_MAX_S = 60.0
ORPHANED_GRACE_S = 2.0
_RELAY_S = 1.0
"""Seconds in which a signal to every process of a job reaches all of them."""
_STRAYS_MAX_S = 20.0


class Keeper:
    """The loop: sockets, signals, the supervisor's pidfd, and a tick."""

    def __init__(self, job: str, node: int, paths: JobPaths) -> None:
        """Become subreaper and listen; nothing is started yet.

        Raises:
            OSError: the socket cannot be made.
        """
        self._socket_path = paths.keeper_socket(node)
        self._imports = paths.imports
        self._select = selectors.DefaultSelector()
        self._agent: LineSocket | None = None
        self._agent_seen = time.monotonic()
        self._leaving = False
        self._told_to_end = False
        self._supervisor = -1
        set_subreaper()
        spec = read_text(paths.spec)
        mark = reap.keeper_mark(os.getpid())
        env = zygote_environ(os.environ, spec) | {reap.KEEPER: mark, "PERDURE_JOB": job}
        env["PERDURE_NODE"] = str(node)
        self.warmth = Warmth(
            job,
            node,
            env,
            watch=self._watch_image,
            unwatch=lambda image: self._off(image.lines.sock),
            log=_log,
        )
        self.ranks = Ranks(job, paths, mark, self.warmth, send=self._send, log=_log)
        self._imports_seen_ns = 0
        """When the list of imports was written that the images know of."""
        self._wake, wake_end = socket.socketpair()
        for end in (self._wake, wake_end):
            end.setblocking(False)
        self._wake_end = wake_end
        self._listener = _listen(self._socket_path)
        self._on(self._listener, self._accept)
        self._on(self._wake, self._drain_wake)
        signal.set_wakeup_fd(wake_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._note_term)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        self._sent_s: dict[int, float] = {}
        """When a signal of the site came to this process itself."""
        self._relay_s: dict[int, float] = {}
        """When `perdure run` asked to pass it on."""
        for number in SITE_SIGNALS:
            signal.signal(number, self._note_sent)
        for relay in RELAYS:
            signal.signal(relay, self._note_relay)

    def watch_supervisor(self, pid: int) -> None:
        """End everything when process `pid` is gone."""
        try:
            self._supervisor = os.pidfd_open(pid)
        except OSError:
            self._leave(f"supervisor {pid} is gone")
            return
        self._on(self._supervisor, lambda: self._leave(f"supervisor {pid} is gone"))

    def run(self, *, cold: bool) -> None:
        """Serve until there is a reason to leave and nothing is left to end."""
        self.ranks.output.start()
        if cold:
            self.warmth.why_cold = "asked for (--cold)"
        else:
            self.warmth.start(read_imports(self._imports))
        while not (self._leaving and self.ranks.all_stopped):
            for key, _ in self._select.select(min(self.ranks.next_look_s, 1.0)):
                key.data()
            self._tick(time.monotonic())
        self.close()

    def close(self) -> None:
        """End the images and give back the socket."""
        self.warmth.close()
        self.ranks.output.close()
        with contextlib.suppress(OSError):
            os.unlink(self._socket_path)
        if self._agent is not None:
            self._agent.flush()
            self._agent.close()
        signal.set_wakeup_fd(-1)
        for end in (self._wake, self._wake_end, self._listener):
            end.close()
        self._select.close()

    # --- the loop's parts ---------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._reap()
        if self._told_to_end:
            self._leave("SIGTERM")
        self._continue_stopped()
        self.warmth.tick(now)
        self.ranks.output.tick()
        self.ranks.advance(now)
        self._relay(now)
        if self.ranks.alive and self.warmth.can_refresh:
            self._refresh()
        for image in self.warmth.images:
            if image.lines.closed:  # While an order was sent to it.
                self._serve_image(image)
            else:
                self._wait_to_write(image.lines)
        if self._agent is not None:
            self._agent_seen = now
            if self._agent.closed:
                self._close_agent()
            else:
                self._wait_to_write(self._agent)
        elif now - self._agent_seen > AGENT_AWAY_MAX_S and self._supervisor < 0:
            self._leave("no agent, and no supervisor that could start one")

    def _continue_stopped(self) -> None:
        """Continue a part that somebody has stopped (SIGSTOP): ranks and starts wait for it."""
        images = [image.pid for image in self.warmth.images]
        for pid in (*images, self.ranks.output.pid, *self.ranks.stores):
            if pid and read_state(pid) == "T":
                _log(f"process {pid} was stopped (state T), and is continued")
                send_signal(pid, signal.SIGCONT)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            failpoint("keeper/reaped")
            self.warmth.note_reaped(pid)
            self.ranks.note_exit(pid, status, usage)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _note_sent(self, number: int, frame: object) -> None:
        self._sent_s[number] = time.monotonic()

    def _note_relay(self, number: int, frame: object) -> None:
        self._relay_s[RELAYS[number]] = time.monotonic()

    def _relay(self, now: float) -> None:
        """Pass signals on, unless whoever sent them has sent them to every process here."""
        for number, asked_s in list(self._relay_s.items()):
            if now < asked_s + _RELAY_S:
                continue
            del self._relay_s[number]
            if abs(self._sent_s.get(number, -math.inf) - asked_s) > 2 * _RELAY_S:
                self.ranks.relay(number)

    def _note_term(self, *_: object) -> None:
        self._told_to_end = True

    def _leave(self, reason: str) -> None:
        if not self._leaving:
            _log(f"leaving: {reason}")
            self._leaving = True
            self.ranks.kill(None, 0.0 if reason == "told" else ORPHANED_GRACE_S)
        if self._supervisor >= 0:
            self._select.unregister(self._supervisor)
            os.close(self._supervisor)
            self._supervisor = -1

    def _on(self, fileobj: Any, call: Callable[[], None]) -> None:
        self._select.register(fileobj, selectors.EVENT_READ, call)

    def _off(self, fileobj: Any) -> None:
        """Forget a file under its number: a closed socket has none any more."""
        for key in list(self._select.get_map().values()):
            if key.fileobj is fileobj:
                self._select.unregister(fileobj)

    def _wait_to_write(self, lines: LineSocket) -> None:
        """Be woken as well when `lines` takes more, for as long as something waits for it."""
        key = self._select.get_key(lines.sock)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if lines.wants_write else 0)
        if key.events != events:
            self._select.modify(lines.sock, events, key.data)

    def _refresh(self) -> None:
        """Have an image made of what a rank has imported since the last look."""
        try:
            written_ns = os.stat(self._imports).st_mtime_ns
        except OSError:
            return
        if written_ns != self._imports_seen_ns:
            self._imports_seen_ns = written_ns
            self.warmth.refresh(read_imports(self._imports))

    # --- agent --------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._close_agent()
            self._agent = LineSocket(sock)
            self._on(sock, self._serve_agent)

    def _close_agent(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            self._off(agent.sock)
            agent.close()

    def _serve_agent(self) -> None:
        agent = self._agent
        if agent is None:
            return
        agent.flush()
        for message in agent.read(ToKeeper, lambda why: _log(f"agent: set aside: {why}")):
            about = type(message).__name__
            failpoint("keeper/order", about)
            try:
                self._obey(message)
            except Exception as error:  # All ranks of the node live by this process.
                _log(f"{about} could not be carried out: {error!r}")
            failpoint("keeper/ordered", about)
        if agent.closed and agent is self._agent:
            self._close_agent()

    def _obey(self, message: ToKeeper) -> None:
        match message:
            case KeeperStatus():
                self._send(self.ranks.describe())
            case KeeperSpawn():
                self.ranks.spawn(message)
            case KeeperStore():
                self.ranks.serve_store(message)
            case KeeperKill():
                self.ranks.kill(message.generation, message.grace_s, writer_s=message.writer_s)
            case KeeperSignal():
                self.ranks.signal(message.generation, message.rank, message.signal)
            case KeeperExit():
                self._leave("told")

    def _send(self, message: FromKeeper) -> None:
        if self._agent is not None:
            self._agent.send(message)
            if isinstance(message, KeeperStopped) and self._leaving:
                self._agent.flush()

    # --- images -------------------------------------------------------------------------------

    def _watch_image(self, image: ImageProcess) -> None:
        self._on(image.lines.sock, lambda: self._serve_image(image))

    def _serve_image(self, image: ImageProcess) -> None:
        image.lines.flush()
        for answer in self.warmth.read(image):
            self.ranks.take_answer(answer)
        if image.lines.closed:
            self.ranks.image_lost(image)


def main(job: str, node: int) -> None:
    """Be the keeper of `node` of `job`, of which there is one at a time.

    Raises:
        PlatformError: there is one already, or its socket cannot be made.
    """
    for number in RELAYS:  # They would end it until it has handlers.
        signal.signal(number, signal.SIG_IGN)
    os.environ.pop(reap.KEEPER, None)
    paths = locate_job(os.environ["PERDURE_HOME"], job)
    try:
        make_private(os.path.dirname(paths.sockets))
        make_private(paths.sockets)
        lock = os.open(f"{paths.keeper_socket(node)}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PlatformError(
            f"job {job}, node {node} has a keeper already", hint="connect to its socket"
        ) from None
    except OSError as error:
        raise PlatformError(f"{error.filename or paths.sockets}: {error.strerror}") from None
    set_title(f"perdure keeper {job} {node}")
    end_strays(job, node)
    keeper = Keeper(job, node, paths)
    supervisor = os.environ.get("PERDURE_RUN_PID", "")
    if supervisor.isdecimal():
        keeper.watch_supervisor(int(supervisor))
    keeper.run(cold=os.environ.get("PERDURE_COLD", "") == "1")
    os.close(lock)


def end_strays(job: str, node: int) -> None:
    """End what a keeper that was killed has left: children of ranks that had detached."""
    home = os.environ["PERDURE_HOME"]
    marks = {"PERDURE_HOME": home, "PERDURE_JOB": job, "PERDURE_NODE": str(node)}
    mark = reap.keeper_mark(os.getpid())
    deadline = time.monotonic() + _STRAYS_MAX_S
    while strays := reap.list_strays(marks, mark):
        if time.monotonic() > deadline:
            raise PlatformError(f"processes of an earlier keeper do not end: {strays}")
        for pid in strays:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.01)


def _listen(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(8)
    listener.setblocking(False)
    return listener


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # A full disk is no reason to end the ranks.
        print(f"keeper: {text}", file=sys.stderr, flush=True)
