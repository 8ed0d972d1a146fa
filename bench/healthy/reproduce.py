"""What was found by attack on the tree at d36469f (rows T4, T5, T7, T9), run again as a benchmark.

Each row is a healthy job in which nothing may be said or done; `harmed` counts the runs in which it
was. On that tree nearly all are harmed; on a later one none may be.

- T4: boxes from elsewhere, steps of 3 and 8 s, and no heartbeat of one of them for 1 to 3 s;
- T5: a rank waits 35 s for storage in silence (S), or is at work alone for 310 s (R): 30 s and
  300 s after the verdict that tree acted;
- T7: steps of 0.5 to 1.5 s whose times spread by a quarter, and 0.4; five minutes;
- T9: under torchft a group pauses for 3 s to validate, every 20 steps.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import tree
from .judge import BEGIN_S, Job
from .noise import Lognormal
from .training import DATA, Shape, World
from .workloads import Ddp, Steps

Row = dict[str, Any]
Gaps = tuple[float, ...]
PAUSE_S, PAUSE_EVERY = 3.0, 20
TICK_S = 0.05


class _Once:
    """One silence of a rank."""

    def __init__(self, at_s: float, seconds: float, rank: int, state: str) -> None:
        """At job time `at_s`."""
        self._at_s, self._seconds, self._rank, self._state = at_s, seconds, rank, state

    def __call__(self, world: World) -> None:
        """Begin it, if it is time."""
        if world.top_s >= self._at_s:
            self._at_s = float("inf")
            world.be_alone(self._seconds, self._rank, self._state, stage=DATA)


def _make_job(
    shape: Shape, seed: str, sigma: float, silence: _Once | None = None, gaps_s: Gaps = ()
) -> Job:
    """Return a job of plain DDP whose times spread by `sigma`."""

    def make(world: World, chance: random.Random) -> Steps:
        steps = Ddp(world, chance, Lognormal(chance, world.shape.ranks, sigma))
        if silence is not None:
            steps.disturbances.append(silence)
        return steps

    return Job("", shape, seed, make=make, gaps_s=gaps_s)


def list_pieces(runs: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """Yield (row, piece, what makes it), with so many runs of each kind."""
    for run in range(runs):
        for step_s in (3.0, 8.0):
            yield "T4", f"{step_s:g} s, {run}", partial(lose_heartbeats, step_s, run)
        for state, seconds in (("S", 35.0), ("R", 310.0)):
            yield "T5", f"{state} {seconds:g} s, {run}", partial(be_silent, state, seconds, run)
        for sigma in (0.25, 0.4):
            for ranks in (2, 4, 8):
                for step_s in (0.5, 1.0, 1.5):
                    piece = f"sigma {sigma:g}, {ranks} ranks, {step_s:g} s, {run}"
                    yield "T7", piece, partial(be_uneven, sigma, ranks, step_s, run)
        for groups in (2, 3, 4):
            yield "T9", f"{groups} groups, {run}", partial(pause_group, groups, run)


def lose_heartbeats(step_s: float, run: int) -> Row:
    """T4: return what is lost by gaps of heartbeats in ten minutes."""
    shape = Shape(4, 1, step_s, links=False)
    job = _make_job(shape, f"T4 {step_s} {run}", 0.05, gaps_s=(1.0, 1.5, 2.0, 3.0))
    outcome = job.run(600.0)
    lost = sum(told.kind == "NodeLost" for told in outcome.told)
    return {"harmed": lost > 0, "lost": lost, "actions": len(outcome.actions)}


def be_silent(state: str, seconds: float, run: int) -> Row:
    """T5: return how often the world is restarted by one long silence."""
    silence = _Once(BEGIN_S + 60.0, seconds, run % 2, state)
    job = _make_job(Shape(2, 1, 0.3), f"T5 {state} {run}", 0.05, silence)
    outcome = job.run(120.0 + seconds)
    return {"harmed": bool(outcome.actions), "actions": len(outcome.actions)}


def be_uneven(sigma: float, ranks: int, step_s: float, run: int) -> Row:
    """T7: return how many ranks and links are blamed in five minutes."""
    job = _make_job(Shape(ranks, 1, step_s), f"T7 {sigma} {ranks} {step_s} {run}", sigma)
    outcome = job.run(300.0)
    false = sum(not told.silent for told in outcome.told)
    return {"harmed": false > 0, "false": false, "actions": len(outcome.actions)}


def pause_group(groups: int, run: int) -> Row:
    """T9: return how often a group is left out that validates for 3 s.

    The lighthouse's real machine hears heartbeats, and requests as torchft's managers make them.
    """
    chance = random.Random(f"T9 {groups} {run}")
    find = tree.find
    config = find(
        "QuorumConfig", "perdure.control.lighthouse.patience", "perdure.control.groups.outputs"
    )
    quorums = find("Quorums", "perdure.control.lighthouse.quorum", "perdure.control.groups.quorum")(
        config()
    )
    member = find("Member", "perdure.model.bus.lighthouse", "perdure.model.lighthouse")
    names = [f"train_{g}:life" for g in range(groups)]
    steps, asks_s = dict.fromkeys(names, 0), dict.fromkeys(names, 1.0)
    asked: dict[str, float] = {}
    left = 0
    for tick in range(int(120.0 / TICK_S)):
        now = tick * TICK_S
        said = list(quorums.tick(now))
        for token, name in enumerate(names):
            said += quorums.hear(now, name) if tick % 2 == 0 else []
            if name not in asked and now >= asks_s[name]:
                asked[name] = now
                one = member(name, f"10.0.0.{token}:1", steps[name], False, 0, b"")
                said += quorums.ask(now, token, one)
        for each in said:
            match type(each).__name__:
                case "LeftOut":
                    left += 1
                case "Answered":
                    for token in each.tokens:
                        name = names[token]
                        asked.pop(name, None)
                        steps[name] += 1
                        asks_s[name] = now + 0.2 * chance.lognormvariate(0.0, 0.05)
                        if token == run % groups and steps[name] % PAUSE_EVERY == 0:
                            asks_s[name] += PAUSE_S
    return {"harmed": left > 0, "left out": left, "steps": min(steps.values())}
