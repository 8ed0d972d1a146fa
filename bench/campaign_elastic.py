"""A thousand seeded SIGKILLs in elastic worlds of 4 to 8 ranks, at every place of a step.

    python bench/campaign_elastic.py [--kills 1000] [--first-seed 1000] [--together 20]

Of each world's ranks all but one die, each at a place and a time of its own: forward, backward,
before and after a reduction, before and after the optimizer, while the next world is formed; every
third world is given a member that joins. Then: every survivor has committed every step, all
replicas are equal after each, every sample of every step is what it is in any other world (a step
whose micro-batches do not count once raises by itself), and nothing hangs.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.elastic_scenarios import find_samples, judge, run_scenarios, seeded


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--together", type=int, default=20, help="worlds a process of the harness")
    args = parser.parse_args()
    began, seed, totals = time.monotonic(), args.first_seed, Counter[str]()
    samples: dict[tuple[int, int], list[int]] = {}
    while totals["kills"] < args.kills:
        worlds = []
        for number in range(seed, seed + args.together):
            more = {"joins": 1, "join_epoch": 1} if number % 3 == 0 else {}
            worlds.append(seeded(number, (4, 5, 6, 7, 8), **more))
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
