"""Action lists of the published schedules, for one replica of a pipeline.

Each function returns, for every rank of one replica, the order of its actions. Micro-batches are
given by their numbers in the step, so that replicas may have different ones, and unequally many.
"""

from collections.abc import Sequence

from perdure.model.errors import ConfigError
from perdure.model.planning.pipeline import Action, Orders

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
    groups, size = find_groups(ranks, len(micro_batches))
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


def find_groups(ranks: int, count: int) -> tuple[int, int]:
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
