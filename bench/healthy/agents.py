"""What the agents of a simulated world see, thinned and sampled as real agents do it.

Which fields a heartbeat has, and when each of them changes, is compared with heartbeats of real
jobs (`tests/contract/test_healthy_beats.py`). Links are as the controller joins them: both ends
are ranks.
"""

import random
from dataclasses import dataclass
from typing import Any

from . import tree
from .training import NEVER, Operation, Silence, Traffic, World

BEAT_S, LOOK_S, SWEEP_S = 0.2, 0.5, 1.0
PENDING_S, PENDING_MAX = 0.25, 16
MOVED_BYTES = 1_000_000
FULL, CROWDED = 0.8, 0.08
"""Where a job's own ranks use so much of the cores, each of them waits for one for so long."""
JIFFY_S = 0.004
"""The kernel counts how long a socket was busy in these."""
LATE_S = 0.004
"""How much later than planned a heartbeat comes, on average."""

_make_progress = tree.find_maker(
    tree.RankProgress, "rank", "pid", "phase", "phase_since_s", "heartbeat_s", "account", "comms",
    "proc", "spans", "stages", "recorder", "busy_phase",
)  # fmt: skip
_make_proc = tree.find_maker(
    tree.ProcSample, "state", "cpu_s", "io_bytes", "rss_bytes", "num_threads", "run_delay_s",
    "blocked",
)  # fmt: skip


class RankView:
    """One rank as its agent follows it."""

    def __init__(self, world: World, rank: int) -> None:
        """Begin with its first heartbeat."""
        shape = world.shape
        self.rank, self._world = rank, world
        self._open: list[Operation] = []
        self._comms: dict[str, Any] = {}
        self._told: tuple[Any, ...] = ()
        """The same, as heartbeats have them."""
        self._index: dict[str, int] = {}
        self._strides: dict[str, Any] = {}
        self._step_stride = tree.Stride(tree.STAGES_A_BEAT)
        self._newest: dict[str, Operation | None] = {}
        self._ended: dict[str, list[Operation]] = {}
        """What ended since the last heartbeat, where that is on a device."""
        self._free_s: dict[str, float] = {}
        """Communicator -> when the device had done with its last one."""
        self._counts: dict[tuple[str, str], int] = {}
        self._moved_s = world.begin_s
        self._last_step_s = 0.0
        self._said_s = self._paused_s = 0.0
        """When a declared phase, and when a pause, last began or ended."""
        self._step = 0
        self._idle_s = 0.0
        self._proc: Any = None
        self._proc_s = -NEVER
        self._run_delay_s = self._seen_s = 0.0
        self._known_step = -1
        """Step of the world up to which it was noted what comes next."""
        self._next_s = self._lagging_s = NEVER
        """When the next thing begins or ends, and when something lags behind."""
        self._behind: list[Operation] = []
        """What is under way while something later is, too."""
        self._late: tuple[Any, ...] = ()
        """Of these what is told of, for as long as nothing begins or ends."""
        self._settled = False
        """Whether the same is told until then."""
        self._declared = shape.declared
        self.waited = 0.0
        """Seconds without a CPU so far."""
        self._account = tree.make(
            tree.RankAccount, spawned_s=world.begin_s, script_s=world.begin_s,
            group_s=world.begin_s, init_s=world.begin_s if shape.declared else 0.0,
            first_step_s=world.begin_s if shape.declared else 0.0,
            step=0 if shape.declared else -1, last_step_s=0.0,
        )  # fmt: skip

    def look(self, now: float, starved: float) -> Any:
        """Return its part of the node's heartbeat.

        `starved` is for how much of every second its threads have no CPU now.
        """
        world, r = self._world, self.rank
        silence = self._find_silence(now) if world.silences[r] else None
        if self._known_step != world.step:
            self._note_next()
        moved = now >= self._next_s
        spans: tuple[Any, ...] = ()
        stages: tuple[Any, ...] = ()
        if moved:
            ended = self._ended = self._follow(now)
            stages = self._follow_rows(now)
            self._note_next()
            spans = self._thin(ended, now)
        elif self._settled:
            spans = self._late
        elif self._newest or now >= self._lagging_s:
            self._step_stride.note(0)
            spans = self._thin({}, now)
        proc = self._sample(now, silence, starved, moved)
        phase, since_s = "group", world.begin_s
        if self._declared:
            phase, since_s = "step", max(self._last_step_s or world.begin_s, self._paused_s)
        busy = None
        if silence is not None and silence.pause and self._declared:
            phase, since_s = "paused", silence.begin_s
        if silence is not None and silence.declared and tree.BusyPhase is not None:
            most_s = silence.begin_s + 5.0 * (silence.end_s - silence.begin_s) + 60.0
            busy = tree.BusyPhase(silence.declared, silence.begin_s, most_s)
        heartbeat_s = max(self._moved_s, self._said_s, since_s)
        progress = _make_progress(
            r, 1000 + r, phase, since_s, heartbeat_s, self._account, self._told, proc, spans,
            stages, "compiled", busy,
        )  # fmt: skip
        return self._put_on_device(progress) if world.on_devices else progress

    def _put_on_device(self, progress: Any) -> Any:
        """Return `progress` as it is where collectives run on a GPU that the host runs ahead of.

        Its stamps are of enqueuing, with a wait anywhere; the device's times are told beside them.
        NCCL counts each kind on its own, and runs a communicator's one after another.
        """
        told = {}
        for name, ended in self._ended.items():
            for o in sorted(ended, key=lambda o: o.seq):
                begin_s = max(o.start_s, self._free_s.get(name, 0.0))
                self._free_s[name] = o.end_s
                if o.peer < 0:
                    seq = self._counts[name, o.op] = self._counts.get((name, o.op), 0) + 1
                    span = tree.CollectiveSpan(0, seq, o.op, o.bytes, begin_s, o.end_s)
                    told.setdefault((name, o.op), []).append(span)
        self._ended = {}
        device = []
        for name, op in self._counts:
            stride = self._strides.setdefault(f"{name} {op}", tree.Stride(tree.SPANS_A_BEAT))
            found = told.get((name, op), [])
            step = stride.note(len(found))
            spans = tuple([span for span in found if span.seq % step == 0])
            device.append(tree.DeviceComm(f"{name} {op} 0abc", self._index[name], spans))
        chance = random.Random(f"{self.rank} {len(progress.spans)} {progress.heartbeat_s}")
        spans = tuple(
            tree.replace(span, start_s=span.start_s - chance.choice((0.0, 0.0, 0.1)), wait_s=0.0)
            for span in progress.spans
        )
        comms = tuple([tree.replace(comm, stamps="enqueued") for comm in progress.comms])
        return tree.replace(progress, comms=comms, spans=spans, device=tuple(device))

    def _note_next(self) -> None:
        """Note when the next thing begins or ends, and what is told of again and again."""
        world, r = self._world, self.rank
        pending, rows = world.operations[r], world.rows[r]
        next_s = pending[0].start_s if pending else NEVER
        if rows and rows[0].end_s < next_s:
            next_s = rows[0].end_s
        lagging_s, behind = NEVER, []
        for o in self._open:
            if o.end_s < next_s:
                next_s = o.end_s
            if o.peer >= 0 or o.seq < self._comms[o.group.name].started_seq:
                behind.append(o)
                lagging_s = min(lagging_s, o.start_s + PENDING_S)
        self._known_step, self._next_s = world.step, next_s
        self._lagging_s, self._behind, self._late = lagging_s, behind, ()
        self._settled = False

    def _find_silence(self, now: float) -> Silence | None:
        silences = self._world.silences[self.rank]
        while silences and silences[0].end_s <= now:
            silence = silences.popleft()
            self._idle_s += silence.end_s - silence.begin_s if silence.state != "R" else 0.0
            self._note_said(silence, silence.end_s)
        silence = silences[0] if silences and silences[0].begin_s <= now else None
        if silence is not None:
            self._note_said(silence, silence.begin_s)
        return silence

    def _note_said(self, silence: Silence, at_s: float) -> None:
        """Note the beat with which a declared phase, or a pause, begins or ends in the ring."""
        paused = silence.pause and self._declared
        if (paused or silence.declared) and at_s > self._said_s:
            self._said_s = at_s
            self._paused_s = at_s if paused else self._paused_s

    def _follow(self, now: float) -> dict[str, list[Operation]]:
        """Take what has begun and ended; return the latter by communicator."""
        pending, left = self._world.operations[self.rank], []
        begun = self._open
        while pending and pending[0].start_s <= now:
            begun.append(pending.popleft())
        ended: dict[str, list[Operation]] = {}
        newest: dict[str, Operation] = {}
        moved_s = self._moved_s
        for o in begun:
            name, seen_s = o.group.name, o.end_s
            if seen_s > now:
                seen_s = o.start_s
                left.append(o)
            elif name in ended:
                ended[name].append(o)
            else:
                ended[name] = [o]
            if seen_s > moved_s:
                moved_s = seen_s
            newest[name] = o
        self._open, self._moved_s = left, moved_s
        timeout_s = (1800.0,) if tree.TIMEOUT_KNOWN else ()
        for name, o in newest.items():
            known = self._comms.get(name)
            done = 0 if known is None else known.ended_seq
            for each in ended.get(name, ()):
                if each.seq == done + 1:
                    done = each.seq
            self._index.setdefault(name, len(self._index))
            self._comms[name] = tree.CommProgress(
                name, o.group.size, o.seq, done, o.op, o.start_s, o.group.ranks, o.bytes,
                "float32", o.peer, *timeout_s,
            )  # fmt: skip
        if newest:
            self._told = tuple(self._comms.values())
        return ended

    def _thin(self, ended: dict[str, list[Operation]], now: float) -> tuple[Any, ...]:
        """Return what is told of: of what has ended some, and what lags behind."""
        chosen: list[Operation] = []
        for name in ended:
            if name not in self._strides:
                self._strides[name] = tree.Stride(tree.SPANS_A_BEAT)
        for name, stride in self._strides.items():
            found = ended.get(name, ())
            step = stride.note(len(found))
            if not found:
                if (newest := self._newest.pop(name, None)) is not None:
                    chosen.append(newest)
                continue
            chosen += found if step == 1 else [o for o in found if o.seq % step == 0]
            if found[-1].seq % step:
                self._newest[name] = found[-1]
            else:
                self._newest.pop(name, None)
        if len(self._late) < len(self._behind):
            late = [o for o in self._behind if now - o.start_s > PENDING_S]
            self._late = tuple([self._show(o, 0.0) for o in late[:PENDING_MAX]])
        if not chosen:
            strides = (self._step_stride, *self._strides.values())
            told = len(self._late) == len(self._behind)
            self._settled = told and all(stride.value == 1 for stride in strides)
            return self._late
        return (*[self._show(o, o.end_s) for o in chosen], *self._late)

    def _show(self, o: Operation, end_s: float) -> Any:
        wait_s = o.wait_s if end_s else 0.0
        index = self._index[o.group.name]
        awaited = (o.peer >= 0 and not end_s,) if tree.AWAITED_KNOWN else ()
        return tree.CollectiveSpan(
            index, o.seq, o.op, o.bytes, o.start_s, end_s, wait_s, o.peer, *awaited
        )

    def _follow_rows(self, now: float) -> tuple[Any, ...]:
        world, found, moved = self._world, [], False
        rows = world.rows[self.rank]
        while rows and rows[0].end_s <= now:
            row, moved = rows.popleft(), True
            self._step, self._last_step_s = row.step, row.end_s
            if not world.staged:
                continue
            more = {tree.WORK_FIELD: row.work} if tree.WORK_FIELD and row.work else {}
            found.append(
                tree.StepStages(
                    row.step, row.begin_s, row.end_s, *row.own, row.wait_s, row.other_s, **more
                )
            )
        if moved and self._declared:
            begin_s = world.begin_s
            self._moved_s = max(self._moved_s, self._last_step_s)
            self._account = tree.make(
                tree.RankAccount, step=self._step, step_s=self._last_step_s - begin_s,
                spawned_s=begin_s, script_s=begin_s, init_s=begin_s, group_s=begin_s,
                first_step_s=begin_s, last_step_s=self._last_step_s,
            )  # fmt: skip
        step = self._step_stride.note(len(found))
        return tuple([row for row in found if row.step % step == 0])

    def _sample(self, now: float, silence: Silence | None, starved: float, moved: bool) -> Any:
        """Look at /proc, as seldom as an agent does."""
        if moved and now - self._proc_s < LOOK_S:
            return self._proc
        world, shape = self._world, self._world.shape
        idle_s = self._idle_s
        state = "S"
        if silence is not None:
            state = silence.state
            idle_s += now - silence.begin_s if state != "R" else 0.0
        fault = world.fault
        if fault is not None and fault.rank == self.rank and now >= fault.at_s:
            if fault.kind in ("sleep", "stop"):
                idle_s += now - fault.at_s
                state = "T" if fault.kind == "stop" else "S"
            elif fault.kind == "spin":
                state = "R"
        if self._seen_s:
            self.waited += (now - self._seen_s) * starved
        self._seen_s = now
        cpu_s = max(0.0, shape.cpu_share * (now - world.begin_s - idle_s))
        cpu_s = round(cpu_s, 2)
        io_bytes = self._step * 4_000_000
        blocked = 1 if state == "D" else 0
        self._proc_s = now
        self._proc = _make_proc(state, cpu_s, io_bytes, 1 << 30, 7, self.waited, blocked)
        return self._proc


@dataclass(slots=True)
class Link:
    """What one rank sends to another in a group."""

    src: int
    dst: int
    name: str
    """Of the communicator, as the rank's note has it."""
    traffic: Traffic
    sent: int = 0


class NodeView:
    """One node's agent."""

    def __init__(self, world: World, group_rank: int, node: int, chance: random.Random) -> None:
        """Follow the ranks of `group_rank`, which run on `node`."""
        shape = world.shape
        self.node, self._world, self._chance = node, world, chance
        self.group_rank = group_rank
        first = group_rank * shape.nproc
        self.ranks = [RankView(world, first + i) for i in range(shape.nproc)]
        self._seq = 0
        self._looked_s = 0.0
        self._swept_s = world.begin_s + chance.random() * SWEEP_S
        self.close_until_s = -NEVER
        self._links: list[Link] = []
        self._waited = 0.0
        self._made = 0

    def beat(self, now: float, generation: int) -> Any:
        """Return its heartbeat."""
        self._seq += 1
        starved = self._starve(now)
        ranks = tuple([view.look(now, starved) for view in self.ranks])
        host = self._look_at_host(now)
        sweep = self._sweep(now) if self._world.shape.links else None
        return tree.make(
            tree.NodeBeat, node=self.node, incarnation=f"a{self.node}", seq=self._seq, sent_s=now,
            generation=generation, ranks=ranks, host=host, sweep=sweep,
        )  # fmt: skip

    def _starve(self, now: float) -> float:
        """Return for how much of every second the threads of each rank have no CPU."""
        shape = self._world.shape
        share = CROWDED if shape.nproc * shape.cpu_share > FULL * shape.cores else 0.003
        for load in self._world.loads:
            mine = load.node == self.group_rank or load.everywhere
            if mine and load.begin_s <= now < load.end_s:
                share += 1.0 - 1.0 / load.factor
        return share

    def _look_at_host(self, now: float) -> Any:
        if tree.HostLoad is None or now - self._looked_s < LOOK_S:
            return None
        window_s = now - self._looked_s if self._looked_s else LOOK_S
        self._looked_s = now
        shape, chance = self._world.shape, self._chance
        waited = sum(view.waited for view in self.ranks)
        waited, self._waited = waited - self._waited, waited
        own, others = shape.nproc * shape.cpu_share + 0.02, 0.01 * shape.cores * chance.random()
        for load in self._world.loads:
            if load.begin_s <= now < load.end_s and (
                load.node == self.group_rank or load.everywhere
            ):
                own /= load.factor
                others = shape.cores - own - 0.03 * shape.cores * chance.random()
        busy = min(float(shape.cores), own + others)
        return tree.HostLoad(
            host=f"boot-{self.node}",
            cores=shape.cores,
            busy=round(busy, 3),
            own=round(own, 3),
            waited=round(max(0.0, waited) / window_s, 3),
            pressure=round(0.01 + max(0.0, busy / shape.cores - 0.5), 3),
        )

    def _sweep(self, now: float) -> Any:
        every_s = BEAT_S if now < self.close_until_s else SWEEP_S
        window_s = now - self._swept_s
        if window_s < every_s - 1e-3:
            return None
        self._swept_s = now
        if self._made < sum(1 + len(group.pairs) for group in self._world.groups):
            self._find_links()
        world, chance, fault = self._world, self._chance, self._world.fault
        samples = []
        for link in self._links:
            src, dst, sent = link.src, link.dst, link.traffic.sent_by(now)
            num_bytes, link.sent = sent - link.sent, sent
            if num_bytes < MOVED_BYTES * min(1.0, window_s):
                continue
            near = src // world.shape.nproc == dst // world.shape.nproc
            busy_s = num_bytes * (0.5e-9 if near else 4e-9) * chance.lognormvariate(0.0, 0.2)
            for load in world.loads:
                on = load.node in (src // world.shape.nproc, dst // world.shape.nproc)
                if load.begin_s <= now < load.end_s and (on or load.everywhere):
                    busy_s *= load.factor
            rtt_s = 2e-4
            struck = fault is not None and now >= fault.at_s and fault.kind == "slow link"
            if struck and fault is not None and (src, dst) == (fault.rank, fault.peer):
                busy_s, rtt_s = busy_s * fault.factor * 3.0, 5e-3
            busy_s = int(busy_s / JIFFY_S + chance.random()) * JIFFY_S
            sample = tree.LinkSample(src, dst, link.name, num_bytes, busy_s, rtt_s, 0, 0, 0, 0.01)
            samples.append(sample)
        return tree.make(tree.LinkSweep, at_s=now, window_s=window_s, links=tuple(samples))

    def _find_links(self) -> None:
        """Find which of all links begin here; sends and receives make theirs as they go."""
        mine = {view.rank for view in self.ranks}
        groups = self._world.groups
        found = [(g.name.removesuffix(" p2p"), *link) for g in groups for link in g.list_links()]
        known = {(link.src, link.dst, link.name) for link in self._links}
        self._links += [
            Link(src, dst, name, traffic)
            for name, src, dst, traffic in found
            if src in mine and (src, dst, name) not in known
        ]
        self._made = sum(1 + len(group.pairs) for group in groups)
