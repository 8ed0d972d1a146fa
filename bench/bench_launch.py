"""A job on a box by perdure beside the same by ssh, tmux and rsync, in turns, in one run.

The box is a private sshd on loopback. Measured: from the command until the script's first step;
from the moment at which every connection breaks until the next line is seen here; a pull, whole
and with its connection broken twice. Prints one JSON document.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sweep import sweep_after_me

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.e2e.box import Box, Laptop
from tests.waiting import wait_until

HERE = Path(__file__).resolve().parent
PYTHON = shlex.quote(sys.executable)
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=1"
JOB = """\
name = "bench"
script = "plain.py"
args = ["--trail", "plain.log", "--dir", ".", "--steps", "1000000"]
[launch]
project = "project"
outputs = ["out"]
"""
PLAIN = """\
import sys, time, subprocess
while True:  # What people write: look, and look again when the connection breaks.
    subprocess.run([*sys.argv[2:], f"tail -n 1 -F {sys.argv[1]}"])
    time.sleep(1)
"""


class Place:
    """A laptop and its box, with a project that has some files to send."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.box = Box(folder / "box")
        self.box.start()
        (folder / "laptop").mkdir()
        self.laptop = Laptop(folder / "laptop", self.box)
        project = self.laptop.folder / "project"
        (project / "out").mkdir(parents=True)
        shutil.copy(HERE / "scripts" / "plain.py", project)
        for number in range(200):
            (project / f"file-{number}.py").write_text(f"# {number}\n" * 100)
        (self.laptop.folder / "job.toml").write_text(JOB)
        self.big = os.urandom(1 << 20) * megabytes
        self.ssh = ["ssh", "-F", str(self.laptop.ssh_config), self.box.name]
        self.rsync = ["rsync", "-a", "-e", shlex.join(self.ssh[:-1])]
        self.plain = self.box.home / "box"

    def close(self) -> None:
        self.laptop.disconnect()
        self.box.power_off()


def wait_step(log: Path) -> float:
    """Return when the first step of a log was made."""
    wait_until(lambda: log.exists() and " 0 " in log.read_text() and "step" in log.read_text(),
               "first step", 300.0)  # fmt: skip
    rows = [line.split() for line in log.read_text().splitlines()]
    return next(float(row[2]) for row in rows if row[0] == "step")


def launch_perdure(place: Place) -> tuple[dict[str, float], Path]:
    began = time.monotonic()
    place.laptop.cli("launch", "job.toml", "--on", "box")
    command_s = time.monotonic() - began
    log = place.box.home / "perdure" / "bench" / "project" / "plain.log"
    return {"command_s": command_s, "first_step_s": wait_step(log) - began}, log


def launch_plain(place: Place) -> tuple[dict[str, float], Path]:
    began = time.monotonic()
    source, target = f"{place.laptop.folder}/project/", f"{place.box.name}:{place.plain}/"
    subprocess.run([*place.rsync, source, target], check=True, timeout=120)
    run = f"{PYTHON} {TORCHRUN} plain.py --trail plain.log --dir . --steps 1000000"
    start = f"tmux -S tmux new-session -d -s run {shlex.quote(f'{run} > run.out 2>&1')}"
    script = f"cd {place.plain} && {start}"
    subprocess.run([*place.ssh, script], check=True, timeout=60)
    command_s = time.monotonic() - began
    log = place.plain / "plain.log"
    return {"command_s": command_s, "first_step_s": wait_step(log) - began}, log


def launch_local(place: Place) -> tuple[dict[str, float], Path]:
    began = time.monotonic()
    place.laptop.cli("launch", "job.toml", "--on", "local")
    command_s = time.monotonic() - began
    log = place.laptop.folder / "project" / "plain.log"
    return {"command_s": command_s, "first_step_s": wait_step(log) - began}, log


def drop(place: Place, command: list[str], log: Path) -> float:
    """Return how long after every connection broke the first line written after that is seen.

    A line ends with the moment at which it was written: the script's own, or one that is added.
    """
    watching = subprocess.Popen(
        command, env=place.laptop.env, cwd=place.laptop.folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert watching.stdout is not None

    def wait_line(after: float) -> None:
        with open(log, "a") as file:
            file.write(f"line 0 {time.monotonic():.6f}\n")
        for line in watching.stdout or ():
            words = line.split()
            if len(words) > 2 and float(words[words.index("0") + 1]) > after:
                return

    try:
        wait_line(0.0)
        time.sleep(1.0)
        assert place.box.cut()
        began = time.monotonic()
        wait_line(began)
        return time.monotonic() - began
    finally:
        os.killpg(watching.pid, signal.SIGKILL)
        watching.wait()


def pull_perdure(place: Place, target: Path) -> list[str]:
    return [sys.executable, "-m", "perdure", "pull", "bench", str(target), "--live"]


def pull_plain(place: Place, target: Path) -> list[str]:
    again = f"until {shlex.join([*place.rsync, '--partial'])}"
    return ["sh", "-c", f"{again} {place.box.name}:{place.plain}/out/ {target}/; do sleep 1; done"]


def pull(place: Place, command: list[str], target: Path, cuts: int) -> float:
    """Return the seconds of a pull whose connection breaks `cuts` times in the middle."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=place.laptop.env, cwd=place.laptop.folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    size = len(place.big)
    for cut in range(cuts):
        wait_until(lambda cut=cut: arrived(target) > size * (cut + 1) / (cuts + 2), "bytes")
        place.box.cut()
    assert process.wait(600) == 0
    return time.monotonic() - began


def arrived(target: Path) -> int:
    """Return the bytes of what comes in now, under whichever name."""
    sizes = []
    for path in target.rglob("*big.bin*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            continue
    return max(sizes, default=0)


def measure(kind: str, folder: Path, megabytes: int) -> dict[str, float]:
    """Return one launcher's figures, on a box of its own."""
    place = Place(folder, megabytes)
    launchers = {"perdure": launch_perdure, "ssh+tmux+rsync": launch_plain, "local": launch_local}
    try:
        told, log = launchers[kind](place)
        if kind == "local":
            place.laptop.cli("stop", "bench")
            return told
        results = log.parent / "out"
        results.mkdir(exist_ok=True)
        (results / "big.bin").write_bytes(place.big)
        if kind == "perdure":
            stream = next(place.box.home.rglob("rank-0.out"))
            watch = [sys.executable, "-m", "perdure", "logs", "bench", "-f", "--rank", "0"]
            command = pull_perdure
        else:
            stream = log
            watch = [sys.executable, "-c", PLAIN, str(log), *place.ssh]
            command = pull_plain

        told["reattach_s"] = drop(place, watch, stream)
        for cuts in (0, 2):
            target = folder / f"pulled-{cuts}"
            target.mkdir()
            told[f"pull_{cuts}_cuts_s"] = pull(place, command(place, target), target, cuts)
            copy = next(target.rglob("big.bin"))
            assert copy.read_bytes() == place.big
        told["mb_per_s"] = megabytes * (1 << 20) / 1e6 / told["pull_0_cuts_s"]
        return told
    finally:
        place.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=512, help="of the file that is pulled")
    args = parser.parse_args()
    kinds = ["perdure", "ssh+tmux+rsync", "local"]
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    load = [os.getloadavg()[0]]
    for run in range(args.runs):
        for kind in kinds if run % 2 == 0 else reversed(kinds):
            with tempfile.TemporaryDirectory(prefix="perdure-bench-") as folder:
                found[kind].append(measure(kind, Path(folder), args.megabytes))
            print(kind, found[kind][-1], file=sys.stderr, flush=True)
    load.append(os.getloadavg()[0])
    medians: dict[str, Any] = {
        kind: {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}
        for kind, rows in found.items()
    }
    print(json.dumps({"runs": args.runs, "megabytes": args.megabytes,
                      "load": load, "median": medians, "all": found}, indent=1))  # fmt: skip


if __name__ == "__main__":
    sweep_after_me()
    main()
