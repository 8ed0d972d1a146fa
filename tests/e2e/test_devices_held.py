"""A rank's start waits for the memory that the one before it had on a GPU: NVML is played."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import PATIENCE_S

Start = Callable[..., Job]
STUB = Path(__file__).parents[1] / "contract" / "nvml_stub.c"
GIB = 1 << 30


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Play NVML for everything that is started from here; return the file of its counters."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "lib" / "libnvidia-ml.so.1"
    library.parent.mkdir()
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(STUB)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("NVML_STUB", str(tmp_path / "counters"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    show(tmp_path / "counters", pid=0, used=GIB)
    return tmp_path / "counters"


def show(counters: Path, **values: int) -> None:
    """Have NVML say so; whoever looks meanwhile sees all of it or nothing."""
    new = counters.with_suffix(".next")
    new.write_text("".join(f"{name} {value}\n" for name, value in values.items()))
    os.replace(new, counters)


def has_seen(job: Job, used: int) -> bool:
    """Return whether an agent has told that so many bytes are in use on a device."""
    samples = [row["sample"] or {} for row in job.state().get("devices", ())]
    return any(sample.get("memory_bytes") == used for sample in samples)


def test_a_rank_starts_once_its_predecessors_memory_is_free_and_the_report_says_so(
    start: Start, counters: Path
) -> None:
    job = start("held", "-n", "1", "--cold", str(SCRIPTS / "train_holding.py"), str(counters))
    job.wait_until(lambda: "pid_used" in counters.read_text(), "a rank on the GPU")
    pid = int(counters.read_text().split()[1])
    job.wait_until(lambda: has_seen(job, 11 * GIB), "a look at its memory")
    show(counters, pid=0, used=11 * GIB, free_after=8)  # It is listed no more; its memory is held.
    os.kill(pid, signal.SIGKILL)
    assert job.wait() == 0, job.text()
    (recovery,) = json.loads(job.cli("report", "held", "--json").stdout)["recoveries"]
    before, _, after = recovery["reason"].partition("; node 0 waited ")
    assert "signal 9" in before
    assert after.endswith(" s for the memory of dead ranks on GPU-5tub")
    assert float(after.split()[0]) > 0


FAULTY = """
import os
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2:
    error = type("AcceleratorError", (RuntimeError,), {"__module__": "torch"})
    raise error("CUDA error: an illegal memory access was encountered\\nSearch for it in the docs")
"""


def test_a_cuda_error_is_told_and_the_second_on_a_gpu_costs_its_node_its_place(
    start: Start, counters: Path, tmp_path: Path
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    script = str(tmp_path / "faulty.py")
    words = ("-n", "1", "--spares", "1", "--max-restarts", "5", "--cold")
    job = start("faulty", *words, script)
    assert job.wait() == 0, job.text()
    first, second = json.loads(job.cli("report", "faulty", "--json").stdout)["recoveries"]
    for recovery in (first, second):
        assert "CUDA error: an illegal memory access was encountered" in recovery["cause"]
        assert "no process survives this CUDA error" in recovery["reason"]
    assert "the first on GPU-5tub within an hour" in first["reason"]
    assert "the second on GPU-5tub within an hour" in second["reason"]
    assert "node 1 stands in for node 0" in second["reason"]
    told = job.cli("diagnose", "faulty").stdout
    assert "no process survives this CUDA error" in told
