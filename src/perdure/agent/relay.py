"""What an agent passes between the controller and its ranks: orders one way, signals the other.

Every order is passed on by `relay`, whatever it says; an agreement and a fault have rules beside
it, since the agent itself has a part in them. The newest word on every agreement of this generation
is remembered, so that a rank that was out of touch hears it as soon as it says hello again, and a
rank that asks is answered on the spot.
"""

import signal

import msgspec

from perdure.agent.messages import Report, Request, TellKeeper, TellWorker, WorkerSaid
from perdure.agent.state import AgentState, KeeperView, NodeIdentity
from perdure.model.bus.wire import KeeperSignal, WorkerHello, WorkerQuery, WorkerSignal
from perdure.model.events import FaultInjected, NodeAsked
from perdure.model.job import JobSpec
from perdure.model.orders import InjectFault, Order, RankOrder, ResumeRanks, SendBoundary

BY_SIGNAL = {"crash": int(signal.SIGKILL), "stop": int(signal.SIGSTOP)}
"""Faults that need nothing of the rank, not even that it listens."""
REMEMBERED_MAX = 8
"""Agreements kept; decided ones go first, oldest first."""
SIGNAL_ECHO_S = 2.0
"""SIGUSR1 to all ranks at once is one request, not one for each rank."""


def relay(state: AgentState, order: Order) -> list[Request]:
    """Pass an order to those of the node's ranks that it is for. A repeat is harmless to them.

    An order that a newer one has overtaken on its way is dropped, where ranks are told the newest
    again: what they have heard last holds.
    """
    keeper = state.keeper
    if keeper is None:
        return []
    if isinstance(order, RankOrder) and order.is_retold:
        newest = state.newest.get(type(order))
        if order.generation != keeper.generation:
            return []
        if newest is not None and newest.version > order.version:
            return []
        state.newest[type(order)] = order
    return _tell(keeper, order)


def _tell(keeper: KeeperView, order: Order) -> list[Request]:
    ranks = [rank for rank in keeper.running if order.is_for(keeper.generation, rank)]
    return [TellWorker(rank, order) for rank in ranks]


def relay_boundary(state: AgentState, order: SendBoundary) -> list[Request]:
    """Pass one move of an agreement to the node's ranks, unless they have it already.

    A newer agreement ends older ones, since only one is open at a time and a committed one stays
    open until all have done it; what is older than the newest has been overtaken on its way.
    Nothing else ends the wait of a rank that has promised: the others may be told to go ahead.
    """
    keeper = state.keeper
    if keeper is None or keeper.generation != order.generation:
        return []
    if order.number < max((b.number for b in state.boundaries.values()), default=0):
        return []
    requests: list[Request] = []
    for old in list(state.boundaries.values()):
        if old.id != order.id and old.move == "prepare":
            requests += _decide(state, keeper, msgspec.structs.replace(old, move="abort"))
    known = state.boundaries.get(order.id)
    if known is not None and known.move == order.move == "prepare":
        new = set(order.ranks) - set(known.ranks)  # Come in since: an elastic world grows.
        state.boundaries[order.id] = order
        return requests + [TellWorker(r, order) for r in sorted(new) if r in keeper.running]
    if known is not None and (known.move == order.move or known.move != "prepare"):
        return requests
    return requests + _decide(state, keeper, order)


def _decide(state: AgentState, keeper: KeeperView, order: SendBoundary) -> list[Request]:
    state.boundaries[order.id] = order
    for id_ in [i for i, b in state.boundaries.items() if b.move != "prepare"]:
        if len(state.boundaries) > REMEMBERED_MAX and id_ != order.id:
            del state.boundaries[id_]
    return _tell(keeper, order)


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
        if order.at_step >= 0:
            return []  # It is told once it says hello, or in the next generation.
        return report(f"rank {order.rank} does not run")
    number = BY_SIGNAL.get(order.kind)
    if number is not None and order.at_step < 0 and "for_s" not in order.args:
        return report("", TellKeeper(KeeperSignal(order.generation, order.rank, number)))
    if spec.no_python:
        return report("with --no-python only crash and stop, now, can be injected")
    return [TellWorker(order.rank, order)]


def answer_worker(
    state: AgentState, identity: NodeIdentity, now: float, said: WorkerSaid
) -> list[Request]:
    """Return what to do about a rank's hello, question or signal."""
    keeper = state.keeper
    if keeper is None or keeper.generation != said.generation:
        return []
    match said.message:
        case WorkerHello():
            orders = [*state.boundaries.values(), *state.newest.values()]
            faults = [
                order
                for order in state.faults.values()
                if order.at_step >= 0 or order.kind not in BY_SIGNAL
            ]
            return [TellWorker(said.rank, o) for o in [*orders, *faults] if said.rank in o.ranks]
        case WorkerQuery(id=id_):
            over, known = state.newest.get(ResumeRanks), state.boundaries.get(id_)
            if isinstance(over, ResumeRanks) and over.id == id_:
                return [TellWorker(said.rank, over)]
            if known is None or known.move == "prepare":
                return []  # The controller repeats what is open; the answer will come by itself.
            return [TellWorker(said.rank, known)]
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
