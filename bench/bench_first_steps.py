"""What a new user types and waits for until his script is protected, and what a kill costs then.

usage: bench_first_steps.py [--only demo,wheel,torchrun,skypilot] [--kill-after-s 30] [--wheel FILE]

Each walk has an empty folder, home and environment of its own, and types what the documents of its
system say that comes first; pip keeps nothing between them. A row a command: its seconds of wall
time, its exit code, and the line that says what came of it. At the end of a walk stand the commands
typed, the files edited, and, where the script trained, what became of it when a rank was killed:
`step -> step` is where it was and where the next process began. The time in which a person reads is
in none of it.

demo       a clone of this tree, `make demo`
wheel      a wheel of this tree (built before, `--wheel`: this one), `perdure init --try`, `run`
torchrun   torch alone, at torchrun's defaults and with --max-restarts
skypilot   the package, `sky check`, `sky launch`: without an account it ends there
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stamp import ROOT, stamp
from sweep import sweep_after_me

SCRIPT = ROOT / "bench/scripts/newcomer.py"
TORCH = "torch==2.13.0"
COMMAND_S_MAX = 900.0
TASK = """\
resources:
  cpus: 2+
workdir: .
setup: pip install torch numpy
run: torchrun --standalone --nproc-per-node 2 train.py
"""
"""What SkyPilot's quickstart has its reader write, for this script."""
_STEP = re.compile(r"\bstep (\d+) loss ")
_RANK = re.compile(r"\brank (\d+) is process (\d+)")


class Walk:
    """One system's first steps, typed in `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.typed = self.edited = 0
        self.seconds = 0.0
        (folder / "home").mkdir(parents=True)
        keep = ("PATH", "LANG", "TERM", "SWEPT_WITH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
        self.env = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k in keep}
        self.env |= {"HOME": str(folder / "home"), "PIP_NO_CACHE_DIR": "1", "COLUMNS": "100"}
        self.env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}

    def type(self, command: str, shows: str = "") -> tuple[int, str]:
        """Run a command that is typed; return its exit code and output.

        Of the output the row has the last line that matches `shows`, or the last one.
        """
        self.typed += 1
        began = time.monotonic()
        with tempfile.TemporaryFile() as out:  # No pipe, which what stays behind would hold.
            try:
                code = subprocess.run(
                    command, shell=True, executable="/bin/bash", cwd=self.folder, env=self.env,
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=COMMAND_S_MAX,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = 124
            out.seek(0)
            text = out.read().decode(errors="replace")
        self._tell(command, time.monotonic() - began, code, choose_line(text, shows))
        return code, text

    def _tell(self, command: str, took_s: float, code: int, says: str) -> None:
        self.seconds += took_s
        command = command.replace(shlex.quote(sys.executable), "python3")
        row = {"walk": self.name, "typed": command, "s": round(took_s, 1), "rc": code}
        tell(row | {"says": says})

    def make_environment(self) -> None:
        """Make a Python of its own, and have it on the path, as its activation does."""
        self.type(f"{shlex.quote(sys.executable)} -m venv env")
        self.typed += 1  # . env/bin/activate
        self.env["PATH"] = f"{self.folder / 'env/bin'}:{self.env['PATH']}"

    def bring_script(self) -> None:
        """Have the user's own script there; he has it already."""
        shutil.copy(SCRIPT, self.folder / "train.py")

    def edit(self, name: str, text: str) -> None:
        """Write a file that the user has to write."""
        (self.folder / name).write_text(text)
        self.edited += 1

    def train_and_kill(self, command: str, kill_after_s: float) -> dict[str, Any]:
        """Train, SIGKILL rank 1 some seconds after the first step, and see what follows."""
        self.typed += 1
        run = Command(command, self.folder, self.env)
        try:
            found = run.kill(kill_after_s)
        finally:
            run.end()
        self.seconds += found["first_step_s"]
        tell({"walk": self.name, "typed": command} | found)
        return found

    def end(self, **more: object) -> None:
        """Tell what it came to."""
        row = {"walk": self.name, "commands": self.typed, "files_edited": self.edited}
        tell(row | {"s": round(self.seconds, 1), "load": stamp()["load"]} | more)


class Command:
    """A command that is read while it runs: its lines, each with the time at which it came."""

    def __init__(self, command: str, folder: Path, env: dict[str, str]) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            shlex.split(command), cwd=folder, env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            executable=shutil.which(shlex.split(command)[0], path=env["PATH"]),
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def steps(self, since: int = 0) -> Iterator[tuple[float, int]]:
        """Yield when each step was told, and its number, from line `since` on."""
        for at, line in self.lines[since:]:
            if found := _STEP.search(line):
                yield at, int(found[1])

    def find_rank(self, rank: int, since: int = 0) -> tuple[int, int]:
        """Return the first line from `since` on in which a rank says its process, and that; -1."""
        for number, (_, line) in enumerate(self.lines[since:], since):
            for said in _RANK.finditer(line):  # Ranks that share an output may share a line.
                if int(said[1]) == rank:
                    return number, int(said[2])
        return -1, -1

    def wait(self, condition: Callable[[], object], limit_s: float) -> bool:
        """Return whether it became true before the command ended, or the limit was reached."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline or not self._reader.is_alive():
                return bool(condition())
            time.sleep(0.02)
        return True

    def kill(self, after_s: float) -> dict[str, Any]:
        """Kill rank 1, and return what became of the run."""
        if not self.wait(lambda: next(self.steps(), None), COMMAND_S_MAX):
            raise SystemExit("it does not train:\n" + "".join(line for _, line in self.lines[-20:]))
        first_s = next(self.steps())[0]
        found: dict[str, Any] = {"first_step_s": round(first_s - self.began, 1)}
        self.wait(lambda: time.monotonic() > first_s + after_s, after_s + 10)
        pid = self.find_rank(1)[1]
        if pid <= 0:  # To a kill, -1 is everybody.
            raise SystemExit("rank 1 did not say its process")
        os.kill(pid, signal.SIGKILL)
        killed, mark = time.monotonic(), len(self.lines)
        reached = max(step for _, step in self.steps())
        if not self.wait(lambda: self.find_rank(0, mark)[0] >= 0, 120):
            self.wait(lambda: self.process.poll() is not None, 60)
            return found | {
                "killed_at": reached,
                "ends_with": self.process.poll(),
                "last_line_s": round(self.lines[-1][0] - killed, 1),
            }
        again = self.find_rank(0, mark)[0]
        self.wait(lambda: any(step >= reached for _, step in self.steps(again)), 300)
        resumed = next(self.steps(again))
        back = next(at for at, step in self.steps(again) if step >= reached)
        return found | {
            "killed_at": reached,
            "resumed_at": resumed[1],
            "steps_made_again": max(0, reached - resumed[1] + 1),
            "next_step_s": round(resumed[0] - killed, 2),
            "where_it_was_s": round(back - killed, 1),
        }

    def end(self) -> None:
        """Stop it as Ctrl-C does, and what is left by force."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                continue
        self._reader.join(10)


def choose_line(text: str, shows: str) -> str:
    """Return the last line of a text that matches `shows`, or of all; at most 200 characters."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    matching = [line for line in lines if re.search(shows, line)] if shows else lines
    return (matching or lines or [""])[-1][:200]


def tell(row: dict[str, Any]) -> None:
    """Print a row."""
    print(json.dumps(row), flush=True)


def walk_demo(walk: Walk, args: argparse.Namespace) -> None:
    """A clone, `make demo`: when its set-up was done, and its first incident and picture shown."""
    walk.type(f"git clone -q {shlex.quote(str(ROOT))} perdure")
    walk.typed += 1  # cd perdure
    run = Command("make -C perdure demo", walk.folder, walk.env)
    marks = {
        "set_up": r"^demo: .* about \d+ s",
        "first_incident": "▲",
        "first_picture": "as a page",
    }
    try:
        run.wait(lambda: False, COMMAND_S_MAX)
    finally:
        run.end()
    told = {f"{name}_s": next((round(at - run.began, 1) for at, line in run.lines
                               if re.search(pattern, line)), None)
            for name, pattern in marks.items()}  # fmt: skip
    walk.typed += 1
    walk.seconds += (took_s := run.lines[-1][0] - run.began)
    row = {"walk": walk.name, "typed": "make demo", "s": round(took_s, 1)}
    tell(row | {"rc": run.process.poll()} | told)
    walk.end()


def walk_wheel(walk: Walk, args: argparse.Namespace) -> None:
    """A wheel, `init --try`, `--apply`, `run`, and a killed rank."""
    wheel = args.wheel or build_wheel(walk.folder)
    shutil.copy(wheel, walk.folder)
    walk.make_environment()
    walk.type(f"pip install -q {TORCH} numpy")
    walk.type(f"pip install -q ./{Path(wheel).name}")
    walk.bring_script()
    walk.type("perdure init train.py --try", r"^tried: ")
    tried_s = walk.seconds
    walk.type("perdure init train.py --apply", r"^wrote |applied")
    killed = walk.train_and_kill("perdure run -n 2 train.py", args.kill_after_s)
    walk.end(until_tried_s=round(tried_s, 1), kill=describe(killed))


def build_wheel(folder: Path) -> Path:
    """Return a wheel of the committed tree, as a release would build it; not timed."""
    tree = folder / "tree"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    subprocess.run(
        ["bash", "scripts/build_wheel.sh", sys.executable],
        cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600, check=True,
    )  # fmt: skip
    (wheel,) = (tree / "dist").glob("perdure-*.whl")
    return wheel


def walk_torchrun(walk: Walk, args: argparse.Namespace) -> None:
    """Torch alone: as its tutorial begins, and with restarts."""
    walk.make_environment()
    walk.type(f"pip install -q {TORCH} numpy")
    walk.bring_script()
    typed, seconds = walk.typed, walk.seconds
    for options in ("", "--max-restarts 3 "):
        walk.typed, walk.seconds = typed, seconds
        command = f"torchrun --standalone --nproc-per-node 2 {options}train.py"
        killed = walk.train_and_kill(command, args.kill_after_s)
        walk.end(kill=describe(killed))


def walk_skypilot(walk: Walk, args: argparse.Namespace) -> None:
    """SkyPilot's quickstart, as far as one comes without an account."""
    walk.make_environment()
    code, _ = walk.type("pip install -q skypilot", "ERROR")
    if code == 0:
        walk.bring_script()
        walk.type("sky check", r"(?i)enabled|no cloud")
        walk.edit("task.yaml", TASK)
        walk.type("sky launch -y task.yaml", r"(?i)error|no cloud|exception|cannot")
    walk.end(
        kill="not run: it needs an account of a cloud, or a cluster", version=ask_version(walk)
    )
    subprocess.run(
        [str(walk.folder / "env/bin/sky"), "api", "stop"],
        env=walk.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip


def ask_version(walk: Walk) -> str:
    """Return the version of SkyPilot that was installed; empty where it was not."""
    code = "from importlib.metadata import version; print(version('skypilot'))"
    python = str(walk.folder / "env/bin/python")
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def describe(found: dict[str, Any]) -> str:
    """Return what a kill cost, in a line."""
    if "resumed_at" not in found:
        return f"step {found['killed_at']} -> none: it ends with {found['ends_with']}"
    return (
        f"step {found['killed_at']} -> step {found['resumed_at']}: {found['steps_made_again']} "
        f"steps made again; the next one after {found['next_step_s']:.2f} s, where it was after "
        f"{found['where_it_was_s']:.1f} s"
    )


WALKS = {
    "demo": walk_demo,
    "wheel": walk_wheel,
    "torchrun": walk_torchrun,
    "skypilot": walk_skypilot,
}


def main() -> None:
    """Take the walks one after another, and print a row for each command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(WALKS), metavar="NAME,...")
    parser.add_argument("--kill-after-s", type=float, default=30.0)
    parser.add_argument("--wheel", type=Path)
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(WALKS):
        parser.error(f"no walk {', '.join(unknown)}: {', '.join(WALKS)}")
    tell(stamp())
    for name in names:
        with tempfile.TemporaryDirectory(prefix="first-steps-", ignore_cleanup_errors=True) as path:
            WALKS[name](Walk(name, Path(path)), args)


if __name__ == "__main__":
    sweep_after_me()
    main()
