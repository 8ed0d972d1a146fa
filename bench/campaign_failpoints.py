"""A fault at each point of each part, alone and in pairs; each job has to end as it should.

Each run is a short job, supervised, resumable, elastic or torchft in turn, in which a rank and the
controller are killed on the way, and besides the faults of `docs/failpoints.md` that were drawn
for it happen. What is then looked at is said by `check`. A job that an undisturbed machine runs in
S seconds has 4 S + 60: one that takes longer hangs, which is a finding as well.

First each depth runs once with nothing but these kills, which tells how often each point is
passed. A point that none passes is a finding: nothing would be known of it. Runs are lines of
`--out`, with seed, commit and load; those that are there are not run again. A home is kept where
something was wrong.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sweep import sweep_after_me

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from failpoints.checks import check
from failpoints.jobs import DEPTHS, ROOT, SNAPSHOTS, Depth, Run
from failpoints.launched import SSH, Launch
from failpoints.plan import Try, draw_pairs, find_uses, plan_alone
from failpoints.queued import QUEUE, Queue

from perdure.failpoints.points import POINTS

ALL = (*DEPTHS, SSH, QUEUE)
DEPTHS_HERE = {depth.name for depth in DEPTHS}
"""Those whose parts can be paused: the others are commands, and the same jobs on another box."""
PAUSED = ("supervisor", "controller", "agent", "keeper", "zygote", "nats", "rank", "all")


def make_run(depth: Depth, terms: str, *, kill: bool = True) -> Run:
    """Return a run of `depth`; nothing is started."""
    kinds: dict[str, type[Run]] = {SSH.name: Launch, QUEUE.name: Queue}
    return kinds.get(depth.name, Run)(depth, terms, kill=kill)


class Reference(NamedTuple):
    """What is known of a depth before it is tried."""

    trail: Path
    """What an undisturbed job has written."""
    uses: Counter[str]
    limit_s: float
    """A job that takes longer hangs."""


def make_reference(depth: Depth, folder: Path) -> Reference:
    """Return the reference of a depth: that of an earlier piece of the same campaign, in `folder`.

    Raises:
        SystemExit: a job without a fault does not end well.
    """
    known = folder / depth.name / "uses.json"
    if not known.exists():
        run_well(make_run(depth, "", kill=False), folder / depth.name / "trail")
        began = time.monotonic()
        run = make_run(depth, SNAPSHOTS)
        run_well(run)
        uses, seconds = find_uses(run.read("hits")), time.monotonic() - began
        shutil.rmtree(run.home, ignore_errors=True)
        known.write_text(json.dumps({"uses": uses, "s": seconds}))
    document = json.loads(known.read_text())
    limit_s = 4 * document["s"] + 60
    return Reference(folder / depth.name / "trail", Counter(document["uses"]), limit_s)


def run_well(run: Run, keep: Path | None = None) -> None:
    """Run a job that has no fault, and `keep` its trail."""
    wrong = run.run(600) + ([] if run.code == 0 else [f"exit code {run.code}"])
    if wrong:
        said = (run.home / "out").read_text(errors="replace")
        raise SystemExit(f"{run.depth.name} without a fault: {wrong}: {run.home}\n{said[-2000:]}")
    if keep is not None:
        shutil.copytree(run.trail, keep)
        shutil.rmtree(run.home, ignore_errors=True)


def read_commit() -> str:
    """Return the commit of this tree."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip()


def try_one(one: Try, depth: Depth, reference: Reference) -> dict[str, Any]:
    """Run one job; return its line."""
    began = time.monotonic()
    more = "=" in one.terms and "snapshot/every" not in one.terms
    run = make_run(depth, f"{one.terms}; {SNAPSHOTS}" if more else one.terms)
    load = os.getloadavg()[0]
    try:
        wrong = run.run(reference.limit_s)
        wrong += run.check() if isinstance(run, Queue) else check(run, reference.trail)
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    fired = run.read("fired")
    row = {
        "key": one.key, "depth": one.depth, "terms": one.terms, "fired": len(fired),
        "wrong": wrong, "load": round(load, 1), "s": round(time.monotonic() - began, 1),
        "home": str(run.home) if wrong else "",
    }  # fmt: skip
    if not wrong:
        shutil.rmtree(run.home, ignore_errors=True)
    return row


def show_uses(uses: dict[str, Counter[str]]) -> list[str]:
    """Print how often each point was passed; return the points that none has passed."""
    for use in sorted({use for found in uses.values() for use in found}):
        counts = "  ".join(f"{name} {found[use]:4d}" for name, found in uses.items())
        print(f"{use:40s} {counts}", file=sys.stderr)
    passed = {use.partition(" ")[0] for found in uses.values() for use in found}
    return sorted(set(POINTS) - passed)


def choose(args: argparse.Namespace, uses: dict[str, Counter[str]]) -> Iterator[Try]:
    """Yield what is to be tried, in order."""
    if args.only:
        yield Try(f"only {args.only}", args.depths[0], args.only)
    elif args.pauses:
        here = [depth for depth in uses if depth in DEPTHS_HERE]
        for depth, part in itertools.product(here, PAUSED):
            yield Try(f"pause {part} {depth}", depth, f"pause {part}")
        for depth in here:
            yield Try(f"clock {depth}", depth, "clock")
    if args.only or args.pauses:
        return
    if not args.pairs_only:
        yield from plan_alone(uses, args.seed)
    if not args.alone:
        yield from draw_pairs(uses, args.seed)


def main() -> int:
    """Run the campaign; exit code 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "failpoints.jsonl")
    parser.add_argument("--depths", nargs="+", default=[d.name for d in ALL])
    parser.add_argument("--alone", action="store_true", help="no pairs")
    parser.add_argument("--pairs-only", action="store_true")
    parser.add_argument("--pauses", action="store_true", help="pauses, and steps of the clock")
    parser.add_argument("--only", default="", help="these terms, in the first of --depths")
    args = parser.parse_args()
    ends_s = time.monotonic() + args.hours * 3600
    commit = read_commit()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {row["key"] for row in map(json.loads, lines)}
    depths = {depth.name: depth for depth in ALL if depth.name in args.depths}
    folder = args.out.with_suffix("")
    references = {name: make_reference(depth, folder) for name, depth in depths.items()}
    uses = {name: reference.uses for name, reference in references.items()}
    unpassed = show_uses(uses)
    bad = 0
    for one in choose(args, uses):
        if one.key in done and not args.only:
            continue
        if time.monotonic() > ends_s:
            break
        row = try_one(one, depths[one.depth], references[one.depth])
        row |= {"seed": args.seed, "commit": commit}
        bad += bool(row["wrong"])
        with open(args.out, "a") as out:
            out.write(json.dumps(row) + "\n")
        reached = row["fired"] or "=" not in one.terms
        verdict = "; ".join(row["wrong"]) or ("ok" if reached else "ok, not reached")
        print(f"{one.depth:11s} {row['s']:6.1f} s  {one.terms}: {verdict}", file=sys.stderr)
    print(json.dumps({"wrong": bad, "unpassed": unpassed, "commit": commit, "seed": args.seed}))
    return 1 if bad or (unpassed and len(depths) == len(ALL)) else 0


if __name__ == "__main__":
    sweep_after_me()
    sys.exit(main())
