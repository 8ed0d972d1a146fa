"""What the agent reads off its ranks: rings five times a second, /proc as seldom as will do."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable

import msgspec

from perdure.adapters.host import (
    CoreMeter,
    LimitMeter,
    ProcSampler,
    list_children,
    measure_cpu,
    read_boot_id,
)
from perdure.adapters.nccl_follow import RANKS_A_BEAT, NcclFollower
from perdure.adapters.network.nccl_links import DeviceRank
from perdure.adapters.ring_follow import RingFollower
from perdure.adapters.rings import read_ring
from perdure.agent.state import KeeperView
from perdure.files.regular import name_foreign, read_file
from perdure.model.errors import ProtocolError
from perdure.model.events import RankExited
from perdure.model.failures import ExitRecord
from perdure.model.paths import JobPaths
from perdure.model.records import decode_record
from perdure.model.ring import RingReading
from perdure.model.signals.progress import HostLoad, NodeBeat, RankAccount, RankProgress

HEALTHY_S = 0.5
"""How old a look at /proc may be for a rank that makes progress; a silent one is looked at anew."""
HOST_S = 0.5
"""Between two looks at what the machine's cores do."""
log = logging.getLogger("perdure.agent")

_RECORD_BYTES_MAX = 16 << 20
_RING_NAME = re.compile(r"^g(\d+)-r(\d+)\.ring$")


class RankReader:
    """Rings and /proc of one node's ranks."""

    def __init__(self, paths: JobPaths, node: int, clock_offset_s: float) -> None:
        """Read the rings under `paths`."""
        self._paths, self._node = paths, node
        self._offset_s = clock_offset_s
        self._sampler = ProcSampler()
        self._host, self._cores, self._host_s = read_boot_id(), CoreMeter(), float("-inf")
        self._limits = LimitMeter()
        self._used: dict[int, tuple[float, float]] = {}
        """Process -> CPU seconds and seconds without one, at the last look at the cores."""
        self._marks: dict[int, tuple[float, float]] = {}
        """Rank -> (last write, last change of phase) at the newest beat."""
        self._followers: dict[tuple[int, int], RingFollower] = {}
        """(generation, rank) -> its ring, read from beat to beat."""
        self._devices: dict[tuple[int, int], NcclFollower] = {}
        """The same: what NCCL's plugin writes beside it."""
        self.on_device: dict[int, DeviceRank] = {}
        """The ranks of the newest heartbeat whose collectives run on a device."""
        self._foreign: set[tuple[int, int]] = set()
        """(generation, rank) in whose ring's place something else was found."""

    def read_beat(
        self, incarnation: str, seq: int, now: float, keeper: KeeperView | None
    ) -> NodeBeat:
        """Return the node's heartbeat."""
        generation = keeper.generation if keeper else -1
        running = keeper.running if keeper else {}
        turns = max(1, -(-len(running) // RANKS_A_BEAT))
        self._sampler.watch(running.values())
        self._followers = {
            key: follower
            for key, follower in self._followers.items()
            if key[0] == generation and key[1] in running
        }
        self._devices = {key: f for key, f in self._devices.items() if key in self._followers}
        self.on_device = {}
        host = self._look_at_host(running.values(), keeper.pid if keeper else 0, now)
        ranks = tuple(
            self._look(generation, rank, running[rank], now, timed=(seq + place) % turns == 0)
            for place, rank in enumerate(sorted(running))
        )
        return NodeBeat(self._node, incarnation, seq, now, generation, ranks, host=host)

    def _look_at_host(self, pids: Iterable[int], keeper: int, now: float) -> HostLoad | None:
        """Return what the cores did since the last look, and who; None where it is too soon.

        An image of the keeper's imports for seconds while ranks train: that is no other's work.
        """
        if now - self._host_s < HOST_S:
            return None
        window_s, self._host_s = now - self._host_s, now
        look, throttled = self._cores.measure(now), self._limits.measure(pids, now)
        used = {os.getpid(): (time.process_time(), 0.0)}
        ranks = set(pids)
        used |= {pid: (cpu_s, 0.0) for pid, cpu_s in _measure_family(keeper, ranks).items()}
        for pid in ranks:
            proc = self._sampler.sample(pid, now)
            used[pid] = (proc.cpu_s, proc.run_delay_s)
        last, self._used = self._used, used
        if look is None:
            return None
        cores, busy, pressure = look
        spent = [(p, last.get(p, (0.0, 0.0))) for p in used]
        own_s = sum(max(used[p][0] - before[0], 0.0) for p, before in spent)
        waited_s = sum(max(used[p][1] - before[1], 0.0) for p, before in spent)
        return HostLoad(
            host=self._host,
            cores=cores,
            busy=round(busy, 3),
            own=round(own_s / window_s, 3),
            waited=round(waited_s / window_s, 3),
            pressure=round(pressure, 3),
            throttled=round(throttled, 3),
        )

    def _look(
        self, generation: int, rank: int, pid: int, now: float, *, timed: bool
    ) -> RankProgress:
        follower = self._followers.get((generation, rank))
        if follower is None:
            follower = RingFollower(self._paths.ring(generation, rank), self._offset_s)
            self._followers[generation, rank] = follower
        look = follower.read(now)
        if look is None:
            unseen = self._look_for_foreign(generation, rank)
            proc = self._sampler.sample(pid, now, HEALTHY_S)
            return RankProgress(
                rank=rank,
                pid=pid,
                phase="spawned",
                phase_since_s=0.0,
                heartbeat_s=0.0,
                account=RankAccount(),
                proc=proc,
                unseen=unseen,
            )
        reading = look.reading
        mark = (reading.heartbeat_s, reading.phase_since_s)
        moved, self._marks[rank] = mark != self._marks.get(rank), mark
        proc = self._sampler.sample(pid, now, HEALTHY_S if moved else 0.0)
        progress = msgspec.structs.replace(
            reading.progress(proc), rank=rank, pid=pid, spans=look.spans, stages=look.stages
        )
        if not any(comm.stamps == "enqueued" for comm in progress.comms):
            return progress
        path, key = self._paths.ring(generation, rank), (generation, rank)
        self.on_device[rank] = DeviceRank(path, reading.pid or pid, progress.comms)
        if not timed:
            return progress
        timing = self._devices.setdefault(key, NcclFollower(path, self._offset_s))
        device = timing.read(rank, reading.pid or pid, progress.comms, now)
        return msgspec.structs.replace(progress, device=device)

    def _look_for_foreign(self, generation: int, rank: int) -> bool:
        """Return whether something else than a file lies in the place of a ring; say so once."""
        path = self._paths.ring(generation, rank)
        kind = name_foreign(path)
        if kind and (generation, rank) not in self._foreign:
            self._foreign = {known for known in self._foreign if known[0] == generation}
            self._foreign.add((generation, rank))
            why = f"{kind} lies in the place of its ring, so nothing is seen of its progress"
            log.error("rank %d of generation %d: %s (%s)", rank, generation, why, path)
        return bool(kind)

    def read_end(self, record: ExitRecord, now: float) -> RankExited:
        """Return `record` with what the rank's ring says after its end."""
        return self._add_ring(record, self._read_ring(record.generation, record.rank), now)

    def read_lost(self, generation: int, ranks: Iterable[int], at_s: float) -> list[RankExited]:
        """Return how `ranks` ended that died with their keeper: by its record, or without one.

        `asked` is set in the latter case, and `at_s` is when: what failed is the keeper, and not
        the rank.
        """
        ends = []
        for rank in ranks:
            reading = self._read_ring(generation, rank)
            if reading is None:
                continue
            record = _read_record(self._paths.exit_record(generation, rank))
            if record is None:
                record = ExitRecord(
                    rank, generation, reading.pid, at_s, signal=9, asked=True, error="keeper lost"
                )
            ends.append(self._add_ring(record, reading, at_s))
        return ends

    def _read_ring(self, generation: int, rank: int) -> RingReading | None:
        return read_ring(self._paths.ring(generation, rank), self._offset_s)

    def _add_ring(self, record: ExitRecord, reading: RingReading | None, now: float) -> RankExited:
        return RankExited(
            node=self._node,
            record=record,
            account=reading.account if reading is not None else RankAccount(),
            comms=reading.comms if reading is not None else (),
            detected_s=now,
        )

    def read_spawn_s(self, generation: int, ranks: dict[int, int]) -> float:
        """Return when the youngest of `ranks` was spawned; 0 where no ring tells."""
        readings = [self._read_ring(generation, rank) for rank in ranks]
        return max((r.account.spawned_s for r in readings if r is not None), default=0.0)

    def read_newest_generation(self, ranks: range) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Return the newest generation of which one of `ranks` has a ring; -1 for none.

        And (generation, rank) of all rings of the newest generation that this machine has seen.
        """
        try:
            names = os.listdir(os.path.dirname(self._paths.ring(0, 0)))
        except OSError:
            return -1, ()
        found = [(int(m[1]), int(m[2])) for name in names if (m := _RING_NAME.match(name))]
        last = max((generation for generation, _ in found), default=-1)
        newest = max((generation for generation, rank in found if rank in ranks), default=-1)
        return newest, tuple(sorted(pair for pair in found if pair[0] == last))


def _measure_family(keeper: int, ranks: set[int]) -> dict[int, float]:
    """Return the CPU seconds of a keeper and of what it runs but `ranks`: images, for example."""
    with contextlib.suppress(OSError):
        return {pid: measure_cpu(pid) for pid in {keeper, *list_children(keeper)} - ranks}
    return {}


def _read_record(path: str) -> ExitRecord | None:
    """Return what a keeper wrote down of a rank's end; None where nothing can be read."""
    with contextlib.suppress(OSError, ProtocolError):
        return decode_record(read_file(path, _RECORD_BYTES_MAX), ExitRecord)
    return None
