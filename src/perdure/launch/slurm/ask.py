"""A launched job asked through Slurm: its state, and perdure's commands beside it.

What the job's files say (all of them are on a shared file system) is read on the login node; what
has to reach its bus or its processes goes into its allocation, as a step of its own.
"""

import shlex
import time
from collections.abc import Sequence

import msgspec

from perdure.launch.channel import Channel
from perdure.launch.output import make_lines
from perdure.launch.platforms import Here
from perdure.launch.runs import RUNS, Run
from perdure.launch.slurm.client import Slurm, find_hook
from perdure.launch.ssh import ask
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.platforms.launching import BoxState, LaunchRecord
from perdure.model.platforms.slurm import SlurmEnd, SlurmRow, list_tasks

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


def find_state(record: LaunchRecord, here: Here) -> BoxState:
    """Return how the job is, by Slurm and by the records of its own runs."""
    end, row = _look(record)
    restarts = row.restarts if row else 0
    if end.state in ("waiting", "running"):
        where = f"Slurm job {row.id} on {row.nodes}" if row and row.nodes else "in Slurm's queue"
        return BoxState(state=end.state, attempt=restarts + 1, reason=end.reason or where)
    if end.state == "unknown":
        return _read_runs(record)
    told = end.reason if end.state in ("done", "failed") else f"{end.state}: {end.reason}"
    return BoxState(
        state="ended" if end.state in ("done", "failed") else "killed",
        code=end.code or (0 if end.state == "done" else 1),
        signal=end.signal,
        attempt=restarts + 1,
        reason=told,
    )


def _look(record: LaunchRecord) -> tuple[SlurmEnd, SlurmRow | None]:
    """Return how Slurm has the job; a submission whose answer was lost is found at its place."""
    slurm = Slurm(record.profile)
    job = record.id or slurm.find_submitted(_find_folder(record))
    if not job:
        raise PlatformError(f"job {record.job} was not submitted", hint="perdure launch it again")
    return slurm.look(job)


def _find_folder(record: LaunchRecord) -> str:
    return f"{record.place}/launch" if record.profile.launch.host else record.place


def _read_runs(record: LaunchRecord) -> BoxState:
    """Return how the newest run ended by its own record: Slurm has forgotten it.

    Raises:
        PlatformError: there is none.
    """
    name, _, task = record.job.rpartition("-")
    file = f"runs-{task}.jsonl" if name and "_" in record.id else RUNS
    done = Slurm(record.profile).ask(f'tail -n 1 "{_find_folder(record)}/{file}"')
    try:
        run = msgspec.json.decode(done.out.strip() or "{}", type=Run)
    except msgspec.MsgspecError:
        raise PlatformError(
            f"Slurm says nothing of job {record.id}", hint=f"sacct -D -j {record.id}"
        ) from None
    reason = f"Slurm has forgotten it; its last run's own record says {run.state}"
    return BoxState(
        state="ended" if run.state in ("done", "failed", "stopped") else "killed",
        code=run.code,
        attempt=run.restart + 1,
        ended_s=run.ended_s,
        reason=reason,
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


def _has_begun(record: LaunchRecord, end: SlurmEnd) -> bool:
    """Return whether there is anything yet that could be asked to stop."""
    if end.state == "waiting":
        return False
    begun = Slurm(record.profile).ask(f"test -e {_find_document(record)}")
    return begun.code == 0


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
        options = f"--jobid={record.id} --overlap --nodes=1 --ntasks=1 --nodelist={node} --quiet"
        command = _STEP.format(options=f"{options} --input=none", words=words)
    return find_hook(record.profile) + (
        f"test -e {_find_document(record)} || "
        f"{{ echo 'perdure: it has written nothing yet' >&2; exit {_NOT_YET}; }}\n"
        f"export PERDURE_HOME={shlex.quote(record.home)} {ask.show_columns()}\n{command}"
    )


def _find_document(record: LaunchRecord) -> str:
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
