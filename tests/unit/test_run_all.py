"""The benches behind bench/RESULTS.md are run one after another, each once a commit."""

import json
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = [sys.executable, str(ROOT / "bench" / "run_all.py")]
CONFIGS = [{"D": n, "P": 1, "samples_per_s": float(n)} for n in (1, 2)]


def call(*words: str) -> str:
    """Return what it says."""
    done = subprocess.run(
        [*RUN, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=True, cwd=ROOT
    )
    return done.stdout


def test_every_bench_of_the_list_is_there() -> None:
    lines = call("--list").splitlines()
    assert len(lines) > 12
    for line in lines:
        assert (ROOT / "bench" / line.split()[3]).exists(), line


def test_what_was_done_at_this_commit_is_not_done_again(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    (traces / "parcae").mkdir(parents=True)
    table = {"bert": {"global_batch": 8, "parameters": 1e6, "configs": CONFIGS}}
    (traces / "parcae" / "v100_throughput_and_costs.json").write_text(json.dumps({"models": table}))
    (traces / "t.csv").write_text("0,add,a\n0,add,b\n60000,remove,b\n600000,remove,a\n")
    words = ("traces", "--traces", str(traces), "--out", str(tmp_path / "out"), "--minutes")
    assert "left: traces" in call(*words, "1")  # It takes two minutes, as is known of it.
    assert not (tmp_path / "out" / "traces.txt").exists()
    said = call(*words, "5")
    assert "| t.csv | 1 |" in said
    kept = (tmp_path / "out" / "traces.txt").read_text()
    assert "'commit'" in kept.splitlines()[0]
    assert "'load'" in kept.splitlines()[0]
    assert call(*words, "5").splitlines() == ["nothing is left"]
    assert (tmp_path / "out" / "traces.txt").read_text() == kept
