"""The controller against a world that repeats, delays and loses: what must hold after any event.

The nodes tell the truth but late: a node obeys the newest assignment it has heard of, and
anything that was ever said may be said again. At the end the world behaves, and the job must end.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.examples import examples

from perdure.control.machine import Controller
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointSaved,
    CommandReceived,
    ControllerStarted,
    GenerationStepping,
    GenerationStopped,
    JobSubmitted,
    KeeperLost,
    NodeLost,
    NodeRegistered,
    ProgressNoted,
    RankExited,
    RankJoined,
    RanksStarted,
    StacksTaken,
    StoreReady,
    TimerFired,
    VerdictReached,
    VerdictWithdrawn,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, RestartConfig
from perdure.model.orders import AnswerCommand, Assignment, AssignNodes, EndJob, SendBoundary
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit, Verdict

NODES, NPROC = 2, 2
SPEC = JobSpec(
    name="j", script="x", nproc=NPROC, nodes=NODES, restart=RestartConfig(max_restarts=6)
)
RANKS = st.integers(0, NODES * NPROC - 1)
NUMBERS = st.integers(0, NODES - 1)
HARMLESS = (
    RankExited, KeeperLost, RanksStarted, GenerationStopped, StacksTaken, CommandReceived,
    BoundaryReached, CheckpointSaved, RankJoined, ProgressNoted,
)  # fmt: skip
"""What may arrive any number of times, however late, and must begin nothing by it."""
IMMEDIATE = 20
"""A machine may have several things due at one instant, but not for ever."""


class ControllerMachine(RuleBasedStateMachine):
    """Plays the cluster; judges every action."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.controllers = 100.0, 0
        self.machine = Controller()
        self.journal: list[tuple[float, AnyEvent]] = []
        self.said: dict[int, Assignment] = {}
        """Node -> newest assignment on its way to it."""
        self.running: dict[int, tuple[int, set[int]]] = {}
        """Node -> generation and ranks that live there."""
        self.assigned: dict[int, Assignment] = {}
        self.yes: set[tuple[str, int]] = set()
        self.decided: dict[str, str] = {}
        self.prepared: SendBoundary | None = None
        self.asked: set[str] = set()
        self.answered: dict[str, bool] = {}
        self.ended: EndJob | None = None
        self.do(JobSubmitted(spec=SPEC, at_s=self.now))
        self.take_over()

    # --- the door and its judges -------------------------------------------------------------

    def do(self, event: AnyEvent) -> None:
        self.journal.append((self.now, event))
        was_ended = self.ended is not None
        before = self.machine.state.generation
        failing = self.is_fatal(event)
        actions = self.machine.handle(self.now, event)
        for action in actions:
            assert action.reason, action
            self.judge(action)
        if was_ended and not isinstance(event, ControllerStarted):
            for action in actions:
                last = isinstance(action, AssignNodes) and action.assignment.phase == "end"
                assert last or isinstance(action, AnswerCommand), action
        if failing:
            state = self.machine.state
            assert state.generation > before or state.phase in ("ending", "ended"), event

    def is_fatal(self, event: AnyEvent) -> bool:
        state = self.machine.state
        return (
            isinstance(event, RankExited)
            and event.record.failed
            and event.record.generation == state.generation
            and event.record.rank not in state.world.exits
            and state.world.has_ranks
        )

    def judge(self, action: object) -> None:
        match action:
            case AssignNodes(assignment=assignment, nodes=nodes):
                self.judge_assignment(assignment)
                for node in nodes:
                    self.said[node] = assignment
            case SendBoundary():
                self.judge_boundary(action)
            case AnswerCommand(id=id_, ok=ok):
                assert id_ in self.asked
                assert self.answered.setdefault(id_, ok) == ok, "two different answers"
            case EndJob():
                # A lost node cannot say that it is empty: who started its agent ends what it runs.
                lost = self.machine.state.lost
                alive = [n for n, (_, ranks) in self.running.items() if ranks and n not in lost]
                assert not alive or self.overdue, f"nodes {alive} still run"
                self.ended = action
            case _:
                pass

    def judge_assignment(self, assignment: Assignment) -> None:
        known = self.assigned.setdefault(assignment.number, assignment)
        assert known == assignment, "one number, two meanings"
        newest = max(self.assigned)
        assert assignment.number == newest, "an old assignment was issued again"
        assert assignment.generation >= max(a.generation for a in self.assigned.values())
        if assignment.phase == "run":
            for node, (generation, ranks) in self.running.items():
                assert not ranks or generation == assignment.generation, f"node {node} still runs"

    def judge_boundary(self, action: SendBoundary) -> None:
        if action.move == "prepare":
            assert action.id not in self.decided, "asked again after the decision"
            self.prepared = action
            return
        assert self.decided.setdefault(action.id, action.move) == action.move
        if action.move == "commit":
            assert all((action.id, rank) in self.yes for rank in action.ranks)

    @property
    def overdue(self) -> bool:
        """Whether the end's bound has passed: now, or before the controller that knew it died."""
        return isinstance(self.journal[-1][1], TimerFired | ControllerStarted)

    # --- the cluster -------------------------------------------------------------------------

    @rule(node=NUMBERS)
    def register(self, node: int) -> None:
        generation, ranks = self.running.get(node, (-1, set()))
        self.do(
            NodeRegistered(
                node=node, incarnation=f"a{len(self.journal)}", host="h", boot_id="b", slots=NPROC,
                generation=generation, running=tuple(sorted(ranks)),
            )
        )  # fmt: skip

    @precondition(lambda self: self.said)
    @rule(node=NUMBERS)
    def obey(self, node: int) -> None:
        """Let a node do what it was told last."""
        told = self.said.get(node)
        if told is None:
            return
        generation, ranks = self.running.get(node, (-1, set()))
        if generation < told.generation and ranks:
            ranks.clear()
        older = GenerationStopped(node=node, generation=told.generation - 1, at_s=self.now)
        self.do(older)
        if told.phase == "store" and node == 0:
            port = 1000 + told.generation
            self.do(StoreReady(generation=told.generation, host="h", port=port, agent_store=True))
        if told.phase == "run" and generation < told.generation:
            mine = set(SPEC.ranks_of(node))
            self.running[node] = (told.generation, mine)
            pids = dict.fromkeys(sorted(mine), 1)
            self.do(
                RanksStarted(
                    node=node, generation=told.generation, pids=pids, at_s=self.now, warm=True
                )
            )

    @rule()
    def all_is_well(self) -> None:
        """Let everybody do what was asked, up to the first step."""
        for node in range(NODES):
            if node not in self.machine.state.nodes:
                self.register(node)
        for _ in range(2):
            for node in range(NODES):
                self.obey(node)
        self.step()

    def exit(self, rank: int, **how: object) -> None:
        node = SPEC.node_of(rank)
        generation, ranks = self.running.get(node, (-1, set()))
        if rank in ranks:
            ranks.discard(rank)
            record = ExitRecord(rank=rank, generation=generation, pid=1, at_s=self.now, **how)  # type: ignore[arg-type]
            self.do(
                RankExited(
                    node=node, record=record, account=RankAccount(step=3), detected_s=self.now
                )
            )

    @rule(rank=RANKS)
    def crash(self, rank: int) -> None:
        self.exit(rank, signal=9)

    @rule(rank=RANKS)
    def leave(self, rank: int) -> None:
        self.exit(rank)

    @rule(node=NUMBERS)
    def lose_keeper(self, node: int) -> None:
        generation, ranks = self.running.get(node, (-1, set()))
        if ranks:
            ranks.clear()
            self.do(KeeperLost(node=node, generation=generation, at_s=self.now))

    @rule(node=NUMBERS)
    def lose_sight_of_node(self, node: int) -> None:
        self.do(NodeLost(node=node, at_s=self.now, reason="silent"))

    @rule()
    def step(self) -> None:
        generation = self.machine.state.generation
        if all(self.running.get(n, (-1, set()))[0] == generation for n in range(NODES)):
            for rank in range(SPEC.world_size):
                self.do(RankJoined(generation=generation, rank=rank))
            self.do(GenerationStepping(generation=generation, at_s=self.now, step=0))

    @rule(step=st.integers(0, 50))
    def progress(self, step: int) -> None:
        generation = self.machine.state.generation
        self.do(ProgressNoted(generation=generation, at_s=self.now, step=step, accounts={}))

    @rule(rank=RANKS, actionable=st.booleans())
    def suspect(self, rank: int, actionable: bool) -> None:
        self.do(VerdictReached(verdict=self.verdict(rank, actionable)))

    @rule(rank=RANKS)
    def clear(self, rank: int) -> None:
        verdict = self.verdict(rank, True)
        self.do(VerdictWithdrawn(verdict=verdict, at_s=self.now, reason="it moved"))

    def verdict(self, rank: int, actionable: bool) -> Verdict:
        return Verdict(
            kind="ComputeHang", culprit=Culprit(rank=rank), confidence=1.0, reason="r",
            generation=self.machine.state.generation, first_seen_s=self.now,
            confirmed_s=self.now, actionable=actionable,
        )  # fmt: skip

    @rule(ranks=st.sets(RANKS))
    def take_stacks(self, ranks: set[int]) -> None:
        stacks = dict.fromkeys(sorted(ranks), "")
        generation = self.machine.state.generation
        self.do(StacksTaken(generation=generation, at_s=self.now, stacks=stacks))

    # --- operators and agreements ------------------------------------------------------------

    @rule(kind=st.sampled_from(["checkpoint", "checkpoint", "stop", "kill"]), id_=st.integers(0, 5))
    def command(self, kind: str, id_: int) -> None:
        if id_ or kind == "checkpoint":
            name = f"{kind}{id_}"
            self.asked.add(name)
            self.do(CommandReceived(id=name, kind=kind))  # type: ignore[arg-type]

    @precondition(lambda self: self.prepared is not None)
    @rule(rank=RANKS, ok=st.sampled_from([True, True, True, False]))
    def answer(self, rank: int, ok: bool) -> None:
        sent = self.prepared
        assert sent is not None
        if ok:
            self.yes.add((sent.id, rank))
        self.do(BoundaryAnswered(id=sent.id, rank=rank, ok=ok, step=sent.step - (1 if ok else -3)))

    @precondition(lambda self: self.prepared is not None)
    @rule()
    def agree_and_reach(self) -> None:
        for rank in range(SPEC.world_size):
            self.answer(rank, True)
        sent = self.prepared
        assert sent is not None
        if self.decided.get(sent.id) == "commit":
            for rank in range(SPEC.world_size):
                self.do(BoundaryReached(id=sent.id, rank=rank, step=sent.step, at_s=self.now))

    @rule()
    def save(self) -> None:
        state = self.machine.state
        self.do(
            CheckpointSaved(
                generation=state.generation, step=max(0, state.step), path="p", bytes=1,
                stall_s=0.1, save_s=0.2, at_s=self.now,
            )
        )  # fmt: skip

    # --- misfortune, time --------------------------------------------------------------------

    @rule(data=st.data())
    def say_again(self, data: st.DataObject) -> None:
        """Deliver something old once more: it must not begin anything."""
        told = [e for _, e in self.journal if not isinstance(e, TimerFired | ControllerStarted)]
        again = data.draw(st.sampled_from(told))
        if isinstance(
            again, JobSubmitted | NodeRegistered | NodeLost | VerdictReached | StoreReady
        ):
            return  # The agents never repeat these once the journal has them.
        if isinstance(again, BoundaryAnswered | GenerationStepping | ProgressNoted | RankJoined):
            return
        number, generation = self.machine.state.number, self.machine.state.generation
        self.do(again)
        if not isinstance(again, GenerationStopped):
            assert (self.machine.state.number, self.machine.state.generation) == (
                number,
                generation,
            ), again

    @rule(seconds=st.sampled_from([0.01, 1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.fire()

    @rule()
    def wait_until_due(self) -> None:
        due = self.machine.next_deadline()
        if due is not None:
            self.now = max(self.now, due)
            self.fire()

    def fire(self) -> None:
        for _ in range(IMMEDIATE):
            due = self.machine.next_deadline()
            if due is None or due > self.now:
                return
            self.do(TimerFired())
        raise AssertionError("the machine is due for ever")

    @rule()
    def take_over(self) -> None:
        """Kill the controller; its successor must know all that it knew."""
        successor = Controller()
        for now, event in self.journal:
            successor.handle(now, event)
        assert repr(successor.state) == repr(self.machine.state)
        self.machine = successor
        self.controllers += 1
        open_, ended, self.ended = successor.state.assignment, self.ended, None
        self.do(ControllerStarted(incarnation=f"c{self.controllers}"))
        assert self.ended == ended, "JobEnded had not reached the journal, and now never will"
        if open_ is not None and ended is None:
            for node in successor.state.nodes:
                assert self.said[node] == open_, "the successor left a node without orders"

    @invariant()
    def one_generation_lives(self) -> None:
        alive = {generation for generation, ranks in self.running.values() if ranks}
        assert len(alive) <= 1, alive

    def teardown(self) -> None:
        """Let the world behave: the job ends, and everybody was answered."""
        for node in range(NODES):
            self.register(node)
        for _ in range(200):
            if self.ended is not None:
                break
            for node in range(NODES):
                self.obey(node)
            for rank in range(SPEC.world_size):
                self.exit(rank)
            if not any(ranks for _, ranks in self.running.values()):
                self.wait_until_due()
        assert self.ended is not None, self.machine.state.phase
        assert self.asked == set(self.answered), self.asked - set(self.answered)


TestController = ControllerMachine.TestCase
TestController.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)


def test_a_job_that_is_stopped_does_not_wait_for_a_node_that_was_lost() -> None:
    """Exploration found it (T13): the model had asked a lost node whether it is empty."""
    world = ControllerMachine()
    world.all_is_well()
    world.lose_sight_of_node(node=1)
    world.command(id_=1, kind="stop")
    world.all_is_well()
    world.teardown()
