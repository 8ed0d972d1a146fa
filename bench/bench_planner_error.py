"""How far the planner's step times are from real ones, and how much faster it could have chosen.

    python bench/bench_planner_error.py [--devices 2 4 8] [--global-batch 16] [--steps 5]
                                        [--model paced | gpt]

A chain of paced blocks, or the blocks of a GPT, which need as many cores as there are devices
(bench/scripts/paced_pipeline.py), is measured as `perdure profile` does it.
Then the best world of every kind (micro-batch, ranks, schedule) is really run on as many ranks,
with the pipeline's runner, all-reduces over the copies of a stage, and an optimizer's step. All
worlds are run twice over, in opposite orders. Of a world's steps the first quartile is taken, as
of all that is measured for a profile: whatever else the machine does only makes them longer.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from scripts.paced_pipeline import MODELS, Task, live

from perdure.model.codec import decode, encode
from perdure.model.errors import PerdureError
from perdure.model.planning.costs import CostProfile, read_profile, write_profile
from perdure.model.planning.world import make_devices
from perdure.plan.worlds.measures import settle
from perdure.plan.worlds.planner import Request, plan_worlds
from perdure.plan.worlds.score import Scorer
from perdure.worker.profiling import BlockMeter
from perdure.worker.profiling.links import measure_links

SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "rerouted")
MEMORY = 64 * 10**9


def measure_profile(name: str, sizes: list[int], ranks: int, before: Path | None) -> CostProfile:
    """Measure blocks and links as `perdure profile` does; links are taken from `before`, if any."""
    model = MODELS[name]
    meter = BlockMeter(model.make(), model.loss, seconds=1.0, say=say)
    batches = {size: model.load(0, 0, size) for size in sizes}
    found = meter.measure(batches, lambda params: torch.optim.SGD(params, lr=1e-3))
    links: Any = read_profile(before.read_text(), str(before)) if before else None
    links = links or measure_links(ranks, say)
    return CostProfile(
        name, f"{os.cpu_count()} cores", 0, found.blocks, links.transfers, links.all_reduces,
        found.shared,
    )  # fmt: skip


def list_worlds(profile: CostProfile, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the best world of every kind, by number of devices, with its predicted step."""
    rows: list[dict[str, Any]] = []
    for devices in args.devices:
        there = make_devices(1, devices, MEMORY)
        seen = set()
        for size in profile.micro_batches:
            for ranks in range(1, min(devices, len(profile.blocks)) + 1):
                for schedule in SCHEDULES:
                    request = Request(args.global_batch, (size,), (ranks,), schedules=(schedule,))
                    try:
                        options = plan_worlds(profile, there, request).options
                    except PerdureError:
                        continue
                    for option in options[:1]:
                        if option.world not in seen:
                            seen.add(option.world)
                            rows.append({"devices": devices, "option": option, "took": []})
    return rows


def run_worlds(profile: CostProfile, rows: list[dict[str, Any]], steps: int, name: str) -> None:
    """Run them all, forwards and then backwards; add each one's step times."""
    size = max(row["devices"] for row in rows)
    tasks = []
    for row in rows + rows[::-1]:
        there = make_devices(1, row["devices"], MEMORY)
        world = row["option"].world
        orders, _, cells = Scorer(profile, there).lay_out(world)
        numbers = {device.name: number for number, device in enumerate(there)}
        ranks = tuple(numbers[cell] for cell in cells)
        tasks.append(Task(world, orders, ranks, steps, name))
    store: Any = vars(dist)["TCPStore"](
        "127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False
    )
    store.set("tasks", encode(tasks))
    context = multiprocessing.get_context("forkserver")  # One import of torch for all ranks.
    context.set_forkserver_preload(["scripts.paced_pipeline"])
    processes = [
        context.Process(target=live, args=(r, size, "127.0.0.1", store.port), daemon=True)
        for r in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for number, row in enumerate(rows + rows[::-1]):
            while not store.check([f"took/{number}"]):
                if any(process.exitcode for process in processes):
                    raise RuntimeError("a rank has failed")
                time.sleep(0.02)
            row["took"] += decode(store.get(f"took/{number}"), list[float])[1:]
            say(f"{number + 1} of {len(tasks)}: {describe(row)} {median(row['took']):.3f} s")
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()


def describe(row: dict[str, Any]) -> str:
    world = row["option"].world
    batch = f"{world.count} x {world.micro_batch}"
    return f"{row['devices']} devices, {world.shape} {world.schedule}, {batch}"


def report(rows: list[dict[str, Any]]) -> None:
    """Print a row a world, and what they say together."""
    print("| devices | world | schedule | micro-batches | predicted s | measured s | error |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        row["real_s"] = settle(row["took"], describe(row)).value
        row["error"] = row["option"].step_s / row["real_s"] - 1.0
        world = row["option"].world
        print(
            f"| {row['devices']} | {world.shape} | {world.schedule} | {world.count} x "
            f"{world.micro_batch} | {row['option'].step_s:.3f} | {row['real_s']:.3f} "
            f"| {row['error']:+.1%} |"
        )
    errors = sorted(abs(row["error"]) for row in rows)
    worst = max(rows, key=lambda row: abs(row["error"]))
    summary: dict[str, Any] = {
        "worlds": len(rows),
        "median_error": round(median(errors), 4),
        "p90_error": round(errors[int(0.9 * (len(errors) - 1))], 4),
        "worst_error": round(worst["error"], 4),
        "worst": describe(worst),
        "load": round(os.getloadavg()[0], 1),
        "regret": {},
    }
    for devices in sorted({row["devices"] for row in rows}):
        mine = [row for row in rows if row["devices"] == devices]
        chosen = min(mine, key=lambda row: row["option"].step_s)
        best = min(mine, key=lambda row: row["real_s"])
        regret = chosen["real_s"] / best["real_s"] - 1.0
        summary["regret"][devices] = round(regret, 4)
        print(
            f"{describe(chosen)} was chosen; fastest of {len(mine)}: {describe(best)}; {regret:.1%}"
        )
    print(json.dumps(summary))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--model", choices=sorted(MODELS), default="paced")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--links", type=Path, help="a profile whose links are taken")
    parser.add_argument("--profile", type=Path, help="write the measured profile here")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    profile = measure_profile(args.model, args.micro_batches, max(args.devices), args.links)
    if args.profile:
        args.profile.write_text(write_profile(profile))
    rows = list_worlds(profile, args)
    say(f"{len(rows)} worlds")
    run_worlds(profile, rows, args.steps, args.model)
    report(rows)


if __name__ == "__main__":
    main()
