"""`--observe` along every path: nothing that acts leaves the controller, or an agent.

Each kind of action, order and event is declared here: a new one fails until somebody has said
whether it acts. The same plays without `--observe` do act, in every way that is declared.
"""

import typing
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect as mi
from tests.examples import examples
from tests.unit.control.driver import Driver
from tests.unit.control.groups_lab import Lab
from tests.unit.control.test_placement import start

from perdure.agent import messages as m
from perdure.agent.machine import Agent
from perdure.agent.state import NodeIdentity
from perdure.control.machine import Controller
from perdure.model import events as e
from perdure.model import orders as a
from perdure.model.bus.wire import KeeperState, NodeOrder
from perdure.model.events import (
    InvitationMade,
    InvitationRevoked,
    InvitationUsed,
    JobPaused,
    JobResumed,
    SettingsChanged,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import DetectConfig, JobSpec
from perdure.model.signals.progress import RankAccount

ACTS = {
    a.SendBoundary, a.ResumeRanks, a.RestoreNode, a.NoteDraining, a.EvictReplica, a.FenceAbort,
    a.RunProbe, a.CordonNode, a.InterruptCollectives, a.ReformWorld, a.FollowWorld, a.InjectFault,
    a.CheckOwn,
}  # fmt: skip
"""What is never done to a job that is only observed, unless a person asks for it."""
LOOKS = {
    a.TakeStacks, a.WatchClosely, a.NoteFinding, a.AnswerCommand, a.RecordEvent, a.HoldReplicas,
}  # fmt: skip
"""What looks, tells or records; `HoldReplicas` says to perdure's own lighthouse who is who."""
RUNS = {a.AssignNodes, a.EndJob}
"""What starts the job and ends it: judged by when it comes."""
ADDRESS = {"controller", "term", "register", "agent", "assignment", "orders"}
"""What is said beside orders: who speaks to whom, and what the node runs."""

A_PERSONS = {
    e.CommandReceived, e.NodeAsked, e.NodeRestored, InvitationMade, InvitationUsed,
    InvitationRevoked, JobPaused, JobResumed, SettingsChanged,
}  # fmt: skip
"""What only follows from somebody's command, or from a signal that somebody sent."""
BEGINS = {e.JobSubmitted, e.JobEnded}
ENDS = {e.RankExited, e.KeeperLost, e.NodeRegistered}
"""After these a world, or a group, may have ended: what is left of it is ended as well."""
EVENTS = [t for t in typing.get_args(e.AnyEvent) if t not in A_PERSONS | BEGINS]
INFOS = {type_: mi.type_info(type_) for type_ in EVENTS}
OFTEN = [e.VerdictReached, e.TimerFired, e.NodeLost, e.NodeRegistered]

ASKED = {m.AgentStarted, m.OrderReceived, m.SupervisorGone, m.WorkerSaid, m.KeeperUp, m.KeeperSaid}
"""What an agent hears that is the job's start or end, a person's signal, or an order."""
ALONE = {
    m.KeeperGone, m.KeeperSilent, m.KeeperHeard, e.RankExited, m.TermHeard, m.StacksCollected,
    m.TimerFired,
}  # fmt: skip
"""What an agent hears, and might react to by itself."""

DETECTS: dict[str, Any] = {"detect": DetectConfig(quiet_action_s=1.0)}
EVERYTHING = {
    "policy": {"comm_slow": "evict", "straggler": "evict", "comm_hang": "evict",
               "compute_hang": "evict", "unhealthy_device": "evict", "desync": "restart",
               "interrupt_s": 2.0, "cordon_after": 1, "evict_factor": 1.05},
    "preemption": {"rebalance": "drain"},
    "restart": {"window_max": 1000, "max_restarts": 1000},
}  # fmt: skip
"""A job file in which every reaction there is, is wanted."""
SELDOM = {"every_steps": 10_000}
"""The script's own checkpoints, which are none of what is looked for."""


def test_every_action_order_and_input_is_declared() -> None:
    assert {*ACTS, *LOOKS, *RUNS} == set(typing.get_args(a.AnyAction))
    assert set(NodeOrder.__struct_fields__) == ADDRESS
    assert set(typing.get_args(m.Input)) == ASKED | ALONE
    assert not ACTS & LOOKS


# --- the controller ------------------------------------------------------------------------------


def make_world(depth: str, *, observe: bool) -> Controller:
    """Return a job that trains, with a node or members to spare."""
    match depth:
        case "torchft":
            return Lab(observe=observe, lighthouse="stock" if observe else "perdure").machine
        case "elastic":
            driver = Driver(nodes=2, spares=2, observe=observe, checkpoint=SELDOM, **EVERYTHING)
            for node in range(3):
                driver.register(node)
            driver.run()
            for rank in range(4):
                driver.do(
                    e.RankJoined(
                        generation=0, rank=rank, depth="elastic", store=f"h:{rank}",
                        feed=f"h:{rank}", state_bytes=1 << 30,
                    )
                )  # fmt: skip
            return driver.controller
        case "supervised":
            driver = Driver(
                nodes=2, spares=2, observe=observe, checkpoint={"own": ["out/*"]}, **EVERYTHING
            )
            for node in range(3):
                driver.register(node)
            generation = driver.controller.state.generation
            for node in range(3):
                driver.do(e.GenerationStopped(node=node, generation=-1, at_s=driver.now))
            driver.do(e.StoreReady(generation=generation, host="h", port=7, agent_store=True))
            for node in range(0 if observe else 3):
                driver.do(e.OwnChecked(node=node, generation=generation, at_s=driver.now))
            for node in range(2):
                pids = {2 * node: 1, 2 * node + 1: 2}
                driver.do(
                    e.RanksStarted(node=node, generation=0, pids=pids, at_s=driver.now, warm=True)
                )
            driver.do(e.GenerationStepping(generation=0, at_s=driver.now, step=0))
            return driver.controller
        case _:
            return start(observe=observe, checkpoint=SELDOM, **EVERYTHING).controller


class Nature:
    """Makes events that are about nodes, ranks and generations that there are."""

    def __init__(self, random: Random, machine: Controller) -> None:
        self.random, self.machine, self.now = random, machine, 200.0
        self.count = machine.state.the_spec().num_nodes
        self.ranks = max(machine.state.the_spec().world_size, machine.state.the_spec().groups)

    def make(self, type_: type) -> Any:
        """Return an event that could be one of this job's own."""
        if type_ is e.TimerFired:
            self.now = max(self.now, self.machine.next_deadline() or self.now)
            return e.TimerFired()
        plain = self._make(INFOS[type_], "")
        return msgspec.convert(plain, type_, str_keys=True)

    def _name(self, name: str) -> Any:
        """Return what a field of this name says; None where its type is enough."""
        random, state = self.random, self.machine.state
        match name:
            case "node":
                return random.randrange(self.count)
            case "group" if state.worlds:
                return random.randrange(self.count)
            case "rank":
                return random.choice([*range(self.ranks), *state.world.elastic.homes])
            case "generation":
                return random.choice([g.generation for g in state.worlds.values()] or [0])
            case "running":
                return [self._name("rank")]
            case "depth":
                return "elastic" if state.world.elastic.members else "resumable"
            case "epoch":
                return state.world.epoch
            case "at_s" | "confirmed_s" | "detected_s" | "since_s":
                return self.now
            case "first_seen_s":
                return self.now - 5.0
            case "grace_s":
                return random.choice((0.0, 30.0, 1000.0))
            case "confidence":
                return random.choice((0.3, 0.95))
            case "who":
                return "me"
            case "replica":
                return ""
            case "phase":
                return "step"
            case "ratio_low" | "step_ratio" | "step_ratio_low" | "ratio" | "ratio_high":
                return 3.0
            case "share" | "share_low":
                return 0.6
            case "evidence":
                return random.choice(({}, {"probe": [0, 1]}))
        return None

    def _make(self, info: Any, name: str) -> Any:
        random, known = self.random, self._name(name)
        if known is not None and not isinstance(info, mi.StructType):
            return known
        match info:
            case mi.StructType() if info.array_like:
                return [self._make(one.type, one.name) for one in info.fields]
            case mi.StructType():
                plain = {info.tag_field: info.tag} if info.tag_field else {}
                for one in info.fields:
                    if one.required or random.random() < 0.5:
                        plain[one.encode_name] = self._make(one.type, one.name)
                return plain
            case mi.UnionType():
                return self._make(random.choice(info.types), name)
            case mi.LiteralType():
                return random.choice(info.values)
            case mi.ListType() | mi.VarTupleType() | mi.SetType() | mi.FrozenSetType():
                return [self._make(info.item_type, name) for _ in range(random.choice((0, 1)))]
            case mi.TupleType():
                return [self._make(each, name) for each in info.item_types]
            case mi.DictType():
                return {}
            case mi.StrType():
                return random.choice(("x", "elastic"))
            case mi.IntType():
                return random.choice((0, 1, 9))
            case mi.FloatType():
                return random.choice((0.0, 1.0))
            case mi.BoolType():
                return random.random() < 0.5
            case mi.NoneType() | mi.AnyType():
                return None
        raise AssertionError(f"nothing is known of {info}")


def play(depth: str, seed: int, *, observe: bool, steps: int = 30) -> list[tuple[Any, Any]]:
    """Return each event of a play, and each action that followed it."""
    machine = make_world(depth, observe=observe)
    nature, told = Nature(Random(seed), machine), []
    for _ in range(steps):
        event = nature.make(nature.random.choice([*EVENTS, *3 * OFTEN]))
        nature.now += nature.random.choice((0.01, 0.5, 20.0))
        for action in machine.handle(nature.now, event):
            told.append((event, action))
            record = getattr(action, "event", None)
            if isinstance(record, e.VerdictReached):  # The controller's loop takes it in at once.
                told += [(record, more) for more in machine.handle(nature.now, record)]
        if machine.state.phase in ("ending", "ended"):
            break
    return told


def judge(depth: str, event: Any, action: Any, told: dict[int, a.Assignment]) -> None:
    """Fail where `action` may not follow `event` in a job that is only observed."""
    assert type(action) not in ACTS, (event, action)
    if isinstance(action, a.AssignNodes):
        asked = action.assignment
        if told.setdefault(asked.number, asked) == asked and isinstance(event, e.ControllerStarted):
            return  # A controller that takes over says again what was said.
        assert not asked.extra, (event, action)
        if asked.phase in ("stop", "end"):
            broken = depth == "elastic" and isinstance(event, e.TimerFired)
            assert type(event) in ENDS or broken, (event, action)
        else:
            assert asked.generation <= (2 if depth == "torchft" else 0), (event, action)
            assert asked.restart_count == 0, (event, action)


DEPTHS = ("supervised", "resumable", "elastic", "torchft")


@pytest.mark.parametrize("depth", DEPTHS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(60), deadline=None)
def test_whatever_happens_nothing_that_acts_leaves_the_controller(depth: str, seed: int) -> None:
    told: dict[int, a.Assignment] = {}
    for event, action in play(depth, seed, observe=True):
        judge(depth, event, action, told)


def test_the_same_plays_act_where_the_job_is_not_only_observed() -> None:
    """The property above is worth something: its events lead to all that it forbids."""
    # One ends a pause, which is a person's. The other is asked for before the plays begin: see
    # test_machine.py (own checkpoints).
    missing = {*ACTS, "again"} - {a.ResumeRanks, a.CheckOwn}
    for seed in range(200):
        for depth in DEPTHS:
            for _, action in play(depth, seed, observe=False):
                missing.discard(type(action))
                if isinstance(action, a.AssignNodes) and action.assignment.restart_count:
                    missing.discard("again")
        if not missing:
            return
    pytest.fail(f"no play led to {missing}")


# --- an agent ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(40), deadline=None)
def test_by_itself_an_agent_ends_and_asks_for_nothing(seed: int) -> None:
    """A keeper is only ended where an order waits for it, or where a rank of it has ended."""
    random = Random(seed)
    spec = JobSpec(name="j", script="s.py", nproc=2, observe=True, **DETECTS)
    agent = Agent(spec, NodeIdentity(node=0, incarnation="a"))
    held = KeeperState(pid=7, generation=0, running={0: 10, 1: 11}, exits=())
    agent.handle(0.0, m.KeeperUp(state=held))
    run = a.Assignment(number=1, generation=0, phase="run")
    agent.handle(0.0, m.OrderReceived(order=NodeOrder("c1", assignment=run)))
    now = 0.0
    for _ in range(20):
        now += random.choice((0.1, 5.0, 100.0))
        record = ExitRecord(rank=random.randrange(2), generation=0, pid=10, at_s=now, signal=9)
        told: dict[type, Any] = {
            m.KeeperSilent: m.KeeperSilent(
                pid=7, state=random.choice("TSD"), silent_s=random.choice((2.5, 500.0))
            ),
            m.KeeperHeard: m.KeeperHeard(),
            e.RankExited: e.RankExited(
                node=0, record=record, account=RankAccount(), detected_s=now
            ),
            m.TermHeard: m.TermHeard(term=random.randrange(3)),
            m.StacksCollected: m.StacksCollected(generation=0, stacks={0: ""}),
            m.TimerFired: e.TimerFired(),
            m.KeeperGone: m.KeeperGone(at_s=1.0),
        }
        assert set(told) == ALONE
        for request in agent.handle(now, random.choice(list(told.values()))):
            assert isinstance(request, m.Report | m.StartKeeper), request
            assert not isinstance(getattr(request, "event", None), e.NodeAsked), request
