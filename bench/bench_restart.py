"""SIGKILL of a rank: perdure's warm restart beside torchrun's, same script, in one run.

Measured from the kill to the restarted script's first own line (last rank), to its first step,
and to the step that was lost. Prints one JSON document. With `--old`, the other side is perdure of
another checkout, and the document has the 95 % interval of the ratio of each delay.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sweep import sweep_after_me

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "scripts" / "plain.py"
BIN = Path(sys.executable).parent


def read_log(path: Path) -> list[tuple[str, int, float, int]]:
    """Return (kind, rank, time, step) of every whole line."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        parts = line.split()
        if len(parts) >= 3:
            rows.append((parts[0], int(parts[1]), float(parts[2]), int([*parts, "-1"][3])))
    return rows


def find_rank_pid(root: int, rank: int) -> int:
    """Return the pid of the descendant of `root` whose log handle and RANK are those of `rank`."""
    import psutil

    for process in psutil.Process(root).children(recursive=True):
        try:
            environ = process.environ()
            files = [f.path for f in process.open_files()]
        except psutil.Error:
            continue
        owns_log = any(f.endswith("plain.log") for f in files)
        if owns_log and environ.get("RANK", str(rank)) == str(rank):
            return int(process.pid)
    raise RuntimeError(f"no process of rank {rank}")


def pid_of_rank(command: list[str], process: subprocess.Popen[bytes], home: str, rank: int) -> int:
    """Return the pid of `rank`, by perdure's map or by its environment under torchrun."""
    if "torchrun" in command[0]:
        return find_rank_pid(process.pid, rank)
    state = json.loads((Path(home) / "jobs" / "bench" / "state.json").read_text())
    return next(row["pid"] for row in state["ranks"] if row["rank"] == rank)


def measure(launcher: str, ranks: int, save_every: int, timeout_s: float) -> dict[str, float]:
    """Run the script under `launcher`, kill its last rank once, return the three delays.

    A `launcher` that is a folder is a checkout, whose perdure runs the script.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "plain.log"
        options = ["--trail", str(log), "--dir", folder, "--save-every", str(save_every)]
        env = dict(os.environ, PERDURE_HOME=folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        if launcher == "torchrun":
            command = [str(BIN / "torchrun"), "--standalone", "--max-restarts=3"]
            command += [f"--nproc-per-node={ranks}"]
        else:
            command = [str(BIN / "perdure"), "run", "-n", str(ranks), "--name", "bench"]
            command += ["--cold"] if launcher == "perdure --cold" else []
            env |= {"PYTHONPATH": f"{launcher}/src"} if os.path.isdir(launcher) else {}
        out = open(Path(folder) / "out", "wb")  # noqa: SIM115
        process = subprocess.Popen(
            [*command, str(SCRIPT), *options], env=env, stdout=out, stderr=out
        )
        try:
            return kill_and_time(command, process, folder, log, ranks, timeout_s)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            out.close()


def kill_and_time(
    command: list[str],
    process: subprocess.Popen[bytes],
    folder: str,
    log: Path,
    ranks: int,
    timeout_s: float,
) -> dict[str, float]:
    """Kill the last rank some steps after a checkpoint; time what follows."""
    deadline = time.monotonic() + timeout_s

    def wait_rows(condition: object) -> list[tuple[str, int, float, int]]:
        while time.monotonic() < deadline:
            rows = read_log(log)
            if condition(rows):  # type: ignore[operator]
                return rows
            time.sleep(0.05)
        raise TimeoutError

    try:
        wait_rows(lambda rows: any(r[0] == "step" and r[3] >= 75 for r in rows))
        time.sleep(1.0)  # past the first restart bookkeeping: a rank that is known by its pid
        pid = pid_of_rank(command, process, folder, ranks - 1)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        reached = max(r[3] for r in read_log(log) if r[0] == "step")

        def restarted(rows: list[tuple[str, int, float, int]]) -> bool:
            lines = {r[1] for r in rows if r[0] == "line" and r[2] > killed}
            first = max((r[2] for r in rows if r[0] == "line"), default=0)
            steps = [r for r in rows if r[0] == "step" and r[2] > first and r[3] >= reached]
            return len(lines) == ranks and bool(steps)

        rows = wait_rows(restarted)
    except TimeoutError:
        return {"hung": 1.0}
    line = max(r[2] for r in rows if r[0] == "line" and r[2] > killed)
    step = min(r[2] for r in rows if r[0] == "step" and r[2] > line)
    same = min(r[2] for r in rows if r[0] == "step" and r[2] > line and r[3] >= reached)
    return {
        "first_line_s": line - killed,
        "first_step_s": step - killed,
        "same_step_s": same - killed,
    }


def main() -> None:
    """Measure all launchers, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--old", metavar="FOLDER", help="a checkout to measure in turn")
    args = parser.parse_args()
    launchers = ["perdure", args.old] if args.old else ["perdure", "perdure --cold", "torchrun"]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in launchers}
    for _ in range(args.repeat):
        for name in launchers:
            runs[name].append(measure(name, args.ranks, args.save_every, 90.0))
            print(name, runs[name][-1], file=sys.stderr, flush=True)
    result: dict[str, object] = {"ranks": args.ranks, "repeat": args.repeat}
    for name, rows in runs.items():
        good = [row for row in rows if "hung" not in row]
        result[name] = {
            key: round(statistics.median(row[key] for row in good), 3)
            for key in ("first_line_s", "first_step_s", "same_step_s")
            if good
        } | {"hung": len(rows) - len(good)}
    if args.old:
        pairs = [
            p
            for p in zip(runs["perdure"], runs[args.old], strict=True)
            if "hung" not in {*p[0], *p[1]}
        ]
        for key in pairs[0][0]:
            ratios = [new[key] / old[key] for new, old in pairs]
            draws = [statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(5000)]
            ends = statistics.quantiles(draws, n=40)
            result[f"{key} of old"] = [
                round(x, 3) for x in (statistics.median(ratios), ends[0], ends[-1])
            ]
    print(json.dumps(result))


if __name__ == "__main__":
    sweep_after_me()
    main()
