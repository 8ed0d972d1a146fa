"""Several boxes as one job: whether they reach one another, and how the others join the first.

Each box is a node. The first has controller and bus beside its own agent; on each other one
`perdure node join` takes a place with an invitation, which goes from the first box to it by way of
this machine, over standard input. Later on the boxes need only one another.

Ranks of different boxes connect to any port of one another, so a way for the bus alone (a forwarded
port, a jump host) would be worth nothing: there has to be a network between them, tried in every
direction before anything is sent.
"""

import ipaddress
import re
import secrets
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec

from perdure.launch.channel import Channel
from perdure.launch.exchange import last_line
from perdure.launch.platforms import Here
from perdure.launch.records import write_record
from perdure.launch.ssh.ask import ask_state, in_job
from perdure.launch.ssh.render import INVITATION, KEPT_ENDPOINT, NETWORK
from perdure.launch.ssh.submit import make_launch_record, must, prepare, start, wait_endpoint
from perdure.launch.wheel import ASK, read_program
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.platforms.launching import BoxState, LaunchRecord, Plan

_LISTEN_S = 60
_INVITE_S = 60.0
_JOIN_S = 90.0
_END_S = 20.0
_PLACE = re.compile(r"this machine is node (\d+) of ")
"""Said by `perdure node join`."""
_NO_WAY = """\
a private network or a VPN between them; launch.addresses names what is not found \
(ranks use any port: a tunnel for one is not enough)"""


@dataclass(frozen=True, slots=True)
class Network:
    """An address at which the other boxes reach one."""

    address: str
    interface: str


class Listening(msgspec.Struct, frozen=True):
    """The answer of `box.py listen`."""

    port: int
    interfaces: list[tuple[str, str]]
    """Name and IPv4 address of each."""


def meet(plans: Sequence[Plan]) -> list[Network]:
    """Return where each box is reached by all others, by connections tried in every direction.

    Raises:
        PlatformError: two boxes do not reach one another, or a box does not answer.
    """
    channels = [Channel(plan.profile.launch) for plan in plans]

    def listen(channel: Channel) -> Listening:
        script, source = f"{ASK}python3 - listen {_LISTEN_S}", read_program("box.py").encode()
        return channel.query(script, Listening, stdin=source)

    with ThreadPoolExecutor(len(plans)) as pool:
        listeners = list(pool.map(listen, channels))
        given = plans[0].profile.launch.addresses
        places = [
            _list_candidates(told, given[node] if given else "")
            for node, told in enumerate(listeners)
        ]
        wanted = [
            f"{place.address}:{told.port}"
            for told, found in zip(listeners, places, strict=True)
            for place in found
        ]

        def reach(channel: Channel) -> dict[str, bool]:
            return channel.query(
                f"python3 - reach {shlex.quote(msgspec.json.encode(wanted).decode())}",
                dict[str, bool],
                stdin=read_program("box.py").encode(),
            )

        reached = list(pool.map(reach, channels))
    return [
        _choose(
            channels, node, [(p, f"{p.address}:{listeners[node].port}") for p in found], reached
        )
        for node, found in enumerate(places)
    ]


def _list_candidates(told: Listening, given: str) -> list[Network]:
    """Return where a box might be reached: as it was said, or its private addresses."""
    if given:
        names = [name for name, address in told.interfaces if address == given]
        return [Network(given, names[0] if names else "")]
    found = [(ipaddress.ip_address(address), name) for name, address in told.interfaces]
    closed = [(ip, name) for ip, name in found if not (ip.is_global or ip.is_loopback)]
    return [Network(str(ip), name) for ip, name in closed]


def _choose(
    channels: Sequence[Channel],
    node: int,
    candidates: list[tuple[Network, str]],
    reached: list[dict[str, bool]],
) -> Network:
    """Return the first of a box's addresses that every box reaches, itself among them."""
    for network, place in candidates:
        if all(told[place] for told in reached):
            return network
    tried = ", ".join(network.address for network, _ in candidates) or "it has no private address"
    cut_off = [
        channel.name
        for channel, told in zip(channels, reached, strict=True)
        if not any(told[place] for _, place in candidates)
    ]
    raise PlatformError(
        f"{', '.join(cut_off) or 'the others'} cannot reach {channels[node].name} ({tried})",
        hint=_NO_WAY,
    )


def submit(plan: Plan, here: Here) -> LaunchRecord:
    """Start the job of `plan` on its boxes, or bring boxes that it has lost back into it.

    Raises:
        ConfigError: a secret is missing, or the whole job runs there.
        PlatformError: a step failed, or boxes do not reach one another.
    """
    plans = (plan, *plan.others)
    networks = meet(plans)
    runs = [not _query_box(each).over for each in plans]
    if all(runs):
        raise ConfigError(f"job {plan.job} runs there already", hint=f"perdure attach {plan.job}")
    for each, network in zip(plans, networks, strict=True):
        here.tell(f"{each.profile.launch.host} is {network.address} to the others")
    if not runs[0]:  # Whoever still waits for a bus that is gone has to ask for a place anew.
        for each in (each for each, lives in zip(plans, runs, strict=True) if lives):
            here.tell(f"{each.profile.launch.host}: ending what is left of the run before")
            end(each)
        runs = [False] * len(plans)
    absent = [node for node, lives in enumerate(runs) if not lives]

    def set_up(node: int) -> None:
        each = plans[node]
        prepare(each, _name_lines(here, each))
        _write_network(each, networks[node])

    with ThreadPoolExecutor(len(absent)) as pool:
        list(pool.map(set_up, absent))
    record, *others = (
        msgspec.structs.replace(make_launch_record(each), address=network.address)
        for each, network in zip(plans, networks, strict=True)
    )
    _check_disk(plan, [record, *others], here)
    record = msgspec.structs.replace(record, others=tuple(others))
    write_record(here.home, record)  # Before it costs: whatever breaks now, it is not forgotten.
    if not runs[0]:
        started = start(record, here)
        record = msgspec.structs.replace(record, boot_id=started.boot_id)
        wait_endpoint(plan, record)
    others = [
        _let_join(each, other, _invite(plan), here) if node in absent else other
        for node, (each, other) in enumerate(zip(plan.others, others, strict=True), start=1)
    ]
    return msgspec.structs.replace(record, others=tuple(others))


def _query_box(plan: Plan | LaunchRecord, command: str = "state") -> BoxState:
    """Return how a box's part of the job is; also where nothing was ever sent to it."""
    return Channel(plan.profile.launch).query(
        f'python3 - {command} "{plan.place}/launch"',
        BoxState,
        stdin=read_program("box.py").encode(),
    )


def end(plan: Plan | LaunchRecord) -> None:
    """End a further box's part; told a second time, `perdure node join` leaves at once.

    Raises:
        PlatformError: the box does not answer, or its part does not end.
    """
    deadline = time.monotonic() + _END_S
    while not _query_box(plan, "end").over:
        if time.monotonic() > deadline:
            host = plan.profile.launch.host
            raise PlatformError(f"{host}: what is left of the run before does not end")
        time.sleep(1.0)


def _write_network(plan: Plan, network: Network) -> None:
    """Write down on a box where the others reach it; after a reboot it is read from there."""
    values = {
        "PERDURE_NODE_ADDRESS": network.address,
        "GLOO_SOCKET_IFNAME": network.interface,
        "NCCL_SOCKET_IFNAME": network.interface,
    }
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items() if value]
    _write(plan, NETWORK, "".join(lines))
    if plan.others:
        address = network.address
        placement = {"bind": address, "addresses": [address], "door": KEPT_ENDPOINT}
        _write(plan, "placement.json", msgspec.json.encode(placement).decode() + "\n")


def _write(plan: Plan, name: str, text: str) -> None:
    """Write a file of a box's `launch`, for its owner alone, over standard input."""
    must(
        Channel(plan.profile.launch),
        plan,
        f'umask 077; mkdir -p "$(dirname launch/{name})"; cat > launch/{name}',
        stdin=text.encode(),
    )


def _check_disk(plan: Plan, records: Sequence[LaunchRecord], here: Here) -> None:
    """Say which boxes do not see the folder of the first box's checkpoints."""
    folder = records[0].roots.get("checkpoints")
    if folder is None:
        return
    mark = f"{shlex.quote(folder)}/.perdure-{secrets.token_hex(4)}"
    first = Channel(plan.profile.launch)
    must(first, plan, f"mkdir -p {shlex.quote(folder)} && touch {mark}")
    for other in records[1:]:
        if Channel(other.profile.launch).ask(f"test -e {mark}").code:
            here.tell(
                f"{other.box} does not see {folder} of {first.name}: only an elastic job keeps "
                "checkpoints that way"
            )
    must(first, plan, f"rm -f {mark}")


def _invite(plan: Plan) -> bytes:
    """Return an invitation to the job on its first box for one other box. It is a secret."""
    channel = Channel(plan.profile.launch)
    script = in_job(plan.place, f'"$PERDURE_PYTHON" -P -m perdure node invite {plan.job}')
    deadline = time.monotonic() + _INVITE_S
    while (done := channel.ask(script)).code:
        if time.monotonic() > deadline:
            raise PlatformError(f"{channel.name}: no invitation to the job: {done.err}")
        time.sleep(0.5)
    return done.out.encode()


def _let_join(plan: Plan, record: LaunchRecord, invitation: bytes, here: Here) -> LaunchRecord:
    """Start a further box's part, and wait until it has a place; return its record."""
    channel = Channel(plan.profile.launch)
    _write(plan, INVITATION, invitation.decode())
    output = f"{shlex.quote(record.place)}/launch/run.out"
    before = int(channel.ask(f"cat {output} 2>/dev/null | wc -l").out)
    state = start(record, here)
    deadline = time.monotonic() + _JOIN_S
    while True:
        said = channel.ask(f"tail -n +{before + 1} {output}").out
        place = _PLACE.search(said)
        if place:
            here.tell(f"{channel.name} is node {place[1]} of {plan.job}")
            return msgspec.structs.replace(record, boot_id=state.boot_id)
        if time.monotonic() > deadline or ask_state(channel, record).over:
            end(plan)  # Else it asks on for a place, and is in the way of the next launch.
            raise PlatformError(
                f"{channel.name} has not joined: {last_line(said, 'it wrote nothing')}",
                hint="the same `perdure launch` tries it again; the others go on",
            )
        time.sleep(0.3)


class Taken(msgspec.Struct, frozen=True):
    """The answer of `box.py take`."""

    killed: int
    left: list[int]
    """Processes that do not go."""


def take(record: LaunchRecord) -> int:
    """Kill all that a job has on a further box, as if the box were gone; return how many.

    Raises:
        PlatformError: the box does not answer, or a process does not go.
    """
    channel = Channel(record.profile.launch)
    about = {"folder": f"{record.place}/launch", "home": record.home}
    script = f"python3 - take {shlex.quote(msgspec.json.encode(about).decode())}"
    told = channel.query(script, Taken, stdin=read_program("box.py").encode())
    if told.left:
        raise PlatformError(f"{channel.name}: processes {told.left} of {record.job} do not go")
    return told.killed


def give(record: LaunchRecord, here: Here) -> None:
    """Start a further box's part again, as after a reboot: by the invitation that it has.

    Raises:
        PlatformError: the box does not answer, or its part does not start.
    """
    if ask_state(Channel(record.profile.launch), record).over:
        start(record, here)


def find_place(record: LaunchRecord) -> int | None:
    """Return which node of the job a further box was last; None where it never was one.

    Raises:
        PlatformError: the box does not answer.
    """
    output = f"{shlex.quote(record.place)}/launch/run.out"
    said = Channel(record.profile.launch).ask(
        f"grep -a 'this machine is node' {output} | tail -n 1"
    )
    place = _PLACE.search(said.out)
    return int(place[1]) if place else None


def _name_lines(here: Here, plan: Plan) -> Here:
    """Return `here` with the box's name before each line of progress."""
    host = plan.profile.launch.host
    return replace(here, tell=lambda line: here.tell(line if host in line else f"{host}: {line}"))
