"""G1: the machine, the tests that are marked `gpu`, and a context in a cold and in a forked rank.

Passes where shared memory takes a snapshot, the plugin can be built, each test marked `gpu` passes
and none is skipped, and a rank that is forked from the image has its context no later than one that
is executed. On the CPU tests of the plugin take the place of those marked `gpu`.
"""

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

from perdure.worker.native.build import build_nccl_plugin
from perdure.worker.system.process import set_subreaper
from tests.gpu.g02_fork import Image, fork_contexts
from tests.gpu.kit import ROOT, Trial

SHARED_MIN = 1 << 30
TESTS_S, REPORT_S = 70.0, 5.0
TESTS = (
    "tests/contract/test_communicators.py",
    "tests/contract/test_nccl_gpu.py",
    "tests/contract/test_devices_gpu.py",
)
DRY_TESTS = ("tests/contract/test_nccl_plugin.py", "-k", "one_all_reduce")
CONTEXT = Path(__file__).with_name("context_rank.py")


def run(trial: Trial) -> None:
    set_subreaper()  # As the keeper is: it becomes the parent of forked ranks.
    shared = shutil.disk_usage("/dev/shm")
    trial.note(shared_bytes=shared.total, shared_free_bytes=shared.free, cpus=os.cpu_count())
    wrong: list[str] = []
    trial.expect(2)
    if shared.free >= trial.choose(SHARED_MIN, 1):
        trial.passed()
    else:
        wrong.append(f"/dev/shm has only {shared.free >> 20} MB")
    cold_s, forked_s = measure_contexts(trial, wrong)
    trial.note(cold_s=round(cold_s, 3), forked_s=round(forked_s, 3))
    if forked_s <= cold_s:
        trial.passed()
    else:
        wrong.append(f"forked after {forked_s:.1f} s, and executed after {cold_s:.1f} s")
    trial.note(plugin=build_nccl_plugin())
    wrong += run_tests(trial)
    assert not wrong, "; ".join(wrong)


def measure_contexts(trial: Trial, wrong: list[str]) -> tuple[float, float]:
    """Return the seconds until a rank has its context, executed and forked: medians."""
    cold, forked = [], []
    with Image("") as image:
        if reason := image.prove():
            wrong.append(f"the image says that it is unfit: {reason}")
            return 0.0, float("inf")
        for number in range(trial.choose(3, 1)):
            began_s = time.monotonic()
            subprocess.run([sys.executable, str(CONTEXT), trial.device], check=True,
                           stdout=subprocess.DEVNULL, timeout=30.0)  # fmt: skip
            cold.append(time.monotonic() - began_s)
            began_s = time.monotonic()
            trial.expect(1)
            wrong += fork_contexts(trial, image, f"forked-{number}", ranks=1)
            forked.append(time.monotonic() - began_s)
    return statistics.median(cold), statistics.median(forked)


def run_tests(trial: Trial) -> list[str]:
    """Count each test that has passed; return what others say."""
    found = trial.folder / "tests.xml"
    words = DRY_TESTS if trial.dry else (*TESTS, "-m", "gpu")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    with open(trial.folder / "tests.out", "wb") as out:
        tests = subprocess.Popen([*command, *words, f"--junitxml={found}"], cwd=ROOT,
                                 stdout=out, stderr=out)  # fmt: skip
        for limit_s, number in ((TESTS_S, signal.SIGINT), (REPORT_S, signal.SIGKILL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                tests.wait(limit_s)
                break
            tests.send_signal(number)  # At the first one it reports on those that have ended.
        code = tests.wait()
    print((trial.folder / "tests.out").read_text(errors="replace")[-8000:], flush=True)
    if not found.is_file():
        trial.expect(1)
        return [f"pytest ended with {code} and no report"]
    cases = list(ElementTree.parse(found).iter("testcase"))
    trial.expect(len(cases))
    wrong = [] if code in (0, 1) else [f"pytest ended with {code}"]
    for case in cases:
        ends = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        if ends:
            wrong.append(f"{case.get('name')}: {ends[0]}")
        else:
            trial.passed()
    trial.note(tests=len(cases), tests_wrong=wrong)
    return wrong if cases else ["pytest has run no test"]
