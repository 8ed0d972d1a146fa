"""Two ranks that count and have never heard of torch; every rank leaves a trail.

usage: counting.py --trail FOLDER --steps N [--pace-s S] [--print-kb K]
"""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--trail", type=Path, required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pace-s", type=float, default=0.0)
parser.add_argument("--print-kb", type=int, default=0, help="so much each step, in numbered lines")
args = parser.parse_args()
rank = os.environ["RANK"]
with open(args.trail / f"rank-{rank}.jsonl", "a", buffering=1) as trail:
    for step in range(args.steps):
        for line in range(step * args.print_kb, (step + 1) * args.print_kb):
            print(line, "x" * 1000)
        time.sleep(args.pace_s)
        row = {"rank": int(rank), "step": step, "loss": float(step).hex(), "indices": []}
        trail.write(json.dumps(row | {"generation": os.environ["PERDURE_GENERATION"]}) + "\n")
