"""A rank that has memory on a played GPU (`tests/contract/nvml_stub.c`) and trains for ever."""

import os
import sys
import time

counters, generation = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if generation == 0:
    with open(counters + ".new", "w") as file:
        file.write(f"pid {os.getpid()}\npid_used {10 << 30}\nused {11 << 30}\n")
    os.replace(counters + ".new", counters)
    time.sleep(86_400)
assert os.path.exists(counters + ".freed"), "started before the memory was free"
print("started again")
