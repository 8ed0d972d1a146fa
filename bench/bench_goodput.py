"""What is left of training under failures: perdure beside torchft and torchrun, in one run.

    python bench/bench_goodput.py [--window-s 90] [--every 0,15,60] [--only elastic,torchrun]

Four slots train the same model with the same global batch of 12 micro-batches of 10 ms (virtual
devices: real tensors and collectives, a declared compute time). From full strength on, a slot is
killed with SIGKILL every so many seconds, the same slots at the same instants for every system; 0
is no failure. Counted are micro-batches of steps that stayed committed, in the window; the ratio
is to perdure's elastic depth without a failure. *Again* are steps made more than once; *short* are
steps whose global batch was smaller than it should be. Prints JSON lines, then a table.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweep import sweep_after_me

SCRIPT = Path(__file__).resolve().parent / "scripts" / "goodput_train.py"
BIN = Path(sys.executable).parent
SLOTS, COUNT = 4, 12
Command = tuple[list[str], dict[str, str]]


def perdure(folder: Path, mode: str, *options: str) -> list[Command]:
    """One job under perdure; failures are many here, and meant."""
    job = folder / "job.toml"
    job.write_text("[restart]\nwindow_max = 100000\n")
    words = [sys.executable, "-m", "perdure", "run", "-c", str(job), "--name", "goodput", *options]
    return [([*words, str(SCRIPT), mode, str(folder)], {})]


def torchft(folder: Path, *options: str) -> list[Command]:
    """torchft's own lighthouse, and each group under a torchrun; 0.2.0's fault is mended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bind = ["--bind", f"127.0.0.1:{port}", "--min_replicas", "1"]
    commands: list[Command] = [([str(BIN / "torchft_lighthouse"), *bind, *options], {})]
    run = [str(BIN / "torchrun"), "--standalone", "--max-restarts=100000", "--nproc-per-node=1"]
    for group in range(SLOTS):
        env = {"REPLICA_GROUP_ID": str(group), "NUM_REPLICA_GROUPS": str(SLOTS)}
        env |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "MEND_HOOK": "1"}
        commands.append(([*run, str(SCRIPT), "torchft", str(folder)], env))
    return commands


def torchrun(folder: Path) -> list[Command]:
    """DistributedDataParallel with a checkpoint every 50 steps."""
    run = [str(BIN / "torchrun"), "--standalone", "--max-restarts=100000", "--nproc-per-node=4"]
    return [([*run, str(SCRIPT), "ddp", str(folder)], {})]


TUNED = ("--heartbeat_timeout_ms", "500", "--quorum_tick_ms", "10")
SYSTEMS: dict[str, Callable[[Path], list[Command]]] = {
    "perdure elastic": lambda folder: perdure(folder, "elastic", "-n", "4"),
    "perdure torchft": lambda folder: perdure(
        folder, "torchft", "--torchft", "--replicas", "4", "-n", "1"
    ),
    "perdure restart": lambda folder: perdure(folder, "ddp", "-n", "4"),
    "torchft": torchft,
    "torchft tuned": lambda folder: torchft(folder, *TUNED),
    "torchrun": torchrun,
}


class Training:
    """A system at work in `folder`."""

    def __init__(self, system: str, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.out = open(folder / "out", "wb")  # noqa: SIM115
        env = dict(os.environ, PERDURE_HOME=str(folder / "state"), RUST_LOG="warn")
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1" if system == "torchrun" else "0"
        self.processes = [
            subprocess.Popen(
                command,
                env=env | more,
                stdout=self.out,
                stderr=self.out,
                start_new_session=True,
            )
            for command, more in SYSTEMS[system](folder)
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return what was committed, by time."""
        rows = []
        for path in self.folder.glob("made-*.jsonl"):
            slot = path.stem.removeprefix("made-")
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    rows.append(json.loads(line) | {"slot": slot})
        return sorted(rows, key=lambda row: row["t"])

    def wait_full(self, timeout_s: float = 120.0) -> None:
        """Wait for thirty steps at full strength."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            sizes: dict[int, int] = defaultdict(int)
            for row in self.rows():
                sizes[row["step"]] += row["n"]
            if sum(size >= COUNT for size in sizes.values()) >= 30:
                return
            time.sleep(0.3)
        raise SystemExit(f"not at full strength within {timeout_s:g} s: {self.folder}/out")

    def kill(self, slot: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((self.folder / f"pid-{slot}").read_text()), signal.SIGKILL)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.out.close()


def measure(system: str, every_s: float, window_s: float, folder: Path) -> dict[str, Any]:
    """Train for a window, with a kill every `every_s` seconds; return what came of it."""
    training = Training(system, folder)
    try:
        training.wait_full()
        began, kills = time.time(), 0
        victims = random.Random(1)
        while (left := began + window_s - time.time()) > 0:
            at = began + every_s * (kills + 0.5) if every_s else began + window_s
            time.sleep(min(left, max(0.0, at - time.time())))
            if every_s and time.time() < began + window_s - 1.0:
                training.kill(victims.randrange(SLOTS))
                kills += 1
        found = count(training.rows(), began, began + window_s)
    finally:
        training.end()
    load = round(os.getloadavg()[0], 1)
    return {"system": system, "every_s": every_s, "kills": kills, **found, "load": load}


def count(rows: list[dict[str, Any]], begin: float, end: float) -> dict[str, Any]:
    """Return what stayed committed between two times."""
    before = {(row["step"], row["slot"]) for row in rows if row["t"] < begin}
    sizes: dict[int, dict[str, int]] = defaultdict(dict)
    again = 0
    for row in rows:
        if begin <= row["t"] < end:
            key = (row["step"], row["slot"])
            again += key in before or row["slot"] in sizes[row["step"]]
            if key not in before:
                sizes[row["step"]][row["slot"]] = row["n"]
    whole = {step: sum(parts.values()) for step, parts in sizes.items() if parts}
    times = [begin, *(row["t"] for row in rows if begin <= row["t"] < end), end]
    return {
        "micro_batches": sum(min(COUNT, n) for n in whole.values()),
        "again": again,
        "short": sum(n < COUNT for n in whole.values()),
        "longest_gap_s": round(max(b - a for a, b in itertools.pairwise(times)), 2),
    }


def show(results: list[dict[str, Any]], window_s: float) -> None:
    """Print the table; ratios are to the elastic depth without a failure."""
    best = max((r["micro_batches"] for r in results if not r["every_s"]), default=0)
    print("\n| a kill every | system | kills | of the best | longest gap | again | short | load |")
    print("|---|---|---|---|---|---|---|---|")
    for r in sorted(results, key=lambda r: (r["every_s"], -r["micro_batches"])):
        every = f"{r['every_s']:g} s" if r["every_s"] else "never"
        ratio = f"{100 * r['micro_batches'] / best:.1f} %" if best else r["micro_batches"]
        cells = [every, r["system"], r["kills"], ratio, f"{r['longest_gap_s']} s"]
        print("|", " | ".join(map(str, [*cells, r["again"], r["short"], r["load"]])), "|")
    print(f"\nwindow {window_s:g} s; best: {best} micro-batches")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--window-s", type=float, default=90.0)
    parser.add_argument("--every", default="0,15")
    parser.add_argument("--only", default=",".join(SYSTEMS))
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for every_s in (float(word) for word in args.every.split(",")):
            for system in (word.strip() for word in args.only.split(",")):
                name = f"{system.replace(' ', '-')}-{every_s:g}"
                results.append(measure(system, every_s, args.window_s, Path(folder) / name))
                print(json.dumps(results[-1]), flush=True)
    show(results, args.window_s)


if __name__ == "__main__":
    sweep_after_me()
    main()
