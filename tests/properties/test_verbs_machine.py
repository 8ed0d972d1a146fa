"""The operator's verbs among failures: hypothesis plays the cluster, and judges every answer.

Whatever happens: a command is answered once, or with the job's end; a yes is true at that moment;
a no has changed nothing; a drain that went as asked lost no step; and no rank is held for ever.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.examples import examples

from perdure.control.job import JobState
from perdure.control.machine import Controller
from perdure.control.records import make_journal_event
from perdure.control.steering.verbs import preview_verb
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    CommandReceived,
    ControllerStarted,
    GenerationStepping,
    GenerationStopped,
    JobSubmitted,
    NodeLost,
    NodeRegistered,
    PreemptionNoticed,
    ProgressNoted,
    RankExited,
    RankJoined,
    RanksStarted,
    StoreReady,
    TimerFired,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, RestartConfig
from perdure.model.orders import (
    AnswerCommand,
    AnyAction,
    Assignment,
    AssignNodes,
    EndJob,
    ResumeRanks,
    SendBoundary,
)
from perdure.model.signals.progress import RankAccount

SPEC = JobSpec(
    name="j", script="x", nodes=2, spares=2,
    restart=RestartConfig(max_restarts=1000, same_fault_max=1000, window_max=1000),
)  # fmt: skip
NODES = st.integers(0, SPEC.num_nodes - 1)
TARGETS = st.sampled_from(["0", "1", "2", "node:3", "rank:0", "rank:1", "7"])


class VerbsMachine(RuleBasedStateMachine):
    """Four nodes, two of them spare, with one rank each."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.controllers, self.ids = 100.0, 0, 0
        self.machine = Controller()
        self.journal: list[tuple[float, AnyEvent]] = []
        self.running: dict[int, tuple[int, int]] = {}
        """Node -> (generation, rank)."""
        self.told: dict[int, Assignment] = {}
        self.prepared: SendBoundary | None = None
        self.committed: SendBoundary | None = None
        self.step, self.saved = 0, 0
        self.held = ""
        """Id of the agreement at which every rank of this world holds."""
        self.asked: dict[str, CommandReceived] = {}
        self.answers: dict[str, AnswerCommand] = {}
        self.ended = False

    @initialize()
    def begin(self) -> None:
        self.do(JobSubmitted(spec=SPEC, at_s=self.now))
        self.do(ControllerStarted(incarnation="c0"))
        for node in range(SPEC.num_nodes):
            self.register(node)
        self.train()

    @property
    def state(self) -> JobState:
        return self.machine.state

    # --- the door and its judges -------------------------------------------------------------

    def do(self, event: AnyEvent) -> list[AnyAction]:
        self.journal.append((self.now, event))
        actions = self.machine.handle(self.now, event)
        for action in actions:
            assert action.reason, action
            self.judge(action)
            record = make_journal_event(self.now, action)
            if record is not None:
                self.do(record)
        return actions

    def judge(self, action: AnyAction) -> None:
        match action:
            case AssignNodes():
                self.told |= dict.fromkeys(action.nodes, action.assignment)
            case SendBoundary(move="prepare"):
                self.prepared, self.committed = action, None
            case SendBoundary(move="commit"):
                self.committed = action
            case SendBoundary():
                self.prepared = self.committed = None
            case ResumeRanks() if action.id == self.held:
                self.held = ""
            case AnswerCommand():
                self.judge_answer(action)
            case EndJob():
                self.ended = True
            case _:
                pass

    def judge_answer(self, said: AnswerCommand) -> None:
        known = self.answers.setdefault(said.id, said)
        assert known == said, "two answers"
        if known is not said:
            return
        assert said.id not in self.state.moves
        kind = self.asked[said.id].kind
        if not said.ok or kind == "restore" or said.result.get("already"):
            return
        for node in said.result.get("nodes", ()):
            assert node in self.state.cordoned or "is free again" in said.reason, said
            if kind in ("drain", "evict"):
                left = node not in self.state.world.placement
                assert left or "is free again" in said.reason, said
        if kind == "drain" and said.result.get("instead") == "":
            lost = said.result["steps_lost"]
            assert lost == 0 or (lost is None and _early(said)), said

    # --- the operator ------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(["drain", "drain", "evict", "cordon", "restore"]),
        names=st.lists(TARGETS, min_size=1, max_size=2),
        deadline_s=st.sampled_from([None, 5.0]),
        flags=st.sets(st.sampled_from(["force", "wait"])),
    )
    def ask(self, kind: str, names: list[str], deadline_s: float | None, flags: set[str]) -> None:
        self.ids += 1
        args: dict[str, object] = {"targets": names, **dict.fromkeys(sorted(flags), True)}
        if deadline_s is not None:
            args["deadline_s"] = deadline_s
        before = _gist(self.state)
        told = preview_verb(self.state, kind, args | {"dry_run": True})
        assert _gist(self.state) == before, "a dry run changed something"
        command = CommandReceived(
            id=f"{kind}-{self.ids}", kind=kind, args=args, who="ada", at_s=self.now  # type: ignore[arg-type]
        )  # fmt: skip
        self.asked[command.id] = command
        self.do(command)
        said = self.answers.get(command.id)
        if said is not None and not said.ok:
            assert _gist(self.state) == before, f"refused, and half done: {said}"
        if told is not None and said is not None and kind in ("cordon", "restore"):
            assert (said.ok, said.reason) == told[:2]

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        command = data.draw(st.sampled_from(sorted(self.asked)))
        before = _gist(self.state)
        self.do(self.asked[command])
        assert _gist(self.state) == before

    # --- the cluster -------------------------------------------------------------------------

    @rule(node=NODES)
    def register(self, node: int) -> None:
        generation = self.running.get(node, (-1, -1))[0]
        self.do(
            NodeRegistered(
                node=node, incarnation=f"a{len(self.journal)}", host="h", boot_id="b", slots=1,
                generation=generation,
            )
        )  # fmt: skip

    @rule()
    def train(self) -> None:
        """Let every node do what it was told, up to the first step."""
        generation = self.state.generation
        if self.ended or self.state.phase == "ending":
            return
        for node, told in sorted(self.told.items()):
            if node in self.state.lost:
                continue
            if self.running.get(node, (-1, -1))[0] < told.generation:
                self.leave(node)
            stopped = told.generation - 1
            self.do(GenerationStopped(node=node, generation=stopped, at_s=self.now))
        if self.state.world.phase == "forming":
            self.do(StoreReady(generation=generation, host="h", port=1, agent_store=True))
        if self.state.world.phase != "starting":
            return
        self.held, self.prepared, self.committed = "", None, None
        self.step = self.saved
        for rank, node in enumerate(self.state.world.placement):
            self.running[node] = (generation, rank)
            pids = {rank: 1}
            self.do(
                RanksStarted(node=node, generation=generation, pids=pids, at_s=self.now, warm=True)
            )
        for rank in range(SPEC.world_size):
            self.do(RankJoined(generation=generation, rank=rank))
            restored = CheckpointRestored(
                generation=generation, rank=rank, step=self.saved, path="p"
            )
            self.do(restored)
        self.do(GenerationStepping(generation=generation, at_s=self.now, step=self.saved))

    def leave(self, node: int) -> None:
        if node in self.running:
            generation, rank = self.running.pop(node)
            self.exit(node, generation, rank, asked=True)

    def exit(self, node: int, generation: int, rank: int, **how: bool) -> None:
        record = ExitRecord(
            rank=rank, generation=generation, pid=1, at_s=self.now, signal=9, **how  # type: ignore[arg-type]
        )  # fmt: skip
        account = RankAccount(step=self.step)
        self.do(RankExited(node=node, record=record, account=account, detected_s=self.now))

    @rule(node=NODES)
    def crash(self, node: int) -> None:
        if node in self.running:
            generation, rank = self.running.pop(node)
            self.exit(node, generation, rank)

    @rule(node=NODES)
    def lose(self, node: int) -> None:
        self.running.pop(node, None)
        self.do(NodeLost(node=node, at_s=self.now, reason="silent"))

    @rule(node=NODES, grace_s=st.sampled_from([3.0, 100.0]))
    def preempt(self, node: int, grace_s: float) -> None:
        notice = PreemptionNoticed(node=node, at_s=self.now, grace_s=grace_s, source="spot")
        self.do(notice)

    @precondition(lambda self: not self.held)
    @rule(steps=st.integers(1, 5))
    def progress(self, steps: int) -> None:
        if (
            self.state.world.phase == "running"
            and self.state.world.stepping
            and self.prepared is None
        ):
            self.step += steps
            generation = self.state.generation
            self.do(
                ProgressNoted(generation=generation, at_s=self.now, step=self.step, accounts={})
            )

    @precondition(lambda self: self.prepared is not None)
    @rule(veto=st.sampled_from([False, False, False, True]), error=st.booleans())
    def agree(self, veto: bool, error: bool) -> None:
        """All ranks agree and come to the step; or one has passed it."""
        sent = self.prepared
        assert sent is not None
        if sent.generation != self.state.generation or self.state.world.phase != "running":
            return
        for rank in range(SPEC.world_size):
            no = (veto and rank == 1) or self.step >= sent.step
            step = max(self.step, sent.step + 1) if no else self.step
            answer = BoundaryAnswered(id=sent.id, rank=rank, ok=not no, step=step)
            self.do(answer)
        if self.committed is None or self.committed.id != sent.id:
            return
        self.step, self.prepared = sent.step, None
        if sent.kind == "drain":
            self.held = sent.id
        for rank in range(SPEC.world_size):
            why = "disk full" if error and rank == 0 else ""
            reached = BoundaryReached(
                id=sent.id, rank=rank, step=sent.step, at_s=self.now, error=why
            )
            self.do(reached)
            if self.state.generation != sent.generation:
                return

    @precondition(lambda self: self.committed is not None)
    @rule(ok=st.sampled_from([True, True, False]))
    def save(self, ok: bool) -> None:
        sent = self.committed
        assert sent is not None
        if sent.generation != self.state.generation or self.step < sent.step:
            return
        self.committed = None
        if not ok:
            self.do(
                CheckpointFailed(
                    generation=sent.generation, step=sent.step, error="full", at_s=self.now
                )
            )
            return
        self.saved = max(self.saved, sent.step)
        self.do(
            CheckpointSaved(
                generation=sent.generation, step=sent.step, path="p", bytes=1, stall_s=0.1,
                save_s=0.2, at_s=self.now,
            )
        )  # fmt: skip

    # --- time, and the controller's death ------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(20):
            due = self.machine.next_deadline()
            if due is None or due > self.now:
                return
            self.do(TimerFired())
        raise AssertionError("the machine is due for ever")

    @rule()
    def take_over(self) -> None:
        successor = Controller()
        for now, event in self.journal:
            successor.handle(now, event)
        assert repr(successor.state) == repr(self.state)
        self.machine = successor
        self.controllers += 1
        self.do(ControllerStarted(incarnation=f"c{self.controllers}"))

    @invariant()
    def nobody_is_held_for_nothing(self) -> None:
        state = self.state
        if self.held and state.world.phase == "running":
            mine = [m for m in state.moves.values() if m.boundary == self.held]
            assert mine, "ranks hold, and nothing is to come of it"

    @invariant()
    def what_is_left_stays_left(self) -> None:
        state = self.state
        short = len(state.spares) == 0
        if state.world.phase == "starting" and not short:
            assert not set(state.world.placement) & state.barred

    def teardown(self) -> None:
        """Let the world behave: everybody is answered, or the job ends."""
        for node in range(SPEC.num_nodes):
            self.register(node)
        for _ in range(50):
            if self.ended or not self.state.moves:
                break
            self.train()
            if self.prepared is not None:
                self.agree(False, False)
            if self.committed is not None:
                self.save(True)
            if self.state.moves:
                self.wait(40.0)
        if not self.ended:
            self.do(
                self.asked.setdefault("end", CommandReceived(id="end", kind="kill", at_s=self.now))
            )
        assert set(self.asked) <= set(self.answers), set(self.asked) - set(self.answers)
        assert not self.state.moves or self.state.phase in ("ending", "ended")


def _early(said: AnswerCommand) -> bool:
    """Whether it was answered before the new world trained."""
    return "not training yet" in said.reason or "is free again" in said.reason


def _gist(state: JobState) -> str:
    """Return what a refused or repeated command must leave as it was."""
    parts = (
        state.cordoned,
        state.cordoned_by,
        sorted(state.barred),
        state.world.placement,
        state.moves,
    )
    return repr((parts, state.generation, state.boundary, state.world.phase, state.restoring))


TestVerbs = VerbsMachine.TestCase
TestVerbs.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
