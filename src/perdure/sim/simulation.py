"""A whole job under virtual time: real machines, played hardware, seeded misfortune.

The invariants of `check` hold after every call of the clock; a violation names the seed, and that
seed is then replayed for ever in the tests.
"""

import random
from dataclasses import dataclass, field
from hashlib import sha256

from perdure.control import Controller
from perdure.detect import Detector
from perdure.model.actions import AnyAction, Assignment, AssignNodes, EndJob, TakeStacks
from perdure.model.codec import encode
from perdure.model.events import (
    AnyEvent,
    CheckpointSaved,
    ControllerStarted,
    Decision,
    JobEnded,
    JobSubmitted,
    JournalEntry,
    TimerFired,
)
from perdure.model.job import CheckpointConfig, JobSpec, RestartConfig
from perdure.model.report import Report as LedgerReport
from perdure.model.wire import EventMessage, NodeOrder
from perdure.sim.clock import VirtualClock
from perdure.sim.network import Network, Weather
from perdure.sim.node import Node
from perdure.sim.training import Disk, World
from perdure.telemetry import LedgerFold

_PATIENT = RestartConfig(max_restarts=50, same_fault_max=50, window_max=1000)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated; everything else follows from `seed`."""

    seed: int
    nodes: int = 8
    nproc: int = 8
    steps: int = 150
    step_s: float = 0.4
    startup_s: float = 0.6
    save_every: int = 10
    beat_s: float = 0.5
    faults: int = 5
    kinds: tuple[str, ...] = (
        "crash", "crash", "stop", "leave", "agent", "keeper", "controller", "halfway", "outage",
    )  # fmt: skip
    """What may go wrong, each entry equally often."""
    bug_at_step: int = 0
    """Rank 0 fails here in every generation: the job must give up, and say so."""
    restart: RestartConfig = _PATIENT
    weather: Weather = field(default_factory=lambda: Weather(0.003, loss=0.02, duplicate=0.02))
    end_s: float = 900.0
    """The job must have ended by then."""


class InvariantViolated(Exception):
    """Something that must never be was, at this seed and time."""


class _ControllerDied(Exception):
    """The rest of what the controller was about to do does not happen."""


@dataclass(slots=True)
class _Shell:
    """What one controller process holds; lost when it is killed."""

    name: str
    machine: Controller
    detector: Detector
    taken: dict[str, int] = field(default_factory=dict)
    levels: dict[int, Assignment] = field(default_factory=dict)


class Simulation:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        """Set everything up; `run` lets time pass."""
        self.scenario = scenario
        self.chance = random.Random(scenario.seed)
        self.clock = VirtualClock()
        self.network = Network(self.clock, self.chance, scenario.weather)
        self.spec = JobSpec(
            name="sim",
            script="train.py",
            nproc=scenario.nproc,
            nodes=scenario.nodes,
            checkpoint=CheckpointConfig(every_steps=scenario.save_every),
            restart=scenario.restart,
        )
        self.disk = Disk()
        self.worlds: dict[int, World] = {}
        self.journal: list[JournalEntry] = []
        self.actions = sha256()
        self.ended: JobEnded | None = None
        self.controllers = 0
        self.shell: _Shell | None = None
        self.saved = 0
        self.committed = 0
        """Highest step whose checkpoint was ever verified."""
        self.injected: list[str] = []
        self.halfway: tuple[int, float] | None = None
        """Events until the controller dies between an event and its decisions, and for how long."""
        self.start_s = self.clock.now
        self.nodes = [
            Node(
                self.spec,
                node,
                self.clock,
                world_of=self.world_of,
                send=lambda message: self.network.send(lambda: self._take(message)),
            )
            for node in range(scenario.nodes)
        ]
        self._start_controller()
        self._plan_faults()
        self._beat()
        self._repeat()

    def run(self) -> LedgerReport:
        """Let time pass until the job has ended; return its ledger.

        Raises:
            InvariantViolated: one did not hold, or the job did not end in time.
        """
        while self.ended is None:
            try:
                going = self.clock.step()
            except _ControllerDied:
                going = True
            if not going or self.clock.now > self.start_s + self.scenario.end_s:
                raise self._violation("the job did not end")
            self.check()
        fold = LedgerFold()
        for entry in self.journal:
            fold.add(entry)
        report = fold.report(self.clock.now)
        self.check_end(report)
        return report

    def world_of(self, generation: int) -> World:
        """Return the world of `generation`, made at its first rank's start."""
        if generation not in self.worlds:
            s = self.scenario
            self.worlds[generation] = World(
                generation, s.nodes * s.nproc, s.steps, s.step_s, s.startup_s, s.save_every,
                0.1, self.disk,
            )  # fmt: skip
            self.clock.after(s.startup_s, lambda: self._watch_finish(generation))
            if s.bug_at_step:
                self.clock.after(s.startup_s, lambda: self._watch_bug(generation))
        return self.worlds[generation]

    # --- invariants --------------------------------------------------------------------------

    def check(self) -> None:
        """Check what must hold at every moment."""
        live = {n.keeper.generation for n in self.nodes if n.keeper and n.keeper.running}
        if len(live) > 1:
            raise self._violation(f"generations {sorted(live)} live at once")
        if self.disk.verified < self.committed:
            raise self._violation(f"step {self.committed} was verified and is lost")
        self.committed = self.disk.verified

    def check_end(self, report: LedgerReport) -> None:
        """Check what must hold once the job has ended."""
        assert self.ended is not None
        expected = "failed" if self.scenario.bug_at_step else "done"
        if self.ended.status != expected or not self.ended.reason:
            raise self._violation(f"it ended as {self.ended.status}: {self.ended.reason}")
        if any(node.keeper and node.keeper.running for node in self.nodes):
            raise self._violation("ranks outlived the job")
        newest = self.worlds[max(self.worlds)]
        if expected == "done" and newest.step_at(self.clock.now) != self.scenario.steps:
            raise self._violation("the last world did not reach the last step")
        total = sum(account.s for account in report.ledger.values())
        if abs(total - report.slot_s) > 1e-6 * report.slot_s:
            raise self._violation(f"the ledger has {total} of {report.slot_s} slot-seconds")
        replayed = Controller()
        for entry in self.journal:
            if not isinstance(entry.body, Decision):
                replayed.handle(entry.at_s, entry.body)
        shell = self.shell
        if shell is not None and encode_state(replayed) != encode_state(shell.machine):
            raise self._violation("a replayed journal gives another state")

    def _violation(self, what: str) -> InvariantViolated:
        at_s = self.clock.now - self.start_s
        faults = "; ".join(self.injected)
        return InvariantViolated(f"seed {self.scenario.seed}, {at_s:.3f} s: {what} ({faults})")

    # --- the controller's process ------------------------------------------------------------

    def _start_controller(self) -> None:
        """Start a controller: replay the journal, then take over."""
        if self.shell is not None or self.ended is not None:
            return
        self.controllers += 1
        shell = _Shell(f"c{self.controllers}", Controller(), Detector(self.spec))
        for entry in self.journal:
            if isinstance(entry.body, Decision):
                continue
            if entry.source:
                shell.taken[entry.source] = max(entry.source_seq, shell.taken.get(entry.source, 0))
            for action in shell.machine.handle(entry.at_s, entry.body):
                self._remember(shell, action)
            shell.detector.note(entry.at_s, entry.body)
        self.shell = shell
        if not self.journal:
            self._append(JobSubmitted(spec=self.spec, at_s=self.start_s))
        self._append(ControllerStarted(incarnation=shell.name))
        for node in self.nodes:
            self._send(node.node, NodeOrder(controller=shell.name, register=True))
        self._tick(shell)

    def _append(self, event: AnyEvent, source: str = "", source_seq: int = 0) -> None:
        """Journal an event, decide, journal the decisions, act."""
        shell = self.shell
        assert shell is not None
        now = self.clock.now
        self._write(event, source, source_seq)
        self._perhaps_die()
        actions = shell.machine.handle(now, event)
        for action in actions:
            kind = type(action).__name__
            self.actions.update(encode(action) + f"{now:.6f}".encode())
            summary = action.assignment.phase if isinstance(action, AssignNodes) else ""
            self._write(Decision(action=kind, summary=summary, reason=action.reason))
        for action in actions:
            self._act(shell, action)
        for derived in shell.detector.note(now, event):
            self._append(derived)

    def _perhaps_die(self) -> None:
        """Lose the controller here: the event is on disk, and nothing has followed from it."""
        if self.halfway is None:
            return
        left, down_s = self.halfway
        self.halfway = (left - 1, down_s) if left > 1 else None
        if self.halfway is None:
            self.shell = None
            self.clock.after(down_s, self._start_controller)
            raise _ControllerDied

    def _write(self, body: AnyEvent | Decision, source: str = "", source_seq: int = 0) -> None:
        entry = JournalEntry(len(self.journal) + 1, self.clock.now, body, source, source_seq)
        self.journal.append(entry)

    def _remember(self, shell: _Shell, action: AnyAction) -> None:
        if isinstance(action, AssignNodes):
            for node in action.nodes:
                shell.levels[node] = action.assignment

    def _act(self, shell: _Shell, action: AnyAction) -> None:
        self._remember(shell, action)
        match action:
            case AssignNodes():
                for node in action.nodes:
                    self._send(node, NodeOrder(shell.name, assignment=action.assignment))
            case TakeStacks():
                for node in sorted({self.spec.node_of(rank) for rank in action.ranks}):
                    self._send(node, NodeOrder(shell.name, stacks=action))
            case EndJob():
                ended = JobEnded(
                    status=action.status,
                    exit_code=action.exit_code,
                    reason=action.reason,
                    at_s=self.clock.now,
                )
                self._write(ended)
                shell.machine.handle(self.clock.now, ended)
                self.ended = ended
            case _:
                pass

    def _send(self, node: int, order: NodeOrder) -> None:
        self.network.send(lambda: self.nodes[node].order(order))

    def _take(self, message: EventMessage) -> None:
        """Take a batch from an agent: each event once, in order; acknowledge what is on disk."""
        shell = self.shell
        if shell is None or self.ended is not None:
            return
        for seq, event in enumerate(message.events, message.first_seq):
            if seq == shell.taken.get(message.source, 0) + 1:
                shell.taken[message.source] = seq
                self._append(event, message.source, seq)
                if self.ended is not None:
                    return
        seq, source, node = shell.taken.get(message.source, 0), message.source, message.node
        self.network.send(lambda: self.nodes[node].acknowledge(source, seq))

    def _tick(self, shell: _Shell) -> None:
        """Look after time: the detector's, the machine's."""
        if shell is not self.shell or self.ended is not None:
            return
        now = self.clock.now
        for event in shell.detector.tick(now):
            self._append(event)
        deadline_s = shell.machine.next_deadline()
        if deadline_s is not None and now >= deadline_s:
            self._append(TimerFired())
        self.clock.after(0.2, lambda: self._tick(shell))

    def _repeat(self) -> None:
        """Repeat the levels, as the real shell does."""
        if self.shell is not None:
            for node, assignment in sorted(self.shell.levels.items()):
                self._send(node, NodeOrder(self.shell.name, assignment=assignment))
        self.clock.after(1.0, self._repeat)

    # --- hardware ----------------------------------------------------------------------------

    def _beat(self) -> None:
        for node in self.nodes:
            beat = node.make_beat()
            if beat is not None:
                self.network.send(lambda beat=beat: self._observe(beat))  # type: ignore[misc]
        self.clock.after(self.scenario.beat_s, self._beat)
        self._save()

    def _observe(self, beat: object) -> None:
        if self.shell is not None and self.ended is None:
            for event in self.shell.detector.observe(self.clock.now, beat):  # type: ignore[arg-type]
                self._append(event)

    def _save(self) -> None:
        """Let rank 0 tell of a checkpoint that was verified."""
        if not self.worlds:
            return
        world = self.worlds[max(self.worlds)]
        world.flush(self.clock.now)
        if self.disk.verified > self.saved and self.shell is not None and self.ended is None:
            self.saved = self.disk.verified
            self._append(
                CheckpointSaved(
                    generation=world.generation,
                    step=self.saved,
                    path="disk",
                    bytes=1,
                    stall_s=0.0,
                    save_s=0.1,
                    at_s=self.clock.now,
                )
            )

    def _watch_finish(self, generation: int) -> None:
        """Let all ranks end well once the last step is committed."""
        world = self.worlds[generation]
        if world.frozen_s is not None or generation != max(self.worlds):
            return
        if not world.first_step_s or self.clock.now < world.finish_s():
            wait_s = world.finish_s() - self.clock.now if world.first_step_s else 0.5
            self.clock.after(max(wait_s, 0.01), lambda: self._watch_finish(generation))
            return
        for node in self.nodes:
            for rank in self.spec.ranks_of(node.node):
                node.end_rank(rank)

    def _watch_bug(self, generation: int) -> None:
        """Let rank 0 fail once it has come to the step with the script's own bug."""
        world = self.worlds[generation]
        if world.frozen_s is not None or generation != max(self.worlds):
            return
        if world.step_at(self.clock.now) < self.scenario.bug_at_step:
            self.clock.after(self.scenario.step_s / 4, lambda: self._watch_bug(generation))
            return
        self.nodes[0].end_rank(0, signal=11)

    def _plan_faults(self) -> None:
        length_s = self.scenario.steps * self.scenario.step_s
        kinds = self.scenario.kinds
        for _ in range(self.scenario.faults):
            at_s = self.chance.random() * length_s
            kind = self.chance.choice(kinds)
            node = self.chance.randrange(self.scenario.nodes)
            rank = self.chance.choice(self.spec.ranks_of(node))
            down_s = 0.2 + self.chance.random() * 2.0
            self.clock.after(at_s, self._fault(kind, node, rank, down_s))

    def _fault(self, kind: str, node: int, rank: int, down_s: float):  # type: ignore[no-untyped-def]
        def strike() -> None:
            if self.ended is not None:
                return
            at_s = self.clock.now - self.start_s
            self.injected.append(f"{kind} of node {node} rank {rank} at {at_s:.3f}")
            match kind:
                case "crash":
                    self.nodes[node].end_rank(rank, signal=9)
                case "stop":
                    self.nodes[node].stop_rank(rank)
                case "agent":
                    self.nodes[node].kill_agent(down_s)
                case "keeper":
                    self.nodes[node].kill_keeper()
                case "leave":
                    self.nodes[node].leave_rank(rank)
                case "controller":
                    self.shell = None
                    self.clock.after(down_s, self._start_controller)
                case "halfway":
                    self.halfway = (1 + rank % 8, down_s)
                case _:
                    self.network.cut(down_s)

        return strike


def encode_state(controller: Controller) -> str:
    """Return a controller's whole state as text, for comparison."""
    return repr(controller.state)
