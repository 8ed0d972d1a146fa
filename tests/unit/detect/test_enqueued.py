"""Where a host runs ahead of its device, its stamps blame nobody for being slow."""

import pytest
from msgspec.structs import replace
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Layout, Run

from perdure.model import ring


def say_enqueued(beat):
    ranks = (
        replace(rank, comms=tuple(replace(comm, stamps="enqueued") for comm in rank.comms))
        for rank in beat.ranks
    )
    return replace(beat, ranks=tuple(ranks))


@pytest.mark.parametrize("kind", ["slow-forward", "slow-host"])
def test_stamps_of_enqueuing_name_no_slow_rank(kind):
    fault = Fault(kind, FAULT_S, 1, 0, 1.6, float("inf"))
    told, untold = (Run(Layout(2), fault) for _ in range(2))
    told.run(FAULT_S - BEGIN_S + 6)
    untold.run(FAULT_S - BEGIN_S + 6, say_enqueued)
    assert told.verdicts[0].culprit.rank == 1
    assert untold.verdicts == []


def test_an_older_ring_is_read_as_the_hosts_and_an_unknown_source_as_none():
    data = bytearray(ring.RECORDS_AT)
    for word, value in (
        (ring.W_MAGIC, ring.MAGIC),
        (ring.W_VERSION, ring.VERSION),
        (ring.W_NUM_COMMS, 1),
    ):
        data[8 * word : 8 * word + 8] = value.to_bytes(8, "little")
    assert ring.parse_ring(bytes(data), 0.0).comms[0].stamps == "host"
    at = ring.comm_at(0) + 8 * ring.C_STAMPS
    for number, stamps in ((1, "enqueued"), (2, "device"), (9, "enqueued")):
        data[at] = number
        assert ring.parse_ring(bytes(data), 0.0).comms[0].stamps == stamps
