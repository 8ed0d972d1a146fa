"""A whole job under virtual time: real machines, played hardware, seeded misfortune.

The invariants of `check` hold after every call of the clock; a violation names the seed, and that
seed is then replayed for ever in the tests.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.control.memory import encode_memory
from perdure.control.orders import Sending
from perdure.model.bus.wire import Command, EventMessage
from perdure.model.events import CheckpointSaved, CommandReceived, JobEnded, JournalEntry
from perdure.model.job import CheckpointConfig, JobSpec, RestartConfig
from perdure.model.report import Report as LedgerReport
from perdure.model.signals.progress import NodeBeat
from perdure.telemetry.accounting.ledger import make_report
from tests.simulator.network import Contradiction, Network, Operator, VirtualClock, Weather
from tests.simulator.node import Node
from tests.simulator.ranks import Agreements, Broken, Disk, Rank, World
from tests.simulator.shell import ControllerDied, Forgotten, Shell
from tests.simulator.shell import Disk as ControllerDisk

_PATIENT = RestartConfig(max_restarts=50, same_fault_max=50, window_max=1000)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario to simulate; everything else follows from `seed`."""

    seed: int
    nodes: int = 8
    nproc: int = 8
    spares: int = 0
    """Spare ranks, on nodes of their own."""
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
    down_s: float = 2.0
    """Seconds that a part which went wrong is down, at most."""
    commands: tuple[str, ...] = ()
    """Operators' commands, each at a moment of its own: checkpoint, stop, kill."""
    save_s: float | None = None
    """Seconds between the controller's own checkpoints; None: every `save_every` steps."""
    bug_at_step: int = 0
    """Rank 0 fails here in every generation: the job must give up, and say so."""
    restart: RestartConfig = _PATIENT
    weather: Weather = field(default_factory=lambda: Weather(0.003, loss=0.02, duplicate=0.02))
    end_s: float = 900.0
    """The job must have ended by then."""


class InvariantViolated(Exception):
    """Raised where, at this seed and time, something happened that must never happen."""


class Simulation:
    """One run of one scenario."""

    rank_type: type[Rank] = Rank

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
            spares=scenario.spares,
            checkpoint=CheckpointConfig(every_steps=scenario.save_every)
            if scenario.save_s is None
            else CheckpointConfig(every_s=scenario.save_s),
            restart=scenario.restart,
        )
        self.disk = Disk()
        self.worlds: dict[int, World] = {}
        self.kept = ControllerDisk()
        self.controllers = 0
        self.shell: Shell | None = None
        self.witness = Agreements()
        self.operator = Operator(self.clock, self._ask)
        self.saved = 0
        self.told: set[tuple[int, int]] = set()
        """Agreed checkpoints that rank 0 has reported."""
        self.committed = 0
        """Highest step whose checkpoint was ever verified."""
        self.injected: list[str] = []
        self.down_s = 0.0
        """How long a controller that dies halfway is missed."""
        self.start_s = self.clock.now
        self.nodes = [
            Node(
                self.spec,
                node,
                self.clock,
                world_of=self.world_of,
                send=lambda message: self.network.send(lambda: self._take(message)),
                witness=self.witness,
                late_s=lambda: 0.5 * self.chance.random() * scenario.step_s,
                rank_type=self.rank_type,
            )
            for node in range(self.spec.num_nodes)
        ]
        self._start_controller()
        self._plan_faults()
        self._plan_commands()
        self._beat()
        self._look()

    @property
    def journal(self) -> list[JournalEntry]:
        """Everything that any controller has written."""
        return self.kept.journal

    @property
    def ended(self) -> JobEnded | None:
        """How the job ended; None before."""
        return self.kept.ended

    @property
    def actions(self):  # type: ignore[no-untyped-def]
        """The hash of all actions and their times."""
        return self.kept.actions

    def run(self) -> LedgerReport:
        """Let time pass until the job has ended; return its ledger.

        Raises:
            InvariantViolated: one did not hold, or the job did not end in time.
        """
        try:
            while self.ended is None:
                self._step()
            report = make_report(self.journal, self.clock.now)
            self.check_end(report)
        except (Broken, Contradiction, Forgotten) as error:
            raise self._violation(str(error)) from error
        return report

    def _step(self) -> None:
        try:
            going = self.clock.step()
        except ControllerDied:
            going, self.shell = True, None
            self.clock.after(self.down_s, self._start_controller)
        if not going or self.clock.now > self.start_s + self.scenario.end_s:
            raise self._violation("the job did not end")
        self.check()

    def world_of(self, generation: int) -> World:
        """Return the world of `generation`, made at its first rank's start."""
        if generation not in self.worlds:
            self.worlds[generation] = self._make_world(generation)
        return self.worlds[generation]

    def _make_world(self, generation: int) -> World:
        s = self.scenario
        self.clock.after(s.startup_s, lambda: self._watch_finish(generation))
        if s.bug_at_step:
            self.clock.after(s.startup_s, lambda: self._watch_bug(generation))
        return World(
            generation, s.nodes * s.nproc, s.steps, s.step_s, s.startup_s, s.save_every,
            0.1, self.disk,
        )  # fmt: skip

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
        stops = "stop" in self.scenario.commands or "kill" in self.scenario.commands
        expected = {"failed"} if self.scenario.bug_at_step else {"done"}
        if stops and not self.scenario.bug_at_step:
            expected |= {"stopped"}
        if self.ended.status not in expected or not self.ended.reason:
            raise self._violation(f"it ended as {self.ended.status}: {self.ended.reason}")
        if any(node.keeper and node.keeper.running for node in self.nodes):
            raise self._violation("ranks outlived the job")
        newest = self.worlds[max(self.worlds)]
        done = newest.step_at(self.clock.now) == self.scenario.steps
        if self.ended.status == "done" and not done:
            raise self._violation("the last world did not reach the last step")
        if newest.frozen_s is None:
            self.witness.check_end(newest.generation, newest.size)
        total = sum(account.s for account in report.ledger.values())
        if abs(total - report.slot_s) > 1e-6 * report.slot_s:
            raise self._violation(f"the ledger has {total} of {report.slot_s} slot-seconds")
        whole = self.kept.replay(self.spec)
        if self.shell is not None and encode_memory(whole) != encode_memory(self.shell.memory):
            raise self._violation("a replayed journal gives another memory")
        self._check_commands()

    def _check_commands(self) -> None:
        """Every command that came to the journal did so once, and was answered with the truth."""
        bodies = [entry.body for entry in self.journal]
        taken = [body.id for body in bodies if isinstance(body, CommandReceived)]
        if len(taken) != len(set(taken)):
            raise self._violation(f"a command was taken twice: {taken}")
        answered = self.kept.replay(self.spec).machine.state.answered
        for id_ in taken:
            if id_ not in answered:
                raise self._violation(f"{id_} was taken and never answered")
            ok, _, result = answered[id_]
            heard = self.operator.answers.get(id_)
            if heard is not None and (heard.ok, heard.result) != (ok, result):
                raise self._violation(f"{id_}: the operator heard {heard}")
            saved = {step for _, step in self.disk.agreed}
            asked = self.operator.sent[id_].kind == "checkpoint"
            if ok and asked and result["step"] not in saved:
                raise self._violation(f"{id_} was answered {result}, and nothing was saved")

    def _violation(self, what: str) -> InvariantViolated:
        at_s = self.clock.now - self.start_s
        faults = "; ".join(self.injected)
        return InvariantViolated(f"seed {self.scenario.seed}, {at_s:.3f} s: {what} ({faults})")

    # --- the controller's process ------------------------------------------------------------

    def _start_controller(self) -> None:
        """Start a controller: it remembers, then takes over."""
        if self.shell is not None or self.ended is not None:
            return
        self.controllers += 1
        self.shell = Shell(f"c{self.controllers}", self.spec, self.kept, self.clock, self._send)
        self.shell.start()
        self._tick(self.shell)

    def _send(self, sending: Sending) -> None:
        whom, order = sending
        for node in self.nodes if whom == "all" else [self.nodes[int(whom)]]:
            self.network.send(lambda node=node: node.order(order))  # type: ignore[misc]

    def _take(self, message: EventMessage) -> None:
        """Take a batch from an agent; acknowledge what is on disk."""
        if self.shell is None or self.ended is not None:
            return
        ack, node = self.shell.take(message), message.node
        if self.ended is None:
            self.network.send(lambda: self.nodes[node].acknowledge(ack))

    def _tick(self, shell: Shell) -> None:
        if shell is self.shell and self.ended is None:
            shell.tick()
            self.clock.after(0.2, lambda: self._tick(shell))

    def _ask(self, command: Command) -> None:
        """Carry a command to whichever controller is there when it arrives, and its answer back."""

        def arrive() -> None:
            if self.shell is not None and self.ended is None:
                answer = self.operator.hear
                self.shell.obey(command, lambda reply: self.network.send(lambda: answer(reply)))

        self.network.send(arrive)

    # --- hardware ----------------------------------------------------------------------------

    def _beat(self) -> None:
        for node in self.nodes:
            beat = node.make_beat()
            if beat is not None:
                self.network.send(lambda beat=beat: self._take_beat(beat))  # type: ignore[misc]
        self.clock.after(self.scenario.beat_s, self._beat)
        self._save()

    def _take_beat(self, beat: NodeBeat) -> None:
        if self.shell is not None and self.ended is None:
            self.shell.take_beat(beat)

    def _look(self) -> None:
        """Let the ranks come to the boundaries that were agreed on."""
        for node in self.nodes:
            node.advance_ranks()
        self.clock.after(0.1, self._look)

    def _save(self) -> None:
        """Let rank 0 tell of a checkpoint that was verified."""
        if not self.worlds:
            return
        world = self.worlds[max(self.worlds)]
        world.flush(self.clock.now)
        agreed = {(g, step) for g, step in self.disk.agreed if g == world.generation}
        steps = sorted(step for _, step in agreed - self.told)
        self.told |= agreed
        if self.disk.verified > self.saved and self.disk.verified not in steps:
            steps.append(self.disk.verified)
        for step in steps:
            self.saved = max(self.saved, step)
            saved = CheckpointSaved(
                generation=world.generation,
                step=step,
                path="disk",
                bytes=1,
                stall_s=0.0,
                save_s=0.1,
                at_s=self.clock.now,
            )
            self.nodes[0].say(0, saved)

    def _watch_finish(self, generation: int) -> None:
        """Let all ranks end well once the last step is committed."""
        world = self.worlds[generation]
        if world.frozen_s is not None or generation != max(self.worlds):
            return
        waiting = not world.first_step_s or world.step_at(self.clock.now) < world.target
        if waiting or not all([node.finish_ranks() for node in self.nodes]):
            self.clock.after(0.25 if waiting else 0.05, lambda: self._watch_finish(generation))

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
            node = self.chance.randrange(self.spec.num_nodes)
            rank = node * self.spec.nproc + self.chance.randrange(self.spec.nproc)
            down_s = 0.2 + self.chance.random() * self.scenario.down_s
            self.clock.after(at_s, self._fault(kind, node, rank, down_s))

    def _plan_commands(self) -> None:
        length_s = self.scenario.steps * self.scenario.step_s
        for number, kind in enumerate(self.scenario.commands):
            at_s = self.chance.random() * length_s * (1.0 if kind == "checkpoint" else 1.5)
            command = Command(f"{kind}-{number}", kind, who="op")  # type: ignore[arg-type]
            self.clock.after(at_s, lambda command=command: self.operator.ask(command))  # type: ignore[misc]

    def _fault(self, kind: str, node: int, rank: int, down_s: float) -> Callable[[], None]:
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
                    self.kept.die_in, self.down_s = 1 + rank % 8, down_s
                case _:
                    self.network.cut(down_s)

        return strike
