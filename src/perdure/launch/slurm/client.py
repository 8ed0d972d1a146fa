"""The one door to Slurm's commands, on this machine or on a login node.

Each call is one short, bounded command: Slurm's own retry for minutes when a controller is away,
and a question that was not answered says nothing about the job.
"""

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

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
from perdure.model.platforms.slurm_reasons import explain_refusal, extract_reason, is_silent

TIMEOUT_S = 20.0
SUBMITTED = "submitted"
"""In a job's folder: a line for each submission, its token and Slurm's id."""
_IS_UP = "is slurmctld up? sinfo says"
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


def locate_nodes(home: str, job: str) -> PurePosixPath:
    """Return where each machine that has joined a job has a PERDURE_HOME, by its name.

    `home` is the job's own. They hold logins, and are not pulled.
    """
    return PurePosixPath(home).parent / "nodes" / job


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
                f"{self._channel.name}: Slurm did not answer in {TIMEOUT_S:g} s", hint=_IS_UP
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
            said = done.err or done.out
            self._check_heard(said)
            refusal = explain_refusal(said)
            raise PlatformError(
                f"sbatch refuses: {refusal.text}",
                hint=f"{refusal.hint}; the script is {folder}/job.sbatch",
            )
        return job

    def _check_heard(self, said: str) -> None:
        """Tell a controller that is away from one that refuses.

        Raises:
            PlatformError: nobody has answered a command that complains so.
        """
        if is_silent(said):
            raise UnreachedError(f"{self._channel.name}: {extract_reason(said)}", hint=_IS_UP)

    def find_submitted(self, folder: str) -> str:
        """Return the id of the newest submission from `folder`; empty for none."""
        done = self.ask(f'tail -n 1 "{folder}/{SUBMITTED}" 2>/dev/null; true')
        return done.out.strip().rpartition(" ")[2]

    def test_submit(self, script: str) -> str:
        """Return what sbatch says against a script; empty where Slurm would take it.

        Raises:
            PlatformError: nobody answered.
        """
        code, out, err = self.call("sbatch", "--test-only", stdin=script)
        if code:
            self._check_heard(err or out)
        return (err or out or "it gives no reason") if code else ""

    def read_partition(self, name: str) -> Mapping[str, str]:
        """Return the fields of a partition, the default one without a name; none if unknown."""
        _, out, _ = self.call("scontrol", "-o", "show", "partition", *([name] if name else []))
        rows = [parse_scontrol(line) for line in out.splitlines()]
        return next((row for row in rows if name or row.get("Default") == "YES"), {})

    def has_pyxis(self) -> bool:
        """Return whether srun takes Pyxis' options."""
        return "--container-image" in self.call("srun", "--help")[1]

    def read_config(self) -> Mapping[str, str]:
        """Return the cluster's configuration."""
        _, out, _ = self.call("scontrol", "show", "config")
        rows = [line.partition("=") for line in out.splitlines() if "=" in line]
        return {name.strip(): value.strip() for name, _, value in rows}

    def submit_join(self, folder: str, name: str, grace_s: float, after: str) -> str:
        """Submit one further node of the job in `folder`; return its own job's id.

        It starts no sooner than Slurm job `after`. As `name` it gets the place that it had; a
        warning is a notice of `grace_s`, or as the profile has it where that is 0.

        Raises:
            PlatformError: Slurm refuses it.
        """
        words = ["sbatch", "--parsable", f"--dependency=after:{after}", "join.sbatch", name]
        words += [f"{grace_s:g}"] if grace_s else []
        done = self._channel.run(f"{self._hook}cd {shlex.quote(folder)} && {shlex.join(words)}")
        job = parse_job_id(done.out.splitlines())
        if done.code or not job:
            refusal = explain_refusal(done.err or done.out)
            raise PlatformError(f"sbatch refuses node {name}: {refusal.text}", hint=refusal.hint)
        return job

    def find_machines(self, home: str, job: str) -> Mapping[str, int]:
        """Return which node each machine is that has joined the job in `home` by `submit_join`."""
        pattern = f"{shlex.quote(str(locate_nodes(home, job)))}/*/jobs/{job}/credentials/agent-*"
        found = {}
        for line in self.ask(f"ls -tr {pattern} 2>/dev/null; true").out.splitlines():
            parts = line.split("/")
            number = parts[-1].removeprefix("agent-").removesuffix(".json")
            if len(parts) > 5 and number.isdigit():
                found[parts[-5]] = int(number)
        return found

    def warn(self, job: str) -> None:
        """Send a job's batch script what Slurm sends it before the walltime."""
        self.call("scancel", "--signal=USR1", "--batch", job)

    def kill(self, jobs: Sequence[str]) -> None:
        """End jobs at once, and without a word to what runs in them; one may be over already.

        Raises:
            PlatformError: nobody answered.
        """
        for words in (("--signal=KILL", "--full"), ()):  # Those that wait are cancelled.
            self._check_heard(self.call("scancel", *words, *jobs)[2] if jobs else "")

    def cancel(self, *jobs: str) -> None:
        """Take jobs out of the queue, or end them."""
        code, _, err = self.call("scancel", *jobs)
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
    if end.over and end.state != "done" and (own := _find_own_end(record, row)):
        return replace(own, reason=f"{own.reason}, although Slurm calls it {end.reason}")
    where = f"Slurm job {row.id} on {row.nodes}" if row and row.nodes else "in Slurm's queue"
    if end.over and end.state != "done":
        end = replace(end, code=end.code or 1)
    attempt = row.restarts + 1 if row else 1
    return judge_outcome(end, attempt, end.reason or ("" if end.over else where))


def _look(record: LaunchRecord) -> tuple[Outcome, SlurmRow | None]:
    """Return how Slurm has the job; a submission whose answer was lost is found at its place."""
    slurm = Slurm(record.profile)
    job = record.id or slurm.find_submitted(locate_launch_folder(record))
    if not job:
        raise PlatformError(f"job {record.job} was not submitted", hint="perdure launch it again")
    return slurm.look(job)


def locate_launch_folder(record: LaunchRecord) -> str:
    """Return the folder of the job's script, where Slurm is."""
    return f"{record.place}/launch" if record.profile.launch.host else record.place


def _find_own_end(record: LaunchRecord, row: SlurmRow | None) -> BoxState | None:
    """Return how the newest run ended by its own record, where it went through to its end.

    Slurm remembers each step's death for want of memory, or with its node; a job may have recovered
    from it, and ended well.
    """
    run = _read_last_run(record)
    job, restart = (row.id, row.restarts) if row else (record.id, run.restart if run else 0)
    if run is None or (run.job, run.restart, run.code) != (job, restart, 0):
        return None
    stopped = run.state == "stopped" and not (run.ended_by or run.warned)
    return _judge_run(run) if run.state == "done" or stopped else None


def _judge_run(run: Run) -> BoxState:
    return BoxState(
        state="ended" if run.state in ("done", "failed", "stopped") else "killed",
        code=run.code,
        attempt=run.restart + 1,
        ended_s=run.ended_s,
        reason=f"its last run's own record says {run.state}",
    )


def _read_last_run(record: LaunchRecord) -> Run | None:
    """Return what the newest run has written down of itself; None where none has."""
    name, _, task = record.job.rpartition("-")
    file = f"runs-{task}.jsonl" if name and "_" in record.id else RUNS
    done = Slurm(record.profile).ask(f'tail -n 1 "{locate_launch_folder(record)}/{file}"')
    try:
        return msgspec.json.decode(done.out.strip() or "{}", type=Run)
    except msgspec.MsgspecError:
        return None


def _read_runs(record: LaunchRecord) -> BoxState:
    """Return how the newest run ended by its own record: Slurm has forgotten it.

    Raises:
        PlatformError: there is none.
    """
    run = _read_last_run(record)
    if run is None:
        raise PlatformError(
            f"Slurm says nothing of job {record.id}", hint=f"sacct -D -j {record.id}"
        )
    own = _judge_run(run)
    return replace(own, reason=f"Slurm has forgotten it; {own.reason}")


def run(record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
    """Run a perdure command line on the login node, or in the job's allocation while it runs."""
    command = argv[0]
    if list_tasks(record.profile.slurm.array) and "_" not in record.id:
        return _run_array(record, command, here)
    if command == "logs" and {"-f", "--follow"} & set(argv):
        return _follow_chain(record, argv, here)
    end, row = _look(record)
    waits = end.state == "waiting"
    if command == "stop" and not end.over and (waits or not _has_written(record)):
        Slurm(record.profile).cancel(record.id)
        here.tell(f"{record.job} had not begun, and is out of the queue")
        return 0
    if command == "status" and waits and not _has_written(record):
        return 0  # As of an array, the one who asks says how Slurm has it.
    # While it is COMPLETING, it counts as running, and takes no step any more.
    node = row.nodes if row is not None and row.state == "RUNNING" else ""

    return ask.run(record, argv, here, carry=lambda record, argv: carry(record, argv, node))


def _has_written(record: LaunchRecord) -> bool:
    """Return whether a job has ever run far enough to be asked."""
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


def render_step(record: LaunchRecord, node: str, words: Sequence[str]) -> str:
    """Return the script that runs a command line as a step on a node of the job's allocation."""
    options = f"--jobid={record.id} --overlap --nodes=1 --ntasks=1 --nodelist={node}"
    return _STEP.format(options=f"{options} --quiet --input=none", words=shlex.join(words))


def carry(record: LaunchRecord, argv: Sequence[str], node: str) -> str:
    """Return the script that runs a command line: in the allocation where `node` is named.

    What only reads files needs no step of its own.
    """
    words = [record.python, "-P", "-m", "perdure", *argv]
    command = f"exec {shlex.join(words)}"
    if node and argv[0] != "logs":
        command = render_step(record, node, words)
    return render_hook(record.profile) + (
        f"test -e {_locate_document(record)} || "
        f"{{ echo 'perdure: it has written nothing yet' >&2; exit {_NOT_YET}; }}\n"
        f"export PERDURE_HOME={shlex.quote(record.home)} {ask.show_columns()}\n{command}"
    )


def _locate_document(record: LaunchRecord) -> str:
    """Return the path, for the shell, of what a job's own process writes first."""
    return shlex.quote(f"{record.home}/jobs/{record.job}/job.json")


def _follow_chain(record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
    """Follow the output of all runs of a job from the present one on; return the last exit code.

    A run's files are only read once they are its own: the one before had the same place. Between
    two of them each reason why the next one waits is told once.
    """
    channel, code = Channel(record.profile.launch), 0
    restart, show, told = -1, make_lines(argv), set[str]()
    while True:
        end, row = _look(record)
        if row is not None and row.restarts != restart:
            restart, show, told = row.restarts, make_lines(argv), set()
        if end.state == "waiting" and row is not None and row.reason not in told:
            told.add(row.reason)
            here.tell(f"{record.job} waits: {end.reason}")
        parts = shlex.quote(f"{record.home}/jobs/{record.job}/parts.json")
        mark = f'"job":"{record.id}","restart":{max(restart, 0)}}}'
        own = f"grep -qsF {shlex.quote(mark)} {parts} || exit 0\n"

        def look(record: LaunchRecord, argv: Sequence[str], own: str = own) -> str:
            return own + carry(record, argv, "")

        if end.state != "waiting":
            code = ask.follow(channel, record, argv, look, show)
        if end.over or end.state == "unknown":
            return code
        time.sleep(_POLL_S)
