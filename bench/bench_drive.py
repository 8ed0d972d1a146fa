"""A user's own job under a recorded trace, beside the way of Varuna's kind, in turns.

    python bench/bench_drive.py TRACE [--repeat 2] [options of `perdure trace drive`]

The job is `examples/elastic_gpt.py --pipeline 2` by `perdure trace drive`. Beside it the same is
trained by torch's pipelining (`bench/scripts/gpt_relaunched.py`): at each change all of it is
ended, and launched again at once in the fastest grid of copies and stages, from its checkpoint of
10 s; nobody has to find out first. Both are ready before the trace begins. Told are the steps that
the time of the trace has brought, those that were made again, and the longest time without one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stamp import ROOT, stamp
from sweep import sweep_after_me

from perdure_lab.live.ledger import count_committed, find_longest_gap
from perdure_lab.live.live import Act, Schedule, play, wait_ready
from perdure_lab.live.systems import Torchrun, choose_grid

BLOCKS, MICRO_BATCHES, BATCH, STAGES = 6, 8, 32, 2
"""Of the model, and of a step: its micro-batches and samples."""


def call_drive(trace: Path, folder: Path, *options: str) -> dict[str, Any]:
    """Return what `perdure trace drive` answers of the job, which lies in `folder`."""
    job = folder / "job.toml"
    job.write_text(
        f'name = "gpt"\nscript = "{ROOT / "examples/elastic_gpt.py"}"\nnodes = 4\nnproc = 1\n'
        f'args = ["--steps", "1000000", "--pipeline", "{STAGES}"]\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "trace", "drive", str(trace), str(job), "--json",
         *options],
        env=os.environ | {"PERDURE_HOME": str(folder / "state")}, cwd=folder,
        stdout=subprocess.PIPE, text=True, timeout=3600, check=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


class Relaunched(Torchrun):
    """The other one."""

    def choose(self, places: Sequence[int]) -> tuple[Sequence[int], list[str]]:
        """Return the places of the fastest grid."""
        copies, deep = choose_grid(len(places), STAGES, BLOCKS, MICRO_BATCHES)
        used = places[: copies * deep]
        script = ROOT / "bench/scripts/gpt_relaunched.py"
        return used, [str(script), str(self._folder), str(deep), ",".join(map(str, used))]


def play_other(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Have the other one live through the trace of a dry run."""
    acts = [Act(at_s, kind, tuple(places), s) for at_s, kind, places, s in plan["acts"]]
    schedule, other = Schedule(tuple(plan["first"]), tuple(acts)), Relaunched(folder, 0.0)
    try:
        other.start(schedule.first)
        wait_ready(other, schedule.first)
        run = play(other, schedule, plan["duration_s"], {}, lambda *_: None).run
    finally:
        other.end()
    samples, again = count_committed(run)
    gap_s = find_longest_gap(run)
    return {"committed": samples / BATCH, "steps_again": again, "longest_gap_s": gap_s}


def main() -> None:
    """Play both, in turns."""
    sweep_after_me()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--repeat", type=int, default=2)
    args, options = parser.parse_known_args()
    print(json.dumps(stamp()), flush=True)
    for turn in range(args.repeat):
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            plan = call_drive(args.trace.resolve(), folder, *options, "--dry-run")
            answer = call_drive(args.trace.resolve(), folder, *options)
            (row,) = answer["systems"]
            kept = {name: row[name] for name in ("committed", "steps_again", "longest_gap_s")}
            print(json.dumps({"turn": turn, "system": "perdure", **kept} | stamp()), flush=True)
            kept = play_other(plan, folder / "other")
            print(
                json.dumps({"turn": turn, "system": "varuna's way", **kept} | stamp()), flush=True
            )


if __name__ == "__main__":
    main()
