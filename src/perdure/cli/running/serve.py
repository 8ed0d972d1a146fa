"""`perdure serve`: bus, controller and lighthouse for replica groups that somebody else starts.

There is no script and there are no ranks here: whoever runs torchrun in another terminal or on
another machine points TORCHFT_LIGHTHOUSE at what this command prints.
"""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.speech.say import JobName, Json, keep_given, note
from perdure.model.errors import ConfigError, PlatformError
from perdure.service.jobfolders import is_alive, paths_of, resolve_home

if TYPE_CHECKING:
    from perdure.model.job import JobSpec
    from perdure.model.paths import JobPaths
    from perdure.model.report import ReplicaRow, Snapshot

PORT = 29510
"""Where torchft's own lighthouse listens, too."""


def serve(
    job: JobName,
    port: Annotated[
        int | None,
        typer.Option(
            "--lighthouse-port", min=0, max=65535, help="Its port; 0: a free one (default 29510)."
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option("--bind", metavar="ADDRESS", help="Address to listen on (default 127.0.0.1)."),
    ] = None,
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
    remote: Annotated[
        int | None,
        typer.Option(
            "--remote",
            metavar="K",
            min=1,
            help="Number of other machines to invite, whose ranks have the line.",
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="A job file; options win over it.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the lighthouse serves.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Serve torchft replica groups that others start by torchrun.

    Bus, controller and lighthouse run here, and no ranks. SIGINT,
    SIGTERM, or `perdure stop` ends it; groups then train without a lighthouse. Groups join by the
    TORCHFT_LIGHTHOUSE that it prints.
    """
    from importlib.util import find_spec

    from perdure.cli.running.jobspec import check_folder
    from perdure.cli.running.run import detach as hand_over
    from perdure.service.access.credentials import check_outside  # With NATS.

    home = resolve_home()
    torchft = keep_given(bind=bind, port=port, min_replicas=min_replicas)
    spec = make_served_spec(job, torchft, config, nproc, remote)
    check_outside(spec)
    check_bind(spec.torchft.bind, unprotected=unprotected, joined=bool(spec.remote))
    if find_spec("grpc") is None:
        raise ConfigError("perdure serve needs grpcio", hint="pip install 'perdure[torchft]'")
    if is_alive(paths_of(home, job)):
        hint = f"`perdure status {job}`, `perdure stop {job}`, or another name"
        raise ConfigError(f"job `{job}` is running", hint=hint)
    check_folder(home)
    check_port(spec.torchft.bind, spec.torchft.port)
    spec = hold_again(spec, paths_of(home, job))
    return (hand_over if detach else serve_here)(spec, home, as_json=as_json)


def serve_here(spec: "JobSpec", home: str, *, as_json: bool) -> int:
    """Serve in this process until it ends; return the exit code.

    Raises:
        PerdureError: it cannot be served.
    """
    from perdure.cli.running.run import supervise

    arrivals = Arrivals()

    def tell(snapshot: "Snapshot") -> list[str]:
        return [f"[perdure] {line}" for line in arrivals.take(snapshot.replicas)]

    placement = write_placement(spec, home) if spec.remote else ""
    return supervise(spec, home, as_json=as_json, tells=tell, placement=placement)


def write_placement(spec: "JobSpec", home: str) -> str:
    """Write that the bus is where the lighthouse is, for machines that join; return the file.

    Port, certificate and `joiner`'s password are kept beside it, so that those who have joined come
    back by their invitations when this is started anew.

    Raises:
        PlatformError: it cannot be written.
    """
    from perdure.service.jobfiles import RENDEZVOUS, on_disk, write_document
    from perdure.service.placement import Placement

    folder = os.path.join(paths_of(home, spec.name).root, RENDEZVOUS)
    with on_disk(f"write {folder}"):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, "placement.json")
    write_document(path, Placement(bind=spec.torchft.bind, door="door.json"))
    return path


def make_served_spec(
    name: str,
    torchft: dict[str, Any],
    config: str | None = None,
    nproc: int | None = None,
    remote: int | None = None,
) -> "JobSpec":
    """Return the job: `torchft` has what was said of its lighthouse.

    Raises:
        ConfigError: the job file is wrong, or has what a job without ranks of its own cannot have.
    """
    from perdure.cli.running.jobspec import locate_all, read_job_file, validate

    document: dict[str, Any] = {"script": "", **(read_job_file(config) if config else {})}
    said = validate(document, config or "options")  # So that it has the shape that is written over.
    if said.script:
        raise ConfigError(
            f"{config}: script: the groups of `perdure serve` are started by others",
            hint="leave it out; `perdure run --torchft` starts groups itself",
        )
    document |= {"name": name, **keep_given(nproc=nproc, remote=remote)}
    document["torchft"] = {
        "port": PORT,
        **document.get("torchft", {}),
        **torchft,
        "replicas": 1,
        "elsewhere": True,
    }
    spec = validate(document, "options")
    wrong = (
        (spec.nodes > 1 or spec.spares or spec.nodes_max, "nodes and spares"),
        (spec.remote and spec.nats.url, "nats.url with remote"),
        (document.get("observe"), "observe"),
        (not (spec.lighthouse and spec.lighthouse.own), "torchft.lighthouse"),
        (spec.checkpoint.every_steps or spec.checkpoint.every_s, "checkpoint.every_*"),
    )
    for given, field in wrong:
        if given:
            hint = "leave it out: perdure starts none of the groups"
            raise ConfigError(f"{field}: not in a job of `perdure serve`", hint=hint)
    return locate_all(spec)


def check_bind(bind: str, *, unprotected: bool, joined: bool) -> None:
    """Check that the lighthouse may listen at `bind`; with `joined`, the bus as well.

    Raises:
        ConfigError: it is no address, or others than this machine's users would reach it.
    """
    import ipaddress

    from perdure.service.placement import CLOSED, is_closed

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
    if joined and not is_closed(str(address)):
        raise ConfigError(
            f"--bind {bind} with --remote: machines that join have to be told one address, which "
            "strangers do not reach",
            hint=f"{CLOSED}: that of this machine in the network of the others",
        )


def check_port(bind: str, port: int) -> None:
    """Check that nobody listens there, and that the address is this machine's.

    Raises:
        PlatformError: otherwise.
    """
    import socket

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


def hold_again(spec: "JobSpec", paths: "JobPaths") -> "JobSpec":
    """Return the job with the holds of the serve that was killed, and say whom it holds."""
    import msgspec

    from perdure.service.holds import read_holds

    holds = read_holds(paths)
    for held in holds.groups:
        alive = f", but for {held.trains}" if held.trains else ""
        note(
            f"group {held.number} ({held.name}) is held, as before{alive}: "
            f"perdure node restore {spec.name} {held.name}"
        )
    for replica in holds.lost:
        note(f"{replica} was held, and cannot be known again by its name: drain it once it is back")
    if holds.damage:
        note(f"the journal of the serve before is damaged, so holds may be missing: {holds.damage}")
    torchft = msgspec.structs.replace(spec.torchft, held=holds.groups or spec.torchft.held)
    return msgspec.structs.replace(spec, torchft=torchft)


class Arrivals:
    """Tells in lines who has come, trains, and has gone."""

    def __init__(self) -> None:
        """Begin with nobody there."""
        self._known: dict[int, tuple[str, str]] = {}

    def take(self, rows: "tuple[ReplicaRow, ...]") -> list[str]:
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
