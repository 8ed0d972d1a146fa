"""One simulated job before the real detector, controller and policy, and what they said of it.

Heartbeats come five times a second from every node; the controller's shell is the simulator's, with
the real machines in it. Orders are carried out as nodes would: stores, ranks, stacks, probes. What
is said is judged against what the world has written down:

- a verdict is *told* once, until it is withdrawn; the same one after that is another;
- `HostBusy` is right where others' load was there, and so is a `Straggler` on a machine that alone
  had it;
- a hang that names a rank which is truly silent is counted apart (`silent`): it is true that the
  others wait for it, and false that it hangs;
- each restart, replacement and stop is a false action, and so is each lost node.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from . import tree
from .agents import BEAT_S, LATE_S, NodeView
from .training import Fault, Shape, World
from .workloads import GAPS, Steps, draw_shape, make_steps

BEGIN_S = 1_000_000.0
START_S = 4.0
"""From an order to run until the first step."""
ANSWER_S = 0.3
GRACE_S = 8.0
"""So long after it was over, a load may still be told of."""
WATCH_S = 2.0
"""For so long a node looks closely that is under suspicion."""
GAPS_S = (1.0, 2.0, 3.0, 8.0, 14.0)
"""Times for which a node is not heard of."""
WAITS = 'Thread 1 (idle): "MainThread"\n    wait (torch/distributed/distributed_c10d.py:1)\n'
ALONE = 'Thread 1 (idle): "MainThread"\n    evaluate (train.py:{line})\n'
HANGS = ("ComputeHang", "CommHang")
Maker = Callable[[World, random.Random], Steps]


@dataclass(slots=True)
class Told:
    """One thing that was said."""

    at_s: float
    kind: str
    culprit: str
    reason: str
    right: bool = False
    silent: bool = False
    withdrawn_s: float = 0.0
    evidence: dict[str, Any] = field(default_factory=dict)
    confidence: float = 0.0
    rank: int | None = None
    node: int | None = None
    link: tuple[int, int] | None = None


@dataclass(slots=True)
class Outcome:
    """What was said of one job, and done to it."""

    told: list[Told] = field(default_factory=list)
    actions: list[Told] = field(default_factory=list)
    simulated_s: float = 0.0
    wall_s: float = 0.0
    ended: str = ""


class Watched(tree.Shell):  # type: ignore[misc]
    """A controller's shell that tells what it writes and what it has done."""

    def __init__(self, job: "Job") -> None:
        """Take over a job that has just been submitted."""
        self.job = job
        super().__init__("controller", job.spec, tree.Disk(), job.clock, lambda sending: None)

    def _write(self, body: Any, source: str = "", source_seq: int = 0) -> None:
        super()._write(body, source, source_seq)
        self.job.note(body)

    def _act(self, action: Any) -> None:
        super()._act(action)
        self.job.obey(action)

    def _rest(self) -> None:
        """Write no snapshots: nobody takes over here."""


class Job:
    """A job of some shape that does some workload, or has some fault."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        seed: str,
        fault: Fault | None = None,
        *,
        make: Maker | None = None,
        gaps_s: tuple[float, ...] = (),
    ) -> None:
        """Draw everything from `seed`.

        `make` makes the steps, where it is none of the table; with `gaps_s` the nodes are boxes
        from elsewhere, of which one is not heard of for so long now and then.
        """
        self.name, self.shape, self.fault = name, shape, fault
        self.make = make or partial(make_steps, name)
        self.gaps_s = gaps_s = gaps_s or (GAPS_S if name == GAPS else ())
        self.chance = random.Random(f"{seed} {name}")
        self.clock = tree.VirtualClock(BEGIN_S)
        self.spec = tree.JobSpec(
            script="train.py", nproc=shape.nproc, nodes=shape.nodes, spares=shape.nproc,
            remote=shape.nodes if gaps_s else 0,
        )  # fmt: skip
        self.outcome = Outcome()
        self.open: dict[tuple[str, str], Told] = {}
        self.world: World | None = None
        self.steps: Steps | None = None
        self.view_of: dict[int, NodeView] = {}
        self.generation = -1
        self.formed = -1
        """The newest generation whose store was ordered."""
        self.offsets = [self.chance.random() * BEAT_S for _ in range(self.spec.num_nodes)]
        self.gap = (-1, 0.0, BEGIN_S + 60.0 if gaps_s else float("inf"))
        """Which node is not heard of, until when, and when the next gap begins."""
        self.shell = Watched(self)
        self.over = False

    # --- the nodes ----------------------------------------------------------------------------

    def start(self) -> None:
        """Submit the job, and register its nodes."""
        self.shell.start()
        for node in range(self.spec.num_nodes):
            self.shell.append(
                tree.make_event(
                    "NodeRegistered", node=node, incarnation=f"a{node}", host=f"10.0.0.{node}",
                    boot_id=f"boot-{node}", slots=self.shape.nproc,
                )
            )  # fmt: skip

    def after(self, seconds: float, name: str, **said: Any) -> None:
        """Have an event arrive some time later."""

        def arrive() -> None:
            event = tree.make_event(name, at_s=self.clock.now, **said)
            if not self.over:
                self.shell.append(event)

        self.clock.after(seconds, arrive)

    def obey(self, action: Any) -> None:
        """Do what nodes would."""
        match type(action).__name__:
            case "AssignNodes":
                self._assign(action.assignment, action.reason)
            case "TakeStacks":
                stacks = {rank: self._stack_of(rank) for rank in action.ranks}
                self.after(ANSWER_S, "StacksTaken", generation=action.generation, stacks=stacks)
            case "RunProbe":
                self._probe(action)
            case "WatchClosely":
                self._watch(action.nodes, action.until_s)
            case "EndJob":
                self.over, self.outcome.ended = True, action.reason
            case _:
                pass

    def _watch(self, nodes: Any, until_s: float) -> None:
        for node in nodes:
            view = self.view_of.get(node)
            if view is not None:
                view.close_until_s = until_s

    def _assign(self, assignment: Any, reason: str) -> None:
        g = assignment.generation
        if assignment.phase == "store" and g > self.formed:
            if self.formed >= 0:
                self._act_upon(self.clock.now, "restart", reason)
            self.formed = g
            self.view_of = {}  # Who was there is ended: nobody tells of it any more.
            for node in range(self.spec.num_nodes):
                self.after(ANSWER_S, "GenerationStopped", node=node, generation=g - 1)
            self.after(
                ANSWER_S, "StoreReady", generation=g, host="10.0.0.0", port=1, agent_store=True
            )
        elif assignment.phase == "run" and g > self.generation:
            self.generation = g
            self.clock.after(ANSWER_S, lambda: self._begin(assignment))

    def _begin(self, assignment: Any) -> None:
        if self.over or assignment.generation != self.generation:
            return
        shape, now = self.shape, self.clock.now
        placement = assignment.placement or tuple(range(shape.nodes))
        old = self.world
        fault = self.fault if self._is_still_there(placement) else None
        self.world = World(shape, self.chance, now + START_S, fault)
        if old is not None:
            self.world.history = old.history
        self.steps = self.make(self.world, self.chance)
        self.view_of = {
            node: NodeView(self.world, i, node, self.chance) for i, node in enumerate(placement)
        }
        for i, node in enumerate(placement):
            pids = {r: 1000 + r for r in range(i * shape.nproc, (i + 1) * shape.nproc)}
            self.shell.append(
                tree.make_event(
                    "RanksStarted", node=node, generation=assignment.generation, pids=pids,
                    at_s=now, warm=True,
                )
            )  # fmt: skip

    def _is_still_there(self, placement: tuple[int, ...]) -> bool:
        """Return whether the broken machine is still among them; a broken rank is the script's."""
        fault = self.fault
        if fault is None:
            return False
        home = fault.rank // self.shape.nproc
        return placement[home] == home

    def _stack_of(self, rank: int) -> str:
        world, now = self.world, self.clock.now
        if world is None:
            return WAITS
        for silence in world.silences[rank]:
            if silence.begin_s <= now < silence.end_s:
                return ALONE.format(line=int(now * 10) % 100 if silence.state == "R" else 1)
        fault = world.fault
        if fault is not None and fault.rank == rank and fault.kind in ("sleep", "spin", "stop"):
            return ALONE.format(line=int(now * 10) % 100 if fault.kind == "spin" else 1)
        return WAITS

    def _probe(self, action: Any) -> None:
        """Let each node transfer and compute: fast, but where something is broken."""
        fault, nproc = self.fault, self.shape.nproc
        for node in sorted({n for pair in action.pairs for n in pair} | set(action.hosts)):
            pairs = []
            for src, dst in action.pairs:
                if src == node:
                    seconds = action.bytes / 1e9 * self.chance.lognormvariate(0.0, 0.1)
                    if fault is not None and fault.kind == "slow link":
                        ends = (fault.rank // nproc, fault.peer // nproc)
                        seconds *= fault.factor * 3.0 if (src, dst) == ends else 1.0
                    pairs.append(
                        tree.PairProbe(action.round, src, dst, action.bytes, seconds, 2e-4)
                    )
            hosts = []
            if node in action.hosts:
                seconds = 0.05 * self.chance.lognormvariate(0.0, 0.05)
                if fault is not None and fault.kind == "slow host" and node == fault.rank // nproc:
                    seconds *= fault.factor
                hosts.append(tree.HostProbe(action.round, node, "cpu", seconds))
            self.after(
                ANSWER_S, "ProbeEnded", id=action.id, node=node, round=action.round,
                pairs=tuple(pairs), hosts=tuple(hosts),
            )  # fmt: skip

    # --- time ---------------------------------------------------------------------------------

    def run(self, seconds: float) -> Outcome:
        """Let so much time pass, or less where the job is ended; return what was said."""
        began = time.process_time()
        self.start()
        end_s = BEGIN_S + seconds
        tick = 0
        order = sorted(range(self.spec.num_nodes), key=self.offsets.__getitem__)
        clock = self.clock
        late = self.chance.expovariate
        while not self.over:
            tick += 1
            base_s = BEGIN_S + tick * BEAT_S
            if base_s > end_s:
                break
            for node in order:
                self._pass_time(base_s + self.offsets[node] + late(1.0 / LATE_S))
                if self.over:
                    break
                self._beat(node)
            if not self.over:
                self.shell.tick()
                self._watch(self.shell.detector.suspects(), clock.now + WATCH_S)
        self.outcome.simulated_s = clock.now - BEGIN_S
        self.outcome.wall_s = time.process_time() - began
        return self.outcome

    def _pass_time(self, until_s: float) -> None:
        """Let what is due until then happen."""
        clock = self.clock
        while clock._queue and clock._queue[0][0] <= until_s:
            clock.step()
        clock.now = max(clock.now, until_s)

    def _beat(self, node: int) -> None:
        now = self.clock.now
        if self._is_unheard(now, node):
            return
        view = self.view_of.get(node)
        if view is None:
            beat = tree.make(
                tree.NodeBeat, node=node, incarnation=f"a{node}", seq=int(now * 10),
                sent_s=now, generation=self.generation,
            )  # fmt: skip
        else:
            assert self.world is not None
            assert self.steps is not None
            self.world.advance(now, self.steps.run)
            beat = view.beat(now, self.generation)
        for event in tree.take_beat(self.shell, now, beat):
            self.shell.append(event)

    def _is_unheard(self, now: float, node: int) -> bool:
        gone, until_s, next_s = self.gap
        if now >= next_s:
            until_s = now + self.chance.choice(self.gaps_s)
            gone = self.chance.randrange(self.spec.nodes)
            self.gap = (gone, until_s, until_s + self.chance.uniform(30.0, 120.0))
        return node == gone and now < until_s

    # --- what is said -------------------------------------------------------------------------

    def note(self, body: Any) -> None:
        """Keep what was written into the journal, where it says something of health."""
        now, name = self.clock.now, type(body).__name__
        match name:
            case "VerdictReached":
                self._judge(now, body.verdict)
            case "VerdictWithdrawn":
                told = self.open.pop((body.verdict.kind, str(body.verdict.culprit)), None)
                if told is not None:
                    told.withdrawn_s = now
            case "NodeLost":
                told = Told(now, "NodeLost", f"node {body.node}", body.reason, node=body.node)
                self.outcome.told.append(told)
            case "Decision" if body.action == "EndJob":
                self._act_upon(now, "stop", body.reason)
            case _:
                pass

    def _act_upon(self, now: float, what: str, reason: str) -> None:
        what = "replace" if "stands in" in reason else what
        self.outcome.actions.append(Told(now, what, "", reason))
        self.open.clear()

    def _judge(self, now: float, verdict: Any) -> None:
        key = (verdict.kind, str(verdict.culprit))
        known = self.open.get(key)
        if known is not None:
            known.evidence, known.reason = verdict.evidence, verdict.reason
            return
        culprit = verdict.culprit
        told = Told(
            now, verdict.kind, key[1], verdict.reason, evidence=dict(verdict.evidence),
            confidence=verdict.confidence, rank=culprit.rank, node=culprit.node, link=culprit.link,
        )  # fmt: skip
        told.right = self.judge_load(now, told.kind, node=told.node, rank=told.rank)
        told.silent = told.kind in HANGS and self._is_silent(now, told)
        self.open[key] = told
        self.outcome.told.append(told)

    def judge_load(self, now: float, kind: str, *, node: int | None, rank: int | None) -> bool:
        """Return whether others' load is there that makes a verdict of this kind true."""
        world = self.world
        if world is None or kind not in ("HostBusy", "Straggler"):
            return False
        view = self.view_of.get(-1 if node is None else node)
        nodes = [] if view is None else [view.group_rank]
        if rank is not None:
            nodes = [rank // self.shape.nproc]
        there = [each for each in world.loads if each.begin_s <= now <= each.end_s + GRACE_S]
        own = {each.node for each in there if not each.everywhere}
        if kind == "HostBusy" and not nodes:  # Of all of them.
            nodes = list(range(self.shape.ranks // self.shape.nproc))
            return any(each.everywhere for each in there) or own.issuperset(nodes)
        return any(
            each.node in nodes if not each.everywhere else kind == "HostBusy" for each in there
        )

    def _is_silent(self, now: float, told: Told) -> bool:
        world = self.world
        if world is None:
            return False
        alone = [s for s in world.history[-64:] if s.begin_s <= now <= s.end_s + 1.0]
        if told.rank is None:
            return bool(alone) and told.kind == "CommHang" and told.link is None
        return any(s.rank == told.rank for s in alone)


def run_healthy(name: str, number: int, seed: str, seconds: float) -> tuple[Shape, Outcome]:
    """Return the shape of run `number` of a workload, and what was said of it."""
    chance = random.Random(f"{seed} {name} {number} shape")
    shape = draw_shape(name, number, chance)
    return shape, Job(name, shape, f"{seed} {number}").run(seconds)
