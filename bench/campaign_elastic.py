"""A thousand seeded SIGKILLs in elastic worlds of 4 to 8 ranks, at every place of a step.

    python bench/campaign_elastic.py [--kills 1000] [--first-seed 1000] [--together 20]

Of each world's ranks all but one die, each at a place and a time of its own: forward, backward,
before and after a reduction, before and after the optimizer, while the next world is formed; in
every fourth world all of them while one is formed. Every third world gets a member that joins,
and every second of these dies as it does. Then: every survivor has committed every step, all
replicas are equal after each, every sample of every step is what it is in any other world (a step
whose micro-batches do not count once raises by itself), and nothing hangs.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.elastic_scenarios import find_samples, judge, run_scenarios, seeded
from tests.e2e.elastic_world import FORMED_AT, KILLED_AT


def make_world(number: int) -> dict[str, Any]:
    """Return the world of a seed."""
    more = {"joins": 1, "join_epoch": 1} if number % 3 == 0 else {}
    places = FORMED_AT if number % 4 == 1 else KILLED_AT
    world = seeded(number, (4, 5, 6, 7, 8), places, **more)
    if number % 6 == 0:
        place = random.Random(number).choice(FORMED_AT)
        world["kill"][str(world["ranks"])] = f"{place} 0"
    return world


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--together", type=int, default=20, help="worlds a process of the harness")
    args = parser.parse_args()
    began, seed, totals = time.monotonic(), args.first_seed, Counter[str]()
    samples: dict[tuple[int, int], list[int]] = {}
    while totals["kills"] < args.kills:
        worlds = [make_world(number) for number in range(seed, seed + args.together)]
        seed += args.together
        with tempfile.TemporaryDirectory() as folder:
            for name, outcome in run_scenarios(worlds, Path(folder)).items():
                totals["worlds"] += 1
                totals["kills"] += sum(code == -9 for code in outcome["answer"]["ends"].values())
                try:
                    judge(outcome)
                    for key, indices in find_samples(outcome).items():
                        assert samples.setdefault(key, indices) == indices, key
                except AssertionError as error:
                    totals["failed"] += 1
                    print(f"{name}: {str(error)[:2000]}", flush=True)
        print(json.dumps(totals), flush=True)
    print(json.dumps({**totals, "wall_s": round(time.monotonic() - began)}))
    return 1 if totals["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
