"""What a rank's recorder saw of its collectives and of its steps, as a heartbeat carries it.

Arrays on the wire: a node of eight ranks sends a few hundred of these a second. Times are the
rank's own job time; nobody may compare those of two nodes, durations may be compared.
"""

from typing import Annotated

import msgspec


class CollectiveSpan(msgspec.Struct, frozen=True, array_like=True):
    """One collective of one rank, ended or not.

    With `dur = end_s - start_s`, the smallest duration among a communicator's ranks for one
    `seq` is pure communication (the last to arrive waits for nobody), and `max(dur) - dur` is
    how late a rank arrived.
    """

    comm: Annotated[int, msgspec.Meta(ge=0)]
    """Index into the `comms` of the same `RankProgress`."""
    seq: int
    op: str
    bytes: int
    start_s: float
    end_s: float = 0.0
    """0 while it is under way, or where its end cannot be seen."""
    wait_s: float = 0.0
    """Of it, how long the rank's own threads were blocked in `wait`: its exposed part."""
    peer: int = -1
    """Global rank at the other end, of a send or receive."""


class StepStages(msgspec.Struct, frozen=True, array_like=True):
    """Where one step of one rank went, in seconds; the parts add up to `end_s - begin_s`.

    A part never holds time blocked in collectives: that is `wait_s`. The slowest rank of a
    stage is therefore named by that stage, not by the all-reduce that equalises the sums.
    """

    step: int
    """Number of the step: committed steps where the script declares them, else a count of
    optimizer steps."""
    begin_s: float
    end_s: float
    data_s: float = 0.0
    """Fetching a batch."""
    forward_s: float = 0.0
    """From the batch (or the step's begin) to the backward pass, communication excluded."""
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    wait_s: float = 0.0
    """Blocked in collectives, by whichever stage."""
    other_s: float = 0.0
    """Checkpoint stalls, boundaries, and what no stage claims."""
