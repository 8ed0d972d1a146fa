"""An item of a queue that tells when it begins and ends, and fails until it was begun often enough.

usage: queued_item.py FOLDER NAME TIMES
"""

import json
import os
import sys
import time
from pathlib import Path

folder, name, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with open(folder / f"{name}.jsonl", "a+", buffering=1) as trail:
    attempt = os.environ["PERDURE_QUEUE_ATTEMPT"]
    trail.write(json.dumps({"what": "begin", "attempt": attempt}) + "\n")
    time.sleep(0.7)
    trail.seek(0)
    begun = trail.read().count("begin")
    trail.write(json.dumps({"what": "end", "attempt": attempt}) + "\n")
if begun < times:
    sys.exit(1)
(folder / f"{name}.done").write_text("done")
