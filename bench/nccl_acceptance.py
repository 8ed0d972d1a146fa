"""What perdure claims of NCCL, tried on real GPUs: two or more of them, under ten minutes.

    python bench/nccl_acceptance.py              everything that this machine allows
    python bench/nccl_acceptance.py --dry-run    the same by gloo: proves the harness, not NCCL

Without a GPU only the plugin's cost per event is measured, by a driver that calls it as NCCL
does. Each check prints `ok`, `WRONG` or `skipped` with its figures; the exit code is 1 after a
WRONG. Steps: a plain run with and without the plugin, interleaved; the same over NCCL's socket
transport, where every transfer goes through the proxy; a rank stopped in the middle, its peers'
files read and their communicators aborted by the control thread.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sweep import sweep_after_me
from tests.nccl_files import describe_open, read_nccl

from perdure.model.orders import InterruptCollectives
from perdure.worker.interrupt import Interrupter
from perdure.worker.native.build import build_nccl_plugin
from perdure.worker.ring import RingWriter

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 90.0
STEPS = 200
BYTES = 64 << 20
OVER_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def rank_main(backend: str, steps: int) -> None:
    """One rank: all-reduce, then send and receive; says the median step, or what it raised."""
    import threading

    import torch
    import torch.distributed as dist

    rank, flag = int(os.environ["RANK"]), Path(os.environ["ACCEPTANCE_FLAG"])
    interrupter = Interrupter(rank=rank, generation=0, emit=lambda _: None, now=time.monotonic)

    def watch() -> None:
        while not flag.exists():
            time.sleep(0.001)
        interrupter.handle(InterruptCollectives(generation=0, ranks=(rank,), reason="acceptance"))

    threading.Thread(target=watch, daemon=True).start()
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    sync = torch.cuda.synchronize if backend == "nccl" else lambda: None
    dist.init_process_group(backend)
    tensor = torch.ones(BYTES // 4 if backend == "nccl" else 1000, device=device)
    took: list[float] = []
    try:
        for step in range(steps):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if step == 0 and rank < 2:
                (dist.send if rank == 0 else dist.recv)(tensor[:1000], 1 - rank)
            sync()
            took.append(time.perf_counter() - began)
            if step == 20:
                print(json.dumps({"running": rank}), flush=True)
    except Exception as error:
        raised = {"raised_s": time.monotonic(), "type": type(error).__name__}
        print(json.dumps(raised | {"text": str(error)[:200]}), flush=True)
    print(json.dumps({"median_s": statistics.median(took[10:] or took)}), flush=True)
    os._exit(0)


class World:
    """The ranks of one run, each with a ring and, if asked for, the plugin."""

    def __init__(self, backend: str, size: int, plugin: str, steps: int, **env: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.flag = Path(self.folder.name, "interrupt")
        self.rings = [str(Path(self.folder.name, f"g0-r{rank}.ring")) for rank in range(size)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.processes = []
        for rank, ring in enumerate(self.rings):
            RingWriter.create(ring, rank=rank, generation=0).close()
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PERDURE_RING": ring}
            world |= {"ACCEPTANCE_FLAG": str(self.flag), "OMP_NUM_THREADS": "1"}
            world |= {"NCCL_PROFILER_PLUGIN": plugin or "none"} | env
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--rank", backend, "--steps", str(steps)],
                    env=os.environ | world,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def wait(self) -> list[list[dict[str, Any]]]:
        """Return what each rank said until its end."""
        try:
            texts = [process.communicate(timeout=WAIT_S)[0] for process in self.processes]
        finally:
            self.kill()
        return [[json.loads(line) for line in text.splitlines()] for text in texts]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def read(self, rank: int) -> Any:
        return read_nccl(self.rings[rank], 0.0)


class Checks:
    """Prints each as it is known."""

    def __init__(self) -> None:
        self.wrong = 0

    def say(self, holds: bool | None, what: str) -> None:
        word = "skipped" if holds is None else "ok" if holds else "WRONG"
        self.wrong += holds is False
        print(f"{word:8}{what}", flush=True)


DRIVER = """
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
#include "abi.h"
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
int main(int argc, char **argv) {
  struct profiler_v5 *p = dlsym(dlopen(argv[argc - 1], RTLD_NOW), "ncclProfiler_v6");
  struct event_v4 coll = {.type = EV_COLL}, op = {.type = EV_PROXY_OP};
  struct event_v4 step = {.type = EV_PROXY_STEP};
  union state_v4 args = {.proxy_step = {64}};
  void *context, *h[3];
  int mask, n = 200000;
  p->init(&context, 1, &mask, "c", 1, 2, 0, NULL);
  op.proxy_op = (struct proxy_op){getpid(), 0, 1, 4, 64, 1};
  p->start(context, &h[0], &coll);
  op.parent = h[0];
  p->start(context, &h[1], &op);
  step.parent = h[1];
  double begin = now();
  for (int i = 0; i < n; i++) { /* one transfer of five events */
    p->start(context, &h[2], &step);
    p->record(h[2], ST_STEP_SEND_GPU, &args);
    p->record(h[2], ST_STEP_SEND_PEER, &args);
    p->record(h[2], ST_STEP_SEND_NET, &args);
    p->stop(h[2]);
  }
  printf("%d %.1f", h[2] != NULL, (now() - begin) / n * 1e9);
}
"""


def measure_event(plugin: str, checks: Checks) -> None:
    """What one transfer costs NCCL's proxy thread: its begin, three waits and its end."""
    with tempfile.TemporaryDirectory() as folder:
        source, ring = Path(folder, "driver.c"), Path(folder, "r.ring")
        source.write_text(DRIVER)
        RingWriter.create(str(ring), rank=0, generation=0).close()
        headers = ROOT / "src" / "perdure" / "worker" / "native" / "nccl"
        command = ["cc", "-O2", f"-I{headers}", "-o", f"{folder}/driver", str(source), "-ldl"]
        subprocess.run(command, check=True)
        env = os.environ | {"PERDURE_RING": str(ring)}
        costs = []
        for _ in range(5):
            Path(f"{ring}.nccl").unlink(missing_ok=True)
            out = subprocess.run(
                [f"{folder}/driver", plugin], env=env, capture_output=True, text=True, check=True
            ).stdout.split()
            assert out[0] == "1"
            costs.append(float(out[1]))
    each = statistics.median(costs)
    checks.say(
        each < 2000,
        f"a transfer of five events costs {each:.0f} ns "
        f"({min(costs):.0f} to {max(costs):.0f} in five runs)",
    )


def try_plain(backend: str, size: int, plugin: str, checks: Checks) -> None:
    """Records of a plain run, and its pace with and without the plugin, three times each."""
    paces: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(3):
        for how in ("without", "with"):
            world = World(backend, size, plugin if how == "with" else "", STEPS)
            said = world.wait()
            paces[how].append(max(lines[-1]["median_s"] for lines in said))
    reading = world.read(0)
    pace = {how: statistics.median(values) for how, values in paces.items()}
    spread = max(paces["without"]) / min(paces["without"]) - 1
    change = pace["with"] / pace["without"] - 1
    checks.say(
        change <= max(0.01, spread) if backend == "nccl" else None,
        f"step {pace['without'] * 1e3:.3f} ms without the plugin, {change:+.1%} with it "
        f"(spread without: {spread:.1%})",
    )
    if reading is None:
        checks.say(backend != "nccl" and None, "the file of rank 0: NCCL wrote none")
        return
    reduces = [op for op in reading.ops if op.op == "AllReduce"]
    checks.say(len(reduces) >= STEPS, f"interface v{reading.api}: {len(reduces)} all-reduces")
    checks.say(all(op.bytes == BYTES for op in reduces), f"of {reduces[-1].bytes} bytes each")
    checks.say(bool(reduces[-1].algo), f"by {reduces[-1].algo}, {reduces[-1].proto}")
    checks.say(all(op.ended for op in reduces), "each of which ended")
    checks.say(any(op.kind == "p2p" for op in reading.ops), "send or receive with its peer")
    gpu = [op.gpu_stop_ns - op.gpu_start_ns for op in reduces if op.gpu_stop_ns]
    checks.say(bool(gpu), f"GPU time of one: {statistics.median(gpu or [0]) / 1e6:.3f} ms")


def try_sockets(backend: str, size: int, plugin: str, checks: Checks) -> None:
    """Transfers by the proxy: peers, bytes, waits."""
    world = World(backend, size, plugin, STEPS, **OVER_SOCKETS)
    world.wait()
    reading = world.read(0)
    if reading is None:
        checks.say(backend != "nccl" and None, "socket transport: NCCL wrote no file")
        return
    for link in reading.links:
        waits = ", ".join(f"{s:.2f}" for s in link.waits_s)
        way = "to" if link.is_send else "from"
        print(f"        {way} rank {link.peer}: {link.steps} steps, {link.bytes} B, waits {waits}")
    sent = sum(link.bytes for link in reading.links if link.is_send)
    least = STEPS * BYTES  # A ring sends 2 (n - 1) / n of it, a tree at least as much.
    checks.say(sent >= least, f"socket transport: {sent / 1e9:.1f} GB sent through the proxy")
    checks.say(any(net.plugin == 2 for net in reading.nets), "events of NCCL's socket plugin")


def try_stopped(backend: str, size: int, plugin: str, checks: Checks) -> None:
    """A stopped rank: what its peers' files say, and how fast they are set free."""
    world = World(backend, size, plugin, 10**9)
    try:
        for process in world.processes:
            assert process.stdout is not None
            process.stdout.readline()
        victim = world.processes[-1]
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(1.0)
        reading = world.read(0)
        lines = describe_open(reading, time.monotonic()) if reading is not None else []
        print("".join(f"        {line}\n" for line in lines[:8]), end="")
        checks.say(bool(lines) or (None if backend != "nccl" else False), "the hang is in the file")
        began = time.monotonic()
        world.flag.touch()
        for process in world.processes[:-1]:
            text = process.communicate(timeout=WAIT_S)[0]
            said = [json.loads(line) for line in text.splitlines()]
            raised = next((words for words in said if "raised_s" in words), None)
            if raised is None:
                checks.say(False, f"a peer ended with {process.returncode} and raised nothing")
            else:
                took = (raised["raised_s"] - began) * 1e3
                checks.say(took < 1000, f"a peer raised {raised['type']} after {took:.1f} ms")
    except subprocess.TimeoutExpired:
        checks.say(False, f"peers were not set free within {WAIT_S:.0f} s")
    finally:
        world.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="by gloo, with two ranks")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rank, args.steps)
    checks, plugin = Checks(), build_nccl_plugin()
    measure_event(plugin, checks)
    size = 2 if args.dry_run else count_gpus()
    if size < 2:
        checks.say(None, f"everything else: {size} GPUs here, two or more are needed")
        return int(checks.wrong > 0)
    backend = "gloo" if args.dry_run else "nccl"
    for attempt in (try_plain, try_sockets, try_stopped):
        attempt(backend, size, plugin, checks)
    return int(checks.wrong > 0)


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sweep_after_me()
    sys.exit(main())
