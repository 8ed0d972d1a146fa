"""Two real gloo ranks, read from outside while one of them keeps the other waiting."""

import json
import os
import subprocess
import sys
import time

import pytest

from perdure.adapters.rings import read_ring
from perdure.worker.recording.recorder import StatusRecorder
from perdure.worker.ring import RingWriter
from tests.waiting import PATIENCE_S, wait_until

pytest.importorskip("torch")

RANK = """
import os, sys, time
import torch, torch.distributed as dist
from perdure.worker.attach import attach_rank
attach_rank()
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
both = dist.new_group([0, 1])
for _ in range(3):
    dist.all_reduce(torch.ones(4), group=both)
dist.all_reduce(torch.ones(4))
print("ready", flush=True)
if rank == 1:
    sys.stdin.readline()
dist.broadcast(torch.ones(4), 0, group=both)
if rank == 1:
    sys.stdin.readline()
dist.destroy_process_group()
"""


@pytest.fixture
def ranks(tmp_path, request):
    """Start two ranks; yield (ring paths, processes)."""
    rings, processes = [], []
    for rank in range(2):
        ring = str(tmp_path / f"{rank}.ring")
        RingWriter.create(ring, rank=rank, generation=0).close()
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "PERDURE_RING": ring, "OMP_NUM_THREADS": "1",
            "PERDURE_RECORDER": request.param,
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-c", RANK, str(tmp_path / "store")]
        processes.append(
            subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        rings.append(ring)
    yield rings, processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.torch
@pytest.mark.parametrize(
    "ranks", ["auto", pytest.param("status", marks=pytest.mark.long)], indirect=True
)
def test_the_rank_that_did_not_arrive_is_seen_from_outside(ranks):
    rings, processes = ranks
    for process in processes:
        assert process.stdout.readline() == b"ready\n"

    def comms(rank):
        return {comm.name: comm for comm in read_ring(rings[rank], 0.0).comms}

    def count(rank):
        return {name: (comm.started_seq, comm.ended_seq) for name, comm in comms(rank).items()}

    wait_until(lambda: count(0) == {"0": (1, 1), "1": (4, 3)}, "rank that waits")
    wait_until(lambda: count(1) == {"0": (1, 1), "1": (3, 3)}, "rank that is absent")
    # A thread beside the training names the ranks of a group.
    wait_until(lambda: comms(0)["1"].ranks == comms(1)["1"].ranks == (0, 1), "names of the ranks")
    assert comms(0)["1"].size == 2
    wait_until(lambda: comms(0)["1"].op == "broadcast")
    account = read_ring(rings[0], 0.0).account
    assert account.group_s < comms(0)["1"].since_s <= time.monotonic()
    assert 0 < account.spawned_s <= account.script_s <= account.group_s
    beat = read_ring(rings[1], 0.0).heartbeat_s
    wait_until(lambda: time.monotonic() > beat + 0.5)
    assert read_ring(rings[1], 0.0).heartbeat_s == beat  # A thread that lives is no progress.

    processes[1].stdin.write(b"\n")
    processes[1].stdin.flush()
    wait_until(lambda: comms(0)["1"].ended_seq == 4)
    processes[1].stdin.write(b"\n")
    processes[1].stdin.flush()
    assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
    assert comms(1)["1"].ended_seq == 4  # Outlives the rank.


@pytest.mark.torch
def test_children_and_exit_codes_are_left_alone(tmp_path):
    ring = str(tmp_path / "r.ring")
    RingWriter.create(ring, rank=0, generation=0).close()
    script = """
import os, subprocess, sys, torch
from perdure.worker import attach
assert attach.attach_rank() is attach.attach_rank() is not None
child = "from perdure.worker.attach import attach_rank; assert attach_rank() is None"
assert subprocess.run([sys.executable, "-c", child]).returncode == 0
pid = os.fork()
if pid == 0:
    os._exit(0 if attach.attach_rank() is None else 1)
assert os.waitpid(pid, 0)[1] == 0
raise SystemExit(7)
"""
    env = os.environ | {"PERDURE_RING": ring}
    result = subprocess.run(
        [sys.executable, "-c", script], env=env, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == 7
    assert read_ring(ring, 0.0).account.step == -1


class FakeFlightRecorder:
    """Speaks as `_dump_fr_trace_json` does."""

    def __init__(self):
        self.status = {}
        self.entries = []
        self.full_dumps = 0
        self.retired = set()

    def __call__(self, entries, only_active):
        self.full_dumps += entries
        body = {"pg_status": self.status, "version": "2.10"}
        if entries:
            body["entries"] = self.entries
        return json.dumps(body).encode()

    def enter(self, group, seq, *, ended):
        self.status[group] = {
            "last_enqueued_collective": str(seq),
            "last_completed_collective": str(ended),
            "last_started_collective": "-1",
        }
        self.entries.append(
            {"pg_id": int(group), "process_group": [f"group{group}", ""],
             "collective_seq_id": seq, "profiling_name": "gloo:all_reduce",
             "retired": seq <= ended or seq in self.retired}
        )  # fmt: skip


@pytest.fixture
def recorder(tmp_path):
    path = str(tmp_path / "r.ring")
    trace = FakeFlightRecorder()
    ring = RingWriter.create(path, rank=0, generation=0)
    return StatusRecorder(ring, {"gloo": trace}, lambda name: (2, (0, 1))), trace, path


def test_more_groups_than_slots_take_those_that_are_idle(recorder):
    status, trace, path = recorder
    for group in range(80):
        trace.enter(str(group), 1, ended=0 if group == 0 else 1)
        status.poll(10**9 * (group + 1))
        status._dump_after_ns = 0
    names = {comm.name for comm in read_ring(path, 0.0).comms}
    assert len(names) == 64
    assert {"group0", "group79"} <= names  # The pending one keeps its slot.
    trace.enter("5", 2, ended=1)
    status.poll(10**11)
    assert "group5" in {comm.name for comm in read_ring(path, 0.0).comms}


@pytest.mark.parametrize(("source", "stamps"), [("gloo", "host"), ("nccl", "enqueued")])
def test_what_nccl_carries_is_known_as_enqueued(tmp_path, source, stamps):
    path, trace = str(tmp_path / "r.ring"), FakeFlightRecorder()
    ring = RingWriter.create(path, rank=0, generation=0)
    status = StatusRecorder(ring, {source: trace}, lambda name: (2, (0, 1)))
    trace.enter("0", 1, ended=0)
    status.poll(10**9)
    (comm,) = read_ring(path, 0.0).comms
    assert (comm.started_seq, comm.ended_seq, comm.stamps) == (1, 0, stamps)


def test_dumps_are_rare(recorder):
    status, trace, _ = recorder
    for seq in range(1, 200):
        trace.enter("0", seq, ended=seq - 1)
        status.poll(seq * 10**9)
        status.poll(seq * 10**9 + 6 * 10**8)
        status._dump_after_ns = max(status._dump_after_ns, seq * 10**9 + 20 * 10**9)
    assert trace.full_dumps <= 12


def test_nothing_moves_nothing_beats(recorder):
    status, trace, path = recorder
    trace.enter("0", 1, ended=1)
    status.poll(10**15)
    beat = read_ring(path, 0.0).heartbeat_s
    assert beat == 10**6
    status.poll(2 * 10**15)
    assert read_ring(path, 0.0).heartbeat_s == beat


def test_buckets_that_ended_out_of_order_are_not_pending(recorder):
    status, trace, path = recorder
    trace.retired = {1, 2}
    trace.enter("0", 1, ended=0)
    trace.enter("0", 2, ended=1)  # 2 ended first, then 1.
    status.poll(10**12)
    assert read_ring(path, 0.0).comms[0].ended_seq == 1
    status._dump_after_ns = 0
    status.poll(2 * 10**12)
    comm = read_ring(path, 0.0).comms[0]
    assert (comm.started_seq, comm.ended_seq, comm.op) == (2, 2, "all_reduce")


def test_what_is_pending_stays_pending(recorder):
    status, trace, path = recorder
    trace.enter("0", 1, ended=1)
    trace.enter("0", 2, ended=1)
    status.poll(10**12)
    status._dump_after_ns = 0
    status.poll(2 * 10**12)
    assert read_ring(path, 0.0).comms[0].ended_seq == 1
