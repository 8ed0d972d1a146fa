"""The one door to Slurm's commands, on this machine or on a login node.

Each call is one short, bounded command: Slurm's own retry for minutes when a controller is away,
and a question that was not answered says nothing about the job.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

from perdure.launch.channel import Channel, Done
from perdure.launch.exchange import UnreachedError
from perdure.model.errors import PlatformError
from perdure.model.platforms.profile import LaunchSection, Profile
from perdure.model.platforms.slurm import (
    SACCT_FIELDS,
    Allocation,
    SlurmEnd,
    SlurmRow,
    explain_attempt,
    explain_attempts,
    explain_rows,
    find_job_id,
    join_ends,
    parse_sacct,
    parse_scontrol,
    read_scontrol,
)

TIMEOUT_S = 20.0
SUBMITTED = "submitted"
"""In a job's folder: a line for each submission, its token and Slurm's id."""
_NO_ANSWER = 124
_NOT_FOUND = 127
_SUBMIT = """\
cd {folder} || exit 1
exec 9>submit.lock
flock -w {patience} 9 || exit 1
known=$(sed -n 's/^{token} //p' {file} 2>/dev/null)
if [ -z "$known" ]; then
    told=$(sbatch --parsable job.sbatch) || exit 1
    known=$(printf '%s\\n' "$told" | grep -oE '^[0-9]+' | tail -n 1)
    printf '{token} %s\\n' "$known" >> {file}
fi
echo "$known"
"""
"""A submission whose answer was lost is not made twice: the place remembers it by its token."""


def find_hook(profile: Profile) -> str:
    """Return what a login node has to be told before Slurm's commands are found there."""
    hook = profile.overrides.PROXY_HOOK
    return f"{hook}\n" if hook and profile.launch.host else ""


def find_reason(said: str) -> str:
    """Return the first thing that one of Slurm's commands complains of; the rest repeats it.

    >>> find_reason("sbatch: error: invalid partition specified: x")
    'invalid partition specified: x'
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return re.sub(r"^(\w+: )?(error|fatal): ", "", lines[0]) if lines else "it gives no reason"


class Slurm:
    """Slurm's commands on this machine, or where `profile` has them."""

    def __init__(self, profile: Profile | None = None) -> None:
        """Connect to nothing yet."""
        self._channel = Channel(profile.launch if profile else LaunchSection())
        self._hook = find_hook(profile) if profile else ""

    def ask(self, script: str, *, stdin: str = "") -> Done:
        """Run what may be run twice; return how it ended.

        Raises:
            PlatformError: no connection, no Slurm there, or nobody answered in time.
        """
        done = self._channel.ask(self._hook + script, stdin=stdin.encode(), timeout_s=3 * TIMEOUT_S)
        if done.code == _NOT_FOUND:
            raise PlatformError(
                f"{self._channel.name}: no Slurm there: {find_reason(done.err)}",
                hint="launch.host: a login node of the cluster; overrides.PROXY_HOOK: what puts "
                "its commands into PATH there",
            )
        if done.code == _NO_ANSWER:
            raise UnreachedError(
                f"{self._channel.name}: Slurm did not answer in {TIMEOUT_S:g} s",
                hint="is slurmctld up? sinfo says",
            )
        return done

    def call(self, *words: str, stdin: str = "") -> tuple[int, str, str]:
        """Run one of Slurm's commands that may be run twice; return code, output and errors."""
        done = self.ask(f"timeout {TIMEOUT_S:g} {shlex.join(words)}", stdin=stdin)
        return done.code, done.out, done.err

    def submit(self, folder: str, token: str) -> str:
        """Submit the script in `folder`, once for a token; return the job's id.

        Raises:
            PlatformError: Slurm refuses it; the message has its reason.
        """
        done = self.ask(
            _SUBMIT.format(
                folder=shlex.quote(folder), token=token, file=SUBMITTED, patience=int(TIMEOUT_S)
            )
        )
        job = find_job_id(done.out.splitlines())
        if done.code or not job:
            reason = find_reason(done.err or done.out)
            raise PlatformError(f"sbatch refuses: {reason}", hint=f"look at {folder}/job.sbatch")
        return job

    def find_submitted(self, folder: str) -> str:
        """Return the id of the newest submission from `folder`; empty for none."""
        done = self.ask(f'tail -n 1 "{folder}/{SUBMITTED}" 2>/dev/null; true')
        return done.out.strip().rpartition(" ")[2]

    def test_submit(self, script: str) -> str:
        """Return why Slurm would refuse a script; empty where it would take it."""
        code, out, err = self.call("sbatch", "--test-only", stdin=script)
        return find_reason(err or out) if code else ""

    def read_config(self) -> Mapping[str, str]:
        """Return the cluster's configuration."""
        _, out, _ = self.call("scontrol", "show", "config")
        rows = [line.partition("=") for line in out.splitlines() if "=" in line]
        return {name.strip(): value.strip() for name, _, value in rows}

    def cancel(self, job: str) -> None:
        """Take a job out of the queue, or end it."""
        code, _, err = self.call("scancel", job)
        if code:
            raise PlatformError(f"scancel: {err}")

    def look(self, job: str) -> tuple[SlurmEnd, SlurmRow | None]:
        """Return how a job is, and what `scontrol` has of it.

        `scontrol` is first, since it knows of this moment; of an attempt that has ended it shows
        one row, so the accounting's steps are asked for as well, where there is any.

        Raises:
            PlatformError: nobody answered.
        """
        _, out, err = self.call("scontrol", "-d", "-o", "show", "job", job)
        found = [read_scontrol(parse_scontrol(line)) for line in out.splitlines()]
        tasks = [row for row in found if row is not None]
        own = tasks[0] if tasks else None
        if own is None and "Invalid job id" not in err and err:
            raise PlatformError(f"scontrol: {err}", hint="ask again: this says nothing of the job")
        now = join_ends([explain_attempt([row]) for row in tasks]) if len(tasks) > 1 else None
        if own is not None and now is None:
            now = explain_attempt([own])
        if now is not None and not now.over:
            return now, own
        told = explain_rows(self.account(job), job)
        # slurmdbd hears of an end a little later than slurmctld.
        if told.over or now is None:
            return told, own
        return now, own

    def account(self, job: str) -> Sequence[SlurmRow]:
        """Return the rows of all attempts of a job and their steps; none without accounting."""
        code, out, _ = self.call("sacct", "-D", "-n", "-P", "-j", job, "-o", SACCT_FIELDS)
        return parse_sacct(out) if code == 0 else ()

    def list_attempts(self, job: str) -> list[SlurmEnd]:
        """Return how each attempt of a job ended, oldest first; without accounting none."""
        return explain_attempts(self.account(job), job)

    def find_end(self, allocation: Allocation) -> SlurmEnd:
        """Return how one attempt of a job is, or ended.

        Without accounting only the newest is known: where a job was put back, why is not.
        """
        attempts = self.list_attempts(allocation.job)
        if len(attempts) > allocation.restart and attempts[allocation.restart].over:
            return attempts[allocation.restart]
        end, row = self.look(allocation.job)
        if row is not None and row.restarts > allocation.restart:
            reason = "Slurm has put it back, after a preemption or the failure of a node"
            return SlurmEnd(state="unknown", reason=f"{reason}; accounting is off")
        return end
