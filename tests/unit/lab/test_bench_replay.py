"""A trace's live run is predicted from what another trace has cost, not from its own medians."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from tests.waiting import PATIENCE_S

from perdure_lab.cli.trace import load_trace, prepare
from perdure_lab.live.ledger import Run
from perdure_lab.live.live import Played
from perdure_lab.live.session import Reference, Wish, compare_played
from perdure_lab.policies.throughput import Shape, Throughput
from perdure_lab.report import MadeStep

ROOT = Path(__file__).resolve().parent.parent.parent.parent
BENCH = [sys.executable, str(ROOT / "bench" / "bench_replay.py"), "--table"]
BATCH = 224
RATES = {Shape(nodes, 1): nodes * BATCH / 3 for nodes in (1, 2, 3)}
"""A step takes 3, 1.5 and 1 s."""
TABLE = Throughput("r", RATES, global_batch=BATCH, state_bytes=3.2e6, source="test")


def play(folder: Path, name: str, lost_at_s: float, r_s: float) -> dict[str, Any]:
    """Return a line of the bench: three nodes, of which one is lost; it takes `r_s` beyond."""
    file = folder / name
    file.write_text(f"0,add,a\n0,add,b\n0,add,c\n{lost_at_s * 1000:.0f},remove,c\n")
    trace = prepare(load_trace(file, None, 60.0), 5, 1.0, 0.0, 0.5, None)
    steps = [MadeStep(float(n), n, BATCH, (0, 1, 2)) for n in range(int(lost_at_s) + 1)]
    at_s, number = lost_at_s + r_s + 1.5, len(steps)
    while at_s < 60.0:
        steps.append(MadeStep(at_s, number, BATCH, (0, 1)))
        at_s, number = at_s + 1.5, number + 1
    present = [(0.0, frozenset({0, 1, 2})), (lost_at_s, frozenset({0, 1}))]
    run = Run(steps, present, 60.0, {})
    wish = Wish(trace, ("perdure",), str(folder), 0.04, 1, False, 1.0, 0.0, None)
    reference = Reference(folder, 0.04, folder / "tau.json")
    result = compare_played(wish, TABLE, {"perdure": Played(run, True, 1.0)}, reference)
    row = {"trace": f"{file}:--duration 60", "rep": 0, "commit": "abc", "load": 1.0}
    return row | {"result": msgspec.to_builtins(result)}


def test_each_trace_is_predicted_from_the_costs_of_the_other(tmp_path: Path) -> None:
    rows = [play(tmp_path, "a.csv", 20.0, 0.5), play(tmp_path, "b.csv", 30.0, 4.0)]
    out = tmp_path / "replays.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*BENCH, str(out)]
    said = subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout
    lines = [line.split(" | ") for line in said.splitlines() if line.count(" | ") == 4]
    (a, b) = [line for line in lines if "csv" in line[0]]
    # b's loss took 3.5 s longer than a's costs say, while two of three were there for 30 s.
    assert "a.csv" in a[0]
    assert float(a[4].split("%")[0]) < -3.0
    assert "b.csv" in b[0]
    assert float(b[4].split("%")[0]) > 3.0


def test_a_trace_that_is_not_what_was_played_predicts_nothing(tmp_path: Path) -> None:
    row = play(tmp_path, "a.csv", 20.0, 0.5)
    (tmp_path / "a.csv").write_text("0,add,a\n0,add,b\n0,add,c\n40000,remove,c\n")
    out = tmp_path / "replays.jsonl"
    out.write_text(json.dumps(row) + "\n")
    done = subprocess.run(
        [*BENCH, str(out)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert "was not played so" in done.stderr
