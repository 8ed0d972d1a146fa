"""What a platform is like: how a job is started there, what survives, what it costs, how it ends.

A profile is a TOML document with the keys below. `generic-ssh`, a box where SSH is the only
channel and nothing stops the meter, is the baseline; every other profile names its `base` and
says only what differs. A value that no profile can know is `host-dependent`: it is measured on
the box, never assumed.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from perdure.model.platforms.kubernetes import KubernetesSection
from perdure.model.platforms.slurm import SlurmSection

Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]*$")]
Dataset = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)+$")]


class NotebookSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a session is, and when the job leaves it."""

    service: Literal["colab", "kaggle"] = "colab"
    """Whose notebook it is."""
    owner: Word = ""
    """Kaggle's user name, which is a part of the notebook's id."""
    accelerator: Word = "T4"
    """As the service names it, such as `T4` or `NvidiaTeslaT4`; empty: none, on the CPU."""
    stop_before_s: Annotated[int, Meta(ge=1)] = 600
    """How long before the session's ceiling the job is told to save and to leave."""
    startup_s: Annotated[int, Meta(ge=0)] = 300
    """From the start of a session to its first step, as the linter counts."""
    every_steps: Annotated[int, Meta(ge=1)] = 100
    """Steps between checkpoints, where the job does not say: no signal comes before the end."""
    sessions_max: Annotated[int, Meta(ge=1)] = 1000
    """So many sessions go on with the job; then it is given up."""
    internet_url: str = "https://github.com"
    """Asked for before pip is, to tell a session without internet at once."""
    dataset_sources: tuple[Dataset, ...] = ()
    """Kaggle's datasets, `owner/name`, that lie under /kaggle/input."""


HOST_DEPENDENT = "host-dependent"
"""In place of a value: measured on the box."""

Kind = Literal["local", "ssh", "slurm", "kubernetes", "notebook"]
HostDependent = Literal["host-dependent"]
Survives = Literal["yes", "no", "provider"]
"""`provider`: it depends on the contract; look before anything is destroyed."""
PlatformId = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.:-]*)?$")]
Place = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_./~$@%+=:{},-]*$")]
"""A path on the box; `$HOME`, `$USER` and the like are expanded there."""


class LaunchSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """1. How the box is reached, and what Python it has."""

    host: str = ""
    """Alias of `~/.ssh/config`, or `user@host`; empty: the commands run on this machine."""
    hosts: tuple[str, ...] = ()
    """Several boxes as one job, a node on each: the first has controller and bus beside its own."""
    addresses: tuple[str, ...] = ()
    """Of `hosts`, in their order: where they reach one another; empty: found at the launch."""
    ssh_config: str = ""
    """Another file than `~/.ssh/config`."""
    ssh_options: tuple[str, ...] = ()
    """More of ssh's `-o` options, such as `Port=2222`."""
    connect_timeout_s: Annotated[int, Meta(ge=1)] = 15
    """For one attempt to connect."""
    python: Place = "python3"
    """The Python that ranks run with, or that their environment is made from."""
    environment: Literal["auto", "use", "create"] = "auto"
    """`use` that Python as it is, `create` a venv beside the job, or `auto`: use it where it has
    torch, msgspec and all else that perdure needs, else create one that sees its packages."""
    packages: tuple[str, ...] = ()
    """Installed by pip where an environment is created, beside the job's own requirements."""
    native: bool = True
    """Build the recorder of collectives on the box, once for a torch; without, a fallback."""


class Tier(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A place on the box where files can lie."""

    name: str
    """What it is, such as `home disk`."""
    path: str
    """Where it is mounted."""
    survives_stop: Survives
    """Whether files are still there after a stop of the instance, or the end of the job."""
    survives_destroy: Survives
    """Whether files are still there once the box is given back."""
    cap: str = HOST_DEPENDENT
    """Bytes and inodes that fit, where the platform says so."""


class StorageSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """2. The survival matrix."""

    tiers: tuple[Tier, ...] = ()
    """Every place that a job may write to."""


class NetworkSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """3. How bytes and people get in and out."""

    ports: Literal["tunnel", "console", "service", "none"] = "tunnel"
    """How a TensorBoard or a dashboard on the box is reached."""
    transfer: Literal["rsync", "shared", "image", "none"] = "rsync"
    """How code gets there and results get back."""


class InterruptionSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """4. What ends a job early, and how it goes on."""

    signal: str = ""
    """What the platform sends before it kills, such as `SIGTERM`; empty: nothing."""
    session_max_s: Annotated[float, Meta(ge=0)] = 0
    """Longest life of a session or job; 0: none is known."""
    relaunch: Literal["none", "cron", "systemd"] = "none"
    """What starts the job again after a reboot: an @reboot entry, or a user unit."""


class TeardownSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """5. How the meter is stopped; only ever by `perdure teardown`."""

    stop_command: tuple[str, ...] = ()
    """Run here once all is pulled, verified and confirmed; `{job}`, `{host}` and `{id}` are filled
    in. Empty, or without an `id` that it needs: it is done by hand, as `how` says."""
    id: PlatformId = ""
    """What the platform itself calls the box, for `{id}`."""
    ids: tuple[PlatformId, ...] = ()
    """Of `launch.hosts`, in their order."""
    gone_command: tuple[str, ...] = ()
    """Asks the platform about the box; filled in like `stop_command`. Before the stop it has to
    know it, and only once it says that it is gone is the job torn down."""
    gone_when: str = ""
    """A regular expression that is found in its output once the box is gone; empty: its exit code
    is 0 then."""
    gone_wait_s: Annotated[float, Meta(ge=0)] = 600.0
    """It is asked for so long."""
    how: str = ""
    """What a person has to do."""
    keeps_billing: str = ""
    """What still costs after the stop verb, such as volumes."""
    price_per_hour: Annotated[float, Meta(ge=0)] = 0
    """Of the whole box; 0: not known."""
    currency: str = "USD"
    """Of the price."""
    budget: Annotated[float, Meta(ge=0)] = 0.0
    """A job that has cost so much is called to mind; 0: none. Nothing is stopped by it."""


class DaemonSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """6. What keeps the job when the connection goes."""

    tools: tuple[Literal["tmux", "setsid", "systemd-run"], ...] = ("tmux", "setsid")
    """The first that the box has is taken."""
    queue: Literal["none", "native"] = "none"
    """Whether the platform has a queue of its own."""


class GotchasSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """7. The traps that were met there."""

    ids: tuple[str, ...] = ()
    """As `perdure doctor` names them."""
    notes: tuple[str, ...] = ()
    """What is not a trap by itself, and good to know."""


class OverridesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """8. Where things lie on the box. Named as the scripts of the profile name them."""

    DATA_DIR: Place = "$HOME/perdure"
    """Code and data."""
    DURABLE_DIR: Place = "$HOME/perdure"
    """Job state and checkpoints: what is pulled before anything is torn down."""
    PROXY_HOOK: str = ""
    """A line of shell that runs before anything else, such as `module load cuda`."""
    CRED_FILE: Place = "$HOME/.perdure-credentials"
    """Secrets, on the box's own disk, streamed in over standard input; empty: never a file."""
    SCRATCH: tuple[str, ...] = ()
    """Patterns of files that are not worth pulling, such as `*.latest.pth`."""
    HF_HOME: Place = "$DATA_DIR/.hf"
    """Where Hugging Face keeps what it downloads."""
    DETACH: str = ""
    """Another detach primitive than the profile's."""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where facts about a platform were read; what platforms do changes without a word."""

    facts: tuple[str, ...]
    """Keys, or sections with all of their keys."""
    where: str
    """An address, or what else was looked at."""
    read: Annotated[str, Meta(pattern=r"^\d{4}-\d{2}(-\d{2})?$")]
    """The day, or the month, on which it was read."""
    profile: str = ""
    """The profile whose facts these are; filled in where it is loaded."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One platform, whole: the diffs of its bases applied."""

    platform: str
    """Its name."""
    base: str = ""
    """The profile that this one is a diff against."""
    danger: str = ""
    """What costs money or work if it is not known: shown before every launch."""
    kind: Kind
    """Which launcher renders it."""
    meter_stop_verb: str
    """What stops the meter: `manual`, `none`, `automatic`, or the platform's verb."""
    meter_stop_irreversible: bool
    """Whether that deletes the disk."""
    detach_primitive: str
    """What severs the job from the connection."""
    spot_available: bool
    """Whether the box may be taken away."""
    spot_grace: float | Literal["n/a", "host-dependent"]
    """Seconds between the notice and the end."""
    shared_fs: bool | HostDependent
    """Whether DURABLE_DIR is on a file system that other machines see."""
    inode_cap: int | Literal["none", "host-dependent"]
    """Files that fit where checkpoints land."""
    free_egress: bool | HostDependent
    """Whether bytes out cost nothing. It cannot be measured."""
    mirror: str
    """HF_ENDPOINT where a mirror is needed; empty: none."""
    host_driver_cuda_max: str
    """Newest CUDA that the driver runs, such as `12.4`; `none` without a GPU."""
    local_nvme: str
    """Mount point of a fast local disk; `none`."""
    launch: LaunchSection = LaunchSection()
    """Section 1."""
    storage: StorageSection = StorageSection()
    """Section 2."""
    network: NetworkSection = NetworkSection()
    """Section 3."""
    interruption: InterruptionSection = InterruptionSection()
    """Section 4."""
    teardown: TeardownSection = TeardownSection()
    """Section 5."""
    daemon: DaemonSection = DaemonSection()
    """Section 6."""
    gotchas: GotchasSection = GotchasSection()
    """Section 7."""
    overrides: OverridesSection = OverridesSection()
    """Section 8."""
    slurm: SlurmSection = SlurmSection()
    """What is asked of Slurm, where `kind` is slurm."""
    notebook: NotebookSection = NotebookSection()
    """What is asked of Colab or Kaggle, where `kind` is notebook."""
    kubernetes: KubernetesSection = KubernetesSection()
    """What is asked of a cluster, where `kind` is kubernetes."""

    sources: tuple[Source, ...] = ()
    """Where its facts were read, and when."""

    @property
    def ends_by_itself(self) -> bool:
        """Whether a forgotten job costs nothing."""
        return self.meter_stop_verb in ("none", "automatic")

    @property
    def detach(self) -> str:
        """What severs the job from the connection, overrides considered."""
        return self.overrides.DETACH or self.detach_primitive


def list_unmeasured(profile: Profile) -> tuple[str, ...]:
    """Return the keys that are still `host-dependent`."""
    names = profile.__struct_fields__
    return tuple(name for name in names if getattr(profile, name) == HOST_DEPENDENT)
