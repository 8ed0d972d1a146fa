"""Elastic pipelines: what a change of the world takes by phase, and what it moves.

    python bench/bench_morph.py [--stages 2 3 4] [--kinds stay recut join follow shapes]
                                [--megabytes 3] [--json]

Of eight ranks one after the other is killed until one copy is left, once with losses rerouted
where nothing has to move (`stay`), and once with the model cut anew for every world (`recut`).
One copy is joined by one rank after the other until there are eight: each takes its blocks within
the join (`join`), or while the members train (`follow`). And as many ranks go from each number of
stages to the next and back (`shapes`). Real processes and connections of the test harness; phases
are the ranks' own stamps, the last rank's of each, from the death, or else from when the first
rank stood still. `least` are the bytes that the best of all assignments of members to the new
stages would move, `ahead` those that were sent while the members trained.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.e2e.elastic_scenarios import run_scenarios, scenario  # noqa: E402

RANKS, LAYERS, EVERY = 8, 12, 3
"""A rank is lost every so many steps."""
PACE_S, STEPS, REST_S = 0.01, 15, 0.5
KINDS = ("stay", "recut", "join", "follow", "shapes")
SHAPES = {8: (1, 2, 4, 8, 4, 2, 1), 6: (1, 2, 3, 6, 3, 2, 1), 4: (1, 2, 4, 2, 1)}
"""Ranks -> stages of one world after another."""
DEFAULTS: dict[str, Any] = {
    "finished": False, "back": 0, "morphed": False, "moved_bytes": 0, "connected_s": 0.0,
}  # fmt: skip
"""Of `WorldReformed`."""


def list_scenarios(kinds: list[str], stages: list[int], width: int) -> list[dict[str, Any]]:
    """Return what is to be run, by kind."""
    made = []
    for count in stages:
        made += [make_losses(count, kind == "recut", width) for kind in KINDS[:2] if kind in kinds]
        made += [make_joins(count, kind == "follow", width) for kind in KINDS[2:4] if kind in kinds]
    if "shapes" in kinds:
        made += [make_shapes(ranks, width) for ranks in SHAPES]
    return made


def make_joins(stages: int, follow: bool, width: int) -> dict[str, Any]:
    """Return one copy of some stages, which one rank after the other joins."""
    joins = RANKS - stages
    return scenario(
        f"{stages}-{'follow' if follow else 'join'}", stages, stages=stages, joins=joins,
        follow=follow, width=width, layers=LAYERS, steps=STEPS * joins, pace_s=PACE_S,
        timeout_s=600,
    )  # fmt: skip


def make_shapes(ranks: int, width: int) -> dict[str, Any]:
    """Return a world that is cut otherwise, again and again, while nobody comes or goes."""
    shapes = SHAPES[ranks]
    return scenario(
        f"{ranks}-shapes", ranks, stages=shapes[0], shapes=shapes, rest_s=REST_S, width=width,
        layers=LAYERS, steps=STEPS * len(shapes) // 2, pace_s=PACE_S, timeout_s=600,
    )  # fmt: skip


def make_losses(stages: int, recut: bool, width: int) -> dict[str, Any]:
    """Return a world whose last rank dies, then the one before it, and so on."""
    kills = {
        str(rank): f"applied {EVERY * (index + 1) - 1}"
        for index, rank in enumerate(range(RANKS - 1, stages - 1, -1))
    }
    steps = EVERY * (len(kills) + 1)
    return scenario(
        f"{stages}-{'recut' if recut else 'stay'}", RANKS, stages=stages, recut=recut, kill=kills,
        width=width, layers=LAYERS, steps=steps, every=7, timeout_s=300,
    )  # fmt: skip


def read_epochs(outcome: dict[str, Any], block_bytes: list[int]) -> list[dict[str, Any]]:
    """Return a line for each change of the world."""
    formed: dict[int, list[dict[str, Any]]] = {}
    for told in outcome["answer"]["formed"]:
        event = DEFAULTS | told
        if not event["finished"]:
            formed.setdefault(event["epoch"], []).append(event)
    rows = [row for mine in outcome["rows"].values() for row in mine]
    ahead = iter(outcome["answer"]["followed_bytes"])
    lines = []
    for before, epoch in itertools.pairwise(sorted(formed)):
        events = formed[epoch]
        old, new = (max(event["formed_s"] for event in formed[e]) for e in (before, epoch))
        deaths = [at for at in outcome["answer"]["deaths"] if old < at <= new]
        died = max(deaths, default=min(event["began_s"] for event in events))
        joined = len(events) > len(formed[before])
        ordered = max(event["ordered_s"] for event in events)
        connected = max(event["connected_s"] for event in events)
        ready = max(event["formed_s"] for event in events)
        after = [row["at"] for row in rows if row["epoch"] == epoch]
        lines.append(
            {
                "before": formed[before][0]["shape"],
                "after": events[0]["shape"],
                "back": max(event["back"] for event in events),
                "morphed": any(event["morphed"] for event in events),
                "ordered_ms": 1e3 * (ordered - died),
                "connected_ms": 1e3 * (connected - ordered),
                "state_ms": 1e3 * (ready - connected),
                "step_ms": 1e3 * (min(after) - ready) if after else None,
                "total_ms": 1e3 * (min(after) - died) if after else None,
                "moved": sum(event["moved_bytes"] for event in events),
                "least": find_least(outcome, before, epoch, block_bytes),
                "ahead": next(ahead, 0) if joined else 0,
            }
        )
    return lines


def find_least(outcome: dict[str, Any], old: int, new: int, sizes: list[int]) -> int | None:
    """Return the fewest bytes that anybody could have moved from epoch `old` to epoch `new`."""
    before, after = {}, {}
    for member, rows in outcome["rows"].items():
        for row in rows:
            if row["epoch"] == new:
                after[member] = row["blocks"]
            elif row["epoch"] == old:
                before[member] = row["blocks"]
    if not after:
        return None
    members = sorted(after)
    missing = {
        (member, tuple(after[other])): sum(
            sizes[b] for b in after[other] if b not in before.get(member, ())
        )
        for member in members
        for other in members
    }
    kinds = [tuple(after[member]) for member in members]
    return min(
        sum(missing[member, kind] for member, kind in zip(members, order, strict=True))
        for order in set(itertools.permutations(kinds))
    )


def main() -> int:
    """Print the changes, one a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--megabytes", type=float, default=3.0, help="state of a block")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    width = int((args.megabytes * 1e6 / 12) ** 0.5)
    load_before = os.getloadavg()[0]
    scenarios = list_scenarios(args.kinds, args.stages, width)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_scenarios(scenarios, Path(folder))
    found = {}
    for name, outcome in outcomes.items():
        if outcome["answer"].get("hung"):
            print(f"{name}: hung\n{outcome['log'][-2000:]}", file=sys.stderr)
            return 1
        sizes = outcome["rows"]["0"][0]["sizes"]
        found[name] = read_epochs(outcome, sizes)
    result = {"load": [round(load_before, 1), round(os.getloadavg()[0], 1)], "worlds": found}
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"load {result['load']}, {args.megabytes:g} MB a block, {LAYERS + 2} blocks")
    keys = ("ordered_ms", "connected_ms", "state_ms", "step_ms", "total_ms")
    heads = "order conn  state step  total    moved    least    ahead"
    print(f"world        change               {heads}")
    for name, lines in found.items():
        for line in lines:
            times = " ".join(f"{line[k]:5.0f}" if line[k] is not None else "    -" for k in keys)
            least = f"{line['least'] / 1e6:8.1f}" if line["least"] is not None else "       -"
            change = f"{line['before']} -> {line['after']}"
            back = f"  {line['back']} steps back" if line["back"] else ""
            sent = f"{line['moved'] / 1e6:8.1f} {least} {line['ahead'] / 1e6:8.1f}"
            print(f"{name:10} {change:22} {times} {sent}{back}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
