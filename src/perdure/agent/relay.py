"""What an agent passes between the controller and its ranks: agreements, faults, signals.

The newest word on every agreement of this generation is remembered, so that a rank that was out
of touch hears it as soon as it says hello again, and a rank that asks is answered on the spot.
"""

import signal

import msgspec

from perdure.agent.messages import Report, Request, TellKeeper, TellWorker, WorkerSaid
from perdure.agent.state import AgentState, KeeperView, NodeIdentity, OpenBoundary
from perdure.model.actions import (
    FollowWorld,
    InjectFault,
    InterruptCollectives,
    ReformWorld,
    ResumeRanks,
    SendBoundary,
)
from perdure.model.bus.wire import KeeperSignal, WorkerHello, WorkerQuery, WorkerSignal
from perdure.model.events import FaultInjected, NodeAsked
from perdure.model.job import JobSpec

BY_SIGNAL = {"crash": int(signal.SIGKILL), "stop": int(signal.SIGSTOP)}
"""Faults that need nothing of the rank, not even that it listens."""
REMEMBERED_MAX = 8
"""Agreements kept; decided ones go first, oldest first."""
SIGNAL_ECHO_S = 2.0
"""SIGUSR1 to all ranks at once is one request, not one for each rank."""


def relay_boundary(state: AgentState, order: SendBoundary) -> list[Request]:
    """Pass one move of an agreement to the node's ranks, unless they have it already.

    A newer agreement ends older ones, since only one is open at a time and a committed one stays
    open until all have done it; what is older than the newest has been overtaken on its way.
    Nothing else ends the wait of a rank that has promised: the others may be told to go ahead.
    """
    keeper = state.keeper
    if keeper is None or keeper.generation != order.generation:
        return []
    if order.number < max((b.order.number for b in state.boundaries.values()), default=0):
        return []
    requests: list[Request] = []
    for old in list(state.boundaries.values()):
        if old.order.id != order.id and old.order.move == "prepare":
            requests += _decide(state, keeper, msgspec.structs.replace(old.order, move="abort"))
    known = state.boundaries.get(order.id)
    if known is not None and known.order.move == order.move == "prepare":
        new = set(order.ranks) - set(known.order.ranks)  # Come in since: an elastic world grows.
        state.boundaries[order.id] = OpenBoundary(order)
        return requests + [TellWorker(r, order) for r in sorted(new) if r in keeper.running]
    if known is not None and (known.order.move == order.move or known.order.move != "prepare"):
        return requests
    return requests + _decide(state, keeper, order)


def _decide(state: AgentState, keeper: KeeperView, order: SendBoundary) -> list[Request]:
    state.boundaries[order.id] = OpenBoundary(order)
    for id_ in [i for i, b in state.boundaries.items() if b.order.move != "prepare"]:
        if len(state.boundaries) > REMEMBERED_MAX and id_ != order.id:
            del state.boundaries[id_]
    return [TellWorker(rank, order) for rank in order.ranks if rank in keeper.running]


def relay_fault(
    state: AgentState, identity: NodeIdentity, spec: JobSpec, now: float, order: InjectFault
) -> list[Request]:
    """Do harm by signal, or ask the rank to do it to itself; each fault once a generation.

    A signal waits until the controller has the fact in its journal: it would otherwise order the
    same again for the next generation, should this agent die in between.
    """
    keeper = state.keeper
    if keeper is None or keeper.generation != order.generation or order.id in state.faults:
        return []
    wanted = state.assignment
    group = wanted.slots_of(identity.node) if wanted else -1
    home = wanted.homes.get(order.rank) if wanted else None
    if order.rank not in spec.ranks_of(group) if home is None else home != identity.node:
        return []
    state.faults[order.id] = order

    def report(error: str, *after: Request) -> list[Request]:
        event = FaultInjected(id=order.id, rank=order.rank, kind=order.kind, at_s=now, error=error)
        return [Report(event, after)]

    if order.rank not in keeper.running:
        return report(f"rank {order.rank} does not run")
    number = BY_SIGNAL.get(order.kind)
    if number is not None and order.at_step < 0 and "for_s" not in order.args:
        return report("", TellKeeper(KeeperSignal(order.generation, order.rank, number)))
    if spec.no_python:
        return report("with --no-python only crash and stop, now, can be injected")
    return [TellWorker(order.rank, order)]


def relay_interrupt(state: AgentState, order: InterruptCollectives) -> list[Request]:
    """Have the node's ranks break their collectives. They carry out a repeat only once."""
    keeper = state.keeper
    if keeper is None or keeper.generation != order.generation:
        return []
    return [TellWorker(rank, order) for rank in order.ranks if rank in keeper.running]


def relay_reform(state: AgentState, order: ReformWorld) -> list[Request]:
    """Have the node's ranks form the next world. They take each epoch once."""
    keeper = state.keeper
    if keeper is None or keeper.generation != order.generation:
        return []
    held = state.reform
    if held is not None and (held.generation, held.epoch) > (order.generation, order.epoch):
        return []
    state.reform = order
    return [TellWorker(rank, order) for rank in order.ranks if rank in keeper.running]


def relay_follow(state: AgentState, order: FollowWorld) -> list[Request]:
    """Have a rank follow the world. It takes each epoch once, and a repeat comes if it is late."""
    keeper = state.keeper
    if keeper is None or keeper.generation != order.generation:
        return []
    return [TellWorker(order.rank, order)] if order.rank in keeper.running else []


def relay_resume(state: AgentState, order: ResumeRanks) -> list[Request]:
    """Release the node's ranks from where they hold. A repeat is harmless."""
    keeper = state.keeper
    if keeper is None or keeper.generation != order.generation:
        return []
    state.resume = order
    return [TellWorker(rank, order) for rank in order.ranks if rank in keeper.running]


def answer_worker(
    state: AgentState, identity: NodeIdentity, now: float, said: WorkerSaid
) -> list[Request]:
    """Return what to do about a rank's hello, question or signal."""
    keeper = state.keeper
    if keeper is None or keeper.generation != said.generation:
        return []
    match said.message:
        case WorkerHello():
            words: list[Request] = [
                TellWorker(said.rank, entry.order)
                for entry in state.boundaries.values()
                if said.rank in entry.order.ranks
            ]
            reform = state.reform
            if reform is not None and said.rank in reform.ranks:
                words.append(TellWorker(said.rank, reform))
            return words + [
                TellWorker(said.rank, order)
                for order in state.faults.values()
                if order.rank == said.rank and (order.at_step >= 0 or order.kind not in BY_SIGNAL)
            ]
        case WorkerQuery(id=id_) if state.resume is not None and state.resume.id == id_:
            return [TellWorker(said.rank, state.resume)]
        case WorkerQuery(id=id_):
            entry = state.boundaries.get(id_)
            if entry is None or entry.order.move == "prepare":
                return []  # The controller repeats what is open; the answer will come by itself.
            return [TellWorker(said.rank, entry.order)]
        case WorkerSignal(signal=number):
            return _take_signal(state, identity, now, said, number)


def _take_signal(
    state: AgentState, identity: NodeIdentity, now: float, said: WorkerSaid, number: int
) -> list[Request]:
    """Ask for a stop upon SIGTERM, for a checkpoint upon SIGUSR1."""
    name = signal.Signals(number).name
    who = f"{name} to rank {said.rank}"
    if number == signal.SIGTERM:
        # One id for all ranks of a generation: they get it together, and it is one stop.
        id_ = f"sigterm-g{said.generation}"
        asked = NodeAsked(id=id_, node=identity.node, kind="stop", who=who, at_s=now)
        return [Report(asked)]
    if number != signal.SIGUSR1 or now - state.checkpoint_asked_s < SIGNAL_ECHO_S:
        return []
    state.checkpoint_asked_s = now
    state.signals += 1
    id_ = f"sigusr1-{identity.incarnation}-{state.signals}"
    return [Report(NodeAsked(id=id_, node=identity.node, kind="checkpoint", who=who, at_s=now))]
