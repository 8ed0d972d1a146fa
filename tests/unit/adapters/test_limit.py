"""CPU limits of cgroups: the kernel's own where one can be set, and files as it writes them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from perdure.adapters import host
from perdure.adapters.host import LimitMeter

CPU = Path("/sys/fs/cgroup/cpu")


@pytest.fixture
def groups() -> Iterator[tuple[Path, Path]]:
    """Return two cgroups: one may use a fiftieth of a core, one has no limit."""
    limited, free = (CPU / f"perdure-test-{os.getpid()}-{name}" for name in ("limited", "free"))
    try:
        limited.mkdir()
        free.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of one's own: {error}")
    try:
        (limited / "cpu.cfs_quota_us").write_text("2000")
        yield limited, free
    finally:
        for folder in (limited, free):
            wait_until(lambda folder=folder: _remove(folder), "end of its last process")


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def test_a_process_that_its_limit_stops_is_seen_and_one_beside_it_is_not(
    groups: tuple[Path, Path],
) -> None:
    limited, free = groups
    spin = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spin) as inside, subprocess.Popen(spin) as beside:
        try:
            (limited / "cgroup.procs").write_text(str(inside.pid))
            (free / "cgroup.procs").write_text(str(beside.pid))  # Ours may have a limit.
            meters = {inside.pid: LimitMeter(), beside.pid: LimitMeter()}
            for pid, meter in meters.items():
                assert meter.measure([pid], 0.0) == 0.0
            periods = limited / "cpu.stat"
            wait_until(lambda: int(periods.read_text().split()[1]) >= 12, "twelve periods")
            assert meters[inside.pid].measure([inside.pid], 1.0) == 0.0, "too soon to look again"
            assert meters[inside.pid].measure([inside.pid], 2.0) >= 0.5
            assert meters[beside.pid].measure([beside.pid], 2.0) == 0.0
        finally:
            inside.kill()
            beside.kill()


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_pod_counts_for_its_containers(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "cpu,cpuacct" if version == 1 else tmp_path
    container = base / "pod" / "container"
    container.mkdir(parents=True)
    line = "4:cpu,cpuacct:/pod/container" if version == 1 else "0::/pod/container"
    monkeypatch.setattr(host, "read_text", lambda path: _read(path, line))

    def tell(folder: Path, periods: int, stopped: int) -> None:
        (folder / "cpu.stat").write_text(
            f"usage_usec 5\nnr_periods {periods}\nnr_throttled {stopped}\nthrottled_usec 9\n"
        )

    meter = LimitMeter(str(tmp_path))
    tell(container, 0, 0)
    tell(base / "pod", 100, 50)
    assert meter.measure([1], 0.0) == 0.0
    tell(base / "pod", 200, 80)
    assert meter.measure([1], 2.0) == 0.3
    tell(base / "pod", 100, 50)  # A pod of the same name that began anew.
    assert meter.measure([1], 4.0) == 0.0
    (base / "pod" / "cpu.stat").write_text("nonsense\nnr_periods many\n")
    assert meter.measure([1], 6.0) == 0.0
    assert meter.measure([], 8.0) == 0.0


def _read(path: str, line: str) -> str:
    return line if path.startswith("/proc/") else Path(path).read_text()
