"""One rank of `bench_recorder.py`: blocks with a recorder and blocks without, in one process.

A recorder is a kernel on dispatch key `BackendSelect`; leaving that key out in this thread is as
if it were not registered. A step needs that key for other things, so there the compiled recorder
lets go of its ring instead (its kernel then only passes on). A wrapped process group is compared
with the one it wraps. Rank 0 prints the seconds of every block as JSON.
"""

import contextlib
import datetime
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure.worker.native.recorder import load_library

warnings.simplefilter("ignore")
MODE, STORE, ROUNDS = sys.argv[1], sys.argv[2], int(sys.argv[3])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CALLS, STEPS = 50, 10
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
torch.set_num_threads(1)


def make_group() -> tuple[object, object]:
    """Return a group of all ranks as it is, and the one that is watched."""
    whole = dist.group.WORLD
    assert whole is not None
    if MODE == "torchft":
        from torchft.process_group import ProcessGroupGloo

        port = [0]
        if RANK == 0:
            server = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=30)
            )
            port[0] = server.port
        dist.broadcast_object_list(port, src=0)
        group = ProcessGroupGloo(timeout=datetime.timedelta(seconds=60))
        group.configure(f"127.0.0.1:{port[0]}/bench", "replica", RANK, WORLD)
        if RANK == 0:
            group.keep = server  # type: ignore[attr-defined]
        return group.parent, group
    return whole, whole


Guard = Callable[[], contextlib.AbstractContextManager[object]]


def leave_key_out() -> contextlib.AbstractContextManager[object]:
    """Leave the recorder's kernel out, where there is one."""
    if MODE == "compiled":
        return torch._C._ExcludeDispatchKeyGuard(KEYS)  # type: ignore[no-any-return]
    return contextlib.nullcontext()


@contextlib.contextmanager
def let_go() -> Iterator[None]:
    """Have the compiled recorder record nothing."""
    library = load_library() if MODE == "compiled" else None
    if library is not None:
        library.detach()
    yield
    if library is not None:
        library.attach(os.environ["PERDURE_RING"])


def make_calls(group: object) -> Callable[[], None]:
    """Return a block of all-reduces of one number, each waited for."""
    number, options = torch.ones(1), dist.AllreduceOptions()

    def run() -> None:
        for _ in range(CALLS):
            group.allreduce([number], options).wait()  # type: ignore[attr-defined]

    return run


def make_steps(group: object) -> Callable[[], None]:
    """Return a block of steps of a small DDP model with a dozen buckets."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
    model = DistributedDataParallel(net, bucket_cap_mb=0.25, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 256)

    def run() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    for _ in range(3):
        run()
    return run


def take(block: Callable[[], None]) -> float:
    """Return the seconds of a block."""
    begun = time.perf_counter()
    block()
    return time.perf_counter() - begun


def compare(
    plain: Callable[[], None], watched: Callable[[], None], guard: Guard
) -> list[list[float]]:
    """Return blocks without, with, and without again, in turn."""
    rows = []
    for number in range(ROUNDS + 3):
        with guard():
            before = take(plain)
        during = take(watched)
        with guard():
            after = take(plain)
        if number >= 3:
            rows.append([before, during, after])
    return rows


def count_spans() -> int:
    """Return how many collectives perdure's recorder has seen."""
    from perdure.adapters.rings import read_ring

    reading = read_ring(os.environ.get("PERDURE_RING", ""), 0.0)
    return reading.num_spans if reading is not None else 0


def main() -> None:
    """Measure calls, and steps where DDP takes such a group."""
    if MODE == "compiled":
        from perdure.worker.attach import attach_rank

        attach_rank()
    dist.init_process_group("gloo", init_method=f"file://{STORE}", rank=RANK, world_size=WORLD)
    plain, watched = make_group()
    result: dict[str, object] = {
        "calls": compare(make_calls(plain), make_calls(watched), leave_key_out)
    }
    if watched is plain and MODE != "detail":  # DDP under DETAIL dies of SIGSEGV in torch 2.13.
        steps = make_steps(plain)
        result["steps"] = compare(steps, steps if watched is plain else make_steps(watched), let_go)
    result["spans"] = count_spans()
    if RANK == 0:
        print(json.dumps(result))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


main()
