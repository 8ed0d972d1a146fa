"""A month of `perdure serve`: groups that others start come and go, and little of them is kept."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.lighthouse import make_member

from perdure.control.lighthouse.names import Names
from perdure.control.lighthouse.outputs import Formed, LeftOut, Output, Seen, Stands
from perdure.control.lighthouse.patience import QuorumConfig
from perdure.control.lighthouse.quorum import Quorums
from perdure.control.memory import Memory, decode_memory, encode_memory
from perdure.model.bus.lighthouse import ENDED_KEPT
from perdure.model.codec import decode, encode
from perdure.model.events import (
    AnyEvent,
    CommandReceived,
    Decision,
    JobSubmitted,
    JournalEntry,
    KeysDeclared,
    QuorumFormed,
    RankAttached,
    RankLeft,
    ReplicaSeen,
)
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.orders import AnswerCommand, AnyAction, EvictReplica, HoldReplicas
from perdure.model.steering import KeySpec
from perdure.telemetry.accounting.ledger import make_report

MONTH_S = 30 * 86400.0
SPEC = JobSpec(script="", torchft=TorchftConfig(replicas=1, elsewhere=True))


@dataclass
class Month:
    """One lighthouse and one controller, and groups that live for a while each."""

    lives: int
    restarts: bool = False
    """Whether the controller and the lighthouse are killed again and again."""
    now: float = 1000.0
    memory: Memory = field(default_factory=lambda: Memory(SPEC))
    machine: Quorums = field(default_factory=lambda: Quorums(QuorumConfig(elsewhere=True)))
    journal: list[JournalEntry] = field(default_factory=list)
    actions: list[bytes] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)
    """Sizes of the orders about who is held."""
    answers: list[AnswerCommand] = field(default_factory=list)
    there: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Lives that had trained, and were not said to have finished."""
    outside: list[str] = field(default_factory=list)
    """The same that were in no quorum just then, and may have trained before."""
    token: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(1)
        self.add(JobSubmitted(spec=SPEC, at_s=self.now))

    # --- the controller's shell -------------------------------------------------------------

    def add(self, event: AnyEvent) -> None:
        self._write(event)
        actions = self.memory.machine.handle(self.now, event)
        for fact in self.memory.machine.facts(self.now):
            self._write(fact)
            self.memory.machine.handle(self.now, fact)
        for action in actions:
            self.actions.append(encode(action))
            name, summary = type(action).__name__, action.describe()
            self._write(Decision(action=name, summary=summary, reason=action.reason))
        for action in actions:
            self._act(action)

    def _write(self, body: AnyEvent | Decision) -> None:
        entry = JournalEntry(len(self.journal) + 1, self.now, body)
        self.journal.append(entry)
        self.memory.note(entry)

    def _act(self, action: AnyAction) -> None:
        match action:
            case HoldReplicas():
                self.orders.append(len(encode(action)))
                self.do(self.machine.regroup(self.now, action.groups))
            case EvictReplica(kill=True, replica=name, group=group, generation=life):
                if name in self.there:
                    self.there.remove(name)
                    self.lost += [name] if name in self.machine.members else []
                told = self.machine.evict(self.now, name, action.reason)
                gone = {"gone": True, "reason": action.reason, "silent": True, "life": life}
                self.add(ReplicaSeen(replica=name, group=group, at_s=self.now, **gone))
                self.do([output for output in told if not isinstance(output, LeftOut)])
            case AnswerCommand():
                self.answers.append(action)

    # --- the lighthouse's -------------------------------------------------------------------

    def do(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Seen():
                    known = {"manager": "http://h:1", "ranks": 1, "life": output.generation}
                    self.tell(output.replica, output.group, **known)
                case LeftOut():
                    gone = {"gone": True, "reason": output.reason, "silent": output.silent}
                    gone["heard_s"] = output.heard_s
                    life, step = output.generation, self.machine.step
                    self.tell(output.replica, output.group, **gone, life=life, step=step)
                case Stands():
                    self.tell(output.replica, output.group, held=True, step=output.step)
                case Formed():
                    names = tuple(member.replica for member in output.members)
                    self.add(
                        QuorumFormed(
                            quorum_id=output.quorum_id, step=output.step, members=names,
                            recovering=output.recovering, at_s=self.now,
                        )
                    )  # fmt: skip
                case _:
                    pass

    def tell(self, replica: str, group: int, **more: Any) -> None:
        self.add(ReplicaSeen(replica=replica, group=group, at_s=self.now, **more))

    # --- the groups ---------------------------------------------------------------------------

    def live(self) -> None:
        """Have all lives come and go, a month long."""
        each_s = MONTH_S / self.lives
        for number in range(self.lives):
            name = self._choose_name(number)
            self.there.append(name)
            self.train(2, 0.5)
            self._attach(name)
            if number % 10 == 3:
                self.command(number)
            if len(self.there) > 3:
                self._leave(self.there[self.chance.randrange(len(self.there) - 1)])
            self.train(2, each_s / 2)
            if self.restarts and number % (self.lives // 20) == 7:
                self.restart()
            if number % (self.lives // 10) == 0:
                self.sizes.append(self.measure())

    def _choose_name(self, number: int) -> str:
        uuid = f"{self.chance.getrandbits(64):016x}"
        kind = self.chance.randrange(4)
        if kind == 0:
            return uuid
        if kind == 1:
            return f"train_{number % 7}:{uuid}"
        return f"spot-{self.chance.getrandbits(32):08x}x:{uuid}"

    def train(self, steps: int, each_s: float) -> None:
        for _ in range(steps):
            self.beat(each_s)
            for name in list(self.there):
                known = self.machine.replicas.get(name)
                if name not in self.there or (known is not None and known.asked is not None):
                    continue
                self.token += 1
                member = make_member(name, "s", self.machine.step + 1)
                self.do(self.machine.ask(self.now, self.token, member))
            self.do(self.machine.tick(self.now))

    def beat(self, each_s: float) -> None:
        """Let time pass, in which those who are there were heard as often as ever."""
        self.now += each_s
        for name in self.there:
            if name in self.machine.replicas:
                self.machine.replicas[name].heard_s = self.now - 0.1
            self.do(self.machine.hear(self.now, name))

    def _attach(self, name: str) -> None:
        known = self.machine.replicas.get(name)
        if known is None or self.chance.random() < 0.5:
            return
        (group, life), now = known.home, self.now
        self.add(
            RankAttached(generation=life, rank=group, pid=7, host="h", devices=("c",), at_s=now)
        )
        keys = (KeySpec(name="lr", type="float", default=0.5),)
        self.add(KeysDeclared(generation=life, keys=keys, step=self.machine.step))

    def _leave(self, name: str) -> None:
        """Have one end: its connections close, or its machine has lost its power."""
        self.there.remove(name)
        known = self.machine.replicas[name]
        group, life = known.home
        if known.asked is not None and self.chance.random() < 0.5:
            self.do(self.machine.hang_up(self.now, known.token))
        attached = self.memory.fold.certain.replicas.groups[group].ranks
        if attached and self.chance.random() < 0.6:
            self.add(RankLeft(generation=life, rank=group, at_s=self.now))
        else:
            (self.lost if name in self.machine.members else self.outside).append(name)
        for _ in range(13):
            self.beat(0.4)
            self.do(self.machine.tick(self.now))

    def command(self, number: int) -> None:
        kind = ("drain", "evict", "cordon", "pause", "note", "set")[number // 10 % 6]
        groups = sorted(self.memory.machine.state.worlds)
        target = f"replica:{groups[number % len(groups)]}"
        args: dict[str, Any] = {"targets": [target]}
        if kind in ("pause", "note", "set"):
            args = {"text": "x"} if kind == "note" else {"changes": {"lr": 0.1}}
        self.ask(number, kind, args)
        self.train(3, 0.5)
        back = {"pause": "resume", "drain": "restore", "cordon": "restore", "evict": "restore"}
        if kind in back:
            self.ask(number, back[kind], args if back[kind] == "restore" else {})

    def ask(self, number: int, kind: Any, args: dict[str, Any]) -> None:
        id_ = f"{kind}-{number}"
        self.add(CommandReceived(id=id_, kind=kind, args=args, who="me", at_s=self.now))

    # --- what is looked at --------------------------------------------------------------------

    def restart(self) -> None:
        """Both go on from what they have written down."""
        again = decode_memory(encode_memory(self.memory), SPEC)
        assert encode_memory(again) == encode_memory(self.memory)
        self.memory = again
        names = self.machine.names
        self.machine.names = Names(decode(encode(names.numbers), dict[str, int]), names.lives)

    def measure(self) -> tuple[int, int]:
        """Return what the controller writes down, and what the lighthouse knows, in bytes."""
        machine = self.machine
        kept = (machine.names.numbers, list(machine.replicas), sorted(machine.groups))
        answered = len(encode(self.memory.machine.state.answered))  # These are bounded as ever.
        return len(encode_memory(self.memory)) - answered, len(encode(kept))


def check_bounded(month: Month) -> None:
    """After the first part of the month nothing grows, whatever has come and gone since."""
    early, late = month.sizes[3], month.sizes[-1]
    assert late[0] < 1.5 * early[0] < 160_000, month.sizes
    assert late[1] < 1.5 * early[1] < 3_000, month.sizes
    assert max(month.orders) < 8_000
    picture = month.memory.fold.snapshot(month.now)
    gone = [row for row in picture.replicas if row.away_s]
    assert ENDED_KEPT <= len(gone) <= ENDED_KEPT + 4
    assert {row.replica for row in picture.replicas} >= set(month.there)
    assert len(gone) + picture.replicas_ended > month.lives // 2
    assert len(encode(picture)) < 60_000


def check_report(month: Month) -> None:
    """Each life that was lost is an incident, and only its own group's next life ends it."""
    report = make_report(month.journal, month.now)
    told = {r.culprit.partition(", ")[2]: r for r in report.recoveries}
    assert set(month.lost) <= told.keys() <= {*month.lost, *month.outside}
    assert len(month.outside) < month.lives / 20
    named = [r for name, r in told.items() if name.startswith("spot-")]
    assert {r.rung for r in named} == {"left out"}
    assert any(r.rung == "restart" for name, r in told.items() if name.startswith("train_"))


@pytest.mark.parametrize("lives", [150, pytest.param(5000, marks=pytest.mark.long)])
def test_a_month_of_groups_leaves_no_more_than_a_few_of_them_behind(lives: int) -> None:
    month = Month(lives)
    month.live()
    check_bounded(month)
    check_report(month)
    assert {answer.ok for answer in month.answers} == {True, False}


def test_what_is_forgotten_is_the_same_for_those_who_were_killed_meanwhile() -> None:
    month, restarted = Month(100), Month(100, restarts=True)
    month.live()
    restarted.live()
    assert month.memory.fold.certain.replicas.ended > 20
    assert month.actions == restarted.actions
    assert encode_memory(month.memory) == encode_memory(restarted.memory)


def test_a_group_that_comes_back_is_known_while_few_have_ended_since_and_always_if_it_is_held() -> (
    None
):
    names = Names()
    assert names.place("a_7:x", ()) == (7, 0)
    assert names.place("b_8:x", ()) == (8, 1)
    for number in range(3 * ENDED_KEPT):
        names.place(f"spot-{number}x:u", (), held=(8,))
        assert len(names.numbers) <= ENDED_KEPT + 2
    assert "a_7" not in names.numbers
    assert names.place("b_8:y", ())[0] == 8
    for number in range(ENDED_KEPT - 2):
        names.place(f"late-{number}x:u", (), held=())
    assert names.place("b_8:z", ())[0] == 8
