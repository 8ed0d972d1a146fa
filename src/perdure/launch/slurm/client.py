"""The one door to Slurm's commands.

Each call is bounded: they retry for minutes when a controller is away, and a question that was
not answered says nothing about the job.
"""

import subprocess
from collections.abc import Mapping, Sequence

from perdure.model.errors import PlatformError
from perdure.model.slurm import (
    SlurmEnd,
    SlurmRow,
    explain_rows,
    find_job_id,
    join_tasks,
    parse_sacct,
    parse_scontrol,
    read_scontrol,
)

TIMEOUT_S = 20.0
_FIELDS = "JobID,State,ExitCode,DerivedExitCode,Start,End"


def call(*words: str, stdin: str | None = None) -> tuple[int, str, str]:
    """Run one of Slurm's commands; return exit code, output and errors.

    Raises:
        PlatformError: it is not installed, or nobody answered in time.
    """
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise PlatformError(
            f"no {words[0]} here", hint="run this on a login node of the cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise PlatformError(
            f"{words[0]}: no answer in {TIMEOUT_S:g} s", hint="is slurmctld up? sinfo says"
        ) from error
    return done.returncode, done.stdout, done.stderr.strip()


def submit(path: str) -> str:
    """Submit a script; return the job's id.

    Raises:
        PlatformError: Slurm refuses it; the message has its reason.
    """
    code, out, err = call("sbatch", "--parsable", path)
    job = find_job_id(out.splitlines())
    if code or not job:
        raise PlatformError(f"sbatch refuses: {err or out.strip()}", hint=f"look at {path}")
    return job


def test_submit(script: str) -> str:
    """Return why Slurm would refuse a script; empty where it would take it."""
    code, out, err = call("sbatch", "--test-only", stdin=script)
    return (err or out).strip() if code else ""


def read_config() -> Mapping[str, str]:
    """Return the cluster's configuration."""
    _, out, _ = call("scontrol", "show", "config")
    rows = [line.partition("=") for line in out.splitlines() if "=" in line]
    return {name.strip(): value.strip() for name, _, value in rows}


def look(job: str) -> tuple[SlurmEnd, SlurmRow | None]:
    """Return how a job is, and what `scontrol` has of it.

    `scontrol` is first, since it knows of this moment; of an attempt that has ended it shows one
    row, so the accounting's steps are asked for as well, where there is any.

    Raises:
        PlatformError: nobody answered.
    """
    _, out, err = call("scontrol", "-o", "show", "job", job)
    found = [read_scontrol(parse_scontrol(line)) for line in out.splitlines()]
    tasks = [row for row in found if row is not None]
    if len(tasks) > 1:
        return join_tasks(tasks), tasks[0]
    own = tasks[0] if tasks else None
    if own is None and "Invalid job id" not in err and err:
        raise PlatformError(f"scontrol: {err}", hint="ask again: this says nothing of the job")
    now = explain_rows([own], own.id) if own else None
    if now is not None and not now.over:
        return now, own
    code, out, _ = call("sacct", "-D", "-n", "-P", "-j", job, "-o", _FIELDS)
    rows = parse_sacct(out) if code == 0 else []
    if rows:
        return explain_rows(rows, job), own
    return now or SlurmEnd(state="unknown", reason="Slurm has forgotten it"), own


def list_attempts(job: str) -> Sequence[SlurmRow]:
    """Return the rows of all attempts of a job and their steps; none without accounting."""
    code, out, _ = call("sacct", "-D", "-n", "-P", "-j", job, "-o", _FIELDS)
    return parse_sacct(out) if code == 0 else ()
