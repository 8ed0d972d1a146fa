"""A drill: the job in a copy, fault after fault, and then once more with nobody disturbing it.

A fault is made a random number of steps after a checkpoint that was asked for, once the one before
is over. Where the job ends by one, or has made all its steps, it begins anew for those that are
left. What was undisturbed runs last, since only then it is known how far: it is no part of the
budget.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perdure import __version__
from perdure.detect.certainty import STOPPED_S
from perdure.drill.card import Card, FaultRow, Losses
from perdure.drill.grading import (
    Outcome,
    Strike,
    Window,
    compare_lines,
    compare_losses,
    judge_row,
    list_unmade,
    read_outcome,
)
from perdure.drill.place import NotMadeError, Place, Run, Victim
from perdure.drill.planning import FAULTS, NEEDS_STEPS, Act, DrillWish, choose_lead
from perdure.drill.strikes import INJECTED
from perdure.model.errors import PlatformError
from perdure.model.report import Snapshot
from perdure.telemetry.restarts import Began

_LOOK_S = 0.1
_JOURNAL_S = 0.4
"""Between two readings of the journal."""
_PATIENCE_S = 60.0
"""For a fault to be found and over, beyond what the job file itself allows for it."""
_SLOW_S = 45.0
"""A slow rank is found within this, or not at all."""
_SLOW_OVER_S = 20.0
_USUAL_S, _USUAL_STEPS = 8.0, 60
"""So long, and for so many steps, it trains undisturbed before a rank is made slow."""
_NODE_S = 5.0
"""A node stays away until its loss is told, or twice as long as silence is borne, and this."""
_SILENT_S = 3.0
"""A script that runs for so long and tells no step declares none."""
_LEAST_S = 10.0
"""With less of the budget left, no fault is made any more."""
_AFTER_STEPS, _AFTER_S = 8, 20.0
"""Steps after the last fault, by which its losses are judged, and how long they may take."""
_PASSES_MAX, _ATTEMPTS = 6, 3
_DAWDLE_S = 60.0

Say = Callable[[str, float, str], None]
"""What is being done, the share of it that is, and more in words."""


class _Ended(Exception):
    """The job has ended, or does not go on; and why."""


@dataclass(slots=True)
class _Pass:
    """One start of the job, and what was done to it."""

    run: Run
    rows: list[FaultRow] = field(default_factory=list)
    strikes: list[tuple[Strike, Outcome]] = field(default_factory=list)
    """With rows of the same numbers."""
    before: dict[int, str] = field(default_factory=dict)
    """What was logged before the first fault."""
    losses: dict[Any, str] = field(default_factory=dict)
    compared: str = ""
    last: int = 0
    """The last step that is compared."""


def _read_before(run: Run, strike: Strike) -> dict[int, str]:
    """Return the losses of steps that were made before a fault; empty where that is not known."""
    what, losses = run.read_losses()
    seen = run.look()
    if what == "lines" or seen is None or seen.generation != strike.generation:
        return {}  # Some may have been made again already.
    return {step: loss for step, loss in losses.items() if step < strike.step}


def aim(act: Act, seen: Snapshot, stays: frozenset[int] = frozenset()) -> Act:
    """Return an act for who is there: ranks of an elastic world get new numbers, nodes may lack.

    Nodes that `stay` are not taken, as long as there is another.
    """
    homes = {row.rank: row.node for row in seen.ranks if row.state not in ("exited", "failed")}
    able = sorted(node for node in homes.values() if node not in stays) or sorted(homes.values())
    if act.fault == "node" and act.node not in able:
        return act._replace(node=able[act.node % len(able)])
    if act.rank in homes or act.fault == "node":
        return act
    rank = sorted(homes)[act.rank % len(homes)]
    return act._replace(rank=rank, node=homes[rank])


def rehearse(wish: DrillWish, place: Place, say: Say) -> Card:
    """Drill a job where it runs, and return its card; the budget counts from now.

    Raises:
        PlatformError: the job cannot be started.
    """
    return _Drill(wish, place, say).drill()


class _Drill:
    """All of one drill."""

    def __init__(self, wish: DrillWish, place: Place, say: Say) -> None:
        self.wish, self._place, self._say = wish, place, say
        self._deadline_s = time.monotonic() + wish.budget_s
        self._passes: list[_Pass] = []
        self._reason = ""
        self._declares: bool | None = None
        """Whether the script declares steps; None: it never trained."""
        self._notes: list[str] = []
        self._not_tried: dict[str, str] = dict(wish.left_out)
        self._unmade: set[str] = set()
        self._made = 0

    def drill(self) -> Card:
        """Make all faults, then compare."""
        begun_s = time.monotonic()
        left = list(self.wish.acts)
        for number in range(_PASSES_MAX):
            before = len(left)
            try:
                left = self._play(number, left)
            except PlatformError as error:  # Such as a disk that is full by now.
                if not self._made:
                    raise
                self._reason = error.message
            if not left or self._reason:
                break
            if self._left_s() < _LEAST_S:
                break
            if number and len(left) == before:
                self._reason = "nothing more could be tried: it ends too early, or does not train"
                break
        else:
            self._reason = f"it was begun {_PASSES_MAX} times, and has ended each time: more steps"
        for act in left:
            spent = f"the budget of {self.wish.budget_s:g} s was spent: a larger --budget"
            self._not_tried.setdefault(act.fault, self._reason or spent)
        drilled_s = time.monotonic() - begun_s
        undisturbed_s = 0.0
        if any(done.strikes for done in self._passes):
            try:
                undisturbed_s = self._compare()
            except PlatformError as error:
                self._say_uncompared(error.message)
        return self._make_card(left, drilled_s, undisturbed_s)

    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _play(self, number: int, acts: Sequence[Act]) -> list[Act]:
        """Start the job, and make faults to it; return those that are left."""
        left = list(acts)
        self._say(f"start {number + 1}", 0.0, "starts")
        with self._place.open(switches=True) as target:
            run, done = target.run, _Pass(target.run)
            self._passes.append(done)
            try:
                self._wait_training(run)
                while left and self._left_s() >= _LEAST_S:
                    if left[0].fault in NEEDS_STEPS and not self._declares:
                        self._not_tried[left.pop(0).fault] = (
                            "the script declares no steps, and perdure writes no checkpoint for it"
                        )
                        continue
                    self._perform(done, target, left[0])
                    left.pop(0)
                self._settle(done, run)
            except _Ended as ended:
                if not self._made and not done.strikes:
                    self._reason = str(ended)
            self._keep(done, target)
        return left

    def _wait_training(self, run: Run) -> Snapshot:
        """Return the job once all its ranks train.

        Raises:
            _Ended: they do not.
        """
        silent_s = math.inf if self._declares is None else -math.inf
        while True:
            over, seen = run.over, run.look()
            if not over and seen is not None and seen.state == "running" and seen.ranks:
                settled = all(row.pid > 1 for row in seen.ranks)
                silent_s = min(silent_s, time.monotonic())
                silent = seen.step < 0 and not self._declares
                if settled and (
                    seen.step > 0 or (silent and time.monotonic() > silent_s + _SILENT_S)
                ):
                    self._declares = self._declares or seen.step > 0
                    return seen
            if over:
                raise _Ended(self._explain_end(run, seen))
            if self._left_s() < 0:
                state = f"{seen.state}, step {seen.step}" if seen else "not started"
                raise _Ended(f"the budget was spent before it trained ({state}): a larger --budget")
            time.sleep(_LOOK_S)

    def _explain_end(self, run: Run, seen: Snapshot | None) -> str:
        if run.code:
            return f"it fails by itself, undisturbed: {run.tail()}{self._explain_refusal(run)}"
        steps = f" after {seen.step} steps" if seen is not None and seen.step >= 0 else ""
        return f"it ended by itself{steps}, before a fault could be made: more steps"

    def _explain_refusal(self, run: Run) -> str:
        if not self.wish.confined or not run.was_refused():
            return ""
        return (
            " (a drill's script may write in its own copy only; --writable DIR allows a folder "
            "that may change)"
        )

    def _perform(self, done: _Pass, target: Victim, act: Act) -> None:
        """Make one fault, and wait until it is over.

        Raises:
            _Ended: the job had ended before.
        """
        run = target.run
        act = aim(act, self._wait_training(run), self._place.stays)
        share = self._made / max(1, len(self.wish.acts))
        self._say(act.fault, share, FAULTS[act.fault])
        strike = self._make(target, act)
        if strike is None:
            return
        self._made += 1
        if not done.strikes:
            done.before = _read_before(run, strike)
        strike, outcome, waited_s = self._wait_over(target, act, strike)
        began = None
        if not self._declares and outcome.back_s is not None:
            began = self._read_began(run, strike)
        row = judge_row(
            strike,
            outcome,
            waited_s=waited_s,
            began=began.describe() if began is not None else "",
            again=began is not None and began.where == "again",
        )
        done.rows.append(row)
        done.strikes.append((strike, outcome))
        found = f"found after {row.found_s:.2f} s" if row.found_s is not None else row.why
        back = f", back after {row.back_s:.2f} s" if row.back_s is not None else ""
        self._say(f"{act.fault}: {row.verdict}", self._made / len(self.wish.acts), found + back)

    def _make(self, target: Victim, act: Act) -> Strike | None:
        """Make a fault; None where it cannot be, after some attempts.

        Raises:
            _Ended: the job has ended before.
        """
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                return self._strike(target, act)
            except NotMadeError as error:  # Such as a step that was already made.
                why = str(error)
            if target.run.over or self._is_ending(target.run):
                raise _Ended(self._explain_end(target.run, target.run.look()))
        self._not_tried[act.fault] = f"it could not be made: {why}"
        self._unmade.add(act.fault)
        return None

    def _is_ending(self, run: Run) -> bool:
        """Return whether the job ends within a moment."""
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s and not run.over:
            time.sleep(_LOOK_S)
        return run.over

    def _read_began(self, run: Run, strike: Strike) -> Began | None:
        """Return where a script without steps began again, once its output says it."""
        spec, until_s = self.wish.spec, time.monotonic() + min(10.0, max(0.0, self._left_s()))
        while time.monotonic() < until_s and not run.over:
            seen = run.look()
            if seen is not None and seen.generation > strike.generation:
                began = run.read_began(spec, seen.generation)
                if began is not None:
                    return began
            time.sleep(0.5)
        return None

    def _strike(self, target: Victim, act: Act) -> Strike:
        """Make a fault at its random step.

        Raises:
            NotMadeError: it cannot be.
            _Ended: the job has ended.
        """
        if not self._declares:
            self._sleep(target.run, 1.0 + 3.0 * act.where)
            return target.strike(act, self._wait_training(target.run), -1)
        if act.fault == "torn":  # The one before it, to which the world goes back.
            target.ask("checkpoint", {}, self._limit_s(_PATIENCE_S))
            step = self._wait_training(target.run).step
            self._wait_step(target.run, step + 3)
        if act.fault == "slow":  # Slower than usual: so there has to be something usual.
            begun_s, step = time.monotonic(), self._wait_training(target.run).step
            self._sleep(target.run, _USUAL_S)
            while time.monotonic() < begun_s + _PATIENCE_S and not target.run.over:
                if self._wait_training(target.run).step >= step + _USUAL_STEPS:
                    break
                time.sleep(_LOOK_S)
        if act.fault != "disk":
            target.ask("checkpoint", {}, self._limit_s(_PATIENCE_S))
        seen = self._wait_training(target.run)
        lead = choose_lead(act.where, seen.steps_per_s)
        if act.fault in INJECTED:
            return target.strike(act, seen, seen.step + lead)
        seen = self._wait_step(target.run, seen.step + lead)
        return target.strike(act, seen, -1)

    def _limit_s(self, at_most_s: float) -> float:
        return max(5.0, min(at_most_s, self._left_s()))

    def _sleep(self, run: Run, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not run.over:
            time.sleep(_LOOK_S)

    def _wait_step(self, run: Run, step: int) -> Snapshot:
        """Return the job once it has made so many steps.

        Raises:
            _Ended: it has ended, or does not come so far within the budget.
        """
        while True:
            seen = self._wait_training(run)
            if seen.step >= step:
                return seen
            if run.over:
                raise _Ended(self._explain_end(run, seen))
            if self._left_s() < 0:
                raise _Ended("the budget was spent")
            time.sleep(_LOOK_S)

    def _wait_over(self, target: Victim, act: Act, strike: Strike) -> tuple[Strike, Outcome, float]:
        """Wait until a fault is over, and end it in time; return what became of it."""
        begun_s, patience_s = time.monotonic(), self._count_patience(act)
        outcome, read_s = Outcome(), 0.0
        while True:
            now_s = time.monotonic()
            waited_s, over = now_s - begun_s, target.run.over
            if now_s - read_s >= _JOURNAL_S or over:
                read_s, outcome = now_s, read_outcome(strike, target.read())
            if strike.healed_s is None and self._is_to_heal(act, outcome, waited_s):
                target.heal(act)
                strike = strike._replace(healed_s=target.now())
                patience_s = waited_s + (_SLOW_OVER_S if act.fault == "slow" else patience_s)
                if act.fault == "disk":
                    with suppress(NotMadeError):
                        target.ask("checkpoint", {}, self._limit_s(_PATIENCE_S))
            if outcome.over or over:
                return strike, outcome, waited_s
            if waited_s > patience_s or self._left_s() < -_DAWDLE_S:
                if strike.healed_s is None:
                    target.heal(act)
                return strike, outcome, waited_s
            time.sleep(_LOOK_S)

    def _is_to_heal(self, act: Act, outcome: Outcome, waited_s: float) -> bool:
        """Return whether a fault that can end shall end now."""
        if act.fault == "slow":
            return bool(outcome.right) or waited_s > _SLOW_S
        if act.fault == "node":  # What broke by its loss may be seen long before the loss itself.
            longest_s = 2 * self.wish.spec.detect.node_lost_s + _NODE_S
            return bool(outcome.right) or waited_s > longest_s
        return act.fault == "disk" and outcome.found_s is not None

    def _count_patience(self, act: Act) -> float:
        """Return how long a fault may take, by what the job file itself allows for it."""
        detect = self.wish.spec.detect
        more = {
            "hang": (detect.hang_action_s or 0.0) + detect.hang_floor_s,
            "stop": STOPPED_S + detect.hang_floor_s,
            "node": 2 * detect.node_lost_s,
            "slow": _SLOW_S,
        }.get(act.fault, 0.0)
        return _PATIENCE_S + more

    def _settle(self, done: _Pass, run: Run) -> None:
        """Let the job make some steps more, by which the last fault's losses are judged."""
        if not done.strikes or not self._declares:
            return
        until_s = time.monotonic() + _AFTER_S
        strike, outcome = done.strikes[-1]
        wanted = max(strike.step, outcome.resumed) + _AFTER_STEPS
        while time.monotonic() < until_s and not run.over:
            seen = run.look()
            if seen is not None and seen.state == "running" and seen.step >= wanted:
                return
            time.sleep(_LOOK_S)

    def _keep(self, done: _Pass, target: Victim) -> None:
        """Keep of a pass what is compared, and note what nobody had made."""
        run = done.run
        run.end(first_s=0.5)
        if not done.strikes:
            return
        done.compared, done.losses = run.read_losses()
        if done.compared != "lines":
            done.last = max(done.losses, default=0)
        entries = target.read()
        spans = []
        for (strike, outcome), later in zip(
            done.strikes, [*done.strikes[1:], None], strict=True
        ):  # fmt: skip
            end_s = strike.at_s + (outcome.back_s or 0.0) + 2.0
            if outcome.back_s is None:
                end_s = later[0].at_s if later is not None else float("inf")
            spans.append((strike.at_s, end_s))
        self._notes += list_unmade(spans, entries)

    def _compare(self) -> float:
        """Run the job undisturbed, as far as any pass came, and compare; return how long."""
        begun_s = time.monotonic()
        last = max(done.last for done in self._passes)
        drilled_s = begun_s - (self._deadline_s - self.wish.budget_s)
        limit_s = begun_s + 3.0 * drilled_s + 120.0
        if not any(done.losses for done in self._passes):
            self._say_uncompared("no loss is logged (run.log(loss=...)), or printed with its step")
            return 0.0
        self._say("undisturbed", 0.0, "starts")
        with self._place.open(switches=False) as target:
            run = target.run
            until_s = limit_s if last else min(limit_s, begun_s + max(20.0, 0.5 * drilled_s))
            while not run.over and time.monotonic() < until_s:
                seen = run.look()
                step = seen.step if seen is not None else 0
                if last and step > last:
                    break
                share = step / (last + 1) if last else (time.monotonic() - begun_s) / (
                    until_s - begun_s
                )  # fmt: skip
                self._say("undisturbed", max(0.0, min(1.0, share)), f"step {max(step, 0)}")
                time.sleep(_LOOK_S)
            run.end(first_s=0.5)
            what, theirs = run.read_losses()
        self._set_losses([self._judge_losses(done, what, theirs) for done in self._passes])
        return time.monotonic() - begun_s

    def _judge_losses(
        self, done: _Pass, what: str, theirs: Mapping[Any, str]
    ) -> list[tuple[Losses, str]]:
        """Return what the losses of a pass say of each of its faults."""
        if what == "lines" or done.compared == "lines":
            return [compare_lines(done.losses, theirs) for _ in done.rows]
        begins = [o.resumed if o.resumed >= 0 else s.step for s, o in done.strikes]
        windows = list(map(Window, begins, [*begins[1:], done.last + 1]))
        found = compare_losses(windows, done.losses, theirs, done.before)
        why = "its world went on in place with other members, which sum in another order"
        placed = [outcome.in_place for _, outcome in done.strikes]
        return [
            ("not compared", why)
            if losses == "differ" and any(placed[: number + 1])
            else (losses, told)
            for number, (losses, told) in enumerate(found)
        ]

    def _say_uncompared(self, why: str) -> None:
        self._set_losses([[("not compared", why)] * len(done.rows) for done in self._passes])

    def _set_losses(self, found: Sequence[Sequence[tuple[Losses, str]]]) -> None:
        for done, verdicts in zip(self._passes, found, strict=True):
            rows = []
            for row, (losses, why) in zip(done.rows, verdicts, strict=True):
                row = msgspec.structs.replace(row, losses=losses, losses_why=why)
                if losses == "differ" and row.verdict == "passed":
                    row = msgspec.structs.replace(row, verdict="failed", why="its losses differ")
                rows.append(row)
            done.rows = rows

    def _make_card(self, left: Sequence[Act], drilled_s: float, undisturbed_s: float) -> Card:
        rows = {row.fault: row for done in self._passes for row in done.rows}
        for name, why in self._not_tried.items():
            rows.setdefault(name, FaultRow(fault=name, verdict="not tried", why=why))
        ordered = tuple(rows[name] for name in FAULTS if name in rows)
        missed = {act.fault for act in left} | self._unmade
        passed = (
            any(row.verdict == "passed" for row in ordered)
            and all(row.verdict != "failed" for row in ordered)
            and not missed
        )
        spec = self.wish.spec
        return Card(
            job=spec.name,
            seed=self.wish.seed,
            ranks=spec.world_size,
            nodes=spec.nodes,
            declares_steps=bool(self._declares),
            passed=passed,
            rows=ordered,
            reason=self._reason,
            compared=next((p.compared for p in self._passes if p.compared), ""),
            budget_s=self.wish.budget_s,
            drilled_s=round(drilled_s, 1),
            undisturbed_s=round(undisturbed_s, 1),
            starts=len(self._passes),
            changed=tuple(self._place.list_changes()),
            notes=tuple(dict.fromkeys([*self._notes, *self._place.list_notes()])),
            place=self._place.describe(),
            version=__version__,
        )
