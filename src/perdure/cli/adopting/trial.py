"""A kill test of a script, in a copy of its folder: does a killed run go on as if nothing had been?

It runs twice under perdure, once undisturbed and once with a rank that is sent SIGKILL, each in a
copy of its own and in a PERDURE_HOME that is gone afterwards. What both have logged, or else
printed, of the same steps is compared bit by bit. What a script writes at absolute paths, or sends
elsewhere, is not held back, but that Weights & Biases is turned off.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from perdure.adapters.confinement import Confinement
from perdure.cli.adopting.jobfile import Project
from perdure.cli.running.torchrun import parse_nproc
from perdure.lab.drill.copies import CopiedRun, check_size
from perdure.model.errors import PlatformError
from perdure.model.events import CheckpointRestored, FailureDecided
from perdure.model.report import Snapshot
from perdure.service.jobfiles import read_mirror, remove_folders

_POLL_S = 0.05
_TELL_S = 5.0
_LARGER = "a larger --budget"
"""Said where one would do; `try_kill` knows how large."""
_STEPS_MIN = 4
_TRAINS_S = 6.0
"""The undisturbed run trains for so long, and half of that before the other one is killed."""
_KEPT_FIELDS = ("args", "env", "cold", "detect", "restart")
"""What a trial takes over of a job file."""


class Trial(msgspec.Struct, frozen=True):
    """What a kill test has shown."""

    verdict: str
    """`equal`, `differs`, `survived` (it went on, and nothing can be compared), `not resumed`,
    `not tried` or `failed`."""
    text: str
    """That in words."""
    killed_rank: int = -1
    killed_at: int = -1
    """Step that was under way; -1: none is known."""
    resumed_at: int = -1
    compared: str = ""
    """What was compared, such as `loss`."""
    steps: int = 0
    """So many steps, or lines, were compared after it resumed."""
    took_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Return whether the script may be relied upon, as far as this shows."""
        return self.verdict in ("equal", "survived")


class Killed(msgspec.Struct, frozen=True):
    """Where a run was killed, and went on."""

    rank: int
    at: int
    """Step that was under way."""
    resumed_at: int
    """Step of the checkpoint that it went on from; 0 or less: none."""
    inexact: str = ""
    """Why perdure itself does not claim that losses are equal; empty where it does."""


class _Ended(Exception):
    """A run is over before it was meant to be."""


class _ToldRun(CopiedRun):
    """A run in a copy; how far it is, is told every few seconds while somebody looks."""

    tell: Callable[[str], None]
    _told_s = 0.0

    def start(self, environ: Mapping[str, str], confinement: Confinement | None = None) -> None:
        """Start it, so that it does not outlive this process."""
        self._told_s = time.monotonic()
        self.tell(f"the {self.name} run starts")
        super().start(environ, confinement)

    def look(self) -> Snapshot | None:
        """Return its newest snapshot; None before there is one."""
        seen = super().look()
        if time.monotonic() - self._told_s > _TELL_S:
            self._told_s = time.monotonic()
            state = f"{seen.state}, step {max(seen.step, 0)}" if seen else "not started yet"
            self.tell(f"the {self.name} run: {state}")
        return seen


def _copy(
    scratch: Path,
    project: Path,
    name: str,
    job: dict[str, Any],
    path: str,
    text: str,
    tell: Callable[[str], None],
) -> _ToldRun:
    """Return a run in a copy of the project's folder, with `text` in the script at `path` of it.

    Raises:
        OSError: it cannot be copied.
    """
    run = _ToldRun(scratch, project, name, job)
    run.tell = tell
    script = run.folder / path
    script.unlink(missing_ok=True)  # Where it is a link, it leads to the user's.
    script.write_bytes(text.encode())
    return run


def try_kill(
    project: Project,
    path: Path,
    text: str,
    document: Mapping[str, Any],
    *,
    budget_s: float,
    environ: Mapping[str, str],
    tell: Callable[[str], None],
) -> Trial:
    """Run the script at `path` of `project`, with `text` in it, and kill a rank of it.

    `document` is its job file's; arguments, environment and the like are taken from it. `tell` is
    told what is waited for.

    Raises:
        SafetyError: the folder is too large to be copied.
        PlatformError: it cannot be copied.
    """
    begun = time.monotonic()
    if "torchft" in document:
        return Trial("not tried", "replica groups of torchft: kill one under perdure run --torchft")
    folder = project.folder.resolve()
    check_size(folder)
    job = {name: document[name] for name in _KEPT_FIELDS if name in document}
    nproc = parse_nproc(str(document.get("nproc", 1)), environ)
    job |= {"script": project.script, "module": project.module, "nproc": min(nproc, 2)}
    place_in = os.path.relpath(path.absolute(), project.folder.absolute())
    with tempfile.TemporaryDirectory(prefix="perdure-try-", ignore_cleanup_errors=True) as scratch:
        place = Path(scratch)
        try:
            plain = _copy(place, folder, "undisturbed", job, place_in, text, tell)
        except OSError as error:
            raise PlatformError(
                f"cannot copy {folder}: {error.strerror or error}", hint="make room in /tmp"
            ) from error
        with _ending(plain):
            plain.start(environ)
            wanted = _watch_plain(plain, begun, budget_s)
            plain.end()
        if isinstance(wanted, Trial):
            trial = wanted
        else:
            killed_at, last = wanted
            if killed_at:
                job["checkpoint"] = {"every_steps": max(1, killed_at * 3 // 10)}
            other = _copy(place, folder, "killed", job, place_in, text, tell)
            with _ending(other):
                other.start(environ)
                trial = _watch_killed(other, plain, killed_at, last, begun + budget_s)
    more = f"a larger one, such as --budget {3 * budget_s:g}"
    return msgspec.structs.replace(
        trial,
        text=trial.text.replace(_LARGER, more),
        took_s=round(time.monotonic() - begun, 1),
    )


@contextlib.contextmanager
def _ending(run: CopiedRun) -> Iterator[None]:
    """End a run whatever happens, SIGTERM and Ctrl-C among it."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        run.end()
        remove_folders(run.paths)
        signal.signal(signal.SIGTERM, before)


def _watch_plain(run: CopiedRun, begun: float, budget_s: float) -> Trial | tuple[int, int]:
    """Return the step at which the other run is to be killed, and the last that is compared.

    Of a script that declares no steps both are 0.
    """
    first_s = 0.0
    while not run.over:
        now, seen = time.monotonic(), run.look()
        spent, step = now - begun, seen.step if seen else 0
        trains = seen is not None and seen.state == "running"
        first_s = first_s or (now if step > 0 else 0.0)
        trained_s = now - first_s if first_s else 0.0
        if step >= _STEPS_MIN and (trained_s > _TRAINS_S or spent > 0.35 * budget_s):
            break
        if spent > 0.5 * budget_s and trains and seen is not None and seen.depth == "supervised":
            return 0, 0
        if spent > 0.6 * budget_s:
            return Trial(
                "not tried",
                f"{max(step, 0)} steps in {spent:.0f} s are too few to kill a rank in between: "
                + _LARGER,
            )
        time.sleep(_POLL_S)
    run.end()
    seen = run.look()
    step = seen.step if seen else 0
    if run.process is not None and run.process.returncode and (not seen or seen.state == "failed"):
        return Trial("failed", f"it fails by itself, undisturbed: {run.tail()}")
    if seen is not None and seen.depth == "supervised":
        return Trial(
            "not tried",
            "it ended before it could be killed, and declares no steps: after a failure it would "
            "begin again from its start",
        )
    if step < _STEPS_MIN:
        return Trial("not tried", f"it has only {max(step, 0)} steps: more of them, or longer ones")
    return step // 2, step


def _watch_killed(run: CopiedRun, plain: CopiedRun, at: int, last: int, deadline: float) -> Trial:
    """Kill a rank once a checkpoint and step `at` are there; let it go on, and compare."""
    try:
        seen = _wait(run, lambda s: _is_ripe(s, at), deadline)
        victim = max(seen.ranks, key=lambda rank: rank.rank)
        before = run.read_losses()[1]
        os.kill(victim.pid, signal.SIGKILL)
        generation = seen.generation
        if not at:
            _wait(run, lambda s: s.generation > generation and s.state == "running", deadline)
            return Trial(
                "not resumed",
                f"rank {victim.rank} was killed, and the script began again from its start: it "
                "declares no steps, so there is nothing to go on from",
                victim.rank,
            )
        _wait(run, lambda s: s.generation > generation and s.state == "running", deadline)
        with contextlib.suppress(_Ended):
            _wait(run, lambda s: s.generation > generation and s.step >= last, deadline)
    except _Ended as ended:
        if run.process is not None and run.process.poll():
            return Trial("failed", f"it fails once a rank was killed: {run.tail()}")
        return Trial("not tried", str(ended))
    except ProcessLookupError:
        return Trial("not tried", "it ended at the moment at which a rank was to be killed")
    run.end()
    return _compare(run, plain, victim.rank, generation, seen.step, before)


def _is_ripe(seen: Snapshot, at: int) -> bool:
    """Return whether a rank can be killed now; with no step `at`, once all run."""
    if seen.state != "running" or not seen.ranks or any(row.pid <= 1 for row in seen.ranks):
        return False
    if not at:
        return all(row.state == "running" for row in seen.ranks)
    return seen.step >= at and any(isinstance(row.get("step"), int) for row in seen.checkpoints)


def _wait(run: CopiedRun, holds: Any, deadline: float) -> Snapshot:
    """Return the first snapshot of which something holds.

    Raises:
        _Ended: the run is over, or its time is.
    """
    while True:
        over = run.over
        seen = run.look()
        if seen is not None and holds(seen):
            return seen
        if over:
            raise _Ended("it ended before a checkpoint was there and a rank killed: more steps")
        if time.monotonic() > deadline:
            state = f"{seen.state}, step {max(seen.step, 0)}" if seen else "not started"
            raise _Ended(f"the budget was spent ({state}): {_LARGER}")
        time.sleep(_POLL_S)


def _read_facts(run: CopiedRun, generation: int) -> tuple[int, int, str]:
    """Return the step under way when `generation` failed, the step that the next one went on from.

    And why it says of itself that it is not exact; empty where it is. -1: not told.
    """
    killed_at = resumed_at = -1
    why = ""
    for entry in read_mirror(run.paths) or ():
        match entry.body:
            case FailureDecided(world=world, at_step=step) if world == generation:
                killed_at = step
            case CheckpointRestored(generation=number, step=step) if number > generation:
                resumed_at = step if resumed_at < 0 else resumed_at
                why = why or entry.body.why_not_exact
    return killed_at, resumed_at, why


def _compare(
    run: CopiedRun,
    plain: CopiedRun,
    rank: int,
    generation: int,
    at: int,
    before: Mapping[Any, str],
) -> Trial:
    """Return what a run that was killed shows beside one that was not."""
    killed_at, resumed_at, inexact = _read_facts(run, generation)
    killed = Killed(rank, killed_at if killed_at >= 0 else at, resumed_at, inexact)
    (what, mine), (_, theirs) = run.read_losses(), plain.read_losses()
    return judge_losses(killed, what, mine, theirs, before)


def judge_losses(
    killed: Killed,
    what: str,
    mine: Mapping[Any, str],
    theirs: Mapping[Any, str],
    before: Mapping[Any, str],
) -> Trial:
    """Return what the losses of a run that was killed, and of one that was not, say.

    `what` names the metric, whose values are by step, as hexadecimal floats; or it is `lines`: then
    they are as printed, by the words in front of them. Of steps that were made again `mine` has the
    newest; `before` has what there was at the kill, which shows whether a script repeats itself
    even if it logs nothing before the checkpoint that it goes on from.
    """
    facts: dict[str, Any] = {
        "killed_rank": killed.rank,
        "killed_at": killed.at,
        "resumed_at": killed.resumed_at,
    }
    text = f"rank {killed.rank} killed at step {killed.at}, resumed at {max(killed.resumed_at, 0)}"
    if killed.resumed_at <= 0:
        return Trial("not resumed", f"{text}: no checkpoint was used", **facts)
    pairs = {key: (theirs[key], mine[key]) for key in theirs if key in mine}
    by_step = what != "lines"
    later = [key for key in pairs if not by_step or key >= killed.resumed_at]
    facts |= {"compared": what, "steps": len(later)}
    shown = f"{what} of {len(later)} steps" if by_step else f"{len(later)} lines with a loss"
    if not later:
        why = "no loss was logged after it resumed" if pairs else (
            "it logs no loss (run.log(loss=...)) and prints none with its step"
        )  # fmt: skip
        return Trial("survived", f"{text}; nothing can be compared: {why}", **facts)
    wrong = [key for key, (left, right) in pairs.items() if left != right]
    if not wrong:
        return Trial("equal", f"{text}, losses equal ({shown})", **facts)
    own = {
        key: (theirs[key], loss) for key, loss in before.items() if theirs.get(key, loss) != loss
    }
    own |= {key: pairs[key] for key in wrong if by_step and key < killed.resumed_at}
    first = next(iter(own), wrong[0])
    left, right = own.get(first) or pairs[first]
    values = f"{_number(left)} undisturbed, {_number(right)} here"
    where = f"step {first}" if by_step else f"`{str(first).strip()}`"
    if own:
        return Trial(
            "survived",
            f"{text}; losses cannot be compared: the script does not repeat itself, already at "
            f"{where}, before the kill ({values}): is everything seeded?",
            **facts,
        )
    because = f"; perdure itself says: {killed.inexact}" if killed.inexact else ""
    return Trial(
        "differs",
        f"{text}, losses differ from {where} on: {values} ({len(wrong)} values differ; compared: "
        f"{shown}){because}",
        **facts,
    )


def _number(text: str) -> str:
    return repr(float.fromhex(text)) if "0x" in text else text
