"""How ranks end, what failed, and what is said of its cause.

A rank's end is what its keeper writes down before anybody hears of it. A controller decides what
failed, who is to blame, and what follows; it writes that down once (`FailureDecided`), and every
report, screen and alert reads it there.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from perdure.model.errors import DeviceLostError, DifferError
from perdure.model.input.plain import name_step
from perdure.model.verdicts import Verdict


class ExitRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a rank ended; the keeper writes it to a file before anybody hears of it."""

    rank: int
    generation: int
    pid: int
    at_s: float
    code: int = 0
    """Exit code; 0 with `signal` set."""
    signal: int = 0
    oom: bool = False
    """The kernel's out-of-memory killer did it (cgroup `memory.events`)."""
    asked: bool = False
    """perdure itself ended it."""
    error: str = ""
    """Last line of the exception, such as `ValueError: bad lr`."""
    traceback: str = ""
    last_output: tuple[str, ...] = ()
    """Last lines of its standard error, or of its output where that is empty."""
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    torn: str = ""
    """Path of the torn checkpoint that the script failed to load."""
    torn_why: str = ""
    """What is wrong with it, which one is whole, and the command that moves it."""
    saving: str = ""
    """Path of the file of a checkpoint that it still wrote when perdure killed it."""

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than by exit code 0."""
        return bool(self.code or self.signal)

    @property
    def lost_peer(self) -> bool:
        """Whether it failed because its connection to another rank, or to the store, went away."""
        text = f"{self.error} {self.traceback[-2000:]} {' '.join(self.last_output[-3:])}"
        return self.failed and (self.lost_store or names_lost_peer(text))

    @property
    def lost_store(self) -> bool:
        """Whether it failed because the store at which the ranks meet was gone."""
        return self.failed and any(words in self.error for words in _STORE_GONE)

    @property
    def flooded(self) -> bool:
        """Whether gloo ended it because connections to its port took its last file descriptor.

        Anybody can connect to that port. So that says nothing about the rank.
        """
        return self.failed and any(_FLOODED in line for line in self.last_output)

    @property
    def failed_rendezvous(self) -> bool:
        """Whether torch's own C++ code failed while this rank formed a process group with others.

        Anybody can write into the store at which they meet. So that says nothing about the rank.
        """
        *_, frame = self.traceback.split('  File "')
        place, _, code = frame.partition("\n")
        forms = any(f", in {name}\n" in self.traceback for name in _FORMING)
        raises = code.lstrip().startswith("raise ")
        own = raises or "CUDA" in self.error or self.lost_device
        return self.failed and forms and "/torch/distributed/" in place and not own

    @property
    def lost_device(self) -> str:
        """Return how the device was lost to it; empty where it ended otherwise.

        A script that leaves with this exit code by itself has no such exception.
        """
        name, _, how = self.error.partition(": ")
        lost = self.code == DeviceLostError.exit_code and name.endswith(DeviceLostError.__name__)
        return (how or "no reason is known") if lost else ""

    @property
    def differs(self) -> str:
        """Return how the members of an elastic world differ, if each of them ended by that."""
        name, _, how = self.error.partition(": elastic: ")  # A script may have such a name itself.
        return how if name.rpartition(".")[2] == DifferError.__name__ else ""

    @property
    def sticky_error(self) -> str:
        """Return the CUDA error that ended it for good; empty where none did.

        A process that a signal has ended says it in its last lines: PyTorch's watchdog aborts it.
        """
        if not self.failed or self.asked:
            return ""
        said = self.last_output if self.signal else ()
        text = " ".join((self.error, self.traceback[-2000:], *said))
        where = self.lost_device
        return next((w for w in _STICKY if f"CUDA error: {w}" in text or w in where), "")

    @property
    def cause(self) -> str:
        """Return it in words, such as `signal 9 (SIGKILL)`."""
        if self.oom:
            return "OOM kill (signal 9, by the kernel for want of memory)"
        if self.signal:
            return f"signal {self.signal} ({_SIGNALS.get(self.signal, '?')})"
        if self.lost_device:
            return f"device lost (exit code {self.code}): {self.lost_device}"
        return f"exit code {self.code}" + (f": {self.error}" if self.error else "")


class StickyError(msgspec.Struct, frozen=True, kw_only=True):
    """A CUDA error that ended a rank for good, and the device that the rank was on."""

    device: str
    node: int
    rank: int
    generation: int
    at_s: float
    step: int
    """Committed steps; -1 where the script declares none."""
    blamed: bool = False
    """The node was left out for it."""


_STICKY = (
    "an illegal memory access was encountered",
    "unspecified launch failure",
    "an illegal instruction was encountered",
    "misaligned address",
    "hardware stack error",
    "invalid program counter",
)
"""CUDA's words for errors after which every further call of the process fails, and which a faulty
device brings about as well as a script's own kernel does. A failed assertion on the device is the
script's, want of memory is no such error, and an uncorrectable one of the memory is the device's
(`policy.response`)."""
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Software caused connection abort",
    "remote process exited",
)
"""What gloo and NCCL say when the other end of a connection is gone."""


_STORE_GONE = ("Connection was likely closed", "The client socket has ")
"""What torch's TCPStore says when nobody serves it any more."""
_FLOODED = "accept: Too many open files"
"""What gloo says before it ends the process."""
_FORMING = ("init_process_group", "_new_process_group_helper")
"""torch's functions in which ranks meet."""


def names_lost_peer(text: str) -> bool:
    """Return whether `text`, of an error, says that the other end of a connection is gone."""
    return any(words in text for words in _PEER_GONE)


_SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM",
    15: "SIGTERM", 19: "SIGSTOP", 24: "SIGXCPU", 25: "SIGXFSZ",
}  # fmt: skip
Rung = Literal["restart", "give up", "stop", "reform", "retry", "move", "none"]
"""What follows: the next generation; the end; the end, at somebody's word before anything was done;
the next epoch without who was lost, or with the same members; the next world without nodes that
were to be left; nothing, for it was no failure."""
BROKEN = "the world broke"
"""Cause of an epoch that was formed again although nobody was lost."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What failed, as far as it is known when something is decided about it."""

    cause: str
    culprit: str
    at_step: int
    """Committed steps; -1 where they are not known."""
    failure_s: float
    detected_s: float
    reason: str


def find_early(exits: Iterable[ExitRecord], record: ExitRecord) -> int | None:
    """Return the first rank that left with exit code 0 before `record`; None where none did.

    Its leaving in good order took the others' connections away.
    """
    if not record.lost_peer:
        return None
    left = [e for e in exits if not e.failed and not e.asked and e.at_s <= record.at_s]
    return min(left, key=lambda e: (e.at_s, e.rank)).rank if left else None


def explain_exit(record: ExitRecord, detected_s: float, step: int, early: int | None) -> Cause:
    """Return what a rank's end is as a cause; `early` is who had left before (`find_early`)."""
    culprit, cause = f"rank {record.rank}", record.cause
    reason = f"{culprit} ended with {record.cause}{name_step(step)}"
    if record.lost_device:
        reason = f"the device of {culprit} was lost{name_step(step)}: {record.lost_device}"
    elif record.sticky_error:
        reason += "; no process survives this CUDA error, be it the script's or its device's"
    if record.differs:
        culprit, cause = "the world", record.differs
        reason = cause
    elif early is not None:
        culprit, cause = f"rank {early}", f"left early; then {culprit}: {cause}"
        reason = f"{culprit} ended with exit code 0 while others needed it: {reason}"
    elif record.lost_peer:  # If another rank had failed before, that rank is told of instead.
        whom = "the store" if record.lost_store else "another rank"
        reason = f"{culprit} lost its connection to {whom}{name_step(step)}"
        culprit = f"a connection of {culprit}"
    elif record.flooded:
        reason = f"connections to gloo's port took all file descriptors of {culprit}"
        culprit = f"the port of {culprit}"
    elif record.failed_rendezvous:
        reason = f"{culprit} could not form a process group with the others: {cause}"
        culprit = f"the rendezvous of {culprit}"
    return Cause(
        cause=cause, culprit=culprit, at_step=step,
        failure_s=record.at_s, detected_s=detected_s, reason=reason,
    )  # fmt: skip


def explain_verdict(verdict: Verdict) -> Cause:
    """Return what a verdict that is acted upon is as a cause."""
    return Cause(
        cause=f"{verdict.kind} ({verdict.activity})",
        culprit=str(verdict.culprit),
        at_step=verdict.step,
        failure_s=verdict.first_seen_s,
        detected_s=verdict.confirmed_s,
        reason=verdict.reason,
    )


def explain_node(
    node: int, cause: str, step: int, lost_s: float, known_s: float, reason: str
) -> Cause:
    """Return the loss of a node, or of its keeper, as a cause."""
    return Cause(
        cause=cause, culprit=f"node {node}", at_step=step,
        failure_s=lost_s, detected_s=known_s, reason=reason,
    )  # fmt: skip


def explain_break(at_s: float) -> Cause:
    """Return that a world broke although nobody is lost: how far it was its members say."""
    return Cause(
        cause=BROKEN, culprit="the world", at_step=-1,
        failure_s=at_s, detected_s=at_s, reason="nobody is lost",
    )  # fmt: skip


def name_preemption(cause: Cause, node: int, words: str) -> Cause:
    """Return a loss that a platform had announced of `node` as what it is: the platform's doing."""
    what = cause.cause if cause.culprit.startswith("node") else cause.reason
    announced = f"Preemption ({words}); {what}"
    return msgspec.structs.replace(cause, cause=announced, culprit=f"node {node}")


LATE_S = 300.0
"""A machine that is there this long after it should have gone is not going any more."""
_NEAR_S = 5.0
_TAKEN = (9, 15)
"""SIGKILL, SIGTERM: what a rank dies of when its machine is shut down."""


def is_explained(record: ExitRecord, gone_s: float, *, here: bool) -> bool:
    """Return whether a rank's end is what a notice has announced.

    On the machine itself (`here`) that is an end from outside: a rank that raised an exception, or
    ran out of memory, has crashed there as it would elsewhere. On another machine it is the loss
    of a peer, about when the noticed one goes away.
    """
    if record.at_s > gone_s + LATE_S:
        return False
    if here:
        return record.signal in _TAKEN and not record.oom
    return record.lost_peer and record.at_s >= gone_s - _NEAR_S
