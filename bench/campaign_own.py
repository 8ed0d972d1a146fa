"""A script that saves its own checkpoints is killed `--kills` times in each format.

Two ranks; any of them is killed, at an instant of the seed. The script saves as fast as it can, and
each file takes 0.08 s to write. At each kill, the campaign stops all ranks and loads what is on the
disk. The next life has to begin at the newest checkpoint that loads. Afterwards each checkpoint
that was saved has to load, and none that was moved. DeepSpeed's and Lightning's files are written
by hand, in their layout. A line of `--out` for each format; with a fault the exit code is 1.
"""

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from stamp import stamp
from sweep import sweep_after_me

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.e2e.exact import jobs_in
from tests.e2e.own_kills import DECLARED, kill_again_and_again


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--forms", nargs="*", default=list(DECLARED), choices=list(DECLARED))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file that lines are added to")
    args = parser.parse_args()
    sweep_after_me()
    bad = 0
    for form in args.forms:
        home, begin_s = Path(tempfile.mkdtemp(prefix=f"perdure-own-{form}-")), time.monotonic()
        with jobs_in(home) as start:
            chance = random.Random(f"{args.seed} {form}")
            account = kill_again_and_again(start, home, form, args.kills, chance)
        row = {"form": form, **dataclasses.asdict(account), "seed": args.seed, **stamp()}
        row["seconds"] = round(time.monotonic() - begin_s)
        text = json.dumps(row)
        print(text, flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(f"{text}\n")
        bad += bool(account.faults)
        if not account.faults:
            shutil.rmtree(home)
        else:
            print(f"kept: {home}", file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
