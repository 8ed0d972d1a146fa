"""One of two gloo ranks that drives every operator of c10d, and what scripts build on them.

Prints one JSON object: for each name what it returned or raised, and for each the spans that it
began. `tests/contract/test_recorder.py` starts it with the recorder and without.
"""

import json
import os
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from perdure.model import ring as layout
from perdure.worker.attach import attach_rank

warnings.simplefilter("ignore")
attachment = attach_rank()
RANK = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=RANK, world_size=2)
GROUP = dist.group.WORLD
SUBGROUP = dist.new_group([0, 1], timeout=timedelta(seconds=33))
N = 6


def ones(count=N):
    return torch.full((count,), float(RANK + 1))


def outs(count=2):
    return [torch.zeros(N) for _ in range(count)]


def gather():
    out = outs() if RANK == 0 else None
    dist.gather(ones(), out, dst=0)
    return out


def scatter():
    out = torch.zeros(N)
    dist.scatter(out, [ones(), ones() * 2] if RANK == 0 else None, src=0)
    return out


def point_to_point(receive):
    if RANK == 0:
        GROUP.send([ones()], 1, 7).wait()
        return None
    out = torch.zeros(N)
    work = receive(out)
    work.wait()
    return [out, work._source_rank() if receive is receive_any else 0]


def receive_one(out):
    return GROUP.recv([out], 0, 7)


def receive_any(out):
    return GROUP.recv_anysource([out], 7)


def coalesced(name, *args):
    getattr(GROUP, name)(*args).wait()
    return args[0]


def into(call, out, *args):
    call(out, *args)
    return out


OPERATORS = {
    "allreduce_": lambda t: into(dist.all_reduce, t),
    "allreduce_coalesced_": lambda t: coalesced("allreduce_coalesced", [t, ones(3)]),
    "allgather_": lambda t: into(dist.all_gather, outs(), t),
    "_allgather_base_": lambda t: into(dist.all_gather_into_tensor, torch.zeros(2 * N), t),
    "allgather_coalesced_": lambda t: coalesced("allgather_coalesced", [outs(1), outs(1)], [t]),
    "allgather_into_tensor_coalesced_": lambda t: coalesced(
        "allgather_into_tensor_coalesced", [torch.zeros(2 * N)], [t]
    ),
    "broadcast_": lambda t: into(dist.broadcast, t, 0),
    "reduce_": lambda t: into(dist.reduce, t, 0) if RANK == 0 else dist.reduce(t, 0),
    "gather_": lambda t: gather(),
    "scatter_": lambda t: scatter(),
    "reduce_scatter_": lambda t: into(dist.reduce_scatter, torch.zeros(N), [t, t * 2]),
    "_reduce_scatter_base_": lambda t: into(dist.reduce_scatter_tensor, torch.zeros(N // 2), t),
    "reduce_scatter_tensor_coalesced_": lambda t: coalesced(
        "reduce_scatter_tensor_coalesced", [torch.zeros(N // 2)], [t]
    ),
    "alltoall_": lambda t: into(dist.all_to_all, outs(), [t, t * 2]),
    "alltoall_base_": lambda t: into(dist.all_to_all_single, torch.zeros(N), t),
    "barrier": lambda t: dist.barrier(),
    "monitored_barrier_": lambda t: dist.monitored_barrier(),
    "send": lambda t: point_to_point(receive_one),
    "recv_": lambda t: point_to_point(receive_one),
    "recv_any_source_": lambda t: point_to_point(receive_any),
}


def train_ddp():
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 64), 0.1 * (RANK + 1))).square().mean().backward()
        optimizer.step()
    return sum(p.sum() for p in model.parameters())


def train_fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    loss = model(torch.full((2, 8), 1.0 * (RANK + 1))).square().mean()
    loss.backward()
    return sum(p.grad.full_tensor().sum() for p in model.parameters())


def functional_with_gradient():
    x = ones().requires_grad_()
    y = funcol.all_gather_tensor_autograd(x, 0, GROUP) * (RANK + 1)
    y.sum().backward()
    return [y, x.grad]


def compiled():
    def work(x):
        return funcol.all_reduce(x * 2, "sum", GROUP) + 1

    return torch.compile(work, backend="aot_eager")(ones())


def async_work():
    tensor = ones()
    work = dist.all_reduce(tensor, async_op=True)
    waited = work.wait()
    future = work.get_future()
    twice = future.then(lambda f: f.value()[0] * 2).wait()
    return [
        waited, work.is_completed(), work.is_success(), work.result(), future.value(), twice,
        work.exception() is None, type(work).__name__, isinstance(work, dist.Work),
        work._get_op_type().name, work.wait(),
    ]  # fmt: skip


def many_in_flight():
    tensors = [ones() + n for n in range(40)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


def objects():
    found = [None, None]
    dist.all_gather_object(found, {"rank": RANK})
    return found


def batch():
    out = torch.zeros(N)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, ones(), 1 - RANK), dist.P2POp(dist.irecv, out, 1 - RANK)]
    )
    for work in works:
        work.wait()
    return out


def dropped_work():
    GROUP._reduce_scatter_base(torch.zeros(N // 2), ones())  # type: ignore[call-arg]
    dist.barrier()


def wrong_size():
    return into(dist.all_gather_into_tensor, torch.zeros(3), ones())


def inference():
    with torch.inference_mode():
        return into(dist.all_reduce, torch.ones(N))


def managed():
    a, b = ones(), ones(3)
    with dist._coalescing_manager(group=GROUP, async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    return [a, b]


def in_threads():
    """One communicator to a thread, at the same time."""
    import threading

    groups = [dist.new_group([0, 1]) for _ in range(3)]
    results = [None] * 3

    def work(n):
        t = ones()
        for _ in range(200):
            dist.all_reduce(t, group=groups[n])
            t.div_(2)
        results[n] = t

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


USES = {
    "ddp": train_ddp,
    "fsdp2": train_fsdp2,
    "functional": lambda: funcol.all_reduce(ones(), "sum", GROUP) + 0,
    "functional with gradient": functional_with_gradient,
    "compile": compiled,
    "async": async_work,
    "many in flight": many_in_flight,
    "objects": objects,
    "batch_isend_irecv": batch,
    "dropped": dropped_work,
    "wrong size": wrong_size,
    "inference mode": inference,
    "coalescing manager": managed,
    "subgroup": lambda: into(lambda t: dist.all_reduce(t, group=SUBGROUP), ones()),
    "threads": in_threads,
}


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def num_spans():
    return attachment.ring._words[layout.W_NUM_SPANS] if attachment is not None else 0


def main():
    answer = {}
    calls = {name: lambda call=call: call(ones()) for name, call in OPERATORS.items()} | USES
    for name, call in calls.items():
        before = num_spans()
        try:
            result = plain(call())
        except Exception as error:
            result = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        answer[name] = [result, before, num_spans()]
        dist.barrier()
    while attachment is not None and attachment.ring.list_unnamed_communicators():
        time.sleep(0.01)  # A thread names them.
    dist.destroy_process_group()
    print(json.dumps(answer))


main()
