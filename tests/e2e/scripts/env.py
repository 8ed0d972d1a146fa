"""Prints what torchrun would have set, then ends with the exit code it is told."""

import json
import os
import sys

KEYS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS"),
)
print(json.dumps({key: os.environ.get(key) for key in KEYS}))
print("to standard error", file=sys.stderr)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 and os.environ["RANK"] == "1" else 0)
