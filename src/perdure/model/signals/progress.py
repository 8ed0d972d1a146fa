"""What an agent reads off its ranks and puts into one heartbeat a node.

All times are *job time*: seconds since the Unix epoch by the node's monotonic clock plus an
offset that is fixed once per agent, so that they never step backwards. Nobody may compare those of
two nodes, durations may be compared. Collectives and stages are arrays on the wire: a node of eight
ranks sends a few hundred of these a second.
"""

from typing import Annotated, Literal

import msgspec

from perdure.model.signals.devices import DeviceSample
from perdure.model.signals.links import LinkSweep


class CollectiveSpan(msgspec.Struct, frozen=True, array_like=True):
    """One collective of one rank, ended or not.

    With `dur = end_s - start_s`, the smallest duration among a communicator's ranks for one
    `seq` is pure communication (the last to arrive waits for nobody), and `max(dur) - dur` is
    how late a rank arrived.
    """

    comm: Annotated[int, msgspec.Meta(ge=0)]
    """Index into the `comms` of the same `RankProgress`."""
    seq: int
    op: str
    bytes: int
    start_s: float
    end_s: float = 0.0
    """0 while it is under way, or where its end cannot be seen."""
    wait_s: float = 0.0
    """Of it, how long the rank's own threads were blocked in `wait`: its exposed part."""
    peer: int = -1
    """Global rank at the other end, of a send or receive."""
    awaited: bool = False
    """A thread of the rank is blocked until it ends."""


class DeviceComm(msgspec.Struct, frozen=True, array_like=True):
    """Collectives of one kind in one communicator of NCCL, timed by the device's own clock.

    It stands beside the `comms` and not among them: who hangs or is out of step is told by those
    alone, since a device's times come late, or not at all.
    """

    name: str
    """Of the group, the kind and NCCL's id of the communicator: the same on all of its ranks. NCCL
    counts each kind on its own."""
    comm: Annotated[int, msgspec.Meta(ge=0)]
    """Index into the `comms` of the same `RankProgress`, of one with the same ranks."""
    spans: tuple[CollectiveSpan, ...] = ()
    """What ended since the last heartbeat, thinned; their `comm` says nothing. They begin when the
    host first saw a kernel, and take as long as they did by the device's clock."""


WORK_MAX = 1e30
"""No step's declared work is more, in whatever unit."""


class StepStages(msgspec.Struct, frozen=True, array_like=True):
    """Where one step of one rank went, in seconds; the parts add up to `end_s - begin_s`.

    A part never holds time blocked in collectives: that is `wait_s`. The slowest rank of a
    stage is therefore named by that stage, not by the all-reduce that equalises the sums.
    """

    step: int
    """Number of the step: committed steps where the script declares them, else a count of
    optimizer steps."""
    begin_s: float
    end_s: float
    data_s: float = 0.0
    """Fetching a batch."""
    forward_s: float = 0.0
    """From the batch (or the step's begin) to the backward pass, communication excluded."""
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    wait_s: float = 0.0
    """Blocked in collectives, by whichever stage."""
    other_s: float = 0.0
    """Checkpoint stalls, boundaries, and what no stage claims."""
    work: float = 0.0
    """How much this rank has done in it, as its script declares (`run.work`): tokens, samples.
    0 where it declares nothing."""


Phase = Literal[
    "spawned",
    "script",
    "init",
    "group",
    "restore",
    "step",
    "checkpoint",
    "boundary",
    "finished",
    "paused",
]
"""Where a rank is: process up; script's first line; `perdure.init` called; process group formed;
state being restored; in a step; stalled by a checkpoint; waiting at a boundary; loop done; standing
still before a step because an operator wants it so."""


class BusyPhase(msgspec.Struct, frozen=True):
    """What a script has declared with `run.busy`: until then its silence is no verdict."""

    name: str
    since_s: float
    until_s: float
    """Job time at which the declaration ends by itself."""

    def describe(self, now: float) -> str:
        """Return it in words, as of job time `now`."""
        most_s, spent_s = self.until_s - self.since_s, max(0.0, now - self.since_s)
        return f"{self.name}, at most {most_s:g} s, for {spent_s:.0f} s"


Stamps = Literal["host", "enqueued", "device"]
"""What the times of a communicator's collectives are of: `host`, they ran on the CPU, so that the
host's stamps are theirs; `enqueued`, they run on a device that the host runs ahead of, so that the
stamps say nothing of who was slow; `device`, by a device's clock."""


class CommProgress(msgspec.Struct, frozen=True):
    """The last collective of one rank in one communicator."""

    name: str
    size: int
    """Ranks in it."""
    started_seq: int
    """Sequence number of the last collective that was entered."""
    ended_seq: int
    """Sequence number of the last collective known to have ended; -1 where the source of the
    record cannot tell."""
    op: str = ""
    since_s: float = 0.0
    """Job time at which `started_seq` was first seen."""
    ranks: tuple[int, ...] = ()
    """Global ranks in it, where known."""
    bytes: int = 0
    """Of collective `started_seq`, where known; ranks that disagree on it are out of step."""
    dtype: str = ""
    peer: int = -1
    """Global rank at the other end, where `started_seq` is a send or receive and it is known."""
    timeout_s: float = 0.0
    """The process group's own time-out; 0 where the rank could not tell it."""
    stamps: Stamps = "host"
    """`enqueued` from its first collective of a device's tensors on: in a group of both backends
    nobody tells which is which afterwards."""


class ProcSample(msgspec.Struct, frozen=True):
    """One look at /proc/PID, with all descendants' CPU and I/O added in."""

    state: str = "?"
    """R, S, D, T, t, Z or X (gone)."""
    cpu_s: float = 0.0
    """CPU seconds used so far, user and system."""
    io_bytes: int = 0
    """Bytes read and written so far (rchar + wchar), 0 where not permitted."""
    rss_bytes: int = 0
    num_threads: int = 0
    run_delay_s: float = 0.0
    """Seconds that it was ready to run and had no CPU (schedstat), 0 where unknown: what its
    neighbours took from it."""
    blocked: int = 0
    """Processes among it and its descendants in state D: they wait in the kernel, mostly for a
    disk."""


class RankAccount(msgspec.Struct, frozen=True):
    """Seconds that a rank has stamped since its generation began; each only grows.

    `first_step_s` .. `last_step_s` is covered by the sum of step, checkpoint, boundary,
    overhead and paused, which is what lets the ledger check itself.
    """

    start_step: int = 0
    """Committed steps at the time the generation's loop began (0, or the checkpoint's)."""
    step: int = -1
    """Committed steps so far; -1 where the script declares none."""
    step_s: float = 0.0
    """In committed steps of this generation: from the loop handing out a step until asking for
    the next, data loading included, checkpoint gate excluded."""
    checkpoint_s: float = 0.0
    """Stalled for checkpoints."""
    boundary_s: float = 0.0
    """Waiting for a boundary agreement."""
    overhead_s: float = 0.0
    """In perdure's own code at step boundaries."""
    paused_s: float = 0.0
    """Standing still because an operator wants it so."""
    lost_s: float = 0.0
    """torchft: in steps that were not committed."""
    reform_s: float = 0.0
    """torchft: waiting for a quorum with other members, and for its process group."""
    heal_s: float = 0.0
    """torchft: in its first step, and in those in which it healed and added nothing."""
    spawned_s: float = 0.0
    """Job time stamps of the start-up phases; 0 where not reached."""
    script_s: float = 0.0
    init_s: float = 0.0
    group_s: float = 0.0
    restored_s: float = 0.0
    first_step_s: float = 0.0
    last_step_s: float = 0.0
    """End of the last committed step."""
    finished_s: float = 0.0
    marks: tuple[tuple[int, float], ...] = ()
    """(committed step, `step_s` at that moment) at each snapshot taken, oldest first."""
    compile_s: float = 0.0
    """Of `step_s`, what torch took to compile in the first steps, up to one in which it compiled
    nothing: that is no training yet."""


class RankProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank in a heartbeat."""

    rank: int
    pid: int
    phase: Phase
    phase_since_s: float
    heartbeat_s: float
    """Job time at which the rank last wrote into its ring from its training thread, or its
    recorder last saw a collective move."""
    account: RankAccount
    comms: tuple[CommProgress, ...] = ()
    proc: ProcSample = ProcSample()
    spans: tuple[CollectiveSpan, ...] = ()
    """Collectives that ended since the last heartbeat, thinned to those whose `seq` is a multiple
    of a power of two, so that all ranks of a communicator keep the same ones."""
    stages: tuple[StepStages, ...] = ()
    """Steps that ended since the last heartbeat, thinned likewise."""
    recorder: str = ""
    """`compiled`, `status` or `off`."""
    busy_phase: BusyPhase | None = None
    """What the script has declared to be busy with; of nested phases the one that ends last."""
    unseen: bool = False
    """Something else lies in the place of its ring: nothing but `proc` is known of it."""
    device: tuple[DeviceComm, ...] = ()
    """What NCCL's profiler plugin has told of collectives on the device."""
    num_steps: int = 0
    """So many steps its loop is to make, counted over the whole run; 0: it does not say."""


class HostLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the cores that an agent may use did between two looks at them."""

    host: str
    """Which machine (its boot): what nodes of one machine use is summed up."""
    cores: int
    busy: float
    """Cores in use, on average, by whomever; what a hypervisor gives to others is in it."""
    own: float
    """Cores in use by the node's ranks, with their descendants, and by its agent."""
    waited: float = 0.0
    """Seconds a second that threads of the node's ranks were ready and had no CPU, in sum."""
    pressure: float = -1.0
    """Share of the time in which something on the machine waited for a CPU (the kernel's PSI);
    -1 where unknown."""
    throttled: float = 0.0
    """Share of the scheduler's periods in which a CPU limit (cgroup) stopped the node's ranks."""


class JobHabits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the detector knows to be usual for the job, so that the next controller does, too."""

    gaps: tuple[tuple[int, float], ...] = ()
    """(position, seconds) of silences in training that ended by themselves."""
    phases: dict[str, float] = {}
    """Phase -> the longest time that ended by itself in it."""
    longest: dict[str, float] = {}
    """Phase -> the longest silence in it that ended by itself, of ranks that declare steps."""
    acted: tuple[str, ...] = ()
    """Kind, culprit and place of the verdicts that have restarted the world, oldest first."""
    unexpected: tuple[tuple[float, float], ...] = ()
    """(end, seconds) of the newest silences that nothing predicted and that ended by themselves."""


BEAT_S = 0.2
"""Seconds between two heartbeats of a node."""


class NodeBeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """One heartbeat of one node. Not journaled; what is decided from it is."""

    node: int
    incarnation: str
    """Of the agent that sent it."""
    seq: int
    sent_s: float
    generation: int
    ranks: tuple[RankProgress, ...] = ()
    sweep: LinkSweep | None = None
    """A look at the ranks' sockets, where one was taken since the last heartbeat."""
    devices: tuple[DeviceSample, ...] = ()
    """A look at the node's GPUs, where one was taken since the last heartbeat."""
    host: HostLoad | None = None
    """A look at the node's cores, where one was taken since the last heartbeat."""
