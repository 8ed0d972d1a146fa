"""The compiled recorder in two real gloo ranks: it sees everything and changes nothing."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.adapters.rings import read_ring
from perdure.model import ring as layout
from perdure.worker.native.build import BuildError, build
from perdure.worker.ring import RingWriter
from tests.rings import read_spans, read_stages
from tests.waiting import PATIENCE_S, wait_until

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).with_name("recorder_rank.py")
NOT_COLLECTIVES = {"check_for_nan": "takes no process group: looks at one tensor"}
SIZES_DIFFER = {"send", "recv", "recv_any_source"}


@pytest.fixture(scope="session")
def library():
    try:
        return build()
    except BuildError as error:
        pytest.skip(f"the compiled recorder cannot be built here: {error}")


def make_ring(folder, rank=0):
    ring = str(folder / f"{rank}.ring")
    RingWriter.create(ring, rank=rank, generation=0).close()
    return ring


FORKS = """
import gc, json, os, sys
import torch, torch._dynamo, torch._functorch.aot_autograd, torch.distributed.fsdp
import torch.testing._internal.distributed.fake_pg
gc.freeze()  # Otherwise each fork looks at all of it when it ends.
for ranks in json.load(sys.stdin):
    pids = []
    for code, word, env, output in ranks:
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(env)
            sys.argv[1:] = [word]
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
            exec(code, {"__name__": "__main__"})
            sys.exit()
    for pid in pids:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def run_forked(runs, folder):
    """Run each list of ranks in forks of one process that has torch; return their exit codes.

    A rank is the text of its script, its argument, its environment, and the file of its output.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS], input=json.dumps(runs),
        env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder,
        stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    return [int(code) for code in done.stdout.split()]


@pytest.fixture(scope="module")
def compiled(forked):
    return forked.compiled, forked.rings


@pytest.fixture(scope="module")
def bare(forked):
    return forked.bare


def c10d_operators():
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("c10d::") for name in names if name.startswith("c10d::")}


def test_every_operator_of_this_torch_is_recorded(compiled):
    answers, rings = compiled
    operators = c10d_operators() - set(NOT_COLLECTIVES)
    driven = {name for name in answers[0] if name in operators}
    assert operators - driven == set(), "drive it in recorder_rank.py"
    for rank in range(2):
        spans = {one.number: one for one in read_spans(rings[rank], 0.0)}
        for name in driven:
            _, first, last = answers[rank][name]
            seen = [spans[n].span.op for n in range(first, last)]
            wanted = name.strip("_")
            if name in ("send", "recv_", "recv_any_source_") and rank == (name != "send"):
                assert seen == [wanted], name
            elif name not in ("send", "recv_", "recv_any_source_"):
                assert wanted in seen, name


def test_names_of_operators_have_numbers():
    named = {name.strip("_") for name in c10d_operators() - set(NOT_COLLECTIVES)}
    assert named - set(layout.OPS) == set()


def test_dtypes_are_numbered_as_torch_numbers_them():
    named = {name: getattr(torch, name) for name in layout.DTYPES if name}
    numbers = {
        name: torch._C._get_dtype_number(dtype) if hasattr(torch._C, "_get_dtype_number") else None
        for name, dtype in named.items()
        if isinstance(dtype, torch.dtype)
    }
    assert {"float32", "bfloat16", "int64", "bool"} <= set(numbers)


def test_what_a_script_gets_is_what_it_gets_without(compiled, bare):
    for rank in range(2):
        for name, (result, _, _) in compiled[0][rank].items():
            assert result == bare[rank][name][0], f"{name} on rank {rank}"


def test_everything_built_on_the_operators_is_recorded(compiled):
    answers, _ = compiled
    at_least = {
        "ddp": 3 * 4, "fsdp2": 8, "functional": 1, "functional with gradient": 2, "compile": 1,
        "async": 1, "many in flight": 40, "objects": 2, "batch_isend_irecv": 2, "dropped": 2,
        "inference mode": 1, "coalescing manager": 1, "subgroup": 1, "threads": 600,
    }  # fmt: skip
    for name, count in at_least.items():
        for rank in range(2):
            _, first, last = answers[rank][name]
            assert last - first >= count, f"{name} on rank {rank}"


def bound_waits(answers, spans):
    """Return by number how long each span may be waited for.

    A call is made between two barriers. What it has begun is waited for before the second one
    begins, and no wait is begun before the first one.
    """
    begins = {one.number: one.span.start_s for one in spans}
    lasts = [last for _, _, last in answers.values() if {last - 1, last + 1} <= set(begins)]
    barriers = {last: begins[last + 1] - begins[last - 1] for last in lasts}
    return barriers | {
        number: begins[last] - begins[first - 1]
        for _, first, last in answers.values()
        if first - 1 in begins and last in begins
        for number in range(first, last)
    }


def test_ends_waits_and_ranks_are_known(compiled):
    answers, rings = compiled
    states = Counter()
    for rank, ring in enumerate(rings):
        reading = read_ring(ring, 0.0)
        assert reading.recorder == "compiled"
        for comm in reading.comms:
            assert comm.started_seq == comm.ended_seq, comm
            assert comm.ranks == (0, 1), comm
        spans = read_spans(ring, 0.0)
        waits_s = bound_waits(answers[rank], spans)
        assert len(waits_s) > 700
        for one in spans:
            states[one.state] += 1
            if one.state == layout.ENDED:
                assert one.span.end_s >= one.span.start_s
                assert one.span.wait_s <= waits_s.get(one.number, math.inf), one
            if one.span.op in ("send", "recv"):
                assert one.span.peer in (0, 1)
    assert states[layout.UNDER_WAY] == 0
    assert states[layout.UNSEEN] <= 2, "only the dropped reduce_scatter of each rank"
    assert states[layout.FAILED] <= 2, "only the one of a wrong size"


def test_the_time_outs_of_the_groups_are_told(compiled):
    """T5: silence is not acted upon before torch itself would give up."""
    for ring in compiled[1]:
        known = {comm.name: comm.timeout_s for comm in read_ring(ring, 0.0).comms}
        assert set(known.values()) >= {1800.0, 33.0}, known
        assert 0.0 not in known.values(), known


def test_the_status_recorder_tells_them_as_well(alone):
    reading = read_ring(alone["timeout", "status"].ring, 0.0)
    assert reading.recorder == "status"
    assert [comm.timeout_s for comm in reading.comms] == [77.0]


def test_ranks_agree_on_each_collective(compiled):
    _, rings = compiled
    seen = []
    for ring in rings:
        names = [comm.name for comm in read_ring(ring, 0.0).comms]
        seen.append(
            {
                (names[one.span.comm], one.span.seq): (one.span.op, one.span.bytes, one.dtype)
                for one in read_spans(ring, 0.0)
                if not names[one.span.comm].endswith(layout.P2P_SUFFIX)
            }
        )
    assert len(seen[0]) > 700
    assert seen[0] == seen[1]


def test_stages_are_recorded_and_add_up(compiled):
    _, rings = compiled
    for ring in rings:
        stages = read_stages(ring, 0.0)
        assert [one.step for one in stages] == [2, 3]
        for one in stages:
            parts = (one.data_s, one.forward_s, one.backward_s, one.optimizer_s)
            assert min(parts) >= 0
            total = sum(parts) + one.wait_s + one.other_s
            assert total == pytest.approx(one.end_s - one.begin_s, abs=1e-6)
            assert one.wait_s > 0
            assert one.backward_s > 0


LONER = """
import os, sys, threading, time
import torch, torch.distributed as dist
from perdure.worker.attach import attach_rank
attachment = attach_rank()
from torch.testing._internal.distributed.fake_pg import FakeStore
# gloo's threads do not survive a fork, so a forked child could do nothing with it.
backend = "fake" if sys.argv[1] == "fork" else "gloo"
store = FakeStore() if sys.argv[1] == "fork" else dist.HashStore()
dist.init_process_group(backend, store=store, rank=0, world_size=1)
t = torch.ones(4)
if sys.argv[1] == "fork":
    dist.all_reduce(t)
    while attachment.ring.list_unnamed_communicators():
        time.sleep(0.01)
    before = open(os.environ["PERDURE_RING"], "rb").read()
    pid = os.fork()
    if pid == 0:
        dist.all_reduce(t)
        dist.barrier()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert open(os.environ["PERDURE_RING"], "rb").read() == before
    dist.all_reduce(t)
elif sys.argv[1] == "again":
    for _ in range(3):
        dist.all_reduce(t)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(t)
elif sys.argv[1] == "exit":
    def leave():
        attachment.recorder.library.set_before(None)
        raise SystemExit(5)
    attachment.recorder.library.set_before(leave)
    try:
        dist.all_reduce(t)
        while True:
            time.sleep(0.01)
    finally:
        # gloo's thread drops the tensor, and with it a Python object: a process that has
        # begun to finalize by then ends in std::terminate, without perdure too.
        time.sleep(0.5)
        dist.destroy_process_group()
else:
    print("ready", flush=True)
    while True:
        dist.all_reduce(t)
"""


ON_DEVICE = """
import sys
import torch, torch.distributed as dist
from perdure.worker.attach import attach_rank
attach_rank()
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
weight = torch.nn.Parameter(torch.ones(4, device=sys.argv[1]))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(4):
    (2 * weight).sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
"""
TIMEOUT = """
import datetime, torch, torch.distributed as dist
from perdure.worker.attach import attach_rank
attachment = attach_rank()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1,
    timeout=datetime.timedelta(seconds=77))
dist.all_reduce(torch.ones(2))
attachment.stop()
"""
SCRIPTS = {
    ("timeout", "status"): (TIMEOUT, "status"),
    **{(what, "compiled"): (LONER, "compiled") for what in ("fork", "again", "exit")},
    **{(device, "compiled"): (ON_DEVICE, "compiled") for device in ("cpu", "meta")},
}
"""First argument of a script, and the recorder -> the script, and the recorder."""


@dataclass
class Alone:
    """What a rank that was alone has left."""

    ring: str
    code: int


@dataclass
class Forked:
    """What each of two ranks printed, with the recorder and without, their rings, and loners."""

    compiled: list[dict[str, list]]
    bare: list[dict[str, list]]
    rings: list[str]
    alone: dict[tuple[str, str], Alone]


@pytest.fixture(scope="module")
def forked(library, tmp_path_factory):
    """Run two ranks with the recorder and without, and each script that ends by itself."""
    script, runs, rings, alone = SCRIPT.read_text(), [], [], []
    folder = tmp_path_factory.mktemp("pairs")
    for mode in ("compiled", "off"):
        runs.append([])
        for rank in range(2):
            env = {"RANK": str(rank), "PERDURE_RECORDER": mode}
            if mode != "off":
                rings.append(make_ring(folder, rank))
                env["PERDURE_RING"] = rings[-1]
            runs[-1].append((script, f"{folder}/store-{mode}", env, f"{folder}/{mode}-{rank}"))
    for number, ((word, _), (code, recorder)) in enumerate(SCRIPTS.items()):
        alone.append(make_ring(tmp_path_factory.mktemp(f"alone-{number}")))
        env = {"RANK": "0", "PERDURE_RING": alone[-1], "PERDURE_RECORDER": recorder}
        runs.append([(code, word, env, "/dev/null")])
    codes = run_forked(runs, folder)
    assert codes[:4] == [0] * 4
    compiled, bare = [
        [json.loads(Path(output).read_text().splitlines()[-1]) for _, _, _, output in ranks]
        for ranks in runs[:2]
    ]
    ends = zip(SCRIPTS, alone, codes[4:], strict=True)
    return Forked(compiled, bare, rings, {name: Alone(ring, code) for name, ring, code in ends})


@pytest.fixture(scope="module")
def alone(forked):
    return forked.alone


def test_a_forked_child_does_not_write(alone):
    rank = alone["fork", "compiled"]
    assert rank.code == 0
    assert [one.span.seq for one in read_spans(rank.ring, 0.0)] == [1, 2]


@pytest.mark.parametrize(
    ("device", "stamps", "steps"), [("cpu", "host", 3), ("meta", "enqueued", 0)]
)
def test_of_a_device_the_hosts_stamps_are_those_of_enqueuing(alone, device, stamps, steps):
    """Tensors without data stand for those of a GPU: neither is the CPU's."""
    rank = alone[device, "compiled"]
    assert rank.code == 0
    (comm,) = read_ring(rank.ring, 0.0).comms
    assert (comm.started_seq, comm.stamps) == (4, stamps)
    assert len(read_stages(rank.ring, 0.0)) == steps


def test_groups_made_anew_count_anew(alone):
    rank = alone["again", "compiled"]
    assert rank.code == 0
    assert [one.span.seq for one in read_spans(rank.ring, 0.0)] == [1, 2, 3, 1]
    (comm,) = read_ring(rank.ring, 0.0).comms
    assert (comm.started_seq, comm.ended_seq, comm.ranks) == (1, 1, (0,))


def test_an_injected_exit_reaches_the_script(alone):
    assert alone["exit", "compiled"].code == 5


def test_a_ring_stays_readable_whatever_becomes_of_its_rank(library, tmp_path):
    ring = make_ring(tmp_path)
    env = os.environ | {"RANK": "0", "PERDURE_RING": ring, "PERDURE_RECORDER": "compiled"}
    command = [sys.executable, "-W", "ignore", "-c", LONER, "loop"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    seen = 0
    try:
        assert process.stdout.readline() == b"ready\n"
        for number in (signal.SIGSTOP, signal.SIGKILL):
            process.send_signal(signal.SIGCONT)
            least = seen + 5000
            wait_until(lambda least=least: read_ring(ring, 0.0).num_spans >= least, "spans")
            process.send_signal(number)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            spans = read_spans(ring, 0.0)
            assert len(spans) >= layout.SPANS_MAX - 1
            numbers = [one.number for one in spans]
            assert numbers == sorted(numbers)
            seqs = [one.span.seq for one in spans]
            assert seqs == sorted(set(seqs))
            assert read_ring(ring, 0.0).comms[0].started_seq - seqs[-1] in (0, 1)
            seen = read_ring(ring, 0.0).num_spans
    finally:
        process.kill()
        process.communicate()
