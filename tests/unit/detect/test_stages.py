import pytest

from perdure.detect.slowness.collectives import Comm, group_peers
from perdure.detect.slowness.stages import compute_frontier
from perdure.model.signals.progress import CommProgress


def test_the_frontier_is_an_exact_additive_account():
    row = {0: (1.0, 2.0, 0.5, 0.1), 1: (0.5, 4.0, 0.1, 0.1), 2: (2.0, 1.0, 1.0, 0.4)}
    increments = compute_frontier(row)
    assert increments == pytest.approx((2.0, 2.5, 0.1, 0.1))
    assert sum(increments) == pytest.approx(max(sum(parts) for parts in row.values()))


def make_comm(name: str, size: int, ranks: tuple[int, ...]) -> Comm:
    return Comm(CommProgress(name, size, 1, 0, ranks=ranks))


@pytest.mark.parametrize(
    ("senders", "groups"),
    [
        (set(), [[0, 1, 2, 3]]),
        ({0, 1}, [[0], [1], [2, 3]]),  # Rank 0 sends its metrics: the others stay alike.
        ({0, 1, 2, 3}, [[0], [1], [2], [3]]),  # A pipeline whose stages take a norm.
    ],
)
def test_the_whole_world_joins_those_that_send_nothing(senders, groups):
    """T6: who sends or receives may be a stage, and is compared with nobody by the world's norm."""
    world = (0, 1, 2, 3)
    comms = [make_comm("0", 4, world), make_comm("0 p2p", 1, world)]
    assert group_peers(comms, {"0 p2p"} if senders else set(), senders, 4) == groups


def test_copies_of_a_stage_are_alike():
    world = (0, 1, 2, 3)
    comms = [make_comm(n, len(r), r) for n, r in [("a", (0, 1)), ("b", (2, 3))]]
    comms.append(make_comm("0", 4, world))
    assert group_peers(comms, set(), set(world), 4) == [[0, 1], [2, 3]]
