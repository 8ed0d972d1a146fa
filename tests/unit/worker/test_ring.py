import os
import time

import pytest
from tests.disks import small_disk
from tests.rings import read_records

from perdure.adapters.rings import read_ring
from perdure.model import ring as layout
from perdure.model.errors import ProtocolError
from perdure.worker.ring import RingWriter


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "g0-r1.ring")


def test_a_new_ring_says_who_it_is_and_that_nothing_happened(path):
    before = time.monotonic()
    RingWriter.create(path, rank=1, generation=3, pid=77).close()
    reading = read_ring(path, 1000.0)
    assert (reading.rank, reading.generation, reading.pid) == (1, 3, 77)
    assert reading.phase == "spawned"
    assert reading.account.step == -1
    assert reading.account.first_step_s == 0.0
    assert before + 1000 <= reading.account.spawned_s <= time.monotonic() + 1000
    assert reading.heartbeat_s == reading.account.spawned_s
    assert not reading.torn


def test_an_error_of_a_full_disk_names_the_ring(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        path = str(disk / "g0-r1.ring")
        with pytest.raises(OSError, match="No space left") as raised:
            RingWriter.create(path, rank=1, generation=0)
        assert raised.value.filename == path
        assert os.listdir(disk) == []


def test_commits_add_up_and_cover_the_time_between(path):
    ring = RingWriter.create(path, rank=0, generation=0)
    ring.start_steps(10)
    ring.stamp("first_step", 1_000)
    ring.commit(11, 1_000, 5_000, (3_000, 500, 400, 100), phase=5)
    ring.add_mark(11)
    ring.commit(12, 5_000, 9_000, (4_000, 0, 0, 0), phase=5)
    account = read_ring(path, 0.0).account
    spent = account.step_s + account.checkpoint_s + account.boundary_s + account.overhead_s
    assert spent == pytest.approx(account.last_step_s - account.first_step_s)
    assert (account.start_step, account.step) == (10, 12)
    assert account.marks == ((11, pytest.approx(3e-6)),)
    assert [record.step for record in read_records(path, 0.0)] == [11, 12]


def test_only_the_last_marks_and_records_are_kept(path):
    ring = RingWriter.create(path, rank=0, generation=0)
    for step in range(1, layout.RECORDS_MAX + 11):
        ring.commit(step, step, step + 1, (1, 0, 0, 0), phase=5)
        ring.add_mark(step)
    records = read_records(path, 0.0)
    assert (records[0].step, records[-1].step) == (11, layout.RECORDS_MAX + 10)
    marks = read_ring(path, 0.0).account.marks
    assert [step for step, _ in marks] == list(range(layout.RECORDS_MAX - 5, 1035))


def test_communicators_keep_name_ranks_and_the_last_collective(path):
    ring = RingWriter.create(path, rank=0, generation=0)
    slot = ring.add_comm("0", 2, (0, 1))
    big = ring.add_comm("world", 100, [*range(99), 200])
    ring.set_comm(slot, 7, 6, 123)
    ring.set_comm_op(slot, b"all_reduce")
    small, large = read_ring(path, 0.0).comms
    assert (small.name, small.size, small.started_seq, small.ended_seq) == ("0", 2, 7, 6)
    assert (small.op, small.ranks) == ("all_reduce", (0, 1))
    assert (big, large.size, large.ranks) == (1, 100, ())


def test_slots_run_out_without_harm(path):
    ring = RingWriter.create(path, rank=0, generation=0)
    slots = [ring.add_comm(str(n), 2, (0, 1)) for n in range(layout.COMMS_MAX + 1)]
    assert slots[-1] == -1
    assert len(read_ring(path, 0.0).comms) == layout.COMMS_MAX


def test_a_writer_that_died_in_the_middle_is_still_read(path):
    ring = RingWriter.create(path, rank=0, generation=0)
    ring.commit(5, 1, 2, (1, 0, 0, 0), phase=5)
    ring._words[layout.W_PROGRESS_SEQ] += 1
    reading = read_ring(path, 0.0)
    assert reading.torn
    assert reading.account.step == 5


def test_a_forked_child_never_writes_the_ring(path):
    ring = RingWriter.create(path, rank=0, generation=0)
    ring.commit(5, 1, 2, (1, 0, 0, 0), phase=5)
    pid = os.fork()
    if pid == 0:
        ring.commit(99, 1, 2, (1, 0, 0, 0), phase=5)
        os._exit(0 if not ring.attached else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert read_ring(path, 0.0).account.step == 5
    ring.commit(6, 2, 3, (1, 0, 0, 0), phase=5)
    assert read_ring(path, 0.0).account.step == 6


def test_a_ring_has_one_owner(path):
    RingWriter.create(path, rank=0, generation=0).close()
    assert RingWriter.open(path).claim(10)
    assert not RingWriter.open(path).claim(11)


def test_what_is_no_ring_is_refused(tmp_path):
    other = tmp_path / "x"
    other.write_bytes(b"\0" * layout.RING_BYTES)
    with pytest.raises(ProtocolError, match="no ring"):
        RingWriter.open(str(other))
    assert read_ring(str(other), 0.0) is None
    assert read_ring(str(tmp_path / "missing"), 0.0) is None
