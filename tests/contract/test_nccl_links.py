"""From what NCCL hands to the network to a cell of the delay matrix, and to the link that is slow.

As in test_nccl_times, NCCL is played by its driver: the plugin, the agent's sweep and the detector
are the real ones. What a link moved, and for how long it was busy, is written into the plugin's
totals, since a simulated training has no real time to wait for.
"""

import os
import random
import struct
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from perdure.adapters.network.nccl_links import RANKS_A_SWEEP, DeviceRank, NcclLinkReader
from perdure.agent.state import KeeperView
from perdure.model.job import DetectConfig
from perdure.model.paths import JobPaths
from perdure.model.signals.links import LinkSample
from perdure.model.signals.nccl import HEADER_BYTES, LINK_BYTES, NcclLayout, parse_layout
from perdure.model.signals.progress import CommProgress, NodeBeat
from perdure.service.agent.beats import RankReader
from perdure.service.agent.sweeps import LinkTelemetry, Ranks
from perdure.telemetry.links import LinkFold, make_delay_matrix
from tests.contract import nccl_driver as driver
from tests.contract.nccl_driver import V5, V6
from tests.contract.test_nccl_times import Gpu, built, no_ring
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Layout, Run

__all__ = ["built", "no_ring"]

MB = 1_000_000
STEPS, BYTES, BUSY = 6, 7, 18
STEP_BYTES = 512 * 1024
"""NCCL's own, of large messages."""
RING = (CommProgress("dp0", 2, 0, 0, ranks=(4, 7), stamps="enqueued"),)


def send(gpu: Gpu, peer: int, size: int, busy_s: float, step: int = STEP_BYTES) -> None:
    """Let the network have sent `size` bytes to `peer`, for which it was busy for so long."""
    with open(f"{gpu.ring}.nccl", "r+b") as file:
        at = find_link(file.fileno(), peer)
        if at is None:
            op = driver.ProxyOp(os.getpid(), 0, peer, 1, 64, 1)
            gpu.nccl.start(driver.PROXY_OP, gpu.nccl.coll(1), proxy_op=op)
            at = find_link(file.fileno(), peer)
            assert at is not None
        for word, more in ((BYTES, size), (STEPS, size // step), (BUSY, int(busy_s * 1e9))):
            (now,) = struct.unpack("=q", os.pread(file.fileno(), 8, at + 8 * word))
            os.pwrite(file.fileno(), struct.pack("=q", now + more), at + 8 * word)


def find_link(fd: int, peer: int) -> int | None:
    layout = read_layout(fd)
    for slot in range(layout.num_links):
        at = layout.links_at + slot * LINK_BYTES
        head, _, found = struct.unpack("=3q", os.pread(fd, 24, at))
        if head and found == peer:
            return at
    return None


def read_layout(fd: int) -> NcclLayout:
    layout = parse_layout(os.pread(fd, HEADER_BYTES, 0))
    assert layout is not None
    return layout


class Node:
    """One agent with one rank whose device sends through NCCL."""

    def __init__(
        self, built: Path, path: Path, rank: int, *, version: int, pace: float, timed: bool
    ) -> None:
        paths = JobPaths(*[str(path)] * 3)
        self.pace, self.timed = pace, timed
        """Of the network, as a multiple of the simulated one; the device's times are told."""
        self.rank, self.gpu = rank, Gpu(built, paths, rank, 4, version)
        self.reader = RankReader(paths, rank, 0.0)
        self.links = LinkTelemetry(paths, rank, 0.0, alone=False)
        self.keeper = KeeperView(0, 0, {rank: os.getpid()})

    def look(self, beat: NodeBeat) -> NodeBeat:
        """Return what an agent makes of the same training on GPUs without a socket."""
        (told,) = beat.ranks
        for span in told.spans if self.timed else ():
            self.gpu.play(span.seq, span.start_s, span.end_s)
        seen = self.reader.read_beat("a", beat.seq, beat.sent_s, self.keeper)
        comms = tuple(replace(comm, stamps="enqueued") for comm in told.comms)
        rank = replace(told, comms=comms, device=seen.ranks[0].device)
        sweep, beat = beat.sweep, replace(beat, ranks=(rank,), sweep=None)
        if sweep is None:
            return beat
        for link in sweep.links:
            send(self.gpu, link.dst, int(link.bytes_acked * self.pace), link.busy_s)
        self.links.sweep(sweep.at_s, Ranks(0, {}, frozenset(), self.reader.on_device))
        return self.links.join(beat)


def train(
    built: Path,
    tmp_path: Path,
    fault: Fault | None,
    seconds: float,
    *,
    version: int = V5,
    pace: float = 1.0,
    timed: bool = True,
    **detect,
) -> tuple[Run, LinkFold]:
    kind = {"version": version, "pace": pace, "timed": timed}
    nodes = [Node(built, tmp_path / str(rank), rank, **kind) for rank in range(4)]
    fold = LinkFold()
    run = Run(Layout(4), fault, detect=DetectConfig(slow_action_s=5.0, **detect))
    run.run(seconds, lambda beat: fold.take_beat(beat.sent_s, nodes[beat.node].look(beat)))
    return run, fold


@pytest.mark.parametrize(("version", "pace", "timed"), [(V5, 1.0, False), (V6, 100.0, True)])
def test_the_slow_link_is_named_where_no_socket_carries_it(
    built: Path, tmp_path: Path, version: int, pace: float, timed: bool
) -> None:
    fault = Fault("slow-link", FAULT_S, 0, 1, 5.0)
    kind = {"version": version, "pace": pace, "timed": timed}
    run, fold = train(built, tmp_path, fault, FAULT_S - BEGIN_S + 12, **kind)
    assert run.standing is not None
    assert (run.standing.kind, run.standing.culprit.link) == ("CommSlow", (0, 1))
    assert run.standing.evidence["stamps"] == "device"
    assert run.standing.evidence["links"][0]["source"] == "nccl"
    assert "usually 0.0;" not in run.standing.reason + ";"
    assert run.acted == []
    noted = fold.sum_up(run.training.now)
    assert noted is not None
    cells = {(s.src, s.dst): s.busy_ms_per_mb for s in make_delay_matrix(noted).links}
    assert set(cells) == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert max(cells, key=cells.__getitem__) == (0, 1)


@pytest.mark.long
def test_it_is_acted_upon_where_that_is_asked_for(built: Path, tmp_path: Path) -> None:
    fault = Fault("slow-link", FAULT_S, 0, 1, 5.0)
    run, _ = train(built, tmp_path, fault, FAULT_S - BEGIN_S + 40, act_on_device_times=True)
    assert [event.verdict.culprit.link for event in run.acted][:1] == [(0, 1)]


def test_no_link_is_named_where_all_are_alike(built: Path, tmp_path: Path) -> None:
    run, fold = train(built, tmp_path, None, 40.0)
    assert run.verdicts == []
    assert len(fold.samples()) == 4


# --- the plugin -----------------------------------------------------------------------------------


@pytest.fixture
def gpu(built: Path, tmp_path: Path) -> Gpu:
    return Gpu(built, JobPaths(*[str(tmp_path)] * 3), 0, 2, V5)


def clock() -> float:
    return time.monotonic()


def look(reader: NcclLinkReader, gpu: Gpu, now: float, pid: int = 0, ring=RING):
    return reader.read({4: DeviceRank(gpu.ring, pid or os.getpid(), ring)}, now)


def begin_step(gpu: Gpu, proxy: object, number: int, size: int) -> driver.c.c_void_p:
    step = gpu.nccl.start(driver.PROXY_STEP, proxy, step=number)
    gpu.nccl.record(step, driver.SEND_GPU, bytes=0)
    gpu.nccl.record(step, driver.SEND_NET, bytes=size)
    return step


def begin_proxy(gpu: Gpu, peer: int, pid: int = 0) -> driver.c.c_void_p:
    op = driver.ProxyOp(pid or os.getpid(), 0, peer, 8, 64, 1)
    return gpu.nccl.start(driver.PROXY_OP, gpu.nccl.coll(1), proxy_op=op)


def test_a_link_is_busy_once_however_many_steps_are_under_way(gpu: Gpu) -> None:
    """By real clocks: three steps beside each other, then nothing, then one that has not ended."""
    reader, proxy = NcclLinkReader(0.0), begin_proxy(gpu, 1)
    assert look(reader, gpu, clock()) == ()
    began_s = clock()
    steps = [begin_step(gpu, proxy, number, 2 * MB) for number in range(3)]
    time.sleep(0.1)
    for step in steps:
        gpu.nccl.stop(step)
    busy_s = clock() - began_s
    time.sleep(0.1)
    (link,) = look(reader, gpu, clock())
    assert (link.src, link.dst, link.comm, link.source) == (4, 7, "dp0", "nccl")
    assert link.bytes_acked == 6 * MB
    assert 0.1 <= link.busy_s <= busy_s
    begin_step(gpu, proxy, 3, MB)
    time.sleep(0.05)
    (link,) = look(reader, gpu, clock())
    assert (link.bytes_acked, link.busy_s >= 0.05) == (MB, True)


def test_a_step_whose_end_nobody_told_keeps_no_link_busy(gpu: Gpu) -> None:
    proxy = begin_proxy(gpu, 1)
    begin_step(gpu, proxy, 0, MB)
    gpu.nccl.stop(proxy)
    reader = NcclLinkReader(0.0)
    look(reader, gpu, clock())
    next_ = begin_proxy(gpu, 1)
    began_s = clock()
    gpu.nccl.stop(begin_step(gpu, next_, 0, 5 * MB))
    busy_s = clock() - began_s
    time.sleep(0.1)
    (link,) = look(reader, gpu, clock())
    assert link.busy_s <= busy_s


def test_what_an_aborted_communicator_left_is_not_its_successors(gpu: Gpu) -> None:
    """It was aborted while it sent; by and by another one, of the same ranks, gets its place."""
    begin_step(gpu, begin_proxy(gpu, 1), 0, MB)
    place = gpu.nccl.context.value
    for _ in range(64):
        gpu.nccl.finalize()
        gpu.nccl.init(b"dp0", 0, 2)
    assert gpu.nccl.context.value == place
    reader, proxy = NcclLinkReader(0.0), begin_proxy(gpu, 1)
    look(reader, gpu, clock())
    began_s = clock()
    gpu.nccl.stop(begin_step(gpu, proxy, 0, 5 * MB))
    busy_s = clock() - began_s
    time.sleep(0.1)
    (link,) = look(reader, gpu, clock())
    assert (link.bytes_acked, link.busy_s <= busy_s) == (5 * MB, True)


def test_what_goes_for_another_process_is_no_link_of_this_rank(gpu: Gpu) -> None:
    reader, mine = NcclLinkReader(0.0), begin_proxy(gpu, 1)
    other = begin_proxy(gpu, 1, os.getpid() + 1)
    look(reader, gpu, clock())
    for proxy, size in ((mine, 2 * MB), (other, 40 * MB)):
        gpu.nccl.stop(begin_step(gpu, proxy, 0, size))
    (link,) = look(reader, gpu, clock() + 0.1)
    assert link.bytes_acked == 2 * MB


# --- the reader -----------------------------------------------------------------------------------


def test_only_what_is_new_and_much_is_told(gpu: Gpu) -> None:
    reader = NcclLinkReader(0.0)
    send(gpu, 1, 50 * MB, 0.5)
    assert look(reader, gpu, 100.0) == ()
    assert look(reader, gpu, 101.0) == ()
    send(gpu, 1, 5 * MB, 0.25)
    (link,) = look(reader, gpu, 102.0)
    assert (link.bytes_acked, link.busy_s) == (5 * MB, pytest.approx(0.25))
    send(gpu, 1, MB // 2, 0.1)
    assert look(reader, gpu, 103.0) == ()
    send(gpu, 1, MB // 2, 0.9)
    assert [s.bytes_acked for s in look(reader, gpu, 104.0)] == [MB // 2]
    gpu.nccl.finalize()
    send(gpu, 1, 5 * MB, 0.25)
    assert look(reader, gpu, 105.0) == ()


def test_what_goes_in_small_steps_has_no_cell(gpu: Gpu) -> None:
    """Latency is its cost: at an eighth of the bytes a step it looked like a slow link."""
    reader = NcclLinkReader(0.0)
    send(gpu, 1, 5 * MB, 0.1)
    look(reader, gpu, 100.0)
    send(gpu, 1, 5 * MB, 0.9, step=64 * 1024)
    assert look(reader, gpu, 101.0) == ()
    send(gpu, 1, 5 * MB, 0.1)
    assert [s.bytes_acked for s in look(reader, gpu, 102.0)] == [5 * MB]


def test_of_a_node_with_many_ranks_some_are_looked_at_in_each_sweep(gpu: Gpu) -> None:
    ranks = {
        rank: DeviceRank(gpu.ring if rank == 4 else "nothing", os.getpid(), RING)
        for rank in range(2 * RANKS_A_SWEEP)
    }
    reader, told = NcclLinkReader(0.0), []
    for second in range(8):
        send(gpu, 1, 5 * MB, 0.25)
        told += [(s.bytes_acked, s.busy_s) for s in reader.read(ranks, 100.0 + second)]
    assert told == [(5 * MB, pytest.approx(0.25))] * 3


def test_a_file_of_another_process_or_version_or_kind_is_not_read(gpu: Gpu) -> None:
    send(gpu, 1, MB, 0.1)
    path = Path(f"{gpu.ring}.nccl")

    def told(pid: int = 0, ring=RING) -> tuple[LinkSample, ...]:
        reader = NcclLinkReader(0.0)
        look(reader, gpu, 100.0, pid, ring)
        send(gpu, 1, 5 * MB, 0.25)
        return look(reader, gpu, 101.0, pid, ring)

    assert told()
    assert told(pid=os.getpid() + 1) == ()
    assert told(ring=(replace(RING[0], ranks=(7, 4)),)) == ()
    assert told(ring=(replace(RING[0], stamps="host"),)) == ()
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + b"\1" + whole[9:])
    reader = NcclLinkReader(0.0)
    assert look(reader, gpu, 100.0) == look(reader, gpu, 101.0) == ()
    path.write_bytes(whole[: len(whole) // 2])
    assert look(reader, gpu, 102.0) == ()
    path.unlink()
    os.mkfifo(path)
    assert look(reader, gpu, 103.0) == ()


def test_nothing_in_the_file_breaks_the_reader_or_makes_an_absurd_link(gpu: Gpu) -> None:
    send(gpu, 1, 5 * MB, 0.25)
    path, rng = Path(f"{gpu.ring}.nccl"), random.Random(5)
    whole = path.read_bytes()
    with path.open("rb") as file:
        layout = read_layout(file.fileno())
        at = find_link(file.fileno(), 1)
    assert at is not None
    used = [*range(0, 360), *range(layout.comms_at, layout.comms_at + 192)]
    used += [*range(at, at + LINK_BYTES)] * 4
    reader, now = NcclLinkReader(0.0), 100.0
    told = 0
    with path.open("r+b", buffering=0) as file:
        for _ in range(1500):
            bent = rng.choices(used, k=rng.choice((0, 1, 1, 3, 40)))
            for at in bent:
                os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << rng.randrange(8)]), at)
            now += 1.0
            for link in look(reader, gpu, now):
                told += 1
                assert (link.src, link.dst) == (4, 7)
                assert 0 <= link.bytes_acked < 2**53
                assert 0.0 <= link.busy_s <= 1.1
            for at in bent:
                os.pwrite(file.fileno(), whole[at : at + 1], at)
    assert told


def send_to_many(gpu: Gpu) -> tuple[CommProgress, ...]:
    """Let a rank send to 399 others; return the ring that names them."""
    for peer in range(400):
        gpu.nccl.start(
            driver.PROXY_OP,
            gpu.nccl.coll(1),
            proxy_op=driver.ProxyOp(os.getpid(), 0, peer, 1, 64, 1),
        )
    ring = (replace(RING[0], size=400, ranks=tuple(range(4, 404))),)
    comm_ranks = struct.pack("=q", 400)
    with open(f"{gpu.ring}.nccl", "r+b") as file:
        os.pwrite(file.fileno(), comm_ranks, read_layout(file.fileno()).comms_at + 16)
    return ring


def test_a_rank_may_send_to_hundreds_of_others(gpu: Gpu) -> None:
    """What a look at them costs is bounded by the gate `nccl-links-look`."""
    ring, reader = send_to_many(gpu), NcclLinkReader(0.0)
    look(reader, gpu, 100.0, ring=ring)
    (kept,) = reader._looks.values()
    assert len(kept.totals) > 300
