"""Action lists of one replica of a pipeline: the published schedules, and one for any routes.

Each `order_` returns, for every rank of one replica, the order of its actions. Micro-batches are
given by their numbers in the step, so that replicas may have different ones, and unequally many.

The published schedules assume that all stages have the same copies. After a loss they have not:
the micro-batches of the lost cell are done by the other copies of its stage, in the gaps of their
own schedule. The idea is that of ReCycle (S. Gandhi et al., SOSP 2024); `order_greedily` is a list
scheduler: what a cell does next is the best of what it could do by then, backwards before forwards,
older micro-batches first, and no more in flight in a stage of a cell than 1F1B allows. It never
deadlocks: what the last stage holds it can finish, and so, by induction towards the first, can
every other.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate

from perdure.model.errors import ConfigError
from perdure.model.planning.pipeline import Action, Orders, Routes
from perdure.model.planning.world import ScheduleName
from perdure.plan.pipeline.simulate import FREE, Pipe

Ranks = list[list[Action]]


def order_1f1b(ranks: int, micro_batches: Sequence[int]) -> Ranks:
    """Return one forward and one backward in turn, once the pipeline is full.

    In flight are `ranks - rank` micro-batches at most. Source: D. Narayanan et al., SOSP 2019
    (PipeDream), in the flushing form of ICML 2021 (PipeDream-Flush).
    """
    return [
        _alternate(
            [Action("F", rank, m) for m in micro_batches],
            [Action("B", rank, m) for m in micro_batches],
            ranks - rank - 1,
        )
        for rank in range(ranks)
    ]


def order_interleaved(ranks: int, chunks: int, micro_batches: Sequence[int]) -> Ranks:
    """Return the interleaved schedule: rank r has the stages r, r + ranks, r + 2 ranks, ...

    Micro-batches pass in groups of about `ranks` through one stage after another. Source:
    D. Narayanan et al., SC 2021, section 2.2 (Megatron-LM); groups other than `ranks` as in
    torch.distributed.pipelining.

    Raises:
        ConfigError: The micro-batches are not a whole number of equal groups.
    """
    groups, size = choose_groups(ranks, len(micro_batches))
    steps = [
        (chunk, micro_batches[group * size + i])
        for group in range(groups)
        for chunk in range(chunks)
        for i in range(size)
    ]
    lists = []
    for rank in range(ranks):
        forwards = [Action("F", chunk * ranks + rank, m) for chunk, m in steps]
        backwards = [Action("B", (chunks - 1 - chunk) * ranks + rank, m) for chunk, m in steps]
        ahead = (chunks - 1) * size + 2 * (ranks - 1 - rank)
        lists.append(_alternate(forwards, backwards, ahead))
    return lists


def choose_groups(ranks: int, count: int) -> tuple[int, int]:
    """Return how many groups `count` micro-batches make for interleaved ranks, and their size.

    Raises:
        ConfigError: They are not a whole number of equal groups.
    """
    groups = max(1, count // ranks)
    if count % groups:
        raise ConfigError(
            "a replica's micro-batches are no whole number of equal groups",
            hint=f"{count} for {ranks} ranks; a multiple of {ranks} always is",
        )
    return groups, count // groups


def order_zero_bubble(ranks: int, micro_batches: Sequence[int]) -> Ranks:
    """Return 1F1B whose gradients of weights are computed where a rank would wait.

    The first rank, which would wait longest at the end, has the most of them left then; as many
    are in flight as in 1F1B. Source: P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024
    (its schedule ZB-H1).
    """
    lists = []
    for rank, plain in enumerate(order_1f1b(ranks, micro_batches)):
        mine: list[Action] = []
        left: list[Action] = []
        for action in plain:
            mine.append(action)
            if action.kind == "B":
                left.append(Action("W", rank, action.micro_batch))
                if len(left) > rank:
                    mine.append(left.pop(0))
        lists.append(mine + left)
    return lists


def order_replica(
    schedule: ScheduleName, ranks: int, chunks: int, micro_batches: Sequence[int]
) -> Ranks:
    """Return what the ranks of one replica do, each with `chunks` stages.

    Raises:
        ConfigError: Interleaved, the micro-batches are not a whole number of equal groups.
    """
    match schedule:
        case "interleaved":
            return order_interleaved(ranks, chunks, micro_batches)
        case "zero-bubble":
            return order_zero_bubble(ranks, micro_batches)
        case "1f1b" | "rerouted":
            return order_1f1b(ranks, micro_batches)


def number_runs(sizes: Sequence[int]) -> list[range]:
    """Return the numbers of each run's things, from 0 on: cells by stage, or shares of a step."""
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def join_replicas(replicas: Sequence[Ranks]) -> Orders:
    """Return the orders of all cells: those of replica 0, then those of replica 1, ..."""
    return tuple(tuple(mine) for ranks in replicas for mine in ranks)


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Return forwards and backwards in turn, `ahead` forwards before the first pair."""
    ahead = min(ahead, len(forwards))
    mine = forwards[:ahead]
    for index, forward in enumerate(forwards[ahead:]):
        mine += [forward, backwards[index]]
    return mine + backwards[len(forwards) - ahead :]


def route_straight(ranks: int, shares: Sequence[Sequence[int]], chunks: int = 1) -> Routes:
    """Return routes that stay in a replica: cell = replica * ranks + rank.

    `shares` are the micro-batches of each replica, together the numbers from 0 on.
    """
    replica_of = {m: replica for replica, mine in enumerate(shares) for m in mine}
    return tuple(
        tuple(replica_of[m] * ranks + rank for m in range(len(replica_of)))
        for _ in range(chunks)
        for rank in range(ranks)
    )


def route_spread(copies: Sequence[Sequence[int]], count: int) -> Routes:
    """Return routes over stages with different copies: each stage's cells take turns.

    `copies` are the cells of each stage.
    """
    return tuple(tuple(cells[m % len(cells)] for m in range(count)) for cells in copies)


class _Cell:
    """What a cell could do: forwards by stage in the order of their arrival, and backwards."""

    def __init__(self) -> None:
        self.forwards: dict[int, deque[int]] = {}
        self.backwards: list[tuple[int, int]] = []
        self.in_flight: dict[int, int] = {}
        self.busy = False
        self.done: list[Action] = []

    def choose(self, caps: Sequence[int]) -> Action | None:
        """Return what to do now: the oldest backward, else a forward of the latest stage."""
        if self.backwards:
            micro_batch, stage = heappop(self.backwards)
            return Action("B", stage, micro_batch)
        for stage in sorted(self.forwards, reverse=True):
            if self.forwards[stage] and self.in_flight.get(stage, 0) < caps[stage]:
                return Action("F", stage, self.forwards[stage].popleft())
        return None


def order_greedily(routes: Routes, cells: int, pipe: Pipe, caps: Sequence[int]) -> Orders:
    """Return orders for `routes`; `caps` are the micro-batches in flight by stage of a cell."""
    states = [_Cell() for _ in range(cells)]
    last = len(routes) - 1
    for micro_batch, cell in enumerate(routes[0]):
        states[cell].forwards.setdefault(0, deque()).append(micro_batch)
    events: list[tuple[float, int, int, Action]] = []
    """(when, 0 arrival or 1 end, cell, the action that may begin, or that has ended)"""

    def begin(now_s: float, cell: int) -> None:
        state = states[cell]
        action = None if state.busy else state.choose(caps)
        if action is None:
            return
        change = 1 if action.kind == "F" else -1
        state.in_flight[action.stage] = state.in_flight.get(action.stage, 0) + change
        state.busy = True
        state.done.append(action)
        heappush(events, (now_s + pipe.work_s(action, cell), 1, cell, action))

    def send(now_s: float, cell: int, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "F" and stage == last:
            following = Action("B", last, micro_batch)
        elif action.kind == "F":
            following = Action("F", stage + 1, micro_batch)
        elif stage:
            following = Action("B", stage - 1, micro_batch)
        else:
            return
        target = routes[following.stage][micro_batch]
        there = target == cell
        cost = FREE if there else pipe.hop(max(stage, following.stage), cell, target)
        heappush(events, (now_s + sum(cost), 0, target, following))

    for cell in range(cells):
        begin(0.0, cell)
    while events:
        now_s, ended, cell, action = heappop(events)
        state = states[cell]
        if ended:
            state.busy = False
            send(now_s, cell, action)
        elif action.kind == "B":
            heappush(state.backwards, (action.micro_batch, action.stage))
        else:
            state.forwards.setdefault(action.stage, deque()).append(action.micro_batch)
        if not events or events[0][0] > now_s or events[0][2] != cell:
            begin(now_s, cell)
    return tuple(tuple(state.done) for state in states)
