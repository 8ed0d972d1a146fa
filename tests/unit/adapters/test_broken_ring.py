"""T1: a rank may write anything into its ring; the agent reads on, and its heartbeats fit."""

import contextlib
import os
import socket
import struct
from pathlib import Path
from random import Random

import pytest
from tests.nccl_files import read_nccl
from tests.rings import read_records, read_spans, read_stages

from perdure.adapters.ring_follow import RingFollower
from perdure.adapters.rings import read_ring
from perdure.agent.state import KeeperView
from perdure.model import ring
from perdure.model.codec import decode, encode
from perdure.model.fitting import fit_beat
from perdure.model.paths import JobPaths
from perdure.model.signals.progress import NodeBeat, ProcSample
from perdure.service.agent.beats import RankReader

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


def put_foreign(kind: str, path: Path) -> None:
    match kind:
        case "a FIFO":
            os.mkfifo(path)
        case "a directory":
            path.mkdir()
        case "a socket":
            # The name of a socket has at most 107 bytes, so it is a relative one.
            with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        case "a symbolic link":
            path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a socket", "a symbolic link"])
def test_what_is_no_file_in_a_rings_place_stops_no_agent(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """T1: a FIFO held up the agent's loop for ever, a directory ended it and its successors."""
    paths = JobPaths(str(tmp_path), str(tmp_path), str(tmp_path))
    (tmp_path / "rings").mkdir()
    (tmp_path / "exits").mkdir()
    ring = Path(paths.ring(0, 0))
    for path in (ring, Path(f"{ring}.nccl"), Path(paths.exit_record(0, 0))):
        put_foreign(kind, path)
    reader = RankReader(paths, 0, 0.0)
    keeper = KeeperView(pid=1, generation=0, running={0: os.getpid(), 1: os.getpid()})
    beats = [reader.read_beat("a", seq, 1.0, keeper) for seq in range(3)]
    assert [[p.phase for p in beat.ranks] for beat in beats] == [["spawned"] * 2] * 3
    assert [p.unseen for p in beats[-1].ranks] == [True, False]  # The other's may still come.
    assert read_spans(str(ring), 0.0) == read_records(str(ring), 0.0) == ()
    assert read_nccl(str(ring), 0.0) is None
    assert reader.read_lost(0, [0], 1.0) == []
    reader.read_newest_generation(range(2))
    assert caplog.text.count(f"rank 0 of generation 0: {kind} lies in the place of its ring") == 1
