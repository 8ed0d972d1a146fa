"""What removes a drill's folder on a box before there is an environment to do it with.

    python3 - FOLDER SECONDS    come back at once; remove it once nobody asks for so long

It is sent as one file and has nothing but Python. From the folder's first moment it stands behind
the watch that the job itself starts (`onbox.py`), and looks at the same file: what a drill has sent
is removed also where the drill was killed before its job began, or where that watch is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time

_OWN = re.compile(r"[A-Za-z0-9_.-]+-drill-[0-9a-f]{6}(\+[A-Za-z0-9_.-]+)?")
_LOOK_S = 1.0
_TELL = '. "$0" >/dev/null 2>&1; printf "%s\\0" "$PERDURE_HOME" "$DURABLE_DIR" "$CRED_FILE"'


def main(folder: str, limit_s: float) -> int:
    """Leave a process behind that guards a folder; one that is guarded already needs no other."""
    launch = os.path.join(folder, "launch")
    lock = os.open(os.path.join(launch, "guard.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0
    if os.fork():
        return 0
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.chdir("/")
    if wait(launch, limit_s):
        remove(folder)
    return 0


def wait(launch: str, limit_s: float) -> bool:
    """Return whether nobody has asked for so long; no, once there is no such folder any more."""
    touched, since_s = 0, time.monotonic()
    while time.monotonic() < since_s + limit_s:
        newest = touched
        try:
            newest = os.stat(os.path.join(launch, "lease")).st_mtime_ns
        except OSError:
            if not os.path.lexists(launch):
                return False
        if newest != touched:
            touched, since_s = newest, time.monotonic()
        time.sleep(_LOOK_S)
    return True


def remove(folder: str) -> None:
    """End and remove what is in a drill's folder, and what its `env.sh` names as the drill's."""
    name, launch = os.path.basename(folder), os.path.join(folder, "launch")
    if not _OWN.fullmatch(name):
        return
    told = subprocess.run(
        ["sh", "-c", _TELL, os.path.join(launch, "env.sh")], stdout=subprocess.PIPE
    ).stdout.split(b"\0")
    if len(told) == 4:
        home, durable, credentials = map(os.fsdecode, told[:3])
        job = json.dumps({"folder": launch, "home": home or launch})
        box = os.path.join(launch, "box.py")
        subprocess.run([sys.executable, box, "take", job])
        if os.path.basename(durable) == name.partition("+")[0]:
            shutil.rmtree(durable, ignore_errors=True)
        if credentials.endswith("-" + name) and os.path.lexists(credentials):
            os.unlink(credentials)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
