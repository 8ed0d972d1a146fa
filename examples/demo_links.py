"""`make demo`, second part: a slow network link is made, and found.

Four nodes, each in a network namespace of its own, train over a bridge; then one directed link is
slowed to 100 Mbit/s and the next moment perdure says which. Needs root and iproute2 and says so
where it cannot. The network is the one of the fault laboratory (`tests/lab`, `docs/lab.md`).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".demo-links"
PERDURE = [sys.executable, "-m", "perdure"]
JOB = "links"
LEARN_S, FIND_S = 12.0, 20.0
SLOW_LINK = ["slow-link", "--rank", "2", "--arg", "to=1", "--arg", "mbit=100"]

sys.path.insert(0, str(ROOT))
from tests.lab.network import Lab, why_not  # noqa: E402


def ask(*words: str) -> dict[str, object]:
    """Return what a command answers as JSON; an empty object where it cannot."""
    done = subprocess.run([*PERDURE, *words, "--json"], capture_output=True, text=True, timeout=60)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def wait_for_state(state: str, timeout_s: float) -> None:
    """Wait until the job is in `state`."""
    end = time.monotonic() + timeout_s
    while ask("status", JOB).get("state") != state:
        if time.monotonic() > end:
            raise SystemExit(f"demo: the job was not {state} within {timeout_s:g} s")
        time.sleep(0.3)


def find_verdict() -> tuple[float | None, set[str]]:
    """Return the seconds until the slow link was named, None if it was not; and what else was."""
    began, kinds = time.monotonic(), set[str]()
    while time.monotonic() - began < FIND_S:
        verdicts = ask("diagnose", JOB).get("verdicts", [])
        kinds |= {v["kind"] for v in verdicts} if isinstance(verdicts, list) else set()
        if "CommSlow" in kinds:
            return time.monotonic() - began, kinds
        time.sleep(0.2)
    return None, kinds


def train(lab: Lab) -> int:
    """Train on the lab's nodes, slow a link, show what was found."""
    placement = str(lab.write_placement(HOME))
    script = str(ROOT / "tests" / "lab" / "train.py")
    run = [*PERDURE, "run", "-c", "examples/demo_links.toml", "--nodes", str(lab.nodes)]
    process = subprocess.Popen([*run, "--placement", placement, script, "--declare"])
    try:
        wait_for_state("running", 90.0)
        time.sleep(LEARN_S)
        print(f"demo: perdure inject {JOB} {' '.join(SLOW_LINK)}", flush=True)
        subprocess.run([*PERDURE, "inject", JOB, *SLOW_LINK], check=False, timeout=60)
        seconds, kinds = find_verdict()
        if seconds is None:
            print(f"demo: the slow link was not found within {FIND_S:g} s")
            if "HostBusy" in kinds:
                print("demo: other work keeps this machine busy, which explains a slow step as")
                print("demo: well; when it is quieter: .venv/bin/python examples/demo_links.py")
            return 1
        print(f"demo: found after {seconds:.1f} s\n", flush=True)
        subprocess.run([*PERDURE, "diagnose", JOB], check=False, timeout=60)
        return 0
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """Return 0 where the link was found, or where there can be no such network."""
    if reason := why_not():
        print(f"demo: no slow link is shown, it needs network namespaces: {reason}")
        return 0
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    os.environ["PERDURE_HOME"] = str(HOME)
    os.chdir(ROOT)
    print("\ndemo: four nodes with networks of their own; one link will be slowed", flush=True)
    with Lab(4) as lab:
        return train(lab)


if __name__ == "__main__":
    sys.exit(main())
