"""The options of `perdure run`, named as torchrun names them, and what they were set to.

Underscores are as good as dashes, and torchrun's environment variables (`PET_NPROC_PER_NODE`)
are read where it reads them. None means: not given, so that a job file's value stays.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, get_origin

import typer

from perdure.cli.speech.say import Json

_TORCHRUN = "torchrun's options"


def _option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    long = next(name for name in names if name.startswith("--"))
    if panel == _TORCHRUN:
        more.setdefault("envvar", "PET_" + long[2:].upper().replace("-", "_"))
    return typer.Option(*names, help=help, rich_help_panel=panel, show_envvar=False, **more)


def _torchrun(*names: str, help: str, **more: Any) -> Any:
    return _option(*names, help=help, panel=_TORCHRUN, **more)


def take_options(options: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Have Typer see the fields of `options` that are options as a command's parameters."""

    def take(command: Callable[..., int]) -> Callable[..., int]:
        fields = inspect.signature(options).parameters.values()
        shown = [field for field in fields if get_origin(field.annotation) is Annotated]
        command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return command

    return take


@dataclass(slots=True)
class RunOptions:
    """The options given on the command line of `perdure run`, in the order of its help.

    Each option is declared here, once: `run` takes what has an annotation.
    """

    script: Annotated[str | None, typer.Argument(help="A Python file, module or program.")] = None
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None
    nproc: Annotated[
        str | None,
        _torchrun(
            "--nproc-per-node",
            "-n",
            metavar="N",
            help="Ranks on each node: a number, auto, cpu or gpu.",
        ),
    ] = None
    name: Annotated[
        str | None, _option("--name", help="The job's name; the same name again resumes it.")
    ] = None
    config: Annotated[
        str | None, _option("--config", "-c", help="A job file; options win over it.")
    ] = None
    nodes: Annotated[
        int | None, _option("--nodes", min=1, help="Emulated nodes on this machine.")
    ] = None
    spares: Annotated[
        int | None, _option("--spares", min=0, help="Slots paid for and kept idle.")
    ] = None
    remote: Annotated[
        int | None,
        _option(
            "--remote", min=0, help="Number of nodes that come from elsewhere: `perdure node join`."
        ),
    ] = None
    torchft: Annotated[
        bool, _option("--torchft", help="Replica groups of torchft; serves them a lighthouse.")
    ] = False
    replicas: Annotated[
        int | None,
        _option("--replicas", min=1, help="Replica groups, each of -n ranks (default 2)."),
    ] = None
    env: Annotated[
        list[str] | None, _option("--env", metavar="K=V", help="For every rank; may be repeated.")
    ] = None
    own: Annotated[
        list[str] | None,
        _option("--own", metavar="PATTERN", help="Checkpoints that the script saves: out/ckpt-*."),
    ] = None
    cold: Annotated[
        bool, _option("--cold", help="Start ranks by exec instead of from a warm image.")
    ] = False
    observe: Annotated[
        bool, _option("--observe", help="See, record and report everything; never act upon it.")
    ] = False
    nats: Annotated[
        str | None, _option("--nats", metavar="URL", help="Your own NATS server with JetStream.")
    ] = None
    nats_creds: Annotated[
        str | None,
        _option(
            "--nats-creds", metavar="PATH", help="Its credentials: a file, or a folder by role."
        ),
    ] = None
    nats_tls_cert: Annotated[
        str | None,
        _option(
            "--nats-tls-cert", metavar="FILE", help="Certificate of perdure's server, or for yours."
        ),
    ] = None
    nats_tls_key: Annotated[
        str | None, _option("--nats-tls-key", metavar="FILE", help="Its key.")
    ] = None
    nats_tls_ca: Annotated[
        str | None,
        _option("--nats-tls-ca", metavar="FILE", help="CA certificate of the NATS server."),
    ] = None
    placement: Annotated[
        str | None, _option("--placement", metavar="FILE", hidden=True, help="See docs/lab.md.")
    ] = None
    detach: Annotated[bool, _option("--detach", help="Return once the job has been started.")] = (
        False
    )
    json: Json = False
    module: Annotated[
        bool, _torchrun("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = False
    no_python: Annotated[bool, _torchrun("--no-python", help="SCRIPT is a program of its own.")] = (
        False
    )
    run_path: Annotated[bool, _torchrun("--run-path", help="Accepted; has no effect.")] = False
    max_restarts: Annotated[
        int | None,
        _torchrun(
            "--max-restarts", min=0, help="Failures in a row without progress between (default 3)."
        ),
    ] = None
    log_dir: Annotated[str | None, _torchrun("--log-dir", help="Where the ranks' streams go.")] = (
        None
    )
    redirects: Annotated[
        str | None,
        _torchrun(
            "--redirects", "-r", help="Not on the terminal: 1 out, 2 err, 3 both, or RANK:N,..."
        ),
    ] = None
    tee: Annotated[
        str | None, _torchrun("--tee", "-t", help="Streams that the terminal shows as well.")
    ] = None
    local_ranks_filter: Annotated[
        str | None,
        _torchrun("--local-ranks-filter", help="Local ranks shown on the terminal: 0,1."),
    ] = None
    role: Annotated[str | None, _torchrun("--role", help="ROLE_NAME.")] = None
    shutdown_timeout: Annotated[
        int | None,
        _torchrun(
            "--shutdown-timeout", min=0, help="Seconds between SIGTERM and SIGKILL (default 30)."
        ),
    ] = None
    nnodes: Annotated[
        str | None,
        _torchrun("--nnodes", metavar="N", help="Nodes on which this is typed: N, MIN:MAX, auto."),
    ] = None
    standalone: Annotated[
        bool, _torchrun("--standalone", help="Accepted on one node: perdure makes the rendezvous.")
    ] = False
    rdzv_backend: Annotated[str | None, _torchrun("--rdzv-backend", help="Ignored.")] = None
    rdzv_endpoint: Annotated[
        str | None,
        _torchrun(
            "--rdzv-endpoint",
            metavar="HOST[:PORT]",
            help="Address and port at which several nodes meet.",
        ),
    ] = None
    rdzv_id: Annotated[
        str | None,
        _torchrun("--rdzv-id", help="TORCHELASTIC_RUN_ID; names a job of several nodes."),
    ] = None
    rdzv_conf: Annotated[
        str | None,
        _torchrun("--rdzv-conf", metavar="K=V,...", help="secret_file=PATH, join_timeout=S."),
    ] = None
    monitor_interval: Annotated[
        float | None, _torchrun("--monitor-interval", help="Ignored: exits are seen at once.")
    ] = None
    start_method: Annotated[
        str | None,
        _torchrun("--start-method", help="Ignored: ranks are forked from a warm image, or --cold."),
    ] = None
    node_rank: Annotated[
        str | None, _torchrun("--node-rank", help="0 is the first node; else --rdzv-endpoint says.")
    ] = None
    master_addr: Annotated[
        str | None, _torchrun("--master-addr", help="As --rdzv-endpoint, without the port.")
    ] = None
    master_port: Annotated[str | None, _torchrun("--master-port", help="Its port (29500).")] = None
    local_addr: Annotated[
        str | None,
        _torchrun(
            "--local-addr", metavar="IP", help="Address at which other nodes reach this one."
        ),
    ] = None
    environ: dict[str, str] = field(default_factory=dict)
    """The environment of `perdure run` itself, which is no option."""

    def map_rendezvous(self) -> dict[str, str | bool | None]:
        """Return torchrun's options about nodes and where they meet, by name."""
        return {
            "--nnodes": self.nnodes,
            "--node-rank": self.node_rank,
            "--standalone": self.standalone,
            "--rdzv-backend": self.rdzv_backend,
            "--rdzv-endpoint": self.rdzv_endpoint,
            "--rdzv-id": self.rdzv_id,
            "--rdzv-conf": self.rdzv_conf,
            "--master-addr": self.master_addr,
            "--master-port": self.master_port,
            "--local-addr": self.local_addr,
        }
