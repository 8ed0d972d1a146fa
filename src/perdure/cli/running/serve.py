"""`perdure serve`: bus, controller and lighthouse for replica groups that somebody else starts.

There is no script and there are no ranks here: whoever runs torchrun in another terminal or on
another machine points TORCHFT_LIGHTHOUSE at what this command prints.
"""

import ipaddress
import socket
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from perdure.cli.running.jobspec import check_folder, locate_all, read_job_file, validate
from perdure.cli.running.run import supervise
from perdure.cli.speech.say import JobName, Json, keep_given
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec
from perdure.model.report import ReplicaRow, Snapshot
from perdure.service.access.credentials import check_outside
from perdure.service.jobfiles import is_alive, paths_of, resolve_home

PORT = 29510
"""Where torchft's own lighthouse listens, too."""


def serve(
    job: JobName,
    port: Annotated[
        int,
        typer.Option("--lighthouse-port", min=0, max=65535, help="0: one that is free."),
    ] = PORT,
    bind: Annotated[
        str, typer.Option("--bind", metavar="ADDRESS", help="Where the lighthouse listens.")
    ] = "127.0.0.1",
    unprotected: Annotated[
        bool,
        typer.Option(
            "--unprotected", help="Bind beyond loopback: torchft's protocol has no credentials."
        ),
    ] = False,
    min_replicas: Annotated[
        int | None,
        typer.Option("--min-replicas", min=1, help="Fewer groups make no quorum (default 1)."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc-per-node", "-n", min=1, help="Ranks of each group (default 1)."),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="A job file; options win over it.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Serve replica groups that others start: bus, controller and lighthouse, and no ranks.

    Runs until SIGINT or SIGTERM, or `perdure stop`; whoever trains then goes on without
    a lighthouse. Groups join by TORCHFT_LIGHTHOUSE, which is printed.
    """
    home = resolve_home()
    torchft = {"bind": bind, "port": port, **keep_given(min_replicas=min_replicas)}
    spec = make_served_spec(job, torchft, config, nproc)
    check_outside(spec)
    check_bind(bind, unprotected=unprotected)
    if find_spec("grpc") is None:
        raise ConfigError("perdure serve needs grpcio", hint="pip install 'perdure[torchft]'")
    if is_alive(paths_of(home, job)):
        hint = f"`perdure status {job}`, `perdure stop {job}`, or another name"
        raise ConfigError(f"job `{job}` is running", hint=hint)
    check_folder(home)
    check_port(bind, port)
    arrivals = Arrivals()

    def tell(snapshot: Snapshot) -> list[str]:
        return [f"[perdure] {line}" for line in arrivals.take(snapshot.replicas)]

    return supervise(spec, home, as_json=as_json, tells=tell)


def make_served_spec(
    name: str, torchft: dict[str, Any], config: str | None = None, nproc: int | None = None
) -> JobSpec:
    """Return the job: `torchft` has what was said of its lighthouse.

    Raises:
        ConfigError: the job file is wrong, or has what a job without ranks of its own cannot have.
    """
    document: dict[str, Any] = {"script": "", **(read_job_file(config) if config else {})}
    said = validate(document, config or "options")  # So that it has the shape that is written over.
    if said.script:
        raise ConfigError(
            f"{config}: script: the groups of `perdure serve` are started by others",
            hint="leave it out; `perdure run --torchft` starts groups itself",
        )
    document |= {"name": name, **keep_given(nproc=nproc)}
    document["torchft"] = {
        **document.get("torchft", {}),
        **torchft,
        "replicas": 1,
        "elsewhere": True,
    }
    spec = validate(document, "options")
    wrong = (
        (spec.nodes > 1 or spec.spares or spec.remote or spec.nodes_max, "nodes and spares"),
        (document.get("observe"), "observe"),
        (spec.bus.replicas > 1, "bus.replicas"),
        (not (spec.lighthouse and spec.lighthouse.own), "torchft.lighthouse"),
        (spec.checkpoint.every_steps or spec.checkpoint.every_s, "checkpoint.every_*"),
    )
    for given, field in wrong:
        if given:
            hint = "leave it out: perdure starts none of the groups"
            raise ConfigError(f"{field}: not in a job of `perdure serve`", hint=hint)
    return locate_all(spec)


def check_bind(bind: str, *, unprotected: bool) -> None:
    """Check that the lighthouse may listen at `bind`.

    Raises:
        ConfigError: it is no address, or others than this machine's users would reach it.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if bind == "localhost" else bind)
    except ValueError:
        hint = "an IP address of this machine, such as 127.0.0.1"
        raise ConfigError(f"--bind {bind}: no address", hint=hint) from None
    if not address.is_loopback and not unprotected:
        raise ConfigError(
            f"--bind {bind}: whoever reaches the lighthouse's port can join a quorum, hand the "
            "others a state, or end a group: torchft's protocol has no credentials",
            hint="--unprotected where only your own machines reach it (docs/torchft.md)",
        )


def check_port(bind: str, port: int) -> None:
    """Check that nobody listens there, and that the address is this machine's.

    Raises:
        PlatformError: otherwise.
    """
    try:
        [(family, kind, proto, _, address), *_] = socket.getaddrinfo(
            bind, port, type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise PlatformError(
            f"the lighthouse cannot listen on {bind}:{port}: {error.strerror}",
            hint="--lighthouse-port PORT, or 0 for one that is free",
        ) from error


class Arrivals:
    """Tells in lines who has come, trains, and has gone."""

    def __init__(self) -> None:
        """Begin with nobody there."""
        self._known: dict[int, tuple[str, str]] = {}

    def take(self, rows: tuple[ReplicaRow, ...]) -> list[str]:
        """Return what is new.

        >>> row = ReplicaRow(0, "train_0:ab", 0, "training", 3, 2, since_s=1.0)
        >>> Arrivals().take((row,))
        ['group 0 (train_0:ab) trains, in quorum 2']
        """
        lines = []
        for row in rows:
            if self._known.get(row.group) != (row.replica, row.state):
                self._known[row.group] = (row.replica, row.state)
                state = {"training": "trains", "healing": "heals"}.get(row.state, f"is {row.state}")
                where = f", in quorum {row.quorum_id}" if row.quorum_id >= 0 else ""
                lines.append(
                    f"group {row.group} ({row.replica}) {state}{where}"
                    + (f": {row.why}" if row.why else "")
                )
        return lines
