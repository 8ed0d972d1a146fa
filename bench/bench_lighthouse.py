"""CPU of a lighthouse a step: perdure's, the same behind grpc's threads, and torchft's own.

    python bench/bench_lighthouse.py [--groups 4] [--steps 300] [--rounds 2]

As in a torchft job each group asks for a quorum a step and says every so often that it lives: ten
calls a step of four groups. The lighthouse is a process of its own, whose CPU time is read before
and after; it depends little on what else runs. Prints a line of JSON for each round.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
from stamp import stamp
from sweep import sweep_after_me

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.lighthouse import encode_request, make_member

from perdure.model.bus.lighthouse import SERVICE
from perdure.model.job import JobSpec, TorchftConfig
from perdure.service.lighthouse.loop import LighthouseService

SYSTEMS = ("perdure", "threads", "torchft")
WARM_STEPS, PAUSE_S = 20, 0.02


class ThreadedServer:
    """Stands in for `adapters.lighthouse.LighthouseServer`: grpc's own threads before the loop."""

    def __init__(self, service: LighthouseService) -> None:
        self._service, self._loop = service, asyncio.get_running_loop()
        handlers = {
            "Quorum": grpc.unary_unary_rpc_method_handler(self._ask),
            "Heartbeat": grpc.unary_unary_rpc_method_handler(self._hear),
        }
        self.server = grpc.server(ThreadPoolExecutor(64))
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self.server.add_generic_rpc_handlers((generic,))

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port."""
        bound = self.server.add_insecure_port(f"{host}:{port}")
        self.server.start()
        return int(bound)

    async def close(self) -> None:
        """Hang up."""
        self.server.stop(0)

    def _ask(self, request: bytes, context: Any) -> bytes:
        asked: Future[bytes] = asyncio.run_coroutine_threadsafe(
            self._service._take_request(request), self._loop
        )
        return asked.result()

    def _hear(self, request: bytes, context: Any) -> bytes:
        self._loop.call_soon_threadsafe(self._service._take_heartbeat, request)
        return b""


async def serve(system: str, groups: int, folder: Path) -> None:
    """Be perdure's lighthouse, without a bus; print the port."""
    spec = JobSpec(name="bench", script="x.py", torchft=TorchftConfig(replicas=groups))
    service = LighthouseService(
        spec, str(folder / "lighthouse.json"), clock=time.monotonic, incarnation="l1"
    )
    if system == "threads":
        service._server = ThreadedServer(service)  # type: ignore[assignment]
    print(await service.start(), flush=True)
    await service.run()


def measure(system: str, groups: int, steps: int) -> dict[str, Any]:
    """Return what a step has cost one lighthouse."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if system == "torchft":
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            program = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))
            bind = ["--bind", f"127.0.0.1:{port}", "--min_replicas", str(groups)]
            words = [str(program), *bind, "--join_timeout_ms", "100"]
        else:
            words = [sys.executable, __file__, "--serve", system, folder, "--groups", str(groups)]
        process = stack.enter_context(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
        stack.callback(process.kill)
        if system != "torchft":
            assert process.stdout is not None
            port = int(process.stdout.readline())
        return train(port, psutil.Process(process.pid), groups, steps) | {"system": system}


def train(port: int, lighthouse: psutil.Process, groups: int, steps: int) -> dict[str, Any]:
    """Be the managers of all groups; return the CPU time of a step and how long a quorum took."""
    turn = threading.Barrier(groups + 1, timeout=120)
    waits: list[float] = []

    def be_manager(number: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_unary(f"/{SERVICE}/Quorum")
            hear = channel.unary_unary(f"/{SERVICE}/Heartbeat")
            name = f"g{number}"
            beat = b"\n" + bytes([len(name)]) + name.encode()
            for step in range(WARM_STEPS + steps):
                if step == WARM_STEPS:
                    turn.wait()
                    turn.wait()
                member = make_member(name, f"127.0.0.1:{9000 + number}", step)
                began = time.perf_counter()
                ask(encode_request(member), timeout=60, wait_for_ready=True)
                if step >= WARM_STEPS:
                    waits.append(time.perf_counter() - began)
                for _ in range(1 + step % 2):
                    hear(beat, timeout=10)
                time.sleep(PAUSE_S)
            turn.wait()

    threads = [threading.Thread(target=be_manager, args=(number,)) for number in range(groups)]
    for thread in threads:
        thread.start()
    turn.wait()
    before = lighthouse.cpu_times()
    turn.wait()
    turn.wait()
    after = lighthouse.cpu_times()
    for thread in threads:
        thread.join()
    spent_s = after.user + after.system - before.user - before.system
    waits.sort()
    return {
        "cpu_ms_a_step": round(1e3 * spent_s / steps, 2),
        "quorum_ms": round(1e3 * waits[len(waits) // 2], 2),
    }


def main() -> int:
    """Measure all systems in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--serve", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve[0], args.groups, Path(args.serve[1])))
        return 0
    sweep_after_me()
    for _ in range(args.rounds):
        for system in SYSTEMS:
            row = measure(system, args.groups, args.steps)
            print(json.dumps(row | {"groups": args.groups} | stamp()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
