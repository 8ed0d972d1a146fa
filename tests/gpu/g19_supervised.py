"""G19: `perdure run` of a DDP script that knows nothing of perdure: a crash, then a stop.

Passes where each time the rank is named and the world starts again, the job ends well, its ledger
closes, and nothing is left on the device.
"""

import json
import time

from tests.gpu.jobs import find_script, open_jobs
from tests.gpu.kit import Trial


def run(trial: Trial) -> None:
    with open_jobs(trial, 60.0) as jobs:
        job = jobs.start("ddp", "-n", "2", find_script("train_plain.py"), str(jobs.home),
                         trial.device)  # fmt: skip
        job.wait_state("running")
        jobs.check_held()
        for number, fault in enumerate(("crash", "stop")):
            began_s = time.monotonic()
            job.cli("inject", "ddp", fault, "--rank", "1")
            job.wait_until(
                lambda n=number: job.state().get("restarts", 0) == n + 1, "another generation"
            )
            job.wait_until(lambda n=number: job.find(f"rank ddp g{n + 1} r1"), "its ranks")
            job.wait_state("running")
            trial.took(time.monotonic() - began_s)
        (jobs.home / "hurry").touch()
        jobs.check_end(job)
        found = [row for row in job.report()["recoveries"] if row["rung"] == "restart"]
        trial.note(causes=[row["cause"] for row in found])
        culprits = [row["culprit"] for row in found]
        trial.check(culprits == ["rank 1", "rank 1"], f"the culprits are {culprits}")
        trial.check("SIGKILL" in found[0]["cause"], f"the crash was {found[0]['cause']}")
        verdicts = json.loads(job.cli("diagnose", "ddp", "--json").stdout)["verdicts"]
        hung = [one["culprit"].get("rank") for one in verdicts if "Hang" in one["kind"]]
        trial.check(1 in hung, f"hangs were of ranks {hung}")
