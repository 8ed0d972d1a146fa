"""The NCCL plugin, called as NCCL calls it, and its file read back: no GPU, no NCCL."""

import ctypes as c
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from perdure.model.errors import ProtocolError
from perdure.model.signals import nccl as model
from perdure.worker.native import build as build_module
from perdure.worker.native.build import build_nccl_plugin
from perdure.worker.ring import RingWriter
from tests.contract import nccl_driver as driver
from tests.contract.nccl_driver import V3, V4, V5, V6, Nccl
from tests.nccl_files import WAITS, NcclReading, describe_open, parse_nccl, read_nccl
from tests.waiting import PATIENCE_S

ALL = (V3, V4, V5, V6)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(build_nccl_plugin(tmp_path_factory.mktemp("plugin") / "plugin.so"))


@pytest.fixture
def plugin(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy of its own, so that each test gets a library that has seen nothing."""
    own = tmp_path / "plugin.so"
    own.write_bytes(built.read_bytes())
    ring = tmp_path / "g0-r1.ring"
    writer = RingWriter.create(str(ring), rank=1, generation=0)
    assert writer.claim(os.getpid())
    writer.close()
    monkeypatch.setenv("PERDURE_RING", str(ring))
    monkeypatch.delenv("PERDURE_NCCL_EVENTS", raising=False)
    return str(own)


def read(plugin: str) -> NcclReading:
    reading = read_nccl(str(Path(plugin).with_name("g0-r1.ring")), 100.0)
    assert reading is not None
    return reading


@pytest.mark.parametrize("version", ALL)
def test_one_all_reduce_with_every_event_of_every_version(plugin: str, version: int) -> None:
    before_s = time.monotonic() + 100.0
    nccl = Nccl(plugin, version)
    assert nccl.mask.value & 0xFF == 0b11011110
    assert nccl.context.value
    proxy, kernel = play_all_reduce(nccl)
    r = read(plugin)
    assert (r.pid, r.api, r.mask & 0xFF) == (os.getpid(), version, 0b11011110)
    assert before_s <= r.started_s <= r.beat_s <= time.monotonic() + 100.0
    assert set(r.dropped.values()) == {0}
    check_op(r, version, before_s)
    check_transfer(r, version, r.beat_s - before_s)

    nccl.stop(proxy)
    nccl.stop(kernel)
    nccl.finalize()
    r = read(plugin)
    assert r.ops[0].ended
    assert r.comms[0].closed_s > 0
    assert r.links[0].ops_stopped == 1


def play_all_reduce(nccl: Nccl) -> tuple[c.c_void_p, c.c_void_p]:
    """Call as NCCL does; the proxy operation and the last kernel channel are still under way."""
    coll = nccl.coll(7)
    nccl.stop(coll)
    kernels = [nccl.kernel(coll, channel, 5000 + channel) for channel in (0, 1)]
    op = driver.ProxyOp(os.getpid(), 3, 2, 4, 512, 1)
    proxy = nccl.start(driver.PROXY_OP, coll, proxy_op=op)
    nccl.record(proxy, driver.IN_PROGRESS, bytes=0)
    step = nccl.start(driver.PROXY_STEP, proxy, step=0)
    for state, size in ((driver.SEND_GPU, 99), (driver.SEND_PEER, 99), (driver.SEND_NET, 640)):
        nccl.record(step, state, bytes=size)
        nccl.record(step, state, bytes=size)  # NCCL repeats a state while it polls.
        time.sleep(0.002)
    # InfiniBand's work request inside the transfer.
    request = b"\1" + bytes(7) + bytes(c.c_int(4)) + bytes(4) + bytes(c.c_uint64(77))
    request += bytes(c.c_int(2)) + bytes(c.c_int(9)) + bytes(c.c_size_t(640))
    data = c.create_string_buffer(request)
    event = driver.Net((1 << 16) | 1, c.addressof(data))
    net = nccl.start(driver.NET, step, net=event)
    nccl.record(net, driver.NET_UPDATE, data=None)
    nccl.stop(net)
    nccl.stop(step)
    nccl.record(kernels[0], driver.KERNEL_STOP, gpu_ns=9000)
    nccl.stop(kernels[0])
    return proxy, kernels[1]


def check_op(r: NcclReading, version: int, before_s: float) -> None:
    (comm,) = r.comms
    assert (comm.name, comm.hash, comm.rank, comm.colls) == ("tp", 0xABC, 1, 1)
    assert (comm.num_nodes, comm.num_ranks) == ((0, 0) if version == V3 else (2, 4))
    assert comm.api == version
    assert not comm.closed_s

    (o,) = r.ops
    assert (o.kind, o.op, o.seq, o.count, o.dtype, o.bytes) == (
        "collective", "AllReduce", 7, 1000, "bfloat16", 2000,
    )  # fmt: skip
    assert (o.channels, o.algo, o.proto, o.comm) == (2, "RING", "SIMPLE", comm.index)
    assert before_s <= o.start_s <= o.launched_s <= o.first_kernel_s <= o.last_kernel_s
    assert (o.kernels_started, o.kernels_stopped) == (2, 1)
    gpu = (0, 0) if version == V3 else (5000, 9000)
    assert (o.gpu_start_ns, o.gpu_stop_ns if version > V3 else 0) == gpu
    assert (o.proxies_started, o.proxies_stopped) == (1, 0)
    assert not o.ended

    assert [(k.op, k.channel, bool(k.stop_s)) for k in r.kernels] == [
        (o.number, 0, True),
        (o.number, 1, False),
    ]


def check_transfer(r: NcclReading, version: int, elapsed_s: float) -> None:
    ((o,), (comm,)) = r.ops, r.comms
    (p,) = r.proxies
    assert (p.op, p.channel, p.peer, p.is_send, p.num_steps) == (o.number, 3, 2, True, 4)
    assert (p.chunk_bytes, p.pid, p.rank) == (512, os.getpid(), 1)
    assert (p.steps_started, p.steps_stopped, p.stop_s, p.wait) == (1, 1, 0, None)
    assert p.in_progress_s >= p.start_s
    (s,) = r.steps
    assert (s.proxy, s.step, s.wait) == (p.number, 0, None)
    waits = dict(zip(WAITS, s.waits_s, strict=True))
    for wait in ("send_gpu", "send_peer", "send_net"):
        assert waits[wait] >= 0.002
    assert sum(waits.values()) <= elapsed_s
    assert waits["recv_net"] == waits["recv_flush"] == waits["recv_gpu"] == 0
    sized = 0 if version == V3 else 640
    assert (s.bytes, p.bytes) == (sized, sized)
    assert p.waits_s == s.waits_s
    (n,) = r.nets
    assert (n.step, n.plugin, n.version, n.type, n.updates) == (s.number, 1, 1, 1, 1)
    assert (n.device, n.opcode, n.qp, n.work, n.bytes) == (4, 2, 9, 77, 640)
    assert n.stop_s >= n.start_s > 0
    (link,) = r.links
    assert (link.comm, link.peer, link.is_send, link.steps) == (comm.index, 2, True, 1)
    assert (link.bytes, link.waits_s) == (sized, s.waits_s)
    assert (link.ops_started, link.ops_stopped) == (1, 0)
    assert (link.busy_s, link.busy_since_s) == (pytest.approx(waits["send_net"]), 0.0)


@pytest.mark.parametrize("version", ALL)
def test_p2p_names_its_peer(plugin: str, version: int) -> None:
    nccl = Nccl(plugin, version)
    nccl.stop(nccl.p2p(3))
    (op,) = read(plugin).ops
    assert (op.kind, op.op, op.peer, op.bytes, op.algo) == ("p2p", "Send", 3, 40, "")
    assert read(plugin).comms[0].p2ps == 1


def test_v3_takes_bytes_from_the_proxy_operation(plugin: str) -> None:
    nccl = Nccl(plugin, V3)
    coll = nccl.coll(1)
    op = driver.ProxyOp(os.getpid(), 0, 0, 4, 512, 0)
    proxy = nccl.start(driver.PROXY_OP, coll, proxy_op=op)
    for total in (100, 300):
        nccl.record(proxy, 5, bytes=total)
    r = read(plugin)
    assert (r.proxies[0].bytes, r.links[0].bytes, r.links[0].is_send) == (300, 300, False)


def test_copy_engine_collectives_are_v6_only(plugin: str) -> None:
    ce = driver.CeColl(seq=4, func=b"AllGather", count=8, datatype=b"ncclFloat8e4m3")
    six = Nccl(plugin, V6)
    assert six.mask.value & driver.CE_COLL
    six.stop(six.start(driver.CE_COLL, ce=ce))
    (op,) = read(plugin).ops
    assert (op.kind, op.op, op.seq, op.bytes, op.algo) == ("ce", "AllGather", 4, 8, "CE")
    assert six.start(driver.CE_SYNC).value is None
    assert not Nccl(plugin, V5).mask.value & driver.CE_COLL


@pytest.mark.parametrize("version", [V5, V6])
def test_events_that_nobody_asked_for_get_no_handle(plugin: str, version: int) -> None:
    nccl = Nccl(plugin, version)
    for type_ in (driver.GROUP_API, driver.COLL_API, 1, 1 << 11, 1 << 20):
        assert nccl.start(type_).value is None
    assert read(plugin).ops == ()


def test_stops_in_any_order_twice_or_of_nothing_do_no_harm(plugin: str) -> None:
    nccl = Nccl(plugin, V5)
    coll = nccl.coll(1)
    op = driver.ProxyOp(os.getpid(), 0, 1, 1, 64, 1)
    proxy = nccl.start(driver.PROXY_OP, coll, proxy_op=op)
    step = nccl.start(driver.PROXY_STEP, proxy, step=0)
    kernel = nccl.kernel(coll, 0, 10)
    for handle in (proxy, coll, step, kernel, step, kernel, coll, proxy):
        nccl.stop(handle)
    for rubbish in (None, 1, 0xDEADBEEF, 2**60, 2**64 - 1, 3 << 60 | 12345):
        nccl.stop(rubbish)
        nccl.record(rubbish, driver.SEND_NET, bytes=5)
        assert nccl.start(driver.PROXY_STEP, rubbish, step=1).value
    r = read(plugin)
    assert r.ops[0].ended
    assert (r.ops[0].kernels_stopped, r.ops[0].proxies_stopped) == (1, 1)
    assert r.proxies[0].steps_stopped == 1
    nccl.context = c.c_void_p(None)
    assert nccl.coll(2).value is None


def test_operation_of_another_process_is_no_parent(plugin: str) -> None:
    nccl = Nccl(plugin, V5)
    coll = nccl.coll(1)
    op = driver.ProxyOp(os.getpid() + 1, 0, 1, 1, 64, 1)
    nccl.start(driver.PROXY_OP, coll, proxy_op=op)
    r = read(plugin)
    assert (r.proxies[0].op, r.proxies[0].pid) == (0, os.getpid() + 1)
    assert r.links == ()
    assert r.ops[0].proxies_started == 0


def test_what_hangs_is_kept_while_others_come_and_go(plugin: str) -> None:
    nccl, other = Nccl(plugin, V5), Nccl(plugin, V5, name=b"dp")
    stuck = nccl.coll(41)
    nccl.stop(stuck)
    kernel = nccl.kernel(stuck, 0, 10)
    op = driver.ProxyOp(os.getpid(), 5, 3, 9, 64, 0)
    proxy = nccl.start(driver.PROXY_OP, stuck, proxy_op=op)
    step = nccl.start(driver.PROXY_STEP, proxy, step=2)
    nccl.record(step, driver.RECV_NET)
    for seq in range(3000):
        other.stop(other.coll(seq))
    r = read(plugin)
    held = [o for o in r.ops if not o.ended]
    assert [(o.seq, o.comm) for o in held] == [(41, r.comms[0].index)]
    assert len(r.ops) == 1024
    lines = describe_open(r, held[0].start_s + 1.25)
    assert lines[0].startswith("AllReduce #41 of tp, 2000 bytes, for 1.25 s")
    assert "0 of 1 kernel channels" in lines[0]
    (waiting,) = [each for each in r.proxies if each.wait]
    lines = describe_open(r, waiting.wait_since_s + 1.25)
    assert "channel 5 from rank 3: step 0 of 9, recv_net for 1.25 s" in lines[1]
    nccl.stop(kernel)
    nccl.finalize()  # Aborted: nothing of it is held on to any more.
    for seq in range(3000):
        other.stop(other.coll(seq))
    assert all(o.ended for o in read(plugin).ops)


def test_more_than_there_is_room_for_is_dropped_and_counted(plugin: str) -> None:
    nccl = Nccl(plugin, V5)
    handles = [nccl.coll(seq) for seq in range(1500)]
    assert sum(1 for handle in handles if handle.value) == 1024
    r = read(plugin)
    assert (len(r.ops), r.dropped["ops"]) == (1024, 1500 - 1024)
    assert [o.seq for o in r.ops] == list(range(1024))
    comms = [Nccl(plugin, V5, name=b"%d" % number) for number in range(70)]
    assert sum(1 for comm in comms if comm.context.value) == 63
    comms[0].finalize()
    assert Nccl(plugin, V5, name=b"late").context.value  # In the place of the one that is closed.
    assert "late" in {comm.name for comm in read(plugin).comms}


def test_threads_lose_and_mix_up_nothing(plugin: str) -> None:
    """Each thread plays a communicator of its own, as NCCL's proxy threads do."""
    rounds, threads = 400, 4
    comms = [Nccl(plugin, V5, name=b"c%d" % number) for number in range(threads)]
    failures: list[BaseException] = []

    def play(number: int, nccl: Nccl) -> None:
        try:
            for seq in range(rounds):
                coll = nccl.coll(seq, count=number + 1)
                op = driver.ProxyOp(os.getpid(), 0, number, 1, 64, 1)
                proxy = nccl.start(driver.PROXY_OP, coll, proxy_op=op)
                step = nccl.start(driver.PROXY_STEP, proxy, step=seq)
                nccl.record(step, driver.SEND_NET, bytes=10)
                nccl.stop(coll)
                nccl.stop(step)
                nccl.stop(proxy)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=play, args=pair) for pair in enumerate(comms)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        for op in read(plugin).ops:  # Never torn, also while they write.
            assert op.op == "AllReduce"
            assert op.bytes == 2 * op.count
    for worker in workers:
        worker.join()
    assert not failures
    r = read(plugin)
    assert set(r.dropped.values()) == {0}
    names = {comm.index: int(comm.name[1:]) for comm in r.comms}
    assert all(o.ended and o.count == names[o.comm] + 1 for o in r.ops)
    assert {comm.colls for comm in r.comms} == {rounds}
    totals = {names[li.comm]: (li.peer, li.steps, li.bytes, li.ops_stopped) for li in r.links}
    assert totals == {n: (n, rounds, 10 * rounds, rounds) for n in range(threads)}
    assert all(p.peer == names[p.comm] for p in r.proxies)


@pytest.mark.parametrize("why", ["no ring", "ring is missing", "not a ring", "mask 0", "foreign"])
def test_where_it_cannot_record_nccl_goes_on_without(
    plugin: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ring = tmp_path / "g0-r1.ring"
    match why:
        case "no ring":
            monkeypatch.delenv("PERDURE_RING")
        case "ring is missing":
            monkeypatch.setenv("PERDURE_RING", "/nonexistent/r.ring")
        case "not a ring":
            ring.write_bytes(b"x" * 4096)
        case "mask 0":
            monkeypatch.setenv("PERDURE_NCCL_EVENTS", "0")
        case "foreign":
            RingWriter.create(str(ring), rank=1, generation=0, pid=os.getppid()).close()
    for version in ALL:
        nccl = Nccl(plugin, version)
        assert (nccl.mask.value, nccl.context.value) == (0, None)
        assert nccl.coll(1).value is None
        nccl.record(None, driver.SEND_NET)
        nccl.stop(None)
        nccl.finalize()
    assert not (tmp_path / "g0-r1.ring.nccl").exists()


def test_mask_can_be_chosen(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_NCCL_EVENTS", "0x2")
    assert Nccl(plugin, V5).mask.value == driver.COLL


def test_forked_child_writes_nothing(plugin: str) -> None:
    nccl = Nccl(plugin, V5)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if nccl.coll(1).value is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert read(plugin).ops == ()


def test_library_loaded_again_goes_on_in_the_same_file(plugin: str) -> None:
    """NCCL unloads it with the last communicator."""
    script = (
        "import sys, _ctypes\n"
        "from perdure.worker.ring import RingWriter\n"
        "import os\n"
        "from tests.contract.nccl_driver import Nccl\n"
        "ring = RingWriter.create(os.environ['PERDURE_RING'], rank=1, generation=0)\n"
        "ring.claim(os.getpid()); ring.close()\n"
        "for seq in (1, 2):\n"
        "    nccl = Nccl(sys.argv[1], 5)\n"
        "    nccl.stop(nccl.coll(seq)); nccl.finalize()\n"
        "    _ctypes.dlclose(nccl.library._handle)\n"
        "    assert 'plugin.so' not in open('/proc/self/maps').read()\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script, plugin], check=True, cwd=root, timeout=PATIENCE_S)
    r = read(plugin)
    assert [op.seq for op in r.ops] == [1, 2]
    assert [bool(comm.closed_s) for comm in r.comms] == [True, True]


def test_records_that_change_between_two_copies_are_left_out(plugin: str) -> None:
    nccl = Nccl(plugin, V5)
    nccl.coll(1)
    data = Path(os.environ["PERDURE_RING"] + ".nccl").read_bytes()
    assert len(parse_nccl(data, data, 0.0).ops) == 1
    nccl.coll(2)
    again = Path(os.environ["PERDURE_RING"] + ".nccl").read_bytes()
    assert [op.seq for op in parse_nccl(data, again, 0.0).ops] == [1]
    for broken in (b"", b"x" * 2000, data[:8] + b"\7" + data[9:], data[:4096]):
        with pytest.raises(ProtocolError):
            parse_nccl(broken, broken, 0.0)


def test_words_of_a_record_are_as_many_as_in_the_header_file() -> None:
    text = (build_module.HERE / "nccl" / "layout.h").read_text()
    sizes = dict(re.findall(r"\b([COPSKNL])_WORDS = (\d+)", text))
    order = dict(zip("COPSKNL", model.WORDS, strict=True))
    assert {order[letter]: int(size) for letter, size in sizes.items()} == model.WORDS
