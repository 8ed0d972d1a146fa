"""The options of `perdure run`, named as torchrun names them, and what they were set to.

Underscores are as good as dashes, and torchrun's environment variables (`PET_NPROC_PER_NODE`)
are read where it reads them. None means: not given, so that a job file's value stays.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

_TORCHRUN = "torchrun's options"


def _option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    long = next(name for name in names if name.startswith("--"))
    if panel == _TORCHRUN:
        more.setdefault("envvar", "PET_" + long[2:].upper().replace("-", "_"))
    return typer.Option(*names, help=help, rich_help_panel=panel, show_envvar=False, **more)


def _torchrun(*names: str, help: str, **more: Any) -> Any:
    return _option(*names, help=help, panel=_TORCHRUN, **more)


Nproc = Annotated[
    str | None,
    _torchrun(
        "--nproc-per-node",
        "-n",
        metavar="N",
        help="Ranks on each node: a number, auto, cpu or gpu.",
    ),
]
Nnodes = Annotated[str | None, _torchrun("--nnodes", help="1, 1:1; more needs --nodes.")]
Standalone = Annotated[
    bool, _torchrun("--standalone", help="Always so here: perdure makes the rendezvous.")
]
RdzvBackend = Annotated[str | None, _torchrun("--rdzv-backend", help="Ignored.")]
RdzvEndpoint = Annotated[
    str | None, _torchrun("--rdzv-endpoint", help="Ignored if it names this machine.")
]
RdzvId = Annotated[str | None, _torchrun("--rdzv-id", help="Becomes TORCHELASTIC_RUN_ID.")]
RdzvConf = Annotated[str | None, _torchrun("--rdzv-conf", help="Ignored.")]
MaxRestarts = Annotated[
    int | None,
    _torchrun(
        "--max-restarts", min=0, help="Failures in a row without progress between (default 3)."
    ),
]
MonitorInterval = Annotated[
    float | None, _torchrun("--monitor-interval", help="Ignored: exits are seen at once.")
]
StartMethod = Annotated[
    str | None,
    _torchrun("--start-method", help="Ignored: ranks are forked from a warm image, or --cold."),
]
Role = Annotated[str | None, _torchrun("--role", help="ROLE_NAME.")]
Module = Annotated[bool, _torchrun("--module", "-m", help="SCRIPT is a module, as in python -m.")]
NoPython = Annotated[bool, _torchrun("--no-python", help="SCRIPT is a program of its own.")]
RunPath = Annotated[bool, _torchrun("--run-path", help="Always so here.")]
LogDir = Annotated[str | None, _torchrun("--log-dir", help="Where the ranks' streams go.")]
Redirects = Annotated[
    str | None,
    _torchrun("--redirects", "-r", help="Not on the terminal: 1 out, 2 err, 3 both, or RANK:N,..."),
]
Tee = Annotated[str | None, _torchrun("--tee", "-t", help="On the terminal all the same.")]
LocalRanksFilter = Annotated[
    str | None, _torchrun("--local-ranks-filter", help="Local ranks shown on the terminal: 0,1.")
]
NodeRank = Annotated[str | None, _torchrun("--node-rank", help="0.")]
MasterAddr = Annotated[
    str | None, _torchrun("--master-addr", help="Ignored if it names this machine.")
]
MasterPort = Annotated[str | None, _torchrun("--master-port", help="Ignored.")]
ShutdownTimeout = Annotated[
    int | None,
    _torchrun("--shutdown-timeout", min=0, help="Seconds between SIGTERM and SIGKILL (default 2)."),
]

Script = Annotated[str | None, typer.Argument(help="A Python file, module or program.")]
Args = Annotated[list[str] | None, typer.Argument(help="Its arguments.")]
Config = Annotated[str | None, _option("--config", "-c", help="A job file; options win over it.")]
Name = Annotated[
    str | None, _option("--name", help="The job's name; the same name again resumes it.")
]
Nodes = Annotated[int | None, _option("--nodes", min=1, help="Emulated nodes on this machine.")]
Spares = Annotated[int | None, _option("--spares", min=0, help="Slots paid for and kept idle.")]
Remote = Annotated[
    int | None,
    _option("--remote", min=0, help="So many of the nodes come from elsewhere: `perdure join`."),
]
Torchft = Annotated[
    bool, _option("--torchft", help="Replica groups of torchft; serves them a lighthouse.")
]
Replicas = Annotated[
    int | None, _option("--replicas", min=1, help="Replica groups, each of -n ranks (default 2).")
]
Cold = Annotated[bool, _option("--cold", help="Start ranks by exec instead of from a warm image.")]
Observe = Annotated[
    bool, _option("--observe", help="See, record and report everything; never act upon it.")
]
Nats = Annotated[
    str | None, _option("--nats", metavar="URL", help="Your own NATS server with JetStream.")
]
NatsCreds = Annotated[
    str | None,
    _option("--nats-creds", metavar="PATH", help="Its credentials: a file, or a folder by role."),
]
NatsTlsCert = Annotated[
    str | None,
    _option(
        "--nats-tls-cert", metavar="FILE", help="Certificate of perdure's server, or for yours."
    ),
]
NatsTlsKey = Annotated[str | None, _option("--nats-tls-key", metavar="FILE", help="Its key.")]
NatsTlsCa = Annotated[
    str | None, _option("--nats-tls-ca", metavar="FILE", help="Who has signed the server's.")
]
Replicate = Annotated[
    int | None,
    _option("--replicate", min=1, metavar="N", help="Survive any node: journal on N nodes (3)."),
]
Arbiter = Annotated[
    str | None,
    _option("--arbiter", metavar="DIR", help="Shared folder that decides between two nodes."),
]
Env = Annotated[
    list[str] | None, _option("--env", metavar="K=V", help="For every rank; may be repeated.")
]
Placement = Annotated[
    str | None, _option("--placement", metavar="FILE", hidden=True, help="See docs/lab.md.")
]
Detach = Annotated[bool, _option("--detach", help="Return once the job has been started.")]
Json = Annotated[bool, _option("--json", help="The answer as JSON.")]


@dataclass(slots=True)
class RunOptions:
    """What was given on the command line of `perdure run`."""

    script: str | None = None
    args: list[str] | None = None
    nproc: str | None = None
    nnodes: str | None = None
    standalone: bool = False
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    max_restarts: int | None = None
    monitor_interval: float | None = None
    start_method: str | None = None
    role: str | None = None
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    log_dir: str | None = None
    redirects: str | None = None
    tee: str | None = None
    local_ranks_filter: str | None = None
    node_rank: str | None = None
    master_addr: str | None = None
    master_port: str | None = None
    shutdown_timeout: int | None = None
    config: str | None = None
    name: str | None = None
    nodes: int | None = None
    spares: int | None = None
    remote: int | None = None
    torchft: bool = False
    replicas: int | None = None
    cold: bool = False
    observe: bool = False
    nats: str | None = None
    nats_creds: str | None = None
    nats_tls_cert: str | None = None
    nats_tls_key: str | None = None
    nats_tls_ca: str | None = None
    env: list[str] | None = None
    replicate: int | None = None
    arbiter: str | None = None
    placement: str | None = None
    detach: bool = False
    json: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    """The environment of `perdure run` itself."""
