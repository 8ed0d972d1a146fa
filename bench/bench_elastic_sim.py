"""A million committed steps of elastic jobs under virtual time, with seeded misfortune.

    python bench/bench_elastic_sim.py [--steps 1000000] [--first-seed 0]

Each seed is a job of 200 steps on 4 or 8 members, every fourth with a spare node, with 6 or 12
faults (ranks, agents, keepers, controllers between an event and its decision, network outages),
every third one in a network that loses and doubles a fifth of its messages. A violated invariant
ends the run and names the seed.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.simulator import Scenario, Weather
from tests.simulator.elastic import ElasticSimulation

KINDS = ("crash", "crash", "crash", "agent", "keeper", "controller", "halfway", "outage")
STEPS = 200


def make_scenario(seed: int) -> Scenario:
    weather = Weather(0.02, 0.2, 0.2) if seed % 3 == 2 else Weather(0.003, 0.02, 0.02)
    nproc = 1 + seed % 2
    return Scenario(
        seed=seed,
        nodes=4,
        nproc=nproc,
        spares=nproc if seed % 4 == 3 else 0,
        steps=STEPS,
        step_s=0.05,
        faults=6 * nproc,
        kinds=KINDS,
        weather=weather,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    began, totals, outcomes = time.monotonic(), Counter[str](), set()
    for seed in range(args.first_seed, args.first_seed + -(-args.steps // STEPS)):
        simulation = ElasticSimulation(make_scenario(seed))
        simulation.run()
        totals["steps"] += STEPS
        totals["formed in place"] += simulation.reformed
        totals["restarts of the world"] += len(simulation.worlds) - 1
        totals.update(words.split()[0] for words in simulation.injected)
        outcomes.add(simulation.truth[STEPS])
        if seed % 500 == 499:
            print(json.dumps(totals), flush=True)
    result = {**totals, "outcomes": len(outcomes), "wall_s": round(time.monotonic() - began, 1)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
