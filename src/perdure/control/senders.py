"""Whether an event is its sender's to tell: by its type, its source, its node and its ranks.

The subject that an event came on says who its sender is; perdure's own server lets nobody publish
on another's. So an agent speaks for its own node and for the ranks that run there, and for nothing
else: it cannot end the job, give a command, register another node or let another node's rank
exit. A sender that tells what is not its own is lying, or has a defect; either way what it told is
dropped and the stream goes on (`service/controller/loop.py`).

Where a rank runs is known from the assignments of this generation, and of older ones from what
was started. That is all that is looked at: whether a fact is true, only its own node can know.
"""

import re
from collections.abc import Iterator

import msgspec

from perdure.control.job import JobState
from perdure.control.membership import membership_of
from perdure.control.membership.fixed import Started
from perdure.model.bus.access import BROUGHT_BY, Sender
from perdure.model.bus.wire import RUN
from perdure.model.events import (
    AnyEvent,
    NodeAsked,
    NodeRegistered,
    ProbeEnded,
    RankAttached,
    RankExited,
    StoreReady,
    VerdictReached,
    VerdictWithdrawn,
)
from perdure.model.job import JobSpec
from perdure.model.orders import LIGHTHOUSE
from perdure.model.signals.progress import NodeBeat
from perdure.model.verdicts import Verdict

_NO_AGENT = "the groups of this job are started by others, and no agent is there"
_RANK = re.compile(r"g(\d{1,9})-r(\d{1,9})-p\d{1,9}")
"""The source of a rank's events, as its agent passes them on."""


def find_untrue(
    state: JobState, started: Started, sender: str, source: str, event: AnyEvent
) -> str:
    """Return why `event` is not for `sender` to tell, in a few words; empty where it is.

    `sender` is what its subject says: the number of a node, `lighthouse` or `run`.
    """
    role = find_role(sender, source)
    if not role:
        return f"the source is not one of {describe_sender(sender)}"
    if role not in BROUGHT_BY[type(event)]:
        who = describe_sender(sender) if role != "rank" else f"a rank of node {sender}"
        return f"{type(event).__name__} is not for {who} to tell"
    if role not in ("agent", "rank"):
        return ""
    if sender == LIGHTHOUSE:
        return _judge_elsewhere(state, source, event, place=-1)
    node = int(sender)
    if state.the_spec().served:
        relayed = role == "rank"
        return _judge_elsewhere(state, source, event, place=node) if relayed else _NO_AGENT
    if role == "rank":
        return _judge_rank(state, started, node, source, event)
    return _judge_agent(state, started, node, event)


def sift_beat(state: JobState, started: Started, beat: NodeBeat) -> tuple[NodeBeat, str]:
    """Return `beat` as far as it is its node's to tell, and why something was left out.

    That the node lives is taken in any case. A generation that nobody was told of would have the
    detector look at no other, and another node's rank would move by what this one says.
    """
    if beat.generation > _newest_told(state):
        why = f"there is no generation {beat.generation} yet"
        return msgspec.structs.replace(beat, generation=-1, ranks=(), sweep=None), why
    homes = started.get(beat.generation, {})
    own = tuple(p for p in beat.ranks if homes.get(p.rank, beat.node) == beat.node)
    if len(own) == len(beat.ranks):
        return beat, ""
    return msgspec.structs.replace(beat, ranks=own), "it tells of ranks of another node"


def find_role(sender: str, source: str) -> Sender | None:
    """Return what `source` is, of those that may speak as `sender`; None where it is nobody."""
    match sender:
        case _ if sender == LIGHTHOUSE and _RANK.fullmatch(source):
            return "rank"
        case _ if sender == LIGHTHOUSE:
            return "lighthouse" if source.startswith("l") else None
        case _ if sender == RUN:
            return "run" if source.startswith("run-") else None
        case _ if _RANK.fullmatch(source):
            return "rank"
        case _:
            return "agent" if source.startswith(f"a{sender}-") else None


def describe_sender(sender: str) -> str:
    """Return who a subject's sender is, in words."""
    if sender == RUN:
        return "`perdure run`"
    return f"the agent of node {sender}" if sender.isdecimal() else f"the {sender:.20}"


def is_sender(spec: JobSpec, sender: str) -> bool:
    """Return whether the job has such a sender at all."""
    if sender in (LIGHTHOUSE, RUN):
        return True
    return sender.isdecimal() and sender.isascii() and int(sender[:9]) < spec.num_logins


def _newest_told(state: JobState) -> int:
    """Return the newest generation that any node has been told of."""
    return state.generation if state.farewell is None else state.farewell.generation


def _judge_rank(state: JobState, started: Started, node: int, source: str, event: AnyEvent) -> str:
    found = _RANK.fullmatch(source)
    assert found is not None
    generation, rank = int(found[1]), int(found[2])
    if getattr(event, "rank", rank) != rank:
        return f"rank {rank} tells of another rank"
    if getattr(event, "generation", generation) != generation:
        return f"rank {rank} of generation {generation} tells of another generation"
    if generation > _newest_told(state):
        return f"there is no generation {generation} yet"
    home = membership_of(state).locate(state, started, generation, rank)
    if home is None:
        return f"generation {generation} is long over"
    return "" if home == node else f"rank {rank} of generation {generation} is not of node {node}"


def _judge_elsewhere(state: JobState, source: str, event: AnyEvent, *, place: int) -> str:
    """A rank that others have started speaks for itself, by way of the lighthouse or a relay.

    By which of them is what it told first: no other machine speaks for it as long as it lives.
    """
    found = _RANK.fullmatch(source)
    assert found is not None
    generation, rank = int(found[1]), int(found[2])
    if not state.the_spec().served:
        return "no rank of this job speaks by way of the lighthouse"
    if getattr(event, "rank", rank) != rank:
        return f"rank {rank} tells of another rank"
    if getattr(event, "generation", generation) != generation:
        return f"rank {rank} of generation {generation} tells of another generation"
    world = state.worlds.get(rank // state.the_spec().nproc)
    if world is None or generation > world.generation:
        return f"there is no generation {generation} of rank {rank}"
    told = event.place if isinstance(event, RankAttached) else place
    known = world.replica.places.get(rank, place) if generation == world.generation else place
    return "" if told == known == place else f"rank {rank} does not speak from there"


def _judge_agent(state: JobState, started: Started, node: int, event: AnyEvent) -> str:
    if getattr(event, "node", node) != node:
        return "it tells of another node"
    match event:
        case NodeRegistered():
            return ""  # Its generation is what its keeper holds, which may be another run's.
        case NodeAsked(kind="stop") if node >= state.the_spec().local_nodes:
            return "a machine from elsewhere may not stop the job"
        case ProbeEnded():
            hosts = any(host.node != node for host in event.hosts)
            if hosts or any(node not in (pair.src, pair.dst) for pair in event.pairs):
                return "it tells of another node"
        case VerdictReached(verdict=verdict) | VerdictWithdrawn(verdict=verdict):
            return _judge_verdict(node, verdict)
        case StoreReady():
            world = state.find_world(event.generation)
            if world is not None and node not in world.placement[:1]:
                return f"the store of generation {event.generation} is not of node {node}"
        case _:
            pass
    locate = membership_of(state).locate
    for generation, rank in _list_ranks(event):
        if generation > _newest_told(state):
            return f"there is no generation {generation} yet"
        if rank >= 0 and locate(state, started, generation, rank) not in (None, node):
            return f"rank {rank} of generation {generation} is not of node {node}"
    return ""


def _judge_verdict(node: int, verdict: Verdict) -> str:
    """An agent judges one thing only: that its own keeper does not answer."""
    own = verdict.kind == "Unresponsive" and verdict.generation < 0
    return "" if own and verdict.culprit.node == node else "it judges more than its own keeper"


def _list_ranks(event: AnyEvent) -> Iterator[tuple[int, int]]:
    """Yield the (generation, rank) that an agent's event is about; -1 for no rank."""
    if isinstance(event, RankExited):
        yield event.record.generation, event.record.rank
        return
    generation = getattr(event, "generation", None)
    if generation is None:
        return
    yield generation, -1
    for name in ("pids", "stacks"):
        for rank in getattr(event, name, ()):
            yield generation, rank
