"""Who may tell what: the table of event types, and what an event says against its subject (D3)."""

from typing import get_args

import pytest

from perdure.control.job import JobState
from perdure.control.membership import membership_of
from perdure.control.senders import find_untrue, is_sender, sift_beat
from perdure.control.world import WorldState
from perdure.model.bus.access import ASKED_BY, BROUGHT_BY, ROLES, build_access
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    CheckpointSaved,
    CommandReceived,
    ControllerLost,
    FaultInjected,
    GenerationStopped,
    JobEnded,
    MetricsLogged,
    NodeAsked,
    NodeRegistered,
    ProbeEnded,
    QuorumFormed,
    RankExited,
    RanksStarted,
    StoreReady,
    VerdictReached,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.orders import Assignment
from perdure.model.signals.links import HostProbe, PairProbe
from perdure.model.signals.progress import NodeBeat, RankAccount, RankProgress
from perdure.model.verdicts import Culprit, Verdict


def make_state(generation: int = 3, placement: tuple[int, ...] = (0, 2)) -> JobState:
    """Two nodes of two ranks and a spare node, which stands in for node 1; node 2 is elsewhere."""
    spec = JobSpec(script="x.py", name="job", nproc=2, nodes=2, spares=2, remote=1)
    state = JobState(spec=spec, generation=generation)
    told = Assignment(number=1, generation=generation, phase="run", placement=placement)
    world = WorldState(generation=generation, placement=placement, assignment=told)
    state.worlds = {0: world}
    return state


STARTED = {2: {0: 0, 1: 0, 2: 1, 3: 1}}
"""The generation before: rank 2 was on node 1."""


def exited(node: int, rank: int, generation: int = 3) -> RankExited:
    record = ExitRecord(rank=rank, generation=generation, pid=7, at_s=1.0, signal=9)
    return RankExited(node=node, record=record, account=RankAccount(), detected_s=1.0)


def probed(node: int, src: int, dst: int, host: int) -> ProbeEnded:
    pairs = (PairProbe(1, src, dst, 1000, 1.0),)
    hosts = (HostProbe(1, host, "cpu", 1.0),)
    return ProbeEnded(id="p1", node=node, round=1, at_s=1.0, pairs=pairs, hosts=hosts)


def silent(node: int, kind: str = "Unresponsive", generation: int = -1) -> VerdictReached:
    verdict = Verdict(
        kind=kind,  # type: ignore[arg-type]
        culprit=Culprit(node=node), generation=generation, first_seen_s=1.0, confirmed_s=1.0,
        confidence=1.0, reason="",
    )  # fmt: skip
    return VerdictReached(verdict=verdict)


def asked(node: int, kind: str) -> NodeAsked:
    return NodeAsked(id="x", node=node, kind=kind, who="SIGTERM", at_s=1.0)  # type: ignore[arg-type]


def started(node: int, *ranks: int, generation: int = 3) -> RanksStarted:
    pids = dict.fromkeys(ranks, 7)
    return RanksStarted(node=node, generation=generation, pids=pids, at_s=1.0, warm=True)


def store(generation: int = 3) -> StoreReady:
    return StoreReady(generation=generation, host="h", port=1, agent_store=True)


SAVED = CheckpointSaved(generation=3, step=1, path="p", bytes=1, stall_s=0.0, save_s=0.0, at_s=1.0)
HONEST: list[tuple[str, str, AnyEvent]] = [
    ("0", "a0-1-x", NodeRegistered(node=0, incarnation="a0-1-x", host="h", boot_id="b", slots=2)),
    ("0", "a0-1-x", started(0, 0, 1)),
    ("2", "a2-1-x", started(2, 2, 3)),
    ("2", "a2-1-x", exited(2, 3)),
    ("1", "a1-1-x", exited(1, 2, generation=2)),
    ("1", "a1-1-x", exited(1, 2, generation=0)),
    ("0", "a0-1-x", store()),
    ("1", "a1-1-x", GenerationStopped(node=1, generation=2, at_s=1.0)),
    ("1", "a1-1-x", silent(1)),
    ("2", "a2-1-x", asked(2, "checkpoint")),
    ("0", "a0-1-x", asked(0, "stop")),
    ("0", "g3-r0-p12", SAVED),
    ("2", "g3-r2-p12", BoundaryAnswered(id="b", rank=2, step=4, ok=True)),
    ("1", "g2-r2-p12", MetricsLogged(generation=2, rows=())),
    ("2", "g3-r3-p12", FaultInjected(id="f", rank=3, kind="slow", at_s=1.0)),
    ("run", "run-12", ControllerLost(part="agent 0", at_s=1.0, pid=1, cause="", restarted_s=1.0)),
    ("lighthouse", "l12-ab", QuorumFormed(quorum_id=1, step=0, members=())),
    ("0", "a0-1-x", probed(0, 1, 0, host=0)),
]
UNTRUE: list[tuple[str, str, AnyEvent, str]] = [
    ("0", "a0-1-x", CommandReceived(id="x", kind="kill"), "not for the agent of node 0"),
    ("0", "g3-r0-p1", CommandReceived(id="x", kind="kill"), "not for a rank of node 0"),
    ("run", "run-1", CommandReceived(id="x", kind="kill"), "not for `perdure run`"),
    ("lighthouse", "l1-a", JobEnded(status="done", exit_code=0, reason="", at_s=1.0), "not for"),
    ("0", "a1-1-x", started(0, 0), "not one of the agent of node 0"),
    ("1", "a11-1-x", silent(1), "not one of the agent of node 1"),
    ("run", "a0-1-x", started(0, 0), "not one of `perdure run`"),
    ("0", "a0-1-x", started(1, 2), "another node"),
    ("0", "a0-1-x", probed(0, 1, 2, host=0), "another node"),
    ("0", "a0-1-x", probed(0, 0, 2, host=1), "another node"),
    ("1", "a1-1-x", started(1, 2), "rank 2 of generation 3 is not of node 1"),
    ("1", "a1-1-x", exited(1, 0), "rank 0 of generation 3 is not of node 1"),
    ("0", "a0-1-x", exited(0, 2, generation=2), "rank 2 of generation 2 is not of node 0"),
    ("0", "a0-1-x", exited(0, 0, generation=4), "no generation 4"),
    ("2", "a2-1-x", store(), "store of generation 3 is not of node 2"),
    ("1", "a1-1-x", silent(0), "more than its own keeper"),
    ("1", "a1-1-x", silent(1, "CommHang", 3), "more than its own keeper"),
    ("3", "a3-1-x", asked(3, "stop"), "may not stop the job"),
    ("1", "g3-r0-p1", SAVED, "rank 0 of generation 3 is not of node 1"),
    ("0", "g3-r0-p1", BoundaryAnswered(id="b", rank=1, step=4, ok=True), "another rank"),
    ("0", "g3-r0-p1", MetricsLogged(generation=2, rows=()), "another generation"),
    ("0", "g9-r0-p1", MetricsLogged(generation=9, rows=()), "no generation 9"),
    ("0", "g1-r0-p1", MetricsLogged(generation=1, rows=()), "long over"),
    ("0", "g3-r0-p1", started(0, 0), "not for a rank"),
]


def test_every_type_of_event_has_a_row_and_no_other_has() -> None:
    """D3: who may bring an event has to be said before there is one of its type."""
    assert set(BROUGHT_BY) == set(get_args(AnyEvent))
    assert all(BROUGHT_BY.values())
    assert {e for e, by in BROUGHT_BY.items() if not {"agent", "rank"} & set(by)} >= {
        CommandReceived, JobEnded, ControllerLost,
    }  # fmt: skip


@pytest.mark.parametrize(("sender", "source", "event"), HONEST)
def test_what_is_ones_own_is_believed(sender: str, source: str, event: AnyEvent) -> None:
    assert find_untrue(make_state(), STARTED, sender, source, event) == ""


@pytest.mark.parametrize(("sender", "source", "event", "words"), UNTRUE)
def test_what_is_not_is_not(sender: str, source: str, event: AnyEvent, words: str) -> None:
    """D3: an agent is its node, a rank is itself, and neither is the controller."""
    assert words in find_untrue(make_state(), STARTED, sender, source, event)


def test_a_replica_group_is_the_node_of_its_number() -> None:
    spec = JobSpec(script="x.py", name="job", nproc=2, nodes=3, torchft=TorchftConfig(replicas=3))
    state = JobState(spec=spec, generation=7)
    locate = membership_of(state).locate
    assert [locate(state, {}, generation, 5) for generation in (0, 7)] == [2, 2]
    assert "not of node 1" in find_untrue(state, {}, "1", "a1-1-x", exited(1, 5, generation=2))


def test_the_store_of_a_group_is_its_own_nodes_to_tell() -> None:
    """D3: ranks of a group would meet where another group's node says."""
    spec = JobSpec(script="x.py", name="job", nproc=2, nodes=3, torchft=TorchftConfig(replicas=3))
    worlds = {n: WorldState(n, generation=5 + n, placement=(n,)) for n in range(3)}
    state = JobState(spec=spec, generation=7, worlds=worlds)
    assert find_untrue(state, {}, "2", "a2-1-x", store(7)) == ""
    assert "not of node 1" in find_untrue(state, {}, "1", "a1-1-x", store(7))


def test_only_senders_that_the_job_has_are_heard() -> None:
    spec = make_state().the_spec()
    names = ("0", "2", "run", "lighthouse", "9999999999999", "-1", "²", "", "a", "all")
    assert [n for n in names if is_sender(spec, n)] == ["0", "2", "run", "lighthouse"]


def test_an_agent_publishes_as_its_own_node_only_and_nobody_else_commands() -> None:
    """D3: what the server is told is what the door looks at."""
    access = build_access("agent", "job", 1)
    asked = {"perdure.job.probe.*"}
    assert {s for s in access.publish if s.endswith((".0", ".*", ">"))} == asked
    commands = {role for role in ROLES for kind in ("kill",) if kind in ASKED_BY.get(role, ())}
    assert commands == {"operator", "run"}


def beat(node: int, generation: int, *ranks: int) -> NodeBeat:
    told = tuple(RankProgress(r, 7, "step", 1.0, 1.0, RankAccount()) for r in ranks)
    return NodeBeat(node, f"a{node}-1", 1, 1.0, generation, told)


def test_a_heartbeat_tells_of_its_own_ranks_and_of_known_generations() -> None:
    """D3: one of generation 10**9 had the detector look at no other one for the rest of the job."""
    state = make_state()
    for honest in (beat(0, 3, 0, 1), beat(2, 3, 2, 3), beat(1, 2, 2, 3), beat(2, -1)):
        assert sift_beat(state, STARTED, honest) == (honest, "")
    sifted, why = sift_beat(state, STARTED, beat(0, 10**9, 0, 1))
    assert (sifted.generation, sifted.ranks) == (-1, ())
    assert "there is no generation" in why
    sifted, why = sift_beat(state, STARTED, beat(0, 2, 1, 2))
    assert [each.rank for each in sifted.ranks] == [1]
    assert "of another node" in why
