"""A machine from elsewhere: it asks for a place in a running job, and runs that node's agent.

`perdure node join` needs nothing of the machine that the controller is on but its NATS server: the
invitation says where that is, the answer to the request carries the job's document and the agent's
own credentials. Neither is ever in an argument, an environment or a log. The script and its data
have to be there.

Its own state is a directory as the job's own machine has one, under another PERDURE_HOME, and one
supervising process: it starts the agent again when that dies, hands signals on as notices, and
leaves nothing behind.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex, token_urlsafe
from typing import Any

import msgspec

from perdure.adapters.host import read_text
from perdure.adapters.nats import NatsBus, UntrustedError
from perdure.control.job import JobState
from perdure.control.joining import note_invitation
from perdure.files.regular import read_file
from perdure.launch.environment import leave_rank
from perdure.model.bus.version import check_spoken
from perdure.model.bus.wire import (
    Admission,
    CommandReply,
    Invitation,
    JoinRequest,
    subject_joins,
)
from perdure.model.chain import EntryReader
from perdure.model.codec import decode, encode
from perdure.model.errors import (
    ConfigError,
    PlatformError,
    ProtocolError,
    RequestError,
    SafetyError,
)
from perdure.model.events import (
    InvitationMade,
    InvitationRevoked,
    InvitationUsed,
    digest_secret,
)
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.service.access.sealing import open_sealed
from perdure.service.agent.notices import OrphanedError, ReplacedError, StartedAnewError
from perdure.service.caches import limit_caches
from perdure.service.jobfiles import (
    MINE,
    JobLock,
    load_endpoint,
    make_folders,
    read_document,
    read_lines,
    remove_folders,
    set_previous_aside,
    write_atomic,
    write_document,
)
from perdure.service.jobfolders import paths_of
from perdure.service.processes import (
    Child,
    describe_exit,
    end_family,
    list_living_descendants,
    part_command,
    reap_adopted,
    start_child,
)
from perdure.service.tail import RankTails
from perdure.worker.system.process import set_subreaper

log = logging.getLogger("perdure.join")

_CONNECT_S = 10.0
_ANSWER_S = 5.0
_ANEW_S = 60.0
"""Given to a job that was started anew to answer who was there before."""
_AGAIN_S = 0.5
_POLL_S = 0.1
_RESTARTS_MAX = 30
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def read_admission(spec: JobSpec, paths: JobPaths, node: int) -> Admission | None:
    """Return what the agent of `node` has to know; None where its credentials are gone."""
    try:
        endpoint = load_endpoint(paths, f"agent-{node}")
    except ConfigError:
        return None
    endpoint = msgspec.structs.replace(endpoint, owner=-1)  # It may be reached by a tunnel.
    return Admission(node=node, spec=spec, endpoint=endpoint)


def make_invitation(
    job: str,
    home: str,
    register: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    expires_s: float,
    uses: int,
) -> Invitation:
    """Return an invitation to a running job, of which `register` tells the controller.

    It is good for the first time for `expires_s` seconds (0: always), and serves `uses` machines
    (0: as many as there are places).

    Raises:
        ConfigError: no node of it comes from elsewhere, or its server is the user's own.
    """
    paths = paths_of(home, job)
    endpoint = load_endpoint(paths, "joiner")
    if endpoint.external:
        raise ConfigError(
            "the job's NATS server is your own, and so are its credentials",
            hint="perdure node join invites to the server that perdure starts",
        )
    id_, secret = token_hex(4), token_urlsafe(24)
    told = register(
        {"id": id_, "digest": digest_secret(secret), "expires_s": expires_s, "uses": uses}
    )
    until_s = float(told.get("until_s", 0.0))
    endpoint = msgspec.structs.replace(endpoint, owner=-1)
    return Invitation(job=job, endpoint=endpoint, id=id_, secret=secret, until_s=until_s)


def read_invitation(data: bytes) -> Invitation:
    """Return the invitation in `data`.

    Raises:
        ConfigError: it is none.
    """
    try:
        invitation: Invitation = decode(data, Invitation)
    except ProtocolError:
        raise ConfigError("not an invitation", hint="perdure node invite JOB > FILE") from None
    check_spoken(MINE, invitation.endpoint.speaks, f"the job {invitation.job}")
    return invitation


def read_invitations(folder: str) -> list[dict[str, Any]]:
    """Return what `perdure node invite` would ask for, of each invitation of the run in `folder`.

    Where the door to the job's bus outlives its runs, who joined an earlier one comes back with its
    invitation (`service/access/credentials.py`). What has become of it is in that run's journal,
    and told to the new run's controller before anybody asks: a spent one stays spent, a revoked one
    is not taken over. Nor is any where that journal is damaged: it may be the revoked one.
    """
    state = JobState()
    reader = EntryReader(read_lines(os.path.join(folder, "journal.jsonl")), mine=MINE)
    try:
        for entry in reader:
            if isinstance(entry.body, InvitationMade | InvitationUsed | InvitationRevoked):
                note_invitation(state, entry.at_s, entry.body)
        if not reader.tally.whole:
            raise ProtocolError(reader.tally.describe())
    except ProtocolError as error:
        log.warning("no invitation to the run before is taken over: %s", error)
        return []
    return [
        {
            "id": id_,
            "digest": each.made.digest,
            "until_s": each.made.until_s,
            "uses": each.made.uses,
            "machines": dict(each.machines),
        }
        for id_, each in state.invitations.items()
        if not each.revoked
    ]


async def ask_place(
    invitation: Invitation,
    machine: str,
    *,
    wait_s: float,
    on_wait: Callable[[str], None] = lambda why: None,
) -> Admission:
    """Return the place that the controller gives this machine, asking for up to `wait_s`.

    The server may come up meanwhile: the job's own machine may have just started as well. `on_wait`
    hears why there is no place yet, again and again.

    Raises:
        PlatformError: the server cannot be reached, or the controller does not answer.
        UntrustedError: it is reached, and is not the server of this invitation.
        SafetyError: there is no place.
    """
    began_s = time.monotonic()
    deadline = began_s + wait_s
    bus = await _connect(invitation, max(_CONNECT_S, wait_s), on_wait)
    try:
        while True:
            asked = JoinRequest(
                id=token_hex(8),
                machine=machine,
                host=os.uname().nodename,
                invitation=invitation.id,
                secret=invitation.secret,
                speaks=MINE,
                sealed=True,
            )
            why: PlatformError | SafetyError
            try:
                data = await bus.request(
                    subject_joins(invitation.job), encode(asked), timeout_s=_ANSWER_S
                )
                told: CommandReply = decode(data, CommandReply)
                if told.ok:
                    return _read_place(told, invitation.secret)
                why = SafetyError(f"no place in {invitation.job}: {told.reason}", hint="--wait S")
                # An agent that this machine had until just now is soon heard of no more.
                deadline = max(deadline, began_s + float(told.result.get("silent_in_s", 0.0)))
                if told.result.get("final"):
                    raise SafetyError(why.message, hint="ask for another: perdure node invite JOB")
            except (RequestError, ProtocolError) as error:
                why = PlatformError(
                    f"the controller of {invitation.job} gives no answer: {error}",
                    hint="is the job running?",
                )
            if time.monotonic() + _AGAIN_S > deadline:
                raise why
            on_wait(why.message)
            await asyncio.sleep(_AGAIN_S)
    finally:
        await bus.close()


def _read_place(told: CommandReply, secret: str) -> Admission:
    """Return the place in an answer; of an older controller, it is not sealed.

    Raises:
        ProtocolError: it cannot be read.
    """
    if "sealed" not in told.result:
        return msgspec.convert(told.result["admission"], Admission)
    admission: Admission = decode(open_sealed(told.result["sealed"], secret), Admission)
    return admission


async def _connect(
    invitation: Invitation, wait_s: float, on_wait: Callable[[str], None]
) -> NatsBus:
    deadline = time.monotonic() + wait_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return await NatsBus.connect(
                invitation.endpoint,
                name=f"perdure node join {invitation.job}",
                timeout_s=max(0.1, min(_CONNECT_S, left_s)),
            )
        except UntrustedError:
            raise
        except PlatformError as error:
            if left_s <= _CONNECT_S:
                raise
            on_wait(error.message)


@dataclass(frozen=True, slots=True)
class Left:
    """How a machine from elsewhere has left its job."""

    code: int
    """Exit code of the one who joined."""
    asked: signal.Signals | None = None
    """The first signal that asked it to leave, if any did."""
    job_code: int | None = None
    """Exit code that the job ended with, where it did."""


def join(
    invitation: Invitation,
    *,
    home: str,
    address: str,
    grace_s: float,
    cwd: str | None,
    wait_s: float,
    on_line: Callable[[str], None],
    on_wait: Callable[[str], None] = lambda why: None,
    on_output: Callable[[str], None] | None = None,
) -> Left:
    """Be a node of a job until the job ends or the node is left; return how.

    Where the job is started anew meanwhile, and still takes the invitation, be one of it again.
    `on_output` gets the lines of this machine's ranks, prefixed `[rank 0]`.

    Raises:
        SafetyError: there is no place.
        ConfigError: this PERDURE_HOME runs the job itself.
        PlatformError: the job cannot be reached, or the agent does not stay up.
    """
    job = invitation.job
    paths = paths_of(home, job)
    lock = JobLock(paths)
    try:
        set_subreaper()
        while True:
            end_family(job, home, spare=frozenset(list_living_descendants(os.getpid())))
            asked = ask_place(invitation, _name_machine(paths), wait_s=wait_s, on_wait=on_wait)
            admission = asyncio.run(asked)
            on_line(_describe_place(admission))
            _write_files(paths, admission, grace_s, cwd)
            joined = _Joined(admission, home, paths, address, grace_s, on_line, on_output)
            code = joined.run()
            if code is not None:
                return Left(code, joined.asked, read_document(paths.ended, int))
            end_family(job, home, spare=frozenset())
            on_line(f"{job} was started anew, or ended this login: asking for a place again")
            wait_s = max(wait_s, _ANEW_S)  # Its server is up a little before its controller.
    finally:
        end_family(job, home, spare=frozenset())
        remove_folders(paths)
        lock.release()


def _describe_place(admission: Admission) -> str:
    job, number = admission.spec.name, admission.node
    if not admission.spec.served:
        return f"this machine is node {number} of {job}"
    return (
        f"this machine has place {number} of {job}: ranks started here that import perdure.torchft "
        "are heard, whose TORCHFT_LIGHTHOUSE is what perdure serve has printed"
    )


def _name_machine(paths: JobPaths) -> str:
    """Return what this machine is called when it asks: the same from now on."""
    path = os.path.join(paths.root, "machine")
    known = read_text(path).strip()
    if not known:
        known = token_hex(8)
        write_atomic(path, known.encode())
    return known


def _write_files(paths: JobPaths, admission: Admission, grace_s: float, cwd: str | None) -> None:
    """Write what the agent reads: as the job says it, but for what is this machine's own."""
    machine = _name_machine(paths)
    set_previous_aside(paths)
    make_folders(paths)
    limit_caches(paths)
    write_atomic(os.path.join(paths.root, "machine"), machine.encode())
    spec = admission.spec
    signals = {"SIGTERM": grace_s, "SIGUSR1": grace_s, **spec.preemption.signals}
    preemption = msgspec.structs.replace(spec.preemption, signals=signals)
    spec = msgspec.structs.replace(spec, preemption=preemption, cwd=cwd or spec.cwd)
    write_document(paths.spec, spec)
    offset_s = time.time() - time.monotonic()  # Of this machine's own boot.
    endpoint = msgspec.structs.replace(admission.endpoint, clock_offset_s=offset_s)
    path = paths.credential(f"agent-{admission.node}")
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    write_document(path, endpoint, mode=0o600)


class _Joined:
    """The supervisor of an agent, or of a relay of ranks, on a machine from elsewhere."""

    def __init__(
        self,
        admission: Admission,
        home: str,
        paths: JobPaths,
        address: str,
        grace_s: float,
        on_line: Callable[[str], None],
        on_output: Callable[[str], None] | None,
    ) -> None:
        self._on_output = on_output
        self._tails = RankTails(admission.spec.log_dir or os.path.join(paths.logs, "ranks"))
        self._spec, self._node, self._paths = admission.spec, admission.node, paths
        self._part = "relay" if admission.spec.served else "agent"
        self._log = paths.log(f"{self._part}-{admission.node}")
        self._grace_s, self._on_line = grace_s, on_line
        self._env = leave_rank(os.environ) | {
            "PERDURE_HOME": home,
            "PERDURE_JOB": admission.spec.name,
            "PERDURE_RUN_PID": str(os.getpid()),
            "PERDURE_NODE_ADDRESS": address,
            "SPT_NOENV": "1",
        }
        self._signals: list[signal.Signals] = []
        self._agent: Child | None = None

    @property
    def asked(self) -> signal.Signals | None:
        """The first signal that asked this machine to leave."""
        return self._signals[0] if self._signals else None

    def run(self) -> int | None:
        """Keep the agent up until it leaves; return None where the job was started anew."""

        def note(number: int, _: object) -> None:
            self._signals.append(signal.Signals(number))

        before = {number: signal.signal(number, note) for number in _SIGNALS}
        try:
            return self._watch()
        finally:  # Nothing of the job runs while a place is asked for: a signal just ends it.
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> int | None:
        taken, restarts, warned_s = 0, 0, None
        self._agent = self._start()
        while True:
            time.sleep(_POLL_S)
            status = self._agent.process.poll()
            self._show_output(last=status is not None)
            if status == 0:
                self._on_line(f"the {self._part} has left: the job has ended, or this machine has")
                return 0
            if status == StartedAnewError.exit_code:
                return 0 if self._signals else None
            if status == ReplacedError.exit_code:
                raise PlatformError(
                    f"another machine is node {self._node} of {self._spec.name} now: left",
                    hint="a PERDURE_HOME is one machine's own: join with another, not with a copy",
                )
            if status == OrphanedError.exit_code:
                raise PlatformError(
                    f"the machine of {self._spec.name} was not reached for "
                    f"{self._spec.bus.orphan_s:g} s: left",
                    hint="perdure node join again, once the job runs",
                )
            if status is not None:
                restarts += 1
                if restarts > _RESTARTS_MAX:
                    why = f"the {self._part} does not stay up"
                    raise PlatformError(why, hint=f"see {self._log}")
                self._on_line(
                    f"the {self._part} died ({describe_exit(status)}) and is started again"
                )
                self._agent.close()
                self._agent = self._start()
            reap_adopted({self._agent.pid})
            while taken < len(self._signals):
                number = self._signals[taken]
                taken += 1
                if taken > 1 and number != signal.SIGUSR1:
                    self._on_line(f"{number.name} again: leaving at once")
                    return 128 + number
                warned_s = warned_s or time.monotonic()
                self._on_line(f"{number.name}: leaving within {self._grace_s:g} s")
                named = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
                self._agent.process.send_signal(named)
            if warned_s is not None and time.monotonic() > warned_s + self._grace_s:
                self._on_line("the grace is over")
                return 0

    def _show_output(self, *, last: bool) -> None:
        if self._on_output is not None and self._spec.tee == "all":
            for line in self._tails.poll(last=last):
                self._on_output(line)

    def _start(self) -> Child:
        command = part_command(self._part, self._spec.name, str(self._node))
        return start_child(f"{self._part} {self._node}", command, self._env, self._log)


def read_source(path: str) -> bytes:
    """Return what is in the file at `path`, or on standard input for `-`.

    Raises:
        ConfigError: it cannot be read.
    """
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return read_file(path, follow=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", hint="perdure node invite JOB > FILE"
        ) from None
