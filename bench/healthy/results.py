"""Rows of the benchmark of harm, one JSON object a line, and the tables that are made of them."""

import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KINDS = ("Straggler", "CommSlow", "HostBusy", "ComputeHang", "CommHang", "Desync", "NodeLost")
MONTH_H = 720.0
GOAL_H = 20.0
"""At most one false verdict in so many hours of any workload."""


def read_rows(path: Path) -> list[Row]:
    """Return the whole lines of a file of results, packed or not; none where there is no file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def append_row(path: Path, row: Row) -> None:
    """Add a row, on disk before the next is begun."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()


def bound_count(count: int, level: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a Poisson mean of which `count` was seen (Garwood 1936).

    >>> [round(x, 3) for x in bound_count(0)]
    [0.0, 3.689]
    >>> [round(x, 3) for x in bound_count(3)]
    [0.619, 8.767]
    >>> [round(x) for x in bound_count(1880)]
    [1796, 1967]
    """
    tail = (1.0 - level) / 2.0
    low = 0.0 if not count else _solve(lambda mean: _at_most(count - 1, mean) - (1.0 - tail))
    return low, _solve(lambda mean: _at_most(count, mean) - tail)


def _at_most(count: int, mean: float) -> float:
    """Return the probability that a Poisson variable is no more than `count`."""
    log_mean = math.log(mean) if mean > 0.0 else -math.inf
    return math.fsum(
        math.exp(k * log_mean - mean - math.lgamma(k + 1)) if k else math.exp(-mean)
        for k in range(count + 1)
    )


def _solve(function: Any) -> float:
    """Return where a falling function is zero, to 1e-9 of it."""
    low, high = 0.0, 10.0
    while function(high) > 0.0:
        high *= 2.0
    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (middle, high) if function(middle) > 0.0 else (low, middle)
    return high


class Sums:
    """What a workload came to."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.hours = self.wall_s = 0.0
        self.runs = self.actions = self.right = self.silent = self.runs_false = 0
        self.kinds: Counter[str] = Counter()

    def add(self, row: Row) -> None:
        """Add one run."""
        self.hours += row["simulated_s"] / 3600.0
        self.wall_s += row["wall_s"]
        self.runs += 1
        self.actions += len(row["actions"])
        false = 0
        for told in row["told"]:
            if told["right"]:
                self.right += 1
            elif told["silent"]:
                self.silent += 1
            else:
                self.kinds[told["kind"]] += 1
                false += 1
        self.runs_false += bool(false)

    @property
    def false(self) -> int:
        """Return how many verdicts were false, but for those that name a rank that was silent."""
        return sum(self.kinds.values())


def sum_rows(rows: Iterable[Row], key: Any) -> dict[Any, Sums]:
    """Return the sums of rows that have the same `key`."""
    found: dict[Any, Sums] = defaultdict(Sums)
    for row in rows:
        found[key(row)].add(row)
    return dict(found)


def show_rate(count: int, hours: float) -> str:
    """Return a rate an hour with its interval, in words of a table."""
    low, high = bound_count(count)
    return f"{count / hours:.3g} ({low / hours:.2g} to {high / hours:.2g})" if hours else ""


def render_table(rows: list[Row]) -> str:
    """Return the table of false verdicts and actions, a line for each workload and tree."""
    lines = [
        "| workload | tree | hours | runs with a false one | false an hour (95 %) | of which "
        "| a silent rank, an hour | right | false actions (95 % an hour) | 30 days: at most |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    sums = sum_rows(rows, lambda row: (row["workload"], row["tree"]))
    totals = sum_rows(rows, lambda row: ("all", row["tree"]))
    for (name, tree), s in [*sorted(sums.items()), *sorted(totals.items())]:
        kinds = ", ".join(f"{kind} {n}" for kind, n in s.kinds.most_common())
        low, high = bound_count(s.actions)
        month = MONTH_H / s.hours
        lines.append(
            f"| {name} | {tree[:8]} | {s.hours:.1f} | {s.runs_false} of {s.runs} "
            f"| {show_rate(s.false, s.hours)} | {kinds} | {s.silent / s.hours:.3g} | {s.right} "
            f"| {s.actions} ({low / s.hours:.2g} to {high / s.hours:.2g}) "
            f"| {bound_count(s.false)[1] * month:.0f} false, {high * month:.1f} actions |"
        )
    lines += ["", *list_goals(sums)]
    speeds = sum_rows(rows, lambda row: (row["ranks"], row["tree"]))
    lines += ["", "| ranks | tree | hours | simulated hours an hour of CPU |", "|---|---|---|---|"]
    for (ranks, tree), s in sorted(speeds.items()):
        speed = s.hours * 3600.0 / max(s.wall_s, 1e-9)
        lines.append(f"| {ranks} | {tree[:8]} | {s.hours:.1f} | {speed:.0f} |")
    return "\n".join(lines)


def render_trees(rows: list[Row]) -> str:
    """Return the rates of all trees side by side, over the runs that each of them has had."""
    trees = sorted({row["tree"] for row in rows})
    runs = [
        {(r["workload"], r["number"], r["seed"]) for r in rows if r["tree"] == t} for t in trees
    ]
    both = set.intersection(*runs) if runs else set()
    rows = [row for row in rows if (row["workload"], row["number"], row["seed"]) in both]
    if len(trees) < 2 or not rows:
        return ""
    sums = sum_rows(rows, lambda row: (row["workload"], row["tree"]))
    names = "".join(f" {tree[:8]}: false an hour | actions |" for tree in trees)
    lines = ["", f"| workload | runs |{names}", "|---|---|" + "---|---|" * len(trees)]
    for name in sorted({name for name, _ in sums}):
        mine = [sums[name, tree] for tree in trees]
        cells = "".join(f" {show_rate(s.false, s.hours)} | {s.actions} |" for s in mine)
        lines.append(f"| {name} | {mine[0].runs} |{cells}")
    return "\n".join(lines)


def list_goals(sums: dict[tuple[str, str], Sums]) -> list[str]:
    """Return a line for each tree: where more is false than one verdict in 20 hours."""
    lines = []
    for tree in sorted({tree for _, tree in sums}):
        mine = {name: s for (name, t), s in sums.items() if t == tree}
        over = sorted(name for name, s in mine.items() if s.false * GOAL_H > s.hours)
        acted = sum(s.actions for s in mine.values())
        lines.append(
            f"{tree[:8]}: {acted} false actions; more than one false verdict in {GOAL_H:g} hours "
            f"in {len(over)} of {len(mine)} workloads{': ' if over else ''}{'; '.join(over)}."
        )
    return lines


def render_reproduced(rows: list[Row]) -> str:
    """Return the table of T4, T5, T7 and T9: how many runs were harmed in each tree."""
    if not rows:
        return ""
    lines = ["", "| row | tree | runs harmed | restarts and stops |", "|---|---|---|---|"]
    for name, tree in sorted({(row["row"], row["tree"]) for row in rows}):
        mine = [row for row in rows if (row["row"], row["tree"]) == (name, tree)]
        harmed = sum(row["harmed"] for row in mine)
        actions = sum(row.get("actions", row.get("left out", 0)) for row in mine)
        lines.append(f"| {name} | {tree[:8]} | {harmed} of {len(mine)} | {actions} |")
    return "\n".join(lines)


def render_real(rows: list[Row]) -> str:
    """Return the table of the real hours."""
    if not rows:
        return ""
    lines = [
        "",
        "| real job | tree | hours | load | ended well | false | a silent rank | right "
        "| false actions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, tree in sorted({(row["real"], row["tree"]) for row in rows}):
        mine = [row for row in rows if (row["real"], row["tree"]) == (kind, tree)]
        said = [one for row in mine for one in row["said"]]
        acted = sum(one["kind"] in ("restart", "NodeLost") for one in said)
        true = [o for o in said if o.get("right") or o.get("silent") or o["kind"] == "restart"]
        false = Counter(one["kind"] for one in said if one not in true)
        words = ", ".join(f"{name} {count}" for name, count in false.most_common())
        hours = sum(row["seconds"] for row in mine) / 3600.0
        loads = [row["load"] for row in mine]
        lines.append(
            f"| {kind} | {tree[:8]} | {hours:.2f} | {min(loads):g} to {max(loads):g} "
            f"| {sum(row['code'] == 0 for row in mine)} of {len(mine)} | {words or 'none'} "
            f"| {sum(bool(one.get('silent')) for one in said)} "
            f"| {sum(bool(one.get('right')) for one in said)} | {acted} |"
        )
    return "\n".join(lines)
