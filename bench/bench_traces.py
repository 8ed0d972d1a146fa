"""Every recorded trace under every policy, as a table for bench/RESULTS.md.

    python bench/bench_traces.py TRACES [--tau FILE:MODEL] [--speed 1 10] [--notice S] [--sweep]
        [--costs FILE] [--sources]

The first column of systems is perdure where a whole node vanishes, on GPUs: its costs are assumed,
as the others' are, and each cell is `likely (worst to best)`: everything at what is likely, and at
the ends of what is known of it (`RANGES` of the lab's `policies/policies.py`; `--sources` prints
them). The last, *exit*, is perdure as it was measured, where a process ends on a CPU: no peer of
the others. Figures do not depend on the machine's load.

TRACES is a folder with traces in any of the formats of docs/traces.md; files that are none are
named and left out. Traces with more nodes than the table knows are scaled down to it. FILE has
perdure's costs as `perdure trace replay --costs` has measured them on live kills; the first column
then has these. *regret* is perdure's to U2'; *blind* is that of the best plan that knows everything
but which nodes leave.
"""

import argparse
import sys
import time
from functools import reduce
from pathlib import Path

from blind_plan import find_blind_plan
from policy_ranges import RANGES, take_end
from stamp import stamp

from perdure.model.errors import ConfigError
from perdure_lab.cli.trace import SWEEP_S, load_costs, load_throughput, load_trace
from perdure_lab.policies.policies import (
    ENDED_PROCESS,
    POLICIES,
    Policy,
    apply_costs,
    change_policy,
)
from perdure_lab.policies.throughput import Throughput
from perdure_lab.report import Physics
from perdure_lab.simulation.compare import compare, derive_online_costs, sweep_communicator
from perdure_lab.simulation.engine import Replay
from perdure_lab.traces import AvailabilityTrace, list_intervals
from perdure_lab.traces.figures import draw_victims
from perdure_lab.traces.formats import add_quiet
from perdure_lab.traces.transform import announce, delay, scale_to, speed_up


def find_traces(folder: Path) -> list[tuple[str, AvailabilityTrace]]:
    """Return every trace below `folder`, with who leaves from seed 0 where it has counts only."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        try:
            trace = load_trace(path)
        except ConfigError:
            print(f"... left out: {path.name} (no trace)", file=sys.stderr)
            continue
        if path.parent.name == "stepfun":
            trace = add_quiet(trace, 400)
        found.append((path.name, trace if trace.named else draw_victims(trace, 0)))
    return found


def fit(trace: AvailabilityTrace, table: Throughput) -> AvailabilityTrace:
    """Return `trace` on no more nodes than the table knows."""
    peak = max(len(i.living) for i in list_intervals(trace))
    return scale_to(trace, table.nodes_max) if peak > table.nodes_max else trace


def find_blind(trace: AvailabilityTrace, table: Throughput, perdure: Policy) -> float:
    """Return what can be expected of who knows all but who leaves, in samples."""
    late = list_intervals(delay(trace, perdure.start_s))
    return find_blind_plan(late, table, derive_online_costs(perdure, Physics()))


def describe(
    share: float, policy: Policy, trace: AvailabilityTrace, table: Throughput, u1: float
) -> str:
    """Return `likely (worst to best)`: at likely costs and at their ends; one where measured."""
    if policy.source != POLICIES[policy.name].source:
        return f"{share:.3f}"
    ends = (take_end(policy, "high"), take_end(policy, "low"))
    worst, best = (Replay(end, trace, table, Physics()).run().committed / u1 for end in ends)
    return f"{share:.3f} ({worst:.3f} to {best:.3f})"


def print_sources() -> None:
    """Print each assumed cost: low, likely, high, and where it is from."""
    print("| system | cost | low | likely | high | from |\n|---|---|---|---|---|---|")
    for name, ranges in RANGES.items():
        for known in ranges:
            likely = reduce(getattr, known.fields[0].split("."), POLICIES[name])
            cells = [name, ", ".join(known.fields), f"{known.low:g}", f"{likely:g}"]
            print("| " + " | ".join([*cells, f"{known.high:g}", known.source]) + " |")


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="?", default=Path())
    parser.add_argument("--tau", default="linear")
    parser.add_argument("--speed", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--notice", type=float, default=0.0)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--sources", action="store_true", help="only the costs, and whence")
    parser.add_argument("--sweep", action="store_true", help="perdure's communicator, 0.1 to 10 s")
    args = parser.parse_args()
    if args.sources:
        print_sources()
        return 0
    perdure = apply_costs(POLICIES["perdure"], load_costs(args.costs)) if args.costs else None
    policies = [perdure or POLICIES["perdure"]]
    policies += [policy for name, policy in POLICIES.items() if name != "perdure"]
    for setting in args.settings:
        policies = change_policy(policies, setting)
    names = [policy.name for policy in policies]
    print(f"{stamp()}\n")
    print(
        "| trace | faster | U2 of U1 | U2' of U1 | " + " | ".join(names) + " | exit | regret | "
        "blind | s |"
    )
    print("|---" * (len(names) + 8) + "|")
    for name, recorded in find_traces(args.traces):
        for speed in args.speed:
            trace = speed_up(recorded, speed) if speed != 1 else recorded
            table = load_throughput(args.tau, trace, None)
            trace = fit(announce(trace, args.notice) if args.notice else trace, table)
            begun = time.monotonic()
            result, _ = compare(trace, table, policies, Physics())
            if not result.u1:
                print(f"| {name} | {speed:g} | nothing fits |", flush=True)
                continue
            cells = [
                describe(row.fraction_of_u1, policy, trace, table, result.u1)
                for row, policy in zip(result.policies, policies, strict=True)
            ]
            ended = Replay(ENDED_PROCESS, trace, table, Physics()).run().committed / result.u1
            blind = find_blind(trace, table, policies[0])
            regret = 1 - result.policies[0].fraction_of_u2_online
            print(
                f"| {name} | {speed:g} | {result.u2 / result.u1:.4f} | "
                f"{result.u2_online / result.u1:.4f} | {' | '.join(cells)} | {ended:.3f} | "
                f"{regret:.2%} | {1 - blind / result.u2_online:.2%} | "
                f"{time.monotonic() - begun:.1f} |",
                flush=True,
            )
            if args.sweep:
                for row in sweep_communicator(trace, table, policies[0], Physics(), SWEEP_S):
                    print(
                        f"    {row.communicator_s:g} s: {row.fraction_of_u2:.4f} of U2, "
                        f"U2' {row.u2_online_of_u2:.4f}",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
