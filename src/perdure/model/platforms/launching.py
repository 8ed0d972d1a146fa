"""What a launcher makes of a job and a profile, and what is remembered of a launched job."""

from typing import Any, Literal

import msgspec

from perdure.model.job import AlertsConfig
from perdure.model.platforms.outcome import Outcome
from perdure.model.platforms.profile import Kind, Profile

Level = Literal["error", "warning", "note"]


class Finding(msgspec.Struct, frozen=True):
    """Something about a plan or a box that a person should know before it costs money."""

    level: Level
    """An error is not submitted."""
    text: str
    hint: str = ""
    trap: str = ""
    """Of the profile's or the universal ones, such as `GEN6`."""


class Step(msgspec.Struct, frozen=True):
    """One command of a launch, as a person would type it on this machine."""

    what: str
    command: tuple[str, ...]
    stdin: str = ""
    """What its standard input is, in words: secrets come that way, and are in no plan."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A job rendered for a platform: data only, the same for the same job and profile."""

    job: str
    kind: Kind
    profile: Profile
    files: dict[str, str]
    """Path -> content: relative to the folder that `--out` or the launcher writes them to."""
    steps: tuple[Step, ...]
    """What submit does, in order."""
    findings: tuple[Finding, ...] = ()
    """What the linter says of it."""
    attach: tuple[str, ...] = ()
    """Command lines that show and steer the job afterwards."""
    place: str = ""
    """Where the job's files are: a folder here or on the box (shell variables unexpanded)."""
    settings: dict[str, Any] = {}
    """What the platform's own submit needs beside it."""
    others: tuple["Plan", ...] = ()
    """One for each further box of the same job."""


class Scaling(msgspec.Struct, frozen=True):
    """`perdure node scale --json`: how many pods a job is to have, and what was done for it."""

    job: str
    pods: int
    before: int
    added: tuple[str, ...] = ()
    """Jobs of the pods that were added; they join as soon as they run."""
    removed: tuple[str, ...] = ()
    """Jobs whose pods have left."""


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine remembers of a job that it launched: `launches/JOB.json`."""

    job: str
    profile: Profile
    """As it was at the launch."""
    place: str
    """The job's folder on the box."""
    home: str
    """PERDURE_HOME there, absolute."""
    python: str
    """The Python that runs perdure there, absolute."""
    id: str = ""
    """Slurm's job id, the name of a Kubernetes Job, a kernel's slug; empty on a box."""
    boot_id: str = ""
    """Of the box when the job was started."""
    launched_s: float = 0.0
    """Unix time."""
    roots: dict[str, str] = {}
    """Results there: label -> folder. All of it is pulled before anything is torn down."""
    pulled_to: str = ""
    """The newest pull."""
    torn_down_s: float = 0.0
    """Unix time at which the stop verb had run; 0 before."""
    gone: bool = False
    """A person has said that the box was taken away: nobody asks it any more."""
    others: tuple["LaunchRecord", ...] = ()
    """One for each further box of the same job; only the first's has them."""
    address: str = ""
    """Where the job's other boxes reach this one."""
    project: str = ""
    """The folder here that was sent, absolute; empty: none was, or an older perdure sent it."""
    stop_asked_s: float = 0.0
    """Unix time at which the stop verb had run; the platform may not yet say that it is gone."""
    notes: tuple[str, ...] = ()
    """What a person has let go of by a flag, with the time."""
    billed_since_s: float = 0.0
    """Unix time of the first launch to this very place; 0 in records of an older perdure."""
    alerts: AlertsConfig = AlertsConfig()
    """Whom the job's file names for alerts: reminders go there as well."""

    @property
    def box(self) -> str:
        """What the box is called to a person."""
        return self.profile.launch.host or self.profile.platform

    @property
    def boxes(self) -> tuple["LaunchRecord", ...]:
        """Every box of the job that may still answer, the first one first."""
        return tuple(record for record in (self, *self.others) if not record.gone)


class BoxState(msgspec.Struct, frozen=True, kw_only=True):
    """How a launched job is, by the record that its supervisor wrote at the place itself."""

    state: Literal["waiting", "running", "orphaned", "ended", "killed", "rebooted", "not-started"]
    """`orphaned`: it runs, its supervisor is gone. `killed`: both are gone, and nobody wrote why.
    `rebooted`: the machine has started anew since. `waiting`: queued by the platform."""
    code: int = 0
    """Exit code of `perdure run`, once it has ended."""
    signal: int = 0
    """The signal that ended it, if one did."""
    boot_id: str = ""
    """Of the machine, at this moment."""
    started_s: float = 0.0
    """Unix time there."""
    ended_s: float = 0.0
    """Unix time there; 0 while it runs."""
    attempt: int = 0
    """How often it has been started."""
    devices: str = ""
    """CUDA_VISIBLE_DEVICES that it holds."""
    reason: str = ""
    """In one sentence."""
    load: float = -1.0
    """The machine's load over a quarter of an hour; -1: not told."""

    @property
    def over(self) -> bool:
        """Whether nothing of it runs or waits any more."""
        return self.state in ("ended", "killed", "rebooted", "not-started")


def judge_outcome(end: Outcome, attempt: int, reason: str = "") -> BoxState:
    """Return the state of a job that a platform's own scheduler runs; `reason` is that of `end`.

    What ended by itself has an exit code; of what the platform ended it says how.
    """
    reason = reason or end.reason
    if end.state in ("waiting", "running"):
        return BoxState(state=end.state, attempt=attempt, reason=reason)
    itself = end.state in ("done", "failed")
    return BoxState(
        state="ended" if itself else "killed",
        code=end.code,
        signal=end.signal,
        attempt=attempt,
        reason=reason if itself else f"{end.state}: {reason}",
    )


class BoxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One of a launched job's boxes, in `boxes` of `perdure status --json`."""

    host: str
    state: str
    """As in `BoxState`; `unreached` where it did not answer, which says nothing about the job."""
    reason: str = ""
    boot_id: str = ""
    """Of the machine when it was last seen."""
    seen_s: float = 0.0
    """Unix time here at which it last answered, or was launched to."""
    started_s: float = 0.0
    """Unix time there at which its part of the job was started."""
    attempt: int = 0
    """How often that was started."""
    address: str = ""
    """Where the job's other boxes reach it."""
    ended_s: float = 0.0
    """Unix time there at which its part of the job ended; 0 while it runs."""
    load: float = -1.0
    """As in `BoxState`."""


class Reminder(msgspec.Struct, frozen=True):
    """What costs money and needs a person: a row of `perdure status --remind --json`."""

    job: str
    kind: Literal["budget", "ended", "idle", "stop-asked"]
    text: str


class PulledFile(msgspec.Struct, frozen=True):
    """One file of the roster of a pull."""

    path: str
    """Label, then the path below its folder on the box: the same below the local directory."""
    bytes: int
    sha256: str
    stamp: str = ""
    """Inode and times of its content on the box: while it is the same, so is the file."""


class PullManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`PULL_MANIFEST.json`: exactly what was on the box when it was pulled."""

    schema: Literal["perdure/pull/v1"] = "perdure/pull/v1"
    job: str
    host: str
    roots: dict[str, str]
    pulled_s: float
    """Unix time at which the roster was made, after the job had ended."""
    files: tuple[PulledFile, ...]
    leave: tuple[str, ...] = ()
    """Patterns of files that a person leaves on the box."""
    left: tuple[PulledFile, ...] = ()
    """Those files; their hashes are empty."""
    sent: int = 0
    """So many files of the project there are as they are here, and were not brought back."""
    excluded: tuple[str, ...] = ()
    """Caches, environments and secrets there, which are not looked into."""
    unread: tuple[str, ...] = ()
    """What could not be looked at, and why: nobody knows whether it exists elsewhere."""
    others: tuple[str, ...] = ()
    """Folders of other jobs of perdure's on the box, none of whose files are among these."""
    changed: tuple[str, ...] = ()
    """Of a pull while the job runs: files that became others after the roster was made, and are
    among `files` as they arrived, or not at all."""


class PullVerified(msgspec.Struct, frozen=True, kw_only=True):
    """`PULL_VERIFIED.json`: that the roster of one manifest was found whole and loaded."""

    schema: Literal["perdure/verified/v1"] = "perdure/verified/v1"
    job: str
    manifest_sha256: str
    """Of the very manifest: a later pull makes this one void."""
    verified_s: float
    files: int
    bytes: int
    loaded: int
    """Files and checkpoints whose tensors were loaded, with `weights_only`."""
    tensors: int = 0
    """Tensors in them."""
    nothing_to_keep: bool = False
    """A person has said that it is right that there is none."""


PULL_MANIFEST = "PULL_MANIFEST.json"
PULL_VERIFIED = "PULL_VERIFIED.json"
