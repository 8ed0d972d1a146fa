"""`perdure run` on the GPU, for G19: jobs of the end-to-end tests, and what is left of them.

Ranks of one GPU connect over NCCL by sockets (`tests/contract/one_gpu.py`); the scripts give each
a host of its own. On the CPU the same jobs run over gloo, and what a job holds of the device is
the number of its processes.
"""

import contextlib
import os
import time
from collections.abc import Iterator

import psutil

from tests.contract.one_gpu import NCCL_ON_ONE_GPU
from tests.e2e.harness import SCRIPTS, Job
from tests.gpu.kit import Trial
from tests.gpu.memory import Gpu

DRY_JOB_S = 200.0
"""Less than the kit gives: a job that is late has to be shown."""
FREE_S = 5.0
SPARE = 256 << 20
"""Bytes by which a device's memory in use may differ."""
UNATTRIBUTED_MAX = 0.005
_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **NCCL_ON_ONE_GPU}


class Jobs:
    """The jobs of one experiment, in a state directory of their own."""

    def __init__(self, trial: Trial, limit_s: float) -> None:
        """Give each job so long on a GPU, which has to be less than the experiment has."""
        self._limit_s = trial.choose(limit_s, DRY_JOB_S)
        self.trial, self.home = trial, trial.folder / "jobs"
        self.home.mkdir()
        self.started: list[Job] = []
        self._gpu = None if trial.dry else Gpu()
        self._spare = 0 if trial.dry else SPARE
        self._computed = self._gpu is not None and self._gpu.is_computed_on()
        self._before = self._count_held()

    def start(self, name: str, *options: str) -> Job:
        """Start a job; what it runs is given the device by its own words."""
        self.started.append(Job(self.home, name, *options, timeout_s=self._limit_s))
        return self.started[-1]

    def check_held(self) -> None:
        """See that running ranks are seen on the device: else nothing could be said of the end."""
        held = self._count_held() - self._before
        self.trial.check(held > self._spare, f"what the ranks hold is not seen: {held}")

    def check_end(self, job: Job, code: int = 0) -> None:
        """Wait for a job's end, which is to be good, with a ledger that closes."""
        found = job.wait()
        self.trial.check(found == code, f"{job.name} ended with {found}")
        share = abs(job.report()["ledger"]["unattributed"]["fraction"])
        self.trial.note(**{f"{job.name}_unattributed": share})
        self.trial.check(share <= UNATTRIBUTED_MAX, f"{share:.2%} of the time is unattributed")

    def check_nothing_left(self) -> None:
        """See that no process is left, and that the device is as it was."""
        left = [line for job in self.started for line in job.leftovers()]
        self.trial.check(not left, f"left are {'; '.join(left)}")
        until_s = time.monotonic() + FREE_S
        while True:
            held = self._count_held() - self._before
            computed = self._gpu is not None and self._gpu.is_computed_on() and not self._computed
            if (held <= self._spare and not computed) or time.monotonic() > until_s:
                break
            time.sleep(0.05)
        self.trial.check(held <= self._spare, f"{held} are still held on the device")
        self.trial.check(not computed, "a process still computes on the device")

    def _count_held(self) -> int:
        """Return the bytes in use on the GPU; on the CPU, how many processes are the jobs'."""
        if self._gpu is not None:
            return self._gpu.count_used()
        state, found = str(self.home / "state"), 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                found += process.environ().get("PERDURE_HOME") == state
        return found


@contextlib.contextmanager
def open_jobs(trial: Trial, limit_s: float) -> Iterator[Jobs]:
    """Yield what starts jobs; all are ended, and nothing of them may be left."""
    if not trial.dry:
        os.environ |= _CUDA
    jobs = Jobs(trial, limit_s)
    try:
        yield jobs
    except BaseException:
        for job in jobs.started:
            show(job)
        raise
    finally:
        for job in jobs.started:
            job.end()
    jobs.check_nothing_left()


def show(job: Job) -> None:
    """Print what a job and its ranks have said, into the experiment's log."""
    print(f"--- {job.name}\n{job.text()[-6000:]}", flush=True)
    for path in sorted((job.folder / "logs" / "ranks").glob("g*/*.err")):
        if text := path.read_text(errors="replace"):
            print(f"--- {path.parent.name} {path.name}\n{text[-3000:]}", flush=True)


def find_script(name: str) -> str:
    """Return where a script of the end-to-end tests is."""
    path = SCRIPTS / name
    assert path.is_file()
    return str(path)
