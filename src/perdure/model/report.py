"""What is shown: the ledger, recoveries, and the live snapshot. Their JSON is a contract."""

from typing import Literal

import msgspec

from perdure.model.signals.devices import DeviceSample
from perdure.model.signals.progress import BusyPhase
from perdure.model.steering import Change, KeySpec
from perdure.model.verdicts import Verdict

ACCOUNTS = (
    "useful",
    "packing",
    "reconfiguration.detect",
    "reconfiguration.decide",
    "reconfiguration.abort",
    "reconfiguration.communicator",
    "reconfiguration.state",
    "reconfiguration.warmup",
    "lost_work",
    "checkpoint",
    "steady_overhead",
    "startup",
    "idle",
    "unattributed",
)
"""Every slot-second paid for is in exactly one of these."""


UNFAILED = ("none", "join")
"""Rungs of what no training stopped for."""
PHASES = ("detect", "decide", "abort", "communicator", "state", "warmup")
"""Of a recovery, one after another."""


class Account(msgspec.Struct, frozen=True):
    """One line of the ledger, in slot-seconds and as a fraction of all that was paid for."""

    s: float
    fraction: float


class Recovery(msgspec.Struct, frozen=True):
    """One incident from its cause to the first new step. Seconds of wall time by phase."""

    cause: str
    culprit: str
    at_step: int
    at_s: float
    detect_s: float
    decide_s: float
    abort_s: float
    communicator_s: float
    state_s: float
    warmup_s: float
    total_s: float
    lost_steps: int | None
    """None: unknown, because the script declares no steps."""
    lost_microbatches: int | None
    rung: str
    """`restart`, `give up`, `stop` where the job was ended while it hung, or `none` where training
    did not stop (a part of perdure died). Of an elastic world, in place: `retry`, `shrink`,
    `replace` (spares stood in at once), `morph`, and `join`, which ends no incident. Of a replica
    group `left out`: it lived, and healed if it came back."""
    reason: str = ""
    generation: int = -1
    """The one that it ended; -1 where none was."""
    began: str = ""
    """Where a script that declares no steps began again, as far as its output says."""

    @property
    def failed(self) -> bool:
        """Return whether training stopped for it."""
        return self.rung not in UNFAILED


class WithheldRow(msgspec.Struct, frozen=True):
    """What would have been done in a job that is only observed."""

    at_s: float
    step: int
    would: str
    """Such as `restarted the world`."""
    cause: str
    culprit: str
    reason: str


class NoteRow(msgspec.Struct, frozen=True):
    """What an operator has remarked."""

    at_s: float
    step: int
    """How far the job was; -1 where that is not known."""
    who: str
    text: str


class MendRow(msgspec.Struct, frozen=True):
    """What a controller found damaged of the journal at its start, and what became of it."""

    at_s: float
    restored: int
    lost: int
    reason: str


class Exactness(msgspec.Struct, frozen=True):
    """Whether a job that resumed computes what it would have without a failure."""

    state: Literal["proved", "expected", "not"]
    """proved: a loss after a resume was compared with that from before. expected: nothing speaks
    against it."""
    reason: str


class SkipRow(msgspec.Struct, frozen=True):
    """A checkpoint that could not be used when a world resumed, so that steps were made again."""

    at_s: float
    why: str
    """Its path, and what is wrong with it."""
    resumed: int
    """The step from which the world went on instead; -1 of a torn checkpoint that the script itself
    saved."""
    fetched: bool = False
    """The machine had no checkpoint of the script; `why` says what was fetched."""


class WindowRow(msgspec.Struct, frozen=True):
    """Time that a platform left ranks before it took their machine, and how much they used."""

    at_s: float
    who: str
    """Such as `node 1 (aws: spot terminate)`."""
    window_s: float
    """Announced seconds."""
    used_s: float = 0.0
    """Seconds until the last rank there ended; 0 before."""
    node: int = -1
    """-1: the time is that of a stop of the whole job."""


class HungSaveRow(msgspec.Struct, frozen=True):
    """A checkpoint whose disk took so long that later saves were skipped."""

    at_s: float
    """When the first save was skipped."""
    step: int
    """Of the checkpoint."""
    why: str
    over_s: float = 0.0
    """When a checkpoint was saved again; 0 before."""
    skipped: int = 0
    """Saves that were skipped until then."""


class EmptySlotRow(msgspec.Struct, frozen=True):
    """A slot of an elastic world whose processes ended one after another before they trained."""

    at_s: float
    """When it was given up."""
    slot: int
    node: int
    why: str
    over_s: float = 0.0
    """When a process was started in it again; 0 before."""


class Report(msgspec.Struct, frozen=True):
    """`perdure report --json`."""

    job: str
    state: str
    wall_s: float
    slot_s: float
    steps_committed: int | None
    ranks: int
    ledger: dict[str, Account]
    goodput: float
    """The useful fraction; at most so much where `lost_unknown`."""
    step_s: float | None
    """Median committed step, seconds."""
    recoveries: tuple[Recovery, ...]
    reason: str = ""
    """Why it ended, or what it does now."""
    observed: bool = False
    """It was only observed (`--observe`): nothing was ever acted upon."""
    withheld: tuple[WithheldRow, ...] = ()
    """What would have been done, had it not been."""
    notes: tuple[NoteRow, ...] = ()
    """Remarks of operators (`perdure note`), the oldest first."""
    mended: tuple[MendRow, ...] = ()
    """What was found damaged of the journal, the oldest first."""
    skipped: tuple[SkipRow, ...] = ()
    """Checkpoints that could not be used, the oldest first."""
    exact: Exactness | None = None
    """None: the script declares no steps."""
    windows: tuple[WindowRow, ...] = ()
    """Notices in whose time ranks ended, the oldest first."""
    hung_saves: tuple[HungSaveRow, ...] = ()
    """Checkpoints whose disk hung, the oldest first."""
    empty_slots: tuple[EmptySlotRow, ...] = ()
    """Slots that were given up, the oldest first."""
    ranks_left: int = 0
    """Members of the last world, if slots of an elastic job stayed empty to its end."""
    incidents: int = 0
    """Of `recoveries` all but joins: what failed, of the job or of perdure's own parts."""
    lost_unknown: bool = False
    """The world was started again and the script declares no steps: of what counts as useful,
    some or all before the last restart may be lost."""


class RankRow(msgspec.Struct, frozen=True):
    """One rank on a screen."""

    rank: int
    node: int
    pid: int
    state: str
    """starting, running, waiting, suspected, exited, failed."""
    phase: str
    step: int
    steps_per_s: float
    collective: str
    """Last collective in words, such as `allreduce #120 (waiting 0.2 s)`; may be empty."""
    cpu_s: float
    rss_bytes: int
    busy_phase: BusyPhase | None = None
    """What its script has declared to be busy with (`run.busy`)."""


class DeviceRow(msgspec.Struct, frozen=True):
    """One device in `perdure status --devices`."""

    device: str
    """UUID of a GPU or MIG instance; of a CPU slot, an id that outlives restarts."""
    node: int
    ranks: tuple[int, ...]
    """That use it now."""
    replicas: tuple[int, ...]
    state: str
    """in use, idle, spare, draining, cordoned, lost."""
    slots: tuple[str, ...] = ()
    """Such as `node0/slot1`."""
    kind: str = ""
    """gpu, mig or cpu."""
    name: str = ""
    host: str = ""
    health: str = ""
    """ok, warn or failed; empty where it has no counters."""
    why: str = ""
    sample: DeviceSample | None = None
    """Its counters, at the newest look."""


class ReplicaRow(msgspec.Struct, frozen=True):
    """One replica group of a torchft job on a screen."""

    group: int
    replica: str
    """Its replica id now; empty before its first quorum."""
    node: int
    state: str
    """starting, healing, training, spare, evicted, silent, failed, finished, left. Of a group that
    others start also drained, and gone: nothing is heard of it, so it has ended, or as good as."""
    step: int
    quorum_id: int
    """Of the quorum in force; -1: it is not in it."""
    late: str = ""
    """In what way it is late, where the others wait for it for longer than ever before."""
    why: str = ""
    """Why it is not in the quorum, in the lighthouse's words; empty where it tells no reason."""
    manager: str = ""
    """Where its manager listens; here and below, of a group that others start."""
    since_s: float = 0.0
    """When this life of it came to the lighthouse."""
    ranks: int = 0
    """How many it has."""
    away_s: float = 0.0
    """Since when it is gone, left out or finished; 0 while it is not."""
    generation: int = -1
    """Which life it is: each start of a group has a number of its own; -1 before the first."""


class IncidentRow(msgspec.Struct, frozen=True):
    """One incident on a screen, newest last."""

    at_s: float
    cause: str
    culprit: str
    rung: str
    total_s: float | None
    """None: not over yet."""
    at_step: int = -1
    lost_steps: int | None = 0
    """None: unknown, because the script declares no steps."""


class StageRow(msgspec.Struct, frozen=True):
    """One stage of a pipelined elastic world."""

    blocks: tuple[int, int]
    """The first, and the one after the last."""
    ranks: tuple[int, ...]
    """That hold them: its copies."""


class WorldShape(msgspec.Struct, frozen=True):
    """A pipelined elastic world as its members have formed it."""

    epoch: int
    shape: str
    """`2x3` is two copies of three stages; `(3,2)` the copies of each where they differ."""
    micro_batches: int
    """Of a step."""
    stages: tuple[StageRow, ...]


FIXED_WORLD = "its world has the ranks that it began with"
SNAPSHOT_SCHEMA = 1
"""Raised when a field is taken away or means something else; a new field does not raise it."""


class Snapshot(msgspec.Struct, frozen=True):
    """`perdure status --json`: everything a screen needs, made by a fold."""

    version: int
    """Grows with everything that it was made of; two of the same version differ in time only."""
    job: str
    state: str
    """pending, forming, running, paused, recovering, stopping, done, failed, stopped."""
    at_s: float
    started_s: float
    generation: int
    restarts: int
    step: int
    steps_per_s: float
    world_size: int
    depth: str
    """supervised, resumable, elastic or torchft."""
    reason: str
    """The newest decision's reason."""
    ranks: tuple[RankRow, ...] = ()
    devices: tuple[DeviceRow, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    checkpoints: tuple[dict[str, object], ...] = ()
    """Newest last: step, path, bytes, at_s."""
    metrics: dict[str, float] = {}
    """Last logged values."""
    incidents: int = 0
    """Of the whole job, as in a report; `recent` holds the last few, and joins."""
    recent: tuple[IncidentRow, ...] = ()
    replicas: tuple[ReplicaRow, ...] = ()
    replicas_ended: int = 0
    """Groups that others had started and that have ended before those in `replicas`."""
    settings: dict[str, object] = {}
    """Live configuration in force: key -> value."""
    keys: tuple[KeySpec, ...] = ()
    """What the script has declared, and perdure's own keys that ranks apply."""
    epoch: int = 0
    """The change of configuration in force."""
    paused: bool = False
    cordoned: tuple[int, ...] = ()
    coming: tuple[Change, ...] = ()
    """Changes of configuration that are agreed for steps yet to come, the next one first."""
    seq: int = 0
    """Number of the newest entry of the journal that it was made of."""
    mended: tuple[MendRow, ...] = ()
    """What was found damaged of the journal, the oldest first."""
    skipped: tuple[SkipRow, ...] = ()
    """Checkpoints that could not be used, the oldest first."""
    exact: Exactness | None = None
    """None: the script declares no steps."""
    hung_saves: tuple[HungSaveRow, ...] = ()
    """Checkpoints whose disk hung, the oldest first."""
    empty_slots: tuple[EmptySlotRow, ...] = ()
    """Slots that were given up, the oldest first."""
    waits: tuple[str, ...] = ()
    """Nodes that wait for a disk to start their ranks, in words."""
    world: WorldShape | None = None
    """Of a pipelined elastic job."""
    observed: bool = False
    """Nothing is ever acted upon (`--observe`)."""
    withheld: tuple[WithheldRow, ...] = ()
    """The newest things that would have been done, had it not been."""
    fixed: str | None = None
    """What keeps its world at the ranks that it began with, its depth first; empty: it takes in
    nodes that join while it trains; None: not known before it trains."""
    num_steps: int = 0
    """So many steps the loop is to make, counted over the whole run; 0: it does not say."""
    step_open_s: float = 0.0
    """Seconds that the step in progress has lasted, in the slowest rank."""
    left_s: tuple[float, float] | None = None
    """Seconds until they are made, at least and at most, by the pace of the last minutes; None
    while that is unsteady, or not known."""
    schema: int = SNAPSHOT_SCHEMA
