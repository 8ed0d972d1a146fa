"""Experiments on one GPU, each a process of its own with its own time limit.

usage: scripts/gpu.sh 1|2|3|all --out DIR [--dry] [--only G11,G17]

Every experiment is a module that has `run(trial)`. It prints one line, and puts a row into
`DIR/gpu.json` at once, so that a crash or a time-out costs that experiment alone; what it printed
is in `DIR/NAME.log`. Without CUDA every one is skipped. With `--dry` they run on the CPU, small,
over a fake device or gloo: that shows that the harness works, and nothing about a GPU.

This process imports no torch, so that nothing of CUDA can take it along.
"""

import argparse
import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from bench.sweep import find_descendants, sweep

from perdure import __version__
from perdure.files import replace_file

ROOT = Path(__file__).resolve().parents[2]
PART_S = 480.0
"""Bound of a part, all its experiments together."""
PROBE_S = 40.0
"""Of it, for finding out what machine this is."""
DRY_LIMIT_S = 240.0
MARK = "PERDURE_GPU_KIT"
"""The variable by which whatever an experiment has started is known as its own."""
ENDED = "the kit was ended while it ran"
_LOOK_S = 0.05


class Experiment(NamedTuple):
    """One row of the table."""

    name: str
    module: str
    part: int
    limit_s: float
    what: str

    @property
    def names(self) -> set[str]:
        """Return by what it can be chosen: G19-ddp also as one of all whose name begins so."""
        return {self.name, self.name.partition("-")[0]}


EXPERIMENTS = (
    Experiment("G11", "tests.gpu.g11_break", 2, 45, "a peer stands still in an all-reduce"),
    Experiment("G17", "tests.gpu.g17_exact", 2, 70, "exact sums in worlds of 1 to 4, and kills"),
    Experiment("G2", "tests.gpu.g02_fork", 1, 70, "contexts in ranks forked from the image"),
    Experiment("G4", "tests.gpu.g04_respawn", 1, 80, "memory of a killed process, taken anew"),
    Experiment("G7", "tests.gpu.g07_checkpoint", 1, 55, "checkpoints beside updates"),
    Experiment("G15", "tests.gpu.g15_form", 2, 40, "a member never comes while a world forms"),
    Experiment("G0", "tests.gpu.g00_two_ranks", 2, 40, "two ranks of one GPU sum once"),
    Experiment("G19-ddp", "tests.gpu.g19_supervised", 3, 80, "perdure run: a crash and a stop"),
    Experiment("G19-exact", "tests.gpu.g19_resumable", 3, 110, "perdure run: killed and resumed"),
    Experiment("G19-elastic", "tests.gpu.g19_elastic", 3, 110, "perdure run: ranks lost in place"),
    Experiment("G19-shard", "tests.gpu.g19_sharded", 3, 70, "perdure run: shard=2 loses a rank"),
    Experiment("G19-stages", "tests.gpu.g19_staged", 3, 70, "perdure run: pipeline=2 loses one"),
    Experiment("G5", "tests.gpu.g05_lost", 1, 40, "a rank loses its device"),
    Experiment("G1", "tests.gpu.g01_machine", 1, 90, "the machine, pytest -m gpu, warm contexts"),
    Experiment("G13", "tests.gpu.g13_side_by_side", 2, 70, "four communicators, broken at once"),
    Experiment("G18", "tests.gpu.g18_watchdog", 2, 50, "PyTorch's watchdog once NCCL has an error"),
    Experiment("G14", "tests.gpu.g14_graph", 2, 40, "a graph has captured the communicator"),
    Experiment("G16", "tests.gpu.g16_growth", 2, 50, "what thirty epochs leave"),
    Experiment("G10", "tests.gpu.g10_plugin", 2, 35, "the profiler plugin: clocks, cost, replays"),
    Experiment("G8", "tests.gpu.g08_fence", 1, 60, "bits of a micro-batch; the fence's cost"),
    Experiment("G6", "tests.gpu.g06_copies", 1, 45, "copies to the CPU, pinned and not"),
)
"""In the order in which they run: first what decides most."""


# --- within an experiment ----------------------------------------------------------------------


class Trial:
    """What an experiment knows of its run, and says of it; any of its processes may."""

    def __init__(self, folder: Path, dry: bool) -> None:
        """Keep what is said in `folder`, which is the experiment's alone."""
        self.folder, self.dry = folder, dry

    @property
    def engine(self) -> str:
        """Return whose communicators it is about."""
        return "fake" if self.dry else "nccl"

    @property
    def device(self) -> str:
        """Return where its tensors are."""
        return "cpu" if self.dry else "cuda:0"

    def choose(self, real: Any, dry: Any) -> Any:
        """Return the size for this kind of run."""
        return dry if self.dry else real

    def note(self, **figures: Any) -> None:
        """Keep figures for the row, at once."""
        self._change(lambda said: said["figures"].update(figures))

    def expect(self, count: int) -> None:
        """Have `count` more tries count, which pass or do not."""
        self._change(lambda said: said.update(of=said["of"] + count))

    def passed(self) -> None:
        """Count a try that has passed."""
        self._change(lambda said: said.update(passed=said["passed"] + 1))

    def took(self, seconds: float) -> None:
        """Add to the times whose median is printed."""
        self._change(lambda said: said["seconds"].append(round(seconds, 6)))

    def tries(self, count: int) -> Iterator[int]:
        """Yield the number of each try; one whose body comes to its end has passed."""
        self.expect(count)
        for number in range(count):
            yield number
            self.passed()

    def check(self, holds: bool, otherwise: str) -> None:
        """Count one try, which has passed if something holds.

        Raises:
            AssertionError: it does not.
        """
        self.expect(1)
        assert holds, otherwise
        self.passed()

    def _change(self, change: Callable[[dict[str, Any]], object]) -> None:
        path = self.folder / "said.json"
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            said = read_said(self.folder)
            change(said)
            replace_file(path, json.dumps(said).encode())


def read_said(folder: Path) -> dict[str, Any]:
    """Return what an experiment has said so far."""
    with contextlib.suppress(FileNotFoundError):
        said: dict[str, Any] = json.loads((folder / "said.json").read_text())
        return said
    return {"passed": 0, "of": 0, "seconds": [], "figures": {}}


# --- around it ---------------------------------------------------------------------------------

PROBE = """
import json, platform, sys
said = {"python": platform.python_version()}
try:
    import torch
    said |= {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if torch.cuda.is_available():
        said["device"] = torch.cuda.get_device_name(0)
        said["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
        said["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        said["count"] = torch.cuda.device_count()
        said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    said["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def probe() -> dict[str, Any]:
    """Return what this machine has, as a process of its own says that may be lost."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            cwd=ROOT, capture_output=True, text=True, timeout=PROBE_S,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"CUDA does not answer within {PROBE_S:g} s"}
    except (IndexError, ValueError):
        return {"error": f"asking for CUDA ended with {done.returncode}: {done.stderr[-500:]}"}
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found["driver"] = next(
            (w for w in text.split() if w.count(".") >= 1 and w[0].isdigit()), ""
        )
    return found


class Kit:
    """Runs experiments, and keeps their rows."""

    def __init__(self, out: Path, *, dry: bool, machine: dict[str, Any]) -> None:
        """Add to the rows that are in `out` already."""
        self._out, self._dry = out, dry
        self._device = "cpu" if dry else machine.get("device", "")
        self._versions = {
            "perdure": __version__,
            "kernel": platform.release(),
            **{k: v for k, v in machine.items() if k not in ("device", "error")},
        }
        self._lock = threading.Lock()
        self._rows = self._read_rows()
        self.over = threading.Event()
        """Set to end what runs; nothing begins any more."""

    def run(self, one: Experiment, until_s: float) -> bool:
        """Run one experiment; return whether it has passed. It ends at `until_s` at the latest."""
        if self.over.is_set():
            return False
        limit_s = min(DRY_LIMIT_S if self._dry else one.limit_s, until_s - time.monotonic())
        at = self._add(self._describe(one, "failed", ENDED, {}))
        began_s = time.monotonic()
        folder = self._out / "scratch" / f"{one.name}-{token_hex(4)}"
        try:
            reason = self._carry_out(one, folder, limit_s)
            said = read_said(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        said["took_s"] = round(time.monotonic() - began_s, 2)
        if not reason and not 0 < said["of"] == said["passed"]:
            reason = f"only {said['passed']} of {said['of']} tries have passed"
        row = self._describe(one, "failed" if reason else "ok", reason, said)
        self._add(row, at)
        print(render_line(row), flush=True)
        return not reason

    def skip(self, one: Experiment, reason: str) -> None:
        """Say that an experiment does not run here."""
        row = self._describe(one, "skipped", reason, {})
        self._add(row)
        print(render_line(row), flush=True)

    def _carry_out(self, one: Experiment, folder: Path, limit_s: float) -> str:
        """Run it as a process; return why it has failed, empty where it has not."""
        if limit_s <= 0:
            return "the part's time was spent before it began"
        folder.mkdir(parents=True)
        mark = token_hex(8)
        command = [sys.executable, "-m", "tests.gpu.child", one.module, str(folder)]
        log = self._out / f"{one.name}.log"
        with open(log, "ab") as file:
            child = subprocess.Popen(
                command + ["--dry"] * self._dry, cwd=ROOT, env=os.environ | {MARK: mark},
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        seen: dict[int, bytes] = {}
        until_s, look_s = time.monotonic() + limit_s, 0.0
        try:
            while child.poll() is None and time.monotonic() < until_s and not self.over.is_set():
                if time.monotonic() > look_s:
                    seen |= find_descendants(child.pid)
                    look_s = time.monotonic() + 1.0
                time.sleep(_LOOK_S)
            code = child.poll()
        finally:
            if child.poll() is None:
                seen |= find_descendants(child.pid)
                child.kill()
            child.wait()
            sweep(f"{MARK}={mark}".encode(), seen)
        if code is None and self.over.is_set():
            return ENDED
        if code is None:
            return f"it did not end within {limit_s:.0f} s"
        return explain_end(code, folder, log)

    def _describe(
        self, one: Experiment, result: str, reason: str, said: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "name": one.name,
            "part": one.part,
            "what": one.what,
            "result": result,
            "reason": reason,
            "dry": self._dry,
            **{key: said.get(key, 0) for key in ("passed", "of", "took_s")},
            "seconds": said.get("seconds", []),
            "figures": said.get("figures", {}),
            "device": self._device,
            "versions": self._versions,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _read_rows(self) -> list[dict[str, Any]]:
        path = self._out / "gpu.json"
        try:
            rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
            return rows
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError):
            path.rename(path.with_name(f"gpu-unreadable-{token_hex(4)}.json"))
            return []

    def _add(self, row: dict[str, Any], at: int | None = None) -> int:
        """Write a row, in the place of an earlier one where `at` names it; return its place."""
        with self._lock:
            if at is None:
                at = len(self._rows)
                self._rows.append(row)
            self._rows[at] = row
            text = json.dumps({"rows": self._rows}, indent=1)
            replace_file(self._out / "gpu.json", text.encode(), synced=True)
            return at


@contextlib.contextmanager
def end_on_signals(over: threading.Event) -> Iterator[None]:
    """Have whatever would end the kit end its experiments first, and all they have started."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, lambda *_: over.set())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain_end(code: int, folder: Path, log: Path) -> str:
    """Return why an experiment has failed that ended with `code`; empty for a good end."""
    if code == 0:
        return ""
    with contextlib.suppress(FileNotFoundError):
        return (folder / "why").read_text()
    what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"it ended with {what} and said nothing: see {log.name}"


def render_line(row: dict[str, Any]) -> str:
    """Return the line that tells of a row.

    >>> row = {"name": "G11", "result": "ok", "passed": 20, "of": 20, "seconds": [0.3, 0.31, 0.5]}
    >>> render_line(row | {"dry": False, "reason": ""})
    'G11 ok 20/20 p50 0.31 s'
    """
    words = [row["name"], row["result"]]
    if row["of"]:
        words.append(f"{row['passed']}/{row['of']}")
    if row["seconds"]:
        words.append(f"p50 {statistics.median(row['seconds']):.2g} s")
    if row["dry"]:
        words.append("(dry)")
    line = " ".join(words)
    return f"{line}: {row['reason'].splitlines()[0]}" if row["reason"] else line


def main(argv: Sequence[str], experiments: Sequence[Experiment] = EXPERIMENTS) -> int:
    """Run what is asked for; return 1 if one fails or it is ended, 3 without a usable torch."""
    parser = argparse.ArgumentParser(prog="scripts/gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["1", "2", "3", "all"])
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.json and the logs")
    parser.add_argument("--dry", action="store_true", help="on the CPU: shows the harness alone")
    parser.add_argument("--only", default="", help="names of experiments, with commas between them")
    asked = parser.parse_args(argv)
    chosen = [one for one in experiments if asked.part in ("all", str(one.part))]
    if asked.only:
        names = set(asked.only.split(","))
        if unknown := names - {name for one in chosen for name in one.names}:
            parser.error(f"this part has no {', '.join(sorted(unknown))}")
        chosen = [one for one in chosen if names & one.names]
    if not chosen:
        parser.error(f"part {asked.part} has no experiments")
    asked.out.mkdir(parents=True, exist_ok=True)
    out = asked.out.resolve()
    ends_s = {part: 0.0 for part in (1, 2, 3)}
    machine = {"python": platform.python_version()} if asked.dry else probe()
    if "torch" not in machine and not asked.dry:
        print(f"gpu: torch cannot be used: {machine.get('error', '')}", file=sys.stderr)
        return 3
    kit = Kit(out, dry=asked.dry, machine=machine)
    if not asked.dry and "device" not in machine:
        for one in chosen:
            kit.skip(one, machine.get("error", "") or "no CUDA device here")
        return 0

    def run(one: Experiment) -> bool:
        ends_s[one.part] = ends_s[one.part] or time.monotonic() + PART_S - PROBE_S
        return kit.run(one, ends_s[one.part])

    with end_on_signals(kit.over), ThreadPoolExecutor(2 if asked.dry else 1) as pool:
        return 0 if all(list(pool.map(run, chosen))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
