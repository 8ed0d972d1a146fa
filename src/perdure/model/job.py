"""What a job is: the document that the user writes, or that `perdure run` makes of its options.

Every field has a default but the script, so that a job file says only what matters to it.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]


class DetectConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When silence becomes a verdict, and when a verdict becomes an action."""

    hang_floor_s: Seconds = 1.0
    """A rank is never suspected before this long without progress, however short its steps."""
    phase_allowance_s: Seconds = 60.0
    """Seconds of silence allowed in a phase never seen to end before: first step, first evaluation.
    Twice as long before the first collective or step of a generation."""
    quiet_action_s: Seconds | None = None
    """A suspected rank of which nothing moves (CPU, I/O, stack) is acted upon after this long;
    without a number by certainty: after the process group's own time-out (docs/verdicts.md)."""
    hang_action_s: Seconds | None = None
    """A suspected rank that still burns CPU is acted upon after this long; without a number it is
    left to the time-out of the process group that waits for it."""
    node_lost_s: Seconds = 15.0
    """A node without a heartbeat is lost after this long (its agent may be restarting)."""
    node_doubt_s: Seconds = 3.0
    """The same if an elastic world has broken, too: its ranks' peers saw connections end, which the
    end of no rank explains. Three tenths of it for a node from elsewhere (`remote`) whose ranks'
    peers saw connections end: nobody else sees its processes end."""
    comm_action_s: Seconds | None = None
    """A hang of communication whose link or node is known is acted upon after this long; without a
    number after 10 s where the kernel's TCP or a probe says so, and else by certainty."""
    slow_action_s: Seconds = 120.0
    """A slowdown that has lasted this long after its verdict may be acted upon, and 20 steps, and
    three times as long as the longest one of the last six hours that ended by itself."""
    act_on_device_times: bool = False
    """Slowness that is told by a device's own clock (NCCL's profiler plugin) may be acted upon like
    any other. By default it is told only: nobody has compared it with a real slow GPU yet."""


class CheckpointConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where, how often and how many (depth resumable and above)."""

    url: str = ""
    """Directory or fsspec URL; empty means `checkpoints/` in the job's own directory. Extra `s3`
    for `s3://`, `gcs` for `gs://`. It belongs to the first job that saves there; another job is
    refused. Of `own`, the newest whole checkpoints are copied there as well, and a machine without
    one begins at the newest copy."""
    from_: str = msgspec.field(default="", name="from")
    """Folder or URL of another job's checkpoints. While the job has none of its own, it begins
    at the newest one there."""
    every_steps: Count = 0
    """A checkpoint at every n-th step; 0 leaves it to `every_s` or the automatic interval."""
    every_s: Annotated[float, Meta(ge=0)] = 0.0
    """A checkpoint every so many seconds; 0 means automatic (Young/Daly)."""
    keep_last: Positive = 3
    """The newest verified checkpoints that are kept."""
    keep_every_steps: Count = 0
    """Checkpoints at multiples of this step are kept for ever; 0 keeps none."""
    keep_best: str = ""
    """Name of a logged metric; the checkpoint at its lowest value is kept."""
    allow_pickle: bool = False
    """Load checkpoints that need pickle (never needed for those perdure wrote)."""
    allow_other_plan: bool = False
    """Resume an elastic job from a checkpoint with another plan, such as another batch size."""
    own: tuple[str, ...] = ()
    """Patterns of the checkpoints that the script itself saves, such as `out/checkpoint-*`. Before
    each start perdure moves a torn newest one to `out.torn/`."""
    own_copy: bool = False
    """Keep a copy of the last whole file of each of `own`, for a script that overwrites one file.
    If the file is torn at a restart, the copy takes its place."""


class RestartConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long perdure goes on trying."""

    max_restarts: Count = 3
    """Failures in a row without progress between them; one more ends the job."""
    same_fault_max: Positive = 3
    """The same fault at the same step this many times is the user's bug: the job ends. In an
    elastic world: so many processes of a slot that commit no step, and the slot stays empty."""
    window_s: Seconds = 600.0
    """Length of the sliding window for `window_max`."""
    window_max: Positive = 60
    """Restarts within `window_s`; one more ends the job, whatever progress it makes."""
    node_wait_s: Seconds = 900.0
    """How long the world waits for a lost node that no spare one can replace; then it ends."""
    grace_s: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds between SIGTERM and SIGKILL when a world is ended that did not crash. Ranks whose
    script and libraries do not handle SIGTERM have 2 s at most."""
    replace: bool = True
    """In an elastic world: whether a new process takes over the slot of one that died."""


Response = Literal["report", "restart", "evict", "stop"]
"""`report` does nothing else; `restart` ends the world and starts it again; `evict` does so
without the blamed node where a spare one stands ready; `stop` ends the job."""


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is done about each verdict once it may be acted upon."""

    comm_hang: Response = "evict"
    """Ranks wait for one another, and none computes: a link, an interface or a node."""
    compute_hang: Response = "restart"
    """One rank never arrives, or ended with exit code 0 while others wait for it."""
    comm_slow: Response = "evict"
    """A slow link or node; see `evict_factor` and `payback_s`."""
    straggler: Response = "evict"
    """A slow rank, or a host that others' work slows down; see `evict_factor` and `payback_s`."""
    desync: Response = "stop"
    """Ranks that call different collectives are the script's own bug: a restart meets it again."""
    unhealthy_device: Response = "evict"
    """A device reports errors of its own, or a rank died of one."""
    evict_factor: Annotated[float, Meta(ge=1)] = 1.5
    """A slow rank or link that makes a step take less than this many times as long, at the lower
    end of what was measured, is only reported."""
    payback_s: Seconds = 600.0
    """A slow node is replaced only where that is repaid within this time."""
    cordon_after: Count = 2
    """Blamed this often, a node runs nothing any more while a spare one can; 0 never."""
    interrupt_s: Annotated[float, Meta(ge=0)] = 0.0
    """Before a hung world is restarted, its collectives are broken so that the script sees an
    exception, and it has this long to end by itself; 0 ends it at once."""
    probe: bool = True
    """Settle what evidence alone cannot by an active probe between the agents."""


class HeldGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A replica group that trains no more, or whose next life does not, until it is restored."""

    name: str
    """What torchft's replica id has before the colon."""
    number: Annotated[int, Meta(ge=0, lt=1000)]
    who: str = ""
    reason: str = ""
    trains: str = ""
    """The replica id of its life that may train on; empty: none."""


class TorchftConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replica groups of torchft's Manager, each a world of its own."""

    replicas: Count = 0
    """Replica groups; 0: not a torchft job. Each has `nproc` ranks on a node of its own."""
    min_replicas: Positive = 1
    """Fewer members than this make no quorum."""
    lighthouse: str = "perdure"
    """`perdure`, `stock` (torchft's own, started here), or a URL of one that runs already."""
    hung_s: Annotated[float, Meta(ge=0)] = 0.0
    """How long members that are ready wait for one whose step does not come, beyond the longest
    silence that was seen to end; 0: as long as torchft would, 60 s or its Manager's time-out, or
    longer where its own pauses were longer."""
    silent_s: Seconds = 0.5
    """A member without a heartbeat (it sends ten a second) is left out after this long, where its
    process is stopped or its connections ended; after 5 s where nothing else is known of it."""
    elsewhere: bool = False
    """Somebody else starts the groups, as many as there are (`perdure serve`): their names tell
    them apart, and `replicas` says nothing but that this is a torchft job."""
    bind: str = "127.0.0.1"
    """Address that perdure's own lighthouse listens on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Its port; 0: one that the system chooses."""
    held: tuple[HeldGroup, ...] = ()
    """Groups that others start and that are held from the beginning: `perdure serve` takes them
    over from one of the same name that was killed."""


class Lighthouse(msgspec.Struct, frozen=True, kw_only=True):
    """The lighthouse of a torchft job."""

    url: str = ""
    """Where one runs already; empty: it is a part of the job."""
    own: bool = False
    """It is perdure's, which sees who hangs and can hold replicas."""
    bind: str = "127.0.0.1"
    """Address that it listens on."""
    port: int = 0
    """0: one that the system chooses."""
    stock_words: tuple[str, ...] = ()
    """Arguments of torchft's own, beside the address that it binds."""


class Unordered(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a job do by themselves, where the controller has ordered nothing."""

    acknowledges: bool
    """Agents tell platforms that a machine can go before its time."""
    saves: bool
    """An agent whose keeper does not answer asks for a checkpoint."""
    ends_unknown: bool
    """It ends a keeper that has never said what it holds."""
    quiet_action_s: float | None
    """It ends one that has not answered for so long, needed or not; None: never."""
    leaves: bool
    """A run that its place warns of its end leaves, saved; else it goes on until it is ended."""
    sets_nccl: bool
    """Ranks tell torch's NCCL to answer errors as the depth needs it, and not as torchrun does."""
    keeps_compiled: bool
    """Ranks tell torch to keep what it compiles with the job, and not where it would by itself."""
    mends: bool
    """Own checkpoints are copied and moved aside; a rank that raised and does not exit is ended."""


class NatsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The bus: the server that perdure starts, or one of your own. Paths only, never a secret."""

    url: str = ""
    """Your own server or cluster with JetStream, `nats://` or `tls://`; empty: one is started."""
    creds: str = ""
    """For your own server: a NATS credentials file, an NKey seed, or JSON with `user` and
    `password`, or `token`; or a directory with such a file for each role (`operator.creds`)."""
    tls_cert: str = ""
    """Certificate of the started server; to your own server it is shown as the client's."""
    tls_key: str = ""
    """Its key, unencrypted."""
    tls_ca: str = ""
    """Authority that has signed the server's certificate; empty: the system's, or `tls_cert`."""


class BusConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long the bus may be away."""

    orphan_s: Seconds = 1800.0
    """A machine that has joined ends what it runs when the bus was away for so long."""


class NotifyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a cluster's own monitor tells of what it knows, beside `perdure node notify` and NATS."""

    webhook_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """`POST /notify` is served here by the controller; 0: not at all."""
    webhook_host: str = "127.0.0.1"
    """Address it is served on; anything but loopback needs `nats.tls_cert` and `nats.tls_key`."""
    webhook_token_file: str = ""
    """File with the token that a caller must know; empty: one is made, in the job's directory."""


class PreemptionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a node learns that it is taken away, and what is done about it."""

    platform: Literal["auto", "aws", "gcp", "azure", "none"] = "auto"
    """Whose metadata service each agent asks; `auto` by what the firmware says of the machine, and
    in a pod with a service account the taints of its node as well."""
    file: str = ""
    """A file whose being there is a notice, and whose content is the grace in seconds; `{node}`
    becomes the node's number."""
    signals: dict[Literal["SIGTERM", "SIGUSR1", "SIGUSR2"], Annotated[float, Meta(ge=0)]] = {}
    """A signal to the agent that is a notice -> the grace that it gives, in seconds."""
    grace_s: Annotated[float, Meta(ge=0)] = 30.0
    """The grace of a notice that does not say its own."""
    lead_s: Seconds = 60.0
    """The node is left no earlier than this long before it goes away."""
    rebalance: Literal["report", "checkpoint", "drain"] = "drain"
    """What is done about a higher risk that is no notice yet. `drain` leaves the node where the
    world stays whole without it, and is a checkpoint otherwise."""
    acknowledge: bool = False
    """Tell Azure that its event may begin as soon as nothing runs on the node any more."""


class MetricsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Figures for the monitoring that is there already; see `perdure metrics` as well."""

    prometheus_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """`/metrics` is served here while the job runs; 0: not at all. Needs prometheus-client."""
    prometheus_host: str = "127.0.0.1"
    """Address it is served on."""


AlertKind = Literal[
    "verdict",
    "failure",
    "recovered",
    "cordon",
    "device",
    "preemption",
    "checkpoint-failed",
    "storage",
    "part",
    "ended",
    "meter",
]


class AlertsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whom perdure tells. Nothing waits for it: what cannot be delivered is logged and dropped."""

    command: tuple[str, ...] = ()
    """A program and its arguments; the alert is on its standard input, as JSON."""
    webhook: str = ""
    """A URL that gets the alert by POST, as JSON; `@PATH` reads the URL from a file, which keeps
    what is secret in it out of job files."""
    apprise: str = ""
    """An address of the library apprise (`slack://...`, `mailto://...`), which is told in words;
    `@PATH` reads them from a file, one a line. Extra `alerts`."""
    events: tuple[AlertKind, ...] = (
        "verdict",
        "failure",
        "recovered",
        "cordon",
        "device",
        "preemption",
        "storage",
        "ended",
        "meter",
    )
    """Which kinds; `checkpoint-failed` and `part` (one of perdure's own died) are there as well.
    `meter` is what `perdure status --remind` finds."""


class TrackingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Experiment trackers that are told of incidents, settings and goodput while the job runs.

    No secret stands here: they read it from the environment, as they always do. Nothing of the job
    waits for them.
    """

    tensorboard: str = ""
    """A folder of TensorBoard's; perdure's own run in it is `perdure-JOB`. Extra `tensorboard`."""
    wandb: str = ""
    """`PROJECT` or `ENTITY/PROJECT` of Weights & Biases. Extra `wandb`."""
    mlflow: str = ""
    """A tracking server's URL, `sqlite:///PATH` or `databricks`, without a password. Extra
    `mlflow`."""
    run_log: bool = False
    """They also get the values of `run.log`, for a script that logs to none of them itself."""
    every_s: Seconds = 10.0
    """Between two samples of goodput, ranks and step."""
    timeout_s: Seconds = 60.0
    """Seconds after which a tracker that takes nothing is left, and tried again later. The end of
    the job waits for trackers for a quarter of it."""

    @property
    def targets(self) -> dict[str, str]:
        """Where each tracker that is wanted is told, by its name."""
        named = {"tensorboard": self.tensorboard, "wandb": self.wandb, "mlflow": self.mlflow}
        return {name: target for name, target in named.items() if target}


class LaunchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What goes along with the job to another machine; where it goes is the profile's business."""

    project: str = "."
    """The folder that is sent, relative to the job file; `cwd` and `script` are inside it."""
    exclude: tuple[str, ...] = (".git", ".venv", "__pycache__", "*.pyc", ".mypy_cache")
    """What of it stays here (patterns of rsync)."""
    requirements: str = ""
    """A file in the project, installed by pip where an environment is made for the job."""
    secrets: tuple[str, ...] = ()
    """Names of variables of this shell whose values the ranks get, over standard input."""
    outputs: tuple[str, ...] = ()
    """Folders in the project that are results: pulled and verified like the checkpoints."""
    gpus: Count = 0
    """GPUs that the job holds alone on a machine; 0: `nproc`, where there are any."""


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training job."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] = "job"
    """Names the job's directory; running the same name again resumes it. `perdure run` makes one
    of the script's name where none was given."""
    script: str
    """Path of a Python file; a module's name with `module`; a program with `no_python`."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    module: bool = False
    """Run `script` as `python -m` would."""
    no_python: bool = False
    """Run `script` as a program of its own, without Python (and without the recorder)."""
    nproc: Positive = 1
    """Ranks on each node."""
    nodes: Positive = 1
    """Nodes; on one machine, that many agents and keepers of their own."""
    spares: Count = 0
    """Slots paid for and kept idle, ready to stand in."""
    nodes_max: Count = 0
    """An elastic world grows to so many nodes while it runs, with machines that join; 0: to
    `nodes`, which it has from the beginning and is never scaled below. Slurm is asked for the
    range, and each run begins with what it gives."""
    remote: Count = 0
    """So many of the nodes, the last ones, are not started here: `perdure node join` brings them.
    Under `perdure serve`, so many other machines pass on what ranks of groups there say."""
    cwd: str = "."
    """Working directory of the ranks; relative to that of `perdure run`."""
    env: dict[str, str] = {}
    """Added to the environment of every rank. Without them here, `ROLE_NAME` is
    `default`, and `TORCHELASTIC_RUN_ID` is the job's name."""
    cold: bool = False
    """Start ranks by exec instead of forking them from a warm image."""
    log_dir: str = ""
    """Where the ranks' streams go; empty means `logs/` in the job's own directory."""
    tee: Literal["all", "none"] = "all"
    """Whether the ranks' streams are also shown, prefixed, on the terminal of `perdure run`."""
    observe: bool = False
    """Everything is seen, recorded and reported, and nothing is ever acted upon: no restart, no
    eviction, no probe. What would have been done is journaled. A rank that dies ends the job."""
    detect: DetectConfig = DetectConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    restart: RestartConfig = RestartConfig()
    policy: PolicyConfig = PolicyConfig()
    torchft: TorchftConfig = TorchftConfig()
    nats: NatsConfig = NatsConfig()
    bus: BusConfig = BusConfig()
    notify: NotifyConfig = NotifyConfig()
    preemption: PreemptionConfig = PreemptionConfig()
    alerts: AlertsConfig = AlertsConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracking: TrackingConfig = TrackingConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def spare_nodes(self) -> int:
        """Whole nodes among the spare slots: each can stand in for one that is left out."""
        return self.spares // self.nproc

    @property
    def growth(self) -> int:
        """Nodes by which an elastic world may grow."""
        return max(0, self.nodes_max - self.nodes)

    @property
    def first_nodes(self) -> int:
        """Nodes that are there from the beginning: those that run ranks, then the spare ones."""
        return self.nodes + self.spare_nodes

    @property
    def num_nodes(self) -> int:
        """Nodes that may have an agent at the same time."""
        return self.first_nodes + self.growth

    @property
    def local_nodes(self) -> int:
        """Nodes whose agents `perdure run` starts."""
        return 0 if self.served else max(0, self.num_nodes - self.remote)

    @property
    def places(self) -> range:
        """Numbers of the places that machines from elsewhere may take.

        They are nodes, but where others start the groups: there they are machines with such groups.
        """
        return range(self.remote) if self.served else range(self.local_nodes, self.num_nodes)

    @property
    def num_logins(self) -> int:
        """How many numbers of nodes and places there are, each with a login at the bus."""
        return max(self.num_nodes, self.remote)

    @property
    def world_size(self) -> int:
        """Ranks of the whole job; of an elastic one, of its first world."""
        return self.nproc * self.nodes

    @property
    def world_size_max(self) -> int:
        """Ranks that an elastic world may have."""
        return self.nproc * (self.nodes + self.growth)

    @property
    def slots(self) -> int:
        """Slots of ranks and spares, those by which an elastic world may grow among them."""
        return self.world_size_max + self.spares

    def slot_of(self, rank: int) -> int:
        """Return the slot of `rank`: its own number, but in an elastic world.

        There slots beyond the world are spare ones, and a number beyond all slots is a member
        that came later, in its predecessors' place.
        """
        return rank if self.groups else rank % self.slots

    def node_of(self, rank: int) -> int:
        """Return the group rank (GROUP_RANK) of the node that runs global rank `rank`.

        It is the node's own number until a spare one stands in (`Assignment.placement`). Spare
        slots that make no whole node are on the last one.
        """
        return min(self.slot_of(rank) // self.nproc, self.num_nodes - 1)

    def local_rank_of(self, rank: int) -> int:
        """Return the number of the slot of `rank` among those of its node (LOCAL_RANK)."""
        return self.slot_of(rank) - self.node_of(rank) * self.nproc

    @property
    def machine_ranks(self) -> int:
        """Ranks, and so GPUs, of one machine on which all nodes are; of torchft, all its groups.

        Groups that are spare hold their devices as well.
        """
        if self.groups:
            return self.nproc * (self.torchft.replicas + self.spare_nodes)
        return self.nproc * self.nodes

    @property
    def local_ranks(self) -> int:
        """Ranks, and so GPUs, of the machine of `perdure run`; other machines have their own."""
        nodes = self.local_nodes if self.groups else min(self.nodes, self.local_nodes)
        return self.nproc * max(1, nodes)

    @property
    def node_ranks(self) -> int:
        """Ranks of a machine that is one node of several; of torchft, of that with all groups."""
        return self.machine_ranks if self.groups else self.nproc

    @property
    def served(self) -> bool:
        """Whether others start its replica groups (`perdure serve`)."""
        return self.torchft.elsewhere

    @property
    def groups(self) -> int:
        """Replica groups of a torchft job, spare ones among them."""
        return self.num_nodes if self.torchft.replicas else 0

    @property
    def lighthouse(self) -> Lighthouse | None:
        """The lighthouse of a torchft job; None in others.

        The stock one's heartbeat time-out does not adapt to a busy machine, so it is twice
        `silent_s`; torchft's default of 5 s would be what survivors of a death wait. That is what
        they wait where the job is only observed.
        """
        config = self.torchft
        if not config.replicas:
            return None
        if config.lighthouse == "perdure":
            return Lighthouse(own=True, bind=config.bind, port=config.port)
        if config.lighthouse != "stock":
            return Lighthouse(url=config.lighthouse)
        words: tuple[str, ...] = ("--min_replicas", str(config.min_replicas))
        if not self.observe:
            words += ("--heartbeat_timeout_ms", str(round(2000 * config.silent_s)))
        return Lighthouse(stock_words=words)

    @property
    def unordered(self) -> Unordered:
        """What the job's parts do by themselves: nothing where it is only observed."""
        acts = not self.observe
        return Unordered(
            acknowledges=acts and self.preemption.acknowledge,
            saves=acts,
            ends_unknown=acts,
            quiet_action_s=self.detect.quiet_action_s if acts else None,
            leaves=acts,
            sets_nccl=acts,
            keeps_compiled=acts,
            mends=acts,
        )

    def ranks_of(self, group: int) -> range:
        """Return the global ranks of the node with group rank `group`; none for -1."""
        return range(max(group, 0) * self.nproc, (group + 1) * self.nproc)
