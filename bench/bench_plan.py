"""Seconds of CPU that a plan takes, by devices, blocks and micro-batch sizes; then what it takes
the members of an elastic pipeline to choose their layout, while they stand still.

The profile is made up from a seed: blocks of 3.2 to 4.8 ms, of 1 GB of state each.
"""

import random
import time

from perdure.model.planning.costs import AllReduce, Block, BlockCost, CostProfile, Transfer
from perdure.model.planning.world import make_devices
from perdure.plan.elastic.stage_choice import PlannedChoice
from perdure.plan.worlds.planner import Request, plan_worlds

MB, GB = 10**6, 10**9
CASES = [
    # nodes, devices of each, global batch, blocks, micro-batch sizes, memory
    (8, 1, 4096, 24, (1, 2, 4, 8), 16 * GB),
    (100, 8, 2048, 48, (1, 2, 4, 8), 16 * GB),
    (1000, 1, 4096, 48, (1, 2, 4, 8), 16 * GB),
    (1000, 1, 4096, 96, (1, 2, 4, 8, 16), 40 * GB),
    (1000, 8, 16384, 96, (1, 2, 4, 8), 16 * GB),
]
CHOICES = [(24, 8, 64), (48, 7, 64), (48, 8, 64), (96, 8, 64), (48, 16, 256)]
"""Blocks, ranks, micro-batches."""


def make_profile(blocks: int, sizes: tuple[int, ...]) -> CostProfile:
    draw = random.Random(1)

    def cost(forward_s: float, size: int) -> BlockCost:
        times = (forward_s * size, 2 * forward_s * size, forward_s * size)
        return BlockCost(*times, input_bytes=20 * MB * size, stored_bytes=300 * MB * size)

    chain = []
    for index in range(blocks):
        forward_s = draw.uniform(0.8, 1.2) * 4e-3
        costs = {size: cost(forward_s, size) for size in sizes}
        chain.append(Block(f"b{index}", GB // 4, GB // 4, GB // 2, 0.0, costs))
    transfers = (Transfer("node", 1e-5, 100e9), Transfer("cluster", 1e-4, 10e9))
    reduces = (
        AllReduce("node", 2, 2e-5, 100e9),
        AllReduce("cluster", 2, 2e-4, 10e9),
        AllReduce("cluster", 8, 14e-4, 5.7e9),
    )
    return CostProfile("model", "machine", 0, tuple(chain), transfers, reduces)


def main() -> None:
    """Print a row a case."""
    print("| nodes x devices | blocks | sizes | CPU s | simulated | chosen | note |")
    print("|---|---|---|---|---|---|---|")
    for nodes, per_node, batch, blocks, sizes, memory in CASES:
        profile, there = make_profile(blocks, sizes), make_devices(nodes, per_node, memory)
        began_s = time.process_time()
        plan = plan_worlds(profile, there, Request(batch))
        took_s = time.process_time() - began_s
        note = next((text for text in plan.notes if "early" in text), "")
        best = plan.options[0].world
        print(
            f"| {nodes} x {per_node} | {blocks} | {len(sizes)} | {took_s:.2f} | {plan.simulated} "
            f"| {best.shape} {best.schedule} | {note} |"
        )
    print("\n| blocks | ranks | micro-batches | CPU ms | chosen |")
    print("|---|---|---|---|---|")
    for blocks, ranks, count in CHOICES:
        choose = PlannedChoice(make_profile(blocks, (1,)), count, 1)
        members = range(ranks)
        began_s = time.process_time()
        choice = choose(members, {m: f"n{m % 2}" for m in members}, None)
        took_ms = 1e3 * (time.process_time() - began_s)
        print(f"| {blocks} | {ranks} | {count} | {took_ms:.0f} | {choice.reason} |")


if __name__ == "__main__":
    main()
