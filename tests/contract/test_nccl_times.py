"""From NCCL's calls to a verdict: the real plugin, the agent's reader and the real detector.

NCCL is played by its driver, since there is no GPU: what a simulated training does becomes calls of
the plugin, with kernel times by a clock of each rank's own GPU. The plugin stamps the host's times
of these calls, which come later than the simulation says; they are moved to the simulation's clock
in the file, and nothing else is.
"""

import os
import random
import struct
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from perdure.adapters import nccl_follow
from perdure.adapters.nccl_follow import NcclFollower
from perdure.agent.state import KeeperView
from perdure.model.job import DetectConfig
from perdure.model.paths import JobPaths
from perdure.model.signals.nccl import HEADER_BYTES, parse_layout
from perdure.model.signals.progress import CommProgress, NodeBeat
from perdure.service.agent.beats import RankReader
from perdure.worker.native.build import build_nccl_plugin
from perdure.worker.ring import RingWriter
from tests.contract import nccl_driver as driver
from tests.contract.nccl_driver import V3, V4, V5, V6, Nccl
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Layout, Run

RING = (CommProgress("dp0", 2, 0, 0, ranks=(0, 1), stamps="enqueued"),)


@pytest.fixture(autouse=True)
def no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what these tests set of it forgotten with them."""
    monkeypatch.setenv("PERDURE_RING", "")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(build_nccl_plugin(tmp_path_factory.mktemp("plugin") / "plugin.so"))


class Gpu:
    """One rank: its ring, its own copy of the plugin, and a device that computes."""

    def __init__(self, built: Path, paths: JobPaths, rank: int, ranks: int, version: int) -> None:
        self.ring = paths.ring(0, rank)
        Path(self.ring).parent.mkdir(parents=True, exist_ok=True)
        self.writer = RingWriter.create(self.ring, rank=rank, generation=0)
        assert self.writer.claim(os.getpid())
        slot = self.writer.add_comm("dp0", ranks, tuple(range(ranks)))
        self.writer.set_comm_enqueued(slot)
        library = Path(f"{self.ring}.so")
        library.write_bytes(built.read_bytes())
        os.environ["PERDURE_RING"] = self.ring
        self.nccl = Nccl(str(library), version, b"dp0", rank, ranks)
        self.base_ns = 10**12 * (rank + 1)
        """GPUs' clocks have nothing in common."""

    def begin(self, seq: int) -> driver.c.c_void_p:
        coll = self.nccl.coll(seq)
        self.nccl.stop(coll)
        return coll

    def play(self, seq: int, start_s: float, end_s: float, *, kernels: int = 2) -> None:
        """Let NCCL run one collective, of two channels, from `start_s` to `end_s`."""
        coll = self.begin(seq)
        start, stop = (self.base_ns + int(at_s * 1e9) for at_s in (start_s, end_s))
        found = [self.nccl.kernel(coll, number, start + number) for number in range(kernels)]
        for number, kernel in enumerate(found):
            self.nccl.record(kernel, driver.KERNEL_STOP, gpu_ns=stop - number)
            self.nccl.stop(kernel)
        self.move(start_s - 0.05, start_s, end_s)

    def move(self, enqueued_s: float, begun_s: float, seen_s: float) -> None:
        """Move the host's times of the newest operation."""
        with open(f"{self.ring}.nccl", "r+b") as file:
            layout = parse_layout(os.pread(file.fileno(), HEADER_BYTES, 0))
            assert layout is not None
            at = layout.ops_at + layout.last_op % layout.num_ops * 256
            for word, at_s in ((8, enqueued_s), (9, enqueued_s), (12, begun_s), (13, seen_s)):
                os.pwrite(file.fileno(), struct.pack("=q", int(at_s * 1e9)), at + 8 * word)


class Played:
    """A simulated training whose ranks' collectives go through the plugin and the agent."""

    def __init__(
        self, built: Path, tmp_path: Path, ranks: int, version: int = V5, kernels: int = 2
    ) -> None:
        paths = JobPaths(*[str(tmp_path)] * 3)
        self.gpus = [Gpu(built, paths, rank, ranks, version) for rank in range(ranks)]
        self.reader = RankReader(paths, 0, 0.0)
        self.keeper = KeeperView(0, 0, dict.fromkeys(range(ranks), os.getpid()))
        self.kernels, self.told = kernels, 0
        self.rng = random.Random(1)

    def change(self, beat: NodeBeat) -> NodeBeat:
        """Return what an agent would make of the same training on GPUs."""
        for told in beat.ranks:
            for span in told.spans:
                gpu = self.gpus[told.rank]
                gpu.play(span.seq, span.start_s, span.end_s, kernels=self.kernels)
        read = {
            r.rank: r for r in self.reader.read_beat("a0", beat.seq, beat.sent_s, self.keeper).ranks
        }
        ranks = []
        for told in beat.ranks:
            waits = (0.0, 0.3) if told.rank == 0 else (0.0,)
            spans = tuple(
                replace(s, start_s=s.end_s - 1e-4 - self.rng.choice(waits)) for s in told.spans
            )
            comms = tuple(replace(comm, stamps="enqueued") for comm in told.comms)
            device = read[told.rank].device
            self.told += sum(len(comm.spans) for comm in device)
            ranks.append(replace(told, comms=comms, spans=spans, device=device))
        return replace(beat, ranks=tuple(ranks))

    def run(self, fault: Fault | None, seconds: float) -> Run:
        ranks = len(self.gpus)
        run = Run(Layout(ranks, nproc=ranks), fault, detect=DetectConfig(slow_action_s=5.0))
        return run.run(seconds, self.change)


@pytest.mark.parametrize(("ranks", "version"), [(2, V4), (4, V5), (4, V6)])
def test_the_rank_that_arrives_late_on_the_device_is_named(
    built: Path, tmp_path: Path, ranks: int, version: int
) -> None:
    fault = Fault("slow-host", FAULT_S, 1, 0, 1.6)
    played = Played(built, tmp_path, ranks, version)
    run = played.run(fault, FAULT_S - BEGIN_S + 20)
    assert played.told > 100 * ranks
    assert {(v.kind, v.culprit.rank) for v in run.verdicts} == {("Straggler", 1)}
    assert run.standing is not None
    assert run.standing.evidence["stamps"] == "device"
    assert run.acted == []


def test_nobody_is_named_where_all_devices_are_alike_and_one_host_waits(
    built: Path, tmp_path: Path
) -> None:
    played = Played(built, tmp_path, 4)
    assert played.run(None, 40.0).verdicts == []
    assert played.told > 400


@pytest.mark.parametrize(("version", "kernels"), [(V3, 2), (V5, 0)])
def test_nobody_is_named_where_the_gpus_times_are_missing(
    built: Path, tmp_path: Path, version: int, kernels: int
) -> None:
    played = Played(built, tmp_path, 2, version, kernels)
    fault = Fault("slow-host", FAULT_S, 1, 0, 2.0)
    assert played.run(fault, FAULT_S - BEGIN_S + 10).verdicts == []
    assert played.told == 0


# --- the reader -----------------------------------------------------------------------------------


@pytest.fixture
def gpu(built: Path, tmp_path: Path) -> Gpu:
    return Gpu(built, JobPaths(*[str(tmp_path)] * 3), 0, 2, V5)


def read(follower: NcclFollower, now: float = 101.0, pid: int = 0, ring=RING):
    return follower.read(0, pid or os.getpid(), ring, now)


def seqs(told) -> list[int]:
    return [span.seq for comm in told for span in comm.spans]


def test_each_collective_is_told_once_when_it_has_ended(gpu: Gpu) -> None:
    follower = NcclFollower(gpu.ring, 0.0)
    gpu.play(1, 100.0, 100.25)
    open_ = gpu.begin(2)
    gpu.move(100.2, 0.0, 0.0)
    (comm,) = read(follower)
    assert (comm.name, comm.comm) == ("dp0 AllReduce 00000abc", 0)
    ((_, seq, op, size, start_s, end_s, *_),) = map(_fields, comm.spans)
    assert (seq, op, size, start_s) == (1, "AllReduce", 2000, 100.0)
    assert end_s == pytest.approx(100.25)
    (again,) = read(follower)
    assert (again.name, again.spans) == (comm.name, ())
    kernels = [gpu.nccl.kernel(open_, number, 10**9) for number in (0, 1)]
    for kernel in kernels:
        gpu.nccl.record(kernel, driver.KERNEL_STOP, gpu_ns=10**9 + 10**8)
        gpu.nccl.stop(kernel)
    gpu.move(100.2, 100.3, 100.4)
    assert seqs(read(follower)) == [2]
    gpu.nccl.finalize()
    assert read(follower) == ()


def _fields(span):
    return tuple(getattr(span, name) for name in span.__struct_fields__)


def test_nothing_is_lost_or_told_twice_while_nccl_goes_on(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By real clocks: a host enqueues far ahead, and its device follows while the agent looks."""
    monkeypatch.setattr(nccl_follow, "SPANS_A_BEAT", 10**6)
    rounds, ahead = 5, 200  # Less than the file keeps, however late a look comes.
    begun = threading.Semaphore(0)

    def train() -> None:
        for round_ in range(rounds):
            colls = [gpu.begin(round_ * ahead + number) for number in range(ahead)]
            for number, coll in enumerate(colls):
                if number % 100 == 50:
                    begun.acquire()  # A look begins just now.
                kernels = [gpu.nccl.kernel(coll, n, time.monotonic_ns()) for n in (0, 1)]
                for kernel in kernels:
                    gpu.nccl.record(kernel, driver.KERNEL_STOP, gpu_ns=time.monotonic_ns())
                    gpu.nccl.stop(kernel)

    thread, follower, found = threading.Thread(target=train), NcclFollower(gpu.ring, 0.0), []
    thread.start()
    looks = 0
    while thread.is_alive():
        begun.release()
        found += seqs(read(follower, time.monotonic()))
        looks += 1
    thread.join()
    found += seqs(read(follower, time.monotonic()))
    assert looks >= 2 * rounds
    assert found == list(range(rounds * ahead))


def test_a_collective_of_which_a_channel_never_began_is_told_a_while_later(gpu: Gpu) -> None:
    follower = NcclFollower(gpu.ring, 0.0)
    gpu.play(1, 100.0, 100.25, kernels=1)
    assert seqs(read(follower, 100.3)) == []
    assert seqs(read(follower, 100.6)) == [1]


def test_every_kind_is_counted_on_its_own_and_a_broadcast_is_not_told(gpu: Gpu) -> None:
    follower = NcclFollower(gpu.ring, 0.0)
    for func in (b"AllReduce", b"AllGather", b"Broadcast"):
        common = {"seq": 5, "func": func, "count": 4, "channels": 1, "datatype": b"ncclInt8"}
        coll = gpu.nccl.start(driver.COLL, coll=driver.CollV5(**common))
        gpu.nccl.stop(coll)
        kernel = gpu.nccl.kernel(coll, 0, 10**9)
        gpu.nccl.record(kernel, driver.KERNEL_STOP, gpu_ns=10**9 + 10**7)
        gpu.nccl.stop(kernel)
        gpu.move(100.0, 100.1, 100.2)
    names = [comm.name for comm in read(follower)]
    assert names == ["dp0 AllReduce 00000abc", "dp0 AllGather 00000abc"]


@pytest.mark.parametrize("start_ns", [5 * 10**9, 2 * 10**9, 0, -5, 1])
def test_a_clock_that_jumped_makes_no_span(gpu: Gpu, start_ns: int) -> None:
    """The device's clock goes backwards, or was reset while a kernel ran."""
    coll = gpu.begin(1)
    kernel = gpu.nccl.kernel(coll, 0, start_ns % 2**64)
    gpu.nccl.record(kernel, driver.KERNEL_STOP, gpu_ns=2 * 10**9)
    gpu.nccl.stop(kernel)
    gpu.move(100.0, 100.1, 100.2)
    (*told,) = read(NcclFollower(gpu.ring, 0.0))
    assert seqs(told) == []


def test_a_file_of_another_process_or_kind_is_not_read(gpu: Gpu, tmp_path: Path) -> None:
    gpu.play(1, 100.0, 100.25)
    path = Path(f"{gpu.ring}.nccl")
    data = path.read_bytes()
    assert read(NcclFollower(gpu.ring, 0.0), pid=os.getpid() + 1) == ()
    assert read(NcclFollower(f"{gpu.ring}x", 0.0)) == ()
    for number, other in enumerate(
        (b"", data[:8], data[:511], b"x" * 2000, data[:8] + b"\7" + data[9:], b"PERDURE" + data[7:])
    ):
        Path(f"{tmp_path}/other{number}.nccl").write_bytes(other)
        assert read(NcclFollower(f"{tmp_path}/other{number}", 0.0)) == ()
    Path(f"{tmp_path}/cut.nccl").write_bytes(data[: HEADER_BYTES + 1000])
    assert seqs(read(NcclFollower(f"{tmp_path}/cut", 0.0))) == []
    os.mkfifo(f"{tmp_path}/fifo.nccl")
    assert read(NcclFollower(f"{tmp_path}/fifo", 0.0)) == ()
    os.symlink(path, f"{tmp_path}/link.nccl")
    assert read(NcclFollower(f"{tmp_path}/link", 0.0)) == ()


def test_a_file_that_was_replaced_is_followed_from_its_begin(gpu: Gpu) -> None:
    follower = NcclFollower(gpu.ring, 0.0)
    for seq in range(1, 4):
        gpu.play(seq, 100.0, 100.25)
    assert seqs(read(follower)) == [1, 2, 3]
    path = Path(f"{gpu.ring}.nccl")
    path.rename(f"{path}.old")
    Path(path).write_bytes(Path(f"{path}.old").read_bytes())
    assert seqs(read(follower)) == [1, 2, 3]
    assert seqs(read(NcclFollower(gpu.ring, 0.0), now=150.0)) == []  # Told long ago.


def test_who_is_in_a_communicator_is_known_by_name_or_by_what_fits(gpu: Gpu) -> None:
    gpu.play(1, 100.0, 100.25)

    def find(*ring: CommProgress) -> list[int]:
        return [comm.comm for comm in read(NcclFollower(gpu.ring, 0.0), ring=ring)]

    (mine,) = RING
    other, unlike = replace(mine, name="7"), replace(mine, name="8", ranks=(0, 2))
    assert find(mine) == [0]
    assert find(other) == [0]
    assert find(unlike, mine) == [1]
    assert find(unlike, other) == []
    assert find(replace(mine, ranks=(1, 0))) == []
    assert find(replace(mine, ranks=())) == []
    assert find(replace(mine, size=3)) == []
    assert find(replace(mine, stamps="host")) == []


def test_nothing_in_the_file_breaks_the_reader_or_makes_an_absurd_span(gpu: Gpu) -> None:
    for seq in range(1, 9):
        gpu.play(seq, 100.0, 100.25)
    path, rng = Path(f"{gpu.ring}.nccl"), random.Random(3)
    whole = path.read_bytes()
    layout = parse_layout(whole)
    assert layout is not None
    used = [*range(0, 160), *range(layout.comms_at, layout.comms_at + 192)]
    used += range(layout.ops_at, layout.ops_at + 10 * 256)
    follower = NcclFollower(gpu.ring, 0.0)
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3, 40))):
            data[rng.choice(used)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        for reader in (follower, NcclFollower(gpu.ring, 0.0)):
            for span in (span for comm in read(reader) for span in comm.spans):
                assert 0.0 < span.end_s - span.start_s < 12.0
                assert 80.0 < span.start_s < 120.0
                assert 0 <= span.seq < 2**53
                assert 0 <= span.bytes < 2**53


def test_of_many_collectives_in_a_beat_a_few_are_told(gpu: Gpu) -> None:
    """What such looks cost is bounded by the gates `nccl-times-look` and `nccl-times-ahead`."""
    follower = NcclFollower(gpu.ring, 0.0)
    for round_ in range(20):
        play_many(gpu, round_)
        assert 0 < len(seqs(read(follower))) <= 8


def play_many(gpu: Gpu, round_: int) -> None:
    for number in range(40):
        gpu.play(40 * round_ + number, 100.0, 100.25)


def enqueue_ahead(gpu: Gpu) -> None:
    """Let a host enqueue 500 collectives of which none begins."""
    for number in range(500):
        gpu.begin(2000 + number)
        gpu.move(100.0, 0.0, 0.0)


def fill(gpu: Gpu) -> None:
    """Fill the file with the collectives of 62 communicators more."""
    os.environ["PERDURE_RING"] = gpu.ring
    comms = [Nccl(f"{gpu.ring}.so", V5, b"c%d" % number, 0, 2) for number in range(62)]
    first = gpu.nccl
    for seq in range(17):
        for gpu.nccl in comms:
            gpu.play(seq, 100.0, 100.25)
    gpu.nccl = first


def test_a_full_file_of_many_communicators_is_read_at_once(gpu: Gpu) -> None:
    """More are told of once the old ones have been idle for long: aborted, and never closed."""
    follower, first = NcclFollower(gpu.ring, 0.0), gpu.nccl
    fill(gpu)
    told = read(follower)
    assert len(told) == 62
    assert len({comm.name for comm in told}) == 62
    for number in range(2):
        common = {"seq": 5, "func": (b"AllGather", b"ReduceScatter")[number], "count": 4}
        coll = first.start(driver.COLL, coll=driver.CollV5(**common, channels=1))
        first.stop(coll)
        kernel = first.kernel(coll, 0, 10**9)
        first.record(kernel, driver.KERNEL_STOP, gpu_ns=10**9 + 10**7)
        first.stop(kernel)
        gpu.move(100.0, 100.1, 100.2)
    gpu.play(5, 100.0, 100.25)
    assert len(read(follower)) == 64
    gpu.play(6, 169.0, 169.25)
    names = [comm.name for comm in read(follower, 169.5)]
    assert len(names) == 64
    assert names[-1] == "dp0 AllReduce 00000abc"
