"""The same `perdure run --nnodes N` on every node: which of them this one is, and what it does.

The first node, at whose address they meet, runs the job and has places for the others (`--remote`);
each of those joins it, as `perdure node join` does, by an invitation that follows from a secret
which they share (`service/access/rendezvous.py`). What is then done when one is lost, comes back or
is left is what is done for any machine from elsewhere.
"""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from perdure.cli.running.torchrun import LOOPBACK, Rendezvous
from perdure.cli.speech.say import note, print_json
from perdure.launch.ssh.box import list_interfaces
from perdure.model.errors import ConfigError, PlatformError, SafetyError
from perdure.model.job import JobSpec
from perdure.model.report import Snapshot
from perdure.service.placement import CLOSED, is_closed

_HERE = "127.0.0.1"
_RESOLVE_S = 1.0
_GRACE_S = 30.0
"""What Ctrl-C and SIGTERM leave a node that has joined."""
_AGAIN_S = 30.0
"""Between two lines that say the same."""
_PATIENCE_S = 5.0
"""How long the other nodes take at least, before anybody is told that they have not come."""
_TEST_NET = "192.0.2.1"
"""An address that nobody has (RFC 5737): what leads there leads to the world."""

_OURS = re.compile(rb"^\s*(?:import|from)\s+perdure\b", re.MULTILINE)
_APART = re.compile(
    rb"^\s*(?:import|from)\s+perdure(?:\.|\s+import\s+)(?:elastic|torchft)\b", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the first node is, and how this one is reached."""

    first: bool
    address: str
    """Of the first node."""
    mine: str


def is_here(place: Place) -> bool:
    """Return whether all nodes are this machine."""
    return place.address == _HERE


def name_job(spec: JobSpec, met: Rendezvous) -> JobSpec:
    """Return the job under the name that it has on every node: the id's, else the script's."""
    stem = spec.script.rsplit(".", 1)[-1] if spec.module else Path(spec.script).stem
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", met.id or stem).strip("-._")[:63] or "job"
    return msgspec.structs.replace(spec, name=name)


def find_place(met: Rendezvous, tell: Callable[[str], None] = note) -> Place:
    """Return which node this one is, and the first one's address, once its name is known.

    Raises:
        ConfigError: an address is not this machine's, or strangers could reach it.
        PlatformError: nobody knows the name of the first node.
    """
    own = [address for _, address in list_interfaces()]
    if met.address and met.address not in own:
        raise ConfigError(
            f"--local-addr {met.address}: not an address of this machine",
            hint=f"one of {', '.join(own)}",
        )
    if met.host.strip("[]") in LOOPBACK:
        return _check(Place(met.rank == 0, _HERE, _HERE))
    names = {os.uname().nodename, os.uname().nodename.partition(".")[0]}
    first = met.rank == 0 if met.rank is not None else met.host in names
    address = "" if first else _resolve(met, tell)
    if met.rank is None and address in own:
        first = True
    if first:
        mine = met.address or _choose_own(address or _look_up(met.host), own)
        return _check(Place(True, mine, mine))
    return _check(Place(False, address, met.address or _find_route(address)))


def _check(place: Place) -> Place:
    for address in (place.address, place.mine):
        if not is_closed(address):
            raise ConfigError(
                f"strangers may reach {address}; what the ranks say to one another has no TLS",
                hint=f"{CLOSED}, in --rdzv-endpoint or --local-addr",
            )
    return place


def _look_up(host: str) -> str:
    """Return the IPv4 address of a host; empty where nobody knows it."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return ""


def _resolve(met: Rendezvous, tell: Callable[[str], None]) -> str:
    """Return the address of the first node; its name may become known a little later."""
    deadline, say = time.monotonic() + met.join_s, Repeated(tell)
    while not (address := _look_up(met.host)):
        if time.monotonic() > deadline:
            raise PlatformError(
                f"nobody knows the address of {met.host}", hint="--rdzv-endpoint IP:PORT"
            )
        say(f"nobody knows the address of {met.host} yet")
        time.sleep(_RESOLVE_S)
    return address


def _choose_own(named: str, own: list[str]) -> str:
    """Return at which of its `own` addresses the first node is reached, whose name is `named`.

    On Debian and Ubuntu a machine's own name is 127.0.1.1 to itself.

    Raises:
        ConfigError: it has several.
    """
    outside = [address for address in own if not address.startswith("127.")]
    if named in outside:
        return named
    closed = [address for address in outside if is_closed(address)]
    routed = _find_route(_TEST_NET)
    if len(closed) == 1 or routed in closed:
        return closed[0] if len(closed) == 1 else routed
    raise ConfigError(
        "at which of its addresses do the other nodes reach this one: "
        f"{', '.join(outside) or 'it has none'}?",
        hint="--local-addr IP, or an IP in --rdzv-endpoint",
    )


def _find_route(other: str) -> str:
    """Return this machine's address on its way to `other`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((other, 9))
        except OSError:
            return _HERE
        return str(asking.getsockname()[0])


def keep_checkpoints(spec: JobSpec, home: str, place: Place) -> JobSpec:
    """Return the job with checkpoints where all nodes see them, if there is such a place.

    Raises:
        ConfigError: there is none, and the ranks would wait there for one another's files.
    """
    from perdure.service.access.rendezvous import is_shared
    from perdure.service.jobfolders import paths_of

    if spec.checkpoint.url:
        return spec
    url = paths_of(home, spec.name).checkpoints
    if is_shared(home, place.address):
        checkpoint = msgspec.structs.replace(spec.checkpoint, url=url)
        return msgspec.structs.replace(spec, checkpoint=checkpoint)
    if saves_together(spec):
        raise ConfigError(
            f"checkpoints would be in {url}, and every node has a PERDURE_HOME of its own: the "
            "ranks would wait there for one another's files",
            hint="[checkpoint] url in a job file (-c), or PERDURE_HOME, in a place that all see",
        )
    return spec


def find_unseen_checkpoints(spec: JobSpec, home: str, address: str) -> str:
    """Return in a line where checkpoints would be that machines which join do not see; or ''.

    `address` is where they meet: on loopback all nodes are this machine.
    """
    from perdure.service.access.rendezvous import is_shared
    from perdure.service.jobfolders import paths_of

    if not spec.remote or spec.served or spec.checkpoint.url:
        return ""
    if is_shared(home, address) or not saves_together(spec):
        return ""
    return (
        f"checkpoints go to {paths_of(home, spec.name).checkpoints}, which machines that join do "
        "not see: the first one would wait for their parts and fail; [checkpoint] url in a job "
        "file (-c) names a place that all see"
    )


def saves_together(spec: JobSpec) -> bool:
    """Return whether the ranks write checkpoints into one place, by the script's own text.

    Those of an elastic world do not need one; a script that never heard of perdure saves by itself.
    """
    path = Path(spec.cwd, os.path.expanduser(spec.script))
    source = path.read_bytes() if path.is_file() and not spec.no_python else b""
    if _APART.search(source):
        return False
    return bool(_OURS.search(source) or spec.checkpoint.every_steps or spec.checkpoint.every_s)


class Repeated:
    """Says a line when it is another one than before, else twice a minute."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Say lines by `tell`."""
        self._tell, self._line, self._said_s = tell, "", 0.0

    def __call__(self, line: str) -> None:
        """Take a line."""
        now_s = time.monotonic()
        if line != self._line or now_s > self._said_s + _AGAIN_S:
            self._tell(line)
            self._line, self._said_s = line, now_s


class Muster:
    """Waits on the first node for the others, for as long as torchrun would."""

    def __init__(self, spec: JobSpec, join_s: float) -> None:
        """Begin to wait."""
        self._spec, self._join_s = spec, join_s
        self._deadline_s = time.monotonic() + join_s
        self._say_s, self._come = time.monotonic() + _PATIENCE_S, False
        self._why = f"not all {spec.nodes} nodes have come within {join_s:g} s"
        self.failed = False
        """They have not come in time, and the job was told to stop."""

    def look(self, snapshot: Snapshot) -> str:
        """Take the newest picture; return what to say of it, if anything."""
        # A place has devices before anybody has it, and a host only once its node has registered.
        here = len({row.node for row in snapshot.devices if row.host})
        # Once all are here, whatever they still prepare takes the time that it takes.
        self._come = self._come or snapshot.state != "pending" or here >= self._spec.nodes
        if self._come or self.failed:
            return ""
        now_s = time.monotonic()
        if now_s > self._deadline_s:
            self.failed = True
            os.kill(os.getpid(), signal.SIGTERM)
            return self._why
        if now_s < self._say_s:
            return ""
        self._say_s = now_s + _AGAIN_S
        return (
            f"{here} of {self._spec.nodes} nodes are here; the same command on the others "
            f"brings them ({self._deadline_s - now_s:.0f} s left)"
        )

    def judge_end(self) -> None:
        """Raise where the job was stopped for want of nodes.

        Raises:
            PlatformError: it was.
        """
        if self.failed:
            raise PlatformError(
                self._why,
                hint="the same command on every node; --rdzv-conf join_timeout=SECONDS",
            )


def join_first(
    spec: JobSpec,
    met: Rendezvous,
    place: Place,
    home: str,
    secret: str,
    *,
    as_json: bool,
    shows: Callable[[str], bool],
) -> int:
    """Be one of the further nodes until the job ends or this one is left; return the exit code.

    Raises:
        PerdureError: the first node is not reached, has no place, or has another secret.
    """
    from perdure.adapters.nats import UntrustedError
    from perdure.service.access.joining import join
    from perdure.service.access.rendezvous import choose_home, make_invitation
    from perdure.service.jobfiles import JobRunsError

    def tell(line: str) -> None:
        if as_json:
            print_json({"job": spec.name, "event": line})
        else:
            note(line)

    def show(line: str) -> None:
        if shows(line):
            print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    where = f"{met.host}:{met.port}"
    waits = Repeated(lambda why: tell(f"waiting for the first node at {where}: {why}"))
    invitation = make_invitation(secret, spec.name, place.address, met.port)
    while True:
        try:
            left = join(
                invitation,
                home=choose_home(home, spec.name),
                address=place.mine,
                grace_s=_GRACE_S,
                cwd=spec.cwd,
                wait_s=met.join_s,
                on_line=tell,
                on_wait=waits,
                on_output=show,
            )
            break
        except JobRunsError:
            continue  # Another node of this machine has come to that folder first.
        except UntrustedError as error:
            raise SafetyError(
                f"{where} does not know this node's secret, or has another address: {error}",
                hint="the same secret and --rdzv-id on every node",
            ) from error
    if left.job_code is not None and left.asked is None:
        tell(f"{spec.name} has ended with exit code {left.job_code}")
        return left.job_code
    return 128 + signal.SIGINT if left.asked == signal.SIGINT else left.code
