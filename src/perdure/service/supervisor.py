"""`perdure run`: starts the parts of a job, keeps them up, shows what the ranks say, cleans up.

It decides nothing about the training. If a part dies it is started again at once; what that part
was doing is in the journal (controller), in the store (nats-server) or in the keeper (agent). Its
own death ends the job: controller, agents, keepers and the guard watch its pid.

A part of a node is named after it, such as `agent 1`. A torchft job's lighthouse is its own, the
stock one, or a URL.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from perdure.adapters.host import read_command, send_signal
from perdure.adapters.nats import NatsBus, NatsServer
from perdure.dash.live import describe_open_step
from perdure.failpoints import failpoint
from perdure.files import is_locked
from perdure.launch.environment import LIGHTHOUSE_URL, leave_rank, set_hash_seed
from perdure.model.bus.lighthouse import PATIENCE
from perdure.model.bus.wire import RUN, Command, CommandReply, subject_commands, subject_events
from perdure.model.codec import decode, encode
from perdure.model.errors import PerdureError, PlatformError
from perdure.model.events import ControllerLost, JobEnded
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.model.platforms.slurm import read_allocation
from perdure.model.report import Snapshot
from perdure.service.access.credentials import (
    end_asked,
    make_server,
    set_certificate,
    write_credentials,
)
from perdure.service.access.joining import read_invitations
from perdure.service.agent.logs import LOOK_S, cut_logs
from perdure.service.agent.outbox import Outbox
from perdure.service.caches import limit_caches
from perdure.service.controller.journal import clear_stream, read_end
from perdure.service.jobfiles import (
    JobLock,
    Parts,
    check_space,
    load_snapshot,
    make_folders,
    read_document,
    remove_folders,
    set_previous_aside,
    write_document,
)
from perdure.service.jobfolders import ENDED, paths_of
from perdure.service.lighthouse.remembered import LighthouseFile
from perdure.service.part import Tasks, run_until
from perdure.service.placement import HERE, Placement
from perdure.service.processes import (
    Child,
    StopWatch,
    describe_exit,
    end_family,
    guard_command,
    list_living_descendants,
    part_command,
    read_process_start_s,
    reap_adopted,
    start_child,
)
from perdure.service.starts import record_start
from perdure.service.storage_watch import watch_free_space
from perdure.service.tail import RankTails
from perdure.service.window import read_left_s, read_window_s
from perdure.worker.system.process import RELAYS, SITE_SIGNALS, ignore_site_signals, set_subreaper

log = logging.getLogger("perdure.run")

RESTARTS_MAX = 30
RESTARTS_WINDOW_S = 60.0
_NATS_READY_S = 20.0
_POLL_S = 0.1
_LEAVE_S = 10.0
"""Given to agents and keepers to leave by themselves after the job has ended."""
_ORPHANS_S = 5.0
"""Given to what is still there after the last agent has left."""
_READY_S = 20.0
"""Given to the lighthouse to say where it listens."""
_CLOSE_S = 3.0
"""Given to a nats-server to close its store."""
_KILL_S = 3.0
"""The time between a second signal and the end by force."""
LEFT_S = 30.0
"""Given to the job to end after an agent has left in good order; then the agent is missed."""
_AGAIN_S = 1.0
"""Between two tries to start a part that cannot be started."""
_STOPPED_S = 3.0
"""A part in state T for so long is killed and started again; each can be, at any moment."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    spec: JobSpec,
    *,
    home: str,
    nats_url: str | None = None,
    placement: Placement = HERE,
    on_line: Callable[[str], None] = print,
    on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None,
    command: Callable[..., list[str]] = part_command,
) -> int:
    """Run a job to its end on this machine; return its exit code.

    `on_line` gets the ranks' lines, prefixed `[rank 0]`, and what happened to the parts, prefixed
    `[perdure]`. `on_snapshot` gets the newest picture twice a second, and the last one. `command`
    returns the command line of a part, such as `controller JOB`.

    Raises:
        ConfigError: a job of this name is running.
        PlatformError: a part cannot be started or does not stay up.
    """
    ignore_site_signals()
    home = os.path.abspath(home)
    paths = paths_of(home, spec.name)
    lock = JobLock(paths)
    try:
        end_family(spec.name, home, spare=frozenset(list_living_descendants(os.getpid())))
        previous = set_previous_aside(paths)
        make_folders(paths)
        limit_caches(paths)
        check_space(paths)
        spec = set_hash_seed(spec, read_document(f"{previous}/job.json", JobSpec), os.environ)
        write_document(paths.spec, spec)
        record_start(spec, paths, previous, os.environ)
        supervisor = Supervisor(
            spec,
            home,
            nats_url,
            on_line,
            on_snapshot,
            command=command,
            placement=placement,
            previous=previous,
        )
        set_subreaper()
        return asyncio.run(supervisor.run())
    finally:
        remove_folders(paths)
        lock.release()


class Supervisor:
    """One run of one job."""

    def __init__(
        self,
        spec: JobSpec,
        home: str,
        nats_url: str | None,
        on_line: Callable[[str], None],
        on_snapshot: Callable[[Snapshot], None],
        *,
        command: Callable[..., list[str]] = part_command,
        placement: Placement = HERE,
        previous: str = "",
    ) -> None:
        """Prepare; nothing runs yet. `previous` is the folder of the run before, or empty."""
        self._command, self._placement = command, placement
        self._spec, self._home, self._nats_url = spec, home, nats_url
        self._on_line, self._on_snapshot, self._rerun = on_line, on_snapshot, bool(previous)
        self._invited = [msgspec.to_builtins(invited) for invited in placement.invited]
        if previous and placement.door:
            mine = {invited.id for invited in placement.invited}
            self._invited += [one for one in read_invitations(previous) if one["id"] not in mine]
        self._paths = paths_of(home, spec.name)
        self._offset_s = time.time() - time.monotonic()
        began_s = read_process_start_s()
        if time.monotonic() - began_s > 10.0:  # a process that did something else before
            began_s = time.monotonic()
        self._started_s = began_s + self._offset_s
        self._server = make_server(spec, self._paths, placement) if nats_url is None else None
        self._children: dict[str, Child] = {}
        self._restarts: deque[float] = deque()
        self._stopped = StopWatch(round(_STOPPED_S / _POLL_S))
        self._killed: dict[int, str] = {}
        """Pid of a part that was killed from here -> why."""
        self._over = asyncio.Event()
        """The job has ended, or cannot go on."""
        self._ended: JobEnded | None = None
        self._failure: PerdureError | None = None
        self._signals: list[signal.Signals] = []
        self._window_s: float | None = None
        """What the platform leaves between SIGTERM and SIGKILL; None if it does not say."""
        self._at_terminal = any(stream.isatty() for stream in (sys.stdout, sys.stderr))
        """Its hang-up says that nobody looks any more, and not that the job shall end."""
        self._tasks = Tasks()
        subject, source = subject_events(spec.name, RUN), f"run-{os.getpid()}"
        self._outbox = Outbox(None, subject, node=-1, source=source)
        self._bus: NatsBus | None = None
        self._tails = RankTails(spec.log_dir or os.path.join(self._paths.logs, "ranks"))
        self._shown, self._torchft = -1, dict[str, str]()
        self._mended_s = 0.0
        self._waits: tuple[str, ...] = ()
        """When the newest damage to the journal that was said was found, job time."""
        self._parts: Parts | None = None
        """Who runs the job, as it is written down."""
        self._told = ""
        """What came of the newest request to end logins."""

    def _now(self) -> float:
        return time.monotonic() + self._offset_s

    # --- life ---------------------------------------------------------------------------------

    async def run(self) -> int:
        """Start everything, wait for the end, leave nothing behind; return the exit code."""
        self._catch_signals()
        self._tasks.spawn(self._read_window())
        self._start_watch()
        try:
            await run_until(self._over, self._start())  # A part may keep dying meanwhile.
            await self._over.wait()
            await self._let_go()
        finally:
            await self._tasks.end()
            if self._bus is not None:
                await self._bus.close()
            left = self._end_all()
            self._show_lines(last=True)
            self._finish_snapshot()
        if left:
            why = "another user's, or waiting for a disk or a driver"
            self._note(f"processes {left} cannot be killed ({why})")
        if self._failure is not None:
            raise self._failure
        if self._ended is not None:
            ran = self._ended.status == "stopped" and not self._spec.served
            interrupted = ran and signal.SIGINT in self._signals
            return 128 + signal.SIGINT if interrupted else self._ended.exit_code
        return 128 + self._signals[-1] if self._signals else 1

    async def _read_window(self) -> None:
        self._window_s = await asyncio.to_thread(read_window_s, os.environ)

    async def _start(self) -> None:
        self._start_part("guard")
        if self._server is not None:
            set_certificate(self._server, self._spec.nats)
            self._start_part("nats-server")
            await self._wait_server(self._server)
        endpoint = write_credentials(
            self._spec,
            self._paths,
            self._server,
            url=self._server.url if self._server is not None else self._nats_url or "",
            clock_offset_s=self._offset_s,
        )
        self._write_parts()
        if self._invited:
            write_document(self._paths.invited, self._invited)
        if self._nats_url is not None:
            await clear_stream(self._paths, self._spec.name, ours=self._rerun)
        self._start_part("controller")
        if self._spec.lighthouse is not None and not self._spec.lighthouse.url:
            self._start_part("lighthouse")
        self._torchft = await read_torchft_variables(self._spec, self._paths, os.environ)
        if self._spec.served:
            for line in describe_door(self._spec, self._torchft[LIGHTHOUSE_URL]):
                self._note(line)
        for node in range(self._spec.local_nodes):
            self._start_part(f"agent {node}")
        self._write_parts()
        self._bus = await NatsBus.connect(endpoint, name=f"perdure run {self._spec.name}")
        self._outbox.bus = self._bus
        self._tasks.spawn(self._outbox.run())
        self._tasks.spawn(self._watch_logs())
        self._tasks.spawn(
            watch_free_space(self._spec, self._paths, self._now, self._note, self._outbox.put)
        )

    async def _wait_server(self, server: NatsServer) -> None:
        deadline = time.monotonic() + _NATS_READY_S
        while not server.poll_ready():
            if time.monotonic() > deadline:
                why = f"; {server.unreached}" if server.unreached else ""
                raise PlatformError(
                    f"nats-server is not ready after {_NATS_READY_S:g} s{why}",
                    hint=f"see {self._paths.logs}/nats-server.log",
                )
            await asyncio.sleep(0.005)

    async def _let_go(self) -> None:
        """Give agents and keepers the time to leave by themselves."""
        if self._ended is None:
            return
        failpoint("supervisor/leave")
        last = ("lighthouse", "guard", "nats-server")
        spare = {c.pid for c in self._children.values() if c.part.startswith(last)}
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline and len(self._signals) < 3:
            reap_adopted({child.pid for child in self._children.values()})
            if not set(list_living_descendants(os.getpid())) - spare:
                return
            agents = [c for c in self._children.values() if c.part.startswith("agent")]
            if all(agent.pidfd < 0 for agent in agents):
                deadline = min(deadline, time.monotonic() + _ORPHANS_S)
            await asyncio.sleep(0.02)

    def _end_all(self) -> list[int]:
        """Kill what is left of the job; a nats-server gets to close its store first."""
        server = self._children.get("nats-server")
        spare = frozenset({server.pid} if server is not None else ())
        for child in self._children.values():
            self._forget(child)
        end_family(self._spec.name, self._home, spare=spare)
        if server is not None:
            end_server(server)
        return end_family(self._spec.name, self._home, spare=frozenset())

    # --- the parts ----------------------------------------------------------------------------

    def _start_part(self, part: str) -> None:
        kind, _, node = part.partition(" ")
        job = self._spec.name
        if kind == "nats-server" and self._server is not None:
            command = self._server.command()
        elif kind == "guard":
            command = guard_command(PERDURE_JOB=job, PERDURE_HOME=self._home)
        else:
            command = self._command(kind, job, *([node] if node else []))
        env = leave_rank(os.environ) | {
            "PERDURE_HOME": self._home,
            "PERDURE_JOB": job,
            "PERDURE_RUN_PID": str(os.getpid()),
            "PERDURE_CLOCK_OFFSET_S": repr(self._offset_s),
            "SPT_NOENV": "1",  # setproctitle shall leave the marks above readable
        }
        if node:
            command = [*self._placement.prefix(int(node)), *command]
            env |= self._placement.environment(int(node)) | self._torchft
        failpoint("supervisor/start", part)
        try:
            child = start_child(part, command, env, self._paths.log(part.replace(" ", "-")))
        except OSError as error:
            raise PlatformError(f"cannot start {part}: {error}") from error
        self._children[part] = child
        failpoint("supervisor/started", part)
        asyncio.get_running_loop().add_reader(child.pidfd, self._notice, child)

    def _forget(self, child: Child) -> None:
        if child.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(child.pidfd)
            child.close()

    def _notice(self, child: Child) -> None:
        """A part has ended: was it asked to, or is it started again?"""
        status = child.process.poll()
        if status is None:
            return
        failpoint("supervisor/ended", child.part)
        at_s = self._now()
        cause = self._killed.pop(child.pid, "") or describe_exit(status)
        self._forget(child)
        if self._over.is_set():
            return
        if child.part == "controller":
            self._tasks.spawn(self._look_for_end(child, cause, at_s))
            return
        if child.part.startswith("agent") and status == 0:
            self._tasks.spawn(self._restart_later(child, at_s))
            return
        self._restart(child, cause, at_s)

    def _end_stopped(self) -> None:
        """Kill what is stopped, as `_notice` will see; the job's own end takes care of itself."""
        for child in self._stopped.list_stopped(self._children.values()):
            if not self._over.is_set():
                self._killed[child.pid] = f"stopped (state T) for {_STOPPED_S:g} s, then killed"
                child.kill()

    async def _restart_later(self, child: Child, at_s: float) -> None:
        """An agent left in good order: at the end, which may wait for another node, or too soon."""
        await asyncio.sleep(LEFT_S)
        if not self._over.is_set():
            self._restart(child, "exit code 0", at_s)

    def _restart(self, child: Child, cause: str, at_s: float) -> None:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTARTS_WINDOW_S:
            self._restarts.popleft()
        self._restarts.append(now)
        if len(self._restarts) > RESTARTS_MAX:
            name = self._paths.log(child.part.replace(" ", "-"))
            self._fail(
                PlatformError(
                    f"perdure's own parts died {RESTARTS_MAX} times in "
                    f"{RESTARTS_WINDOW_S:g} s, the last one {child.part}: {cause}",
                    hint=f"see {name}",
                )
            )
            return
        self._tasks.spawn(self._start_again(child, cause, at_s))

    async def _start_again(self, child: Child, cause: str, at_s: float) -> None:
        """Start a part that has died, once it can be: the ranks train on while a disk refuses."""
        deadline_s, told = time.monotonic() + self._spec.bus.orphan_s, ""
        while not self._over.is_set():
            if self._is_away(child.part):
                deadline_s = time.monotonic() + self._spec.bus.orphan_s
                await asyncio.sleep(_POLL_S)
                continue
            try:
                self._start_part(child.part)
                break
            except PerdureError as error:
                if time.monotonic() >= deadline_s:
                    self._fail(error)
                    return
                if error.message != told:
                    told = error.message
                    self._note(f"{child.part} died: {cause}; {told}: tried again until it can be")
                await asyncio.sleep(_AGAIN_S)
        else:
            return
        self._write_parts()
        restarted_s = self._now()
        self._note(f"{child.part} (pid {child.pid}) died: {cause}; started again")
        if child.part == "nats-server":
            try:
                check_space(self._paths)
            except PlatformError as error:
                self._note(f"{error.message}: nothing is decided until there is room")
        lost = ControllerLost(
            part=child.part, at_s=at_s, pid=child.pid, cause=cause, restarted_s=restarted_s
        )
        self._outbox.put(lost)

    def _is_away(self, part: str) -> bool:
        """Return whether the node of a part is kept away, as by a trace that is played."""
        _, _, node = part.partition(" ")
        return bool(node) and is_locked(self._paths.kept_away(int(node)))

    def _fail(self, error: PerdureError) -> None:
        self._failure = error
        self._over.set()

    async def _look_for_end(self, child: Child, cause: str, at_s: float) -> None:
        """A controller that is gone has finished if the journal says so; else it is missed."""
        bus = self._bus if cause == "exit code 0" else None
        self._ended = await read_end(self._paths, bus, self._spec)
        if self._ended is not None:
            self._over.set()
        else:
            self._restart(child, cause, at_s)

    def _write_parts(self) -> None:
        """Write down who runs the job, if that has changed, or could not be written before."""
        parts = make_parts(self._children, self._started_s)
        if parts != self._parts:
            try:
                write_document(self._paths.parts, parts)
                self._parts = parts
            except PlatformError as error:
                log.warning("%s", error)

    # --- signals ------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._stop, number)
        for number in SITE_SIGNALS:
            loop.add_signal_handler(number, self._pass_on, number)

    def _stop(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP and self._at_terminal:
            self._note(f"the terminal is gone; the job goes on: perdure attach {self._spec.name}")
            return
        self._signals.append(number)
        match len(self._signals):
            case 1:
                snapshot = load_snapshot(self._paths)
                step = describe_open_step(snapshot) if snapshot is not None else ""
                after = f" after the step in progress ({step})" if step else ""
                self._note(f"{number.name}: stopping{after}; once more ends it at once")
                self._tasks.spawn(self._order_stop(number))
            case 2:
                self._note(f"{number.name} again: killing the ranks")
                self._tasks.spawn(self._order("kill", number.name))
                asyncio.get_running_loop().call_later(_KILL_S, self._over.set)
            case _:
                self._over.set()

    async def _order_stop(self, number: signal.Signals) -> None:
        """Have the job stop within what its platform leaves it after SIGTERM."""
        args = {}
        if number == signal.SIGTERM:
            left_s = await asyncio.to_thread(read_left_s, os.environ) or 0.0
            if window_s := max(left_s, self._window_s or 0.0):
                args["window_s"] = window_s
        await self._order("stop", number.name, args)

    def _pass_on(self, number: signal.Signals) -> None:
        """Hand a signal of the site to ranks that handle it; the first one also asks to save."""
        self._note(f"{number.name}: handed to the ranks of this machine that handle it")
        relay = next(relay for relay, passed in RELAYS.items() if passed == number)
        for pid in list_living_descendants(os.getpid()):
            if f"perdure keeper {self._spec.name} " in read_command(pid):
                send_signal(pid, relay)
        if number == signal.SIGUSR1:
            self._tasks.spawn(self._order("checkpoint", "SIGUSR1"))

    async def _order(self, kind: str, who: str, args: Mapping[str, object] = {}) -> None:
        """Repeat a command until the controller has answered it."""
        id_ = f"run-{os.getpid()}-{kind}-{time.monotonic_ns()}"
        given = {"id": id_, "kind": kind, "who": who, "args": args}
        command = msgspec.convert(given, Command)
        while True:
            with contextlib.suppress(PerdureError):
                if self._bus is not None:
                    answer = await self._bus.request(
                        subject_commands(self._spec.name), encode(command), timeout_s=2.0
                    )
                    reply: CommandReply = decode(answer, CommandReply)
                    plain = who == signal.SIGUSR1.name and "does not call perdure" in reply.reason
                    if not plain:  # Its ranks were sent the signal.
                        self._note(f"{kind}: {reply.reason or ('ok' if reply.ok else 'refused')}")
                    return
            await asyncio.sleep(_POLL_S)

    # --- what is shown ------------------------------------------------------------------------

    def _start_watch(self) -> asyncio.Future[None]:
        """Watch files; should that ever end by itself, say so."""

        def tell(watch: asyncio.Future[None]) -> None:
            if not watch.cancelled():
                self._note(f"what is shown here is out of date from now on: {watch.exception()!r}")

        watch = self._tasks.spawn(self._watch_files())
        watch.add_done_callback(tell)
        return watch

    async def _watch_files(self) -> None:
        """Show new lines and pictures, and reap orphans, ten times a second."""
        while True:
            self._show_lines()
            self._show_snapshot()
            self._write_parts()
            reap_adopted({child.pid for child in self._children.values()})
            self._end_stopped()
            self._end_logins()
            await asyncio.sleep(_POLL_S)

    async def _watch_logs(self) -> None:
        """Have what this machine's parts write take a bounded room; agents see to their own."""
        output = os.environ.get("PERDURE_OUTPUT", "")
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(cut_logs, self._paths.logs, output)

    def _end_logins(self) -> None:
        """Cut off the machines whose logins are to end, as somebody has asked."""
        if self._server is None or self._bus is None:
            return

        def reload() -> None:
            if (child := self._children.get("nats-server")) is not None:
                child.process.send_signal(signal.SIGHUP)

        told = end_asked(self._paths, self._server, reload)
        if told and told != self._told:  # A request that cannot be removed is found at each look.
            self._note(told)
        self._told = told

    def _show_lines(self, *, last: bool = False) -> None:
        if self._spec.tee == "all":
            for line in self._tails.poll(last=last):
                self._say(line)

    def _show_snapshot(self) -> None:
        try:
            changed = os.stat(self._paths.snapshot).st_mtime_ns
        except OSError:
            return
        if changed != self._shown:
            self._shown = changed
            snapshot = load_snapshot(self._paths)
            if snapshot is not None:
                if snapshot.state in ENDED:  # What ranks have left unfinished comes before that.
                    self._show_lines(last=True)
                self._on_snapshot(snapshot)
                self._show_waits(snapshot.waits)
                for row in snapshot.mended:
                    if row.at_s > self._mended_s:
                        self._mended_s = row.at_s
                        self._note(f"the journal was damaged: {row.reason}")

    def _show_waits(self, waits: tuple[str, ...]) -> None:
        for why in waits:
            if why not in self._waits:
                self._note(f"{why}; perdure tries again until it can")
        if self._waits and not waits:
            self._note("the wait is over: all ranks are started")
        self._waits = waits

    def _finish_snapshot(self) -> None:
        """Leave no picture of a running job where the job was ended by force."""
        snapshot = load_snapshot(self._paths)
        if snapshot is not None and self._ended is None:
            by_force = self._failure.message if self._failure else "ended by force"
            state = "failed" if self._failure else "stopped"
            snapshot = msgspec.structs.replace(snapshot, state=state, reason=by_force)
            with contextlib.suppress(PlatformError):
                write_document(self._paths.snapshot, snapshot)
        self._show_snapshot()

    def _note(self, line: str) -> None:
        log.info(line)
        self._say(f"[perdure] {line}")

    def _say(self, line: str) -> None:
        """Show a line; a terminal that has gone away is no reason to end the training."""
        try:
            self._on_line(line)
        except OSError:
            self._on_line = lambda line: None


# --- the parts of which a job has several, or only some jobs have one ----------------------------


def end_server(server: Child) -> None:
    """Let nats-server close its store; kill it if it does not."""
    server.process.terminate()
    try:
        server.process.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        server.process.kill()


def make_parts(children: Mapping[str, Child], started_s: float) -> Parts:
    """Return who runs the job now."""

    def pid_of(kind: str) -> int:
        child = children.get(kind)
        return child.pid if child else 0

    return Parts(
        started_s=started_s,
        run=os.getpid(),
        nats=pid_of("nats-server"),
        controller=pid_of("controller"),
        agents={
            int(part.split()[1]): child.pid
            for part, child in children.items()
            if part.startswith("agent")
        },
        slurm=read_allocation(os.environ),
        host=socket.gethostname(),
    )


async def read_torchft_variables(
    spec: JobSpec, paths: JobPaths, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return what the agents of a torchft job find in their environment, once it is known.

    torchft's manager logs several lines a step unless it is asked not to.

    Raises:
        PlatformError: there is no lighthouse in time.
    """
    if spec.lighthouse is None:
        return {}
    url = spec.lighthouse.url or await wait_lighthouse(paths, spec.lighthouse.bind)
    return {LIGHTHOUSE_URL: url, "RUST_LOG": environ.get("RUST_LOG", "warn")}


def describe_door(spec: JobSpec, url: str) -> list[str]:
    """Return what whoever starts a replica group has to know."""
    remote = [
        f"perdure node invite {spec.name} invites another machine, on which perdure node join FILE "
        "has the ranks that import perdure.torchft heard"
    ]
    return [
        f"job {spec.name} serves replica groups that others start, by torchrun or otherwise:",
        f"  export TORCHFT_LIGHTHOUSE={url}",
        f"  export {' '.join(f'{name}={value}' for name, value in PATIENCE.items())}",
        *(remote if spec.remote else ()),
        f"perdure status {spec.name} --devices shows who has come; Ctrl-C, or perdure stop "
        f"{spec.name}, ends this and none of the groups",
    ]


async def wait_lighthouse(paths: JobPaths, host: str) -> str:
    """Return the URL of the lighthouse that is a part of the job, once it listens.

    Raises:
        PlatformError: it does not in time.
    """
    deadline_s = time.monotonic() + _READY_S
    while (known := read_document(paths.lighthouse, LighthouseFile)) is None:
        if time.monotonic() > deadline_s:
            hint = f"see {paths.log('lighthouse')}"
            raise PlatformError(f"no lighthouse after {_READY_S:g} s", hint=hint)
        await asyncio.sleep(0.01)
    return render_url(host, known.port)


def render_url(host: str, port: int) -> str:
    """Return the URL at which a lighthouse on this machine is reached that is bound to `host`.

    >>> render_url("127.0.0.1", 29510), render_url("::1", 29510)
    ('http://127.0.0.1:29510', 'http://[::1]:29510')
    """
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
