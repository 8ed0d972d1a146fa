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


class RankView:
    """One rank as its agent follows it."""

    def __init__(self, world: World, rank: int) -> None:
        """Begin with its first heartbeat."""
        shape = world.shape
        self.rank, self._world = rank, world
        self._open: list[Operation] = []
        self._comms: dict[str, Any] = {}
        self._index: dict[str, int] = {}
        self._strides: dict[str, Any] = {}
        self._step_stride = tree.Stride(tree.STAGES_A_BEAT)
        self._newest: dict[str, Operation | None] = {}
        self._moved_s = world.begin_s
        self._last_step_s = 0.0
        self._said_s = self._paused_s = 0.0
        """When a declared phase, and when a pause, last began or ended."""
        self._step = 0
        self._idle_s = 0.0
        self._over: Silence | None = None
        self._proc: Any = None
        self._proc_s = -NEVER
        self._run_delay_s = self._seen_s = 0.0
        self._shown: Any = None
        self._next_end_s = self._lagging_s = NEVER
        self._lagging = False
        self._declared = shape.declared
        self.waited = 0.0
        """Seconds without a CPU so far."""
        self._account = tree.make(
            tree.RankAccount, spawned_s=world.begin_s, script_s=world.begin_s,
            group_s=world.begin_s, init_s=world.begin_s if shape.declared else 0.0,
            first_step_s=world.begin_s if shape.declared else 0.0,
            step=0 if shape.declared else -1, last_step_s=0.0,
        )  # fmt: skip

    def look(self, now: float) -> Any:
        """Return its part of the node's heartbeat."""
        world, r, shown = self._world, self.rank, self._shown
        silence = self._find_silence(now) if world.silences[r] else None
        moved = self._is_news(now)
        spans: list[Any] = []
        stages: list[Any] = []
        if moved or self._newest or (self._lagging and now >= self._lagging_s):
            spans = self._follow(now)
            stages = self._follow_rows(now)
            self._note_next()
        proc = self._sample(now, silence, moved)
        same = shown is not None and not (moved or spans) and proc is shown.proc
        same = same and shown.heartbeat_s >= self._said_s
        if same and silence is None and not shown.spans and not shown.stages:
            return shown
        phase, since_s = "group", world.begin_s
        if self._declared:
            phase, since_s = "step", max(self._last_step_s or world.begin_s, self._paused_s)
        busy = None
        if silence is not None and silence.pause and self._declared:
            phase, since_s = "paused", silence.begin_s
        if silence is not None and silence.declared and tree.BusyPhase is not None:
            most_s = silence.begin_s + 5.0 * (silence.end_s - silence.begin_s) + 60.0
            busy = tree.BusyPhase(silence.declared, silence.begin_s, most_s)
        self._shown = tree.make(
            tree.RankProgress, rank=r, pid=1000 + r, phase=phase, phase_since_s=since_s,
            heartbeat_s=max(self._moved_s, self._said_s, since_s), account=self._account,
            comms=tuple(self._comms.values()), proc=proc, spans=tuple(spans),
            stages=tuple(stages), recorder="compiled", busy_phase=busy,
        )  # fmt: skip
        return self._shown

    def _is_news(self, now: float) -> bool:
        """Return whether anything of it has begun or ended since the last look."""
        pending, rows = self._world.operations[self.rank], self._world.rows[self.rank]
        return (
            now >= self._next_end_s
            or bool(pending and pending[0].start_s <= now)
            or bool(rows and rows[0].end_s <= now)
        )

    def _note_next(self) -> None:
        """Note when one of what is under way ends, and what is told of again and again."""
        self._next_end_s = min([o.end_s for o in self._open], default=NEVER)
        lagging = [o for o in self._open if self._is_behind(o)]
        self._lagging = bool(lagging)
        self._lagging_s = min([o.start_s for o in lagging], default=NEVER) + PENDING_S

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

    def _follow(self, now: float) -> list[Any]:
        pending, left = self._world.operations[self.rank], []
        begun = self._open
        while pending and pending[0].start_s <= now:
            begun.append(pending.popleft())
        ended: dict[str, list[Operation]] = {}
        touched: dict[str, tuple[Operation, int]] = {}
        for o in begun:
            name = o.group.name
            last = touched.get(name)
            done = last[1] if last is not None else self._known_end(name)
            seen_s = o.end_s if o.end_s <= now else o.start_s
            if seen_s > self._moved_s:
                self._moved_s = seen_s
            if o.end_s <= now:
                done = o.seq if done == o.seq - 1 else done
                ended.setdefault(name, []).append(o)
            else:
                left.append(o)
            newest = o if last is None or o.seq >= last[0].seq else last[0]
            touched[name] = (newest, done)
        self._open = left
        for name, (o, done) in touched.items():
            self._index.setdefault(name, len(self._index))
            more = {"timeout_s": 1800.0} if tree.TIMEOUT_KNOWN else {}
            self._comms[name] = tree.CommProgress(
                name, o.group.size, o.seq, done, o.op, o.start_s, o.group.ranks, o.bytes,
                "float32", o.peer, **more,
            )  # fmt: skip
        return self._thin(ended, now)

    def _known_end(self, name: str) -> int:
        known = self._comms.get(name)
        return 0 if known is None else int(known.ended_seq)

    def _thin(self, ended: dict[str, list[Operation]], now: float) -> list[Any]:
        chosen: list[Operation] = []
        for name in {**dict.fromkeys(self._strides), **ended}:
            stride = self._strides.setdefault(name, tree.Stride(tree.SPANS_A_BEAT))
            found = ended.get(name, [])
            step = stride.note(len(found))
            chosen += [o for o in found if o.seq % step == 0]
            if found and found[-1].seq % step:
                self._newest[name] = found[-1]
            elif (newest := self._newest.pop(name, None)) is not None and not found:
                chosen.append(newest)
        shown = [self._show(o, o.end_s) for o in chosen]
        late = [o for o in self._open if now - o.start_s > PENDING_S and self._is_behind(o)]
        return shown + [self._show(o, 0.0) for o in late[:PENDING_MAX]]

    def _is_behind(self, o: Operation) -> bool:
        return o.peer >= 0 or o.seq < self._comms[o.group.name].started_seq

    def _show(self, o: Operation, end_s: float) -> Any:
        wait_s = o.wait_s if end_s else 0.0
        index = self._index[o.group.name]
        awaited = (o.peer >= 0 and not end_s,) if tree.AWAITED_KNOWN else ()
        return tree.CollectiveSpan(
            index, o.seq, o.op, o.bytes, o.start_s, end_s, wait_s, o.peer, *awaited
        )

    def _follow_rows(self, now: float) -> list[Any]:
        rows, found = self._world.rows[self.rank], []
        while rows and rows[0].end_s <= now:
            row = rows.popleft()
            self._step, self._last_step_s = row.step, row.end_s
            more = {tree.WORK_FIELD: row.work} if tree.WORK_FIELD and row.work else {}
            found.append(
                tree.StepStages(
                    row.step, row.begin_s, row.end_s, *row.own, row.wait_s, row.other_s, **more
                )
            )
        if found and self._declared:
            begin_s = self._world.begin_s
            self._moved_s = max(self._moved_s, self._last_step_s)
            self._account = tree.make(
                tree.RankAccount, step=self._step, step_s=self._last_step_s - begin_s,
                spawned_s=begin_s, script_s=begin_s, init_s=begin_s, group_s=begin_s,
                first_step_s=begin_s, last_step_s=self._last_step_s,
            )  # fmt: skip
        step = self._step_stride.note(len(found))
        return [row for row in found if row.step % step == 0]

    def _sample(self, now: float, silence: Silence | None, moved: bool) -> Any:
        """Look at /proc, as seldom as an agent does."""
        if self._proc is not None and now - self._proc_s < (LOOK_S if moved else 0.0):
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
            self.waited += (now - self._seen_s) * self._starve(now)
        self._seen_s = now
        cpu_s = max(0.0, shape.cpu_share * (now - world.begin_s - idle_s))
        cpu_s = round(cpu_s, 2)
        io_bytes = self._step * 4_000_000
        blocked = 1 if state == "D" else 0
        self._proc_s = now
        self._proc = tree.make(
            tree.ProcSample, state=state, cpu_s=cpu_s, io_bytes=io_bytes, rss_bytes=1 << 30,
            num_threads=7, run_delay_s=self.waited, blocked=blocked,
        )  # fmt: skip
        return self._proc

    def _starve(self, now: float) -> float:
        """Return for how much of every second its threads have no CPU."""
        node = self.rank // self._world.shape.nproc
        shape = self._world.shape
        share = CROWDED if shape.nproc * shape.cpu_share > FULL * shape.cores else 0.003
        for load in self._world.loads:
            if load.begin_s <= now < load.end_s and (load.node == node or load.everywhere):
                share += 1.0 - 1.0 / load.factor
        return share


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
        ranks = tuple([view.look(now) for view in self.ranks])
        host = self._look_at_host(now)
        sweep = self._sweep(now) if self._world.shape.links else None
        return tree.make(
            tree.NodeBeat, node=self.node, incarnation=f"a{self.node}", seq=self._seq, sent_s=now,
            generation=generation, ranks=ranks, host=host, sweep=sweep,
        )  # fmt: skip

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
