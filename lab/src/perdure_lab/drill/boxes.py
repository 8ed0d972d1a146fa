"""A drill on boxes behind ssh: the job is launched to them as `perdure launch` would, in a copy.

What is asked and harmed beside the job is done there (`onbox.py`), a box is taken away and given
back as in a played trace, and only the rehearsal itself is here. Each start has a name of its own,
and so folders of its own: nothing of a job of the user's is looked at, and all of the drill's is
removed by its name.
"""

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import structs

from perdure.drill.card import Card
from perdure.drill.grading import Strike
from perdure.drill.here import make_scratch
from perdure.drill.isolation import isolate_elsewhere, list_changes
from perdure.drill.onbox import FULL, KEPT, LEASE, LEASE_S, MODULE, Answer, Kept, Order
from perdure.drill.place import NotMadeError, Place, Run, Victim
from perdure.drill.planning import Act, DrillWish
from perdure.drill.rehearsal import Say, rehearse
from perdure.drill.strikes import SIGNALS
from perdure.launch import ssh
from perdure.launch.channel import ANSWER, Channel
from perdure.launch.exchange import UnreachedError, last_line
from perdure.launch.platforms import Here
from perdure.launch.ssh.ask import ask_state, in_job
from perdure.launch.ssh.submit import prepare
from perdure.launch.wheel import ASK, read_program
from perdure.model.codec import encode
from perdure.model.errors import PerdureError, PlatformError
from perdure.model.events import CheckpointSaved, JournalEntry
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import BoxState, LaunchRecord, Plan
from perdure.model.platforms.profile import Profile
from perdure.model.report import Snapshot
from perdure.telemetry.restarts import Began
from perdure_lab.live.fleets.boxes import BoxFleet
from perdure_lab.live.fleets.elsewhere import at_once, wait

T = TypeVar("T")
_TOUCH_S = 10.0
"""Between two signs of life: many fit into the lease."""
_ANSWER_S = 120.0
"""For an order beside the job; those that wait for a step or a checkpoint have as much more."""
_STOP_S = 20.0
_PAUSES_S = (1.0, 4.0)
"""Before what is only looked up is asked again, where the connection broke."""
_PROGRAM = "../../adapters/confinement.py"
GUARD = str(Path(__file__).with_name("guard.py"))
GUARD_S = LEASE_S + 30.0
"""A box's own watch is first: it knows more that is to be removed."""


class Surroundings(NamedTuple):
    """What is said of a box before anything is done on it."""

    host: str
    abi: int
    """Of the kernel's Landlock; 0: it has none."""
    others: Sequence[str]
    """Who else would notice, in words."""


def look_around(profile: Profile) -> list[Surroundings]:
    """Return what each box of a profile is like for a drill; nothing is changed there.

    Raises:
        PlatformError: one does not answer.
    """

    def look(host: str) -> Surroundings:
        channel = Channel(structs.replace(profile.launch, host=host, hosts=()))
        abi = channel.query(f"{ASK}python3 -", int, stdin=render_probe().encode())
        told = channel.query(
            "python3 - others -", dict[str, list[str]], stdin=read_program("box.py").encode()
        )
        return Surroundings(host, abi, told["others"])

    return at_once(look, list_hosts(profile))


def render_probe() -> str:
    """Return the program by which any Python says what Landlock its kernel has."""
    return f'{read_program(_PROGRAM)}\nprint("{ANSWER}" + str(read_abi()))\n'


def list_hosts(profile: Profile) -> tuple[str, ...]:
    """Return the boxes of a profile."""
    return profile.launch.hosts or (profile.launch.host,)


def plan_run(spec: JobSpec, profile: Profile, name: str, kept: Kept) -> Plan:
    """Return the plan of one start of the drill's job, under `name`, all of it below that name.

    Raises:
        ConfigError: job and profile do not go together.
    """
    overrides = structs.replace(
        profile.overrides, DURABLE_DIR=f"{profile.overrides.DURABLE_DIR}/{name}"
    )
    interruption = structs.replace(profile.interruption, relaunch="none")
    own = structs.replace(profile, overrides=overrides, interruption=interruption)
    plan = ssh.render(isolate_elsewhere(spec, name), own)
    # One environment for all starts of all drills of a job, and none of the job's own.
    setup = ssh.render(isolate_elsewhere(spec, f"{spec.name[:40]}-drill"), own).files["setup.sh"]
    others = tuple(_keep(other, kept, setup) for other in plan.others)
    return structs.replace(_keep(plan, kept, setup), others=others)


def _keep(plan: Plan, kept: Kept, setup: str) -> Plan:
    """Return the plan of a box with the drill's own keeper in front of the job's command."""
    settings = json.loads(plan.files["settings.json"])
    settings["command"] = ["$PERDURE_PYTHON", "-P", "-m", MODULE, "keep", *settings["command"]]
    files = {
        "settings.json": json.dumps(settings, indent=2) + "\n",
        "setup.sh": setup,
        KEPT: encode(kept).decode(),
    }
    return structs.replace(plan, files={**plan.files, **files})


def name_run(spec: JobSpec) -> str:
    """Return a name for one start."""
    return f"{spec.name[:40]}-drill-{token_hex(3)}"


def drill(wish: DrillWish, profile: Profile, here: Here, say: Say) -> Card:
    """Drill a job on the boxes of `profile`, and return its card; nothing of it is left there.

    The first copy and the environment are made before the budget begins to count.

    Raises:
        PlatformError: a box cannot be reached, or the job cannot be started.
    """
    with make_scratch(wish.home) as (scratch, _):
        place = _Boxes(wish, profile, replace(here, home=str(scratch)))
        try:
            say("send", 0.0, "the project, and an environment")
            place.prepare()
            return rehearse(wish, place, say)
        finally:
            place.drop()


class _Boxes(Place):
    """Starts of the job on the same boxes, one after another."""

    def __init__(self, wish: DrillWish, profile: Profile, here: Here) -> None:
        self.wish, self._profile, self._here = wish, profile, here
        self.stays = frozenset({0})
        self._prepared: Plan | None = None
        self._notes: list[str] = []

    def describe(self) -> str:
        """Return the boxes."""
        return ", ".join(list_hosts(self._profile))

    def list_changes(self) -> list[str]:
        """Return what is otherwise than in the user's job."""
        return list_changes(self.wish.spec, elsewhere=True)

    def list_notes(self) -> Sequence[str]:
        """Return what could not be given back, or removed."""
        return self._notes

    def _plan(self, *, switches: bool) -> Plan:
        wish = self.wish
        kept = Kept(
            confined=wish.confined, writable=tuple(wish.writable), switches=switches
        )  # fmt: skip
        return plan_run(wish.spec, self._profile, name_run(wish.spec), kept)

    def prepare(self) -> None:
        """Send the first copy, have an environment made, and remove what was left there.

        Raises:
            PlatformError: a step failed.
        """
        self._prepared = self._plan(switches=True)
        plans = (self._prepared, *self._prepared.others)
        with _Leases(plans):
            at_once(guard, plans)
            at_once(partial(prepare, here=self._here), plans)
            for plan in plans:
                told = give_order(plan, Order(what="sweep"))
                for name in told.value or ():
                    self._here.tell(f"{plan.profile.launch.host}: removed {name}, a drill's")

    def drop(self) -> None:
        """Remove what was prepared, and never started."""
        if self._prepared is not None:
            self._clean(self._prepared)
            self._prepared = None

    @contextmanager
    def open(self, *, switches: bool) -> Iterator["_BoxVictim"]:
        """Launch the job, and remove it from all boxes in the end."""
        plan, self._prepared = self._prepared, None
        if plan is None or not switches:
            self._prepared, plan = plan, self._plan(switches=switches)
        fleet = BoxFleet(
            isolate_elsewhere(self.wish.spec, plan.job), list_hosts(self._profile), self._here,
            launch=lambda: ssh.submit(plan, self._here),
        )  # fmt: skip
        with _Leases((plan, *plan.others)):
            try:
                at_once(guard, (plan, *plan.others))
                self._start(fleet, plan)
                yield _BoxVictim(fleet)
            finally:
                trouble = fleet.find_trouble()
                if trouble is not None and not fleet.over():
                    self._notes.append(trouble.message)
                self._clean(plan)

    def _start(self, fleet: BoxFleet, plan: Plan) -> None:
        """Launch the job, and follow what it tells.

        Raises:
            PlatformError: it cannot be launched, or ends at once; its last words are told.
        """
        try:
            fleet.start()
        except PerdureError as error:
            words = ""
            with contextlib.suppress(PerdureError):
                told = give_order(plan, Order(what="words"))
                words = f": {told.value[0]}" if told.value else ""
            raise PlatformError(f"{error.message}{words}", hint=error.hint) from error

    def _clean(self, plan: Plan) -> None:
        """End and remove all of a start, on all boxes; where that fails, their watches do it."""

        def order(what: Literal["end", "clean"], each: Plan) -> str:
            try:
                return give_order(each, Order(what=what)).error
            except PerdureError as error:
                return error.message

        plans = (plan, *plan.others)
        at_once(partial(order, "end"), plans)  # All, before a disk that they share is emptied.
        for each, error in zip(plans, at_once(partial(order, "clean"), plans), strict=True):
            if error:
                text = (
                    f"{each.profile.launch.host}: {error}; what is left there of {plan.job} ends "
                    f"within {GUARD_S:g} s by itself"
                )
                self._notes.append(text)
                self._here.tell(text)


class _Leases:
    """Signs of life to each box, while the body runs."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._touch, args=(plan,), name="perdure-lease", daemon=True)
            for plan in plans
        ]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(_TOUCH_S)

    def _touch(self, plan: Plan) -> None:
        channel = Channel(plan.profile.launch)
        script = f'cd "{plan.place}/launch" 2>/dev/null && touch {LEASE}'
        while not self._over.wait(_TOUCH_S):
            with contextlib.suppress(PerdureError):
                channel.run(script, timeout_s=2 * _TOUCH_S)


def guard(plan: Plan) -> None:
    """Make a start's folder on its box, which is removed from now on where nobody asks after it.

    Raises:
        PlatformError: it cannot be made.
    """
    folder = f'mkdir -p "{plan.place}/launch" && cd "{plan.place}/launch" && touch {LEASE} {KEPT}'
    Channel(plan.profile.launch).must(
        f'{folder} && cd .. && python3 - "$(pwd)" {GUARD_S:g}',
        hint="overrides.DATA_DIR",
        stdin=read_program(GUARD).encode(),
    )


REMOVE = (
    'for each in "$JOB_DIR" "$DURABLE_DIR" "$CRED_FILE"; do '
    'case "${each##*/}" in *-drill-*) rm -rf "$each";; esac; done'
)
"""What cleans, by its name, where nothing was ever started: there is no Python for it."""


def give_order(plan: Plan | LaunchRecord, order: Order, timeout_s: float = _ANSWER_S) -> Answer:
    """Return what became of an order beside the job. It is given once: it may be a kill.

    Raises:
        UnreachedError: the answer did not come, and what became of it is not known.
        PlatformError: the program failed there.
    """
    channel = Channel(plan.profile.launch)
    words = shlex.join(["-P", "-m", MODULE, "do", encode(order).decode()])
    script = in_job(plan.place, f'exec "$PERDURE_PYTHON" {words}')
    ends = order.what in ("end", "clean")
    if ends:
        bare = in_job(plan.place, f'{{ test -n "$PERDURE_PYTHON" || {{ {REMOVE}; exit 0; }}; }}')
        unsent = f'rm -rf "{plan.place}"; ' if order.what == "clean" else ""
        sent = f'test -e "{plan.place}/launch/env.sh" || {{ {unsent}exit 0; }}'
        script = f"{sent}; {bare} && {script}"
    done = channel.run(script, timeout_s=timeout_s)
    lines = [line for line in done.out.splitlines() if line.startswith(ANSWER)]
    if ends and not done.code and not lines:
        return Answer()
    if done.code or not lines:
        raise PlatformError(f"{channel.name}: {last_line(done.err, 'it said nothing')}")
    try:
        return msgspec.json.decode(lines[-1][len(ANSWER) :], type=Answer)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise PlatformError(f"{channel.name} answered in another shape: {error}") from None


def read_value(value: Any, type_: type[T]) -> T:
    """Return what an answer says, as `type_`.

    Raises:
        PlatformError: it is of another shape.
    """
    try:
        return msgspec.convert(value, type_, str_keys=True)
    except msgspec.ValidationError as error:
        raise PlatformError(f"a box answered in another shape: {error}") from None


class _BoxRun(Run):
    """One start of the job on boxes."""

    def __init__(self, fleet: BoxFleet, record: LaunchRecord) -> None:
        self._fleet, self.record = fleet, record
        self._words: tuple[str, bool] | None = None

    @property
    def over(self) -> bool:
        """Return whether it has ended, or is not heard any more."""
        return self._fleet.over()

    @property
    def code(self) -> int:
        """Return its exit code; 0 while it runs."""
        if not self.over:
            return 0
        channel = Channel(self.record.profile.launch)
        wait(lambda: ask_state(channel, self.record).over, _STOP_S)  # Its last words come first.
        state = ask_state(channel, self.record)
        return state.code or (state.signal and 128 + state.signal) if state.over else 0

    def look(self) -> Snapshot | None:
        """Return the newest status that has come."""
        return self._fleet.read_snapshot()

    def end(self, *, first_s: float) -> None:
        """Have it stop at an agreed step, within `first_s`, or else at once."""
        channel, folder = Channel(self.record.profile.launch), shlex.quote(self.record.place)
        script = f"python3 {folder}/launch/box.py end {folder}/launch"
        for wait_s in (first_s, _STOP_S):
            if channel.query(script, BoxState).over:
                return
            if wait(lambda: ask_state(channel, self.record).over, wait_s):
                return

    def read_losses(self) -> tuple[str, dict[Any, str]]:
        """Return what was compared by, and what was logged, or else printed, at each step."""
        what, losses = read_value(self._ask(Order(what="losses")), tuple[str, dict[str, str]])
        return what, losses if what == "lines" else read_value(losses, dict[int, str])

    def read_began(self, spec: JobSpec, generation: int) -> Began | None:
        """Return where a script without steps began in a generation; None: not known yet."""
        told = self._ask(Order(what="began", generation=generation))
        return None if told is None else read_value(told, Began)

    def tail(self) -> str:
        """Return the last line of what went wrong."""
        return read_value(self._ask(Order(what="words")), tuple[str, bool])[0]

    def was_refused(self) -> bool:
        """Return whether something that it wanted to do was not permitted."""
        return read_value(self._ask(Order(what="words")), tuple[str, bool])[1]

    def _ask(self, order: Order) -> Any:
        """Return what is only looked up, and may be asked again."""
        told = None
        for pause_s in _PAUSES_S:
            with contextlib.suppress(UnreachedError):
                told = give_order(self.record, order)
                break
            time.sleep(pause_s)
        told = told or give_order(self.record, order)
        if told.error:
            raise PlatformError(f"{self.record.box}: {told.error}")
        return told.value


class _BoxVictim(Victim):
    """A job on boxes that faults are made to."""

    def __init__(self, fleet: BoxFleet) -> None:
        self._fleet = fleet
        self._record = fleet.locate(0)
        self._run = _BoxRun(fleet, self._record)

    @property
    def run(self) -> _BoxRun:
        """Return its start."""
        return self._run

    def now(self) -> float:
        """Return job time."""
        return time.monotonic() + self._fleet.compute_offset_s()

    def read(self) -> list[JournalEntry]:
        """Return the journal so far."""
        for pause_s in _PAUSES_S:
            with contextlib.suppress(PlatformError):  # Such as a connection that broke.
                return self._fleet.read_entries()
            time.sleep(pause_s)
        return self._fleet.read_entries()

    def ask(self, verb: str, args: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return what the controller answers."""
        order = Order(what="ask", verb=verb, args=args, timeout_s=timeout_s)
        told: dict[str, Any] = self._order(order, timeout_s + _ANSWER_S)
        return told

    def strike(self, act: Act, seen: Snapshot, at_step: int) -> Strike:
        """Make a fault, where it belongs."""
        if act.fault == "node":
            return self._take(act, seen)
        first = sorted(row.rank for row in seen.ranks if row.node == 0 and row.pid > 1)
        if act.fault == "torn":  # Where the checkpoint is cut, a rank has to end at once.
            if not first:
                raise NotMadeError(f"no rank is on {self._record.box}")
            act = act._replace(rank=first[act.rank % len(first)], node=0)
        if act.fault in SIGNALS and at_step < 0 and act.rank not in first:
            return self._signal(act, seen)
        if act.fault == "disk":
            self._fill(full=True)
        lead = at_step - seen.step if at_step >= 0 else -1
        told = self._order(Order(what="strike", act=act, lead=lead), 2 * _ANSWER_S)
        return read_value(told, Strike)

    def heal(self, act: Act) -> None:
        """End what can end."""
        if act.fault == "node":
            self._fleet.give([act.node])
            return
        with contextlib.suppress(NotMadeError):
            self._order(Order(what="heal", act=act), _ANSWER_S)
        if act.fault == "disk":
            self._fill(full=False)

    def _order(self, order: Order, timeout_s: float) -> Any:
        told = give_order(self._record, order, timeout_s)
        if told.error:
            raise NotMadeError(told.error)
        return told.value

    def _take(self, act: Act, seen: Snapshot) -> Strike:
        """Take a box away: all that the drill's job has there."""
        if act.node == 0:
            raise NotMadeError(f"{self._record.box} stays: it has the job's controller and bus")
        saved = [e.body.step for e in self.read() if isinstance(e.body, CheckpointSaved)]
        at_s = self.now()
        self._fleet.take([act.node])
        text = (
            f"node {act.node}: all that the drill's job has on {self._fleet.locate(act.node).box} "
            "killed, and nothing starts there until it is found"
        )
        return Strike(
            act.fault, at_s, seen.step, act.rank, act.node, text, seen.generation,
            saved=max(saved, default=-1),
        )  # fmt: skip

    def _signal(self, act: Act, seen: Snapshot) -> Strike:
        """Send a signal to a rank of another box, once it is sure to be the job's."""
        row = next((row for row in seen.ranks if row.rank == act.rank), None)
        if row is None or row.pid < 2:
            raise NotMadeError(f"rank {act.rank} has no process")
        box, number = self._fleet.locate(row.node), SIGNALS[act.fault]
        marks = (f"PERDURE_HOME={box.home}", f"PERDURE_JOB={box.job}")
        environ = f"tr '\\0' '\\n' < /proc/{row.pid}/environ"
        sure = " && ".join(f"{environ} | grep -qxF {shlex.quote(mark)}" for mark in marks)
        at_s = self.now()
        if Channel(box.profile.launch).run(f"{sure} && kill -{number.value} {row.pid}").code:
            raise NotMadeError(f"rank {act.rank} has no process on {box.box}")
        return Strike(
            act.fault, at_s, seen.step, act.rank, row.node, f"rank {act.rank}: {number.name}",
            seen.generation,
        )  # fmt: skip

    def _fill(self, *, full: bool) -> None:
        """Let checkpoints of all boxes be refused, or taken again."""
        verb = "touch" if full else "rm -f"
        each = (self._record, *self._record.others)
        at_once(
            lambda box: Channel(box.profile.launch).ask(
                f"{verb} {shlex.quote(box.place)}/launch/{FULL}"
            ),
            each,
        )
