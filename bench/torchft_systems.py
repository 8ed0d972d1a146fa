"""Ways to run the same three torchft replica groups, for `bench_torchft.py`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).resolve().parent.parent / "tests/e2e/scripts/torchft_groups.py"
BIN = Path(sys.executable).parent
STEPS = 10_000_000
Row = dict[str, Any]


class Groups:
    """Running replica groups; reads what they write as they write it."""

    spares = 0
    options: tuple[str, ...] = ()
    """Of torchft's own lighthouse."""

    def __init__(self, folder: Path, count: int, env: dict[str, str]) -> None:
        self.folder, self.count = folder, count
        self.log = folder / "log"
        self.log.mkdir(parents=True)
        self.rows: dict[int, list[Row]] = {g: [] for g in range(count + self.spares)}
        self._at: dict[int, int] = {}
        self.env = dict(os.environ, PERDURE_HOME=str(folder / "state")) | env
        self.env["PG_TIMEOUT_S"] = self.env.get("PG_TIMEOUT_S", "60")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.out = open(folder / "out", "ab")  # noqa: SIM115
        self.start()

    def start(self) -> None:
        raise RuntimeError("a system says how it starts")

    def popen(self, *command: str, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, env=self.env | env, stdout=self.out, stderr=self.out, start_new_session=True
        )
        self.processes.append(process)
        return process

    def poll(self) -> dict[int, list[Row]]:
        """Return all rows by group, with those that have come since."""
        for group, rows in self.rows.items():
            path = self.log / f"group-{group}.jsonl"
            if not path.exists():
                continue
            with open(path, "rb") as file:
                file.seek(self._at.get(group, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at[group] = self._at.get(group, 0) + len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):
                    rows.append(json.loads(line))
        return self.rows

    def live(self, within_s: float = 0.6) -> list[int]:
        """Return the groups that commit now, all of them together."""
        now = time.time()
        return [
            g
            for g, rows in self.poll().items()
            if rows and now - rows[-1]["t"] < within_s and rows[-1]["n"] == self.count
        ]

    def wait(self, condition: Callable[[], Any], timeout_s: float) -> Any:
        """Return what `condition` has found; None after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > end:
                return None
            time.sleep(0.01)
        return found

    def wait_full(self, timeout_s: float = 120.0) -> bool:
        """Wait until all groups train together, and spares stand ready."""
        full = lambda: len(self.live()) == self.count  # noqa: E731
        return self.wait(full, timeout_s) is not None and self.wait_spares(timeout_s)

    def wait_spares(self, timeout_s: float) -> bool:
        return True

    def find(self, words: str) -> list[psutil.Process]:
        found = []
        for parent in self.processes:
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(parent.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if words in " ".join(process.cmdline()):
                            found.append(process)
        return found

    def mismatches(self) -> tuple[int, int]:
        """Return at how many steps hashes were compared, and how many were not all equal.

        The first of these is said on standard error.
        """
        hashes: dict[int, list[str]] = {}
        for rows in self.poll().values():
            for row in rows:
                if "hash" in row:
                    hashes.setdefault(row["step"], []).append(row["hash"])
        first = min((s for s, found in hashes.items() if len(set(found)) > 1), default=None)
        if first is not None:
            print(f"{self.folder}: unlike at step {first}: {hashes[first]}", file=sys.stderr)
        compared = [found for found in hashes.values() if len(found) > 1]
        return len(compared), sum(len(set(found)) > 1 for found in compared)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.out.close()


class Perdure(Groups):
    """`perdure run --torchft`."""

    config = (
        "[restart]\nwindow_max = 100000\n[detect]\nquiet_action_s = 30.0\n[torchft]\nhung_s = 1.0\n"
    )
    """A hung thread is left out, and ended, as soon as a user may ask for."""

    def start(self) -> None:
        job = self.folder / "job.toml"
        job.write_text(self.config)
        words = ["--torchft", "--replicas", str(self.count), "-n", "1", "--name", "bench"]
        words += ["--spares", str(self.spares)] if self.spares else []
        script = (str(SCRIPT), str(STEPS), str(self.log))
        perdure = (sys.executable, "-m", "perdure", "run", "-c", str(job))
        self.popen(*perdure, *words, *script)

    def wait_spares(self, timeout_s: float) -> bool:
        if not self.spares:
            return True
        state = self.folder / "state/jobs/bench/lighthouse.json"

        def ready() -> bool:
            with contextlib.suppress(OSError, ValueError):
                groups = json.loads(state.read_text())["groups"]
                log = (self.folder / "state/jobs/bench/logs/lighthouse.log").read_text()
                held = [g["generation"] for g in groups if g.get("spare")]
                return len(held) == self.spares and all(f"generation {g} asks" in log for g in held)
            return False

        return self.wait(ready, timeout_s) is not None


class PerdureSpare(Perdure):
    """The same with a warm spare group."""

    spares = 1


class PerdureStock(Perdure):
    """The same at torchft's own lighthouse, as perdure starts it."""

    config = Perdure.config + 'lighthouse = "stock"\n'


class Stock(Groups):
    """torchft as it is: its lighthouse with its defaults, each group under torchrun."""

    mended = False

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.start_lighthouse()
        self.env |= {"RUST_LOG": "warn", "MEND_HOOK": "1" if self.mended else ""}
        # The Manager is only a client of MASTER_PORT: it needs torchrun's own store there.
        self.env.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
        for group in range(self.count):
            torchrun = (str(BIN / "torchrun"), "--standalone", "--max-restarts=1000")
            script = ("--nproc-per-node=1", str(SCRIPT), str(STEPS), str(self.log))
            self.popen(
                *torchrun,
                *script,
                REPLICA_GROUP_ID=str(group),
                NUM_REPLICA_GROUPS=str(self.count),
                TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{self.port}",
            )

    def start_lighthouse(self) -> None:
        bind = ("--bind", f"127.0.0.1:{self.port}", "--min_replicas", "1")
        lighthouse = str(BIN / "torchft_lighthouse")
        self.lighthouse = self.popen(lighthouse, *bind, *self.options, RUST_LOG="warn")


class Mended(Stock):
    """torchft's defaults, with the fault of 0.2.0 with gloo mended."""

    mended = True


class Tuned(Mended):
    """The same with a short heartbeat time-out and a quick tick."""

    options = ("--heartbeat_timeout_ms", "500", "--quorum_tick_ms", "10")
