"""Prints what torchrun would have set. Then rank 1 ends with a code, once rank 0 has printed.

Arguments: the code, and a folder for the word of rank 0.
"""

import json
import os
import sys
import time
from pathlib import Path

KEYS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS"),
)
print(json.dumps({key: os.environ.get(key) for key in KEYS}))
print("to standard error", file=sys.stderr)
printed = Path(sys.argv[2], "printed")
if os.environ["RANK"] == "0":
    sys.stdout.flush()
    printed.touch()
    sys.exit()
while not printed.exists():
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
