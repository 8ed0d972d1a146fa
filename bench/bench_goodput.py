"""What is left of training under failures: perdure beside torchft and torchrun, in one run.

    python bench/bench_goodput.py [--window-s 90] [--every 0,15,60] [--only elastic,torchrun]
        [--settle-s 20] [--rounds 3]

Four slots train the same model with the same global batch of 12 micro-batches of 10 ms (virtual
devices: real tensors and collectives, a declared compute time). From full strength on, a slot is
killed with SIGKILL every so many seconds, the same slots at the same instants for every system; 0
is no failure. Counted are micro-batches of steps that stayed committed, in the window; the ratio
is to perdure's elastic depth without a failure. *Again* are steps made more than once; *short* are
steps whose global batch was smaller than it should be. A window begins `--settle-s` after thirty
steps at full strength: perdure makes an image of each node's imports meanwhile, which on few cores
takes steps away from the job that it is made for. `--settle-s 0` shows that. With `--rounds` the
systems take turns so often, and medians are printed. Prints JSON lines, then a table, then where
the CPU of a step went: that of the ranks, and of what runs beside them.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from stamp import stamp
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

    def read_cpu(self) -> dict[tuple[int, str], float]:
        """Return the CPU seconds of each process so far, with the part that it is."""
        seconds = {}
        for parent in self.processes:
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(parent.pid)
                for process in [family, *family.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        times = process.cpu_times()
                        part = name_part(process.cmdline())
                        seconds[process.pid, part] = times.user + times.system
        return seconds

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


def name_part(words: list[str]) -> str:
    """Return which part of a system a command line is."""
    text = " ".join(words)
    for part in ("zygote", "keeper", "lighthouse", "agent", "controller", "nats-server", "guard"):
        if f"perdure {part}" in text or (f"{part} " in f"{text} " and "goodput_train" not in text):
            return part
    ours = "goodput_train" in text
    return ("torchrun" if "torchrun" in text else "rank") if ours else "other"


def measure(
    system: str, every_s: float, window_s: float, settle_s: float, folder: Path
) -> dict[str, Any]:
    """Train for a window, with a kill every `every_s` seconds; return what came of it."""
    training = Training(system, folder)
    try:
        training.wait_full()
        time.sleep(settle_s)
        before = training.read_cpu()
        began, kills = time.time(), 0
        victims = random.Random(1)
        while (left := began + window_s - time.time()) > 0:
            at = began + every_s * (kills + 0.5) if every_s else began + window_s
            time.sleep(min(left, max(0.0, at - time.time())))
            if every_s and time.time() < began + window_s - 1.0:
                training.kill(victims.randrange(SLOTS))
                kills += 1
        found = count(training.rows(), began, began + window_s)
        cpu: dict[str, float] = defaultdict(float)
        for (pid, part), seconds in training.read_cpu().items():
            cpu[part] += (seconds - before.get((pid, part), 0.0)) / max(1, found["steps"])
    finally:
        training.end()
    parts = {part: round(1e3 * seconds, 2) for part, seconds in cpu.items()}
    row = {"system": system, "every_s": every_s, "kills": kills, **found, "cpu_ms": parts}
    return row | stamp()


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
        "steps": len(whole),
        "micro_batches": sum(min(COUNT, n) for n in whole.values()),
        "again": again,
        "short": sum(n < COUNT for n in whole.values()),
        "longest_gap_s": round(max(b - a for a, b in itertools.pairwise(times)), 2),
    }


def show(results: list[dict[str, Any]], window_s: float) -> None:
    """Print the tables; ratios are to the fastest without a failure, of medians over rounds."""
    groups: dict[tuple[float, str], list[dict[str, Any]]] = defaultdict(list)
    for r in results:
        groups[r["every_s"], r["system"]].append(r)
    medians = {k: statistics.median(r["micro_batches"] for r in g) for k, g in groups.items()}
    best = max((m for (every_s, _), m in medians.items() if not every_s), default=0)
    print("\n| a kill every | system | kills | of the best | longest gap | again | short | load |")
    print("|---|---|---|---|---|---|---|---|")
    order = sorted(groups, key=lambda key: (key[0], -medians[key]))
    for every_s, system in order:
        mine = groups[every_s, system]
        every = f"{every_s:g} s" if every_s else "never"
        median = medians[every_s, system]
        ratio = f"{100 * median / best:.1f} %" if best else median
        sums = [sum(r[key] for r in mine) for key in ("again", "short")]
        gap = f"{max(r['longest_gap_s'] for r in mine)} s"
        loads = sorted(r["load"] for r in mine)
        cells = [every, system, sum(r["kills"] for r in mine), ratio, gap, *sums]
        print("|", " | ".join(map(str, [*cells, f"{loads[0]} to {loads[-1]}"])), "|")
    print(f"\nwindow {window_s:g} s; best: {best} micro-batches; {results[0]['commit']}\n")
    parts = list(dict.fromkeys(part for r in results for part in r["cpu_ms"]))
    print(
        "| CPU of a step, ms | every | "
        + " | ".join(parts)
        + " |\n"
        + "|---" * (len(parts) + 2)
        + "|"
    )
    for every_s, system in order:
        mine = [r["cpu_ms"] for r in groups[every_s, system]]
        cells = [f"{statistics.median(c.get(part, 0.0) for c in mine):.1f}" for part in parts]
        print("| " + " | ".join([system, f"{every_s:g}", *cells]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--window-s", type=float, default=90.0)
    parser.add_argument("--every", default="0,15")
    parser.add_argument("--settle-s", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default=",".join(SYSTEMS))
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        rates = [float(word) for word in args.every.split(",")]
        systems = [word.strip() for word in args.only.split(",")]
        for number, every_s, system in itertools.product(range(args.rounds), rates, systems):
            where = Path(folder) / f"{number}-{system.replace(' ', '-')}-{every_s:g}"
            row = measure(system, every_s, args.window_s, args.settle_s, where)
            results.append(row)
            print(json.dumps(row), flush=True)
    show(results, args.window_s)


if __name__ == "__main__":
    sweep_after_me()
    main()
