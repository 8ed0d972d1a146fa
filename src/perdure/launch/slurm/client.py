"""The one door to Slurm's commands, on this machine or on a login node.

Each call is one short, bounded command: Slurm's own retry for minutes when a controller is away,
and a question that was not answered says nothing about the job.
"""

import re
import shlex
import time
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from perdure.launch.channel import Channel, Done
from perdure.launch.exchange import UnreachedError, make_lines
from perdure.launch.platforms import Here
from perdure.launch.runs import RUNS, Run
from perdure.launch.ssh import ask
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.platforms.launching import BoxState, LaunchRecord, judge_outcome
from perdure.model.platforms.outcome import Outcome
from perdure.model.platforms.profile import LaunchSection, Profile
from perdure.model.platforms.slurm import (
    SACCT_FIELDS,
    Allocation,
    SlurmRow,
    explain_attempt,
    explain_attempts,
    explain_rows,
    join_ends,
    list_tasks,
    parse_job_id,
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


def render_hook(profile: Profile) -> str:
    """Return what a login node has to be told before Slurm's commands are found there."""
    hook = profile.overrides.PROXY_HOOK
    return f"{hook}\n" if hook and profile.launch.host else ""


def extract_reason(said: str) -> str:
    """Return the first thing that one of Slurm's commands complains of; the rest repeats it.

    >>> extract_reason("sbatch: error: invalid partition specified: x")
    'invalid partition specified: x'
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return re.sub(r"^(\w+: )?(error|fatal): ", "", lines[0]) if lines else "it gives no reason"


class Slurm:
    """Slurm's commands on this machine, or where `profile` has them."""

    def __init__(self, profile: Profile | None = None) -> None:
        """Connect to nothing yet."""
        self._channel = Channel(profile.launch if profile else LaunchSection())
        self._hook = render_hook(profile) if profile else ""

    def ask(self, script: str, *, stdin: str = "") -> Done:
        """Run what may be run twice; return how it ended.

        Raises:
            PlatformError: no connection, no Slurm there, or nobody answered in time.
        """
        done = self._channel.ask(self._hook + script, stdin=stdin.encode(), timeout_s=3 * TIMEOUT_S)
        if done.code == _NOT_FOUND:
            raise PlatformError(
                f"{self._channel.name}: no Slurm there: {extract_reason(done.err)}",
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
        job = parse_job_id(done.out.splitlines())
        if done.code or not job:
            raise PlatformError(
                f"sbatch refuses: {extract_reason(done.err or done.out)}",
                hint=f"look at {folder}/job.sbatch",
            )
        return job

    def find_submitted(self, folder: str) -> str:
        """Return the id of the newest submission from `folder`; empty for none."""
        done = self.ask(f'tail -n 1 "{folder}/{SUBMITTED}" 2>/dev/null; true')
        return done.out.strip().rpartition(" ")[2]

    def test_submit(self, script: str) -> str:
        """Return why Slurm would refuse a script; empty where it would take it."""
        code, out, err = self.call("sbatch", "--test-only", stdin=script)
        return extract_reason(err or out) if code else ""

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

    def look(self, job: str) -> tuple[Outcome, SlurmRow | None]:
        """Return how a job is, and what `scontrol` has of it.

        `scontrol` is first, since it knows of this moment; of an attempt that has ended it shows
        one row, so the accounting's steps are asked for as well, where there is any.

        Raises:
            PlatformError: nobody answered.
        """
        _, out, err = self.call("scontrol", "-d", "-o", "show", "job", job)
        rows = (read_scontrol(parse_scontrol(line)) for line in out.splitlines())
        tasks = [row for row in rows if row is not None]
        own = tasks[0] if tasks else None
        if own is None and "Invalid job id" not in err and err:
            raise PlatformError(f"scontrol: {err}", hint="ask again: this says nothing of the job")
        ends = [explain_attempt([row]) for row in tasks]
        now = join_ends(ends) if len(ends) > 1 else next(iter(ends), None)
        if now is not None and not now.over:
            return now, own
        told = explain_rows(self.account(job), job)
        # slurmdbd hears of an end a little later than slurmctld.
        return (told if told.over or now is None else now), own

    def account(self, job: str) -> Sequence[SlurmRow]:
        """Return the rows of all attempts of a job and their steps; none without accounting."""
        code, out, _ = self.call("sacct", "-D", "-n", "-P", "-j", job, "-o", SACCT_FIELDS)
        return parse_sacct(out) if code == 0 else ()

    def list_attempts(self, job: str) -> list[Outcome]:
        """Return how each attempt of a job ended, oldest first; without accounting none."""
        return explain_attempts(self.account(job), job)

    def query_end(self, allocation: Allocation) -> Outcome:
        """Return how one attempt of a job is, or ended.

        Without accounting only the newest is known: where a job was put back, why is not.
        """
        attempts = self.list_attempts(allocation.job)
        if len(attempts) > allocation.restart and attempts[allocation.restart].over:
            return attempts[allocation.restart]
        end, row = self.look(allocation.job)
        if row is not None and row.restarts > allocation.restart:
            return Outcome(
                state="unknown",
                reason="Slurm has put it back, after a preemption or the failure of a node; "
                "accounting is off",
            )
        return end


_POLL_S = 2.0
_STEP = """\
exec 3>&1
code=$(srun {options} sh -c '"$@"; echo "@@perdure step $?" >&2' sh {words} 2>&1 >&3 3>&- \\
    | sed -u -n -e 's/^@@perdure step //p' -e t -e 'w /dev/stderr')
exit "${{code:-1}}"
"""
"""A command line as a step. Slurm counts the step's exit code as one of the job's own
(DerivedExitCode), so it is 0, and that of the command is told beside it."""
_NOT_YET = 3
"""Exit code of a question about a job that has written nothing yet."""


def query_state(record: LaunchRecord, here: Here) -> BoxState:
    """Return how the job is, by Slurm and by the records of its own runs."""
    end, row = _look(record)
    if end.state == "unknown":
        return _read_runs(record)
    where = f"Slurm job {row.id} on {row.nodes}" if row and row.nodes else "in Slurm's queue"
    if end.over and end.state != "done":
        end = replace(end, code=end.code or 1)
    attempt = row.restarts + 1 if row else 1
    return judge_outcome(end, attempt, end.reason or ("" if end.over else where))


def _look(record: LaunchRecord) -> tuple[Outcome, SlurmRow | None]:
    """Return how Slurm has the job; a submission whose answer was lost is found at its place."""
    slurm = Slurm(record.profile)
    job = record.id or slurm.find_submitted(_locate_launch_folder(record))
    if not job:
        raise PlatformError(f"job {record.job} was not submitted", hint="perdure launch it again")
    return slurm.look(job)


def _locate_launch_folder(record: LaunchRecord) -> str:
    return f"{record.place}/launch" if record.profile.launch.host else record.place


def _read_runs(record: LaunchRecord) -> BoxState:
    """Return how the newest run ended by its own record: Slurm has forgotten it.

    Raises:
        PlatformError: there is none.
    """
    name, _, task = record.job.rpartition("-")
    file = f"runs-{task}.jsonl" if name and "_" in record.id else RUNS
    done = Slurm(record.profile).ask(f'tail -n 1 "{_locate_launch_folder(record)}/{file}"')
    try:
        run = msgspec.json.decode(done.out.strip() or "{}", type=Run)
    except msgspec.MsgspecError:
        raise PlatformError(
            f"Slurm says nothing of job {record.id}", hint=f"sacct -D -j {record.id}"
        ) from None
    return BoxState(
        state="ended" if run.state in ("done", "failed", "stopped") else "killed",
        code=run.code,
        attempt=run.restart + 1,
        ended_s=run.ended_s,
        reason=f"Slurm has forgotten it; its last run's own record says {run.state}",
    )


def run(record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
    """Run a perdure command line on the login node, or in the job's allocation while it runs."""
    command = argv[0]
    if list_tasks(record.profile.slurm.array) and "_" not in record.id:
        return _run_array(record, command, here)
    if command == "logs" and {"-f", "--follow"} & set(argv):
        return _follow_chain(record, argv)
    end, row = _look(record)
    if command == "stop" and not end.over and not _has_begun(record, end):
        Slurm(record.profile).cancel(record.id)
        here.tell(f"{record.job} had not begun, and is out of the queue")
        return 0
    # While it is COMPLETING, it counts as running, and takes no step any more.
    node = row.nodes if row is not None and row.state == "RUNNING" else ""

    def carry(record: LaunchRecord, argv: Sequence[str]) -> str:
        return _carry(record, argv, node)

    return ask.run(record, argv, here, carry=carry)


def _has_begun(record: LaunchRecord, end: Outcome) -> bool:
    """Return whether there is anything yet that could be asked to stop."""
    if end.state == "waiting":
        return False
    return Slurm(record.profile).ask(f"test -e {_locate_document(record)}").code == 0


def _run_array(record: LaunchRecord, command: str, here: Here) -> int:
    """Answer for an array as a whole: its tasks are jobs of their own."""
    if command == "status":
        return 0  # The one who asks says how Slurm has it.
    if command == "stop":
        Slurm(record.profile).cancel(record.id)
        here.tell(f"Slurm ends the tasks of {record.job}; those that run save first")
        return 0
    tasks = list_tasks(record.profile.slurm.array)
    raise ConfigError(
        f"{record.job} is an array of {len(tasks)} jobs",
        hint=f"perdure {command} {record.job}-{tasks[0]}",
    )


def _carry(record: LaunchRecord, argv: Sequence[str], node: str) -> str:
    """Return the script that runs a command line: in the allocation where `node` is named.

    What only reads files needs no step of its own.
    """
    words = shlex.join([record.python, "-P", "-m", "perdure", *argv])
    command = f"exec {words}"
    if node and argv[0] != "logs":
        options = f"--jobid={record.id} --overlap --nodes=1 --ntasks=1 --nodelist={node}"
        command = _STEP.format(options=f"{options} --quiet --input=none", words=words)
    return render_hook(record.profile) + (
        f"test -e {_locate_document(record)} || "
        f"{{ echo 'perdure: it has written nothing yet' >&2; exit {_NOT_YET}; }}\n"
        f"export PERDURE_HOME={shlex.quote(record.home)} {ask.show_columns()}\n{command}"
    )


def _locate_document(record: LaunchRecord) -> str:
    """Return the path, for the shell, of what a job's own process writes first."""
    return shlex.quote(f"{record.home}/jobs/{record.job}/job.json")


def _follow_chain(record: LaunchRecord, argv: Sequence[str]) -> int:
    """Follow the output of all runs of a job from the present one on; return the last exit code.

    A run's files are only read once they are its own: the one before had the same place.
    """
    channel, code = Channel(record.profile.launch), 0
    restart, show = -1, make_lines(argv)
    while True:
        end, row = _look(record)
        if row is not None and row.restarts != restart:
            restart, show = row.restarts, make_lines(argv)
        parts = shlex.quote(f"{record.home}/jobs/{record.job}/parts.json")
        mark = f'"job":"{record.id}","restart":{max(restart, 0)}}}'
        own = f"grep -qsF {shlex.quote(mark)} {parts} || exit 0\n"

        def carry(record: LaunchRecord, argv: Sequence[str], own: str = own) -> str:
            return own + _carry(record, argv, "")

        if end.state != "waiting":
            code = ask.follow(channel, record, argv, carry, show)
        if end.over or end.state == "unknown":
            return code
        time.sleep(_POLL_S)
