"""What came of the matrix's faults, as tables: found, late, wrong or missed, with intervals."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]

STEP_S = 0.06
_HANG_S = 1.5 + STEP_S
TARGETS_S = {
    **dict.fromkeys(
        ("stop", "spin", "sleep", "gil", "wrong-op", "drop-link", "link-down"), _HANG_S
    ),
    **dict.fromkeys(("crash", "exit", "wrong-size"), 1.0),
}
"""A verdict is late after these; slow ones after 3 s, and 20 % more after 30 s."""
CLASSES = {
    "hangs": ("stop", "spin", "sleep", "gil"),
    "deaths": ("crash", "exit"),
    "desync": ("wrong-op", "wrong-size"),
    "slow ranks": ("slow-forward", "slow-backward", "slow-data"),
    "slow links": ("slow-link",),
    "dead links": ("drop-link", "link-down"),
    "memory, harmless": ("memory",),
}
ENDS = ("found", "late", "wrong culprit", "another verdict", "missed")


def name_end(row: Row) -> str:
    """Return what came of one fault, one of `ENDS`.

    Of memory no verdict is right, or that the rank is slow.
    """
    if row["fault"] == "memory" and row["kind"] == "none":
        return "found"
    if row["kind"] == "none":
        return "missed"
    if not row["kind_right"]:
        return "another verdict"
    if not row["culprit_right"]:
        return "wrong culprit"
    return "late" if row["confirm_s"] > compute_target_s(row) else "found"


def compute_target_s(row: Row) -> float:
    """Return after how many seconds a verdict is late."""
    slow_s = 30.0 if row["fault"].startswith("slow-") and row["severity"] == 1.2 else 3.0
    return TARGETS_S.get(row["fault"], slow_s)


def compute_wilson(hits: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927), which holds for few trials too."""
    if not trials:
        return 0.0, 1.0
    share, spread = hits / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / trials / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def describe_share(hits: int, trials: int) -> str:
    """Return `9/10 [60, 98] %`."""
    low, high = compute_wilson(hits, trials)
    return f"{hits}/{trials} [{100 * low:.0f}, {100 * high:.0f}] %"


def count_wrong(rows: Iterable[Row]) -> int:
    """Return the verdicts that were wrong beside the faults, before and after them."""
    return sum(len(row["passing"]) + len(row["after"]) + len(row["idle"]) for row in rows)


def split_rows(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the repetitions, and those that the laboratory itself failed."""
    return [r for r in rows if "error" not in r], [r for r in rows if "error" in r]


def name_cell(row: Row) -> str:
    """Return a row's fault, with its severity where that decides how hard it is to see."""
    graded = row["fault"].startswith("slow-")
    unit = " Mbit/s" if row["fault"] == "slow-link" else "x"
    return f"{row['fault']} {row['severity']:g}{unit}" if graded else str(row["fault"])


def render_tables(rows: Sequence[Row]) -> str:
    """Return a line a fault and world, a line a class of faults, and what was measured when."""
    good, failed = split_rows(rows)
    order = [fault for faults in CLASSES.values() for fault in faults]
    good.sort(key=lambda r: (order.index(r["fault"]), -r["severity"], r["world"]))
    lines = _render(good, lambda r: f"{name_cell(r)} | {r['world']}", "fault | ranks")
    kinds = {fault: name for name, faults in CLASSES.items() for fault in faults}
    by_class = _render(good, lambda r: f"{kinds[r['fault']]} | {r['world']}", "class | ranks")
    return "\n".join([*lines, "", *by_class, "", *describe_origin(good, failed)])


def _render(rows: Sequence[Row], key: Callable[[Row], str], head: str) -> list[str]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    lines = [
        f"| {head} | found, 95 % | late | wrong culprit | another | missed | s | p95 | beside |"
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for name, group in groups.items():
        ends = Counter(map(name_end, group))
        found = ends["found"] + ends["late"]
        times = sorted(r["confirm_s"] for r in group if r["confirm_s"] >= 0)
        middle = f"{statistics.median(times):.2f}" if times else "-"
        last = f"{times[min(len(times) - 1, int(0.95 * len(times)))]:.2f}" if times else "-"
        rest = [str(ends[end] or "") for end in ENDS[1:]]
        cells = [name, describe_share(found, len(group)), *rest, middle, last]
        lines.append("| " + " | ".join([*cells, str(count_wrong(group) or "")]) + " |")
    return lines


def describe_origin(rows: Sequence[Row], failed: Sequence[Row]) -> list[str]:
    """Return what the repetitions were measured with: a figure without it cannot be trusted."""
    says = [f"{len(rows)} repetitions, and {len(failed)} that the laboratory itself failed."]
    for key in ("seed", "commit", "thresholds", "piece"):
        known = sorted({str(row.get(key, "not recorded")) for row in rows})
        says.append(f"{key}: {', '.join(known)}")
    loads = sorted(row["load"] for row in rows if "load" in row)
    if loads:
        says.append(f"load: {loads[0]} to {loads[-1]}, median {statistics.median(loads)}")
    return says
