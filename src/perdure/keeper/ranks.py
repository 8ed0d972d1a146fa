"""What the keeper holds: ranks and stores by generation, and the orders about them.

At most one generation lives: an order to start a newer one first ends what is older, and a
generation that was ended is never started again, however late its order arrives.
"""

import contextlib
import errno
import glob
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from resource import struct_rusage

import msgspec

from perdure.adapters.host import (
    Process,
    catches_signal,
    has_stopped,
    read_command,
    read_process,
    read_state,
    read_text,
    scan_processes,
    send_signal,
    send_signal_to_group,
)
from perdure.failpoints import failpoint
from perdure.keeper import execution as launch
from perdure.keeper import exits
from perdure.keeper import reaping as reap
from perdure.keeper.image import ImageProcess, Warmth
from perdure.keeper.output import RankOutput
from perdure.keeper.writers import Save, list_written
from perdure.keeper.zygote import (
    FORK_TIMEOUT_S,
    ForkFailed,
    ForkRanks,
    ForkStore,
    RanksForked,
    StoreForked,
)
from perdure.model.bus.wire import (
    FromKeeper,
    KeeperExited,
    KeeperSpawn,
    KeeperSpawned,
    KeeperState,
    KeeperStopped,
    KeeperStore,
    KeeperStoreReady,
    KeeperWaits,
    RankLaunch,
)
from perdure.model.errors import ProtocolError
from perdure.model.failures import ExitRecord
from perdure.model.input.raw import restore_spawn, restore_variables
from perdure.model.paths import JobPaths
from perdure.worker.ring import RingWriter, is_alone
from perdure.worker.start.streams import DISK_ERRORS
from perdure.worker.system.cgroups import OomKills

_NAMED_MAX = 5
_EVERYTHING = 1 << 62
_RESCAN_S = 0.005
_RESCAN_S_MAX = 0.1
_IDLE_S = 1.0
_STANDBY = -2
"""Generation of a store that no generation has yet."""
_STANDBY_AFTER_S = 2.0
"""From the start of ranks, which need the processors, to the fork of a standby."""
_STANDBY_S = 5.0
"""Longest wait for that fork; the generation after it makes its own store then."""
_AGAIN_S = 2.0
"""Until processes are asked for again that the machine has refused."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_AWAY = DISK_ERRORS | {errno.ENFILE, errno.ENOMEM}
"""Errors of a machine, not of the job: those that trained here before can train here later."""
_RING_KEPT_S = 600.0
"""Seconds for which the ring of a rank that has ended stays: an agent may be away meanwhile."""
_LINGER_S = 15.0
"""Seconds that processes below the ranks have to finish once all ranks have ended well.

The agent and the controller wait for 20 s."""
_LAST_WORD_S = 2.0
"""Seconds between SIGTERM and SIGKILL for such processes, and for those without a handler."""
_CLEANERS_S = 10.0
"""Seconds for helpers that remove shared memory, once the processes that used it are gone."""
_SHARED_LOOK_S = 3.0
_WRITING_S = 0.03
"""Seconds between two looks at ranks that save: a save that follows at once begins soon."""
_SAVED_S = 1.0
"""Seconds after the last file of a save before a rank counts as done with it."""
_STOPS_S = 0.05
"""Longest wait until ranks stand still: a driver may hold one for longer."""
_ROOM_S, _ROOM_S_MAX = 1.0, 30.0
"""Until a start is tried again that the disk has refused; twice as long each time."""


@dataclass(slots=True)
class Rank:
    """One rank that was started."""

    pid: int
    generation: int
    rank: int
    evidence: exits.Evidence
    asked: bool = False
    exit_skew_s: float = 0.0
    raised_s: float = 0.0
    """When its last exception was seen to be saved; 0 before."""
    ended_for: str = ""
    """Why the keeper has killed it."""
    saving: str = ""
    """The file of a checkpoint that it still wrote when the keeper killed it."""
    record: ExitRecord | None = None


@dataclass(slots=True)
class Ending:
    """An order to end generations, until nothing of them is left."""

    upto: int
    deadline_s: float
    """SIGKILL from here on."""
    warn_s: float = 0.0
    """SIGTERM from here on."""
    next_look_s: float = 0.0
    wait_s: float = _RESCAN_S
    warned_s: float = 0.0
    """When SIGTERM was sent; 0 before."""
    named: bool = False
    """The ranks that it waits for were named."""
    writers_s: float = 0.0
    """Until then, a rank may finish a file of a checkpoint."""
    written_s: float = -math.inf
    """When a rank was last seen to write one."""
    written: dict[int, str] = field(default_factory=dict)
    """Pids of ranks that were seen to write -> file."""
    saves: dict[int, Save] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)
    """Pids of ranks that have finished a save: they write the next one already."""
    stopped: set[int] = field(default_factory=set)
    """Pids of ranks that stood still at the last look before their end."""
    answers: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    """Processes below the ranks that were killed and named."""


@dataclass(slots=True)
class Forking:
    """A request to an image that is not answered yet."""

    order: KeeperSpawn | KeeperStore
    image: ImageProcess
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Standby:
    """A store that serves already, for the generation that comes next."""

    pid: int
    port: int
    order: KeeperStore


class Ranks:
    """Orders in, processes out. Time-outs are kept by `advance`, which the loop calls often."""

    def __init__(
        self,
        job: str,
        paths: JobPaths,
        mark: str,
        warmth: Warmth,
        *,
        send: Callable[[FromKeeper], None],
        log: Callable[[str], None],
    ) -> None:
        """Hold nothing yet. `mark` is this keeper's `PERDURE_KEEPER`."""
        self._job, self._paths, self._mark = job, paths, mark
        self._warmth, self._send, self._log = warmth, send, log
        self.output = RankOutput(log)
        self._offset_s = float(os.environ.get("PERDURE_CLOCK_OFFSET_S", "0") or 0)
        self.generation = -1
        self._ended = -1
        """Generations up to this one are never started again."""
        self._ranks: dict[int, Rank] = {}
        """By rank, of `generation`."""
        self._by_pid: dict[int, Rank] = {}
        self._roots: dict[int, int] = {}
        """Pid -> generation of every rank and store, for telling orphans' generations."""
        self._spawned: KeeperSpawned | None = None
        self._waiting: list[KeeperSpawn] = []
        """Ordered and not yet begun: a new generation, or members beside the one that lives."""
        self._store: KeeperStore | None = None
        self._served: KeeperStore | None = None
        """The newest order for a store."""
        self._store_ready: KeeperStoreReady | None = None
        self._store_pid = 0
        self._stores: set[int] = set()
        """Stores that live, of any generation: they never end by themselves."""
        self._standby: Standby | None = None
        self._standby_s = math.inf
        """When the next standby is made."""
        self._forking: Forking | None = None
        self._again_s = 0.0
        """Nothing is started before: there was no process to be had, or no room."""
        self._no_room: KeeperWaits | None = None
        self._room_s = _ROOM_S
        self._evidence: dict[int, exits.Evidence] = {}
        self._unclaimed: dict[int, tuple[int, struct_rusage, float]] = {}
        self._ending: Ending | None = None
        self._cleaners: dict[int, tuple[int, float]] = {}
        """Helpers of generations that have ended: pid -> start time, and when they are killed."""
        self._ended_pids: set[int] = set()
        """Processes of ended generations whose shared memory is not looked at yet."""
        self._shared_look_s = 0.0
        self._shared_before: set[str] = set()
        """What was in shared memory before the oldest generation whose helpers still live."""
        self._old_rings: deque[tuple[float, str]] = deque()
        """When ranks have ended, the oldest first, and their rings."""
        self._oom_kills = OomKills(mark)
        self._oom_kills.tidy(lambda mark: reap.keeper_mark(int(mark.partition(":")[0])) == mark)
        self._first_start = 0

    # --- questions ----------------------------------------------------------------------------

    @property
    def alive(self) -> dict[int, int]:
        """Rank -> pid, of the newest generation."""
        return {r.rank: r.pid for r in self._ranks.values() if r.record is None}

    @property
    def all_stopped(self) -> bool:
        """Whether nothing lives and nothing is under way."""
        under_way = self._ending or self._forking or self._ended_pids
        return not under_way and not self.alive

    @property
    def stores(self) -> list[int]:
        """Pids of the stores that live."""
        return sorted(self._stores)

    @property
    def next_look_s(self) -> float:
        """Seconds until `advance` has something to do."""
        if self._ending is None or (self._forking and self._forking.order.generation != _STANDBY):
            return _IDLE_S
        return max(0.0, self._ending.next_look_s - time.monotonic())

    def describe(self) -> KeeperState:
        """Return what there is."""
        ready = self._store_ready
        return KeeperState(
            pid=os.getpid(),
            generation=self.generation,
            running=self.alive,
            exits=exits.fit_records([r.record for r in self._ranks.values() if r.record]),
            store_port=ready.port if ready is not None and self._store_pid else 0,
            store_generation=ready.generation if ready is not None else -1,
            warm=self._warmth.current is not None,
            why_cold=self._warmth.why_cold,
        )

    @property
    def _spared(self) -> set[int]:
        """Processes below the keeper that belong to no generation."""
        return self._warmth.pids | {self.output.pid, self._standby.pid if self._standby else 0}

    # --- orders -------------------------------------------------------------------------------

    def spawn(self, order: KeeperSpawn) -> None:
        """Start a generation, once everything older is gone and it is known how."""
        if order.generation <= self._ended:
            self._send(KeeperStopped(order.generation))
        elif order.beside:
            self._spawn_beside(order)
        elif self._spawned is not None and self._spawned.generation == order.generation:
            self._send(self._spawned)
        elif self._is_under_way(order.generation) or order in self._waiting:
            if self._no_room is not None and order in self._waiting:
                self._send(self._no_room)
        elif order.generation <= self.generation:
            self._send(KeeperStopped(order.generation))
        elif all(one.generation < order.generation for one in self._waiting):
            self._waiting = [order]
            self._again_s, self._room_s, self._no_room = 0.0, _ROOM_S, None
            if self.generation >= 0 and self._ended < order.generation - 1:
                self.kill(order.generation - 1, 0.0, answer=False)

    def _spawn_beside(self, order: KeeperSpawn) -> None:
        """Start members beside the ranks of the generation that lives, each once."""
        known = {one.rank for one in order.ranks} & set(self._ranks)
        if known and self._spawned is not None:
            pids = {rank: self._ranks[rank].pid for rank in known}
            self._send(msgspec.structs.replace(self._spawned, pids=pids, beside=True))
        under_way = [*self._waiting, *([self._forking.order] if self._forking else [])]
        if order.generation == self.generation and not known and order not in under_way:
            self._waiting.append(order)

    def serve_store(self, order: KeeperStore) -> None:
        """Serve a store, in the same way."""
        ready = self._store_ready
        if order.generation <= self._ended:
            self._send(KeeperStopped(order.generation))
        elif ready is not None and ready.generation == order.generation:
            if ready.port and not self._store_pid:
                ready = KeeperStoreReady(order.generation, 0, "the store has ended")
            self._send(ready)
        elif not self._is_under_way(order.generation, store=True) and (
            self._store is None or self._store.generation < order.generation
        ):
            self._store = self._served = order
            self._use_standby()

    def _use_standby(self) -> None:
        """Have the standby be the store that was ordered, if it serves and is like that."""
        order, standby = self._store, self._standby
        if order is None or standby is None:
            return
        self._standby = None  # One that cannot be used ends with the older generation.
        serves = read_state(standby.pid) not in "TtXZ"  # It may just have been killed, or stopped.
        if serves and msgspec.structs.replace(order, generation=_STANDBY) == standby.order:
            self._store = None
            self._adopt_store(order.generation, standby.pid, standby.port)

    def _is_under_way(self, generation: int, *, store: bool = False) -> bool:
        """Whether the image is just forking this: the answer follows then."""
        if self._forking is None or self._forking.order.generation != generation:
            return False
        return isinstance(self._forking.order, KeeperStore) is store

    def kill(
        self,
        generation: int | None,
        grace_s: float,
        *,
        answer: bool = True,
        writer_s: float = 0.0,
    ) -> None:
        """End generations up to `generation` (None: everything) with all their descendants.

        Nothing may hide: it is looked for again until nothing is found. `KeeperStopped` follows
        then, unless the keeper itself wanted it (`answer`). A rank that writes a checkpoint has
        `writer_s` to finish its file.
        """
        upto = _EVERYTHING if generation is None else generation
        self._ended = max(self._ended, upto)
        self._waiting = [order for order in self._waiting if order.generation > upto]
        if generation is None:
            self._standby, self._standby_s = None, math.inf
        if self._store is not None and self._store.generation <= upto:
            self._store = None
        now = warn_s = time.monotonic()
        if self._ending is None and self._has_ended_well(upto):
            grace_s = max(grace_s, _LINGER_S)
            warn_s = now + grace_s - _LAST_WORD_S
        deadline_s = now + grace_s
        if self._ending is None:
            self._ending = Ending(upto, deadline_s, warn_s, writers_s=warn_s + writer_s)
        else:
            ending = self._ending
            ending.deadline_s = min(ending.deadline_s, deadline_s)
            ending.warn_s = min(ending.warn_s, warn_s)
            ending.writers_s = min(ending.writers_s, warn_s + writer_s)
            if upto > ending.upto:
                ending.warned_s = 0.0
            ending.upto = max(ending.upto, upto)
            ending.next_look_s = 0.0
        if answer:
            self._ending.answers.add(self.generation if generation is None else generation)
        self.advance(time.monotonic())

    def _has_ended_well(self, upto: int) -> bool:
        """Return whether all ranks have left with 0, before anybody asked for their end."""
        records = [rank.record for rank in self._ranks.values()]
        return (
            bool(records)
            and self.generation <= upto
            and all(
                record is not None and not (record.failed or record.asked) for record in records
            )
        )

    def signal(self, generation: int, rank: int, number: int) -> None:
        """Send a signal to a rank that lives."""
        found = self._ranks.get(rank)
        if found is not None and found.generation == generation and found.record is None:
            send_signal(found.pid, number)

    def relay(self, number: int) -> None:
        """Send a signal to each rank that handles it: to its first process that does."""
        table = scan_processes()
        children: dict[int, list[int]] = {}
        for process in table.values():
            children.setdefault(process.parent, []).append(process.pid)
        for rank in self._ranks.values():
            front = [rank.pid] if rank.record is None else []
            if is_alone(self._paths.ring(rank.generation, rank.rank), number):
                continue  # By way of the agent, perdure has had it carried out already.
            while front:
                if handles := [pid for pid in front if catches_signal(pid, number)]:
                    for pid in handles:
                        send_signal(pid, number)
                    break
                front = [child for pid in front for child in children.get(pid, [])]

    # --- progress -----------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Do what has become possible: end, then start."""
        self._end_raised(now)
        if self._forking is not None:
            standby = self._forking.order.generation == _STANDBY
            if now > self._forking.deadline_s:
                self._log("the image does not answer")
                self._fail_fork("the image did not answer in time")
                if not standby:
                    self._warmth.drop_current()
                return
            if not standby:
                return
        if (ending := self._ending) is not None and now >= ending.next_look_s:
            self._advance_ending(ending, now)
            for pid in ending.stopped & self._by_pid.keys():  # Else SIGTERM does not reach them.
                send_signal(pid, signal.SIGCONT)
        if self._ending is not None or self._forking is not None:
            return
        self._end_cleaners(now)
        if self._store is not None:
            self._begin_store(self._store)
        if self._forking is not None or now < self._again_s:
            return
        if self._waiting:
            self._begin_spawn(self._waiting[0])
        elif now >= self._standby_s:
            self._begin_standby()

    def note_exit(self, pid: int, status: int, usage: struct_rusage) -> None:
        """Take over the status of a child: a rank, a store, an image, or an orphan."""
        at_s = time.monotonic() + self._offset_s
        self.output.note_reaped(pid)
        rank = self._by_pid.pop(pid, None)
        if rank is not None:
            self._finish(rank, status, usage, at_s)
        elif pid in self._stores:
            self._stores.discard(pid)
            self._store_pid = 0 if pid == self._store_pid else self._store_pid
            self._standby = self._standby if self._standby and self._standby.pid != pid else None
        elif self._forking is not None:
            self._unclaimed[pid] = (status, usage, at_s)
        if self._ending is not None:
            self._ending.next_look_s = 0.0

    def take_answer(self, answer: RanksForked | StoreForked | ForkFailed) -> None:
        """Take over what the image has forked."""
        if self._forking is None or self._forking.order.generation != answer.generation:
            return
        order = self._forking.order
        match answer:
            case RanksForked() if isinstance(order, KeeperSpawn):
                self._end_fork()
                self._adopt(order, answer.pids, warm=True, why_cold="")
            case StoreForked() if isinstance(order, KeeperStore):
                self._end_fork()
                if order.generation != _STANDBY:
                    self._adopt_store(answer.generation, answer.pid, answer.port)
                elif answer.pid not in self._unclaimed and self._ended != _EVERYTHING:
                    self._stores.add(answer.pid)
                    self._standby = Standby(answer.pid, answer.port, order)
                    self._use_standby()
            case ForkFailed():
                self._fail_fork(answer.reason)
            case _:
                raise ProtocolError(f"image answered {type(answer).__name__}")
        self._unclaimed.clear()

    def image_lost(self, image: ImageProcess) -> None:
        """End what the image that is gone had forked, and go on cold."""
        if self._forking is not None and self._forking.image is image:
            self._fail_fork("the image died while forking")

    # --- starting -----------------------------------------------------------------------------

    def _begin_store(self, order: KeeperStore) -> None:
        if not self._warmth.settled:
            return
        self._store = None
        image = self._warmth.current
        if image is None:
            self._answer_store(KeeperStoreReady(order.generation, 0, self._warmth.why_cold))
            return
        self._fork_store(order, image)

    def _begin_standby(self) -> None:
        """Have the image fork a store that no generation waits for.

        To fork one takes a quarter of the time from a death to the next life's first line.
        """
        self._standby_s = math.inf
        if self._warmth.current is not None and self._served is not None and not self._standby:
            order = msgspec.structs.replace(self._served, generation=_STANDBY)
            self._fork_store(order, self._warmth.current)

    def _fork_store(self, order: KeeperStore, image: ImageProcess) -> None:
        self._start_fork(order, image)
        image.lines.send(
            ForkStore(**msgspec.structs.asdict(order), job=self._job, keeper=os.getpid())
        )

    def _adopt_store(self, generation: int, pid: int, port: int) -> None:
        gone = pid in self._unclaimed
        self._store_pid = 0 if gone else pid
        self._stores |= set() if gone else {pid}
        self._roots[pid] = generation
        self._answer_store(KeeperStoreReady(generation, port))

    def _begin_spawn(self, order: KeeperSpawn) -> None:
        why_cold = self._explain_cold(order)
        if not why_cold and not self._warmth.settled:
            return
        self._waiting.remove(order)
        try:
            self._prepare(order)
        except OSError as error:  # Those that live here live on.
            if error.errno in (_AWAY if order.generation else _FULL):
                self._wait_for_room(order, error)
            else:
                self._refuse(order, f"cannot be started: {error}")
            return
        image = self._warmth.current
        if why_cold or self._warmth.why_cold or image is None:
            self._spawn_cold(order, why_cold or self._warmth.why_cold)
            return
        self._start_fork(order, image)
        image.lines.send(
            ForkRanks(
                **msgspec.structs.asdict(order) | {"ranks": self._mark_launches(order)},
                job=self._job,
                keeper=os.getpid(),
                traceback_files={rank: e.traceback_file for rank, e in self._evidence.items()},
                imports=self._paths.imports,
                why_cold=self._paths.why_cold,
            )
        )

    def _explain_cold(self, order: KeeperSpawn) -> str:
        if order.cold:
            return "asked for (--cold)"
        if order.no_python:
            return "--no-python"
        if noted := read_text(self._paths.why_cold):
            return noted
        if not self._warmth.why_cold and order.ranks:
            rank_env = restore_variables(order.ranks[0].env)
            name = launch.find_difference(self._warmth.env, rank_env)
            if name:
                names = self._warmth.current.names if self._warmth.current else ()
                env = launch.adopt_difference(self._warmth.env, rank_env)
                self._warmth.restart(env, names)
                return f"{name} differs from the image's environment"
        return ""

    def _prepare(self, order: KeeperSpawn) -> None:
        """Make the rings and the streams' directories; note where evidence will lie."""
        failpoint("keeper/prepare")
        self._remove_old_rings()
        if not order.beside:
            self.generation = order.generation
            self._ranks = {}
            self._spawned = None
            self._evidence = {}
            if not self._ended_pids:
                self._shared_before = reap.list_shared()
            self._waiting.clear()
        kept = {path for one in order.ranks for path in (one.stdout, one.stderr)}
        for rank in self._ranks.values():
            if rank.record is None:
                kept |= {rank.evidence.stdout, rank.evidence.stderr}
        self.output.close_all_but(kept)
        for one in order.ranks:
            own = self._paths.error_file(order.generation, one.rank)
            self._evidence[one.rank] = exits.prepare_evidence(one, own)
            self.output.open(one.stdout)
            self.output.open(one.stderr)
            if one.ring:
                RingWriter.create(one.ring, rank=one.rank, generation=order.generation).close()

    def _remove_old_rings(self) -> None:
        """Remove rings of ranks that ended long ago: their folder may be memory."""
        before_s = time.monotonic() + self._offset_s - _RING_KEPT_S
        while self._old_rings and self._old_rings[0][0] < before_s:
            ring = glob.escape(self._old_rings.popleft()[1])
            for path in glob.glob(f"{ring}*"):  # What plugins write lies beside it.
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _refuse(self, order: KeeperSpawn, why: str) -> None:
        """Have processes in the place of these ranks, that end at once."""
        self._log(f"generation {order.generation}: {why}")
        self._evidence |= {one.rank: exits.Evidence(refused=why) for one in order.ranks}
        pids = {one.rank: launch.start_failed() for one in order.ranks}
        self._adopt(order, pids, warm=False, why_cold=why)

    def _mark_launches(self, order: KeeperSpawn) -> tuple[RankLaunch, ...]:
        mark = {reap.KEEPER: self._mark, reap.GENERATION: str(order.generation)}
        return tuple(
            msgspec.structs.replace(
                one,
                env=dict(one.env) | mark,
                stdout=self.output.name_pipe(one.stdout),
                stderr=self.output.name_pipe(one.stderr),
            )
            for one in order.ranks
        )

    def _spawn_cold(self, order: KeeperSpawn, why_cold: str) -> None:
        """Execute the ranks; where there are not so many processes to be had, try again later."""
        order = restore_spawn(order)
        pids: dict[int, int] = {}
        name = os.path.basename(order.script)
        try:
            for one in self._mark_launches(order):
                title = f"perdure rank {self._job} g{order.generation} r{one.rank}: {name}"
                pids[one.rank] = launch.start_cold(
                    order,
                    one,
                    title=title,
                    traceback_file=self._evidence[one.rank].traceback_file,
                    imports=self._paths.imports,
                )
        except OSError as error:
            self._log(f"generation {order.generation}: no process for every rank yet: {error}")
            for pid in pids.values():
                send_signal(pid, signal.SIGKILL)
            if error.errno in _FULL:
                self._wait_for_room(order, error)
            else:
                self._put_back(order)
            return
        self._adopt(order, pids, warm=False, why_cold=why_cold)

    def _wait_for_room(self, order: KeeperSpawn, error: OSError) -> None:
        """Try again later: the disk is no fault of the ranks, and would use up all restarts."""
        place = str(error.filename or self._paths.root)
        waits = KeeperWaits(order.generation, str(error.strerror), place)
        if waits != self._no_room:
            self._no_room = waits
            self._log(f"generation {order.generation} waits: {error.strerror}: {place}")
            self._send(waits)
        self._put_back(order, self._room_s)
        self._room_s = min(2 * self._room_s, _ROOM_S_MAX)

    def _put_back(self, order: KeeperSpawn, after_s: float = _AGAIN_S) -> None:
        self._again_s = time.monotonic() + after_s
        if all(one.generation <= order.generation for one in self._waiting):  # Else that is newer.
            self._waiting.insert(0, order)

    def _adopt(
        self, order: KeeperSpawn, pids: dict[int, int], *, warm: bool, why_cold: str
    ) -> None:
        self._no_room, self._room_s = None, _ROOM_S
        at_s = time.monotonic() + self._offset_s
        if not order.beside:
            self._first_start = min(
                (p.start for p in map(read_process, pids.values()) if p), default=0
            )
        for number, pid in pids.items():
            rank = Rank(
                pid, order.generation, number, self._evidence[number], exit_skew_s=order.exit_skew_s
            )
            self._ranks[number] = self._by_pid[pid] = rank
            self._roots[pid] = order.generation
        if self._store_pid:
            self._standby_s = time.monotonic() + _STANDBY_AFTER_S
        spawned = KeeperSpawned(order.generation, pids, at_s, warm, why_cold, order.beside)
        if not order.beside:
            self._spawned = spawned
        failpoint("keeper/adopted")
        self._send(spawned)
        for pid in pids.values():
            if pid in self._unclaimed:
                status, usage, ended_s = self._unclaimed.pop(pid)
                self._finish(self._by_pid.pop(pid), status, usage, ended_s)

    def _start_fork(self, order: KeeperSpawn | KeeperStore, image: ImageProcess) -> None:
        failpoint("keeper/fork", type(order).__name__)
        wait_s = _STANDBY_S if order.generation == _STANDBY else 2 * FORK_TIMEOUT_S
        self._forking = Forking(order, image, time.monotonic() + wait_s)
        self._warmth.busy = True
        self._unclaimed.clear()

    def _end_fork(self) -> None:
        self._forking = None
        self._warmth.busy = False
        if self._ending is not None:
            self._ending.next_look_s = 0.0

    def _fail_fork(self, reason: str) -> None:
        """End what may have been forked, then start the same order cold."""
        assert self._forking is not None
        order = self._forking.order
        self._end_fork()
        self._unclaimed.clear()
        if order.generation == _STANDBY:
            return  # The next generation makes its own store.
        self._log(f"generation {order.generation}: {reason}")
        spared = self._spared | self._stores | set(self._by_pid)
        for pid in reap.list_processes_below(
            scan_processes(), os.getpid(), {}, spared, order.generation
        ):
            send_signal(pid, signal.SIGKILL)
        if order.generation <= self._ended:
            return
        if isinstance(order, KeeperSpawn):
            self._spawn_cold(order, reason)
        else:
            self._answer_store(KeeperStoreReady(order.generation, 0, reason))

    def _answer_store(self, answer: KeeperStoreReady) -> None:
        self._store_ready = answer
        self._send(answer)

    # --- ending -------------------------------------------------------------------------------

    def _end_raised(self, now: float) -> None:
        """Kill ranks whose script an exception has ended, and that do not exit.

        Others wait for such a rank, and its exception would be told by its exit only.
        """
        for rank in self._ranks.values():
            if rank.record is not None or rank.asked or rank.ended_for or not rank.exit_skew_s:
                continue
            if not rank.raised_s and exits.has_raised(rank.evidence):
                rank.raised_s = now
            if rank.raised_s and now - rank.raised_s >= rank.exit_skew_s:
                rank.ended_for = f"the process did not exit within {rank.exit_skew_s:g} s"
                send_signal(rank.pid, signal.SIGKILL)

    def _end_cleaners(self, now: float) -> None:
        """Wait for the helpers of ended generations, and then remove or name what they left."""
        if not self._ended_pids:
            return
        for pid, (start, deadline_s) in list(self._cleaners.items()):
            process = read_process(pid)
            if process is None or process.dead or process.start != start:
                del self._cleaners[pid]
            elif now >= deadline_s:
                self._log(f"killed process {pid}: {read_command(pid)}")
                send_signal(pid, signal.SIGKILL)
        if self._cleaners or now < self._shared_look_s:
            return
        left = reap.remove_shared(reap.list_shared() - self._shared_before, self._ended_pids)
        self._ended_pids.clear()
        if left:
            some = ", ".join(f"{reap.SHARED}/{name}" for name in left[:_NAMED_MAX])
            more = len(left) - _NAMED_MAX
            self._tell(f"ranks that ended left {some}{f' and {more} more' if more > 0 else ''}")

    def _tell(self, text: str, rank: Rank | None = None) -> None:
        """Say `text` on a rank's standard error."""
        self._log(text)
        rank = rank or next(iter(self._ranks.values()), None)
        if rank is not None:
            with contextlib.suppress(OSError), open(rank.evidence.stderr, "a") as file:
                file.write(f"perdure: {text}\n")

    def _finish(self, rank: Rank, status: int, usage: struct_rusage, at_s: float) -> None:
        self.output.drain()  # Its last lines are evidence.
        record = exits.make_record(
            rank=rank.rank,
            generation=rank.generation,
            pid=rank.pid,
            at_s=at_s,
            status=status,
            usage=usage,
            asked=rank.asked,
            oom_kills=self._count_oom_kills_of(rank),
            evidence=rank.evidence,
            ended_for=rank.ended_for,
            saving=rank.saving,
        )
        rank.record = record
        self._old_rings.append((at_s, self._paths.ring(rank.generation, rank.rank)))
        try:
            if record.oom:
                self._oom_kills.claim()
            exits.write_record(self._paths.exit_record(rank.generation, rank.rank), record)
        except Exception as error:  # What died is one rank, and the others live by this process.
            self._log(f"exit record of rank {rank.rank}: {error!r}")
        failpoint("keeper/recorded")
        self._send(KeeperExited(record))

    def _find_writers(self, ranks: list[Rank], ending: Ending, now: float) -> set[int]:
        """Return the pids of ranks that may finish a file of a checkpoint, and name them once.

        A save may have several files, so perdure waits a little after the last one. A
        rank that saves again at once is done after its next save. While a rank handles SIGTERM,
        nothing is killed before its grace is over.
        """
        if now < ending.warn_s:
            return set()
        if any(self._handles_term(rank.pid) for rank in ranks):
            ending.writers_s = max(ending.writers_s, ending.deadline_s)
        if now >= ending.writers_s:
            for rank in ranks:
                if path := ending.written.pop(rank.pid, ""):
                    rank.saving = path
                    self._tell(f"killed rank {rank.rank}, which still wrote {path}", rank)
            return set()
        looks = {rank.pid: self._list_own(rank.pid) for rank in ranks}
        for rank in ranks:
            files = looks[rank.pid]
            if ending.saves.setdefault(rank.pid, Save()).take(files, now):
                ending.written.pop(rank.pid, None)
                ending.saved.add(rank.pid)
            elif files and rank.pid not in ending.saved:
                self._await_writer(rank, files, ending, now)
        if now >= ending.written_s + _SAVED_S:
            ending.written.clear()
        quiet = {pid for pid, files in looks.items() if not files} - ending.written.keys()
        self._look_again([rank for rank in ranks if rank.pid in quiet], ending, now)
        return {rank.pid for rank in ranks if rank.pid in ending.written}

    def _look_again(self, ranks: list[Rank], ending: Ending, now: float) -> None:
        """Stop the ranks that end now, and let those go on that have begun a save meanwhile.

        Without it, a script could begin to overwrite its only checkpoint between a look and a kill.
        """
        due = [r for r in ranks if r.pid not in ending.stopped and self._is_due(r, ending, now)]
        failpoint("keeper/looked")
        for rank in due:
            send_signal(rank.pid, signal.SIGSTOP)
        ending.stopped.update(rank.pid for rank in due)
        until_s = time.monotonic() + _STOPS_S
        for rank in due:
            while not has_stopped(rank.pid) and time.monotonic() < until_s:
                time.sleep(_STOPS_S / 100)
            if files := self._list_own(rank.pid):
                send_signal(rank.pid, signal.SIGCONT)
                ending.stopped.discard(rank.pid)
                ending.saved.discard(rank.pid)
                self._await_writer(rank, files, ending, now)

    def _is_due(self, rank: Rank, ending: Ending, now: float) -> bool:
        """Return whether a rank ends with the signals of now."""
        if ending.warned_s and now < min(ending.warned_s + _LAST_WORD_S, ending.deadline_s):
            return False
        return now >= ending.deadline_s or not self._handles_term(rank.pid)

    def _await_writer(self, rank: Rank, files: dict[str, int], ending: Ending, now: float) -> None:
        """Have the end wait for a rank that writes `files`."""
        ending.written_s, path = now, next(iter(files))
        if rank.pid not in ending.written:
            most = f"{ending.writers_s - now:.0f} s at most"
            self._tell(f"perdure waits for rank {rank.rank}, {most}: it writes {path}", rank)
        ending.written[rank.pid] = path

    def _list_own(self, pid: int) -> dict[str, int]:
        """Return the files of the script's own checkpoints that a rank is writing, and where."""
        found = list_written(pid)
        return {p: at for p, at in found.items() if not p.startswith(self._paths.root)}

    def _handles_term(self, pid: int) -> bool:
        """Return whether `pid` handles SIGTERM; perdure's own handler in a rank does not count."""
        rank = self._by_pid.get(pid)
        if rank is not None and is_alone(
            self._paths.ring(rank.generation, rank.rank), signal.SIGTERM
        ):
            return False
        return catches_signal(pid, signal.SIGTERM)

    def _name_awaited(self, left: list[int], ending: Ending, now: float) -> None:
        """Say once which ranks the end waits for."""
        if ending.named or not left or now >= ending.deadline_s:
            return
        ending.named = True
        for pid in left:
            if pid in self._by_pid:
                rank = self._by_pid[pid]
                wait_s = ending.deadline_s - now
                text = f"rank {rank.rank} handles SIGTERM; perdure waits {wait_s:.0f} s for it"
                self._tell(text, rank)

    def _name_killed(self, pids: list[int], table: dict[int, Process], ending: Ending) -> None:
        """Say on the rank's standard error which processes below it did not end in time."""
        for pid in pids:
            if pid in ending.killed:
                continue
            ending.killed.add(pid)
            root = table[pid].session
            rank = next((r for r in self._ranks.values() if r.pid == root), None)
            self._tell(f"killed process {pid}, which a rank had left: {read_command(pid)}", rank)

    def _tell_killed(
        self,
        ranks: list[Rank],
        members: list[int],
        writing: set[int],
        table: dict[int, Process],
        ending: Ending,
    ) -> None:
        """Name what SIGTERM has not ended, and what is killed now."""
        for rank in ranks:
            if rank.pid not in {*ending.killed, *writing} and self._handles_term(rank.pid):
                ending.killed.add(rank.pid)
                rank.saving = rank.saving or next(iter(self._list_own(rank.pid)), "")
                end = f" and wrote {rank.saving}" if rank.saving else ""
                self._tell(f"killed rank {rank.rank}, which still worked on SIGTERM{end}", rank)
        below = [pid for pid in members if pid not in {*self._by_pid, *self._stores}]
        self._name_killed([p for p in below if table[p].session not in writing], table, ending)

    def _count_oom_kills_of(self, rank: Rank) -> int:
        try:
            return self._oom_kills.count_of(rank.generation, rank.rank)
        except Exception as error:
            self._log(f"kills for memory of rank {rank.rank}: {error!r}")
            return 0

    def _advance_ending(self, ending: Ending, now: float) -> None:
        """Warn, kill, look again; when nothing is left, answer.

        SIGTERM goes to the process group of each rank, so that a program below a shell hears of
        it. The grace lasts until nothing of the generations is left.
        """
        ranks = [r for r in self._by_pid.values() if r.generation <= ending.upto]
        for rank in ranks:
            rank.asked = True
        writing = self._find_writers(ranks, ending, now)
        if now >= ending.deadline_s and not ending.warned_s:
            for rank in ranks:  # Before the table is read, which takes a while.
                if rank.pid not in writing:
                    send_signal(rank.pid, signal.SIGKILL)
        newer = self._first_start if self.generation > ending.upto else None
        table = scan_processes()
        spared = {*self._spared, *self._cleaners}
        members = reap.list_processes_below(
            table, os.getpid(), self._roots, spared, ending.upto, newer
        )
        self._ended_pids.update(members)
        cleaners = [pid for pid in members if pid not in self._by_pid and reap.cleans_up(pid)]
        members = [pid for pid in members if pid not in cleaners]
        left = [pid for pid in members if pid not in self._stores]
        if ending.warned_s and now >= ending.warned_s + _LAST_WORD_S:
            left = [pid for pid in left if self._handles_term(pid)]
            self._name_awaited(left, ending, now)
        if now < ending.deadline_s and left:
            if now >= ending.warn_s and not ending.warned_s:
                ending.warned_s = now
                # The group of a session may live on without its leader. Ranks need the store yet.
                sessions = {table[pid].session for pid in left} - {os.getsid(0)}
                for pid in sorted({*(rank.pid for rank in ranks), *sessions}):
                    if pid not in writing or self._handles_term(pid):
                        send_signal_to_group(pid, signal.SIGTERM)
            # What ends meanwhile wakes the loop: its orphans are the keeper's children.
            ending.next_look_s = ending.warn_s
            if ending.warned_s:
                brief_s = ending.warned_s + _LAST_WORD_S
                ending.next_look_s = min(brief_s, ending.deadline_s)
                if now >= brief_s:
                    ending.next_look_s = min(now + _IDLE_S, ending.deadline_s)
            return
        if ending.warned_s:
            self._tell_killed(ranks, members, writing, table, ending)
        members = [pid for pid in members if table[pid].session not in writing]
        ours = [pid for pid in members if send_signal(pid, signal.SIGKILL)]
        if ranks or ours:
            ending.wait_s = min(ending.wait_s, _WRITING_S) if writing else ending.wait_s
            ending.next_look_s = now + ending.wait_s
            ending.wait_s = min(2 * ending.wait_s, _RESCAN_S_MAX)
            return
        if self._forking is not None:  # Then it is not known yet which process is the standby.
            ending.next_look_s = now + _RESCAN_S_MAX
            return
        if members:  # What sudo has started: to wait for it would hold up the ranks for ever.
            self._log(f"processes {members} are another user's and go on")
        self.output.drain()
        for pid in cleaners:
            self._cleaners[pid] = table[pid].start, now + _CLEANERS_S
        # All processes are looked at then, which must not hold up a start.
        self._shared_look_s = now + (0.0 if ending.upto == _EVERYTHING else _SHARED_LOOK_S)
        self._ending = None
        self._roots = {p: g for p, g in self._roots.items() if g > ending.upto}
        failpoint("keeper/stopped")
        for generation in sorted(ending.answers):
            self._send(KeeperStopped(generation))
