"""T1: a rank may write anything into its ring; the agent reads on, and its heartbeats fit."""

import struct
from pathlib import Path
from random import Random

import pytest

from perdure.adapters.ring_follow import RingFollower
from perdure.adapters.rings import read_records, read_ring, read_spans, read_stages
from perdure.model import ring
from perdure.model.codec import decode, encode
from perdure.model.fitting import fit_beat
from perdure.model.progress import NodeBeat, ProcSample

EXTREMES = (0, 1, -1, -5, 63, 64, 1000, 2**62, 2**63 - 1, -(2**63))
PAYLOAD_MAX = 64 << 10


def write_broken(path: Path, seed: int) -> None:
    """Write what passes for a ring and holds nonsense."""
    random = Random(seed)
    data = bytearray(random.randbytes(ring.RING_BYTES))
    for word in range(80):
        struct.pack_into("=q", data, 8 * word, random.choice(EXTREMES))
    whole = {ring.W_MAGIC: ring.MAGIC, ring.W_VERSION: ring.VERSION}
    whole |= {ring.W_PROGRESS_SEQ: 0, ring.W_COMM_SEQ: 0, ring.W_NUM_COMMS: ring.COMMS_MAX}
    for word, value in whole.items():
        struct.pack_into("=q", data, 8 * word, value)
    if seed % 2:
        for slot in range(ring.COMMS_MAX):
            at = ring.comm_at(slot) + ring.COMM_RANKS_AT
            struct.pack_into("=4H", data, at, ring.COMM_RANGE, 0, 1, 0xFFFF)
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(12))
def test_a_ring_full_of_nonsense_is_read_and_its_heartbeat_fits(tmp_path: Path, seed: int) -> None:
    """It ended the agent, and each that came after it; or no heartbeat of the node went out."""
    path = tmp_path / "g0-r0.ring"
    write_broken(path, seed)
    look = RingFollower(str(path), 1e9).read(2e9)
    assert look is not None
    assert sum(len(comm.ranks) for comm in look.reading.comms) < 5 * 0xFFFF
    for read in (read_ring, read_spans, read_stages, read_records):
        read(str(path), 1e9)
    progress = look.reading.progress(ProcSample())
    data = encode(fit_beat(NodeBeat(0, "a0-1", 1, 2e9, 0, (progress,)), PAYLOAD_MAX))
    assert len(data) <= PAYLOAD_MAX
    assert decode(data, NodeBeat).ranks[0].rank == progress.rank
