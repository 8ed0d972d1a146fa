"""Launch to first step, and the end of a pod to the first new step, on a real Kubernetes.

    python -m bench.bench_kubernetes [--times 5]

Starts the one-node cluster of `make platforms-k8s`. Times are by the files that rank 0 writes; the
last step before a pod ends and the first after it are compared, so that what was not saved and is
made again counts as well.
"""

import argparse
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from tests.platforms.k8s.cluster import Kubernetes
from tests.platforms.k8s.tenant import Tenant

STEPS, PACE_S = 5000, 0.05


def main() -> None:
    """Measure, and print one row a kind of end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory(prefix="perdure-bench-k8s-") as folder:
        cluster = Kubernetes(Path(folder, "cluster"))
        try:
            began = time.monotonic()
            cluster.start()
            rows = {"cluster up": [time.monotonic() - began]}
            rows |= measure(cluster, Path(folder), times)
        finally:
            cluster.stop()
    for name, found in rows.items():
        print(f"{name:34} median {statistics.median(found):6.1f} s   of {sorted(found)}")
    print(json.dumps({name: [round(value, 2) for value in found] for name, found in rows.items()}))


def measure(cluster: Kubernetes, folder: Path, times: int) -> dict[str, list[float]]:
    """Return seconds by what is measured."""
    rows: dict[str, list[float]] = {"launch command": [], "launch to first step": []}
    ends: dict[str, Callable[[Tenant], None]] = {
        "deleted (SIGTERM) to first new step": delete,
        "killed (SIGKILL) to first new step": kill,
    }
    rows |= {name: [] for name in ends}
    for number in range(times):
        tenant = Tenant(cluster, make_folder(folder, number))
        tenant.write_exact(STEPS, PACE_S)
        began = time.monotonic()
        tenant.launch()
        rows["launch command"].append(time.monotonic() - began)
        wait(lambda tenant=tenant: tenant.find_step() >= 0, "a first step")
        rows["launch to first step"].append(time.monotonic() - began)
        for name, end in ends.items():
            reached = tenant.find_step() + 50
            wait(lambda tenant=tenant, reached=reached: tenant.find_step() >= reached, "steps")
            began = time.monotonic()
            end(tenant)
            highest = wait_stopped(tenant)
            wait(lambda tenant=tenant, highest=highest: find_last(tenant) > highest, "a new step")
            rows[name].append(time.monotonic() - began)
        cluster.clear()
    return {name: [round(value, 1) for value in found] for name, found in rows.items()}


def make_folder(folder: Path, number: int) -> Path:
    """Return a folder of its own for one launch."""
    path = folder / f"launch-{number}"
    path.mkdir()
    return path


def delete(tenant: Tenant) -> None:
    """Delete the pod."""
    tenant.cluster.kubectl("delete", "pod", tenant.find_running(), "--wait=false")


def kill(tenant: Tenant) -> None:
    """Kill all processes of the pod at once."""
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("PERDURE_POD_NAME", "").startswith("job-")
            root = Path(f"/proc/{process.pid}/root/checkpoints")
            if mine and root.stat().st_ino == tenant.durable.stat().st_ino:
                process.send_signal(signal.SIGKILL)
        except (psutil.Error, OSError):
            continue


def find_last(tenant: Tenant) -> int:
    """Return the highest step so far."""
    lines = (tenant.trail() / "rank-0.jsonl").read_text().splitlines()
    return max(int(json.loads(line)["step"]) for line in lines if line.endswith("}"))


def wait_stopped(tenant: Tenant) -> int:
    """Wait until a second passes without a step; return the highest one."""
    while True:
        before = find_last(tenant)
        time.sleep(1.0)
        if find_last(tenant) == before:
            return before


def wait(condition: Callable[[], object], what: str) -> None:
    """Wait up to three minutes."""
    until = time.monotonic() + 180
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"no {what}")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
