"""The node agent's process: the machine of `perdure.agent`, wired to bus, keeper, ranks, /proc.

Everything that happens becomes one input of the machine, handled to the end before the next one
is looked at. A rank's exit takes no timer and no poll on its way: the keeper's line is read, the
ring is read, and the event is in the outbox.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Coroutine, Iterable, Mapping
from secrets import token_hex
from typing import Any, assert_never

from perdure.adapters.devices import Nvml, choose_group_devices, list_device_ids
from perdure.adapters.host import (
    catches_signal,
    pick_free_ports,
    read_boot_id,
    read_state,
)
from perdure.adapters.nats import NatsBus
from perdure.adapters.nccl import has_nvidia_gpu
from perdure.adapters.notices import open_sources
from perdure.adapters.stacks import dump_stack
from perdure.agent.machine import Agent
from perdure.agent.messages import (
    AgentStarted,
    CarryOut,
    CollectStacks,
    EndKeeper,
    Input,
    KeeperGone,
    KeeperHeard,
    KeeperSaid,
    KeeperUp,
    Leave,
    OrderReceived,
    Report,
    Request,
    SpawnRanks,
    StacksCollected,
    StartKeeper,
    SupervisorGone,
    TellKeeper,
    TellWorker,
    TermHeard,
)
from perdure.agent.state import NodeIdentity
from perdure.failpoints import failpoint
from perdure.launch.environment import GROUP_DEVICES, RDZV_SECRET, rank_environment
from perdure.model.bus.version import check_spoken
from perdure.model.bus.wire import (
    Endpoint,
    FromKeeper,
    KeeperExit,
    KeeperExited,
    KeeperSpawn,
    KeeperSpawned,
    KeeperState,
    KeeperStoreReady,
    RankLaunch,
    read_order,
    subject_beats,
    subject_events,
    subject_orders,
)
from perdure.model.codec import encode
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.events import TimerFired
from perdure.model.fitting import fit_beat
from perdure.model.input.raw import carry_variables, restore_job
from perdure.model.job import JobSpec
from perdure.model.orders import CheckOwn, RunProbe, WatchClosely
from perdure.model.paths import JobPaths
from perdure.model.signals.progress import BEAT_S
from perdure.model.verdicts import EXIT_SKEW_S
from perdure.service.access.credentials import is_loopback
from perdure.service.agent.beats import RankReader
from perdure.service.agent.keeper import KeeperLink
from perdure.service.agent.logs import LOOK_S, LogWatch
from perdure.service.agent.notices import NoticeWatch, ReplacedError, wait_to_leave
from perdure.service.agent.outbox import Outbox
from perdure.service.agent.own import OwnCheckpoints
from perdure.service.agent.probe import Prober
from perdure.service.agent.ranks import WorkerServer
from perdure.service.agent.sweeps import DeviceTelemetry, LinkTelemetry, Ranks
from perdure.service.caches import choose_caches
from perdure.service.jobfiles import MINE, load_endpoint, load_spec, write_document, write_steering
from perdure.service.jobfolders import paths_of, resolve_home
from perdure.service.part import DropLog, Tasks, read_run_pid, run_part, watch_process
from perdure.service.placement import choose_gloo_interface, read_own_address
from perdure.service.ports import Bus
from perdure.service.processes import part_command
from perdure.worker.native.build import find_nccl_plugin, plugin_command

log = logging.getLogger("perdure.agent")

_KEEPER_EXIT_S = 5.0
_FLUSH_S = 3.0
_SPAWN_AGAIN_S = 0.5
"""Until a full disk is tried again."""
RANK_ONLY = ("PERDURE_RING", "PERDURE_RANK", "PERDURE_GENERATION", "PERDURE_KEEPER", RDZV_SECRET)
"""Never handed down to the keeper, should perdure itself run below a rank; nor is a secret."""


class AgentService:
    """One agent of one node; `run` is its life."""

    def __init__(
        self,
        spec: JobSpec,
        node: int,
        paths: JobPaths,
        bus: Bus,
        *,
        home: str,
        clock_offset_s: float,
        env: Mapping[str, str],
        incarnation: str,
        keeper: list[str] | None = None,
    ) -> None:
        """Wire the machine; `keeper` is the command that starts one."""
        self._spec, self._node, self._paths, self._bus = spec, node, paths, bus
        self._home, self._offset_s, self._drops = home, clock_offset_s, DropLog(log)
        marks = {"PERDURE_HOME": home, "PERDURE_JOB": spec.name, "PERDURE_NODE": str(node)}
        caches = choose_caches(spec, paths, env)
        self._env = _make_base(spec, node, env) | caches
        cold = {"PERDURE_COLD": "1"} if spec.cold else {}
        offset = {"PERDURE_CLOCK_OFFSET_S": repr(clock_offset_s)}
        nvml = Nvml.open(env, self._env.get(GROUP_DEVICES, ""))
        self._devices = DeviceTelemetry(clock_offset_s, nvml)
        identity = NodeIdentity(
            node=node,
            incarnation=incarnation,
            host=read_own_address(env),
            boot_id=read_boot_id(),
            device_ids=list_device_ids(spec, node, nvml.ids if nvml else ()),
            speaks=MINE,
        )
        self.machine = Agent(spec, identity)
        self._outbox = Outbox(bus, subject_events(spec.name, node), node=node, source=incarnation)
        self._outbox.on_term = lambda term: self.take(TermHeard(term=term))
        self._workers = WorkerServer(spec.name, self._outbox, self.take)
        self._reader = RankReader(paths, node, clock_offset_s)
        self._links = LinkTelemetry(paths, node, clock_offset_s, alone=spec.nodes == 1)
        self.notices = self._watch_notices(env)
        self._prober = Prober(
            bus,
            spec.name,
            node,
            address=self._choose_address,
            report=self._outbox.put,
            now=self.now,
        )
        self._own = OwnCheckpoints(spec, node, self._outbox, now=self.now)
        log.info("what torch compiles is kept in %s", ", ".join(caches.values()) or "its own place")
        self._keeper = KeeperLink(
            paths.keeper_socket(node),
            keeper or part_command("keeper", spec.name, str(node)),
            env=self._env | marks | cold | offset,
            log_path=paths.log(f"keeper-{node}"),
            marks=marks,
            up=self._greet_keeper,
            said=self._hear_keeper,
            gone=self._miss_keeper,
            silent=self.take,
            heard=lambda: self.take(KeeperHeard()),
        )
        self._tasks = Tasks()
        self._dumping, self._awaited = set[tuple[int, int]](), dict[int, str]()
        self._nccl_plugin, self._told_exit = find_nccl_plugin() if has_nvidia_gpu() else "", False
        self._left = asyncio.Event()
        self._failed: BaseException | None = None
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Return job time."""
        return time.monotonic() + self._offset_s

    def _watch_notices(self, env: Mapping[str, str]) -> NoticeWatch:
        spec, node = self._spec.preemption, self._node
        return NoticeWatch(
            spec,
            open_sources(spec, node, env),
            node=node,
            report=self._outbox.put,
            now=self.now,
            handles=self._handle_term,
        )

    def _choose_address(self) -> str:
        """Return where this node's ranks can be reached."""
        host = self.machine.identity.host
        return self._links.reader.choose_address(loopback=is_loopback(host)) or host

    async def run(self) -> None:
        """Serve the node until the job ends here, or until cancelled (and then touch nothing)."""
        try:
            await self._workers.start(self._paths.worker_socket(self._node))
            for whom in (self._node, "all"):
                await self._bus.subscribe(subject_orders(self._spec.name, whom), self._take_order)
            await self._prober.start()
            self._start(self._outbox.run())
            self._start(self._beat())
            self._start(self._watch_logs())
            self._start(self._links.run(self._view_ranks, self.now))
            self._start(self._devices.run(lambda: self._view_ranks().pids))
            if self._spec.checkpoint.own_copy and self._spec.unordered.mends:
                self._start(self._own.keep_copies())
            if self._spec.checkpoint.own and self._spec.checkpoint.url:
                self._start(self._own.keep_away(lambda: 0 in self._view_ranks().pids))
            if has_nvidia_gpu() and not self._nccl_plugin:
                self._start(self._build_plugin())
            for source in self.notices.sources:
                self._start(self.notices.watch(source))
            if self._node >= self._spec.local_nodes:
                self._start(self._leave_in_time())
            if self._spec.unordered.acknowledges:
                self._start(self.notices.acknowledge(lambda: not self._view_ranks().pids))
            self.take(AgentStarted())
            await self._left.wait()
            if self._told_exit:
                await self._keeper.end(_KEEPER_EXIT_S)
            if self._failed is not None:
                raise self._failed
            await self._own.finish()
            await self._outbox.flush(_FLUSH_S)
        finally:
            await self._workers.close()
            await self._tasks.end()
            await self._prober.close()
            self._keeper.close()
            self._links.close()
            self._devices.close()

    # --- in -----------------------------------------------------------------------------------

    def take(self, input_: Input) -> None:
        """Hand `input_` to the machine and do what it asks."""
        if self._left.is_set():
            return
        self._do_all(self.machine.handle(self.now(), input_))
        self._set_timer()

    def _take_order(self, data: bytes) -> None:
        failpoint("agent/order")
        try:
            order, unknown = read_order(data)
        except ProtocolError as error:
            self._drops.note(f"order of a controller: {error}")
            return
        for type_ in unknown:
            self._drops.note(f"order of a controller: unknown type {type_!r}")
        self.take(OrderReceived(order=order))
        failpoint("agent/ordered")

    def _greet_keeper(self, state: KeeperState) -> None:
        ranks, reader = self._spec.ranks_of(self._node), self._reader
        newest, begun = reader.read_newest_generation(ranks)
        exits = [reader.read_end(record, self.now()) for record in state.exits]
        if newest > state.generation:  # An earlier keeper's, which no agent saw die.
            exits += reader.read_lost(newest, ranks, self.now())
        self.take(
            KeeperUp(
                state=state,
                exits=tuple(exits),
                started_s=reader.read_spawn_s(state.generation, state.running),
                newest_on_disk=newest,
                begun=begun,
            )
        )
        log.info("keeper %d: generation %d, %s", state.pid, state.generation, state.running)

    def _miss_keeper(self, died_s: float) -> None:
        """Say that the keeper is gone, with what the rings of its ranks say."""
        lost, at_s = self.machine.state.keeper, died_s + self._offset_s
        ranks = sorted(lost.running) if lost else ()
        exits = self._reader.read_lost(lost.generation if lost else -1, ranks, at_s)
        _, begun = self._reader.read_newest_generation(self._spec.ranks_of(self._node))
        self.take(KeeperGone(at_s=at_s, exits=tuple(exits), begun=begun))

    def _hear_keeper(self, message: FromKeeper) -> None:
        if isinstance(message, KeeperExited):
            failpoint("agent/exit")
            self.take(self._reader.read_end(message.record, self.now()))
        elif not isinstance(message, KeeperState):
            cold = isinstance(message, KeeperStoreReady) and not message.port
            host = self.machine.identity.host
            started = isinstance(message, KeeperSpawned)
            self.take(
                KeeperSaid(
                    message=message,
                    free_port=pick_free_ports(host, 1)[0] if cold else 0,
                    awaited=self._awaited.pop(message.generation, "") if started else "",
                )
            )

    def _set_timer(self) -> None:
        deadline = self.machine.next_deadline()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            delay_s = max(0.0, deadline - self.now()) + 0.001
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self.take, TimerFired())

    # --- out ----------------------------------------------------------------------------------

    def _do(self, request: Request) -> None:
        match request:
            case StartKeeper():
                self._start(self._keeper.run())
            case TellKeeper(message=message):
                self._told_exit = self._told_exit or isinstance(message, KeeperExit)
                self._keeper.send(message)
            case EndKeeper(reason=reason):
                self._keeper.kill(reason)
            case SpawnRanks():
                failpoint("agent/spawn")
                self._spawn(request)
            case TellWorker(rank=rank, message=message):
                self._workers.send(rank, message)
            case CarryOut(order=WatchClosely() as order):
                self._links.watch(order)
            case CarryOut(order=RunProbe() as order):
                self._prober.take(order)
            case CarryOut(order=CheckOwn() as order):
                if self._own.is_new(order):
                    self._start(self._own.check(order))
            case CarryOut():
                pass  # It is not an agent's.
            case CollectStacks():
                self._start(self._collect(request))
            case Report(event=event, after=after):
                log.info("%.300s", event)
                self._outbox.put(event, (lambda: self._do_all(after)) if after else None)
            case Leave(reason=reason, replaced=replaced):
                log.info("leaving: %s", reason)
                if replaced and self._node >= self._spec.local_nodes:
                    self._failed = self._failed or ReplacedError(reason)
                self._note_end()
                self._left.set()
            case _:
                assert_never(request)

    def _note_end(self) -> None:
        """Leave the job's exit code to who keeps this agent up on a machine from elsewhere."""
        told = self.machine.state.assignment
        if told is not None and told.exit_code is not None and self._node >= self._spec.local_nodes:
            with contextlib.suppress(PlatformError):  # Its disk is full; then nobody is told.
                write_document(self._paths.ended, told.exit_code)

    def _do_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._do(request)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn(work).add_done_callback(self._note_done)

    def _note_done(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug of ours: the next agent takes over; silence would be worse.
            self._failed = error
            self._left.set()

    def _spawn(self, request: SpawnRanks) -> None:
        """Have the keeper start ranks; once the disk takes what they have to know.

        It is asked for once only. Should it be out of date by then, the keeper does not start it.
        On GPUs whose memory dead ranks had, it is free first, or `memory.WAIT_S` have passed.
        """
        keeper, slots = self.machine.state.keeper, {self._spec.slot_of(r) for r in request.members}
        dead = self._devices.memory.list_dead(
            frozenset(keeper.running.values()) if keeper is not None else (),
            lambda rank: not slots or self._spec.slot_of(rank) in slots,
        )
        if dead:
            self._start(self._spawn_when_ready(request, dead))
        else:
            self._send_spawn(request)

    async def _spawn_when_ready(
        self, request: SpawnRanks, dead: Mapping[str, frozenset[int]]
    ) -> None:
        """Have ranks started once nothing is waited for; unless the keeper is another by then.

        Another keeper is asked anew, for the next generation. What was waited is kept by generation
        (`_awaited`) until the keeper says that it has started it.
        """
        keeper, generation = self.machine.state.keeper, request.assignment.generation
        said = await self._devices.memory.wait(dead)
        if self.machine.state.keeper is not keeper or self._left.is_set():
            return
        if said:
            log.warning("generation %d: %s", generation, said)
            self._awaited[generation] = said
        self._send_spawn(request)

    def _send_spawn(self, request: SpawnRanks) -> None:
        try:
            self._keeper.send(self._render_spawn(request))
        except (PlatformError, OSError) as error:
            log.error("%s; ranks are started once it can be", error)
            asyncio.get_running_loop().call_later(_SPAWN_AGAIN_S, self._send_spawn, request)

    def _render_spawn(self, request: SpawnRanks) -> KeeperSpawn:
        assignment, members = request.assignment, request.members
        spec, paths, generation = self._spec, self._paths, assignment.generation
        write_steering(paths, self._node, assignment)
        launches = []
        for rank in members or spec.ranks_of(assignment.slots_of(self._node)):
            env = rank_environment(
                restore_job(spec),
                rank,
                assignment,
                paths,
                node=self._node,
                base=self._env,
                home=self._home,
                clock_offset_s=self._offset_s,
                nccl_plugin=self._nccl_plugin,
            )
            env = carry_variables(env)
            out, err = (paths.stream(generation, rank, s, spec.log_dir) for s in ("out", "err"))
            ring = paths.ring(generation, rank)
            launches.append(RankLaunch(rank, env, out, err, ring, self._find_input(generation)))
        return KeeperSpawn(
            generation=generation,
            ranks=tuple(launches),
            script=spec.script,
            args=spec.args,
            module=spec.module,
            no_python=spec.no_python,
            cwd=spec.cwd,
            cold=spec.cold,
            beside=request.beside,
            exit_skew_s=EXIT_SKEW_S if spec.unordered.mends else 0.0,
        )

    def _find_input(self, generation: int) -> int:
        """Return the process whose input a rank reads: with one rank, in its first life."""
        one = self._spec.world_size == 1 and not self._spec.groups and generation == 0
        pid = self._env.get("PERDURE_RUN_PID", "") if one else ""
        return int(pid) if pid.isdecimal() else 0

    async def _collect(self, order: CollectStacks) -> None:
        """Take stacks, all at a time; a rank whose stack is being taken is left out."""
        wanted = {r: p for r, p in order.pids.items() if (order.generation, r) not in self._dumping}
        if not wanted:
            return
        keys = {(order.generation, rank) for rank in wanted}
        self._dumping |= keys
        try:
            dumps = [
                dump_stack(pid, nonblocking=read_state(pid) in "Tt") for pid in wanted.values()
            ]
            stacks = dict(zip(wanted, await asyncio.gather(*dumps), strict=True))
        finally:
            self._dumping -= keys
        self.take(
            StacksCollected(
                generation=order.generation,
                stacks=stacks,
                traces=self._find_traces(order.generation),
            )
        )

    def _find_traces(self, generation: int) -> str:
        """Return the directory of Flight Recorder's traces; empty where no rank wrote any."""
        traces = self._paths.traces(generation)
        return traces if os.path.isdir(traces) else ""

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        seq, due_s = 0, loop.time()
        subject, me = subject_beats(self._spec.name, self._node), self.machine.identity
        while True:
            seq += 1
            beat = self._reader.read_beat(
                me.incarnation, seq, self.now(), self.machine.state.keeper
            )
            beat = fit_beat(self._devices.join(self._links.join(beat)), self._bus.payload_max)
            await self._bus.publish(subject, encode(beat))
            due_s = max(due_s + BEAT_S, loop.time())
            await asyncio.sleep(due_s - loop.time())

    async def _watch_logs(self) -> None:
        """Have what ranks write take a bounded room."""
        watch = LogWatch(self._spec, self._paths, self._node)
        while True:
            await asyncio.sleep(LOOK_S)
            view = self._view_ranks()
            await asyncio.to_thread(watch.look, view.generation, tuple(view.pids))

    async def _build_plugin(self) -> None:
        """Have a process beside build the NCCL plugin, for the ranks that start later."""
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            builder = await asyncio.create_subprocess_exec(
                *plugin_command(), stdin=nothing, stderr=pipe
            )
        except OSError as error:
            log.warning("NCCL is not watched: its plugin cannot be built: %s", error)
            return
        try:
            _, said = await builder.communicate()
        finally:
            if builder.returncode is None:
                builder.terminate()
                await builder.wait()
        if builder.returncode:
            log.warning("NCCL is not watched: %s", said.decode(errors="replace").strip())
        self._nccl_plugin = find_nccl_plugin()

    async def _leave_in_time(self) -> None:
        """Leave a machine from elsewhere."""
        orphan_s = self._spec.bus.orphan_s
        orphaned = await wait_to_leave(
            self._bus, self.notices, lambda: not self._view_ranks().pids, orphan_s
        )
        self._failed = self._failed or orphaned
        self.take(SupervisorGone())

    def _view_ranks(self) -> Ranks:
        """Return whose connections are looked at; the store's are none between ranks."""
        keeper, wanted = self.machine.state.keeper, self.machine.state.assignment
        if keeper is None:
            return Ranks(-1, {}, frozenset(), {})
        ports = frozenset({keeper.store_port, wanted.master_port if wanted else 0} - {0})
        running = dict(keeper.running)
        return Ranks(keeper.generation, running, ports, self._reader.on_device)

    def _handle_term(self) -> bool:
        """Return whether there are ranks here, and all of them handle SIGTERM."""
        pids = self._view_ranks().pids.values()
        return bool(pids) and all(catches_signal(pid, signal.SIGTERM) for pid in pids)


# --- the process --------------------------------------------------------------------------------


def main(job: str, node: int) -> int:
    """Run the agent of `node` of `job` as a process; return its exit code."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    return run_part(_main(job, node), log, "; the keeper and its ranks go on")


async def _main(job: str, node: int) -> None:
    home = resolve_home()
    paths = paths_of(home, job)
    spec, endpoint = load_spec(paths), load_endpoint(paths, f"agent-{node}")
    check_spoken(MINE, endpoint.speaks, f"the job {job}")
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    run_pid = read_run_pid()
    bus = await connect(endpoint, f"perdure agent {job} {node}", run_pid)
    if bus is None:
        log.error("`perdure run` (pid %d) is gone", run_pid)
        return
    try:
        service = AgentService(
            spec,
            node,
            paths,
            bus,
            home=home,
            clock_offset_s=endpoint.clock_offset_s,
            env=os.environ,
            incarnation=f"a{node}-{os.getpid()}-{token_hex(3)}",
        )
        for name in spec.preemption.signals:
            number = signal.Signals[name]
            loop.add_signal_handler(number, service.notices.warn, name)
        with watch_process(run_pid, lambda: service.take(SupervisorGone())):
            await service.run()
    finally:
        await bus.close()


async def connect(endpoint: Endpoint, name: str, run_pid: int) -> NatsBus | None:
    """Return a connection, however long it takes; None once process `run_pid` is gone."""
    while True:
        try:
            return await NatsBus.connect(endpoint, name=name, timeout_s=2.0)
        except PlatformError as error:
            log.warning("%s; trying again", error)
            if run_pid and read_state(run_pid) in "XZ":
                return None
            await asyncio.sleep(0.1)


def _make_base(spec: JobSpec, node: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return what the node's ranks inherit of its agent's environment, and what this node adds."""
    base = {name: value for name, value in env.items() if name not in RANK_ONLY}
    if share := choose_group_devices(spec, node, env):
        base[GROUP_DEVICES] = share
    if interface := choose_gloo_interface(spec, env):
        base["GLOO_SOCKET_IFNAME"] = interface
    return base
