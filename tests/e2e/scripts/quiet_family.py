"""A rank with a family: a child of its own session, as loaders, servers and tools start them."""

import subprocess
import sys
import time

subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("up", "x" * int(sys.argv[1]) if len(sys.argv) > 1 else "", flush=True)
time.sleep(1000)
