"""`make campaign`: random SIGKILLs of any process of a job, then the books are checked.

A job of two ranks (depth resumable, dropout, shuffled data) runs while processes picked at random
(rank, keeper, zygote, agent, controller, nats-server) are killed at random moments. Afterwards:
the job ended by itself with exit code 0; every committed step's loss equals the uninterrupted
run's to the bit; every sample of every step was used once; no process is left; the ledger closes.
With `--user NAME` (as root) the whole job runs as that ordinary user.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from sweep import sweep_after_me

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "e2e" / "scripts" / "train_exact.py"
PARTS = ("rank", "rank", "keeper", "zygote", "agent", "controller", "nats")


def find_parts(root: int) -> dict[str, list[psutil.Process]]:
    """Return the job's living processes by part, below the supervisor `root`."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process(root).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        for part in ("rank", "keeper", "zygote", "agent", "controller"):
            if alive and f"perdure {part} " in title:
                found.setdefault(part, []).append(process)
        if alive and "nats-server" in title:
            found.setdefault("nats", []).append(process)
    return found


def start(home: Path, name: str, steps: int, pace_s: float, user: str) -> subprocess.Popen[bytes]:
    """Start the job under `perdure run`."""
    trail = home / f"trail-{name}"
    trail.mkdir(parents=True)
    if user:
        for path in (home, trail):
            shutil.chown(path, user)
    command = [sys.executable, "-m", "perdure", "run", "-n", "2", "--name", name, "-c"]
    spec = home / f"{name}.toml"
    spec.write_text(
        f'script = "{SCRIPT}"\nargs = ["--trail", "{trail}", "--steps", "{steps}", "--pace-s", '
        f'"{pace_s}"]\n[checkpoint]\nevery_steps = 20\n'
        "[restart]\nmax_restarts = 20\nwindow_max = 1000\n"
    )
    command.append(str(spec))
    if user:
        command = ["setpriv", f"--reuid={user}", "--clear-groups", "--", *command]
    out = open(home / f"{name}.out", "wb")  # noqa: SIM115
    env = dict(os.environ, PERDURE_HOME=str(home / "state"), HOME=str(home))
    return subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=home)


def read_trail(folder: Path) -> tuple[dict[tuple[int, int], str], list[str]]:
    """Return each (rank, step)'s last record, and a line for each repetition that differs."""
    last: dict[tuple[int, int], str] = {}
    differs = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a line cut short by the kill: the step was not committed
            key = (row["rank"], row["step"])
            value = json.dumps([row["loss"], row["indices"]])
            if last.setdefault(key, value) != value:
                differs.append(f"rank {key[0]} step {key[1]}: {last[key]} then {value}")
            last[key] = value
    return last, differs


def check(home: Path, steps: int, code: int) -> list[str]:
    """Return what is wrong after a killed run, one line each."""
    wrong = [] if code == 0 else [f"exit code {code}"]
    want, _ = read_trail(home / "trail-reference")
    got, differs = read_trail(home / "trail-killed")
    wrong += differs
    wrong += [f"{key}: missing" for key in want if key not in got]
    wrong += [
        f"{key}: {want[key]} but {got[key]}" for key in want if got.get(key, want[key]) != want[key]
    ]
    if len(want) != 2 * steps:
        wrong.append(f"the reference itself has {len(want)} of {2 * steps} steps")
    report = json.loads(
        subprocess.run(
            [sys.executable, "-m", "perdure", "report", "killed", "--json"],
            env=dict(os.environ, PERDURE_HOME=str(home / "state")),
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout
    )  # fmt: skip
    unattributed = report["ledger"]["unattributed"]["fraction"]
    if abs(unattributed) > 0.005:
        wrong.append(f"unattributed {unattributed:.4f}")
    return wrong


def leftovers(home: Path) -> list[str]:
    """Return the processes that still carry this campaign's state directory."""
    marker = f"PERDURE_HOME={home / 'state'}"
    left = []
    for process in psutil.process_iter():
        try:
            if marker in (f"{k}={v}" for k, v in process.environ().items()):
                left.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        except psutil.Error:
            continue
    return left


def main() -> int:
    """Run the campaign; exit code 1 where anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--gap-s", type=float, default=3.0, help="mean time between kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--user", default="", help="run as this ordinary user (needs root)")
    parser.add_argument("--steps", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    steps = args.steps or int(args.kills * args.gap_s * 20)
    home = Path(tempfile.mkdtemp(prefix="perdure-campaign-"))
    home.chmod(0o755)
    counts: Counter[str] = Counter()
    try:
        reference = start(home, "reference", steps, 0.0, args.user)
        if reference.wait(3600) != 0:
            print((home / "reference.out").read_text()[-3000:], file=sys.stderr)
            return 1
        process = start(home, "killed", steps, 0.03, args.user)
        while process.poll() is None and sum(counts.values()) < args.kills:
            time.sleep(chance.expovariate(1 / args.gap_s))
            parts = find_parts(process.pid) if process.poll() is None else {}
            part = chance.choice(PARTS)
            if victims := parts.get(part):
                chance.choice(victims).send_signal(signal.SIGKILL)
                counts[part] += 1
                print(f"{sum(counts.values()):4d} SIGKILL {part}", file=sys.stderr, flush=True)
        code = process.wait(1800)
        time.sleep(1.0)
        wrong = check(home, steps, code) + [f"left: {line}" for line in leftovers(home)]
        for line in wrong[:40]:
            print("campaign: " + line, file=sys.stderr)
        if wrong:
            print((home / "killed.out").read_text()[-4000:], file=sys.stderr)
            print(f"campaign: state kept in {home}", file=sys.stderr)
        kills = {part: counts[part] for part in sorted(counts)}
        print(json.dumps({"kills": kills, "steps": steps, "wrong": len(wrong), "user": args.user}))
        return 1 if wrong else 0
    finally:
        if "wrong" in locals() and not locals()["wrong"]:
            shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sweep_after_me()
    sys.exit(main())
