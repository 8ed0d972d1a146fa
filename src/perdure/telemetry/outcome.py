"""What became of a job: told by what it leaves on the disk, never by its words.

A job has finished when its journal says so, and nobody but its own loss had ended it. Without
that, a supervisor that is gone means death, and one that lives without a sign of progress for long
enough means a stall. Signs of progress are files that ranks write and the beats of their loops;
the controller's own picture proves nothing.

Why `perdure run` is gone without having ended its job is Slurm's word, or one of four causes.
Where Slurm ran it, Slurm's own word is certain, and the machine that is asked may be another than
the one where the job was. Then the four, in this order: a reboot explains everything at once and
is certain; an out-of-memory kill leaves a line in the kernel's log; a hang-up is in the journal,
because it is a signal that is answered; what is left is SIGKILL by somebody, or a crash of
perdure's own.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from perdure.model.events import (
    CommandReceived,
    JobEnded,
    JournalEntry,
    NodeRegistered,
    RankExited,
)
from perdure.model.platforms.outcome import Outcome
from perdure.model.platforms.outcome import State as SlurmState

RUN_LOST = "loss of perdure run"
"""`who` of a command by which a controller ends the job that nobody is left to show."""
VanishingCause = Literal["reboot", "out of memory", "hang-up", "killed"] | SlurmState
_SLURM: dict[SlurmState, str] = {
    "out of memory": "more memory was used than asked for: a larger slurm.mem, or fewer workers",
    "time limit": "the walltime was over before the job had left; a larger slurm.warn_s",
    "preempted": "another job took its place; Slurm puts it back where --requeue is in force",
    "node failed": "Slurm puts it back on another node where --requeue is in force",
    "put back": "by scontrol requeue; its next run goes on from the newest checkpoint",
    "cancelled": "somebody ended it with scancel; the same launch resumes it",
}
"""What follows from an end that Slurm tells."""


def find_end(entries: Sequence[JournalEntry], *, by_loss: bool = False) -> JobEnded | None:
    """Return how a job was ended; None where it was not, or nobody but its own loss ended it.

    A controller that outlives `perdure run` for a moment ends the job, and says so: with `by_loss`
    that counts as well. The end need not be the last entry: a controller that was started for want
    of knowing it has said so after it.
    """
    found: JobEnded | None = None
    for entry in entries:
        if isinstance(entry.body, CommandReceived) and entry.body.who == RUN_LOST and not by_loss:
            return None
        if isinstance(entry.body, JobEnded):
            found = entry.body
    return found


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """When each kind of artifact last changed, in Unix time; 0 where there is none."""

    now_s: float
    alive: bool
    """Whether the job's lock is held."""
    outputs_s: float = 0.0
    checkpoints_s: float = 0.0
    loops_s: float = 0.0
    """The newest beat of a rank's loop."""


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a job."""

    state: Literal["finished", "dead", "stalled", "running"]
    reason: str
    newest_s: float = 0.0
    """Age of the newest sign of progress; 0 where there is none."""


def judge_outcome(entries: Sequence[JournalEntry], signs: Signs, allowance_s: float) -> JobOutcome:
    """Return what became of a job; one that gave no sign for `allowance_s` has stalled."""
    ended = find_end(entries)
    kinds = {
        "a checkpoint": signs.checkpoints_s,
        "output of a rank": signs.outputs_s,
        "a beat of a rank's loop": signs.loops_s,
    }
    newest = max(kinds, key=lambda name: kinds[name])
    age_s = max(0.0, signs.now_s - kinds[newest]) if kinds[newest] else 0.0
    if ended is not None:
        text = f"its journal ends with {ended.status}, exit code {ended.exit_code}"
        return JobOutcome(state="finished", reason=text, newest_s=age_s)
    sign = f"the newest sign is {newest}, {age_s:.0f} s ago" if kinds[newest] else "no sign at all"
    if not signs.alive:
        text = f"nobody holds its lock, and its journal has no end of its own; {sign}"
        return JobOutcome(state="dead", reason=text, newest_s=age_s)
    if kinds[newest] and age_s > allowance_s:
        text = f"it lives, and has shown nothing for {allowance_s:.0f} s: {sign}"
        return JobOutcome(state="stalled", reason=text, newest_s=age_s)
    return JobOutcome(state="running", reason=sign, newest_s=age_s)


def collect_last_words(entries: Iterable[JournalEntry]) -> list[str]:
    """Return what ranks that failed have left: errors, tracebacks, last lines."""
    words: list[str] = []
    for entry in entries:
        if isinstance(entry.body, RankExited) and entry.body.record.failed:
            record = entry.body.record
            if record.torn:
                continue  # The file is known, and the words would blame a full disk.
            words += [*record.last_output, *record.traceback.splitlines(), record.error]
    return [line for line in words if line]


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine says now."""

    boot_id: str
    boot_id_before: str = ""
    """At the job's start, where somebody but the journal has noted it: that may end too soon."""
    kernel_log: tuple[str, ...] = ()
    """Lines of the kernel's log about killed processes; empty where it cannot be read."""
    log_readable: bool = True
    memory_kills: int = 0
    """Of the cgroup that the job is in, since it was started; 0 where nobody counted."""
    elsewhere: str = ""
    """The machine where the job was, if it is another than this one."""
    slurm: Outcome | None = None
    """How the attempt ended that the job ran in, as Slurm has it."""


class Vanishing(msgspec.Struct, frozen=True):
    """The most probable cause, and what speaks for it."""

    cause: VanishingCause
    reason: str
    evidence: dict[str, object] = {}


def explain_vanishing(
    entries: Sequence[JournalEntry], facts: HostFacts, pids: Iterable[int] = ()
) -> Vanishing | None:
    """Return why a job that does not run has not ended, or was hung up; None where it ended.

    `pids` are those of the job's own parts, as far as they are known.
    """
    ended = find_end(entries)
    hung_up = [e for e in entries if isinstance(e.body, CommandReceived) and "SIGHUP" in e.body.who]
    if ended is not None and not hung_up:
        return None
    if ended is not None or hung_up:
        return Vanishing(
            "hang-up",
            "its terminal was closed (SIGHUP), and the job was stopped in good order; start it "
            "below tmux, with nohup or with setsid to survive that",
            {"at_s": hung_up[-1].at_s},
        )
    last_s = entries[-1].at_s if entries else 0.0
    if facts.slurm is not None and facts.slurm.state in _SLURM:
        told: dict[str, object] = {"slurm": facts.slurm.reason, "last_event_s": last_s}
        if facts.slurm.nodes:
            told["nodes"] = facts.slurm.nodes
        return Vanishing(facts.slurm.state, f"Slurm says so; {_SLURM[facts.slurm.state]}", told)
    boots = [facts.boot_id_before] if facts.boot_id_before else []
    boots += [e.body.boot_id for e in entries if isinstance(e.body, NodeRegistered)]
    here = bool(facts.boot_id) and facts.boot_id in boots
    if facts.elsewhere and not here:  # Else a DHCP server, for example, has renamed this machine.
        more = f"; Slurm: {facts.slurm.reason}" if facts.slurm is not None else ""
        reason = f"it ran on {facts.elsewhere}, whose kernel is not asked from here{more}"
        return Vanishing("unknown", reason, {"last_event_s": last_s})
    if boots and boots[-1] and facts.boot_id and not here:
        return Vanishing(
            "reboot",
            "the machine was started anew since; the same --name resumes the job",
            {"boot_id": boots[-1], "boot_id_now": facts.boot_id, "last_event_s": last_s},
        )
    known = {str(pid) for pid in pids}
    lines = [line for line in facts.kernel_log if known & set(re.split(r"[,()=\s]+", line))]
    if lines:
        return Vanishing(
            "out of memory",
            "the kernel killed a part of it for lack of memory",
            {"kernel_log": lines[-3:], "last_event_s": last_s},
        )
    recovered = sum(isinstance(e.body, RankExited) and e.body.record.oom for e in entries)
    if facts.memory_kills > recovered:
        return Vanishing(
            "out of memory",
            "the kernel has killed processes of its cgroup for lack of memory, more than ranks "
            "that it was told of",
            {"kills": facts.memory_kills, "ranks": recovered, "last_event_s": last_s},
        )
    xids = [line for line in facts.kernel_log if "Xid" in line]
    seen: dict[str, object] = {"xid": xids[-3:]} if xids else {}
    unread = "" if facts.log_readable else " (the kernel's log cannot be read here)"
    return Vanishing(
        "killed",
        f"no reboot, no hang-up and no sign of lack of memory{unread}: SIGKILL from outside, or a "
        "crash of perdure's own; the same --name resumes the job",
        {"last_event_s": last_s, **seen},
    )
