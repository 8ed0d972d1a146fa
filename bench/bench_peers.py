"""The same faults under torchrun, NVIDIA's resiliency extension and perdure: who says what, when.

Each run is one fault; the last rank brings it upon itself and writes down when. Every line that
the launcher and the ranks print is stamped as it comes, and the first that names a trouble
is kept. Time-outs that are half an hour by default are short here, and both are stated. Prints
one JSON document a run.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from sweep import sweep_after_me

SCRIPT = Path(__file__).parent / "scripts" / "peer_train.py"
FAULTS = ("stop", "sleep", "slow", "wrong", "kill")
GLOO_S, HEARTBEAT_S = 10, 5
DEFAULTS = {
    "torchrun": f"gloo's time-out {GLOO_S} s (default 1800 s)",
    "nvrx": f"heartbeat {HEARTBEAT_S} s, looked at each 1 s (default 2700 s, each 5 s)",
    "perdure": "defaults; gloo's time-out as under torchrun",
}
TROUBLE = {
    "torchrun": re.compile(r"Error|exitcode|Signal|[Tt]imed? ?out"),
    "nvrx": re.compile(r"Error|exitcode|Signal|[Tt]imed? ?out|heartbeat|straggl", re.I),
    "perdure": re.compile(r"^\[perdure\].* last verdict: "),
}


def make_command(peer: str, python: str, folder: Path) -> list[str]:
    """Return the launcher's part of the command line."""
    match peer:
        case "torchrun":
            return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        case "nvrx":
            options = {
                "workload-check-interval": 1,
                "rank-heartbeat-timeout": HEARTBEAT_S,
                "initial-rank-heartbeat-timeout": 30,
            }
            given = [f"--ft-param-{k.replace('-', '_')}={v}" for k, v in options.items()]
            launcher = str(Path(python).with_name("ft_launcher"))
            return [python, launcher, "--nproc-per-node=2", "--max-restarts=3", *given]
        case _:
            return [sys.executable, "-m", "perdure", "run", "-n", "2", "--name", "peer"]


def run(peer: str, fault: str, python: str, seconds: float) -> dict[str, object]:
    """Run one fault; return what was said first, and after how long."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mark = folder / "mark"
        env = {k: v for k, v in os.environ.items() if not k.startswith("PERDURE_")}
        env |= {"PERDURE_HOME": name, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env |= {
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{name}/fr_",
            "TORCH_FR_DUMP_TEMP_FILE": f"{name}/fr_",
        }
        env |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
        command = [*make_command(peer, python, folder), str(SCRIPT)]
        command += ["--fault", fault, "--mark", str(mark), "--timeout-s", str(GLOO_S)]
        process = subprocess.Popen(
            command + (["--nvrx"] if peer == "nvrx" else []),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        lines: list[tuple[float, str]] = []
        reader = threading.Thread(target=read_lines, args=(process, lines), daemon=True)
        reader.start()
        try:
            begun = wait_for(mark, 90.0)
            while time.monotonic() < begun + seconds and process.poll() is None:
                time.sleep(0.1)
            heard = len(lines)  # What comes later tells of our ending it.
            verdicts = ask_perdure(env) if peer == "perdure" else []
        finally:
            end(process, folder)
        reader.join(5)
        after = [(at - begun, line) for at, line in lines[:heard] if at >= begun]
        first = next(((at, x) for at, x in after if TROUBLE[peer].search(x)), None)
        return {
            "peer": peer,
            "fault": fault,
            "seconds": round(first[0], 2) if first else None,
            "says": first[1][:300] if first else f"nothing in {seconds:.0f} s",
            "verdicts": [{**v, "seconds": round(float(v["seconds"]) - begun, 2)} for v in verdicts],
            "dumps of Flight Recorder": len(list(folder.glob("fr_*"))),
            "set": DEFAULTS[peer],
            "lines": [f"{at:.2f} {x[:200]}" for at, x in after][:60],
        }


def read_lines(process: "subprocess.Popen[str]", lines: list[tuple[float, str]]) -> None:
    """Stamp each line as it comes."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.monotonic(), line.rstrip()))


def wait_for(mark: Path, seconds: float) -> float:
    """Return when the fault began."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if mark.exists() and (text := mark.read_text()):
            return float(text)
        time.sleep(0.02)
    raise SystemExit("the fault did not begin")


def ask_perdure(env: dict[str, str]) -> list[dict[str, object]]:
    """Return perdure's verdicts and when each was reached."""
    home = Path(env["PERDURE_HOME"]) / "jobs" / "peer"
    offset = json.loads((home / "endpoint.json").read_text())["clock_offset_s"]
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "diagnose", "peer", "--json"],
        env=env, capture_output=True, timeout=60,
    )  # fmt: skip
    return [
        {"kind": v["kind"], "reason": v["reason"], "seconds": float(v["confirmed_s"]) - offset}
        for v in json.loads(done.stdout)["verdicts"]
    ]


def end(process: "subprocess.Popen[str]", folder: Path) -> None:
    """End the launcher and whatever carries this run's folder in its command line."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)
        except OSError:
            continue


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", nargs="+", default=["torchrun", "nvrx", "perdure"])
    parser.add_argument("--faults", nargs="+", default=FAULTS)
    parser.add_argument("--nvrx-python", default=sys.executable, help="where it is installed")
    parser.add_argument("--seconds", type=float, default=20.0, help="listened to after the fault")
    parser.add_argument("--lines", action="store_true", help="keep all that was printed")
    args = parser.parse_args()
    for fault in args.faults:
        for peer in args.peers:
            found = run(peer, fault, args.nvrx_python, args.seconds)
            if not args.lines:
                del found["lines"]
            print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    sweep_after_me()
    main()
